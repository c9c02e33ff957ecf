"""The rules of `edf_mh`, one by one, and the small pure pieces that it is made of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from clockwright.errors import ConfigError, Refusal
from clockwright.units import (
    NS_PER_S,
    ArchitectureId,
    GpuKind,
    ModelId,
    RequestId,
    WorkerId,
)
from clockwright.wire.actions import ActionError, EvictWeights, Infer, LoadWeights
from controller.core import EdfMhConfig, SchedulerConfig
from controller.core.estimator import Estimates
from controller.core.events import (
    ActionFailed,
    ModelAdded,
    ModelReady,
    ModelWanted,
    RefuseRequest,
    RequestArrived,
    RequestCancelled,
    RequestsArrived,
    SendAction,
    TenantsWeighed,
    WorkerJoined,
    WorkerLost,
)
from controller.core.link import LinkPlan
from controller.core.policies import POLICIES
from controller.core.policies.batch_clients import BatchClients
from controller.core.policies.deferral import Deferral
from controller.core.policies.edf_mh import EdfMhPolicy
from controller.core.policies.fairness import Fairness
from controller.core.policies.lookahead import SHORTEST_LOOKAHEAD_NS, adapted_lookahead_ns
from controller.core.policies.margin import Margin
from controller.core.policies.moore_hodgson import Job, first_kept
from controller.core.policies.pressure import pressure_of
from controller.core.policy import Policy, PolicyKind, Traits
from controller.core.shares import MAX_TENANTS, STEP_NS, FairShare, RecentDrops, Usage
from controller.core.state import Batch, Copy, Model, Readiness, Request, WorkerState
from tests.kit.core_bench import MS, NO_DELAY, CoreBench, sends

EXEC = {1: 3 * MS, 2: 4 * MS, 4: 6 * MS, 8: 10 * MS}


# --- Moore and Hodgson ----------------------------------------------------------------------------


def job(latest_ms: float, share_ms: float, density: float = 1.0, *, held: bool = False) -> Job:
    return Job(int(latest_ms * MS), share_ms * MS, density, held)


def test_while_there_is_time_for_all_the_most_urgent_is_first() -> None:
    assert first_kept([job(1, 2), job(5, 2, 9.0)], 0, 1.0)[0] == 0


def test_the_least_dense_job_is_struck_out_when_not_all_are_in_time() -> None:
    jobs = [job(1, 4, 2.0), job(2, 4, 1.0), job(3, 4, 3.0)]
    assert first_kept(jobs, 0, 1.0)[0] == 2  # 0 before 2 would make 2 late, 1 is worth least
    assert first_kept([job(1, 4, 4.0), *jobs[1:]], 0, 1.0)[0] == 0


def test_without_pressure_nothing_is_struck_out() -> None:
    assert first_kept([job(1, 4, 1.0), job(2, 4, 9.0)], 0, 0.0)[0] == 0


def test_under_more_pressure_what_is_sparse_gives_way_sooner() -> None:
    jobs = [job(1, 2, 1.0), job(3, 2, 9.0)]
    assert first_kept(jobs, 0, 1.0)[0] == 0
    assert first_kept(jobs, 0, 2.0)[0] == 1


def test_within_their_shares_jobs_strike_each_other_out_by_what_of_theirs_is_dropped() -> None:
    """However much a flood beside them has dropped."""
    jobs = [job(1, 2, 1.0, held=True), job(5, 2, 9.0, held=True)]
    assert first_kept(jobs, 0, 4.0, held_pressure=4.0)[0] == 1
    assert first_kept(jobs, 0, 4.0, held_pressure=1.0)[0] == 0


def test_where_all_are_struck_out_the_densest_is_first() -> None:
    assert first_kept([job(1, 2, 1.0), job(1, 2, 3.0), job(1, 2, 2.0)], 5 * MS, 1.0)[0] == 1


def test_equal_jobs_are_dropped_nearly_as_seldom_as_possible() -> None:
    """Beside the largest sets that can be done in time, found by trying all."""
    generator = random.Random(1)
    done = most = 0
    for _ in range(200):
        jobs = [
            job(generator.randint(0, 12), length, 1 / length)
            for length in (generator.randint(1, 6) for _ in range(6))
        ]
        done += _done_one_by_one(sorted(jobs))
        most += _most_in_time(sorted(jobs, key=lambda job: job.latest_ns + job.share_ns))
    assert 0.97 * most <= done <= most


def _done_one_by_one(jobs: Sequence[Job]) -> int:
    """Do what the rule names first, again and again, dropping what is too late by then."""
    time_ns, left, done = 0.0, list(jobs), 0
    while left := [job for job in left if job.latest_ns >= time_ns]:
        first = left.pop(first_kept(left, time_ns, 1.0)[0])
        time_ns += first.share_ns
        done += 1
    return done


def _most_in_time(jobs: Sequence[Job]) -> int:
    for size in range(len(jobs), 0, -1):
        for chosen in itertools.combinations(jobs, size):
            starts = itertools.accumulate((job.share_ns for job in chosen), initial=0.0)
            if all(start <= job.latest_ns for start, job in zip(starts, chosen, strict=False)):
                return size
    return 0


# --- look-ahead and margin -----------------------------------------------------------------------------------------


def lookahead_after(
    gap_ms: float, *, waiting_ms: float = 5.0, staged_ms: float | None = None
) -> int:
    end_ns = 100 * MS
    begin_ns = end_ns + int(gap_ms * MS)
    return adapted_lookahead_ns(
        MS,
        last_end_ns=end_ns,
        waiting_since_ns=end_ns - int(waiting_ms * MS),
        staged_ns=begin_ns if staged_ms is None else end_ns + int(staged_ms * MS),
        begin_ns=begin_ns,
        longest_ns=5 * MS,
    )


def test_a_gap_while_work_waits_lengthens_the_lookahead_by_itself() -> None:
    assert lookahead_after(0.3) == int(1.3 * MS)
    assert lookahead_after(30) == 5 * MS


def test_without_gaps_the_lookahead_shrinks_to_its_least() -> None:
    assert SHORTEST_LOOKAHEAD_NS < lookahead_after(0.0) < MS
    lookahead_ns = MS
    for _ in range(2000):
        lookahead_ns = adapted_lookahead_ns(
            lookahead_ns,
            last_end_ns=9 * MS,
            waiting_since_ns=0,
            staged_ns=9 * MS,
            begin_ns=9 * MS,
            longest_ns=5 * MS,
        )
    assert lookahead_ns == SHORTEST_LOOKAHEAD_NS


def test_work_that_came_late_says_nothing_about_the_lookahead() -> None:
    assert lookahead_after(2.0, waiting_ms=0.5) == MS


def test_a_device_that_is_slow_to_begin_says_nothing_about_the_lookahead() -> None:
    # It was there before the EXEC before it had ended, and began late all the same.
    assert lookahead_after(2.0, staged_ms=-0.5) < MS
    # It was not: that part of the gap is the look-ahead's.
    assert lookahead_after(2.0, staged_ms=0.3) == int(1.3 * MS)


def test_the_margin_follows_the_worst_delay_and_forgets_it_slowly() -> None:
    margin = Margin(5 * MS)
    for _ in range(20_000):
        margin.measured(MS // 10)
    calm_ns = margin.ns
    assert MS // 10 <= calm_ns < MS // 5
    margin.measured(2 * MS)
    assert 2 * MS < margin.ns <= 3 * MS
    margin.measured(50 * MS)
    assert margin.ns == 5 * MS  # never above what is configured


# --- shares ---------------------------------------------------------------------------------------


def test_recent_drops_are_forgotten_after_two_windows() -> None:
    drops = RecentDrops()
    assert drops.share(0) == 0.0
    drops.count(0, served=3, dropped=1)
    assert drops.share(10 * MS) == 0.25
    assert drops.share(60 * MS) == 0.25
    assert drops.share(120 * MS) == 0.0
    drops.count(130 * MS, dropped=1)
    assert drops.share(900 * MS) == 0.0


def test_usage_fades_by_half_each_second() -> None:
    usage = Usage()
    share = FairShare()
    share.served(usage, 1.0, 8 * MS, 0)
    share.dropped(usage, 1.0, 8 * MS, 0)
    usage.fade(NS_PER_S // STEP_NS)
    assert usage.used_ns == pytest.approx(4 * MS)
    assert usage.asked_ns == pytest.approx(8 * MS)
    usage.fade(100 * NS_PER_S // STEP_NS)
    assert (usage.used_ns, usage.asked_ns) == (0.0, 0.0)


def test_what_was_dropped_long_ago_is_nothing_and_no_division_by_it() -> None:
    """Half an hour later the numbers are too small to fade, and half of the smallest is 0."""
    share, usage = FairShare(), Usage()
    share.dropped(Usage(), 1.0, MS, 0)
    last = 1800 * NS_PER_S // STEP_NS
    for step in range(0, last, 8):
        share.served(Usage(), 1.0, MS, step)
    usage.step, usage.asked_ns = last, 1000.0 * MS
    assert share.has_left(usage, 1.0, 1.0, last)


@pytest.mark.parametrize(
    ("asks_ms", "capacity_ms", "expected_ms"),
    [
        ((10, 10, 10, 90), 60, 30),  # the three that ask for little leave 30 to the fourth
        ((40, 40, 40, 40), 80, 20),
        ((5, 30, 60), 65, 30),
        ((1, 1, 1, 1, 1, 1, 1, 1, 92), 50, 42),
    ],
)
def test_the_level_comes_to_be_the_max_min_share(
    asks_ms: Sequence[int], capacity_ms: int, expected_ms: int
) -> None:
    """Everybody is served the same part of what it asks for, which is unfair."""
    share = FairShare()
    usages = [Usage() for _ in asks_ms]
    part = capacity_ms / sum(asks_ms)
    levels = []
    for tenth in range(100):
        step = tenth * (NS_PER_S // 10) // STEP_NS
        for usage, ask_ms in zip(usages, asks_ms, strict=True):
            for _ in range(10):
                share.served(usage, 1.0, ask_ms * part * MS / 10, step)
                share.dropped(usage, 1.0, ask_ms * (1 - part) * MS / 10, step)
        levels.append(share.level_ns)
    # What is asked in a tenth of a second is remembered 14.4 times.
    assert sum(levels[50:]) / 50 / MS == pytest.approx(14.4 * expected_ms, rel=0.15)


def test_a_crowd_takes_what_others_left_a_moment_ago_and_is_held_back_after() -> None:
    """Ten have half of four lanes; a crowd comes and asks for three."""
    share = FairShare()
    ten, crowd = [Usage() for _ in range(10)], Usage()
    for step in range(64):
        for usage in ten:
            share.served(usage, 1.0, STEP_NS / 5, step)
    for step in range(64, 104):
        for usage in ten:
            share.served(usage, 1.0, STEP_NS / 6, step)
            share.dropped(usage, 1.0, STEP_NS / 30, step)
        share.served(crowd, 1.0, 3 * STEP_NS, step)
        if step == 71:
            assert share.has_left(crowd, 1.0, 1.0, step)
    assert not share.has_left(crowd, 1.0, 1.0, 103)
    assert all(share.has_left(usage, 1.0, 1.0, 103) for usage in ten)


def test_of_many_tenants_the_latest_are_remembered() -> None:
    """A client that makes up names pushes out whoever asks less often than a thousand of them."""
    fairness = Fairness(EdfMhConfig())
    for number in range(2 * MAX_TENANTS):
        for name in (f"made up {number}", "ann"):
            request = waiting_batch(0, [name]).copy.model.queue[0]
            fairness.leaves_room(request, 0)
    assert fairness.num_tenants == MAX_TENANTS
    assert fairness.knows("ann")
    assert not fairness.knows("made up 0")


# --- pressure, fairness, batch clients, deferral --------------------------------------------------


def test_pressure_sets_in_with_the_share_dropped_and_grows_beyond_one() -> None:
    assert pressure_of(0.02, 6.0) == 0.0
    assert 0.0 < pressure_of(0.05, 6.0) < 1.0
    assert pressure_of(0.08, 6.0) == pytest.approx(1.48)
    assert pressure_of(0.5, 6.0) == pytest.approx(4.0)
    assert pressure_of(0.5, 0.0) == 1.0


def waiting_batch(
    number: int, tenants: Sequence[str], *, gpus: int = 1, models_per_gpu: int = 1, slo_ms: int = 9
) -> Batch:
    """A batch of a model that some GPUs hold; nothing of a scheduler is there."""
    model = Model(ModelId(f"m{number}"), number)
    for place, tenant in enumerate(tenants):
        due_ns = slo_ms * MS
        request = Request(
            RequestId(place), model, 1, 0, due_ns, due_ns, due_ns, False, 0, tenant=tenant
        )
        model.queue.append(request)
    estimates = Estimates(load_ns=MS, exec_ns=EXEC)
    for gpu in range(gpus):
        link = LinkPlan(least_ns=0, tolerance_ns=0)
        worker = WorkerState(WorkerId(str(gpu)), GpuKind("x"), 100, 100, gpu, link)
        model.copies[worker] = Copy(model, worker, 1, estimates, resident=True)
        worker.copies[model] = model.copies[worker]
        for other in range(1, models_per_gpu):
            stranger = Model(ModelId(f"other{other}"), 1000 + other)
            worker.copies[stranger] = Copy(stranger, worker, 1, estimates, resident=True)
    model.fastest = estimates
    size_index = estimates.fit[len(tenants)]
    begin_ns = slo_ms * MS - estimates.exec_ns[size_index]
    return Batch(next(iter(model.copies.values())), 0, len(tenants), size_index, begin_ns, begin_ns)


def crowd(fairness: Fairness, tenants: Sequence[str] = ("",) * 4) -> Batch:
    """A model that was served twenty times and refused a hundred times; returns its batch."""
    batch = waiting_batch(9, tenants)
    for request in batch.copy.model.queue * 5:
        if request.tenant:
            fairness.leaves_room(request, 0)
    for number in range(120):
        if number % 6 == 0:
            fairness.count_served(batch, 0)
        else:
            fairness.count_dropped(batch.copy.model.queue[0], 0)
    return batch


@pytest.mark.parametrize(
    ("isolation", "served", "struck"),
    [(1.0, 0, False), (0.0, 0, True), (1.0, 8, False), (1.0, 60, True), (0.1, 8, True)],
)
def test_whoever_used_less_than_its_share_is_never_struck_out(
    isolation: float, served: int, struck: bool
) -> None:
    fairness = Fairness(EdfMhConfig(isolation=isolation))
    one, rich = waiting_batch(0, [""]), crowd(fairness)
    for _ in range(served):
        fairness.count_served(one, 0)
    (mine, held), (theirs, _) = fairness.worths([one, rich], 0)
    assert held is not struck
    assert (mine < theirs) is struck


def test_a_popular_model_does_not_flood_where_the_others_would_not_fit_without_it() -> None:
    fairness = Fairness(EdfMhConfig())
    popular = crowd(fairness)
    for number in range(
        30
    ):  # each asks for less than a quarter, all together for more than there is
        other = waiting_batch(100 + number, [""])
        for _ in range(20):
            fairness.count_dropped(other.copy.model.queue[0], 0)
    rare = waiting_batch(0, [""])
    (mine, held), (theirs, _) = fairness.worths([rare, popular], 0)
    assert not held
    assert mine < theirs


def test_while_nobody_floods_whoever_was_served_more_of_what_it_asked_weighs_less() -> None:
    """The worth of a model's requests falls as its share rises, also beyond the mean share, down to a bound."""
    fairness = Fairness(EdfMhConfig())
    # Ten models ask alike, so none floods; of each the first so many of four are served.
    models = [waiting_batch(number, [""]) for number in range(10)]
    for place, (number, batch) in itertools.product(range(80), enumerate(models)):
        if place % 4 < (3 if number == 0 else 2):
            fairness.count_served(batch, 0)
        else:
            fairness.count_dropped(batch.copy.model.queue[0], 0)
    # By then it is forgotten that the very first asked for all that had been served.
    later_ns = 17 * STEP_NS
    (ahead, _), (mean, _) = fairness.worths(models[:2], later_ns)
    assert 0.8 * mean <= ahead < 0.9 * mean


def test_a_name_seen_once_is_no_tenant_of_its_own() -> None:
    """Its request counts as its model's, which the same client flooded under other names."""
    fairness = Fairness(EdfMhConfig())
    known = waiting_batch(0, ["ann"])
    for _ in range(5):
        fairness.leaves_room(known.copy.model.queue[0], 0)
    flooded = crowd(fairness)
    flooded.copy.model.queue[0].tenant = "made up"
    fairness.leaves_room(flooded.copy.model.queue[0], 0)
    (mine, _), (theirs, _) = fairness.worths([known, flooded], 0)
    assert mine > 1000 * theirs


def test_a_tenant_beyond_its_share_leaves_room_to_others_and_more_when_one_was_dropped() -> None:
    fairness = Fairness(EdfMhConfig())
    flood = crowd(fairness, ["flood"] * 4).copy.model.queue[0]
    modest = waiting_batch(0, ["ann"]).copy.model.queue[0]
    modest.model = flood.model
    assert [fairness.leaves_room(modest, 0) for _ in range(5)] == [0.0] * 5
    now_ns = modest.slo_ns
    assert fairness.leaves_room(flood, now_ns) == 0.5
    fairness.count_dropped(modest, now_ns)
    assert fairness.leaves_room(flood, now_ns) == 1.0
    assert fairness.leaves_room(modest, now_ns) == 0.0
    assert fairness.leaves_room(flood, now_ns + modest.slo_ns) == 0.5


def test_batch_clients_get_a_gpu_more_now_and_then_and_fewer_while_others_suffer() -> None:
    clients = BatchClients(10 * NS_PER_S)
    work = waiting_batch(0, [""], gpus=5, slo_ms=20_000)
    assert clients.sent(work)
    work.copy.model.ready = dict.fromkeys(
        work.copy.model.copies, Readiness(1, ArchitectureId("a"), work.copy.estimates)
    )
    now_ns = 0

    def num_allowed() -> int:
        clients.workers.clear()
        for worker in work.copy.model.copies:
            if clients.may_run(work, worker, now_ns):
                clients.runs(worker)
        return len(clients.workers)

    assert num_allowed() == 1
    for _ in range(40):
        now_ns += 100 * MS
        clients.served = 100
        assert 1 <= num_allowed() <= 5
    assert num_allowed() == 5
    for _ in range(40):
        now_ns += 100 * MS
        clients.served, clients.missed = 100, 10
        num_allowed()
    assert num_allowed() == 1


def test_batches_wait_to_grow_only_where_many_gpus_hold_few_models() -> None:
    deferral = Deferral()
    for gpus, models_per_gpu, waits in ((2, 1, True), (1, 1, False), (3, 2, False), (4, 2, True)):
        batch = waiting_batch(0, [""] * 2, gpus=gpus, models_per_gpu=models_per_gpu)
        # Until four would be late; a batch of four begins 6 ms before 9 ms.
        assert deferral.grows_until_ns(batch) == (3 * MS if waits else 0)
    assert deferral.grows_until_ns(waiting_batch(0, [""] * 8, gpus=2)) == 0  # the largest size


# --- the policy -----------------------------------------------------------------------------------


class Fleet(CoreBench):
    """Numbered GPUs and models, by default under `edf_mh`; every action takes as long as predicted."""

    def __init__(
        self,
        *,
        gpus: int = 1,
        models: int = 2,
        num_pages: int = 100,
        policy: str = "edf_mh",
        make: Callable[[SchedulerConfig], Policy] | None = None,
        **settings: object,
    ) -> None:
        super().__init__(
            replace(NO_DELAY, policy=policy, **settings),  # type: ignore[arg-type]
            PolicyKind(
                make or POLICIES[policy].make,
                Traits(predicts=True, punctual=True, eager_copies=True),
            ),
            # Late enough for a request that has been on its way for long.
            now_ns=100 * NS_PER_S,
        )
        self.workers = [WorkerId(f"gpu{index}") for index in range(gpus)]
        self.models = [ModelId(f"m{index}") for index in range(models)]
        for model_id in self.models:
            self.tell(ModelAdded(model_id=model_id))
        for worker_id in self.workers:
            kind = GpuKind(worker_id)
            self.tell(WorkerJoined(worker_id=worker_id, gpu_kind=kind, num_pages=num_pages))

    def profiled(
        self,
        model: int,
        *,
        worker: int = 0,
        exec_ns: dict[int, int] | None = None,
        load_ns: int = 8 * MS,
        num_pages: int = 1,
    ) -> None:
        """A worker has compiled and measured a model."""
        self.tell(
            ModelReady(
                worker_id=self.workers[worker],
                model_id=self.models[model],
                architecture_id=ArchitectureId(f"a{model}"),
                num_pages=num_pages,
                load_ns=load_ns,
                exec_ns=exec_ns or EXEC,
            )
        )

    def resident(self, model: int, *, worker: int = 0, **costs: object) -> None:
        """Have a model profiled and loaded."""
        self.profiled(model, worker=worker, **costs)  # type: ignore[arg-type]
        self.tell(ModelWanted(model_id=self.models[model]))
        if not self.in_flight:
            # It has a copy, and gets another when a request is refused. One of a batch client that comes
            # a millisecond before its deadline has no other consequence.
            (refusal, _) = self.tell(self.arrived(model, 20_000, since_ms=20_000 - 1))
            assert isinstance(refusal, RefuseRequest)
            assert refusal.refusal is Refusal.OVERLOADED
        self.finish_next(LoadWeights, worker=worker)

    def arrived(
        self, model: int, slo_ms: float, tenant: str = "", since_ms: float = 0
    ) -> RequestArrived:
        self.num_requests += 1
        return RequestArrived(
            request_id=RequestId(self.num_requests),
            model_id=self.models[model],
            rows=1,
            arrival_ns=self.now_ns - int(since_ms * MS),
            slo_ns=int(slo_ms * MS),
            tenant=tenant,
        )

    def ask(self, model: int, slo_ms: float, count: int = 1, tenant: str = "") -> list[SendAction]:
        requests = tuple(self.arrived(model, slo_ms, tenant) for _ in range(count))
        return sends(self.tell(RequestsArrived(requests=requests)))

    def finish_next(self, kind: type, *, worker: int = 0) -> list[SendAction]:
        """The oldest action of the kind ends when it was predicted to."""
        return self.finish(
            next(
                command
                for command in self.in_flight.values()
                if isinstance(command.action, kind) and command.worker_id == self.workers[worker]
            )
        )


def batches(commands: Sequence[SendAction]) -> list[tuple[ModelId, int]]:
    return [
        (command.action.model_id, command.action.batch_size)
        for command in commands
        if isinstance(command.action, Infer)
    ]


def test_the_second_batch_is_chosen_only_when_the_lane_is_about_to_be_free() -> None:
    """What comes meanwhile joins it, which a look-ahead as long as the EXEC would prevent."""
    bench = Fleet()
    bench.resident(0)
    assert batches(bench.ask(0, 100)) == [("m0", 1)]
    begin_ns = bench.now_ns
    assert bench.ask(0, 100) == []
    assert batches(bench.wait(begin_ns + MS // 2)) == []
    assert bench.ask(0, 100) == []
    assert batches(bench.wait(begin_ns + 3 * MS)) == [("m0", 2)]


def test_the_head_is_served_in_a_smaller_batch_rather_than_dropped() -> None:
    """`clockwork` would pass over it for a batch of four."""
    bench = Fleet()
    bench.resident(0)
    bench.ask(0, 100)  # the lane is busy for 3 ms
    bench.ask(0, 3 + 3.5)
    bench.ask(0, 100, count=3)
    assert batches(bench.finish_next(Infer)) == [("m0", 1)]


def test_the_oldest_is_dropped_where_the_time_saved_serves_more_who_wait() -> None:
    """One by itself and then two cost 7 ms; without the first, two in 4 ms: the 3 ms are worth 1.5."""
    no_gain = {1: 2 * MS, 2: 4 * MS}
    for other_waits, exec_ns, expected in (
        (False, EXEC, ("m0", 1)),
        (True, EXEC, ("m0", 2)),
        (True, no_gain, ("m0", 1)),
    ):
        bench = Fleet()
        bench.resident(0, exec_ns=exec_ns)
        bench.resident(1)
        bench.ask(1, 100)  # the lane is busy for 3 ms
        bench.ask(0, 3 + 3.5)
        bench.ask(0, 100, count=2)
        if other_waits:
            bench.ask(1, 200, count=8)
        assert batches(bench.finish_next(Infer))[0] == expected, (other_waits, exec_ns)


def refuse_many(
    bench: Fleet, model: int, slo_ms: float, refusal: Refusal, tenant: str = ""
) -> None:
    """Have many requests refused at once, for the reason that the test names."""
    for _ in range(50):
        request = bench.arrived(model, slo_ms, tenant)
        (command,) = bench.tell(request)
        assert getattr(command, "refusal", None) is refusal


def test_under_overload_the_batch_with_most_requests_per_time_is_next() -> None:
    for overloaded, expected in ((False, ("m0", 1)), (True, ("m1", 4))):
        bench = Fleet(models=3)
        bench.resident(0, exec_ns={1: 6 * MS})
        bench.resident(1)
        bench.resident(2)
        bench.ask(1, 100)
        bench.ask(0, 3 + 7)  # must begin first, and would make the four late
        bench.ask(1, 3 + 8, count=4)
        if overloaded:
            refuse_many(bench, 2, 4, Refusal.OVERLOADED)
        assert batches(bench.finish_next(Infer))[0] == expected


def test_under_overload_a_batch_that_leaves_nobody_behind_is_next_before_one_that_breaks_the_next_size() -> (
    None
):
    """Two of three that wait leave one alone; a fourth comes soon, and four are denser."""
    for waiting, expected in ((2, ("m0", 2)), (3, ("m1", 2))):
        bench = Fleet(models=3)
        for model in range(3):
            bench.resident(model)
        bench.ask(2, 100)  # the lane is busy for 3 ms
        bench.ask(0, 3 + 7, count=waiting)  # must begin first, and too late for four
        bench.ask(1, 3 + 7.5, count=2)
        refuse_many(bench, 2, 4, Refusal.OVERLOADED)
        assert batches(bench.finish_next(Infer))[0] == expected


def test_under_overload_the_urgent_are_not_passed_over_for_those_who_can_wait() -> None:
    for patient_ms, expected in ((20, ("m0", 4)), (500, ("m0", 2))):
        bench = Fleet()
        bench.resident(0)
        bench.resident(1)
        bench.ask(0, 100)  # the lane is busy for 3 ms
        bench.ask(0, 3 + 5)
        bench.ask(0, patient_ms, count=4)
        refuse_many(bench, 1, 4, Refusal.OVERLOADED)
        assert batches(bench.finish_next(Infer))[0] == expected


def test_under_overload_those_who_can_wait_make_no_batch_denser() -> None:
    """Two with little time are denser than one and three with much, which are as many per time in all."""
    for patient_ms, expected in ((12, ("m0", 4)), (500, ("m1", 2))):
        bench = Fleet(models=3)
        for model in range(3):
            bench.resident(model)
        bench.ask(2, 100)  # the lane is busy for 3 ms
        bench.ask(0, 3 + 7)
        bench.ask(0, 3 + patient_ms, count=3)
        bench.ask(1, 3 + 7.5, count=2)
        refuse_many(bench, 2, 4, Refusal.OVERLOADED)
        assert batches(bench.finish_next(Infer))[0] == expected


def deferring(deferral: Deferral) -> Callable[[SchedulerConfig], Policy]:
    return lambda config: EdfMhPolicy(config, deferral=deferral)


def test_where_few_models_share_gpus_and_requests_were_dropped_batches_wait_to_grow() -> None:
    """With two in time for four until 3 ms from now; without drops, or with as many models as GPUs, at once."""
    for dropped, models, enabled, expected in (
        (True, 1, True, []),
        (False, 1, True, [("m0", 2)]),
        (True, 1, False, [("m0", 2)]),
        (True, 2, True, [("m0", 2)]),
    ):
        deferral = Deferral(enabled=enabled)
        bench = Fleet(gpus=2, models=models, make=deferring(deferral))
        for model in range(models):
            for gpu in range(2):
                bench.resident(model, worker=gpu)
        if dropped:
            deferral.requests_dropped(bench.now_ns)
        begin_ns = bench.now_ns
        case = dropped, models, enabled
        assert batches(bench.ask(0, 9, count=2)) == expected, case
        if expected:
            continue
        assert batches(bench.wait(begin_ns + 3 * MS - 1)) == [], case
        assert batches(bench.wait(begin_ns + 3 * MS)) == [("m0", 2)], case
        # Two more in time make four, which go at once.
        bench.finish_next(Infer)
        assert batches(bench.ask(0, 20, count=2)) == [], case
        assert batches(bench.ask(0, 20, count=6)) == [("m0", 8)], case


def test_requests_refused_for_want_of_time_have_batches_wait_for_seconds() -> None:
    bench = Fleet(gpus=2, models=1)
    for gpu in range(2):
        bench.resident(0, worker=gpu)
    for _ in range(2):
        bench.ask(0, 100)  # both lanes are busy for 3 ms
    refuse_many(bench, 0, 4, Refusal.OVERLOADED)
    for gpu in range(2):
        bench.finish_next(Infer, worker=gpu)
    bench.ask(0, 100)  # the policy sees what was dropped when it chooses
    bench.wait(bench.now_ns + 1000 * MS)
    while bench.in_flight:
        bench.finish(next(iter(bench.in_flight.values())))
    assert batches(bench.ask(0, 9, count=2)) == []
    bench.wait(bench.now_ns + 10_000 * MS)
    assert batches(bench.ask(0, 9, count=2)) == [("m0", 2)]


def test_a_batch_waits_to_grow_no_longer_than_the_larger_would_take_however_long_its_slo() -> None:
    deferral = Deferral()
    bench = Fleet(gpus=2, models=1, make=deferring(deferral))
    for gpu in range(2):
        bench.resident(0, worker=gpu)
    deferral.requests_dropped(bench.now_ns)
    begin_ns = bench.now_ns
    assert batches(bench.ask(0, 5000)) == []
    assert batches(bench.wait(begin_ns + EXEC[2] - 1)) == []
    assert batches(bench.wait(begin_ns + EXEC[2])) == [("m0", 1)]


def test_batch_clients_do_not_overtake_a_batch_that_waits_to_grow() -> None:
    """It was held back on every GPU, and would find none idle when its wait is over."""
    deferral = Deferral()
    bench = Fleet(
        gpus=4,
        models=2,
        make=deferring(deferral),
        edf_mh=EdfMhConfig(limit_batch=False),
    )
    for model in range(2):
        for gpu in range(4):
            bench.resident(model, worker=gpu, exec_ns=EXEC if model == 0 else {1: 30 * MS})
    deferral.requests_dropped(bench.now_ns)
    begin_ns = bench.now_ns
    assert batches(bench.ask(0, 9, count=2)) == []
    assert batches(bench.ask(1, 3_600_000, count=4)) == []
    assert ("m0", 2) in batches(bench.wait(begin_ns + 3 * MS))


def test_configurations_that_are_equal_have_one_hash() -> None:
    one, other = (SchedulerConfig(edf_mh=EdfMhConfig(tenant_weights={"ann": 8.0})) for _ in "12")
    assert {one: "first", other: "second"} == {one: "second"}
    assert EdfMhConfig(tenant_weights={"ann": 2.0}) != one.edf_mh


@pytest.mark.parametrize(
    ("weights", "told", "expected"),
    [
        ({}, [], ("m1", 4)),
        ({"ann": 8.0}, [], ("m0", 1)),  # one of hers counts as eight
        ({}, [{"ann": 8.0}], ("m0", 1)),
        ({}, [{"ann": 8.0}, {}], ("m1", 4)),
    ],
)
def test_a_tenants_weight_decides_under_overload_from_when_it_is_told_on(
    weights: dict[str, float], told: list[dict[str, float]], expected: tuple[str, int]
) -> None:
    bench = Fleet(models=3, edf_mh=EdfMhConfig(tenant_weights=weights))
    bench.resident(0, exec_ns={1: 6 * MS})
    bench.resident(1)
    bench.resident(2)
    bench.ask(1, 100, tenant="bob")
    for weights in told:
        bench.tell(TenantsWeighed(weights=weights))
    bench.ask(0, 3 + 7, tenant="ann")
    bench.ask(1, 3 + 8, count=4, tenant="bob")
    refuse_many(bench, 2, 4, Refusal.OVERLOADED)
    assert batches(bench.finish_next(Infer))[0] == expected


def test_a_tenants_share_is_learned_from_what_it_used() -> None:
    """Bob's one outweighs Ann's four after she had more than her share, and not before."""
    for served, expected in ((60, ("m0", 1)), (1, ("m1", 4))):
        bench = Fleet(models=3)
        bench.resident(0, exec_ns={1: 6 * MS})
        bench.resident(1)
        bench.resident(2)
        for _ in range(served):
            bench.ask(2, 100, count=8, tenant="ann")
            bench.finish_next(Infer)
        bench.ask(1, 100)
        bench.ask(0, 3 + 7, tenant="bob")
        bench.ask(1, 3 + 8, count=4, tenant="ann")
        refuse_many(bench, 2, 4, Refusal.OVERLOADED, "ann")
        assert batches(bench.finish_next(Infer))[0] == expected


def test_under_overload_the_load_that_saves_most_requests_per_time_is_next() -> None:
    for overloaded, expected in ((False, "m0"), (True, "m1")):
        bench = Fleet(models=4)
        bench.profiled(2, load_ns=20 * MS)
        bench.profiled(0, load_ns=40 * MS)
        bench.profiled(1, load_ns=10 * MS)
        bench.profiled(3)
        assert [c.action.model_id for c in bench.ask(2, 300)] == ["m2"]
        bench.ask(0, 20 + 40 + 8)  # must begin first, and would make the other late
        bench.ask(1, 20 + 40 + 9, count=2)
        if overloaded:
            refuse_many(bench, 3, 5, Refusal.COLD)
        loads = [
            command.action.model_id
            for command in bench.finish_next(LoadWeights)
            if isinstance(command.action, LoadWeights)
        ]
        assert loads[0] == expected


def test_what_is_wanted_is_not_evicted() -> None:
    """Pages for two; both resident models have requests waiting, the third has to do without."""
    bench = Fleet(models=3, num_pages=2)
    bench.resident(0)
    bench.resident(1)
    bench.profiled(2)
    bench.ask(0, 200)
    bench.ask(0, 200)
    bench.ask(1, 200)
    sent = bench.ask(2, 60)
    assert not any(isinstance(command.action, EvictWeights) for command in sent)
    while any(isinstance(command.action, Infer) for command in bench.in_flight.values()):
        for command in bench.finish_next(Infer):
            if isinstance(command.action, EvictWeights):
                (evicted,) = (
                    model
                    for model in bench.scheduler.statistics().models
                    if model.model_id == command.action.model_id
                )
                assert not evicted.num_waiting
                return
    pytest.fail("nothing was evicted when nobody waited any more")


def test_another_copy_only_when_the_first_cannot_serve_in_time() -> None:
    bench = Fleet(gpus=2, fill_free_pages=False)
    bench.resident(0)
    bench.resident(1, exec_ns={1: 50 * MS})
    bench.profiled(0, worker=1)
    bench.ask(1, 100)
    sent = bench.ask(0, 100, count=3)
    assert not any(isinstance(command.action, LoadWeights) for command in sent)
    # One that cannot wait for the 50 ms, nor for a load, is refused and shows the need.
    refused = bench.tell(bench.arrived(0, 9))
    assert [getattr(command, "refusal", None) for command in refused] == [Refusal.OVERLOADED]
    sent = bench.ask(0, 100)
    assert [command.worker_id for command in sent] == [bench.workers[1]]
    assert isinstance(sent[0].action, LoadWeights)


def test_a_model_whose_slo_is_shorter_than_its_load_gets_further_copies_too() -> None:
    """No request of it ever waits for a load; those that are refused show the need."""
    bench = Fleet(gpus=3, models=1)
    bench.resident(0)
    bench.profiled(0, worker=1)
    bench.profiled(0, worker=2)
    assert batches(bench.ask(0, 5)) == [("m0", 1)]
    for worker in (1, 2):
        sent = bench.ask(0, 5)
        assert [type(command.action) for command in sent] == [LoadWeights]
        assert sent[0].worker_id == bench.workers[worker]


def test_batch_clients_are_confined_to_some_gpus_while_others_suffer() -> None:
    for limited, expected in ((True, 1), (False, 3)):
        bench = Fleet(gpus=3, edf_mh=EdfMhConfig(limit_batch=limited))
        for worker in range(3):
            bench.resident(0, worker=worker)
            bench.resident(1, worker=worker)
        sent = bench.ask(1, 3_600_000, count=24)
        assert len({command.worker_id for command in sent}) == expected


def test_batch_clients_come_last() -> None:
    bench = Fleet()
    bench.resident(0)
    bench.resident(1)
    bench.ask(0, 100)
    bench.ask(1, 3_600_000, count=8)
    bench.ask(0, 100)
    assert batches(bench.finish_next(Infer))[0] == ("m0", 1)
    assert batches(bench.finish_next(Infer))[0] == ("m1", 8)


def test_batch_work_near_its_deadline_comes_last_too() -> None:
    bench = Fleet(models=3)
    bench.resident(0)
    bench.resident(1)
    bench.resident(2, exec_ns={1: 9_990 * MS})
    bench.ask(2, 20_000)
    bench.ask(1, 10_000)
    bench.wait(bench.now_ns + 9_980 * MS)
    bench.ask(0, 30)  # the batch client's has to begin 10 ms before
    assert batches(bench.finish_next(Infer)) == [("m0", 1)]
    assert batches(bench.finish_next(Infer)) == [("m1", 1)]


def test_a_lost_worker_does_not_count_among_those_with_batch_work() -> None:
    """Its Infer was planned behind a load that failed, so no copy of it went with the worker."""
    bench = Fleet(gpus=2, edf_mh=EdfMhConfig(adaptive_lookahead=False))
    bench.profiled(0, worker=0)
    bench.resident(1, worker=1)
    (load,) = bench.ask(0, 3_600_000)
    assert batches(bench.wait(bench.now_ns + 8 * MS)) == [("m0", 1)]
    failed = ActionFailed(
        worker_id=bench.workers[0], action_id=load.action.action_id, error=ActionError.DEVICE
    )
    bench.tell(failed)
    bench.tell(WorkerLost(worker_id=bench.workers[0]))
    assert batches(bench.ask(1, 3_600_000)) == [("m1", 1)]


def test_only_a_refusal_for_want_of_time_is_a_sign_of_overload() -> None:
    bench = Fleet()
    bench.resident(0, exec_ns={1: 6 * MS})
    bench.resident(1)
    bench.ask(1, 100)
    bench.ask(0, 3 + 7)  # would be struck out under overload
    bench.ask(1, 3 + 8, count=4)
    refuse_many(bench, 1, 1.0, Refusal.INFEASIBLE)
    assert batches(bench.finish_next(Infer))[0] == ("m0", 1)


@pytest.mark.parametrize(
    ("model", "slo_ms", "refusal"), [(0, 0.1, Refusal.INFEASIBLE), (2, 100.0, Refusal.NO_WORKER)]
)
def test_only_a_refusal_for_want_of_time_confines_batch_clients(
    model: int, slo_ms: float, refusal: Refusal
) -> None:
    bench = Fleet(gpus=2, models=3)
    for worker in range(2):
        bench.resident(0, worker=worker)
        bench.resident(1, worker=worker)
    # The limit grows by a GPU in four periods without suffering.
    for _ in range(4):
        refuse_many(bench, model, slo_ms, refusal)
        bench.wait(bench.now_ns + 200 * MS)
        bench.ask(1, 3_600_000)
        bench.finish_next(Infer)
    refuse_many(bench, model, slo_ms, refusal)
    sent = bench.ask(1, 3_600_000, count=16)
    assert len({command.worker_id for command in sent}) == 2


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
def test_a_model_that_is_wanted_no_more_does_not_keep_another_from_being_warmed_up(
    policy: str,
) -> None:
    bench = Fleet(models=3, num_pages=3, policy=policy)
    bench.resident(0)
    bench.profiled(1, num_pages=3)
    bench.profiled(2)
    bench.ask(0, 100)
    assert bench.ask(1, 100) == []  # while m0 runs its page cannot be freed
    bench.tell(RequestCancelled(request_id=RequestId(bench.num_requests)))
    sent = bench.ask(2, 5)  # too short for a load: refused, but the next one shall find it
    assert [(type(c.action), c.action.model_id) for c in sent] == [(LoadWeights, "m2")]


def test_durations_are_those_of_the_gpu_that_runs_it() -> None:
    """On the slow GPU only the small batch is in time."""
    bench = Fleet(gpus=2, models=1)
    slow = {size: 3 * duration for size, duration in EXEC.items()}
    bench.resident(0, worker=0, exec_ns=slow)
    assert batches(bench.ask(0, 20, count=8))[0] == ("m0", 4)
    fast = Fleet(gpus=2, models=1)
    fast.resident(0, worker=0)
    assert batches(fast.ask(0, 20, count=8)) == [("m0", 8)]


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
def test_of_idle_gpus_the_fastest_is_asked_first(policy: str) -> None:
    bench = Fleet(gpus=3, models=1, policy=policy)
    for worker, factor in enumerate((2, 1, 3)):
        exec_ns = {size: factor * duration for size, duration in EXEC.items()}
        bench.resident(0, worker=worker, exec_ns=exec_ns)
    for worker in (1, 0, 2):
        (sent,) = bench.ask(0, 100)
        assert sent.worker_id == bench.workers[worker]


def test_settings_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="isolation is 2, expected 0 to 1"):
        EdfMhConfig(isolation=2)
    with pytest.raises(ConfigError, match="pressure_gain is -1, expected 0 to 100"):
        EdfMhConfig(pressure_gain=-1)
    with pytest.raises(ConfigError, match="batch_slo_ns is 0"):
        SchedulerConfig(batch_slo_ns=0)
