"""The most that any policy could answer of a family's case."""

from __future__ import annotations

import numpy as np

from clockwright.units import NS_PER_S, ModelId
from experiments.bounds import BoundProblem, Cost, density_bound, density_rate, memory_bound
from experiments.simulator import Case
from experiments.simulator.case import pages_of
from experiments.unseen.family import Family

# The memory bound takes seconds for some thousand requests, so longer runs are bounded by windows.
_WINDOW_NS = 2 * NS_PER_S


def bound_of(family: Family, seed: int) -> int:
    """Requests of the measured time that any policy could answer in time; -1 where no bound is known."""
    if not family.bound:
        return -1
    case = family.case(seed)
    if family.bound == "rate":
        return _rate_bound(case, family.begin_ns)
    problem = problem_of(case, family.begin_ns)
    if family.bound == "density":
        return density_bound(problem)
    windows = range(family.begin_ns, case.duration_ns, _WINDOW_NS)
    return sum(memory_bound(problem.window(at, at + _WINDOW_NS)) for at in windows)


def problem_of(case: Case, begin_ns: int) -> BoundProblem:
    """The open-loop requests of a case from a time on, on the fastest kind of its GPUs."""
    cluster = case.cluster
    hosted = {model.model_id: model for model in cluster.models}
    models = [hosted[ModelId(name)] for name in case.workload.models]
    rows = [cluster.least_row(model) for model in models]
    parts = [
        [column[inside] for column in arrivals]
        for arrivals in case.workload.arrivals()
        if np.any(inside := (arrivals.time_ns >= begin_ns) & (arrivals.time_ns < case.duration_ns))
    ]
    time_ns, model, slo_ns, _ = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return BoundProblem(
        arrival_ns=time_ns,
        model=model,
        slo_ns=slo_ns,
        costs=[Cost(row.exec_ns, row.load_ns, pages_of(row)) for row in rows],
        num_gpus=cluster.num_workers,
        pages_per_gpu=max(map(cluster.pages_of_worker, range(cluster.num_workers))),
        start_ns=begin_ns,
        warm=begin_ns > 0,
    )


def _rate_bound(case: Case, begin_ns: int) -> int:
    """All that arrives in the measured time is run in it, or within the longest SLO after it."""
    rows = [model.row for model in case.cluster.models]
    slos_ns = [loop.slo_ns for loop in case.workload.closed_loops]
    slo_ns = max(slos_ns + [source.slo_ns for source in case.workload.sources])
    rate_rps = density_rate(
        [Cost(row.exec_ns) for row in rows], slo_ns=slo_ns, num_gpus=case.cluster.num_workers
    )
    return int(rate_rps * (case.duration_ns + slo_ns - begin_ns) / NS_PER_S)
