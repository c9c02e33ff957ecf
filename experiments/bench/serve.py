"""`make bench`: what serving costs and keeps.

The parts: `core` (the scheduler per request, virtual time), `paging` and `lateness` (the worker on the CPU), and
`overload` (goodput at up to three times what the device can do). What a request costs is `bench-live`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from experiments.bench import core, overload, worker
from experiments.study.bench import bench
from experiments.study.study import chosen

PARTS: Mapping[str, Callable[[], dict[str, float]]] = {
    "core": core.measure,
    "paging": worker.measure_paging,
    "lateness": worker.measure_lateness,
    "overload": overload.measure,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured."""

    parts: tuple[str, ...] = tuple(PARTS)

    @property
    def seeds(self) -> range:
        """Arrivals of the core's cases, and those of the overload."""
        return range(max(core.REPEATS, len(overload.RATES)))

    def __post_init__(self) -> None:
        chosen("part", self.parts, PARTS)


def measure(setting: Setting) -> dict[str, float]:
    """Measure the parts, one after the other."""
    begin_s = time.monotonic()
    figures: dict[str, float] = {}
    for part in setting.parts:
        figures |= PARTS[part]()
    return figures | {"wall_s": round(time.monotonic() - begin_s, 1)}


STUDY = bench("bench-serve", Setting(), measure)
