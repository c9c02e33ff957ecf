"""What each lane gets next, and which commands that takes.

A lane has room while its predicted backlog is below its look-ahead; then the policy is asked. Three
things make a lane worth a look: requests came (`place`), an action ended (`after_result`),
or a wake-up is due (`wake`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import count, islice

from clockwright.actions import EvictWeights, Infer, LoadWeights
from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, ActionId
from controller.core.alarms import Alarms
from controller.core.books import Books
from controller.core.config import SchedulerConfig
from controller.core.copies import (
    DEMAND,
    IDLE_PAGES,
    REFUSED_COLD,
    REFUSED_FULL,
    WANTED,
    Reason,
    reason_for_copy,
)
from controller.core.events import Command, SendAction
from controller.core.load_lanes import Place
from controller.core.policy import Policy, Traits
from controller.core.state import (
    MANY_COPIES,
    Batch,
    Copy,
    Model,
    Readiness,
    Request,
    SentAction,
    WorkerState,
)

# A load goes to one of so many workers, whose load lanes have been free for longest; to one of the next so many if
# none of those can make room for it.
_MOST_ROOM = 32

# What a batch may wait for its inputs.
_NO_MATTER_NS = NS_PER_MS // 2


class Dispatch:
    """Keeps every lane a look-ahead full."""

    def __init__(
        self,
        config: SchedulerConfig,
        traits: Traits,
        policy: Policy,
        books: Books,
        alarms: Alarms,
        commands: list[Command],
    ) -> None:
        """Begin with no worker.

        Args:
            config: the scheduler's.
            traits: the policy's.
            policy: chooses what runs and what is loaded.
            books: what is true; told of every action.
            alarms: when to look at a lane again.
            commands: where actions to send are put; the door takes them away with every event.
        """
        self._config = config
        self._traits = traits
        self._policy = policy
        self._books = books
        self._alarms = alarms
        self.commands = commands
        self._action_ids = count(1)
        # No load lane has room before this time. Set to 0 by whatever may prove it wrong, which is easily
        # forgotten at a new place; it saves a walk over all workers per request that waits for a load.
        self._load_room_ns = 0

    # --- exec lanes -----------------------------------------------------------------------------

    def place(self, model: Model, now_ns: int, *, seek: bool = True) -> None:
        """Requests of the model wait: let the lanes that hold it and have room take them.

        Args:
            model: what they ask for.
            now_ns: the present.
            seek: where some still wait after that, seek the model another copy.
        """
        copies = model.copies
        if len(copies) < MANY_COPIES:
            self._offer(model, copies, now_ns)
        else:
            self._offer_to_idle(model, now_ns)
            if model.queue:
                self._offer_to_loose(model, now_ns)
        if seek and model.queue and len(copies) < len(model.ready):
            self.seek_copy(model, now_ns)

    def _offer(self, model: Model, workers: Iterable[WorkerState], now_ns: int) -> None:
        """Let those of the workers take the model's requests whose lanes may have room."""
        # A lane with a wake-up yet to come is full, and is looked at then. Where the policy holds a batch
        # back (`retry_ns`), look now: these requests may be what the batch waits for.
        room = [
            worker
            for worker in workers
            if (worker.exec_wakeup_ns or 0) <= now_ns or worker.retry_ns is not None
        ]
        if len(room) > 1:
            # Ask the lane that is free first; among idle ones, the fastest GPU. To ask the slowest one that
            # is in time, so that fast ones are free for what comes, gained nothing on two kinds of GPU, and
            # made the median longer.
            room.sort(
                key=lambda w: (
                    w.exec_lane.available_ns(now_ns) if w.link.is_usual else _begin_ns(w, now_ns),
                    model.copies[w].estimates.exec_ns[0],
                )
            )
        for worker in room:
            self.fill_exec(worker, now_ns)
            if not model.queue:
                return

    def _offer_to_idle(self, model: Model, now_ns: int) -> None:
        """Let idle workers take the model's requests: first those that ran it last, of the fastest kind."""
        copies = model.copies
        while model.queue:
            best: WorkerState | None = None
            least_ns = 0
            for idle in model.idle.values():
                if idle:
                    worker = next(reversed(idle))
                    exec_ns = copies[worker].estimates.exec_ns[0]
                    if best is None or exec_ns < least_ns:
                        best, least_ns = worker, exec_ns
            if best is None:
                break
            self.fill_exec(best, now_ns)
            if not best.exec_lane:  # it holds them back, or cannot be in time
                best.leave_idle()
        if model.queue and self._books.num_busy_lanes < len(self._books.workers):
            self._offer(model, [worker for worker in copies if not worker.exec_lane], now_ns)

    def _offer_to_loose(self, model: Model, now_ns: int) -> None:
        """Let busy workers whose lane may have room take the model's requests, or look when it has."""
        loose, model.loose = model.loose, {}
        self._offer(model, [worker for worker in loose if worker in model.copies], now_ns)
        for worker in loose:
            self._note_loose(worker)

    def _note_loose(self, worker: WorkerState) -> None:
        """Note whether nobody looks at a busy worker's exec lane before a result comes."""
        if worker.exec_lane and (worker.exec_wakeup_ns is None or worker.retry_ns is not None):
            model = next(reversed(worker.in_flight.values())).copy.model
            if len(model.copies) >= MANY_COPIES:
                model.loose[worker] = None

    def fill_exec(self, worker: WorkerState, now_ns: int) -> None:
        """Send Infers while the exec lane has less than the look-ahead to do."""
        if worker.draining:
            return
        self._policy.catch_up(worker)
        if worker.strategies:
            self._fill_exec(worker, now_ns)
        if worker.exec_wakeup_ns is None or worker.retry_ns is not None:
            self._note_loose(worker)

    def _fill_exec(self, worker: WorkerState, now_ns: int) -> None:
        lane, link = worker.exec_lane, worker.link
        lookahead_ns, max_outstanding = worker.exec_lookahead_ns, self._policy.max_outstanding
        there_ns = now_ns + link.usual_ns
        if not link.is_usual:
            there_ns = now_ns + link.way_ns(now_ns)
            # A long link must be fed earlier, or the lane runs dry, and has more under way for it.
            max_outstanding += max_outstanding * link.length_ns // self._config.lookahead_ns
            lookahead_ns += link.excess_ns
        worker.retry_ns = None
        while True:
            if len(lane) >= max_outstanding:
                return  # the next result makes room
            available_ns = lane.available_ns(now_ns)
            room_ns = available_ns - lookahead_ns
            if link.is_thin:
                # Bytes take their time beside the lane's work, so they leave earlier; but what leaves before
                # the wire has room only waits there.
                link.there_ns = there_ns = now_ns + link.expected_ns(now_ns)
                room_ns = link.room_ns(room_ns, worker.exec_lookahead_ns)
            if room_ns > now_ns:
                break
            free_ns = max(available_ns, there_ns)
            batch = self._policy.next_infer(worker, free_ns, now_ns)
            if batch is None:
                break
            if now_ns < batch.copy.model.apart_until_ns:
                _take_apart(batch)
            if link.is_thin and self._traits.predicts:
                _fit_link(batch, available_ns)
            self._send_infer(worker, batch, now_ns)
        self._look_again(worker, room_ns, now_ns)

    def _look_again(self, worker: WorkerState, room_ns: int, now_ns: int) -> None:
        """When a batch held back may go, else when the lane has room."""
        # This is not done in the function that sets `retry_ns` to None, because a compiler (mypyc) believes
        # that it is None until that function ends.
        if worker.retry_ns is not None:
            self._alarms.wake_exec(worker, worker.retry_ns, now_ns)
        elif worker.strategies and not worker.exec_lane.late(now_ns):
            self._alarms.wake_exec(worker, room_ns, now_ns)

    def _send_infer(self, worker: WorkerState, batch: Batch, now_ns: int) -> None:
        copy, begin_ns = batch.copy, batch.begin_ns
        model = copy.model
        requests = model.queue[batch.first : batch.first + batch.count]
        tries = copy.estimates.trial == batch.size_index
        if tries:
            copy.estimates.try_once()
        duration_ns = copy.estimates.exec_ns[batch.size_index]
        # A policy that does not predict has no begin that is too late; after the timeout its worker is
        # given up anyway.
        predicts = self._traits.predicts
        window_ns = self._config.window_ns if predicts else self._config.action_timeout_ns
        link, back_ns = worker.link, 0
        if not link.is_usual:
            back_ns = link.back.ns
            window_ns += link.out.variation_ns
            if link.is_thin:
                back_ns += link.back.wire_ns(
                    sum([r.rows for r in requests]) * model.output_row_bytes
                )
                begin_ns = max(begin_ns, now_ns + back_ns)  # a policy that reacts knows of no bytes
        action = Infer(
            action_id=ActionId(next(self._action_ids)),
            model_id=model.model_id,
            batch_size=copy.estimates.sizes[batch.size_index],
            rows=tuple([request.rows for request in requests]),
            earliest_ns=now_ns,
            latest_ns=min(begin_ns + window_ns, batch.required_start_ns) - back_ns,
            expected_duration_ns=duration_ns,
        )
        sent = SentAction(
            action,
            copy,
            begin_ns,
            begin_ns + duration_ns,
            worker.clock_mhz,
            requests,
            tries=tries,
        )
        if not link.is_usual:
            sent.back_ns = back_ns
            sent.in_bytes = sum([request.num_bytes for request in requests])
            sent.sent_bytes = link.out.send(now_ns, sent.in_bytes)
        self._books.begin_infer(sent, batch, now_ns)
        self._alarms.expect_result(worker, sent, alone=len(self._books.workers) == 1)
        self.commands.append(
            SendAction(
                worker_id=worker.worker_id,
                action=action,
                request_ids=tuple([request.request_id for request in requests]),
                expected_begin_ns=begin_ns - back_ns,
            )
        )
        if not model.queue and len(model.copies) > 1 and self._policy.wants_any:
            # Nobody needs the model's other copies now: they may make room. A worker with actions in flight
            # looks for that when one ends.
            for other in model.copies:
                if not other.in_flight and other.load_wakeup_ns is None:
                    self._look_for_room(other, now_ns)

    # --- probes ---------------------------------------------------------------------------------

    def probe_run(self, copy: Copy, request: Request, now_ns: int) -> None:
        """Run one request on a worker that is avoided, while it waits or runs elsewhere all the same."""
        worker, estimates = copy.worker, copy.estimates
        if request.rows > estimates.sizes[-1]:
            return
        index = estimates.cover[request.rows]
        duration_ns = estimates.exec_ns[index]
        link, out_bytes = worker.link, request.rows * copy.model.output_row_bytes
        there_ns = now_ns + link.expected_ns(now_ns, request.num_bytes, out_bytes)
        begin_ns = max(worker.exec_lane.available_ns(now_ns), there_ns)
        back_ns = link.back.ns
        if link.is_thin:
            back_ns += link.back.wire_ns(out_bytes)
        action = Infer(
            action_id=ActionId(next(self._action_ids)),
            model_id=copy.model.model_id,
            batch_size=estimates.sizes[index],
            rows=(request.rows,),
            earliest_ns=now_ns,
            latest_ns=begin_ns + self._config.window_ns - back_ns,
            expected_duration_ns=duration_ns,
        )
        sent = SentAction(
            action,
            copy,
            begin_ns,
            begin_ns + duration_ns,
            worker.clock_mhz,
            [request],
            shared=True,
            back_ns=back_ns,
        )
        if not link.is_usual:
            sent.in_bytes = request.num_bytes
            sent.sent_bytes = link.out.send(now_ns, sent.in_bytes)
        self._books.begin_probe(sent, now_ns)
        self._alarms.expect_result(worker, sent, alone=len(self._books.workers) == 1)
        self.commands.append(
            SendAction(
                worker_id=worker.worker_id,
                action=action,
                request_ids=(request.request_id,),
                expected_begin_ns=begin_ns - back_ns,
            )
        )

    def probe_load(
        self, worker: WorkerState, model: Model, readiness: Readiness, now_ns: int
    ) -> None:
        """Load a model on a worker that is avoided, where its lane is free."""
        if worker.load_lane:
            return
        victims = self._policy.victims(worker, readiness.num_pages, now_ns)
        if victims is None:
            return
        for victim in victims:
            self.evict(victim)
        begin_ns = now_ns + worker.link.expected_ns(now_ns)
        self._send_load(worker, model, readiness, begin_ns, now_ns)

    # --- load lanes -----------------------------------------------------------------------------

    def seek_copy(
        self,
        model: Model,
        now_ns: int,
        *,
        refusal: Refusal | None = None,
        wanted: bool = False,
    ) -> None:
        """Load the model once more where there is a reason and room (copies.py).

        Args:
            model: some worker that is ready for it has no copy.
            now_ns: the present.
            refusal: why a request of the model was refused at arrival; None: none was.
            wanted: somebody asked for a copy.
        """
        reason = reason_for_copy(
            model,
            self._config,
            self._traits,
            self._policy,
            refusal=refusal,
            wanted=wanted,
            any_idle=self._books.num_idle > 0,
            now_ns=now_ns,
        )
        if reason is DEMAND:
            self._load_by_urgency(model, now_ns)
        elif reason is not None:
            self._load_aside(model, reason, now_ns)

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
        for worker in self._books.load_lanes.maybe_idle(model.ready, now_ns):
            if worker.in_flight if reason is IDLE_PAGES else worker.load_lane:
                continue
            readiness = model.ready.get(worker)
            if readiness is None or worker in model.copies:
                continue
            if reason is REFUSED_COLD or reason is WANTED:
                victims = self._policy.victims(worker, readiness.num_pages, now_ns)
                if victims is None:
                    continue
                for victim in victims:
                    self.evict(victim)
            elif worker.num_free_pages < readiness.num_pages:
                if reason is not REFUSED_FULL:
                    continue
                victims = self._policy.victims_of_refused(
                    model, worker, readiness.num_pages, now_ns
                )
                if victims is None:
                    continue
                for victim in victims:
                    self.evict(victim)
            begin_ns = now_ns + worker.link.expected_ns(now_ns)
            self._send_load(worker, model, readiness, begin_ns, now_ns)
            return

    def load_pinned(self, now_ns: int) -> None:
        """Load pinned models that are nowhere, before all else; what is pinned, runs or loads makes no room."""
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
                self.fill_exec(worker, now_ns)
                for victim in victims:
                    if victim.model.queue:
                        self.seek_copy(victim.model, now_ns)
                break

    def fill_load(self, worker: WorkerState, now_ns: int) -> None:
        """Send LoadWeights while the load lane has less than the look-ahead to do."""
        if worker.draining or worker.load_blocked:
            return
        passed_over: list[Model] = []
        self._fill_load(worker, passed_over, now_ns)
        for model in passed_over:
            self._policy.want_load(model, now_ns)

    def _fill_load(self, worker: WorkerState, passed_over: list[Model], now_ns: int) -> None:
        """Do what `fill_load` does; models that do not fit beside what is pinned are passed over, and noted."""
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
                # Every copy there is in use until an action ends, or until nobody waits for it.
                worker.load_blocked = bool(worker.in_flight)
                self._policy.want_load(model, now_ns)
                return
            for victim in victims:
                self.evict(victim)
            self._send_load(worker, model, readiness, begin_ns, now_ns)
            self.fill_exec(worker, now_ns)

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
        self.commands.append(
            SendAction(
                worker_id=worker.worker_id, action=action, expected_begin_ns=begin_ns - back_ns
            )
        )
        self._wake_load(worker, now_ns)

    def evict(self, copy: Copy) -> None:
        """Free a copy's pages: nothing of it is in flight."""
        action = EvictWeights(
            action_id=ActionId(next(self._action_ids)), model_id=copy.model.model_id
        )
        copy.worker.counts.num_evictions += 1
        copy.model.evicted = True
        self._books.drop(copy)
        self.commands.append(SendAction(worker_id=copy.worker.worker_id, action=action))

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

    def _look_for_room(self, worker: WorkerState, now_ns: int) -> None:
        """Nobody waits for one of the worker's copies any more: it may make room for what is wanted."""
        worker.load_blocked = False
        self._alarms.wake_load(worker, now_ns + 1)

    # --- when to look ---------------------------------------------------------------------------

    def may_make_room(self, model: Model, now_ns: int) -> None:
        """All copies of the model may make room: its last request left its queue unserved, or it is pinned no more."""
        if self._policy.wants_any:
            for worker in model.copies:
                self._look_for_room(worker, now_ns)

    def pages_freed(self, worker: WorkerState, now_ns: int) -> None:
        """A copy is gone that nobody took the place of."""
        if self._policy.wants_any:
            self._look_for_room(worker, now_ns)

    def load_lane_freed(self) -> None:
        """Some load lane may have room sooner than was known."""
        self._load_room_ns = 0

    def load_ended(self, worker: WorkerState, now_ns: int) -> None:
        """A LoadWeights of the worker succeeded."""
        self._load_room_ns = 0
        self._wake_load(worker, now_ns)

    def after_result(self, worker: WorkerState, model: Model, now_ns: int) -> None:
        """An action of the model ended: keep the worker's lanes busy."""
        if worker.load_blocked:
            worker.load_blocked = False
            self._load_room_ns = 0
        self.fill_exec(worker, now_ns)
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
            self.fill_exec(worker, now_ns)
        if worker.load_wakeup_ns == at_ns:
            worker.load_wakeup_ns = None
            self._books.load_near_end(worker)
            self.fill_exec(worker, now_ns)
            if self._policy.wants_any or (worker.timers and worker.ahead_ns <= now_ns):
                self.fill_load(worker, now_ns)
            self._wake_load(worker, now_ns)


def _movable(worker: WorkerState, num_pages: int) -> list[Copy] | None:
    """The least recently used copies that free so many pages, waited for or not; None: what stays holds them."""
    found: list[Copy] = []
    missing = num_pages - worker.num_free_pages
    for copy in worker.copies.values():
        if missing <= 0:
            break
        if copy.resident and not copy.num_pins and not copy.model.pinned:
            found.append(copy)
            missing -= copy.num_pages
    return found if missing <= 0 else None


def _begin_ns(worker: WorkerState, now_ns: int) -> int:
    """When the worker could begin a batch, as heard of here, less what is the same for all of them."""
    link = worker.link
    there_ns = now_ns + link.expected_ns(now_ns) - link.usual_ns
    return max(worker.exec_lane.available_ns(now_ns), there_ns)


def _fit_link(batch: Batch, available_ns: int) -> None:
    """Leave those out of a batch whose inputs would keep it waiting, for the lane or past its time.

    Where the lane is busy meanwhile, inputs of many get there in its shadow, and a larger batch saves it time.
    Where it is idle, it is the wire that is short: there nothing is saved by a larger batch.
    Of the counts that keep nobody waiting, one that fills no size is taken where it gives more rows per time of the
    lane than smaller ones: a device that runs one large size only would run it for one row else.
    """
    copy, first = batch.copy, batch.first
    model, estimates, link = copy.model, copy.estimates, copy.worker.link
    queue, sizes = model.queue, estimates.sizes
    due_ns = queue[first].due_ns
    num_bytes = rows = count = index = 0
    begin_ns = taken_rows = taken_ns = 0
    for position in range(first, first + batch.count):
        request = queue[position]
        num_bytes += request.num_bytes
        rows += request.rows
        cover = estimates.cover[rows]
        exec_ns = estimates.exec_ns[cover]
        later_ns = link.begin_ns(available_ns, num_bytes, rows * model.output_row_bytes, exec_ns)
        if not count:
            most_ns = min(later_ns + _NO_MATTER_NS, due_ns)
        elif later_ns > most_ns or later_ns + exec_ns > due_ns:
            break
        if (
            not count
            or sizes[cover] == rows
            or position == first + batch.count - 1
            or rows * taken_ns > taken_rows * exec_ns
        ):
            count, index, begin_ns = position - first + 1, cover, later_ns
            taken_rows, taken_ns = rows, exec_ns
    if count < batch.count:
        batch.count, batch.size_index = count, index
        batch.required_start_ns = due_ns - estimates.exec_ns[index]
    if not copy.resident:
        begin_ns = max(begin_ns, copy.ready_ns)
    # The first request is in time; should it not be the one that the policy looked at, its inputs may be later.
    batch.begin_ns = max(available_ns, min(begin_ns, batch.required_start_ns))


def _take_apart(batch: Batch) -> None:
    """Leave those out of a batch that must not run with so many others, because a run with them failed."""
    copy, first = batch.copy, batch.first
    queue, estimates = copy.model.queue, copy.estimates
    most = batch.count
    rows = count = 0
    for request in queue[first : first + batch.count]:
        most = min(most, request.most_together or most)
        if count >= most:
            break
        rows += request.rows
        count += 1
    if count < batch.count:
        batch.count = count
        index = estimates.cover[rows]
        # A pause makes a smaller size look longer for a while; then the larger one is padded.
        if estimates.exec_ns[index] < estimates.exec_ns[batch.size_index]:
            batch.size_index = index
        required_ns = queue[first].due_ns - estimates.exec_ns[batch.size_index]
        batch.required_start_ns = max(batch.required_start_ns, required_ns)
