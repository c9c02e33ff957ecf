"""The live shell: a clock, the one timer, those who wait, and links to workers.

Everything runs in one event loop thread. Whatever happens becomes an event in the ledger, which hands
it to the scheduler and has the commands carried out here. Nothing else calls the scheduler.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clockwright.actions import ActionError, Result
from clockwright.bulk import Buffer
from clockwright.errors import Refusal, RefusedError
from clockwright.units import NS_PER_S, ActionId, ModelId, RequestId, WorkerId
from controller.core import ClusterLoad, HeldPages, ModelStatistics, Scheduler, Statistics
from controller.core.events import (
    AdmissionClosed,
    AnswerRequest,
    ClockSeen,
    Event,
    ModelWanted,
    RefuseRequest,
    RequestArrived,
    RequestsArrived,
    WorkerDraining,
    WorkerJoined,
)
from controller.core.forecast import Forecast
from controller.ledger import Finished, Ledger, Sent
from controller.parties import Link, Waiter
from controller.past_requests import PastRequests
from controller.telemetry import Telemetry

# Takes the outputs of one request.
_TakeOutputs = Callable[[Sequence[Buffer]], object]


@dataclass(slots=True)
class Answer:
    """The outputs of a request, and what was told of it on its way.

    All times are on the controller's clock.
    """

    #: Tensor bytes per output, in the model's order.
    outputs: Sequence[Buffer]
    request: RequestArrived
    command: AnswerRequest
    #: The Infer that answered it, with the others of its batch.
    finished: Finished
    #: When this answer was made.
    departure_ns: int


class NoAnswerError(RefusedError):
    """The scheduler refused a request, or its answer came too late.

    It carries figures; the sentence about them is the front end's (`controller.front.refusals`).
    """

    def __init__(
        self, refusal: Refusal, model_id: ModelId, figures: dict[str, int], *, detail: str = ""
    ) -> None:
        """Refuse a request.

        Args:
            refusal: why.
            model_id: what was asked.
            figures: the times that led to it, in ns, by name.
            detail: what the figures do not say: the engine's words, for example.
        """
        super().__init__(refusal, f"model {model_id}", figures=figures)
        self.model_id = model_id
        self.detail = detail


# What is kept of a request until it is closed: its inputs, its waiter, who takes its outputs whenever they come
# (None: nobody wants them but in time), and what its client calls it, which may be empty.
_Waiting = tuple[Sequence[Buffer], Waiter, _TakeOutputs | None, str]


class Runtime:
    """Lets a scheduler serve: carries out what it decides, and tells it what became of that."""

    def __init__(
        self,
        scheduler: Scheduler,
        telemetry: Telemetry,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Serve with a scheduler that has heard of nothing yet.

        Args:
            scheduler: decides.
            telemetry: takes a row per request and action.
            clock: the present in ns; the event loop's timers run at its pace.
        """
        self.telemetry = telemetry
        #: What is known of requests that are over, beside their rows in telemetry.
        self.past = PastRequests()
        #: The controller's clock, for everybody who lives with this runtime.
        self.clock = clock
        #: No requests are admitted any more.
        self.draining = False
        #: How long what is read now may have waited for this process, in ns.
        self.unread_ns: Callable[[], int] = lambda: 0
        self._scheduler = scheduler
        self._ledger: Ledger[Link, _Waiting] = Ledger(
            scheduler,
            clock=clock,
            telemetry=telemetry,
            send=self._send,
            withdraw_action=_withdraw_action,
            answer=self._answer,
            refuse=self._refuse,
            forget=_forget,
            close=self._close,
            settled=self._settled,
            arm=self._arm,
        )
        #: By action under way: who wants its outputs even if they are late, with the numbers of their requests.
        self._late: dict[ActionId, list[tuple[int, _TakeOutputs]]] = {}
        self._last_request_id = 0
        #: In this turn of the event loop.
        self._arrived: list[RequestArrived] = []
        # The links that actions were sent on while arrivals are told; None: none are.
        self._sent_to: list[Link] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle: asyncio.Future[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Requests without an answer yet."""
        return len(self._ledger.requests)

    def time_to_last_deadline_ns(self, model_id: ModelId) -> int:
        """How long until no request that waits now for a model can wait any more; 0 if none does."""
        deadlines_ns = (
            request.arrival_ns + request.slo_ns
            for request, _ in self._ledger.requests.values()
            if request.model_id == model_id
        )
        return max(0, max(deadlines_ns, default=0) - self.clock())

    def statistics(self) -> Statistics:
        """What the scheduler believes now; linear in models and workers."""
        return self._scheduler.statistics(self.clock())

    def cluster_load(self) -> ClusterLoad:
        """What all workers have to do now; linear in workers, and hardly in models."""
        return self._scheduler.cluster_load(self.clock())

    def held_pages(self) -> dict[WorkerId, list[HeldPages]]:
        """What fills the pages of each worker; linear in copies."""
        return self._scheduler.held_pages()

    def model_statistics(self, model_id: ModelId) -> ModelStatistics | None:
        """One model's row of `statistics`; None: there is no such model."""
        return self._scheduler.model_statistics(model_id)

    def backlogs(self, model_ids: Sequence[ModelId]) -> list[tuple[int, int]]:
        """How many requests wait for each of some models, not sent yet, and how many workers hold its weights."""
        return self._scheduler.backlogs(model_ids)

    # --- requests -----------------------------------------------------------------------------

    def ask(
        self,
        waiter: Waiter,
        model_id: ModelId,
        inputs: Sequence[Buffer],
        *,
        rows: int = 1,
        arrival_ns: int,
        slo_ns: int,
        tenant: str = "",
        late: _TakeOutputs | None = None,
        name: str = "",
    ) -> RequestId:
        """Have a waiter told the answer, or why there is none inside the SLO.

        Args:
            waiter: told in a later turn of the event loop.
            model_id: the id that the catalogue gives, which is not always the public name.
            inputs: tensor bytes per input, in the model's order. Kept, not copied, until the request
                is closed.
            rows: 1 to the model's largest batch size.
            arrival_ns: when its first bytes came, by `clock()`.
            slo_ns: the answer is due this long after.
            tenant: whose it is; empty: nobody's in particular.
            late: takes the outputs of a batch that was sent for the request, also when the request was
                withdrawn or refused before they came.
            name: what its client calls it; may be empty.

        Returns:
            What `withdraw` takes.
        """
        self._last_request_id += 1
        request_id = RequestId(self._last_request_id)
        request = RequestArrived(
            request_id=request_id,
            model_id=model_id,
            rows=rows,
            arrival_ns=arrival_ns,
            slo_ns=slo_ns,
            tenant=tenant,
            num_bytes=sum(map(len, inputs)),
        )
        self._ledger.open(request, (inputs, waiter, late, name))
        if name:
            self.past.named(name, request_id, tenant)
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._tell_arrivals)
        self._arrived.append(request)
        return request_id

    @property
    def last_id(self) -> RequestId:
        """The number of the request that came last."""
        return RequestId(self._last_request_id)

    def number_query(self) -> RequestId:
        """Give a query to an application a number among those of requests; the scheduler does not hear of it."""
        self._last_request_id += 1
        return self.last_id

    def find_open(self, request_id: RequestId) -> tuple[RequestArrived, ActionId | None] | None:
        """Find a request without an answer yet, and the Infer that it is in; None: there is none."""
        entry = self._ledger.requests.get(request_id)
        return None if entry is None else (entry[0], self._ledger.action_of(request_id))

    def withdraw(self, request_id: RequestId) -> None:
        """Nobody waits any more: what has not been sent to a worker never will be. Its waiter hears nothing."""
        self._ledger.withdraw(request_id)

    def submit(
        self,
        model_id: ModelId,
        inputs: Sequence[Buffer],
        *,
        rows: int = 1,
        arrival_ns: int,
        slo_ns: int,
        tenant: str = "",
        late: _TakeOutputs | None = None,
        name: str = "",
    ) -> asyncio.Future[Answer]:
        """Ask for an answer inside the SLO; the arguments are those of `ask`.

        Cancelling the future, or the task that awaits it, withdraws the request.

        Returns:
            A future of the answer, which was in time when the future was resolved.

        Raises:
            NoAnswerError: (through the future) why there is no answer in time.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        request_id = self.ask(
            future,
            model_id,
            inputs,
            rows=rows,
            arrival_ns=arrival_ns,
            slo_ns=slo_ns,
            tenant=tenant,
            late=late,
            name=name,
        )
        future.add_done_callback(functools.partial(self._withdraw_if_cancelled, request_id))
        return future

    def forecast(
        self,
        model_ids: Sequence[ModelId],
        *,
        rows: int,
        arrival_ns: int,
        slo_ns: int,
        together: bool,
        num_bytes: int,
    ) -> list[Forecast]:
        """Predict what a request to each of some models would come to; see `Scheduler`."""
        return self._scheduler.forecast(
            model_ids,
            rows=rows,
            arrival_ns=arrival_ns,
            slo_ns=slo_ns,
            now_ns=self.clock(),
            together=together,
            num_bytes=num_bytes,
        )

    def want(self, model_id: ModelId) -> None:
        """A cold model was left out of an answer; the next query shall find it loaded."""
        self.tell(ModelWanted(model_id=model_id))

    def _tell_arrivals(self) -> None:
        """Tell the scheduler of all requests that arrived in this turn of the event loop at once.

        So that they can form a batch: under load a turn brings several.
        """
        arrived, self._arrived = self._arrived, []
        waiting = self._ledger.requests
        # Some are withdrawn already; a future that was cancelled in this turn says so in the next.
        requests = tuple(
            [
                request
                for request in arrived
                if (entry := waiting.get(request.request_id)) and not entry[1][1].done()
            ]
        )
        if not requests:
            return
        # What they lead to is all that is sent in this turn, as a rule: another one only to send it costs more.
        sent_to: list[Link] = []
        self._sent_to = sent_to
        try:
            if len(requests) == 1:
                self.tell(requests[0])
            else:
                self.tell(RequestsArrived(requests=requests))
        finally:
            self._sent_to = None
            # The second time for a link there is nothing left.
            for link in sent_to:
                link.flush(now=True)

    def _withdraw_if_cancelled(self, request_id: RequestId, future: asyncio.Future[Answer]) -> None:
        if future.cancelled():
            self._ledger.withdraw(request_id)

    def close_admission(self) -> None:
        """Refuse what arrives from now on; what is admitted is finished."""
        self.draining = True
        self.tell(AdmissionClosed())

    async def wait_idle(self) -> None:
        """Wait until no request waits and no action is under way."""
        while not self._ledger.is_idle:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    # --- workers ------------------------------------------------------------------------------

    def worker_joined(self, link: Link, event: WorkerJoined) -> None:
        """Start to use a worker; its id is not in use."""
        self._ledger.join(link, event)

    def clock_seen(self, worker_id: WorkerId, clock_mhz: int) -> None:
        """A worker has looked at its GPU's clock."""
        if self._ledger.link_of(worker_id) is not None:
            self.tell(ClockSeen(worker_id=worker_id, clock_mhz=clock_mhz))

    def drain_worker(self, worker_id: WorkerId) -> None:
        """Send a worker nothing new; its link is closed when all it has is answered."""
        if self._ledger.link_of(worker_id) is not None:
            self.tell(WorkerDraining(worker_id=worker_id))

    def worker_lost(self, worker_id: WorkerId) -> None:
        """A worker's link ended. Does nothing when the scheduler has let it go before."""
        self._forget_late(self._ledger.lose(worker_id))

    def action_finished(
        self, worker_id: WorkerId, result: Result, outputs: Sequence[Buffer]
    ) -> None:
        """Take in a result; `outputs` is per request, per output tensor.

        Raises:
            ProtocolError: the worker was not sent this action, or the result lacks something.
        """
        sent = self._ledger.finish(worker_id, result, outputs, unread_ns=self.unread_ns())
        if sent is None or not self._late:
            return
        wanted = self._late.pop(result.action_id, ())
        if result.error is ActionError.NONE:
            num_outputs = len(outputs) // max(len(sent.command.request_ids), 1)
            for index, late in wanted:
                late(outputs[index * num_outputs : (index + 1) * num_outputs])

    # --- events and commands ------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Tell the scheduler what happened and do what it says."""
        self._ledger.tell(event)

    def _send(self, link: Link, sent: Sent) -> None:
        waiting = self._ledger.requests
        payload: list[Buffer] = []
        action = sent.command.action
        for index, request_id in enumerate(sent.command.request_ids):
            inputs, _, late, _ = waiting[request_id][1]
            payload += inputs
            if late is not None:
                self._late.setdefault(action.action_id, []).append((index, late))
        link.send(action, payload)
        if self._sent_to is None:
            link.flush(now=False)
        elif not self._sent_to or self._sent_to[-1] is not link:
            self._sent_to.append(link)

    def _close(self, link: Link, reason: str, lost: Sequence[Sent]) -> None:
        self._forget_late(lost)
        link.close(reason)

    def _forget_late(self, lost: Sequence[Sent]) -> None:
        for sent in lost:
            self._late.pop(sent.command.action.action_id, None)

    def _answer(
        self,
        request: RequestArrived,
        waiting: _Waiting,
        command: AnswerRequest,
        finished: Finished,
        departure_ns: int,
        in_time: bool,
    ) -> None:
        waiter = waiting[1]
        if waiter.done():
            return
        if not in_time:
            error = late_error(
                request.model_id,
                slo_ns=request.slo_ns,
                latency_ns=departure_ns - request.arrival_ns,
                expected_latency_ns=command.expected_departure_ns - request.arrival_ns,
            )
            error.figures["request_id"] = request.request_id
            waiter.set_exception(error)
            return
        num_outputs = len(finished.outputs) // len(finished.sent.command.request_ids)
        first = command.index * num_outputs
        outputs = finished.outputs[first : first + num_outputs]
        waiter.set_result(Answer(outputs, request, command, finished, departure_ns))

    def _refuse(
        self, request: RequestArrived, waiting: _Waiting, command: RefuseRequest, now_ns: int
    ) -> None:
        _, waiter, _, name = waiting
        if waiter.done():
            return
        obstacles = self._scheduler.obstacles(request, command)
        action_id = None
        if command.refusal is Refusal.LATE:
            action_id = self._ledger.action_of(request.request_id)
        self.past.refused(name, request, command, obstacles, action_id, now_ns)
        error = refused_error(command)
        error.figures["request_id"] = request.request_id
        remedy = obstacles.remedy
        if remedy.slo_ns:
            error.figures["enough_slo_ns"] = remedy.slo_ns
        if remedy.more_workers:
            error.figures["more_workers"] = remedy.more_workers
        if obstacles.pinning:
            error.figures["pinning"] = 1
        waiter.set_exception(error)

    def _settled(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    # --- the timer ----------------------------------------------------------------------------

    def _arm(self, wakeup_ns: int) -> int:
        if self._timer is not None:
            self._timer.cancel()
        # Event loops keep time in milliseconds, and uvloop rounds to the nearest: round up here, or
        # it fires too early and has to be armed again.
        delay_ms = max(1, math.ceil((wakeup_ns - self.clock()) * 1000 / NS_PER_S))
        self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._fire)
        return wakeup_ns

    def _fire(self) -> None:
        self._timer = None
        self._ledger.fire()


def _withdraw_action(link: Link, action_id: ActionId) -> None:
    link.withdraw_action(action_id)


def _forget(link: Link, model_id: ModelId) -> None:
    link.forget_model(model_id)


def late_error(
    model_id: ModelId, *, slo_ns: int, latency_ns: int, expected_latency_ns: int
) -> NoAnswerError:
    """An answer was ready only after its deadline."""
    figures = {
        "slo_ns": slo_ns,
        "latency_ns": latency_ns,
        "expected_latency_ns": expected_latency_ns,
    }
    return NoAnswerError(Refusal.LATE, model_id, figures)


def refused_error(refused: RefuseRequest) -> NoAnswerError:
    """The scheduler refused a request; the figures are what it predicted."""
    figures = {
        "slo_ns": refused.slo_ns,
        "load_ns": refused.load_ns,
        "exec_ns": refused.exec_ns,
        "queue_ns": refused.queue_ns,
        "margin_ns": refused.margin_ns,
    }
    return NoAnswerError(refused.refusal, refused.model_id, figures, detail=refused.detail)
