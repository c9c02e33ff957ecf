"""Fills the lanes: decides when to check a lane, and what load lanes get. `exec_lanes` fills the exec lanes.

A lane is checked when requests came (`place`), an action ended (`after_result`), or a wake-up is due (`wake`). A load
lane has room while its predicted backlog is below its look-ahead. Then the policy chooses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain, count, islice

from clockwright.errors import Refusal
from clockwright.units import ActionId
from clockwright.wire.actions import EvictWeights, LoadWeights
from controller.core.copies import (
    DEMAND,
    IDLE_PAGES,
    REFUSED_COLD,
    REFUSED_FULL,
    WANTED,
    Reason,
    reason_for_copy,
)
from controller.core.events import SendAction
from controller.core.exec_lanes import ExecLanes
from controller.core.load_lanes import Place
from controller.core.parts import CoreParts
from controller.core.state import (
    Copy,
    Model,
    Readiness,
    SentAction,
    WorkerState,
)

# A load goes to one of so many workers, whose load lanes have been free for longest; to one of the next so many if
# none of those can make room for it.
_MOST_ROOM = 32
# Models that are wanted at once; pipelines want a few each.
_WANTED_MAX = 100
# Among so many of them a load for which no request waits looks for free pages.
_FEW = 4


class Dispatch:
    """Keeps every lane a look-ahead full."""

    def __init__(self, parts: CoreParts) -> None:
        self._config = parts.config
        self._traits = parts.traits
        self._policy = parts.policy
        self._books = parts.books
        self._alarms = parts.alarms
        self._lag = parts.lag
        self._health = parts.health
        self._commands = parts.commands
        self._action_ids = count(1)
        self.exec_lanes = ExecLanes(parts, self._action_ids)
        # No load lane has room before this time, which saves a walk over all workers per request that waits for a
        # load. Every change that may give a lane room sooner has to set it to 0: do not forget that in new code.
        self._load_room_ns = 0
        #: Models that are wanted until a time, as long as they have no copy.
        self._wanted: dict[Model, int] = {}

    def place(self, model: Model, now_ns: int, *, seek: bool = True) -> None:
        """Requests of the model wait: let the lanes that hold it and have room take them.

        Where some still wait after that, `seek` has the model get another copy.
        """
        self.exec_lanes.offer(model, now_ns)
        if seek and model.queue and len(model.copies) < len(model.ready):
            self.seek_copy(model, now_ns)

    def probe_load(
        self, worker: WorkerState, model: Model, readiness: Readiness, now_ns: int
    ) -> None:
        """Load a model on a worker that is avoided, where its lane is free."""
        if worker.load_lane:
            return
        if not self._evict_all(self._policy.victims(worker, readiness.num_pages, now_ns)):
            return
        begin_ns = now_ns + worker.link.expected_ns(now_ns)
        self._send_load(worker, model, readiness, begin_ns, now_ns)

    def seek_copy(
        self,
        model: Model,
        now_ns: int,
        *,
        refusal: Refusal | None = None,
        wanted: bool = False,
    ) -> None:
        """Load the model once more where there is a reason and room (copies.py).

        Some worker that is ready for it has no copy. `refusal` says why a request of the model was refused at arrival;
        `wanted`: `ModelWanted` asks for a copy.
        """
        if (
            model.suspended
            and (wanted or refusal is not None)
            and self._health.may_return(model, now_ns)
        ):
            return  # later requests find the copy that it has
        reason = reason_for_copy(
            model,
            self._config,
            self._traits,
            self._policy,
            refusal=refusal,
            wanted=wanted,
            any_idle=self._books.num_idle > 0,
            lag=self._lag,
            now_ns=now_ns,
        )
        if reason is DEMAND:
            self._load_by_urgency(model, now_ns)
        elif reason is not None:
            self._load_aside(model, reason, now_ns)

    def want(self, model: Model, until_ns: int, now_ns: int) -> None:
        """Load a model that is about to be asked: now, or when a load ends until a time."""
        self.seek_copy(model, now_ns, wanted=True)
        if until_ns > now_ns and not model.copies and len(self._wanted) < _WANTED_MAX:
            self._wanted[model] = max(until_ns, self._wanted.get(model, 0))

    def _want_again(self, now_ns: int) -> None:
        """A load lane is free: load the first that is still wanted."""
        for model, until_ns in list(self._wanted.items()):
            is_wanted = until_ns > now_ns and not model.copies and not model.removed
            if is_wanted:
                self.seek_copy(model, now_ns, wanted=True)
            if not is_wanted or model.copies:
                del self._wanted[model]
            if is_wanted and model.copies:
                return

    def _load_by_urgency(self, model: Model, now_ns: int) -> None:
        """The policy has queued the model: load it, or something more urgent, where there is room."""
        if now_ns < self._load_room_ns:
            return
        most_ns, lanes = self._config.lookahead_ns, self._books.load_lanes
        next_room_ns = now_ns + most_ns
        places, begin = lanes.among(model.ready), 0
        while begin < len(places):
            room: list[tuple[int, int, int, WorkerState]] = []
            last: Place | None = None
            for place in islice(places, begin, None):
                lane_end_ns, _, worker = place
                if lane_end_ns > now_ns + most_ns and not lanes.unusual:
                    next_room_ns = min(next_room_ns, lane_end_ns - most_ns)
                    break
                if worker.load_blocked or worker not in model.ready:
                    continue
                lookahead_ns = worker.load_lookahead_ns + worker.link.excess_ns
                load_free_ns = worker.load_lane.available_ns(now_ns)
                next_room_ns = min(next_room_ns, load_free_ns - lookahead_ns)
                if load_free_ns <= now_ns + lookahead_ns and worker not in model.copies:
                    exec_free_ns = worker.exec_lane.available_ns(now_ns)
                    room.append((load_free_ns, exec_free_ns, worker.sequence, worker))
                    if len(room) == _MOST_ROOM:
                        last = place
                        break
            if len(model.ready) == len(self._books.workers):
                self._load_room_ns = next_room_ns
            room.sort()
            for _, _, _, worker in room:
                if model.load_key is None:
                    break
                self.fill_load(worker, now_ns)
            if last is None or model.load_key is None:
                break
            # Lanes that were given a load stand further back in the order now.
            begin = bisect_right(places, last)

    def _load_aside(self, model: Model, reason: Reason, now_ns: int) -> None:
        """Load the model on the first worker from which that takes nothing but what the reason may take."""
        lanes = self._books.load_lanes
        is_asked_for = reason is REFUSED_COLD or reason is WANTED
        if is_asked_for:
            # Those that are idle for longest, so that each in turn gives up a copy; a few with free pages before them.
            rest = (worker for *_, worker in lanes.among(model.ready))
            few = sorted(islice(rest, _FEW), key=lambda worker: _is_full(worker, model))
            workers: Iterable[WorkerState] = chain(few, rest)
        else:
            workers = lanes.maybe_idle(model.ready, now_ns)
        for worker in workers:
            if worker.in_flight if reason is IDLE_PAGES else worker.load_lane:
                continue
            readiness = model.ready.get(worker)
            if readiness is None or worker in model.copies:
                continue
            if is_asked_for:
                if not self._evict_all(self._policy.victims(worker, readiness.num_pages, now_ns)):
                    continue
            elif worker.num_free_pages < readiness.num_pages:
                if reason is not REFUSED_FULL:
                    continue
                victims = self._policy.victims_of_refused(
                    model, worker, readiness.num_pages, now_ns
                )
                if not self._evict_all(victims):
                    continue
            begin_ns = now_ns + worker.link.expected_ns(now_ns)
            self._send_load(worker, model, readiness, begin_ns, now_ns)
            return

    def load_pinned(self, now_ns: int) -> None:
        """Load pinned models that have no copy, before all others; pinned, running and loading copies stay."""
        for model in self._books.pinned:
            if model.copies:
                continue
            for worker in sorted(model.ready, key=lambda w: w.load_lane.available_ns(now_ns)):
                readiness = model.ready[worker]
                # As long as others' requests wait everywhere, a policy finds nothing that may go.
                victims = self._policy.victims(worker, readiness.num_pages, now_ns)
                if victims is None and (victims := _movable(worker, readiness.num_pages)) is None:
                    continue
                for victim in victims:
                    self.evict(victim)
                begin_ns = max(
                    worker.load_lane.available_ns(now_ns),
                    now_ns + worker.link.expected_ns(now_ns),
                )
                self._send_load(worker, model, readiness, begin_ns, now_ns)
                self.exec_lanes.fill(worker, now_ns)
                for victim in victims:
                    if victim.model.queue:
                        self.seek_copy(victim.model, now_ns)
                break

    def load_promised(self, worker: WorkerState, model: Model, now_ns: int) -> bool:
        """Load a model for a request that is about to be promised. Returns False if no pages can be freed for it."""
        readiness = model.ready[worker]
        if not self._evict_all(self._policy.victims(worker, readiness.num_pages, now_ns)):
            return False
        there_ns = now_ns + worker.link.expected_ns(now_ns)
        begin_ns = max(worker.load_lane.available_ns(now_ns), there_ns)
        self._send_load(worker, model, readiness, begin_ns, now_ns)
        return True

    def fill_load(self, worker: WorkerState, now_ns: int) -> None:
        """Send LoadWeights while the load lane has less than the look-ahead to do."""
        if worker.draining or worker.load_blocked:
            return
        passed_over: list[Model] = []
        self._fill_load(worker, passed_over, now_ns)
        for model in passed_over:
            self._policy.want_load(model, now_ns)

    def _fill_load(self, worker: WorkerState, passed_over: list[Model], now_ns: int) -> None:
        """Do what `fill_load` does; models that do not fit with the pinned ones are passed over, and noted."""
        lookahead_ns = worker.load_lookahead_ns + worker.link.excess_ns
        lane = worker.load_lane
        there_ns = now_ns + worker.link.expected_ns(now_ns)
        while True:
            available_ns = lane.available_ns(now_ns)
            if available_ns > now_ns + lookahead_ns:
                return
            begin_ns = max(available_ns, there_ns)
            model = self._policy.next_load(worker, begin_ns, now_ns)
            if model is None:
                if worker.load_retry_ns is not None:
                    if worker.load_wakeup_ns is None:
                        self._alarms.wake_load(worker, worker.load_retry_ns)
                    worker.load_retry_ns = None
                return
            readiness = model.ready[worker]
            victims = self._policy.victims(worker, readiness.num_pages, now_ns)
            if victims is None:
                if self._books.pinned and not worker.fits_beside_pins(readiness.num_pages):
                    # It has no room here as long as others are pinned, and must not keep smaller ones out.
                    passed_over.append(model)
                    continue
                # Every copy there is in use until an action ends, or until no request waits for it.
                worker.load_blocked = bool(worker.in_flight)
                self._policy.want_load(model, now_ns)
                return
            for victim in victims:
                self.evict(victim)
            self._send_load(worker, model, readiness, begin_ns, now_ns)
            self.exec_lanes.fill(worker, now_ns)

    def _send_load(
        self,
        worker: WorkerState,
        model: Model,
        readiness: Readiness,
        begin_ns: int,
        now_ns: int,
    ) -> None:
        readiness.estimates.try_load_once()
        load_ns, back_ns = readiness.estimates.load_ns, worker.link.back.ns
        action = LoadWeights(
            action_id=ActionId(next(self._action_ids)),
            model_id=model.model_id,
            earliest_ns=now_ns,
            latest_ns=begin_ns + self._config.window_ns - back_ns,
            expected_duration_ns=load_ns,
        )
        copy = Copy(model, worker, readiness.num_pages, readiness.estimates, begin_ns + load_ns)
        sent = SentAction(action, copy, begin_ns, copy.ready_ns, worker.clock_mhz, back_ns=back_ns)
        if not worker.link.is_usual:
            sent.sent_bytes = worker.link.out.send(now_ns, 0)
        self._books.begin_load(sent, now_ns)
        self._alarms.expect_result(worker, sent, alone=len(self._books.workers) == 1)
        self._commands.append(
            SendAction(
                worker_id=worker.worker_id, action=action, expected_begin_ns=begin_ns - back_ns
            )
        )
        self._wake_load(worker, now_ns)

    def _evict_all(self, victims: list[Copy] | None) -> bool:
        """Evict copies. Returns False if `victims` is None: the pages cannot be freed."""
        for victim in victims or ():
            self.evict(victim)
        return victims is not None

    def evict(self, copy: Copy) -> None:
        """Free a copy's pages: nothing of it is in flight."""
        copy.worker.counts.num_evictions += 1
        copy.model.evicted = True
        self._books.drop(copy)
        self._send_evict(copy)

    def disown(self, copy: Copy) -> None:
        """Evict a copy whose load was lost: the worker may have it or not."""
        self._load_room_ns = 0
        self._send_evict(copy)

    def _send_evict(self, copy: Copy) -> None:
        action = EvictWeights(
            action_id=ActionId(next(self._action_ids)), model_id=copy.model.model_id
        )
        self._commands.append(SendAction(worker_id=copy.worker.worker_id, action=action))

    def _wake_load(self, worker: WorkerState, now_ns: int) -> None:
        """Look at both lanes when the load lane has room again.

        That is also when an Infer may be planned behind the lane's last load.
        """
        lane = worker.load_lane
        lookahead_ns = worker.load_lookahead_ns + worker.link.excess_ns
        at_ns = lane.available_ns(now_ns) - lookahead_ns
        if worker.load_wakeup_ns is None and at_ns > now_ns and not lane.late(now_ns):
            worker.load_blocked = False
            self._alarms.wake_load(worker, at_ns)

    # --- when to look ---------------------------------------------------------------------------

    def may_make_room(self, model: Model, now_ns: int) -> None:
        """Let all copies of the model make room: its last request left the queue unserved, or it is no longer pinned."""
        if self._policy.wants_any:
            for worker in model.copies:
                self.exec_lanes.look_for_room(worker, now_ns)

    def pages_freed(self, worker: WorkerState, now_ns: int) -> None:
        """Look for loads: a copy left pages free."""
        if self._policy.wants_any:
            self.exec_lanes.look_for_room(worker, now_ns)

    def load_lane_freed(self) -> None:
        """Look at all load lanes again: one may have room sooner than expected."""
        self._load_room_ns = 0

    def load_ended(self, worker: WorkerState, now_ns: int) -> None:
        """A LoadWeights of the worker succeeded."""
        self._load_room_ns = 0
        self._wake_load(worker, now_ns)
        if self._wanted:
            self._want_again(now_ns)

    def after_result(self, worker: WorkerState, model: Model, now_ns: int) -> None:
        """An action of the model ended: keep the worker's lanes busy."""
        if worker.load_blocked:
            worker.load_blocked = False
            self._load_room_ns = 0
        self.exec_lanes.fill(worker, now_ns)
        if model.queue and len(model.copies) < len(model.ready):
            self._policy.want_load(model, now_ns)
        if self._policy.wants_any or (worker.timers and worker.ahead_ns <= now_ns):
            self.fill_load(worker, now_ns)
            if not self._traits.predicts and model.load_key is not None:
                self._load_by_urgency(model, now_ns)  # a replica, for which no request waits
        if model.queue:
            self.place(model, now_ns, seek=False)

    def wake(self, worker: WorkerState, at_ns: int, now_ns: int) -> None:
        """A wake-up that was armed for `at_ns` is due: look at the lanes that wait for that time."""
        if worker.exec_wakeup_ns == at_ns:
            worker.exec_wakeup_ns = None
            self.exec_lanes.fill(worker, now_ns)
        if worker.load_wakeup_ns == at_ns:
            worker.load_wakeup_ns = None
            self._books.load_near_end(worker)
            self.exec_lanes.fill(worker, now_ns)
            if self._policy.wants_any or (worker.timers and worker.ahead_ns <= now_ns):
                self.fill_load(worker, now_ns)
            self._wake_load(worker, now_ns)


def _is_full(worker: WorkerState, model: Model) -> bool:
    readiness = model.ready.get(worker)
    return readiness is None or worker.num_free_pages < readiness.num_pages


def _movable(worker: WorkerState, num_pages: int) -> list[Copy] | None:
    """The least recently used copies that free so many pages, even if requests wait for them.

    Returns None if pinned, running, loading and promised copies hold too many pages.
    """
    found: list[Copy] = []
    missing = num_pages - worker.num_free_pages
    for copy in worker.copies.values():
        if missing <= 0:
            break
        promised = any(place.copy is copy for place in worker.promised)
        if copy.resident and not copy.num_pins and not copy.model.pinned and not promised:
            found.append(copy)
            missing -= copy.num_pages
    return found if missing <= 0 else None
