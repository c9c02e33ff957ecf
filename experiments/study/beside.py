"""A point of a study with a case live and simulated, and the gap between the two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated

from experiments.study.sides import METRICS, Side, gap_pct, words_of
from experiments.study.study import Column, Row, cells_of, key_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A stretch of a run, live and simulated: a study's point, which adds its axes."""

    live: Annotated[Side, Column()]
    #: None: the server answered too few requests to measure, so nothing was simulated.
    simulated: Annotated[Side | None, Column()]
    #: Delay of the client itself.
    client_late_p99_ms: float
    #: Requests of the whole run that are not in `live`: fronts refused them by themselves, and keep no row of that.
    num_without_row: int = 0
    #: The simulator's excess; None: nothing to compare.
    goodput_gap_pct: Annotated[float | None, Column()] = field(init=False)
    p50_gap_pct: Annotated[float | None, Column()] = field(init=False)
    p99_gap_pct: Annotated[float | None, Column()] = field(init=False)

    def __post_init__(self) -> None:
        for metric, name in METRICS.items():
            gap = gap_pct(self.live, self.simulated, name)
            object.__setattr__(self, f"{metric}_gap_pct", gap)


def worst(points: Iterable[Beside], name: str) -> dict[str, float]:
    """Return the largest gap with its name; empty if no point has one."""
    gaps = [gap for point in points if (gap := getattr(point, name)) is not None]
    return {name: max(gaps, key=abs)} if gaps else {}


def say(key: str, point: Beside) -> str:
    """One line about a point."""
    words = f"{key_of(key, point)}: {words_of(point.live, point.simulated)}"
    return words + f"; {point.num_without_row} requests left no row" * (point.num_without_row > 0)


def by_side(_setting: object, points: Iterable[Beside]) -> Iterator[Row]:
    """Rows of a table: two for each point, live and simulated, its words first."""
    for point in points:
        words = {n: value for n, (_, value) in cells_of(point).items() if isinstance(value, str)}
        for name, side in (("live", point.live), ("simulated", point.simulated)):
            if side is not None:
                yield {**words, "side": name, **asdict(side)}
