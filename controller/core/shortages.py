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

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from clockwright.errors import Refusal
from clockwright.units import NS_PER_S, GpuKind
from controller.core.capacity import START_NS, KindStatistics, required_workers
from controller.core.state import Copy, KindCounts, Request

# To look a member up in its enum takes ten times as long as a global.
_OVERLOADED: Final = Refusal.OVERLOADED
_COLD: Final = Refusal.COLD

_SAMPLE_NS = NS_PER_S
_KEPT_NS = 10 * NS_PER_S


@dataclass(slots=True)
class _CountsThen:
    """All counts at one time."""

    at_ns: int
    kinds: dict[GpuKind, KindCounts]
    num_without_worker: int


class Shortages:
    """Counts per kind, and samples of them."""

    def __init__(self) -> None:
        self._kinds: dict[GpuKind, KindCounts] = {}
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

    def statistics(self, now_ns: int) -> tuple[tuple[KindStatistics, ...], float]:
        """Each kind's, and the requests per second that no worker was there for."""
        self.sample(now_ns)
        before = self._before(now_ns)
        over_ns = max(1, now_ns - before.at_ns)
        without = (self._num_without_worker - before.num_without_worker) * NS_PER_S / over_ns
        kinds = tuple(
            _statistics(kind, before.kinds.get(kind, KindCounts()), counts, over_ns, now_ns)
            for kind, counts in self._kinds.items()
        )
        return kinds, without

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
    found = KindStatistics(
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
    wanted, limit = required_workers(found)
    return replace(found, wanted=wanted, limit=limit, start_ns=START_NS)
