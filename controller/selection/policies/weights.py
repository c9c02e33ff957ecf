"""Exponential weights, kept as logarithms.

Every update shifts all logarithms so that the largest is 0. A sum that is updated in place instead would
drift; Clipper's first public version had one. The spread is bounded, so no weight becomes zero: a
multiplicative update never brings a zero back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

# A weight of e**-100 is never chosen, and is still far from the smallest float.
SPREAD_MAX = 100.0


@dataclass(frozen=True, slots=True)
class LogWeights:
    """State of the exponential-weights policies."""

    models: tuple[str, ...]
    #: Natural logarithms, one per model; the largest is 0.
    logs: tuple[float, ...]
    #: Number of feedbacks that these weights have learned from.
    rounds: int = 0
    _by_model: dict[str, float] | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.models) != len(self.logs):
            raise ValueError(
                f"state: found {len(self.logs)} weights, expected one for each of {len(self.models)} models"
            )
        if self.rounds < 0:
            raise ValueError(f"state: found {self.rounds} rounds, expected none below 0")

    @classmethod
    def fresh(cls, models: Sequence[str]) -> LogWeights:
        """Make weights that are all alike."""
        return cls(tuple(models), (0.0,) * len(models))

    def shares(self, models: Sequence[str]) -> list[float]:
        """Weights of some models, scaled to sum to 1. An unknown model weighs what an average one does."""
        weights = self._by_model
        if weights is None:
            weights = dict(zip(self.models, normalised(self.logs), strict=True))
            # Computed once per state: a query asks three times, and users share states.
            object.__setattr__(self, "_by_model", weights)
        mean = 1 / len(self.models)
        chosen = [weights.get(model, mean) for model in models]
        total = sum(chosen)
        return [weight / total for weight in chosen]

    def add(self, gains: Mapping[str, float]) -> LogWeights:
        """Add to the models' logarithms; this counts as one round."""
        return LogWeights(
            self.models,
            bounded(
                log + gains.get(model, 0.0)
                for model, log in zip(self.models, self.logs, strict=True)
            ),
            self.rounds + 1,
        )

    def shared(self, share: float) -> LogWeights:
        """Give every model an equal part of `share` of all weight (Herbster and Warmuth 1998).

        Without it, a model's weight falls for as long as the model is bad, and needs as long to rise once
        the model is good again.
        """
        if share == 0.0:
            return self
        weights = normalised(self.logs)
        floor = share / len(weights)
        mixed = [math.log((1 - share) * weight + floor) for weight in weights]
        return LogWeights(self.models, bounded(mixed), self.rounds)

    def resized(self, models: Sequence[str]) -> LogWeights:
        """Make the weights of other models: new ones weigh what an average one does."""
        logs = dict(zip(self.models, self.logs, strict=True))
        mean = log_mean(self.logs) if self.logs else 0.0
        return LogWeights(
            tuple(models), bounded(logs.get(model, mean) for model in models), self.rounds
        )


def bounded(logs: Iterable[float]) -> tuple[float, ...]:
    """Shift logarithms so that the largest is 0, and bound their spread by `SPREAD_MAX`."""
    values = list(logs)
    top = max(values, default=0.0)
    return tuple([max(value - top, -SPREAD_MAX) for value in values])


def normalised(logs: Sequence[float]) -> list[float]:
    """Turn logarithms into weights that sum to 1."""
    top = max(logs, default=0.0)
    weights = [math.exp(log - top) for log in logs]
    total = sum(weights)
    return [weight / total for weight in weights]


def log_mean(logs: Sequence[float]) -> float:
    """Compute the logarithm of the mean weight."""
    top = max(logs)
    return top + math.log(sum(math.exp(log - top) for log in logs) / len(logs))


def draw(shares: Sequence[float], rng: Random) -> int:
    """Draw an index with the given probabilities, which sum to 1 but for rounding."""
    left = rng.random() * sum(shares)
    for index, share in enumerate(shares):
        left -= share
        if left < 0:
            return index
    # Rounding left a rest. It goes to the last index that can be drawn at all.
    return max(index for index, share in enumerate(shares) if share > 0)
