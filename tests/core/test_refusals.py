"""Who is refused at arrival: nobody who can be served, and what would wait in vain."""

from __future__ import annotations

import pytest
from typing_extensions import override

from clockwright.errors import Refusal
from clockwright.units import ModelId, RequestId, WorkerId
from clockwright.wire.actions import Infer, LoadWeights
from controller.core import SchedulerConfig
from controller.core.events import (
    Command,
    ModelAdded,
    RefuseRequest,
    RequestArrived,
    RequestsArrived,
)
from controller.core.policies.edf_mh import EdfMhPolicy
from controller.core.policy import PolicyKind, Traits
from controller.core.state import Request
from tests.kit.core_bench import GPU, GPU2, MS, A, B, CoreBench, answers, loads, refusals


def burst(bench: CoreBench, numbers: dict[ModelId, int], *, slo_ms: int) -> list[Command]:
    """So many requests for each model, told in one event."""
    models = [model for model, number in numbers.items() for _ in range(number)]
    arrivals = [
        RequestArrived(
            request_id=RequestId(1000 + place),
            model_id=model,
            rows=1,
            arrival_ns=bench.now_ns,
            slo_ns=slo_ms * MS,
        )
        for place, model in enumerate(models)
    ]
    return bench.tell(RequestsArrived(requests=tuple(arrivals)))


def idle(
    policy: str, *workers: WorkerId, models: tuple[ModelId, ...] = (A,), delay_ns: int = 0
) -> CoreBench:
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=delay_ns))
    for worker in workers:
        bench.join(worker)
    for model in models:
        bench.tell(ModelAdded(model_id=model))
        for worker in workers:
            bench.ready(model, worker)
    return bench


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
def test_a_burst_for_a_cold_model_is_shared_among_idle_workers(policy: str) -> None:
    """One GPU answers 16 in the 87 ms that are left of 100 ms, so 20 are nothing for two."""
    bench = idle(policy, GPU, GPU2)
    commands = burst(bench, {A: 20}, slo_ms=100)
    assert refusals(commands) == []
    assert sorted(loads(commands)) == [(GPU, A), (GPU2, A)]


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
def test_what_two_idle_workers_cannot_share_is_refused_at_once(policy: str) -> None:
    bench = idle(policy, GPU, GPU2)
    refused = refusals(burst(bench, {A: 50}, slo_ms=100))
    assert {reason for _, reason in refused} == {Refusal.COLD}
    assert 14 <= len(refused) <= 20


def test_a_burst_takes_no_idle_worker_from_the_other_models_in_it() -> None:
    bench = idle("edf_mh", GPU, GPU2, models=(A, B))
    commands = burst(bench, {A: 12, B: 12}, slo_ms=100)
    assert refusals(commands) == []
    assert sorted(loads(commands))[:2] == [(GPU, A), (GPU2, B)]


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("slo_ms", [1.0, 10.2, 11.2, 11.6])
def test_an_slo_without_time_for_the_way_is_infeasible_calls_for_no_worker_and_the_stated_one_is_enough(
    slo_ms: float, warm: bool, policy: str
) -> None:
    """An EXEC takes 10 ms and the way to the idle worker 0.5 ms; a tenth of the SLO is kept free for the way back."""
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=MS // 2))
    if warm:
        bench.join()
        bench.warm(A)
    else:
        bench = idle(policy, GPU, delay_ns=MS // 2)
    for number in range(20):
        asked = RequestArrived(
            request_id=RequestId(1000 + number),
            model_id=A,
            rows=1,
            arrival_ns=bench.now_ns,
            slo_ns=int(slo_ms * MS),
        )
        (refused,) = bench.tell(asked)
        assert isinstance(refused, RefuseRequest)
        assert refused.refusal is Refusal.INFEASIBLE
        remedy = bench.scheduler.obstacles(asked, refused).remedy
        needed_ns = refused.load_ns + refused.exec_ns + refused.queue_ns + refused.margin_ns
        assert remedy.slo_ns >= needed_ns > asked.slo_ns
        assert remedy.more_workers == 0
    (kind,) = bench.scheduler.statistics().kinds
    assert kind.dropped_for_exec_rps == kind.dropped_for_loads_rps == 0
    assert refusals(bench.request(A, slo_ms=remedy.slo_ns / MS)) == []
    told: list[Command] = []
    while bench.in_flight:
        sent = next(iter(bench.in_flight.values()))
        assert isinstance(sent.action, LoadWeights | Infer)
        end_ns = sent.expected_begin_ns + sent.action.expected_duration_ns
        bench.wait(end_ns)
        told = bench.done(sent.action.action_id, sent.expected_begin_ns / MS, end_ns / MS)
    assert answers(told) == [bench.num_requests]


@pytest.mark.parametrize(
    ("margin_ms", "slo_ms", "kept_part"),
    [(0, 10.52, 20), (5, 11.1, 10)],
    ids=["no margin", "all that may be kept"],
)
def test_what_the_front_will_charge_is_kept_free_beside_the_margin_as_far_as_both_may_go(
    margin_ms: int, slo_ms: float, kept_part: int
) -> None:
    """An EXEC takes 10 ms; a front that charges a twentieth of the SLO would throw away what ends later."""
    config = SchedulerConfig(
        policy="clockwork", dispatch_delay_ns=0, margin_ns=margin_ms * MS, way_back_ns=4 * MS
    )
    bench = CoreBench(config)
    bench.join()
    bench.warm(A)
    slo_ns = int(slo_ms * MS)
    (refused,) = bench.tell(
        RequestArrived(
            request_id=RequestId(1000), model_id=A, rows=1, arrival_ns=bench.now_ns, slo_ns=slo_ns
        )
    )
    assert isinstance(refused, RefuseRequest)
    assert refused.refusal is Refusal.INFEASIBLE
    assert refused.margin_ns == slo_ns // kept_part
    assert refusals(bench.request(A, slo_ms=slo_ms + 0.03)) == []


class Crowded(EdfMhPolicy):
    """All tenants used up their share, and somebody else's request was dropped a moment ago."""

    @override
    def leaves_room(self, request: Request, now_ns: int) -> float:
        return 1.0


def test_a_large_request_of_a_tenant_beyond_its_share_is_no_impossible_one() -> None:
    bench = CoreBench(
        SchedulerConfig(policy="edf_mh"), PolicyKind(Crowded, Traits(predicts=True, punctual=True))
    )
    bench.join()
    bench.warm()
    (refusal,) = bench.tell(
        RequestArrived(
            request_id=RequestId(1000),
            model_id=A,
            rows=4,
            arrival_ns=bench.now_ns,
            slo_ns=100 * MS,
            tenant="flood",
        )
    )
    assert isinstance(refusal, RefuseRequest)
    assert refusal.refusal is Refusal.OVERLOADED
    assert "'flood' used up its share" in refusal.detail
