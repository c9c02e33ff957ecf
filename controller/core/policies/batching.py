"""How a Clipper container sets the largest batch it sends (NSDI'17, section 4.3): three ways.

Each learns from batches that came back: their rows and how long they took, from sending to the result,
against the SLO.

* `none`: one row at a time, the paper's baseline.
* `aimd`: two more after a batch that filled the cap and came back within the SLO, a tenth less after
  one that filled it and did not. The paper gives the decrease, Clipper's source the increment. A batch
  that did not fill the cap says nothing about the cap: Clipper's source learns from every batch, and
  light load shrinks its caps to one.
* `quantile`: the P99 of the latency as a line over the batch size, by quantile regression over recent
  batches; the cap is where the line meets the SLO. Clipper's source fits once and freezes
  the line; this one is fitted again as batches come. It looks no further than the next compiled size
  beyond those it has seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from typing_extensions import override

# Clipper v0's increment; the paper gives the decrease only.
AIMD_INCREASE = 2
AIMD_DECREASE = 0.9

#: The paper sets batch sizes by the P99.
QUANTILE = 0.99
# Samples kept per size: the fewest among which the P99 is not the largest. With ten, one outlier at a size
# kept containers from ever trying it again.
_SAMPLES_PER_SIZE = 100
# A sample is forgotten after so many batches; that also bounds the work of a fit.
_STALE_AFTER = 500
# A fit costs about 10 us per sample, so it waits until this share of the samples is new.
_NEW_SHARE = 1 / 16
# Steps of the search for the slope; so many find it to a hundred-thousandth of the steepest.
_SEARCH_STEPS = 30


class Batching(Protocol):
    """The largest batch of one container."""

    #: Rows that a batch may have now; at least the smallest compiled size, but for `none`.
    cap: float

    def learn(self, rows: int, latency_ns: int, slo_ns: int) -> None:
        """A batch came back so long after it was sent; the SLO is the smallest among its requests."""


def make_batching(name: str, sizes: Sequence[int]) -> Batching:
    """One of `config.BATCHINGS` for a container with these compiled batch sizes, ascending."""
    if name == "aimd":
        return Aimd(sizes)
    if name == "quantile":
        return QuantileRegression(sizes)
    return OneByOne()


class OneByOne(Batching):
    """No batching."""

    def __init__(self) -> None:
        self.cap = 1.0

    @override
    def learn(self, rows: int, latency_ns: int, slo_ns: int) -> None:
        """Nothing to learn."""


class Aimd(Batching):
    """Additive increase, multiplicative decrease."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.cap: float = float(sizes[0])
        self._sizes = sizes

    @override
    def learn(self, rows: int, latency_ns: int, slo_ns: int) -> None:
        # A batch fills the cap when it has the largest compiled size below it.
        if rows < max(size for size in self._sizes if size <= self.cap):
            return
        if latency_ns > slo_ns:
            self.cap = max(float(self._sizes[0]), self.cap * AIMD_DECREASE)
        else:
            self.cap = min(self.cap + AIMD_INCREASE, float(self._sizes[-1]))


class QuantileRegression(Batching):
    """The batch size at which the P99 of the latency meets the SLO."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.cap: float = float(sizes[0])
        self._sizes = sizes
        #: Rows -> (number of the batch, latency in ns).
        self._samples: dict[int, deque[tuple[int, int]]] = {}
        self._num_learned = 0
        self._num_fitted = 0
        self._num_points = 0

    @override
    def learn(self, rows: int, latency_ns: int, slo_ns: int) -> None:
        self._num_learned += 1
        samples = self._samples.setdefault(rows, deque(maxlen=_SAMPLES_PER_SIZE))
        samples.append((self._num_learned, latency_ns))
        if self._num_learned - self._num_fitted < _NEW_SHARE * self._num_points:
            return
        oldest = self._num_learned - _STALE_AFTER
        points = [
            (size, duration)
            for size, known in self._samples.items()
            for at, duration in known
            if at > oldest
        ]
        self._num_fitted, self._num_points = self._num_learned, len(points)
        intercept, slope = fit_quantile(points)
        seen = max(size for size, _ in points)
        next_size = next((size for size in self._sizes if size > seen), self._sizes[-1])
        if slope > 0:
            wanted = (slo_ns - intercept) / slope
        else:  # no sign yet that size matters
            wanted = float(next_size) if intercept <= slo_ns else 0.0
        self.cap = max(float(self._sizes[0]), min(wanted, float(next_size)))


def fit_quantile(
    points: Sequence[tuple[int, int]], quantile: float = QUANTILE
) -> tuple[float, float]:
    """Fit a quantile of y as a line over x that does not fall: least pinball loss.

    For a given slope the best intercept is that quantile of what the slope leaves over; the loss is
    convex in the slope, which a golden-section search finds.

    Args:
        points: (x, y), at least one, x positive, y not negative.
        quantile: between 0 and 1.

    Returns:
        Intercept and slope. With a single x the slope is 0.
    """
    if len({x for x, _ in points}) < 2:
        return _best(points, 0.0, quantile)[1], 0.0
    xs = sorted({x for x, _ in points})
    low = 0.0
    # No two points at neighbouring sizes ask for a steeper line than this.
    high = max(y for _, y in points) / min(b - a for a, b in pairwise(xs))
    golden = (5**0.5 - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    left_loss, right_loss = (_best(points, slope, quantile)[0] for slope in (left, right))
    for _ in range(_SEARCH_STEPS):
        if left_loss <= right_loss:
            high, right, right_loss = right, left, left_loss
            left = high - golden * (high - low)
            left_loss = _best(points, left, quantile)[0]
        else:
            low, left, left_loss = left, right, right_loss
            right = low + golden * (high - low)
            right_loss = _best(points, right, quantile)[0]
    slope = min(
        (0.0, low, (low + high) / 2, high), key=lambda slope: _best(points, slope, quantile)
    )
    return _best(points, slope, quantile)[1], slope


def _best(points: Sequence[tuple[int, int]], slope: float, quantile: float) -> tuple[float, float]:
    """The least loss at this slope, and the intercept that has it."""
    left_over = sorted([y - slope * x for x, y in points])
    # Rank of the smallest value with at least this share of the values at or below it.
    rank = min(max(-int(-quantile * len(left_over) // 1), 1), len(left_over))
    intercept = left_over[rank - 1]
    above = sum(left_over[rank:]) - intercept * (len(left_over) - rank)
    below = intercept * rank - sum(left_over[:rank])
    return quantile * above + (1 - quantile) * below, intercept
