"""The mechanism, event by event: build, feed events, compare commands."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType
from typing import TypeVar

import pytest

from clockwright.errors import ConfigError, Refusal
from clockwright.units import (
    NS_PER_S,
    GpuKind,
    ModelId,
    RequestId,
    WorkerId,
)
from clockwright.wire.actions import ActionError, EvictWeights, Infer, LoadWeights
from controller.core import SchedulerConfig
from controller.core.events import (
    AnswerRequest,
    CloseWorker,
    Command,
    ForgetModel,
    ModelAdded,
    ModelRemoved,
    RefuseRequest,
    RequestArrived,
    RequestCancelled,
    RequestsArrived,
    SendAction,
    TimerFired,
    WithdrawAction,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from controller.core.policies import POLICIES
from controller.core.state import Model, WorkerState
from tests.kit.core_bench import (
    GPU,
    GPU2,
    MS,
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

T = TypeVar("T")


@pytest.fixture
def bench() -> CoreBench:
    bench = CoreBench()
    bench.join()
    return bench


def test_a_request_put_back_a_thousand_times_is_answered(bench: CoreBench) -> None:
    """One expiry more each time made a turn of the event loop take seconds, and cost the worker.

    That there is none more is an invariant.
    """
    bench.warm(A, exec_ms={1: 10})
    (infer,) = actions(bench.request(A, at_ms=2000, slo_ms=60_000))
    for number in range(1000):
        (infer,) = actions(bench.failed(infer.action_id, ActionError.TOO_LATE, at_ms=2001 + number))
    commands = bench.done(infer.action_id, 3001, 3011)
    assert answers(commands) == [2]


def test_actions_are_planned_for_when_they_can_be_there(bench: CoreBench) -> None:
    bench.warm(A, exec_ms={1: 10})
    (infer,) = sends(bench.request(A, at_ms=2000))
    assert infer.expected_begin_ns == 2000 * MS
    # It was 20 ms on its way, and so is the next: that is the length of the link, not a queue on it.
    (again,) = sends(bench.failed(infer.action.action_id, ActionError.TOO_LATE, 2020, at_ms=2021))
    assert again.expected_begin_ns == (2021 + 20) * MS
    assert isinstance(again.action, Infer)
    assert (again.action.earliest_ns, again.action.latest_ns) == (2021 * MS, 2046 * MS)
    # Nor does admission promise what cannot be there in time.
    assert refusals(bench.request(A, slo_ms=30)) == [(3, Refusal.OVERLOADED)]


@pytest.mark.parametrize(
    ("run_ms", "found"),
    # A run of 10 ms that is 20 ms on its way; then its end is near, and then it is late. One that takes no time may be back
    # whenever this process looks, whatever was learned of the link.
    [(10, [1, 1, 0, 0]), (0.001, [0, 0, 0, 0])],
)
def test_requests_are_with_a_device_while_it_may_still_run_them(
    bench: CoreBench, run_ms: float, found: list[int]
) -> None:
    bench.warm(A, run_ms=run_ms, exec_ms={1: run_ms})
    (infer,) = sends(bench.request(A, at_ms=2000))
    bench.failed(infer.action.action_id, ActionError.TOO_LATE, 2020, at_ms=2021)
    times_ms = (2021, 2041, 2050, 2060)
    assert [bench.scheduler.share_with_devices(ms * MS) for ms in times_ms] == found


def test_a_length_that_rules_requests_out_is_forgotten_when_nothing_was_sent_for_a_while(
    bench: CoreBench,
) -> None:
    bench.warm(A, exec_ms={1: 10})
    (infer,) = sends(bench.request(A, at_ms=2000))
    bench.done(infer.action.action_id, 2080, 2090, received_ms=2080)
    assert refusals(bench.request(A, slo_ms=80)) == [(3, Refusal.OVERLOADED)]
    assert refusals(bench.request(A, slo_ms=80, at_ms=2589)) == [(4, Refusal.OVERLOADED)]
    assert refusals(bench.request(A, slo_ms=80, at_ms=2590)) == [(5, Refusal.OVERLOADED)]
    (infer,) = sends(bench.request(A, slo_ms=80, at_ms=2591))
    assert infer.expected_begin_ns == 2591 * MS


def test_an_action_that_arrived_in_the_future_or_never_teaches_nothing(bench: CoreBench) -> None:
    bench.warm(A, exec_ms={1: 10})
    for number, received_ms in enumerate((1e9, -1e9)):
        (infer,) = sends(bench.request(A, at_ms=2000 + 100 * number))
        assert infer.expected_begin_ns == bench.now_ns
        bench.done(infer.action.action_id, bench.now_ms, bench.now_ms + 1, received_ms=received_ms)


def test_a_request_that_cannot_be_loaded_in_time_is_cold(bench: CoreBench) -> None:
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A)
    refusal, send = bench.request(A, slo_ms=16)
    assert isinstance(refusal, RefuseRequest)
    assert refusal.refusal is Refusal.COLD
    # The next one shall find it resident.
    assert isinstance(send, SendAction)
    assert isinstance(send.action, LoadWeights)
    assert len(bench.request(A, slo_ms=16, at_ms=1)) == 1  # once is enough
    bench.done(send.action.action_id, 0, 8)
    (infer,) = actions(bench.request(A, slo_ms=16, at_ms=9))
    assert isinstance(infer, Infer)
    assert (refusal.load_ns, refusal.exec_ns, refusal.queue_ns) == (8 * MS, 10 * MS, 0)


def test_a_waiting_request_is_refused_when_its_slack_is_gone(bench: CoreBench) -> None:
    bench.warm(A, exec_ms={1: 10})
    bench.warm(B, exec_ms={1: 10})
    bench.now_ns = 2000 * MS
    bench.request(A, slo_ms=100)
    bench.request(A, slo_ms=25)
    bench.request(B, slo_ms=25)
    commands = bench.tell(TimerFired(), at_ms=2005)
    assert len(actions(commands)) == 1  # the first of the two that want the lane at 10 ms
    wakeup_ns = bench.scheduler.next_wakeup_ns()
    assert wakeup_ns == 2015 * MS
    commands = bench.tell(TimerFired(), at_ms=2015)
    assert [refusal for _, refusal in refusals(commands)] == [Refusal.OVERLOADED]


def test_one_event_may_evict_weights_load_them_again_and_run_them() -> None:
    """The first request is refused but has its model loaded, which pushes out the model of the second."""
    bench = CoreBench(SchedulerConfig(policy="edf_mh", dispatch_delay_ns=0))
    bench.join()
    for model in (B, ModelId("c"), ModelId("d"), A):
        bench.tell(ModelAdded(model_id=model))
        bench.ready(model, pages=3, load_ms=0.5, resident=model != A)
    bench.now_ns = 2000 * MS
    arrivals = tuple(
        RequestArrived(
            request_id=RequestId(100 + number),
            model_id=model,
            rows=1,
            arrival_ns=bench.now_ns,
            slo_ns=slo_ns,
        )
        for number, (model, slo_ns) in enumerate([(A, 11 * MS + MS // 2), (B, 1000 * MS)])
    )
    commands = bench.tell(RequestsArrived(requests=arrivals))
    assert refusals(commands) == [(100, Refusal.COLD)]
    done = [(type(action), action.model_id) for action in actions(commands)]
    assert done.index((EvictWeights, B)) < done.index((LoadWeights, B)) < done.index((Infer, B))


def test_a_machine_that_stood_still_blames_no_worker(bench: CoreBench) -> None:
    bench.warm(A, exec_ms={1: 10})
    (infer,) = actions(bench.request(A, at_ms=2000, slo_ms=60_000))
    # Ten seconds on at once: the timer is handled before the result that came meanwhile.
    assert bench.tell(TimerFired(), at_ms=12_000) == []
    assert answers(bench.done(infer.action_id, 2000, 2010)) == [2]
    assert bench.tell(TimerFired(), at_ms=20_000) == []


def test_an_infer_behind_a_failed_load_keeps_the_next_load_of_its_model(bench: CoreBench) -> None:
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A, pages=10)
    (load,) = actions(bench.request(A, slo_ms=200))
    (infer,) = actions(bench.tell(TimerFired(), at_ms=3))
    assert bench.request(A, slo_ms=25) == []
    (again,) = actions(bench.failed(load.action_id, ActionError.TOO_LATE, at_ms=6))
    assert isinstance(again, LoadWeights)
    bench.tell(RequestCancelled(request_id=RequestId(2)))
    bench.done(again.action_id, 6, 14)
    bench.tell(ModelAdded(model_id=B))
    bench.ready(B, pages=10)
    assert bench.request(B, slo_ms=200) == []  # the first Infer has not been answered
    commands = bench.done(infer.action_id, 14, 24)
    assert answers(commands) == [1]
    assert [type(action) for action in actions(commands)] == [EvictWeights, LoadWeights]


def test_a_removed_model_is_forgotten_after_the_infer_behind_its_failed_load(
    bench: CoreBench,
) -> None:
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A)
    (load,) = actions(bench.request(A, slo_ms=200))
    (infer,) = actions(bench.tell(TimerFired(), at_ms=3))
    (withdraw,) = bench.tell(ModelRemoved(model_id=A))
    assert withdraw == WithdrawAction(worker_id=GPU, action_id=load.action_id)
    assert bench.failed(load.action_id, ActionError.TOO_LATE, at_ms=6) == []
    refusal, forget = bench.failed(infer.action_id, ActionError.NOT_RESIDENT, at_ms=7)
    assert isinstance(refusal, RefuseRequest)
    assert refusal.refusal is Refusal.MODEL_REMOVED
    assert forget == ForgetModel(worker_id=GPU, model_id=A)


def test_what_a_draining_worker_was_too_late_for_goes_to_another(bench: CoreBench) -> None:
    bench.warm(A, exec_ms={1: 10})
    bench.warm(B, exec_ms={1: 10})
    bench.join(GPU2)
    bench.ready(A, GPU2, exec_ms={1: 10})
    (infer,) = actions(bench.request(A, at_ms=2000))
    (behind,) = actions(bench.request(B, at_ms=2006))
    assert isinstance(behind, Infer)  # keeps the worker from leaving
    bench.tell(WorkerDraining(worker_id=GPU))
    commands = bench.failed(infer.action_id, ActionError.TOO_LATE, at_ms=2006)
    assert loads(commands) == [(GPU2, A)]


def test_a_worker_that_drops_what_nobody_took_back_is_let_go(bench: CoreBench) -> None:
    bench.warm(A, exec_ms={1: 10})
    (infer,) = actions(bench.request(A, at_ms=2000))
    commands = bench.failed(infer.action_id, ActionError.WITHDRAWN, at_ms=2001)
    (close,) = [command for command in commands if isinstance(command, CloseWorker)]
    assert "WITHDRAWN" in close.reason


def test_requests_that_wait_are_reason_enough_to_load_a_worker_that_gets_ready(
    bench: CoreBench,
) -> None:
    bench.warm(A, exec_ms={1: 10})
    bench.now_ns = 2000 * MS
    for _ in range(8):
        bench.request(A, slo_ms=1000)
    bench.join(GPU2)
    assert loads(bench.ready(A, GPU2, exec_ms={1: 10})) == [(GPU2, A)]


def test_a_load_that_failed_is_tried_on_another_worker() -> None:
    bench = CoreBench(
        SchedulerConfig(policy="clockwork", dispatch_delay_ns=0, margin_ns=0, fill_free_pages=False)
    )
    bench.join()
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A)
    bench.tell(ModelAdded(model_id=B))
    bench.ready(B, load_ms=50)
    (load,) = actions(bench.request(A, slo_ms=200))
    bench.tell(TimerFired(), at_ms=3)
    assert loads(bench.request(B, slo_ms=200, at_ms=4)) == [(GPU, B)]
    assert loads(bench.request(A, slo_ms=200)) == []
    bench.join(GPU2)
    assert bench.ready(A, GPU2) == []  # the copy that is being loaded is enough
    commands = bench.failed(load.action_id, ActionError.TOO_LATE, at_ms=6)
    assert loads(commands) == [(GPU2, A)]


@pytest.mark.parametrize("why", ["refused", "cancelled"])
def test_room_is_made_for_a_model_when_nobody_waits_for_another_any_more(why: str) -> None:
    bench = CoreBench(SchedulerConfig(policy="clockwork", margin_ns=0))
    bench.join()
    bench.warm(A, pages=10, exec_ms={1: 10})
    bench.tell(ModelAdded(model_id=B))
    bench.ready(B, pages=10, exec_ms={1: 10})
    (infer,) = actions(bench.request(A, at_ms=2000))
    bench.request(A, slo_ms=25)
    bench.request(B, slo_ms=100)
    # Late, so that the second request of A can neither run nor is past hope; nothing is in flight.
    commands = bench.done(infer.action_id, 2004.8, 2014.8)
    assert answers(commands) == [2]
    assert actions(commands) == []
    if why == "cancelled":
        bench.tell(RequestCancelled(request_id=RequestId(3)))
    sent: list[Command] = []
    while not loads(sent):
        wakeup_ns = bench.scheduler.next_wakeup_ns()
        assert wakeup_ns is not None
        assert wakeup_ns < 2020 * MS, "an idle GPU, and it is not loaded"
        bench.now_ns = max(bench.now_ns, wakeup_ns)
        sent = bench.tell(TimerFired())
    assert loads(sent) == [(GPU, B)]


def test_the_load_lane_is_looked_at_again_after_a_load_that_overran(bench: CoreBench) -> None:
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A)
    bench.tell(ModelAdded(model_id=B))
    bench.ready(B, load_ms=30)
    (load,) = actions(bench.request(A, slo_ms=500))
    bench.request(B, slo_ms=500)
    assert loads(bench.tell(TimerFired(), at_ms=3)) == [(GPU, B)]
    while (wakeup_ns := bench.scheduler.next_wakeup_ns()) is not None and wakeup_ns < 40 * MS:
        bench.now_ns = max(bench.now_ns, wakeup_ns)
        bench.tell(TimerFired())
    bench.done(load.action_id, 0, 40)
    assert bench.scheduler.next_wakeup_ns() == 65 * MS  # B's load ends within the look-ahead then


@pytest.mark.parametrize(
    ("queue", "batch_size", "rows"),
    [
        ([3], 4, (3,)),  # no smaller size holds it: padded
        ([3, 1], 4, (3, 1)),
        ([1, 3], 4, (1, 3)),
        ([1, 1, 1], 2, (1, 1)),  # single rows are never padded
        ([2, 3], 2, (2,)),
        ([4, 4], 4, (4,)),
        ([3, 3], 4, (3,)),
    ],
)
def test_requests_of_several_rows_run_whole(
    bench: CoreBench, queue: list[int], batch_size: int, rows: tuple[int, ...]
) -> None:
    bench.warm(A)
    (first,) = actions(bench.request(A, at_ms=2000))
    for place, count in enumerate(queue):
        bench.request(A, rows=count, slo_ms=100 + place)
    (infer, *_) = actions(bench.done(first.action_id, 2000, 2010))
    assert isinstance(infer, Infer)
    assert (infer.batch_size, infer.rows) == (batch_size, rows)


def test_more_rows_than_any_batch_are_refused_with_the_limit(bench: CoreBench) -> None:
    bench.warm(A)
    (refusal,) = bench.request(A, rows=5, at_ms=2000)
    assert isinstance(refusal, RefuseRequest)
    assert refusal.refusal is Refusal.INFEASIBLE
    assert refusal.detail == "5 rows, the largest batch that any worker runs is 4"


def test_one_outlier_does_not_shut_a_tight_slo_out(bench: CoreBench) -> None:
    bench.warm(A, exec_ms={1: 10})
    (infer,) = actions(bench.request(A, at_ms=2000, slo_ms=1000))
    bench.done(infer.action_id, 2000, 2200)  # 200 ms, once
    assert len(actions(bench.request(A, at_ms=3000, slo_ms=50))) == 1


@pytest.mark.parametrize("order", ["aaaaaaaaaaaaaaab", "abababababababab", "aabbbbbbbbbbbbbba"])
def test_what_an_exec_is_spared_after_one_of_its_model_is_not_counted_on(
    order: str, bench: CoreBench
) -> None:
    # An EXEC takes 8 ms, and 2 ms more to get at weights that the one before it did not use.
    bench.warm(A, exec_ms={1: 10})
    bench.warm(B, exec_ms={1: 10})
    before = B
    for name in order:
        model = ModelId(name)
        (command,) = infers(bench.request(model))
        took_ms = 8 if model == before else 10
        assert isinstance(command.action, Infer)
        # A promise holds whichever model ran before,
        assert command.action.expected_duration_ns == 10 * MS
        begin_ms = bench.now_ms
        commands = bench.done(
            command.action.action_id, begin_ms, begin_ms + took_ms, spared_ms=10 - took_ms
        )
        assert any(isinstance(each, AnswerRequest) for each in commands)
        before = model
    # and the time that is gained is used: two more take until 28 ms from the begin of this one.
    begin_ms = bench.now_ms
    (command,) = infers(bench.request(before))
    bench.request(before)
    bench.done(command.action.action_id, begin_ms, begin_ms + 8, spared_ms=2)
    for slo_ms, refused in ((19.5, True), (20.5, False)):
        commands = bench.request(before, slo_ms=slo_ms)
        assert any(isinstance(each, RefuseRequest) for each in commands) is refused


def test_two_outliers_in_a_row_do_not_shut_a_tight_slo_out_for_good(bench: CoreBench) -> None:
    """An estimate above every SLO is never measured again; the outliers have to fade by themselves."""
    bench.warm(A, exec_ms={1: 10})
    for at_ms in (2000, 2500):
        (infer,) = actions(bench.request(A, at_ms=at_ms, slo_ms=1000))
        bench.done(infer.action_id, at_ms, at_ms + 200)
    assert refusals(bench.request(A, at_ms=3000, slo_ms=50)) == [(4, Refusal.INFEASIBLE)]
    assert len(actions(bench.request(A, at_ms=3200, slo_ms=50))) == 1


def test_a_profile_longer_than_the_slo_does_not_refuse_for_ever(bench: CoreBench) -> None:
    bench.warm(A, exec_ms={1: 40})
    assert refusals(bench.request(A, at_ms=2000, slo_ms=20)) == [(2, Refusal.INFEASIBLE)]
    bench.request(A, at_ms=2200, slo_ms=20)
    (tried,) = actions(bench.request(A, at_ms=2300, slo_ms=20))
    bench.done(tried.action_id, 2300, 2310)
    for at_ms in range(2400, 3000, 100):
        (infer,) = actions(bench.request(A, at_ms=at_ms, slo_ms=20))
        bench.done(infer.action_id, at_ms, at_ms + 10)


def test_the_request_that_finds_a_profile_doubtful_tries_it_itself(bench: CoreBench) -> None:
    """A load of 8 ms and an EXEC that is said to take 40 do not fit into 50; the EXEC takes 10."""
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A, exec_ms={1: 40}, load_ms=8)
    bench.now_ns = 1000 * MS
    verdicts = []
    for at_ms in (1000, 1030):
        commands = bench.request(A, at_ms=at_ms, slo_ms=45)
        verdicts.append([kind for _, kind in refusals(commands)])
        for action in actions(commands):
            if isinstance(action, LoadWeights):
                bench.done(action.action_id, at_ms, at_ms + 8)
    assert verdicts == [[Refusal.COLD], []]


def test_a_load_profile_longer_than_the_slo_does_not_refuse_for_ever(bench: CoreBench) -> None:
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A, exec_ms={1: 5}, load_ms=100)
    commands = [bench.request(A, at_ms=at_ms, slo_ms=50) for at_ms in range(1000, 2000, 50)]
    assert refusals(commands[0]) == [(1, Refusal.COLD)]
    assert any(isinstance(action, LoadWeights) for each in commands for action in actions(each))


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
def test_a_worker_says_that_its_runs_take_no_time_and_others_are_judged_all_the_same(
    policy: str,
) -> None:
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=0))
    bench.join()
    bench.warm(A)
    bench.warm(B, exec_ms={1: 100})
    for at_ms in range(2000, 4000, 50):
        (infer,) = actions(bench.request(A, at_ms=at_ms))
        bench.done(infer.action_id, at_ms, at_ms)
    assert infers(bench.request(B, at_ms=5000, slo_ms=1000))
    assert refusals(bench.request(A, slo_ms=40)) == [(bench.num_requests, Refusal.OVERLOADED)]


def test_a_worker_that_joins_takes_load_as_soon_as_requests_wait(bench: CoreBench) -> None:
    bench.warm(A, exec_ms={1: 10})
    bench.join(GPU2)
    bench.ready(A, GPU2, exec_ms={1: 10})
    bench.request(A, at_ms=2000)
    (load,) = bench.request(A)  # the lane is taken for longer than the look-ahead
    assert isinstance(load, SendAction)
    assert (load.worker_id, type(load.action)) == (GPU2, LoadWeights)
    (sent,) = bench.tell(TimerFired(), at_ms=2003)  # behind the load, before the first lane is free
    assert isinstance(sent, SendAction)
    assert (sent.worker_id, type(sent.action)) == (GPU2, Infer)


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
def test_a_model_is_loaded_on_the_one_worker_that_can_make_room_however_many_others_idle(
    policy: str,
) -> None:
    """All load lanes are free; the last to become so is that of the worker whose only model nobody asks for."""
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=0))
    owners = {WorkerId(f"gpu{number}"): ModelId(f"m{number}") for number in range(40)}
    bench.tell(ModelAdded(model_id=A))
    for place, (gpu, own) in enumerate(owners.items()):
        bench.join(gpu, pages=2)
        bench.tell(ModelAdded(model_id=own))
        for model in (own, A):
            bench.ready(model, gpu, exec_ms={1: 40})
        bench.request(own, at_ms=100 * place, slo_ms=1000)
        while bench.in_flight:
            bench.finish(next(iter(bench.in_flight.values())))
    bench.now_ns = 10_000 * MS
    *others, last = owners
    for gpu in others:
        assert infers(bench.request(owners[gpu]))
    assert loads(bench.request(A)) == [(last, A)]


def test_a_model_too_slow_for_one_kind_of_gpu_is_loaded_on_a_faster_one() -> None:
    bench = CoreBench()
    for worker, kind, exec_ms in ((GPU, "slow", 80), (GPU2, "fast", 5)):
        bench.tell(WorkerJoined(worker_id=worker, gpu_kind=GpuKind(kind), num_pages=10))
        if worker == GPU:
            bench.tell(ModelAdded(model_id=A))
        bench.ready(A, worker, exec_ms={1: exec_ms})
    (load,) = bench.request(A, slo_ms=50)
    assert isinstance(load, SendAction)
    assert (load.worker_id, type(load.action)) == (GPU2, LoadWeights)


def test_the_lookahead_is_limited_in_number_as_well_as_in_time() -> None:
    config = SchedulerConfig(
        policy="clockwork",
        dispatch_delay_ns=0,
        margin_ns=0,
        lookahead_ns=NS_PER_S,
        max_outstanding=3,
    )
    bench = CoreBench(config)
    bench.join()
    bench.warm(A, exec_ms={1: 10})
    bench.now_ns = 2000 * MS
    sent = [actions(bench.request(A, slo_ms=1000)) for _ in range(5)]
    assert [len(infers) for infers in sent] == [1, 1, 1, 0, 0]
    assert len(actions(bench.done(sent[0][0].action_id, 2000, 2010))) == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_outstanding", 0),
        ("lookahead_ns", 0),
        ("window_ns", -1),
        ("margin_fraction", 1.0),
        ("action_timeout_ns", 1),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=setting):
        SchedulerConfig(**{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
def test_one_request_tries_whether_a_profile_is_true_and_delays_nobody(policy: str) -> None:
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=0))
    bench.join()
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A, exec_ms={1: 50})
    bench.request(A, slo_ms=10_000)
    while bench.in_flight:
        command = next(iter(bench.in_flight.values()))
        bench.finish(command)
    trials: list[SendAction] = []
    for _ in range(100):
        trials += infers(bench.request(A, slo_ms=20))
        bench.wait(bench.now_ns + 5 * MS)
        if trials:
            break
    (trial,) = trials
    # Whoever comes while it runs is judged by what is known, and so is the lane behind it.
    assert isinstance(trial.action, Infer)
    assert trial.action.expected_duration_ns == 50 * MS
    assert not infers(bench.request(A, slo_ms=20))
    assert refusals(bench.request(A, slo_ms=20))
    (behind,) = infers(bench.request(A, slo_ms=1000)) or bench.wait(bench.now_ns + 46 * MS)
    assert behind.expected_begin_ns == trial.expected_begin_ns + 50 * MS


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
@pytest.mark.parametrize("slo_ms", [5, 8], ids=["at arrival", "after it waited"])
def test_a_load_time_that_one_refusal_puts_in_doubt_is_tried_for_those_that_wait(
    slo_ms: float, policy: str
) -> None:
    """The fast worker's pages are in use, and a profile says that the idle slow one would take too long to load."""
    fast, slow = WorkerId("fast"), WorkerId("slow")
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=MS // 2, margin_ns=0))
    bench.join(fast, pages=2)
    bench.tell(ModelAdded(model_id=A))
    bench.tell(ModelAdded(model_id=B))
    bench.ready(A, fast, load_ms=6, exec_ms={1: 1})
    bench.ready(B, fast)
    assert loads(bench.request(B, slo_ms=3000)) == [(fast, B)]
    bench.tell(WorkerJoined(worker_id=slow, gpu_kind=GpuKind("old"), num_pages=10))
    bench.ready(A, slow, load_ms=40, exec_ms={1: 10})
    assert not bench.request(A, slo_ms=49, at_ms=1)
    assert refusals(bench.request(A, slo_ms=5, at_ms=2)) == [(3, Refusal.COLD)]
    assert slow not in [command.worker_id for command in bench.wait(23 * MS)]
    sent = sends(bench.request(A, slo_ms=slo_ms)) + bench.wait(25 * MS)
    assert [(load.worker_id, load.action.model_id) for load in sent] == [(slow, A)]


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_remembers_a_worker_that_was_lost_nor_a_model_that_was_removed(policy: str) -> None:
    """Workers come and go for months; each that left would keep its heaps and what they hold."""
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0))
    bench.join()
    for model in (A, B):
        bench.tell(ModelAdded(model_id=model))
        bench.ready(model)
        for _ in range(3):
            bench.request(model, slo_ms=1000)
        while bench.in_flight:
            bench.finish(next(iter(bench.in_flight.values())))
    bench.tell(WorkerLost(worker_id=GPU))
    bench.tell(ModelRemoved(model_id=B))
    bench.wait(bench.now_ns + 20 * NS_PER_S)
    assert not reachable(bench.scheduler, WorkerState)
    assert [model.model_id for model in reachable(bench.scheduler, Model)] == [A]


def reachable(root: object, kind: type[T]) -> list[T]:
    """All objects of a kind that a scheduler holds, however far away."""
    found: list[T] = []
    seen, todo = {id(root)}, [root]
    while todo:
        for each in gc.get_referents(todo.pop()):
            if id(each) not in seen and not isinstance(each, type | ModuleType | FunctionType):
                seen.add(id(each))
                todo.append(each)
                if isinstance(each, kind):
                    found.append(each)
    return found
