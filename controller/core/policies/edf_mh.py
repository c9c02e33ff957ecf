"""The policy `edf_mh`: the batch that must start soonest runs first, and a drop costs as little as it can.

When not all can be served, those batches are dropped that answer the fewest requests per GPU time. A request counts as
many times as it has rows, times what its client says that it is worth (`Request.row_worth`). Goodput is reported in
requests all the same.

**Late binding.** A lane gets its next action as late as it can be sent without leaving a gap (`lookahead`).
Until then requests gather and batches grow.

**Infer.** One batch per model: the largest that a run of its queue fills in time (`runs`). While nothing is
being dropped, the batch that has to begin first goes first. Under overload that order makes every batch late
in turn, so batches are struck out by Moore and Hodgson's rule (`moore_hodgson`), those with the fewest
requests per GPU time first, the harder the more requests were dropped of late (`pressure`). A batch that would
leave requests behind, which with it nearly fill the next size, counts less: three that wait are soon four.

**LoadWeights.** The same on the load lane, by requests saved per PCIe time. A model gets another copy when
requests were refused although it has one, also in the pages of copies that served much less; and before any is
refused, when a crowd waits for it.

**Eviction.** The model whose next use is farthest away goes first. A model that is asked at even gaps is a timer: its
next use is known, and it is loaded ahead of it where the load lane has nothing else to do (`eviction`).

**Unlike workers.** A batch or a load is left to the kinds of worker that suit its model, while a lane of those can
have it in time (`suits`).

**Fairness.** Batches and loads of a tenant that used less than its fair share of lane time are worth more than those of
one that used more. A tenant beyond its share is refused before it crowds a queue that others share
(`fairness`).

**Batch clients.** Requests with an SLO of `batch_slo_ns` or more run when nothing else is waiting, on a
limited number of GPUs at a time (`batch_clients`).

**Deferral.** Where many GPUs share few models and requests were dropped of late, a batch waits while it can
grow and be in time (`deferral`).

Left out, and recorded next to what was kept (`experiments/results/ablation.json`):

* **Prefetch** of models other than timers, with every arrival of the next second known: on the Azure replay
  it makes most of the few cold requests warm, which had been answered in time without it.
* **The slowest GPU that is in time** among unlike ones: see `ExecLanes._offer`.
* **A further GPU for batch work** while another is idle: other clients get fewer answers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from typing_extensions import override

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core.config import SchedulerConfig
from controller.core.events import ActionSucceeded
from controller.core.lag import Lag
from controller.core.policies.batch_clients import BatchClients
from controller.core.policies.deferral import Deferral
from controller.core.policies.eviction import NextUse
from controller.core.policies.fairness import Fairness
from controller.core.policies.load_queue import LoadQueue
from controller.core.policies.lookahead import adapt_lookahead
from controller.core.policies.margin import Margin
from controller.core.policies.moore_hodgson import Job, first_kept
from controller.core.policies.pressure import pressure_of
from controller.core.policies.runs import Run, largest_run, urgent_run
from controller.core.policies.strategies import Strategies, soonest
from controller.core.policies.suits import Suits
from controller.core.policy import Policy
from controller.core.shares import RecentDrops
from controller.core.state import Batch, Copy, Model, Request, SentAction, WorkerState, due_ns_of

# The rule chooses among so many of the most urgent batches, or loads. In overload more are seldom in time;
# 64 gave the same.
_MAX_CANDIDATES = 32
# It looks at so many first, then at twice as many, until the choice is all but certain.
_FIRST_CANDIDATES = 4

# Refusals for other reasons say nothing about how busy lanes are.
_FOR_WANT_OF_TIME = (Refusal.OVERLOADED, Refusal.COLD)

# A batch that leaves requests behind which nearly fill the next size counts less, by so much of itself at most:
# they would be dense together, and are sparse apart. 0.4 gave less.
_BROKEN = 0.2

# A refusal calls for another copy for this long.
_SHORT_NS = 100 * NS_PER_MS

# So does a queue that fills this part of the time of its model's lanes, until its last request is due. Smaller: loads
# go to queues that would have been served. Larger: a crowd waits longer for its copies.
_CROWD = 0.25

# A model that was refused takes pages of copies that together served less than this part of what it lost.
_MAX_SERVED = 0.25

# A lane that is idle because what waits is held back, or too late, is asked again after this time.
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
    ) -> None:
        """Make the policy of its parts; an experiment with another rule hands its own part in.

        Args:
            config: the scheduler's settings.
            run: the rule for every model's batch. By default the rule depends on what is being dropped.
            deferral: None: the one that `config` asks for.
        """
        pieces = config.edf_mh
        self.max_outstanding = config.max_outstanding
        self.margin_ns = config.margin_ns
        self.lookahead_ns = self._longest_ns = config.lookahead_ns
        if pieces.adaptive_lookahead:
            self.lookahead_ns = min(_FIRST_LOOKAHEAD_NS, config.lookahead_ns)
        self._pieces = pieces
        self._margin = Margin(config.margin_ns)
        self._run = run
        self._deferral = deferral or Deferral(enabled=pieces.deferral)
        self._batch_clients = BatchClients(config.batch_slo_ns, limited=pieces.limit_batch)
        self._fairness = Fairness(pieces)
        self._next_use = NextUse(enabled=pieces.next_use, prefetches=pieces.prefetch)
        self._suits = Suits()
        self._strategies = Strategies()
        self._loads = LoadQueue(_load_key)
        self._lag = Lag()
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
        held_pressure = self._fairness.pressure(now_ns)
        defers = now_ns < deferral.until_ns and deferral.may_wait_on(worker)
        run = self._run
        if run is None:
            run = largest_run if pressure >= 1.0 else deferral.run if defers else urgent_run

        # The most urgent batches, several under pressure; those that wait to grow; those of batch clients; those
        # that another kind of worker is to have.
        if clients.line:
            clients.asked(worker)
        most = _MAX_CANDIDATES if pressure > 0.0 else 1
        soon_ns = now_ns + worker.exec_lookahead_ns + worker.link.excess_ns
        suits = worker.beside_others and self._pieces.suits
        chosen: Batch | None
        loading: list[Batch] = []
        first, sought = 0, min(most, _FIRST_CANDIDATES)
        batches = strategies.find(worker, free_ns, soon_ns, run, loading, sought)
        if most == 1 and not defers and not suits:
            # Nearly always: the most urgent batch, or nothing.
            if batches:
                chosen = batches[0]
                if chosen.copy.model.queue[chosen.first].slo_ns < clients.slo_ns:
                    strategies.take_out(chosen)
                    return chosen
            elif not loading:
                if worker.strategies:
                    worker.retry_ns = now_ns + _RETRY_NS
                return None
        found: list[Batch] = []
        aside: list[Batch] = []
        growing: list[Batch] = []
        left: list[Batch] = []
        jobs: list[Job] = []
        more = sought
        while True:
            slos_ns = [batch.copy.model.queue[batch.first].slo_ns for batch in batches]
            if defers or suits or max(slos_ns, default=0) >= clients.slo_ns:
                for batch, slo_ns in zip(batches, slos_ns, strict=True):
                    if slo_ns >= clients.slo_ns:
                        aside.append(batch)
                    elif defers and deferral.grows_until_ns(batch) > free_ns:
                        growing.append(batch)
                    elif suits and len(left) < _MAX_CANDIDATES and self._leaves(batch, now_ns):
                        left.append(batch)
                    else:
                        found.append(batch)
            else:
                found += batches
            if len(batches) < more or (
                aside
                and (
                    aside[-1].required_start_ns >= now_ns + clients.slo_ns
                    or len(aside) == len(worker.strategies)
                )
            ):
                break  # whatever comes after that, if anything, has an SLO as long
            if len(found) == most:
                break
            if len(found) == sought:
                self._add_jobs(jobs, found, pressure, now_ns)
                first, is_settled = first_kept(
                    jobs, free_ns, pressure, most=most, held_pressure=held_pressure
                )
                if is_settled:
                    break
                sought = min(2 * sought, most)
            if len(aside) >= _MAX_CANDIDATES:
                break
            position = len(found) + len(loading) + len(aside) + len(growing) + len(left)
            more = sought - len(found)
            batches = strategies.find(worker, free_ns, soon_ns, run, loading, more, position)

        # Batch clients do not overtake a batch that waits to grow: it would find no GPU idle in the end.
        chosen = None
        if found:
            if len(found) > max(len(jobs), 1):
                self._add_jobs(jobs, found, pressure, now_ns)
                first, _ = first_kept(jobs, free_ns, pressure, held_pressure=held_pressure)
            chosen = found[first]
        elif not growing and (loading or aside):
            chosen = soonest(loading) if loading else aside[0]
            if clients.sent(chosen) and not clients.may_run(chosen, worker, now_ns):
                worker.held_until_ns = worker.retry_ns = clients.retry_ns(worker, now_ns)
                chosen = None

        if chosen is not None:
            strategies.take_out(chosen)
        elif growing:
            worker.retry_ns = min(map(deferral.grows_until_ns, growing)) - (free_ns - now_ns)
        elif worker.strategies:
            if worker.retry_ns is None:
                worker.retry_ns = now_ns + _RETRY_NS
            # Batches left to another kind are looked at again before they would be too late here.
            for batch in left:
                at_ns = batch.required_start_ns - (free_ns - now_ns)
                worker.retry_ns = min(worker.retry_ns, max(at_ns, now_ns + NS_PER_MS))
        return chosen

    def _leaves(self, batch: Batch, now_ns: int) -> bool:
        """Whether the batch is better off on another kind of worker, a lane of which can have it in time."""
        copy, count = batch.copy, batch.count
        model = copy.model
        kinds = self._suits.better(model, copy.worker.gpu_kind, count, now_ns)
        if not kinds:
            return False
        due_ns = batch.required_start_ns + copy.estimates.exec_ns[batch.size_index]
        for other, there in model.copies.items():
            if other.gpu_kind not in kinds or count > there.estimates.sizes[-1]:
                continue
            begin_ns = max(
                other.exec_lane.available_ns(now_ns), now_ns + other.link.expected_ns(now_ns)
            )
            if not there.resident:
                begin_ns = max(begin_ns, there.ready_ns)
            estimates = there.estimates
            if begin_ns + estimates.exec_ns[estimates.cover[count]] <= due_ns:
                return True
        return False

    def _add_jobs(self, jobs: list[Job], found: list[Batch], pressure: float, now_ns: int) -> None:
        """Add what the lane could do for those batches that are not among the jobs yet."""
        batches = found[len(jobs) :]
        worths = self._fairness.worths(batches, now_ns)
        for batch, (worth, held) in zip(batches, worths, strict=True):
            exec_ns = batch.copy.estimates.exec_ns[batch.size_index]
            left = len(batch.copy.model.queue) - batch.first - batch.count
            if left and pressure >= 1.0 and not batch.worth:
                worth *= 1.0 - _BROKEN * _part_of_next(batch, left)
            # Lanes that hold a copy share the work.
            lane_ns = exec_ns / len(batch.copy.model.copies)
            jobs.append(Job(batch.required_start_ns, lane_ns, worth / exec_ns, held))

    # --- told by the mechanism ---------------------------------------------------------------

    @override
    def runs(self, batch: Batch, now_ns: int) -> None:
        """Work of batch clients, which runs in time that others leave over, does not count."""
        model, served, clients = batch.copy.model, batch.count, self._batch_clients
        first = model.queue[batch.first]
        if first.slo_ns >= clients.slo_ns:
            clients.runs(batch.copy.worker)
            return
        if self._next_use.watches:
            self._next_use.asked(model, first.arrival_ns)
        self._fairness.count_served(batch, now_ns)
        self._exec_drops.count(now_ns, served=served)
        self._load_drops.count(now_ns, served=served)
        clients.served += served

    @override
    def queue_changed(self, model: Model) -> None:
        self._strategies.update(model)

    @override
    def catch_up(self, worker: WorkerState) -> None:
        self._strategies.catch_up(worker)

    @override
    def copy_gone(self, copy: Copy) -> None:
        copy.strategy_key = None
        self._batch_clients.release(copy.worker)

    @override
    def unpark(self, worker: WorkerState) -> None:
        self._batch_clients.release(worker)
        self._strategies.unpark(worker)

    @override
    def leaves_room(self, request: Request, now_ns: int) -> float:
        """A part of its slack where its tenant used up its share."""
        return self._fairness.leaves_room(request, now_ns)

    def weigh_tenants(self, weights: Mapping[str, float]) -> None:
        """Let tenants' shares be other ones from now on; those that are not named have the configured."""
        self._fairness.weigh(weights)

    @override
    def refused(self, request: Request, refusal: Refusal, *, now_ns: int) -> None:
        """Requests that other than batch clients lose for want of time on a lane count as dropped."""
        clients = self._batch_clients
        if self._next_use.watches:
            self._next_use.asked(request.model, request.arrival_ns)
        if refusal not in _FOR_WANT_OF_TIME or request.slo_ns >= clients.slo_ns:
            return
        clients.missed += 1
        model = request.model
        for copy in model.copies.values():
            if copy.resident:
                self._fairness.count_dropped(request, now_ns)
                if self._lag.is_late and self._lag.at(now_ns):
                    return  # it was the controller that had no time for it, and no lane
                self._exec_drops.count(now_ns, dropped=1)
                model.short_until_ns = now_ns + _SHORT_NS
                if self._next_use.watches:
                    model.lost.count(now_ns)
                return
        self._fairness.count_dropped_cold(request, now_ns)
        self._load_drops.count(now_ns, dropped=1)

    @override
    def infer_ended(self, sent: SentAction, event: ActionSucceeded, now_ns: int) -> None:
        """Learn how far ahead to decide, and how long answers take to come back."""
        worker = sent.copy.worker
        if event.unread_ns or self._lag.is_late:
            self._lag.read(event.unread_ns, now_ns)
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
        if not queue or estimates is None:
            return False
        if model.copies and model.short_until_ns <= now_ns:
            lanes_ns = (queue[-1].due_ns - now_ns) * len(model.copies)
            if (
                not self._pieces.before_refusals
                or (self._lag.is_late and self._lag.at(now_ns))
                or (len(queue) + model.extra_rows.total) * estimates.ns_per_row <= _CROWD * lanes_ns
            ):
                return False
            model.short_until_ns = now_ns + _SHORT_NS
        self._loads.want(model, queue[0].due_ns - estimates.exec_ns[0] - estimates.load_ns)
        return True

    @property
    @override
    def wants_any(self) -> bool:
        return self._loads.num_models > 0

    @override
    def forget_unwanted(self, now_ns: int) -> None:
        self._loads.at(0, now_ns)

    @override
    def next_load(self, worker: WorkerState, begin_ns: int, now_ns: int) -> Model | None:
        loads, pressure = self._loads, 0.0
        if self._pieces.prune_loads:
            pressure = pressure_of(self._load_drops.share(now_ns), self._pieces.pressure_gain)
        most = _MAX_CANDIDATES if pressure > 0.0 else 1
        suits = worker.beside_others and self._pieces.suits
        found: list[Model] = []
        jobs: list[Job] = []
        firsts: list[Request] = []
        # Pages that can be freed, and that cannot. A model that needs more must not be in others' way.
        fitting, too_many = worker.num_free_pages, worker.num_pages + 1
        # Models at earlier places are found, or have to be loaded elsewhere.
        place = 0
        while len(found) < most and (model := loads.at(place, now_ns)) is not None:
            queue = model.queue
            readiness = model.ready.get(worker)
            if readiness is None or worker in model.copies:
                place += 1
                continue
            estimates = readiness.estimates
            if suits and self._leaves_load(model, worker, now_ns):
                place += 1
                continue
            needed_ns = estimates.load_ns + estimates.exec_ns[0]
            if worker.in_flight:  # when it is loaded, its batch waits for the one that runs
                needed_ns += worker.mean_exec_ns
            usable_ns = begin_ns + needed_ns
            if queue[-1].due_ns < usable_ns:
                place += 1
                continue
            if readiness.num_pages >= too_many or (
                readiness.num_pages > fitting
                and self.victims(worker, readiness.num_pages, now_ns) is None
            ):
                too_many = min(too_many, readiness.num_pages)
                place += 1
                continue
            fitting = max(fitting, readiness.num_pages)
            first = (
                0 if queue[0].due_ns >= usable_ns else bisect_left(queue, usable_ns, key=due_ns_of)
            )
            latest_ns = queue[first].due_ns - needed_ns
            assert model.load_key is not None
            if model.load_key < latest_ns:
                loads.move(model, float(latest_ns))
                if loads.at(place, now_ns) is not model:
                    continue
            place += 1
            found.append(model)
            load_ns = estimates.load_ns
            worth = self._fairness.load_worth(model, first, now_ns)
            jobs.append(Job(latest_ns, load_ns / len(model.ready), worth / load_ns))
            firsts.append(queue[first])
        if not found:
            if place or not worker.timers:
                return None
            return self._next_use.expected(worker, begin_ns, now_ns)
        index, _ = first_kept(jobs, begin_ns, pressure)
        chosen = found[index]
        self._fairness.count_loaded(firsts[index], chosen.ready[worker].estimates.load_ns, now_ns)
        for model, job in zip(found, jobs, strict=True):
            if model is not chosen:
                loads.move(model, job.latest_ns)
        loads.unwant(chosen)
        return chosen

    @override
    def victims_of_refused(
        self, model: Model, worker: WorkerState, num_pages: int, now_ns: int
    ) -> list[Copy] | None:
        """Copies that together serve less in a second than a quarter of what the model lost of late."""
        last_ns = model.sought_ns
        if not self._pieces.take_pages or last_ns < now_ns < last_ns + _RETRY_NS:
            return None
        model.sought_ns = now_ns
        victims = self.victims(worker, num_pages, now_ns)
        if victims is None:
            return None
        served = 0.0
        for victim in victims:
            other = victim.model
            # Its other copies go on serving.
            between_ns = max(other.gap_ns, now_ns - other.asked_ns, NS_PER_MS)
            served += NS_PER_S / (between_ns * max(len(other.copies), 1))
        return victims if served < _MAX_SERVED * model.lost.of_late(now_ns) else None

    def _leaves_load(self, model: Model, worker: WorkerState, now_ns: int) -> bool:
        """Whether the model is better off on another kind of worker, which can load it in time."""
        kinds = self._suits.better(model, worker.gpu_kind, 1, now_ns)
        if not kinds:
            return False
        due_ns = model.queue[-1].due_ns
        for other, readiness in model.ready.items():
            if other.gpu_kind not in kinds or other.load_blocked or other in model.copies:
                continue
            estimates = readiness.estimates
            begin_ns = max(
                other.load_lane.available_ns(now_ns), now_ns + other.link.expected_ns(now_ns)
            )
            end_ns = max(begin_ns + estimates.load_ns, other.exec_lane.available_ns(now_ns))
            if end_ns + estimates.exec_ns[0] <= due_ns:
                # It may not come to it: look again before it would be too late here.
                own = model.ready[worker].estimates
                at_ns = due_ns - own.load_ns - own.exec_ns[0] - NS_PER_MS
                worker.load_retry_ns = min(now_ns + _RETRY_NS, max(at_ns, now_ns + NS_PER_MS))
                return True
        return False

    @override
    def victims(self, worker: WorkerState, num_pages: int, now_ns: int) -> list[Copy] | None:
        """Never a copy that is loading, in use, or has waiting requests."""
        return self._next_use.victims(worker, num_pages, now_ns)


def _load_key(model: Model, now_ns: int) -> float | None:
    """A queued model keeps its key, the latest begin of its load, while it has no copy or too few."""
    if model.queue and (not model.copies or model.short_until_ns > now_ns):
        return model.load_key
    return None


def _part_of_next(batch: Batch, left: int) -> float:
    """How much of what a batch lacks of the next size stands behind it in the queue, 0 to 1."""
    estimates, larger = batch.copy.estimates, batch.size_index + 1
    sizes = estimates.sizes
    if larger == len(sizes) or estimates.densest[sizes[larger]] != larger:
        return 0.0  # nothing is gained by it
    return min(left / (sizes[larger] - batch.count), 1.0)
