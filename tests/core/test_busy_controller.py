"""What a busy controller leaves lying is not the worker's link's doing, and it plans for its own delay while that lasts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

import controller.core
from clockwright.errors import Refusal
from clockwright.units import ActionId, ModelId, WorkerId
from clockwright.wire.actions import Infer, LoadWeights
from controller.core import SchedulerConfig
from controller.core.events import ActionSucceeded, ModelAdded, SendAction
from controller.core.invariants import check, check_commands, size_of
from tests.kit.core_bench import GPU, MS, A, CoreBench, infers, refusals, sends

CONFIG = SchedulerConfig(policy="clockwork", dispatch_delay_ns=0, margin_ns=0)
WORKERS = tuple(WorkerId(f"gpu{number}") for number in range(15))


#: What audits a scheduler in each test.
AUDIT = {found.__code__ for found in (check, check_commands, size_of)}
CORE = str(Path(controller.core.__file__).parent)


def served_late(*, unsent_ms: int = 0, unread_ms: int = 0, link_ms: int = 0) -> CoreBench:
    """Half a second in which each action's result is heard of so much after its end."""
    bench = CoreBench(CONFIG)
    bench.join()
    bench.warm(A, exec_ms={1: 5})
    for begin_ms in range(2_000, 2_500, 100):
        (sent,) = sends(bench.request(A, at_ms=begin_ms, slo_ms=10_000))
        there_ns = bench.now_ns + (unsent_ms + link_ms) * MS
        bench.now_ns = there_ns + (5 + unread_ms + link_ms) * MS
        bench.tell(
            ActionSucceeded(
                worker_id=GPU,
                action_id=sent.action.action_id,
                begin_ns=there_ns,
                end_ns=there_ns + 5 * MS,
                duration_ns=5 * MS,
                received_ns=there_ns,
                unsent_ns=unsent_ms * MS,
                unread_ns=unread_ms * MS,
            )
        )
        bench.now_ns = min(bench.now_ns, (begin_ms + 99) * MS)
    return bench


@pytest.mark.parametrize(("unsent_ms", "unread_ms"), [(0, 90), (90, 0), (45, 45)])
def test_results_that_a_busy_controller_left_lying_do_not_make_a_link_long(
    unsent_ms: int, unread_ms: int
) -> None:
    bench = served_late(unsent_ms=unsent_ms, unread_ms=unread_ms)
    commands = bench.request(A, at_ms=2_510, slo_ms=20)
    assert refusals(commands) == []
    assert len(infers(commands)) == 1


def read_late(bench: CoreBench, unread_ms: int, *, times: int) -> None:
    """So many runs one after the other, and each result lies unread so long."""
    for _ in range(times):
        (sent,) = sends(bench.request(A, slo_ms=5_000))
        bench.now_ns += (5 + unread_ms) * MS
        read(bench, sent, unread_ms)


def read(bench: CoreBench, sent: SendAction, unread_ms: int) -> None:
    """The result of a run that began at once."""
    assert isinstance(sent.action, Infer)
    begin_ns = sent.action.earliest_ns
    bench.tell(
        ActionSucceeded(
            worker_id=sent.worker_id,
            action_id=sent.action.action_id,
            begin_ns=begin_ns,
            end_ns=begin_ns + 5 * MS,
            duration_ns=5 * MS,
            received_ns=begin_ns,
            staged_ns=begin_ns,
            unread_ns=unread_ms * MS,
        )
    )


def is_refused(bench: CoreBench, slo_ms: int) -> bool:
    """Ask, and let what is sent end in time."""
    commands = bench.request(A, slo_ms=slo_ms)
    for sent in infers(commands):
        bench.finish(sent)
    return refusals(commands) != []


def test_a_request_whose_result_would_lie_unread_too_long_is_refused() -> None:
    bench = CoreBench(CONFIG)
    bench.join()
    bench.warm(A, exec_ms={1: 5})
    read_late(bench, 8, times=3)
    assert is_refused(bench, slo_ms=16)
    assert not is_refused(bench, slo_ms=20)
    # That answer was read at once.
    assert not is_refused(bench, slo_ms=16)


def test_what_was_left_lying_in_one_pause_delays_no_answer_after_it() -> None:
    bench = CoreBench(CONFIG)
    bench.join()
    bench.warm(A, exec_ms={1: 5})
    read_late(bench, 90, times=1)
    assert not is_refused(bench, slo_ms=16)


def test_a_controller_that_is_long_silent_is_not_behind() -> None:
    bench = CoreBench(CONFIG)
    bench.join()
    bench.warm(A, exec_ms={1: 5})
    read_late(bench, 8, times=3)
    bench.now_ns += 20 * MS
    assert not is_refused(bench, slo_ms=16)


@pytest.mark.parametrize("unread_ms", [0, 8])
@pytest.mark.parametrize("largest", [1, 2])
def test_a_controller_that_is_behind_decides_later_what_a_lane_does_next_if_batches_can_grow(
    largest: int, unread_ms: int
) -> None:
    bench = CoreBench(SchedulerConfig(dispatch_delay_ns=0, margin_ns=0))
    bench.join()
    bench.warm(A, exec_ms=dict.fromkeys((1, largest), 5))
    read_late(bench, unread_ms, times=20)
    bench.request(A, slo_ms=5_000)
    bench.request(A, slo_ms=5_000)
    # A millisecond before the first one ends.
    decides_later = unread_ms and largest > 1
    assert len(bench.wait(bench.now_ns + 4 * MS)) == (0 if decides_later else 1)


def test_a_controller_that_is_behind_loads_no_further_copies() -> None:
    bench = CoreBench(SchedulerConfig(dispatch_delay_ns=0, margin_ns=0))
    bench.join()
    bench.warm(A, exec_ms={1: 5})
    read_late(bench, 8, times=20)
    bench.join(WORKERS[0])
    bench.ready(A, WORKERS[0], exec_ms={1: 5})
    # The other worker has pages to spare.
    commands = bench.request(A, slo_ms=12)
    assert refusals(commands) != []
    assert sends(commands) == []
    bench.now_ns += 100 * MS
    bench.request(A, slo_ms=5_000)
    commands = bench.request(A, slo_ms=6)
    assert refusals(commands) != []
    (load,) = sends(commands)
    assert isinstance(load.action, LoadWeights)


def test_a_long_link_is_as_long_while_the_controller_is_busy() -> None:
    bench = served_late(link_ms=40)
    assert [refusal for _, refusal in refusals(bench.request(A, at_ms=2_510, slo_ms=60))] == [
        Refusal.OVERLOADED
    ]
    # The worker is idle, so another one like it would not help.
    (kind,) = bench.scheduler.statistics().kinds
    assert kind.dropped_for_exec_rps == kind.dropped_for_links_rps == 0
    (sent,) = sends(bench.request(A, slo_ms=10_000))
    there_ns = bench.now_ns + 40 * MS
    # It was heard of after 40 ms, and the loop might have been busy all that time.
    bench.now_ns = there_ns + 45 * MS
    bench.tell(
        ActionSucceeded(
            worker_id=GPU,
            action_id=ActionId(sent.action.action_id),
            begin_ns=there_ns,
            end_ns=there_ns + 5 * MS,
            duration_ns=5 * MS,
            received_ns=there_ns,
            unread_ns=500 * MS,
        )
    )
    assert len(refusals(bench.request(A, slo_ms=60))) == 1


def calls_of(bench: CoreBench, model: ModelId, slo_ms: float) -> int:
    """Count the calls of the core's Python functions that a request takes, without those of the audit."""
    num_calls = 0
    depth = 0

    def count(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal num_calls, depth
        if frame.f_code in AUDIT and event in ("call", "return"):
            depth += 1 if event == "call" else -1
        is_core = frame.f_code.co_filename.startswith(CORE)
        num_calls += event == "call" and is_core and not depth

    sys.setprofile(count)
    try:
        bench.request(model, slo_ms=slo_ms)
    finally:
        sys.setprofile(None)
    return num_calls


def test_a_refusal_for_long_links_takes_little_more_for_fifteen_workers_than_for_one() -> None:
    numbers = []
    for workers in (WORKERS[:1], WORKERS):
        bench = CoreBench(CONFIG)
        bench.tell(ModelAdded(model_id=A))
        for worker in workers:
            bench.join(worker)
            bench.ready(A, worker, exec_ms={1: 5})
        for _ in range(10):
            for _ in range(30):
                bench.request(A, slo_ms=10_000)
            end_ns = bench.now_ns + 5 * MS
            bench.now_ns += 300 * MS
            for sent in list(bench.in_flight.values()):
                bench.tell(
                    ActionSucceeded(
                        worker_id=sent.worker_id,
                        action_id=sent.action.action_id,
                        begin_ns=end_ns - 5 * MS,
                        end_ns=end_ns,
                        duration_ns=5 * MS,
                        received_ns=end_ns - 5 * MS,
                    )
                )
        assert len(refusals(bench.request(A, slo_ms=100))) == 1
        numbers.append(calls_of(bench, A, 100))
    # Each other worker has its link looked at, in six calls.
    assert numbers[1] <= numbers[0] + 6 * (len(WORKERS) - 1)
