"""What is counted per kind of worker, and that rates look at the last seconds only."""

from __future__ import annotations

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_S, GpuKind
from clockwright.wire.actions import ActionError
from controller.core import KindStatistics
from controller.core.events import LearnedStart, ModelAdded, Recalled, RefuseRequest, WorkerLost
from controller.core.link import LinkPlan
from controller.core.shortages import Shortages
from controller.core.state import KindCounts, WorkerState
from tests.kit.core_bench import GPU, GPU2, MS, A, B, CoreBench, sends

KIND = GpuKind("k")


def only(shortages: Shortages, now_ns: int) -> KindStatistics:
    (kind,), _ = shortages.statistics(now_ns)
    return kind


def test_rates_are_of_the_last_ten_seconds() -> None:
    shortages = Shortages()
    counts = shortages.of_kind(KIND)
    counts.changed(2, 0)
    for second in range(30):
        counts.exec_ns += NS_PER_S // 2
        counts.num_run += 100 if second < 15 else 200
        shortages.sample((second + 1) * NS_PER_S)
    kind = only(shortages, 30 * NS_PER_S)
    assert kind.over_ns == 10 * NS_PER_S
    assert kind.run_rps == 200
    assert kind.exec_busy == 0.25


def test_what_was_before_a_long_silence_is_no_rate_of_now() -> None:
    shortages = Shortages()
    counts = shortages.of_kind(KIND)
    counts.changed(1, 0)
    counts.num_run += 1000
    shortages.sample(10 * NS_PER_S)
    hour_ns = 3600 * NS_PER_S
    assert only(shortages, hour_ns).run_rps == 0
    counts.num_run += 300
    assert only(shortages, hour_ns + 3 * NS_PER_S).run_rps == 100


def test_workers_count_for_as_long_as_they_are_there() -> None:
    counts = KindCounts()
    counts.changed(1, 0)
    counts.changed(1, 5 * NS_PER_S)
    counts.changed(-1, 7 * NS_PER_S)
    assert counts.worker_ns_at(10 * NS_PER_S) == 12 * NS_PER_S


def test_a_refused_request_is_a_want_of_what_its_model_has_not() -> None:
    bench = CoreBench()
    bench.join()
    bench.warm(A, exec_ms={1: 10})
    bench.tell(ModelAdded(model_id=B))
    refused = [command for _ in range(4) for command in bench.request(A, slo_ms=25)]
    assert [c.refusal for c in refused if isinstance(c, RefuseRequest)] == [Refusal.OVERLOADED] * 2
    # Nobody has B; then it is not loaded in time.
    bench.request(B, slo_ms=25)
    bench.ready(B, load_ms=50)
    for _ in range(3):
        bench.request(B, slo_ms=25)
    bench.wait(1000 * MS)
    statistics = bench.scheduler.statistics()
    (kind,) = statistics.kinds
    seconds = kind.over_ns / NS_PER_S
    assert kind.dropped_for_exec_rps * seconds == pytest.approx(2)
    assert statistics.dropped_without_worker_rps * seconds == pytest.approx(1)
    # The first one came to an idle lane: the load itself takes too long.
    assert kind.dropped_for_loads_rps * seconds == pytest.approx(2)
    assert kind.dropped_for_pages_rps == 0


def test_a_model_that_is_avoided_on_a_worker_is_shown_with_the_reason() -> None:
    bench = CoreBench()
    for worker in (GPU, GPU2):
        bench.join(worker)
        if worker is GPU:
            bench.tell(ModelAdded(model_id=A))
        bench.ready(A, worker)
    (load,) = sends(bench.request(A, slo_ms=500))
    bench.failed(load.action.action_id, ActionError.DEVICE, at_ms=5, worker=load.worker_id)
    shown = {row.worker_id: row.suspended for row in bench.scheduler.statistics().workers}
    assert list(shown.pop(load.worker_id)) == [A]
    assert list(shown.values()) == [{}]


def second(bench: CoreBench, *, requests: int, slo_ms: float) -> KindStatistics:
    """So many requests come at once, what was sent is done, and the rest of a second passes."""
    begin_ns = bench.now_ns
    for _ in range(requests):
        bench.request(A, slo_ms=slo_ms)
    while bench.in_flight:
        bench.finish(next(iter(bench.in_flight.values())))
    bench.wait(begin_ns + NS_PER_S)
    (kind,) = bench.scheduler.cluster_load(bench.now_ns).kinds
    return kind


def test_an_slo_that_no_worker_can_meet_asks_for_none() -> None:
    bench = CoreBench()
    bench.join()
    bench.warm(A, exec_ms={1: 10})
    for _ in range(200):
        kind = second(bench, requests=20, slo_ms=5)
    assert kind.wanted == 1
    # One that two workers could meet asks for the second.
    for _ in range(20):
        kind = second(bench, requests=4, slo_ms=25)
    assert (kind.wanted, kind.limit) == (2, "exec")


def test_a_start_lasts_until_a_model_is_ready_on_the_worker_that_was_asked_for() -> None:
    bench = CoreBench()
    bench.join()
    bench.warm(A, exec_ms={1: 10})
    second(bench, requests=0, slo_ms=25)
    asked_ns = 0
    while not asked_ns:
        if second(bench, requests=4, slo_ms=25).wanted == 2:
            asked_ns = bench.now_ns
    bench.join(GPU2)
    kind = second(bench, requests=1, slo_ms=25)
    assert (kind.num_workers, kind.num_joining, kind.start_ns) == (2, 1, 60 * NS_PER_S)
    bench.ready(A, GPU2, exec_ms={1: 10})
    (kind,) = bench.scheduler.cluster_load(bench.now_ns).kinds
    assert (kind.num_joining, kind.start_ns) == (0, bench.now_ns - asked_ns)
    # One that is lost and comes back was not started.
    bench.tell(WorkerLost(worker_id=GPU2))
    second(bench, requests=1, slo_ms=25)
    bench.join(GPU2)
    bench.ready(A, GPU2, exec_ms={1: 10})
    (learned,) = bench.scheduler.learned_starts()
    assert list(learned.starts_ns) == [kind.start_ns]


def test_workers_that_an_earlier_controller_had_were_not_started() -> None:
    bench = CoreBench()
    bench.tell(Recalled(starts=[LearnedStart(gpu_kind=KIND, wanted=3, starts_ns=[40 * NS_PER_S])]))
    bench.tell(ModelAdded(model_id=A))
    for worker in (GPU, GPU2):
        bench.join(worker)
        bench.wait(bench.now_ns + 2 * NS_PER_S)
        bench.ready(A, worker)
        (kind,) = bench.scheduler.cluster_load(bench.now_ns).kinds
        assert kind.wanted == 3
    (learned,) = bench.scheduler.learned_starts()
    assert list(learned.starts_ns) == [40 * NS_PER_S]


def test_loads_of_a_worker_that_has_just_joined_ask_for_none() -> None:
    shortages = Shortages()
    counts = shortages.of_kind(KIND)
    counts.changed(2, 0)
    workers = [
        WorkerState(GPU, KIND, 10, 10, 0, LinkPlan(least_ns=0, tolerance_ns=0)) for _ in range(2)
    ]
    workers[0].ready_ns, workers[1].ready_ns = 0, 300 * NS_PER_S
    wanted = {}
    for at in range(400):
        if at >= 300:
            counts.load_ns += 2 * NS_PER_S
        there = workers if at >= 300 else workers[:1]
        (kind,), _ = shortages.statistics(at * NS_PER_S, there)
        wanted[at] = kind.wanted, kind.limit
    assert wanted[320] == (1, "")
    assert wanted[399] == (3, "loads")
