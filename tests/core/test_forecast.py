"""What the scheduler predicts for an ensemble before anything of it is sent."""

from __future__ import annotations

import pytest

from clockwright.errors import Refusal
from clockwright.units import ModelId, WorkerId
from clockwright.wire.actions import ActionError, Infer, LoadWeights
from controller.core import SchedulerConfig
from controller.core.events import AdmissionClosed, ModelAdded, ModelWanted
from controller.core.forecast import Forecast
from tests.kit.core_bench import GPU, GPU2, MS, A, B, CoreBench, actions, loads, refusals, sends

C = ModelId("c")


def bench(*workers: WorkerId, policy: str = "clockwork", delay_ns: int = 0) -> CoreBench:
    """Models a, b and c of 10 ms EXEC and 4 ms load, ready on every worker."""
    made = CoreBench(SchedulerConfig(dispatch_delay_ns=delay_ns, margin_ns=0, policy=policy))
    for worker in workers:
        made.join(worker)
    for model in (A, B, C):
        made.tell(ModelAdded(model_id=model))
        for worker in workers:
            made.ready(model, worker, pages=1, load_ms=4, exec_ms={1: 10})
    return made


def warm_bench(delay_ns: int = 0) -> CoreBench:
    """One worker, all models resident."""
    made = bench(GPU, delay_ns=delay_ns)
    for model in (A, B, C):
        (command,) = sends(made.tell(ModelWanted(model_id=model)))
        made.finish(command)
    return made


def predict(
    made: CoreBench, slo_ms: int, *, together: bool = True, num_bytes: int = 0
) -> list[Forecast]:
    return made.scheduler.forecast(
        [A, B, C],
        rows=1,
        arrival_ns=made.now_ns,
        slo_ns=slo_ms * MS,
        now_ns=made.now_ns,
        together=together,
        num_bytes=num_bytes,
    )


def test_members_of_an_ensemble_take_their_time_from_those_behind() -> None:
    made = warm_bench()
    assert predict(made, 25) == [
        Forecast(None, 10 * MS, 10 * MS),
        Forecast(None, 20 * MS, 10 * MS),
        Forecast(Refusal.OVERLOADED, 30 * MS, 10 * MS),
    ]


def test_alone_each_of_them_would_be_in_time() -> None:
    made = warm_bench()
    alone = Forecast(None, 10 * MS, 10 * MS)
    assert predict(made, 25, together=False) == [alone] * 3


def test_cold_members_wait_for_their_loads_one_after_another() -> None:
    made = bench(GPU)
    forecasts = predict(made, 25)
    assert [row.refusal for row in forecasts] == [None, None, Refusal.COLD]
    assert forecasts[0].wait_ns == 14 * MS


def test_an_ensemble_spreads_over_workers() -> None:
    made = bench(GPU, GPU2)
    waits = [row.wait_ns // MS for row in predict(made, 100)]
    assert waits == [14, 14, 24]


def test_what_waits_already_goes_first() -> None:
    made = warm_bench()
    for _ in range(4):  # the first is sent at once
        made.request(A, slo_ms=60)
    assert predict(made, 60, together=False)[0].wait_ns == 50 * MS
    # With an earlier deadline it would go before all but the one that is under way.
    assert predict(made, 45, together=False)[0].wait_ns == 20 * MS


def test_what_no_lane_can_do_is_infeasible_and_nobody_is_no_worker() -> None:
    assert predict(bench(GPU), 9)[0].refusal is Refusal.INFEASIBLE
    assert predict(bench(), 9)[0].refusal is Refusal.NO_WORKER
    unknown = bench(GPU).scheduler.forecast(
        [ModelId("?")], rows=1, arrival_ns=0, slo_ns=MS, now_ns=0, together=True
    )
    assert unknown[0].refusal is Refusal.NO_WORKER


@pytest.mark.parametrize("policy", ["clockwork", "clipper"])
def test_more_rows_than_any_worker_runs_are_infeasible(policy: str) -> None:
    made = bench(GPU, policy=policy)
    (found,) = made.scheduler.forecast(
        [A], rows=2, arrival_ns=0, slo_ns=100 * MS, now_ns=0, together=False
    )
    assert found == Forecast(Refusal.INFEASIBLE)


@pytest.mark.parametrize("policy", ["clockwork", "clipper"])
def test_while_loads_pause_a_member_has_failed_and_is_asked_again_after_the_pause(
    policy: str,
) -> None:
    made = bench(GPU, policy=policy)
    made.request(A, slo_ms=60_000)
    while not made.scheduler.statistics().workers[0].suspended:
        for command in list(made.in_flight.values()):
            is_load = isinstance(command.action, LoadWeights)
            error = ActionError.DEVICE if is_load else ActionError.NOT_RESIDENT
            made.failed(command.action.action_id, error, at_ms=made.now_ms)
        made.wait(made.now_ns + MS)
    assert predict(made, 100, together=False)[0].refusal is Refusal.FAILED
    made.wait(made.now_ns + 2_000 * MS)
    assert predict(made, 100, together=False)[0].refusal is None
    assert loads(made.request(A, slo_ms=100)) == [(GPU, A)]


def after_an_outlier() -> CoreBench:
    """The estimate of A's EXEC is 9.9 ms, of samples of 10 ms and 1 ms; the way to the worker 0.5 ms."""
    made = warm_bench(delay_ns=MS // 2)
    (infer,) = actions(made.request(A, slo_ms=60))
    end_ms = made.now_ms + 120
    made.done(infer.action_id, end_ms - 1, end_ms)
    return made


def test_an_outlier_a_hair_shorter_than_the_slo_is_not_believed_for_ever() -> None:
    made = after_an_outlier()
    assert predict(made, 10)[0].refusal is Refusal.INFEASIBLE
    assert predict(made, 10)[0].refusal is None


def test_nor_does_admission_believe_it_for_ever() -> None:
    made = after_an_outlier()
    assert refusals(made.request(A, slo_ms=10)) == [(2, Refusal.INFEASIBLE)]
    (infer,) = actions(made.request(A, slo_ms=10))
    assert isinstance(infer, Infer)


def test_a_policy_that_does_not_predict_leaves_nobody_out() -> None:
    assert [row.refusal for row in predict(bench(GPU, policy="clipper"), 9)] == [None] * 3


def test_nothing_is_promised_once_admission_is_closed() -> None:
    made = bench(GPU)
    made.tell(AdmissionClosed())
    assert {row.refusal for row in predict(made, 100)} == {Refusal.DRAINING}


def test_a_forecast_sends_nothing_and_a_wanted_model_is_loaded_once() -> None:
    made = bench(GPU)
    predict(made, 1)
    wanted_a, wanted_b = (ModelWanted(model_id=model) for model in (A, B))
    (load,) = actions(made.tell(wanted_a))
    assert isinstance(load, LoadWeights)
    assert made.tell(wanted_a) == []
    # The lane is busy: a second one has to wait for its turn.
    assert made.tell(wanted_b) == []


@pytest.mark.parametrize(("until_ms", "loaded"), [(0, False), (1, False), (100, True)])
def test_a_model_that_is_wanted_until_a_time_is_loaded_behind_others(
    until_ms: int, loaded: bool
) -> None:
    made = bench(GPU)
    (load,) = sends(made.tell(ModelWanted(model_id=A)))
    assert made.tell(ModelWanted(model_id=B, until_ns=until_ms * MS)) == []
    behind = [command.action.model_id for command in made.finish(load)]
    assert behind == ([B] if loaded else [])
