"""The scheduler under random load, noise and faults: every invariant after every event.

A failing case prints its seed; `run(seed, policy, ...)` repeats it.
"""

from __future__ import annotations

import random

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, WorkerId
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import (
    ModelAdded,
    ModelRemoved,
    WorkerDraining,
)
from experiments.simulator import HostedModel
from tests.kit.simulated_cluster import SimulatedCluster, row

MS = NS_PER_MS
SECONDS = 3
# Those that promise anything about time.
POLICIES = ("clockwork", "edf_mh")


def random_models(generator: random.Random) -> list[HostedModel]:
    """Up to twelve models of up to eight architectures, some of which share one."""
    rows = []
    for number in range(8):
        base_ms = generator.choice([0.3, 2.0, 6.0])
        rows.append(
            row(
                f"a{number}",
                pages=generator.randint(1, 7),
                load_ns=int(generator.uniform(1, 12) * MS),
                exec_ns={
                    size: int(base_ms * (0.5 + 0.5 * size) * MS)
                    for size in generator.choice([(1,), (1, 2, 4), (1, 2, 4, 8, 16), (4,)])
                },
            )
        )
    return [
        HostedModel(ModelId(f"m{number}"), generator.choice(rows))
        for number in range(generator.randint(2, 12))
    ]


def run(seed: int, policy: str, *, faults: bool, sigma: float) -> SimulatedCluster:
    generator = random.Random(seed)
    scheduler = Scheduler(SchedulerConfig(policy=policy))
    models = random_models(generator)
    cluster = SimulatedCluster(scheduler, models, seed=seed, exec_sigma=sigma)
    num_workers = generator.randint(1, 3)
    workers = [
        cluster.add_worker(f"gpu{index}", generator.randint(7, 40)) for index in range(num_workers)
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
            cluster.withdraw(generator.choice(requests))
        cluster.at(cluster.now_ns + int(generator.expovariate(400) * NS_PER_S), arrive)

    cluster.at(0, arrive)
    if faults:
        cluster.at(700 * MS, lambda: cluster.kill(workers[0]))
        cluster.at(900 * MS, lambda: cluster.add_worker("later", 30))
        cluster.at(1300 * MS, lambda: cluster.tell(ModelRemoved(model_id=models[0].model_id)))
        cluster.at(1600 * MS, lambda: cluster.tell(ModelAdded(model_id=models[0].model_id)))
        cluster.at(2000 * MS, lambda: cluster.tell(WorkerDraining(worker_id=WorkerId("later"))))
    cluster.run((SECONDS + 1) * NS_PER_S)
    return cluster


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("faults", [False, True], ids=["calm", "faults"])
@pytest.mark.parametrize("sigma", [0.0, 0.3], ids=["exact", "noisy"])
@pytest.mark.seeds(6)
def test_every_request_gets_one_response_and_no_success_is_late(
    seed: int, sigma: float, faults: bool, policy: str
) -> None:
    cluster = run(seed, policy, faults=faults, sigma=sigma)
    responses = len(cluster.answers) + len(cluster.refusals)
    assert responses + cluster.num_cancelled == len(cluster.deadlines)
    assert len(cluster.telemetry.requests) == len(cluster.deadlines)
    assert cluster.num_in_time() == len(cluster.answers)
    assert cluster.num_in_time() > 0
    assert cluster.scheduler.num_open_requests == 0
    for request_id, refusal in cluster.refusals.items():
        assert refusal.departure_ns <= cluster.deadlines[request_id], "refused after its deadline"


@pytest.mark.seeds(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_exact_predictions_are_hardly_ever_late(policy: str, seed: int) -> None:
    """With no noise and known delays, what is sent is in time, but for two weak spots.

    A worker fills the time that a batch waits for its load with a later batch that is ready, which the
    scheduler expects behind. And the scheduler may expect a lane to be free a fraction of a millisecond
    too early, because actions reach the worker sooner than the delay that it allows for.
    """
    runs = [run(seed + number, policy, faults=False, sigma=0.0) for number in range(6)]
    num_late = sum(cluster.refusal_counts()[Refusal.LATE.value] for cluster in runs)
    assert num_late <= sum(len(cluster.deadlines) for cluster in runs) / 1000
    errors = {action.error for cluster in runs for action in cluster.telemetry.actions}
    assert errors <= {"NONE", "TOO_LATE"}


@pytest.mark.seeds(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_schedule(policy: str, seed: int) -> None:
    first, second = (run(3 + seed, policy, faults=True, sigma=0.3) for _ in range(2))
    assert first.telemetry.requests == second.telemetry.requests
    assert first.telemetry.actions == second.telemetry.actions


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rate", [150, 300])
def test_overload_does_not_lower_goodput(rate: int, policy: str) -> None:
    """One device of exactly 10 ms per request: at most 100 per second, whatever is offered."""
    scheduler = Scheduler(SchedulerConfig(policy=policy))
    model = HostedModel(ModelId("m"), row("a", load_ns=MS, exec_ns={1: 10 * MS}))
    cluster = SimulatedCluster(scheduler, [model])
    cluster.add_worker("gpu", 4)
    generator = random.Random(rate)

    def arrive() -> None:
        cluster.request(model.model_id, 100 * MS)
        if cluster.now_ns < 10 * NS_PER_S:
            cluster.at(cluster.now_ns + int(generator.expovariate(rate) * NS_PER_S), arrive)

    cluster.at(0, arrive)
    cluster.run(11 * NS_PER_S)
    assert cluster.num_in_time() >= 970
    # By then the 10 ms that it would have run for were no longer left.
    for request_id, refusal in cluster.refusals.items():
        assert refusal.departure_ns <= cluster.deadlines[request_id] - 10 * MS
    assert cluster.refusal_counts().keys() == {Refusal.OVERLOADED.value}
