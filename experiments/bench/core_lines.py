"""What the core does per request, counted in executed lines: the same on every machine, however busy.

Time is measured by `experiments.bench.core`. Counted lines tell of a scan over all models or all that waits, or of
work that is done twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from typing_extensions import override

import controller.core
from clockwright.units import NS_PER_S
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import Command, Event
from experiments.bench.core import SETTINGS, Setting, table1_models
from experiments.simulator import Progress, run

_CORE = str(Path(controller.core.__file__).parent)

# As it is before tests audit it after every event, which runs lines of the core too.
_HANDLE = Scheduler.handle

#: Few models on one GPU; and fewer than in the benchmark, but more than fit: loads, evictions and refusals are
#: among the work.
CASES = {
    "15x1": replace(SETTINGS["15x1"](), warm_s=1, measured_s=1),
    "610x4": Setting(
        models=table1_models(61, 10), num_workers=4, rate_rps=2000, zipf=1.2, warm_s=1, measured_s=1
    ),
}


class CountedScheduler(Scheduler):
    """Counts the lines of the core that run in its calls."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.is_counting = False
        self.num_lines = 0
        self._trace = self._counting()

    @override
    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        before = sys.gettrace()
        sys.settrace(self._trace if self.is_counting else before)
        try:
            return _HANDLE(self, event, now_ns=now_ns)
        finally:
            sys.settrace(before)

    def _counting(self) -> Callable[[FrameType, str, object], Any]:
        """What is told of each line. It runs for millions: it holds what it needs in its own variables."""
        is_core: dict[str, bool] = {}

        def line(_frame: FrameType, event: str, _argument: object) -> Any:  # noqa: ANN401
            if event == "line":
                self.num_lines += 1
            return line

        def enter(frame: FrameType, _event: str, _argument: object) -> Any:  # noqa: ANN401
            name = frame.f_code.co_filename
            if name not in is_core:
                is_core[name] = name.startswith(_CORE)
            return line if is_core[name] else None

        return enter


def lines_per_request(setting: Setting, policy: str) -> float:
    """Lines of the core that a request costs, results and timers included, once caches are warm."""
    case = setting.case_of(1, policy)
    scheduler = CountedScheduler(case.scheduler)
    before: list[int] = []

    def progress(progress: Progress) -> None:
        if not before and progress.simulated_ns >= setting.warm_s * NS_PER_S:
            before.append(progress.summary.total().arrived)
            scheduler.is_counting = True

    result = run(case, make_scheduler=lambda _: scheduler, on_progress=progress)
    return scheduler.num_lines / (result.num_requests - before[0])
