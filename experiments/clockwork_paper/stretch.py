"""The bound for a stretch of the Azure replay, or of any open-loop workload."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clockwright.units import ModelId
from experiments.bounds import BoundProblem, Cost, density_bound
from experiments.simulator import Case


def stretch_bound(case: Case, begin_ns: int, end_ns: int) -> tuple[int, int]:
    """Bound the answers to the requests that arrive in a stretch of a run.

    Args:
        case: the run; open loop.
        begin_ns: begin of the stretch.
        end_ns: end of the stretch.

    Returns:
        Requests that could be answered in time at most, by GPU time alone (B1), with the GPUs for
        themselves; and requests that arrive.
    """
    columns: tuple[list[NDArray[np.int64]], ...] = ([], [], [], [])
    for arrivals in case.workload.arrivals():
        if arrivals.time_ns[0] >= end_ns:
            break
        first, last = np.searchsorted(arrivals.time_ns, [begin_ns, end_ns])
        for column, values in zip(columns, arrivals, strict=True):
            column.append(values[first:last])
    time_ns, model, slo_ns, _ = (np.concatenate(column) for column in columns)
    hosted = {model.model_id: model.row for model in case.cluster.models}
    bound = density_bound(
        BoundProblem(
            arrival_ns=time_ns,
            model=model,
            slo_ns=slo_ns,
            costs=[Cost(hosted[ModelId(name)].exec_ns) for name in case.workload.models],
            num_gpus=case.cluster.num_workers,
            start_ns=begin_ns,
            # A batch may hold requests from before or after the stretch.
            padding=True,
        )
    )
    return bound, len(time_ns)
