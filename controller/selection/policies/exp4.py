"""Policies that ask an ensemble: two different algorithms that both go by the name of Exp4.

`Exp4` is Auer et al. 2002: actions are labels, models are experts, and only whether the *served* label
was right need be known. For that the served label is drawn, and its probability logged; serving the
heaviest label and learning from right or wrong alone would be unsound.

`Exp4FullInformation` is what Clipper describes (section 5.2): the true label is known, so the loss of
every model that answered is, and weights fall by each model's own loss. That is Hedge; nothing is
drawn, and no loss is divided by a probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log
from typing import Any, ClassVar

from controller.selection.core.combination import Rule, combine
from controller.selection.core.policy import Policy, check_range, dump_fields, load_fields
from controller.selection.core.query import Choice, Combined, Observation, Prediction, Query
from controller.selection.policies.weights import LogWeights, draw

# In no model's name.
CROWD = "*"


class _Ensemble(Policy[LogWeights]):
    """What the two share: ask everybody who can be in time, the heaviest first."""

    def __init__(self, *, share: float = 0.0, max_members: int = 0) -> None:
        self.share = check_range("share", share, 0.0, 0.5)
        self.max_members = int(check_range("max_members", max_members, 0, 1000))

    def init(self, models: Sequence[str]) -> LogWeights:
        """All alike."""
        return LogWeights.uniform(models)

    def select(self, state: LogWeights, query: Query) -> Choice:
        """Take all that can be in time, or the heaviest of them."""
        models = query.in_time
        if not models:
            return Choice(())
        weights = dict(zip(models, self.says(state, models), strict=True))
        # Of equals, in the application's order.
        models.sort(key=lambda model: -weights[model])
        if self.max_members:
            models = models[: self.max_members]
        return Choice(tuple(models), (1.0,) * len(models))

    def combine(
        self,
        state: LogWeights,
        query: Query,
        choice: Choice,
        predictions: Mapping[str, Prediction],
        rule: Rule,
    ) -> Combined:
        """Combine by weight."""
        weights = dict(zip(choice.members, self.says(state, choice.members), strict=True))
        return combine(rule, weights, predictions, choice.members)

    def says(self, state: LogWeights, models: Sequence[str]) -> list[float]:
        """Each model's part of the answer; they sum to 1."""
        return state.shares(models)

    def resize(self, state: LogWeights, models: Sequence[str]) -> LogWeights:
        """See `LogWeights.resized`."""
        return state.resized(models)

    def dump(self, state: LogWeights) -> dict[str, Any]:
        """See `Policy`."""
        return dump_fields(state)

    def load(self, data: Mapping[str, Any]) -> LogWeights:
        """See `Policy`."""
        return load_fields(LogWeights, data)

    def weights(self, state: LogWeights) -> dict[str, float]:
        """Each model's say."""
        return dict(zip(state.models, state.shares(state.models), strict=True))


class Exp4FullInformation(_Ensemble):
    """Hedge over the models that answered: `w_i <- w_i exp(-eta L_i)`; needs the true label.

    One more expert than there are models: the crowd, which says what most members say. Hedge follows the
    best single expert, and where members are equally good and err apart, that is what none of them but
    all of them together are: without it, weights drift to one of five small forests whose majority errs a
    third less (experiments/figures/clipper_fig7.py). The crowd's weight is spread evenly over the members.

    A member that did not answer keeps its share of the whole, neither punished nor rewarded (a sleeping
    expert, Freund et al. 1997): left alone among falling weights it would gain by being late.
    """

    # 2: the crowd.
    version: ClassVar[int] = 2

    def __init__(
        self,
        *,
        eta: float = 0.3,
        share: float = 1e-3,
        max_members: int = 0,
        crowd: bool = True,
    ) -> None:
        """Set the rates.

        Args:
            eta: learning rate.
            share: of all weight that is spread evenly after each feedback (fixed share); without it
                the policy weighs all history alike and takes as long to forget as it took to learn.
            max_members: most models asked at once, the heaviest; 0: all.
            crowd: count the majority as an expert; without it this is Clipper's as the paper has it.
        """
        super().__init__(share=share, max_members=max_members)
        self.eta = check_range("eta", eta, 0.0, 10.0, open_low=True)
        self.crowd = (CROWD,) if crowd else ()

    def init(self, models: Sequence[str]) -> LogWeights:
        """All alike, the crowd too."""
        return LogWeights.uniform((*models, *self.crowd))

    def resize(self, state: LogWeights, models: Sequence[str]) -> LogWeights:
        """See `LogWeights.resized`; the crowd stays."""
        return state.resized((*models, *self.crowd))

    def says(self, state: LogWeights, models: Sequence[str]) -> list[float]:
        """Each model's weight, and its part of the crowd's."""
        shares = state.shares((*models, *self.crowd))
        everybodys = shares.pop() / len(models) if self.crowd else 0.0
        return [share + everybodys for share in shares]

    def weights(self, state: LogWeights) -> dict[str, float]:
        """Each model's say."""
        models = [model for model in state.models if model != CROWD]
        return dict(zip(models, self.says(state, models), strict=True))

    def observe(self, state: LogWeights, observation: Observation) -> LogWeights:
        """Charge every expert whose loss is known."""
        losses = dict(observation.losses)
        # With one loss only, all weight stays where it is: there is nobody to compare it with.
        if len(losses) < 2:
            return state
        if self.crowd:
            voters = [m for m in observation.choice.members if m in observation.votes]
            counted = Counter(observation.votes[member] for member in voters).most_common(2)
            # Of two minds, it has said nothing.
            if counted and (len(counted) < 2 or counted[0][1] > counted[1][1]):
                first = next(m for m in voters if observation.votes[m] == counted[0][0])
                if first in losses:
                    losses[CROWD] = losses[first]
        awake = [expert for expert in state.models if expert in losses]
        before = dict(zip(awake, state.shares(awake), strict=True))
        kept = sum(before[expert] * exp(-self.eta * losses[expert]) for expert in awake)
        # Among themselves the awake keep what they had together.
        gains = {expert: -self.eta * losses[expert] - log(kept) for expert in awake}
        return state.add(gains).shared(self.share)


class Exp4(_Ensemble):
    """Exp4 from "was the served label right?", with the served label drawn.

    Actions are the labels that were voted for, of which there are J in a query: `p_j = (1 - gamma) m_j
    + gamma / J`, m_j the weight behind label j. Serving labels that nobody voted for, as exploring all
    classes would, teaches nothing about any model. The update is Auer's: `w_i <- w_i exp(gamma y_i / J)`
    with `y_i = x / p` for those who voted for the served label, x the reward.
    """

    def __init__(self, *, gamma: float = 0.1, share: float = 1e-3, max_members: int = 0) -> None:
        """Set the rates.

        Args:
            gamma: share of even draws among the labels voted for, and learning rate.
            share: as in `Exp4FullInformation`.
            max_members: as in `Exp4FullInformation`.
        """
        super().__init__(share=share, max_members=max_members)
        self.gamma = check_range("gamma", gamma, 0.0, 1.0, open_low=True)

    def combine(
        self,
        state: LogWeights,
        query: Query,
        choice: Choice,
        predictions: Mapping[str, Prediction],
        rule: Rule,
    ) -> Combined:
        """Draw the label; probabilities, if averaged, stay the average."""
        weights = dict(zip(choice.members, state.shares(choice.members), strict=True))
        answered = [member for member in choice.members if member in predictions]
        heard = sum(weights[member] for member in answered)
        labels = list(dict.fromkeys(predictions[member].label for member in answered))
        voters = {label: [m for m in answered if predictions[m].label == label] for label in labels}
        masses = [
            sum(weights[member] for member in voters[label]) / heard
            if heard > 0
            else len(voters[label]) / len(answered)
            for label in labels
        ]
        floor = self.gamma / len(labels)
        chances = [(1 - self.gamma) * mass + floor for mass in masses]
        index = draw(chances, query.rng)
        agreement = len(voters[labels[index]]) / len(choice.members)
        averaged = combine(rule, weights, predictions, choice.members)
        return replace(
            averaged,
            label=labels[index],
            confidence=agreement,
            agreement=agreement,
            weight_mass=sum(weights[member] for member in voters[labels[index]]),
            propensity=chances[index],
        )

    def observe(self, state: LogWeights, observation: Observation) -> LogWeights:
        """Credit those who voted for what was served, if it was right."""
        served, loss = observation.served, observation.served_loss
        if served is None or loss is None:
            return state
        voted = [m for m in observation.choice.members if m in observation.votes]
        num_labels = len({observation.votes[member] for member in voted})
        if not num_labels:
            return state
        gain = self.gamma * (1 - loss) / (observation.served_propensity * num_labels)
        gains = {member: min(gain, 1.0) for member in voted if observation.votes[member] == served}
        return state.add(gains).shared(self.share)
