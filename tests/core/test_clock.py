"""Durations per clock: a GPU that slows down and recovers is planned for with what each clock has shown."""

from __future__ import annotations

import pytest

from clockwright.units import DURATION_NS_MAX, ArchitectureId, GpuKind, ModelId, WorkerId
from clockwright.wire.actions import Infer
from controller.core.estimator import (
    MAX_CLOCKS,
    WINDOW_SIZE,
    Estimates,
    EstimateTable,
)
from controller.core.events import (
    ClockSeen,
    ModelAdded,
    ModelReady,
    SendAction,
    WorkerJoined,
    WorkerLost,
)
from tests.kit.core_bench import GPU, GPU2, MS, A, B, CoreBench, actions

FAST, SLOW = 1980, 990


class Clocked(CoreBench):
    """One model, resident on GPU: 10 ms at the fast clock, as profiled there."""

    def __init__(self) -> None:
        super().__init__()
        self.join()
        self.see(FAST)
        self.warm(A, exec_ms={1: 10})
        self.see(FAST)
        self.now_ns = 2000 * MS

    def see(self, clock_mhz: int, worker: WorkerId = GPU) -> None:
        self.tell(ClockSeen(worker_id=worker, clock_mhz=clock_mhz))

    def ready_there(self, model: ModelId, measured_mhz: int = 0) -> None:
        """The other GPU has a model of the one architecture, profiled at that clock."""
        self.tell(
            ModelReady(
                worker_id=GPU2,
                model_id=model,
                architecture_id=ArchitectureId(A),
                num_pages=2,
                load_ns=8 * MS,
                exec_ns={1: 10 * MS},
                clock_mhz=measured_mhz,
            )
        )

    def send(self) -> int:
        (infer,) = actions(self.request(A, slo_ms=10_000))
        assert isinstance(infer, Infer)
        return infer.action_id

    def measure(self, exec_ms: float, action: int | None = None) -> None:
        """One EXEC that takes this long."""
        action = self.send() if action is None else action
        self.done(action, self.now_ms, self.now_ms + exec_ms)

    def expected_ms(self, model: ModelId = A) -> float:
        """What an EXEC is expected to take on the first GPU that has the model."""
        (row,) = [row for row in self.scheduler.statistics().models if row.model_id == model]
        return row.exec_ns[1] / MS


class Pair(Clocked):
    """And another GPU of the kind, at the same clock, with a model of the same architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.join(GPU2)
        self.see(FAST, GPU2)
        self.tell(ModelAdded(model_id=B))
        self.ready_there(B)
        (load,) = actions(self.request(B, slo_ms=10_000))
        (infer,) = actions(self.done(load.action_id, self.now_ms, self.now_ms + 8, GPU2))
        self.done(infer.action_id, self.now_ms, self.now_ms + 10, GPU2)
        self.see(FAST, GPU2)

    def measure_other(self, exec_ms: float) -> None:
        """One EXEC of the other GPU that takes this long."""
        (infer,) = actions(self.request(B, slo_ms=10_000))
        self.done(infer.action_id, self.now_ms, self.now_ms + exec_ms, GPU2)


def test_a_lower_clock_is_expected_to_be_slower_in_proportion_until_it_is_measured() -> None:
    bench = Clocked()
    bench.see(SLOW)
    assert bench.expected_ms() == 20
    for _ in range(WINDOW_SIZE):
        bench.measure(17)
    assert bench.expected_ms() == 17


@pytest.mark.parametrize("unseen", [2, 3, 2 * WINDOW_SIZE])
def test_what_was_measured_before_the_change_was_seen_is_not_mixed_in(unseen: int) -> None:
    bench = Clocked()
    for _ in range(unseen):
        bench.measure(21)  # the clock has fallen, and the next look is yet to come
    assert bench.expected_ms() > 20  # meanwhile that is the best that is known
    bench.see(SLOW)
    assert bench.expected_ms() == 20
    for _ in range(WINDOW_SIZE):
        bench.measure(18)
    bench.see(SLOW)
    for _ in range(unseen):
        bench.measure(9)  # recovered, not seen yet
    bench.see(FAST)
    assert bench.expected_ms() == 10
    bench.see(SLOW)
    assert bench.expected_ms() == 18


def test_a_look_that_shows_no_change_confirms_what_was_measured() -> None:
    bench = Clocked()
    for _ in range(WINDOW_SIZE):
        bench.measure(12)
    bench.see(FAST)
    bench.measure(30)
    bench.see(SLOW)
    bench.see(FAST)
    assert bench.expected_ms() == 12


def test_an_exec_during_which_the_clock_changed_is_of_neither_clock() -> None:
    bench = Clocked()
    action = bench.send()
    bench.see(SLOW)
    bench.measure(14, action)
    assert bench.expected_ms() == 20
    bench.see(FAST)
    assert bench.expected_ms() == 10


def test_workers_of_one_kind_share_estimates_while_their_clocks_are_the_same() -> None:
    bench = Clocked()
    bench.join(GPU2)
    bench.see(FAST, GPU2)
    bench.tell(ModelAdded(model_id=B))
    bench.ready_there(B)
    for _ in range(WINDOW_SIZE):
        bench.measure(12)
    assert bench.expected_ms(B) == 12
    bench.see(SLOW, GPU2)
    assert bench.expected_ms(B) == 24
    bench.measure(13)
    assert bench.expected_ms(B) == 24


def test_of_very_many_clocks_those_are_remembered_that_some_worker_is_at() -> None:
    bench = Clocked()
    bench.join(GPU2)
    bench.see(FAST, GPU2)
    bench.tell(ModelAdded(model_id=B))
    bench.ready_there(B)
    for _ in range(WINDOW_SIZE):
        bench.measure(12)
    bench.see(FAST)
    for clock_mhz in range(1000, 1300):
        bench.see(clock_mhz)
    assert bench.expected_ms() > 12  # none of these clocks is as fast
    bench.see(FAST)
    assert bench.expected_ms() == bench.expected_ms(B) == 12


def test_of_very_many_clocks_no_more_are_kept_than_a_gpu_could_have() -> None:
    table, kind = EstimateTable(), GpuKind("x")
    known = Estimates(load_ns=MS, exec_ns={1: MS})
    for clock_mhz in range(1000, 1300):
        table.forget_clocks(kind, [clock_mhz])
        table.at_clock(kind, clock_mhz, ArchitectureId("a"), known=known, known_mhz=FAST)
        assert len(table) <= MAX_CLOCKS


def test_at_any_sequence_of_clocks_an_estimate_stays_below_an_hour() -> None:
    known = Estimates(load_ns=MS, exec_ns={1: DURATION_NS_MAX})
    for known_mhz, clock_mhz in ((100_000, 1), (1, 99_999), (99_999, 2), (99_998, 3)):
        known = known.at_clock(known_mhz, clock_mhz)
    assert known.exec_ns == [DURATION_NS_MAX]


def test_every_number_of_rows_finds_the_sizes_around_it() -> None:
    estimates = Estimates(load_ns=MS, exec_ns={2: MS, 4: MS, 16: MS})
    sizes = estimates.sizes
    for rows in range(17):
        below = [index for index, size in enumerate(sizes) if size <= rows]
        assert estimates.fit[rows] == (below[-1] if below else -1)
        assert estimates.cover[rows] == min(i for i, size in enumerate(sizes) if size >= rows)


@pytest.mark.parametrize("confirmed", [False, True])
def test_a_gpu_whose_clock_changes_takes_back_only_what_it_measured_itself(confirmed: bool) -> None:
    bench = Pair()
    for _ in range(WINDOW_SIZE):
        bench.measure_other(21)  # its clock has fallen, and the next look is yet to come
        bench.measure(12)
    if confirmed:
        bench.see(FAST)
    bench.measure_other(21)
    bench.see(SLOW, GPU2)
    assert bench.expected_ms() == 12
    bench.see(FAST)
    assert bench.expected_ms() == 12


def test_what_a_gpu_took_back_no_other_brings_back() -> None:
    bench = Pair()
    bench.measure(21)  # not at the fast clock any more
    bench.measure_other(10)
    bench.see(SLOW)
    bench.measure_other(21)  # neither is this one
    bench.see(SLOW, GPU2)
    bench.see(FAST)
    assert bench.expected_ms() == 10


def test_what_a_gpu_measured_last_before_it_was_lost_is_not_kept() -> None:
    bench = Pair()
    bench.measure(12)
    bench.measure_other(30)
    bench.measure_other(30)
    assert bench.expected_ms() > 20
    bench.tell(WorkerLost(worker_id=GPU2))
    bench.see(FAST)
    assert 11 < bench.expected_ms() < 12


@pytest.mark.parametrize(("measured_mhz", "expected_ms"), [(0, 10), (SLOW, 10), (FAST, 20)])
def test_seeds_are_taken_at_the_clock_they_were_measured_at(
    measured_mhz: int, expected_ms: float
) -> None:
    bench = Clocked()
    bench.tell(WorkerJoined(worker_id=GPU2, gpu_kind=GpuKind("other"), num_pages=10))
    bench.see(SLOW, GPU2)
    bench.tell(ModelAdded(model_id=B))
    bench.ready_there(B, measured_mhz)
    assert bench.expected_ms(B) == expected_ms


def test_a_faster_clock_is_not_believed_to_be_faster_before_it_is_measured() -> None:
    bench = CoreBench()
    bench.join()
    bench.tell(ClockSeen(worker_id=GPU, clock_mhz=SLOW))
    bench.tell(ModelAdded(model_id=A))
    bench.ready(exec_ms={1: 10})
    bench.tell(ClockSeen(worker_id=GPU, clock_mhz=FAST))
    (model,) = bench.scheduler.statistics().models
    assert model.exec_ns == {1: 10 * MS}


def test_a_request_that_waits_is_planned_anew_when_the_clock_recovers() -> None:
    bench = Clocked()
    bench.see(SLOW)
    sent = [actions(bench.request(A, slo_ms=70)) for _ in range(3)]
    # Two fill the look-ahead at 20 ms each; the third is expected at 60 ms, and waits.
    assert [len(each) for each in sent] == [1, 0, 0]
    commands = bench.tell(ClockSeen(worker_id=GPU, clock_mhz=FAST))
    assert not [each for each in commands if isinstance(each, SendAction)]
    following = actions(bench.done(sent[0][0].action_id, bench.now_ms, bench.now_ms + 20))
    assert [each.expected_duration_ns for each in following if isinstance(each, Infer)] == [10 * MS]


def test_a_look_of_a_worker_that_is_gone_means_nothing() -> None:
    bench = CoreBench()
    assert bench.tell(ClockSeen(worker_id=GPU, clock_mhz=FAST)) == []
