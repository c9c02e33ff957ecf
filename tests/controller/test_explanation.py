"""Where the time of a request went: parts that add up, whatever overlaps and however clocks are off."""

from __future__ import annotations

import pytest

from clockwright.units import NS_PER_US, ActionId, ModelId, RequestId, WorkerId
from clockwright.wire.actions import Infer, Result, StepTime
from controller.core.events import AnswerRequest, RequestArrived, SendAction
from controller.front.oip.explanation import explain
from controller.ledger import Finished, Sent
from controller.port import Course
from controller.runtime import course_of

PARTS = ("queue_us", "load_us", "input_us", "exec_us", "output_us", "network_us")


def answer(*, worker_clock_us: int = 0, load: bool = True, departure_us: int = 4600) -> Course:
    """Arrives at 1,000 us; its Infer is on the way from 1,200 to 1,500, the load runs until 3,000."""

    def at(us: int) -> int:
        return (us + worker_clock_us) * NS_PER_US

    def step(begin_us: int, end_us: int) -> StepTime:
        return StepTime(at(begin_us), at(end_us), (end_us - begin_us) * NS_PER_US)

    infer = Infer(
        action_id=ActionId(1),
        model_id=ModelId("m"),
        batch_size=1,
        rows=(1,),
        earliest_ns=0,
        latest_ns=0,
        expected_duration_ns=0,
    )
    command = SendAction(worker_id=WorkerId("w"), action=infer, request_ids=(RequestId(1),))
    result = Result(
        action_id=ActionId(1),
        received_ns=at(1500),
        input=step(3000, 3100),
        exec=step(3100, 4000),
        output=step(4000, 4200),
    )
    return course_of(
        request=RequestArrived(
            request_id=RequestId(1),
            model_id=ModelId("m"),
            rows=1,
            arrival_ns=1000 * NS_PER_US,
            slo_ns=10_000 * NS_PER_US,
        ),
        command=AnswerRequest(
            request_id=RequestId(1),
            action_id=ActionId(1),
            worker_id=WorkerId("w"),
            index=0,
            batch_size=1,
            cold=load,
            expected_departure_ns=0,
        ),
        finished=Finished(
            sent=Sent(command, 1200 * NS_PER_US),
            result=result,
            result_ns=4500 * NS_PER_US,
            load=step(1100, 3000) if load else None,
            outputs=[],
        ),
        departure_ns=departure_us * NS_PER_US,
    )


def parts_of(given: Course) -> dict[str, int]:
    explained = explain(given, slo_ns=10_000 * NS_PER_US, slo_source="slo_ms")
    assert explained["measured_us"] == 3600
    return {name: int(explained[name]) for name in PARTS}


def test_the_way_there_is_not_counted_again_where_the_load_ran() -> None:
    assert parts_of(answer()) == {
        "queue_us": 200,
        "load_us": 1900,
        "input_us": 100,
        "exec_us": 900,
        "output_us": 200,
        "network_us": 300,
    }
    assert parts_of(answer(load=False)) == {
        "queue_us": 1800,
        "load_us": 0,
        "input_us": 100,
        "exec_us": 900,
        "output_us": 200,
        "network_us": 600,
    }


@pytest.mark.parametrize("worker_clock_us", [-5000, -400, -100, 100, 400, 5000])
@pytest.mark.parametrize("load", [False, True])
def test_parts_add_up_when_the_workers_clock_is_off(worker_clock_us: int, load: bool) -> None:
    parts = parts_of(answer(worker_clock_us=worker_clock_us, load=load))
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == 3600


def test_steps_longer_than_the_whole_leave_nothing_for_the_rest() -> None:
    given = answer(departure_us=1000)
    explained = explain(given, slo_ns=10_000 * NS_PER_US, slo_source="slo_ms")
    assert explained["queue_us"] == explained["load_us"] == explained["network_us"] == 0
