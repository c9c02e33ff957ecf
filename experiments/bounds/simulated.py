"""The input of a bound for a simulated case."""

from __future__ import annotations

import numpy as np

from clockwright.units import NS_PER_S, ModelId
from experiments.bounds.case import BoundProblem, Cost
from experiments.bounds.density import density_rate
from experiments.bounds.noise import work_ns
from experiments.simulator import Case
from experiments.simulator.case import pages_of
from modelzoo.profile import ProfileRow


def problem_of(case: Case, begin_ns: int = 0, *, padding: bool = True) -> BoundProblem:
    """The open-loop requests of a case, on so many GPUs of its fastest kind.

    Args:
        case: a run; faults that make it slower are left out.
        begin_ns: requests before this are not counted, and leave any models resident.
        padding: as for `BoundProblem`.
    """
    parts = [
        [column[inside] for column in arrivals]
        for arrivals in case.workload.arrivals()
        for inside in ((arrivals.time_ns >= begin_ns) & (arrivals.time_ns < case.duration_ns),)
    ]
    columns = zip(*parts, strict=True) if parts else [[np.empty(0, np.int64)]] * 4
    time_ns, model, slo_ns, _ = (np.concatenate(column) for column in columns)
    cluster = case.cluster
    hosted = {model.model_id: cluster.least_row(model) for model in cluster.models}
    rows = [hosted[ModelId(name)] for name in case.workload.models]
    factor = _least_factor(case)
    return BoundProblem(
        arrival_ns=time_ns,
        model=model,
        slo_ns=slo_ns,
        costs=[Cost(_times(row, factor), row.load_ns, pages_of(row)) for row in rows],
        num_gpus=cluster.num_workers,
        pages_per_gpu=max(map(cluster.pages_of_worker, range(cluster.num_workers))),
        start_ns=begin_ns,
        warm=begin_ns > 0,
        padding=padding,
        exec_sigma=cluster.noise.exec_sigma,
        load_sigma=cluster.noise.load_sigma,
    )


def rate_bound(case: Case, begin_ns: int = 0) -> int:
    """Answers in time to what is asked in the measured time, of closed loops and all others together.

    All of it is run in that time, or within the longest SLO after it.
    """
    cluster = case.cluster
    factor = _least_factor(case)
    asked = {case.workload.models[loop.model] for loop in case.workload.closed_loops}
    for source in case.workload.sources:
        asked.update(case.workload.models[model] for model in source.models)
    rows = [cluster.least_row(model) for model in cluster.models if model.model_id in asked]
    slos_ns = [loop.slo_ns for loop in case.workload.closed_loops]
    slo_ns = max(slos_ns + [source.slo_ns for source in case.workload.sources])
    costs = [Cost(_times(row, factor)) for row in rows]
    rate_rps = density_rate(costs, slo_ns=slo_ns)
    gpu_ns = work_ns(
        cluster.num_workers * (case.duration_ns + slo_ns - begin_ns),
        cluster.noise.exec_sigma,
        max(max(cost.exec_ns.values()) for cost in costs),
        num_gpus=cluster.num_workers,
        number=round(rate_rps * cluster.num_workers * case.duration_ns / NS_PER_S),
    )
    return int(rate_rps * gpu_ns / NS_PER_S)


def _least_factor(case: Case) -> float:
    """EXECs that a fault shortens take so much of what the rows say."""
    faults = case.faults
    return min(1.0, faults.slow_factor) if faults.slow_probability else 1.0


def _times(row: ProfileRow, factor: float) -> dict[int, int]:
    return {size: max(1, int(ns * factor)) for size, ns in row.exec_ns.items()}
