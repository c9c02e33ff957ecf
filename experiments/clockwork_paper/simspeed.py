"""How fast the simulator is: requests per second, one core, the scheduler in the loop, no telemetry rows.

`fig5`: the case of Figure 5 under the `clockwork` policy at an SLO of 100 ms. `fig8`: the first seconds
of the generated trace of Figure 8. The best of several runs: whatever else the machine does can only
slow a run down. Per second of wall time, and of CPU time where others share the cores. In pure Python,
or, if this runs in what `make native` made, compiled: the keys of Figure 8 say which.

`fig8_full`: the long run that Figure 8's own record has, if that lies in the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from clockwright.units import NS_PER_S
from controller.core import SchedulerConfig
from experiments.clockwork_paper import azure_replay, fig5
from experiments.native import is_compiled
from experiments.simulator import Case, run
from experiments.study.study import Study

SLO_MS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is simulated."""

    repeats: int = 5
    #: Virtual time of each figure's case.
    fig5_seconds: int = 60
    fig8_seconds: int = 20
    replay: azure_replay.Setting = field(default_factory=azure_replay.Setting)

    @property
    def seeds(self) -> tuple[int, int]:
        """Those of both cases."""
        return fig5.Setting().seed, self.replay.seed


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPoint:
    """Requests that arrived per second of wall time in several runs of one case, and of CPU time in the best."""

    case: str
    requests_per_s: float
    requests_per_s_median: float
    requests_per_s_min: float
    requests_per_cpu_s: float


def measure(key: str, case: Case, repeats: int) -> SpeedPoint:
    """Simulate a case several times."""
    results = [run(case) for _ in range(repeats)]
    wall = sorted(result.requests_per_wall_s for result in results)
    return SpeedPoint(
        case=key,
        requests_per_s=wall[-1],
        requests_per_s_median=median(wall),
        requests_per_s_min=wall[0],
        requests_per_cpu_s=max(result.num_requests / result.cpu_s for result in results),
    )


def ask(setting: Setting) -> Iterator[SpeedPoint]:
    """Simulate the beginnings of both figures."""
    paper = replace(fig5.Setting(), warmup_ns=0, measured_ns=setting.fig5_seconds * NS_PER_S)
    yield measure("fig5", fig5.case_of(paper, "clockwork", SLO_MS), setting.repeats)
    trace = azure_replay.generated(setting.replay)
    case = azure_replay.case_of(setting.replay, trace, SchedulerConfig())
    case = replace(case, duration_ns=setting.fig8_seconds * NS_PER_S)
    how = "compiled" if is_compiled() else "interpreted"
    yield measure(f"fig8_{how}", case, setting.repeats)


def full_run(directory: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Take over what `fig8.json` says of its longest run, and where it says so.

    Returns:
        Figures, and their origin as `fig8_full`; that and the figures are empty where there is no such file.
    """
    path = directory / "fig8.json"
    if not path.exists():
        return {}, {"fig8_full": {}}
    record = json.loads(path.read_text(encoding="utf-8"))
    figures = record["figures"]
    keys = [key.removesuffix("_wall_s") for key in figures if key.endswith("_wall_s")]
    longest = max(keys, key=lambda key: float(figures[f"{key}_requests"]))
    requests, wall_s, cpu_s = (
        figures[f"{longest}_{name}"] for name in ("requests", "wall_s", "cpu_s")
    )
    origin = {key: record[key] for key in ("command", "commit", "when", "machine", "compiled")}
    return {
        "fig8_requests_per_s": requests / wall_s,
        "fig8_requests_per_cpu_s": requests / cpu_s,
    }, {"fig8_full": {"run": longest, **origin}}


STUDY = Study(
    name="simspeed",
    setting=Setting(),
    ask=ask,
    key="{case}",
    tables={},
    extra=lambda *_: {"compiled": is_compiled()},
    taken=full_run,
)
