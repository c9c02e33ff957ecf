"""The serving path without gRPC: the scheduler's core in this thread, workers' lanes beside it.

Clipper's figures saturate containers with tens of thousands of requests per second, which two cores that
carry client, gRPC and server in Python cannot. Here are the production scheduler, the production worker
lanes and real devices; between them a queue instead of a stream. What this path carries at best is
measured with a model that does nothing, and stands beside every result.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clockwright.actions import ActionError, Infer, LoadWeights, Result
from clockwright.bulk import Buffer
from clockwright.errors import Refusal
from clockwright.units import (
    NS_PER_MS,
    NS_PER_S,
    ActionId,
    GpuKind,
    ModelId,
    RequestId,
    WorkerId,
)
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import (
    AnswerRequest,
    ModelAdded,
    ModelReady,
    RefuseRequest,
    RequestArrived,
    RequestsArrived,
    WorkerJoined,
)
from controller.ledger import Finished, Ledger, Sent
from experiments.clipper_paper.models import Prepared, held_out
from experiments.digits.images import Array
from worker.lane_threads import LaneThreads, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturating:
    """A load that keeps a number of requests waiting at any time."""

    outstanding: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A load that arrives by a Poisson process, whatever waits."""

    rate_rps: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Fields of every setting in which containers serve."""

    slo_ms: float = 20.0
    batch_sizes: tuple[int, ...] = tuple(2**power for power in range(11))
    warmup_s: float = 5.0
    measured_s: float = 3.0

    @property
    def slo_ns(self) -> int:
        """The SLO of every request."""
        return round(self.slo_ms * NS_PER_MS)

    @property
    def saturating(self) -> Saturating:
        """Twice the largest batch always waits, so the next batch is full when one ends."""
        return Saturating(outstanding=2 * self.batch_sizes[-1])


@dataclass(slots=True, kw_only=True)
class Measured:
    """Responses and batches of the measured time."""

    seconds: float
    #: Latency of each request, from arrival to response; late ones count, too.
    latency_ns: NDArray[np.int64]
    num_late: int
    #: Rows of each batch, then its time from sending to the result.
    batch_rows: NDArray[np.int64]
    batch_ns: NDArray[np.int64]

    @property
    def throughput_rps(self) -> float:
        """Responses per second."""
        return len(self.latency_ns) / self.seconds

    @property
    def mean_batch(self) -> float:
        """Rows per batch; 0 without any."""
        return float(self.batch_rows.mean()) if len(self.batch_rows) else 0.0

    def latency_ms(self, percentile: float) -> float:
        """Percentile of the requests' latency; 0 without any."""
        return _percentile_ms(self.latency_ns, percentile)

    def batch_ms(self, percentile: float) -> float:
        """Percentile of the batches' time; 0 without any."""
        return _percentile_ms(self.batch_ns, percentile)

    def batches_late_pct(self, slo_ns: int) -> float:
        """Share of the batches that took longer than the SLO, in percent."""
        return float(100 * (self.batch_ns > slo_ns).mean()) if len(self.batch_ns) else 0.0


def together(runs: Sequence[Measured]) -> Measured:
    """Join several runs into one."""
    return Measured(
        seconds=sum(run.seconds for run in runs),
        latency_ns=np.concatenate([run.latency_ns for run in runs]),
        num_late=sum(run.num_late for run in runs),
        batch_rows=np.concatenate([run.batch_rows for run in runs]),
        batch_ns=np.concatenate([run.batch_ns for run in runs]),
    )


def _percentile_ms(values: NDArray[np.int64], percentile: float) -> float:
    return float(np.percentile(values, percentile)) / NS_PER_MS if len(values) else 0.0


@dataclass(slots=True)
class _Log:
    latency_ns: list[int] = field(default_factory=list)
    num_late: int = 0
    batches: list[tuple[int, int]] = field(default_factory=list)


class Bench:
    """The ledger's shell without a network: lanes of workers behind a queue, one thread."""

    def __init__(self, ready: Sequence[Prepared], config: SchedulerConfig) -> None:
        self._model_id = ModelId(ready[0].model.model_id)
        self._payloads = [row.tobytes() for row in held_out()[0]]
        self._outcomes: queue.SimpleQueue[tuple[WorkerId, Outcome]] = queue.SimpleQueue()
        self._runtimes: list[LaneThreads[Any]] = []
        self._next_id = 0
        self._slo_ns = 0
        self._log = _Log()
        self._completed = 0
        self._ledger: Ledger[LaneThreads[Any], None] = Ledger(
            Scheduler(config),
            clock=time.monotonic_ns,
            telemetry=None,
            send=self._send,
            withdraw_action=LaneThreads.withdraw,
            answer=self._answer,
            refuse=self._refuse,
            forget=_unexpected,
            close=_unexpected,
            settled=_nothing,
            # `run` itself looks when the timer is due.
            arm=_same,
        )
        self._ledger.tell(ModelAdded(model_id=self._model_id))
        for number, each in enumerate(ready):
            worker_id = WorkerId(f"worker-{number}")
            runtime: LaneThreads[Any] = LaneThreads(each.device, self._listener(worker_id))
            self._runtimes.append(runtime)
            runtime.add_model(each.model)
            runtime.start()
            kind = GpuKind(each.device.gpu_kind)
            pages = each.device.limits.num_pages
            self._ledger.join(
                runtime, WorkerJoined(worker_id=worker_id, gpu_kind=kind, num_pages=pages)
            )
            self._ledger.tell(
                ModelReady(
                    worker_id=worker_id,
                    model_id=self._model_id,
                    architecture_id=each.model.architecture_id,
                    num_pages=each.model.num_pages,
                    load_ns=each.model.load_ns,
                    exec_ns=each.model.exec_ns,
                )
            )

    def close(self) -> None:
        """End the lanes; running steps are finished first."""
        for runtime in self._runtimes:
            runtime.stop()

    def run(
        self, load: Saturating | Offered, *, slo_ns: int, warmup_s: float, measured_s: float
    ) -> Measured:
        """Serve for a while.

        Args:
            load: how requests come.
            slo_ns: the SLO of every request.
            warmup_s: time before anything counts.
            measured_s: time that counts.

        Raises:
            RuntimeError: a request failed, or was refused for another reason than lateness.
        """
        self._slo_ns = slo_ns
        begin_ns = time.monotonic_ns()
        count_ns = begin_ns + int(warmup_s * NS_PER_S)
        end_ns = count_ns + int(measured_s * NS_PER_S)
        due = _arrivals(load, begin_ns, end_ns)
        if isinstance(load, Saturating):
            self._arrive([begin_ns] * load.outstanding)
        counting = False
        while (now_ns := time.monotonic_ns()) < end_ns:
            if not counting and now_ns >= count_ns:
                counting, self._log, count_ns = True, _Log(), now_ns
            arrived = []
            while due and due[0] <= now_ns:
                arrived.append(due.popleft())
            if isinstance(load, Saturating):
                arrived += [now_ns] * self._completed
                self._completed = 0
            if arrived:
                self._arrive(arrived)
            due_ns = self._ledger.due_ns
            if due_ns is not None and due_ns <= time.monotonic_ns():
                self._ledger.fire()
                due_ns = self._ledger.due_ns
            until_ns = min(due_ns or end_ns, due[0] if due else end_ns, end_ns)
            self._wait(until_ns)
        log = self._log
        return Measured(
            seconds=(time.monotonic_ns() - count_ns) / NS_PER_S,
            latency_ns=np.array(log.latency_ns, np.int64),
            num_late=log.num_late,
            batch_rows=np.array([rows for rows, _ in log.batches], np.int64),
            batch_ns=np.array([duration for _, duration in log.batches], np.int64),
        )

    def _listener(self, worker_id: WorkerId) -> Any:  # noqa: ANN401  a callback of the runtime
        return lambda outcome: self._outcomes.put((worker_id, outcome))

    def _wait(self, until_ns: int) -> None:
        """Take in the results that are there, or wait for the next one until other work is due."""
        remaining_s = (until_ns - time.monotonic_ns()) / 1e9
        try:
            worker_id, (result, _) = (
                self._outcomes.get(timeout=remaining_s)
                if remaining_s > 0
                else self._outcomes.get_nowait()
            )
            while True:
                self._take(worker_id, result)
                worker_id, (result, _) = self._outcomes.get_nowait()
        except queue.Empty:
            pass

    def _take(self, worker_id: WorkerId, result: Result) -> None:
        sent = self._ledger.finish(worker_id, result)
        if (
            sent is not None
            and isinstance(infer := sent.command.action, Infer)
            and not result.error
        ):
            self._log.batches.append((sum(infer.rows), time.monotonic_ns() - infer.earliest_ns))

    def _arrive(self, times_ns: Sequence[int]) -> None:
        requests = []
        for at_ns in times_ns:
            self._next_id += 1
            request = RequestArrived(
                request_id=RequestId(self._next_id),
                model_id=self._model_id,
                rows=1,
                arrival_ns=at_ns,
                slo_ns=self._slo_ns,
            )
            self._ledger.open(request, None)
            requests.append(request)
        self._ledger.tell(RequestsArrived(requests=tuple(requests)))

    def _send(self, runtime: LaneThreads[Any], sent: Sent) -> None:
        payloads, number = self._payloads, len(self._payloads)
        payload = [payloads[request_id % number] for request_id in sent.command.request_ids]
        runtime.submit(sent.command.action, payload)

    def _answer(
        self,
        request: RequestArrived,
        _: None,
        _command: AnswerRequest,
        _finished: Finished,
        now_ns: int,
        _in_time: bool,
    ) -> None:
        self._respond(request, now_ns)

    def _refuse(
        self, request: RequestArrived, _: None, command: RefuseRequest, now_ns: int
    ) -> None:
        if command.refusal is not Refusal.LATE:
            raise RuntimeError(f"a request was refused: {command.refusal.name} {command.detail}")
        self._log.num_late += 1
        self._respond(request, now_ns)

    def _respond(self, request: RequestArrived, now_ns: int) -> None:
        self._log.latency_ns.append(now_ns - request.arrival_ns)
        self._completed += 1


def _unexpected(_runtime: LaneThreads[Any], *what: object) -> None:
    raise RuntimeError(f"the scheduler lets a model or a worker go: {what}")


def _nothing() -> None:
    return


def _same(wakeup_ns: int) -> int:
    return wakeup_ns


def _arrivals(load: Saturating | Offered, begin_ns: int, end_ns: int) -> deque[int]:
    if isinstance(load, Saturating):
        return deque()
    random = np.random.default_rng(load.seed)
    seconds = (end_ns - begin_ns) / NS_PER_S
    number = int(load.rate_rps * seconds * 1.2 + 100)
    gaps = random.exponential(NS_PER_S / load.rate_rps, number)
    times = begin_ns + np.cumsum(gaps).astype(np.int64)
    return deque(times[times < end_ns].tolist())


def saturate(setting: Serving, ready: Sequence[Prepared], config: SchedulerConfig) -> Measured:
    """Serve, on all of these devices, more requests than any batch takes."""
    load = Saturating(outstanding=setting.saturating.outstanding * len(ready))
    with closing(Bench(ready, config)) as served:
        return served.run(
            load,
            slo_ns=setting.slo_ns,
            warmup_s=setting.warmup_s,
            measured_s=setting.measured_s,
        )


@contextmanager
def loaded(ready: Prepared) -> Iterator[Callable[[Array], tuple[Result, Sequence[Buffer]]]]:
    """A model in its device's memory, and what runs one batch of it on the worker's lanes.

    Whoever calls it gives rows, as many as one of the model's batch sizes, and gets the result and the outputs.

    Raises:
        RuntimeError: an action failed.
    """
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    runtime: LaneThreads[Any] = LaneThreads(ready.device, outcomes.put)
    ids = count(1)

    def done(kind: type[LoadWeights | Infer], *payload: bytes, **others: Any) -> Any:  # noqa: ANN401
        now_ns = time.monotonic_ns()
        action = kind(
            action_id=ActionId(next(ids)),
            model_id=ModelId(ready.model.model_id),
            earliest_ns=now_ns,
            latest_ns=now_ns + 60 * NS_PER_S,
            expected_duration_ns=1,
            **others,
        )
        runtime.submit(action, payload)
        result, outputs = outcomes.get()
        if result.error is not ActionError.NONE:
            raise RuntimeError(f"action {result.action_id}: {result.error.name}: {result.message}")
        return result, outputs

    runtime.add_model(ready.model)
    runtime.start()
    try:
        done(LoadWeights)
        yield lambda rows: done(Infer, rows.tobytes(), batch_size=len(rows), rows=(len(rows),))
    finally:
        runtime.stop()


def exec_ns(ready: Prepared, batch_size: int, *, runs: int, budget_s: float) -> Array:
    """How long the EXEC of a batch takes on the worker's lanes, in ns by run.

    Args:
        ready: the model.
        batch_size: one of its sizes.
        runs: number of runs at most; at least 3.
        budget_s: time after which no further run begins.
    """
    images, _ = held_out()
    rows = np.resize(images, (batch_size, images.shape[1]))
    durations: list[int] = []
    with loaded(ready) as run:
        end_ns = time.monotonic_ns() + int(budget_s * NS_PER_S)
        while len(durations) < 4 or (len(durations) <= runs and time.monotonic_ns() < end_ns):
            result, _ = run(rows)
            durations.append(result.exec.duration_ns if result.exec else 0)
    return np.array(durations[1:])  # the first touches memory
