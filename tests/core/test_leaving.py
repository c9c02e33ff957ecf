"""Which worker leaves: the one that is cheapest to lose, compared with all others by brute force."""

from __future__ import annotations

import random

import pytest

from clockwright.units import NS_PER_S, GpuKind, ModelId, WorkerId
from controller.core.events import (
    ModelAdded,
    ModelPinned,
    WorkerDraining,
    WorkerJoined,
)
from controller.core.invariants import check
from tests.kit.core_bench import GPU, GPU2, A, B, CoreBench, sends

KIND = GpuKind("k")


def leaving(bench: CoreBench) -> WorkerId | None:
    return bench.scheduler.cheapest_to_lose(KIND, bench.now_ns).worker_id


def asked(bench: CoreBench, model: ModelId, times: int) -> None:
    """Requests for a model come, one by one, and are answered."""
    for _ in range(times):
        sent = sends(bench.request(model, slo_ms=1000))
        while sent:
            sent = [*sent[1:], *bench.finish(sent[0])]
    bench.wait(bench.now_ns + NS_PER_S)


def place(bench: CoreBench, places: dict[WorkerId, dict[ModelId, float]]) -> None:
    """Workers come with the weights of some models, which take so many ms to load."""
    models = list(dict.fromkeys(model for held in places.values() for model in held))
    for worker in places:
        bench.join(worker)
    for model in models:
        bench.tell(ModelAdded(model_id=model))
        load_ms = max(held.get(model, 0) for held in places.values())
        for worker, held in places.items():
            bench.ready(model, worker, pages=1, load_ms=load_ms, resident=model in held)
    check(bench.scheduler)


def test_the_last_worker_stays() -> None:
    bench = CoreBench()
    assert "no worker of kind k" in bench.scheduler.cheapest_to_lose(KIND, 0).words
    place(bench, {GPU: {A: 8}})
    found = bench.scheduler.cheapest_to_lose(KIND, bench.now_ns)
    assert found.worker_id is None
    assert found.words == "worker gpu is the last one"


def test_who_holds_what_no_other_holds_stays() -> None:
    bench = CoreBench()
    place(bench, {GPU: {A: 8}, GPU2: {A: 8, B: 8}})
    assert leaving(bench) == GPU
    # However much GPU is used for what GPU2 holds too.
    asked(bench, A, 20)
    assert leaving(bench) == GPU


def test_what_is_asked_for_weighs_more_and_so_does_a_longer_load() -> None:
    bench = CoreBench()
    place(bench, {GPU: {A: 8}, GPU2: {B: 10}})
    assert leaving(bench) == GPU
    asked(bench, A, 3)
    assert leaving(bench) == GPU2
    asked(bench, B, 10)
    assert leaving(bench) == GPU


def test_a_pinned_model_weighs_more() -> None:
    bench = CoreBench()
    place(bench, {GPU: {A: 8}, GPU2: {B: 10}})
    bench.tell(ModelPinned(model_id=A, pinned=True))
    assert leaving(bench) == GPU2


def test_what_waits_on_a_worker_counts() -> None:
    bench = CoreBench()
    place(bench, {GPU: {A: 8}, GPU2: {A: 8}})
    (sent,) = sends(bench.request(A, slo_ms=1000))
    other = {GPU: GPU2, GPU2: GPU}[sent.worker_id]
    assert leaving(bench) == other


def test_the_only_one_ready_for_a_model_stays() -> None:
    bench = CoreBench()
    place(bench, {GPU: {}, GPU2: {A: 8}})
    bench.tell(ModelAdded(model_id=B))
    bench.ready(B, GPU, load_ms=1, resident=True)
    # GPU2 holds what GPU would have to load, but nobody else could serve B.
    assert leaving(bench) == GPU2
    bench.tell(WorkerDraining(worker_id=GPU2))
    found = bench.scheduler.cheapest_to_lose(KIND, bench.now_ns)
    assert found.worker_id is None


def test_if_each_is_the_only_one_for_something_none_leaves() -> None:
    bench = CoreBench()
    place(bench, {GPU: {}, GPU2: {}})
    for model, worker in ((A, GPU), (B, GPU2)):
        bench.tell(ModelAdded(model_id=model))
        bench.ready(model, worker, resident=True)
    found = bench.scheduler.cheapest_to_lose(KIND, bench.now_ns)
    assert found.worker_id is None
    assert "the only one ready for" in found.words
    assert bench.scheduler.why_not_without(GPU) == f"worker gpu is the only one ready for {A}"
    bench.ready(A, GPU2)
    assert bench.scheduler.why_not_without(GPU) == ""
    assert leaving(bench) == GPU


def test_workers_of_other_kinds_do_not_leave_but_hold_copies() -> None:
    bench = CoreBench()
    place(bench, {GPU: {A: 8}, GPU2: {B: 1}})
    bench.tell(WorkerJoined(worker_id=WorkerId("other"), gpu_kind=GpuKind("l"), num_pages=10))
    bench.ready(A, WorkerId("other"), resident=True)
    assert leaving(bench) == GPU
    assert bench.scheduler.cheapest_to_lose(GpuKind("l"), bench.now_ns).worker_id == "other"


@pytest.mark.parametrize("seed", range(30))
def test_no_other_worker_would_be_cheaper(seed: int) -> None:
    """Small states, drawn at random: what each costs is counted anew here, model by model."""
    draw = random.Random(seed)
    models = [ModelId(f"m{number}") for number in range(draw.randint(1, 5))]
    loads = {model: draw.randint(1, 50) for model in models}
    workers = [WorkerId(f"w{number}") for number in range(draw.randint(2, 4))]
    places = {
        worker: {model: float(loads[model]) for model in models if draw.random() < 0.5}
        for worker in workers
    }
    bench = CoreBench()
    place(bench, places)
    num_asked = dict.fromkeys(models, 0)
    for model in draw.choices(models, k=draw.randint(0, 6)):
        if any(model in held for held in places.values()):
            asked(bench, model, 1)
            num_asked[model] += 1
    scheduler = bench.scheduler
    held = {
        worker: [model for model, _, _ in pages] for worker, pages in scheduler.held_pages().items()
    }
    rows = [scheduler.model_statistics(model) for model in models]
    load_ns = {row.model_id: row.load_ns for row in rows if row is not None}

    def cost_of(worker: WorkerId) -> float:
        total_ns = 0
        for model in held[worker]:
            others = [each for each in workers if each != worker and model in held[each]]
            if not others:
                total_ns += load_ns[model] * (1 + num_asked[model])
            elif num_asked[model]:
                total_ns += load_ns[model]
        return total_ns

    chosen = leaving(bench)
    assert chosen is not None
    assert cost_of(chosen) == min(map(cost_of, workers))
