"""What it costs to refuse at once instead of late: the most that any policy answers, and what `edf_mh` does.

Copies of ResNet50 are asked for alike, by Poisson arrivals, for more than their GPUs can do. B7 says what a policy
that cannot foresee arrivals answers at most, and what it does if half of its refusals, and with them the median one,
leave within a tenth of the SLO. For 15 models it has too many states to be computed. Beside it stands `edf_mh` with
its gate open, as by default, and with the gate closing as `--at-once 0.62` has it.

With 600 models at 3,300 r/s, `edf_mh` answers more than any policy could that refuses half at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import EdfMhConfig, SchedulerConfig
from controller.telemetry import OK, ActionRow, RequestRow
from experiments.bounds import AlikeCase, Cost, at_once_bound
from experiments.bounds.at_once import AT_ONCE
from experiments.results_file import RESULTS, write_results
from experiments.simulator import Case, Cluster, copies_of
from experiments.study.report import write_csv
from experiments.study.study import run_rows
from modelzoo.profile import load_profile
from traces.arrivals import Poisson, Workload

#: Models, GPUs, and the rates asked, r/s.
LOADS = ((15, 1, (1050, 1500, 2000)), (600, 4, (2200, 2750, 3300)))
SEEDS = (1, 2, 3)
#: The gate open, and as it is set where most refusals are to leave at once.
GATES = (0.0, 0.62)
_SLO_NS = 100 * NS_PER_MS
# Caches are warm after this; then so long is measured.
_WARM_NS, _MEASURED_NS = 3 * NS_PER_S, 4 * NS_PER_S

# With more models than this, seldom more than four requests wait for one.
_BOUND_FROM = 500
_SLOT_NS = 5 * NS_PER_MS
_ROW = load_profile("table1").row_for("resnet50_v1b")


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
    end_ns = _WARM_NS + _MEASURED_NS
    everyone = (*range(num_models),)
    source = Poisson(models=everyone, rate_rps=rate_rps, slo_ns=_SLO_NS, end_ns=end_ns, seed=seed)
    case = Case(
        workload=Workload(models=tuple(m.model_id for m in models), sources=(source,)),
        cluster=Cluster(
            models=models,
            num_workers=num_gpus,
            num_pages=sum(model.num_pages for model in models),
        ),
        scheduler=SchedulerConfig(policy="edf_mh", edf_mh=EdfMhConfig(at_once=gate)),
        duration_ns=end_ns,
        seed=seed,
    )
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

    run_rows(case, take)
    return answered / asked, early / max(asked - answered, 1)


def produce(directory: Path = RESULTS) -> None:
    """Write `at_once.csv` and `at_once.json`."""
    figures: dict[str, float] = {}
    lines = []
    loads = [(models, gpus, rate) for models, gpus, rates in LOADS for rate in rates]
    with ProcessPoolExecutor() as pool:
        measured = {
            (load, gate): [pool.submit(measure, *load, gate, seed) for seed in SEEDS]
            for load, gate in product(loads, GATES)
        }
        bounds = {
            (load, part): pool.submit(bound, *load, part)
            for load, part in product(loads, (0.0, 0.5))
            if load[0] >= _BOUND_FROM
        }
        for load in loads:
            key = "models{}_gpus{}_rps{}".format(*load)
            row: list[float | str] = [*load]
            for part, name in ((0.0, "bound"), (0.5, "bound_half_at_once")):
                if (load, part) in bounds:
                    figures[f"{key}_{name}"] = bounds[load, part].result()
                row.append(figures.get(f"{key}_{name}", ""))
            for gate, name in zip(GATES, ("open", "gate"), strict=True):
                pairs = [future.result() for future in measured[load, gate]]
                figures[f"{key}_{name}_answered"] = mean(answered for answered, _ in pairs)
                figures[f"{key}_{name}_at_once"] = mean(early for _, early in pairs)
                row += [figures[f"{key}_{name}_{what}"] for what in ("answered", "at_once")]
            lines.append(row)
            print(*row, flush=True)
    columns = ["models", "gpus", "rate_rps", "bound", "bound_half_at_once"]
    columns += ["open_answered", "open_at_once", "gate_answered", "gate_at_once"]
    write_csv(directory / "at_once.csv", columns, lines)
    command = "python -m experiments at_once"
    write_results("at_once", figures, command=command, seeds=SEEDS, directory=directory)


if __name__ == "__main__":
    produce()
