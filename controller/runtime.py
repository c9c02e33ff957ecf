"""The shell around the scheduler: the clock, the one timer, requests and actions under way.

Everything runs in one event loop thread. Whatever happens becomes an event; `apply` hands it to the
scheduler and carries the commands out in order. Nothing else calls the scheduler.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from clockwright.actions import (
    Action,
    ActionError,
    EvictWeights,
    Infer,
    LoadWeights,
    Result,
    StepTime,
)
from clockwright.bulk import Buffer
from clockwright.errors import ProtocolError, Refusal, RefusedError
from clockwright.units import NS_PER_S, ActionId, ModelId, RequestId, WorkerId
from controller.core import Scheduler, Statistics
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
from controller.core.forecast import Forecast
from controller.front.refusals import late_text, refusal_figures, refusal_text
from controller.telemetry import CANCELLED, OK, ActionRow, RequestRow, Telemetry

now_ns = time.monotonic_ns


@dataclass(slots=True, kw_only=True)
class Submission:
    """A request, decoded and checked against its model."""

    #: The id that the catalogue gives, which is not always the public name.
    model_id: ModelId
    #: 1 to the model's largest batch size.
    rows: int
    slo_ns: int
    #: `now_ns()` when the front end had the request in hand.
    arrival_ns: int
    #: Tensor bytes per input, in the model's order. Kept, not copied, until the request is done.
    inputs: Sequence[Buffer]
    #: Whose it is; empty: nobody's in particular.
    tenant: str = ""


@dataclass(slots=True, kw_only=True)
class Answer:
    """The outputs of a request, and where its time went. All times on the controller's clock."""

    #: Tensor bytes per output, in the model's order.
    outputs: Sequence[Buffer]
    request_id: RequestId
    action_id: ActionId
    worker_id: WorkerId
    batch_size: int
    #: No resident copy at arrival.
    cold: bool
    arrival_ns: int
    slo_ns: int
    #: When the Infer was handed to the worker's link, when the worker had it, when its result was
    #: back, and when this answer was made.
    sent_ns: int
    received_ns: int
    result_ns: int
    departure_ns: int
    #: As predicted when the Infer was sent.
    expected_begin_ns: int
    expected_duration_ns: int
    expected_departure_ns: int
    #: The LoadWeights that a cold request waited for.
    load: StepTime | None
    input: StepTime | None
    exec: StepTime | None
    output: StepTime | None

    @property
    def deadline_ns(self) -> int:
        """After it the answer must not be given as a success."""
        return self.arrival_ns + self.slo_ns


class Link(Protocol):
    """The way to one worker. None of these blocks or raises."""

    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        """Send an action; `payload` is per request, per input tensor."""

    def forget_model(self, model_id: ModelId) -> None:
        """Tell the worker to drop a model."""

    def close(self, reason: str) -> None:
        """Tell the worker to leave, and close."""


@dataclass(slots=True)
class _Waiting:
    """A request without an answer yet."""

    row: RequestRow
    inputs: Sequence[Buffer]
    future: asyncio.Future[Answer]


@dataclass(slots=True)
class _Worker:
    link: Link
    #: Actions without a result yet.
    actions: dict[ActionId, ActionRow] = field(default_factory=dict)
    #: The latest load of each model, to explain cold starts.
    loads: dict[ModelId, StepTime] = field(default_factory=dict)


@dataclass(slots=True)
class _Finished:
    """The Infer whose result is being handled."""

    row: ActionRow
    outputs: Sequence[Buffer]
    outputs_per_request: int
    load: StepTime | None


class Runtime:
    """Carries out what the scheduler decides, and tells it what became of that."""

    def __init__(self, scheduler: Scheduler, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        #: No requests are admitted any more.
        self.draining = False
        self._scheduler = scheduler
        self._waiting: dict[RequestId, _Waiting] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._finished: _Finished | None = None
        self._last_request_id = 0
        #: In this turn of the event loop.
        self._arrived: list[RequestArrived] = []
        self._events: deque[Event] = deque()
        self._applying = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._idle: asyncio.Future[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Requests without an answer yet."""
        return len(self._waiting)

    def time_to_last_deadline_ns(self, model_id: ModelId) -> int:
        """How long until no request that waits now for a model can wait any more; 0 if none does."""
        deadlines_ns = (
            waiting.row.arrival_ns + waiting.row.slo_ns
            for waiting in self._waiting.values()
            if waiting.row.model_id == model_id
        )
        return max(0, max(deadlines_ns, default=0) - now_ns())

    def statistics(self) -> Statistics:
        """What the scheduler believes; linear in models and workers."""
        return self._scheduler.statistics()

    # --- requests -----------------------------------------------------------------------------

    def submit(self, submission: Submission) -> asyncio.Future[Answer]:
        """Ask for an answer inside the SLO.

        Cancelling the future, or the task that awaits it, withdraws the request: if it has not been
        sent to a worker yet, it never will be.

        Returns:
            A future of the answer, which was in time when the future was resolved.

        Raises:
            RefusedError: (through the future) why there is no answer in time.
        """
        self._last_request_id += 1
        request_id = RequestId(self._last_request_id)
        row = RequestRow(
            request_id=request_id,
            model_id=submission.model_id,
            rows=submission.rows,
            arrival_ns=submission.arrival_ns,
            slo_ns=submission.slo_ns,
        )
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = _Waiting(row, submission.inputs, future)
        future.add_done_callback(functools.partial(self._withdraw_if_cancelled, request_id))
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._apply_arrivals)
        self._arrived.append(
            RequestArrived(
                request_id=request_id,
                model_id=submission.model_id,
                rows=submission.rows,
                arrival_ns=submission.arrival_ns,
                slo_ns=submission.slo_ns,
                tenant=submission.tenant,
            )
        )
        return future

    def forecast(
        self, model_ids: Sequence[ModelId], *, arrival_ns: int, slo_ns: int, together: bool
    ) -> list[Forecast]:
        """Predict what a request of one row to each of some models would come to; see `Scheduler`."""
        return self._scheduler.forecast(
            model_ids,
            rows=1,
            arrival_ns=arrival_ns,
            slo_ns=slo_ns,
            now_ns=now_ns(),
            together=together,
        )

    def want(self, model_id: ModelId) -> None:
        """A cold model was left out of an answer; the next query shall find it loaded."""
        self.apply(ModelWanted(model_id=model_id))

    def _apply_arrivals(self) -> None:
        """Tell the scheduler of all requests that arrived in this turn of the event loop at once.

        So that they can form a batch: under load a turn brings several.
        """
        arrived, self._arrived = self._arrived, []
        # A future that was cancelled in this turn says so in the next.
        requests = tuple([r for r in arrived if not self._waiting[r.request_id].future.done()])
        if len(requests) == 1:
            self.apply(requests[0])
        elif requests:
            self.apply(RequestsArrived(requests=requests))

    def _withdraw_if_cancelled(self, request_id: RequestId, future: asyncio.Future[Answer]) -> None:
        if not future.cancelled():
            return
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        self._close_row(waiting.row, CANCELLED)
        self.apply(RequestCancelled(request_id=request_id))

    def close_admission(self) -> None:
        """Refuse what arrives from now on; what is admitted is finished."""
        self.draining = True
        self.apply(AdmissionClosed())

    async def wait_idle(self) -> None:
        """Wait until no request waits and no action is under way."""
        while self._waiting or any(worker.actions for worker in self._workers.values()):
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    # --- workers ------------------------------------------------------------------------------

    def worker_joined(self, link: Link, event: WorkerJoined) -> None:
        """Start to use a worker; its id is not in use."""
        assert event.worker_id not in self._workers, f"worker {event.worker_id} is here already"
        self._workers[event.worker_id] = _Worker(link)
        self.apply(event)

    def clock_seen(self, worker_id: WorkerId, clock_mhz: int) -> None:
        """A worker has looked at its GPU's clock."""
        if worker_id in self._workers:
            self.apply(ClockSeen(worker_id=worker_id, clock_mhz=clock_mhz))

    def drain_worker(self, worker_id: WorkerId) -> None:
        """Send a worker nothing new; its link is closed when all it has is answered."""
        if worker_id in self._workers:
            self.apply(WorkerDraining(worker_id=worker_id))

    def worker_lost(self, worker_id: WorkerId) -> None:
        """A worker's link ended. Does nothing when the scheduler has let it go before."""
        if self._detach(worker_id) is not None:
            self.apply(WorkerLost(worker_id=worker_id))

    def action_finished(
        self, worker_id: WorkerId, result: Result, outputs: Sequence[Buffer]
    ) -> None:
        """Take in a result; `outputs` is per request, per output tensor.

        Raises:
            ProtocolError: the worker was not sent this action, or the result lacks something.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return  # Let go a moment ago.
        row = worker.actions.get(result.action_id)
        if row is None:
            raise ProtocolError(f"result of action {result.action_id}, which is not under way")
        event = _event(row, result)
        if isinstance(event, ActionSucceeded) and row.num_requests:
            if not outputs or len(outputs) % row.num_requests:
                raise ProtocolError(
                    f"action {result.action_id}: {len(outputs)} output tensors for "
                    f"{row.num_requests} requests"
                )
            load = worker.loads.get(row.model_id)
            per_request = len(outputs) // row.num_requests
            self._finished = _Finished(row, outputs, per_request, load)
        if result.load is not None:
            worker.loads[row.model_id] = result.load
        del worker.actions[result.action_id]
        row.received_ns = result.received_ns
        row.result_ns = now_ns()
        row.error = result.error.name
        row.load, row.input, row.exec, row.output = (
            result.load,
            result.input,
            result.exec,
            result.output,
        )
        self.apply(event)
        self._finished = None
        self.telemetry.add_action(row)

    def _detach(self, worker_id: WorkerId) -> _Worker | None:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            for row in worker.actions.values():
                row.result_ns = now_ns()
                row.error = "WORKER_LOST"
                self.telemetry.add_action(row)
        return worker

    # --- events and commands ------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Tell the scheduler what happened and do what it says.

        Carrying out a command may lead to a further event; it waits its turn.
        """
        self._events.append(event)
        if self._applying:
            return
        self._applying = True
        try:
            while self._events:
                for command in self._scheduler.handle(self._events.popleft(), now_ns=now_ns()):
                    self._carry_out(command)
        finally:
            self._applying = False
        self._arm_timer()
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _carry_out(self, command: Command) -> None:
        match command:
            case SendAction():
                self._send(command)
            case AnswerRequest():
                self._answer(command)
            case RefuseRequest():
                self._refuse(command)
            case ForgetModel():
                if worker := self._workers.get(command.worker_id):
                    worker.loads.pop(command.model_id, None)
                    worker.link.forget_model(command.model_id)
            case CloseWorker():
                if worker := self._detach(command.worker_id):
                    worker.link.close(command.reason)
            case _:
                assert_never(command)

    def _send(self, command: SendAction) -> None:
        action = command.action
        worker = self._workers[command.worker_id]
        row = ActionRow(
            action_id=action.action_id,
            type=type(action).__name__,
            worker_id=command.worker_id,
            model_id=action.model_id,
            sent_ns=now_ns(),
            expected_begin_ns=command.expected_begin_ns,
        )
        if not isinstance(action, EvictWeights):
            row.earliest_ns = action.earliest_ns
            row.latest_ns = action.latest_ns
            row.expected_duration_ns = action.expected_duration_ns
        payload: list[Buffer] = []
        if isinstance(action, Infer):
            row.batch_size = action.batch_size
            row.rows = sum(action.rows)
            row.num_requests = len(command.request_ids)
            for request_id in command.request_ids:
                payload += self._waiting[request_id].inputs
        worker.actions[action.action_id] = row
        worker.link.send(action, payload)

    def _answer(self, command: AnswerRequest) -> None:
        waiting = self._waiting.pop(command.request_id, None)
        if waiting is None:
            return  # Cancelled while it ran.
        finished = self._finished
        assert finished is not None
        assert finished.row.action_id == command.action_id
        row, action = waiting.row, finished.row
        row.cold = command.cold
        row.worker_id = command.worker_id
        row.action_id = command.action_id
        row.batch_size = command.batch_size
        row.expected_departure_ns = command.expected_departure_ns
        self._close_row(row, OK)
        if waiting.future.done():
            return
        if row.outcome != OK:
            text = late_text(
                row.model_id,
                slo_ns=row.slo_ns,
                latency_ns=row.departure_ns - row.arrival_ns,
                expected_latency_ns=row.expected_departure_ns - row.arrival_ns,
            )
            waiting.future.set_exception(RefusedError(Refusal.LATE, text))
            return
        first = command.index * finished.outputs_per_request
        waiting.future.set_result(
            Answer(
                outputs=finished.outputs[first : first + finished.outputs_per_request],
                request_id=command.request_id,
                action_id=command.action_id,
                worker_id=command.worker_id,
                batch_size=command.batch_size,
                cold=command.cold,
                arrival_ns=row.arrival_ns,
                slo_ns=row.slo_ns,
                sent_ns=action.sent_ns,
                received_ns=action.received_ns,
                result_ns=action.result_ns,
                departure_ns=row.departure_ns,
                expected_begin_ns=action.expected_begin_ns,
                expected_duration_ns=action.expected_duration_ns,
                expected_departure_ns=command.expected_departure_ns,
                load=finished.load if command.cold else None,
                input=action.input,
                exec=action.exec,
                output=action.output,
            )
        )

    def _refuse(self, command: RefuseRequest) -> None:
        waiting = self._waiting.pop(command.request_id, None)
        if waiting is None:
            return
        self._close_row(waiting.row, command.refusal.value)
        if not waiting.future.done():
            error = RefusedError(
                command.refusal, refusal_text(command), figures=refusal_figures(command)
            )
            waiting.future.set_exception(error)

    def _close_row(self, row: RequestRow, outcome: str) -> None:
        """Complete a row; a success past its deadline is none."""
        row.departure_ns = now_ns()
        late = outcome == OK and row.departure_ns > row.arrival_ns + row.slo_ns
        row.outcome = Refusal.LATE.value if late else outcome
        self.telemetry.add_request(row)

    # --- the timer ----------------------------------------------------------------------------

    def _arm_timer(self) -> None:
        """Have the timer fire no later than the scheduler wants.

        A timer that is armed earlier is left alone and re-armed when it fires: wake-ups move on
        with every request, and re-arming each time would cost more than firing once in vain.
        """
        wakeup_ns = self._scheduler.next_wakeup_ns()
        if wakeup_ns is None:
            return
        if self._timer is not None:
            if self._timer_ns <= wakeup_ns:
                return
            self._timer.cancel()
        self._timer_ns = wakeup_ns
        # Event loops keep time in milliseconds, and uvloop rounds to the nearest: round up here, or
        # it fires too early and has to be armed again.
        delay_ms = max(1, math.ceil((wakeup_ns - now_ns()) * 1000 / NS_PER_S))
        self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._fire)

    def _fire(self) -> None:
        self._timer = None
        wakeup_ns = self._scheduler.next_wakeup_ns()
        if wakeup_ns is not None and wakeup_ns <= now_ns():
            self.apply(TimerFired())
        else:
            self._arm_timer()


def _event(row: ActionRow, result: Result) -> ActionSucceeded | ActionFailed:
    """Turn a result into the event it is.

    Raises:
        ProtocolError: a success lacks the time of its main step, or the time is impossible, which
            would spoil the estimates of every worker of the kind.
    """
    if result.error is not ActionError.NONE:
        return ActionFailed(
            worker_id=row.worker_id,
            action_id=row.action_id,
            error=result.error,
            message=result.message,
            received_ns=result.received_ns,
        )
    match row.type:
        case LoadWeights.__name__:
            step = result.load
        case Infer.__name__:
            step = result.exec
        case _:
            step = StepTime(result.received_ns, result.received_ns, 0)
    if step is None:
        raise ProtocolError(f"action {row.action_id}: {row.type} succeeded without a time")
    # A second more than possible, for modelled devices and clocks that run unlike.
    possible_ns = now_ns() - row.sent_ns + NS_PER_S
    if step.end_ns < step.begin_ns or not 0 <= step.duration_ns <= possible_ns:
        raise ProtocolError(
            f"action {row.action_id}: {row.type} ran from {step.begin_ns} to {step.end_ns} ns "
            f"for {step.duration_ns} ns"
        )
    return ActionSucceeded(
        worker_id=row.worker_id,
        action_id=row.action_id,
        begin_ns=step.begin_ns,
        end_ns=step.end_ns,
        duration_ns=step.duration_ns,
        received_ns=result.received_ns,
        staged_ns=None if result.input is None else result.input.end_ns,
    )
