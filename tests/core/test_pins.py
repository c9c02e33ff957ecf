"""Models that an operator has pinned: nothing makes them leave, and they are loaded before all else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, ModelId
from clockwright.wire.actions import EvictWeights, LoadWeights
from controller.core import SchedulerConfig
from controller.core.events import (
    Command,
    ModelAdded,
    ModelPinned,
    ModelRemoved,
    RefuseRequest,
    RequestArrived,
    TimerFired,
    WorkerDraining,
    WorkerLost,
)
from controller.core.policies import POLICIES
from tests.kit.core_bench import GPU, GPU2, A, B, CoreBench, actions, loads, refusals

C = ModelId("c")


def bench_of(policy: str, *, pages: int = 2, second: bool = False) -> CoreBench:
    """Three models of two pages each, on workers that have room for one of them."""
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=0))
    workers = (GPU, GPU2) if second else (GPU,)
    for worker in workers:
        bench.join(worker, pages=pages)
    for model in (A, B, C):
        bench.tell(ModelAdded(model_id=model))
        for worker in workers:
            bench.ready(model, worker, pages=2)
    return bench


def refused_by(commands: Sequence[Command]) -> list[RefuseRequest]:
    return [command for command in commands if isinstance(command, RefuseRequest)]


def finish_all(bench: CoreBench) -> None:
    while bench.in_flight:
        bench.finish(next(iter(bench.in_flight.values())))


def pin(bench: CoreBench, model: ModelId, *, pinned: bool = True) -> list[tuple[object, ModelId]]:
    commands = bench.tell(ModelPinned(model_id=model, pinned=pinned))
    return [(type(action), action.model_id) for action in actions(commands)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_model_that_is_pinned_is_loaded_though_nobody_asks_for_it(policy: str) -> None:
    assert pin(bench_of(policy), A) == [(LoadWeights, A)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_it_makes_another_leave_and_is_made_to_leave_by_none(policy: str) -> None:
    bench = bench_of(policy)
    bench.request(B, slo_ms=1000)
    finish_all(bench)
    assert pin(bench, A) == [(EvictWeights, B), (LoadWeights, A)]
    finish_all(bench)
    commands = bench.request(B, slo_ms=1000)
    assert actions(commands) == []
    # Until somebody lets it go.
    pin(bench, A, pinned=False)
    finish_all(bench)
    bench.request(C, slo_ms=1000)
    assert any(model in (B, C) for _, model in loads(list(bench.in_flight.values())))


def test_what_runs_makes_no_room_until_it_has_run() -> None:
    bench = bench_of("edf_mh")
    bench.request(B, slo_ms=1000)
    bench.finish(next(iter(bench.in_flight.values())))
    assert pin(bench, A) == []
    (running,) = bench.in_flight.values()
    told = bench.finish(running)
    assert [(type(c.action), c.action.model_id) for c in told] == [
        (EvictWeights, B),
        (LoadWeights, A),
    ]


def test_others_that_wait_everywhere_do_not_keep_it_out() -> None:
    """All pages are wanted by waiting requests; a policy alone would find nothing that may go."""
    bench = bench_of("edf_mh")
    bench.request(B, slo_ms=5000)
    bench.finish(next(iter(bench.in_flight.values())))
    for _ in range(40):
        bench.request(B, slo_ms=5000)
    pin(bench, A)
    while not any(isinstance(c.action, LoadWeights) for c in bench.in_flight.values()):
        bench.finish(next(iter(bench.in_flight.values())))
    assert loads(list(bench.in_flight.values())) == [(GPU, A)]


def test_pins_that_do_not_fit_together_leave_the_last_one_waiting() -> None:
    bench = bench_of("edf_mh")
    pin(bench, A)
    finish_all(bench)
    assert pin(bench, B) == []
    assert pin(bench, A, pinned=False) == [(EvictWeights, A), (LoadWeights, B)]


@pytest.mark.parametrize("policy", ["clipper", "infaas"])
def test_who_does_not_predict_refuses_what_pins_leave_no_room_for(policy: str) -> None:
    """It would wait for ever: nothing else would ever say that it is too late."""
    bench = bench_of(policy)
    pin(bench, A)
    finish_all(bench)
    (refused,) = refused_by(bench.request(B, slo_ms=1000))
    assert refused.refusal is Refusal.NO_WORKER
    assert "pinned" in refused.detail
    assert refused_by(bench.request(A, slo_ms=1000)) == []
    finish_all(bench)
    pin(bench, A, pinned=False)
    assert (GPU, B) in loads(bench.request(B, slo_ms=1000))


@pytest.mark.parametrize("policy", ["clipper", "infaas"])
def test_who_does_not_predict_refuses_what_waits_when_a_pin_takes_the_room(policy: str) -> None:
    bench = bench_of(policy)
    bench.request(A, slo_ms=1000)
    assert refused_by(bench.request(C, slo_ms=1000)) == []
    (refused,) = refused_by(bench.tell(ModelPinned(model_id=A, pinned=True)))
    assert (refused.model_id, refused.refusal) == (C, Refusal.NO_WORKER)
    finish_all(bench)


@pytest.mark.parametrize("policy", ["clipper", "infaas"])
def test_who_does_not_predict_serves_what_has_room_beside_pins(policy: str) -> None:
    bench = bench_of(policy, pages=4)
    pin(bench, A)
    finish_all(bench)
    assert loads(bench.request(B, slo_ms=1000)) == [(GPU, B)]


@pytest.mark.parametrize("gone", [WorkerLost, WorkerDraining])
def test_it_is_loaded_elsewhere_when_its_worker_goes(
    gone: type[WorkerLost | WorkerDraining],
) -> None:
    bench = bench_of("edf_mh", second=True)
    pin(bench, A)
    ((where, _),) = loads(list(bench.in_flight.values()))
    finish_all(bench)
    commands = bench.tell(gone(worker_id=where))
    assert loads(commands) == [(GPU if where == GPU2 else GPU2, A)]


def test_a_worker_that_joins_gets_what_is_nowhere() -> None:
    bench = CoreBench()
    bench.tell(ModelAdded(model_id=A))
    pin(bench, A)
    bench.join()
    assert loads(bench.ready(A)) == [(GPU, A)]


def test_a_pinned_model_can_be_removed() -> None:
    bench = bench_of("edf_mh")
    pin(bench, A)
    finish_all(bench)
    commands = bench.tell(ModelRemoved(model_id=A))
    assert EvictWeights in {type(action) for action in actions(commands)}
    assert refusals(commands) == []
    assert pin(bench, B) == [(LoadWeights, B)]


def test_a_model_that_nobody_knows_is_not_pinned() -> None:
    assert pin(bench_of("edf_mh"), ModelId("nobody")) == []


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
def test_who_is_refused_because_of_pins_is_told_that_another_worker_would_do_and_no_longer_slo(
    policy: str,
) -> None:
    bench = bench_of(policy)
    pin(bench, A)
    finish_all(bench)
    refused = refused_by(bench.request(B, slo_ms=30))
    refused += refused_by(bench.tell(TimerFired(), at_ms=1000)) if not refused else []
    assert [each.refusal for each in refused] == [Refusal.COLD]
    asked = RequestArrived(
        request_id=refused[0].request_id, model_id=B, rows=1, arrival_ns=0, slo_ns=30 * NS_PER_MS
    )
    found = bench.scheduler.obstacles(asked, refused[0])
    assert (found.remedy.slo_ns, found.remedy.more_workers, found.pinning) == (0, 1, False)
