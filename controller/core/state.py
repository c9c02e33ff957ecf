"""Records of requests, models, copies and workers. They have no rules.

Each record's fields stand in blocks. The mechanism's fields are changed by `Books` (or, where the
block or the field says so, by `Alarms`, `Dispatch`, `Requests` and `Results`) and read by all parts. A policy's
fields are its own notes: the mechanism neither reads nor writes them. Both sides write the fields in the
block "both".

Records hash and compare by identity. `Model` and `WorkerState` have 30 fields and more: most are read on the path
of each request, where a record inside the record costs one more look-up.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from clockwright.units import (
    NS_PER_S,
    ActionId,
    ArchitectureId,
    GpuKind,
    ModelId,
    RequestId,
    WorkerId,
)
from clockwright.wire.actions import Infer, LoadWeights
from controller.core.estimator import Estimates
from controller.core.link import LinkPlan
from controller.core.lost import Lost
from controller.core.shares import ServedShare, Usage
from controller.core.sums import SumsInOrder
from controller.core.timeline import Timeline

# From so many copies on, a worker hears of a change of the model's queue when it looks, and idle workers are
# found by a list of them: nothing that is done per request grows with the copies.
MANY_COPIES: Final = 16


class Phase(enum.IntEnum):
    """Where a request is. The table in books.py says which call leads from one phase to the next."""

    WAITING = 0
    SENT = 1
    DONE = 2


# Looking a member up in its enum takes ten times as long as a global, and requests are compared with
# these several times each.
WAITING: Final = Phase.WAITING
SENT: Final = Phase.SENT
DONE: Final = Phase.DONE


@dataclass(slots=True, eq=False)
class Request:
    """One client request, from arrival to its one response."""

    # --- fixed at arrival ---
    request_id: RequestId
    model: Model
    rows: int
    arrival_ns: int
    slo_ns: int
    #: A response after this is never a success.
    deadline_ns: int
    #: Deadline minus the margin: when an EXEC that answers it has to end.
    due_ns: int
    #: No copy was resident at arrival.
    cold: bool
    #: Its part of the model's demand.
    demand_ns: int
    #: The tenant whose request it is. May be empty.
    tenant: str = ""
    #: Size of its inputs; 0 where that is not known.
    num_bytes: int = 0
    #: What an answer is worth for each of its rows: its weight, and only a part of that where its pipeline needs
    #: more work after this.
    row_worth: float = 1.0

    # --- the mechanism's ---
    phase: Phase = Phase.WAITING
    #: The action that it is part of while it is `SENT`, and after. None once it waits again.
    action_id: ActionId | None = None
    #: A worker vanished with it; it waits for another. `Requests` notes that.
    lost_worker: bool = False
    #: Workers that vanished or fell silent while they ran this, as far as can be told. After two it is given to no other.
    lost_on: frozenset[WorkerId] = frozenset()
    #: When `Alarms` looks at it again; its entry with this time is the one that counts.
    watch_ns: int = 0
    #: Runs that failed with it. `Results` notes that, and the next three.
    num_failures: int = 0
    #: The engine's message for the last of them.
    failure: str = ""
    #: Those in which it was alone.
    num_failures_alone: int = 0
    #: Requests that its next batch may have, because a larger one failed; 0: as many as fit.
    most_together: int = 0

    # --- the promises' (`Promises`, `Requests`) ---
    #: By then it has to be refused or promised; 0: its client did not ask for that.
    decide_ns: int = 0
    #: When it was promised; 0: it was not.
    decided_ns: int = 0
    #: The place that is reserved for it while it waits.
    place: ReservedPlace | None = None


#: Key by which a model's queue is sorted and searched.
due_ns_of: Final[Callable[[Request], int]] = attrgetter("due_ns")


def to_front(queue: list[Request], requests: list[Request]) -> None:
    """Put some requests of a queue at its front, where they are a run until they leave in this event."""
    chosen = set(map(id, requests))
    queue[:] = requests + [each for each in queue if id(each) not in chosen]


@dataclass(slots=True, eq=False)
class Model:
    """A model, its waiting requests in deadline order, and where its weights are."""

    # --- fixed ---
    model_id: ModelId
    #: Order of addition: breaks ties reproducibly.
    sequence: int

    # --- the mechanism's ---
    #: Waiting requests by `due_ns`. A plain list: with 5,000 waiting, to cut a batch of 8 off the front
    #: costs 1.3 us, and 16 us in a `SortedKeyList`; its first and last, 0.03 us against 0.8.
    queue: list[Request] = field(default_factory=list)
    #: Waiting requests with more than one row, or with rows of another worth than 1. Not every run of those is as good
    #: as another of the same length, and batches of them cannot always be filled exactly.
    num_unlike: int = 0
    #: Those with rows of another worth than 1.
    num_weighed: int = 0
    #: Their rows beyond the first of each, by `due_ns`.
    extra_rows: SumsInOrder = field(default_factory=SumsInOrder)
    #: Requests in Infer actions.
    num_sent: int = 0
    #: Workers that hold the weights in host memory, and what they know of the model.
    ready: dict[WorkerState, Readiness] = field(default_factory=dict)
    #: Estimates of the fastest kind of worker among `ready`: what the model is worth loading for.
    fastest: Estimates | None = None
    #: Its estimates on each kind of worker among `ready`.
    kinds: dict[GpuKind, Estimates] = field(default_factory=dict)
    #: All its estimates there, each once: clocks may differ within a kind.
    estimates: list[Estimates] = field(default_factory=list)
    #: Workers where the weights are resident or being loaded.
    copies: dict[WorkerState, Copy] = field(default_factory=dict)
    #: Where it has many copies: by kind of GPU the workers with an empty exec lane that ran it last.
    idle: dict[GpuKind, dict[WorkerState, None]] = field(default_factory=dict)
    #: Likewise: workers that run it and whose exec lane is not looked at before a result comes, and some that no
    #: longer are so. `ExecLanes` notes them.
    loose: dict[WorkerState, None] = field(default_factory=dict)
    removed: bool = False
    #: Workers that hold the weights too, but are avoided (health.py): in neither of the two above.
    suspended: dict[WorkerState, Suspension] = field(default_factory=dict)
    #: Size of one row's outputs; 0 where that is not known.
    output_row_bytes: int = 0
    #: Its weights were somewhere, and had to make room.
    evicted: bool = False
    #: An operator wants it to stay: no copy of it makes room.
    pinned: bool = False
    #: Until then some waiting request may have `most_together`.
    apart_until_ns: int = 0
    #: Appendix B's d_m: predicted execution time of its outstanding requests.
    demand_ns: int = 0

    # --- the promises' ---
    #: When a request of its clients that ask for certainty had to be decided last, and the mean gap between those.
    decided_ns: int = 0
    decide_gap_ns: int = NS_PER_S

    # --- both ---
    #: Key with which the policy has it queued for loading. None if it is not queued. The mechanism only reads.
    load_key: float | None = None

    # --- the policies' ---
    #: Until then it counts as short of copies: requests were refused although one was resident.
    short_until_ns: int = 0
    #: Until then its idle lanes are not looked through to take its requests of batch clients: all refused.
    held_until_ns: int = 0
    #: Use of the exec lanes by its requests without a known tenant.
    usage: Usage = field(default_factory=Usage)
    #: Outcomes of its requests while it was resident.
    served: ServedShare = field(default_factory=ServedShare)
    #: Until then a tenant that used up its share finds no room in the queue: others' requests were dropped.
    crowded_until_ns: int = 0
    #: Noted once memory is about to be short.
    lost: Lost = field(default_factory=Lost)
    #: When pages for a further copy were looked for last.
    sought_ns: int = 0
    #: When it was asked last, the gap before that, and when it is expected next; 0: nothing is known.
    asked_ns: int = 0
    gap_ns: int = 0
    expected_ns: int = 0

    def ready_on(self, worker: WorkerState, readiness: Readiness) -> None:
        """A worker holds it in host memory."""
        self.ready[worker] = readiness
        self.kinds[worker.gpu_kind] = readiness.estimates
        self.held_until_ns = 0  # its lane has not refused anything
        # Where all workers are of one kind, one that comes or goes is news for every model, and tells nothing.
        if len(self.estimates) != 1 or self.estimates[0] is not readiness.estimates:
            self._find_fastest()

    def has_room_beside_pins(self) -> bool:
        """Whether it has a copy, or some worker has room for one in addition to its pinned models."""
        if self.copies:
            return True
        for worker, readiness in self.ready.items():
            if worker.fits_beside_pins(readiness.num_pages):
                return True
        return False

    def not_ready_on(self, worker: WorkerState) -> bool:
        """A worker does not any more; tells whether it did."""
        had_it = self.ready.pop(worker, None) is not None
        if had_it and (len(self.estimates) != 1 or not self.ready):
            self.kinds = {other.gpu_kind: each.estimates for other, each in self.ready.items()}
            self._find_fastest()
        return self.suspended.pop(worker, None) is not None or had_it

    def _find_fastest(self) -> None:
        known = dict.fromkeys([readiness.estimates for readiness in self.ready.values()])
        self.estimates = list(known)
        self.fastest = min(known, key=lambda each: each.exec_ns[0], default=None)


@dataclass(slots=True, eq=False)
class Readiness:
    """One model on one worker, independent of residency."""

    num_pages: int
    architecture_id: ArchitectureId
    estimates: Estimates


@dataclass(slots=True, eq=False)
class Suspension:
    """One model on one worker where it is avoided."""

    readiness: Readiness
    #: It is not probed before.
    until_ns: int
    #: The worker's message.
    words: str
    #: A load failed; else it is a run that failed, or the worker that is slow or silent.
    load: bool

    def is_last_resort(self, now_ns: int) -> bool:
        """Whether the model may run here all the same if no other worker offers it."""
        return not self.load or self.until_ns <= now_ns


@dataclass(slots=True, eq=False)
class Trouble:
    """Failures of a worker. `Health` changes this record, and drops it when all is well."""

    #: It is avoided for all its models, and was probed in vain so often.
    sick: bool = False
    strikes: int = 0
    #: That is because it did not answer: any answer shows that it does again, a load's too.
    silent: bool = False
    #: Failures of a model since its last success here.
    run_strikes: dict[Model, int] = field(default_factory=dict)
    load_strikes: dict[Model, int] = field(default_factory=dict)
    #: Models that failed here since any succeeded.
    failing_runs: dict[Model, None] = field(default_factory=dict)
    failing_loads: dict[Model, None] = field(default_factory=dict)
    #: (estimates, batch size or 0 for a load, duration) of actions in a row that took far too long: learned from
    #: when the row ends, unless the worker is found to be slow.
    held: list[tuple[Estimates, int, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Copy:
    """Weights of one model in one worker's cache, or on their way into it."""

    # --- fixed ---
    model: Model
    worker: WorkerState
    num_pages: int

    # --- the mechanism's ---
    estimates: Estimates
    #: Predicted end of the load, on the clock of the worker's lanes (link.py); meaningless once resident.
    ready_ns: int = 0
    resident: bool = False
    #: Infer actions in flight: it may not be evicted.
    num_pins: int = 0

    # --- the policies' ---
    #: Share of the model's demand that Appendix B allots to this GPU (a_m,g).
    allocation_ns: float = 0.0
    #: Smallest key with which it stands in the worker's `strategies`, and that entry's serial. None if it does not.
    strategy_key: int | None = None
    strategy_serial: int = 0
    #: The batch that the last look found.
    batch: Batch | None = None
    #: When its model is expected next, as its entry among the worker's timers says.
    expected_ns: int = 0


@dataclass(slots=True, eq=False)
class Batch:
    """A run of one model's queue to put into one Infer."""

    copy: Copy
    #: Requests `first` to `first + count` of the queue.
    first: int
    count: int
    size_index: int
    #: Latest begin at which the earliest deadline in it is still met.
    required_start_ns: int
    #: When it could begin: the lane is free and the weights are there.
    begin_ns: int
    #: What its answers are worth, where its model's requests are unlike; 0: its number of requests.
    worth: float = 0.0
    #: Its requests by `due_ns`, where they are no run of the queue; None: they are. `first` is where the first of them
    #: stands.
    picked: list[Request] | None = None


@dataclass(slots=True, eq=False)
class ReservedPlace:
    """A batch that its worker's exec lane will run in time, whatever else comes (promises.py)."""

    copy: Copy
    #: Promised requests, some of which may have left since the last look.
    requests: list[Request] = field(default_factory=list)
    #: Time that is kept for it even if it takes less by now: others may join, as long as no place is late for that.
    reserved_ns: int = 0

    # --- as of the last look at the lane ---
    rows: int = 0
    #: The earliest of its requests' `due_ns`.
    due_ns: int = 0
    #: How long it takes, with the time kept for others.
    exec_ns: int = 0
    #: When it ends if nothing but the places before it goes first.
    end_ns: int = 0


@dataclass(slots=True, eq=False)
class SentAction:
    """An action on its way, until its result."""

    action: LoadWeights | Infer
    #: Copy that is loaded or run; another one when an Infer's load failed and was sent again.
    copy: Copy
    #: Both on the clock of the worker's lanes (link.py): as they are heard of here.
    expected_begin_ns: int
    expected_end_ns: int
    #: Clock of the GPU when it was sent; 0 where that is not known.
    clock_mhz: int
    #: Requests of an Infer, in payload order.
    requests: list[Request] = field(default_factory=list)
    #: Some of these requests are not its own: they wait again, or run elsewhere. It answers those that are still
    #: open when it succeeds.
    shared: bool = False
    #: It tries whether it takes less time than is known; else its requests would have been refused.
    tries: bool = False
    #: The worker was asked to give it back.
    withdrawn: bool = False
    #: How much later the controller hears of its begin and end than they are, as planned.
    back_ns: int = 0
    #: Bytes of its inputs, and those sent to the worker until then; both 0 where the link is usual.
    in_bytes: int = 0
    sent_bytes: int = 0


@dataclass(slots=True)
class KindCounts:
    """Work and shortages of one kind of worker since the first of it joined (shortages.py)."""

    #: Time of all workers until `counted_ns`, and how many there are since.
    worker_ns: int = 0
    counted_ns: int = 0
    num_workers: int = 0
    #: Time of EXECs and LOADs, and the requests and copies that they served.
    exec_ns: int = 0
    num_run: int = 0
    load_ns: int = 0
    num_loads: int = 0
    num_evictions: int = 0
    #: Requests dropped for want of each.
    num_for_exec: int = 0
    num_for_links: int = 0
    num_for_loads: int = 0
    num_for_pages: int = 0
    #: Rows that were run since the last look at the work (`Shortages`), by model, and the SLO of the last request.
    ran: dict[Model, tuple[int, int]] = field(default_factory=dict)

    def changed(self, added: int, now_ns: int) -> None:
        """Workers of the kind joined, or left."""
        self.worker_ns = self.worker_ns_at(now_ns)
        self.counted_ns = now_ns
        self.num_workers += added

    def worker_ns_at(self, now_ns: int) -> int:
        """Time that all workers of the kind were there until now."""
        return self.worker_ns + self.num_workers * (now_ns - self.counted_ns)


@dataclass(slots=True, eq=False)
class WorkerState:
    """One GPU."""

    # --- fixed ---
    worker_id: WorkerId
    gpu_kind: GpuKind
    num_pages: int

    # --- the mechanism's: what is true ---
    num_free_pages: int
    #: Order of joining: breaks ties reproducibly.
    sequence: int
    link: LinkPlan
    #: Clock at the last look; 0 where that is not known.
    clock_mhz: int = 0
    #: Estimates and batch sizes that it has measured since that look; `Results` notes them.
    unconfirmed: set[tuple[Estimates, int]] = field(default_factory=set)
    exec_lane: Timeline = field(default_factory=Timeline)
    load_lane: Timeline = field(default_factory=Timeline)
    #: Least recently used first.
    copies: dict[Model, Copy] = field(default_factory=dict)
    #: Copies whose LoadWeights has no result yet.
    loading: dict[Model, Copy] = field(default_factory=dict)
    in_flight: dict[ActionId, SentAction] = field(default_factory=dict)
    draining: bool = False
    #: When a model was ready on it for the first time; None: none was yet.
    ready_ns: int | None = None
    #: Workers of another kind are there too.
    beside_others: bool = False
    #: Work and shortages of all workers of its kind (shortages.py).
    counts: KindCounts = field(default_factory=KindCounts)

    # --- the mechanism's: when to look again (`Alarms`, `Dispatch`, `Results`) ---
    #: When the timer looks at each lane again. None if nothing is armed.
    exec_wakeup_ns: int | None = None
    load_wakeup_ns: int | None = None
    #: Nothing can be evicted until an action ends.
    load_blocked: bool = False
    #: Where it stands among the load lanes (load_lanes.py).
    load_end_ns: int = 0
    #: Whether a timer watches its oldest action.
    watched: bool = False
    #: The action whose time was up at the last look.
    suspected: ActionId | None = None
    #: Its failures. None as long as all is well.
    trouble: Trouble | None = None

    # --- both ---
    #: A lane gets its next action when its work is predicted to last no longer than this. A policy that
    #: measures how far ahead to decide writes it.
    exec_lookahead_ns: int = 0
    load_lookahead_ns: int = 0
    #: (key, -batch size, sequence, serial, copy), the smallest first: the policy keeps in it what could run
    #: (strategies.py). The mechanism asks for no batch while it is empty.
    strategies: list[tuple[int, int, int, int, Copy]] = field(default_factory=list)
    #: (`Copy.expected_ns`, sequence, copy): the policy keeps in it copies of models that are asked at even gaps
    #: (eviction.py). The mechanism asks for a load that no request waits for only while it is not empty.
    timers: list[tuple[int, int, Copy]] = field(default_factory=list)
    #: Nor does it before this time.
    ahead_ns: int = 0
    #: When a policy that holds batches back wants to be asked again. None if it holds none. The
    #: mechanism clears it before it asks.
    retry_ns: int | None = None
    #: Likewise when a policy that leaves a load to another worker wants to be asked for loads again.
    load_retry_ns: int | None = None

    #: The model in whose `idle` it stands.
    idle_with: Model | None = None
    #: Places on its exec lane that are reserved (promises.py).
    promised: list[ReservedPlace] = field(default_factory=list)

    # --- the policies' ---
    #: Number of the last change that it heard of (strategies.py).
    seen_change: int = 0
    #: Appendix B's l_g: sum of allocations.
    load_ns: float = 0.0
    #: `edf_mh`: it refused work of batch clients, since as many others as may have some, and is asked again then.
    held_until_ns: int = 0
    #: Reported end of the last EXEC.
    exec_end_ns: int = 0
    #: Mean duration of recent EXECs.
    mean_exec_ns: int = 0

    def fits_beside_pins(self, num_pages: int) -> bool:
        """Whether a model of this many pages fits here in addition to the pinned models."""
        pinned = sum([copy.num_pages for copy in self.copies.values() if copy.model.pinned])
        return num_pages + pinned <= self.num_pages

    def leave_idle(self) -> None:
        """Remove it from the idle workers of its model."""
        model, self.idle_with = self.idle_with, None
        if model is not None:
            del model.idle[self.gpu_kind][self]

    def settle(self, *, confirmed: bool) -> None:
        """Keep what was measured at the clock of the last look, or forget it."""
        for estimates, size in self.unconfirmed:
            estimates.settle_exec(self.sequence, size, confirmed=confirmed)
        self.unconfirmed.clear()

    def touch(self, model: Model) -> None:
        """Make a copy the most recently used."""
        copies = self.copies
        copies[model] = copies.pop(model)
