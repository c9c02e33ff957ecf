"""Policies that ask an ensemble: two different algorithms that both go by the name of Exp4.

`Exp4` is Auer et al. 2002: actions are labels, models are experts, and feedback says only whether the
*served* label was right. So the served label is drawn and its probability logged; serving the heaviest
label and learning from right or wrong alone would be unsound.

`Exp4FullInformation` is what Clipper describes (section 5.2): feedback gives the true label, and with it
the loss of every model that answered. Each weight falls by the model's own loss. This is Hedge: nothing
is drawn, and no loss is divided by a probability. A reward for a label that was not drawn teaches it nothing,
because the rewards of the other labels are unknown; `Exp4` is there for that.

Where all that answered did equally well, no weight moves in either. The fixed share waits too: it stands
for a change of the best model, and such a round shows none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log
from typing import ClassVar

from typing_extensions import override

from controller.selection.core.combination import Rule, combine
from controller.selection.core.policy import PerModelPolicy, check_range
from controller.selection.core.query import Choice, Combined, Observation, Prediction, Query
from controller.selection.policies.weights import LogWeights, draw

# The name of the expert that is no model. No model's name has a "*".
CROWD = "*"


class _Ensemble(PerModelPolicy[LogWeights]):
    """Asks every model that can be in time, the heaviest first."""

    state_type = LogWeights

    def __init__(self, *, share: float = 0.0, max_members: int = 0) -> None:
        self.share = check_range("share", share, 0.0, 0.5)
        self.max_members = int(check_range("max_members", max_members, 0, 1000))

    @override
    def select(self, state: LogWeights, query: Query) -> Choice:
        models = query.in_time
        if not models:
            return Choice(())
        weights = dict(zip(models, self.says(state, models), strict=True))
        # The sort is stable: equal weights keep the application's order.
        models.sort(key=lambda model: -weights[model])
        if self.max_members:
            models = models[: self.max_members]
        return Choice(tuple(models), (1.0,) * len(models))

    @override
    def combine(
        self,
        state: LogWeights,
        query: Query,
        choice: Choice,
        predictions: Mapping[str, Prediction],
        rule: Rule,
    ) -> Combined:
        weights = dict(zip(choice.members, self.says(state, choice.members), strict=True))
        return combine(rule, weights, predictions, choice.members)

    def says(self, state: LogWeights, models: Sequence[str]) -> list[float]:
        """Each model's part of the answer; they sum to 1."""
        return state.shares(models)

    @override
    def weights(self, state: LogWeights) -> dict[str, float]:
        return dict(zip(state.models, state.shares(state.models), strict=True))


class Exp4FullInformation(_Ensemble):
    """Hedge over the models that answered: `w_i <- w_i exp(-eta L_i)`; needs the true label.

    A reward gives the losses only of those who said what was served. If others said something else, the
    state stays as it is: charging only some would favour the models that were not served.

    There is one more expert than there are models: the crowd, which says what most members say. Hedge
    follows the best single expert. Where members are equally good and err on different queries, the best
    expert is none of them but their majority: without the crowd, weights drift to one of five small
    forests, although the majority errs a third less (experiments/clipper_paper/fig7.py). The crowd's
    weight is spread evenly over the members.

    A member that did not answer keeps its share of the whole, neither punished nor rewarded (a sleeping
    expert, Freund et al. 1997). If its weight stayed as it is while the others fall, lateness would pay.
    """

    # Version 1 had no crowd.
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
            share: part of all weight that is spread evenly after each feedback (fixed share). With 0 the
                policy weighs all history equally, so it forgets as slowly as it learned.
            max_members: limit on models per query, the heaviest ones first; 0: all.
            crowd: count the majority as an expert. Without it this is Clipper's published algorithm.
        """
        super().__init__(share=share, max_members=max_members)
        self.eta = check_range("eta", eta, 0.0, 10.0, open_low=True)
        self.crowd = (CROWD,) if crowd else ()

    @override
    def init(self, models: Sequence[str]) -> LogWeights:
        return super().init((*models, *self.crowd))

    @override
    def resize(self, state: LogWeights, models: Sequence[str]) -> LogWeights:
        return super().resize(state, (*models, *self.crowd))

    @override
    def says(self, state: LogWeights, models: Sequence[str]) -> list[float]:
        # A model's say is its own weight and an even part of the crowd's.
        shares = state.shares((*models, *self.crowd))
        everybodys = shares.pop() / len(models) if self.crowd else 0.0
        return [share + everybodys for share in shares]

    @override
    def weights(self, state: LogWeights) -> dict[str, float]:
        models = [model for model in state.models if model != CROWD]
        return dict(zip(models, self.says(state, models), strict=True))

    @override
    def observe(self, state: LogWeights, observation: Observation) -> LogWeights:
        losses = dict(observation.losses)
        if observation.votes.keys() - losses.keys():
            return state
        if len(set(losses.values())) < 2:  # There is nothing to compare.
            return state.add({})
        if self.crowd:
            voters = [m for m in observation.choice.members if m in observation.votes]
            counted = Counter(observation.votes[member] for member in voters).most_common(2)
            # On a tie the crowd has said nothing.
            if counted and (len(counted) < 2 or counted[0][1] > counted[1][1]):
                first = next(m for m in voters if observation.votes[m] == counted[0][0])
                if first in losses:
                    losses[CROWD] = losses[first]
        awake = [expert for expert in state.models if expert in losses]
        before = dict(zip(awake, state.shares(awake), strict=True))
        kept = sum(before[expert] * exp(-self.eta * losses[expert]) for expert in awake)
        # The experts that spoke keep together the weight that they had together.
        gains = {expert: -self.eta * losses[expert] - log(kept) for expert in awake}
        return state.add(gains).shared(self.share)


class Exp4(_Ensemble):
    """Learns only from whether the served label was right, and therefore draws the served label.

    Actions are the J labels that a query's members voted for: `p_j = (1 - gamma) m_j + gamma / J`, where
    m_j is the weight of label j. Serving a label without votes, as exploring all classes would, teaches
    nothing about any model. The update is Auer's: `w_i <- w_i exp(gamma y_i / J)`, with
    `y_i = x / p` for the members that voted for the served label and x the reward.
    """

    def __init__(self, *, gamma: float = 0.1, share: float = 1e-3, max_members: int = 0) -> None:
        """Set the rates.

        Args:
            gamma: share of uniform draws among the labels with votes; also the learning rate.
            share: part of all weight that is spread evenly after each feedback.
            max_members: limit on models per query, the heaviest ones first; 0: all.
        """
        super().__init__(share=share, max_members=max_members)
        self.gamma = check_range("gamma", gamma, 0.0, 1.0, open_low=True)

    @override
    def combine(
        self,
        state: LogWeights,
        query: Query,
        choice: Choice,
        predictions: Mapping[str, Prediction],
        rule: Rule,
    ) -> Combined:
        # The label is drawn; probabilities, where the application averages, stay the average.
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

    @override
    def observe(self, state: LogWeights, observation: Observation) -> LogWeights:
        # The members that voted for the served label get the credit, if it was right.
        served, loss = observation.served, observation.served_loss
        if served is None or loss is None:
            return state
        voted = [m for m in observation.choice.members if m in observation.votes]
        num_labels = len({observation.votes[member] for member in voted})
        if not num_labels:
            return state
        gain = self.gamma * (1 - loss) / (observation.served_propensity * num_labels)
        if num_labels < 2 or not gain:
            return state.add({})
        gains = {member: min(gain, 1.0) for member in voted if observation.votes[member] == served}
        return state.add(gains).shared(self.share)
