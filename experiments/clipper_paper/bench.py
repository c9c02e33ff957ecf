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
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from clockwright.actions import Infer, Result
from clockwright.errors import Refusal
from clockwright.units import (
    NS_PER_MS,
    NS_PER_S,
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
from experiments.clipper_paper.models import held_out
from experiments.live.bare_lanes import Prepared
from traces.arrivals import Poisson
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


@dataclass(slots=True)
class Measured:
    """Responses and batches of the measured time."""

    seconds: float = 0.0
    #: Latency of each request, from arrival to response; late ones count, too.
    latency_ns: list[int] = field(default_factory=list)
    num_late: int = 0
    #: Rows of each batch, and its time from sending to the result.
    batch_rows: list[int] = field(default_factory=list)
    batch_ns: list[int] = field(default_factory=list)

    @property
    def throughput_rps(self) -> float:
        """Responses per second."""
        return len(self.latency_ns) / self.seconds

    @property
    def mean_batch(self) -> float:
        """Rows per batch; 0 without any."""
        return fmean(self.batch_rows or [0])

    def latency_ms(self, percentile: float) -> float:
        """Percentile of the requests' latency; 0 without any."""
        return float(np.percentile(self.latency_ns or [0], percentile)) / NS_PER_MS

    def batch_ms(self, percentile: float) -> float:
        """Percentile of the batches' time; 0 without any."""
        return float(np.percentile(self.batch_ns or [0], percentile)) / NS_PER_MS

    def batches_late_pct(self, slo_ns: int) -> float:
        """Share of the batches that took longer than the SLO, in percent."""
        return 100 * fmean([took_ns > slo_ns for took_ns in self.batch_ns] or [0])

    def __iadd__(self, other: Measured) -> Measured:
        self.seconds += other.seconds
        self.latency_ns += other.latency_ns
        self.num_late += other.num_late
        self.batch_rows += other.batch_rows
        self.batch_ns += other.batch_ns
        return self


class Bench:
    """The ledger's shell without a network: lanes of workers behind a queue, one thread."""

    def __init__(self, ready: Sequence[Prepared], config: SchedulerConfig) -> None:
        self._model_id = ModelId(ready[0].model.model_id)
        self._payloads = [row.tobytes() for row in held_out()[0]]
        self._outcomes: queue.SimpleQueue[tuple[WorkerId, Outcome]] = queue.SimpleQueue()
        self._runtimes: list[LaneThreads[Any]] = []
        self._next_id = 0
        self._slo_ns = 0
        self._log = Measured()
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
        due = _arrivals(load, slo_ns, begin_ns, end_ns)
        if isinstance(load, Saturating):
            self._arrive([begin_ns] * load.outstanding)
        counting = False
        while (now_ns := time.monotonic_ns()) < end_ns:
            if not counting and now_ns >= count_ns:
                counting, self._log, count_ns = True, Measured(), now_ns
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
        self._log.seconds = (time.monotonic_ns() - count_ns) / NS_PER_S
        return self._log

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
            self._log.batch_rows.append(sum(infer.rows))
            self._log.batch_ns.append(time.monotonic_ns() - infer.earliest_ns)

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


def _arrivals(load: Saturating | Offered, slo_ns: int, begin_ns: int, end_ns: int) -> deque[int]:
    if isinstance(load, Saturating):
        return deque()
    arrivals = Poisson(
        models=(0,), rate_rps=load.rate_rps, slo_ns=slo_ns, begin_ns=begin_ns, end_ns=end_ns,
        seed=load.seed,
    )  # fmt: skip
    return deque(sorted(at for chunk in arrivals.chunks() for at in chunk.time_ns.tolist()))


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
