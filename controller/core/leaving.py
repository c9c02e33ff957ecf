"""Which worker leaves: the one of its kind that is cheapest to lose."""

from __future__ import annotations

from clockwright.units import GpuKind
from controller.core.books import Books
from controller.core.state import WorkerState


def cheapest_to_lose(books: Books, gpu_kind: GpuKind) -> tuple[WorkerState | None, str]:
    """Find the worker of a kind that is cheapest to lose. Returns it and why, in words; None: none may leave."""
    workers = [
        worker
        for worker in books.workers.values()
        if worker.gpu_kind == gpu_kind and not worker.draining
    ]
    if len(workers) < 2:
        return None, f"{len(workers)} workers of kind {gpu_kind}, expected 2 at least"
    found = min(workers, key=lambda worker: (len(worker.copies), -worker.sequence))
    return found, f"it holds {len(found.copies)} models, the fewest"
