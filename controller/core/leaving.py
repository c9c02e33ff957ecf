"""Which worker leaves: the one of its kind that is cheapest to lose.

What a worker holds that others lack has to be loaded again elsewhere, and requests for it wait meanwhile or are refused.
So a worker costs, summed over the models whose weights it holds:

| the weights are                             | it costs                                                  |
|---------------------------------------------|-----------------------------------------------------------|
| nowhere else                                | a load for each row of the last minute, and one more      |
| nowhere else, and pinned                    | twice that                                                |
| elsewhere too, and were asked for of late   | one load: their copies were all of use                    |
| elsewhere too, and were not                 | nothing                                                   |

and in addition what its lanes have to finish first. A worker that is the only one ready for a model does not leave unless
it is named. Sequences and pipelines do not count: state travels with each step, so a worker that
drains has none to hand over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from clockwright.units import GpuKind, WorkerId, format_ns
from controller.core.books import Books
from controller.core.state import Model, WorkerState

_PINNED: Final = 2


@dataclass(frozen=True, slots=True)
class Leaving:
    """Which worker should leave."""

    #: None: none may.
    worker_id: WorkerId | None
    #: Why this one, or why none.
    words: str


def cheapest_to_lose(books: Books, gpu_kind: GpuKind, now_ns: int) -> Leaving:
    """Find the worker of a kind that is cheapest to lose. Takes O(models ready + copies)."""
    there = [worker for worker in books.workers.values() if not worker.draining]
    candidates = [worker for worker in there if worker.gpu_kind == gpu_kind]
    if not candidates:
        return Leaving(None, f"no worker of kind {gpu_kind} is ready")
    if len(there) == 1:
        return Leaving(None, f"worker {there[0].worker_id} is the last one")
    asked = books.shortages.asked(now_ns)
    only = _only_ones(books)
    found = min(
        (worker for worker in candidates if worker not in only),
        key=lambda worker: (cost_ns(worker, asked, now_ns), -worker.sequence),
        default=None,
    )
    if found is None:
        words = _words(candidates[0], only[candidates[0]])
        if len(candidates) > 1:
            words += f"; so it is with the {len(candidates) - 1} others of kind {gpu_kind}"
        return Leaving(None, words)
    alone = sum([_is_alone(model) for model in found.copies])
    cost = format_ns(cost_ns(found, asked, now_ns))
    return Leaving(
        found.worker_id,
        f"of {len(candidates)} of kind {gpu_kind} it costs least: {cost} of loads and work under way;"
        f" it holds {len(found.copies)} models, {alone} of which no other worker holds",
    )


def why_not(books: Books, worker_id: WorkerId) -> str:
    """Say what would have no worker without this one; empty: nothing. Takes O(models ready)."""
    worker = books.workers[worker_id]
    if all(other is worker or other.draining for other in books.workers.values()):
        return f"worker {worker_id} is the last one"
    models = _only_ones(books).get(worker)
    return "" if models is None else _words(worker, models)


def _only_ones(books: Books) -> dict[WorkerState, list[Model]]:
    """Workers that are the only ones ready for models, among those that stay, with these models."""
    only: dict[WorkerState, list[Model]] = {}
    for model in books.models.values():
        staying = [worker for worker in model.ready if not worker.draining]
        if len(staying) == 1 and not model.removed:
            only.setdefault(staying[0], []).append(model)
    return only


def _words(worker: WorkerState, models: list[Model]) -> str:
    more = f" and {len(models) - 5} more" if len(models) > 5 else ""
    names = ", ".join([model.model_id for model in models[:5]])
    return f"worker {worker.worker_id} is the only one ready for {names}{more}"


def cost_ns(worker: WorkerState, asked: Mapping[Model, float], now_ns: int) -> int:
    """What it costs to lose a worker, as time of lanes; `asked` are the rows that ran lately of each model in use."""
    total_ns = worker.exec_lane.available_ns(now_ns) - now_ns
    total_ns += worker.load_lane.available_ns(now_ns) - now_ns
    for model, copy in worker.copies.items():
        num_asked = asked.get(model, 0.0)
        if worker not in model.copies or model.removed:
            continue  # it is avoided for the model
        if not _is_alone(model):
            total_ns += copy.estimates.load_ns if num_asked else 0
        else:
            worth = (1 + num_asked) * (_PINNED if model.pinned else 1)
            total_ns += int(copy.estimates.load_ns * worth)
    return total_ns


def _is_alone(model: Model) -> bool:
    return len(model.copies) == 1
