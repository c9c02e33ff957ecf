"""A point of a study that has a case live beside the same case simulated, and how far apart the two are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from experiments.study.sides import METRICS, Side, gap_pct, words
from experiments.study.study import Column, key_of, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A stretch of a run, live and simulated: a study's point, which adds its axes."""

    live: Annotated[Side, Column()]
    #: None: the server answered too little to be measured, so nothing was simulated.
    simulated: Annotated[Side | None, Column()]
    #: How late the client itself sent.
    client_late_p99_ms: float
    #: How much more the simulator says; None: there is nothing to compare.
    goodput_gap_pct: Annotated[float | None, Column()] = field(init=False)
    p50_gap_pct: Annotated[float | None, Column()] = field(init=False)
    p99_gap_pct: Annotated[float | None, Column()] = field(init=False)

    def __post_init__(self) -> None:
        for metric, name in METRICS.items():
            gap = gap_pct(self.live, self.simulated, name)
            object.__setattr__(self, f"{metric}_gap_pct", gap)


def worst(points: Iterable[Beside], name: str) -> dict[str, float]:
    """Give the gap that is furthest from 0, under its name; nothing where no point has one."""
    gaps = [gap for point in points if (gap := getattr(point, name)) is not None]
    return {name: max(gaps, key=abs)} if gaps else {}


def say(key: str, point: Beside) -> str:
    """One line about a point."""
    return f"{key_of(key, point)}: {words(point.live, point.simulated)}"


def recorded(table: Path) -> list[Any]:
    """Read the points of a table, their sides as they were."""
    names = [entry.name for entry in fields(Side)]
    points = []
    for row in read_table(table):
        sides = {
            side: SimpleNamespace(**{name: row[f"{side}_{name}"] for name in names})
            for side in ("live", "simulated")
        }
        points.append(SimpleNamespace(**row | sides))
    return points
