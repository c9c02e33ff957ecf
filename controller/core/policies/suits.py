"""Which kind of worker suits which model, compared with the other models.

A kind may be slower for all models, and still be right for some of them: those that lose least by it. So a kind's
EXEC time is divided by the kind's slowness: the geometric mean, over the models, of the time there as a multiple of
the time on each model's fastest kind. A model is better off on another kind if its time in these terms is `_BETTER`
times less there. If all models slow down by the same factor, no model is.

The policy (`EdfMhPolicy`) decides which batches and loads a worker leaves to others: only those that a lane of a
better kind can run in time, with all that waits there. To leave less, if the model was refused lately or the better
lanes could not serve all its waiting requests, was tried and gave two to seven points less under overload.

Models count from when they are asked first. One that cannot run on a kind counts there as one that is slow: others
should leave it the kinds that it needs.
"""

from __future__ import annotations

from math import exp, log

from clockwright.units import NS_PER_MS, GpuKind
from controller.core.estimator import Estimates
from controller.core.state import Model

# The slower kind is left for another only where that is so many times better.
_BETTER = 1.25
# A model that cannot run on a kind counts there as so many times as slow as where it is fastest. With 1, which is
# not to count it, cards that two models need ran a third that processors could have had in time (11 % violated
# instead of 0.2); with 100, loads where a device holds one model were placed worse (7.5 % instead of 0.2).
_CANNOT = 10.0
# Measurements made meanwhile count after this time.
_KEEP_NS = 100 * NS_PER_MS


class _Suit:
    """The kinds that suit one model."""

    __slots__ = ("better", "slowness", "until_ns")

    def __init__(self) -> None:
        self.until_ns = 0
        #: By kind: logarithm of how many times as slow as on the fastest kind.
        self.slowness: dict[GpuKind, float] = {}
        #: By kind and size of the batch: the kinds on which it is better off.
        self.better: dict[tuple[GpuKind, int], tuple[GpuKind, ...]] = {}


class Suits:
    """The slowness of each kind, and where each model is better off."""

    __slots__ = ("_means", "_suits")

    def __init__(self) -> None:
        self._suits: dict[Model, _Suit] = {}
        #: By kind: sum of the logarithms, and of how many models.
        self._means: dict[GpuKind, tuple[float, int]] = {}

    def better(self, model: Model, kind: GpuKind, count: int, now_ns: int) -> tuple[GpuKind, ...]:
        """The kinds on which a batch of so many requests of the model is better off than on this one."""
        suit = self._suits.get(model)
        if suit is None or suit.until_ns <= now_ns:
            suit = self._look(model, suit or _Suit(), now_ns)
        key = kind, count
        found = suit.better.get(key)
        if found is None:
            found = suit.better[key] = self._better(model, kind, count)
        return found

    def _better(self, model: Model, kind: GpuKind, count: int) -> tuple[GpuKind, ...]:
        own = model.kinds.get(kind)
        if own is None:
            return ()
        limit = self._relative(own, kind, count) / _BETTER
        return tuple(
            other
            for other, estimates in model.kinds.items()
            if other != kind
            and count < len(estimates.cover)
            and self._relative(estimates, other, count) < limit
        )

    def _relative(self, estimates: Estimates, kind: GpuKind, count: int) -> float:
        total, models = self._means.get(kind, (0.0, 0))
        slowness = exp(total / models) if models else 1.0
        return estimates.exec_ns[estimates.cover[count]] / slowness

    def _look(self, model: Model, suit: _Suit, now_ns: int) -> _Suit:
        """Count what is measured now instead of what was."""
        self._forget_removed()
        if not suit.until_ns:
            self._suits[model] = suit
        suit.until_ns = now_ns + _KEEP_NS
        suit.better.clear()
        costs = {kind: _cost(estimates) for kind, estimates in model.kinds.items()}
        least = min(costs.values())
        slowness = {kind: cost - least for kind, cost in costs.items()}
        for kind in self._means:
            slowness.setdefault(kind, log(_CANNOT))
        self._leave_out(suit)
        for kind, value in slowness.items():
            total, models = self._means.get(kind, (0.0, 0))
            self._means[kind] = total + value, models + 1
        suit.slowness = slowness
        return suit

    def _forget_removed(self) -> None:
        """Forget the first model if it was removed, else make it the last: so all have their turn."""
        for model in self._suits:
            suit = self._suits.pop(model)
            if model.removed:
                self._leave_out(suit)
            else:
                self._suits[model] = suit
            return

    def _leave_out(self, suit: _Suit) -> None:
        for kind, before in suit.slowness.items():
            total, models = self._means[kind]
            self._means[kind] = total - before, models - 1


def _cost(estimates: Estimates) -> float:
    """Logarithm of the time per row, midway between single requests and full batches."""
    return (
        log(estimates.exec_ns[0] / estimates.sizes[0])
        + log(estimates.exec_ns[-1] / estimates.sizes[-1])
    ) / 2
