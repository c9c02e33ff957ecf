"""Deferral: a batch waits while it can grow and still be in time (Symphony, arXiv 2308.07470).

GPUs that take what there is run small batches all the time. Where many GPUs share few models and requests were
dropped of late, waiting costs little: another GPU is idle soon.
"""

from __future__ import annotations

from clockwright.units import NS_PER_S
from controller.core.policies.runs import best_batch, urgent_run
from controller.core.state import Batch, Copy, WorkerState

# On a GPU that holds more models than this no batch waits to grow: several would end their wait together, and
# some of them would be late.
_MAX_MODELS = 2

# Batches wait to grow for so long after the last drop. Were it shorter, they would stop waiting, more would
# be dropped, and so on.
_KEEP_NS = 3 * NS_PER_S


class Deferral:
    """When batches wait to grow, which ones, and until when."""

    def __init__(self, *, enabled: bool = True, keep_ns: int = _KEEP_NS) -> None:
        #: Batches that would grow wait, until then.
        self.until_ns = 0
        self._keep_ns = keep_ns if enabled else 0

    def requests_dropped(self, now_ns: int) -> None:
        """Requests are being dropped for want of time: wait to grow from now on."""
        self.until_ns = now_ns + self._keep_ns

    def may_wait_on(self, worker: WorkerState) -> bool:
        """Whether the worker holds so few models that a batch may wait there."""
        return len(worker.copies) <= _MAX_MODELS

    def shares_gpus(self, copy: Copy) -> bool:
        """Whether the copy's GPU holds few models, and twice as many GPUs hold the copy's model.

        Elsewhere batches of other models fill the time while this one grows by itself.
        """
        num_models = len(copy.worker.copies)
        return num_models <= _MAX_MODELS and len(copy.model.copies) >= 2 * num_models

    def run(self, copy: Copy, begin_ns: int) -> Batch | None:
        """Where batches wait to grow, Appendix B's: requests that cannot wait for it are dropped."""
        drops = self.shares_gpus(copy) and not copy.model.num_unlike
        return (best_batch if drops else urgent_run)(copy, begin_ns)

    def grows_until_ns(self, batch: Batch) -> int:
        """Until when the batch waits to grow; 0: it does not wait.

        As long as a larger one that begins with the same request would be in time, but never longer than
        the larger batch would run: meanwhile another GPU of the model stands idle.
        """
        copy, larger = batch.copy, batch.size_index + 1
        estimates = copy.estimates
        exec_ns = estimates.exec_ns
        if larger == len(exec_ns) or not self.shares_gpus(copy):
            return 0
        if estimates.densest[estimates.sizes[larger]] != larger:
            return 0
        first = copy.model.queue[batch.first]
        late_ns = batch.required_start_ns + exec_ns[batch.size_index] - exec_ns[larger]
        return min(late_ns, first.arrival_ns + exec_ns[larger])
