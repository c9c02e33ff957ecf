"""Who could be in a batch with whom: requests of one model that are all there when it begins, none late after it.

With several SLOs in a model, a request with a short one finds patient mates at any time, but each of these is in
one batch only. `mixed_bound` counts them. Let T be the members of a batch of k with an SLO of at most tau, and c
the most requests with such an SLO that one of them could meet at once: |T| <= c for each, so the 1/c of T sum to at
most 1, and the others of the batch are k - |T| >= the sum over T of k/c - 1. Summed over all batches of k, that is
a row of a linear program for each k and tau.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from experiments.bounds.case import NEVER_NS, BoundProblem, Times
from experiments.bounds.program import Inequalities, solve

Counts = NDArray[np.int64]

# With more SLOs in a model, only so many of them divide the patient from the others.
_MAX_DIVISIONS = 3


def most_together(arrival_ns: Times, latest_ns: Times, among: NDArray[np.bool_]) -> Counts:
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


def _largest(values: Counts, first: NDArray[np.intp], end: NDArray[np.intp]) -> Counts:
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


def has_mixed_slos(case: BoundProblem) -> bool:
    """Whether some model is asked with several SLOs."""
    return any(np.ptp(case.slo_ns[places]) > 0 for _, places in case.by_model())


def mixed_bound(case: BoundProblem) -> int:
    """Requests that could be answered in time by GPU time, where patient mates are in one batch only.

    Holds for what `density_bound` holds for; neither of the two is always below the other.
    """
    divisions = _divisions(case.slo_ns)
    rows = Inequalities()
    upper: list[NDArray[np.float64]] = []
    time: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
    width = 0
    for exec_of, members in case.by_cost():
        alike = _Alike(case, exec_of, members, divisions)
        # Requests of one SLO, in batches of all sizes together.
        in_all: dict[int, list[NDArray[np.int64]]] = {}
        for k, exec_ns in alike.batches:
            mates: list[tuple[list[NDArray[np.int64]], list[NDArray[np.float64]]]] = [
                ([], []) for _ in divisions
            ]
            for slo_ns, classes, counts in alike.classes(k):
                columns = width + np.arange(len(counts))
                width += len(counts)
                in_all.setdefault(slo_ns, []).append(columns)
                time.append((columns, np.full(len(counts), exec_ns / k)))
                upper.append(counts.astype(float))
                for (found, parts), division_ns, most in zip(
                    mates, divisions, classes.T, strict=True
                ):
                    short = slo_ns <= division_ns
                    found.append(columns)
                    parts.append(k / most - 1 if short else np.full(len(counts), -1.0))
            for found, parts in mates:
                if found:
                    rows.add(np.concatenate(found), np.concatenate(parts), 0.0)
        for slo_ns, columns_of in in_all.items():
            together = np.concatenate(columns_of)
            rows.add(together, np.ones(len(together)), float(alike.number(slo_ns)))
    if not width:
        return 0
    capacity_ns = case.exec_work_ns(case.num_gpus * case.span_ns)
    rows.add(
        np.concatenate([columns for columns, _ in time]),
        np.concatenate([costs for _, costs in time]) / capacity_ns,
        1.0,
    )
    return solve(rows, np.concatenate(upper), width)


def _divisions(slo_ns: Times) -> list[int]:
    """SLOs that divide the patient from the others; the longest divides nobody, so it is there only alone."""
    known = np.unique(slo_ns)
    known = known[:-1] if len(known) > 1 else known
    if len(known) > _MAX_DIVISIONS:
        known = known[np.linspace(0, len(known) - 1, _MAX_DIVISIONS).astype(int)]
    return [int(slo) for slo in known]


class _Alike:
    """The requests of models that cost the same."""

    def __init__(
        self,
        case: BoundProblem,
        exec_of: Sequence[int],
        members: Sequence[NDArray[np.int64]],
        divisions: Sequence[int],
    ) -> None:
        self._case = case
        self._members = members
        self._divisions = divisions
        #: Number of requests in a batch, and the least duration of an EXEC that answers them.
        self.batches = [
            (count, exec_ns) for count, exec_ns in enumerate(exec_of, start=1) if exec_ns < NEVER_NS
        ]
        self._exec_ns = dict(self.batches)

    def number(self, slo_ns: int) -> int:
        """Requests with this SLO."""
        slos = self._case.slo_ns
        return sum(int(np.count_nonzero(slos[places] == slo_ns)) for places in self._members)

    def classes(self, k: int) -> Iterator[tuple[int, Counts, Counts]]:
        """Requests that find k at once, by SLO.

        Returns:
            The SLO; for each class the most, up to k, that its requests meet among those within each
            division, shape (class, division); and how many requests each class has, shape (class,).
        """
        case, exec_ns = self._case, self._case.shortest_exec_ns(self._exec_ns[k])
        by_slo: dict[int, list[Counts]] = {}
        for places in self._members:
            arrival_ns, slo_ns = case.arrival_ns[places], case.slo_ns[places]
            latest_ns = arrival_ns + slo_ns - exec_ns
            everybody = np.ones(len(places), bool)
            able = most_together(arrival_ns, latest_ns, everybody) >= k
            within = [
                np.where(short, np.clip(most_together(arrival_ns, latest_ns, short), 1, k), 1)
                for short in (slo_ns <= division for division in self._divisions)
            ]
            for slo in np.unique(slo_ns[able]).tolist():
                chosen = able & (slo_ns == slo)
                table = np.stack([most[chosen] for most in within], axis=1)
                by_slo.setdefault(slo, []).append(table)
        for slo, tables in by_slo.items():
            classes, counts = np.unique(np.concatenate(tables), axis=0, return_counts=True)
            yield slo, classes, counts
