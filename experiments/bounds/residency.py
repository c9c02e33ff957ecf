"""B6: an answer needs weights that were kept since the request before, or a LOAD; there is only so much of either.

A request is answered from weights that lay in their pages from the latest begin of the model's request before
until it arrived, or from a LOAD that ended later than that. No LOAD counts for two requests in this way, since
the stretches between latest begins are disjoint. Keeping takes pages for the whole stretch, and all pages of all
GPUs hold so many bytes for so long; LOADs take the load lanes' time. So

    answers <= most requests that could be kept while so many LOADs run + these LOADs,

each of the two filled with the cheapest first. A LOAD takes its pages while it runs, when nothing is kept in them, and
so does the last EXEC from what it loaded: whatever is kept there for a request is kept until that arrives. And
models whose weights all are a multiple of so many pages leave the rest of a GPU empty. It is the memory bound
(linear.py) without its intervals, at the cost of a sort, so that it holds for a whole run. There is nothing to be gained by cutting the run into windows,
each of which may begin with anything resident: where models are asked once in each window, that is a gift.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from experiments.bounds.case import BoundProblem
from experiments.bounds.density import density_bound


def residency_bound(case: BoundProblem) -> int:
    """Requests that any policy could answer in time at most, by pages times time and load lanes (B6).

    Holds for every policy, clairvoyant ones that load ahead of the arrivals too, if a model's weights
    are in `num_pages` pages of a GPU from the begin of their LOAD to their eviction, an EXEC begins
    only once its weights are there, and each GPU runs one LOAD at a time.
    """
    if not len(case):
        return 0
    kept: list[NDArray[np.float64]] = []
    from_start: list[tuple[float, int]] = []
    loads: list[NDArray[np.float64]] = []
    load_pages: list[NDArray[np.float64]] = []
    for cost, places in case.by_model():
        if cost.num_pages > case.pages_per_gpu:
            continue
        reach_ns = np.maximum.accumulate(case.latest_ns[places])
        arrival_ns = case.arrival_ns[places]
        kept.append(cost.num_pages * np.maximum(arrival_ns[1:] - reach_ns[:-1], 0.0))
        from_start.append((float(cost.num_pages * (arrival_ns[0] - case.start_ns)), cost.num_pages))
        loads.append(np.full(len(places), float(cost.load_ns)))
        exec_ns = case.deadline_ns[places] - case.latest_ns[places]
        taken_ns = np.asarray(cost.load_ns + exec_ns, dtype=np.float64)
        load_pages.append(cost.num_pages * taken_ns)
    multiple = math.gcd(*(cost.num_pages for cost in case.costs)) or 1
    num_pages = case.num_gpus * (case.pages_per_gpu // multiple * multiple)
    half_done_ns = spared = 0
    if case.warm:
        # No more models than fit are resident at the start; and a LOAD may be half done by then.
        most = _most(np.array([pages for _, pages in from_start], dtype=float), num_pages)
        kept.append(np.sort([page_ns for page_ns, _ in from_start])[:most])
        half_done_ns = max(cost.load_ns for cost in case.costs)
        spared = case.num_gpus  # LOADs that were all but done at the start
    lane_ns = case.num_gpus * (case.span_ns + half_done_ns)
    num_loads = _most(np.concatenate([*loads, []]), lane_ns)
    # Pages that 0, 1, ... LOADs take at least, times time.
    taken = np.cumsum(np.sort(np.concatenate([*load_pages, []])))[: max(0, num_loads - spared)]
    taken = np.concatenate([np.zeros(num_loads - len(taken) + 1), taken])
    at_ns = np.cumsum(np.sort(np.concatenate([*kept, []])))
    num_kept = np.searchsorted(at_ns, num_pages * case.span_ns - taken, side="right")
    most = int(np.max(num_kept + np.arange(num_loads + 1)))
    return min(len(case), density_bound(case), most)


def _most(costs: NDArray[np.float64], budget: int) -> int:
    """How many of the cheapest fit."""
    return int(np.searchsorted(np.cumsum(np.sort(costs)), budget, side="right"))
