"""A trace of invocations per minute, and the workload it makes of models.

This is the form of the Azure Functions trace of 2019. `traces.azure` reads it, `traces.synthetic` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from traces.arrivals import EvenReplay, Source, TraceReplay, Workload

#: Trigger of a function that a clock starts, in the words of the 2019 trace.
TIMER = "timer"


class FunctionKey(NamedTuple):
    """Identity of a function: its owner, and the trigger that starts it, as the 2019 trace has them."""

    owner: str
    app: str
    function: str
    #: "http", "queue", "timer", ...; "unknown" in some derived traces.
    trigger: str


@dataclass(frozen=True, slots=True, eq=False)
class MinuteTrace:
    """How often each function was invoked in each minute."""

    functions: tuple[FunctionKey, ...]
    #: Invocations; shape (function, minute).
    counts: npt.NDArray[np.int32]
    #: Minute of the first column; minute 0 begins at midnight.
    first_minute: int

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or len(self.counts) != len(self.functions):
            raise ValueError(
                f"counts have shape {self.counts.shape}, expected one row for each of "
                f"{len(self.functions)} functions"
            )

    @property
    def num_minutes(self) -> int:
        """Length of the trace."""
        return int(self.counts.shape[1])

    @property
    def totals(self) -> npt.NDArray[np.int64]:
        """Invocations of each function over the whole trace."""
        totals: npt.NDArray[np.int64] = self.counts.sum(axis=1, dtype=np.int64)
        return totals

    def between(self, begin: int, end: int) -> MinuteTrace:
        """Keep the columns from one minute of the day up to, without, another.

        Raises ValueError if the trace does not have them.
        """
        last = self.first_minute + self.num_minutes
        if not self.first_minute <= begin < end <= last:
            raise ValueError(
                f"minutes {begin} to {end}: the trace has {self.first_minute} to {last}"
            )
        columns = slice(begin - self.first_minute, end - self.first_minute)
        return MinuteTrace(self.functions, self.counts[:, columns], begin)

    def workload(
        self,
        models: Sequence[str],
        *,
        slo_ns: int,
        scale: float = 1.0,
        assignment: Literal["contiguous", "striped"] = "contiguous",
        timers: Literal["poisson", "even"] = "poisson",
        seed: int = 0,
        tenants: str = "",
    ) -> Workload:
        """Make requests to models as often as the functions were invoked.

        Args:
            models: names of the instances.
            slo_ns: SLO of every request.
            scale: requests per invocation.
            assignment: which functions share a model; see `assign`.
            timers: "poisson": replayed like all others, as Clockwork's client did; "even": evenly
                spaced over their minutes, the first at second 0, as they really fire.
            seed: seed of all arrivals.
            tenants: "owner" or "app": a function's requests carry its name; empty: no tenant.
        """
        owners = [getattr(key, tenants) if tenants else "" for key in self.functions]
        names = {name: index for index, name in enumerate(dict.fromkeys(("", *owners)))}
        whose = np.array([names[owner] for owner in owners], np.int64)
        assigned = assign(self.totals, len(models), assignment)
        clocked = np.zeros(len(assigned), bool)
        if timers == "even":
            clocked[:] = [key.trigger == TIMER for key in self.functions]
        sources: list[Source] = []
        if not clocked.all():
            sources.append(
                TraceReplay(
                    counts=self.counts[~clocked],
                    models=assigned[~clocked],
                    tenants=whose[~clocked],
                    slo_ns=slo_ns,
                    seed=seed,
                    scale=scale,
                )
            )
        if clocked.any():
            sources.append(
                EvenReplay(
                    counts=self.counts[clocked],
                    models=assigned[clocked],
                    tenants=whose[clocked],
                    slo_ns=slo_ns,
                    seed=seed,
                    scale=scale,
                )
            )
        return Workload(models=tuple(models), sources=tuple(sources), tenants=tuple(names))


def assign(
    totals: npt.NDArray[np.int64], num_models: int, how: Literal["contiguous", "striped"]
) -> npt.NDArray[np.int64]:
    """Assign each function to a model.

    Both sort the functions by total, largest first. "contiguous" is what Clockwork's client does
    (azure.h): function i of N goes to model floor(i * M / N), so that neighbours in popularity share a
    model and the most popular ones share the first. "striped", its other mode: i mod M.

    Args:
        totals: invocations of each function.
        num_models: M.
        how: one of the two.

    Returns:
        Positions of models, in the order of `totals`.
    """
    if num_models < 1:
        raise ValueError(f"num_models is {num_models}, expected at least 1")
    rank = np.empty(len(totals), np.int64)
    # The sort is stable: functions of equal totals keep their order.
    rank[np.argsort(-totals, kind="stable")] = np.arange(len(totals))
    if how == "striped":
        return rank % num_models
    return rank * num_models // max(1, len(totals))
