"""The scheduler against modelled workers in virtual time: the least that closes the loop.

Enough to test the core under load and to time it: lanes that take what the profile says (with seeded
noise), windows enforced, a fixed delay each way, workers that can vanish. No tensors, no threads.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from time import thread_time_ns

from clockwright.actions import ActionError, EvictWeights, Infer, LoadWeights
from clockwright.errors import Refusal
from clockwright.units import ArchitectureId, GpuKind, ModelId, RequestId, WorkerId
from controller.core import Scheduler
from controller.core.events import (
    ActionFailed,
    ActionSucceeded,
    AnswerRequest,
    CloseWorker,
    Event,
    ModelAdded,
    ModelReady,
    RefuseRequest,
    RequestArrived,
    SendAction,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)

Action = LoadWeights | EvictWeights | Infer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledModel:
    """What a model costs."""

    model_id: ModelId
    architecture_id: ArchitectureId
    num_pages: int
    load_ns: int
    exec_ns: dict[int, int]


@dataclass(slots=True)
class ModelledWorker:
    """One GPU: two lanes in order of arrival, pages, residency."""

    worker_id: WorkerId
    free_pages: int
    models: dict[ModelId, ModelledModel]
    resident: dict[ModelId, int] = field(default_factory=dict)
    exec_queue: deque[Infer] = field(default_factory=deque)
    load_queue: deque[LoadWeights] = field(default_factory=deque)
    exec_busy: bool = False
    load_busy: bool = False
    #: Models whose LoadWeights is queued or running.
    loading: set[ModelId] = field(default_factory=set)


class VirtualCluster:
    """A heap of (time, thing to do); the scheduler is called with the virtual time."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        seed: int = 0,
        exec_sigma: float = 0.0,
        delay_ns: int = 100_000,
        after_event: Callable[[], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.now_ns = 0
        self.answers: dict[RequestId, tuple[AnswerRequest, int]] = {}
        self.refusals: dict[RequestId, tuple[RefuseRequest, int]] = {}
        self.deadlines: dict[RequestId, int] = {}
        self.cancelled: set[RequestId] = set()
        self.num_actions = 0
        #: CPU ns inside the scheduler (wall time counts whoever else is on the processor), in all and (when asked for) of each call.
        self.core_ns = 0
        self.costs_ns: list[int] = []
        self.record_cost = False
        self._random = random.Random(seed)
        self._sigma = exec_sigma
        self._delay_ns = delay_ns
        self._after_event = after_event
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._serial = count()
        self._request_ids = count(1)
        self._workers: dict[WorkerId, ModelledWorker] = {}
        self._armed_ns: int | None = None

    # --- setting up --------------------------------------------------------------------------

    def add_worker(self, name: str, num_pages: int, models: list[ModelledModel]) -> WorkerId:
        """Join a worker that has all `models` in host memory."""
        worker_id = WorkerId(name)
        self._workers[worker_id] = ModelledWorker(
            worker_id, num_pages, {model.model_id: model for model in models}
        )
        self.tell(
            WorkerJoined(worker_id=worker_id, gpu_kind=GpuKind("modelled"), num_pages=num_pages)
        )
        for model in models:
            self.tell(
                ModelReady(
                    worker_id=worker_id,
                    model_id=model.model_id,
                    architecture_id=model.architecture_id,
                    num_pages=model.num_pages,
                    load_ns=model.load_ns,
                    exec_ns=model.exec_ns,
                )
            )
        return worker_id

    def add_models(self, models: list[ModelledModel]) -> None:
        """Announce models to the scheduler."""
        for model in models:
            self.tell(ModelAdded(model_id=model.model_id))

    def kill(self, worker_id: WorkerId) -> None:
        """The worker vanishes with all it had."""
        del self._workers[worker_id]
        self.tell(WorkerLost(worker_id=worker_id))

    def request(self, model_id: ModelId, slo_ns: int, *, rows: int = 1) -> RequestId:
        """A request arrives now."""
        request_id = RequestId(next(self._request_ids))
        self.deadlines[request_id] = self.now_ns + slo_ns
        self.tell(
            RequestArrived(
                request_id=request_id,
                model_id=model_id,
                rows=rows,
                arrival_ns=self.now_ns,
                slo_ns=slo_ns,
            )
        )
        return request_id

    def at(self, time_ns: int, action: Callable[[], object]) -> None:
        """Do something at a virtual time."""
        heappush(self._heap, (time_ns, next(self._serial), action))

    # --- running -----------------------------------------------------------------------------

    def run(self, until_ns: int) -> None:
        """Advance virtual time."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns:
            self.now_ns, _, action = heappop(heap)
            action()
        self.now_ns = max(self.now_ns, until_ns)

    def tell(self, event: Event) -> None:
        """Hand the scheduler an event and carry its commands out."""
        begin_ns = thread_time_ns()
        commands = self.scheduler.handle(event, now_ns=self.now_ns)
        wakeup_ns = self.scheduler.next_wakeup_ns()
        cost_ns = thread_time_ns() - begin_ns
        self.core_ns += cost_ns
        if self.record_cost:
            self.costs_ns.append(cost_ns)
        for command in commands:
            if isinstance(command, SendAction):
                self._send(command)
            elif isinstance(command, AnswerRequest):
                self._respond_once(command.request_id)
                self.answers[command.request_id] = command, self.now_ns
            elif isinstance(command, RefuseRequest):
                self._respond_once(command.request_id)
                self.refusals[command.request_id] = command, self.now_ns
            elif isinstance(command, CloseWorker):
                self._workers.pop(command.worker_id, None)
        if wakeup_ns is not None and wakeup_ns != self._armed_ns:
            self._armed_ns = wakeup_ns
            self.at(max(wakeup_ns, self.now_ns), lambda: self._fire(wakeup_ns))
        if self._after_event is not None:
            self._after_event()

    def _respond_once(self, request_id: RequestId) -> None:
        assert request_id not in self.answers, f"request {request_id} was answered already"
        assert request_id not in self.refusals, f"request {request_id} was refused already"

    def _fire(self, armed_ns: int) -> None:
        if self._armed_ns == armed_ns:
            self._armed_ns = None
            self.tell(TimerFired())

    # --- the modelled worker -----------------------------------------------------------------

    def _send(self, command: SendAction) -> None:
        worker = self._workers.get(command.worker_id)
        action = command.action
        self.num_actions += 1
        if worker is not None:
            self.at(self.now_ns + self._delay_ns, lambda: self._receive(worker, action))

    def _receive(self, worker: ModelledWorker, action: Action) -> None:
        if isinstance(action, EvictWeights):
            worker.free_pages += worker.resident.pop(action.model_id)
        elif isinstance(action, LoadWeights):
            worker.load_queue.append(action)
            worker.loading.add(action.model_id)
            self._next_load(worker)
        else:
            worker.exec_queue.append(action)
            self._next_exec(worker)

    def _next_load(self, worker: ModelledWorker) -> None:
        while worker.load_queue and not worker.load_busy:
            action = worker.load_queue.popleft()
            model = worker.models[action.model_id]
            if self.now_ns > action.latest_ns:
                worker.loading.discard(action.model_id)
                self._fail(worker, action, ActionError.TOO_LATE)
                continue
            assert worker.free_pages >= model.num_pages, "pages oversubscribed"
            worker.free_pages -= model.num_pages
            worker.load_busy = True
            begin_ns, end_ns = self.now_ns, self.now_ns + model.load_ns

            def done(
                action: LoadWeights = action,
                begin_ns: int = begin_ns,
                end_ns: int = end_ns,
                num_pages: int = model.num_pages,
            ) -> None:
                worker.load_busy = False
                worker.loading.discard(action.model_id)
                worker.resident[action.model_id] = num_pages
                self._succeed(worker, action, begin_ns, end_ns)
                self._next_load(worker)
                self._next_exec(worker)

            self.at(end_ns, done)

    def _next_exec(self, worker: ModelledWorker) -> None:
        while worker.exec_queue and not worker.exec_busy:
            action = worker.exec_queue[0]
            if action.model_id in worker.loading:
                return  # its LoadWeights is still at work
            worker.exec_queue.popleft()
            if self.now_ns > action.latest_ns:
                self._fail(worker, action, ActionError.TOO_LATE)
                continue
            if action.model_id not in worker.resident:
                self._fail(worker, action, ActionError.NOT_RESIDENT)
                continue
            assert sum(action.rows) <= action.batch_size
            worker.exec_busy = True
            duration_ns = worker.models[action.model_id].exec_ns[action.batch_size]
            if self._sigma:
                duration_ns = int(duration_ns * self._random.lognormvariate(0, self._sigma))
            begin_ns, end_ns = self.now_ns, self.now_ns + duration_ns

            def done(
                action: Infer = action, begin_ns: int = begin_ns, end_ns: int = end_ns
            ) -> None:
                worker.exec_busy = False
                assert action.model_id in worker.resident, "evicted while it ran"
                self._succeed(worker, action, begin_ns, end_ns)
                self._next_exec(worker)

            self.at(end_ns, done)

    def _succeed(
        self, worker: ModelledWorker, action: LoadWeights | Infer, begin_ns: int, end_ns: int
    ) -> None:
        event = ActionSucceeded(
            worker_id=worker.worker_id,
            action_id=action.action_id,
            begin_ns=begin_ns,
            end_ns=end_ns,
            duration_ns=end_ns - begin_ns,
        )
        self.at(self.now_ns + self._delay_ns, lambda: self._report(worker, event))

    def _fail(
        self, worker: ModelledWorker, action: LoadWeights | Infer, error: ActionError
    ) -> None:
        event = ActionFailed(worker_id=worker.worker_id, action_id=action.action_id, error=error)
        self.at(self.now_ns + self._delay_ns, lambda: self._report(worker, event))

    def _report(self, worker: ModelledWorker, event: Event) -> None:
        if self._workers.get(worker.worker_id) is worker:
            self.tell(event)

    # --- what came of it ---------------------------------------------------------------------

    def num_in_time(self) -> int:
        """Requests answered by their deadline."""
        return sum(at <= self.deadlines[request] for request, (_, at) in self.answers.items())

    def refusal_counts(self) -> dict[Refusal, int]:
        """How often each reason was given."""
        counts: dict[Refusal, int] = {}
        for command, _ in self.refusals.values():
            counts[command.refusal] = counts.get(command.refusal, 0) + 1
        return counts
