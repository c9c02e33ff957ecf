"""What the controller knows: requests, models, copies, workers. Plain records; `Scheduler` acts.

All hash and compare by identity.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from clockwright.actions import Infer, LoadWeights
from clockwright.units import ActionId, ArchitectureId, GpuKind, ModelId, RequestId, WorkerId
from controller.core.delivery import DeliveryDelay
from controller.core.estimator import Estimates
from controller.core.lane import Lane
from controller.core.shares import ServedShare


class Phase(enum.IntEnum):
    """Where a request is."""

    WAITING = 0
    SENT = 1
    DONE = 2


@dataclass(slots=True, eq=False)
class Request:
    """One client request, from arrival to its one response."""

    request_id: RequestId
    model: Model
    rows: int
    arrival_ns: int
    slo_ns: int
    #: A response after this is never a success.
    deadline_ns: int
    #: Deadline minus the margin: when an EXEC that answers it has to end.
    due_ns: int
    #: No resident copy at arrival.
    cold: bool
    #: What it adds to its model's demand.
    demand_ns: int
    #: Whose it is; empty: nobody's in particular.
    tenant: str = ""
    phase: Phase = Phase.WAITING
    #: A worker vanished with it; it waits for another.
    lost_worker: bool = False
    #: When it is looked at again, whatever happens: its one entry in force among the expiries.
    watch_ns: int = 0


@dataclass(slots=True, eq=False)
class Model:
    """A model, its waiting requests in deadline order, and where its weights are."""

    model_id: ModelId
    #: Order of addition: breaks ties reproducibly.
    sequence: int
    queue: list[Request] = field(default_factory=list)
    #: Waiting requests with more than one row; batches of those cannot always be filled exactly.
    num_multi_row: int = 0
    #: Requests in Infer actions.
    num_sent: int = 0
    #: Workers that hold the weights in host memory, and what they know of the model.
    ready: dict[WorkerState, Readiness] = field(default_factory=dict)
    #: Estimates of the kind of worker that runs it fastest, among `ready`: what it is worth loading for.
    fastest: Estimates | None = None
    #: Workers where the weights are resident or being loaded.
    copies: dict[WorkerState, Copy] = field(default_factory=dict)
    removed: bool = False
    #: Appendix B's d_m: predicted execution time of its outstanding requests.
    demand_ns: int = 0
    #: What the policy has it queued for loading with, None when it is not.
    load_key: float | None = None
    #: Until then its copies are taken for too few: requests were refused although one was resident.
    short_until_ns: int = 0
    served: ServedShare = field(default_factory=ServedShare)

    def ready_on(self, worker: WorkerState, readiness: Readiness) -> None:
        """A worker holds it in host memory."""
        self.ready[worker] = readiness
        self._find_fastest()

    def not_ready_on(self, worker: WorkerState) -> bool:
        """A worker does not any more; tells whether it did."""
        had_it = self.ready.pop(worker, None) is not None
        if had_it:
            self._find_fastest()
        return had_it

    def _find_fastest(self) -> None:
        kinds = [readiness.estimates for readiness in self.ready.values()]
        self.fastest = min(kinds, key=lambda kind: kind.exec_ns[0], default=None)


@dataclass(slots=True, eq=False)
class Readiness:
    """One model on one worker, independent of residency."""

    num_pages: int
    architecture_id: ArchitectureId
    estimates: Estimates


@dataclass(slots=True, eq=False)
class Copy:
    """Weights of one model in one worker's cache, or on their way into it."""

    model: Model
    worker: WorkerState
    num_pages: int
    estimates: Estimates
    #: Predicted end of the load; meaningless once resident.
    ready_ns: int = 0
    resident: bool = False
    #: Infer actions in flight: it may not be evicted.
    num_pins: int = 0
    #: Share of the model's demand that Appendix B allots to this GPU (a_m,g).
    allocation_ns: float = 0.0
    #: Smallest key it stands with in the worker's strategy heap, None when it does not.
    strategy_key: int | None = None


@dataclass(slots=True, eq=False)
class SentAction:
    """An action on its way, until its result."""

    action: LoadWeights | Infer
    copy: Copy
    expected_begin_ns: int
    expected_end_ns: int
    #: Of the GPU when it was sent; 0 where that is not known.
    clock_mhz: int
    #: Of an Infer, in payload order.
    requests: list[Request] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class WorkerState:
    """One GPU."""

    worker_id: WorkerId
    gpu_kind: GpuKind
    num_pages: int
    num_free_pages: int
    #: Order of joining: breaks ties reproducibly.
    sequence: int
    delivery: DeliveryDelay
    #: As it was seen last; 0 where that is not known.
    clock_mhz: int = 0
    #: Estimates and batch sizes of which it has measured something since then.
    unconfirmed: set[tuple[Estimates, int]] = field(default_factory=set)
    #: A lane gets its next action when what it has to do is predicted to last no longer than this.
    exec_lookahead_ns: int = 0
    load_lookahead_ns: int = 0
    #: Reported end of the last EXEC.
    exec_end_ns: int = 0
    #: Of recent EXECs.
    mean_exec_ns: int = 0
    exec_lane: Lane = field(default_factory=Lane)
    load_lane: Lane = field(default_factory=Lane)
    #: Least recently used first.
    copies: dict[Model, Copy] = field(default_factory=dict)
    in_flight: dict[ActionId, SentAction] = field(default_factory=dict)
    draining: bool = False
    #: Appendix B's l_g: sum of allocations.
    load_ns: float = 0.0
    #: Heap of (key, -batch size, sequence, serial, copy), lazily kept by the policy (strategies.py).
    strategies: list[tuple[int, int, int, int, Copy]] = field(default_factory=list)
    #: Copies whose LoadWeights has no result yet.
    loading: dict[Model, Copy] = field(default_factory=dict)
    #: When the timer looks at its lanes again; None when nothing is armed.
    exec_wakeup_ns: int | None = None
    load_wakeup_ns: int | None = None
    #: When the policy, which holds batches back, wants to be asked again; None when it holds none.
    retry_ns: int | None = None
    #: Nothing can be evicted until an action ends.
    load_blocked: bool = False
    #: Whether a timer watches its oldest action.
    watched: bool = False
    #: The action whose time was up when it was last looked at.
    suspected: ActionId | None = None

    def settle(self, *, confirmed: bool) -> None:
        """Keep what was measured at its clock as it was seen last, or forget it."""
        for estimates, size in self.unconfirmed:
            estimates.settle_exec(self.sequence, size, confirmed=confirmed)
        self.unconfirmed.clear()

    def touch(self, model: Model) -> None:
        """Make a copy the most recently used."""
        copies = self.copies
        copies[model] = copies.pop(model)
