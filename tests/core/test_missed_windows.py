"""What can no longer begin, because a run took too long, goes on at once: not as its results come, one by one."""

from __future__ import annotations

import pytest

from clockwright.errors import Refusal
from clockwright.wire.actions import ActionError
from controller.core import SchedulerConfig
from controller.core.events import Command, WithdrawAction
from tests.kit.core_bench import GPU, GPU2, MS, A, B, CoreBench, answers, infers, refusals

TOO_LATE = ActionError.TOO_LATE


def withdrawn(commands: list[Command]) -> list[int]:
    return [command.action_id for command in commands if isinstance(command, WithdrawAction)]


def warm_bench(b_ms: int = 1) -> CoreBench:
    """A worker that holds A, which runs for 50 ms, and B."""
    bench = CoreBench(SchedulerConfig(policy="edf_mh", dispatch_delay_ns=0, margin_ns=0))
    bench.join()
    bench.warm(A, run_ms=50, exec_ms={1: 50})
    bench.warm(B, run_ms=b_ms, exec_ms={1: b_ms})
    return bench


def behind_a_long_run(slo_ms: float = 60) -> tuple[CoreBench, int, int, int]:
    """A run of A, and behind it a short one of B with this SLO and another of A.

    They begin at 2000, 2050 and 2051 ms, and their windows are open for 5 ms more.
    """
    bench = warm_bench()
    (first,) = infers(bench.request(A, slo_ms=1000, at_ms=2000))
    bench.request(B, slo_ms=slo_ms, at_ms=2040)
    bench.request(A, slo_ms=1000, at_ms=2041)
    short, second = bench.wait(2060 * MS)
    assert [short.action.model_id, second.action.model_id] == [B, A]
    return bench, first.action.action_id, short.action.action_id, second.action.action_id


@pytest.mark.parametrize("heard", ["run", "short"])
def test_what_waited_behind_a_run_that_took_too_long_is_judged_by_the_lane_as_it_is(
    heard: str,
) -> None:
    """The second run of A cannot begin: it keeps nobody waiting, though no result says so yet."""
    bench, first, short, second = behind_a_long_run()
    b, a = bench.num_requests - 1, bench.num_requests
    if heard == "run":
        commands = bench.done(first, 2000, 2080)
    else:
        commands = bench.failed(short, TOO_LATE, at_ms=2081, turn_ms=2080)
    assert refusals(commands) == []
    # Both are back before the lane takes more, so that the more urgent one goes first.
    again = infers(commands)
    assert [command.request_ids for command in again] == [(b,), (a,)]
    if heard == "short":
        assert answers(bench.done(first, 2000, 2080)) == [b - 1]
    for late in {"run": (short, second), "short": (second,)}[heard]:
        assert bench.failed(late, TOO_LATE, at_ms=2082, turn_ms=2080) == []
    assert answers(bench.done(again[0].action.action_id, 2082, 2083)) == [b]
    assert answers(bench.done(again[1].action.action_id, 2083, 2133)) == [a]


@pytest.mark.parametrize("heard", ["run", "short"])
def test_one_whose_window_is_open_is_left_alone(heard: str) -> None:
    """The run ended between the end of the short one's window and that of the second run's."""
    bench, first, short, second = behind_a_long_run()
    if heard == "run":
        commands = bench.done(first, 2000, 2055.5)
    else:
        commands = bench.failed(short, TOO_LATE, at_ms=2060, turn_ms=2055.5)
    assert infers(commands) == []
    assert answers(bench.done(second, 2055.5, 2105.5)) == [bench.num_requests]


def test_one_that_overtook_what_waited_for_its_weights_is_not_taken_for_too_late() -> None:
    """Its own result is on its way while the other, which was sent before it, is too late."""
    bench, first, short, second = behind_a_long_run()
    assert answers(bench.done(first, 2000, 2050)) == [bench.num_requests - 2]
    # The second run of A went first, and B was too late when it ended.
    commands = bench.failed(short, TOO_LATE, at_ms=2101, turn_ms=2100)
    assert infers(commands) == []
    assert answers(bench.done(second, 2050, 2100)) == [bench.num_requests]


def test_one_that_ran_all_the_same_answers_first_and_what_was_sent_for_it_again_is_taken_back() -> (
    None
):
    """Clocks of two machines differ by a little, so a run may have begun that seemed to be too late."""
    bench, first, short, second = behind_a_long_run()
    b, a = bench.num_requests - 1, bench.num_requests
    commands = bench.done(first, 2000, 2080)
    again = {int(sent.request_ids[0]): sent.action.action_id for sent in infers(commands)}
    commands = bench.done(short, 2080, 2081)
    assert answers(commands) == [b]
    assert withdrawn(commands) == [again[b]]
    assert bench.failed(again[b], ActionError.WITHDRAWN, at_ms=2081) == []
    # What was sent for A again is too late itself by then: the worker will not run it.
    commands = bench.done(second, 2081, 2131)
    assert answers(commands) == [a]
    assert withdrawn(commands) == []
    assert bench.failed(again[a], TOO_LATE, at_ms=2131, turn_ms=2131) == []


def test_one_without_time_for_a_second_try_is_refused_by_its_result() -> None:
    bench, first, short, _ = behind_a_long_run()
    b, a = bench.num_requests - 1, bench.num_requests
    commands = bench.done(first, 2000, 2099.5)
    assert [command.request_ids for command in infers(commands)] == [(a,)]
    commands = bench.failed(short, TOO_LATE, at_ms=2099.6, turn_ms=2099.5)
    assert refusals(commands) == [(b, Refusal.LATE)]


def test_a_lane_that_is_free_sooner_than_it_was_to_look_again_takes_what_comes() -> None:
    """It was to look when the second run of A would be nearly over, which does not run."""
    bench = warm_bench()
    (first,) = infers(bench.request(A, slo_ms=1000, at_ms=2000))
    bench.request(A, slo_ms=57, at_ms=2044)
    (second,) = bench.wait(2048 * MS)
    bench.request(B, slo_ms=1000, at_ms=2049)
    commands = bench.done(first.action.action_id, 2000, 2060)
    (short,) = infers(commands)
    bench.failed(second.action.action_id, TOO_LATE, at_ms=2060, turn_ms=2060)
    bench.done(short.action.action_id, 2060, 2061)
    assert infers(bench.request(B, slo_ms=10, at_ms=2062)) != []


def test_another_worker_takes_what_this_one_has_no_room_for() -> None:
    bench = warm_bench(b_ms=50)
    (first,) = infers(bench.request(A, slo_ms=1000, at_ms=2000))
    bench.request(B, slo_ms=1000, at_ms=2040)
    assert len(bench.wait(2050 * MS)) == 1
    bench.request(A, slo_ms=150, at_ms=2051)
    bench.join(GPU2)
    bench.ready(B, GPU2, exec_ms={1: 50}, resident=True)
    again = infers(bench.done(first.action.action_id, 2000, 2080))
    found = {command.worker_id: command.request_ids for command in again}
    assert found == {GPU: (bench.num_requests,), GPU2: (bench.num_requests - 1,)}
