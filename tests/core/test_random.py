"""The scheduler under random load, noise and faults: every invariant after every event.

A failing case prints its seed; `run(seed, policy, ...)` repeats it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, WorkerId
from clockwright.wire.actions import ActionError
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import (
    ModelAdded,
    ModelRemoved,
    WorkerDraining,
)
from controller.telemetry.rows import ActionRow
from experiments.simulator import HostedModel
from tests.kit.simulated_cluster import SimulatedCluster, row

MS = NS_PER_MS
SECONDS = 3
# Those that promise anything about time.
POLICIES = ("clockwork", "edf_mh")
# Pages of a GPU: hardly enough for a few models, and enough for all there may be.
TIGHT = (7, 40)
ROOMY = (84, 84)


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


def run(
    seed: int,
    policy: str,
    *,
    faults: bool,
    sigma: float,
    pages: tuple[int, int] = TIGHT,
) -> SimulatedCluster:
    generator = random.Random(seed)
    scheduler = Scheduler(SchedulerConfig(policy=policy))
    models = random_models(generator)
    cluster = SimulatedCluster(scheduler, models, seed=seed, exec_sigma=sigma)
    num_workers = generator.randint(1, 3)
    workers = [
        cluster.add_worker(f"gpu{index}", generator.randint(*pages)) for index in range(num_workers)
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
@pytest.mark.seeds(1)
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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.seeds(1)
def test_exact_predictions_come_true_where_no_lane_waits_for_a_load(seed: int, policy: str) -> None:
    """With no noise and known delays, an Infer begins when it was predicted to.

    So do those behind one that tries whether a profile that rules its request out is true.
    """
    cluster = run(seed, policy, faults=False, sigma=0.0, pages=ROOMY)
    infers = [infer for lane in lanes_of(cluster) for infer in lane.undisturbed()]
    assert len(infers) > 100
    # An action is there sooner than planned, and the lane takes a batch to run until its result is back.
    # With a link as fast in one direction as in the other, the plan for the way covers both.
    early_ns = cluster.scheduler.config.dispatch_delay_ns
    for infer in infers:
        assert infer.exec is not None, infer
        assert 0 <= infer.expected_begin_ns - infer.exec.begin_ns <= early_ns, infer


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pages", [TIGHT, ROOMY], ids=["tight", "roomy"])
@pytest.mark.seeds(1)
def test_exact_predictions_are_late_only_where_a_lane_waits_for_a_load(
    seed: int, pages: tuple[int, int], policy: str
) -> None:
    """A weak spot of the scheduler; every Infer that is late is a victim of it, and so are its requests.

    Other requests are late only where they try whether a profile that rules them out is true.

    The scheduler expects a lane to keep the order in which it was fed, and keeps the wait for a load as a
    stretch of time behind the Infer before, not as the time at which the load ends.
    """
    cluster = run(seed, policy, faults=False, sigma=0.0, pages=pages)
    missed = []
    for lane in lanes_of(cluster):
        for infer in lane.infers:
            if infer.exec is None:
                assert infer.error == ActionError.TOO_LATE.name, infer
                missed.append(infer)
            if infer.exec is None or infer.exec.begin_ns > infer.expected_begin_ns:
                assert lane.was_held_up(infer), infer
    infers = [infer for lane in lanes_of(cluster) for infer in lane.infers]
    for request in cluster.telemetry.requests:
        if request.outcome == Refusal.LATE.value:
            deadline_ns = request.arrival_ns + request.slo_ns
            assert any(
                infer.model_id == request.model_id
                and request.arrival_ns <= infer.sent_ns
                and request.departure_ns == min(infer.result_ns, deadline_ns)
                and (infer in missed or planned_end_ns(infer) > deadline_ns)
                for infer in infers
            ), request


def planned_end_ns(infer: ActionRow) -> int:
    """Where it exceeds the deadline of its request, the request was to try how long the EXEC takes."""
    return infer.expected_begin_ns + infer.expected_duration_ns


class ExecLane:
    """What a worker's exec lane was given, and which of it had to wait for weights."""

    def __init__(self, actions: Sequence[ActionRow]) -> None:
        """Take all actions of one worker."""
        self.infers = sorted(
            (action for action in actions if action.type == "Infer"), key=lambda row: row.action_id
        )
        self._loads = sorted(
            (action for action in actions if action.load is not None), key=lambda row: row.action_id
        )
        self._waiting = [infer for infer in self.infers if self._waited(infer)]
        # An Infer sent behind one that was held up may find the lane empty when it comes: the one before
        # ended sooner than predicted, and what comes behind is predicted as if the lane had gone on.
        self._waiting += [
            infer
            for infer in self.infers
            if infer.exec is not None
            and infer.exec.begin_ns == infer.received_ns
            and any(
                other.action_id < infer.action_id
                and other.result_ns >= infer.sent_ns
                and self.was_held_up(other)
                for other in self.infers
            )
        ]

    def undisturbed(self) -> list[ActionRow]:
        """Those sent while the lane held none that was sent before its weights were there."""
        planned = [infer for infer in self.infers if infer.sent_ns <= self._loaded_ns(infer)]
        return [
            infer
            for infer in self.infers
            if not self.was_held_up(infer)
            and not any(
                other.action_id <= infer.action_id and other.result_ns >= infer.sent_ns
                for other in planned
            )
        ]

    def was_held_up(self, late: ActionRow) -> bool:
        """Whether it waited for its load, or was sent while the lane still held an Infer that does."""
        return late in self._waiting or any(
            infer.action_id < late.action_id and infer.result_ns >= late.sent_ns
            for infer in self._waiting
        )

    def _waited(self, infer: ActionRow) -> bool:
        """Whether the lane was free for an Infer before its weights were there.

        Either the Infer began the moment its load ended, or it was overtaken: a worker does not hold its
        lane free for a batch that waits, and a later one ran in its place.
        """
        loaded_ns = self._loaded_ns(infer)
        if infer.exec is not None and infer.exec.begin_ns == loaded_ns:
            return True
        return infer.sent_ns < loaded_ns and any(
            other.action_id > infer.action_id
            and other.exec is not None
            and other.exec.begin_ns < loaded_ns
            and (infer.exec is None or other.exec.begin_ns < infer.exec.begin_ns)
            for other in self.infers
        )

    def _loaded_ns(self, infer: ActionRow) -> int:
        """When the load ended behind which an Infer was sent."""
        ends_ns = [
            action.load.end_ns
            for action in self._loads
            if action.load is not None
            and action.model_id == infer.model_id
            and action.action_id < infer.action_id
        ]
        return ends_ns[-1]


def lanes_of(cluster: SimulatedCluster) -> list[ExecLane]:
    """The exec lanes of all workers that were sent anything."""
    actions: dict[WorkerId, list[ActionRow]] = {}
    for action in cluster.telemetry.actions:
        actions.setdefault(action.worker_id, []).append(action)
    return [ExecLane(rows) for rows in actions.values()]


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
