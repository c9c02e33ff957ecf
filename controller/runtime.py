"""The live shell: a clock, one timer, the requests that wait, and links to workers.

Everything runs in one event loop thread. Whatever happens becomes an event in the ledger, which hands
it to the scheduler and has the commands carried out here. Nothing else calls the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

from clockwright.errors import Refusal
from clockwright.units import NS_PER_S, ActionId, GpuKind, ModelId, RequestId, WorkerId
from clockwright.wire.actions import ActionError, Infer, Result
from clockwright.wire.bulk import Buffer
from controller.core import (
    ClusterLoad,
    HeldPages,
    ModelStatistics,
    ModelTimes,
    Outlook,
    Scheduler,
    Statistics,
)
from controller.core.events import (
    AdmissionClosed,
    AnswerRequest,
    ClockSeen,
    Event,
    LearnedLink,
    LearnedStart,
    LearnedTimes,
    ModelWanted,
    RefuseRequest,
    RequestArrived,
    RequestsArrived,
    TurnedAway,
    WorkerDraining,
    WorkerJoined,
)
from controller.core.forecast import Forecast
from controller.core.leaving import Leaving
from controller.ledger import Finished, Ledger, Sent
from controller.port import Answered, Ask, Course, Link, Refused, Sink, Told
from controller.telemetry.journey import Journey, where_it_went
from controller.telemetry.past_requests import PastRequests
from controller.telemetry.rows import RequestRow
from controller.telemetry.tables import Telemetry

log = logging.getLogger(__name__)

# Takes the outputs of one request.
_TakeOutputs = Callable[[Sequence[Buffer]], object]


# What is kept of a request until it is closed: the question, its inputs, its sink, and the function that takes its
# outputs even when they are late (None: late outputs are dropped).
_Waiting = tuple[Ask, Sequence[Buffer], Sink, _TakeOutputs | None]


class Runtime:
    """Drives a scheduler: carries out its commands, and feeds it their results as events."""

    def __init__(
        self,
        scheduler: Scheduler,
        telemetry: Telemetry,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Serve with a scheduler that has heard of nothing yet; the event loop's timers run at the clock's pace."""
        self.telemetry = telemetry
        #: Records of closed requests, in addition to their rows in telemetry.
        self.past = PastRequests()
        #: The controller's clock, shared by all that works with this runtime.
        self.clock = clock
        #: Requests are about to be refused, or are.
        self.draining = False
        #: They are, but for those of pipelines that are under way.
        self.closing = False
        self._num_pipelines = 0
        #: How long what is read now may have waited for this process, in ns.
        self.unread_ns: Callable[[], int] = lambda: 0
        #: Whether the event loop has no time to spare.
        self.is_pressed: Callable[[], bool] = lambda: False
        #: Has answers leave that would leave at the end of this turn.
        self.answers_leave: Callable[[], object] = lambda: None
        self._scheduler = scheduler
        self._ledger: Ledger[Link, _Waiting] = Ledger(
            scheduler,
            clock=clock,
            telemetry=telemetry,
            send=self._send,
            withdraw_action=_withdraw_action,
            write_off=self._write_off,
            answer=self._answer,
            refuse=self._refuse,
            forget=_forget,
            close=self._close,
            settled=self._settled,
            arm=self._arm,
        )
        #: By action under way: functions that take its outputs even when late, with their requests' numbers.
        self._late: dict[ActionId, list[tuple[int, _TakeOutputs]]] = {}
        self._last_request_id = 0
        #: In this turn of the event loop.
        self._arrived: list[RequestArrived] = []
        #: In this turn, by model: the deadline of each row that was found not to be in vain, in order.
        self._about_to_ask: dict[ModelId, list[int]] = {}
        #: Requests among them whose clients ask for certainty, and within which time.
        self._deciding: list[tuple[RequestId, int]] = []
        # The links that actions were sent on while the scheduler is told of arrivals, else None.
        self._sent_to: dict[Link, None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle: asyncio.Future[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Requests without an answer yet."""
        return len(self._ledger.requests)

    def share_with_devices(self) -> float:
        """The part of the open requests that a device is to answer before this process can."""
        return self._scheduler.share_with_devices(self.clock())

    def time_to_last_deadline_ns(self, model_id: ModelId) -> int:
        """Time until the last deadline of the requests that wait for a model. 0 if none waits."""
        deadlines_ns = (
            request.arrival_ns + request.slo_ns
            for request, _ in self._ledger.requests.values()
            if request.model_id == model_id
        )
        return max(0, max(deadlines_ns, default=0) - self.clock())

    def statistics(self) -> Statistics:
        """A snapshot of the scheduler's state. Takes O(models + workers)."""
        return self._scheduler.statistics(self.clock())

    def cluster_load(self) -> ClusterLoad:
        """The work of all workers now, summed up. Takes O(workers)."""
        return self._scheduler.cluster_load(self.clock())

    def cheapest_to_lose(self, gpu_kind: GpuKind) -> Leaving:
        """The worker of a kind that should leave first; see `Scheduler`."""
        return self._scheduler.cheapest_to_lose(gpu_kind, self.clock())

    def why_not_without(self, worker_id: WorkerId) -> str:
        """Say what would have no worker without one that is there; empty: nothing."""
        return self._scheduler.why_not_without(worker_id)

    def outlook(self, slos_ns: Sequence[int]) -> Outlook:
        """How soon the lanes could begin requests with some SLOs. Takes O(models + workers)."""
        return self._scheduler.outlook(slos_ns, self.clock())

    def model_times(self) -> dict[ModelId, ModelTimes]:
        """What a row of each model takes, and its weights if they are not resident. Takes O(models + copies)."""
        return self._scheduler.model_times()

    def held_pages(self) -> dict[WorkerId, list[HeldPages]]:
        """The models in the pages of each worker. Takes O(copies)."""
        return self._scheduler.held_pages()

    def model_statistics(self, model_id: ModelId) -> ModelStatistics | None:
        """One model's row of `statistics`. Returns None if there is no such model."""
        return self._scheduler.model_statistics(model_id)

    def learned_times(self) -> Iterator[LearnedTimes | None]:
        """What the scheduler has learned of actions; see `Scheduler`."""
        return self._scheduler.learned_times()

    def learned_links(self) -> list[LearnedLink]:
        """What it has learned of workers' links."""
        return self._scheduler.learned_links()

    def learned_starts(self) -> list[LearnedStart]:
        """What it has learned of how long workers take to start."""
        return self._scheduler.learned_starts()

    def backlogs(self, model_ids: Sequence[ModelId]) -> list[tuple[int, int]]:
        """For each model: how many requests wait, not sent yet, and how many workers hold its weights."""
        return self._scheduler.backlogs(model_ids)

    # --- requests -----------------------------------------------------------------------------

    def ask(
        self,
        model_id: ModelId,
        ask: Ask,
        inputs: Sequence[Buffer],
        sink: Sink,
        late: _TakeOutputs | None = None,
    ) -> RequestId:
        """Ask for an answer inside the SLO. The sink gets the answer, or the reason of its refusal, in a later turn.

        The id is the catalogue's, which is not always the public name. Inputs are kept, not copied, until the request
        is closed. `late` takes the outputs of a batch that was sent for the request, also when it was withdrawn or
        refused before they came. Returns what `withdraw` takes.
        """
        request_id = self.number(ask)
        request = RequestArrived(
            request_id=request_id,
            model_id=model_id,
            rows=ask.rows,
            arrival_ns=ask.arrival_ns,
            slo_ns=ask.slo_ns,
            tenant=ask.tenant,
            num_bytes=sum(map(len, inputs)),
            weight=ask.weight,
            work_ahead_ns=ask.work_ahead_ns,
        )
        self._ledger.open(request, (ask, inputs, sink, late))
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._tell_arrivals)
        self._arrived.append(request)
        if ask.decide_within_ns:
            self._deciding.append((request_id, ask.decide_within_ns))
        return request_id

    def new_number(self) -> RequestId:
        """Give a request a number, also one that does not reach the scheduler."""
        self._last_request_id += 1
        return RequestId(self._last_request_id)

    def margin_ns(self, slo_ns: int) -> int:
        """The part of an SLO that is kept free behind the predicted end of a run; see `Scheduler`."""
        return self._scheduler.margin_ns(slo_ns, self.clock())

    def refused_at_door(self, ask: Ask, name: str, told: Refused, remedy: str) -> None:
        """Count a refusal that does not reach the scheduler, and record it (`PastRequests.refused_at_door`)."""
        self.telemetry.refused_at_door(told.refusal)
        self.past.refused_at_door(ask, name, self.clock(), told, remedy)

    def number(self, ask: Ask) -> RequestId:
        """Give a request a number, and keep its client's name for it."""
        request_id = self.new_number()
        if ask.name:
            self.past.named(ask.name, request_id, ask.tenant)
        return request_id

    def find_open(self, request_id: RequestId) -> tuple[RequestArrived, ActionId | None] | None:
        """Find an open request, and the Infer that it is in. Returns None if it is not open."""
        entry = self._ledger.requests.get(request_id)
        return None if entry is None else (entry[0], self._ledger.action_of(request_id))

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a request: it is not sent to a worker any more, and its sink is not called."""
        self._ledger.withdraw(request_id)

    def forecast(
        self,
        model_ids: Sequence[ModelId],
        ask: Ask,
        *,
        num_bytes: int,
        together: bool,
    ) -> list[Forecast]:
        """Predict the answer of a request to each of some models, with inputs of this size; see `Scheduler`."""
        return self._scheduler.forecast(
            model_ids,
            rows=ask.rows,
            arrival_ns=ask.arrival_ns,
            slo_ns=ask.slo_ns,
            now_ns=self.clock(),
            together=together,
            num_bytes=num_bytes,
        )

    def is_in_vain(self, request: RequestArrived) -> bool:
        """Say whether a request that arrived now would be refused as `OVERLOADED`; see `Scheduler`.

        One that would not is to be asked in this turn of the event loop, and counts for those that are judged after it.
        """
        deadline_ns = request.arrival_ns + request.slo_ns
        about_to_ask = self._about_to_ask
        before = about_to_ask.get(request.model_id, [])
        behind_rows = bisect_right(before, deadline_ns)
        now_ns = self.clock()
        in_vain = self._scheduler.is_in_vain(request, behind_rows=behind_rows, now_ns=now_ns)
        if in_vain is False:
            if not about_to_ask:
                asyncio.get_running_loop().call_soon(about_to_ask.clear)
            before[behind_rows:behind_rows] = [deadline_ns] * request.rows
            about_to_ask[request.model_id] = before
        return bool(in_vain)

    def turned_away(self, request: RequestArrived, number: int) -> None:
        """Take in that so many requests like this one were refused because they were in vain. They have no numbers."""
        now_ns = self.clock()
        row = RequestRow(
            request.request_id,
            request.model_id,
            request.rows,
            request.arrival_ns,
            request.slo_ns,
            departure_ns=now_ns,
            outcome=Refusal.OVERLOADED.value,
        )
        for _ in range(number):
            self.telemetry.add_request(row)
        self.tell(TurnedAway(request=request, number=number))

    def want(self, model_id: ModelId, until_ns: int = 0) -> None:
        """Load a cold model that is about to be asked; see `ModelWanted`."""
        self.tell(ModelWanted(model_id=model_id, until_ns=until_ns))

    def _tell_arrivals(self) -> None:
        """Tell the scheduler of all requests that arrived in this turn of the event loop at once.

        So that they can form a batch: under load a turn brings several.
        """
        arrived, self._arrived = self._arrived, []
        waiting = self._ledger.requests
        # Some may be withdrawn already.
        requests = tuple([each for each in arrived if each.request_id in waiting])
        if not requests:
            return
        # As a rule all actions of this turn are sent here. Another turn only to send them would cost more.
        self._sent_to = {}
        try:
            if len(requests) == 1:
                self.tell(requests[0])
            else:
                self.tell(RequestsArrived(requests=requests))
            if self._deciding:
                deciding, self._deciding = self._deciding, []
                for request_id, within_ns in deciding:
                    self._ledger.decide(request_id, within_ns)
        finally:
            sent_to = self._flush()
        if sent_to and self.is_pressed():
            # Results that are there already are answered before more is read, which takes a large part of a short SLO.
            self._sent_to = {}
            for link in sent_to:
                link.look()
            self._flush()
            self.answers_leave()

    def _flush(self) -> Iterable[Link]:
        """Have what was sent leave on each link; returns those."""
        sent_to, self._sent_to = self._sent_to or {}, None
        for link in sent_to:
            link.flush(now=True)
        return sent_to

    @property
    def predicts(self) -> bool:
        """Whether requests are refused that are predicted to be late."""
        return self._scheduler.predicts

    def pipeline_begun(self) -> None:
        """A request is admitted that will ask several models."""
        self._num_pipelines += 1

    def pipeline_over(self) -> None:
        """It asks no more."""
        self._num_pipelines -= 1
        if self.closing and not self._num_pipelines:
            self.tell(AdmissionClosed())

    def close_admission(self) -> None:
        """Refuse new requests. Admitted ones are finished: those of pipelines under way, before others are refused."""
        self.draining = self.closing = True
        if not self._num_pipelines:
            self.tell(AdmissionClosed())

    async def wait_idle(self) -> None:
        """Wait until no request waits and no action is under way."""
        while not self._ledger.is_idle or self._num_pipelines:
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

        Raises ProtocolError if the worker was not sent this action, or the result lacks something.
        """
        sent = self._ledger.finish(worker_id, result, outputs, unread_ns=self.unread_ns())
        if sent is None or not self._late:
            return
        wanted = self._late.pop(result.action_id, ())
        if result.error is ActionError.NONE:
            num_outputs = len(outputs) // max(len(sent.command.request_ids), 1)
            for index, late in wanted:
                if result.failed and index in result.failed:
                    continue
                late(outputs[index * num_outputs : (index + 1) * num_outputs])

    # --- events and commands ------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Tell the scheduler what happened and do what it says."""
        self._ledger.tell(event)

    def _send(self, link: Link, sent: Sent) -> None:
        payload: list[Buffer] = []
        action = sent.command.action
        for index, request_id in enumerate(sent.command.request_ids):
            _, inputs, _, late = self._ledger.kept_to_send(request_id)
            payload += inputs
            if late is not None:
                self._late.setdefault(action.action_id, []).append((index, late))
        link.send(action, payload)
        if self._sent_to is None:
            link.flush(now=False)
        else:
            self._sent_to[link] = None

    def _write_off(self, link: Link, sent: Sent) -> None:
        self._forget_late([sent])
        link.write_off(sent.command.action.action_id)

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
        ask, _, sink, _ = waiting
        if not in_time:
            latency_ns = departure_ns - request.arrival_ns
            expected_ns = command.expected_departure_ns - request.arrival_ns
            figures = late_figures(request.slo_ns, latency_ns, expected_ns)
            figures["request_id"] = request.request_id
            _tell(sink, request.request_id, Refused(Refusal.LATE, figures), ())
            return
        num_outputs = len(finished.outputs) // len(finished.sent.command.request_ids)
        first = command.index * num_outputs
        outputs = finished.outputs[first : first + num_outputs]
        told = Answered(command.expected_departure_ns)
        if ask.explain or ask.traced:
            told.course = course_of(request, command, finished, departure_ns)
            if ask.decide_within_ns:
                decided_ns = self._ledger.decided_ns(request.request_id, finished.sent.sent_ns)
                told.course.decided_ns = decided_ns - request.arrival_ns
        _tell(sink, request.request_id, told, outputs)

    def _refuse(
        self, request: RequestArrived, waiting: _Waiting, command: RefuseRequest, now_ns: int
    ) -> None:
        ask, _, sink, _ = waiting
        obstacles = self._scheduler.obstacles(request, command)
        action_id = None
        if command.refusal is Refusal.LATE:
            action_id = self._ledger.action_of(request.request_id)
        self.past.refused(ask.name, request, command, obstacles, action_id, now_ns)
        figures = refused_figures(command)
        figures["request_id"] = request.request_id
        remedy = obstacles.remedy
        if remedy.slo_ns:
            figures["enough_slo_ns"] = remedy.slo_ns
        if remedy.more_workers:
            figures["more_workers"] = remedy.more_workers
        if obstacles.pinning:
            figures["pinning"] = 1
        _tell(sink, request.request_id, Refused(command.refusal, figures, command.detail), ())

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


def _tell(sink: Sink, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
    """Tell a sink. A bug in it costs its own request only, not the event's other commands or the worker."""
    try:
        sink.told(request_id, told, outputs)
    except Exception:
        log.exception("request %d: its sink failed", request_id)


def _withdraw_action(link: Link, action_id: ActionId) -> None:
    link.withdraw_action(action_id)


def _forget(link: Link, model_id: ModelId) -> None:
    link.forget_model(model_id)


def late_figures(slo_ns: int, latency_ns: int, expected_latency_ns: int) -> dict[str, int]:
    """Say that an answer was ready only after its deadline."""
    return {
        "slo_ns": slo_ns,
        "latency_ns": latency_ns,
        "expected_latency_ns": expected_latency_ns,
    }


def refused_figures(refused: RefuseRequest) -> dict[str, int]:
    """Say what the scheduler predicted when it refused a request."""
    return {
        "slo_ns": refused.slo_ns,
        "load_ns": refused.load_ns,
        "exec_ns": refused.exec_ns,
        "queue_ns": refused.queue_ns,
        "margin_ns": refused.margin_ns,
    }


def course_of(
    request: RequestArrived, command: AnswerRequest, finished: Finished, departure_ns: int
) -> Course:
    """Say where the time of an answer went, which was made at `departure_ns`."""
    result, infer, arrival_ns = finished.result, finished.sent.command.action, request.arrival_ns
    assert isinstance(infer, Infer)
    load = finished.load if command.cold else None
    parts_ns = where_it_went(
        Journey(
            arrival_ns=arrival_ns,
            sent_ns=finished.sent.sent_ns,
            received_ns=result.received_ns,
            result_ns=finished.result_ns,
            departure_ns=departure_ns,
            load=load,
            input=result.input,
            exec=result.exec,
            output=result.output,
        )
    )
    run = result.exec
    return Course(
        *parts_ns,
        0 if load is None else load.begin_ns - arrival_ns,
        0 if load is None else load.end_ns - arrival_ns,
        finished.result_ns - arrival_ns if run is None else run.begin_ns - arrival_ns,
        finished.result_ns - arrival_ns if run is None else run.end_ns - arrival_ns,
        departure_ns - arrival_ns,
        command.expected_departure_ns - arrival_ns,
        infer.expected_duration_ns,
        command.batch_size,
        command.worker_id,
        command.cold,
        request.request_id,
        command.action_id,
    )
