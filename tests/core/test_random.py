"""The scheduler under random load, noise and faults: every invariant after every event.

A failing case prints its seed; `run(seed, policy, ...)` repeats it.
"""

from __future__ import annotations

import random

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ArchitectureId, ModelId, WorkerId
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import (
    ModelAdded,
    ModelRemoved,
    RequestCancelled,
    WorkerDraining,
)
from controller.core.invariants import check
from experiments.virtual_cluster import ModelledModel, VirtualCluster

MS = NS_PER_MS
SECONDS = 3
# Those that promise anything about time.
POLICIES = ("clockwork", "edf_mh")


def random_models(generator: random.Random) -> list[ModelledModel]:
    models = []
    for number in range(generator.randint(2, 12)):
        base_ms = generator.choice([0.3, 2.0, 6.0])
        models.append(
            ModelledModel(
                model_id=ModelId(f"m{number}"),
                architecture_id=ArchitectureId(f"a{number % 4}-{base_ms}"),
                num_pages=generator.randint(1, 7),
                load_ns=int(generator.uniform(1, 12) * MS),
                exec_ns={
                    size: int(base_ms * (0.5 + 0.5 * size) * MS)
                    for size in generator.choice([(1,), (1, 2, 4), (1, 2, 4, 8, 16), (4,)])
                },
            )
        )
    return models


def run(seed: int, policy: str, *, faults: bool, sigma: float) -> VirtualCluster:
    generator = random.Random(seed)
    scheduler = Scheduler(SchedulerConfig(policy=policy))
    cluster = VirtualCluster(
        scheduler, seed=seed, exec_sigma=sigma, after_event=lambda: check(scheduler)
    )
    models = random_models(generator)
    cluster.add_models(models)
    num_workers = generator.randint(1, 3)
    workers = [
        cluster.add_worker(f"gpu{index}", generator.randint(7, 40), models)
        for index in range(num_workers)
    ]
    requests = []

    def arrive() -> None:
        if cluster.now_ns >= SECONDS * NS_PER_S:
            return
        model = generator.choice(models)
        rows = generator.choice([1, 1, 1, 1, 2, 3])
        slo_ms = generator.choice([5, 20, 50, 100, 400])
        requests.append(cluster.request(model.model_id, slo_ms * MS, rows=rows))
        if faults and generator.random() < 0.05:
            victim = generator.choice(requests)
            if victim not in cluster.answers and victim not in cluster.refusals:
                cluster.tell(RequestCancelled(request_id=victim))
                cluster.cancelled.add(victim)
        cluster.at(cluster.now_ns + int(generator.expovariate(400) * NS_PER_S), arrive)

    cluster.at(0, arrive)
    if faults:
        cluster.at(700 * MS, lambda: cluster.kill(workers[0]))
        cluster.at(900 * MS, lambda: cluster.add_worker("later", 30, models))
        cluster.at(1300 * MS, lambda: cluster.tell(ModelRemoved(model_id=models[0].model_id)))
        cluster.at(1600 * MS, lambda: cluster.tell(ModelAdded(model_id=models[0].model_id)))
        cluster.at(2000 * MS, lambda: cluster.tell(WorkerDraining(worker_id=WorkerId("later"))))
    cluster.run((SECONDS + 1) * NS_PER_S)
    return cluster


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("faults", [False, True], ids=["calm", "faults"])
@pytest.mark.parametrize("sigma", [0.0, 0.3], ids=["exact", "noisy"])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_one_response_and_no_success_is_late(
    seed: int, sigma: float, faults: bool, policy: str
) -> None:
    cluster = run(seed, policy, faults=faults, sigma=sigma)
    responses = len(cluster.answers) + len(cluster.refusals)
    withdrawn = len(cluster.cancelled - set(cluster.answers) - set(cluster.refusals))
    assert responses + withdrawn == len(cluster.deadlines)
    assert cluster.num_in_time() == len(cluster.answers)
    assert cluster.num_in_time() > 0
    assert cluster.scheduler.num_open_requests == 0
    for request_id, (_, at_ns) in cluster.refusals.items():
        assert at_ns <= cluster.deadlines[request_id], "refused after its deadline"


@pytest.mark.parametrize("policy", POLICIES)
def test_exact_predictions_are_never_late(policy: str) -> None:
    """With no noise and known delays, what is sent is in time."""
    for seed in range(6):
        assert Refusal.LATE not in run(seed, policy, faults=False, sigma=0.0).refusal_counts()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_schedule(policy: str) -> None:
    first, second = (run(3, policy, faults=True, sigma=0.3) for _ in range(2))
    assert [a for a, _ in first.answers.values()] == [a for a, _ in second.answers.values()]
    assert [r for r, _ in first.refusals.values()] == [r for r, _ in second.refusals.values()]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rate", [150, 300])
def test_overload_does_not_lower_goodput(rate: int, policy: str) -> None:
    """One device of exactly 10 ms per request: at most 100 per second, whatever is offered."""
    scheduler = Scheduler(SchedulerConfig(policy=policy))
    cluster = VirtualCluster(scheduler, after_event=lambda: check(scheduler))
    model = ModelledModel(
        model_id=ModelId("m"),
        architecture_id=ArchitectureId("a"),
        num_pages=1,
        load_ns=MS,
        exec_ns={1: 10 * MS},
    )
    cluster.add_models([model])
    cluster.add_worker("gpu", 4, [model])
    generator = random.Random(rate)

    def arrive() -> None:
        cluster.request(model.model_id, 100 * MS)
        if cluster.now_ns < 10 * NS_PER_S:
            cluster.at(cluster.now_ns + int(generator.expovariate(rate) * NS_PER_S), arrive)

    cluster.at(0, arrive)
    cluster.run(11 * NS_PER_S)
    assert cluster.num_in_time() >= 970
    # By then the 10 ms that it would have run for were no longer left.
    for request_id, (_, at_ns) in cluster.refusals.items():
        assert at_ns <= cluster.deadlines[request_id] - 10 * MS
    assert cluster.refusal_counts().keys() == {Refusal.OVERLOADED}
