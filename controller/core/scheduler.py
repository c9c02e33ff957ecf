"""The scheduler's mechanism: requests in, actions and responses out.

Deviations from Clockwork's source, all shared by every policy:

* A model's queue is in deadline order, not arrival order, so mixed SLOs in one model work.
* `latest_ns` of an Infer is capped by its earliest deadline minus its predicted time.
* An Infer may be planned behind a pending LoadWeights of its model.
* A model whose requests have to wait is copied to an idle worker with free pages, although Appendix B
  finds its demand met (`fill_free_pages`): else a worker that joins gets nothing before the others are
  overloaded.
* A request refused because its model is cold has the model loaded, where nothing else wants the lane.
* Eviction never takes a model with an action in flight or with waiting requests.
* An Infer refused for lateness, or lost with its worker, puts its requests back while slack remains.
* Every action has a timeout; a worker that exceeds it, or contradicts the controller's books, is let
  go and starts afresh when it registers again.
* Refused requests are answered at once, with the reason, not at the deadline.
* How long actions are on their way is measured, and planned for (delivery.py).
* Estimates are kept per GPU kind, clock, architecture and batch sizes (estimator.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Final

from clockwright.actions import ActionError, EvictWeights, Infer, LoadWeights
from clockwright.errors import ConfigError, Refusal
from clockwright.units import (
    NS_PER_S,
    ActionId,
    ArchitectureId,
    GpuKind,
    ModelId,
    RequestId,
    WorkerId,
)
from controller.core.admission import Verdict, judge, judge_without_prediction
from controller.core.config import SchedulerConfig
from controller.core.delivery import DeliveryDelay
from controller.core.estimator import Estimates
from controller.core.events import (
    ActionFailed,
    ActionSucceeded,
    AdmissionClosed,
    AnswerRequest,
    ClockSeen,
    CloseWorker,
    Command,
    Event,
    ForgetModel,
    ModelAdded,
    ModelReady,
    ModelRemoved,
    ModelWanted,
    RefuseRequest,
    RequestArrived,
    RequestCancelled,
    RequestsArrived,
    SendAction,
    TimerFired,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from controller.core.forecast import Forecast, forecast
from controller.core.policies import POLICIES
from controller.core.policy import Batch, PolicyKind
from controller.core.state import Copy, Model, Phase, Readiness, Request, SentAction, WorkerState
from controller.core.statistics import Statistics, snapshot

# To look a member up in its enum takes ten times as long as a global, and these are compared several
# times per request.
_WAITING: Final = Phase.WAITING
_SENT: Final = Phase.SENT
_DONE: Final = Phase.DONE

# Between an action's time being up and its worker being given up.
_SECOND_LOOK_NS = NS_PER_S

# What a worker may report of an action without contradicting what the controller believes.
_EXPECTED_ERRORS = {ActionError.TOO_LATE, ActionError.DEVICE, ActionError.BAD_INPUT}

# Of one kind of GPU whose estimates are kept. Levels are 5 % apart: no real one has half as many.
_CLOCKS_MAX = 64


class Scheduler:
    """Decides which model runs on which GPU, and when."""

    def __init__(
        self, config: SchedulerConfig | None = None, kind: PolicyKind | None = None
    ) -> None:
        """Make one without workers, models or requests.

        Args:
            config: None: the defaults.
            kind: the policy; None: the built-in one that `config` names.

        Raises:
            ConfigError: no policy is built in under that name.
        """
        self.config = config or SchedulerConfig()
        kind = kind or POLICIES.get(self.config.policy)
        if kind is None:
            raise ConfigError(
                f"policy is {self.config.policy!r}, expected one of {', '.join(POLICIES)}"
            )
        self.traits = kind.traits
        self._policy = kind.make(self.config)
        self._models: dict[ModelId, Model] = {}
        self._workers: dict[WorkerId, WorkerState] = {}
        self._requests: dict[RequestId, Request] = {}
        self._estimates: dict[tuple[GpuKind, int, ArchitectureId, tuple[int, ...]], Estimates] = {}
        self._closed = False
        self._now_ns = 0
        self._out: list[Command] = []
        self._serial = count()
        self._action_ids = count(1)
        # No load lane has room before this time, unless a result says otherwise.
        self._load_room_ns = 0
        # Workers without an action in flight.
        self._num_idle = 0
        # (time, serial, request): when a waiting request becomes hopeless, or a sent one late. In force
        # while the request is open and its `watch_ns` is that time.
        self._expiries: list[tuple[int, int, Request]] = []
        self._wakeups: list[tuple[int, int, WorkerState]] = []
        self._timeouts: list[tuple[int, int, WorkerState]] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            RequestArrived: self._request_arrived,
            RequestsArrived: self._requests_arrived,
            ActionSucceeded: self._action_succeeded,
            ActionFailed: self._action_failed,
            RequestCancelled: self._request_cancelled,
            TimerFired: self._timer_fired,
            WorkerJoined: self._worker_joined,
            ClockSeen: self._clock_seen,
            WorkerDraining: self._worker_draining,
            WorkerLost: self._worker_lost,
            ModelAdded: self._model_added,
            ModelReady: self._model_ready,
            ModelRemoved: self._model_removed,
            ModelWanted: self._model_wanted,
            AdmissionClosed: self._admission_closed,
        }

    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        """Apply one event and return what to do about it.

        The only method that changes scheduler state. It reads no clock and draws no random number:
        the same events at the same times give the same commands.

        Args:
            event: what happened. Events about workers, models or requests that are gone are ignored.
            now_ns: when, on the controller's clock; never earlier than in the previous call.

        Returns:
            Commands in the order to carry them out. Empty when nothing is to be done.
        """
        assert now_ns >= self._now_ns, f"time went back: {now_ns} after {self._now_ns}"
        self._now_ns = now_ns
        self._handlers[type(event)](event)
        if self.traits.punctual and self._wakeups and self._wakeups[0][0] <= now_ns:
            self._wake_due()
        if self._expiries and self._expiries[0][0] <= now_ns:
            self._expire()
        out, self._out = self._out, []
        return out

    def next_wakeup_ns(self) -> int | None:
        """When to send `TimerFired` at the latest, if nothing happens before."""
        expiries = self._expiries
        while expiries:
            at_ns, _, request = expiries[0]
            if request.phase is not _DONE and request.watch_ns == at_ns:
                break
            heappop(expiries)
        wakeups = self._wakeups
        while wakeups:
            at_ns, _, worker = wakeups[0]
            if worker.exec_wakeup_ns == at_ns or worker.load_wakeup_ns == at_ns:
                break
            heappop(wakeups)  # superseded by an earlier one
        next_ns = expiries[0][0] if expiries else None
        if wakeups and (next_ns is None or wakeups[0][0] < next_ns):
            next_ns = wakeups[0][0]
        timeouts = self._timeouts
        if timeouts and (next_ns is None or timeouts[0][0] < next_ns):
            next_ns = timeouts[0][0]
        return next_ns

    def forecast(
        self,
        model_ids: Sequence[ModelId],
        *,
        rows: int,
        arrival_ns: int,
        slo_ns: int,
        now_ns: int,
        together: bool,
    ) -> list[Forecast]:
        """Predict what a request to each of some models would come to.

        Changes nothing, but that an estimate which stands in the way may lose an outlier.

        Args:
            model_ids: the most important first.
            rows: of the request.
            arrival_ns: of the request.
            slo_ns: of the request.
            now_ns: the present, not before the last event.
            together: all are asked at once, and share the lanes; else each as if it were alone.

        Returns:
            One per model. Where a policy does not predict, only whether there is a worker for it.
        """
        models = [self._models.get(model_id) for model_id in model_ids]
        if self._closed:
            return [Forecast(Refusal.DRAINING) for _ in models]
        margin_ns = min(self._policy.margin_ns, int(slo_ns * self.config.margin_fraction))
        forecasts = forecast(
            models,
            rows,
            due_ns=arrival_ns + slo_ns - margin_ns,
            now_ns=now_ns,
            together=together,
        )
        if not self.traits.predicts:
            for row in forecasts:
                if row.refusal is not Refusal.NO_WORKER:
                    row.refusal = None
        return forecasts

    def statistics(self) -> Statistics:
        """A frozen snapshot for people and dashboards; linear in models and workers."""
        return snapshot(self._workers.values(), self._models.values(), self._now_ns)

    @property
    def num_open_requests(self) -> int:
        """Requests that have no response yet."""
        return len(self._requests)

    # --- requests -------------------------------------------------------------------------------

    def _request_arrived(self, event: RequestArrived) -> None:
        model = self._admit(event)
        if model is not None:
            self._serve(model)

    def _requests_arrived(self, event: RequestsArrived) -> None:
        # In order of arrival, once each.
        models = dict.fromkeys(map(self._admit, event.requests))
        for model in models:
            if model is not None:
                self._serve(model)

    def _serve(self, model: Model) -> None:
        """New requests of the model wait: run them, or load it, where there is room."""
        self._policy.queue_changed(model)
        self._policy.demand_changed(model)
        self._offer(model)
        self._seek_load(model)

    def _admit(self, event: RequestArrived) -> Model | None:
        """Queue a request, or refuse it; returns its model in the first case."""
        config = self.config
        model = self._models.get(event.model_id)
        if model is None:
            self._refuse_unknown(event)
            return None
        slo_ns = event.slo_ns
        deadline_ns = event.arrival_ns + slo_ns
        margin_ns = min(self._policy.margin_ns, int(slo_ns * config.margin_fraction))
        cold = True
        for copy in model.copies.values():
            if copy.resident:
                cold = False
                break
        request = Request(
            event.request_id,
            model,
            event.rows,
            event.arrival_ns,
            slo_ns,
            deadline_ns,
            deadline_ns - margin_ns,
            cold,
            # Appendix B's demand of one request: its execution time, alone.
            model.fastest.exec_ns[0] * event.rows if model.fastest else 0,
            event.tenant,
        )
        verdict = self._judge(request, arriving=True)
        if verdict.refusal is not None:
            self._policy.refused(request, verdict.refusal, now_ns=self._now_ns)
            self._out.append(_refusal(request, verdict))
            if verdict.refusal is Refusal.COLD:
                self._warm_up(model)
            elif (
                verdict.refusal is Refusal.OVERLOADED
                and self.traits.eager_copies
                and self.config.fill_free_pages
                and len(model.copies) < len(model.ready)
            ):
                self._spread(model, refused=True)
            return None
        self._requests[event.request_id] = request
        self._enqueue(request)
        self._watch(request, verdict.hopeless_ns)
        return model

    def _offer(self, model: Model) -> None:
        """Requests of the model wait: let the lanes that hold it and have room take them."""
        now_ns = self._now_ns
        # A wake-up that is yet to come means that the lane is full and its turn will come; or that a
        # batch was held back, which may be full now.
        room = [
            worker
            for worker in model.copies
            if worker.exec_wakeup_ns is None
            or worker.exec_wakeup_ns <= now_ns
            or worker.retry_ns is not None
        ]
        if len(room) > 1:
            # The lane that is free first, first, and of idle ones the fastest. To leave fast GPUs free for
            # what comes gained nothing on two kinds of GPU, and the fastest has the shorter median.
            room.sort(
                key=lambda worker: (
                    worker.exec_lane.available_ns(now_ns),
                    model.copies[worker].estimates.exec_ns[0],
                )
            )
        for worker in room:
            self._fill_exec(worker)
            if not model.queue:
                return

    def _refuse_unknown(self, event: RequestArrived) -> None:
        self._out.append(
            RefuseRequest(
                request_id=event.request_id,
                model_id=event.model_id,
                refusal=Refusal.MODEL_REMOVED,
                slo_ns=event.slo_ns,
                detail=f"there is no model {event.model_id}",
            )
        )

    def _judge(self, request: Request, *, arriving: bool = False) -> Verdict:
        if self._closed and arriving:
            return Verdict(Refusal.DRAINING)
        if not self.traits.predicts:
            return judge_without_prediction(request)
        return judge(request, self._now_ns, arriving=arriving)

    def _request_cancelled(self, event: RequestCancelled) -> None:
        request = self._requests.pop(event.request_id, None)
        if request is None:
            return
        if request.phase is _WAITING:
            self._take_out(request)
        request.phase = _DONE

    def _enqueue(self, request: Request) -> None:
        model = request.model
        queue = model.queue
        if not queue or request.due_ns >= queue[-1].due_ns:
            queue.append(request)
        else:
            insort(queue, request, key=_due)
        request.phase = _WAITING
        model.num_multi_row += request.rows > 1
        model.demand_ns += request.demand_ns

    def _take_out(self, request: Request) -> None:
        """Remove a waiting request from its queue."""
        model = request.model
        position = bisect_left(model.queue, request.due_ns, key=_due)
        while model.queue[position] is not request:
            position += 1
        del model.queue[position]
        model.num_multi_row -= request.rows > 1
        model.demand_ns -= request.demand_ns
        self._policy.queue_changed(model)
        self._policy.demand_changed(model)
        if not model.queue and self._policy.wants_any:
            # Nobody waits for its copies any more: they may make room for what is wanted.
            for worker in model.copies:
                self._wake_load_at(worker, self._now_ns + 1)

    def _refuse(self, request: Request, verdict: Verdict) -> None:
        """Respond to an open request that is in no queue."""
        request.phase = _DONE
        del self._requests[request.request_id]
        self._out.append(_refusal(request, verdict))

    def _watch(self, request: Request, at_ns: int) -> None:
        """Look at an open request again at a time."""
        if not self.traits.predicts:
            return  # it waits until it has run
        expiries = self._expiries
        request.watch_ns = at_ns
        heappush(expiries, (at_ns, next(self._serial), request))
        # Answered requests leave lazily; with SLOs of hours that would be never.
        if len(expiries) > 1024 and len(expiries) > 4 * len(self._requests):
            expiries[:] = [entry for entry in expiries if _in_force(entry)]
            heapify(expiries)

    def _watch_no_later(self, request: Request, at_ns: int) -> None:
        """Look at a request again at a time, or sooner if that is arranged already.

        A request that is sent and put back again and again, because its worker is always too late, must
        not leave an entry each time: with thousands of them a turn took seconds.
        """
        if at_ns < request.watch_ns:
            self._watch(request, at_ns)

    def _expire(self) -> None:
        """Refuse waiting requests that became hopeless and sent ones past their deadline."""
        expiries, now_ns = self._expiries, self._now_ns
        while expiries and expiries[0][0] <= now_ns:
            entry = heappop(expiries)
            if not _in_force(entry):
                continue
            request = entry[2]
            if request.phase is _SENT:
                if request.deadline_ns <= now_ns:
                    self._refuse(request, Verdict(Refusal.LATE))
                else:
                    self._watch(request, request.deadline_ns)
                continue
            verdict = self._judge(request)
            if verdict.refusal is None and verdict.hopeless_ns > now_ns:
                self._watch(request, verdict.hopeless_ns)
                continue
            if verdict.refusal is None:
                verdict.refusal = Refusal.OVERLOADED
            self._take_out(request)
            self._policy.refused(request, verdict.refusal, now_ns=now_ns)
            self._refuse(request, verdict)

    # --- lanes ----------------------------------------------------------------------------------

    def _fill_exec(self, worker: WorkerState) -> None:
        """Send Infers while the exec lane has less than the look-ahead to do."""
        if worker.draining or not worker.strategies:
            return
        now_ns, policy = self._now_ns, self._policy
        lane = worker.exec_lane
        there_ns = now_ns + worker.delivery.expected_ns(now_ns)
        lookahead_ns, max_outstanding = worker.exec_lookahead_ns, policy.max_outstanding
        if excess_ns := there_ns - now_ns - self.config.dispatch_delay_ns:
            # What is long on its way has to leave sooner, or the lane runs dry meanwhile. But the link
            # is the bottleneck then: more than one behind the one that it carries would only queue there.
            lookahead_ns += excess_ns
            max_outstanding = min(max_outstanding, 2)
        worker.retry_ns = None
        while True:
            if len(lane) >= max_outstanding:
                return  # the next result makes room
            available_ns = lane.available_ns(now_ns)
            if available_ns > now_ns + lookahead_ns:
                break
            free_ns = max(available_ns, there_ns)
            batch = policy.next_infer(worker, free_ns, now_ns)
            if batch is None:
                break
            self._send_infer(worker, batch)
        self._look_again(worker, available_ns - lookahead_ns)

    def _look_again(self, worker: WorkerState, room_ns: int) -> None:
        """When a batch held back may go, else when the lane has room."""
        # Not in the function that sets `retry_ns` to None: a compiler may hold it for None to the end.
        if worker.retry_ns is not None:
            self._wake_exec(worker, worker.retry_ns)
        elif worker.strategies and not worker.exec_lane.late(self._now_ns):
            self._wake_exec(worker, room_ns)

    def _send_infer(self, worker: WorkerState, batch: Batch) -> None:
        copy, model, now_ns = batch.copy, batch.copy.model, self._now_ns
        first, end = batch.first, batch.first + batch.count
        requests = model.queue[first:end]
        del model.queue[first:end]
        duration_ns = copy.estimates.exec_ns[batch.size_index]
        # Without prediction no begin is too late, short of giving the worker up.
        predicts = self.traits.predicts
        window_ns = self.config.window_ns if predicts else self.config.action_timeout_ns
        action_id = ActionId(next(self._action_ids))
        action = Infer(
            action_id=action_id,
            model_id=model.model_id,
            batch_size=copy.estimates.sizes[batch.size_index],
            rows=tuple([request.rows for request in requests]),
            earliest_ns=now_ns,
            latest_ns=min(batch.begin_ns + window_ns, batch.required_start_ns),
            expected_duration_ns=duration_ns,
        )
        for request in requests:
            request.phase = _SENT
            if request.rows > 1:
                model.num_multi_row -= 1
        model.num_sent += len(requests)
        copy.num_pins += 1
        worker.touch(model)
        worker.exec_lane.push(
            action_id, begin_ns=batch.begin_ns, duration_ns=duration_ns, now_ns=now_ns
        )
        end_ns = batch.begin_ns + duration_ns
        self._track(
            worker, SentAction(action, copy, batch.begin_ns, end_ns, worker.clock_mhz, requests)
        )
        self._out.append(
            SendAction(
                worker_id=worker.worker_id,
                action=action,
                request_ids=tuple([request.request_id for request in requests]),
                expected_begin_ns=batch.begin_ns,
            )
        )
        self._policy.queue_changed(model)
        if not model.queue and len(model.copies) > 1 and self._policy.wants_any:
            # Its other copies may make room now. A worker with actions in flight looks when one ends.
            for other in model.copies:
                if not other.in_flight and other.load_wakeup_ns is None:
                    self._wake_load_at(other, now_ns + 1)

    def _seek_load(self, model: Model) -> None:
        """Requests of the model wait: load it, or something more urgent, where there is room."""
        if len(model.copies) == len(model.ready) or not model.queue:
            return
        if not self._policy.want_load(model, self._now_ns):
            if self.config.fill_free_pages:
                self._spread(model)
            return
        now_ns = self._now_ns
        if now_ns < self._load_room_ns:
            return
        room = []
        next_room_ns = now_ns + self.config.lookahead_ns
        for worker in model.ready:
            if worker.load_blocked:
                continue
            lookahead_ns = worker.load_lookahead_ns
            load_free_ns = worker.load_lane.available_ns(now_ns)
            next_room_ns = min(next_room_ns, load_free_ns - lookahead_ns)
            if load_free_ns <= now_ns + lookahead_ns and worker not in model.copies:
                exec_free_ns = worker.exec_lane.available_ns(now_ns)
                room.append((load_free_ns, exec_free_ns, worker.sequence, worker))
        if len(model.ready) == len(self._workers):
            self._load_room_ns = next_room_ns
        room.sort()
        for _, _, _, worker in room:
            if model.load_key is None:
                break
            self._fill_load(worker)

    def _spread(self, model: Model, *, refused: bool = False) -> None:
        """Copy a model that has to wait for its lanes to a worker with nothing better to do.

        Where pages are free and the load lane is idle, another copy takes nothing from anybody. Once
        requests are refused, that lane is enough.
        """
        if not refused and not self._num_idle:
            return
        now_ns = self._now_ns
        for worker, readiness in model.ready.items():
            if (
                not (worker.load_lane if refused else worker.in_flight)
                and worker.num_free_pages >= readiness.num_pages
                and worker not in model.copies
            ):
                begin_ns = now_ns + worker.delivery.expected_ns(now_ns)
                self._send_load(worker, model, readiness, begin_ns)
                return

    def _warm_up(self, model: Model) -> None:
        """A request came that only a resident copy could have answered: the next one shall find one.

        Demand is counted from waiting requests, and this one does not wait; without this a model whose
        SLO is shorter than its load would be refused for ever. Only on a load lane with nothing to do.
        """
        if model.copies:
            return
        self._policy.forget_unwanted(self._now_ns)
        if self._policy.wants_any:
            return
        for worker, readiness in model.ready.items():
            if worker.load_lane:
                continue
            victims = self._policy.victims(worker, readiness.num_pages)
            if victims is not None:
                for victim in victims:
                    self._evict(victim)
                begin_ns = self._now_ns + worker.delivery.expected_ns(self._now_ns)
                self._send_load(worker, model, readiness, begin_ns)
                return

    def _model_wanted(self, event: ModelWanted) -> None:
        model = self._models.get(event.model_id)
        if model is not None:
            self._warm_up(model)

    def _fill_load(self, worker: WorkerState) -> None:
        """Send LoadWeights while the load lane has less than the look-ahead to do."""
        if worker.draining or worker.load_blocked:
            return
        now_ns, lookahead_ns = self._now_ns, worker.load_lookahead_ns
        lane = worker.load_lane
        there_ns = now_ns + worker.delivery.expected_ns(now_ns)
        while True:
            available_ns = lane.available_ns(now_ns)
            if available_ns > now_ns + lookahead_ns:
                return
            begin_ns = max(available_ns, there_ns)
            model = self._policy.next_load(worker, begin_ns, now_ns)
            if model is None:
                return
            readiness = model.ready[worker]
            victims = self._policy.victims(worker, readiness.num_pages)
            if victims is None:
                # Everything there is in use until some action ends, or requests that wait for it go.
                worker.load_blocked = bool(worker.in_flight)
                self._policy.want_load(model, now_ns)
                return
            for victim in victims:
                self._evict(victim)
            self._send_load(worker, model, readiness, begin_ns)
            self._fill_exec(worker)

    def _send_load(
        self, worker: WorkerState, model: Model, readiness: Readiness, begin_ns: int
    ) -> None:
        now_ns = self._now_ns
        estimates = readiness.estimates
        action_id = ActionId(next(self._action_ids))
        action = LoadWeights(
            action_id=action_id,
            model_id=model.model_id,
            earliest_ns=now_ns,
            latest_ns=begin_ns + self.config.window_ns,
            expected_duration_ns=estimates.load_ns,
        )
        copy = Copy(model, worker, readiness.num_pages, estimates)
        copy.ready_ns = begin_ns + estimates.load_ns
        for sent in _infers(worker, model):  # behind a load that failed; they find this one
            sent.copy = copy
            copy.num_pins += 1
        model.copies[worker] = worker.copies[model] = copy
        worker.num_free_pages -= copy.num_pages
        worker.load_lane.push(
            action_id, begin_ns=begin_ns, duration_ns=estimates.load_ns, now_ns=now_ns
        )
        self._track(worker, SentAction(action, copy, begin_ns, copy.ready_ns, worker.clock_mhz))
        self._out.append(
            SendAction(worker_id=worker.worker_id, action=action, expected_begin_ns=begin_ns)
        )
        worker.loading[model] = copy
        self._policy.demand_changed(model)
        self._policy.queue_changed(model)
        self._wake_load(worker)

    def _evict(self, copy: Copy) -> None:
        action = EvictWeights(
            action_id=ActionId(next(self._action_ids)), model_id=copy.model.model_id
        )
        self._drop_copy(copy)
        self._out.append(SendAction(worker_id=copy.worker.worker_id, action=action))

    def _drop_copy(self, copy: Copy) -> None:
        """Take a copy off the books."""
        worker, model = copy.worker, copy.model
        del worker.copies[model]
        model.copies.pop(worker, None)  # gone already when the worker drains
        worker.loading.pop(model, None)
        worker.num_free_pages += copy.num_pages
        self._policy.copy_gone(copy)
        self._policy.demand_changed(model)

    def _track(self, worker: WorkerState, sent: SentAction) -> None:
        self._num_idle -= not worker.in_flight
        worker.in_flight[sent.action.action_id] = sent
        if not worker.watched:
            worker.watched = True
            timeout_ns = sent.expected_end_ns + self.config.action_timeout_ns
            heappush(self._timeouts, (timeout_ns, next(self._serial), worker))

    def _wake_exec(self, worker: WorkerState, at_ns: int) -> None:
        """Look at the exec lane again at `at_ns`, or sooner."""
        at_ns = max(at_ns, self._now_ns + 1)
        # Every result shifts the lane's end a little; a wake-up that is close enough stays.
        slack_ns = min(self.config.lookahead_ns, worker.exec_lookahead_ns) // 16
        if worker.exec_wakeup_ns is None or at_ns < worker.exec_wakeup_ns - slack_ns:
            worker.exec_wakeup_ns = at_ns
            heappush(self._wakeups, (at_ns, next(self._serial), worker))

    def _wake_load(self, worker: WorkerState) -> None:
        """Look at both lanes when the load lane has room again.

        That is also when an Infer may be planned behind the lane's last load.
        """
        lane, now_ns = worker.load_lane, self._now_ns
        at_ns = lane.available_ns(now_ns) - worker.load_lookahead_ns
        if worker.load_wakeup_ns is None and at_ns > now_ns and not lane.late(now_ns):
            self._wake_load_at(worker, at_ns)

    def _wake_load_at(self, worker: WorkerState, at_ns: int) -> None:
        worker.load_blocked = False
        worker.load_wakeup_ns = at_ns
        heappush(self._wakeups, (at_ns, next(self._serial), worker))

    # --- results --------------------------------------------------------------------------------

    def _action_succeeded(self, event: ActionSucceeded) -> None:
        worker = self._workers.get(event.worker_id)
        sent = worker.in_flight.pop(event.action_id, None) if worker else None
        if worker is None or sent is None:
            return
        self._num_idle += not worker.in_flight
        self._learn_delay(worker, sent, event.received_ns)
        copy, model = sent.copy, sent.copy.model
        # A clock offset that is a little off must not put an end into the future.
        end_ns = min(event.end_ns, self._now_ns)
        if isinstance(sent.action, Infer):
            worker.exec_lane.complete(event.action_id, end_ns=end_ns)
            size = sent.action.batch_size
            self._measured_exec(worker, sent, size, event.duration_ns)
            copy.num_pins -= 1
            self._answer(event, sent, size)
            self._policy.infer_ended(sent, event, self._now_ns)
            self._policy.unpark(worker)
        else:
            worker.load_lane.complete(event.action_id, end_ns=end_ns)
            self._load_room_ns = 0
            copy.estimates.measured_load(event.duration_ns)
            copy.resident = True
            del worker.loading[model]
            self._wake_load(worker)
            self._policy.queue_changed(model)
        self._settle(worker, model)

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

    def _learn_delay(self, worker: WorkerState, sent: SentAction, received_ns: int | None) -> None:
        if received_ns is not None:
            # An action is sent the moment it may begin. It was not received later than now, whatever
            # the worker's clock says.
            delay_ns = min(received_ns, self._now_ns) - sent.action.earliest_ns
            worker.delivery.measured(delay_ns, self._now_ns)

    def _answer(self, event: ActionSucceeded, sent: SentAction, size: int) -> None:
        now_ns = self._now_ns
        for index, request in enumerate(sent.requests):
            if request.phase is _DONE:
                continue
            if now_ns > request.deadline_ns:
                self._refuse(request, Verdict(Refusal.LATE))
                continue
            request.phase = _DONE
            del self._requests[request.request_id]
            self._out.append(
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
        self._no_longer_sent(sent)

    def _no_longer_sent(self, sent: SentAction) -> None:
        model = sent.copy.model
        model.num_sent -= len(sent.requests)
        for request in sent.requests:
            model.demand_ns -= request.demand_ns
        self._policy.demand_changed(model)

    def _action_failed(self, event: ActionFailed) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is None or event.action_id not in worker.in_flight:
            return
        if event.error not in _EXPECTED_ERRORS and not self._explained(worker, event):
            self._let_go(
                worker,
                f"action {event.action_id}: {event.error.name}: {event.message}; "
                "the worker's cache is not what the controller believes",
            )
            return
        sent = worker.in_flight.pop(event.action_id)
        self._num_idle += not worker.in_flight
        self._learn_delay(worker, sent, event.received_ns)
        copy, model = sent.copy, sent.copy.model
        if isinstance(sent.action, Infer):
            worker.exec_lane.complete(event.action_id, end_ns=self._now_ns)
            copy.num_pins -= 1
            if event.error in (ActionError.DEVICE, ActionError.BAD_INPUT):
                for request in sent.requests:
                    if request.phase is not _DONE:
                        self._refuse(request, Verdict(Refusal.FAILED, detail=event.message))
                self._no_longer_sent(sent)
            else:
                self._put_back(sent, Refusal.LATE)
            self._policy.unpark(worker)
        else:
            worker.load_lane.complete(event.action_id, end_ns=self._now_ns)
            self._load_room_ns = 0
            self._drop_copy(copy)
        self._settle(worker, model)
        if model.queue:  # another worker may be the better one now
            self._offer(model)
            self._seek_load(model)

    def _explained(self, worker: WorkerState, event: ActionFailed) -> bool:
        """NOT_RESIDENT is no contradiction while the load that the Infer was planned behind failed."""
        return event.error is ActionError.NOT_RESIDENT and not (
            worker.in_flight[event.action_id].copy.resident
        )

    def _put_back(self, sent: SentAction, refusal: Refusal) -> None:
        """Requests of an action that did not run wait again while some worker may be in time."""
        model = sent.copy.model
        self._no_longer_sent(sent)
        for request in sent.requests:
            if request.phase is _DONE:
                continue
            if refusal is Refusal.WORKER_LOST:
                request.lost_worker = True
            verdict = self._judge(request)
            if verdict.refusal is None:
                self._enqueue(request)
                self._watch_no_later(request, verdict.hopeless_ns)
            else:
                if not model.removed:
                    verdict.refusal = refusal
                self._refuse(request, verdict)
        self._policy.queue_changed(model)
        self._policy.demand_changed(model)

    def _settle(self, worker: WorkerState, model: Model) -> None:
        """After a result: keep the lanes busy, finish what waited for the action's end."""
        if model.removed:
            self._forget(worker, model)
        if worker.draining:
            if not worker.in_flight:
                self._dismiss(worker, "")
            return
        if worker.load_blocked:
            worker.load_blocked = False
            self._load_room_ns = 0
        self._fill_exec(worker)
        if model.queue and len(model.copies) < len(model.ready):
            self._policy.want_load(model, self._now_ns)
        if self._policy.wants_any:
            self._fill_load(worker)
        if model.queue:
            self._offer(model)

    def _timer_fired(self, event: TimerFired) -> None:
        self._wake_due()
        now_ns = self._now_ns
        while self._timeouts and self._timeouts[0][0] <= now_ns:
            _, _, worker = heappop(self._timeouts)
            worker.watched = False
            if self._workers.get(worker.worker_id) is worker and worker.in_flight:
                self._check_timeout(worker)

    def _wake_due(self) -> None:
        """Look at the lanes whose time has come."""
        now_ns = self._now_ns
        while self._wakeups and self._wakeups[0][0] <= now_ns:
            at_ns, _, worker = heappop(self._wakeups)
            if self._workers.get(worker.worker_id) is not worker:
                continue
            if worker.exec_wakeup_ns == at_ns:
                worker.exec_wakeup_ns = None
                self._fill_exec(worker)
            if worker.load_wakeup_ns == at_ns:
                worker.load_wakeup_ns = None
                for copy in worker.loading.values():
                    self._policy.queue_changed(copy.model)
                self._fill_exec(worker)
                if self._policy.wants_any:
                    self._fill_load(worker)
                self._wake_load(worker)

    def _check_timeout(self, worker: WorkerState) -> None:
        action_id, sent = next(iter(worker.in_flight.items()))
        timeout_ns = sent.expected_end_ns + self.config.action_timeout_ns
        if timeout_ns <= self._now_ns:
            if worker.suspected == action_id:
                self._let_go(
                    worker, f"action {action_id} has no result long after its predicted end"
                )
                return
            # Whoever has been stopped as a whole finds every time up before any result has come: a
            # worker is to blame only for what is still missing a while later.
            worker.suspected = action_id
            timeout_ns = self._now_ns + min(_SECOND_LOOK_NS, self.config.action_timeout_ns)
        worker.watched = True
        heappush(self._timeouts, (timeout_ns, next(self._serial), worker))

    # --- workers and models ---------------------------------------------------------------------

    def _worker_joined(self, event: WorkerJoined) -> None:
        assert event.worker_id not in self._workers, f"worker {event.worker_id} joined twice"
        self._num_idle += 1
        self._workers[event.worker_id] = WorkerState(
            event.worker_id,
            event.gpu_kind,
            event.num_pages,
            event.num_pages,
            next(self._serial),
            DeliveryDelay(
                least_ns=self.config.dispatch_delay_ns, tolerance_ns=self.config.window_ns // 2
            ),
            exec_lookahead_ns=self._policy.lookahead_ns,
            load_lookahead_ns=self.config.lookahead_ns,
        )

    def _clock_seen(self, event: ClockSeen) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is None:
            return
        left_mhz, worker.clock_mhz = worker.clock_mhz, event.clock_mhz
        worker.settle(confirmed=left_mhz == event.clock_mhz)
        if left_mhz == event.clock_mhz:
            return
        self._forget_clocks(worker.gpu_kind)
        self._load_room_ns = 0
        waiting = []
        for model in self._models.values():
            readiness = model.ready.get(worker)
            if readiness is None:
                continue
            known = readiness.estimates
            key = (worker.gpu_kind, worker.clock_mhz, readiness.architecture_id, known.sizes)
            if key not in self._estimates:
                self._estimates[key] = known.at_clock(left_mhz, worker.clock_mhz)
            readiness.estimates = self._estimates[key]
            model.ready_on(worker, readiness)
            copy = worker.copies.get(model)
            if copy is not None:
                copy.estimates = readiness.estimates
            if model.queue:
                waiting.append(model)
        for model in waiting:
            self._policy.queue_changed(model)
            self._policy.demand_changed(model)
        for model in waiting:
            self._offer(model)
            self._seek_load(model)

    def _forget_clocks(self, gpu_kind: GpuKind) -> None:
        """Keep memory bounded whatever clocks workers say: of too many, keep those that some are at."""
        if len({clock for kind, clock, *_ in self._estimates if kind == gpu_kind}) < _CLOCKS_MAX:
            return
        present = {
            worker.clock_mhz for worker in self._workers.values() if worker.gpu_kind == gpu_kind
        }
        self._estimates = {
            key: estimates
            for key, estimates in self._estimates.items()
            if key[0] != gpu_kind or key[1] in present
        }

    def _worker_draining(self, event: WorkerDraining) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is None or worker.draining:
            return
        worker.draining = True
        models = list(worker.copies)
        # What it has is finished there; to the models it is as if it were gone.
        for copy in worker.copies.values():
            del copy.model.copies[worker]
            self._policy.copy_gone(copy)
            self._policy.demand_changed(copy.model)
        for model in self._models.values():
            if model.not_ready_on(worker) and model.queue and model not in worker.copies:
                models.append(model)
        for model in models:
            self._reconsider(model, Refusal.NO_WORKER)
        if not worker.in_flight:
            self._dismiss(worker, "")

    def _worker_lost(self, event: WorkerLost) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is not None:
            self._remove_worker(worker)

    def _let_go(self, worker: WorkerState, reason: str) -> None:
        self._out.append(CloseWorker(worker_id=worker.worker_id, reason=reason))
        self._remove_worker(worker)

    def _dismiss(self, worker: WorkerState, reason: str) -> None:
        """A drained worker may go."""
        self._out.append(CloseWorker(worker_id=worker.worker_id, reason=reason))
        self._remove_worker(worker)

    def _remove_worker(self, worker: WorkerState) -> None:
        del self._workers[worker.worker_id]
        worker.settle(confirmed=False)  # a GPU that failed may have been slow before
        in_flight, worker.in_flight = worker.in_flight, {}
        self._num_idle -= not in_flight
        touched = dict.fromkeys(worker.copies)
        for copy in list(worker.copies.values()):
            self._drop_copy(copy)
        for model in self._models.values():
            if model.not_ready_on(worker) and model.queue:
                touched[model] = None
        for sent in in_flight.values():
            if sent.requests:
                self._put_back(sent, Refusal.WORKER_LOST)
                touched[sent.copy.model] = None
        self._policy.unpark(worker)
        for model in touched:
            self._reconsider(model, Refusal.WORKER_LOST)

    def _reconsider(self, model: Model, refusal: Refusal) -> None:
        """A worker is no longer there for the model: refuse what nobody else can do, move the rest."""
        for request in list(model.queue):
            verdict = self._judge(request)
            if verdict.refusal is not None:
                if verdict.refusal is Refusal.NO_WORKER or request.lost_worker:
                    verdict.refusal = refusal
                self._take_out(request)
                self._refuse(request, verdict)
        self._policy.queue_changed(model)
        self._offer(model)
        self._seek_load(model)

    def _model_added(self, event: ModelAdded) -> None:
        assert event.model_id not in self._models, f"model {event.model_id} added twice"
        self._models[event.model_id] = Model(event.model_id, next(self._serial))

    def _model_ready(self, event: ModelReady) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is None:
            return
        model = self._models.get(event.model_id)
        if model is None:
            self._out.append(ForgetModel(worker_id=event.worker_id, model_id=event.model_id))
            return
        sizes = tuple(sorted(event.exec_ns))
        key = (worker.gpu_kind, worker.clock_mhz, event.architecture_id, sizes)
        estimates = self._estimates.get(key)
        if estimates is None:
            seed = Estimates(load_ns=event.load_ns, exec_ns=event.exec_ns)
            estimates = seed.at_clock(event.clock_mhz, worker.clock_mhz)
            self._estimates[key] = estimates
        self._load_room_ns = 0
        if not worker.draining:
            readiness = Readiness(event.num_pages, event.architecture_id, estimates)
            model.ready_on(worker, readiness)
            self._seek_load(model)

    def _model_removed(self, event: ModelRemoved) -> None:
        model = self._models.pop(event.model_id, None)
        if model is None:
            return
        model.removed = True
        for request in list(model.queue):
            self._take_out(request)
            self._refuse(request, Verdict(Refusal.MODEL_REMOVED))
        for worker in list(model.ready):
            self._forget(worker, model)

    def _forget(self, worker: WorkerState, model: Model) -> None:
        """Free a removed model's pages and tell the worker, once no action of it is in flight."""
        copy = worker.copies.get(model)
        if copy is not None:
            if not copy.resident or copy.num_pins:
                return
            self._evict(copy)
        elif _infers(worker, model):
            return  # behind a load that failed
        if model.not_ready_on(worker):
            self._out.append(ForgetModel(worker_id=worker.worker_id, model_id=model.model_id))

    def _admission_closed(self, event: AdmissionClosed) -> None:
        self._closed = True


def _infers(worker: WorkerState, model: Model) -> list[SentAction]:
    """Infers of the model that the worker has not answered."""
    return [
        sent
        for sent in worker.in_flight.values()
        if sent.copy.model is model and isinstance(sent.action, Infer)
    ]


def _refusal(request: Request, verdict: Verdict) -> RefuseRequest:
    assert verdict.refusal is not None
    return RefuseRequest(
        request_id=request.request_id,
        model_id=request.model.model_id,
        refusal=verdict.refusal,
        slo_ns=request.slo_ns,
        load_ns=verdict.load_ns,
        exec_ns=verdict.exec_ns,
        queue_ns=verdict.queue_ns,
        margin_ns=request.deadline_ns - request.due_ns,
        detail=verdict.detail,
    )


def _in_force(entry: tuple[int, int, Request]) -> bool:
    """Whether an expiry still counts: its request is open, and not to be looked at sooner."""
    at_ns, _, request = entry
    return request.phase is not _DONE and request.watch_ns == at_ns


def _due(request: Request) -> int:
    return request.due_ns
