"""A later result of a lane proves that an earlier one is lost, and what was lost goes on at once."""

from __future__ import annotations

from clockwright.errors import Refusal
from clockwright.units import RequestId, WorkerId
from clockwright.wire.actions import ActionError, EvictWeights, Infer, LoadWeights
from controller.core.events import (
    Command,
    ForgetModel,
    ModelAdded,
    ModelRemoved,
    RequestCancelled,
    SendAction,
    WorkerLost,
    WriteOffAction,
)
from tests.kit.core_bench import (
    GPU,
    MS,
    A,
    B,
    CoreBench,
    actions,
    answers,
    infers,
    refusals,
    sends,
)


def written_off(commands: list[Command]) -> list[int]:
    return [command.action_id for command in commands if isinstance(command, WriteOffAction)]


def two_under_way(slo_ms: float = 1000) -> tuple[CoreBench, int, int]:
    """A warm worker with two Infers of a request each; the first is about to be lost."""
    bench = CoreBench()
    bench.join()
    bench.warm()
    (first,) = infers(bench.request(A, slo_ms=slo_ms))
    bench.request(A, slo_ms=1000)
    (second,) = bench.wait(bench.now_ns + 6 * MS)
    return bench, first.action.action_id, second.action.action_id


def test_an_infer_that_runs_after_another_s_window_has_closed_proves_that_one_lost() -> None:
    bench, lost, later = two_under_way()
    commands = bench.done(later, bench.now_ms + 20, bench.now_ms + 30)
    assert written_off(commands) == [lost]
    assert answers(commands) == [bench.num_requests]
    (again,) = infers(commands)
    assert again.request_ids == (bench.num_requests - 1,)
    # Should its result come after all, it answers no second time.
    assert bench.done(lost, bench.now_ms - 2, bench.now_ms) == []
    commands = bench.done(again.action.action_id, bench.now_ms, bench.now_ms + 2)
    assert answers(commands) == [bench.num_requests - 1]


def test_an_infer_that_runs_while_another_s_window_is_open_proves_nothing() -> None:
    bench, first, later = two_under_way()
    commands = bench.done(later, 1001, 1007)
    assert written_off(commands) == []
    assert answers(bench.done(first, bench.now_ms, bench.now_ms + 2)) == [bench.num_requests - 1]


def test_a_request_of_a_lost_infer_that_has_no_time_left_hears_that_its_worker_was_lost() -> None:
    bench, lost, later = two_under_way(slo_ms=40)
    request_id = bench.num_requests - 1
    commands = bench.done(later, bench.now_ms + 20, bench.now_ms + 30)
    assert written_off(commands) == [lost]
    assert refusals(commands) == [(request_id, Refusal.WORKER_LOST)]


def loading() -> tuple[CoreBench, LoadWeights, Infer]:
    """A worker with a load and an Infer that was planned behind it."""
    bench = CoreBench()
    bench.join()
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A)
    sent = actions(bench.request(A, slo_ms=1000))
    sent += [command.action for command in bench.wait(7 * MS)]
    load, infer = sent
    assert isinstance(load, LoadWeights)
    assert isinstance(infer, Infer)
    return bench, load, infer


def test_a_copy_whose_load_was_lost_is_not_believed() -> None:
    bench, load, infer = loading()
    commands = bench.failed(infer.action_id, ActionError.NOT_RESIDENT, at_ms=9, worker=GPU)
    assert written_off(commands) == [load.action_id]
    evict, again = actions(commands)[:2]
    assert isinstance(evict, EvictWeights)  # the worker may have it or not
    assert isinstance(again, LoadWeights)


def test_a_model_that_runs_proves_that_only_the_result_of_its_load_was_lost() -> None:
    bench, load, infer = loading()
    commands = bench.done(infer.action_id, 9, 19)
    assert written_off(commands) == [load.action_id]
    assert answers(commands) == [1]
    assert actions(commands) == []
    assert [type(action) for action in actions(bench.request(A))] == [Infer]


def test_a_load_that_runs_after_another_s_window_has_closed_proves_that_one_lost() -> None:
    bench = CoreBench()
    bench.join()
    for model in (A, B):
        bench.tell(ModelAdded(model_id=model))
        bench.ready(model)
    (lost,) = actions(bench.request(A, slo_ms=1000))
    bench.tell(RequestCancelled(request_id=RequestId(bench.num_requests)))
    bench.request(B, slo_ms=1000)
    (later,) = [
        command.action for command in bench.wait(8 * MS) if type(command.action) is LoadWeights
    ]
    commands = bench.done(later.action_id, 20, 28)
    assert written_off(commands) == [lost.action_id]
    evicted = [each for each in actions(commands) if isinstance(each, EvictWeights)]
    assert [evict.model_id for evict in evicted] == [A]


def test_a_removed_model_is_forgotten_with_its_last_infer_though_that_one_s_result_was_lost() -> (
    None
):
    bench = CoreBench()
    bench.join()
    bench.warm(A)
    bench.warm(B)
    (lost,) = infers(bench.request(B, slo_ms=1000))
    bench.request(A, slo_ms=1000)
    (later,) = bench.wait(bench.now_ns + 6 * MS)
    bench.tell(ModelRemoved(model_id=B))
    commands = bench.done(later.action.action_id, bench.now_ms + 20, bench.now_ms + 30)
    assert written_off(commands) == [lost.action.action_id]
    evicted = [each for each in actions(commands) if isinstance(each, EvictWeights)]
    assert [evict.model_id for evict in evicted] == [B]
    assert ForgetModel(worker_id=GPU, model_id=B) in commands


def test_a_removed_model_is_forgotten_with_its_load_though_that_one_s_result_was_lost() -> None:
    bench = CoreBench()
    bench.join()
    for model in (A, B):
        bench.tell(ModelAdded(model_id=model))
        bench.ready(model)
    (lost,) = actions(bench.request(A, slo_ms=1000))
    bench.tell(ModelRemoved(model_id=A))
    bench.request(B, slo_ms=1000)
    (later,) = [
        command.action for command in bench.wait(8 * MS) if type(command.action) is LoadWeights
    ]
    commands = bench.done(later.action_id, 20, 28)
    assert written_off(commands) == [lost.action_id]
    assert ForgetModel(worker_id=GPU, model_id=A) in commands


def three_workers() -> tuple[CoreBench, SendAction]:
    """Three that have a model; one has a request."""
    bench = CoreBench()
    bench.tell(ModelAdded(model_id=A))
    for number in range(3):
        bench.join(WorkerId(f"w{number}"))
        bench.ready(A, WorkerId(f"w{number}"), resident=True)
    (sent,) = infers(bench.request(A, slo_ms=1000))
    return bench, sent


def test_a_request_with_which_two_workers_vanished_is_given_to_no_third() -> None:
    """What it holds may be what ends them: an integer that onnxruntime cannot divide ends its process."""
    bench = CoreBench()
    for model in (A, B):
        bench.tell(ModelAdded(model_id=model))
    commands: list[Command] = []
    for number in range(3):
        bench.join(WorkerId(f"w{number}"))
        for model in (A, B):
            bench.ready(model, WorkerId(f"w{number}"), resident=True)
        if number:
            commands = bench.tell(WorkerLost(worker_id=WorkerId(f"w{number - 1}")))
        else:
            bench.request(A, slo_ms=1000)
            bench.request(B, slo_ms=1000)
        # B's goes to the worker, too, and is behind A's.
        bench.wait(bench.now_ns + 6 * MS)
    assert refusals(commands) == [(1, Refusal.WORKER_LOST)]
    assert [sent.action.model_id for sent in infers(commands)] == [B]


def test_a_request_with_which_two_workers_fell_silent_is_given_to_no_third() -> None:
    """One that hangs keeps its connection, and is closed only long after its request could be answered elsewhere."""
    bench, _ = three_workers()
    (sent,) = bench.wait(bench.now_ns + 600 * MS)
    assert answers(bench.done(sent.action.action_id, 1, bench.now_ms, sent.worker_id)) == [1]


def test_a_request_with_which_one_worker_vanished_and_one_fell_silent_is_given_to_no_third() -> (
    None
):
    bench, sent = three_workers()
    (sent,) = infers(bench.tell(WorkerLost(worker_id=sent.worker_id)))
    assert bench.wait(bench.now_ns + 500 * MS) == []
    commands = bench.tell(WorkerLost(worker_id=sent.worker_id))
    assert infers(commands) == []
    assert refusals(commands) == [(1, Refusal.WORKER_LOST)]


def test_a_request_whose_weights_did_not_come_on_two_silent_workers_is_given_to_a_third() -> None:
    """It never ran there, so it did not silence them."""
    bench = CoreBench()
    bench.tell(ModelAdded(model_id=A))
    for number in range(2):
        bench.join(WorkerId(f"w{number}"))
        bench.ready(A, WorkerId(f"w{number}"))
    sent = sends(bench.request(A, slo_ms=1500)) + bench.wait(bench.now_ns + 600 * MS)
    assert {load.worker_id for load in sent} == {"w0", "w1"}
    bench.join(WorkerId("w2"))
    (again,) = infers(bench.ready(A, WorkerId("w2"), resident=True))
    assert again.worker_id == "w2"
