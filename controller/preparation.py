"""How far the preparation of the models is: a bar on a terminal, a line per change elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from clockwright.v1 import control_pb2 as pb

# Of models whose turn has not come.
_UNTOLD = ("waiting for a worker", "loading", "")


class Preparation:
    """Shown while it is open."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("preparing models"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
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
            elif self._console.is_terminal:
                self._bar.update(self._task, description=f"{model.model_id}: {stage}")
            else:
                self._console.print(f"model {model.model_id}: {stage}")

    def count(self, num_ready: int, num_models: int) -> None:
        """Take in the totals."""
        self._bar.update(self._task, completed=num_ready, total=num_models)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
