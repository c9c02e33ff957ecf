"""Which weights make room for others."""

from __future__ import annotations

from controller.core.state import Copy, WorkerState


def least_recently_used(worker: WorkerState, num_pages: int, *, wanted: bool) -> list[Copy] | None:
    """Copies not in use that free `num_pages` pages; None when they cannot be freed.

    Args:
        worker: the GPU to make room on.
        num_pages: to be free afterwards.
        wanted: copies for which requests wait may go, too.
    """
    found: list[Copy] = []
    missing = num_pages - worker.num_free_pages
    for copy in worker.copies.values():
        if missing <= 0:
            break
        needed = bool(copy.model.queue) and worker in copy.model.copies  # else it is suspended
        if copy.resident and not copy.num_pins and (wanted or not needed):
            found.append(copy)
            missing -= copy.num_pages
    return found if missing <= 0 else None
