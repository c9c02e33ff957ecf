"""Admits requests, refuses them, queues them again, and withdraws Infers that no request needs.

`admission` decides whether a request can be in time. `results` answers requests that ran.
"""

from __future__ import annotations

from collections.abc import Sequence

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, ActionId, RequestId
from controller.core.admission import (
    Verdict,
    judge,
    judge_without_prediction,
    margin_of,
    refusal_of,
    row_worth_of,
    way_back_of,
)
from controller.core.books import own_requests, requests_run
from controller.core.dispatch import Dispatch
from controller.core.events import (
    AdmissionClosed,
    CertaintyAsked,
    PromiseRequest,
    RefuseRequest,
    RequestArrived,
    RequestCancelled,
    RequestsArrived,
    TurnedAway,
    WithdrawAction,
)
from controller.core.parts import CoreParts
from controller.core.state import DONE, SENT, WAITING, Model, Request, SentAction, WorkerState

# Timers of event loops are so coarse: a decision is looked at sooner by that.
_TICK_NS = NS_PER_MS

_IN_VAIN = {None: False, Refusal.OVERLOADED: True}

# For these reasons a promised request is not refused. None: it may be in time, or could have been until now.
_FOR_WANT_OF_TIME = (Refusal.OVERLOADED, Refusal.COLD, Refusal.INFEASIBLE, None)


class Requests:
    """Owns open requests from arrival to refusal."""

    def __init__(self, parts: CoreParts, dispatch: Dispatch) -> None:
        self._config = parts.config
        self._policy = parts.policy
        self._books = parts.books
        self._alarms = parts.alarms
        self._lag = parts.lag
        self._health = parts.health
        self._dispatch = dispatch
        self._commands = parts.commands
        self._predicts = parts.traits.predicts
        self._promises = dispatch.exec_lanes.promises
        #: Every request that arrives is refused.
        self.closed = False

    def arrived(self, event: RequestArrived, now_ns: int) -> None:
        """Admit a request and offer it to the lanes, or refuse it."""
        model = self._admit(event, now_ns)
        if model is not None:
            self._books.came(model)
            self._dispatch.place(model, now_ns)
            if model.suspended:
                self.probe(model, event.request_id, now_ns)

    def arrived_together(self, event: RequestsArrived, now_ns: int) -> None:
        """Admit all requests before a lane takes any, so that they share batches."""
        # Each model once, in the order of arrival.
        models: dict[Model, int] = {}
        for request in event.requests:
            admitted = self._admit(request, now_ns)
            if admitted is not None:
                models[admitted] = models.get(admitted, 0) + 1
        copied: list[Model] = []
        for model, number in models.items():
            self._books.came(model)
            num_copies = len(model.copies)
            self._dispatch.place(model, now_ns)
            if number > 1 and len(model.copies) > num_copies:
                copied.append(model)
        # Had they come one by one, each could have brought its model one more copy.
        while copied:
            copied = [model for model in copied if self._copied_again(model, models, now_ns)]
        for request in event.requests:
            asked = self._books.models.get(request.model_id)
            if asked is not None and asked.suspended:
                self.probe(asked, request.request_id, now_ns)

    def _copied_again(self, model: Model, numbers: dict[Model, int], now_ns: int) -> bool:
        """Seek another copy for the next of the model's requests that came together. Returns whether it got one."""
        numbers[model] -= 1
        num_copies = len(model.copies)
        if not numbers[model] or not model.queue or num_copies == len(model.ready):
            return False
        self._dispatch.seek_copy(model, now_ns)
        return len(model.copies) > num_copies

    def margin_of(self, slo_ns: int, now_ns: int) -> int:
        """The part of an SLO that is kept free between the predicted end of the EXEC and the deadline."""
        config, kept_ns = self._config, self._policy.margin_ns
        if config.way_back_ns:
            kept_ns = self.most_kept_ns(way_back_of(slo_ns, config.way_back_ns))
        late_ns = self._lag.at(now_ns) if self._lag.is_late else 0
        return margin_of(slo_ns, kept_ns, config.margin_fraction) + late_ns

    def most_kept_ns(self, way_back_ns: int) -> int:
        """The policy's margin plus the way from the front to the client, as far as `config.margin_ns` allows both."""
        margin_ns = self._policy.margin_ns
        both_ns = min(margin_ns + way_back_ns, self._config.margin_ns)
        return max(both_ns, margin_ns, way_back_ns)

    def is_in_vain(self, event: RequestArrived, behind_rows: int, now_ns: int) -> bool | None:
        """Say whether a request that arrived now would be refused as `OVERLOADED`; see `Scheduler`."""
        model = self._books.models.get(event.model_id)
        if model is None or model.suspended or self.closed or not self._predicts or event.tenant:
            return None
        request, lanes = self._request_of(event, model, now_ns), self._books.load_lanes
        verdict = judge(request, now_ns, lanes, arriving=True, behind=behind_rows, doubts=False)
        return _IN_VAIN.get(verdict.refusal)

    def turned_away(self, event: TurnedAway, now_ns: int) -> None:
        """Count requests that were in vain as if they had arrived."""
        model = self._books.models.get(event.request.model_id)
        if model is not None:
            request = self._request_of(event.request, model, now_ns)
            for _ in range(event.number):
                self._books.dropped(request, Refusal.OVERLOADED, now_ns)
            self._seek_copy_for_refused(model, Verdict(Refusal.OVERLOADED), now_ns, arriving=True)

    def _admit(self, event: RequestArrived, now_ns: int) -> Model | None:
        """Queue a request, or refuse it; returns its model in the first case."""
        books = self._books
        model = books.models.get(event.model_id)
        if model is None:
            self._refuse_unknown(event)
            return None
        if model.suspended:
            self.resort(model, now_ns)
        request = self._request_of(event, model, now_ns)
        if self.closed:
            verdict = Verdict(Refusal.DRAINING)
        elif self._predicts:
            if event.tenant:
                verdict = self._judge_of_tenant(request, now_ns)
            else:
                verdict = judge(request, now_ns, books.load_lanes, arriving=True)
        else:
            verdict = self._judge_without_prediction(request)
        if verdict.refusal is not None:
            books.dropped(request, verdict.refusal, now_ns)
            self._commands.append(refusal_of(request, verdict))
            self._seek_copy_for_refused(model, verdict, now_ns, arriving=True)
            if model.suspended:
                self.probe(model, request.request_id, now_ns)
            return None
        books.enqueue(request)
        if self._predicts:  # else it waits until it has run
            self._alarms.watch(request, verdict.hopeless_ns)
        return model

    def _request_of(self, event: RequestArrived, model: Model, now_ns: int) -> Request:
        slo_ns = event.slo_ns
        deadline_ns = event.arrival_ns + slo_ns
        for copy in model.copies.values():
            if copy.resident:
                cold = False
                break
        else:
            cold = True
        request = Request(
            event.request_id,
            model,
            event.rows,
            event.arrival_ns,
            slo_ns,
            deadline_ns,
            deadline_ns - self.margin_of(slo_ns, now_ns),
            cold,
            # Appendix B's demand of one request: its execution time, alone.
            model.fastest.exec_ns[0] * event.rows if model.fastest else 0,
            event.tenant,
            event.num_bytes,
        )
        if event.weight != 1.0 or event.work_ahead_ns:
            request.row_worth = row_worth_of(model, event.rows, event.weight, event.work_ahead_ns)
        return request

    def _judge_of_tenant(self, request: Request, now_ns: int) -> Verdict:
        """Judge a request of a tenant, which may have used up its share."""
        fastest = request.model.fastest
        room_ns = 0
        if fastest is not None and (part := self._policy.leaves_room(request, now_ns)):
            alone_ns = fastest.exec_ns[0] + (fastest.load_ns if request.cold else 0)
            room_ns = int(part * max(0, request.due_ns - now_ns - alone_ns))
        verdict = judge(request, now_ns, self._books.load_lanes, arriving=True, room_ns=room_ns)
        verdict.hopeless_ns += room_ns
        if verdict.refusal is Refusal.OVERLOADED and room_ns:
            verdict.detail = f"tenant {request.tenant!r} used up its share, and others wait"
        return verdict

    def judge_again(self, request: Request, now_ns: int) -> Verdict:
        """Judge a request that waits, or was sent in vain."""
        if self._predicts and not request.decide_ns:
            return judge(request, now_ns, self._books.load_lanes)
        if self._predicts:
            return self._judge_asking(request, now_ns)
        return self._judge_without_prediction(request)

    # --- requests that ask for certainty --------------------------------------------------------

    def certainty_asked(self, event: CertaintyAsked, now_ns: int) -> None:
        """Decide a request within a time: refuse it by then, or promise it (promises.py)."""
        request = self._books.requests.get(event.request_id)
        if request is None:
            return
        if not self._predicts:
            if request.phase is WAITING:
                self.leave_queue(request, now_ns)
            detail = (
                f"policy {self._config.policy} cannot decide within a time, because it predicts nothing; "
                "ask without decide_within_ms, or choose a policy that predicts, such as edf_mh"
            )
            self.refuse(request, Verdict(Refusal.INFEASIBLE, detail=detail))
            if request.action_id is not None:
                self.withdraw(request.action_id)
            return
        way_back_ns = way_back_of(event.within_ns, self._config.way_back_ns)
        early_ns = max(way_back_ns, min(_TICK_NS, event.within_ns // 2))
        request.decide_ns = request.arrival_ns + event.within_ns - early_ns
        self._alarms.watch_no_later(request, request.decide_ns)

    def _judge_asking(self, request: Request, now_ns: int) -> Verdict:
        """Judge a request that asks for certainty; once it has to be decided, by its place."""
        verdict = judge(request, now_ns, self._books.load_lanes)
        if not request.decided_ns:
            if now_ns < request.decide_ns:
                verdict.hopeless_ns = min(verdict.hopeless_ns, request.decide_ns)
                return verdict
            promised = request.phase is SENT or self._has_place(request, now_ns)
            self._promises.count_decision(request.model, refused=not promised, now_ns=now_ns)
            if not promised:
                return _undecided(request, verdict, now_ns)
            request.decided_ns = now_ns
            self._commands.append(PromiseRequest(request_id=request.request_id))
        if request.deadline_ns <= now_ns:
            return Verdict(Refusal.LATE)
        if request.phase is SENT:
            # It was sent in vain, and is promised. It gets a place when it waits again (`wait_again`).
            return verdict if request.lost_worker else self._kept(request, verdict)
        if self._has_place(request, now_ns):
            return Verdict(hopeless_ns=request.deadline_ns)
        if request.place is None and not request.lost_worker:
            return self._kept(request, verdict)
        request.lost_worker = True
        if verdict.refusal is None and verdict.hopeless_ns > now_ns:
            self._alarms.watch_no_later(request, verdict.hopeless_ns)
        elif verdict.refusal in _FOR_WANT_OF_TIME:
            verdict.refusal = Refusal.WORKER_LOST
        return verdict

    def _has_place(self, request: Request, now_ns: int) -> bool:
        """Whether a request that waits has a place, or can be given one."""
        promises = self._promises
        if promises.is_kept(request):
            return True
        if not promises.reserve(request, now_ns):
            for worker in promises.loads_in_time(request, now_ns):
                if self._dispatch.load_promised(worker, request.model, now_ns):
                    break
            else:
                return False
            copy = request.model.copies[worker]
            if not promises.reserve(request, now_ns, loading=copy):
                return False  # the load is to show whether it is as short as was supposed
        assert request.place is not None
        self._alarms.wake_exec(request.place.copy.worker, now_ns, now_ns)
        return True

    def _kept(self, request: Request, verdict: Verdict) -> Verdict:
        """A promised request is not refused for want of time before its deadline."""
        if verdict.refusal in _FOR_WANT_OF_TIME:
            return Verdict(hopeless_ns=request.deadline_ns)
        return verdict

    def displaced(self, model: Model, now_ns: int) -> None:
        """Copies of the model are gone: find other places for the promised requests that had theirs there."""
        for request in model.queue:
            if request.place is not None and not self._promises.is_kept(request):
                self._alarms.watch(request, now_ns)

    def _judge_without_prediction(self, request: Request) -> Verdict:
        """Judge whether a request can be answered at any time. That needs no prediction."""
        verdict = judge_without_prediction(request)
        # Else such a request would wait for ever.
        has_pins = bool(self._books.pinned)
        if has_pins and verdict.refusal is None and not request.model.has_room_beside_pins():
            detail = "models that are pinned leave no worker the pages for it"
            return Verdict(Refusal.NO_WORKER, detail=detail)
        return verdict

    def _seek_copy_for_refused(
        self, model: Model, verdict: Verdict, now_ns: int, *, arriving: bool
    ) -> None:
        """Seek the model another copy if a request was refused because there were too few.

        It was refused at arrival (`arriving`), or waited in vain.
        """
        if verdict.doubted and model.queue and not model.copies:
            self._dispatch.seek_copy(model, now_ns)
        # A request that has waited shows that copies are too few only where there was too much to do.
        is_short = arriving or verdict.refusal is Refusal.OVERLOADED
        if is_short and len(model.copies) < len(model.ready):
            self._dispatch.seek_copy(model, now_ns, refusal=verdict.refusal)

    def close(self, event: AdmissionClosed, now_ns: int) -> None:
        """Refuse every request that arrives from now on."""
        self.closed = True

    def cancelled(self, event: RequestCancelled, now_ns: int) -> None:
        """Drop a request; an Infer that runs for no other is withdrawn."""
        request = self._books.requests.get(event.request_id)
        if request is None:
            return
        waited = request.phase is WAITING
        self._books.close(request)
        if waited:
            self.leave_queue(request, now_ns)
        elif request.action_id is not None:
            self.withdraw(request.action_id)

    def leave_queue(self, request: Request, now_ns: int) -> None:
        """Take a waiting request out of its model's queue."""
        model = request.model
        self._books.take_out(request)
        if not model.queue:
            self._dispatch.may_make_room(model, now_ns)

    def refuse(self, request: Request, verdict: Verdict) -> None:
        """Respond to an open request that is in no queue."""
        self._books.close(request)
        if request.failure and not verdict.detail:
            # Where it ran it failed, and why says more than what followed.
            verdict.detail = request.failure
        self._commands.append(refusal_of(request, verdict))

    def _refuse_unknown(self, event: RequestArrived) -> None:
        self._commands.append(
            RefuseRequest(
                request_id=event.request_id,
                model_id=event.model_id,
                refusal=Refusal.MODEL_REMOVED,
                slo_ns=event.slo_ns,
                detail=f"there is no model {event.model_id}",
            )
        )

    def expire(self, now_ns: int) -> None:
        """Refuse waiting requests that became hopeless and sent ones past their deadline."""
        alarms, expiries = self._alarms, self._alarms.expiries
        while expiries and expiries[0][0] <= now_ns:
            request = alarms.expired()
            if request is None:
                continue
            if request.phase is SENT:
                if request.deadline_ns <= now_ns:
                    self.refuse(request, Verdict(Refusal.LATE))
                else:
                    alarms.watch(request, request.deadline_ns)
                continue
            verdict = self.judge_again(request, now_ns)
            if verdict.refusal is None and verdict.hopeless_ns > now_ns:
                alarms.watch(request, verdict.hopeless_ns)
                continue
            if verdict.refusal is None:
                verdict.refusal = Refusal.OVERLOADED
                _waited_in_vain(request, verdict)
            self.leave_queue(request, now_ns)
            self._books.dropped(request, verdict.refusal, now_ns)
            self.refuse(request, verdict)
            self._seek_copy_for_refused(request.model, verdict, now_ns, arriving=False)

    def put_back(self, sent: SentAction, refusal: Refusal, now_ns: int) -> None:
        """Queue the requests of an Infer that did not run again, if a worker may still be in time; refuse the others."""
        model = sent.copy.model
        for request in own_requests(sent) if sent.shared else sent.requests:
            if request.phase is DONE:
                continue
            if refusal is Refusal.WORKER_LOST:
                request.lost_worker = True
            again = len(request.lost_on) < 2
            verdict = self.judge_again(request, now_ns) if again else Verdict(refusal)
            if verdict.refusal is None:
                self.wait_again(request, verdict, now_ns)
            else:
                if not model.removed and verdict.refusal is not Refusal.FAILED:
                    verdict.refusal = refusal
                self.refuse(request, verdict)
        self._books.came(model)

    def wait_again(self, request: Request, verdict: Verdict, now_ns: int) -> None:
        """Queue a request that was sent in vain."""
        self._books.enqueue(request)
        request.place = None
        if request.decided_ns:
            self._promises.reserve(request, now_ns)
        if self._predicts:
            self._alarms.watch_no_later(request, verdict.hopeless_ns)

    def reconsider(self, model: Model, refusal: Refusal, now_ns: int) -> None:
        """The model lost a worker: refuse the requests that no other worker can answer, and place the others."""
        self.resort(model, now_ns)
        for request in list(model.queue):
            verdict = self.judge_again(request, now_ns)
            if verdict.refusal is not None:
                if verdict.refusal is Refusal.NO_WORKER or request.lost_worker:
                    verdict.refusal = refusal
                self.leave_queue(request, now_ns)
                self.refuse(request, verdict)
        self._books.moved(model)
        self._dispatch.place(model, now_ns)

    def resort(self, model: Model, now_ns: int) -> None:
        """Use workers that are avoided if no other offers the model: a slow worker is better than none."""
        if model.suspended and not model.ready:
            self._health.last_resort(model, now_ns)

    def trust_changed(self, worker: WorkerState, touched: Sequence[Model], now_ns: int) -> None:
        """Place the requests of models that were suspended on the worker, or restored there or elsewhere."""
        if not touched:
            return
        self._dispatch.load_lane_freed()
        if worker.trouble is not None and worker.trouble.sick:
            self._do_without(worker, worker.trouble.silent, now_ns)
        for model in dict.fromkeys(touched):
            if model.queue:
                self.displaced(model, now_ns)
                self._dispatch.place(model, now_ns)

    def _do_without(self, worker: WorkerState, silent: bool, now_ns: int) -> None:
        """Queue a sick worker's requests again if another may be in time. The first answer counts."""
        models: dict[Model, None] = {}
        blamed = requests_run(worker) if silent else ()
        for action_id, sent in list(worker.in_flight.items()):
            model = sent.copy.model
            if not sent.requests or worker not in model.suspended:
                continue
            for request in own_requests(sent):
                if request.phase is DONE or (request.lost_on and request in blamed):
                    continue  # it silenced another worker, too; this one may answer yet
                verdict = self.judge_again(request, now_ns)
                if verdict.refusal is None:
                    if request in blamed:
                        request.lost_on |= {worker.worker_id}
                    self._books.disown(sent, request)
                    self.wait_again(request, verdict, now_ns)
                    models[model] = None
            self.withdraw(action_id)
        for model in models:
            self._books.came(model)
            self._dispatch.place(model, now_ns)

    def withdraw(self, action_id: ActionId) -> None:
        """Withdraw an Infer, once, if none of its requests is open, or all open ones belong to other Infers."""
        for worker in self._books.workers.values():
            sent = worker.in_flight.get(action_id)
            if sent is None:
                continue
            for request in sent.requests:
                if request.phase is not DONE and request.action_id == action_id:
                    return
            self.take_back(worker, sent)
            return

    def take_back(self, worker: WorkerState, sent: SentAction) -> None:
        """Ask the worker, once, not to begin an action."""
        if not sent.withdrawn:
            sent.withdrawn = True
            action_id = sent.action.action_id
            self._commands.append(WithdrawAction(worker_id=worker.worker_id, action_id=action_id))

    def probe(self, model: Model, request_id: RequestId, now_ns: int) -> None:
        """Probe the workers on which the model is suspended: does it work there again?"""
        for worker in self._health.to_probe(model, now_ns):
            copy = worker.copies.get(model)
            if copy is None:
                readiness = model.suspended[worker].readiness
                self._dispatch.probe_load(worker, model, readiness, now_ns)
            elif (request := self._books.requests.get(request_id)) is not None:
                self._dispatch.exec_lanes.probe_run(copy, request, now_ns)


def _waited_in_vain(request: Request, verdict: Verdict) -> Verdict:
    """Say that other requests went first until the slack was gone."""
    verdict.exec_ns = request.due_ns - verdict.hopeless_ns
    verdict.queue_ns = verdict.hopeless_ns - request.arrival_ns
    return verdict


def _undecided(request: Request, verdict: Verdict, now_ns: int) -> Verdict:
    """Refuse a request that has to be decided, and that no lane has a place for."""
    if verdict.refusal is None:
        resident = any(copy.resident for copy in request.model.copies.values())
        verdict.refusal = Refusal.OVERLOADED if resident else Refusal.COLD
        verdict.exec_ns = request.due_ns - verdict.hopeless_ns
        verdict.queue_ns = now_ns - request.arrival_ns
        verdict.detail = "no lane has a place for it that could be promised by now"
    return verdict
