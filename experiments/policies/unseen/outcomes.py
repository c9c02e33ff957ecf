"""What a policy makes of one case of a family, and the most that any policy could."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from controller.core import Scheduler, SchedulerConfig
from controller.telemetry import ActionRow, RequestRow
from experiments.bounds import simulated
from experiments.policies.outcome import PolicyOutcome, RequestCounts
from experiments.policies.unseen.family import Family
from experiments.policies.unseen.plain_edf import PLAIN_EDF
from experiments.simulator import Case, production_scheduler
from experiments.study.compared import POLICIES, run_rows

#: The default with isolation off: all time goes to what answers most.
WITHOUT_ISOLATION = "edf_mh_isolation_0"
#: Policies compared; `edf` is the plain one, which no server has.
COMPARED = (
    "clockwork",
    "clockwork1ms",
    "edf",
    "edf_mh",
    WITHOUT_ISOLATION,
    "clipper",
    "infaas",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyOutcome(PolicyOutcome):
    """And why requests were refused, and whose were answered."""

    refused: dict[str, int] = field(default_factory=dict)
    #: Time from arrival to refusal as a share of the SLO; 0: nothing was refused.
    refusal_p50_share: float
    refusal_p99_share: float
    p99_ms: float
    #: Models that could be asked.
    num_models: int = 0
    #: By tenant, or by model where none has a name: how many asked, and how many were answered in time.
    asked_by: dict[str, int] = field(default_factory=dict)
    answered_by: dict[str, int] = field(default_factory=dict)
    #: How long the simulation took, of this computer's time.
    wall_s: float = 0.0

    @property
    def small(self) -> list[str]:
        """Tenants, or models, that ask for less than the mean."""
        return [
            name for name, asked in self.asked_by.items() if asked * len(self.asked_by) < self.asked
        ]

    def share_of(self, names: Sequence[str]) -> float:
        """The share of some tenants, or models, together."""
        asked = sum(self.asked_by.get(name, 0) for name in names)
        return sum(self.answered_by.get(name, 0) for name in names) / asked if asked else 1.0


def measure(family: Family, policy: str, seed: int, *, fault: bool = True) -> FamilyOutcome:
    """Simulate one policy under one case of a family, with its fault or without."""
    make = family.case if fault or family.without is None else family.without
    begin_s = time.perf_counter()
    case = make(seed)
    scheduler, make_scheduler = _scheduler(case, policy)
    case = replace(case, scheduler=scheduler)
    counts = RequestCounts()

    def take(requests: Sequence[RequestRow], _actions: Sequence[ActionRow]) -> None:
        for row in requests:
            if row.arrival_ns >= family.begin_ns:
                counts.add(row, row.tenant or row.model_id)

    done = run_rows(case, take, make_scheduler=make_scheduler)
    # Whoever has no answer at the end of all patience has none in time.
    if done.num_unanswered:
        counts.refused["UNANSWERED"] = done.num_unanswered
    return FamilyOutcome(
        asked=counts.asked.total() + done.num_unanswered,
        answered=counts.answered.total(),
        late=counts.refused["LATE"],
        refused=dict(sorted(counts.refused.items())),
        refusal_p50_share=counts.refusal_share(50),
        refusal_p99_share=counts.refusal_share(99),
        p50_ms=counts.latency_ms(50),
        p99_ms=counts.latency_ms(99),
        num_models=len(case.workload.models),
        asked_by=dict(counts.asked),
        answered_by=dict(counts.answered),
        wall_s=time.perf_counter() - begin_s,
    )


def bound_of(family: Family, seed: int) -> int:
    """Requests of the measured time that any policy could answer in time; -1 where no bound is known."""
    return simulated.bound_of(family.case(seed), family.bound, family.begin_ns)


def _scheduler(case: Case, policy: str) -> tuple[SchedulerConfig, Callable[[Case], Scheduler]]:
    """The case's settings under a policy, and what makes the scheduler."""
    if policy == "edf":
        return case.scheduler, _plain_edf
    if policy == WITHOUT_ISOLATION:
        pieces = replace(case.scheduler.edf_mh, isolation=0.0)
        return replace(case.scheduler, edf_mh=pieces), production_scheduler
    known = POLICIES[policy]
    config = replace(case.scheduler, policy=known.policy, lookahead_ns=known.lookahead_ns)
    return config, production_scheduler


def _plain_edf(case: Case) -> Scheduler:
    return Scheduler(case.scheduler, PLAIN_EDF)
