"""The books around the scheduler, and the one loop that hands it events and carries its commands out.

The scheduler decides and does no I/O. The code that runs it is a *shell*: `controller.runtime` serves
clients, `experiments.simulator` plays them on virtual time, `experiments.clipper_paper.bench`
saturates devices without a network. Shells differ in their clock, their timer, their links and in what
waits for an answer. Everything else is here, once:

* which requests have no answer yet, and what the shell keeps of each;
* which actions are under way on which worker, and how they end when it vanishes;
* how the result of an action becomes an event, and which results cannot be true;
* whether an answer is in time;
* the rows of telemetry, each built when it is complete;
* when a timer has to be armed.

Three rules hold for every shell. Events are handled one after the other: one that comes up while
commands are carried out waits its turn. A result changes the books before the scheduler hears of it,
and its row follows once the commands it led to are carried out. A request is closed once: a command
about one that is closed (its client went away) does nothing, except that an action already decided is
sent whole.

Nothing here reads a clock, waits or draws a random number; the shell's clock is an argument. mypyc
compiles the module for long simulations, so what a shell does comes as callables: a protocol that is
compiled would accept compiled classes only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from clockwright.errors import ProtocolError, Refusal
from clockwright.units import NS_PER_S, ActionId, ModelId, RequestId, WorkerId
from clockwright.wire.actions import ActionError, EvictWeights, Infer, Result, StepTime
from clockwright.wire.bulk import Buffer
from controller.core import Scheduler
from controller.core.events import (
    ActionFailed,
    ActionSucceeded,
    AnswerRequest,
    CertaintyAsked,
    CloseWorker,
    Command,
    Event,
    ForgetModel,
    PromiseRequest,
    RefuseRequest,
    RequestArrived,
    RequestCancelled,
    SendAction,
    TimerFired,
    WithdrawAction,
    WorkerJoined,
    WorkerLost,
    WriteOffAction,
)
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import CANCELLED, OK, Telemetry

#: The shell's link to a worker.
W = TypeVar("W")
#: What a shell keeps of a request until it is closed.
K = TypeVar("K")

WORKER_LOST = "WORKER_LOST"

# Python takes long to find the name of a number.
_NO_ERROR = ActionError.NONE.name


@dataclass(slots=True)
class Sent:
    """An action under way."""

    command: SendAction
    #: Time at which the action was handed to the worker's link.
    sent_ns: int


@dataclass(slots=True)
class Finished:
    """An action whose result is in, while the commands that it led to are carried out."""

    sent: Sent
    result: Result
    result_ns: int
    #: The latest load of its model on its worker, to explain a cold start.
    load: StepTime | None
    #: Output tensors, per request; empty in a shell that carries none.
    outputs: Sequence[Buffer]


class _Worker(Generic[W]):
    """A worker that is here; no dataclass, because mypyc makes none of a generic class."""

    __slots__ = ("actions", "link", "loads", "written_off")

    def __init__(self, link: W) -> None:
        self.link = link
        self.actions: dict[ActionId, Sent] = {}
        #: The latest load of each model.
        self.loads: dict[ModelId, StepTime] = {}
        #: The newest action that was written off; 0: none was.
        self.written_off = 0


class Ledger(Generic[W, K]):
    """The books of one shell, and its loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        clock: Callable[[], int],
        telemetry: Telemetry | None,
        send: Callable[[W, Sent], None],
        withdraw_action: Callable[[W, ActionId], None],
        write_off: Callable[[W, Sent], None],
        answer: Callable[[RequestArrived, K, AnswerRequest, Finished, int, bool], None],
        refuse: Callable[[RequestArrived, K, RefuseRequest, int], None],
        forget: Callable[[W, ModelId], None],
        close: Callable[[W, str, Sequence[Sent]], None],
        settled: Callable[[], None],
        arm: Callable[[int], int],
        tick_ns: int = 1,
    ) -> None:
        """Keep the books of a shell. A callable that raises ends the loop.

        Args:
            scheduler: makes every decision.
            clock: the present in ns, on the clock that all the events' times are on.
            telemetry: takes a record per request and action. None if no records are made.
            send: puts an action on a worker's link.
            withdraw_action: tells a worker to drop an action that it has not begun. The action stays in
                the books until its result comes.
            write_off: takes in that the result of an action is lost. It may come after all, and is dropped then.
            answer: gives (request, what is kept of it, command, the Infer, departure in ns, whether it
                is in time) to the waiter. An answer that is not in time is a refusal for lateness.
            refuse: gives (request, what is kept of it, command, departure in ns) to the waiter.
            forget: tells a worker that it gets no more actions for a model.
            close: lets a worker go, for a reason (empty: it is drained), with these actions under way.
            settled: an event, and those that came up meanwhile, are dealt with.
            arm: has `fire` called at a time in ns, or soon when that is past, instead of whenever it
                was armed for before. Returns when the timer is due.
            tick_ns: what the shell's timer rounds up to. A timer that is due less than a tick after
                the time wanted is left alone.
        """
        #: Requests without an answer yet.
        self.requests: dict[RequestId, tuple[RequestArrived, K]] = {}
        #: Those whose clients ask for certainty: when each was promised; 0: it was not, or it was sent before it had
        #: to be.
        self.promised: dict[RequestId, int] = {}
        #: Those withdrawn while commands are carried out, which may still send them.
        self._leaving: dict[RequestId, tuple[RequestArrived, K]] = {}
        self._scheduler = scheduler
        self._clock = clock
        self._telemetry = telemetry
        self._send = send
        self._withdraw_action = withdraw_action
        self._write_off = write_off
        self._answer = answer
        self._refuse = refuse
        self._forget = forget
        self._close = close
        self._settled = settled
        self._arm = arm
        self._tick_ns = tick_ns
        self._workers: dict[WorkerId, _Worker[W]] = {}
        self._later: deque[tuple[Event, Finished | None]] = deque()
        self._telling = False
        self._due_ns: int | None = None

    # --- what there is ------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request waits and no action is under way."""
        return not self.requests and not any([w.actions for w in self._workers.values()])

    @property
    def due_ns(self) -> int | None:
        """Time at which the timer is due. None if it is not armed."""
        return self._due_ns

    def link_of(self, worker_id: WorkerId) -> W | None:
        """The link to a worker. Returns None if there is no such worker."""
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.link

    def action_of(self, request_id: RequestId) -> ActionId | None:
        """The Infer under way that a request is in, if any; linear in what is under way."""
        for worker in self._workers.values():
            for action_id, sent in worker.actions.items():
                if request_id in sent.command.request_ids:
                    return action_id
        return None

    # --- requests -----------------------------------------------------------------------------

    def open(self, request: RequestArrived, kept: K) -> None:
        """Enter a request; the event that tells the scheduler of it is the shell's to `tell`."""
        self.requests[request.request_id] = request, kept

    def kept_to_send(self, request_id: RequestId) -> K:
        """What the shell keeps of a request that is being sent, even if it was withdrawn since the scheduler said so."""
        entry = self.requests.get(request_id)
        return (self._leaving[request_id] if entry is None else entry)[1]

    def decide(self, request_id: RequestId, within_ns: int) -> None:
        """Have a request refused or promised within a time of its arrival, which the scheduler has heard of."""
        if request_id in self.requests:
            self.promised[request_id] = 0
            self.tell(CertaintyAsked(request_id=request_id, within_ns=within_ns))

    def decided_ns(self, request_id: RequestId, otherwise_ns: int) -> int:
        """When a request whose client asks for certainty was decided. Returns 0 if its client does not ask.

        Args:
            request_id: it is being answered or refused.
            otherwise_ns: when it was sent, or is refused: that decides what was not promised before.
        """
        promised_ns = self.promised.get(request_id)
        return 0 if promised_ns is None else promised_ns or otherwise_ns

    def withdraw(self, request_id: RequestId) -> None:
        """Close a request whose client left. Does nothing if it is closed already."""
        entry = self.requests.pop(request_id, None)
        self.promised.pop(request_id, None)
        if entry is not None:
            if self._telling:
                self._leaving[request_id] = entry
            if self._telemetry is not None:
                self._telemetry.add_request(_unanswered(entry[0], self._clock(), CANCELLED))
            self.tell(RequestCancelled(request_id=request_id))

    # --- workers ------------------------------------------------------------------------------

    def join(self, link: W, event: WorkerJoined) -> None:
        """Start to use a worker; its id is not in use."""
        assert event.worker_id not in self._workers, f"worker {event.worker_id} is here already"
        self._workers[event.worker_id] = _Worker(link)
        self.tell(event)

    def lose(self, worker_id: WorkerId) -> Sequence[Sent]:
        """Take in that a worker vanished.

        Returns the actions that were under way. None also when the scheduler has let it go before.
        """
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return ()
        lost = self._record_lost(list(worker.actions.values()))
        self.tell(WorkerLost(worker_id=worker_id))
        return lost

    def finish(
        self,
        worker_id: WorkerId,
        result: Result,
        outputs: Sequence[Buffer] | None = None,
        *,
        unread_ns: int = 0,
    ) -> Sent | None:
        """Take in a result.

        Args:
            worker_id: the worker that sent it.
            result: the report, with times on the shell's clock.
            outputs: output tensors, per request. None if the shell carries no tensors.
            unread_ns: how long it may have lain unread because the shell was busy.

        Returns:
            The action, or None if the worker was let go a moment ago, or the action was written off.

        Raises:
            ProtocolError: the worker was not sent this action, or the result cannot be true. The
                books are as before.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        sent = worker.actions.get(result.action_id)
        if sent is None:
            if result.action_id <= worker.written_off:
                return None
            raise ProtocolError(f"result of action {result.action_id}, which is not under way")
        now_ns = self._clock()
        event = event_of(sent, result, now_ns=now_ns, unread_ns=unread_ns)
        command = sent.command
        if outputs is not None and not result.error:
            num_requests = len(command.request_ids)
            if num_requests and (not outputs or len(outputs) % num_requests):
                raise ProtocolError(
                    f"action {result.action_id}: {len(outputs)} output tensors for "
                    f"{num_requests} requests"
                )
        model_id = command.action.model_id
        finished = Finished(sent, result, now_ns, worker.loads.get(model_id), outputs or ())
        if result.load is not None:
            worker.loads[model_id] = result.load
        del worker.actions[result.action_id]
        self.tell(event, finished)
        return sent

    def _record_lost(self, lost: Sequence[Sent]) -> Sequence[Sent]:
        if self._telemetry is not None:
            for sent in lost:
                self._telemetry.add_action(_action_row(sent, None, self._clock()))
        return lost

    # --- the loop -----------------------------------------------------------------------------

    def tell(self, event: Event, finished: Finished | None = None) -> None:
        """Tell the scheduler what happened, do what it says, and see to the timer.

        Args:
            event: the news. Where commands are being carried out, it waits its turn.
            finished: the action whose result it is, if it is one's.
        """
        if self._telling:
            self._later.append((event, finished))
            return
        self._telling = True
        try:
            while True:
                now_ns = self._clock()
                commands = self._scheduler.handle(event, now_ns=now_ns)
                if commands:
                    self._carry_out(commands, finished)
                if finished is not None and self._telemetry is not None:
                    self._telemetry.add_action(
                        _action_row(finished.sent, finished.result, finished.result_ns)
                    )
                if not self._later:
                    break
                event, finished = self._later.popleft()
        finally:
            self._telling = False
            if self._leaving:
                self._leaving.clear()
        self._settled()
        # The timer fires no later than the scheduler wants. One that is due earlier is left alone and
        # armed again when it fires: wake-ups move on with every request, and arming each time would cost
        # more than firing once in vain. Nearly always the timer is armed for this very wake-up, rounded
        # up. One that is due and has not fired yet is put off to the next tick if it should have fired
        # before: a weak spot.
        wakeup_ns = self._scheduler.next_wakeup_ns()
        if wakeup_ns is not None:
            due_ns = self._due_ns
            if (
                due_ns is None
                or wakeup_ns <= due_ns - self._tick_ns
                or wakeup_ns < due_ns <= now_ns
            ):
                self._due_ns = self._arm(wakeup_ns)

    def _carry_out(self, commands: list[Command], finished: Finished | None) -> None:
        for command in commands:
            if isinstance(command, AnswerRequest):
                assert finished is not None
                self._give_answer(command, finished)
            elif isinstance(command, SendAction):
                sent = Sent(command, self._clock())
                worker = self._workers[command.worker_id]
                worker.actions[command.action.action_id] = sent
                self._send(worker.link, sent)
            elif isinstance(command, RefuseRequest):
                self._give_refusal(command)
            elif isinstance(command, PromiseRequest):
                if command.request_id in self.promised:
                    self.promised[command.request_id] = self._clock()
            elif isinstance(command, WithdrawAction):
                holder = self._workers.get(command.worker_id)
                if holder is not None:
                    self._withdraw_action(holder.link, command.action_id)
            elif isinstance(command, WriteOffAction):
                of = self._workers[command.worker_id]
                of.written_off = max(of.written_off, command.action_id)
                sent = of.actions.pop(command.action_id)
                self._record_lost([sent])
                self._write_off(of.link, sent)
            elif isinstance(command, ForgetModel):
                here = self._workers.get(command.worker_id)
                if here is not None:
                    here.loads.pop(command.model_id, None)
                    self._forget(here.link, command.model_id)
            elif isinstance(command, CloseWorker):
                gone = self._workers.pop(command.worker_id, None)
                if gone is not None:
                    lost = self._record_lost(list(gone.actions.values()))
                    self._close(gone.link, command.reason, lost)

    def _give_answer(self, command: AnswerRequest, finished: Finished) -> None:
        entry = self.requests.get(command.request_id)
        if entry is None:
            return
        assert finished.result.action_id == command.action_id
        request, kept = entry
        if finished.result.failed and (why := finished.result.failed.get(command.index)):
            # Others of its batch did not fail.
            refusal = RefuseRequest(
                request_id=request.request_id,
                model_id=request.model_id,
                refusal=Refusal.FAILED,
                slo_ns=request.slo_ns,
                detail=why,
            )
            self._give_refusal(refusal)
            return
        del self.requests[command.request_id]
        now_ns = self._clock()
        in_time = now_ns <= request.arrival_ns + request.slo_ns
        decided_ns = 0
        if self.promised:
            decided_ns = self.decided_ns(command.request_id, finished.sent.sent_ns)
        if self._telemetry is not None:
            self._telemetry.add_request(
                RequestRow(
                    request.request_id,
                    request.model_id,
                    request.rows,
                    request.arrival_ns,
                    request.slo_ns,
                    request.tenant,
                    now_ns,
                    OK if in_time else Refusal.LATE.value,
                    cold=command.cold,
                    worker_id=command.worker_id,
                    action_id=command.action_id,
                    batch_size=command.batch_size,
                    expected_departure_ns=command.expected_departure_ns,
                    decided_ns=decided_ns,
                    weight=request.weight,
                )
            )
        self._answer(request, kept, command, finished, now_ns, in_time)
        if self.promised:
            self.promised.pop(command.request_id, None)

    def _give_refusal(self, command: RefuseRequest) -> None:
        entry = self.requests.pop(command.request_id, None)
        if entry is None:
            return
        request, kept = entry
        now_ns = self._clock()
        if self._telemetry is not None:
            row = _unanswered(request, now_ns, command.refusal.value)
            row.load_ns, row.exec_ns = command.load_ns, command.exec_ns
            row.queue_ns, row.margin_ns = command.queue_ns, command.margin_ns
            row.decided_ns = self.decided_ns(command.request_id, now_ns)
            self._telemetry.add_request(row)
        self._refuse(request, kept, command, now_ns)
        self.promised.pop(command.request_id, None)

    # --- the timer ----------------------------------------------------------------------------

    def fire(self) -> None:
        """The timer that was armed last is due."""
        self._due_ns = None
        wakeup_ns = self._scheduler.next_wakeup_ns()
        if wakeup_ns is None:
            return
        if wakeup_ns <= self._clock():
            self.tell(TimerFired())
        else:
            self._due_ns = self._arm(wakeup_ns)


def event_of(
    sent: Sent, result: Result, *, now_ns: int, unread_ns: int = 0
) -> ActionSucceeded | ActionFailed:
    """Turn a result into the event it is, which is read now and may have been there for `unread_ns`.

    Raises ProtocolError if a success lacks the time of its main step, or the time is impossible, which would spoil the
    estimates of every worker of the kind.
    """
    command = sent.command
    action = command.action
    unsent_ns = 0
    if not isinstance(action, EvictWeights):
        unsent_ns = max(0, sent.sent_ns - action.earliest_ns)
    if result.error:
        return ActionFailed(
            worker_id=command.worker_id,
            action_id=result.action_id,
            error=result.error,
            message=result.message,
            received_ns=result.received_ns,
            turn_ns=result.turn_ns,
            unsent_ns=unsent_ns,
        )
    begin_ns = end_ns = result.received_ns
    duration_ns = spared_ns = 0
    if not isinstance(action, EvictWeights):
        step = result.exec if isinstance(action, Infer) else result.load
        if step is None:
            name = type(action).__name__
            raise ProtocolError(f"action {result.action_id}: {name} succeeded without a time")
        begin_ns, end_ns, duration_ns = step.begin_ns, step.end_ns, step.duration_ns
        spared_ns = step.spared_ns
        # Allow a second more than possible, for modelled devices and clocks that run unlike.
        most_ns = now_ns - sent.sent_ns + NS_PER_S
        if (
            end_ns < begin_ns
            or min(duration_ns, spared_ns) < 0
            or duration_ns + spared_ns > most_ns
        ):
            raise ProtocolError(
                f"action {result.action_id}: {type(action).__name__} ran from {begin_ns} to "
                f"{end_ns} ns for {duration_ns} ns, {spared_ns} ns spared"
            )
    return ActionSucceeded(
        worker_id=command.worker_id,
        action_id=result.action_id,
        begin_ns=begin_ns,
        end_ns=end_ns,
        duration_ns=duration_ns,
        spared_ns=spared_ns,
        received_ns=result.received_ns,
        staged_ns=None if result.input is None else result.input.end_ns,
        unsent_ns=unsent_ns,
        unread_ns=unread_ns,
    )


def _unanswered(request: RequestArrived, departure_ns: int, outcome: str) -> RequestRow:
    """Make the row of a request that was not answered."""
    return RequestRow(
        request.request_id,
        request.model_id,
        request.rows,
        request.arrival_ns,
        request.slo_ns,
        request.tenant,
        departure_ns,
        outcome,
        weight=request.weight,
    )


def _action_row(sent: Sent, result: Result | None, result_ns: int) -> ActionRow:
    """Make the row of an action that is over; without a result, its worker is lost."""
    command, action = sent.command, sent.command.action
    batch_size = rows = num_requests = expected_duration_ns = 0
    earliest_ns: int | None = None
    latest_ns: int | None = None
    if not isinstance(action, EvictWeights):
        earliest_ns, latest_ns = action.earliest_ns, action.latest_ns
        expected_duration_ns = action.expected_duration_ns
        if isinstance(action, Infer):
            batch_size, rows = action.batch_size, sum(action.rows)
            num_requests = len(command.request_ids)
    error = WORKER_LOST
    if result is not None:
        error = result.error.name if result.error else _NO_ERROR
    return ActionRow(
        action.action_id,
        type(action).__name__,
        command.worker_id,
        action.model_id,
        batch_size,
        rows,
        num_requests,
        sent.sent_ns,
        earliest_ns,
        latest_ns,
        command.expected_begin_ns,
        expected_duration_ns,
        0 if result is None else result.received_ns,
        result_ns,
        error,
        None if result is None else result.load,
        None if result is None else result.input,
        None if result is None else result.exec,
        None if result is None else result.output,
    )
