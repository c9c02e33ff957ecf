"""The production scheduler on virtual time: the shell around it, as `controller.runtime` is live."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from clockwright.actions import EvictWeights, Infer, LoadWeights, Result
from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, ActionId, GpuKind, ModelId, RequestId, WorkerId
from controller.core import Scheduler
from controller.core.events import (
    ActionFailed,
    ActionSucceeded,
    AnswerRequest,
    CloseWorker,
    Command,
    Event,
    ForgetModel,
    ModelAdded,
    ModelReady,
    RefuseRequest,
    RequestArrived,
    RequestsArrived,
    SendAction,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)
from controller.core.invariants import check as check_scheduler
from controller.schedulers import make_scheduler
from controller.telemetry import OK, ActionRow, RequestRow, Telemetry
from experiments.simulator.case import Case, Cluster
from experiments.simulator.clients import Arrival, Clients
from experiments.simulator.loop import Loop
from experiments.simulator.summary import Bucket, Summary, latency_class
from experiments.simulator.worker import Worker
from traces.arrivals import ClosedLoop


def production_scheduler(case: Case) -> Scheduler:
    """What every run has that does not try another."""
    return make_scheduler(case.scheduler)


class _Attached:
    """A worker that the scheduler knows, and its actions without a result: (command, time sent)."""

    __slots__ = ("actions", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.actions: dict[ActionId, tuple[SendAction, int]] = {}


class Controller:
    """Events to the scheduler, commands to workers and clients, what happened to the summary."""

    def __init__(
        self,
        case: Case,
        loop: Loop,
        summary: Summary,
        *,
        telemetry: Telemetry | None,
        groups: Mapping[ModelId, Summary],
        on_closed: Callable[[Worker], None],
        check: bool,
        make_scheduler: Callable[[Case], Scheduler],
    ) -> None:
        """Announce the cluster's models.

        Args:
            case: what is run.
            loop: virtual time.
            summary: where everything is counted.
            telemetry: where rows go; None: none are made.
            groups: where requests of some models are counted as well.
            on_closed: told when the scheduler lets a worker go.
            check: assert the scheduler's invariants after every event.
            make_scheduler: for the case.
        """
        #: Set before the first arrival.
        self.clients: Clients
        #: Requests without a response.
        self.open: dict[RequestId, tuple[RequestArrived, ClosedLoop | None]] = {}
        self._loop = loop
        self._summary = summary
        self._telemetry = telemetry
        self._groups = groups
        self._on_closed = on_closed
        self._check = check
        self._scheduler = make_scheduler(case)
        self._workers: dict[WorkerId, _Attached] = {}
        self._next_request = 1
        self._armed_ns: int | None = None
        for model in case.cluster.models:
            self._tell(ModelAdded(model_id=model.model_id))

    # --- workers ----------------------------------------------------------------------------------

    def join(self, worker: Worker, cluster: Cluster) -> None:
        """A worker registers, with all models ready in host memory."""
        if (before := self._workers.get(worker.worker_id)) is not None:
            self.lose(before.worker)  # it is back before its loss was noticed
        self._workers[worker.worker_id] = _Attached(worker)
        factor = cluster.exec_factor(worker.index)
        self._tell(
            WorkerJoined(
                worker_id=worker.worker_id,
                gpu_kind=GpuKind("simulated" if factor == 1.0 else f"simulated x {factor:g}"),
                num_pages=cluster.num_pages,
            )
        )
        for model in cluster.models:
            self._tell(
                ModelReady(
                    worker_id=worker.worker_id,
                    model_id=model.model_id,
                    architecture_id=model.architecture_id,
                    num_pages=model.num_pages,
                    load_ns=model.row.load_ns,
                    exec_ns=model.row.exec_ns
                    if factor == 1.0
                    else {size: round(ns * factor) for size, ns in model.row.exec_ns.items()},
                )
            )

    def lose(self, worker: Worker) -> None:
        """A worker's link broke."""
        if self._detach(worker):
            self._tell(WorkerLost(worker_id=worker.worker_id))

    def _detach(self, worker: Worker) -> bool:
        attached = self._workers.get(worker.worker_id)
        if attached is None or attached.worker is not worker:
            return False
        del self._workers[worker.worker_id]
        now_ns = self._loop.now_ns
        for command, sent_ns in attached.actions.values():
            self._summary.at(now_ns).action_errors["WORKER_LOST"] += 1
            if self._telemetry is not None:
                row = _action_row(command, sent_ns)
                row.result_ns, row.error = now_ns, "WORKER_LOST"
                self._telemetry.add_action(row)
        return True

    def result(self, message: tuple[Worker, Result]) -> None:
        """A worker's result arrived."""
        worker, result = message
        attached = self._workers.get(worker.worker_id)
        if attached is None or attached.worker is not worker:
            return
        command, sent_ns = attached.actions.pop(result.action_id)
        self._count_action(command, result)
        self._tell(_event(command, result))
        if self._telemetry is not None:
            row = _action_row(command, sent_ns)
            row.received_ns, row.result_ns = result.received_ns, self._loop.now_ns
            row.error = result.error.name
            row.load, row.input = result.load, result.input
            row.exec, row.output = result.exec, result.output
            self._telemetry.add_action(row)

    def _count_action(self, command: SendAction, result: Result) -> None:
        summary, action = self._summary, command.action
        bucket = summary.at(self._loop.now_ns)
        if result.error:
            bucket.action_errors[result.error.name] += 1
        elif isinstance(action, Infer):
            bucket.batches[action.batch_size] += 1
        elif isinstance(action, LoadWeights):
            bucket.loads += 1
        if (step := result.exec) is not None:
            summary.add_busy(step.begin_ns, step.begin_ns + step.duration_ns, load=False)
        if (step := result.load) is not None:
            summary.add_busy(step.begin_ns, step.begin_ns + step.duration_ns, load=True)

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, arrivals: list[Arrival]) -> None:
        """Requests arrive now, all at once."""
        now_ns = self._loop.now_ns
        requests = []
        for model_id, slo_ns, client in arrivals:
            request = RequestArrived(
                request_id=RequestId(self._next_request),
                model_id=model_id,
                rows=1,
                arrival_ns=now_ns,
                slo_ns=slo_ns,
            )
            self._next_request += 1
            self.open[request.request_id] = request, client
            requests.append(request)
            if self._groups and (group := self._groups.get(model_id)) is not None:
                group.at(now_ns).arrived += 1
        self._summary.at(now_ns).arrived += len(requests)
        self._tell(requests[0] if len(requests) == 1 else RequestsArrived(requests=tuple(requests)))

    def _answer(self, command: AnswerRequest, bucket: Bucket, answered: list[ClosedLoop]) -> None:
        request, client = self.open.pop(command.request_id)
        now_ns = self._loop.now_ns
        latency_ns = now_ns - request.arrival_ns
        in_time = latency_ns <= request.slo_ns
        cold = request.model_id if command.cold else None
        _count_answer(bucket, latency_ns, in_time, cold)
        if self._groups and (group := self._groups.get(request.model_id)) is not None:
            _count_answer(group.at(now_ns), latency_ns, in_time, cold)
        if client is not None:
            answered.append(client)
        if self._telemetry is not None:
            row = _request_row(request, now_ns, OK if in_time else Refusal.LATE.value)
            row.cold = command.cold
            row.worker_id = command.worker_id
            row.action_id = command.action_id
            row.batch_size = command.batch_size
            row.expected_departure_ns = command.expected_departure_ns
            self._telemetry.add_request(row)

    def _refuse(self, command: RefuseRequest, bucket: Bucket) -> None:
        request, client = self.open.pop(command.request_id)
        now_ns, reason = self._loop.now_ns, command.refusal.value
        bucket.refused[reason] += 1
        if self._groups and (group := self._groups.get(request.model_id)) is not None:
            group.at(now_ns).refused[reason] += 1
        if client is not None:
            self.clients.refused(client, request.arrival_ns + request.slo_ns)
        if self._telemetry is not None:
            self._telemetry.add_request(_request_row(request, now_ns, reason))

    # --- the scheduler ----------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        now_ns = self._loop.now_ns
        commands = self._scheduler.handle(event, now_ns=now_ns)
        if commands:
            self._carry_out(commands)
        wakeup_ns = self._scheduler.next_wakeup_ns()
        # As live: a timer that is armed earlier is left alone and armed again when it fires.
        # Nearly always it is the wake-up that the timer is armed for, rounded up: nothing to do.
        armed_ns = self._armed_ns
        if wakeup_ns is not None and (
            armed_ns is None or wakeup_ns <= armed_ns - NS_PER_MS or wakeup_ns < armed_ns <= now_ns
        ):
            self._arm(wakeup_ns)
        if self._check:
            check_scheduler(self._scheduler)

    def _carry_out(self, commands: list[Command]) -> None:
        bucket = self._summary.at(self._loop.now_ns)
        answered: list[ClosedLoop] = []
        for command in commands:
            if isinstance(command, AnswerRequest):
                self._answer(command, bucket, answered)
            elif isinstance(command, SendAction):
                attached = self._workers[command.worker_id]
                attached.actions[command.action.action_id] = command, self._loop.now_ns
                attached.worker.send(command.action)
            elif isinstance(command, RefuseRequest):
                self._refuse(command, bucket)
            elif isinstance(command, ForgetModel):
                self._workers[command.worker_id].worker.forget_model(command.model_id)
            elif isinstance(command, CloseWorker):
                attached = self._workers[command.worker_id]
                self._detach(attached.worker)
                self._on_closed(attached.worker)
        if answered:
            self.clients.answered(answered)

    def _arm(self, wakeup_ns: int) -> None:
        """Fire at the next whole millisecond: event loops keep no finer time."""
        after_ns = max(wakeup_ns, self._loop.now_ns + 1)
        at_ns = -(-after_ns // NS_PER_MS) * NS_PER_MS
        if at_ns != self._armed_ns:
            self._armed_ns = at_ns
            self._loop.at(at_ns, self._fire, at_ns)

    def _fire(self, armed_ns: int) -> None:
        if self._armed_ns != armed_ns:
            return
        self._armed_ns = None
        wakeup_ns = self._scheduler.next_wakeup_ns()
        if wakeup_ns is None:
            return
        if wakeup_ns <= self._loop.now_ns:
            self._tell(TimerFired())
        else:
            self._arm(wakeup_ns)


def _count_answer(bucket: Bucket, latency_ns: int, in_time: bool, cold: ModelId | None) -> None:
    if not in_time:
        bucket.refused[Refusal.LATE.value] += 1
        return
    bucket.answered += 1
    if cold is not None:
        bucket.cold_answered += 1
        bucket.cold_models.add(cold)
    bucket.latencies[latency_class(latency_ns)] += 1
    if latency_ns > bucket.latency_ns_max:
        bucket.latency_ns_max = latency_ns


def _event(command: SendAction, result: Result) -> ActionSucceeded | ActionFailed:
    if result.error:
        return ActionFailed(
            worker_id=command.worker_id,
            action_id=result.action_id,
            error=result.error,
            message=result.message,
            received_ns=result.received_ns,
        )
    action = command.action
    step = result.exec if isinstance(action, Infer) else result.load
    if step is None:
        assert isinstance(action, EvictWeights)
        begin_ns = end_ns = result.received_ns
        duration_ns = 0
    else:
        begin_ns, end_ns, duration_ns = step.begin_ns, step.end_ns, step.duration_ns
    return ActionSucceeded(
        worker_id=command.worker_id,
        action_id=result.action_id,
        begin_ns=begin_ns,
        end_ns=end_ns,
        duration_ns=duration_ns,
        received_ns=result.received_ns,
        staged_ns=None if result.input is None else result.input.end_ns,
    )


def _request_row(request: RequestArrived, departure_ns: int, outcome: str) -> RequestRow:
    return RequestRow(
        request_id=request.request_id,
        model_id=request.model_id,
        rows=request.rows,
        arrival_ns=request.arrival_ns,
        slo_ns=request.slo_ns,
        departure_ns=departure_ns,
        outcome=outcome,
    )


def _action_row(command: SendAction, sent_ns: int) -> ActionRow:
    action = command.action
    row = ActionRow(
        action_id=action.action_id,
        type=type(action).__name__,
        worker_id=command.worker_id,
        model_id=action.model_id,
        sent_ns=sent_ns,
        expected_begin_ns=command.expected_begin_ns,
    )
    if not isinstance(action, EvictWeights):
        row.earliest_ns = action.earliest_ns
        row.latest_ns = action.latest_ns
        row.expected_duration_ns = action.expected_duration_ns
    if isinstance(action, Infer):
        row.batch_size = action.batch_size
        row.rows = sum(action.rows)
        row.num_requests = len(command.request_ids)
    return row
