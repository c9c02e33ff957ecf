"""Explains why a request was refused, and what would have let it succeed.

It is called once per refusal, right after the event that led to it, because the state changes a moment later. It takes
no part in decisions and changes nothing that does.

A remedy is a promise to the client that tries it, so it errs on the safe side:

* If hardly anything is dropped on lanes of the kind, the load was a short burst. A longer SLO helps, if all open
  requests can go first.
* If more is dropped, the load lasts, and requests with shorter SLOs go first, so a longer SLO alone promises nothing.
  More workers help, as many as would have run what was dropped, with an SLO that suffices on an idle worker.
* Where the weights are not resident, the SLO has to leave time for a load. To pin the model is as good, while EXEC
  lanes have room: then nothing else has to change, neither the SLO nor the number of workers.
* A request that no worker serves, that failed, or that was late after all has no remedy that could be promised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, GpuKind, WorkerId
from controller.core.books import Books
from controller.core.events import RefuseRequest, RequestArrived
from controller.core.state import KindCounts, WorkerState

# Rates look back so far, and twice as far at most while requests are dropped.
_WINDOW_NS: Final = 250 * NS_PER_MS

# A crowd passes while less of the work is dropped than this part.
_FEW: Final = 0.02

# So much work for each lane within an SLO is a crowd: what lies in queues is never run as densely as it could be.
_CROWD: Final = 0.8

# LOAD lanes have no time to spare when they are busy for such a part of it.
_BUSY: Final = 0.7

# Further workers are to run so many times what was dropped: what comes is never as even as what was counted.
_SPARE: Final = 1.2

# The mean SLO is that of about so many refused requests, and before any was refused that of a server as it comes.
_FIRST_SLO_NS: Final = 100 * NS_PER_MS
_MEMORY: Final = 32

# So many are shown of the workers that could have run the request.
_MAX_SHOWN: Final = 3

_FOR_WANT_OF_TIME: Final = (Refusal.OVERLOADED, Refusal.COLD, Refusal.INFEASIBLE)


#: A worker that could have run a request, when that was refused: whether the model's weights lay there, or were on
#: their way; for how long its EXEC lane and its LOAD lane were busy from then on, in ns; its free pages, and all.
Lane = tuple[WorkerId, bool, bool, int, int, int, int]


@dataclass(slots=True)
class Remedy:
    """The changes that together would have let a request succeed. Without any, nothing is promised."""

    #: Its SLO would have been this long; 0: its own is long enough.
    slo_ns: int = 0
    #: More workers like the present ones.
    more_workers: int = 0

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.slo_ns or self.more_workers)


@dataclass(slots=True)
class Obstacles:
    """What stood in the way of one request when it was refused."""

    #: Requests of its model that were waiting, and pages that its weights take.
    num_waiting: int
    num_pages: int
    #: Requests without an answer, of all models.
    num_open: int
    #: Part of the requests for lanes of its kind that were dropped of late.
    dropped_share: float
    #: Some workers that have a copy, or could load one if none has.
    lanes: tuple[Lane, ...]
    remedy: Remedy
    #: To pin its model, and nothing else, would have let it succeed too.
    pinning: bool = False


class Remedies:
    """Finds remedies, and remembers what was dropped of late to do so."""

    def __init__(self, books: Books) -> None:
        self._books = books
        #: The mean SLO of requests that were refused of late.
        self._mean_slo_ns = float(_FIRST_SLO_NS)
        #: Counts of each kind now and then: when, and what they were, twice.
        self._then: dict[GpuKind, tuple[int, KindCounts, int, KindCounts]] = {}

    def obstacles(
        self, request: RequestArrived, refused: RefuseRequest, *, margin_ns: int, margin_share: float,
        now_ns: int,
    ) -> Obstacles:  # fmt: skip
        """Say what stands in the way of a request that is refused now.

        The policy keeps a margin free for answers' way back, and at most a share of the SLO.
        """
        books = self._books
        model = books.models.get(request.model_id)
        if model is None:
            return Obstacles(0, 0, len(books.requests), 0.0, (), Remedy())
        copies, lanes = model.copies, []
        worker: WorkerState | None = None
        for each in copies or model.ready:
            copy = copies.get(each)
            lanes.append(
                (
                    each.worker_id,
                    copy is not None and copy.resident,
                    copy is not None and not copy.resident,
                    each.exec_lane.available_ns(now_ns) - now_ns,
                    each.load_lane.available_ns(now_ns) - now_ns,
                    each.num_free_pages,
                    each.num_pages,
                )
            )
            worker = worker or each
            if len(lanes) == _MAX_SHOWN:
                break
        readiness = None if worker is None else model.ready.get(worker)
        found = Obstacles(
            len(model.queue),
            0 if readiness is None else readiness.num_pages,
            len(books.requests),
            0.0,
            tuple(lanes),
            Remedy(),
        )
        estimates = model.fastest
        if (
            refused.refusal not in _FOR_WANT_OF_TIME
            or estimates is None
            or worker is None
            or request.rows > estimates.sizes[-1]
        ):
            return found
        if books.pinned and not model.has_room_beside_pins():
            # However long it may wait: only another worker has room for it.
            found.remedy.more_workers = 1
            return found
        self._mean_slo_ns += (request.slo_ns - self._mean_slo_ns) / _MEMORY
        served, dropped, for_exec = self._of_late(worker, now_ns)
        found.dropped_share = dropped / (served + dropped) if dropped else 0.0
        exec_ns = estimates.exec_ns[estimates.cover[request.rows]]
        # On lanes without a crowd it waits for the EXEC that runs, and for one more that has to go first.
        in_front_ns = 2 * max(worker.mean_exec_ns, exec_ns)
        least_ns = worker.link.usual_ns + max(worker.link.excess_ns, 0) + in_front_ns + exec_ns
        for copy in copies.values():
            if copy.resident:
                break
        else:
            if for_exec < _FEW * (served + for_exec):
                warm_ns = least_ns + _margin_ns(least_ns, margin_ns, margin_share)
                found.pinning = warm_ns <= request.slo_ns and not model.pinned
            # Loads are not interrupted either.
            least_ns += 2 * estimates.load_ns
        num_workers = max(worker.counts.num_workers, 1)
        # Where much is dropped requests stay for nearly as long as they may: so much is asked now, as far as one
        # model's pace is that of all. It tells of a crowd before many of it were dropped.
        usual_ns = max(request.slo_ns, self._mean_slo_ns)
        asked = len(books.requests) * estimates.ns_per_row / usual_ns
        if found.dropped_share >= _FEW or asked > _CROWD * num_workers:
            more = dropped / max(served, 1.0) * num_workers
            found.remedy.more_workers = max(1, ceil(_SPARE * max(more, asked - num_workers)))
        else:
            # All that is open goes first.
            least_ns = max(least_ns, refused.load_ns + refused.exec_ns + refused.queue_ns)
            least_ns += int(len(books.requests) * estimates.ns_per_row / num_workers)
        slo_ns = least_ns + _margin_ns(least_ns, margin_ns, margin_share)
        if slo_ns > request.slo_ns:
            found.remedy.slo_ns = slo_ns
        return found

    def _of_late(self, worker: WorkerState, now_ns: int) -> tuple[float, float, float]:
        """Requests that workers of a kind ran of late, those dropped for want of them, and of EXEC time."""
        counts, kind = worker.counts, worker.gpu_kind
        if kind not in self._then:
            self._then[kind] = 0, KindCounts(), 0, KindCounts()
        before_ns, before, then_ns, then = self._then[kind]
        if now_ns >= then_ns + _WINDOW_NS:
            before_ns, before = then_ns, then
            self._then[kind] = before_ns, before, now_ns, replace(counts)
        for_exec = counts.num_for_exec - before.num_for_exec
        dropped = for_exec + counts.num_for_links - before.num_for_links
        # Where LOAD lanes have time to spare, cold requests are dropped because they leave too little for a load.
        time_ns = max(1, counts.num_workers * (now_ns - before_ns))
        if counts.load_ns - before.load_ns >= _BUSY * time_ns:
            dropped += counts.num_for_loads + counts.num_for_pages
            dropped -= before.num_for_loads + before.num_for_pages
        return counts.num_run - before.num_run, dropped, for_exec


def _margin_ns(least_ns: int, margin_ns: int, margin_share: float) -> int:
    """The time to add to an SLO for the margin that is kept free of it."""
    return min(margin_ns, int(least_ns * margin_share / (1.0 - margin_share)) + 1)
