"""Measures what each kind of worker lacks, and what one more worker would answer: signals for autoscalers.

Everything is counted as it happens, per kind: work done where a result comes, requests dropped where they are
refused. Rates are differences between now and a sample of the counts, of which the last ten seconds are kept.
Samples are taken when requests are dropped, and when statistics are read. Without either, rates look back further:
`over_ns` says how far.

| a request is dropped                           | for want of                                         |
|------------------------------------------------|-----------------------------------------------------|
| though a copy of its model is resident         | EXEC time                                           |
| and its bytes take the link longer than that   | the link                                            |
| and no copy is; none was evicted               | LOAD time: PCIe                                     |
| and no copy is; one was evicted before         | pages: the weights were there once                  |
| because no worker offers the model             | a worker, whatever its kind                         |

A request counts for the kind of the first worker that has its model. Late answers are no shortage: they were
predicted to be in time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from clockwright.errors import Refusal
from clockwright.units import NS_PER_S, GpuKind, WorkerId
from controller.core.capacity import KindSample, KindStatistics, StartTimes, WorkersNeeded
from controller.core.estimator import Estimates
from controller.core.events import LearnedStart
from controller.core.state import Copy, KindCounts, Model, Request, WorkerState

# To look a member up in its enum takes ten times as long as a global.
_OVERLOADED: Final = Refusal.OVERLOADED
_COLD: Final = Refusal.COLD

_SAMPLE_NS = NS_PER_S
_KEPT_NS = 10 * NS_PER_S
# A worker that is ready for no longer loads all that it is to hold.
_YOUNG_NS = 30 * NS_PER_S
# Models whose batches are looked at in a second; the work of others counts as much per request. With the use of all, in 1 ms
# where 1,000 ran, and in 4 where 10,000 did.
_MODELS_LOOKED_AT = 1000
# Names of lost workers that are remembered.
_LOST_MAX = 1024
# Use of models counts a third after this time; less than this is none.
_USE_NS, _USE_LEAST = 60 * NS_PER_S, math.exp(-5)


@dataclass(slots=True)
class _CountsThen:
    """All counts at one time."""

    at_ns: int
    kinds: dict[GpuKind, KindCounts]
    num_without_worker: int


@dataclass(slots=True)
class _Wanted:
    """The number of workers wanted of one kind, and what it has taken in."""

    capacity: WorkersNeeded = field(default_factory=WorkersNeeded)
    starts: StartTimes = field(default_factory=StartTimes)
    at_ns: int = 0
    #: None: there was no look yet.
    counts: KindCounts | None = None
    num_without_worker: int = 0


class Shortages:
    """Counts per kind, samples of them, and the numbers of workers wanted."""

    def __init__(self) -> None:
        self._kinds: dict[GpuKind, KindCounts] = {}
        self._wanted: dict[GpuKind, _Wanted] = {}
        #: Names of workers that did not drain: one that comes back is no start.
        self._lost: dict[WorkerId, None] = {}
        #: Rows that ran, by model, and when the last of them did; those before that count less, by their age then.
        self._use: dict[Model, tuple[float, int]] = {}
        self._num_without_worker = 0
        self._samples: deque[_CountsThen] = deque([_CountsThen(0, {}, 0)])
        self._due_ns = _SAMPLE_NS

    def of_kind(self, gpu_kind: GpuKind) -> KindCounts:
        """The counts of a kind."""
        return self._kinds.setdefault(gpu_kind, KindCounts())

    def dropped(self, request: Request, refusal: Refusal, now_ns: int) -> None:
        """A request is refused that was never sent.

        It is a shortage only if other requests had what it lacked. Where a lane is idle and no request of its model
        waits, the way to the worker or the load alone took too long, and more hardware does not make these shorter.
        """
        if now_ns >= self._due_ns:
            self.sample(now_ns)
        if refusal is _OVERLOADED or refusal is _COLD:
            for copy in request.model.copies.values():
                if copy.resident:
                    if copy.worker.link.is_thin and _waits_for_link(copy, request):
                        copy.worker.counts.num_for_links += 1
                    elif request.model.queue or copy.worker.exec_lane.available_ns(now_ns) > now_ns:
                        copy.worker.counts.num_for_exec += 1
                    return
            for worker in request.model.ready:
                if request.model.evicted:
                    worker.counts.num_for_pages += 1
                elif request.model.queue or worker.load_lane.available_ns(now_ns) > now_ns:
                    worker.counts.num_for_loads += 1
                return
        elif refusal is Refusal.NO_WORKER:
            self._num_without_worker += 1

    def sample(self, now_ns: int) -> None:
        """Keep the counts of now, if those kept last are a second old; linear in kinds."""
        if now_ns < self._due_ns:
            return
        self._due_ns = now_ns + _SAMPLE_NS
        samples = self._samples
        # The last one that is too old stays until there is another to look back to.
        while len(samples) > 1 and samples[0].at_ns < now_ns - _KEPT_NS:
            samples.popleft()
        kinds = {kind: replace(counts) for kind, counts in self._kinds.items()}
        samples.append(_CountsThen(now_ns, kinds, self._num_without_worker))

    def worker_ready(self, worker: WorkerState, now_ns: int, *, is_resident: bool) -> None:
        """The first model is ready on a worker, where its weights may lie since before it joined."""
        wanted = self._wanted_of(worker.gpu_kind)
        # A worker that was lost, or that an earlier controller had, was not started for the load of now.
        is_back = is_resident or worker.worker_id in self._lost or wanted.capacity.recalled > 0
        self._lost.pop(worker.worker_id, None)
        wanted.starts.ready(now_ns, is_back=is_back)

    def worker_lost(self, worker: WorkerState) -> None:
        """A worker goes that was not asked to."""
        if not worker.draining:
            self._lost[worker.worker_id] = None
            if len(self._lost) > _LOST_MAX:
                del self._lost[next(iter(self._lost))]

    def recall(self, starts: Sequence[LearnedStart]) -> None:
        """Begin with what an earlier controller wanted, and with the starts that it has measured."""
        for each in starts:
            self.of_kind(each.gpu_kind)
            wanted = self._wanted_of(each.gpu_kind)
            wanted.capacity.recall(each.wanted, each.fullness, each.season)
            wanted.starts.recall(each.starts_ns)

    def learned_starts(self) -> list[LearnedStart]:
        """Say how many workers are wanted, and what was measured of starts."""
        return [
            LearnedStart(
                gpu_kind=kind,
                wanted=wanted.capacity.wanted,
                fullness=wanted.capacity.fullness,
                starts_ns=list(wanted.starts.starts_ns),
                season=list(wanted.capacity.season.factors),
            )
            for kind, wanted in self._wanted.items()
            if wanted.capacity.wanted
        ]

    def asked(self, now_ns: int) -> Mapping[Model, float]:
        """Rows that ran lately, by model: older ones count less, and models not in use for five minutes are left out."""
        found = {
            model: rows * math.exp((at_ns - now_ns) / _USE_NS)
            for model, (rows, at_ns) in self._use.items()
        }
        for counts in self._kinds.values():
            for model, (rows, _) in counts.ran.items():
                found[model] = found.get(model, 0.0) + rows
        return {model: rows for model, rows in found.items() if rows >= _USE_LEAST}

    def forget(self, model: Model) -> None:
        """A model is removed."""
        for counts in self._kinds.values():
            counts.ran.pop(model, None)
        self._use.pop(model, None)

    def _take_work(self, kind: GpuKind, over_ns: int, now_ns: int) -> float:
        """EXEC time of the rows that ran, in the batches that gather in half of their SLO; and remember what is in use."""
        ran, use = self._kinds[kind].ran, self._use
        for model, (rows, _) in ran.items():
            before, at_ns = use.get(model, (0.0, now_ns))
            if not model.removed:
                use[model] = before * math.exp((at_ns - now_ns) / _USE_NS) + rows, now_ns
        work_ns, rows_counted = 0.0, 0
        for model, (rows, slo_ns) in islice(ran.items(), _MODELS_LOOKED_AT):
            estimates = model.kinds.get(kind)
            if estimates is not None:
                within_ns = slo_ns // 2
                rows_per_ns = rows / over_ns
                if within_ns > over_ns and not model.removed:
                    # How many gather for longer than since the last look, what came before says.
                    rows_per_ns = min(rows_per_ns, use[model][0] / _USE_NS)
                work_ns += rows * _row_ns(estimates, rows_per_ns, within_ns)
                rows_counted += rows
        rows_all = sum([rows for rows, _ in ran.values()])
        ran.clear()
        return work_ns * rows_all / rows_counted if rows_counted else 0.0

    def _wanted_of(self, gpu_kind: GpuKind) -> _Wanted:
        return self._wanted.setdefault(gpu_kind, _Wanted())

    def _look(
        self, kind: GpuKind, num_joining: int, ready_ns: Sequence[int], now_ns: int
    ) -> _Wanted:
        """Bring the number of workers wanted of a kind up to date, if it is a second old.

        `num_joining` serve no model yet; `ready_ns` says of the others since when they do, without those that drain.
        """
        wanted, counts = self._wanted_of(kind), self._kinds[kind]
        # What was before the first look says nothing, since it is not known how long it took.
        then, over_ns = wanted.counts, now_ns - wanted.at_ns
        if then is None:
            then, over_ns, wanted.num_without_worker = counts, _SAMPLE_NS, self._num_without_worker
            self._take_work(kind, over_ns, now_ns)
        if over_ns < _SAMPLE_NS:
            return wanted
        # Where none is older, what they do is all that there is to go by.
        num_young = sum([since_ns > now_ns - _YOUNG_NS for since_ns in ready_ns])
        sample = KindSample(
            over_ns=over_ns,
            num_workers=len(ready_ns),
            num_joining=num_joining,
            num_young=num_young if num_young < len(ready_ns) else 0,
            work_ns=self._take_work(kind, over_ns, now_ns),
            load_ns=counts.load_ns - then.load_ns,
            num_run=counts.num_run - then.num_run,
            num_for_exec=counts.num_for_exec - then.num_for_exec,
            num_for_links=counts.num_for_links - then.num_for_links,
            num_for_loads=counts.num_for_loads - then.num_for_loads,
            num_for_pages=counts.num_for_pages - then.num_for_pages,
            num_without_worker=self._num_without_worker - wanted.num_without_worker,
        )
        wanted.at_ns, wanted.counts = now_ns, replace(counts)
        wanted.num_without_worker = self._num_without_worker
        wanted.capacity.take(sample, now_ns=now_ns, start_ns=wanted.starts.start_ns)
        wanted.starts.missing(wanted.capacity.needed - len(ready_ns), now_ns)
        return wanted

    def statistics(
        self, now_ns: int, workers: Iterable[WorkerState] = (), *, has_models: bool = True
    ) -> tuple[tuple[KindStatistics, ...], float]:
        """Each kind's, with the number of workers wanted, and the requests per second that no worker was there for.

        Where there are models, workers serve once one is ready there.
        """
        self.sample(now_ns)
        by_kind: dict[GpuKind, list[WorkerState]] = {}
        for worker in workers:
            if not worker.draining:
                by_kind.setdefault(worker.gpu_kind, []).append(worker)
        before = self._before(now_ns)
        over_ns = max(1, now_ns - before.at_ns)
        without = (self._num_without_worker - before.num_without_worker) * NS_PER_S / over_ns
        kinds = []
        for kind, counts in self._kinds.items():
            since_ns = [worker.ready_ns for worker in by_kind.get(kind, [])]
            ready_ns = [now_ns if each is None else each for each in since_ns]
            if has_models:
                ready_ns = [each for each in since_ns if each is not None]
            num_joining = len(since_ns) - len(ready_ns)
            wanted = self._look(kind, num_joining, ready_ns, now_ns)
            found = _statistics(kind, before.kinds.get(kind, KindCounts()), counts, over_ns, now_ns)
            kinds.append(
                replace(
                    found,
                    wanted=wanted.capacity.wanted,
                    limit=wanted.capacity.limit,
                    num_joining=num_joining,
                    start_ns=wanted.starts.start_ns,
                )
            )
        return tuple(kinds), without

    def _before(self, now_ns: int) -> _CountsThen:
        """The oldest sample of the last seconds; where nothing happened for long, the one before."""
        older = [sample for sample in self._samples if sample.at_ns < now_ns]
        for sample in older:
            if sample.at_ns >= now_ns - _KEPT_NS:
                return sample
        return older[-1] if older else self._samples[0]


def _waits_for_link(copy: Copy, request: Request) -> bool:
    """Whether a link carries fewer of such requests than the lane behind it runs in full batches."""
    out_bytes = request.rows * request.model.output_row_bytes
    wire_ns = copy.worker.link.wire_ns(request.num_bytes, out_bytes)
    return wire_ns > request.rows * copy.estimates.ns_per_row


def _row_ns(estimates: Estimates, rows_per_ns: float, within_ns: int) -> float:
    """EXEC time per row in the batches that gather in a time, each of which takes no longer than that."""
    rows = min(max(int(rows_per_ns * within_ns), 1), estimates.sizes[-1])
    place = estimates.cover[rows]
    while place and estimates.exec_ns[place] > within_ns:
        place -= 1
    rows = min(rows, estimates.sizes[place])
    # A batch that is not full may take longer than a smaller one.
    row_ns = estimates.exec_ns[place] / rows
    return (
        min(row_ns, estimates.exec_ns[place - 1] / estimates.sizes[place - 1]) if place else row_ns
    )


def _statistics(
    kind: GpuKind, before: KindCounts, counts: KindCounts, over_ns: int, now_ns: int
) -> KindStatistics:
    worker_ns = max(1, counts.worker_ns_at(now_ns) - before.worker_ns_at(now_ns - over_ns))

    def rate(name: str) -> float:
        return float((getattr(counts, name) - getattr(before, name)) * NS_PER_S / over_ns)

    exec_ns = counts.exec_ns - before.exec_ns
    run_rps = rate("num_run")
    for_exec, for_links = rate("num_for_exec"), rate("num_for_links")
    for_loads, for_pages = rate("num_for_loads"), rate("num_for_pages")
    # In batches as dense as now; and of the rest, as much as each worker there serves with its link, pages and PCIe.
    most_rps = run_rps * over_ns / exec_ns if exec_ns else 0.0
    per_worker_rps = run_rps * over_ns / worker_ns
    other_rps = min(for_links + for_loads + for_pages, per_worker_rps)
    return KindStatistics(
        gpu_kind=kind,
        num_workers=counts.num_workers,
        over_ns=over_ns,
        exec_busy=min(1.0, exec_ns / worker_ns),
        load_busy=min(1.0, (counts.load_ns - before.load_ns) / worker_ns),
        run_rps=run_rps,
        loads_per_s=rate("num_loads"),
        evictions_per_s=rate("num_evictions"),
        dropped_for_exec_rps=for_exec,
        dropped_for_links_rps=for_links,
        dropped_for_loads_rps=for_loads,
        dropped_for_pages_rps=for_pages,
        one_more_rps=min(for_exec + other_rps, most_rps),
    )
