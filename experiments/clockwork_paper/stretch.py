"""The requests of stretches of a run, as bounds ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from clockwright.units import ModelId
from experiments.bounds import BoundProblem, Cost
from experiments.simulator import Case


def problems(case: Case, stretches: Iterable[tuple[int, int]]) -> Iterator[BoundProblem]:
    """Give the open-loop requests of each stretch, as if they had the GPUs for themselves.

    Durations are those of the profile, without noise, and links take no time.

    Args:
        case: the run, whose workers are of one kind.
        stretches: begin and end of each, one after the other, ns.
    """
    cost_of = {
        model.model_id: Cost(model.row.exec_ns, model.row.load_ns, model.num_pages)
        for model in case.cluster.models
    }
    costs = [cost_of[ModelId(name)] for name in case.workload.models]
    chunks = case.workload.arrivals()
    chunk = next(chunks, None)
    for begin_ns, end_ns in stretches:
        parts = []
        while chunk is not None and chunk.time_ns[0] < end_ns:
            first, last = np.searchsorted(chunk.time_ns, (begin_ns, end_ns))
            parts.append([column[first:last] for column in chunk])
            if last < len(chunk.time_ns):  # The rest belongs to later stretches.
                break
            chunk = next(chunks, None)
        columns = zip(*parts, strict=True) if parts else [[np.empty(0, np.int64)]] * 4
        time_ns, model, slo_ns, _ = (np.concatenate(column) for column in columns)
        yield BoundProblem(
            arrival_ns=time_ns,
            model=model,
            slo_ns=slo_ns,
            costs=costs,
            num_gpus=case.cluster.num_workers,
            pages_per_gpu=case.cluster.num_pages,
            start_ns=begin_ns,
            warm=begin_ns > 0,
        )
