"""Loads on which scheduling policies are compared, each at a steady state, and what came of a run.

Every scenario is a value: by its name and a seed it gives the same requests to every policy. Requests with
an SLO of an hour are batch clients', and are counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from controller.core import SchedulerConfig
from controller.telemetry import OK, ActionRow, RequestRow
from experiments.bounds import Case as BoundCase
from experiments.bounds import Cost, density_bound, density_rate, memory_bound
from experiments.figures import azure_replay
from experiments.figures.study import run_rows
from experiments.simulator import Case, Cluster, HostedModel, copies_of
from modelzoo.profile import Noise, load_profile
from traces.arrivals import ClosedLoop, Poisson, TraceReplay, Workload

ARCHITECTURE = "resnet50_v1b"
#: As in Figure 5.
NOISE = Noise(exec_sigma=0.003, load_sigma=0.003)
#: Of the latency-sensitive requests of Figure 7.
BASE_SLO_NS = 2_900_000

_BATCH_SLO_NS = 3600 * NS_PER_S
_MINUTE_NS = 60 * NS_PER_S
# Counts of a replay are whole numbers; scaled by this, the rare models keep their rates.
_COUNT_SCALE = 0.01
# The memory bound takes seconds for some thousand requests; longer runs go by windows.
_BOUND_WINDOW_NS = 4 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, not yet drawn."""

    name: str
    #: Of the table: which of the paper's figures, or which of our own cases.
    group: str
    case: Callable[[int], Case]
    begin_ns: int
    #: `density` (B1), `memory` (B3), `rate` (closed loops), or empty: none is known.
    bound: str = "density"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of the requests that arrived in the measured time."""

    arrived: int
    answered: int
    #: Answers that were late; the requests count as refused.
    late: int
    #: Likewise at most, by the scenario's bound; -1: none.
    bound: int
    cold: int
    seconds: float
    #: Share of the model's requests that was answered, of the 5th-percentile model and the worst.
    p5_model_share: float
    worst_model_share: float
    p50_ms: float
    #: Of batch clients, per second.
    batch_rps: float
    exec_busy: float
    mean_batch_size: float

    @property
    def share(self) -> float:
        """Goodput as a part of what was asked."""
        return self.answered / self.arrived if self.arrived else 1.0

    @property
    def bound_share(self) -> float:
        """Goodput as a part of the bound."""
        return self.answered / self.bound

    @property
    def goodput_rps(self) -> float:
        """Answers in time per second."""
        return self.answered / self.seconds


# --- workloads ------------------------------------------------------------------------------------


def zoo(count: int, seed: int) -> tuple[HostedModel, ...]:
    """Models of Table 1, drawn with replacement."""
    rows = list(load_profile("table1").rows.values())
    picks = np.random.default_rng(seed).integers(len(rows), size=count)
    return tuple(HostedModel(ModelId(f"m{i}"), rows[pick]) for i, pick in enumerate(picks))


def resnets(count: int) -> tuple[HostedModel, ...]:
    """Copies of the paper's ResNet50."""
    return copies_of(load_profile("table1").row_for(ARCHITECTURE), count)


def poisson(
    models: tuple[HostedModel, ...],
    seed: int,
    *,
    num_gpus: int,
    rate_rps: float,
    slo_ns: int,
    duration_ns: int,
) -> Case:
    """Equally popular models, asked at random."""
    source = Poisson(
        models=range(len(models)), rate_rps=rate_rps, slo_ns=slo_ns, end_ns=duration_ns, seed=seed
    )
    return Case(
        workload=Workload(models=tuple(m.model_id for m in models), sources=(source,)),
        cluster=Cluster(models=models, num_workers=num_gpus, noise=NOISE),
        duration_ns=duration_ns,
        seed=seed,
    )


def pressed(
    models: tuple[HostedModel, ...],
    seed: int,
    *,
    zipf: float,
    num_gpus: int,
    num_pages: int,
    rate_rps: float,
    slo_ns: int,
    duration_ns: int,
) -> Case:
    """More models than memory holds, with Zipf popularity, dealt out at random."""
    popularity = 1.0 / np.arange(1, len(models) + 1) ** zipf
    popularity /= popularity.sum()
    popularity = np.random.default_rng(seed + 100).permutation(popularity)
    per_minute = np.rint(popularity * rate_rps * 60 / _COUNT_SCALE).astype(np.int32)
    source = TraceReplay(
        counts=np.repeat(per_minute[:, None], -(-duration_ns // _MINUTE_NS), axis=1),
        models=np.arange(len(models)),
        slo_ns=slo_ns,
        seed=seed,
        scale=_COUNT_SCALE,
    )
    return Case(
        workload=Workload(models=tuple(m.model_id for m in models), sources=(source,)),
        cluster=Cluster(models=models, num_workers=num_gpus, num_pages=num_pages, noise=NOISE),
        duration_ns=duration_ns,
        seed=seed,
    )


def closed(seed: int, *, slo_ms: int, duration_ns: int) -> Case:
    """Figure 5: 15 models on one GPU, 16 clients each."""
    models = resnets(15)
    loops = tuple(
        ClosedLoop(model=i, concurrency=16, slo_ns=slo_ms * NS_PER_MS, end_ns=duration_ns)
        for i in range(len(models))
    )
    return Case(
        workload=Workload(models=tuple(m.model_id for m in models), closed_loops=loops),
        cluster=Cluster(models=models, noise=NOISE),
        duration_ns=duration_ns,
        seed=seed,
    )


def shared(seed: int, *, multiple: float, duration_ns: int) -> Case:
    """Figure 7, right: 6 models at 200 r/s each, beside 12 with 16 batch clients each, on 6 GPUs."""
    models = resnets(18)
    source = Poisson(
        models=range(6),
        rate_rps=1200,
        slo_ns=round(BASE_SLO_NS * multiple),
        end_ns=duration_ns,
        seed=seed,
    )
    loops = tuple(
        ClosedLoop(model=i, concurrency=16, slo_ns=_BATCH_SLO_NS, end_ns=duration_ns)
        for i in range(6, 18)
    )
    return Case(
        workload=Workload(
            models=tuple(m.model_id for m in models), sources=(source,), closed_loops=loops
        ),
        cluster=Cluster(models=models, num_workers=6, noise=NOISE),
        duration_ns=duration_ns,
        seed=seed,
    )


def azure(seed: int, *, scale: float, duration_ns: int) -> Case:
    """The paper's Azure replay from the calibrated generator, at a multiple of its rate."""
    setting = azure_replay.Setting(
        rate_rps=scale * azure_replay.Setting().rate_rps, num_minutes=10, noise=NOISE, seed=seed
    )
    case = azure_replay.case_of(setting, azure_replay.generated(setting), SchedulerConfig())
    return replace(case, duration_ns=duration_ns)


# --- scenarios ------------------------------------------------------------------------------------


def _overload(name: str, num_models: int, rate_rps: int, slo_ms: int) -> Scenario:
    return Scenario(
        f"{name}_r{rate_rps}_slo{slo_ms}",
        "overload",
        lambda seed: poisson(
            zoo(num_models, 7) if name == "zoo48" else resnets(num_models),
            seed,
            num_gpus=6,
            rate_rps=rate_rps,
            slo_ns=slo_ms * NS_PER_MS,
            duration_ns=6 * NS_PER_S,
        ),
        3 * NS_PER_S,
    )


def _left(num_models: int, rate_rps: int, step: int) -> Scenario:
    return Scenario(
        f"n{num_models}_r{rate_rps}_x{1.5**step:.3g}",
        "fig7_left",
        lambda seed: poisson(
            resnets(num_models),
            seed,
            num_gpus=6,
            rate_rps=rate_rps,
            slo_ns=round(BASE_SLO_NS * 1.5**step),
            duration_ns=6 * NS_PER_S,
        ),
        2 * NS_PER_S,
    )


def _pressed(
    name: str, count: int, zipf: float, gpus: int, rate_rps: int, slo_ms: int, seconds: int
) -> Scenario:
    return Scenario(
        f"{name}_slo{slo_ms}",
        "zoo",
        lambda seed: pressed(
            zoo(count, seed),
            seed,
            zipf=zipf,
            num_gpus=gpus,
            num_pages=1000,
            rate_rps=rate_rps,
            slo_ns=slo_ms * NS_PER_MS,
            duration_ns=(4 + seconds) * NS_PER_S,
        ),
        4 * NS_PER_S,
        bound="memory",
    )


def _closed(slo_ms: int) -> Scenario:
    return Scenario(
        f"slo{slo_ms}",
        "fig5",
        lambda seed: closed(seed, slo_ms=slo_ms, duration_ns=5 * NS_PER_S),
        2 * NS_PER_S,
        bound="rate",
    )


def _shared(step: int) -> Scenario:
    return Scenario(
        f"m12c16_x{1.5**step:.3g}",
        "fig7_right",
        lambda seed: shared(seed, multiple=1.5**step, duration_ns=8 * NS_PER_S),
        2 * NS_PER_S,
    )


def _azure(scale: float) -> Scenario:
    return Scenario(
        f"scale{scale:g}",
        "azure",
        lambda seed: azure(seed, scale=scale, duration_ns=30 * NS_PER_S),
        15 * NS_PER_S,
    )


def scenarios() -> list[Scenario]:
    """All that policies are compared on."""
    return [
        *(_closed(slo_ms) for slo_ms in (10, 25, 100)),
        Scenario(
            "end",
            "fig6",
            lambda seed: pressed(
                resnets(3600),
                seed,
                zipf=0.0,
                num_gpus=1,
                num_pages=1937,  # 31 GB
                rate_rps=1000,
                slo_ns=100 * NS_PER_MS,
                duration_ns=10 * NS_PER_S,
            ),
            4 * NS_PER_S,
            bound="",
        ),
        *(_left(12, rate, step) for rate, step in ((600, 1), (1200, 2))),
        *(_left(12, 2400, step) for step in (2, 3, 4, 5)),
        *(_left(48, rate, step) for rate, step in ((1200, 2), (2400, 4))),
        *(_shared(step) for step in (3, 6)),
        *(_overload("n48", 48, rate, 25) for rate in (4288, 5514, 9190)),
        *(_overload("n196", 196, rate, 50) for rate in (5514, 9190)),
        *(_overload("n12", 12, rate, 25) for rate in (5514,)),
        _overload("zoo48", 48, 3000, 50),
        _pressed("zoo600", 600, 0.8, 1, 600, 100, 8),
        _pressed("zoo600", 600, 0.8, 1, 600, 25, 8),
        _pressed("zoo1500", 1500, 1.1, 2, 2000, 100, 4),
        *(_azure(scale) for scale in (1.0, 1.5, 2.0)),
    ]


# --- running --------------------------------------------------------------------------------------


def measure(
    scenario: Scenario, scheduler: SchedulerConfig, seed: int, *, bound: int = -1
) -> Outcome:
    """Simulate one policy under one scenario; `bound` is passed on."""
    case = replace(scenario.case(seed), scheduler=scheduler)
    begin_ns, end_ns = scenario.begin_ns, case.duration_ns
    arrived: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    latencies: list[int] = []

    def take(requests: Sequence[RequestRow], actions: Sequence[ActionRow]) -> None:
        # A closed loop's bound knows nothing of time spent before counting begins.
        early = {
            row.action_id
            for row in actions
            if scenario.bound == "rate" and row.exec is not None and row.exec.begin_ns < begin_ns
        }
        for row in requests:
            if row.slo_ns == _BATCH_SLO_NS:
                if begin_ns <= row.departure_ns < end_ns and row.outcome == OK:
                    outcomes["batch"] += 1
                continue
            if row.arrival_ns < begin_ns or (
                scenario.bound == "rate" and row.departure_ns >= end_ns
            ):
                continue
            arrived[row.model_id] += 1
            if row.outcome != OK:
                outcomes[row.outcome] += 1
            elif row.action_id not in early:
                answered[row.model_id] += 1
                outcomes["cold"] += row.cold
                latencies.append(row.departure_ns - row.arrival_ns)

    result = run_rows(case, take)
    total = result.summary.total(begin_ns, end_ns)
    shares = [answered[model_id] / number for model_id, number in arrived.items()]
    seconds = (end_ns - begin_ns) / NS_PER_S
    return Outcome(
        arrived=arrived.total(),
        answered=answered.total(),
        late=outcomes["LATE"],
        bound=bound,
        cold=outcomes["cold"],
        seconds=seconds,
        p5_model_share=float(np.percentile(shares, 5)),
        worst_model_share=min(shares),
        p50_ms=float(np.median(latencies)) / NS_PER_MS if latencies else 0.0,
        batch_rps=outcomes["batch"] / seconds,
        exec_busy=result.summary.utilisation(total.exec_ns, begin_ns, end_ns),
        mean_batch_size=total.mean_batch_size,
    )


def bound_of(scenario: Scenario, seed: int) -> int:
    """Requests of the measured time that any policy could answer in time; -1 where no bound is known."""
    if not scenario.bound:
        return -1
    case = scenario.case(seed)
    begin_ns, end_ns = scenario.begin_ns, case.duration_ns
    hosted = {model.model_id: model for model in case.cluster.models}
    models = [hosted[ModelId(name)] for name in case.workload.models]
    if scenario.bound == "rate":
        costs = [Cost(models[loop.model].row.exec_ns) for loop in case.workload.closed_loops]
        slo_ns = max(loop.slo_ns for loop in case.workload.closed_loops)
        rate_rps = density_rate(costs, slo_ns=slo_ns, num_gpus=case.cluster.num_workers)
        return int(rate_rps * (end_ns - begin_ns) / NS_PER_S)
    parts = []
    for arrivals in case.workload.arrivals():
        if arrivals.time_ns[0] >= end_ns:
            break
        inside = (arrivals.time_ns >= begin_ns) & (arrivals.time_ns < end_ns)
        parts.append([column[inside] for column in arrivals])
    time_ns, model, slos_ns = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    load = BoundCase(
        arrival_ns=time_ns,
        model=model,
        slo_ns=slos_ns,
        costs=[Cost(m.row.exec_ns, m.row.load_ns, m.num_pages) for m in models],
        num_gpus=case.cluster.num_workers,
        pages_per_gpu=case.cluster.num_pages,
        start_ns=begin_ns,
        warm=True,
        # The policies compared send no batch that is not full.
        padding=False,
    )
    if scenario.bound == "density":
        return density_bound(load)
    windows = range(begin_ns, end_ns, _BOUND_WINDOW_NS)
    return sum(memory_bound(load.window(at, at + _BOUND_WINDOW_NS)) for at in windows)
