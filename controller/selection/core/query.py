"""What a selection policy is shown, and what it says. Plain records.

A policy sees models by their public names and answers as `Prediction`s; tensors, request ids and
clocks stay outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Handed in seeded; a policy never makes one.
    from random import Random


@dataclass(slots=True)
class Candidate:
    """One model of an application, and what the scheduler predicts for this query."""

    model: str
    #: It can answer inside the SLO, were it the only one asked.
    in_time: bool = True
    #: Predicted latency, arrival to answer; 0 where nothing is predicted.
    latency_ns: int = 0
    #: Predicted EXEC time, which is what asking it costs others.
    cost_ns: int = 0
    #: Why it cannot be in time (a `Refusal`'s value); empty when it can.
    reason: str = ""


@dataclass(slots=True)
class Query:
    """One question to an application."""

    #: In the application's order.
    candidates: tuple[Candidate, ...]
    #: User, session or tenant; empty: none was named.
    context: str
    #: Every random draw of the policy comes from here.
    rng: Random

    @property
    def in_time(self) -> list[str]:
        """Models that can answer inside the SLO."""
        return [candidate.model for candidate in self.candidates if candidate.in_time]


@dataclass(frozen=True, slots=True)
class Choice:
    """Whom to ask."""

    #: Most important first: what does not fit into the SLO is left out from the end. May be empty.
    members: tuple[str, ...]
    #: Probability with which each member was to be chosen; 1.0 where nothing was drawn. Logged, because
    #: feedback must be weighed with the probability of then, not of now.
    propensities: tuple[float, ...] = ()
    #: Asked without being waited for; never part of an answer.
    shadows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one model said about one query."""

    label: int
    #: By class, where the application averages; else empty.
    probabilities: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Combined:
    """One answer made of several."""

    label: int
    #: Between 0 and 1; what the application's threshold is held against.
    confidence: float
    #: Share of the chosen members that said the same; members that did not answer count as others.
    agreement: float = 1.0
    #: Share of the chosen members' weight behind the answer, counted likewise.
    weight_mass: float = 1.0
    #: Probability with which this label was to be served; 1.0 where nothing was drawn.
    propensity: float = 1.0
    probabilities: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """Feedback, joined with what was known when the query was answered."""

    choice: Choice
    #: What each model said that answered, shadows included. Who is not here did not answer, in time
    #: or at all: that is not an error of its judgement and is never counted as one.
    votes: Mapping[str, int]
    #: Loss of each model, 0 to 1, as far as it follows from the feedback: from a label for all that
    #: answered, from a reward only for those that said what was served.
    losses: Mapping[str, float]
    #: Of the label that was served; None: the default was served.
    served: int | None
    served_loss: float | None
    #: `Combined.propensity` of then.
    served_propensity: float = 1.0


@dataclass(frozen=True, slots=True)
class Service:
    """How the members of a query fared, known without any feedback."""

    choice: Choice
    answered: frozenset[str]
    #: Chosen, sent, and without an answer in time. Who was left out before is in neither.
    missing: frozenset[str] = field(default_factory=frozenset)
