"""How the reactive baselines size their batches; what they do with them is in transcripts and in Figure 5."""

from __future__ import annotations

from itertools import pairwise

import pytest

from clockwright.errors import ConfigError
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


MODEL = HostedModel(ModelId("m"), row("a", pages=7, load_ns=8 * MS, exec_ns=EXEC))


class ClosedLoop:
    """Clients of one model that ask again as soon as they have a response."""

    def __init__(self, *, clients: int, slo_ms: int, kind: PolicyKind) -> None:
        self.scheduler = Scheduler(SchedulerConfig(policy="clipper"), kind)
        self.cluster = SimulatedCluster(self.scheduler, [MODEL])
        self.cluster.add_worker("gpu0", 200)
        self.slo_ns = slo_ms * MS
        self.open = [self.ask() for _ in range(clients)]

    def ask(self) -> RequestId:
        return self.cluster.request(MODEL.model_id, self.slo_ns)

    def run(self, seconds: int) -> None:
        for _ in range(seconds * 1000):
            self.cluster.run(self.cluster.now_ns + MS)
            self.open = [each if self.cluster.is_open(each) else self.ask() for each in self.open]


def clipper_with(caps: ClipperCaps) -> PolicyKind:
    """Clipper whose caps the test can see."""
    return PolicyKind(lambda config: ReactivePolicy(caps), Traits())


@pytest.mark.parametrize(
    ("batching", "least", "less_than"),
    [("aimd", 4 * AIMD_DECREASE, 4 + AIMD_INCREASE), ("quantile", 2, 4)],
)
def test_clipper_grows_its_batches_while_the_slo_holds_and_shrinks_them_when_not(
    batching: str, least: float, less_than: float
) -> None:
    caps = ClipperCaps(batching)
    loop = ClosedLoop(clients=32, slo_ms=500, kind=clipper_with(caps))
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


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="policy is 'best', expected one of clockwork, edf_mh"):
        Scheduler(SchedulerConfig(policy="best"))
    with pytest.raises(ConfigError, match="batching is 'some', expected one of aimd, quantile"):
        SchedulerConfig(batching="some")
