"""No model is avoided for ever where it would work: something asks again."""

from __future__ import annotations

import pytest

from clockwright.units import NS_PER_S, WorkerId
from clockwright.wire.actions import ActionError, LoadWeights
from controller.core import SchedulerConfig
from controller.core.events import Command, ModelAdded, SendAction
from tests.kit.core_bench import GPU, GPU2, MS, A, B, CoreBench, sends

PREDICTING = ("clockwork", "edf_mh")


def pair(policy: str, *, pages: int) -> CoreBench:
    """Two workers that have two models in host memory, and none on the GPU."""
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=0))
    for model in (A, B):
        bench.tell(ModelAdded(model_id=model))
    for worker in (GPU, GPU2):
        bench.join(worker, pages=pages)
        for model in (A, B):
            bench.ready(model, worker)
    return bench


def fail(bench: CoreBench, command: SendAction) -> list[Command]:
    return bench.failed(
        command.action.action_id,
        ActionError.DEVICE,
        at_ms=bench.now_ms + 1,
        worker=command.worker_id,
    )


def finish_all(bench: CoreBench) -> None:
    while bench.in_flight:
        bench.finish(next(iter(bench.in_flight.values())))


def is_back(bench: CoreBench, worker: WorkerId) -> bool:
    """Ask for A some times a second, twice at once; is the worker one of those that have it in the end."""
    until_ns = bench.now_ns + 3 * NS_PER_S
    while bench.now_ns < until_ns:
        bench.request(A, slo_ms=50)
        bench.request(A, slo_ms=50)
        finish_all(bench)
        bench.wait(bench.now_ns + 100 * MS)
    (found,) = [row for row in bench.scheduler.statistics().models if row.model_id == A]
    return worker in found.resident_on


@pytest.mark.parametrize("policy", PREDICTING)
def test_a_model_whose_run_failed_is_tried_again_after_its_copy_was_evicted(policy: str) -> None:
    bench = pair(policy, pages=2)  # room for one
    bench.request(A, slo_ms=1000)
    finish_all(bench)
    (run,) = sends(bench.request(A, slo_ms=1000))
    broken = run.worker_id
    fail(bench, run)
    finish_all(bench)
    # The other model takes the broken one's place, since nobody sees it there.
    bench.request(B, slo_ms=1000)
    finish_all(bench)
    assert is_back(bench, broken)


@pytest.mark.parametrize("policy", PREDICTING)
def test_a_sick_worker_is_tried_again_though_it_holds_only_what_nobody_asks_for(
    policy: str,
) -> None:
    bench = pair(policy, pages=2)
    bench.request(B, slo_ms=1000)
    (load,) = bench.in_flight.values()
    sick = load.worker_id
    finish_all(bench)
    (run,) = sends(bench.request(B, slo_ms=1000))
    bench.wait(bench.now_ns + 100 * MS)  # no answer for so long: it is suspected
    given_back = run.action.action_id
    bench.failed(given_back, ActionError.WITHDRAWN, at_ms=bench.now_ms, worker=sick)
    finish_all(bench)
    assert is_back(bench, sick)


@pytest.mark.parametrize("policy", PREDICTING)
def test_a_model_that_failed_to_load_is_back_although_its_next_load_took_long(policy: str) -> None:
    bench = pair(policy, pages=4)
    bench.request(A, slo_ms=1000)
    (load,) = bench.in_flight.values()
    broken = load.worker_id
    fail(bench, load)
    finish_all(bench)
    slow: SendAction | None = None
    for _ in range(20):
        bench.wait(bench.now_ns + 100 * MS)
        for command in sends(bench.request(A, slo_ms=50)):
            if command.worker_id == broken and isinstance(command.action, LoadWeights):
                slow = command
        if slow is not None:
            break
        finish_all(bench)
    assert slow is not None
    begin_ms = bench.now_ms
    del bench.in_flight[slow.action.action_id]
    finish_all(bench)
    bench.done(slow.action.action_id, begin_ms, begin_ms + 40, broken)
    assert is_back(bench, broken)


@pytest.mark.parametrize("policy", PREDICTING)
def test_a_worker_that_did_not_answer_is_back_with_any_answer_a_loads_too(policy: str) -> None:
    bench = pair(policy, pages=4)
    bench.request(A, slo_ms=1000)
    (load,) = bench.in_flight.values()
    silent = load.worker_id
    bench.wait(bench.now_ns + 100 * MS)  # it is suspected, and A is loaded on the other
    begin_ms = bench.now_ms
    bench.done(load.action.action_id, begin_ms - 8, begin_ms, silent)
    finish_all(bench)
    bench.request(B, slo_ms=1000)
    # As long as it is avoided, B is loaded on the other, and here only to see whether it answers.
    assert [command.worker_id for command in bench.in_flight.values()] == [silent]
