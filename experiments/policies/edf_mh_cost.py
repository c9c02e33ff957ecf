"""What the core costs per request under `edf_mh` and under `clockwork`, beside what `edf_mh` recorded."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from experiments.bench.core import REPEATS, SETTINGS, run_case
from experiments.study.bench import bench


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    seeds: tuple[int, ...] = tuple(range(REPEATS))


def time_core(policy: str, seeds: tuple[int, ...]) -> dict[str, float]:
    """Cost per request on the largest case."""
    setting = SETTINGS["4026x20"]()
    runs = [run_case(setting, seed, policy) for seed in seeds]
    prefix = "" if policy == "edf_mh" else f"{policy}_"
    return {
        f"{prefix}core_us_4026x20": median(run.us_per_request for run in runs),
        f"{prefix}core_us_4026x20_min": min(run.us_per_request for run in runs),
        f"{prefix}core_us_p999_4026x20": median(run.us_p999 for run in runs),
    }


def measure(setting: Setting) -> dict[str, float]:
    """Time both policies."""
    return time_core("clockwork", setting.seeds) | time_core("edf_mh", setting.seeds)


STUDY = bench("edf_mh_cost", Setting(), measure, record="edf_mh", part="cost")
