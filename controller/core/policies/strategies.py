"""Which of a worker's models has the batch that must begin first: one heap per worker.

The heap holds at most one live entry per copy: (key, -batch size, sequence, serial, copy). The key is a lower
bound of the required start of the model's next batch. A bound is corrected when it comes to the top, so a
request that joins a long queue costs nothing here.

An entry is stale unless its key equals the copy's `strategy_key`; stale ones leave when they come to the top.
True removal costs more: an entry costs 2 to 3.5 us more in a sorted list (sortedcontainers 2.4) than in this
heap, and a request makes about one.

A model with many copies is not entered on all their workers whenever its queue changes. It stands once among the
changed, and each worker enters it when it looks (`catch_up`): at most as many as changed since its last look.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from itertools import count

from controller.core.policies.runs import Run
from controller.core.policy import Batch
from controller.core.state import MANY_COPIES, Copy, Model, WorkerState


class Strategies:
    """Keeps the heap of every worker, and aside the copies whose requests wait for an early end."""

    __slots__ = ("_changed", "_num_changes", "_parked", "_serial")

    def __init__(self) -> None:
        #: Copies whose waiting requests could not be in time at the last look, each once.
        self._parked: dict[WorkerState, dict[Copy, None]] = {}
        #: Models with many copies for which requests wait: the number of the change, the latest last.
        self._changed: dict[Model, int] = {}
        self._num_changes = 0
        # Breaks every tie in a heap, so that records are never compared.
        self._serial = count()

    def update(self, model: Model) -> None:
        """Requests of the model came or went, or a copy became usable."""
        queue = model.queue
        if not queue:
            if self._changed:
                self._changed.pop(model, None)
            return
        if len(model.copies) >= MANY_COPIES:
            self._changed.pop(model, None)
            self._num_changes += 1
            self._changed[model] = self._num_changes
            return
        head_due_ns = queue[0].due_ns
        waiting, single = len(queue), not model.num_multi_row
        for copy in model.copies.values():
            estimates = copy.estimates
            # The key has to be a lower bound. Where rows matter too, not only the number of requests, the
            # largest size gives one.
            index = estimates.fit[waiting] if waiting <= estimates.sizes[-1] and single else -1
            key = head_due_ns - estimates.exec_ns[index]
            if copy.strategy_key is None or key < copy.strategy_key:
                copy.strategy_key = key
                entry = (key, -estimates.sizes[index], model.sequence, next(self._serial), copy)
                heappush(copy.worker.strategies, entry)

    def catch_up(self, worker: WorkerState) -> None:
        """Enter on the worker what changed, of models with many copies, since it was asked last."""
        seen = worker.seen_change
        if seen == self._num_changes:
            return
        worker.seen_change = self._num_changes
        for model, number in reversed(self._changed.items()):
            if number <= seen:
                break
            copy = model.copies.get(worker)
            if copy is not None and model.queue:
                self._enter(copy)

    def _enter(self, copy: Copy) -> None:
        """Enter a copy for which requests wait, or move it forward."""
        model, estimates = copy.model, copy.estimates
        queue, single = model.queue, not model.num_multi_row
        few = len(queue) <= estimates.sizes[-1] and single
        index = estimates.fit[len(queue)] if few else -1
        key = queue[0].due_ns - estimates.exec_ns[index]
        if copy.strategy_key is None or key < copy.strategy_key:
            copy.strategy_key = key
            entry = (key, -estimates.sizes[index], model.sequence, next(self._serial), copy)
            heappush(copy.worker.strategies, entry)

    def take(
        self, worker: WorkerState, free_ns: int, soon_ns: int, run: Run, loading: list[Batch]
    ) -> Batch | None:
        """Take out the batch that has to begin first.

        Args:
            worker: its lane has room.
            free_ns: predicted time at which its lane could begin something new.
            soon_ns: a batch behind a load counts if it could begin until then.
            run: a model's batch that is in time.
            loading: gets batches that could begin only after a load, which leave a gap.
        """
        strategies = worker.strategies
        while strategies:
            key, _, _, _, copy = strategies[0]
            if copy.strategy_key != key:
                heappop(strategies)  # superseded by a smaller one, or the copy is gone
                continue
            if not copy.model.queue:
                heappop(strategies)
                copy.strategy_key = None
                continue
            begin_ns = free_ns
            if not copy.resident and copy.ready_ns > free_ns:
                begin_ns = copy.ready_ns
                if begin_ns > soon_ns:
                    heappop(strategies)  # too early; it comes back when the load is about to end
                    copy.strategy_key = None
                    continue
            batch = run(copy, begin_ns)
            if batch is None:
                heappop(strategies)
                copy.strategy_key = None
                self._park(copy)
                continue
            if batch.required_start_ns > key:
                size = copy.estimates.sizes[batch.size_index]
                copy.strategy_key = batch.required_start_ns
                serial = next(self._serial)
                entry = (batch.required_start_ns, -size, copy.model.sequence, serial, copy)
                heapreplace(strategies, entry)
                if strategies[0] is not entry:
                    continue
            heappop(strategies)
            copy.strategy_key = None
            if begin_ns > free_ns:
                loading.append(batch)
                continue
            return batch
        return None

    def put_back(self, batch: Batch) -> None:
        """A batch that was taken is not run now."""
        copy, key = batch.copy, batch.required_start_ns
        copy.strategy_key = key
        size = copy.estimates.sizes[batch.size_index]
        entry = (key, -size, copy.model.sequence, next(self._serial), copy)
        heappush(copy.worker.strategies, entry)

    def _park(self, copy: Copy) -> None:
        """No batch of the copy is in time: do not look again before an action of its worker ends."""
        parked = self._parked.get(copy.worker)
        if parked is None:
            parked = self._parked[copy.worker] = {}
        parked[copy] = None

    def unpark(self, worker: WorkerState) -> None:
        """An action of the worker ended, perhaps early: look again at what could not be in time."""
        if worker not in self._parked:
            return
        for copy in self._parked.pop(worker):
            if copy.model.queue and copy.model.copies.get(worker) is copy:
                self._enter(copy)


def soonest(loading: list[Batch]) -> Batch:
    """The batch whose load ends first."""
    return min(loading, key=lambda batch: (batch.begin_ns, batch.copy.model.sequence))
