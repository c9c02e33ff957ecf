"""Predicts which of several models could answer a request in time.

Each model is judged by a lower bound like the one in `admission`. But the members of an ensemble share lanes: each one
that fits takes time from those after it. So K requests with one deadline are priced as K requests, and the members that
do not fit are known before anything is sent.

This bound differs from that of `admission`. Here the queue ahead is priced at the fastest
kind's rate, on all copies, also where the model would be loaded again, and `INFEASIBLE` compares with the time
that is left, not with the whole SLO. Whose request it is does not count. A forecast decides which
members are asked; `admission` has the last word.

It writes in one place, which a forecast should not: `_doubt`, as `admission` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from clockwright.errors import Refusal
from clockwright.units import WorkerId
from controller.core.admission import rows_due
from controller.core.estimator import Estimates
from controller.core.state import Model, Readiness, WorkerState


@dataclass(slots=True)
class Forecast:
    """The prediction for one model."""

    #: None: it can be in time.
    refusal: Refusal | None = None
    #: From now to the end of the EXEC, at the earliest.
    wait_ns: int = 0
    exec_ns: int = 0
    #: From now until an action that is sent now could begin, and until the weights are there; 0: they are.
    way_ns: int = 0
    load_ns: int = 0
    #: What it was made with, and all workers that could run the model.
    estimates: Estimates | None = field(default=None, compare=False, repr=False)
    workers: frozenset[WorkerId] = field(default=frozenset(), compare=False, repr=False)


def forecast(
    models: Sequence[Model | None],
    rows: int,
    *,
    due_ns: int,
    now_ns: int,
    together: bool,
    num_bytes: int = 0,
) -> list[Forecast]:
    """Predict the earliest end of a request to each model.

    Args:
        models: the most important first. None stands for a model that does not exist.
        rows: of the request, the same for all.
        due_ns: when the EXEC has to end.
        now_ns: the present.
        together: all are asked; else each as if it were the only one.
        num_bytes: of the request's inputs, which every model that is asked gets.
    """
    # When each lane is free again behind the members that go before.
    exec_free_ns: dict[WorkerState, int] = {}
    load_free_ns: dict[WorkerState, int] = {}
    result: list[Forecast] = []
    for model in models:
        best = Forecast(Refusal.NO_WORKER)
        where: WorkerState | None = None
        load_end_ns = 0
        if model is not None:
            ready = model.ready or _last_resort(model, now_ns)
            if ready:
                best.refusal = Refusal.INFEASIBLE  # unless some worker runs so many rows
            elif model.suspended:
                best.refusal = Refusal.FAILED
            out_bytes = rows * model.output_row_bytes
            queue_ns = _queue_ns(model, rows, due_ns)
            for worker, readiness in ready.items():
                estimates = readiness.estimates
                if rows > estimates.sizes[-1]:
                    continue
                earliest_ns = now_ns + worker.link.expected_ns(now_ns, num_bytes, out_bytes)
                begin_ns = max(worker.exec_lane.available_ns(now_ns), earliest_ns)
                begin_ns = max(begin_ns, exec_free_ns.get(worker, 0))
                copy = model.copies.get(worker)
                loaded_ns = 0
                if copy is None:
                    loaded_ns = max(worker.load_lane.available_ns(now_ns), earliest_ns)
                    loaded_ns = max(loaded_ns, load_free_ns.get(worker, 0)) + estimates.load_ns
                elif not copy.resident:
                    loaded_ns = copy.ready_ns
                exec_ns = estimates.exec_ns[estimates.cover[rows]]
                busy_ns = max(exec_ns, queue_ns)
                wait_ns = max(begin_ns, loaded_ns) + busy_ns - now_ns
                if where is None or wait_ns < best.wait_ns:
                    load_ns = max(loaded_ns - now_ns, 0)
                    way_ns = earliest_ns - now_ns
                    best = Forecast(None, wait_ns, exec_ns, way_ns, load_ns, estimates)
                    where, load_end_ns = worker, loaded_ns
        if model is not None and where is not None:
            best.workers = frozenset([worker.worker_id for worker in model.ready])
            if now_ns + best.wait_ns > due_ns:
                best.refusal = _reason(model, best.exec_ns, due_ns - now_ns)
                _doubt(model, rows, due_ns - now_ns, now_ns, num_bytes)
            elif together:
                exec_free_ns[where] = now_ns + best.wait_ns
                load_free_ns[where] = max(load_end_ns, load_free_ns.get(where, 0))
        result.append(best)
    return result


def _last_resort(model: Model, now_ns: int) -> dict[WorkerState, Readiness]:
    """Where a request that came now would be tried, though the model is avoided on all workers (health.py)."""
    return {
        worker: suspension.readiness
        for worker, suspension in model.suspended.items()
        if suspension.is_last_resort(now_ns)
    }


def _queue_ns(model: Model, rows: int, due_ns: int) -> int:
    """Time for this request and those of its model that go before it, at the best rate, on all copies."""
    ahead = rows_due(model, due_ns)
    if not ahead or model.fastest is None:
        return 0
    return int((ahead + rows) * model.fastest.ns_per_row / max(len(model.copies), 1))


def _doubt(model: Model, rows: int, left_ns: int, now_ns: int, num_bytes: int) -> None:
    """Doubt an estimate that alone rules the model out: no request would come that could correct it."""
    out_bytes = rows * model.output_row_bytes
    for worker, readiness in model.ready.items():
        estimates = readiness.estimates
        if rows > estimates.sizes[-1]:
            continue
        exec_ns = estimates.exec_ns[estimates.cover[rows]]
        budget_ns = left_ns - worker.link.expected_ns(now_ns, num_bytes, out_bytes)
        if exec_ns > budget_ns:
            worker.link.doubt(now_ns)
            estimates.doubt_exec(rows, budget_ns, now_ns=now_ns)
        elif estimates.load_ns + exec_ns > budget_ns:
            estimates.doubt_load(budget_ns - exec_ns, now_ns=now_ns, tries=not model.copies)


def _reason(model: Model, exec_ns: int, left_ns: int) -> Refusal:
    way_ns = next((worker.link.usual_ns for worker in model.ready), 0)
    if exec_ns + way_ns > left_ns:
        return Refusal.INFEASIBLE
    if any(copy.resident for copy in model.copies.values()):
        return Refusal.OVERLOADED
    return Refusal.COLD
