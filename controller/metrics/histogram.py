"""Histograms of times. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from clockwright.units import NS_PER_S


class Buckets:
    """The upper bounds of a histogram's buckets."""

    def __init__(self, *bounds_s: float) -> None:
        """Bound buckets at some times, ascending, in s."""
        self.bounds_ns = tuple(round(bound_s * NS_PER_S) for bound_s in bounds_s)
        #: The bounds as a page has them; the last bucket has none.
        self.le = (*(repr(float(bound_s)) for bound_s in bounds_s), "+Inf")
        #: Whether negative values are counted too: then a sum is not a counter.
        self.signed = bounds_s[0] < 0


class Histogram:
    """Counts per bucket, and the sum."""

    __slots__ = ("buckets", "counts", "sum_ns", "template")

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        #: Counts of each bucket alone.
        self.counts = [0] * len(buckets.le)
        self.sum_ns = 0
        #: Cache of its lines on a page, with gaps for numbers.
        self.template = ""

    def add(self, time_ns: int) -> None:
        """Count one."""
        self.counts[bisect_left(self.buckets.bounds_ns, time_ns)] += 1
        self.sum_ns += time_ns

    def cumulative(self) -> list[float]:
        """Cumulative counts by bound; the last counts all."""
        return list(accumulate(self.counts))
