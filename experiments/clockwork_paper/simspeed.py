"""How fast the simulator is: requests per second, one core, the scheduler in the loop, no telemetry rows.

`fig5`: the case of Figure 5 under the `clockwork` policy at an SLO of 100 ms. `fig8`: the first seconds
of the generated trace of Figure 8. The best of several runs: whatever else the machine does can only
slow a run down. Per second of wall time, and of CPU time where others share the cores. In pure Python,
or, if this runs in what `make native` made, compiled: the keys of Figure 8 say which.

`fig8_full`: the long run that Figure 8's own results record, if there are any.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from clockwright.units import NS_PER_S
from controller.core import SchedulerConfig
from experiments.clockwork_paper import azure_replay, fig5
from experiments.native import is_compiled
from experiments.results_file import RESULTS, write_results
from experiments.simulator import Case, run

SLO_MS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Requests that arrived per second of wall and of CPU time, ascending, in several runs of one case."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]


def fig5_case(seconds: int) -> Case:
    """Figure 5's case, shortened to this many seconds."""
    setting = replace(fig5.Setting(), warmup_ns=0, measured_ns=seconds * NS_PER_S)
    return fig5.case_of(setting, "clockwork", SLO_MS)


def fig8_case(seconds: int, setting: azure_replay.Setting) -> Case:
    """The beginning of Figure 8's case with the generated trace."""
    case = azure_replay.case_of(setting, azure_replay.generated(setting), SchedulerConfig())
    return replace(case, duration_ns=seconds * NS_PER_S)


def measure(case: Case, repeats: int) -> Speeds:
    """Simulate a case several times."""
    wall, cpu = [], []
    for _ in range(repeats):
        result = run(case)
        cpu.append(result.num_requests / result.cpu_s)
        wall.append(result.requests_per_wall_s)
    return Speeds(wall=tuple(sorted(wall)), cpu=tuple(sorted(cpu)))


def full_run(directory: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Take over what `fig8.json` says of its longest run, and where it says so.

    Returns:
        Figures, and their origin; both empty where there is no such file.
    """
    path = directory / "fig8.json"
    if not path.exists():
        return {}, {}
    record = json.loads(path.read_text(encoding="utf-8"))
    figures = record["figures"]
    keys = [key.removesuffix("_wall_s") for key in figures if key.endswith("_wall_s")]
    longest = max(keys, key=lambda key: float(figures[f"{key}_requests"]))
    requests, wall_s, cpu_s, rss_mib = (
        figures[f"{longest}_{name}"] for name in ("requests", "wall_s", "cpu_s", "peak_rss_mib")
    )
    return {
        "fig8_requests_per_s": requests / wall_s,
        "fig8_requests_per_cpu_s": requests / cpu_s,
        "fig8_full_requests": requests,
        "fig8_full_simulated_s": 60 * figures[f"{longest}_minutes"],
        "fig8_full_wall_s": wall_s,
        "fig8_full_cpu_s": cpu_s,
        "fig8_peak_rss_mib": rss_mib,
    }, {
        "run": longest,
        "rss_mib_at_tenths": record["rss_mib_at_tenths"][longest],
        **{key: record[key] for key in ("command", "commit", "when", "machine", "compiled")},
    }


def produce(
    *,
    repeats: int = 5,
    seconds: int = 60,
    setting: azure_replay.Setting | None = None,
    fig8_seconds: int = 20,
    directory: Path = RESULTS,
) -> None:
    """Measure, and write `simspeed.json`."""
    setting = setting or azure_replay.Setting()
    how = "compiled" if is_compiled() else "interpreted"
    figures, origin = full_run(directory)
    for key, case in (
        ("fig5", fig5_case(seconds)),
        (f"fig8_{how}", fig8_case(fig8_seconds, setting)),
    ):
        speeds = measure(case, repeats)
        figures |= _named(key, speeds)
        print(
            f"{key}: {speeds.wall[-1]:,.0f} requests per second of wall time "
            f"(median {median(speeds.wall):,.0f}), {speeds.cpu[-1]:,.0f} of CPU time"
        )
    write_results(
        "simspeed",
        figures,
        command="python -m experiments simspeed",
        seeds=[fig5.Setting().seed, setting.seed],
        extra={"fig8_full": origin, "compiled": is_compiled()},
        directory=directory,
    )


def _named(key: str, speeds: Speeds) -> dict[str, float]:
    wall: Sequence[float] = speeds.wall
    return {
        f"{key}_requests_per_s": wall[-1],
        f"{key}_requests_per_s_median": median(wall),
        f"{key}_requests_per_s_min": wall[0],
        f"{key}_requests_per_cpu_s": speeds.cpu[-1],
    }


if __name__ == "__main__":
    produce()
