"""The scheduler's door: events in, commands out.

Here an event becomes changes of the books and looks at lanes, requests are admitted and answered, and
results taken. What is true is in `Books`, when to look again in `Alarms`, what a lane gets next in
`Dispatch`; which batch and which weights, the policy says.

Deviations from Clockwork's source, shared by the policies that predict (those that react evict a model with
waiting requests, and refuse nothing by prediction):

* A model's queue is in deadline order, not arrival order, so mixed SLOs in one model work.
* `latest_ns` of an Infer is capped by its earliest deadline minus its predicted time.
* An Infer may be planned behind a pending LoadWeights of its model.
* A model whose requests have to wait is copied to an idle worker with free pages, although Appendix B
  finds its demand met (`fill_free_pages`): else a worker that joins gets nothing before the others are
  overloaded.
* A request refused because its model is cold has the model loaded, where nothing else wants the lane.
* Eviction never takes a model with an action in flight or with waiting requests.
* An Infer refused for lateness, or lost with its worker, puts its requests back while slack remains; so does
  one that failed, in smaller batches, and one whose result is overdue (health.py).
* Every action has a timeout; a worker that exceeds it, or contradicts the controller's books, is let
  go and starts afresh when it registers again.
* Refused requests are answered at once, with the reason, not at the deadline.
* The link of each worker is measured, its length and what it carries, and planned for (link.py).
* Estimates are kept per GPU kind, clock, architecture and batch sizes (estimator.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clockwright.actions import ActionError, Infer
from clockwright.errors import ConfigError, Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ActionId, ModelId, RequestId, WorkerId
from controller.core.admission import (
    Verdict,
    judge,
    judge_without_prediction,
    margin_of,
    refusal_of,
    way_back_of,
)
from controller.core.alarms import Alarms
from controller.core.books import Books, infers_of, own_requests
from controller.core.config import SchedulerConfig
from controller.core.dispatch import Dispatch
from controller.core.estimator import SLOW_FACTOR, SLOW_NS, EstimateTable
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
    ModelPinned,
    ModelReady,
    ModelRemoved,
    ModelWanted,
    RefuseRequest,
    RequestArrived,
    RequestCancelled,
    RequestsArrived,
    TenantsWeighed,
    TimerFired,
    WithdrawAction,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from controller.core.forecast import Forecast, forecast
from controller.core.health import Health
from controller.core.link import LinkPlan
from controller.core.policies import POLICIES
from controller.core.policy import PolicyKind
from controller.core.remedies import Obstacles, Remedies
from controller.core.state import (
    DONE,
    SENT,
    WAITING,
    Model,
    Readiness,
    Request,
    SentAction,
    WorkerState,
)
from controller.core.statistics import (
    ClusterLoad,
    HeldPages,
    ModelStatistics,
    Statistics,
    cluster_load_of,
    held_pages_of,
    model_statistics_of,
    snapshot,
)

# A worker whose action is overdue is given up if the result is still missing after this time.
_SECOND_LOOK_NS = NS_PER_S

# Where a timer comes so much too late, this process stood still.
_STOOD_STILL_NS = 20 * NS_PER_MS

# More than the clocks of a worker and of the controller differ by, as each believes it knows the other's.
_CLOCK_ERROR_NS = 2 * NS_PER_MS

_FOREVER_NS = 1 << 62

# A worker may report these of an action without contradicting what the controller believes.
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
        self._predicts = kind.traits.predicts
        self._punctual = kind.traits.punctual
        self._policy = kind.make(self.config)
        self._closed = False
        self._now_ns = 0
        self._commands: list[Command] = []
        self._estimates = EstimateTable(finds_densest=self.config.edf_mh.densest)
        self._alarms = Alarms(self.config)
        self._books = Books(self._policy)
        self._remedies = Remedies(self._books)
        self._health = Health(self._books)
        self._dispatch = Dispatch(
            self.config,
            kind.traits,
            self._policy,
            self._books,
            self._alarms,
            self._commands,
        )
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
            ModelPinned: self._model_pinned,
            TenantsWeighed: self._tenants_weighed,
            AdmissionClosed: self._admission_closed,
        }

    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        """Apply one event and return what to do about it.

        It reads no clock and draws no random number: the same events at the same times give the same
        commands.

        Args:
            event: what happened. Events about workers, models or requests that are gone are ignored.
            now_ns: when, on the controller's clock; never earlier than in the previous call.

        Returns:
            Commands in the order to carry them out. Empty when nothing is to be done.
        """
        assert now_ns >= self._now_ns, f"time went back: {now_ns} after {self._now_ns}"
        self._now_ns = now_ns
        self._handlers[type(event)](event)
        alarms = self._alarms
        if self._punctual and alarms.wakeups and alarms.wakeups[0][0] <= now_ns:
            self._wake_due()
        if alarms.expiries and alarms.expiries[0][0] <= now_ns:
            self._expire()
        commands = self._commands
        self._commands = self._dispatch.commands = []
        return commands

    def next_wakeup_ns(self) -> int | None:
        """When to send `TimerFired` at the latest, if nothing happens before."""
        return self._alarms.next_ns()

    def forecast(
        self,
        model_ids: Sequence[ModelId],
        *,
        rows: int,
        arrival_ns: int,
        slo_ns: int,
        now_ns: int,
        together: bool,
        num_bytes: int = 0,
    ) -> list[Forecast]:
        """Predict what a request to each of some models would come to.

        A second door, and it is not quite read-only: where one estimate alone rules a model out, that
        estimate may lose an outlier, as it may when a request is refused. Nobody would send the request
        that could measure it anew, so a forecast that only read would shut the model out for good. The
        same events give the same commands only if the same forecasts are asked for between them.

        Args:
            model_ids: the most important first.
            rows: rows of the request.
            arrival_ns: when the request arrived.
            slo_ns: SLO of the request.
            now_ns: the present, not before the last event.
            together: all are asked at once, and share the lanes; else each as if it were alone.
            num_bytes: of the inputs that each gets.

        Returns:
            One per model. Where a policy does not predict, only whether there is a worker for it.
        """
        models = [self._books.models.get(model_id) for model_id in model_ids]
        if self._closed:
            return [Forecast(Refusal.DRAINING) for _ in models]
        margin_ns = self._margin_of(slo_ns)
        forecasts = forecast(
            models,
            rows,
            due_ns=arrival_ns + slo_ns - margin_ns,
            now_ns=now_ns,
            together=together,
            num_bytes=num_bytes,
        )
        if not self._predicts:
            for row in forecasts:
                if row.exec_ns:  # some worker could run it
                    row.refusal = None
        return forecasts

    def obstacles(self, request: RequestArrived, refused: RefuseRequest) -> Obstacles:
        """Say what stood in the way of a request, and what would have let it succeed.

        A third door, through which nothing that decides is changed: whether it is asked makes no difference to any
        schedule. It is meant to be asked while the commands of the event are carried out that led to the refusal.
        """
        return self._remedies.obstacles(
            request,
            refused,
            margin_ns=self._most_kept_ns(self.config.way_back_ns),
            margin_share=self.config.margin_fraction,
            now_ns=self._now_ns,
        )

    def statistics(self, now_ns: int = 0) -> Statistics:
        """A frozen snapshot for people and dashboards; linear in models and workers.

        Args:
            now_ns: the present; the default is the time of the last event, which may be long ago.
        """
        return snapshot(self._books, max(now_ns, self._now_ns))

    def cluster_load(self, now_ns: int) -> ClusterLoad:
        """What all workers have to do; linear in workers, and hardly in models."""
        return cluster_load_of(self._books, max(now_ns, self._now_ns))

    def held_pages(self) -> dict[WorkerId, list[HeldPages]]:
        """What fills the pages of each worker; linear in copies."""
        return held_pages_of(self._books)

    def model_statistics(self, model_id: ModelId) -> ModelStatistics | None:
        """One model's row of `statistics`; None: there is no such model."""
        return model_statistics_of(self._books, model_id)

    def backlogs(self, model_ids: Sequence[ModelId]) -> list[tuple[int, int]]:
        """How many requests wait for each of some models, not sent yet, and how many workers hold its weights."""
        models = self._books.models
        found: list[tuple[int, int]] = []
        for model_id in model_ids:
            model = models.get(model_id)
            if model is None:
                found.append((0, 0))
                continue
            num_resident = 0
            for copy in model.copies.values():
                num_resident += copy.resident
            found.append((len(model.queue), num_resident))
        return found

    @property
    def num_open_requests(self) -> int:
        """Requests that have no response yet."""
        return len(self._books.requests)

    # --- requests come --------------------------------------------------------------------------

    def _request_arrived(self, event: RequestArrived) -> None:
        model = self._admit(event)
        if model is not None:
            self._books.came(model)
            self._dispatch.place(model, self._now_ns)
            if model.suspended:
                self._probe(model, event.request_id)

    def _requests_arrived(self, event: RequestsArrived) -> None:
        # Each model once, in the order of arrival.
        models: dict[Model, int] = {}
        for request in event.requests:
            admitted = self._admit(request)
            if admitted is not None:
                models[admitted] = models.get(admitted, 0) + 1
        copied: list[Model] = []
        for model, number in models.items():
            self._books.came(model)
            num_copies = len(model.copies)
            self._dispatch.place(model, self._now_ns)
            if number > 1 and len(model.copies) > num_copies:
                copied.append(model)
        # Had they come one by one, each could have brought its model one more copy.
        while copied:
            copied = [model for model in copied if self._copied_again(model, models)]
        for request in event.requests:
            asked = self._books.models.get(request.model_id)
            if asked is not None and asked.suspended:
                self._probe(asked, request.request_id)

    def _copied_again(self, model: Model, numbers: dict[Model, int]) -> bool:
        """Whether a further one of the model's requests that came together brings it a further copy."""
        numbers[model] -= 1
        num_copies = len(model.copies)
        if not numbers[model] or not model.queue or num_copies == len(model.ready):
            return False
        self._dispatch.seek_copy(model, self._now_ns)
        return len(model.copies) > num_copies

    def _margin_of(self, slo_ns: int) -> int:
        """What is kept free of an SLO between the predicted end of the EXEC and the deadline."""
        config = self.config
        kept_ns = self._policy.margin_ns
        if config.way_back_ns:
            kept_ns = self._most_kept_ns(way_back_of(slo_ns, config.way_back_ns))
        return margin_of(slo_ns, kept_ns, config.margin_fraction)

    def _most_kept_ns(self, way_back_ns: int) -> int:
        """The policy's margin, and beside it, as far as both may go together, the way from the front to the client."""
        margin_ns = self._policy.margin_ns
        both_ns = min(margin_ns + way_back_ns, self.config.margin_ns)
        return max(both_ns, margin_ns, way_back_ns)

    def _admit(self, event: RequestArrived) -> Model | None:
        """Queue a request, or refuse it; returns its model in the first case."""
        books = self._books
        model = books.models.get(event.model_id)
        if model is None:
            self._refuse_unknown(event)
            return None
        if model.suspended:
            self._resort(model)
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
            deadline_ns - self._margin_of(slo_ns),
            cold,
            # Appendix B's demand of one request: its execution time, alone.
            model.fastest.exec_ns[0] * event.rows if model.fastest else 0,
            event.tenant,
            event.num_bytes,
        )
        if self._closed:
            verdict = Verdict(Refusal.DRAINING)
        elif self._predicts:
            if event.tenant:
                verdict = self._judge_of_tenant(request)
            else:
                verdict = judge(request, self._now_ns, books.load_lanes, arriving=True)
        else:
            verdict = self._judge_without_prediction(request)
        if verdict.refusal is not None:
            books.dropped(request, verdict.refusal, self._now_ns)
            self._commands.append(refusal_of(request, verdict))
            self._seek_copy_for_refused(model, verdict, arriving=True)
            if model.suspended:
                self._probe(model, request.request_id)
            return None
        books.enqueue(request)
        if self._predicts:  # else it waits until it has run
            self._alarms.watch(request, verdict.hopeless_ns)
        return model

    def _judge_of_tenant(self, request: Request) -> Verdict:
        """A request arrives from a tenant, which may have used up its share."""
        now_ns, fastest = self._now_ns, request.model.fastest
        room_ns = 0
        if fastest is not None and (part := self._policy.leaves_room(request, now_ns)):
            alone_ns = fastest.exec_ns[0] + (fastest.load_ns if request.cold else 0)
            room_ns = int(part * max(0, request.due_ns - now_ns - alone_ns))
        verdict = judge(request, now_ns, self._books.load_lanes, arriving=True, room_ns=room_ns)
        verdict.hopeless_ns += room_ns
        if verdict.refusal is Refusal.OVERLOADED and room_ns:
            verdict.detail = f"tenant {request.tenant!r} used up its share, and others wait"
        return verdict

    def _judge_again(self, request: Request) -> Verdict:
        """A request waits, or was sent in vain: can it still be answered?"""
        if self._predicts:
            return judge(request, self._now_ns, self._books.load_lanes)
        return self._judge_without_prediction(request)

    def _judge_without_prediction(self, request: Request) -> Verdict:
        """Whether it can be answered at any time, which no prediction is needed for."""
        verdict = judge_without_prediction(request)
        # No time would ever come at which somebody said so.
        has_pins = bool(self._books.pinned)
        if has_pins and verdict.refusal is None and not request.model.has_room_beside_pins():
            detail = "models that are pinned leave no worker the pages for it"
            return Verdict(Refusal.NO_WORKER, detail=detail)
        return verdict

    @property
    def weighs_tenants(self) -> bool:
        """Whether tenants' weights have any effect: most policies know no shares, and none is asked to."""
        return hasattr(self._policy, "weigh_tenants")

    def _tenants_weighed(self, event: TenantsWeighed) -> None:
        weigh = getattr(self._policy, "weigh_tenants", None)
        if weigh is not None:
            weigh(event.weights)

    def _resort(self, model: Model) -> None:
        """Where no worker offers the model that is trusted, take those that are not: slow beats never."""
        if model.suspended and not model.ready:
            self._health.last_resort(model, self._now_ns)

    def _admission_closed(self, event: AdmissionClosed) -> None:
        self._closed = True

    # --- requests go ----------------------------------------------------------------------------

    def _request_cancelled(self, event: RequestCancelled) -> None:
        request = self._books.requests.get(event.request_id)
        if request is None:
            return
        waited = request.phase is WAITING
        self._books.close(request)
        if waited:
            self._leave_queue(request)
        elif request.action_id is not None:
            self._withdraw(request.action_id)

    def _leave_queue(self, request: Request) -> None:
        model = request.model
        self._books.take_out(request)
        if not model.queue:
            self._dispatch.may_make_room(model, self._now_ns)

    def _refuse(self, request: Request, verdict: Verdict) -> None:
        """Respond to an open request that is in no queue."""
        self._books.close(request)
        if request.failure and not verdict.detail:
            verdict.detail = (
                request.failure
            )  # Where it ran it failed, and why says more than what followed.
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

    def _expire(self) -> None:
        """Refuse waiting requests that became hopeless and sent ones past their deadline."""
        alarms, now_ns = self._alarms, self._now_ns
        expiries = alarms.expiries
        while expiries and expiries[0][0] <= now_ns:
            request = alarms.expired()
            if request is None:
                continue
            if request.phase is SENT:
                if request.deadline_ns <= now_ns:
                    self._refuse(request, Verdict(Refusal.LATE))
                else:
                    alarms.watch(request, request.deadline_ns)
                continue
            verdict = self._judge_again(request)
            if verdict.refusal is None and verdict.hopeless_ns > now_ns:
                alarms.watch(request, verdict.hopeless_ns)
                continue
            if verdict.refusal is None:
                verdict.refusal = Refusal.OVERLOADED
                _waited_in_vain(request, verdict)
            self._leave_queue(request)
            self._books.dropped(request, verdict.refusal, now_ns)
            self._refuse(request, verdict)
            self._seek_copy_for_refused(request.model, verdict, arriving=False)

    def _seek_copy_for_refused(self, model: Model, verdict: Verdict, *, arriving: bool) -> None:
        """A request of the model was refused: where copies were too few, have it loaded once more.

        Args:
            model: whose request it was.
            verdict: why it was refused.
            arriving: it was so as it came; else it has waited in vain.
        """
        now_ns = self._now_ns
        if verdict.doubted and model.queue and not model.copies:
            self._dispatch.seek_copy(model, now_ns)
        # A request that has waited shows that copies are too few only where there was too much to do.
        is_short = arriving or verdict.refusal is Refusal.OVERLOADED
        if is_short and len(model.copies) < len(model.ready):
            self._dispatch.seek_copy(model, now_ns, refusal=verdict.refusal)

    def _reconsider(self, model: Model, refusal: Refusal) -> None:
        """A worker is no longer there for the model: refuse what nobody else can do, move the rest."""
        self._resort(model)
        for request in list(model.queue):
            verdict = self._judge_again(request)
            if verdict.refusal is not None:
                if verdict.refusal is Refusal.NO_WORKER or request.lost_worker:
                    verdict.refusal = refusal
                self._leave_queue(request)
                self._refuse(request, verdict)
        self._books.moved(model)
        self._dispatch.place(model, self._now_ns)

    # --- results --------------------------------------------------------------------------------

    def _action_succeeded(self, event: ActionSucceeded) -> None:
        books = self._books
        worker = books.workers.get(event.worker_id)
        sent = books.take_result(worker, event.action_id) if worker is not None else None
        if worker is None or sent is None:
            return
        now_ns = self._now_ns
        # A clock offset that is a little off must not put an end into the future.
        end_ns = min(event.end_ns, now_ns)
        end_ns += self._learn_link(worker, sent, event, end_ns, event.unread_ns)
        # A worker may say that something took no time. Rates are reciprocals of durations, so it took some.
        duration_ns, action = max(event.duration_ns + event.spared_ns, 1), sent.action
        learns, touched = True, None
        if (
            worker.trouble is not None
            or duration_ns > SLOW_FACTOR * action.expected_duration_ns + SLOW_NS
        ):
            learns, touched = self._health.succeeded(sent, duration_ns, now_ns)
        if isinstance(action, Infer):
            if learns:
                self._measured_exec(worker, sent, action.batch_size, duration_ns)
            books.end_infer(sent, end_ns)
            if sent.shared:
                self._answer_first(event, sent, action.batch_size)
                books.exec_freed(worker)
            else:
                self._answer(event, sent, action.batch_size)
                books.infer_over(sent, event, now_ns)
        else:
            if learns:
                sent.copy.estimates.measured_load(duration_ns)
            books.end_load(sent, end_ns, now_ns)
            self._dispatch.load_ended(worker, now_ns)
        if touched:
            self._trust_changed(worker, touched)
        self._settle(worker, sent.copy.model)

    def _action_failed(self, event: ActionFailed) -> None:
        worker = self._books.workers.get(event.worker_id)
        if worker is None or event.action_id not in worker.in_flight:
            return
        if event.error not in _EXPECTED_ERRORS and not _explained(worker, event):
            self._let_go(
                worker,
                f"action {event.action_id}: {event.error.name}: {event.message}; "
                "the worker's cache is not what the controller believes",
            )
            return
        sent = self._books.take_result(worker, event.action_id)
        assert sent is not None
        now_ns, model = self._now_ns, sent.copy.model
        self._learn_link(worker, sent, event, now_ns, 0)
        if isinstance(sent.action, Infer):
            self._books.end_infer(sent, now_ns)
            if event.error in _FAILURES:
                self._run_failed(event, sent)
            else:
                if (
                    event.error is ActionError.TOO_LATE
                    and now_ns < sent.action.latest_ns - _CLOCK_ERROR_NS
                    and not model.removed
                ):
                    # As with runs that fail at once, its lane is always free for more.
                    words = "worker says TOO_LATE while there was time"
                    self._trust_changed(worker, self._health.run_failed(sent, words, now_ns))
                self._put_back(sent, Refusal.LATE)
            self._books.exec_freed(worker)
            if event.error is not ActionError.TOO_LATE:
                worker.exec_wakeup_ns = None  # the lane has room long before that was to be
        else:
            self._books.fail_load(sent, now_ns)
            self._dispatch.load_lane_freed()
            if event.error in _FAILURES and not model.removed:
                self._trust_changed(worker, self._health.load_failed(sent, event.message, now_ns))
                if not model.ready:
                    self._reconsider(model, Refusal.FAILED)
        self._settle(worker, model)
        if model.queue:  # another worker may be the better one for those that were put back
            self._dispatch.place(model, self._now_ns)

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
    ) -> int:
        """Learn from the ways of an action and its result, and tell how long to allow for the way back.

        Args:
            worker: which did it.
            sent: the action.
            event: what became of it.
            end_ns: when it ended there; now, where it failed.
            unread_ns: how long the result may have been here unread.
        """
        link, now_ns, received_ns = worker.link, self._now_ns, event.received_ns
        # An action may begin the moment it is decided upon. It was not received later than now, whatever the
        # worker's clock says.
        sent_ns = sent.action.earliest_ns + event.unsent_ns
        there_ns = sent_ns if received_ns is None else min(received_ns, now_ns)
        end_ns = max(end_ns, there_ns, sent_ns)
        if unread_ns:
            # The time in which a busy process did not look is no delay of the link, which is as long as before.
            now_ns -= min(unread_ns, max(0, now_ns - end_ns - link.back.length_ns))
        if not link.is_news(there_ns - sent_ns, now_ns - end_ns, now_ns):
            return 0
        if received_ns is not None:
            if not sent.sent_bytes:  # nobody counted them when they were sent
                sent.in_bytes = sum([request.num_bytes for request in sent.requests])
            link.out.measured(
                sent_ns,
                there_ns,
                num_bytes=sent.in_bytes,
                sent_bytes=sent.sent_bytes,
            )
        if end_ns < now_ns:
            out_bytes = 0
            if isinstance(sent.action, Infer):
                out_bytes = sum(sent.action.rows) * sent.copy.model.output_row_bytes
            sent_bytes = link.back.send(end_ns, out_bytes)
            link.back.measured(end_ns, now_ns, num_bytes=out_bytes, sent_bytes=sent_bytes)
        link.learned(self._now_ns)
        # On a thin way back results queue, and the next comes after this one.
        return now_ns - end_ns if link.back.ns_per_byte else link.back.ns

    def _answer(self, event: ActionSucceeded, sent: SentAction, size: int) -> None:
        """Respond to the requests of an Infer that ran; those past their deadline are late."""
        now_ns, books = self._now_ns, self._books
        for index, request in enumerate(sent.requests):
            if request.phase is DONE:
                continue
            if now_ns > request.deadline_ns:
                self._refuse(request, Verdict(Refusal.LATE))
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

    def _answer_first(self, event: ActionSucceeded, sent: SentAction, size: int) -> None:
        """Respond to those of the requests that nobody has answered yet, though they wait or run elsewhere."""
        elsewhere: dict[ActionId, None] = {}
        for request in sent.requests:
            if request.phase is WAITING:
                self._leave_queue(request)
            elif request.action_id is not None and request.action_id != event.action_id:
                elsewhere[request.action_id] = None
        self._answer(event, sent, size)
        for action_id in elsewhere:
            self._withdraw(action_id)
        if sent.copy.model.queue:  # a policy that reacts waits for the end of each of its actions
            self._books.came(sent.copy.model)

    def _put_back(self, sent: SentAction, refusal: Refusal) -> None:
        """Requests of an action that did not run wait again while some worker may be in time."""
        model = sent.copy.model
        for request in own_requests(sent) if sent.shared else sent.requests:
            if request.phase is DONE:
                continue
            if refusal is Refusal.WORKER_LOST:
                request.lost_worker = True
            verdict = self._judge_again(request)
            if verdict.refusal is None:
                self._wait_again(request, verdict)
            else:
                if not model.removed and verdict.refusal is not Refusal.FAILED:
                    verdict.refusal = refusal
                self._refuse(request, verdict)
        self._books.came(model)

    # --- failures -------------------------------------------------------------------------------

    def _run_failed(self, event: ActionFailed, sent: SentAction) -> None:
        """The engine failed at an Infer: run its requests elsewhere or again, in smaller batches.

        One that fails alone again is refused with the engine's words, and so is one without time.
        """
        now_ns, model = self._now_ns, sent.copy.model
        if event.error is ActionError.DEVICE and not model.removed:
            if any(request.num_failures for request in sent.requests):
                touched = self._health.requests_failed(sent)
            else:
                touched = self._health.run_failed(sent, event.message, now_ns)
            self._trust_changed(sent.copy.worker, touched)
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
            verdict = Verdict() if in_vain else self._judge_again(request)
            if in_vain or verdict.refusal is not None:
                self._refuse(request, Verdict(Refusal.FAILED, detail=event.message))
                continue
            request.most_together = max(1, together // 2)
            # A policy that does not predict runs it when it will.
            until_ns = request.deadline_ns if self._predicts else _FOREVER_NS
            model.apart_until_ns = max(model.apart_until_ns, until_ns)
            self._wait_again(request, verdict)
        self._books.came(model)

    def _wait_again(self, request: Request, verdict: Verdict) -> None:
        self._books.enqueue(request)
        if self._predicts:
            self._alarms.watch_no_later(request, verdict.hopeless_ns)

    def _trust_changed(self, worker: WorkerState, touched: Sequence[Model]) -> None:
        """Models were suspended on the worker, or restored there or elsewhere: look at where they may run now."""
        if not touched:
            return
        self._dispatch.load_lane_freed()
        if worker.trouble is not None and worker.trouble.sick:
            self._do_without(worker)
        for model in dict.fromkeys(touched):
            if model.queue:
                self._dispatch.place(model, self._now_ns)

    def _do_without(self, worker: WorkerState) -> None:
        """The requests that a worker has wait again, too, where there is time for another: the first answer counts."""
        models: dict[Model, None] = {}
        for action_id, sent in list(worker.in_flight.items()):
            model = sent.copy.model
            if not sent.requests or worker not in model.suspended:
                continue
            for request in own_requests(sent):
                if request.phase is DONE:
                    continue
                verdict = self._judge_again(request)
                if verdict.refusal is None:
                    self._books.disown(sent, request)
                    self._wait_again(request, verdict)
                    models[model] = None
            self._withdraw(action_id)
        for model in models:
            self._books.came(model)
            self._dispatch.place(model, self._now_ns)

    def _withdraw(self, action_id: ActionId) -> None:
        """Take an Infer back, once, if none of its requests is open, or all of those are somebody else's."""
        for worker in self._books.workers.values():
            sent = worker.in_flight.get(action_id)
            if sent is None:
                continue
            for request in sent.requests:
                if request.phase is not DONE and request.action_id == action_id:
                    return
            self._take_back(worker, sent)
            return

    def _take_back(self, worker: WorkerState, sent: SentAction) -> None:
        if not sent.withdrawn:
            sent.withdrawn = True
            action_id = sent.action.action_id
            self._commands.append(WithdrawAction(worker_id=worker.worker_id, action_id=action_id))

    def _probe(self, model: Model, request_id: RequestId) -> None:
        """A request of a model came that is suspended somewhere: find out whether it works there again."""
        for worker in self._health.to_probe(model, self._now_ns):
            copy = worker.copies.get(model)
            if copy is None:
                readiness = model.suspended[worker].readiness
                self._dispatch.probe_load(worker, model, readiness, self._now_ns)
            elif (request := self._books.requests.get(request_id)) is not None:
                self._dispatch.probe_run(copy, request, self._now_ns)

    def _settle(self, worker: WorkerState, model: Model) -> None:
        """After a result: finish what waited for the action's end, keep the lanes busy."""
        if model.removed:
            self._forget(worker, model)
        self._place_pinned()
        if not worker.draining:
            self._dispatch.after_result(worker, model, self._now_ns)
        elif not worker.in_flight:
            self._let_go(worker, "")
        if model.suspended and model.queue:
            # Where all clients wait for answers, no request comes with which a worker is tried again.
            self._probe(model, model.queue[-1].request_id)

    # --- time passes ----------------------------------------------------------------------------

    def _timer_fired(self, event: TimerFired) -> None:
        self._wake_due()
        timeouts = self._alarms.timeouts
        while timeouts and timeouts[0][0] <= self._now_ns:
            at_ns, worker = self._alarms.timed_out()
            if self._is_here(worker) and worker.in_flight:
                self._check_timeout(worker, at_ns)

    def _wake_due(self) -> None:
        """Look at the lanes whose time has come."""
        now_ns, wakeups = self._now_ns, self._alarms.wakeups
        while wakeups and wakeups[0][0] <= now_ns:
            at_ns, worker = self._alarms.woken()
            if self._is_here(worker):
                self._dispatch.wake(worker, at_ns, now_ns)

    def _is_here(self, worker: WorkerState) -> bool:
        """Whether it neither left, nor came back as another record."""
        return self._books.workers.get(worker.worker_id) is worker

    def _check_timeout(self, worker: WorkerState, at_ns: int) -> None:
        """Look at the oldest action, as was arranged for `at_ns`: is it late, and how late."""
        action_id, sent = next(iter(worker.in_flight.items()))
        now_ns, until_ns = self._now_ns, self._alarms.overdue_ns(sent)
        if until_ns > now_ns and len(self._books.workers) > 1:
            suspect_ns = self._alarms.suspect_ns(sent)
            if suspect_ns > now_ns:
                until_ns = suspect_ns
            else:
                if now_ns - at_ns > _STOOD_STILL_NS:
                    # Whatever came meanwhile has not been read yet.
                    until_ns = min(until_ns, now_ns + _STOOD_STILL_NS)
                elif worker.trouble is None or not worker.trouble.sick:
                    self._trust_changed(worker, self._health.overdue(worker, now_ns))
        if until_ns <= now_ns:
            if worker.suspected == action_id:
                self._let_go(
                    worker, f"action {action_id} has no result long after its predicted end"
                )
                return
            # If this process was suspended, every timeout fires before any result is read. So look twice:
            # blame the worker only if the result is still missing a second later.
            worker.suspected = action_id
            until_ns = self._now_ns + min(_SECOND_LOOK_NS, self.config.action_timeout_ns)
        self._alarms.expect_result_until(worker, until_ns)

    # --- workers --------------------------------------------------------------------------------

    def _worker_joined(self, event: WorkerJoined) -> None:
        config = self.config
        self._books.join(
            event.worker_id,
            event.gpu_kind,
            event.num_pages,
            LinkPlan(
                least_ns=config.dispatch_delay_ns,
                tolerance_ns=config.window_ns // 2,
                unusual=self._books.load_lanes.unusual,
            ),
            load_lookahead_ns=config.lookahead_ns,
            now_ns=self._now_ns,
        )
        workers = list(self._books.workers.values())
        if len(workers) == 2 and workers[0].watched:  # from now on it can be done without
            self._alarms.look_sooner(workers[0], self._now_ns + _STOOD_STILL_NS)

    def _clock_seen(self, event: ClockSeen) -> None:
        worker = self._books.workers.get(event.worker_id)
        if worker is None:
            return
        same = worker.clock_mhz == event.clock_mhz
        worker.settle(confirmed=same)
        if same:
            return
        waiting = self._books.clock_changed(worker, event.clock_mhz, self._estimates)
        self._dispatch.load_lane_freed()
        for model in waiting:
            self._books.came(model)
        for model in waiting:
            self._dispatch.place(model, self._now_ns)

    def _worker_draining(self, event: WorkerDraining) -> None:
        worker = self._books.workers.get(event.worker_id)
        if worker is None or worker.draining:
            return
        models = self._books.drain(worker)
        self._place_pinned()
        for model in models:
            self._reconsider(model, Refusal.NO_WORKER)
        if not worker.in_flight:
            self._let_go(worker, "")

    def _worker_lost(self, event: WorkerLost) -> None:
        worker = self._books.workers.get(event.worker_id)
        if worker is not None:
            self._remove_worker(worker)

    def _let_go(self, worker: WorkerState, reason: str) -> None:
        """Close a worker's link; no reason: it was drained, and may go."""
        self._commands.append(CloseWorker(worker_id=worker.worker_id, reason=reason))
        self._remove_worker(worker)

    def _remove_worker(self, worker: WorkerState) -> None:
        in_flight, touched = self._books.lose(worker, self._now_ns)
        for sent in in_flight:
            if sent.requests:
                self._books.end_infer(sent, self._now_ns)
                self._resort(sent.copy.model)
                self._put_back(sent, Refusal.WORKER_LOST)
                touched[sent.copy.model] = None
        self._books.exec_freed(worker)
        self._place_pinned()
        for model in touched:
            self._reconsider(model, Refusal.WORKER_LOST)

    # --- models ---------------------------------------------------------------------------------

    def _model_added(self, event: ModelAdded) -> None:
        self._books.add_model(event.model_id)

    def _model_ready(self, event: ModelReady) -> None:
        worker = self._books.workers.get(event.worker_id)
        if worker is None:
            return
        model = self._books.models.get(event.model_id)
        if model is None:
            self._commands.append(ForgetModel(worker_id=event.worker_id, model_id=event.model_id))
            return
        if self._estimates.crowded:
            self._estimates.keep_used(self._books.estimates_used())
        estimates = self._estimates.profiled(
            worker.gpu_kind,
            worker.clock_mhz,
            event.architecture_id,
            load_ns=event.load_ns,
            exec_ns=event.exec_ns,
            profile_mhz=event.clock_mhz,
        )
        self._dispatch.load_lane_freed()
        if not worker.draining:
            readiness = Readiness(event.num_pages, event.architecture_id, estimates)
            self._books.ready(model, worker, readiness)
            model.output_row_bytes = event.output_row_bytes
            if event.resident:
                self._books.find_resident(model, worker, readiness)
            self._place_pinned()
            for sick in self._health.replaced(model, self._now_ns):
                self._trust_changed(sick, [model])
            if event.resident and model.queue:
                self._dispatch.place(model, self._now_ns)
            elif len(model.copies) < len(model.ready):
                self._dispatch.seek_copy(model, self._now_ns)

    def _model_wanted(self, event: ModelWanted) -> None:
        model = self._books.models.get(event.model_id)
        if model is not None:
            self._dispatch.seek_copy(model, self._now_ns, wanted=True)

    def _model_pinned(self, event: ModelPinned) -> None:
        model = self._books.models.get(event.model_id)
        if model is not None:
            self._books.pin(model, pinned=event.pinned)
            self._place_pinned()
            if not event.pinned:
                self._dispatch.may_make_room(model, self._now_ns)

    def _place_pinned(self) -> None:
        """Something may have taken a pinned model's last copy, or made room for one."""
        if self._books.pinned:
            self._dispatch.load_pinned(self._now_ns)
            if not self._predicts:
                for model in self._books.models.values():
                    if model.queue and not model.has_room_beside_pins():
                        self._reconsider(model, Refusal.NO_WORKER)

    def _model_removed(self, event: ModelRemoved) -> None:
        model = self._books.remove_model(event.model_id)
        if model is None:
            return
        for request in list(model.queue):
            self._leave_queue(request)
            self._refuse(request, Verdict(Refusal.MODEL_REMOVED))
        if model.pinned:
            self._books.pin(model, pinned=False)
        for worker in [*model.ready, *model.suspended]:
            for action_id, sent in worker.in_flight.items():
                if sent.copy.model is not model:
                    continue
                if isinstance(sent.action, Infer):
                    self._withdraw(action_id)
                else:
                    self._take_back(worker, sent)
            self._forget(worker, model)
        self._place_pinned()

    def _forget(self, worker: WorkerState, model: Model) -> None:
        """Free a removed model's pages and tell the worker, once no action of it is in flight."""
        copy = worker.copies.get(model)
        if copy is not None:
            if not copy.resident or copy.num_pins:
                return
            self._dispatch.evict(copy)
            self._dispatch.pages_freed(worker, self._now_ns)
        elif infers_of(worker, model):
            return  # behind a load that failed
        self._health.forget(worker, model)
        if self._books.forget(model, worker):
            self._commands.append(ForgetModel(worker_id=worker.worker_id, model_id=model.model_id))


def _waited_in_vain(request: Request, verdict: Verdict) -> Verdict:
    """Others went first, or would, until the request's slack was gone."""
    verdict.exec_ns = request.due_ns - verdict.hopeless_ns
    verdict.queue_ns = verdict.hopeless_ns - request.arrival_ns
    return verdict


def _explained(worker: WorkerState, event: ActionFailed) -> bool:
    """NOT_RESIDENT is no contradiction where the Infer was planned behind a load that failed.

    WITHDRAWN is none of what was taken back. A worker that says so of what was not does nothing, and always
    has time for more.
    """
    sent = worker.in_flight[event.action_id]
    if event.error is ActionError.WITHDRAWN:
        return sent.withdrawn
    return event.error is ActionError.NOT_RESIDENT and not sent.copy.resident
