"""What it costs to refuse at once instead of late: the most that any policy answers, and what `edf_mh` does.

Copies of ResNet50 are asked for alike, by Poisson arrivals, for more than their GPUs can do. B7 says what a policy
that cannot foresee arrivals answers at most, and what it does if half of its refusals, and with them the median one,
leave within a tenth of the SLO. For 15 models it has too many states to be computed. Beside it stands `edf_mh` with
its gate open, as by default, and with the gate closing as `--at-once 0.62` has it.

With 600 models at 3,300 r/s, `edf_mh` answers more than any policy could that refuses half at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import Annotated

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import EdfMhConfig, SchedulerConfig
from controller.telemetry import OK, ActionRow, RequestRow
from experiments.bounds import AlikeCase, Cost, at_once_bound
from experiments.bounds.at_once import AT_ONCE
from experiments.clockwork_paper.cases import poisson
from experiments.simulator import copies_of
from experiments.study.compared import run_rows
from experiments.study.study import Column, Study
from modelzoo.profile import Noise, load_profile

#: The gate open, and as it is set where most refusals are to leave at once.
GATES = (0.0, 0.62)
_SLO_NS = 100 * NS_PER_MS
# Caches are warm after this; then so long is measured.
_WARM_NS, _MEASURED_NS = 3 * NS_PER_S, 4 * NS_PER_S

# With more models than this, seldom more than four requests wait for one.
_BOUND_FROM = 500
_SLOT_NS = 5 * NS_PER_MS
_ROW = load_profile("table1").row_for("resnet50_v1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is simulated."""

    #: Models, GPUs, and the rates asked, r/s.
    loads: tuple[tuple[int, int, tuple[int, ...]], ...] = (
        (15, 1, (1050, 1500, 2000)),
        (600, 4, (2200, 2750, 3300)),
    )
    seeds: tuple[int, ...] = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class GatePoint:
    """One load: the shares that are answered, and the parts of all refusals that leave at once."""

    models: int
    gpus: int
    rate_rps: int
    #: The most that any policy answers; None: not computed.
    bound: Annotated[float | None, Column()]
    bound_half_at_once: Annotated[float | None, Column()]
    open_answered: float
    open_at_once: float
    gate_answered: float
    gate_at_once: float


def bound(num_models: int, num_gpus: int, rate_rps: float, part: float) -> float:
    """The share answered at most where so much of all that is refused is refused at once."""
    case = AlikeCase(
        cost=Cost(_ROW.exec_ns),
        num_models=num_models,
        num_gpus=num_gpus,
        rate_rps=rate_rps,
        slo_ns=_SLO_NS,
    )
    return at_once_bound(case, part, slot_ns=_SLOT_NS)


def measure(
    num_models: int, num_gpus: int, rate_rps: float, gate: float, seed: int
) -> tuple[float, float]:
    """The share that `edf_mh` answers, and which part of its refusals leaves at once."""
    models = copies_of(_ROW, num_models)
    case = poisson(
        models,
        seed,
        num_gpus=num_gpus,
        rate_rps=rate_rps,
        slo_ns=_SLO_NS,
        duration_ns=_WARM_NS + _MEASURED_NS,
        num_pages=sum(model.num_pages for model in models),
        noise=Noise(),
    )
    config = SchedulerConfig(policy="edf_mh", edf_mh=EdfMhConfig(at_once=gate))
    asked = answered = early = 0

    def take(requests: Sequence[RequestRow], _actions: Sequence[ActionRow]) -> None:
        nonlocal asked, answered, early
        for row in requests:
            if row.arrival_ns >= _WARM_NS:
                asked += 1
                answered += row.outcome == OK
                early += (
                    row.outcome != OK and row.departure_ns - row.arrival_ns <= AT_ONCE * _SLO_NS
                )

    run_rows(replace(case, scheduler=config), take)
    return answered / asked, early / max(asked - answered, 1)


def measure_all(setting: Setting) -> Iterator[GatePoint]:
    """Measure every load with the gate open and as it is set, beside the bounds."""
    loads = [(models, gpus, rate) for models, gpus, rates in setting.loads for rate in rates]
    with ProcessPoolExecutor() as pool:
        measured = {
            (load, gate): [pool.submit(measure, *load, gate, seed) for seed in setting.seeds]
            for load, gate in product(loads, GATES)
        }
        bounds = {
            (load, part): pool.submit(bound, *load, part)
            for load, part in product(loads, (0.0, 0.5))
            if load[0] >= _BOUND_FROM
        }
        for load in loads:
            models, gpus, rate_rps = load
            most, half = (
                bounds[load, part].result() if (load, part) in bounds else None
                for part in (0.0, 0.5)
            )
            shares = (
                mean(of_seeds)
                for gate in GATES
                for of_seeds in zip(*(done.result() for done in measured[load, gate]), strict=True)
            )
            yield GatePoint(models, gpus, rate_rps, most, half, *shares)


STUDY = Study(
    name="at_once",
    setting=Setting(),
    ask=measure_all,
    key="models{models}_gpus{gpus}_rps{rate_rps}",
)
