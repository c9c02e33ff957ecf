"""How many requests of a model could be in large batches at all: each is in one batch only.

A request finds enough mates for a large batch more often than all of them together do, because those that it would
need are needed by others. `grouped_bound` counts this. The members of a batch of k or more lie within a window: the
last has arrived when it begins, and the first is not late when it ends. Disjoint groups of k or more within windows of
one length can be made runs of the arrivals, by exchanging members of two that overlap. So the most requests that lie
in such groups is found in one pass. It bounds the requests that are answered in batches of k or more; for all k, and
with the time that batches take, this is a linear program with a column per batch size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experiments.bounds.case import NEVER_NS, BoundProblem, Times
from experiments.bounds.program import Inequalities, solve


def most_in_groups(arrival_ns: Times, window_ns: int, least: int) -> int:
    """The most requests that lie in disjoint groups, each of so many or more.

    Args:
        arrival_ns: arrivals, ascending, shape (request,).
        window_ns: the last of a group arrives no later than this after its first; negative: there is no group.
        least: members of a group.
    """
    if window_ns < 0 or len(arrival_ns) < least:
        return 0
    starts: list[int] = np.searchsorted(arrival_ns, arrival_ns - window_ns).tolist()
    # By number of requests: those of the first so many that are in no group, at least.
    outside = [0]
    # Where the last group may begin, the best first: those later in the queue are worse, and stay longer.
    begins: deque[int] = deque()
    for number, start in enumerate(starts, start=1):
        fewest = outside[-1] + 1
        begin = number - least
        if begin >= 0:
            while begins and outside[begins[-1]] >= outside[begin]:
                begins.pop()
            begins.append(begin)
            while begins and begins[0] < start:
                begins.popleft()
            if begins:
                fewest = min(fewest, outside[begins[0]])
        outside.append(fewest)
    return len(arrival_ns) - outside[-1]


def grouped_bound(case: BoundProblem) -> int:
    """Requests that could be answered in time by GPU time, where each is in one batch only.

    Holds for what `density_bound` holds for. Where a model has several SLOs, its longest counts for all.
    """
    if not len(case):
        return 0
    rows = Inequalities()
    upper: list[float] = []
    time_ns: list[float] = []
    for exec_ns, members in case.by_cost():
        most = np.sum([_most_by_size(case, exec_ns, places) for places in members], axis=0)
        first, end = len(upper), len(upper) + len(exec_ns)
        for index, (duration_ns, number) in enumerate(zip(exec_ns, most.tolist(), strict=True)):
            larger = np.arange(first + index, end)
            rows.add(larger, np.ones(len(larger)), float(number))
            runs = duration_ns < NEVER_NS
            upper.append(float(number) if runs else 0.0)
            time_ns.append(duration_ns / (index + 1) if runs else 0.0)
    capacity_ns = case.exec_work_ns(case.num_gpus * case.span_ns)
    rows.add(np.arange(len(upper)), np.array(time_ns) / capacity_ns, 1.0)
    return solve(rows, np.array(upper), len(upper))


def _most_by_size(
    case: BoundProblem, exec_ns: Sequence[int], places: NDArray[np.int64]
) -> list[int]:
    """The most requests of a model in batches of k or more, at index k - 1."""
    arrival_ns = case.arrival_ns[places]
    slo_ns = int(case.slo_ns[places].max())
    found: list[int] = []
    for least in range(1, len(exec_ns) + 1):
        if found and not found[-1]:
            found.append(0)
            continue
        shortest_ns = min(exec_ns[least - 1 :])
        window_ns = slo_ns - case.shortest_exec_ns(shortest_ns) if shortest_ns < NEVER_NS else -1
        found.append(most_in_groups(arrival_ns, window_ns, least))
    return found
