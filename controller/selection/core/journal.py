"""Answered queries, kept by query id until their feedback comes or they are too old.

Feedback may come late, out of order, twice or never. It is weighed with what was known when the query
was answered; Clipper's first public version drew again instead. A second feedback for one query changes
nothing. No I/O, and time is an argument.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from controller.selection.core.query import Choice, Label, Observation


@dataclass(slots=True)
class AnsweredQuery:
    """One answered query."""

    application: str
    context: str
    choice: Choice
    #: Label of each model that has answered. Shadows and late members are added as their answers come.
    votes: dict[str, Label]
    #: Label that was combined from the votes; None: no model answered.
    combined: Label | None
    #: Probability with which that label was served.
    propensity: float
    #: The default was served instead.
    is_default: bool
    #: Time of the answer.
    at_ns: int
    #: Owner of the query, who may give feedback.
    asker: str = ""
    #: The models say labels. With numbers, feedback tells no member from another.
    labelled: bool = True
    #: The query has had its feedback.
    closed: bool = False


class FeedbackStatus(enum.Enum):
    """What a feedback led to; the values are the wire's."""

    #: It was learned from.
    APPLIED = "APPLIED"
    #: It taught nothing: no model had answered, the default was rewarded, or the policy learns only from
    #: feedback of another kind.
    UNINFORMATIVE = "UNINFORMATIVE"
    #: The query had its feedback before; nothing has changed.
    DUPLICATE = "DUPLICATE"
    #: The query is not known, or is too old; nothing has changed.
    UNKNOWN = "UNKNOWN"
    #: Learning from it failed; nothing has changed, and it may be given again.
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class FeedbackItem:
    """A client's verdict on one answer: either the true label, or how good the answer was."""

    query_id: str
    #: The true label; None: `reward` is given.
    label: Label | None = None
    #: How good the answer was, from 0 to 1; None: `label` is given.
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """A feedback joined with its query."""

    status: FeedbackStatus
    #: Given exactly if the status is APPLIED.
    observation: Observation | None = None
    #: Loss of each model about which the feedback says something.
    losses: Mapping[str, float] = field(default_factory=dict)


class Journal:
    """Answered queries, oldest first; bounded in number and age."""

    def __init__(self, *, capacity: int, ttl_ns: int) -> None:
        """Start empty.

        The oldest queries leave first; feedback that comes `ttl_ns` after the answer is no longer taken.
        """
        self._capacity = capacity
        self._ttl_ns = ttl_ns
        self._records: OrderedDict[str, AnsweredQuery] = OrderedDict()
        #: Ids of the queries of each application, by context.
        self._ids: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(
            lambda: defaultdict(set)
        )

    def __len__(self) -> int:
        return len(self._records)

    def add(self, query_id: str, record: AnsweredQuery) -> None:
        """Keep an answered query, and drop those that are too old or too many."""
        oldest_ns = record.at_ns - self._ttl_ns
        records = self._records
        while records:
            first = next(iter(records))
            if records[first].at_ns >= oldest_ns and len(records) < self._capacity:
                break
            self._drop(first)
        records[query_id] = record
        self._ids[record.application][record.context].add(query_id)

    def add_vote(self, query_id: str, model: str, label: Label) -> None:
        """Add a shadow's or a late member's vote to a query. It is too late once feedback has been given."""
        record = self._records.get(query_id)
        if record is not None and not record.closed:
            record.votes.setdefault(model, label)

    def find(self, query_id: str, *, now_ns: int) -> AnsweredQuery | None:
        """Find the query of an id, unless it is too old."""
        record = self._records.get(query_id)
        return None if record is None or record.at_ns + self._ttl_ns < now_ns else record

    def join(self, feedback: FeedbackItem, *, now_ns: int) -> Joined:
        """Find the query of a feedback, close it, and work out each model's loss."""
        record = self.find(feedback.query_id, now_ns=now_ns)
        if record is None:
            return Joined(FeedbackStatus.UNKNOWN)
        if record.closed:
            return Joined(FeedbackStatus.DUPLICATE)
        record.closed = True
        losses, served_loss = _losses(record, feedback)
        if not losses:
            return Joined(FeedbackStatus.UNINFORMATIVE)
        observation = Observation(
            choice=record.choice,
            votes=record.votes,
            losses=losses,
            served=record.combined,
            served_loss=served_loss,
            served_propensity=record.propensity,
        )
        return Joined(FeedbackStatus.APPLIED, observation, losses)

    def forget(self, application: str, context: str | None = None) -> int:
        """Drop the queries of an application, or of one context of it; returns how many there were.

        This takes time linear in these queries; all others cost nothing.
        """
        by_context: Mapping[str, set[str]] = self._ids.get(application, {})
        doomed = [context] if context is not None else list(by_context)
        ids = [query_id for name in doomed for query_id in by_context.get(name, ())]
        for query_id in ids:
            self._drop(query_id)
        return len(ids)

    def _drop(self, query_id: str) -> None:
        record = self._records.pop(query_id)
        by_context = self._ids[record.application]
        by_context[record.context].discard(query_id)
        # Names of former users must not accumulate here.
        if not by_context[record.context]:
            del by_context[record.context]
        if not by_context:
            del self._ids[record.application]


def _losses(record: AnsweredQuery, feedback: FeedbackItem) -> tuple[dict[str, float], float | None]:
    """Work out each model's loss, and that of the combined label, as far as the feedback says."""
    if not record.labelled and (feedback.label is not None or len(record.votes) > 1):
        return {}, None
    if feedback.label is not None:
        # A text that is a number may come as a number.
        label = str(feedback.label)
        losses = {model: float(str(vote) != label) for model, vote in record.votes.items()}
        served = None if record.combined is None else float(str(record.combined) != label)
        return losses, served
    # A reward is for the label that was served. It says nothing about models that said another.
    if feedback.reward is None or record.is_default or record.combined is None:
        return {}, None
    loss = 1.0 - feedback.reward
    losses = {m: loss for m, vote in record.votes.items() if vote == record.combined}
    return losses, loss
