"""What the mechanism asks of a policy: which batch runs next, which weights are loaded or evicted."""

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
    """What the mechanism does otherwise for one policy than for another."""

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
    """Hears what changed, says what to do. Holds no truth of its own about requests or workers.

    The table in books.py says which change tells it what, and in which order.
    """

    #: Bound how far ahead of a lane the mechanism asks; `lookahead_ns` is what a worker begins with.
    lookahead_ns: int
    max_outstanding: int
    #: Kept free between the predicted end of an EXEC and the deadline of a request that arrives now.
    margin_ns: int

    @property
    def wants_any(self) -> bool:
        """Whether any model is queued for loading; some may need it no more."""

    def queue_changed(self, model: Model) -> None:
        """Requests of the model came or went, or a copy of it became usable.

        The mechanism asks `next_infer` for workers whose `strategies` are not empty: fill them here, or, where
        the model has many copies, when the mechanism looks at a worker (`catch_up`).
        """

    def catch_up(self, worker: WorkerState) -> None:
        """The mechanism is about to look at the worker: bring its `strategies` up to date."""

    def demand_changed(self, model: Model) -> None:
        """Its outstanding requests, or the set of its copies, changed."""

    def copy_gone(self, copy: Copy) -> None:
        """A copy was evicted or lost."""

    def leaves_room(self, request: Request, now_ns: int) -> float:
        """The part of its slack, 0 to 1, that an arriving request with a tenant leaves to others."""

    def infer_ended(self, sent: SentAction, event: ActionSucceeded, now_ns: int) -> None:
        """An Infer succeeded; its copy holds one pin less."""

    def refused(self, request: Request, refusal: Refusal, *, now_ns: int) -> None:
        """A request that arrives, or waited, is refused."""

    def unpark(self, worker: WorkerState) -> None:
        """An Infer of the worker ended, well or not, or the worker is gone."""

    def want_load(self, model: Model, now_ns: int) -> bool:
        """Queue the model for loading if it should be; tells whether it is."""

    def forget_unwanted(self, now_ns: int) -> None:
        """Make `wants_any` exact: drop what is first in the queue and needs no load any more."""

    def next_infer(self, worker: WorkerState, free_ns: int, now_ns: int) -> Batch | None:
        """Choose what the exec lane runs next.

        Args:
            worker: its exec lane has room.
            free_ns: when the lane could begin something new, as predicted.
            now_ns: the present.
        """

    def next_load(self, worker: WorkerState, begin_ns: int, now_ns: int) -> Model | None:
        """Choose what the load lane loads next.

        Args:
            worker: its load lane has room.
            begin_ns: when a load sent now would begin.
            now_ns: the present.
        """

    def victims(self, worker: WorkerState, num_pages: int, now_ns: int) -> list[Copy] | None:
        """Copies whose eviction makes `num_pages` pages free; None when that cannot be."""

    def victims_of_refused(
        self, model: Model, worker: WorkerState, num_pages: int, now_ns: int
    ) -> list[Copy] | None:
        """The same for a model that was refused though it has a copy; None: it may take nobody's pages."""
        return None
