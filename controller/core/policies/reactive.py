"""Two systems that react instead of predict, for comparison on equal devices: Clipper and INFaaS.

What both share here: a model's container works by itself. It sends its next batch as soon as the last
one is back, whatever else the GPU has queued, and does not check whether the answer will be in time:
all requests run, late ones too (and count as late). Batches wait for the GPU in the order they were
sent. Weights are loaded when a request finds none, least recently used ones make room.

**Clipper** (NSDI'17, section 4.3): each container adapts its batch size against the SLO, by AIMD, by
quantile regression or not at all (batching.py); compiled sizes round it down. Delayed batching
(`batch_delay_ns`) holds a batch that is not full back until its oldest request has waited that long.
Modelled: these, one queue per model, late answers. Not modelled: the cache and the model selection
layer, concurrent kernels of several containers on one GPU (the device runs one EXEC at a time for
every policy alike), Docker and RPC overheads.

**INFaaS** (ATC'21) as the Clockwork paper describes it: the SLO is a coarse goal for choosing among
variants and replicas, not a deadline. Modelled: a variant is a batch size, the most efficient whose
profiled latency is within the SLO; a model whose answers come back late gets one more replica, at most
one per second. Not modelled: variants that differ in network, precision or hardware, scaling down,
and the placement of workers in the cloud.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from typing_extensions import override

from clockwright.units import NS_PER_S
from clockwright.wire.actions import Infer
from controller.core.config import SchedulerConfig
from controller.core.events import ActionSucceeded
from controller.core.policies.batching import Batching, make_batching
from controller.core.policies.eviction import least_recently_used
from controller.core.policies.margin import NO_MARGIN_NS
from controller.core.policy import Policy
from controller.core.state import Batch, Copy, Model, SentAction, WorkerState

# How often a model may get a further replica.
SCALE_INTERVAL_NS = NS_PER_S

_FOREVER_NS = 1 << 62


class CapRule(Protocol):
    """The rule for the largest batch of a container."""

    def cap(self, copy: Copy) -> float:
        """Most rows that a batch of this copy may have now."""

    def learn(self, sent: SentAction, now_ns: int) -> bool:
        """A batch came back; tells whether its model shall have one more replica."""

    def forget(self, copy: Copy) -> None:
        """The container is gone."""


class ClipperCaps(CapRule):
    """Adaptive batching, per container."""

    def __init__(self, batching: str) -> None:
        self._name = batching
        #: Containers that answered at least once.
        self.batchings: dict[Copy, Batching] = {}

    @override
    def cap(self, copy: Copy) -> float:
        known = self.batchings.get(copy)
        return known.cap if known is not None else 1.0

    @override
    def learn(self, sent: SentAction, now_ns: int) -> bool:
        """How long the batch took, from sending to the result, against the SLO."""
        copy, action = sent.copy, sent.action
        assert isinstance(action, Infer)
        batching = self.batchings.get(copy)
        if batching is None:
            batching = make_batching(self._name, copy.estimates.sizes)
            self.batchings[copy] = batching
        slo_ns = min(request.slo_ns for request in sent.requests)
        batching.learn(sum(action.rows), now_ns - action.earliest_ns, slo_ns)
        return False

    @override
    def forget(self, copy: Copy) -> None:
        self.batchings.pop(copy, None)


class InfaasCaps(CapRule):
    """A batch size per SLO, and replicas for models that are late."""

    def __init__(self) -> None:
        self._scaled_ns: dict[Model, int] = {}

    @override
    def cap(self, copy: Copy) -> float:
        """The size with the least time per row among those whose latency is within the SLO."""
        estimates = copy.estimates
        slo_ns = copy.model.queue[0].slo_ns
        fitting = [i for i, duration in enumerate(estimates.exec_ns) if duration <= slo_ns] or [0]
        best = min(fitting, key=lambda i: estimates.exec_ns[i] / estimates.sizes[i])
        return float(estimates.sizes[best])

    @override
    def learn(self, sent: SentAction, now_ns: int) -> bool:
        """A late answer calls for a replica, if a worker without one is there."""
        model = sent.copy.model
        late = any(now_ns > request.deadline_ns for request in sent.requests)
        due = now_ns - self._scaled_ns.get(model, -SCALE_INTERVAL_NS) >= SCALE_INTERVAL_NS
        if late and due and model.load_key is None and len(model.copies) < len(model.ready):
            self._scaled_ns[model] = now_ns
            return True
        return False

    @override
    def forget(self, copy: Copy) -> None:
        """The profile is the model's, not the container's."""
        if not copy.model.copies:
            self._scaled_ns.pop(copy.model, None)


class ReactivePolicy(Policy):
    """Containers that send what waits, up to a cap."""

    def __init__(self, caps: CapRule, batch_delay_ns: int = 0) -> None:
        """Make it of a rule for sizes.

        A batch that is not full waits until its oldest request has waited `batch_delay_ns`.
        """
        # A container sends whatever it has; the GPU's backlog is not its business.
        self.lookahead_ns = _FOREVER_NS // 2
        self.max_outstanding = 1 << 30
        self.margin_ns = NO_MARGIN_NS
        self._caps = caps
        self._batch_delay_ns = batch_delay_ns
        self._wanted: deque[Model] = deque()
        self._serial = count()

    @property
    @override
    def wants_any(self) -> bool:
        return bool(self._wanted)

    @override
    def queue_changed(self, model: Model) -> None:
        if not model.queue:
            return
        for copy in model.copies.values():
            if copy.resident and not copy.num_pins and copy.strategy_key is None:
                copy.strategy_key = key = model.queue[0].arrival_ns
                entry = (key, 0, model.sequence, next(self._serial), copy)
                heappush(copy.worker.strategies, entry)

    @override
    def copy_gone(self, copy: Copy) -> None:
        copy.strategy_key = None
        self._caps.forget(copy)

    @override
    def infer_ended(self, sent: SentAction, event: ActionSucceeded, now_ns: int) -> None:
        model = sent.copy.model
        if self._caps.learn(sent, now_ns):
            self._want(model)
        self.queue_changed(model)

    @override
    def next_infer(self, worker: WorkerState, free_ns: int, now_ns: int) -> Batch | None:
        """The container whose oldest request is oldest, among those whose batch is complete."""
        held: list[tuple[int, int, int, int, Copy]] = []
        batch = None
        while worker.strategies and batch is None:
            entry = heappop(worker.strategies)
            copy = entry[4]
            if copy.strategy_key != entry[0]:
                continue
            queue = copy.model.queue
            if not queue or copy.num_pins:
                copy.strategy_key = None
            elif self._waits(copy, now_ns):
                held.append(entry)
            else:
                copy.strategy_key = None
                batch = self._batch(copy, free_ns)
        worker.retry_ns = None
        for entry in held:
            heappush(worker.strategies, entry)
            due_ns = entry[4].model.queue[0].arrival_ns + self._batch_delay_ns
            worker.retry_ns = min(worker.retry_ns or due_ns, due_ns)
        return batch

    def _waits(self, copy: Copy, now_ns: int) -> bool:
        """Whether the container's next batch is worth waiting for."""
        if not self._batch_delay_ns:
            return False
        queue = copy.model.queue
        if now_ns >= queue[0].arrival_ns + self._batch_delay_ns:
            return False
        full = copy.estimates.sizes[max(copy.estimates.fit[self._limit(copy)], 0)]
        rows = 0
        for request in queue:
            rows += request.rows
            if rows >= full:
                return False
        return True

    def _limit(self, copy: Copy) -> int:
        """Rows that the next batch may have; a request is never cut in two."""
        return min(
            max(copy.model.queue[0].rows, int(self._caps.cap(copy))), copy.estimates.sizes[-1]
        )

    def _batch(self, copy: Copy, free_ns: int) -> Batch:
        queue, estimates = copy.model.queue, copy.estimates
        rows = num_requests = 0
        limit = self._limit(copy)
        for request in queue:
            if rows + request.rows > limit:
                break
            rows += request.rows
            num_requests += 1
        # The largest compiled size that they fill; what is left over goes with the next batch.
        index = max(estimates.fit[rows], 0)
        while rows > estimates.sizes[index] and num_requests > 1:
            num_requests -= 1
            rows -= queue[num_requests].rows
        index = estimates.cover[rows]
        begin_ns = max(free_ns, copy.ready_ns)
        return Batch(copy, 0, num_requests, index, _FOREVER_NS, begin_ns)

    @override
    def want_load(self, model: Model, now_ns: int) -> bool:
        """As soon as a request finds no copy."""
        if model.load_key is None and model.queue and not model.copies:
            self._want(model)
        return model.load_key is not None

    def _want(self, model: Model) -> None:
        model.load_key = 1.0
        self._wanted.append(model)

    @override
    def forget_unwanted(self, now_ns: int) -> None:
        while self._wanted and not _needs_copy(self._wanted[0]):
            self._wanted.popleft().load_key = None

    @override
    def next_load(self, worker: WorkerState, begin_ns: int, now_ns: int) -> Model | None:
        """In the order in which they were found missing."""
        for _ in range(len(self._wanted)):
            model = self._wanted.popleft()
            if not _needs_copy(model):
                model.load_key = None
            elif worker in model.ready and worker not in model.copies:
                model.load_key = None
                return model
            else:
                self._wanted.append(model)
        return None

    @override
    def victims(self, worker: WorkerState, num_pages: int, now_ns: int) -> list[Copy] | None:
        """Least recently used, whether requests wait for it or not."""
        return least_recently_used(worker, num_pages, wanted=True)


def _needs_copy(model: Model) -> bool:
    """Whether a model that was wanted still is: for its first copy requests have to wait, for a replica not."""
    if model.removed:
        return False
    return len(model.copies) < len(model.ready) if model.copies else bool(model.queue)


def clipper(config: SchedulerConfig) -> ReactivePolicy:
    """Clipper's (NSDI'17): each container adapts its batch size; nothing is refused by prediction."""
    return ReactivePolicy(ClipperCaps(config.batching), config.batch_delay_ns)


def infaas(config: SchedulerConfig) -> ReactivePolicy:
    """INFaaS's (ATC'21): a batch size for each SLO, and replicas; nothing is refused by prediction."""
    return ReactivePolicy(InfaasCaps())
