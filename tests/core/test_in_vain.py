"""What the scheduler says of requests that have not arrived: never that one is in vain which would have been served."""

from __future__ import annotations

import random

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, RequestId
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import (
    Command,
    Event,
    RefuseRequest,
    RequestArrived,
    RequestsArrived,
    TurnedAway,
)
from experiments.simulator import HostedModel
from tests.kit.chaos import Chaos
from tests.kit.simulated_cluster import SimulatedCluster, row

MS = NS_PER_MS


class Asked:
    """Asks before each arrival, and looks at what becomes of it."""

    def __init__(self) -> None:
        self.num_in_vain = self.num_overloaded = 0

    def look(self, found: list[tuple[RequestArrived, bool]], commands: list[Command]) -> None:
        refused = {c.request_id: c.refusal for c in commands if isinstance(c, RefuseRequest)}
        any_refused = False
        for request, in_vain in found:
            overloaded = refused.get(request.request_id) is Refusal.OVERLOADED
            # A refusal may get its model a copy, for which another loses its own, and corrects estimates: what was said
            # of later requests of the same event was said before that.
            assert overloaded or not in_vain or any_refused, request
            any_refused = any_refused or request.request_id in refused
            self.num_in_vain += in_vain
            self.num_overloaded += overloaded


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Every scheduler is asked of every request, as a controller asks of those that come in one turn of its loop."""
    asked, handle = Asked(), Scheduler.handle

    def ask_first(scheduler: Scheduler, event: Event, *, now_ns: int) -> list[Command]:
        requests: tuple[RequestArrived, ...] = ()
        if isinstance(event, RequestArrived):
            requests = (event,)
        elif isinstance(event, RequestsArrived):
            requests = event.requests
        found, about_to_ask = [], list[tuple[ModelId, int, int]]()
        for request in requests:
            deadline_ns = request.arrival_ns + request.slo_ns
            behind_rows = sum(
                rows
                for model_id, before_ns, rows in about_to_ask
                if model_id == request.model_id and before_ns <= deadline_ns
            )
            in_vain = scheduler.is_in_vain(request, behind_rows=behind_rows, now_ns=now_ns)
            if in_vain is False:
                about_to_ask.append((request.model_id, deadline_ns, request.rows))
            found.append((request, bool(in_vain)))
        commands = handle(scheduler, event, now_ns=now_ns)
        asked.look(found, commands)
        return commands

    monkeypatch.setattr(Scheduler, "handle", ask_first)
    return asked


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh", "clipper"])
@pytest.mark.seeds(6)
def test_no_request_is_in_vain_that_would_be_served_whatever_happens(
    seed: int, policy: str, asked: Asked
) -> None:
    Chaos(seed, policy).run()


def overloaded(seed: int, policy: str) -> SimulatedCluster:
    """Some models on one or two GPUs, asked for more than these can do."""
    generator = random.Random(seed)
    models = [
        HostedModel(ModelId(f"m{n}"), row(f"a{n}", load_ns=3 * MS, exec_ns={1: 2 * MS, 4: 5 * MS}))
        for n in range(generator.randint(1, 4))
    ]
    cluster = SimulatedCluster(
        Scheduler(SchedulerConfig(policy=policy)), models, seed=seed, exec_sigma=0.1
    )
    for number in range(generator.randint(1, 2)):
        cluster.add_worker(f"gpu{number}", 8)

    def arrive() -> None:
        if cluster.now_ns < NS_PER_S:
            model = generator.choice(models)
            rows, slo_ms = generator.choice([1, 1, 2]), generator.choice([10, 50, 50, 100])
            cluster.request(model.model_id, slo_ms * MS, rows=rows)
            cluster.at(cluster.now_ns + int(generator.expovariate(3000) * NS_PER_S), arrive)

    cluster.at(0, arrive)
    cluster.run(2 * NS_PER_S)
    return cluster


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
@pytest.mark.seeds(4)
def test_nor_under_overload_where_nearly_all_that_is_refused_on_arrival_is_found_to_be_in_vain(
    seed: int, policy: str, asked: Asked
) -> None:
    overloaded(seed, policy)
    assert asked.num_overloaded > 100
    assert asked.num_in_vain > 0.9 * asked.num_overloaded


def test_the_question_changes_nothing(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(i, r.departure_ns) for i, r in overloaded(0, "edf_mh").answers.items()]
    monkeypatch.undo()
    assert answers == [(i, r.departure_ns) for i, r in overloaded(0, "edf_mh").answers.items()]


def test_requests_that_were_turned_away_count_as_dropped() -> None:
    def drop(*, turned_away: bool) -> object:
        scheduler = Scheduler(SchedulerConfig())
        model = HostedModel(ModelId("m"), row("a", load_ns=3 * MS, exec_ns={1: 5 * MS}))
        cluster = SimulatedCluster(scheduler, [model])
        cluster.add_worker("gpu", 8)
        cluster.request(model.model_id, 100 * MS)
        cluster.run(20 * MS)
        for _ in range(20):
            cluster.request(model.model_id, 30 * MS)
        like = RequestArrived(
            request_id=RequestId(0), model_id=model.model_id, rows=1, arrival_ns=cluster.now_ns, slo_ns=30 * MS,
        )  # fmt: skip
        assert scheduler.is_in_vain(like, behind_rows=0, now_ns=cluster.now_ns)
        if turned_away:
            cluster.tell(TurnedAway(request=like, number=10))
        else:
            for _ in range(10):
                cluster.request(model.model_id, 30 * MS)
        return scheduler.statistics(cluster.now_ns + NS_PER_S).kinds

    assert drop(turned_away=True) == drop(turned_away=False)
