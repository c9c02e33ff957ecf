"""Clockwork's policy (OSDI'20, Appendix B): which batch runs next, which weights to load.

**Infer.** Appendix B gives every request one strategy per batch size, ordered by required start
(deadline minus estimate), and lets each executor walk that queue: skip strategies whose batch cannot
be filled, or for which a larger one could, or that cannot be in time; take the first that is left.
Walking is linear in everything that waits. Here the same choice is computed per model. With a
model's requests in deadline order, the walk meets them so that the strategy of request k that is
neither too large nor too small has size b(k), the largest that the requests from k on can fill. As k
grows, deadlines grow and b(k) shrinks, so required starts ascend: the model's first strategy that is
in time is found by bisection (`runs.best_batch`), and the executor's choice is the least of those over
its models (`strategies`).

**LoadWeights.** Highest load priority first: demand that no resident copy can serve. Priorities only
fall while nothing happens to a model, so what it had is an upper bound (`load_queue`). Eviction is
least recently used.

Deviations from the paper, besides those of the mechanism (scheduler.py): a model may be run behind
its own pending load when that load ends within the look-ahead and no resident model has work
(Appendix B says "about to finish"; the source waits for the load's result); estimates are assumed to
grow with batch size where bisection needs it.
"""

from __future__ import annotations

from bisect import bisect_left

from typing_extensions import override

from controller.core.config import SchedulerConfig
from controller.core.policies.eviction import least_recently_used
from controller.core.policies.load_queue import LoadQueue
from controller.core.policies.runs import best_batch
from controller.core.policies.strategies import Strategies, soonest
from controller.core.policy import Policy
from controller.core.state import Batch, Copy, Model, WorkerState, due_ns_of

# Clockwork's floor for a GPU's load, so that an idle one has a finite priority (load_tracker.cpp).
_MIN_GPU_LOAD_NS = 1e6


class ClockworkPolicy(Policy):
    """Clockwork's own (OSDI'20), Appendix B, kept up to date incrementally."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.lookahead_ns = config.lookahead_ns
        self.max_outstanding = config.max_outstanding
        self.margin_ns = config.margin_ns
        self._capacity_ns = config.capacity_ns
        self._strategies = Strategies()
        self._loads = LoadQueue(self._load_key)

    # --- Infer -------------------------------------------------------------------------------

    @override
    def queue_changed(self, model: Model) -> None:
        self._strategies.update(model)

    @override
    def catch_up(self, worker: WorkerState) -> None:
        self._strategies.catch_up(worker)

    @override
    def unpark(self, worker: WorkerState) -> None:
        self._strategies.unpark(worker)

    @override
    def next_infer(self, worker: WorkerState, free_ns: int, now_ns: int) -> Batch | None:
        loading: list[Batch] = []
        soon_ns = now_ns + self.lookahead_ns + worker.link.excess_ns
        found = self._strategies.find(worker, free_ns, soon_ns, best_batch, loading)
        if not found and not loading:
            return None
        chosen = found[0] if found else soonest(loading)
        self._strategies.take_out(chosen)
        return chosen

    # --- Appendix B's demand, and the load priority made of it -------------------------------

    @override
    def demand_changed(self, model: Model) -> None:
        """Divide the model's demand again among the GPUs that have it, each by its load's inverse."""
        copies = model.copies
        if len(copies) == 1:
            copy = next(iter(copies.values()))
            copy.worker.load_ns += model.demand_ns - copy.allocation_ns
            copy.allocation_ns = float(model.demand_ns)
            return
        if not copies:
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

    @override
    def copy_gone(self, copy: Copy) -> None:
        copy.worker.load_ns -= copy.allocation_ns
        copy.allocation_ns = 0.0
        copy.strategy_key = None

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
            helped = len(queue) - bisect_left(queue, point_ns, key=due_ns_of)
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

    # --- LoadWeights -------------------------------------------------------------------------

    def _load_key(self, model: Model, now_ns: int) -> float | None:
        """The queue has the smallest key first, which is the highest priority."""
        priority = self._priority(model, now_ns)
        return -priority if priority > 0 else None

    @override
    def want_load(self, model: Model, now_ns: int) -> bool:
        key = self._load_key(model, now_ns)
        if key is None:
            return False
        self._loads.want(model, key)
        return True

    @property
    @override
    def wants_any(self) -> bool:
        return self._loads.num_models > 0

    @override
    def forget_unwanted(self, now_ns: int) -> None:
        self._loads.at(0, now_ns)

    @override
    def next_load(self, worker: WorkerState, begin_ns: int, now_ns: int) -> Model | None:
        """The highest load priority among models that the worker lacks and could still serve."""
        loads, place = self._loads, 0
        while (model := loads.at(place, now_ns)) is not None:
            if _helps(model, worker, begin_ns):
                loads.unwant(model)
                return model
            place += 1
        return None

    @override
    def victims(self, worker: WorkerState, num_pages: int, now_ns: int) -> list[Copy] | None:
        """Never a copy that is loading, in use, or has waiting requests."""
        return least_recently_used(worker, num_pages, wanted=False)


def _helps(model: Model, worker: WorkerState, begin_ns: int) -> bool:
    """Whether a load of the model on the worker would be in time for its last request."""
    readiness = model.ready.get(worker)
    if readiness is None or worker in model.copies:
        return False
    estimates = readiness.estimates
    return model.queue[-1].due_ns >= begin_ns + estimates.load_ns + estimates.exec_ns[0]
