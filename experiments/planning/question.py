"""What a plan is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_S, ModelId
from experiments.simulator import Case, WorkerKind
from traces.arrivals import Recorded, Slice, Source

#: Workers of each kind.
Size = tuple[int, ...]

# Stretches begin at whole multiples of this.
_STEP_NS = NS_PER_S // 4
#: So many seeds at least show that the target is met: some bursts come in one of several runs only.
LEAST_RUNS = 5
# No miss among n requests shows with 95 % confidence that less than 3 / n of all are missed.
_RULE_OF_THREE = 3.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """A load, kinds of workers, and a target."""

    #: How many workers it has does not matter.
    case: Case
    #: Share of the requests that are to be answered inside their SLO.
    target: float = 0.999
    #: Requests that arrive before this are not counted: caches are cold at the start.
    warmup_ns: int = 0
    #: By name of a kind: workers that are there in any case, at no price.
    have: Mapping[str, int] = field(default_factory=dict)
    #: The most workers of a kind.
    most_workers: int = 64
    #: The most seeds that a size is simulated with.
    most_runs: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ConfigError(
                f"target is {100 * self.target:g} %, expected more than 0 and less than 100"
            )
        if not 0 <= self.warmup_ns < self.case.duration_ns:
            raise ConfigError(
                f"warm-up is {self.warmup_ns / NS_PER_S:g} s, expected less than the case's "
                f"{self.case.duration_ns / NS_PER_S:g} s"
            )
        names = [kind.name for kind in self.kinds]
        if unknown := set(self.have) - set(names):
            raise ConfigError(
                f"workers that are there: found kind {min(unknown)!r}, expected one of {', '.join(names)}"
            )
        if self.most_runs < LEAST_RUNS or max(self.least) > self.most_workers:
            raise ConfigError(
                f"found at most {self.most_runs} runs and {self.most_workers} workers of a kind, "
                f"expected {LEAST_RUNS} runs or more, and {max(self.least)} workers or more"
            )
        if self.case.workload.closed_loops:
            return
        num_requests = self.expected_requests * self.most_runs
        if num_requests < self.least_requests:
            raise ConfigError(
                f"found about {num_requests:,.0f} requests in {self.most_runs} runs, expected "
                f"{self.least_requests:,} or more: fewer cannot show {100 * self.target:g} %; a longer case or "
                "--stretch-s, more runs or a lower target helps"
            )

    @cached_property
    def kinds(self) -> tuple[WorkerKind, ...]:
        """Kinds of workers, each once."""
        cluster = self.case.cluster
        return tuple({kind.name: kind for kind in cluster.kinds or (cluster.kind_of(0),)}.values())

    @cached_property
    def least(self) -> Size:
        """The smallest size."""
        return tuple(self.have.get(kind.name, 0) for kind in self.kinds)

    @cached_property
    def expected_requests(self) -> float:
        """Open-loop requests that are counted in one run, on average."""
        return self.case.workload.expected_requests(self.warmup_ns, self.case.duration_ns)

    @cached_property
    def is_recorded(self) -> bool:
        """Whether requests come when they came once, whatever the seed."""
        workload = self.case.workload
        return not workload.closed_loops and all(map(_is_recorded, workload.sources))

    @property
    def least_requests(self) -> int:
        """So many requests can show that the target is met."""
        return round(_RULE_OF_THREE / (1 - self.target))

    def price(self, size: Size) -> float:
        """What a size costs beyond what is there."""
        extra = (count - least for count, least in zip(size, self.least, strict=True))
        return sum(
            count * kind.price for count, kind in zip(extra, self.kinds, strict=True) if count > 0
        )

    def named(self, size: Size) -> dict[str, int]:
        """A size by the names of its kinds."""
        return {kind.name: count for kind, count in zip(self.kinds, size, strict=True)}

    def words(self, size: Size) -> str:
        """A size in words."""
        if not self.case.cluster.kinds:
            return f"{size[0]} worker{'s' * (size[0] != 1)}"
        named = self.named(size).items()
        return " + ".join(f"{count} {name}" for name, count in named if count) or "no workers"

    def case_of(self, size: Size, run: int = 0) -> Case:
        """The case with so many workers.

        Args:
            size: workers of each kind.
            run: 0: with the case's own seed; others draw arrivals and noise afresh.
        """
        case = self.case
        kinds = [kind for kind, count in zip(self.kinds, size, strict=True) for _ in range(count)]
        cluster = replace(
            case.cluster,
            num_workers=sum(size),
            kinds=tuple(kinds) if case.cluster.kinds else (),
        )
        workload = case.workload.reseeded(case.seed + run) if run else case.workload
        return replace(case, cluster=cluster, workload=workload, seed=case.seed + run)

    def slos_ns(self) -> dict[int, float]:
        """Every SLO, ascending, with the open-loop requests that have it in one run, on average."""
        workload = self.case.workload
        found = dict.fromkeys((loop.slo_ns for loop in workload.closed_loops), 0.0)
        for source in workload.sources:
            asked = source.expected(self.warmup_ns, self.case.duration_ns)
            found[source.slo_ns] = found.get(source.slo_ns, 0.0) + asked
        return dict(sorted(found.items()))


def _is_recorded(source: Source) -> bool:
    while isinstance(source, Slice):
        source = source.source
    return isinstance(source, Recorded) and source.scale == 1


def busiest(case: Case, stretch_ns: int, warmup_ns: int) -> Case:
    """The part of a case in which most is asked, by the time that its runs take, and what comes before it as a warm-up.

    Closed-loop clients ask all the time, so they do not matter for which it is.
    """
    length_ns = warmup_ns + stretch_ns
    if length_ns >= case.duration_ns or not case.workload.sources:
        return case
    rows = {model.model_id: case.cluster.least_row(model) for model in case.cluster.models}
    work = np.array(
        [
            min(ns / size for size, ns in rows[ModelId(name)].exec_ns.items())
            for name in case.workload.models
        ]
    )
    steps = np.zeros(-(-case.duration_ns // _STEP_NS) + 1)
    for arrivals in case.workload.arrivals():
        inside = arrivals.time_ns < case.duration_ns
        places = arrivals.time_ns[inside] // _STEP_NS
        steps += np.bincount(places, work[arrivals.model[inside]], minlength=len(steps))
    before = np.concatenate([[0.0], np.cumsum(steps)])
    wide, early = max(1, stretch_ns // _STEP_NS), -(-warmup_ns // _STEP_NS)
    # Those that a whole warm-up precedes, and that end within the case.
    first = np.arange(early, case.duration_ns // _STEP_NS - wide + 1)
    if not len(first):
        return case
    begin_ns = int(first[np.argmax(before[first + wide] - before[first])]) * _STEP_NS - warmup_ns
    begin_ns = max(0, begin_ns)
    end_ns = min(begin_ns + length_ns, case.duration_ns)
    return replace(
        case, workload=case.workload.sliced(begin_ns, end_ns), duration_ns=end_ns - begin_ns
    )
