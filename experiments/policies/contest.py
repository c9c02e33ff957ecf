"""Policies under loads: what happens to the requests, counted alike for all, and the most that any policy could do.

Every policy plays every load with every seed, as many at a time as there are processes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Annotated, Any

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from controller.core import EdfMhConfig, Scheduler, SchedulerConfig
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import OK
from experiments.bounds import Cost, density_rate, simulated
from experiments.policies.load import BATCH_SLO_NS, Load
from experiments.simulator import Case, production_scheduler
from experiments.study.compared import run_rows
from experiments.study.pool import pool
from experiments.study.study import NO_COLUMN, key_of

# --- one run --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened to the requests that arrived in the measured time, and how busy the cluster was.

    Of a closed loop with the bound `rate_inside`, only what begins and ends in that time counts.
    """

    #: By tenant, or by model where none has a name: how many asked, and how many were answered in time.
    asked_by: Mapping[str, int]
    answered_by: Mapping[str, int]
    #: Rows times weight of the answered, as a part of those that were asked for.
    worth_share: float = 1.0
    #: By reason. A late answer is a refusal, and a request that is still open at the end counts as not answered in time.
    refused: Mapping[str, int]
    #: Answers in time at most, by the load's bound; -1: none is known.
    bound: int = -1
    #: Answers of models that had to be loaded first.
    cold: int = 0
    seconds: float = 1.0
    #: Latency of the answers; 0: no request was answered.
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    #: Time from arrival to refusal, and the same as a share of the SLO; 0: nothing was refused.
    refusal_p50_ms: float = 0.0
    refusal_p99_ms: float = 0.0
    refusal_p50_share: float = 0.0
    refusal_p99_share: float = 0.0
    #: Answers to batch clients, per second; they are counted nowhere else.
    batch_rps: float = 0.0
    exec_busy: float = 0.0
    load_busy: float = 0.0
    mean_batch_size: float = 0.0

    @property
    def asked(self) -> int:
        """All requests."""
        return sum(self.asked_by.values()) + self.refused.get("UNANSWERED", 0)

    @property
    def answered(self) -> int:
        """Those that were answered in time."""
        return sum(self.answered_by.values())

    @property
    def late(self) -> int:
        """Those that were answered too late, so after admission."""
        return self.refused.get("LATE", 0)

    @property
    def share(self) -> float:
        """Goodput as a part of what was asked."""
        return self.answered / self.asked if self.asked else 1.0

    @property
    def bound_share(self) -> float:
        """Goodput as a part of the bound."""
        return self.answered / self.bound if self.bound else 1.0

    @property
    def p5_model_share(self) -> float:
        """The share of its requests that the 5th-percentile model has answered."""
        return float(np.percentile(self._shares(), 5))

    @property
    def worst_model_share(self) -> float:
        """The same of the model that is served worst."""
        return min(self._shares())

    def _shares(self) -> list[float]:
        return [self.answered_by.get(name, 0) / asked for name, asked in self.asked_by.items()]

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

    def share_among(self, who: str) -> float:
        """The share of those whose answers a load compares (`Load.compared`), together."""
        if who == "all":
            return self.share
        if who == "worth":
            return self.worth_share
        if who == "innocent":
            return self.share_of([name for name in self.asked_by if name.startswith(who)])
        number = len(self.asked_by)
        return self.share_of(
            [n for n, asked in self.asked_by.items() if asked * number < self.asked]
        )

    def share_of(self, names: Iterable[str]) -> float:
        """The share of some tenants, or models, together."""
        names = list(names)
        asked = sum(self.asked_by.get(name, 0) for name in names)
        return sum(self.answered_by.get(name, 0) for name in names) / asked if asked else 1.0


def measure(
    load: Load,
    config: SchedulerConfig,
    seed: int,
    *,
    make_scheduler: Callable[[Case], Scheduler] = production_scheduler,
    fault: bool = True,
) -> Outcome:
    """Simulate one policy under one case of a load, with its fault or without."""
    make = load.case if fault or load.without is None else load.without
    case = replace(make(seed), scheduler=config)
    begin_ns, end_ns = load.begin_ns, case.duration_ns
    inside = load.bound == "rate_inside"
    asked, answered, refused = Counter[str](), Counter[str](), Counter[str]()
    latencies_ns, refusals_ns, refusal_shares = list[int](), list[int](), list[float]()
    worth_asked = worth_answered = 0.0
    # A pipeline counts as asked with the request to its first model, and as answered with the answer of its last.
    asks = {each: stages[0] for stages in case.pipelines for each in stages}
    ends = {stages[-1] for stages in case.pipelines}
    cold = num_of_batch_clients = 0

    def take(requests: Sequence[RequestRow], actions: Sequence[ActionRow]) -> None:
        nonlocal cold, num_of_batch_clients, worth_asked, worth_answered
        early = {
            row.action_id
            for row in actions
            if inside and row.exec is not None and row.exec.begin_ns < begin_ns
        }
        for row in requests:
            if row.slo_ns == BATCH_SLO_NS:
                num_of_batch_clients += begin_ns <= row.departure_ns < end_ns and row.outcome == OK
                continue
            if row.arrival_ns < begin_ns or (inside and row.departure_ns >= end_ns):
                continue
            name, worth = row.tenant or row.model_id, row.rows * row.weight
            if row.model_id in asks:
                name = asks[row.model_id]
            if name == row.model_id or row.model_id not in asks:
                asked[name] += 1
                worth_asked += worth
            if row.outcome == OK and row.model_id in asks and row.model_id not in ends:
                continue
            taken_ns = row.departure_ns - row.arrival_ns
            if row.outcome != OK:
                refused[row.outcome] += 1
                refusals_ns.append(taken_ns)
                refusal_shares.append(taken_ns / row.slo_ns)
            elif row.action_id not in early:
                answered[name] += 1
                worth_answered += worth
                cold += row.cold
                latencies_ns.append(taken_ns)

    done = run_rows(case, take, make_scheduler=make_scheduler)
    if done.num_unanswered:
        refused["UNANSWERED"] = done.num_unanswered
    total = done.summary.total(begin_ns, end_ns)
    seconds = (end_ns - begin_ns) / NS_PER_S

    def at(values: Sequence[float], percentile: float) -> float:
        return float(np.percentile(values or [0], percentile))

    return Outcome(
        asked_by=dict(asked),
        answered_by=dict(answered),
        worth_share=worth_answered / worth_asked if worth_asked else 1.0,
        refused=dict(sorted(refused.items())),
        cold=cold,
        seconds=seconds,
        p50_ms=at(latencies_ns, 50) / NS_PER_MS,
        p99_ms=at(latencies_ns, 99) / NS_PER_MS,
        refusal_p50_ms=at(refusals_ns, 50) / NS_PER_MS,
        refusal_p99_ms=at(refusals_ns, 99) / NS_PER_MS,
        refusal_p50_share=at(refusal_shares, 50),
        refusal_p99_share=at(refusal_shares, 99),
        batch_rps=num_of_batch_clients / seconds,
        exec_busy=done.summary.utilisation(total.exec_ns, begin_ns, end_ns),
        load_busy=done.summary.utilisation(total.load_ns, begin_ns, end_ns),
        mean_batch_size=total.mean_batch_size,
    )


def bound_of(load: Load, seed: int, *, padding: bool = False) -> int:
    """Requests of the measured time that any policy could answer in time; -1 where no bound is known.

    Args:
        load: the load.
        seed: of its case.
        padding: a compared policy sends batches that are not full.
    """
    case, begin_ns = load.case(seed), load.begin_ns
    if load.bound != "rate_inside":
        window_ns = (2 if padding else 4) * NS_PER_S
        return simulated.bound_of(case, load.bound, begin_ns, padding=padding, window_ns=window_ns)
    # Only what begins and ends in the measured time is counted, so there is no time outside it.
    hosted = {model.model_id: model for model in case.cluster.models}
    models = [hosted[ModelId(name)] for name in case.workload.models]
    loops = case.workload.closed_loops
    costs = [Cost(case.cluster.least_row(models[loop.model]).exec_ns) for loop in loops]
    slo_ns = max(loop.slo_ns for loop in loops)
    rate_rps = density_rate(costs, slo_ns=slo_ns, num_gpus=case.cluster.num_workers)
    return int(rate_rps * (case.duration_ns - begin_ns) / NS_PER_S)


# --- all runs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is simulated."""

    seeds: tuple[int, ...] = (1, 2, 3)
    #: Only loads whose key begins with one of these words.
    only: tuple[str, ...] = ("",)
    #: Runs at a time.
    processes: int = os.cpu_count() or 1
    #: Compute all bounds; those with memory take minutes. False: only bounds that cost nothing.
    bounds: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy that is compared."""

    name: str
    config: SchedulerConfig
    #: Makes the scheduler. A function of a module or a partial of one, so that it can be sent to another process.
    scheduler: Callable[[Case], Scheduler] = production_scheduler
    #: Run only under loads whose key begins with one of these words.
    only: tuple[str, ...] = ("",)
    #: Runs under the loads without their faults, too.
    judged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy under one load, by seed."""

    load: Annotated[Load, NO_COLUMN]
    policy: str
    outcomes: tuple[Outcome, ...]
    #: The same without the fault; empty without a fault, or where the policy is not judged.
    without: tuple[Outcome, ...] = ()

    @property
    def group(self) -> str:
        """The load's."""
        return self.load.group

    @property
    def scenario(self) -> str:
        """The load's name, as the table of scenarios calls it."""
        return self.load.name

    @property
    def part(self) -> str:
        """The group, as the table of unseen families calls it."""
        return self.load.group

    @property
    def family(self) -> str:
        """The load's name, as the table of unseen families calls it."""
        return self.load.name

    @property
    def points(self) -> float:
        """Goodput of those whom the load compares, in percent of what they asked, the mean of the seeds."""
        if self.load.compared == "all":
            return self.points_of_all
        return 100 * mean(outcome.share_among(self.load.compared) for outcome in self.outcomes)

    @property
    def points_of_all(self) -> float:
        """Goodput in percent of what was asked, the mean of the seeds.

        In percent of the bound where clients wait for their answers: there a refusal makes them ask more.
        """
        by_rate = self.load.bound.startswith("rate") and self.possible_share is not None
        return 100 * self.mean("bound_share" if by_rate else "share")

    @property
    def possible_share(self) -> float | None:
        """Goodput compared with what is possible; None where that is not known."""
        if self.without:
            return mean(
                found / possible if possible else 1.0
                for outcome, sound in zip(self.outcomes, self.without, strict=True)
                for names in (list(sound.asked_by),)
                for found, possible in ((outcome.share_of(names), sound.share_of(names)),)
            )
        if min(outcome.bound for outcome in self.outcomes) < 0:
            return None
        return self.mean("bound_share")

    def mean(self, name: str) -> float:
        """Mean of one property of the outcomes over the seeds."""
        return float(mean(getattr(outcome, name) for outcome in self.outcomes))

    def per_million(self, name: str) -> float:
        """How many of a million requests a count stands for, all seeds together."""
        return 1e6 * self.mean(name) / self.mean("asked")


def said(key: str, row: Row) -> str:
    """One line about a row."""
    return (
        f"{key_of(key, row)}: {row.points:.2f} % answered, p50 {row.mean('p50_ms'):.1f} ms, "
        f"batch clients {row.mean('batch_rps'):.0f} r/s"
    )


def run_all(
    loads: Sequence[Load],
    contenders: Sequence[Contender],
    setting: Setting,
    named: Callable[[str], Load],
    *,
    padding: bool = False,
) -> Iterator[Row]:
    """Measure every contender under all of its loads.

    Args:
        loads: the loads.
        contenders: who is measured.
        setting: how much.
        named: gives a load by its key, in other processes, to which what draws its requests cannot be sent; a function
            of a module.
        padding: as for `bound_of`.
    """
    with pool(setting.processes) as calls:

        def played(load: Load, contender: Contender, *, fault: bool) -> list[Future[Outcome]]:
            config = asdict(contender.config)
            return [
                calls.submit(_measure, named, load.key, config, contender.scheduler, seed, fault)
                for seed in setting.seeds
            ]

        bounds = {
            load.key: [
                calls.submit(_bound, named, load.key, seed, padding) for seed in setting.seeds
            ]
            for load in loads
            if setting.bounds or load.bound == "rate_inside"
        }
        rows = [
            (
                load,
                contender.name,
                played(load, contender, fault=True),
                played(load, contender, fault=False) if contender.judged and load.without else [],
            )
            for load in loads
            for contender in contenders
            if load.key.startswith(contender.only)
        ]
        for load, policy, outcomes, without in rows:
            of_seeds = [call.result() for call in bounds.get(load.key, ())] or [-1] * len(outcomes)
            yield Row(
                load=load,
                policy=policy,
                outcomes=tuple(
                    replace(call.result(), bound=bound)
                    for call, bound in zip(outcomes, of_seeds, strict=True)
                ),
                without=tuple(call.result() for call in without),
            )


def _measure(
    named: Callable[[str], Load],
    key: str,
    config: dict[str, Any],
    scheduler: Callable[[Case], Scheduler],
    seed: int,
    fault: bool,
) -> Outcome:
    # A frozen dataclass that was compiled cannot be sent to another process; its fields can.
    config["edf_mh"] = EdfMhConfig(**config["edf_mh"])
    made = SchedulerConfig(**config)
    return measure(named(key), made, seed, make_scheduler=scheduler, fault=fault)


def _bound(named: Callable[[str], Load], key: str, seed: int, padding: bool) -> int:
    return bound_of(named(key), seed, padding=padding)
