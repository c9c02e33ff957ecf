"""Batch clients: requests with an SLO of many seconds, which run in time that others leave over.

A long batch that has begun is in the way of whatever comes. So the work of batch clients runs when nothing
else waits, and on a limited number of GPUs at a time. The limit follows what the other clients lose: a tenth
fewer GPUs after a period in which they suffered, else slowly more, and 1 at least.
"""

from __future__ import annotations

from clockwright.units import NS_PER_MS
from controller.core.state import Batch, WorkerState

_PERIOD_NS = 100 * NS_PER_MS
# Others suffer when they lose more than this share of their requests in a period.
_SUFFERING = 0.025
_DECREASE = 0.9
_INCREASE = 0.25

# One of the lanes that were refused batch work is asked again after this time.
_RETRY_NS = 10 * NS_PER_MS


class BatchClients:
    """Tells which work is theirs, and on which GPUs it may run."""

    def __init__(self, slo_ns: int, *, limited: bool = True) -> None:
        """Begin with a limit of one GPU for SLOs this long or longer; unless `limited`, on every lane that is idle."""
        self.slo_ns = slo_ns
        #: Workers with batch work in flight.
        self.workers: dict[WorkerState, None] = {}
        #: Workers whose lanes were refused batch work when they were asked last.
        self.line: dict[WorkerState, None] = {}
        #: Requests of other clients that went to a worker, or were refused, since the last look.
        self.served = 0
        self.missed = 0
        self._limited = limited
        self._limit = 1.0
        self._until_ns = 0

    def sent(self, batch: Batch) -> bool:
        """Whether the batch's most urgent request is a batch client's."""
        return batch.copy.model.queue[batch.first].slo_ns >= self.slo_ns

    def may_run(self, batch: Batch, worker: WorkerState, now_ns: int) -> bool:
        """Whether a batch of theirs may take the worker's lane."""
        if not self._limited:
            return True
        if now_ns >= self._until_ns:
            self._adapt(len(batch.copy.model.ready), now_ns)
        return worker in self.workers or len(self.workers) < int(self._limit)

    def retry_ns(self, worker: WorkerState, now_ns: int) -> int:
        """When a lane that was refused batch work is asked again.

        Each lane waits longer, the more lanes there are: together they are asked once in `_RETRY_NS`.
        """
        self.line[worker] = None
        return now_ns + _RETRY_NS * len(self.line)

    def asked(self, worker: WorkerState) -> None:
        """The worker's lane is asked what it may run: it was refused nothing yet."""
        self.line.pop(worker, None)

    def runs(self, worker: WorkerState) -> None:
        """A batch of theirs is sent to the worker, which counts as taken."""
        self.workers[worker] = None

    def release(self, worker: WorkerState) -> None:
        """An action of the worker ended, or the worker is gone: it may run no batch work any more."""
        if self.line:
            self.asked(worker)
        if worker not in self.workers:
            return
        for sent in worker.in_flight.values():
            if sent.requests and sent.requests[0].slo_ns >= self.slo_ns:
                return
        del self.workers[worker]

    def _adapt(self, num_workers: int, now_ns: int) -> None:
        """Move the limit, up to no more than the GPUs that could run the work.

        Another model's work may have more GPUs than the one that is asked about: it lowers no limit.
        """
        if self.missed > _SUFFERING * (self.served + self.missed):
            self._limit = max(1.0, self._limit * _DECREASE)
        else:
            raised = min(self._limit + _INCREASE, float(num_workers))
            self._limit = max(self._limit, raised)
        self.served = self.missed = 0
        self._until_ns = now_ns + _PERIOD_NS
