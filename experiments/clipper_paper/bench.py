"""The serving path without gRPC: the scheduler's core in this thread, workers' lanes next to it.

Clipper's figures saturate containers with tens of thousands of requests per second, which two cores that
carry client, gRPC and server in Python cannot. Here are the production scheduler, the production worker
lanes and real devices; between them a queue instead of a stream. What this path carries at best is
measured with a model that does nothing, and stands next to every result.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Any

import numpy as np

from clockwright.errors import Refusal
from clockwright.units import (
    NS_PER_MS,
    NS_PER_S,
    GpuKind,
    ModelId,
    RequestId,
    WorkerId,
)
from clockwright.wire.actions import Infer
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import (
    ModelAdded,
    ModelReady,
    RefuseRequest,
    RequestArrived,
    RequestsArrived,
    WorkerJoined,
)
from controller.ledger import Ledger, Sent
from experiments.clipper_paper.models import held_out
from experiments.live.bare_lanes import Prepared
from traces.arrivals import Poisson
from worker.lane_threads import LaneThreads, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Fields of every setting in which containers serve."""

    slo_ms: float = 20.0
    batch_sizes: tuple[int, ...] = tuple(2**power for power in range(11))
    #: Time before anything counts, and time that counts.
    warmup_s: float = 5.0
    measured_s: float = 3.0

    @property
    def slo_ns(self) -> int:
        """The SLO of every request."""
        return round(self.slo_ms * NS_PER_MS)

    @property
    def outstanding(self) -> int:
        """Requests of which the next batch is full when one ends."""
        return 2 * self.batch_sizes[-1]


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
        self._slo_ns = 0
        self._model_id = ModelId(ready[0].model.model_id)
        self._payloads = [row.tobytes() for row in held_out()[0]]
        self._outcomes: queue.SimpleQueue[tuple[WorkerId, Outcome]] = queue.SimpleQueue()
        self._runtimes: list[LaneThreads[Any]] = []
        self._ids = count(1)
        self._log = Measured()
        self._completed = 0
        self._ledger: Ledger[LaneThreads[Any], None] = Ledger(
            Scheduler(config),
            clock=time.monotonic_ns,
            telemetry=None,
            send=self._send,
            withdraw_action=LaneThreads.withdraw,
            write_off=_unexpected,
            answer=lambda request, _kept, _command, _finished, now_ns, _in_time: self._respond(
                request, now_ns
            ),
            refuse=self._refuse,
            forget=_unexpected,
            close=_unexpected,
            settled=lambda: None,
            # `run` itself looks when the timer is due.
            arm=lambda wakeup_ns: wakeup_ns,
        )
        self._ledger.tell(ModelAdded(model_id=self._model_id))
        for number, each in enumerate(ready):
            self._join(WorkerId(f"worker-{number}"), each)

    def _join(self, worker_id: WorkerId, ready: Prepared) -> None:
        device, model = ready.device, ready.model
        runtime: LaneThreads[Any] = LaneThreads(
            device, lambda outcome: self._outcomes.put((worker_id, outcome))
        )
        self._runtimes.append(runtime)
        runtime.add_model(model)
        runtime.start()
        joined = WorkerJoined(
            worker_id=worker_id,
            gpu_kind=GpuKind(device.gpu_kind),
            num_pages=device.limits.num_pages,
        )
        self._ledger.join(runtime, joined)
        self._ledger.tell(
            ModelReady(
                worker_id=worker_id,
                model_id=self._model_id,
                architecture_id=model.architecture_id,
                num_pages=model.num_pages,
                load_ns=model.load_ns,
                exec_ns=model.exec_ns,
            )
        )

    def close(self) -> None:
        """End the lanes; running steps are finished first."""
        for runtime in self._runtimes:
            runtime.stop()

    def run(
        self, setting: Serving, *, outstanding: int = 0, rate_rps: float = 0.0, seed: int = 0
    ) -> Measured:
        """Serve for a while.

        Args:
            setting: for how long, and the SLO of every request.
            outstanding: so many requests wait at any time.
            rate_rps: so many more come by a Poisson process, whatever waits.
            seed: of that process.

        Raises:
            RuntimeError: a request failed, or was refused for another reason than lateness.
        """
        self._slo_ns = setting.slo_ns
        begin_ns = time.monotonic_ns()
        count_ns = begin_ns + int(setting.warmup_s * NS_PER_S)
        end_ns = count_ns + int(setting.measured_s * NS_PER_S)
        source = Poisson(
            models=(0,), rate_rps=rate_rps, slo_ns=self._slo_ns, begin_ns=begin_ns,
            end_ns=end_ns, seed=seed,
        )  # fmt: skip
        due = deque(sorted(at for chunk in source.chunks() for at in chunk.time_ns.tolist()))
        self._arrive([begin_ns] * outstanding)
        counting = False
        while (now_ns := time.monotonic_ns()) < end_ns:
            if not counting and now_ns >= count_ns:
                counting, self._log, count_ns = True, Measured(), now_ns
            arrived = [now_ns] * self._completed if outstanding else []
            self._completed = 0
            while due and due[0] <= now_ns:
                arrived.append(due.popleft())
            self._arrive(arrived)
            due_ns = self._ledger.due_ns
            if due_ns is not None and due_ns <= time.monotonic_ns():
                self._ledger.fire()
                due_ns = self._ledger.due_ns
            self._take_results(min(due_ns or end_ns, due[0] if due else end_ns, end_ns))
        self._log.seconds = (time.monotonic_ns() - count_ns) / NS_PER_S
        return self._log

    def _take_results(self, until_ns: int) -> None:
        """Take in the results that are there, or wait for the next one until other work is due."""
        # A queue with a timeout of 0 gives what is there.
        remaining_s = max(0.0, (until_ns - time.monotonic_ns()) / NS_PER_S)
        try:
            worker_id, (result, _) = self._outcomes.get(timeout=remaining_s)
            while True:
                sent = self._ledger.finish(worker_id, result)
                if sent and isinstance(infer := sent.command.action, Infer) and not result.error:
                    self._log.batch_rows.append(sum(infer.rows))
                    self._log.batch_ns.append(time.monotonic_ns() - infer.earliest_ns)
                worker_id, (result, _) = self._outcomes.get_nowait()
        except queue.Empty:
            pass

    def _arrive(self, times_ns: Sequence[int]) -> None:
        if not times_ns:
            return
        requests = tuple(
            RequestArrived(
                request_id=RequestId(next(self._ids)),
                model_id=self._model_id,
                rows=1,
                arrival_ns=at_ns,
                slo_ns=self._slo_ns,
            )
            for at_ns in times_ns
        )
        for request in requests:
            self._ledger.open(request, None)
        self._ledger.tell(RequestsArrived(requests=requests))

    def _send(self, runtime: LaneThreads[Any], sent: Sent) -> None:
        payloads, number = self._payloads, len(self._payloads)
        payload = [payloads[request_id % number] for request_id in sent.command.request_ids]
        runtime.submit(sent.command.action, payload)

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


def saturate(setting: Serving, ready: Sequence[Prepared], config: SchedulerConfig) -> Measured:
    """Serve, on all of these devices, more requests than any batch takes."""
    with closing(Bench(ready, config)) as served:
        return served.run(setting, outstanding=setting.outstanding * len(ready))
