"""B4: the loss because no policy can foresee which model is asked next.

When each request is for a model drawn independently of all before, a policy's residents are a guess: at
an arrival they contain the model asked for with at most the popularity H of the best set that fits. All
other answers need a LOAD that ends after the arrival. A LOAD that ends at v helps the waiting requests of
its model, which came within the last SLO - exec; all of them but the first are *followers*: another
request of the model came within that time before. So

    answers <= hits + loads + followers,   E[hits] <= H * requests.

`R H + N / load * (1 + r S)` is no bound: it averages over models as if a policy took them blindly, but one that
waits and then loads the models with two requests waiting gets more (a test does it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experiments.bounds.case import BoundProblem, Cost
from experiments.bounds.noise import FAILURE_PROBABILITY


def memoryless_bound(case: BoundProblem, popularity: NDArray[np.float64]) -> int:
    """Requests that a policy which cannot foresee could answer in time, at most (B4).

    Holds, but for a chance of `FAILURE_PROBABILITY` (the draw may be lucky), for any policy that knows
    the past and the popularities only, if the model of each request was drawn with `popularity`
    independently of all before and of the arrival times. Needs no Poisson arrivals.

    Args:
        case: the run; memory and load lanes of all GPUs are pooled.
        popularity: shape (model,), the probabilities that the models were drawn with; sums to 1.
    """
    count = len(case)
    if not count:
        return 0
    share = resident_share(case.costs, popularity, num_pages=case.num_gpus * case.pages_per_gpu)
    # Given the past, each arrival is a hit with at most this probability, whatever the policy does; the margin is
    # that of Azuma and Hoeffding, about 3 / sqrt(requests).
    margin = math.sqrt(count * math.log(1 / FAILURE_PROBABILITY) / 2)
    shortest_load_ns = min(cost.load_ns for cost, _ in case.by_model())
    if shortest_load_ns == 0:
        return count
    # Where anything may be resident at the start, a load may be half done by then, too.
    loads = case.num_gpus * (case.span_ns // shortest_load_ns + case.warm)
    followers = 0
    for _, places in case.by_model():
        reach_ns = int((case.latest_ns - case.arrival_ns)[places].max())
        followers += int(np.count_nonzero(np.diff(case.arrival_ns[places]) <= reach_ns))
    return min(count, math.floor(count * share + margin) + loads + followers)


def resident_share(
    costs: Sequence[Cost], popularity: NDArray[np.float64], *, num_pages: int
) -> float:
    """Largest popularity of models that fit into so many pages, the last of them in part."""
    pages = np.array([cost.num_pages for cost in costs], dtype=np.float64)
    order = np.argsort(-popularity / np.maximum(pages, 1e-9), kind="stable")
    room = float(num_pages)
    share = 0.0
    for model in order:
        if pages[model] > room:
            return share + float(popularity[model]) * room / float(pages[model])
        room -= pages[model]
        share += float(popularity[model])
    return min(share, 1.0)
