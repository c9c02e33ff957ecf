"""What fails is remembered, avoided, and tried again where that costs nothing."""

from __future__ import annotations

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_S, ModelId, RequestId, WorkerId
from clockwright.wire.actions import ActionError, Infer, LoadWeights
from controller.core import SchedulerConfig
from controller.core.events import (
    ClockSeen,
    Command,
    ModelAdded,
    ModelRemoved,
    ModelWanted,
    RefuseRequest,
    RequestCancelled,
    SendAction,
    TimerFired,
    WithdrawAction,
    WorkerLost,
)
from tests.kit.core_bench import (
    GPU,
    GPU2,
    MS,
    NO_DELAY,
    A,
    B,
    CoreBench,
    actions,
    answers,
    infers,
    loads,
    refusals,
    sends,
)

PREDICTING = ("clockwork", "edf_mh")
POLICIES = (*PREDICTING, "clipper", "infaas")


def pair(
    policy: str = "clockwork", models: tuple[ModelId, ...] = (A,), exec_ms: float = 10
) -> CoreBench:
    """Two workers, both of which hold all models."""
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=0))
    for worker in (GPU, GPU2):
        bench.join(worker)
        for model in models:
            if worker is GPU:
                bench.tell(ModelAdded(model_id=model))
            bench.ready(model, worker, exec_ms={1: exec_ms, 2: exec_ms, 4: exec_ms})
        for model in models:
            # The first worker is busy when the second gets its copy.
            number = 1 if worker is GPU else 2
            for _ in range(number):
                bench.request(model, slo_ms=100_000)
            finish_all(bench)
    assert all(len(model.resident_on) == 2 for model in bench.scheduler.statistics().models)
    bench.wait(2_000 * MS)
    return bench


def finish_all(bench: CoreBench) -> None:
    """Everything that was sent ends well, until nothing is left."""
    while bench.in_flight:
        bench.finish(next(iter(bench.in_flight.values())))


def where(commands: list[Command]) -> list[WorkerId]:
    """Workers that are to run something."""
    return [command.worker_id for command in sends(commands) if isinstance(command.action, Infer)]


def fail(bench: CoreBench, command: SendAction, after_ms: float = 1) -> list[Command]:
    return bench.failed(
        command.action.action_id,
        ActionError.DEVICE,
        at_ms=bench.now_ms + after_ms,
        worker=command.worker_id,
    )


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_whose_run_failed_runs_elsewhere(policy: str) -> None:
    bench = pair(policy)
    (first,) = infers(bench.request(A, slo_ms=100))
    (second,) = infers(fail(bench, first))
    assert second.worker_id != first.worker_id
    assert answers(bench.done(second.action.action_id, 2001, 2011, second.worker_id)) == [
        bench.num_requests
    ]


@pytest.mark.parametrize("policy", PREDICTING)
def test_a_worker_where_a_run_failed_gets_none_but_a_probe_that_costs_no_answer(
    policy: str,
) -> None:
    bench = pair(policy)
    (first,) = infers(bench.request(A, slo_ms=100))
    sick = first.worker_id
    (second,) = infers(fail(bench, first))
    bench.finish(second)
    (sent,) = infers(bench.request(A, slo_ms=100))  # within the pause
    assert sent.worker_id != sick
    bench.finish(sent)
    bench.wait(bench.now_ns + 100 * MS)
    served, probe = infers(bench.request(A, slo_ms=100))
    assert (served.worker_id != sick, probe.worker_id) == (True, sick)
    assert probe.request_ids == served.request_ids
    assert refusals(fail(bench, probe)) == []
    assert answers(
        bench.done(served.action.action_id, bench.now_ms, bench.now_ms + 9, served.worker_id)
    ) == [bench.num_requests]
    pauses = []
    for _ in range(4):  # ever longer
        begin_ns = bench.now_ns
        while True:
            sent, *probes = infers(bench.request(A, slo_ms=100))
            bench.finish(sent)
            if probes:
                fail(bench, probes[0], 0)
                break
        pauses.append(bench.now_ns - begin_ns)
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0]


@pytest.mark.parametrize("policy", PREDICTING)
def test_a_worker_whose_probe_succeeds_is_back(policy: str) -> None:
    bench = pair(policy)
    (first,) = infers(bench.request(A, slo_ms=100))
    bench.finish(infers(fail(bench, first))[0])
    bench.wait(bench.now_ns + 100 * MS)
    served, probe = infers(bench.request(A, slo_ms=100))
    commands = bench.done(probe.action.action_id, bench.now_ms, bench.now_ms + 5, probe.worker_id)
    assert answers(commands) == [bench.num_requests], "the first answer counts"
    withdrawn = [command for command in commands if isinstance(command, WithdrawAction)]
    assert [command.action_id for command in withdrawn] == [served.action.action_id]
    assert (
        bench.done(served.action.action_id, bench.now_ms, bench.now_ms + 5, served.worker_id) == []
    )
    both = {*where(bench.request(A, slo_ms=100)), *where(bench.request(A, slo_ms=100))}
    assert both == {GPU, GPU2}


@pytest.mark.parametrize("policy", PREDICTING)
def test_a_worker_is_probed_though_all_clients_wait_and_nobody_asks_anew(policy: str) -> None:
    bench = pair(policy)
    (first,) = infers(bench.request(A, slo_ms=900))
    sick = first.worker_id
    at_work = infers(fail(bench, first))
    for _ in range(60):  # more than may be under way
        at_work += infers(bench.request(A, slo_ms=900))
    probes: list[SendAction] = []
    while at_work and not probes:
        sent = bench.finish(at_work.pop(0))
        probes = [command for command in sent if command.worker_id == sick]
        at_work += [command for command in sent if command.worker_id != sick]
    assert probes
    commands = bench.done(
        probes[0].action.action_id, bench.now_ms, bench.now_ms + 5, probes[0].worker_id
    )
    assert sick in where(commands), "it is back"


def test_where_there_is_no_elsewhere_a_request_is_run_twice_and_hears_the_engines_words() -> None:
    bench = CoreBench()
    bench.join()
    bench.warm(A)
    for _ in range(5):  # and the worker is asked again with the next
        (first,) = infers(bench.request(A, slo_ms=1000))
        (second,) = infers(fail(bench, first))
        (refusal,) = fail(bench, second)
        assert isinstance(refusal, RefuseRequest)
        assert (refusal.refusal, refusal.detail) == (Refusal.FAILED, "words")


@pytest.mark.parametrize("policy", POLICIES)
def test_one_bad_row_costs_itself_and_not_its_batch_mates(policy: str) -> None:
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=0))
    bench.join()
    bench.warm(A, exec_ms={1: 10, 2: 11, 4: 12})
    for _ in range(6):  # a batch gathers behind the first
        bench.request(A, slo_ms=1000)
    bad = RequestId(bench.num_requests - 2)
    answered: list[int] = []
    refused: list[tuple[int, Refusal]] = []
    while bench.in_flight:
        command = next(iter(bench.in_flight.values()))
        bench.wait(bench.now_ns + 10 * MS)
        if bad in command.request_ids:
            commands = fail(bench, command)
        else:
            commands = bench.done(command.action.action_id, bench.now_ms - 10, bench.now_ms)
        answered += answers(commands)
        refused += refusals(commands)
    assert refused == [(bad, Refusal.FAILED)]
    assert sorted(answered) == [n for n in range(2, bench.num_requests + 1) if n != bad]


def test_a_row_that_fails_everywhere_leaves_the_workers_in_good_standing() -> None:
    bench = pair()
    (first,) = infers(bench.request(A, slo_ms=100))
    (second,) = infers(fail(bench, first))
    assert refusals(fail(bench, second)) == [(bench.num_requests, Refusal.FAILED)]
    both = {*where(bench.request(A, slo_ms=100)), *where(bench.request(A, slo_ms=100))}
    assert both == {GPU, GPU2}


def test_models_that_fail_on_every_worker_cost_the_workers_no_other_model() -> None:
    c = ModelId("c")
    bench = pair(models=(A, B, c))
    for model in (A, B, A, B, A, B):
        assert infers(bench.request(model, slo_ms=100))
        while bench.in_flight:
            sent = next(iter(bench.in_flight.values()))
            fail(bench, sent)
        bench.wait(bench.now_ns + 50 * MS)
    for _ in range(20):
        for command in infers(bench.request(c, slo_ms=100)):
            bench.finish(command)
        bench.wait(bench.now_ns + 20 * MS)
    both = {*where(bench.request(c, slo_ms=100)), *where(bench.request(c, slo_ms=100))}
    assert both == {GPU, GPU2}


def test_a_worker_that_fails_with_two_models_is_avoided_for_the_third() -> None:
    c = ModelId("c")
    bench = pair(models=(A, B, c))
    (first,) = infers(bench.request(A, slo_ms=100))
    sick = first.worker_id
    (again,) = infers(fail(bench, first))
    second = infers(bench.request(B, slo_ms=100))[0]
    assert second.worker_id == sick
    fail(bench, second)
    assert sick not in where(bench.request(c, slo_ms=100))
    assert again.worker_id != sick


def test_a_request_that_left_a_sick_worker_vanished_with_it_if_it_ran_there() -> None:
    c, third = ModelId("c"), WorkerId("third")
    bench = pair(models=(A, B, c))
    (first,) = infers(bench.request(A, slo_ms=1000))
    sick = first.worker_id
    (again,) = infers(fail(bench, first))
    second = infers(bench.request(B, slo_ms=1000))[0]
    bench.request(c, slo_ms=1000)
    (left,) = bench.wait(bench.now_ns + 7 * MS)
    assert left.worker_id == sick
    assert where(fail(bench, second)) == [again.worker_id]
    bench.tell(WorkerLost(worker_id=sick))
    bench.finish(again)
    bench.join(third)
    bench.ready(c, third, resident=True)
    commands = bench.tell(WorkerLost(worker_id=again.worker_id))
    assert (bench.num_requests, Refusal.WORKER_LOST) in refusals(commands)


def test_a_worker_that_is_the_last_one_left_is_asked_though_it_failed() -> None:
    bench = pair()
    (first,) = infers(bench.request(A, slo_ms=100))
    (second,) = infers(fail(bench, first))
    bench.finish(second)
    bench.tell(WorkerLost(worker_id=second.worker_id))
    assert where(bench.request(A, slo_ms=100)) == [first.worker_id]


# --- loads --------------------------------------------------------------------------------------


def test_a_load_that_fails_is_repeated_with_pauses_and_its_requests_hear_why() -> None:
    bench = CoreBench()
    bench.join()
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A)
    tried = 0
    refused: list[Command] = []
    commands = bench.request(A, slo_ms=1000)
    for _ in range(1000):  # a second of requests, each of which could be loaded for in time
        for command in [*bench.in_flight.values()]:
            assert isinstance(command.action, LoadWeights | Infer)
            if isinstance(command.action, LoadWeights):
                tried += 1
                commands += fail(bench, command, 0.1)
            else:
                commands += bench.failed(
                    command.action.action_id, ActionError.NOT_RESIDENT, at_ms=bench.now_ms
                )
        bench.wait(bench.now_ns + MS)
        commands += bench.request(A, slo_ms=1000)
        refused += [command for command in commands if isinstance(command, RefuseRequest)]
        commands = []
    assert tried < 20
    assert {(c.refusal, c.detail) for c in refused if isinstance(c, RefuseRequest)} == {
        (Refusal.FAILED, "words")
    }
    assert len(refused) > 900
    # It works again: the pause ends by itself.
    bench.wait(bench.now_ns + 2000 * MS)
    (load,) = [c for c in sends(bench.request(A, slo_ms=1000)) if isinstance(c.action, LoadWeights)]
    bench.finish(load)
    finish_all(bench)
    assert bench.scheduler.num_open_requests == 0


def test_a_load_that_failed_is_tried_elsewhere_first() -> None:
    bench = CoreBench()
    for worker in (GPU, GPU2):
        bench.join(worker)
    bench.tell(ModelAdded(model_id=A))
    for worker in (GPU, GPU2):
        bench.ready(A, worker)
    ((first, _),) = loads(bench.request(A, slo_ms=200))
    (command,) = bench.in_flight.values()
    ((second, _),) = loads(fail(bench, command))
    assert first != second


def test_a_worker_whose_loads_all_fail_is_avoided_for_loads() -> None:
    c = ModelId("c")
    bench = CoreBench()
    for worker in (GPU, GPU2):
        bench.join(worker)
    for model in (A, B, c):
        bench.tell(ModelAdded(model_id=model))
        for worker in (GPU, GPU2):
            bench.ready(model, worker)
    for model in (A, B):
        bench.request(model, slo_ms=500)
        for command in [*bench.in_flight.values()]:
            if command.worker_id == GPU:
                fail(bench, command)
        finish_all(bench)
    assert [worker for worker, _ in loads(bench.request(c, slo_ms=500))] == [GPU2]


# --- overdue and slow ---------------------------------------------------------------------------


@pytest.mark.parametrize(("exec_ms", "late_ms"), [(10, 5000), (14_000, 14_000)])
def test_a_worker_is_given_up_when_a_result_is_late_by_the_limit_or_the_actions_duration(
    exec_ms: float, late_ms: float
) -> None:
    bench = CoreBench(SchedulerConfig(dispatch_delay_ns=0, margin_ns=0))
    bench.join(GPU)
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A, GPU, exec_ms={1: exec_ms}, resident=True)
    begin_ms = bench.now_ms
    assert infers(bench.request(A, slo_ms=60_000))
    end_ms = begin_ms + exec_ms + late_ms
    bench.wait(round((end_ms - 500) * MS))
    assert bench.scheduler.statistics().workers
    bench.wait(round((end_ms + 2000) * MS))
    assert not bench.scheduler.statistics().workers


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_worker_does_not_answer_runs_elsewhere_and_the_first_answer_counts(
    policy: str,
) -> None:
    bench = pair(policy)
    (hung,) = infers(bench.request(A, slo_ms=1000))
    (again,) = bench.wait(bench.now_ns + 200 * MS)
    assert again.request_ids == hung.request_ids
    assert again.worker_id != hung.worker_id
    late = bench.done(hung.action.action_id, 2190, bench.now_ms, hung.worker_id)
    assert answers(late) == [bench.num_requests]
    assert WithdrawAction(worker_id=again.worker_id, action_id=again.action.action_id) in late
    commands = bench.failed(
        again.action.action_id, ActionError.WITHDRAWN, at_ms=bench.now_ms, worker=again.worker_id
    )
    assert answers(commands) == []
    assert refusals(commands) == []
    both = {*where(bench.request(A, slo_ms=100)), *where(bench.request(A, slo_ms=100))}
    assert both == {GPU, GPU2}, "nobody is blamed"


@pytest.mark.parametrize("policy", PREDICTING)
def test_a_worker_that_was_silent_and_came_back_is_suspected_as_soon_the_next_time(
    policy: str,
) -> None:
    bench = pair(policy)
    for _ in range(2):
        (hung,) = infers(bench.request(A, slo_ms=1000))
        begin_ns = bench.now_ns
        (again,) = bench.wait(begin_ns + 100 * MS)
        assert again.request_ids == hung.request_ids
        bench.done(hung.action.action_id, begin_ns / MS, begin_ns / MS + 10, hung.worker_id)
        finish_all(bench)


def test_no_copy_for_later_requests_takes_pages_until_a_silent_worker_is_likely_lost() -> None:
    bench = CoreBench(SchedulerConfig(policy="edf_mh", dispatch_delay_ns=0, margin_ns=0))
    for worker, model in ((GPU, A), (GPU2, B)):
        bench.join(worker, pages=2)
        bench.tell(ModelAdded(model_id=model))
        bench.ready(model, worker)
        bench.request(model, slo_ms=1000)
        finish_all(bench)
    bench.ready(A, GPU2)
    bench.request(A, slo_ms=12)  # has no answer
    begin_ns = bench.now_ns
    loaded: list[tuple[WorkerId, ModelId]] = []
    while not loaded:
        bench.wait(bench.now_ns + 100 * MS)
        loaded = loads(bench.tell(ModelWanted(model_id=A)))
    assert loaded == [(GPU2, A)]
    assert NS_PER_S < bench.now_ns - begin_ns < 2 * NS_PER_S


def test_what_runs_elsewhere_by_now_is_taken_back_from_a_worker_that_does_not_answer() -> None:
    bench = pair()
    (hung,) = infers(bench.request(A, slo_ms=1000))
    taken: list[Command] = []
    while not taken:
        bench.now_ns = bench.scheduler.next_wakeup_ns() or 0
        taken = [c for c in bench.tell(TimerFired()) if isinstance(c, WithdrawAction)]
    assert taken == [WithdrawAction(worker_id=hung.worker_id, action_id=hung.action.action_id)]
    assert bench.now_ms < 2100


def test_a_process_that_stood_still_suspects_nobody_before_it_has_read_the_results() -> None:
    bench = pair()
    (sent,) = infers(bench.request(A, slo_ms=10_000))
    assert bench.tell(TimerFired(), at_ms=4000) == []
    assert answers(bench.done(sent.action.action_id, 2000, 4001, sent.worker_id)) == [
        bench.num_requests
    ]


@pytest.mark.parametrize("clock_mhz", [0, 1400])
def test_a_slow_worker_is_avoided_and_its_times_are_not_believed_of_others(clock_mhz: int) -> None:
    bench = pair()
    if clock_mhz:
        for worker in (GPU, GPU2):
            bench.tell(ClockSeen(worker_id=worker, clock_mhz=clock_mhz))
    # The first one is believed where nothing was measured before.
    for _ in range(4 if clock_mhz else 3):
        sent = [command for command in _two(bench) if command.worker_id == GPU]
        bench.done(sent[0].action.action_id, bench.now_ms - 45, bench.now_ms + 45)
        finish_all(bench)
    for _ in range(5):
        (served,) = [c for c in infers(bench.request(A, slo_ms=100)) if c.worker_id == GPU2]
        bench.finish(served)
    (model,) = bench.scheduler.statistics().models
    assert model.exec_ns[1] == 10 * MS
    assert model.ready_on == (GPU2,)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slow_worker_that_is_left_alone_gets_what_the_others_had_and_is_believed(
    policy: str,
) -> None:
    bench = pair(policy)
    for _ in range(3):
        for sent in list(_two(bench)):
            begin_ms = bench.now_ms
            if sent.worker_id == GPU:
                bench.done(sent.action.action_id, begin_ms, begin_ms + 90)
            elif sent.action.action_id in bench.in_flight:
                bench.finish(sent)
        finish_all(bench)
    (model,) = bench.scheduler.statistics().models
    assert model.ready_on == (GPU2,)
    # What was under way when the other was lost runs on the slow one, as does what comes then.
    (under_way,) = infers(bench.request(A, slo_ms=1000))
    assert under_way.worker_id == GPU2
    commands = bench.tell(WorkerLost(worker_id=GPU2))
    assert refusals(commands) == []
    bench.in_flight.pop(under_way.action.action_id)
    for _ in range(8):
        commands += bench.request(A, slo_ms=1000)
        assert refusals(commands) == []
        (sent,) = infers(commands)
        commands = bench.done(sent.action.action_id, bench.now_ms, bench.now_ms + 90)
    (model,) = bench.scheduler.statistics().models
    assert model.ready_on == (GPU,)
    assert model.exec_ns[1] == 90 * MS


def _two(bench: CoreBench) -> list[SendAction]:
    """A request for each worker."""
    return [*infers(bench.request(A, slo_ms=1000)), *infers(bench.request(A, slo_ms=1000))]


def test_where_all_are_slow_the_estimates_follow() -> None:
    bench = CoreBench()
    bench.join()
    bench.warm(A)
    for _ in range(12):
        (sent,) = infers(bench.request(A, slo_ms=1000))
        bench.done(sent.action.action_id, bench.now_ms, bench.now_ms + 100)
    (model,) = bench.scheduler.statistics().models
    assert model.exec_ns[1] == 100 * MS


def test_one_slow_run_between_others_says_nothing_of_the_next() -> None:
    bench = pair()
    sent = [command for command in _two(bench) if command.worker_id == GPU]
    bench.done(sent[0].action.action_id, bench.now_ms, bench.now_ms + 45)
    finish_all(bench)
    for _ in range(2):
        _two(bench)
        finish_all(bench)
    (model,) = bench.scheduler.statistics().models
    assert model.exec_ns[1] == 10 * MS
    assert len(model.ready_on) == 2


def test_nobody_is_slow_beside_a_profile_that_nothing_confirmed() -> None:
    bench = pair()
    bench.tell(ModelAdded(model_id=B))
    for worker, exec_ms in ((GPU, 20), (GPU2, 2)):  # the second announces a tenth of the truth
        bench.ready(B, worker, exec_ms={1: exec_ms})
    for _ in range(12):
        bench.request(B, slo_ms=1000)
        while bench.in_flight:
            command = next(iter(bench.in_flight.values()))
            if isinstance(command.action, Infer):
                begin_ms = bench.now_ms
                bench.done(command.action.action_id, begin_ms, begin_ms + 20, command.worker_id)
            else:
                bench.finish(command)
    model = next(each for each in bench.scheduler.statistics().models if each.model_id == B)
    assert model.exec_ns == {1: 20 * MS}
    assert len(model.ready_on) == 2


# --- taken back ---------------------------------------------------------------------------------


def test_an_action_whose_requests_are_all_cancelled_is_taken_back_once() -> None:
    bench = CoreBench(NO_DELAY)
    bench.join()
    bench.warm(A)
    bench.request(A, slo_ms=1000)
    bench.request(A, slo_ms=1000)
    bench.request(A, slo_ms=1000)
    (infer, *_) = bench.in_flight.values()
    bench.finish(infer)
    (batch,) = bench.in_flight.values()
    assert len(batch.request_ids) == 2
    first, second = batch.request_ids
    assert bench.tell(RequestCancelled(request_id=first)) == []
    assert bench.tell(RequestCancelled(request_id=second)) == [
        WithdrawAction(worker_id=GPU, action_id=batch.action.action_id)
    ]
    bench.failed(batch.action.action_id, ActionError.WITHDRAWN, at_ms=bench.now_ms)
    assert len(actions(bench.request(A, slo_ms=100))) == 1


def test_the_load_of_a_removed_model_is_taken_back_and_then_forgotten() -> None:
    bench = CoreBench()
    bench.join()
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A)
    (load,) = actions(bench.request(A, slo_ms=1000))
    commands = bench.tell(ModelRemoved(model_id=A))
    assert WithdrawAction(worker_id=GPU, action_id=load.action_id) in commands
    (forget,) = bench.failed(load.action_id, ActionError.WITHDRAWN, at_ms=1)
    assert type(forget).__name__ == "ForgetModel"
