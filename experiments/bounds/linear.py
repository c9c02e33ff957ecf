"""B3: a linear program that sees bursts, memory and the host-to-device lane.

Variables, all in [0, 1]: `served[i]`; `load[i]`, a LOAD that ended in time for request i but not for one
before it; `kept[i]`, the weights stayed resident from the last moment at which the request of the same
model before i could have begun to i's arrival. A schedule is turned into these by taking each stretch of
residency on one GPU, from the end of its LOAD at v to its eviction at w. It *touches* the requests with
arrival <= w and latest begin >= v, which are consecutive because both ascend (latest begins are made to,
by raising them, where SLOs are mixed: that only helps a schedule). The first of them gets the `load`, the
others are `kept`. Then

* served[i] <= load[i] + kept[i], since what answers i touches it;
* kept[next] <= load[i] + kept[i], likewise;
* at any moment the kept weights, each between the two requests it is kept between, fit into the pages;
* a LOAD of i ended after the latest begin of the request before, and before that of i, so loads whose
  whole range lies in an interval fit into it;
* GPU time: the least shares (density.py) of served requests that lie in an interval fit into it.

Moments and intervals are sampled, which only removes constraints, so the value remains a bound. Pooling pages
and lanes over GPUs, fractions, and one LOAD per request instead of one per copy are relaxations too. That LOADs
may begin ahead of the arrivals costs at most 1 in 1,000. Tight on skewed popularity (policies reach 92-94 %),
loose where popularity is uniform and no policy can foresee (`memoryless_bound` is for that).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.bounds.case import BoundProblem, Times
from experiments.bounds.density import density_bound, shares
from experiments.bounds.program import Inequalities, solve

# Points of the time grid. Memory has a row for each; intervals have one for each and each of `_LENGTHS`.
_MIN_GRID, _MAX_GRID = 64, 320
# Lengths of intervals, in grid steps; finer where bursts are, and all the way to the whole run.
_LENGTHS = (4, 5, 6, 8, 12, 16, 24, 32, 64, 128, 256)
# The grid divides the shortest SLO into this many steps.
_STEPS_PER_SLO = 4


def memory_bound(case: BoundProblem) -> int:
    """Requests that any policy could answer in time at most, with pages and LOADs (B3).

    Holds for every policy, clairvoyant ones that load ahead of the arrivals too, if a model's weights
    are in `num_pages` pages of a GPU from the begin of their LOAD to their eviction, an EXEC begins
    only once its weights are there, and each GPU runs one LOAD at a time. Takes 10 to 30 s for 3,000
    requests; longer runs go by `BoundProblem.window`.
    """
    density = density_bound(case)
    case, cost_ns = _possible(case)
    count = len(case)
    if not count:
        return 0
    rows = Inequalities()
    _interval_rows(case, rows, case.arrival_ns, case.deadline_ns, cost_ns, case.exec_work_ns, 0)
    links = _links(case)
    for place, before in enumerate(links.before.tolist()):
        load, kept = count + place, 2 * count + place
        rows.add([place, load, kept], [1.0, -1.0, -1.0], 0.0)
        if before >= 0:
            rows.add([kept, count + before, 2 * count + before], [1.0, -1.0, -1.0], 0.0)
    _memory_rows(case, links, rows)
    load_ns = np.array([cost.load_ns for cost in case.costs], dtype=float)[case.model]
    _interval_rows(
        case, rows, links.load_begin_ns, links.load_end_ns, load_ns, case.load_work_ns, count
    )
    fits = np.array([cost.num_pages <= case.pages_per_gpu for cost in case.costs])[case.model]
    in_time = links.load_begin_ns + load_ns * case.load_factors[0] <= links.load_end_ns
    kept_at_all = case.warm | (links.before >= 0)
    upper = np.concatenate((fits, fits & in_time, fits & kept_at_all)).astype(float)
    return min(density, solve(rows, upper, count))


def _possible(case: BoundProblem) -> tuple[BoundProblem, NDArray[np.float64]]:
    """The requests that some EXEC could answer in time, and each one's share of GPU time."""
    cost_ns = shares(case)
    possible = np.isfinite(cost_ns)
    return case.only(possible), cost_ns[possible]


@dataclass(slots=True)
class _Links:
    """The grid's view of each request; all arrays have shape (request,)."""

    #: Index of the request of the same model before it, or -1.
    before: NDArray[np.int64]
    #: Time from which the weights are kept until the arrival.
    kept_from_ns: Times
    #: A LOAD that ends in time for it, and not for one before, begins and ends within these.
    load_begin_ns: Times
    load_end_ns: Times


def _links(case: BoundProblem) -> _Links:
    links = _Links(*(np.full(len(case), -1, dtype=np.int64) for _ in range(4)))
    for cost, places in case.by_model():
        reach_ns = np.maximum.accumulate(case.latest_ns[places])
        previous_ns = np.concatenate(([case.start_ns], reach_ns[:-1]))
        links.before[places[1:]] = places[:-1]
        links.kept_from_ns[places] = previous_ns
        longest_ns = int(cost.load_ns * case.load_factors[1])
        links.load_begin_ns[places] = np.maximum(previous_ns - longest_ns, case.start_ns)
        links.load_end_ns[places] = reach_ns
    return links


def _grid(case: BoundProblem) -> tuple[int, int]:
    """Step in ns, and number of steps from the start to the end of the case."""
    shortest_ns = max(1, int(case.slo_ns.min()))
    step_ns = min(shortest_ns // _STEPS_PER_SLO, case.span_ns // _MIN_GRID)
    step_ns = max(1, step_ns, -(-case.span_ns // _MAX_GRID))
    return step_ns, -(-case.span_ns // step_ns)


def _intervals(case: BoundProblem) -> Iterator[tuple[int, int]]:
    step_ns, steps = _grid(case)
    start_ns = case.start_ns
    end_ns = start_ns + case.span_ns
    for length in _LENGTHS:
        if length >= steps:
            break
        for first in range(0, steps - length + 1):
            yield start_ns + first * step_ns, min(start_ns + (first + length) * step_ns, end_ns)
    for edge in range(1, steps):
        yield start_ns, start_ns + edge * step_ns
        yield start_ns + edge * step_ns, end_ns
    yield start_ns, end_ns


def _interval_rows(
    case: BoundProblem,
    rows: Inequalities,
    begin_ns: Times,
    end_ns: Times,
    cost_ns: NDArray[np.float64],
    work_ns: Callable[[float, int], float],
    column: int,
) -> None:
    """Constraints: all work that has to lie in an interval fits into it, on all GPUs together.

    Args:
        case: has the intervals.
        rows: get the constraints.
        begin_ns: from when the work of each request may be done, shape (request,).
        end_ns: until when.
        cost_ns: how much work that is.
        work_ns: the most work that is done in some time, one of so many such sums.
        column: the first request's variable.
    """
    candidates = np.flatnonzero(cost_ns)
    candidates = candidates[np.argsort(begin_ns[candidates], kind="stable")]
    begins, ends, costs = begin_ns[candidates], end_ns[candidates], cost_ns[candidates]
    intervals = list(_intervals(case))
    for first_ns, last_ns in intervals:
        low, high = np.searchsorted(begins, [first_ns, last_ns])
        inside = np.flatnonzero(ends[low:high] <= last_ns) + low
        capacity_ns = work_ns(case.num_gpus * (last_ns - first_ns), len(intervals))
        if costs[inside].sum() > capacity_ns:
            rows.add(column + candidates[inside], costs[inside] / capacity_ns, 1.0)


def _memory_rows(case: BoundProblem, links: _Links, rows: Inequalities) -> None:
    pages = np.array([cost.num_pages for cost in case.costs], dtype=np.float64)[case.model]
    capacity = float(case.num_gpus * case.pages_per_gpu)
    if not capacity:
        return  # nothing fits that has pages at all
    column = 2 * len(case)

    def limit(kept: NDArray[np.intp]) -> None:
        if pages[kept].sum() > capacity:
            rows.add(column + kept, pages[kept] / capacity, 1.0)

    # Models resident at the start count there, even where the first request comes at once.
    limit(np.flatnonzero(links.before < 0))
    step_ns, steps = _grid(case)
    for step in range(1, steps):
        at_ns = case.start_ns + step * step_ns
        # Half-open: a request without slack is the end of one stretch and the begin of the next.
        limit(np.flatnonzero((links.kept_from_ns <= at_ns) & (at_ns < case.arrival_ns)))
