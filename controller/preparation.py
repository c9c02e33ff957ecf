"""How far the preparation of the models is: a bar on a terminal, a line per change elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from clockwright.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from rich.progress import Progress

# Reasons of models whose turn has not come.
_UNTOLD = ("waiting for a worker", "loading", "")


class Preparation:
    """A view of the models' progress, shown while it is open."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = _bar(console) if console.is_terminal else None
        self._stages: dict[str, str] = {}

    def show(self, models: Iterable[pb.ModelInfo]) -> None:
        """Take in the models' states."""
        for model in models:
            # Thousands may wait.
            if model.state == "LOADING" and model.reason in _UNTOLD:
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

    def count(self, num_ready: int, num_models: int) -> None:
        """Take in the totals."""
        self._update(completed=num_ready, total=num_models)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _update(self, **changes: Any) -> None:  # noqa: ANN401  rich's
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], **changes)


def _bar(console: Console) -> Progress:
    # A controller that starts where one was killed has no terminal, as a rule, and no time for the import.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("preparing models"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
    bar.add_task("", total=None)
    return bar
