"""What the scheduler predicts for an ensemble before anything of it is sent."""

from __future__ import annotations

from clockwright.actions import LoadWeights
from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, ArchitectureId, GpuKind, ModelId, RequestId, WorkerId
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import (
    ActionSucceeded,
    AdmissionClosed,
    Command,
    ModelAdded,
    ModelReady,
    ModelWanted,
    RefuseRequest,
    RequestArrived,
    SendAction,
    WorkerJoined,
)
from controller.core.forecast import Forecast

MS = NS_PER_MS
A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
GPU, GPU2 = WorkerId("gpu"), WorkerId("gpu2")


def scheduler(*workers: WorkerId, policy: str = "clockwork", delay_ns: int = 0) -> Scheduler:
    """Models a, b and c of 10 ms EXEC and 4 ms load, ready on every worker."""
    made = Scheduler(SchedulerConfig(dispatch_delay_ns=delay_ns, margin_ns=0, policy=policy))
    for worker in workers:
        made.handle(
            WorkerJoined(worker_id=worker, gpu_kind=GpuKind("kind"), num_pages=10), now_ns=0
        )
    for model in (A, B, C):
        made.handle(ModelAdded(model_id=model), now_ns=0)
        for worker in workers:
            made.handle(
                ModelReady(
                    worker_id=worker,
                    model_id=model,
                    architecture_id=ArchitectureId(model),
                    num_pages=1,
                    load_ns=4 * MS,
                    exec_ns={1: 10 * MS},
                ),
                now_ns=0,
            )
    return made


def want(made: Scheduler, model: ModelId, now_ns: int = 0) -> list[Command]:
    return made.handle(ModelWanted(model_id=model), now_ns=now_ns)


def load_all(made: Scheduler) -> int:
    """Load every model; returns the time at which all are resident."""
    now_ns = 0
    for model in (A, B, C):
        (command,) = want(made, model, now_ns)
        assert isinstance(command, SendAction)
        now_ns += 4 * MS + made.config.dispatch_delay_ns
        made.handle(
            ActionSucceeded(
                worker_id=command.worker_id,
                action_id=command.action.action_id,
                begin_ns=now_ns - 4 * MS,
                end_ns=now_ns,
                duration_ns=4 * MS,
            ),
            now_ns=now_ns,
        )
    return now_ns


def predict(made: Scheduler, slo_ms: int, now_ns: int, *, together: bool = True) -> list[Forecast]:
    return made.forecast(
        [A, B, C],
        rows=1,
        arrival_ns=now_ns,
        slo_ns=slo_ms * MS,
        now_ns=now_ns,
        together=together,
    )


def test_members_of_an_ensemble_take_their_time_from_those_behind() -> None:
    made = scheduler(GPU)
    now_ns = load_all(made)
    assert predict(made, 25, now_ns) == [
        Forecast(None, 10 * MS, 10 * MS),
        Forecast(None, 20 * MS, 10 * MS),
        Forecast(Refusal.OVERLOADED, 30 * MS, 10 * MS),
    ]


def test_alone_each_of_them_would_be_in_time() -> None:
    made = scheduler(GPU)
    now_ns = load_all(made)
    alone = Forecast(None, 10 * MS, 10 * MS)
    assert predict(made, 25, now_ns, together=False) == [alone] * 3


def test_cold_members_wait_for_their_loads_one_after_another() -> None:
    made = scheduler(GPU)
    forecasts = predict(made, 25, 0)
    assert [row.refusal for row in forecasts] == [None, None, Refusal.COLD]
    assert forecasts[0].wait_ns == 14 * MS


def test_an_ensemble_spreads_over_workers() -> None:
    made = scheduler(GPU, GPU2)
    waits = [row.wait_ns // MS for row in predict(made, 100, 0)]
    assert waits == [14, 14, 24]


def test_what_waits_already_goes_first() -> None:
    made = scheduler(GPU)
    now_ns = load_all(made)
    for number in range(4):  # the first is sent at once
        made.handle(
            RequestArrived(
                request_id=RequestId(number), model_id=A, rows=1, arrival_ns=now_ns, slo_ns=60 * MS
            ),
            now_ns=now_ns,
        )
    assert predict(made, 60, now_ns, together=False)[0].wait_ns == 50 * MS
    # With an earlier deadline it would go before all but the one that is under way.
    assert predict(made, 45, now_ns, together=False)[0].wait_ns == 20 * MS


def test_what_no_lane_can_do_is_infeasible_and_nobody_is_no_worker() -> None:
    assert predict(scheduler(GPU), 9, 0)[0].refusal is Refusal.INFEASIBLE
    assert predict(scheduler(), 9, 0)[0].refusal is Refusal.NO_WORKER
    unknown = scheduler(GPU).forecast(
        [ModelId("?")], rows=1, arrival_ns=0, slo_ns=MS, now_ns=0, together=True
    )
    assert unknown[0].refusal is Refusal.NO_WORKER


def after_an_outlier() -> tuple[Scheduler, int]:
    """The estimate of A's EXEC is 9.9 ms, of samples of 10 ms and 1 ms; the way to the worker 0.5 ms."""
    made = scheduler(GPU, delay_ns=MS // 2)
    now_ns = load_all(made)
    request = RequestArrived(
        request_id=RequestId(0), model_id=A, rows=1, arrival_ns=now_ns, slo_ns=60 * MS
    )
    (command,) = made.handle(request, now_ns=now_ns)
    assert isinstance(command, SendAction)
    now_ns += 120 * MS
    made.handle(
        ActionSucceeded(
            worker_id=GPU,
            action_id=command.action.action_id,
            begin_ns=now_ns - MS,
            end_ns=now_ns,
            duration_ns=MS,
        ),
        now_ns=now_ns,
    )
    return made, now_ns


def test_an_outlier_a_hair_shorter_than_the_slo_is_not_believed_for_ever() -> None:
    made, now_ns = after_an_outlier()
    assert predict(made, 10, now_ns)[0].refusal is Refusal.OVERLOADED
    assert predict(made, 10, now_ns)[0].refusal is None


def test_nor_does_admission_believe_it_for_ever() -> None:
    made, now_ns = after_an_outlier()
    outcomes = []
    for number in (1, 2):
        request = RequestArrived(
            request_id=RequestId(number), model_id=A, rows=1, arrival_ns=now_ns, slo_ns=10 * MS
        )
        outcomes += made.handle(request, now_ns=now_ns)
    refused, sent = outcomes
    assert isinstance(refused, RefuseRequest)
    assert refused.refusal is Refusal.OVERLOADED
    assert isinstance(sent, SendAction)


def test_a_policy_that_does_not_predict_leaves_nobody_out() -> None:
    assert [row.refusal for row in predict(scheduler(GPU, policy="clipper"), 9, 0)] == [None] * 3


def test_nothing_is_promised_once_admission_is_closed() -> None:
    made = scheduler(GPU)
    made.handle(AdmissionClosed(), now_ns=0)
    assert {row.refusal for row in predict(made, 100, 0)} == {Refusal.DRAINING}


def test_a_forecast_sends_nothing_and_a_wanted_model_is_loaded_once() -> None:
    made = scheduler(GPU)
    predict(made, 1, 0)
    (command,) = want(made, A)
    assert isinstance(command, SendAction)
    assert isinstance(command.action, LoadWeights)
    assert want(made, A) == []
    # The lane is busy: a second one has to wait for its turn.
    assert want(made, B) == []
