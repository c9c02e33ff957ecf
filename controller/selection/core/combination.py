"""How the answers of several models become one.

Clipper (section 5.2.2) replaces the prediction of a member that did not answer by its average value. A
class label has no average. So here a member that did not answer has no say, and counts against the
confidence: agreement and weight mass are shares of all chosen members, not of those that answered. Numbers
have an average: the mean over those that answered is the same as the paper's, which puts it in their place.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from controller.selection.core.query import Combined, Label, Prediction


class Rule(enum.Enum):
    """How predictions are combined; the values are the wire's."""

    #: The label with the most weight behind it.
    VOTE = "vote"
    #: The class with the largest weighted mean probability.
    AVERAGE = "average"
    #: The weighted mean of every number of every output.
    MEAN = "mean"
    #: No combination: the one chosen model's outputs as they are.
    ONE = "one"


def single(rule: Rule, prediction: Prediction) -> Combined:
    """Pass one model's answer on. Its confidence is the model's own, or 1 if the model gives none."""
    probabilities = prediction.probabilities
    confidence = max(probabilities) if probabilities and rule is not Rule.MEAN else 1.0
    return Combined(
        label=prediction.label,
        confidence=min(max(confidence, 0.0), 1.0),
        probabilities=probabilities,
    )


def combine(
    rule: Rule,
    weights: Mapping[str, float],
    predictions: Mapping[str, Prediction],
    members: Sequence[str],
) -> Combined:
    """Combine the answers of an ensemble.

    Args:
        rule: vote, average or mean. With mean there are no labels: all say 0.
        weights: the weight of every member; not negative.
        predictions: the predictions of the members that answered; at least one.
        members: all members that were chosen, whether they answered or not.

    Returns:
        The answer. If two labels weigh the same, it is the one that an earlier member said.
    """
    mass: dict[Label, float] = {}
    votes: dict[Label, int] = {}
    winner: Label
    answered = [member for member in members if member in predictions]
    # When the weights of all that answered are 0, they count alike.
    heard = sum(weights[member] for member in answered)
    for member in answered:
        label = predictions[member].label
        mass[label] = mass.get(label, 0.0) + (weights[member] if heard > 0 else 1.0)
        votes[label] = votes.get(label, 0) + 1
    probabilities: tuple[float, ...] = ()
    if rule is Rule.MEAN:
        winner, probabilities = 0, _mean(weights, predictions, answered, heard)
    elif rule is Rule.AVERAGE:
        probabilities = _mean(weights, predictions, answered, heard)
        winner = max(range(len(probabilities)), key=probabilities.__getitem__)
    else:
        winner = max(mass, key=mass.__getitem__)
    total = sum(weights[member] for member in members) if heard > 0 else float(len(members))
    agreement = votes.get(winner, 0) / len(members)
    return Combined(
        label=winner,
        confidence=agreement,
        agreement=agreement,
        weight_mass=min(mass.get(winner, 0.0) / total, 1.0),
        probabilities=probabilities,
    )


def _mean(
    weights: Mapping[str, float],
    predictions: Mapping[str, Prediction],
    answered: Sequence[str],
    heard: float,
) -> tuple[float, ...]:
    shares = [weights[member] / heard if heard > 0 else 1 / len(answered) for member in answered]
    rows = [predictions[member].probabilities for member in answered]
    return tuple(
        sum(share * value for share, value in zip(shares, column, strict=True))
        for column in zip(*rows, strict=True)
    )
