"""How far the preparation of the models is: a bar on a terminal, a line per change elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from clockwright.v1 import control_pb2 as pb
from controller.models.verdicts import NOT_BEGUN

if TYPE_CHECKING:
    from rich.progress import Progress

# Ends of the reasons of models whose turn has not come.
_UNTOLD = ("waiting for a worker", NOT_BEGUN)

# So many models, or seconds, from one line with the totals to the next, where there is no bar.
_MODELS_BETWEEN, _BETWEEN_S = 10, 10.0
_MODELS_NAMED = 3


class Preparation:
    """A view of the models' progress, shown while it is open."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = _bar(console) if console.is_terminal else None
        self._stages: dict[str, str] = {}
        self._begin_s = time.monotonic()
        self._counted = (0, self._begin_s)
        #: How many were decided at the last change of that, and when.
        self._decided = (0, self._begin_s)

    def show(self, models: Iterable[pb.ModelInfo]) -> None:
        """Take in the models' states."""
        for model in models:
            # Thousands may wait.
            if model.state == "LOADING" and model.reason.endswith(_UNTOLD):
                continue
            stage = "ready" if model.state == "READY" else model.reason
            if self._stages.get(model.model_id) == stage:
                continue
            self._stages[model.model_id] = stage
            if model.state == "UNAVAILABLE":
                self._console.print(f"refused: {model.model_id}: {stage}")
            elif self._bar is not None:
                self._update(description=f"{model.model_id}: {stage}")
            else:
                self._console.print(f"model {model.model_id}: {stage}")

    def count(self, num_ready: int, num_models: int) -> bool:
        """Take in the totals. Returns whether it is time for a line that says them."""
        self._update(completed=num_ready, total=num_models)
        num_before, before_s = self._counted
        now_s = time.monotonic()
        is_due = num_ready - num_before >= _MODELS_BETWEEN or now_s - before_s >= _BETWEEN_S
        if is_due:
            self._counted = (num_ready, now_s)
        return is_due and self._bar is None

    def say(self, num_ready: int, models: Sequence[pb.ModelInfo]) -> None:
        """Print a line with the totals, and what is being done."""
        doing = [
            f"{model.model_id}: {model.reason}"
            for model in models
            if model.state == "LOADING" and not model.reason.endswith(_UNTOLD)
        ]
        now = f"; {', '.join(doing[:_MODELS_NAMED])}" if doing else ""
        num_left = sum(model.state == "LOADING" for model in models)
        num_decided, now_s = len(models) - num_left, time.monotonic()
        if num_decided != self._decided[0]:
            self._decided = (num_decided, now_s)
        left = ""
        if num_left and num_decided:
            # As long each as those before. What takes longer, such as a server that is away, is not guessed at.
            decided_s = self._decided[1]
            left_s = (decided_s - self._begin_s) * num_left / num_decided - (now_s - decided_s)
            left = f", the rest in about {max(round(left_s), 1)} s" if left_s > 0 else ""
        self._console.print(f"preparing: {num_ready} of {len(models)} models are ready{left}{now}")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _update(self, **changes: Any) -> None:  # noqa: ANN401  rich's
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], **changes)


def _bar(console: Console) -> Progress:
    # A controller that starts where one was killed has no terminal, as a rule, and no time for the import.
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("preparing models"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
    bar.add_task("", total=None)
    return bar
