"""What the last seconds say, read off the rows of telemetry."""

from __future__ import annotations

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S, ActionId, ModelId, RequestId, WorkerId
from clockwright.wire.actions import StepTime
from controller.front.services.recent import recent_actions, recent_requests
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import Telemetry

NOW_NS = 100 * NS_PER_S
A, B = WorkerId("a"), WorkerId("b")
SAME = {A: "V100", B: "V100"}


def ended(
    telemetry: Telemetry, at_ns: int, latency_ns: int, outcome: str = "OK", *, cold: bool = False
) -> None:
    slo_ns = 100 * NS_PER_MS
    telemetry.add_request(
        RequestRow(
            RequestId(0),
            ModelId("m"),
            1,
            at_ns - latency_ns,
            slo_ns,
            "",
            at_ns,
            outcome,
            0,
            0,
            0,
            0,
            cold,
            A,
            ActionId(0),
            1,
            at_ns,
        )
    )


def done(
    telemetry: Telemetry,
    worker: WorkerId,
    *,
    exec_ms: int = 0,
    load_ms: int = 0,
    expected_ms: int = 10,
    error: str = "NONE",
    batch: int = 1,
    at_ns: int = NOW_NS,
) -> None:
    def step(milliseconds: int) -> StepTime | None:
        duration_ns = milliseconds * NS_PER_MS
        return StepTime(at_ns - duration_ns, at_ns, duration_ns) if duration_ns else None

    telemetry.add_action(
        ActionRow(
            ActionId(0),
            "Infer" if exec_ms else "LoadWeights",
            worker,
            ModelId("m"),
            batch,
            1,
            1,
            at_ns,
            None,
            None,
            at_ns,
            expected_ms * NS_PER_MS,
            at_ns,
            at_ns,
            error,
            step(load_ms),
            None,
            step(exec_ms),
            None,
        )
    )


def test_requests_of_the_last_seconds_are_summed_up_and_older_ones_are_not() -> None:
    telemetry = Telemetry()
    ended(telemetry, NOW_NS - 60 * NS_PER_S, 99 * NS_PER_MS)
    for latency_ms in (10, 20, 90):
        ended(telemetry, NOW_NS, latency_ms * NS_PER_MS, cold=latency_ms == 90)
    ended(telemetry, NOW_NS, NS_PER_MS, "COLD")
    ended(telemetry, NOW_NS, NS_PER_MS, "CANCELLED")
    recent = recent_requests(telemetry, since_ns=0, now_ns=NOW_NS)
    assert (recent.requests, recent.answered, recent.counters["cold_starts"]) == (4, 3, 1)
    assert [(row.reason, row.count) for row in recent.refusals] == [("COLD", 1)]
    assert (recent.latency_ns_p50, recent.latency_ns_p99) == (20 * NS_PER_MS, 90 * NS_PER_MS)
    assert (recent.slo_share_p50, recent.slo_share_p99) == (0.2, 0.9)
    assert recent.over_ns == 5 * NS_PER_S


def test_a_look_is_bounded_and_says_how_far_it_went_back() -> None:
    telemetry = Telemetry()
    for number in range(10_000):
        ended(telemetry, NOW_NS - (10_000 - number) * NS_PER_MS // 10, NS_PER_MS)
    recent = recent_requests(telemetry, since_ns=0, now_ns=NOW_NS)
    assert recent.requests < 10_000
    # As many requests per second as there were, however few of them were looked at.
    assert recent.requests / (recent.over_ns / NS_PER_S) == pytest.approx(10_000, rel=0.01)


def test_a_young_controller_looks_back_to_its_start() -> None:
    recent = recent_requests(Telemetry(), since_ns=NOW_NS - NS_PER_S, now_ns=NOW_NS)
    assert (recent.over_ns, recent.requests) == (NS_PER_S, 0)


def test_a_worker_is_compared_with_others_over_the_same_work_alone() -> None:
    telemetry = Telemetry()
    for _ in range(4):
        done(telemetry, A, exec_ms=10)
        done(telemetry, B, exec_ms=20)
    # Nobody else ran this size: it takes longer, and says nothing of the worker.
    done(telemetry, A, exec_ms=500, batch=16)
    done(telemetry, B, load_ms=250)
    done(telemetry, B, error="TOO_LATE")
    done(telemetry, B, error="DEVICE")
    done(telemetry, B, error="WITHDRAWN")
    done(telemetry, WorkerId("gone"), exec_ms=10)
    found = recent_actions(telemetry, SAME, since_ns=0, now_ns=NOW_NS)
    assert set(found) == {A, B}
    assert (found[A].exec_over_others, found[B].exec_over_others) == (0.5, 2.0)
    assert (found[B].infers, found[B].loads, found[B].too_late, found[B].failed) == (4, 1, 1, 1)
    assert found[B].exec_busy == pytest.approx(0.08 / 5)
    assert found[B].load_busy == pytest.approx(0.25 / 5)
    assert found[B].exec_over_predicted == 2.0


def test_a_slow_worker_makes_none_of_the_others_look_fast() -> None:
    telemetry = Telemetry()
    three = {A: "V100", B: "V100", WorkerId("tortoise"): "V100"}
    for worker, exec_ms in zip(three, (20, 20, 50), strict=True):
        done(telemetry, worker, exec_ms=exec_ms)
    found = recent_actions(telemetry, three, since_ns=0, now_ns=NOW_NS)
    assert [found[worker].exec_over_others for worker in three] == [1.0, 1.0, 2.5]


def test_workers_of_other_kinds_are_no_measure() -> None:
    telemetry = Telemetry()
    done(telemetry, A, exec_ms=10)
    done(telemetry, B, exec_ms=20)
    found = recent_actions(telemetry, {A: "V100", B: "CPU"}, since_ns=0, now_ns=NOW_NS)
    assert found[A].exec_over_others == found[B].exec_over_others == 0.0
