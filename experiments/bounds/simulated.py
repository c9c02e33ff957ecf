"""The input of a bound for a simulated case."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clockwright.units import NS_PER_S, ModelId
from experiments.bounds.case import BoundProblem, Cost, Wires
from experiments.bounds.density import density_bound, density_rate
from experiments.bounds.linear import memory_bound
from experiments.bounds.noise import work_ns
from experiments.bounds.residency import residency_bound
from experiments.simulator import Case
from experiments.simulator.case import pages_of
from modelzoo.profile import ProfileRow

# What takes seconds; more takes minutes, or more memory than there is.
_MOST_REQUESTS = 300_000
_MOST_WITH_MEMORY = 3_000


@dataclass(frozen=True, slots=True)
class Bounded:
    """The most requests of a case that any policy could answer in time."""

    #: None: none is known, or it would take too long.
    answers: int | None
    #: What the bound counts, or why it is missing.
    words: str


def bound_of_case(case: Case) -> Bounded:
    """The closest bound that takes seconds."""
    loops = case.workload.closed_loops
    if loops and max(loop.slo_ns for loop in loops) > case.duration_ns:
        return Bounded(None, "clients wait longer for an answer than the run lasts")
    if loops:
        return Bounded(rate_bound(case), "GPU time, in the densest batches")
    if case.workload.expected_requests(0, case.duration_ns) > _MOST_REQUESTS:
        return Bounded(None, f"more than {_MOST_REQUESTS:,} requests")
    problem = problem_of(case)
    num_pages = sum(cost.num_pages for cost, _ in problem.by_model())
    if num_pages <= problem.pages_per_gpu:
        return Bounded(density_bound(problem), "GPU time")
    if len(problem) > _MOST_WITH_MEMORY:
        words = f"GPU time; pages and loads count in runs of up to {_MOST_WITH_MEMORY:,} requests"
        return Bounded(density_bound(problem), words)
    return Bounded(memory_bound(problem), "GPU time, pages and loads")


def bound_of(
    case: Case, kind: str, begin_ns: int, *, padding: bool = True, window_ns: int = NS_PER_S * 2
) -> int:
    """Requests of the measured time that any policy could answer in time; -1 where no bound is known.

    Args:
        case: a run.
        kind: `density` (B1), `memory` (B3), `residency` (B6), `rate` (closed loops), or empty: none is known.
        begin_ns: when the measured time begins.
        padding: as for `BoundProblem`.
        window_ns: the memory bound takes seconds for some thousand requests, so longer runs are bounded by
            windows of this length.
    """
    if not kind:
        return -1
    if kind == "rate":
        return rate_bound(case, begin_ns)
    problem = problem_of(case, begin_ns, padding=padding)
    if kind == "density":
        return density_bound(problem)
    if kind == "residency":
        return residency_bound(problem)
    windows = range(begin_ns, case.duration_ns, window_ns)
    return sum(memory_bound(problem.window(at, at + window_ns)) for at in windows)


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
        # As if all clocks of workers went after the controller's by the shortest way out.
        slo_ns=np.maximum(slo_ns - _least_round_trip_ns(case), 1),
        costs=[Cost(_times(row, factor), row.load_ns, pages_of(row)) for row in rows],
        num_gpus=cluster.num_workers,
        pages_per_gpu=max(map(cluster.pages_of_worker, range(cluster.num_workers))),
        start_ns=begin_ns,
        warm=begin_ns > 0,
        padding=padding,
        exec_sigma=cluster.noise.exec_sigma,
        load_sigma=cluster.noise.load_sigma,
        wires=_wires(case, rows),
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


def _least_round_trip_ns(case: Case) -> int:
    """What the shortest ways out and back take of every SLO."""
    links = [case.network.of(worker) for worker in range(case.cluster.num_workers)]
    return min(
        link.delay_ns_of(up=False) + min(link.down_samples_ns, default=0) for link in links
    ) + min(link.delay_ns_of(up=True) + min(link.up_samples_ns, default=0) for link in links)


def _wires(case: Case, rows: list[ProfileRow]) -> list[Wires]:
    """All links together, each way on which bytes take time everywhere."""
    links = [case.network.of(worker) for worker in range(case.cluster.num_workers)]
    wires = []
    for up in (False, True):
        speeds = [speed for link in links if (speed := link.bytes_per_s_of(up=up))]
        if len(speeds) == len(links):
            request_bytes = [row.output_bytes if up else row.input_bytes for row in rows]
            wires.append(Wires(sum(speeds), request_bytes))
    return wires


def _least_factor(case: Case) -> float:
    """EXECs that a fault shortens take so much of what the rows say."""
    faults = case.faults
    return min(1.0, faults.slow_factor) if faults.slow_probability else 1.0


def _times(row: ProfileRow, factor: float) -> dict[int, int]:
    return {size: max(1, int(ns * factor)) for size, ns in row.exec_ns.items()}
