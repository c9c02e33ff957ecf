"""What was answered, kept until its feedback comes: by query id, for a while, once.

Feedback may come late, out of order, twice or never. It is weighed with what was known when the query
was answered (Clipper's first public version drew anew instead), and a second feedback for one
query changes nothing. No I/O, and time is an argument.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from controller.selection.core.query import Choice, Observation


@dataclass(slots=True)
class Record:
    """One answered query."""

    application: str
    context: str
    choice: Choice
    #: Label of each model that has answered; shadows are added as they come.
    votes: dict[str, int]
    #: The label that was made of them; None: nobody answered.
    combined: int | None
    propensity: float
    #: The default was served instead.
    is_default: bool
    at_ns: int
    #: Has had its feedback.
    closed: bool = False


class FeedbackStatus(enum.Enum):
    """What became of a feedback; the values are the wire's."""

    #: Learned from.
    APPLIED = "APPLIED"
    #: Correct, but it says nothing about any model: nobody had answered, or the default was rewarded.
    UNINFORMATIVE = "UNINFORMATIVE"
    #: The query has had its feedback; nothing has changed.
    DUPLICATE = "DUPLICATE"
    #: No such query, or too long ago; nothing has changed.
    UNKNOWN = "UNKNOWN"
    #: It could not be learned from; nothing has changed, and it may be given again.
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class FeedbackItem:
    """What somebody says of an answer: the true label, or how good the answer was."""

    query_id: str
    #: Exactly one of the two.
    label: int | None = None
    #: From 0 to 1.
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """What follows from a feedback."""

    status: FeedbackStatus
    observation: Observation | None = None
    losses: Mapping[str, float] = field(default_factory=dict)


class Journal:
    """Answered queries, oldest first; bounded in number and age."""

    def __init__(self, *, capacity: int, ttl_ns: int) -> None:
        """Start empty.

        Args:
            capacity: queries kept; the oldest leave first.
            ttl_ns: feedback this long after the answer is no longer taken.
        """
        self._capacity = capacity
        self._ttl_ns = ttl_ns
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, query_id: str, record: Record) -> None:
        """Keep an answered query."""
        oldest_ns = record.at_ns - self._ttl_ns
        records = self._records
        while records:
            first = next(iter(records))
            if records[first].at_ns >= oldest_ns and len(records) < self._capacity:
                break
            del records[first]
        records[query_id] = record

    def add_vote(self, query_id: str, model: str, label: int) -> None:
        """A shadow has answered, after the query was; too late when feedback has been given."""
        record = self._records.get(query_id)
        if record is not None and not record.closed:
            record.votes.setdefault(model, label)

    def find(self, query_id: str, *, now_ns: int) -> Record | None:
        """The query of an id, unless it is too old."""
        record = self._records.get(query_id)
        return None if record is None or record.at_ns + self._ttl_ns < now_ns else record

    def join(self, feedback: FeedbackItem, *, now_ns: int) -> Joined:
        """Find the query of a feedback, close it, and say what follows for each model."""
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
        """Drop the queries of an application, or of one context of it; linear. Returns how many."""
        doomed = [
            query_id
            for query_id, record in self._records.items()
            if record.application == application and context in (None, record.context)
        ]
        for query_id in doomed:
            del self._records[query_id]
        return len(doomed)


def _losses(record: Record, feedback: FeedbackItem) -> tuple[dict[str, float], float | None]:
    """Loss of each model, and of the label that was made, as far as the feedback says."""
    if feedback.label is not None:
        losses = {model: float(vote != feedback.label) for model, vote in record.votes.items()}
        served = None if record.combined is None else float(record.combined != feedback.label)
        return losses, served
    # A reward is for what was served; of who said something else it says nothing.
    if feedback.reward is None or record.is_default or record.combined is None:
        return {}, None
    loss = 1.0 - feedback.reward
    losses = {m: loss for m, vote in record.votes.items() if vote == record.combined}
    return losses, loss
