"""What is counted per kind of worker, and that rates look at the last seconds only."""

from __future__ import annotations

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_S, GpuKind
from clockwright.wire.actions import ActionError
from controller.core import KindStatistics
from controller.core.events import ModelAdded, RefuseRequest
from controller.core.shortages import Shortages
from controller.core.state import KindCounts
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
