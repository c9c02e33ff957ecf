"""Plain records that a selection policy gets and returns.

A policy sees models by their public names and answers as `Prediction`s. Tensors, request ids and clocks
stay outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    # Generators come in seeded. A policy never makes one.
    from random import Random


#: What a model says a row is: an integer or a text.
Label: TypeAlias = int | str


@dataclass(slots=True)
class Candidate:
    """One model of an application, with the scheduler's prediction for this query."""

    model: str
    #: The model can answer within the SLO if no other model is asked too.
    in_time: bool = True
    #: Predicted latency from arrival to answer; 0 where nothing is predicted.
    latency_ns: int = 0
    #: Predicted EXEC time: the cost to other requests.
    cost_ns: int = 0
    #: Why the model cannot be in time (a `Refusal`'s value); empty when it can.
    reason: str = ""


@dataclass(slots=True)
class Query:
    """One query to an application."""

    #: All models of the application, in its order.
    candidates: tuple[Candidate, ...]
    #: User, session or tenant; empty: none was named.
    context: str
    #: Source of every random draw of the policy.
    rng: Random

    @property
    def in_time(self) -> list[str]:
        """Models that can answer within the SLO, in the application's order."""
        return [candidate.model for candidate in self.candidates if candidate.in_time]


@dataclass(frozen=True, slots=True)
class Choice:
    """The models that a policy wants to be asked."""

    #: Models whose answers are combined, the most important first: if they do not all fit into the SLO,
    #: the last ones are left out. May be empty.
    members: tuple[str, ...]
    #: Probability with which each member was to be chosen; 1.0 where nothing was drawn. It is logged,
    #: because feedback must be weighed with the probability of then, not of now.
    propensities: tuple[float, ...] = ()
    #: Models that are asked for comparison. No query waits for a shadow or is answered from one.
    shadows: tuple[str, ...] = ()
    #: The model that would have been chosen but could not be in time; empty: none.
    passed_over: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One model's answer to one query."""

    label: Label
    #: Probability of each class, where the application averages; all numbers of all outputs, where it takes
    #: their mean; else empty.
    probabilities: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Combined:
    """One answer made of several."""

    label: Label
    #: Number from 0 to 1 that is compared with the application's threshold.
    confidence: float
    #: Share of the chosen members with this label. Members without an answer count as other labels.
    agreement: float = 1.0
    #: Share of the chosen members' weight behind this label, counted in the same way.
    weight_mass: float = 1.0
    #: Probability with which this label was to be served; 1.0 where nothing was drawn.
    propensity: float = 1.0
    probabilities: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """Feedback, joined with what was known when the query was answered."""

    choice: Choice
    #: Label of each model that answered, shadows and late members included. A model that is missing here had
    #: not answered when the feedback came. That is not a wrong answer and never counts as one.
    votes: Mapping[str, Label]
    #: Loss of each model, 0 to 1, as far as it follows from the feedback. A label gives the loss of every
    #: model that answered; a reward, only of those that said the label that was served.
    losses: Mapping[str, float]
    #: Label that was combined from the votes; None: no model answered, and the default was served.
    served: Label | None
    #: Loss of that label; None where `served` is None.
    served_loss: float | None
    #: `Combined.propensity` when the query was answered.
    served_propensity: float = 1.0


@dataclass(frozen=True, slots=True)
class Service:
    """Which members of a query answered in time; it is known without any feedback."""

    choice: Choice
    answered: frozenset[str]
    #: Members that were asked and did not answer in time. Members that were not asked are in neither set.
    missing: frozenset[str] = field(default_factory=frozenset)
