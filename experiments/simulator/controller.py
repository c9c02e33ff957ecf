"""The production scheduler and ledger on virtual time: what `controller.runtime` is live."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, GpuKind, ModelId, RequestId
from clockwright.wire.actions import Infer, LoadWeights, Result
from controller.core import Scheduler
from controller.core.events import (
    AnswerRequest,
    ModelAdded,
    ModelPinned,
    ModelReady,
    RefuseRequest,
    RequestArrived,
    RequestsArrived,
    SendAction,
    WorkerJoined,
)
from controller.core.invariants import check as check_scheduler
from controller.ledger import WORKER_LOST, Finished, Ledger, Sent
from controller.process.schedulers import make_scheduler
from controller.stages.pipelines.core.run import kept_ns
from controller.telemetry.tables import Telemetry
from experiments.simulator.case import Case, Cluster, pages_of
from experiments.simulator.clients import Arrival, Clients
from experiments.simulator.cpu_core import CpuCore
from experiments.simulator.loop import Loop
from experiments.simulator.summary import Bucket, Summary, latency_class
from experiments.simulator.watch import Watch
from experiments.simulator.worker import Worker
from traces.arrivals import ClosedLoop


def production_scheduler(case: Case) -> Scheduler:
    """Scheduler of every run that does not try another."""
    return make_scheduler(case.scheduler)


class VirtualController:
    """The ledger's shell on virtual time: workers, clients, and a summary of what happened."""

    def __init__(
        self,
        case: Case,
        loop: Loop,
        summary: Summary,
        *,
        telemetry: Telemetry | None,
        groups: Mapping[str, Summary],
        on_closed: Callable[[Worker], None],
        check: bool,
        make_scheduler: Callable[[Case], Scheduler],
        watch: Watch | None = None,
        pinned: Sequence[ModelId] = (),
        tick_ns: int = NS_PER_MS,
    ) -> None:
        """Announce the cluster's models.

        Requests of some tenants, or of some models without one, are counted in `groups` as well. `on_closed` is told
        when the scheduler lets a worker go. Its invariants are asserted after every event where `check` says so.
        The timer fires at whole multiples of `tick_ns`, because event loops keep no finer time.
        """
        #: The clients, set before the first arrival.
        self.clients: Clients
        self._loop = loop
        self._summary = summary
        self._groups = groups
        self._on_closed = on_closed
        self._check = check
        self._scheduler = make_scheduler(case)
        self._watch = watch
        self._tick_ns = tick_ns
        self._costs = case.costs
        self._faults = case.faults
        self._core = CpuCore(loop) if case.costs.charged else None
        self._next_request = 1
        self._decide_within_ns, self._decide_share = case.decide_within_ns, case.decide_share
        self._rows, self._weights = case.rows, case.weights
        # The stages of pipelines: for each model the next, if any, and the time that all after it need.
        self._stages = _stages_of(case)
        self._tells_work_ahead = case.tells_work_ahead
        self._plans = case.plans_pipelines
        #: When the whole pipeline is due, by the request under way that says what is ahead.
        self._ends_ns: dict[RequestId, int] = {}
        self._client_delay_ns = case.network.client_delay_ns
        self._random = random.Random(case.seed)
        self._input_bytes = {model.model_id: model.row.input_bytes for model in case.cluster.models}
        self._armed_ns: int | None = None
        #: Clients with an answer, until the event that brought it is dealt with.
        self._answered: list[ClosedLoop] = []
        self.ledger: Ledger[Worker, ClosedLoop | None] = Ledger(
            self._scheduler,
            clock=loop.now,
            telemetry=telemetry,
            send=self._send,
            withdraw_action=Worker.withdraw_action,
            write_off=lambda _worker, _sent: None,
            answer=self._answer,
            refuse=self._refuse,
            forget=Worker.forget_model,
            close=self._close,
            settled=self._settled,
            arm=self._arm,
            tick_ns=tick_ns,
        )
        for model in case.cluster.models:
            self.ledger.tell(ModelAdded(model_id=model.model_id))
        for model_id in pinned:
            self.ledger.tell(ModelPinned(model_id=model_id, pinned=True))

    @property
    def scheduler(self) -> Scheduler:
        """Decides all."""
        return self._scheduler

    @property
    def num_open(self) -> int:
        """Requests without a response, and whatever else the core is to do."""
        waiting = 0 if self._core is None else len(self._core)
        return len(self.ledger.requests) + waiting

    # --- workers ----------------------------------------------------------------------------------

    def join(self, worker: Worker, cluster: Cluster) -> None:
        """A worker registers, with all models ready in host memory."""
        if (before := self.ledger.link_of(worker.worker_id)) is not None:
            self.lose(before)  # it is back before its loss was noticed
        kind = cluster.kind_of(worker.index)
        self.ledger.join(
            worker,
            WorkerJoined(
                worker_id=worker.worker_id,
                gpu_kind=GpuKind(kind.name),
                num_pages=cluster.pages_of_worker(worker.index),
            ),
        )
        for model in cluster.models:
            row = kind.row_of(model.row)
            if row is None:
                continue
            row = self._faults.announced(row, worker.index)
            self.ledger.tell(
                ModelReady(
                    worker_id=worker.worker_id,
                    model_id=model.model_id,
                    architecture_id=model.architecture_id,
                    num_pages=pages_of(row),
                    load_ns=row.load_ns,
                    exec_ns=row.exec_ns,
                    output_row_bytes=row.output_bytes,
                )
            )

    def lose(self, worker: Worker) -> None:
        """A worker's link broke."""
        if self.ledger.link_of(worker.worker_id) is worker:
            self._count_lost(self.ledger.lose(worker.worker_id))

    def result(self, message: tuple[Worker, Result]) -> None:
        """A worker's result arrived."""
        there = (*message, self._loop.now_ns)
        if self._core is not None:
            self._core.take(self._costs.result_ns, self._take_result, there)
        else:
            self._take_result(there)

    def _take_result(self, there: tuple[Worker, Result, int]) -> None:
        worker, result, there_ns = there
        unread_ns = 0
        if self._core is not None:
            self._summary.at(self._loop.now_ns).controller_ns += self._costs.result_ns
            unread_ns = self._loop.now_ns - there_ns - self._costs.result_ns
        if self.ledger.link_of(worker.worker_id) is not worker:
            return
        sent = self.ledger.finish(worker.worker_id, result, unread_ns=unread_ns)
        if sent is not None:
            self._count_action(sent.command, result)

    def _send(self, worker: Worker, sent: Sent) -> None:
        if self._core is None:
            worker.send(sent.command.action)
            return
        cost_ns = self._costs.action_ns
        self._summary.at(self._loop.now_ns).controller_ns += cost_ns
        self._loop.at(self._core.charge(cost_ns), worker.send, sent.command.action)

    def _close(self, worker: Worker, _reason: str, lost: Sequence[Sent]) -> None:
        self._count_lost(lost)
        self._on_closed(worker)

    def _count_lost(self, lost: Sequence[Sent]) -> None:
        if lost:
            self._summary.at(self._loop.now_ns).action_errors[WORKER_LOST] += len(lost)

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
            summary.add_busy(step.begin_ns, step.duration_ns, load=False)
        if (step := result.load) is not None:
            summary.add_busy(step.begin_ns, step.duration_ns, load=True)

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, arrivals: list[Arrival]) -> None:
        """Requests arrive now, all at once."""
        now_ns = self._loop.now_ns
        self._summary.at(now_ns).arrived += len(arrivals)
        if self._groups:
            for model_id, _, tenant, _ in arrivals:
                if (group := self._groups.get(tenant or model_id)) is not None:
                    group.at(now_ns).arrived += 1
        if self._core is None:
            self._admit((arrivals, now_ns))
            return
        costs = self._costs
        cost_ns = len(arrivals) * (costs.front_ns + costs.request_ns)
        self._core.take(cost_ns, self._admit, (arrivals, now_ns))

    def _admit(self, arrived: tuple[list[Arrival], int]) -> None:
        """Requests have come through the front end, which takes no time where nothing is charged."""
        arrivals, arrival_ns = arrived
        if self._core is not None:
            bucket = self._summary.at(self._loop.now_ns)
            bucket.front_ns += len(arrivals) * self._costs.front_ns
            bucket.controller_ns += len(arrivals) * self._costs.request_ns
        requests = []
        for model_id, slo_ns, tenant, client in arrivals:
            request = RequestArrived(
                request_id=RequestId(self._next_request),
                model_id=model_id,
                rows=1,
                arrival_ns=arrival_ns,
                slo_ns=slo_ns,
                tenant=tenant,
                num_bytes=self._input_bytes[model_id],
            )
            self._next_request += 1
            if self._rows:
                request.rows = self._random.choice(self._rows)
                request.num_bytes *= request.rows
            if self._weights:
                request.weight = self._random.choice(self._weights)
            if self._stages and self._tells_work_ahead and model_id in self._stages:
                _, ahead_ns, own_ns = self._stages[model_id]
                left_ns = kept_ns(slo_ns, own_ns, ahead_ns) if self._plans else ahead_ns
                request.work_ahead_ns = ahead_ns
                request.slo_ns = max(1, slo_ns - left_ns)
                self._ends_ns[request.request_id] = arrival_ns + slo_ns
            if self._watch is not None:
                self._watch.arrived(request)
            self.ledger.open(request, client)
            requests.append(request)
        self.ledger.tell(
            requests[0] if len(requests) == 1 else RequestsArrived(requests=tuple(requests))
        )
        if self._decide_within_ns:
            for request in requests:
                if self._random.random() < self._decide_share:
                    self.ledger.decide(request.request_id, self._decide_within_ns)

    def _answer(
        self,
        request: RequestArrived,
        client: ClosedLoop | None,
        command: AnswerRequest,
        _finished: Finished,
        now_ns: int,
        in_time: bool,
    ) -> None:
        if self._watch is not None:
            self._watch.over(request, None if in_time else Refusal.LATE)
        latency_ns = now_ns - request.arrival_ns
        cold = request.model_id if command.cold else None
        for bucket in self._buckets(request, now_ns):
            _count_answer(bucket, latency_ns, in_time, cold)
        if client is not None:
            self._answered.append(client)
        if self._stages and request.model_id in self._stages:
            end_ns = self._ends_ns.pop(request.request_id, request.arrival_ns + request.slo_ns)
            if in_time:
                later_ns = now_ns + 2 * self._client_delay_ns
                self._loop.at(later_ns, self._go_on, (request, end_ns))

    def _go_on(self, answered: tuple[RequestArrived, int]) -> None:
        """The client of a pipeline has an answer, and asks the next model; the last one is due at the second."""
        request, end_ns = answered
        model_id, _, _ = self._stages[request.model_id]
        if model_id is not None:
            self.submit([(model_id, max(1, end_ns - self._loop.now_ns), request.tenant, None)])

    def _refuse(
        self,
        request: RequestArrived,
        client: ClosedLoop | None,
        command: RefuseRequest,
        now_ns: int,
    ) -> None:
        if self._watch is not None:
            self._watch.refused(request, command, self._scheduler)
            self._watch.over(request, command.refusal)
        self._ends_ns.pop(request.request_id, None)
        reason, after_ns = command.refusal.value, now_ns - request.arrival_ns
        for bucket in self._buckets(request, now_ns):
            bucket.refuse(reason, after_ns)
        if client is not None:
            self.clients.refused(client, request.arrival_ns + request.slo_ns)

    def _buckets(self, request: RequestArrived, now_ns: int) -> list[Bucket]:
        """The counts of a request's outcome now."""
        buckets = [self._summary.at(now_ns)]
        if self._groups and (group := self._groups.get(request.tenant or request.model_id)):
            buckets.append(group.at(now_ns))
        return buckets

    def _settled(self) -> None:
        if self._answered:
            answered, self._answered = self._answered, []
            self.clients.answered(answered)
        if self._check:
            check_scheduler(self._scheduler)

    # --- the timer --------------------------------------------------------------------------------

    def _arm(self, wakeup_ns: int) -> int:
        after_ns = max(wakeup_ns, self._loop.now_ns + 1)
        at_ns = -(-after_ns // self._tick_ns) * self._tick_ns
        if at_ns != self._armed_ns:
            self._armed_ns = at_ns
            self._loop.at(at_ns, self._fire if self._core is None else self._due, at_ns)
        return at_ns

    def _due(self, armed_ns: int) -> None:
        """The timer waits its turn on the core."""
        assert self._core is not None
        self._core.take(0, self._fire, armed_ns)

    def _fire(self, armed_ns: int) -> None:
        if self._armed_ns == armed_ns:
            self._armed_ns = None
            self.ledger.fire()


def _stages_of(case: Case) -> dict[ModelId, tuple[ModelId | None, int, int]]:
    """By model: the next one of its pipeline, the time that those behind need, and its own."""
    rows = {model.model_id: model.row for model in case.cluster.models}
    way_ns = 2 * (case.network.client_delay_ns + case.network.delay_ns)
    stages: dict[ModelId, tuple[ModelId | None, int, int]] = {}
    for pipeline in case.pipelines:
        following: ModelId | None = None
        ahead_ns = 0
        for model_id in reversed(pipeline):
            own_ns = min(rows[model_id].exec_ns.values()) + way_ns
            stages[model_id] = following, ahead_ns, own_ns
            following = model_id
            ahead_ns += own_ns
    return stages


def _count_answer(bucket: Bucket, latency_ns: int, in_time: bool, cold: ModelId | None) -> None:
    if not in_time:
        bucket.refuse(Refusal.LATE.value, latency_ns)
        return
    bucket.answered += 1
    if cold is not None:
        bucket.cold_answered += 1
        bucket.cold_models.add(cold)
    bucket.latencies[latency_class(latency_ns)] += 1
    if latency_ns > bucket.latency_ns_max:
        bucket.latency_ns_max = latency_ns
