"""The outcome of a policy under a scenario, and the bound for any policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clockwright.units import NS_PER_S, ModelId
from controller.core import Scheduler, SchedulerConfig
from controller.telemetry import OK, ActionRow, RequestRow
from experiments.bounds import Cost, density_rate, simulated
from experiments.policies.outcome import PolicyOutcome, RequestCounts
from experiments.policies.scenarios import BATCH_SLO_NS, Scenario
from experiments.simulator import Case, production_scheduler
from experiments.study.compared import run_rows

_BOUND_WINDOW_NS = 4 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOutcome(PolicyOutcome):
    """And how busy the cluster was, for whom."""

    #: Answers in time at most, by the scenario's bound; -1: none.
    bound: int
    cold: int
    seconds: float
    #: Share of the model's requests that was answered, of the 5th-percentile model and the worst.
    p5_model_share: float
    worst_model_share: float
    #: Time from arrival to refusal; 0: nothing was refused. A late answer is a refusal.
    refusal_p50_ms: float
    refusal_p99_ms: float
    #: Answers to batch clients, per second.
    batch_rps: float
    exec_busy: float
    load_busy: float
    mean_batch_size: float

    @property
    def bound_share(self) -> float:
        """Goodput as a part of the bound."""
        return self.answered / self.bound if self.bound else 1.0

    @property
    def utilisation(self) -> float:
        """Busy share of the GPUs or of their PCIe buses, whichever is busier."""
        return max(self.exec_busy, self.load_busy)

    @property
    def goodput_rps(self) -> float:
        """Answers in time per second."""
        return self.answered / self.seconds

    @property
    def bound_rps(self) -> float:
        """The most that any policy could give."""
        return self.bound / self.seconds


def measure(
    scenario: Scenario,
    scheduler: SchedulerConfig,
    seed: int,
    *,
    bound: int = -1,
    make_scheduler: Callable[[Case], Scheduler] = production_scheduler,
) -> ScenarioOutcome:
    """Simulate one policy under one scenario; `bound` is passed on."""
    case = replace(scenario.case(seed), scheduler=scheduler)
    begin_ns, end_ns = scenario.begin_ns, case.duration_ns
    counts = RequestCounts()
    num_of_batch_clients = 0

    def take(requests: Sequence[RequestRow], actions: Sequence[ActionRow]) -> None:
        nonlocal num_of_batch_clients
        # A closed loop's bound does not count time that was spent before counting begins.
        early = {
            row.action_id
            for row in actions
            if scenario.bound == "rate" and row.exec is not None and row.exec.begin_ns < begin_ns
        }
        for row in requests:
            if row.slo_ns == BATCH_SLO_NS:
                num_of_batch_clients += begin_ns <= row.departure_ns < end_ns and row.outcome == OK
                continue
            if row.arrival_ns < begin_ns or (
                scenario.bound == "rate" and row.departure_ns >= end_ns
            ):
                continue
            counts.add(row, row.model_id, answer_counts=row.action_id not in early)

    result = run_rows(case, take, make_scheduler=make_scheduler)
    total = result.summary.total(begin_ns, end_ns)
    shares = [counts.answered[model_id] / number for model_id, number in counts.asked.items()]
    seconds = (end_ns - begin_ns) / NS_PER_S
    return ScenarioOutcome(
        asked=counts.asked.total(),
        answered=counts.answered.total(),
        late=counts.refused["LATE"],
        bound=bound,
        cold=counts.cold,
        seconds=seconds,
        p5_model_share=float(np.percentile(shares, 5)),
        worst_model_share=min(shares),
        p50_ms=counts.latency_ms(50),
        refusal_p50_ms=counts.refusal_ms(50),
        refusal_p99_ms=counts.refusal_ms(99),
        batch_rps=num_of_batch_clients / seconds,
        exec_busy=result.summary.utilisation(total.exec_ns, begin_ns, end_ns),
        load_busy=result.summary.utilisation(total.load_ns, begin_ns, end_ns),
        mean_batch_size=total.mean_batch_size,
    )


def bound_of(scenario: Scenario, seed: int) -> int:
    """Requests of the measured time that any policy could answer in time; -1 where no bound is known."""
    if not scenario.bound:
        return -1
    case = scenario.case(seed)
    begin_ns = scenario.begin_ns
    if scenario.bound == "rate":
        # Only what begins and ends in the measured time is counted (`measure`), so there is no time beside it.
        hosted = {model.model_id: model for model in case.cluster.models}
        models = [hosted[ModelId(name)] for name in case.workload.models]
        costs = [
            Cost(case.cluster.least_row(models[loop.model]).exec_ns)
            for loop in case.workload.closed_loops
        ]
        slo_ns = max(loop.slo_ns for loop in case.workload.closed_loops)
        rate_rps = density_rate(costs, slo_ns=slo_ns, num_gpus=case.cluster.num_workers)
        return int(rate_rps * (case.duration_ns - begin_ns) / NS_PER_S)
    # The compared policies send no batch that is not full.
    return simulated.bound_of(
        case, scenario.bound, begin_ns, padding=False, window_ns=_BOUND_WINDOW_NS
    )
