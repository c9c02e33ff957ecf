"""Which batches run next: fills exec lanes with Infers.

An exec lane has room while its predicted backlog is below its look-ahead; then the policy is asked for a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from clockwright.units import NS_PER_MS, ActionId
from clockwright.wire.actions import Infer
from controller.core.events import SendAction
from controller.core.parts import CoreParts
from controller.core.promises import Promises
from controller.core.state import (
    MANY_COPIES,
    Batch,
    Copy,
    Model,
    Request,
    SentAction,
    WorkerState,
    due_ns_of,
)

# A batch may wait so long for its inputs.
_NO_MATTER_NS = NS_PER_MS // 2


class ExecLanes:
    """Keeps every exec lane a look-ahead full."""

    def __init__(self, parts: CoreParts, action_ids: Iterator[int]) -> None:
        self._config = parts.config
        self._traits = parts.traits
        self._policy = parts.policy
        self.promises = Promises(parts)
        self._books = parts.books
        self._alarms = parts.alarms
        self._action_ids = action_ids
        self._commands = parts.commands

    def offer(self, model: Model, now_ns: int) -> None:
        """Let lanes that hold the model and have room take its requests."""
        if len(model.copies) < MANY_COPIES:
            self._offer(model, model.copies, now_ns)
        else:
            self._offer_to_idle(model, now_ns)
            if model.queue and model.loose:
                self._offer_to_loose(model, now_ns)

    def _offer(self, model: Model, workers: Iterable[WorkerState], now_ns: int) -> None:
        """Let those of the workers take the model's requests whose lanes may have room."""
        # A lane with a wake-up yet to come is full, and is looked at then. Where the policy holds a batch
        # back (`retry_ns`), look now: these requests may be what the batch waits for. Where it refused work of batch
        # clients, more of that changes nothing.
        room = [
            worker
            for worker in workers
            if (worker.exec_wakeup_ns or 0) <= now_ns
            or (
                worker.retry_ns is not None
                and not (now_ns < worker.held_until_ns and self._is_batch_work(model))
            )
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
            self.fill(worker, now_ns)
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
            self.fill(best, now_ns)
            if not best.exec_lane:  # it holds them back, or cannot be in time
                best.leave_idle()
        if not model.queue or self._books.num_busy_lanes == len(self._books.workers):
            return
        if now_ns < model.held_until_ns and self._is_batch_work(model):
            return
        others = [worker for worker in copies if not worker.exec_lane]
        self._offer(model, others, now_ns)
        if others and now_ns < others[0].held_until_ns:
            model.held_until_ns = others[0].held_until_ns

    def _is_batch_work(self, model: Model) -> bool:
        """Whether the most urgent of the model's requests is a batch client's."""
        return bool(model.queue) and model.queue[0].slo_ns >= self._config.batch_slo_ns

    def _offer_to_loose(self, model: Model, now_ns: int) -> None:
        """Let busy workers whose lane may have room take the model's requests, or look when it has."""
        loose, model.loose = model.loose, {}
        self._offer(model, [worker for worker in loose if worker in model.copies], now_ns)
        for worker in loose:
            self._note_loose(worker)

    def _note_loose(self, worker: WorkerState) -> None:
        """Note a busy worker whose exec lane is not looked at before a result comes."""
        if worker.exec_lane and (worker.exec_wakeup_ns is None or worker.retry_ns is not None):
            model = next(reversed(worker.in_flight.values())).copy.model
            if len(model.copies) >= MANY_COPIES:
                model.loose[worker] = None

    def fill(self, worker: WorkerState, now_ns: int) -> None:
        """Send Infers while the exec lane has less than the look-ahead to do."""
        if worker.draining:
            return
        self._policy.catch_up(worker)
        if worker.strategies or worker.promised:
            self._fill(worker, now_ns)
        if worker.exec_wakeup_ns is None or worker.retry_ns is not None:
            self._note_loose(worker)
            if worker.held_until_ns and worker.exec_wakeup_ns is None:
                # It found nothing, and does not look again by itself.
                worker.held_until_ns = 0
                for model in worker.copies:
                    model.held_until_ns = 0

    def _fill(self, worker: WorkerState, now_ns: int) -> None:
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
                # Bytes travel while the lane works, so they leave earlier; but what leaves before
                # the wire has room only waits there.
                link.there_ns = there_ns = now_ns + link.expected_ns(now_ns)
                room_ns = link.room_ns(room_ns, worker.exec_lookahead_ns)
            if room_ns > now_ns:
                break
            free_ns = max(available_ns, there_ns)
            policy = self.promises if worker.promised else self._policy
            batch = policy.next_infer(worker, free_ns, now_ns)
            if batch is None:
                break
            if now_ns < batch.copy.model.apart_until_ns:
                _take_apart(batch)
            if link.is_thin and self._traits.predicts:
                _fit_link(batch, available_ns)
            self._policy.runs(batch, now_ns)
            self._send_infer(worker, batch, now_ns)
        self._look_again(worker, room_ns, now_ns)

    def _look_again(self, worker: WorkerState, room_ns: int, now_ns: int) -> None:
        """When a batch held back may go, else when the lane has room."""
        # This is not done in the function that sets `retry_ns` to None, because a compiler (mypyc) assumes
        # that it is None until that function ends.
        if worker.retry_ns is not None:
            self._alarms.wake_exec(worker, worker.retry_ns, now_ns)
        elif (worker.strategies or worker.promised) and not worker.exec_lane.late(now_ns):
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
        self._commands.append(
            SendAction(
                worker_id=worker.worker_id,
                action=action,
                request_ids=tuple([request.request_id for request in requests]),
                expected_begin_ns=begin_ns - back_ns,
            )
        )
        if not model.queue and len(model.copies) > 1 and self._policy.wants_any:
            # No request needs the model's other copies now: they may make room. A worker with actions in flight
            # checks that when one ends.
            for other in model.copies:
                if not other.in_flight and other.load_wakeup_ns is None:
                    self.look_for_room(other, now_ns)

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
        self._commands.append(
            SendAction(
                worker_id=worker.worker_id,
                action=action,
                request_ids=(request.request_id,),
                expected_begin_ns=begin_ns - back_ns,
            )
        )

    def look_for_room(self, worker: WorkerState, now_ns: int) -> None:
        """Fill the worker's load lane: no request waits for one of its copies any more, which may make room."""
        worker.load_blocked = False
        self._alarms.wake_load(worker, now_ns + 1)


def _begin_ns(worker: WorkerState, now_ns: int) -> int:
    """When the worker could begin a batch, as heard of here, less what is the same for all of them."""
    link = worker.link
    there_ns = now_ns + link.expected_ns(now_ns) - link.usual_ns
    return max(worker.exec_lane.available_ns(now_ns), there_ns)


def _fit_link(batch: Batch, available_ns: int) -> None:
    """Leave those out of a batch whose inputs would keep it waiting, for the lane or past its time.

    Where the lane is busy meanwhile, inputs of many get there in its shadow, and a larger batch saves it time.
    Where it is idle, it is the wire that is short: there nothing is saved by a larger batch.
    Among the counts that delay no request, one that fills no size is taken if it gives more rows per time of the
    lane than smaller ones. Else a device that runs only one large size would run it for one row.
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
        if batch.picked is not None:  # they stand at the front, and these go back to their places
            queue[count:] = sorted(queue[count:], key=due_ns_of)
        index = estimates.cover[rows]
        # A pause makes a smaller size look longer for a while; then the larger one is padded.
        if estimates.exec_ns[index] < estimates.exec_ns[batch.size_index]:
            batch.size_index = index
        required_ns = queue[first].due_ns - estimates.exec_ns[batch.size_index]
        batch.required_start_ns = max(batch.required_start_ns, required_ns)
