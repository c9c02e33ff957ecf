"""Which of a worker's models has the batch that must begin first: one sorted list per worker.

The list holds at most one live entry per copy: (key, -batch size, sequence, serial, copy). The key is a lower
bound of the required start of the model's next batch. A bound is corrected when a look comes to it, so a
request that joins a long queue costs nothing here.

An entry is stale unless it has the copy's `strategy_key` and `strategy_serial`; stale ones leave when a look comes
to them. Under overload a look goes through some thirty entries, and most of them are as the look before left
them. So they stay where they are, and a batch that was found is kept with its copy (`Copy.batch`). From a heap
they had to be taken and put back each time. A plain list costs no more than that heap: it is moved in
memory, a microsecond for four thousand entries.

A model with many copies is not entered on all their workers whenever its queue changes. It stands once among the
changed, and each worker enters it when it looks (`catch_up`): at most as many as changed since its last look.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count

from controller.core.estimator import Estimates
from controller.core.policies.runs import Run
from controller.core.state import MANY_COPIES, Batch, Copy, Model, WorkerState, to_front


class Strategies:
    """Keeps the list of every worker, and aside the copies whose requests wait for an early end."""

    __slots__ = ("_changed", "_num_changes", "_parked", "_serial")

    def __init__(self) -> None:
        #: Copies whose waiting requests could not be in time at the last look, each once.
        self._parked: dict[WorkerState, dict[Copy, None]] = {}
        #: Models with many copies for which requests wait: the number of the change, the latest last.
        self._changed: dict[Model, int] = {}
        self._num_changes = 0
        # Breaks every tie in a list, so that records are never compared.
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
        waiting, single = len(queue), not model.num_unlike
        last: Estimates | None = None
        key = size = 0
        for copy in model.copies.values():
            if copy.estimates is not last:
                last = copy.estimates
                # The key has to be a lower bound. Where rows matter too, not only the number of requests, the
                # largest size gives one.
                index = last.fit[waiting] if waiting <= last.sizes[-1] and single else -1
                key, size = queue[0].due_ns - last.exec_ns[index], last.sizes[index]
            if copy.strategy_key is None or key < copy.strategy_key:
                self._insert(copy, key, size, 0)

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
        queue, single = model.queue, not model.num_unlike
        few = len(queue) <= estimates.sizes[-1] and single
        index = estimates.fit[len(queue)] if few else -1
        key = queue[0].due_ns - estimates.exec_ns[index]
        if copy.strategy_key is None or key < copy.strategy_key:
            self._insert(copy, key, estimates.sizes[index], 0)

    def _insert(self, copy: Copy, key: int, size: int, position: int) -> None:
        """Enter a copy at a position, or behind it; its entry before, if any, is stale from now on."""
        copy.strategy_key = key
        serial = copy.strategy_serial = next(self._serial)
        insort(copy.worker.strategies, (key, -size, copy.model.sequence, serial, copy), position)

    def find(
        self,
        worker: WorkerState,
        free_ns: int,
        soon_ns: int,
        run: Run,
        loading: list[Batch],
        most: int = 1,
        position: int = 0,
    ) -> list[Batch]:
        """The batches that have to begin first; they stay in the list.

        Args:
            worker: its lane has room.
            free_ns: predicted time at which its lane could begin something new.
            soon_ns: a batch behind a load counts if it could begin until then.
            run: a model's batch that is in time.
            loading: gets batches that could begin only after a load, which leave a gap.
            most: so many, or fewer if there are no more.
            position: how many were found before, those of `loading` included.
        """
        strategies, is_thin = worker.strategies, worker.link.is_thin
        found: list[Batch] = []
        while position < len(strategies) and len(found) < most:
            key, _, _, serial, copy = strategies[position]
            queue = copy.model.queue
            if copy.strategy_serial != serial or copy.strategy_key != key or not queue:
                # It is superseded by a smaller one, the copy is gone, or no request waits.
                del strategies[position]
                if copy.strategy_serial == serial:
                    copy.strategy_key = None
                continue
            begin_ns = _begin_ns(copy, free_ns) if is_thin else free_ns
            if loads := not copy.resident and copy.ready_ns > begin_ns:
                begin_ns = copy.ready_ns
                if begin_ns > soon_ns:
                    del strategies[
                        position
                    ]  # too early; it comes back when the load is about to end
                    copy.strategy_key = None
                    continue
            batch = copy.batch
            if (
                batch is not None
                and batch.picked is None
                and batch.required_start_ns == key >= begin_ns
                and not batch.first
                and batch.count == len(queue)
                and queue[0].due_ns - copy.estimates.exec_ns[batch.size_index] == key
                and not copy.model.num_unlike
            ):
                batch.begin_ns = begin_ns  # it has all that waits, as at the last look
            else:
                batch = copy.batch = run(copy, begin_ns)
                if batch is None:
                    del strategies[position]
                    copy.strategy_key = None
                    self._park(copy)
                    continue
                if batch.required_start_ns > key:
                    size = copy.estimates.sizes[batch.size_index]
                    del strategies[position]
                    self._insert(copy, batch.required_start_ns, size, position)
                    if strategies[position][3] != copy.strategy_serial:
                        continue
            position += 1
            if loads:
                loading.append(batch)
            else:
                found.append(batch)
        return found

    def take_out(self, batch: Batch) -> None:
        """A batch that was found is run now; where its requests are no run of the queue, they are one then."""
        copy = batch.copy
        if batch.picked is not None:
            to_front(copy.model.queue, batch.picked)
            batch.first = 0
        strategies, serial = copy.worker.strategies, copy.strategy_serial
        position = bisect_left(strategies, (copy.strategy_key,))
        while strategies[position][3] != serial:
            position += 1
        del strategies[position]
        copy.strategy_key = copy.batch = None

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


def _begin_ns(copy: Copy, free_ns: int) -> int:
    """When the first request of a copy's model could run, with what its bytes take on a thin link."""
    model, exec_ns = copy.model, copy.estimates.exec_ns[0]
    first = model.queue[0]
    return copy.worker.link.begin_ns(free_ns, first.num_bytes, model.output_row_bytes, exec_ns)


def soonest(loading: list[Batch]) -> Batch:
    """The batch whose load ends first."""
    return min(loading, key=lambda batch: (batch.begin_ns, batch.copy.model.sequence))
