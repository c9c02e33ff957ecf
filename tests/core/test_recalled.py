"""A scheduler that begins with what an earlier one had learned takes it as a profile: until it is measured."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from clockwright.units import NS_PER_S, ArchitectureId, GpuKind, ModelId
from clockwright.wire.actions import Infer
from controller.core import SchedulerConfig
from controller.core.estimator import FORGET_INTERVAL_NS, WINDOW_SIZE, Estimates
from controller.core.events import (
    ClockSeen,
    LearnedLink,
    LearnedTimes,
    ModelAdded,
    Recalled,
    WorkerJoined,
    WorkerLost,
)
from controller.core.invariants import check
from controller.core.link import LinkPlan, OneWay
from tests.kit.core_bench import GPU, GPU2, MS, A, CoreBench, actions, infers, refusals

PROFILE = {1: 10.0, 2: 14.0, 4: 20.0}


def learned(bench: CoreBench) -> Recalled:
    """What the next controller is told."""
    times = [row for row in bench.scheduler.learned_times() if row is not None]
    return Recalled(times=times, links=bench.scheduler.learned_links())


def times_of(load_ms: float, exec_ms: dict[int, float], clock_mhz: int = 0) -> LearnedTimes:
    return LearnedTimes(
        gpu_kind=GpuKind("k"),
        clock_mhz=clock_mhz,
        architecture_id=ArchitectureId(A),
        load_ns=[int(load_ms * MS)],
        exec_ns={size: [int(ms * MS)] for size, ms in exec_ms.items()},
    )


def successor(recalled: Recalled) -> CoreBench:
    """A controller after a restart; its worker comes back with its profile and the weights."""
    bench = CoreBench()
    bench.tell(recalled)
    bench.join()
    bench.tell(ModelAdded(model_id=A))
    bench.ready(resident=True)
    check(bench.scheduler)
    return bench


def expected_ms(bench: CoreBench, model: ModelId = A) -> dict[int, float]:
    (found,) = [row for row in bench.scheduler.statistics().models if row.model_id == model]
    return {size: ns / MS for size, ns in found.exec_ns.items()}


def run(bench: CoreBench, exec_ms: float, times: int = WINDOW_SIZE) -> None:
    """Have requests run one by one, each for so long."""
    for _ in range(times):
        (infer,) = actions(bench.request(slo_ms=10_000))
        bench.done(infer.action_id, bench.now_ms, bench.now_ms + exec_ms)


@pytest.fixture
def served() -> CoreBench:
    """A controller whose model takes half as long again as its profile says."""
    bench = CoreBench()
    bench.join()
    bench.warm(load_ms=8, exec_ms=PROFILE)
    run(bench, 15, 3 * WINDOW_SIZE)
    return bench


def test_after_a_restart_the_first_batch_is_predicted_as_the_last_one_was(
    served: CoreBench,
) -> None:
    before = expected_ms(served)
    assert before[1] == 15
    assert before[4] > PROFILE[4]  # it never ran, and follows from its neighbour
    bench = successor(learned(served))
    assert expected_ms(bench) == before
    (infer,) = actions(bench.request())
    assert isinstance(infer, Infer)
    assert infer.expected_duration_ns == 15 * MS


def test_what_is_recalled_outlives_restarts_in_which_nothing_ran(served: CoreBench) -> None:
    before, bench = expected_ms(served), served
    for _ in range(3):
        bench = successor(learned(bench))
    assert expected_ms(bench) == before


def test_a_profile_alone_is_nothing_learned() -> None:
    bench = CoreBench()
    bench.join()
    bench.tell(ModelAdded(model_id=A))
    bench.ready()
    assert learned(bench) == Recalled(times=[], links=[])


def test_measurements_take_the_place_of_what_is_recalled() -> None:
    bench = successor(Recalled(times=[times_of(8, {1: 25, 2: 30, 4: 40})]))
    run(bench, 12, 2 * WINDOW_SIZE)
    assert expected_ms(bench)[1] == 12


def test_recalled_times_that_alone_refuse_a_request_are_tried_as_soon_as_a_profile_is() -> None:
    def first_trial_ms(bench: CoreBench) -> float:
        for number in range(1000):
            if infers(bench.request(slo_ms=18, at_ms=1000 + number)):
                return number
        raise AssertionError("it was never tried")

    def fresh(exec_ms: dict[int, float]) -> CoreBench:
        bench = CoreBench()
        bench.join()
        bench.tell(ModelAdded(model_id=A))
        bench.ready(exec_ms=exec_ms, resident=True)
        return bench

    too_long = {1: 30.0, 2: 40.0, 4: 50.0}
    bench = successor(Recalled(times=[times_of(8, too_long)]))
    assert refusals(bench.request(slo_ms=18))
    assert first_trial_ms(bench) <= first_trial_ms(fresh(too_long)) < FORGET_INTERVAL_NS / MS


def test_what_is_on_trial_is_not_taken_for_learned(served: CoreBench) -> None:
    before = learned(served)
    for number in range(2000):
        if infers(served.request(slo_ms=12, at_ms=served.now_ms + 1)):
            break
        if expected_ms(served)[1] < 15:
            assert learned(served).times == before.times, f"at request {number}"
    else:
        raise AssertionError("it was never tried")


def test_recalled_times_far_beyond_the_profile_came_from_a_slow_gpu() -> None:
    bench = successor(Recalled(times=[times_of(100, {1: 15, 2: 200, 4: 25})]))
    assert expected_ms(bench) == {1: 15, 2: 14, 4: 25}


@pytest.mark.parametrize(
    "other",
    [
        times_of(9, {1: 15, 2: 20}),
        times_of(9, {1: 15, 2: 20, 4: 30}, clock_mhz=1400),
    ],
    ids=["other batch sizes", "another clock"],
)
def test_times_of_what_no_worker_brings_change_nothing_and_are_kept_until_forgotten(
    other: LearnedTimes,
) -> None:
    bench = successor(Recalled(times=[other]))
    assert expected_ms(bench) == PROFILE
    assert learned(bench).times == [other]
    bench.tell(Recalled())
    assert learned(bench).times == []


def test_times_at_another_clock_are_found_when_the_gpu_is_at_it() -> None:
    bench = successor(Recalled(times=[times_of(9, {1: 13, 2: 19, 4: 29}, clock_mhz=1400)]))
    bench.tell(ClockSeen(worker_id=GPU, clock_mhz=1400))
    assert expected_ms(bench) == {1: 13, 2: 19, 4: 29}


def test_a_size_that_is_known_to_be_less_dense_stays_so() -> None:
    row = Estimates(load_ns=8 * MS, exec_ns={1: 10 * MS, 2: 14 * MS, 4: 60 * MS})
    assert row.densest[4] == 2  # it costs little to try
    row.recall(times_of(8, {1: 10, 2: 14, 4: 60}))
    assert row.densest[4] == 1


@pytest.mark.parametrize("seed", range(10))
def test_whatever_was_measured_a_row_recalled_predicts_the_same(seed: int) -> None:
    chance = random.Random(seed)
    sizes = (1, 2, 4, 8)
    profile_ns = {size: size * 3 * MS for size in sizes}
    row = Estimates(load_ns=5 * MS, exec_ns=profile_ns)
    for _ in range(300):
        size = chance.choice(sizes)
        row.measured_exec(size, int(profile_ns[size] * chance.uniform(0.7, 2.5)))
        row.measured_load(int(5 * MS * chance.uniform(0.7, 2)))
    for size in sizes:  # so that none is on trial
        row.measured_exec(size, profile_ns[size])
    found = row.learned()
    assert found is not None
    again = Estimates(load_ns=5 * MS, exec_ns=profile_ns)
    load_ns, exec_ns = found
    again.recall(replace(times_of(0, {}), load_ns=load_ns, exec_ns=exec_ns))
    assert (again.load_ns, again.exec_ns) == (row.load_ns, row.exec_ns)
    assert again.learned() == found


# --- links ----------------------------------------------------------------------------------------


def link_of(out_ms: float = 0, per_byte: float = 0, back_ms: float = 0) -> LearnedLink:
    return LearnedLink(
        worker_id=GPU,
        out_length_ns=int(out_ms * MS),
        out_ns_per_byte=per_byte,
        back_length_ns=int(back_ms * MS),
        back_ns_per_byte=0.0,
    )


def test_a_link_that_was_long_is_planned_for_from_the_first_action_on() -> None:
    bench = successor(Recalled(links=[link_of(12, back_ms=6)]))
    (found,) = bench.scheduler.learned_links()
    assert found == link_of(12, back_ms=6)
    (infer,) = infers(bench.request())
    assert infer.expected_begin_ns == 12 * MS


def test_a_link_that_is_not_measured_is_soon_forgotten() -> None:
    bench = successor(Recalled(links=[link_of(12)]))
    bench.now_ns = 3 * NS_PER_S
    (infer,) = infers(bench.request())
    assert infer.expected_begin_ns == bench.now_ns


def test_a_link_is_recalled_by_its_own_worker_only_and_once() -> None:
    bench = CoreBench(SchedulerConfig())
    bench.tell(Recalled(links=[link_of(12)]))
    bench.join(GPU2)
    assert bench.scheduler.learned_links() == [link_of(12)]
    bench.join(GPU)
    bench.tell(WorkerLost(worker_id=GPU))
    bench.tell(WorkerJoined(worker_id=GPU, gpu_kind=GpuKind("k"), num_pages=4))
    assert bench.scheduler.learned_links() == []


def test_a_recalled_rate_holds_until_messages_tell_another() -> None:
    way = OneWay(least_ns=MS // 2, short_ns=MS // 2, tolerance_ns=5 * MS // 2)
    way.recall(3 * MS, 8.0, 0)
    assert way.wire_ns(600_000) == pytest.approx(4.8 * MS, rel=0.01)
    sent_bytes = way.send(0, 600_000)
    way.measured(0, int(7.8 * MS), num_bytes=600_000, sent_bytes=sent_bytes)
    assert way.ns_per_byte == 8.0
    # Now nobody else uses it.
    sent_bytes = way.send(20 * MS, 600_000)
    way.measured(20 * MS, 21 * MS, num_bytes=600_000, sent_bytes=sent_bytes)
    assert way.ns_per_byte < 2


def test_a_link_with_nothing_to_plan_for_is_not_kept() -> None:
    bench = CoreBench()
    bench.join()
    assert bench.scheduler.learned_links() == []
    assert LinkPlan(least_ns=0, tolerance_ns=0).is_usual
