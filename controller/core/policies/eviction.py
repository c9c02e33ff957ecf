"""Which weights make room for others: those whose next use is farthest away, as far as one can tell.

A model that was asked at even gaps is a timer, and is expected again when its gap has passed; while it is not
overdue, its next use is so far away. About other models nothing is known but how long they were not asked, and
that is taken for how long they will not be: the least recently used goes first. Where models that do not fit are
asked in turn, the least recently used is the next one to be asked, so timers need this. Among the least recently used,
a copy whose model has another elsewhere goes before all: the other serves it. Where copies of all models just fit, each
that is there twice keeps a model out, whose requests are refused if their SLO is shorter than its load.

A decision looks at the head of the worker's copies in order of use, and at the top of its heap of timers. It
never walks all copies, unless most of those that it meets are in use.

Sorted lists, whose entries leave at once, were tried for both heaps. They change which of two timers expected at the
same time goes first, and when a worker counts as having timers: Figure 8's short form has 0.014 points less cold starts
with them. So the heaps stay, with entries that leave when they are met.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count, islice

from clockwright.units import NS_PER_MS
from controller.core.state import MANY_COPIES, Copy, Model, WorkerState

# A gap may differ from the one before by this part of it, and a timer be late by as much.
_TOLERANCE = 8
# Copies of timers that a decision passes over in order of use; it looks for spare ones among as many.
_MAX_PASSED_OVER = 8
# A timer is loaded ahead when it is expected so soon after the end of its load. Timers that stay resident are asked
# one after the other, and meanwhile the load lane would be idle; three times as much gave the same.
_AHEAD_NS = 100 * NS_PER_MS
# Expected uses below this number are never swept.
_SWEEP_MIN = 1024
# Where there is nothing to load ahead, this is looked at again after so long.
_LOOK_NS = 2 * NS_PER_MS


def least_recently_used(worker: WorkerState, num_pages: int, *, wanted: bool) -> list[Copy] | None:
    """Copies not in use that free `num_pages` pages; None when they cannot be freed.

    Copies for which requests wait may go, too, if `wanted`.
    """
    found: list[Copy] = []
    missing = num_pages - worker.num_free_pages
    for copy in worker.copies.values():
        if missing <= 0:
            break
        if not copy.resident or copy.num_pins or copy.model.pinned:
            continue
        if wanted or not _needed(copy):
            found.append(copy)
            missing -= copy.num_pages
    return found if missing <= 0 else None


def _needed(copy: Copy) -> bool:
    """Whether requests wait for it; where its model is avoided on the worker, none do."""
    return bool(copy.model.queue) and copy.worker in copy.model.copies


class NextUse:
    """When each model is asked next, which copies of a worker therefore go first, and what comes before it is asked.

    Cost: a request of a timer costs two heap entries, which leave when they are stale. Nothing is noted before
    some worker's cache is half full.
    """

    __slots__ = ("_enabled", "_serial", "_soon", "_sweep_at", "watches")

    def __init__(self, *, enabled: bool = True, prefetches: bool = True) -> None:
        """Begin where nothing has been evicted.

        Args:
            enabled: else the least recently used always goes first, and nothing is loaded ahead.
            prefetches: load timers ahead.
        """
        self._enabled = enabled
        #: Memory is about to be short: `asked` is to be told of each model that is asked.
        self.watches = False
        #: Heap of (expected next use, serial, model); None: nothing is loaded ahead.
        self._soon: list[tuple[int, int, Model]] | None = [] if prefetches else None
        self._sweep_at = _SWEEP_MIN
        # Breaks every tie in a heap, so that records are never compared.
        self._serial = count()

    @property
    def num_expected(self) -> int:
        """How many expected uses are kept, those included that stand no more."""
        return len(self._soon or ())

    def asked(self, model: Model, arrival_ns: int) -> None:
        """A request of the model that arrived then was sent, or refused."""
        before_ns, last_gap_ns = model.asked_ns, model.gap_ns
        gap_ns = arrival_ns - before_ns
        if gap_ns <= 0:
            return
        model.asked_ns = arrival_ns
        if not before_ns:
            return
        if not last_gap_ns:
            model.gap_ns = gap_ns  # the first gap is taken for even
        elif abs(gap_ns - last_gap_ns) * _TOLERANCE <= gap_ns:
            model.gap_ns = (3 * last_gap_ns + gap_ns) // 4
        else:
            model.gap_ns, model.expected_ns = gap_ns, 0
            return
        if not self._enabled:
            return
        model.expected_ns = expected_ns = arrival_ns + model.gap_ns
        if self._soon is not None:
            heappush(self._soon, (expected_ns, next(self._serial), model))
            if len(self._soon) > self._sweep_at:
                self._sweep(self._soon)
        if len(model.copies) >= MANY_COPIES:
            return  # one of so many may go
        for copy in model.copies.values():
            timers = copy.worker.timers
            copy.expected_ns = expected_ns
            heappush(timers, (-expected_ns, next(self._serial), copy))
            # What was expected before stays in the heap, far from its top.
            if len(timers) > 64 + 4 * len(copy.worker.copies):
                timers[:] = [entry for entry in timers if _stands(entry)]
                heapify(timers)

    def _sweep(self, soon: list[tuple[int, int, Model]]) -> None:
        """Drop uses that stand no more: while load lanes have other work, no lookup meets them at the top."""
        soon[:] = [
            entry for entry in soon if entry[0] == entry[2].expected_ns and not entry[2].removed
        ]
        heapify(soon)
        self._sweep_at = max(_SWEEP_MIN, 4 * len(soon))

    def expected(self, worker: WorkerState, begin_ns: int, now_ns: int) -> Model | None:
        """The timer without a copy that is expected soonest, if all that it would displace is farther away.

        The worker's load lane has nothing else to do; a load would begin at `begin_ns`.
        """
        soon = self._soon
        worker.ahead_ns = now_ns + _LOOK_NS
        if soon is None:
            return None
        elsewhere: list[tuple[int, int, Model]] = []
        found: Model | None = None
        while soon and len(elsewhere) < _MAX_PASSED_OVER:
            expected_ns, _, model = soon[0]
            readiness = model.ready.get(worker)
            load_ns = readiness.estimates.load_ns if readiness is not None else 0
            if expected_ns > begin_ns + load_ns + _AHEAD_NS:
                break
            entry = heappop(soon)
            if (
                expected_ns != model.expected_ns
                or expected_ns < begin_ns
                or model.copies
                or model.queue
            ):
                continue
            if readiness is None:
                elsewhere.append(entry)
                continue
            if not self._displaces(worker, readiness.num_pages, expected_ns, now_ns):
                elsewhere.append(entry)
                break
            worker.ahead_ns = now_ns
            found = model
            break
        for entry in elsewhere:
            heappush(soon, entry)
        return found

    def _displaces(
        self, worker: WorkerState, num_pages: int, expected_ns: int, now_ns: int
    ) -> bool:
        """Whether all that has to go for a timer is farther away than it."""
        victims = self.victims(worker, num_pages, now_ns)
        if victims is None:
            return False
        away_ns = expected_ns - now_ns
        return all(_away_ns(victim.model, now_ns) > away_ns for victim in victims)

    def victims(self, worker: WorkerState, num_pages: int, now_ns: int) -> list[Copy] | None:
        """Copies not in use, and not waited for, that free `num_pages` pages; None when they cannot be freed."""
        if 2 * worker.num_free_pages < worker.num_pages:
            self.watches = True
        missing = num_pages - worker.num_free_pages
        if missing <= 0:
            return []
        spare = _spare(worker, missing)
        if spare is not None:
            return spare
        timers = worker.timers
        if not timers:
            return least_recently_used(worker, num_pages, wanted=False)
        found: list[Copy] = []
        aside: list[tuple[int, int, Copy]] = []
        passed_over = 0
        in_order = iter(worker.copies.values())
        oldest: Copy | None = None
        farthest: Copy | None = None
        while missing > 0:
            while farthest is None and timers:
                entry = timers[0]
                if not _stands(entry):
                    heappop(timers)
                elif -entry[0] <= now_ns:
                    break  # it is due, or overdue, and so are all below it
                else:
                    aside.append(heappop(timers))
                    if _free(entry[2]):
                        farthest = entry[2]
            while oldest is None and passed_over < _MAX_PASSED_OVER:
                copy = next(in_order, None)
                if copy is None:
                    break
                if copy.expected_ns > now_ns:
                    passed_over += 1
                elif _free(copy):
                    oldest = copy
            if farthest is not None and (
                oldest is None or _away_ns(farthest.model, now_ns) > _away_ns(oldest.model, now_ns)
            ):
                victim, farthest = farthest, None
            elif oldest is not None:
                victim, oldest = oldest, None
            else:
                break
            found.append(victim)
            missing -= victim.num_pages
        for entry in aside:
            heappush(timers, entry)
        if missing > 0:
            return least_recently_used(worker, num_pages, wanted=False)
        return found


def _stands(entry: tuple[int, int, Copy]) -> bool:
    """Whether the copy is there still, and is expected at the entry's time."""
    copy = entry[2]
    return -entry[0] == copy.expected_ns and copy.worker.copies.get(copy.model) is copy


def _spare(worker: WorkerState, missing: int) -> list[Copy] | None:
    """Copies that free so many pages, whose models have others: no request has to wait for a load when they are gone."""
    found: list[Copy] = []
    for copy in islice(worker.copies.values(), _MAX_PASSED_OVER):
        if len(copy.model.copies) > 1 and _free(copy):
            found.append(copy)
            missing -= copy.num_pages
            if missing <= 0:
                return found
    return None


def _free(copy: Copy) -> bool:
    return copy.resident and not copy.num_pins and not copy.model.pinned and not _needed(copy)


def _away_ns(model: Model, now_ns: int) -> int:
    """How far away its next use is."""
    late_ns = now_ns - model.expected_ns
    if late_ns <= model.gap_ns // _TOLERANCE and model.expected_ns:
        return max(-late_ns, 0)
    return now_ns - model.asked_ns
