"""The policy `edf_mh`: the batch that must start soonest runs first, and a drop costs as little as it can.

When not all can be served, those batches are dropped that answer the fewest requests per GPU time.

**Late binding.** A lane gets its next action as late as it can be sent without leaving a gap (`lookahead`).
Until then requests gather and batches grow.

**Infer.** One batch per model: the largest that a run of its queue fills in time (`runs`). While nothing is
being dropped, the batch that has to begin first goes first. Under overload that order makes every batch late
in turn, so batches are struck out by Moore and Hodgson's rule (`moore_hodgson`), those with the fewest
requests per GPU time first, the harder the more requests were dropped of late (`pressure`).

**LoadWeights.** The same on the load lane, by requests saved per PCIe time. A model gets another copy when
requests were refused although it has one.

**Fairness.** A model's batches weigh more the smaller its served share is beside that of all models; requests
that carry a tenant weigh by the tenant's share and its configured weight (`fairness`).

**Batch clients.** Requests with an SLO of `batch_slo_ns` or more run when nothing else is waiting, on a
limited number of GPUs at a time (`batch_clients`).

**Deferral.** Where many GPUs share few models and requests were dropped of late, a batch waits while it can
grow and be in time (`deferral`).

Left out, and recorded beside what was kept (`experiments/results/ablation.json`):

* **Prefetch** of models with periodic demand, with every arrival of the next second known: on the Azure replay
  it makes most of the few cold requests warm, which had been answered in time without it.
* **The slowest GPU that is in time** among unlike ones: see `Dispatch.place`.
* **A further GPU for batch work** while another is idle: it trades what is answered of the others for it.
"""

from __future__ import annotations

from bisect import bisect_left

from typing_extensions import override

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS
from controller.core.config import SchedulerConfig
from controller.core.events import ActionSucceeded
from controller.core.policies.batch_clients import BatchClients
from controller.core.policies.deferral import Deferral
from controller.core.policies.eviction import least_recently_used
from controller.core.policies.fairness import Fairness
from controller.core.policies.load_queue import Entry, LoadQueue
from controller.core.policies.lookahead import adapt_lookahead
from controller.core.policies.margin import Margin
from controller.core.policies.moore_hodgson import Job, first_kept
from controller.core.policies.pressure import pressure_of
from controller.core.policies.runs import Run, largest_run, urgent_run
from controller.core.policies.strategies import Strategies, soonest
from controller.core.policy import Batch, Policy
from controller.core.shares import RecentDrops
from controller.core.state import Copy, Model, Request, SentAction, WorkerState, due_ns_of

# The rule chooses among so many of the most urgent batches, or loads. In overload more are seldom in time;
# 64 gave the same.
_MAX_CANDIDATES = 32

# Refusals for other reasons say nothing about how busy lanes are.
_FOR_WANT_OF_TIME = (Refusal.OVERLOADED, Refusal.COLD)

# A refusal calls for another copy for this long.
_SHORT_NS = 100 * NS_PER_MS

# A lane that is idle because batch work may not run there is asked again after this time.
_RETRY_NS = 10 * NS_PER_MS

# The look-ahead before anything is measured.
_FIRST_LOOKAHEAD_NS = 2 * NS_PER_MS


class EdfMhPolicy(Policy):
    """Earliest latest begin first; Moore and Hodgson's rule under overload."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        run: Run | None = None,
        deferral: Deferral | None = None,
        batch_clients: BatchClients | None = None,
    ) -> None:
        """Make the policy of its parts; an experiment with another rule hands its own part in.

        Args:
            config: the scheduler's settings.
            run: the rule for every model's batch; None: the rule follows what is being dropped.
            deferral: None: the one that `config` asks for.
            batch_clients: None: the ones that `config` asks for.
        """
        pieces = config.edf_mh
        self.max_outstanding = config.max_outstanding
        self.margin_ns = config.margin_ns
        self.at_once = pieces.at_once
        self.lookahead_ns = self._longest_ns = config.lookahead_ns
        if pieces.adaptive_lookahead:
            self.lookahead_ns = min(_FIRST_LOOKAHEAD_NS, config.lookahead_ns)
        self._pieces = pieces
        self._margin = Margin(config.margin_ns)
        self._run = run
        self._deferral = deferral or Deferral(enabled=pieces.deferral)
        self._batch_clients = batch_clients or BatchClients(
            config.batch_slo_ns, limited=pieces.limit_batch
        )
        self._fairness = Fairness(pieces)
        self._strategies = Strategies()
        self._loads = LoadQueue(_load_key)
        # Requests dropped in the last moments for want of time, on either lane.
        self._exec_drops = RecentDrops()
        self._load_drops = RecentDrops()

    # --- Infer -------------------------------------------------------------------------------

    @override
    def next_infer(self, worker: WorkerState, free_ns: int, now_ns: int) -> Batch | None:
        strategies, deferral, clients = self._strategies, self._deferral, self._batch_clients
        pressure = pressure_of(self._exec_drops.share(now_ns), self._pieces.pressure_gain)
        if pressure > 0.0:
            deferral.requests_dropped(now_ns)
            if not self._pieces.prune_infers:
                pressure = 0.0
        defers = now_ns < deferral.until_ns
        run = self._run
        if run is None:
            run = largest_run if pressure >= 1.0 else deferral.run if defers else urgent_run

        # The most urgent batches, several under pressure; those that wait to grow; those of batch clients.
        most = _MAX_CANDIDATES if pressure > 0.0 else 1
        soon_ns = now_ns + worker.exec_lookahead_ns
        found: list[Batch] = []
        loading: list[Batch] = []
        aside: list[Batch] = []
        growing: list[Batch] = []
        while len(found) < most and len(aside) < _MAX_CANDIDATES:
            batch = strategies.take(worker, free_ns, soon_ns, run, loading)
            if batch is None:
                break
            if clients.sent(batch):
                aside.append(batch)
                if batch.required_start_ns >= now_ns + clients.slo_ns:
                    break  # whatever comes after it has an SLO as long
            elif defers and deferral.grows_until_ns(batch) > free_ns:
                growing.append(batch)
            else:
                found.append(batch)

        # Batch clients do not overtake a batch that waits to grow: it would find no GPU idle in the end.
        chosen: Batch | None = None
        if found:
            chosen = found[0] if len(found) == 1 else self._first_kept(found, free_ns, pressure)
            self._count(chosen, now_ns)
        elif not growing and (loading or aside):
            chosen = soonest(loading) if loading else aside[0]
            if not clients.sent(chosen):
                self._count(chosen, now_ns)
            elif not clients.may_run(chosen, worker, now_ns):
                chosen = None

        if len(found) > 1 or aside or loading or growing:
            for batch in [*aside, *loading, *growing, *found]:
                if batch is not chosen:
                    strategies.put_back(batch)
        if chosen is None:
            if growing:
                worker.retry_ns = min(map(deferral.grows_until_ns, growing)) - (free_ns - now_ns)
            elif worker.strategies:
                worker.retry_ns = now_ns + _RETRY_NS
        return chosen

    def _first_kept(self, found: list[Batch], free_ns: int, pressure: float) -> Batch:
        jobs = []
        for batch, worth in zip(found, self._fairness.worths(found), strict=True):
            exec_ns = batch.copy.estimates.exec_ns[batch.size_index]
            # Lanes that hold a copy share the work.
            lane_ns = exec_ns / len(batch.copy.model.copies)
            jobs.append(Job(batch.required_start_ns, lane_ns, worth / exec_ns))
        return found[first_kept(jobs, free_ns, pressure)]

    def _count(self, chosen: Batch, now_ns: int) -> None:
        served = chosen.count
        self._fairness.count_served(chosen, now_ns)
        self._exec_drops.count(now_ns, served=served)
        self._load_drops.count(now_ns, served=served)
        self._batch_clients.served += served

    # --- told by the mechanism ---------------------------------------------------------------

    @override
    def queue_changed(self, model: Model) -> None:
        self._strategies.update(model)

    @override
    def catch_up(self, worker: WorkerState) -> None:
        self._strategies.catch_up(worker)

    @override
    def demand_changed(self, model: Model) -> None:
        """Demand plays no part."""

    @override
    def copy_gone(self, copy: Copy) -> None:
        copy.strategy_key = None
        self._batch_clients.release(copy.worker)

    @override
    def unpark(self, worker: WorkerState) -> None:
        self._batch_clients.release(worker)
        self._strategies.unpark(worker)

    @override
    def refused(self, request: Request, refusal: Refusal, *, now_ns: int) -> None:
        """Requests that other than batch clients lose for want of time on a lane count as dropped."""
        clients = self._batch_clients
        if refusal not in _FOR_WANT_OF_TIME or request.slo_ns >= clients.slo_ns:
            return
        clients.missed += 1
        self._fairness.count_dropped(request, now_ns)
        model = request.model
        for copy in model.copies.values():
            if copy.resident:
                self._fairness.count_dropped_though_resident(model, now_ns)
                self._exec_drops.count(now_ns, dropped=1)
                model.short_until_ns = now_ns + _SHORT_NS
                return
        self._load_drops.count(now_ns, dropped=1)

    @override
    def infer_ended(self, sent: SentAction, event: ActionSucceeded, now_ns: int) -> None:
        """Learn how far ahead to decide, and how long answers take to come back."""
        worker = sent.copy.worker
        # Batch work is held back at times, which says nothing about the look-ahead.
        if self._pieces.adaptive_lookahead and sent.requests[0].slo_ns < self._batch_clients.slo_ns:
            adapt_lookahead(worker, sent, event, longest_ns=self._longest_ns, now_ns=now_ns)
        worker.exec_end_ns = event.end_ns
        worker.mean_exec_ns += (event.duration_ns - worker.mean_exec_ns) // 16
        if self._pieces.adaptive_margin:
            self._margin.measured(now_ns - sent.expected_end_ns)
            self.margin_ns = self._margin.ns

    # --- LoadWeights -------------------------------------------------------------------------

    @override
    def want_load(self, model: Model, now_ns: int) -> bool:
        """A load is wanted when the model has no copy, or too few."""
        queue, estimates = model.queue, model.fastest
        if not queue or estimates is None or (model.copies and model.short_until_ns <= now_ns):
            return False
        self._loads.want(model, queue[0].due_ns - estimates.exec_ns[0] - estimates.load_ns)
        return True

    @property
    @override
    def wants_any(self) -> bool:
        return self._loads.num_models > 0

    @override
    def forget_unwanted(self, now_ns: int) -> None:
        self._loads.first(now_ns)

    @override
    def next_load(self, worker: WorkerState, begin_ns: int, now_ns: int) -> Model | None:
        loads, pressure = self._loads, 0.0
        if self._pieces.prune_loads:
            pressure = pressure_of(self._load_drops.share(now_ns), self._pieces.pressure_gain)
        most = _MAX_CANDIDATES if pressure > 0.0 else 1
        elsewhere: list[Entry] = []
        found: list[Model] = []
        jobs: list[Job] = []
        # Pages that can be freed, and that cannot. A model that needs more must not be in others' way.
        fitting, too_many = worker.num_free_pages, worker.num_pages + 1
        while len(found) < most and (entry := loads.first(now_ns)) is not None:
            key, _, _, model = entry
            queue = model.queue
            readiness = model.ready.get(worker)
            if readiness is None or worker in model.copies:
                elsewhere.append(loads.pop())
                continue
            estimates = readiness.estimates
            needed_ns = estimates.load_ns + estimates.exec_ns[0]
            if worker.in_flight:  # when it is loaded, its batch waits for the one that runs
                needed_ns += worker.mean_exec_ns
            usable_ns = begin_ns + needed_ns
            if queue[-1].due_ns < usable_ns:
                elsewhere.append(loads.pop())
                continue
            if readiness.num_pages >= too_many or (
                readiness.num_pages > fitting and self.victims(worker, readiness.num_pages) is None
            ):
                too_many = min(too_many, readiness.num_pages)
                elsewhere.append(loads.pop())
                continue
            fitting = max(fitting, readiness.num_pages)
            first = (
                0 if queue[0].due_ns >= usable_ns else bisect_left(queue, usable_ns, key=due_ns_of)
            )
            latest_ns = queue[first].due_ns - needed_ns
            # The very float of the entry: above 2^53 an integer may differ from it.
            if key < latest_ns and not loads.postpone(model, float(latest_ns)):
                continue
            loads.pop()
            found.append(model)
            load_ns = estimates.load_ns
            jobs.append(Job(latest_ns, load_ns / len(model.ready), (len(queue) - first) / load_ns))
        for entry in elsewhere:
            loads.put_back(entry)
        if not found:
            return None
        chosen = found[first_kept(jobs, begin_ns, pressure)]
        for model, job in zip(found, jobs, strict=True):
            if model is not chosen:
                loads.put_back_at(model, job.latest_ns)
        loads.unwant(chosen)
        return chosen

    @override
    def victims(self, worker: WorkerState, num_pages: int) -> list[Copy] | None:
        """Never a copy that is loading, in use, or has waiting requests."""
        return least_recently_used(worker, num_pages, wanted=False)


def _load_key(model: Model, now_ns: int) -> float | None:
    """A queued model keeps its key, the latest begin of its load, while it has no copy or too few."""
    if model.queue and (not model.copies or model.short_until_ns > now_ns):
        return model.load_key
    return None
