"""On how many GPUs work of batch clients may run at a time."""

from __future__ import annotations

from clockwright.units import NS_PER_MS
from controller.core.state import WorkerState

_PERIOD_NS = 100 * NS_PER_MS
# Others suffer when they lose more than this share of their requests in a period.
_SUFFERING = 0.025
_DECREASE = 0.9
_INCREASE = 0.25


class BatchLimit:
    """A tenth fewer GPUs after a period in which the other clients suffered, else slowly more; 1 at least."""

    __slots__ = ("_limit", "_until_ns", "missed", "served", "workers")

    def __init__(self) -> None:
        #: Workers with batch work in flight.
        self.workers: dict[WorkerState, None] = {}
        #: Requests of other clients that went to a worker, or were refused, since the last look.
        self.served = 0
        self.missed = 0
        self._limit = 1.0
        self._until_ns = 0

    def take(self, worker: WorkerState, num_workers: int, now_ns: int) -> bool:
        """Let the worker run batch work, if there is room.

        Args:
            worker: which.
            num_workers: GPUs that could run it.
            now_ns: the present.
        """
        if now_ns >= self._until_ns:
            self._adapt(num_workers, now_ns)
        if worker not in self.workers and len(self.workers) >= int(self._limit):
            return False
        self.workers[worker] = None
        return True

    def _adapt(self, num_workers: int, now_ns: int) -> None:
        if self.missed > _SUFFERING * (self.served + self.missed):
            self._limit = max(1.0, self._limit * _DECREASE)
        else:
            self._limit = min(self._limit + _INCREASE, float(num_workers))
        self.served = self.missed = 0
        self._until_ns = now_ns + _PERIOD_NS
