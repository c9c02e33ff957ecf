"""Policies that count: discounted Thompson sampling and epsilon-greedy. One model per query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from controller.selection.core.policy import PerModelPolicy, check_range
from controller.selection.core.query import Choice, Observation, Query
from controller.selection.policies.weights import draw


@dataclass(frozen=True, slots=True)
class Tallies:
    """Reward and loss that each model has gathered. Each feedback discounts all earlier ones."""

    models: tuple[str, ...]
    rewards: tuple[float, ...]
    losses: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.models) == len(self.rewards) == len(self.losses):
            raise ValueError(
                f"state: found {len(self.rewards)} rewards and {len(self.losses)} losses, expected one of"
                f" each for {len(self.models)} models"
            )
        if min((*self.rewards, *self.losses), default=0.0) < 0:
            raise ValueError("state: found a negative tally, expected none below 0")

    @classmethod
    def fresh(cls, models: Sequence[str]) -> Tallies:
        """Make the tallies of models that have had no feedback."""
        return cls(tuple(models), (0.0,) * len(models), (0.0,) * len(models))

    def count(self, model: str, loss: float, discount: float) -> Tallies:
        """Discount all tallies, then count one loss of a model."""
        index = self.models.index(model)
        rewards = [reward * discount for reward in self.rewards]
        losses = [lost * discount for lost in self.losses]
        rewards[index] += 1 - loss
        losses[index] += loss
        return Tallies(self.models, tuple(rewards), tuple(losses))

    def of(self, model: str) -> tuple[float, float]:
        """Reward and loss of a model; 0 and 0 for one that is unknown."""
        if model not in self.models:
            return 0.0, 0.0
        index = self.models.index(model)
        return self.rewards[index], self.losses[index]

    def mean(self, model: str) -> float:
        """Mean reward of a model, as if it had begun with one reward and one loss."""
        reward, loss = self.of(model)
        return (reward + 1) / (reward + loss + 2)

    def resized(self, models: Sequence[str]) -> Tallies:
        """Make the tallies of other models: known ones keep theirs."""
        pairs = [self.of(model) for model in models]
        rewards, losses = zip(*pairs, strict=True)
        return Tallies(tuple(models), rewards, losses)


class _Counting(PerModelPolicy[Tallies]):
    chooses_one: bool = True
    state_type = Tallies

    def __init__(self, *, discount: float) -> None:
        self.discount = check_range("discount", discount, 0.5, 1.0)

    @override
    def observe(self, state: Tallies, observation: Observation) -> Tallies:
        for model in observation.choice.members:
            if model in observation.losses and model in state.models:
                return state.count(model, observation.losses[model], self.discount)
        return state

    @override
    def weights(self, state: Tallies) -> dict[str, float]:
        return {model: state.mean(model) for model in state.models}


class Thompson(_Counting):
    """Thompson sampling over Beta posteriors whose evidence fades (Raj and Kalyani 2017)."""

    def __init__(self, *, discount: float = 0.999) -> None:
        """Set how fast evidence fades.

        Args:
            discount: all evidence together weighs at most 1 / (1 - discount) feedbacks; with 1 it never fades.
        """
        super().__init__(discount=discount)

    @override
    def select(self, state: Tallies, query: Query) -> Choice:
        # Draw a mean from each model's posterior and take the model with the largest.
        best, best_draw = "", -1.0
        for model in query.in_time:
            reward, loss = state.of(model)
            drawn = query.rng.betavariate(reward + 1, loss + 1)
            if drawn > best_draw:
                best, best_draw = model, drawn
        # The winner's probability has no closed form. None is logged: no update here divides by it.
        return Choice((best,)) if best else Choice(())


class EpsilonGreedy(_Counting):
    """Uses the model with the best mean so far, and with probability `epsilon` any model."""

    def __init__(self, *, epsilon: float = 0.05, discount: float = 0.999) -> None:
        """Set how often to explore, and how fast evidence fades.

        Args:
            epsilon: share of queries that use a random model.
            discount: all evidence together weighs at most 1 / (1 - discount) feedbacks; with 1 it never fades.
        """
        super().__init__(discount=discount)
        self.epsilon = check_range("epsilon", epsilon, 0.0, 1.0)

    @override
    def select(self, state: Tallies, query: Query) -> Choice:
        models = query.in_time
        if not models:
            return Choice(())
        # `max` takes the first of equal means, in the application's order.
        best = max(models, key=state.mean)
        floor = self.epsilon / len(models)
        shares = [floor + (1 - self.epsilon if model == best else 0.0) for model in models]
        index = draw(shares, query.rng)
        return Choice((models[index],), (shares[index],))
