"""B1: every request takes a share of GPU time, and there is only so much of it.

A request that runs in a batch of k takes the k-th part of that EXEC. The others in its batch arrived
before the EXEC began and are not late when it ends, so at one moment all k were there and could begin.
The least share over the k for which that many mates exist is what the request costs in any schedule.
Answering the cheapest first gives more than any schedule can.

Source: notes on Clockwork's headroom, checked there against CP-SAT and exact search: within 12 % of the
optimum, within 1 % with many models or clear under- or overload. Loose for two or three models near
saturation, which cannot all have their best batches at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from clockwright.units import NS_PER_S
from experiments.bounds.case import NEVER_NS, BoundProblem, Cost, Times, Wires
from experiments.bounds.groups import grouped_bound


def density_rate(
    costs: Iterable[Cost], *, slo_ns: int, num_gpus: int = 1, padding: bool = True
) -> float:
    """Requests per second that the GPUs could answer at most if every batch were the best one.

    Holds for any arrivals, closed loops included, in which no SLO is above `slo_ns`: the answers given
    in T seconds are at most T times this. Zero when nothing can be in time.
    """
    best = Fraction(0)
    for cost in costs:
        for count, exec_ns in enumerate(cost.exec_of(padding=padding), start=1):
            if exec_ns <= slo_ns:
                best = max(best, Fraction(count, exec_ns))
    return float(best * num_gpus * NS_PER_S)


def density_bound(case: BoundProblem) -> int:
    """Requests that any policy could answer in time at most, by GPU time and what links carry alone (B1).

    Holds for the arrivals of the case, every policy that exists, clairvoyant and preemptive ones too,
    every placement and any number of copies. Arrivals of a closed loop are made by the policy: a bound
    from one policy's arrivals says nothing of another's (there, take `density_rate`).

    Memory stays small compared with the arrivals: shares are counted, not sorted, and the sum is exact. That each request
    is in one batch only is a small linear program (`grouped_bound`).
    """
    capacity = Fraction(math.floor(case.exec_work_ns(case.num_gpus * case.span_ns)))
    counts: dict[Fraction, int] = {}
    for exec_ns, _, best in _cheapest(case):
        for batch, number in enumerate(np.bincount(best, minlength=1).tolist()):
            if batch and number:
                share = Fraction(exec_ns[batch - 1], batch)
                counts[share] = counts.get(share, 0) + number
    total = 0
    for share, number in sorted(counts.items()):
        fits = min(number, capacity // share)
        total += fits
        capacity -= share * fits
        if fits < number:
            break
    total = min(total, *(_carried(case, wires) for wires in case.wires), len(case))
    # Else there may be millions, all of which can be answered as far as is known.
    return min(total, grouped_bound(case)) if total < len(case) else total


def _carried(case: BoundProblem, wires: Wires) -> int:
    """Requests that links could carry at most, one way: those with the fewest bytes, from start to last deadline."""
    # A simulated wire rounds the time of each message down to whole ns.
    span_s = (case.span_ns + len(case)) / NS_PER_S
    num_bytes = np.sort(np.asarray(wires.request_bytes, dtype=np.float64)[case.model])
    fits = np.cumsum(num_bytes) <= math.ceil(wires.bytes_per_s * span_s)
    return int(np.count_nonzero(fits))


def most_together(
    arrival_ns: Times, latest_ns: Times, among: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """The most requests that are there at one moment, of those in which each request could begin.

    Args:
        arrival_ns: arrivals, ascending, shape (request,).
        latest_ns: the latest that each could begin, shape (request,).
        among: who is counted, shape (request,).

    Returns:
        Shape (request,); 0 where `latest_ns` is before the arrival.
    """
    among = among & (latest_ns >= arrival_ns)
    begins, ends = arrival_ns[among], np.sort(latest_ns[among])
    # The number grows at arrivals only.
    there = np.searchsorted(begins, begins, side="right") - np.searchsorted(ends, begins)
    first = np.searchsorted(begins, arrival_ns)
    last = np.searchsorted(begins, latest_ns, side="right")
    return _largest(there.astype(np.int64), first, np.maximum(first, last))


def _largest(
    values: NDArray[np.int64], first: NDArray[np.intp], end: NDArray[np.intp]
) -> NDArray[np.int64]:
    """Largest value in each range; 0 where a range is empty."""
    result = np.zeros(len(first), np.int64)
    width, table = 1, values
    lengths = end - first
    while width <= len(values):
        # `table` has the largest of `width` values from each place on.
        fits = (lengths >= width) & (lengths < 2 * width)
        result[fits] = np.maximum(table[first[fits]], table[end[fits] - width])
        table = np.maximum(table[:-width], table[width:]) if len(table) > width else table[:0]
        width *= 2
    return result


def least_shares(
    arrival_ns: Times,
    slo_ns: Times,
    exec_ns: Sequence[int],
    shortest_ns: Callable[[int], int] = int,
) -> NDArray[np.int64]:
    """Size of the batch in which each request of one model costs least.

    Args:
        arrival_ns: arrivals, ascending, shape (request,).
        slo_ns: SLOs, shape (request,).
        exec_ns: duration of a batch of k at index k - 1; `NEVER_NS` if no such batch exists.
        shortest_ns: the least that a batch takes by luck, from what it should take.

    Returns:
        Shape (request,): how many requests the batch has; 0 where the request cannot be in time.
    """
    best = np.zeros(len(arrival_ns), dtype=np.int64)
    everybody = np.ones(len(arrival_ns), dtype=bool)
    # Shares are written from dearest to cheapest, so that the least stays.
    for count in sorted(
        (count for count, ns in enumerate(exec_ns, start=1) if ns < NEVER_NS),
        key=lambda count: -Fraction(exec_ns[count - 1], count),
    ):
        latest_ns = arrival_ns + slo_ns - shortest_ns(exec_ns[count - 1])
        best[most_together(arrival_ns, latest_ns, everybody) >= count] = count
    return best


def shares(case: BoundProblem) -> NDArray[np.float64]:
    """Least GPU time of each request, ns; infinite where it cannot be in time."""
    result = np.full(len(case), math.inf)
    for exec_ns, places, best in _cheapest(case):
        per_request = np.array(
            [math.inf, *(ns / count for count, ns in enumerate(exec_ns, start=1))]
        )
        result[places] = per_request[best]
    return result


def _cheapest(
    case: BoundProblem,
) -> Iterator[tuple[list[int], NDArray[np.int64], NDArray[np.int64]]]:
    """By model: durations of its batches, its requests, and the batch in which each costs least."""
    for cost, places in case.by_model():
        exec_ns = cost.exec_of(padding=case.padding)
        best = least_shares(
            case.arrival_ns[places], case.slo_ns[places], exec_ns, case.shortest_exec_ns
        )
        yield exec_ns, places, best
