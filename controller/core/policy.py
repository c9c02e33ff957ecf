"""The interface of policies: which batch runs next, which weights are loaded or evicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from clockwright.errors import Refusal
from controller.core.config import SchedulerConfig
from controller.core.events import ActionSucceeded
from controller.core.state import Batch, Copy, Model, Request, SentAction, WorkerState


@dataclass(frozen=True, slots=True)
class Traits:
    """Differences in how the mechanism treats policies."""

    #: Refuse a request that cannot be in time, and run none too late. Else every request waits until it
    #: has run, and is judged by when that was.
    predicts: bool = False
    #: Serve a due wake-up at the next event of any kind; the timer itself may be 1 ms late.
    punctual: bool = False
    #: Fill free pages for refused requests, too. Where the SLO is shorter than a load, every request is
    #: refused until a copy is there.
    eager_copies: bool = False


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """How a policy is made, and its traits: an entry of `policies.POLICIES`, or of a foreign package."""

    make: Callable[[SchedulerConfig], Policy]
    traits: Traits


class Policy(Protocol):
    """Hears of changes, and chooses batches and weights. Keeps no state of requests or workers but its own notes.

    A policy that derives from this class leaves out what does not concern it: by default it does nothing.
    The table in books.py says which change tells it what, and in which order.
    """

    #: Bound how far ahead of a lane the mechanism asks; `lookahead_ns` is what a worker begins with.
    lookahead_ns: int
    max_outstanding: int
    #: Kept free between the predicted end of an EXEC and the deadline of a request that arrives now.
    margin_ns: int

    @property
    def wants_any(self) -> bool:
        """Whether any model is queued for loading. Some may no longer need it."""

    def queue_changed(self, model: Model) -> None:
        """Requests of the model came or went, or a copy of it became usable.

        The mechanism asks `next_infer` for workers whose `strategies` are not empty: fill them here, or, where
        the model has many copies, when the mechanism looks at a worker (`catch_up`).
        """

    def catch_up(self, worker: WorkerState) -> None:
        """The mechanism is about to look at the worker: bring its `strategies` up to date."""
        return

    def demand_changed(self, model: Model) -> None:
        """Its outstanding requests, or the set of its copies, changed."""
        return

    def copy_gone(self, copy: Copy) -> None:
        """A copy was evicted or lost."""

    def leaves_room(self, request: Request, now_ns: int) -> float:
        """The part of its slack, 0 to 1, that an arriving request with a tenant leaves to others."""
        return 0.0

    def infer_ended(self, sent: SentAction, event: ActionSucceeded, now_ns: int) -> None:
        """An Infer succeeded; its copy holds one pin less."""
        return

    def refused(self, request: Request, refusal: Refusal, *, now_ns: int) -> None:
        """A request that arrives, or waited, is refused."""
        return

    def unpark(self, worker: WorkerState) -> None:
        """An Infer of the worker ended, well or not, or the worker is gone."""
        return

    def want_load(self, model: Model, now_ns: int) -> bool:
        """Queue the model for loading if it should be; tells whether it is."""

    def forget_unwanted(self, now_ns: int) -> None:
        """Make `wants_any` exact: drop models at the head of the queue that no longer need a load."""

    def next_infer(self, worker: WorkerState, free_ns: int, now_ns: int) -> Batch | None:
        """Choose what the exec lane runs next.

        Args:
            worker: its exec lane has room.
            free_ns: when the lane could begin something new, as predicted.
            now_ns: the present.
        """

    def runs(self, batch: Batch, now_ns: int) -> None:
        """A batch is sent, whose requests still stand in their queue.

        Not all that `next_infer` chose are, and some are not what it chose: a promise may demand another (promises.py).
        """
        return

    def next_load(self, worker: WorkerState, begin_ns: int, now_ns: int) -> Model | None:
        """Choose what the load lane loads next.

        Args:
            worker: its load lane has room.
            begin_ns: when a load sent now would begin.
            now_ns: the present.
        """

    def victims(self, worker: WorkerState, num_pages: int, now_ns: int) -> list[Copy] | None:
        """Copies whose eviction makes `num_pages` pages free. Returns None if none do."""

    def victims_of_refused(
        self, model: Model, worker: WorkerState, num_pages: int, now_ns: int
    ) -> list[Copy] | None:
        """The same for a model that was refused though it has a copy. By default it may not evict others."""
        return None
