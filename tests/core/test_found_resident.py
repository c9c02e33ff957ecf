"""A worker that joins with weights in its cache, since an earlier controller."""

from __future__ import annotations

import pytest

from clockwright.wire.actions import EvictWeights, Infer, LoadWeights
from controller.core import SchedulerConfig
from controller.core.events import ModelAdded, ModelWanted, WorkerLost
from controller.core.invariants import check
from controller.core.policies import POLICIES
from tests.kit.core_bench import GPU, GPU2, A, B, CoreBench, actions, infers


def found(bench: CoreBench) -> None:
    """A worker of two pages holds one of two models."""
    bench.join(pages=2)
    for model in (A, B):
        bench.tell(ModelAdded(model_id=model))
    bench.ready(A, resident=True)
    bench.ready(B)
    check(bench.scheduler)


def test_what_is_resident_runs_without_a_load() -> None:
    bench = CoreBench()
    found(bench)
    (infer,) = actions(bench.request(A))
    assert isinstance(infer, Infer)
    check(bench.scheduler)


def test_its_pages_are_taken_so_another_model_has_to_make_it_leave() -> None:
    bench = CoreBench()
    found(bench)
    evict, load = actions(bench.request(B))
    assert (type(evict), evict.model_id) == (EvictWeights, A)
    assert (type(load), load.model_id) == (LoadWeights, B)
    check(bench.scheduler)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_requests_that_wait_for_the_only_worker_to_come_back_run_at_once(policy: str) -> None:
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=0))
    # Another worker is ready for the model, and too busy with its load to be in time for all.
    bench.join(GPU2)
    bench.tell(ModelAdded(model_id=A))
    bench.ready(A, GPU2, load_ms=2000)
    bench.request(A, slo_ms=10_000)
    bench.join(GPU)
    commands = bench.ready(A, GPU, resident=True)
    assert [command.worker_id for command in infers(commands)] == [GPU]
    check(bench.scheduler)


def test_a_worker_that_held_a_model_and_is_lost_held_it_for_nobody() -> None:
    bench = CoreBench()
    found(bench)
    bench.tell(WorkerLost(worker_id=GPU))
    check(bench.scheduler)
    found_again = CoreBench()
    found(found_again)
    assert found_again.tell(ModelWanted(model_id=A)) == []
