"""Takes results: learns durations and links from them, answers requests, and handles failures and timeouts."""

from __future__ import annotations

from collections.abc import Sequence

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ActionId
from clockwright.wire.actions import ActionError, Infer
from controller.core.admission import Verdict
from controller.core.alarms import STOOD_STILL_NS, SUSPECT_NS
from controller.core.books import loads_before, own_requests
from controller.core.dispatch import Dispatch
from controller.core.estimator import SLOW_FACTOR, SLOW_NS
from controller.core.events import ActionFailed, ActionSucceeded, AnswerRequest, WriteOffAction
from controller.core.membership import Membership
from controller.core.parts import CoreParts
from controller.core.requests import Requests
from controller.core.state import DONE, WAITING, Copy, Model, SentAction, WorkerState

# A worker whose action is overdue is given up if the result is still missing after this time.
_SECOND_LOOK_NS = NS_PER_S

# An upper bound on the error with which a worker's and the controller's clocks are converted.
_CLOCK_ERROR_NS = 2 * NS_PER_MS

_FOREVER_NS = 1 << 62

# A worker may report these errors without contradicting the controller's books.
_EXPECTED_ERRORS = {
    ActionError.TOO_LATE,
    ActionError.DEVICE,
    ActionError.BAD_INPUT,
}

# The engine's, or the request's, doing: to try the same again at once would give the same.
_FAILURES = {ActionError.DEVICE, ActionError.BAD_INPUT}

# A request that fails alone is run alone once more: elsewhere, or here where there is no elsewhere.
_MAX_FAILURES_ALONE = 2
# To take a batch of 256 apart takes eight failures.
_MAX_FAILURES = 10


class Results:
    """Takes the results of actions, and notices missing ones."""

    def __init__(
        self, parts: CoreParts, requests: Requests, members: Membership, dispatch: Dispatch
    ) -> None:
        self._config = parts.config
        self._books = parts.books
        self._alarms = parts.alarms
        self._lag = parts.lag
        self._health = parts.health
        self._dispatch = dispatch
        self._requests = requests
        self._members = members
        self._commands = parts.commands
        self._predicts = parts.traits.predicts

    def succeeded(self, event: ActionSucceeded, now_ns: int) -> None:
        """Learn from an action that ran, answer its requests, and keep the lanes busy."""
        books = self._books
        worker = books.workers.get(event.worker_id)
        sent = books.take_result(worker, event.action_id) if worker is not None else None
        if worker is None or sent is None:
            return
        if event.unread_ns or self._lag.is_late:
            self._lag.read(event.unread_ns, now_ns)
        overtook = next(iter(worker.in_flight), event.action_id) < event.action_id
        lost = self._lost(worker, sent, event.begin_ns) if overtook else ()
        # A clock offset that is a little off must not put an end into the future.
        end_ns = min(event.end_ns, now_ns)
        end_ns += self._learn_link(worker, sent, event, end_ns, event.unread_ns, now_ns)
        # A worker may say that something took no time. Rates are reciprocals of durations, so it took some.
        duration_ns, action = max(event.duration_ns + event.spared_ns, 1), sent.action
        learns, touched = True, None
        waiting: Sequence[Model] = ()
        if (
            worker.trouble is not None
            or duration_ns > SLOW_FACTOR * action.expected_duration_ns + SLOW_NS
        ):
            learns, touched = self._health.succeeded(sent, duration_ns, now_ns)
        if isinstance(action, Infer):
            if learns:
                self._measured_exec(worker, sent, action.batch_size, duration_ns)
            books.end_infer(sent, end_ns)
            # Where it ended in time, those behind it may begin, but for a few, whose own results say so.
            if worker.exec_lane and sent.expected_end_ns < end_ns:
                missed = self._skip_missed(sent, min(event.end_ns, now_ns))
                waiting = self._wait_again(missed, now_ns)
            if sent.shared:
                self._answer_first(event, sent, action.batch_size, now_ns)
                books.exec_freed(worker)
            else:
                self._answer(event, sent, action.batch_size, now_ns)
                books.infer_over(sent, event, action.batch_size, now_ns)
        else:
            if learns:
                sent.copy.estimates.measured_load(duration_ns)
            books.end_load(sent, end_ns, now_ns)
            self._dispatch.load_ended(worker, now_ns)
        for each in lost:
            self._write_off(each, sent.copy, now_ns)
        if touched:
            self._requests.trust_changed(worker, touched, now_ns)
        self._settle(worker, sent.copy.model, now_ns)
        for model in waiting:
            if model.queue:
                self._dispatch.place(model, now_ns)

    def failed(self, event: ActionFailed, now_ns: int) -> None:
        """Handle an action that did not run: it was too late, it failed, or the worker contradicts the books."""
        worker = self._books.workers.get(event.worker_id)
        if worker is None or event.action_id not in worker.in_flight:
            return
        if event.error not in _EXPECTED_ERRORS and not _explained(worker, event):
            self._members.let_go(
                worker,
                f"action {event.action_id}: {event.error.name}: {event.message}; "
                "the worker's cache is not what the controller believes",
                now_ns,
            )
            return
        sent = self._books.take_result(worker, event.action_id)
        assert sent is not None
        model = sent.copy.model
        self._learn_link(worker, sent, event, now_ns, 0, now_ns)
        waiting: Sequence[Model] = ()
        if isinstance(sent.action, Infer):
            self._books.end_infer(sent, now_ns)
            missed: Sequence[SentAction] = ()
            if (
                event.error is ActionError.TOO_LATE
                and event.turn_ns is not None
                and _is_behind_another(worker, sent)
            ):
                missed = self._skip_missed(sent, min(event.turn_ns, now_ns))
            if event.error is ActionError.NOT_RESIDENT:
                # The worker heard of the load before, and answered for it before if it ended.
                for load in loads_before(worker, sent):
                    self._write_off(load, None, now_ns)
            if event.error in _FAILURES:
                self._run_failed(event, sent, now_ns)
            else:
                if (
                    event.error is ActionError.TOO_LATE
                    and now_ns < sent.action.latest_ns - _CLOCK_ERROR_NS
                    and not model.removed
                ):
                    # As with runs that fail at once, its lane is always free for more.
                    words = "worker says TOO_LATE while there was time"
                    self._requests.trust_changed(
                        worker, self._health.run_failed(sent, words, now_ns), now_ns
                    )
                self._requests.put_back(sent, Refusal.LATE, now_ns)
                waiting = self._wait_again(missed, now_ns)
            self._books.exec_freed(worker)
            if event.error is not ActionError.TOO_LATE:
                worker.exec_wakeup_ns = None  # the lane has room long before that was to be
        else:
            self._books.fail_load(sent, now_ns)
            self._dispatch.load_lane_freed()
            if event.error in _FAILURES and not model.removed:
                self._requests.trust_changed(
                    worker, self._health.load_failed(sent, event.message, now_ns), now_ns
                )
                if not model.ready:
                    self._requests.reconsider(model, Refusal.FAILED, now_ns)
            self._requests.displaced(model, now_ns)
        self._settle(worker, model, now_ns)
        for each in dict.fromkeys((model, *waiting)):
            if each.queue:  # another worker may be the better one for those that were put back
                self._dispatch.place(each, now_ns)

    def _skip_missed(self, sent: SentAction, busy_until_ns: int) -> list[SentAction]:
        """Take Infers off their lane that can no longer begin, before their results say so.

        Results come one by one. Judged as each comes, the first requests would find a lane that is full of what cannot
        run, and what is sent for them would stand in the way of the rest.

        Args:
            sent: an Infer that ended, or was too late; those in question were sent after it.
            busy_until_ns: on the worker's clock, until when its lane can have begun none of them.

        Returns:
            Those whose windows closed before that, each once.
        """
        worker = sent.copy.worker
        missed = [
            other
            for action_id, other in worker.in_flight.items()
            if action_id > sent.action.action_id
            and isinstance(other.action, Infer)
            and other.action.latest_ns < busy_until_ns
            and worker.exec_lane.skip(action_id)
        ]
        if missed:
            worker.exec_wakeup_ns = None  # the lane has room long before that was to be
        return missed

    def _wait_again(self, missed: Sequence[SentAction], now_ns: int) -> Sequence[Model]:
        """Queue the requests of Infers that cannot begin any more. Returns the models of those that wait again."""
        models: dict[Model, None] = {}
        for sent in missed:
            for request in own_requests(sent):
                if request.phase is DONE:
                    continue
                verdict = self._requests.judge_again(request, now_ns)
                if verdict.refusal is None:  # else the result decides
                    self._books.disown(sent, request)
                    self._requests.wait_again(request, verdict, now_ns)
                    models[sent.copy.model] = None
        for model in models:
            self._books.came(model)
        return list(models)

    def _lost(self, worker: WorkerState, sent: SentAction, begin_ns: int) -> Sequence[SentAction]:
        """Find what a success proves to have lost its result.

        A worker answers in the order of its lanes: what could not begin any more when a later action of the lane began
        has been answered. So has the load of a model that ran.

        Args:
            worker: has older actions in flight.
            sent: the action that succeeded.
            begin_ns: when it began.
        """
        lost: list[SentAction] = []
        is_run = isinstance(sent.action, Infer)
        for action_id, other in worker.in_flight.items():
            if action_id > sent.action.action_id:
                break
            if isinstance(other.action, Infer) is not is_run:
                if is_run and other.copy is sent.copy:
                    lost.append(other)
            elif other.action.latest_ns + _CLOCK_ERROR_NS < begin_ns and (
                # The Infers behind a load will tell whether it is lost.
                is_run or not other.copy.num_pins
            ):
                lost.append(other)
        return lost

    def _write_off(self, lost: SentAction, ran: Copy | None, now_ns: int) -> None:
        """The result of an action is lost: take it out of flight, and go on without it.

        `ran` is the copy that has run, if any.
        """
        books, copy, action_id = self._books, lost.copy, lost.action.action_id
        worker, model = copy.worker, copy.model
        books.take_result(worker, action_id)
        self._commands.append(WriteOffAction(worker_id=worker.worker_id, action_id=action_id))
        if isinstance(lost.action, Infer):
            books.end_infer(lost, now_ns)
            self._requests.put_back(lost, Refusal.WORKER_LOST, now_ns)
            books.exec_freed(worker)
        elif copy is ran:
            books.end_load(lost, now_ns, now_ns)
            self._dispatch.load_ended(worker, now_ns)
        else:
            books.fail_load(lost, now_ns)
            self._dispatch.disown(copy)
            self._requests.displaced(model, now_ns)
        if model.removed:
            self._members.forget(worker, model, now_ns)
        elif model.queue:
            self._dispatch.place(model, now_ns)

    def _settle(self, worker: WorkerState, model: Model, now_ns: int) -> None:
        """After a result: finish what waited for the action's end, keep the lanes busy."""
        if model.removed:
            self._members.forget(worker, model, now_ns)
        self._members.place_pinned(now_ns)
        if not worker.draining:
            self._dispatch.after_result(worker, model, now_ns)
        elif not worker.in_flight:
            self._members.let_go(worker, "", now_ns)
        if model.suspended and model.queue:
            # In closed loops all clients may wait for answers: then no request comes to probe a worker with.
            self._requests.probe(model, model.queue[-1].request_id, now_ns)

    def _measured_exec(
        self, worker: WorkerState, sent: SentAction, size: int, duration_ns: int
    ) -> None:
        if sent.clock_mhz != worker.clock_mhz:
            return  # it changed meanwhile, before the EXEC or after it
        estimates = sent.copy.estimates
        if worker.clock_mhz:
            worker.unconfirmed.add((estimates, size))
            estimates.measured_exec_unconfirmed(worker.sequence, size, duration_ns)
        else:
            estimates.measured_exec(size, duration_ns)

    def _learn_link(
        self,
        worker: WorkerState,
        sent: SentAction,
        event: ActionSucceeded | ActionFailed,
        end_ns: int,
        unread_ns: int,
        now_ns: int,
    ) -> int:
        """Learn from the delays of an action and its result. Returns the delay to allow for the result.

        `end_ns` is its end there, or now, if it failed; for `unread_ns` the result may have been here unread.
        """
        link, received_ns, back_ns = worker.link, event.received_ns, now_ns
        # An action may begin the moment it is decided upon. It was not received later than now, whatever the
        # worker's clock says.
        sent_ns = sent.action.earliest_ns + event.unsent_ns
        there_ns = sent_ns if received_ns is None else min(received_ns, now_ns)
        end_ns = max(end_ns, there_ns, sent_ns)
        if unread_ns:
            # The time in which a busy process did not look is no delay of the link, which is as long as before.
            back_ns -= min(unread_ns, max(0, now_ns - end_ns - link.back.length_ns))
        if not link.is_news(there_ns - sent_ns, back_ns - end_ns, back_ns):
            return 0
        if received_ns is not None:
            if not sent.sent_bytes:  # the link was usual when they were sent
                sent.in_bytes = sum([request.num_bytes for request in sent.requests])
            link.out.measured(
                sent_ns,
                there_ns,
                num_bytes=sent.in_bytes,
                sent_bytes=sent.sent_bytes,
            )
        if end_ns < back_ns:
            out_bytes = 0
            if isinstance(sent.action, Infer):
                out_bytes = sum(sent.action.rows) * sent.copy.model.output_row_bytes
            sent_bytes = link.back.send(end_ns, out_bytes)
            link.back.measured(end_ns, back_ns, num_bytes=out_bytes, sent_bytes=sent_bytes)
        link.learned(now_ns)
        # On a thin way back results queue, and the next comes after this one.
        return back_ns - end_ns if link.back.ns_per_byte else link.back.ns

    def _answer(self, event: ActionSucceeded, sent: SentAction, size: int, now_ns: int) -> None:
        """Respond to the requests of an Infer that ran; those past their deadline are late."""
        books = self._books
        for index, request in enumerate(sent.requests):
            if request.phase is DONE:
                continue
            if now_ns > request.deadline_ns:
                self._requests.refuse(request, Verdict(Refusal.LATE))
                continue
            books.close(request)
            self._commands.append(
                AnswerRequest(
                    request_id=request.request_id,
                    action_id=event.action_id,
                    worker_id=event.worker_id,
                    index=index,
                    batch_size=size,
                    cold=request.cold,
                    expected_departure_ns=sent.expected_end_ns,
                )
            )

    def _answer_first(
        self, event: ActionSucceeded, sent: SentAction, size: int, now_ns: int
    ) -> None:
        """Answer the open requests of an Infer, even if they wait or run on another worker as well."""
        elsewhere: dict[ActionId, None] = {}
        for request in sent.requests:
            if request.phase is WAITING:
                self._requests.leave_queue(request, now_ns)
            elif request.action_id is not None and request.action_id != event.action_id:
                elsewhere[request.action_id] = None
        self._answer(event, sent, size, now_ns)
        for action_id in elsewhere:
            self._requests.withdraw(action_id)
        if sent.copy.model.queue:  # a policy that reacts waits for the end of each of its actions
            self._books.came(sent.copy.model)

    def _run_failed(self, event: ActionFailed, sent: SentAction, now_ns: int) -> None:
        """The engine failed at an Infer: run its requests elsewhere or again, in smaller batches.

        One that fails alone again is refused with the engine's words, and so is one without time.
        """
        model = sent.copy.model
        if event.error is ActionError.DEVICE and not model.removed:
            if any(request.num_failures for request in sent.requests):
                touched = self._health.requests_failed(sent)
            else:
                touched = self._health.run_failed(sent, event.message, now_ns)
            self._requests.trust_changed(sent.copy.worker, touched, now_ns)
        together = len(sent.requests)
        for request in own_requests(sent) if sent.shared else sent.requests:
            if request.phase is DONE:
                continue
            request.num_failures += 1
            request.failure = event.message
            request.num_failures_alone += together == 1
            in_vain = (
                request.num_failures_alone >= _MAX_FAILURES_ALONE
                or request.num_failures >= _MAX_FAILURES
                or (event.error is ActionError.BAD_INPUT and together == 1)
            )
            verdict = Verdict() if in_vain else self._requests.judge_again(request, now_ns)
            if in_vain or verdict.refusal is not None:
                self._requests.refuse(request, Verdict(Refusal.FAILED, detail=event.message))
                continue
            request.most_together = max(1, together // 2)
            # A policy that does not predict runs it when it will.
            until_ns = request.deadline_ns if self._predicts else _FOREVER_NS
            model.apart_until_ns = max(model.apart_until_ns, until_ns)
            self._requests.wait_again(request, verdict, now_ns)
        self._books.came(model)

    def check_timeout(self, worker: WorkerState, at_ns: int, now_ns: int) -> None:
        """Check whether the oldest action of a worker is overdue, as the check that was due at `at_ns`."""
        action_id, sent = next(iter(worker.in_flight.items()))
        until_ns = self._alarms.overdue_ns(sent)
        if until_ns > now_ns and len(self._books.workers) > 1:
            suspect_ns = self._alarms.suspect_ns(sent)
            if suspect_ns > now_ns:
                until_ns = suspect_ns
            else:
                if now_ns - at_ns > STOOD_STILL_NS:
                    # Results that came meanwhile have not been read yet.
                    until_ns = min(until_ns, now_ns + STOOD_STILL_NS)
                elif worker.trouble is None or not worker.trouble.sick:
                    self._requests.trust_changed(
                        worker, self._health.overdue(worker, now_ns), now_ns
                    )
                # Its next action may be overdue too, once this one has its result.
                until_ns = min(until_ns, now_ns + SUSPECT_NS)
        if until_ns <= now_ns:
            if worker.suspected == action_id:
                self._members.let_go(
                    worker, f"action {action_id} has no result long after its predicted end", now_ns
                )
                return
            # If this process was suspended, every timeout fires before any result is read. So look twice:
            # blame the worker only if the result is still missing a second later.
            worker.suspected = action_id
            until_ns = now_ns + min(_SECOND_LOOK_NS, self._config.action_timeout_ns)
        self._alarms.expect_result_until(worker, until_ns)


def _is_behind_another(worker: WorkerState, infer: SentAction) -> bool:
    """Whether an Infer that was sent before this one has no result yet: it may have kept the lane busy.

    Else those that were sent after it may have overtaken it, while it waited for its weights.
    """
    for action_id, sent in worker.in_flight.items():
        if isinstance(sent.action, Infer):
            return action_id < infer.action.action_id
    return False


def _explained(worker: WorkerState, event: ActionFailed) -> bool:
    """Whether an error agrees with the books. NOT_RESIDENT does if the Infer was planned after a load that failed.

    WITHDRAWN is none of what was taken back. A worker that says so of what was not does nothing, and always
    has time for more.
    """
    sent = worker.in_flight[event.action_id]
    if event.error is ActionError.WITHDRAWN:
        return sent.withdrawn
    return event.error is ActionError.NOT_RESIDENT and not sent.copy.resident
