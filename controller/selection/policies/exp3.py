"""Policies that ask one model per query and learn from its answer alone: Exp3 and its kin.

Losses are between 0 and 1. An update divides by the probability that was logged with the choice, not by
today's. A chosen model that did not answer teaches nothing.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

from typing_extensions import override

from controller.selection.core.policy import PerModelPolicy, check_range
from controller.selection.core.query import Choice, Observation, Query
from controller.selection.policies.weights import LogWeights, draw

# Largest step of a logarithm. The paper's form divides a loss by a probability that may be next to
# nothing, so one unlucky draw would end a model for good. With this bound no single loss leaves a model
# less than e**-3, a twentieth, of its weight.
STEP_MAX = 3.0


class _OneModel(PerModelPolicy[LogWeights]):
    """Draws one model from a distribution over weights. The policies of this file differ in the rest."""

    chooses_one: bool = True
    state_type = LogWeights

    @override
    def select(self, state: LogWeights, query: Query) -> Choice:
        models = query.in_time
        if not models:
            return Choice(())
        shares = self._shares(state, models)
        index = draw(shares, query.rng)
        return Choice((models[index],), (shares[index],))

    def _shares(self, state: LogWeights, models: Sequence[str]) -> list[float]:
        return state.shares(models)

    @override
    def observe(self, state: LogWeights, observation: Observation) -> LogWeights:
        # Only the chosen model is charged: of the others the answer says nothing.
        if not observation.choice.members:
            return state
        model = observation.choice.members[0]
        loss = observation.losses.get(model)
        if loss is None or model not in state.models:
            return state
        return self._learn(state, model, loss, observation.choice.propensities[0])

    @abc.abstractmethod
    def _learn(self, state: LogWeights, model: str, loss: float, propensity: float) -> LogWeights:
        """Charge a loss to the model that was chosen with a propensity."""

    @override
    def weights(self, state: LogWeights) -> dict[str, float]:
        # The probability of each model, if all could be in time.
        return dict(zip(state.models, self._shares(state, state.models), strict=True))


class Exp3(_OneModel):
    """Clipper's own form (section 5.1): `s_i <- s_i exp(-eta L / p_i)`, without an exploration term."""

    def __init__(self, *, eta: float = 0.1) -> None:
        """Set the rate.

        Args:
            eta: learning rate; small values are steady, large ones follow changes.
        """
        self.eta = check_range("eta", eta, 0.0, 10.0, open_low=True)

    def _learn(self, state: LogWeights, model: str, loss: float, propensity: float) -> LogWeights:
        return state.add({model: -min(self.eta * loss / propensity, STEP_MAX)})


class Exp3IX(_OneModel):
    """Implicit exploration (Neu 2015): `L / (p + gamma)`, `gamma = eta / 2`; bounded by construction.

    Without `eta` the rate is the anytime `sqrt(ln K / (K t))`.
    """

    def __init__(self, *, eta: float | None = None) -> None:
        """Set the rate.

        Args:
            eta: learning rate; by default it falls with the number of rounds.
        """
        self.eta = None if eta is None else check_range("eta", eta, 0.0, 10.0, open_low=True)

    def _learn(self, state: LogWeights, model: str, loss: float, propensity: float) -> LogWeights:
        num_models = len(state.models)
        eta = self.eta
        if eta is None:
            # A single model has nothing to learn. Its ln 1 would be a rate of 0, and a division by 0.
            eta = math.sqrt(math.log(max(num_models, 2)) / (num_models * (state.rounds + 1)))
        return state.add({model: -eta * loss / (propensity + eta / 2)})


class Exp3S(_OneModel):
    """Exp3.S (Auer et al. 2002, section 8): follows a best model that changes over time.

    `p_i = (1 - gamma) w_i / W + gamma / K`. The chosen model's weight grows by `exp(gamma x / (p K))`,
    where x is the reward; then every weight gets `e alpha / K` of the total.
    """

    def __init__(self, *, gamma: float = 0.05, alpha: float = 1e-4) -> None:
        """Set the rates.

        Args:
            gamma: share of uniform draws; also the learning rate.
            alpha: expected changes per query; the paper's choice is 1 / T.
        """
        self.gamma = check_range("gamma", gamma, 0.0, 1.0, open_low=True)
        self.alpha = check_range("alpha", alpha, 0.0, 0.1)

    def _shares(self, state: LogWeights, models: Sequence[str]) -> list[float]:
        floor = self.gamma / len(models)
        return [(1 - self.gamma) * share + floor for share in state.shares(models)]

    def _learn(self, state: LogWeights, model: str, loss: float, propensity: float) -> LogWeights:
        num_models = len(state.models)
        total = sum(math.exp(log) for log in state.logs)
        gain = min(self.gamma * (1 - loss) / (propensity * num_models), 1.0)
        grown = state.add({model: gain})
        # `add` shifts all logarithms so that the largest is 0. Shift the total by as much.
        shift = max(
            log + (gain if name == model else 0.0)
            for name, log in zip(state.models, state.logs, strict=True)
        )
        added = math.e * self.alpha / num_models * total * math.exp(-shift)
        logs = tuple(math.log(math.exp(log) + added) for log in grown.logs)
        top = max(logs)
        return LogWeights(state.models, tuple(log - top for log in logs), grown.rounds)
