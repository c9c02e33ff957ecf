"""The reactive baselines: they batch, they do not look ahead, and they collapse where the paper says."""

from __future__ import annotations

from itertools import pairwise

import pytest

from clockwright.errors import ConfigError, Refusal
from clockwright.units import NS_PER_MS, ModelId, RequestId
from controller.core import Scheduler, SchedulerConfig
from controller.core.policies.batching import (
    AIMD_DECREASE,
    AIMD_INCREASE,
    Aimd,
    QuantileRegression,
    fit_quantile,
)
from controller.core.policies.reactive import ClipperCaps, ReactivePolicy
from controller.core.policy import PolicyKind, Traits
from experiments.simulator import HostedModel
from tests.kit.simulated_cluster import SimulatedCluster, row

MS = NS_PER_MS
EXEC = {1: 3 * MS, 2: 4 * MS, 4: 6 * MS, 8: 10 * MS, 16: 17 * MS}


def models(number: int) -> list[HostedModel]:
    cost = row("a", pages=7, load_ns=8 * MS, exec_ns=EXEC)
    return [HostedModel(ModelId(f"m{index}"), cost) for index in range(number)]


class ClosedLoop:
    """Clients that ask again as soon as they have a response."""

    def __init__(
        self,
        policy: str,
        *,
        num_models: int,
        clients: int,
        slo_ms: int,
        gpus: int = 1,
        batching: str = "aimd",
        batch_delay_ns: int = 0,
        kind: PolicyKind | None = None,
    ) -> None:
        config = SchedulerConfig(policy=policy, batching=batching, batch_delay_ns=batch_delay_ns)
        self.scheduler = Scheduler(config, kind)
        served = models(num_models)
        self.cluster = SimulatedCluster(self.scheduler, served)
        for index in range(gpus):
            self.cluster.add_worker(f"gpu{index}", 200)
        self.slo_ns = slo_ms * MS
        self.open: dict[RequestId, ModelId] = {}
        for model in served:
            for _ in range(clients):
                self.ask(model.model_id)

    def ask(self, model_id: ModelId) -> None:
        request = self.cluster.request(model_id, self.slo_ns)
        self.open[request] = model_id

    def run(self, seconds: int) -> float:
        """Goodput per second."""
        for _ in range(seconds * 1000):
            self.cluster.run(self.cluster.now_ns + MS)
            for request, model_id in list(self.open.items()):
                if not self.cluster.is_open(request):
                    del self.open[request]
                    self.ask(model_id)
        return self.cluster.num_in_time() / seconds


def clipper_with(caps: ClipperCaps, batch_delay_ns: int = 0) -> PolicyKind:
    """Clipper whose caps the test can see."""
    return PolicyKind(lambda config: ReactivePolicy(caps, batch_delay_ns), Traits())


@pytest.mark.parametrize("policy", ["clipper", "infaas"])
def test_goodput_is_good_with_a_loose_slo_and_collapses_with_a_tight_one(policy: str) -> None:
    """Clockwork paper, Figure 5: below the time of one round over all models everything is late."""
    loose = ClosedLoop(policy, num_models=10, clients=16, slo_ms=500).run(3)
    tight = ClosedLoop(policy, num_models=10, clients=16, slo_ms=50).run(3)
    assert loose > 500
    assert tight < 50


def test_clockworks_goodput_is_good_with_a_tight_slo_too() -> None:
    assert ClosedLoop("clockwork", num_models=10, clients=16, slo_ms=50).run(3) > 500


@pytest.mark.parametrize(
    ("policy", "batching", "delay_ms"),
    [("clipper", "aimd", 0), ("clipper", "quantile", 7), ("infaas", "aimd", 0)],
)
def test_every_request_runs_and_late_ones_count_as_late(
    policy: str, batching: str, delay_ms: int
) -> None:
    loop = ClosedLoop(
        policy,
        num_models=10,
        clients=16,
        slo_ms=50,
        batching=batching,
        batch_delay_ns=delay_ms * MS,
    )
    loop.run(2)
    loop.cluster.run(loop.cluster.now_ns + 1000 * MS)
    assert set(loop.cluster.refusal_counts()) == {Refusal.LATE.value}
    assert loop.scheduler.num_open_requests == 0


@pytest.mark.parametrize(
    ("batching", "least", "less_than"),
    [("aimd", 4 * AIMD_DECREASE, 4 + AIMD_INCREASE), ("quantile", 2, 4)],
)
def test_clipper_grows_its_batches_while_the_slo_holds_and_shrinks_them_when_not(
    batching: str, least: float, less_than: float
) -> None:
    caps = ClipperCaps(batching)
    loop = ClosedLoop("clipper", num_models=1, clients=32, slo_ms=500, kind=clipper_with(caps))
    loop.run(1)
    (container,) = caps.batchings.values()
    assert container.cap == 16
    loop.slo_ns = 5 * MS  # four rows take 6 ms, two take 4
    loop.run(2)
    assert least <= container.cap < less_than


def test_aimd_learns_from_batches_that_fill_its_cap_only() -> None:
    aimd = Aimd((1, 2, 4, 8))
    aimd.learn(1, 10, 100)
    assert aimd.cap == 1 + AIMD_INCREASE
    aimd.learn(1, 10, 100)  # two rows would have fitted
    aimd.learn(1, 200, 100)
    assert aimd.cap == 1 + AIMD_INCREASE
    aimd.learn(2, 200, 100)
    assert aimd.cap == (1 + AIMD_INCREASE) * AIMD_DECREASE
    for _ in range(9):
        aimd.learn(8, 10, 100)
    assert aimd.cap == 8
    assert Aimd((512,)).cap == 512  # no smaller batch exists


def test_without_batching_rows_go_one_by_one() -> None:
    loop = ClosedLoop("clipper", num_models=1, clients=8, slo_ms=500, batching="none")
    loop.run(1)
    assert {answer.batch_size for answer in loop.cluster.answers.values()} == {1}


def test_quantile_regression_finds_the_line_that_a_share_of_the_points_is_above() -> None:
    # 2 ms and 3 ms per row; every tenth point takes 5 ms more.
    points = [
        (size, (2 + 3 * size) * MS + (5 * MS if index == 0 else 0))
        for size in (1, 2, 4, 8)
        for index in range(10)
    ]
    intercept, slope = fit_quantile(points, 0.8)
    assert intercept == pytest.approx(2 * MS, rel=1e-3)
    assert slope == pytest.approx(3 * MS, rel=1e-3)
    intercept, slope = fit_quantile(points, 0.99)
    assert intercept == pytest.approx(7 * MS, rel=1e-3)
    assert slope == pytest.approx(3 * MS, rel=1e-3)
    assert fit_quantile([(4, 7), (4, 9)]) == (9, 0)


def test_quantile_regression_caps_batches_where_the_line_meets_the_slo_and_follows_it() -> None:
    regression = QuantileRegression((1, 2, 4, 8, 16))
    caps = [regression.cap]

    def serve(num: int, per_row_ms: float) -> None:
        for _ in range(num):
            rows = max(size for size in (1, 2, 4, 8, 16) if size <= regression.cap)
            regression.learn(rows, round((2 + per_row_ms * rows) * MS), 20 * MS)
            caps.append(regression.cap)

    serve(40, per_row_ms=2)
    assert max(b / a for a, b in pairwise(caps)) <= 2  # one compiled size at a time
    assert regression.cap == pytest.approx(9, rel=1e-2)
    serve(40, per_row_ms=4)
    assert 4 <= regression.cap < 8
    serve(800, per_row_ms=1)  # what was known of other sizes is stale by then
    assert regression.cap == pytest.approx(16, rel=0.2)


def test_a_batch_that_is_not_full_is_held_back_for_as_long_as_was_said() -> None:
    served = models(1)
    caps = ClipperCaps("aimd")
    scheduler = Scheduler(SchedulerConfig(policy="clipper"), clipper_with(caps, 2 * MS))
    cluster = SimulatedCluster(scheduler, served)
    cluster.add_worker("gpu0", 200)
    model_id = served[0].model_id
    # A cold start, and one answer after which the cap is three: batches of two are full.
    cluster.request(model_id, 500 * MS)
    cluster.run(cluster.now_ns + 100 * MS)
    (container,) = caps.batchings.values()
    assert container.cap == 3

    def waiting() -> int:
        return scheduler.statistics().num_waiting

    begin_ns = cluster.now_ns
    alone = cluster.request(model_id, 500 * MS)
    cluster.run(begin_ns + 2 * MS - 1)
    assert waiting() == 1
    cluster.run(begin_ns + 2 * MS)
    assert waiting() == 0
    cluster.run(begin_ns + 50 * MS)
    assert alone in cluster.answers
    begin_ns = cluster.now_ns
    cluster.request(model_id, 500 * MS)
    cluster.run(begin_ns + MS)
    assert waiting() == 1
    cluster.request(model_id, 500 * MS)
    assert waiting() == 0  # full: no reason to wait


def test_infaas_takes_the_most_efficient_batch_whose_profile_is_within_the_slo() -> None:
    loop = ClosedLoop("infaas", num_models=1, clients=32, slo_ms=11)
    loop.run(1)
    assert {answer.batch_size for answer in loop.cluster.answers.values()} <= {1, 2, 4, 8}


def test_infaas_adds_a_replica_for_a_model_that_is_late() -> None:
    loop = ClosedLoop("infaas", num_models=1, clients=64, slo_ms=40, gpus=2)
    loop.run(3)
    (model,) = loop.scheduler.statistics().models
    assert len(model.resident_on) == 2


def test_infaas_loads_the_replica_it_wants_though_nothing_waits_any_more() -> None:
    """Each client asks alone, so that no queue is left when its answer comes late."""
    config = SchedulerConfig(policy="infaas", fill_free_pages=False)
    scheduler = Scheduler(config)
    cluster = SimulatedCluster(scheduler, models(1))
    for index in range(2):
        cluster.add_worker(f"gpu{index}", 200)
    for _ in range(3):
        cluster.request(ModelId("m0"), 2 * MS)  # one row takes 3 ms
        cluster.run(cluster.now_ns + 1500 * MS)
    (model,) = scheduler.statistics().models
    assert len(model.resident_on) == 2


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="policy is 'best', expected one of clockwork, edf_mh"):
        Scheduler(SchedulerConfig(policy="best"))
    with pytest.raises(ConfigError, match="batching is 'some', expected one of aimd, quantile"):
        SchedulerConfig(batching="some")
