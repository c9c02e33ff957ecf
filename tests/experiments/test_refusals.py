"""Under overload with many models refusals leave at once, goodput hardly falls, and no burst is refused in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clockwright.units import NS_PER_MS
from controller.core import EdfMhConfig, SchedulerConfig
from experiments.policies.unseen import FAMILIES
from experiments.simulator import Case
from experiments.simulator.run import Run, run

SLO_NS = 100 * NS_PER_MS
BURSTS = [name for name in FAMILIES if name.startswith("burst_")]


def case_of(name: str) -> Case:
    return FAMILIES[name].case(1)


def under(case: Case, policy: str = "edf_mh", **pieces: float) -> Run:
    config = SchedulerConfig(policy=policy, edf_mh=EdfMhConfig(**pieces))  # type: ignore[arg-type]
    return run(replace(case, scheduler=config), bucket_ns=SLO_NS)


@pytest.mark.parametrize(
    "name",
    [
        "refusal_15",
        pytest.param("refusal_15_deep", marks=pytest.mark.long),
        pytest.param("refusal_600", marks=pytest.mark.long),
    ],
)
def test_most_refusals_leave_at_once_however_many_models_there_are(name: str) -> None:
    case = case_of(name)
    waiting, gated = under(case, at_once=0.0), under(case, at_once=0.62)
    assert waiting.summary.total(5 * SLO_NS).refusal_ns(50) > 0.5 * SLO_NS
    assert gated.summary.total(5 * SLO_NS).refusal_ns(50) < 0.1 * SLO_NS
    lost = waiting.summary.total().answered - gated.summary.total().answered
    assert lost < 0.025 * waiting.num_requests


def test_models_are_closed_in_turn_so_that_each_is_served() -> None:
    case = case_of("refusal_15")
    groups = {str(model.model_id): str(model.model_id) for model in case.cluster.models}
    done = run(replace(case, scheduler=SchedulerConfig(policy="edf_mh")), groups=groups)
    shares = [group.total().answered / group.total().arrived for group in done.groups.values()]
    assert min(shares) > 0.7 * sum(shares) / len(shares)


def test_what_is_calm_is_not_refused() -> None:
    """The second before a load that triples, and the one after it, lose next to nothing once what waits is served."""
    done = under(case_of("refusal_step"), at_once=0.62)
    assert done.summary.total(0, 9 * SLO_NS).num_refused <= 5
    assert done.summary.total(25 * SLO_NS, 30 * SLO_NS).num_refused <= 5


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
@pytest.mark.parametrize("name", BURSTS)
def test_a_burst_that_idle_workers_can_serve_is_served(name: str, policy: str) -> None:
    assert under(case_of(name), policy).summary.total().num_refused == 0
