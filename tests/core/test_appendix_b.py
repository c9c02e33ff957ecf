"""The fast policy decides as Appendix B does, and differs only where it says so."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright.units import NS_PER_MS, ArchitectureId, GpuKind, ModelId, RequestId, WorkerId
from controller.core import Scheduler, SchedulerConfig
from controller.core.estimator import Estimates
from controller.core.link import LinkPlan
from controller.core.policies import POLICIES
from controller.core.policies.clockwork import ClockworkPolicy
from controller.core.policy import PolicyKind
from controller.core.state import Batch, Copy, Model, Readiness, Request, WorkerState
from experiments.simulator import HostedModel
from tests.kit import appendix_b
from tests.kit.examples import examples
from tests.kit.simulated_cluster import SimulatedCluster, row

MS = NS_PER_MS


def make_worker(name: str = "gpu") -> WorkerState:
    link = LinkPlan(least_ns=0, tolerance_ns=0)
    return WorkerState(WorkerId(name), GpuKind("modelled"), 1000, 1000, 0, link)


def make_model(number: int, dues_ns: list[int]) -> Model:
    model = Model(ModelId(f"m{number}"), number)
    for place, due_ns in enumerate(sorted(dues_ns)):
        request = Request(RequestId(place), model, 1, 0, due_ns, due_ns, due_ns, False, 0)
        model.queue.append(request)
    return model


def make_copy(model: Model, worker: WorkerState, exec_ns: dict[int, int]) -> Copy:
    copy = Copy(model, worker, 1, Estimates(load_ns=MS, exec_ns=exec_ns), resident=True)
    model.copies[worker] = worker.copies[model] = copy
    return copy


def as_choice(batch: Batch | None) -> appendix_b.Choice | None:
    if batch is None:
        return None
    run = batch.copy.model.queue[batch.first : batch.first + batch.count]
    return appendix_b.Choice(
        batch.copy.model.sequence,
        batch.copy.estimates.sizes[batch.size_index],
        tuple(request.request_id for request in run),
    )


@st.composite
def exec_profiles(draw: st.DrawFn) -> dict[int, int]:
    """Durations that grow with the batch size, as every measured profile in Table 1 does."""
    sizes = draw(st.sampled_from([(1,), (1, 2), (1, 2, 4), (1, 2, 4, 8), (1, 4)]))
    steps = [draw(st.integers(1, 6)) for _ in sizes]
    return {size: sum(steps[: place + 1]) for place, size in enumerate(sizes)}


@st.composite
def situations(
    draw: st.DrawFn,
) -> tuple[list[tuple[list[int], dict[int, int], bool]], int]:
    model = st.tuples(
        st.lists(st.integers(0, 40), max_size=12, unique=True), exec_profiles(), st.booleans()
    )
    return draw(st.lists(model, min_size=1, max_size=5)), draw(st.integers(0, 30))


@examples(100)
@given(situations())
def test_the_first_choice_is_appendix_bs(
    situation: tuple[list[tuple[list[int], dict[int, int], bool]], int],
) -> None:
    parts, free_ns = situation
    worker = make_worker()
    policy = ClockworkPolicy(SchedulerConfig())
    waiting, exec_ns, loaded = [], {}, set()
    for number, (dues_ns, profile, is_loaded) in enumerate(parts):
        model = make_model(number, dues_ns)
        exec_ns[number] = profile
        waiting += [appendix_b.Waiting(number, int(r.request_id), r.due_ns) for r in model.queue]
        if is_loaded:
            loaded.add(number)
            make_copy(model, worker, profile)
            policy.queue_changed(model)
    expected = appendix_b.pick_infer(waiting, exec_ns, loaded, free_ns, 0)
    assert as_choice(policy.next_infer(worker, free_ns, 0)) == expected


class BesideAppendixB(ClockworkPolicy):
    """Checks every choice of a batch against the paper's."""

    compared = 0

    def next_infer(self, worker: WorkerState, free_ns: int, now_ns: int) -> Batch | None:
        resident = [copy for copy in worker.copies.values() if copy.resident]
        waiting = [
            appendix_b.Waiting(copy.model.sequence, int(request.request_id), request.due_ns)
            for copy in resident
            for request in copy.model.queue
        ]
        exec_ns = {
            copy.model.sequence: dict(
                zip(copy.estimates.sizes, copy.estimates.exec_ns, strict=True)
            )
            for copy in resident
        }
        expected = appendix_b.pick_infer(waiting, exec_ns, set(exec_ns), free_ns, now_ns)
        batch = super().next_infer(worker, free_ns, now_ns)
        if batch is None or batch.copy.resident:
            assert as_choice(batch) == expected
            self.compared += 1
        elif batch.begin_ns > free_ns:
            assert expected is None  # a gap behind its load, only when nothing resident has work
        return batch


@pytest.mark.seeds(1)
def test_a_whole_run_decides_as_appendix_b_at_every_step(seed: int) -> None:
    """Queues change in every way there is; the lazily kept heap must not go stale."""
    config = SchedulerConfig()
    policy = BesideAppendixB(config)
    kind = PolicyKind(lambda config: policy, POLICIES["clockwork"].traits)
    scheduler = Scheduler(config, kind)
    models = [
        HostedModel(
            ModelId(f"m{number}"),
            row(
                f"a{number % 3}",
                pages=5,
                load_ns=8 * MS,
                exec_ns={1: (2 + number % 3) * MS, 2: 4 * MS, 4: 6 * MS, 8: 10 * MS},
            ),
        )
        for number in range(8)
    ]
    cluster = SimulatedCluster(scheduler, models)
    cluster.add_worker("gpu", 30)
    generator = random.Random(7 + seed)
    for _ in range(1500):
        at_ns = generator.randrange(4_000 * MS)
        model, slo_ms = generator.choice(models), generator.choice([12, 25, 60, 200])
        cluster.at(at_ns, partial(cluster.request, model.model_id, slo_ms * MS))
    cluster.run(10_000 * MS)
    assert policy.compared > 1000
    assert len(cluster.answers) + len(cluster.refusals) == 1500


@examples(60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 6), st.integers(1, 5), st.sampled_from(["none", "a", "b", "both"])
        ),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.floats(2e6, 4e8), min_size=2, max_size=2),
)
def test_the_load_chosen_has_appendix_bs_highest_priority(
    parts: list[tuple[int, int, str]], loads: list[float]
) -> None:
    config = SchedulerConfig()
    policy = ClockworkPolicy(config)
    gpus = {"a": make_worker("a"), "b": make_worker("b")}
    for worker, load in zip(gpus.values(), loads, strict=True):
        worker.load_ns = load
    priorities = {}
    for number, (num_waiting, exec_ms, where) in enumerate(parts):
        profile = {1: exec_ms * MS}
        model = make_model(number, [1000 * MS + i for i in range(num_waiting)])
        model.demand_ns = num_waiting * exec_ms * MS
        estimates = Estimates(load_ns=MS, exec_ns=profile)
        for name, worker in gpus.items():
            model.ready_on(worker, Readiness(1, ArchitectureId("x"), estimates))
            if where in (name, "both"):
                copy = make_copy(model, worker, profile)
                copy.allocation_ns = model.demand_ns / (2 if where == "both" else 1)
        priority = appendix_b.load_priority(
            model.demand_ns,
            {i: copy.allocation_ns for i, copy in enumerate(model.copies.values())},
            {i: worker.load_ns for i, worker in enumerate(model.copies)},
            config.capacity_ns,
        )
        policy.want_load(model, 0)
        if where in ("none", "b") and priority > 0:
            priorities[number] = priority
    chosen = policy.next_load(gpus["a"], 0, 0)
    if chosen is None:
        assert not priorities  # negative priority: the demand is met
    else:
        assert priorities[chosen.sequence] == pytest.approx(max(priorities.values()))


def test_differs_from_the_other_reading_when_the_head_of_a_queue_is_lost() -> None:
    """Two wait, the older can no longer make any batch.

    Counting all that wait, two are enough for a batch of two, so every strategy of size one is "too
    small" and none of size two is in time: the younger request would be dropped beside an idle GPU.
    We count from the strategy's own request on, as the source does, and serve it.
    """
    profile = {1: 10, 2: 15}
    worker, model = make_worker(), make_model(0, [12, 40])
    policy = ClockworkPolicy(SchedulerConfig())
    make_copy(model, worker, profile)
    policy.queue_changed(model)
    waiting = [appendix_b.Waiting(0, 0, 12), appendix_b.Waiting(0, 1, 40)]
    literal = appendix_b.pick_infer(waiting, {0: profile}, {0}, 5, 0, from_request=False)
    ours = as_choice(policy.next_infer(worker, 5, 0))
    assert literal is None
    assert ours == appendix_b.Choice(0, 1, (1,))


def test_differs_in_running_a_model_behind_its_own_load() -> None:
    """Appendix B skips models that are not loaded; ours plans behind a load that ends in a moment."""
    worker, model = make_worker(), make_model(0, [100 * MS])
    policy = ClockworkPolicy(SchedulerConfig())
    copy = make_copy(model, worker, {1: 10 * MS})
    copy.resident, copy.ready_ns = False, 4 * MS
    policy.queue_changed(model)
    batch = policy.next_infer(worker, 1 * MS, 0)
    assert batch is not None
    assert batch.begin_ns == 4 * MS
    copy.ready_ns = 20 * MS  # beyond the look-ahead: not yet
    copy.strategy_key = None
    policy.queue_changed(model)
    assert policy.next_infer(worker, 1 * MS, 0) is None


def test_differs_in_padding_a_request_whose_rows_are_no_batch_size() -> None:
    """The paper has one row per request. Three rows run whole, in a batch of four."""
    worker, model = make_worker(), make_model(0, [100 * MS])
    model.queue[0].rows = 3
    model.num_unlike = 1
    model.extra_rows.add(model.queue[0].due_ns, 2)
    policy = ClockworkPolicy(SchedulerConfig())
    make_copy(model, worker, {1: MS, 2: 2 * MS, 4: 3 * MS})
    policy.queue_changed(model)
    batch = policy.next_infer(worker, 0, 0)
    assert batch is not None
    assert batch.copy.estimates.sizes[batch.size_index] == 4
