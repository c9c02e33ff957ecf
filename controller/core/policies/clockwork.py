"""Clockwork's policy (OSDI'20, Appendix B): which batch runs next, which weights to load.

**Infer.** Appendix B gives every request one strategy per batch size, ordered by required start
(deadline minus estimate), and lets each executor walk that queue: skip strategies whose batch cannot
be filled, or for which a larger one could, or that cannot be in time; take the first that is left.
Walking is linear in everything that waits. Here the same choice is computed per model. With a
model's requests in deadline order, the walk meets them so that the strategy of request k that is
neither too large nor too small has size b(k), the largest that the requests from k on can fill. As k
grows, deadlines grow and b(k) shrinks, so required starts ascend: the model's first strategy that is
in time is found by bisection, and the executor's choice is the least of those over its models. A
heap per worker holds a lower bound for each of its models, corrected when it comes to the top.

**LoadWeights.** Highest load priority first (demand that no resident copy can serve), from a heap of
upper bounds, corrected likewise. Eviction is least recently used.

Deviations from the paper, besides those of the mechanism (scheduler.py): a model may be run behind
its own pending load when that load ends within the look-ahead and no resident model has work
(Appendix B says "about to finish"; the source waits for the load's result); estimates are assumed to
grow with batch size where bisection needs it, so a noisy profile may cost the first feasible k.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from clockwright.errors import Refusal
from controller.core.config import SchedulerConfig
from controller.core.estimator import Estimates
from controller.core.events import ActionSucceeded
from controller.core.policy import Batch
from controller.core.state import Copy, Model, Request, SentAction, WorkerState

# Clockwork's floor for a GPU's load, so that an idle one has a finite priority (load_tracker.cpp).
_MIN_GPU_LOAD_NS = 1e6

# Batches of multi-row requests are looked for from this many queue positions, no more.
_MULTI_ROW_STARTS = 32


class ClockworkPolicy:
    """Strategies per worker and load priorities, kept up to date incrementally."""

    predicts = True
    punctual = False
    eager_copies = False

    def __init__(self, config: SchedulerConfig) -> None:
        self.lookahead_ns = config.lookahead_ns
        self.max_outstanding = config.max_outstanding
        self.margin_ns = config.margin_ns
        self._capacity_ns = config.capacity_ns
        self._wanted: list[tuple[float, int, int, Model]] = []
        self._num_wanted = 0
        # Last resort of every heap comparison, so that records are never compared.
        self._serial = count()

    # --- told by the mechanism ---------------------------------------------------------------

    def queue_changed(self, model: Model) -> None:
        """Requests of the model came or went."""
        queue = model.queue
        if not queue:
            return
        head_due_ns = queue[0].due_ns
        waiting = len(queue)
        for copy in model.copies.values():
            estimates = copy.estimates
            fit = estimates.fit
            # The largest size where the batch depends on more than the number of requests: the key
            # has to be a lower bound.
            few = waiting < len(fit) and not model.num_multi_row
            index = fit[waiting] if few else -1
            key = head_due_ns - estimates.exec_ns[index]
            if copy.strategy_key is None or key < copy.strategy_key:
                copy.strategy_key = key
                self._push(copy, key, estimates.sizes[index])

    def demand_changed(self, model: Model) -> None:
        """Its outstanding requests, or the set of its copies, changed: re-allocate its demand."""
        copies = model.copies
        if not copies:
            return
        if len(copies) == 1:
            for worker, copy in copies.items():
                demand_ns = float(model.demand_ns)
                worker.load_ns += demand_ns - copy.allocation_ns
                copy.allocation_ns = demand_ns
            return
        weights = [
            1.0 / load_ns
            if (load_ns := worker.load_ns) > _MIN_GPU_LOAD_NS
            else 1.0 / _MIN_GPU_LOAD_NS
            for worker in copies
        ]
        scale = model.demand_ns / sum(weights, 0.0)
        for (worker, copy), weight in zip(copies.items(), weights, strict=True):
            allocation = scale * weight
            worker.load_ns += allocation - copy.allocation_ns
            copy.allocation_ns = allocation

    def copy_gone(self, copy: Copy) -> None:
        """A copy was evicted or lost."""
        copy.worker.load_ns -= copy.allocation_ns
        copy.allocation_ns = 0.0
        copy.strategy_key = None

    def infer_ended(self, sent: SentAction, event: ActionSucceeded, now_ns: int) -> None:
        """Nothing to learn: the estimator, which is the mechanism's, has the duration."""

    def refused(self, request: Request, refusal: Refusal, *, now_ns: int) -> None:
        """Nothing follows from it."""

    def want_load(self, model: Model, now_ns: int) -> bool:
        """Queue the model for loading if its demand calls for it; tells whether it does."""
        priority = self._priority(model, now_ns)
        if priority <= 0:
            return False
        if model.load_key is None or priority > model.load_key:
            self._num_wanted += model.load_key is None
            model.load_key = priority
            wanted = self._wanted
            heappush(wanted, (-priority, model.sequence, next(self._serial), model))
            if len(wanted) > 64 + 4 * self._num_wanted:
                self._wanted = [e for e in wanted if e[3].load_key == -e[0]]
                heapify(self._wanted)
        return True

    @property
    def wants_any(self) -> bool:
        """See `Policy`."""
        return self._num_wanted > 0

    def forget_unwanted(self, now_ns: int) -> None:
        """See `Policy`."""
        self._first_wanted(now_ns)

    # --- asked by the mechanism --------------------------------------------------------------

    def next_infer(self, worker: WorkerState, free_ns: int, now_ns: int) -> Batch | None:
        """Choose what the exec lane runs next.

        Args:
            worker: its lane has room.
            free_ns: predicted time at which its lane could begin something new.
            now_ns: the present.
        """
        loading: list[Batch] = []
        soon_ns = now_ns + self.lookahead_ns
        chosen = self._take_candidate(worker, free_ns, soon_ns, best_batch, loading)
        if chosen is None and loading:
            chosen = min(loading, key=lambda b: (b.begin_ns, b.copy.model.sequence))
        for batch in loading:
            if batch is not chosen:
                self._put_back(batch)
        return chosen

    def unpark(self, worker: WorkerState) -> None:
        """An action ended: what could not be in time may be after all, if it ended early."""
        parked, worker.parked = worker.parked, []
        for copy in parked:
            if copy.model.queue and worker.copies.get(copy.model) is copy:
                self.queue_changed(copy.model)

    def next_load(self, worker: WorkerState, begin_ns: int, now_ns: int) -> Model | None:
        """Choose the model with the highest load priority that the worker lacks and can make use of.

        Args:
            worker: its load lane has room.
            begin_ns: when a load sent now would begin.
            now_ns: the present.
        """
        wanted = self._wanted
        elsewhere: list[tuple[float, int, int, Model]] = []
        chosen: Model | None = None
        while (entry := self._first_wanted(now_ns)) is not None:
            model = entry[3]
            heappop(wanted)
            readiness = model.ready.get(worker)
            if readiness is None or worker in model.copies:
                elsewhere.append(entry)
                continue
            estimates = readiness.estimates
            usable_ns = begin_ns + estimates.load_ns + estimates.exec_ns[0]
            if model.queue[-1].due_ns < usable_ns:
                elsewhere.append(entry)
                continue
            self._unwant(model)
            chosen = model
            break
        for entry in elsewhere:
            heappush(wanted, entry)
        return chosen

    def victims(self, worker: WorkerState, num_pages: int) -> list[Copy] | None:
        """Least recently used copies that free `num_pages` pages; None when they cannot be freed.

        Never one that is loading, in use, or has waiting requests.
        """
        return least_recently_used(worker, num_pages, wanted=False)

    def _take_candidate(
        self,
        worker: WorkerState,
        free_ns: int,
        soon_ns: int,
        best: Callable[[Copy, int], Batch | None],
        loading: list[Batch],
    ) -> Batch | None:
        """Take the batch that has to begin first out of the worker's heap.

        Args:
            worker: its lane has room.
            free_ns: predicted time at which its lane could begin something new.
            soon_ns: until then a batch behind a load has to begin to be thought of.
            best: a model's batch that is in time from a begin; None when there is none.
            loading: gets those that could begin only after a load, which leave a gap.
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
            batch = best(copy, begin_ns)
            if batch is None:
                heappop(strategies)
                copy.strategy_key = None
                worker.parked.append(copy)
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

    def _put_back(self, batch: Batch) -> None:
        """A candidate was not chosen."""
        copy = batch.copy
        copy.strategy_key = batch.required_start_ns
        self._push(copy, batch.required_start_ns, copy.estimates.sizes[batch.size_index])

    def _push(self, copy: Copy, key: int, size: int) -> None:
        entry = (key, -size, copy.model.sequence, next(self._serial), copy)
        heappush(copy.worker.strategies, entry)

    def _first_wanted(self, now_ns: int) -> tuple[float, int, int, Model] | None:
        """The entry with the highest load priority, which stays in the heap."""
        wanted = self._wanted
        while wanted:
            negative, _, _, model = wanted[0]
            if model.load_key != -negative:
                heappop(wanted)
                continue
            priority = self._priority(model, now_ns)
            if priority <= 0:
                heappop(wanted)
                self._unwant(model)
                continue
            if priority < -negative:
                model.load_key = priority
                heapreplace(wanted, (-priority, model.sequence, next(self._serial), model))
                continue
            return wanted[0]
        return None

    def _unwant(self, model: Model) -> None:
        model.load_key = None
        self._num_wanted -= 1

    # --- Appendix B's load priority ----------------------------------------------------------

    def _priority(self, model: Model, now_ns: int) -> float:
        """Demand that a load could still serve, less what the resident copies will serve of it.

        p_m = d_m - sum over g of a_m,g * capacity_g / l_g, with d_m limited to the requests that
        have not passed the point at which a load could help them.
        """
        queue = model.queue
        if not queue:
            return 0.0
        estimates = model.fastest
        if estimates is None:
            return 0.0
        point_ns = now_ns + estimates.load_ns + estimates.exec_ns[0]
        if queue[0].due_ns >= point_ns:
            helped = len(queue)
        else:
            helped = len(queue) - bisect_left(queue, point_ns, key=_due)
        demand = float(helped * estimates.exec_ns[0])
        if not demand:
            return 0.0
        if model.demand_ns:
            served = 0.0
            for worker, copy in model.copies.items():
                share = copy.allocation_ns / model.demand_ns
                served += share * self._capacity_ns / max(worker.load_ns, _MIN_GPU_LOAD_NS)
            demand -= demand * served
        return demand


def least_recently_used(worker: WorkerState, num_pages: int, *, wanted: bool) -> list[Copy] | None:
    """Copies not in use that free `num_pages` pages; None when they cannot be freed.

    Args:
        worker: whose.
        num_pages: to be free afterwards.
        wanted: those for which requests wait may go, too.
    """
    found: list[Copy] = []
    missing = num_pages - worker.num_free_pages
    for copy in worker.copies.values():
        if missing <= 0:
            break
        if copy.resident and not copy.num_pins and (wanted or not copy.model.queue):
            found.append(copy)
            missing -= copy.num_pages
    return found if missing <= 0 else None


def best_batch(copy: Copy, begin_ns: int) -> Batch | None:
    """The model's strategy with the earliest required start that is in time from `begin_ns`."""
    model = copy.model
    queue = model.queue
    estimates = copy.estimates
    if model.num_multi_row or estimates.sizes[0] != 1:
        return _best_multi_row_batch(copy, begin_ns)
    exec_ns, fit = estimates.exec_ns, estimates.fit
    waiting, largest = len(queue), len(fit) - 1
    index = fit[waiting] if waiting <= largest else fit[largest]
    required_ns = queue[0].due_ns - exec_ns[index]
    first = 0
    if required_ns < begin_ns:
        low, high = 1, waiting
        while low < high:
            middle = (low + high) // 2
            left = waiting - middle
            index = fit[left] if left <= largest else fit[largest]
            if queue[middle].due_ns - exec_ns[index] >= begin_ns:
                high = middle
            else:
                low = middle + 1
        if low == waiting:
            return None
        first = low
        left = waiting - first
        index = fit[left] if left <= largest else fit[largest]
        required_ns = queue[first].due_ns - exec_ns[index]
    return Batch(copy, first, estimates.sizes[index], index, required_ns, begin_ns)


def _best_multi_row_batch(copy: Copy, begin_ns: int) -> Batch | None:
    queue, estimates = copy.model.queue, copy.estimates
    for first in range(min(len(queue), _MULTI_ROW_STARTS)):
        index, count = fill(queue, first, estimates)
        required_ns = queue[first].due_ns - estimates.exec_ns[index]
        if required_ns >= begin_ns:
            return Batch(copy, first, count, index, required_ns, begin_ns)
    return None


def fill(queue: list[Request], first: int, estimates: Estimates) -> tuple[int, int]:
    """Largest compiled size that whole requests from `first` on fill exactly.

    Where none does, because the first request's rows are no compiled size, the smallest that
    holds it, with as many of the following requests as fit: the only case in which a batch is padded.

    Returns:
        Index of the size, and how many requests go in.
    """
    sizes = estimates.sizes
    total = 0
    best: tuple[int, int] | None = None
    for position in range(first, len(queue)):
        total += queue[position].rows
        if total > sizes[-1]:
            break
        index = estimates.fit[total]
        if index >= 0 and sizes[index] == total:
            best = index, position - first + 1
    if best is not None:
        return best
    index = estimates.cover[queue[first].rows]
    total = count = 0
    for position in range(first, len(queue)):
        total += queue[position].rows
        if total > sizes[index]:
            break
        count += 1
    return index, count


def _due(request: Request) -> int:
    return request.due_ns
