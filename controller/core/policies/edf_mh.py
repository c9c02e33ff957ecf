"""The policy `edf_mh`: earliest latest begin first; what to drop by requests per time, when some must be.

**Late binding.** A lane gets its next action as late as it can be sent without leaving a gap (pace.py).
Until then requests gather and batches grow.

**Infer.** One batch per model: the largest that a run of its queue fills in time. While nothing is being
dropped, the batch that has to begin first goes first. Under overload that order makes every batch late in
turn, so batches are struck out by Moore and Hodgson's rule, those with the fewest requests per GPU time
first. The rule counts the time that the waiting batches take in part, in full, or more than once, by the
share of requests dropped of late: what will yet arrive competes for the same time.

**LoadWeights.** The same on the load lane, by requests saved per PCIe time. A model gets another copy when
requests were refused although it has one.

**Fairness.** A model's batches weigh more the smaller its served share is beside that of all models; those
of requests that carry a tenant, the smaller the tenant's is, and the more by its configured weight.

**Batch clients.** Requests with an SLO of `batch_slo_ns` or more run when nothing else is waiting, and on a
limited number of GPUs at a time, because a long batch that has begun is in the way of whatever comes. The
limit follows the share of the other requests that are dropped.

**Deferral** (Symphony, arXiv 2308.07470). Where many GPUs share few models and requests were dropped of late,
a batch waits while it can grow and be in time: GPUs that take what there is run small batches all the time.

Left out, and recorded beside what was kept (`experiments.figures.ablation`):

* **Prefetch** of models with periodic demand, with every arrival of the next second known: on the Azure replay
  it makes most of the few cold requests warm, which had been answered in time without it.
* **The slowest GPU that is in time** among unlike ones: see `Scheduler._offer`.
* **A further GPU for batch work** while another is idle: it trades what is answered of the others for it.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush, heapreplace

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core.config import SchedulerConfig
from controller.core.estimator import Estimates
from controller.core.events import ActionSucceeded
from controller.core.policies.batch_limit import BatchLimit
from controller.core.policies.clockwork import ClockworkPolicy, best_batch
from controller.core.policies.lookahead import Margin, adapted_lookahead_ns
from controller.core.policies.moore_hodgson import Job, first_kept
from controller.core.policy import Batch
from controller.core.shares import RecentDrops, ServedShare, TenantShares
from controller.core.state import Copy, Model, Request, SentAction, WorkerState

# Most urgent batches, or loads, among which the rule chooses. In overload there are seldom more that
# could still be in time; 64 gave the same.
_MAX_CANDIDATES = 32

# The rule sets in at the first share of requests dropped and is in full force at the second. Always on, it
# loses near saturation, where a burst that passes makes it drop what could have been served.
_PRESSURE_FROM, _PRESSURE_FULL = 0.02, 0.08

# However badly a model was served, its batches weigh no more than this.
_MAX_WEIGHT = 8.0
_NEVER_STRUCK = 1e9

# The others say nothing about how busy lanes are.
_FOR_WANT_OF_TIME = (Refusal.OVERLOADED, Refusal.COLD)

# A refusal calls for another copy for this long.
_SHORT_NS = 100 * NS_PER_MS

# On a GPU that holds more models than this no batch waits to grow: several would end their wait together, and
# some of them would be late.
_MAX_GROWING = 2

# So long after requests were dropped batches wait to grow. Shorter: they would stop to, more would be dropped,
# and so on.
_DEFER_NS = 3 * NS_PER_S

# A lane that is idle because batch work may not run there is looked at again after this.
_RETRY_NS = 10 * NS_PER_MS

# Before anything is measured.
_FIRST_LOOKAHEAD_NS = 2 * NS_PER_MS


class EdfMhPolicy(ClockworkPolicy):
    """Shares the strategy heaps with `clockwork`; chooses otherwise."""

    punctual = True
    eager_copies = True

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._config = config.edf_mh
        self._longest_ns = config.lookahead_ns
        if self._config.adaptive_lookahead:
            self.lookahead_ns = min(_FIRST_LOOKAHEAD_NS, config.lookahead_ns)
        self._margin = Margin(config.margin_ns)
        self._exec_drops = RecentDrops()
        #: Batches that would grow wait until then.
        self._defer_until_ns = 0
        self._load_drops = RecentDrops()
        self._served = ServedShare()
        self._tenants = TenantShares()
        self._batch_slo_ns = config.batch_slo_ns
        self._batch = BatchLimit() if self._config.limit_batch else None

    # --- told by the mechanism ---------------------------------------------------------------

    def demand_changed(self, model: Model) -> None:
        """See `Policy`; demand plays no part."""

    def copy_gone(self, copy: Copy) -> None:
        """See `Policy`."""
        copy.strategy_key = None
        self._look_for_batch_work(copy.worker)

    def infer_ended(self, sent: SentAction, event: ActionSucceeded, now_ns: int) -> None:
        """See `Policy`: learn how far ahead to decide, and how long answers take to come back."""
        copy, worker = sent.copy, sent.copy.worker
        first = sent.requests[0]
        # Batch work is held back at times, which says nothing about the look-ahead.
        if self._config.adaptive_lookahead and first.slo_ns < self._batch_slo_ns:
            staged_ns, longest_ns = event.staged_ns, self._longest_ns
            if staged_ns is None:
                staged_ns = event.begin_ns
            else:
                round_trip_ns = staged_ns - sent.action.earliest_ns + now_ns - event.end_ns
                error_ns = abs(sent.expected_end_ns - event.end_ns)
                longest_ns = min(longest_ns, 2 * (round_trip_ns + error_ns))
            worker.exec_lookahead_ns = worker.load_lookahead_ns = adapted_lookahead_ns(
                worker.exec_lookahead_ns,
                last_end_ns=worker.exec_end_ns,
                waiting_since_ns=max(first.arrival_ns, copy.ready_ns),
                staged_ns=staged_ns,
                begin_ns=event.begin_ns,
                longest_ns=longest_ns,
            )
        worker.exec_end_ns = event.end_ns
        worker.mean_exec_ns += (event.duration_ns - worker.mean_exec_ns) // 16
        if self._config.adaptive_margin:
            self._margin.measured(now_ns - sent.expected_end_ns)
            self.margin_ns = self._margin.ns

    def unpark(self, worker: WorkerState) -> None:
        """See `Policy`."""
        self._look_for_batch_work(worker)
        super().unpark(worker)

    def refused(self, request: Request, refusal: Refusal, *, now_ns: int) -> None:
        """See `Policy`: what other clients lose for want of time on a lane is dropped."""
        if refusal not in _FOR_WANT_OF_TIME or request.slo_ns >= self._batch_slo_ns:
            return
        model = request.model
        if request.tenant:
            self._tenants.count(request.tenant, now_ns, dropped=1)
        if self._batch is not None:
            self._batch.missed += 1
        for copy in model.copies.values():
            if copy.resident:
                model.served.count(now_ns, dropped=1)
                self._served.count(now_ns, dropped=1)
                self._exec_drops.count(now_ns, dropped=1)
                model.short_until_ns = now_ns + _SHORT_NS
                return
        self._load_drops.count(now_ns, dropped=1)

    # --- Infer -------------------------------------------------------------------------------

    def next_infer(self, worker: WorkerState, free_ns: int, now_ns: int) -> Batch | None:
        """See `Policy`."""
        pressure = self._pressure(self._exec_drops, now_ns)
        if pressure > 0.0:
            self._defer_until_ns = now_ns + _DEFER_NS
            if not self._config.prune_infers:
                pressure = 0.0
        defers = now_ns < self._defer_until_ns and self._config.deferral
        most = _MAX_CANDIDATES if pressure > 0.0 else 1
        best = _largest_run if pressure >= 1.0 else _growing_run if defers else _urgent_run
        soon_ns = now_ns + worker.exec_lookahead_ns
        found: list[Batch] = []
        loading: list[Batch] = []
        aside: list[Batch] = []
        growing: list[Batch] = []
        while len(found) < most and len(aside) < _MAX_CANDIDATES:
            candidate = self._take_candidate(worker, free_ns, soon_ns, best, loading)
            if candidate is None:
                break
            if not self._is_batch_work(candidate):
                if defers and _grows_until_ns(candidate) > free_ns:
                    growing.append(candidate)
                else:
                    found.append(candidate)
                continue
            aside.append(candidate)
            if candidate.required_start_ns >= now_ns + self._batch_slo_ns:
                break  # whatever comes after it has an SLO as long
        chosen: Batch | None = None
        if found:
            chosen = found[self._first_kept(found, free_ns, pressure)]
        elif not growing:
            if loading:
                chosen = min(loading, key=lambda b: (b.begin_ns, b.copy.model.sequence))
            elif aside:
                chosen = aside[0]
            if chosen and self._is_batch_work(chosen) and not self._may_run(chosen, worker, now_ns):
                chosen = None
        for candidates in (aside, loading, growing, found):
            for candidate in candidates:
                if candidate is not chosen:
                    self._put_back(candidate)
        if chosen is None:
            if growing:
                worker.retry_ns = min(map(_grows_until_ns, growing)) - (free_ns - now_ns)
            elif worker.strategies:
                worker.retry_ns = now_ns + _RETRY_NS
        elif not self._is_batch_work(chosen):
            self._count(chosen, now_ns)
        return chosen

    def _count(self, chosen: Batch, now_ns: int) -> None:
        served = chosen.count
        chosen.copy.model.served.count(now_ns, served=served)
        self._served.count(now_ns, served=served)
        self._exec_drops.count(now_ns, served=served)
        self._load_drops.count(now_ns, served=served)
        if self._batch is not None:
            self._batch.served += served
        for request in _requests(chosen):
            if request.tenant:
                self._tenants.count(request.tenant, now_ns, served=1)

    def _first_kept(self, found: list[Batch], free_ns: int, pressure: float) -> int:
        if len(found) == 1:
            return 0
        mean = self._served.beside(1.0)
        floor = mean * self._config.served_floor
        jobs = []
        for batch in found:
            model, estimates = batch.copy.model, batch.copy.estimates
            exec_ns = estimates.exec_ns[batch.size_index]
            share = model.served.beside(mean)
            weight = self._weight(share, mean)
            if share < floor:
                weight = _NEVER_STRUCK
            worth = weight * batch.count
            if self._tenants:
                worth = self._worth(batch, weight, mean)
            # Lanes that hold a copy share the work.
            lane_ns = exec_ns / len(model.copies)
            jobs.append(Job(batch.required_start_ns, lane_ns, worth / exec_ns))
        return first_kept(jobs, free_ns, pressure)

    def _weight(self, share: float, mean: float) -> float:
        return min(float((mean / share) ** self._config.fairness), _MAX_WEIGHT)

    def _worth(self, batch: Batch, weight: float, mean: float) -> float:
        """Sum over a batch's requests, of which those without a tenant have the model's weight."""
        weights, tenants = self._config.tenant_weights, self._tenants
        return sum(
            weights.get(request.tenant, 1.0)
            * self._weight(tenants.beside(request.tenant, mean), mean)
            if request.tenant and weight < _NEVER_STRUCK
            else weight
            for request in _requests(batch)
        )

    def _pressure(self, drops: RecentDrops, now_ns: int) -> float:
        """How much of the waiting work counts; 0: none, the most urgent is next."""
        dropped = drops.share(now_ns)
        if dropped <= _PRESSURE_FROM:
            return 0.0
        ramp = min(1.0, (dropped - _PRESSURE_FROM) / (_PRESSURE_FULL - _PRESSURE_FROM))
        return ramp * (1.0 + self._config.pressure_gain * dropped)

    # --- batch clients -----------------------------------------------------------------------

    def _is_batch_work(self, batch: Batch) -> bool:
        return batch.copy.model.queue[batch.first].slo_ns >= self._batch_slo_ns

    def _may_run(self, batch: Batch, worker: WorkerState, now_ns: int) -> bool:
        """Whether batch work may take the lane; if so, it is counted."""
        if self._batch is None:
            return True
        return self._batch.take(worker, len(batch.copy.model.ready), now_ns)

    def _look_for_batch_work(self, worker: WorkerState) -> None:
        """An action of the worker ended, or the worker is gone: it may run no batch work any more."""
        if self._batch is None or worker not in self._batch.workers:
            return
        for sent in worker.in_flight.values():
            if sent.requests and sent.requests[0].slo_ns >= self._batch_slo_ns:
                return
        del self._batch.workers[worker]

    # --- LoadWeights -------------------------------------------------------------------------

    def want_load(self, model: Model, now_ns: int) -> bool:
        """See `Policy`: when it has no copy, or too few."""
        queue, estimates = model.queue, model.fastest
        if not queue or estimates is None or (model.copies and model.short_until_ns <= now_ns):
            return False
        key = queue[0].due_ns - estimates.exec_ns[0] - estimates.load_ns
        if model.load_key is None or model.load_key > key:
            self._num_wanted += model.load_key is None
            model.load_key = key
            heappush(self._wanted, (key, model.sequence, next(self._serial), model))
        return True

    def _first_wanted(self, now_ns: int) -> tuple[float, int, int, Model] | None:
        """The entry with the earliest latest begin, which stays in the heap."""
        wanted = self._wanted
        while wanted:
            key, _, _, model = wanted[0]
            if model.load_key == key:
                if model.queue and (not model.copies or model.short_until_ns > now_ns):
                    return wanted[0]
                self._unwant(model)
            heappop(wanted)
        return None

    def next_load(self, worker: WorkerState, begin_ns: int, now_ns: int) -> Model | None:
        """See `Policy`."""
        wanted = self._wanted
        pressure = self._pressure(self._load_drops, now_ns) if self._config.prune_loads else 0.0
        most = _MAX_CANDIDATES if pressure > 0.0 else 1
        elsewhere: list[tuple[float, int, int, Model]] = []
        found: list[Model] = []
        jobs: list[Job] = []
        # Pages that can be freed, and that cannot. Who needs more must not be in others' way.
        fitting, too_many = worker.num_free_pages, worker.num_pages + 1
        while len(found) < most and (entry := self._first_wanted(now_ns)) is not None:
            key, _, _, model = entry
            queue = model.queue
            readiness = model.ready.get(worker)
            if readiness is None or worker in model.copies:
                elsewhere.append(heappop(wanted))
                continue
            estimates = readiness.estimates
            needed_ns = estimates.load_ns + estimates.exec_ns[0]
            if worker.in_flight:  # when it is loaded, its batch waits for the one that runs
                needed_ns += worker.mean_exec_ns
            usable_ns = begin_ns + needed_ns
            if queue[-1].due_ns < usable_ns:
                elsewhere.append(heappop(wanted))
                continue
            if readiness.num_pages >= too_many or (
                readiness.num_pages > fitting and self.victims(worker, readiness.num_pages) is None
            ):
                too_many = min(too_many, readiness.num_pages)
                elsewhere.append(heappop(wanted))
                continue
            fitting = max(fitting, readiness.num_pages)
            first = 0 if queue[0].due_ns >= usable_ns else bisect_left(queue, usable_ns, key=_due)
            latest_ns = queue[first].due_ns - needed_ns
            if key < latest_ns:
                # The very float of the entry: above 2^53 an integer may differ from it.
                model.load_key = float(latest_ns)
                entry = (model.load_key, model.sequence, next(self._serial), model)
                heapreplace(wanted, entry)
                if wanted[0] is not entry:
                    continue
            heappop(wanted)
            found.append(model)
            load_ns = estimates.load_ns
            jobs.append(Job(latest_ns, load_ns / len(model.ready), (len(queue) - first) / load_ns))
        for entry in elsewhere:
            heappush(wanted, entry)
        if not found:
            return None
        chosen = found[first_kept(jobs, begin_ns, pressure)]
        for model, job in zip(found, jobs, strict=True):
            if model is not chosen:
                model.load_key = job.latest_ns
                heappush(wanted, (job.latest_ns, model.sequence, next(self._serial), model))
        self._unwant(chosen)
        return chosen


def _urgent_run(copy: Copy, begin_ns: int) -> Batch | None:
    """The largest batch in time that begins with the first request which a batch of one still answers.

    Or, where that pays and others wait for the time saved, Appendix B's: larger, and without the oldest.
    """
    queue, estimates = copy.model.queue, copy.estimates
    if copy.model.num_multi_row or estimates.sizes[0] != 1:
        return best_batch(copy, begin_ns)
    exec_ns, fit = estimates.exec_ns, estimates.fit
    waiting, largest = len(queue), len(fit) - 1
    first, due_ns = 0, queue[0].due_ns
    index = fit[waiting] if waiting <= largest else fit[largest]
    if due_ns - exec_ns[index] < begin_ns:
        alone_ns = begin_ns + exec_ns[0]
        if due_ns < alone_ns:
            first = bisect_left(queue, alone_ns, key=_due)
            if first == waiting:
                return None
            left = waiting - first
            index = fit[left] if left <= largest else fit[largest]
            due_ns = queue[first].due_ns
        if due_ns - exec_ns[index] < begin_ns:
            while due_ns - exec_ns[index] < begin_ns:
                index -= 1
            if _others_wait(copy):
                other = best_batch(copy, begin_ns)
                if other is not None and _pays(other, first, index):
                    return other
    return Batch(copy, first, estimates.sizes[index], index, due_ns - exec_ns[index], begin_ns)


def _growing_run(copy: Copy, begin_ns: int) -> Batch | None:
    """Where batches wait to grow, Appendix B's: those who cannot wait for it are dropped. Else the urgent run."""
    return best_batch(copy, begin_ns) if _few_models(copy) else _urgent_run(copy, begin_ns)


def _few_models(copy: Copy) -> bool:
    """Whether its GPU holds few models, asked for or not, and twice as many GPUs hold this one.

    Else batches of the others fill the time while this one grows by itself.
    """
    num_models = len(copy.worker.copies)
    return num_models <= _MAX_GROWING and len(copy.model.copies) >= 2 * num_models


def _grows_until_ns(batch: Batch) -> int:
    """Until when a batch waits to grow; 0: it does not wait.

    As long as a larger one that begins with the same request would be in time; but for no longer than that would
    take, in which time another GPU of those that share the model is idle.
    """
    copy, larger = batch.copy, batch.size_index + 1
    exec_ns = copy.estimates.exec_ns
    if larger == len(exec_ns) or not _few_models(copy):
        return 0
    first = copy.model.queue[batch.first]
    late_ns = batch.required_start_ns + exec_ns[batch.size_index] - exec_ns[larger]
    return min(late_ns, first.arrival_ns + exec_ns[larger])


def _others_wait(copy: Copy) -> bool:
    """Whether requests of another model wait for the copy's lane, as far as a look at its heap's top tells.

    To look at all of them costs more, and gained nothing.
    """
    for key, _, _, _, other in copy.worker.strategies[1:3]:
        if other is not copy and other.strategy_key == key and other.model.queue:
            return True
    return False


def _pays(other: Batch, first: int, index: int) -> bool:
    """Whether to drop the requests from `first` on that `other` leaves out, and run that.

    It does when in the time saved, beside a batch of size `index` first and the rest after it, more could be
    answered than is dropped, at the rate of `other`.
    """
    estimates, waiting = other.copy.estimates, len(other.copy.model.queue)
    dropped = other.first - first
    if dropped <= 0:
        return False
    exec_ns, sizes = estimates.exec_ns, estimates.sizes
    saved_ns = exec_ns[index] - exec_ns[other.size_index]
    saved_ns += _time_ns(estimates, waiting - first - sizes[index])
    saved_ns -= _time_ns(estimates, waiting - other.first - other.count)
    return dropped * exec_ns[other.size_index] < saved_ns * other.count


def _time_ns(estimates: Estimates, waiting: int) -> int:
    """GPU time for so many requests, in full batches, the largest first."""
    exec_ns, sizes, fit = estimates.exec_ns, estimates.sizes, estimates.fit
    whole, waiting = divmod(waiting, sizes[-1])
    time_ns = whole * exec_ns[-1]
    while waiting:
        index = fit[waiting]
        time_ns += exec_ns[index]
        waiting -= sizes[index]
    return time_ns


def _largest_run(copy: Copy, begin_ns: int) -> Batch | None:
    """The largest batch in time, though it may pass over requests that a smaller one could still answer."""
    queue, estimates = copy.model.queue, copy.estimates
    if copy.model.num_multi_row or estimates.sizes[0] != 1:
        return best_batch(copy, begin_ns)
    exec_ns, fit, sizes = estimates.exec_ns, estimates.fit, estimates.sizes
    waiting, largest = len(queue), len(fit) - 1
    index = fit[waiting] if waiting <= largest else fit[largest]
    while index >= 0:
        last = waiting - sizes[index]
        due_ns = begin_ns + exec_ns[index]
        if queue[last].due_ns >= due_ns:
            first = (
                0 if queue[0].due_ns >= due_ns else bisect_left(queue, due_ns, 0, last, key=_due)
            )
            return Batch(
                copy, first, sizes[index], index, queue[first].due_ns - exec_ns[index], begin_ns
            )
        index -= 1
    return None


def _requests(batch: Batch) -> list[Request]:
    return batch.copy.model.queue[batch.first : batch.first + batch.count]


def _due(request: Request) -> int:
    return request.due_ns
