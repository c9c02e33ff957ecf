"""Under overload each model is served, and neither what is calm nor a burst is refused in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clockwright.units import NS_PER_MS
from controller.core import SchedulerConfig
from experiments.policies.unseen import FAMILIES
from experiments.simulator import Case
from experiments.simulator.run import Run, run

SLO_NS = 100 * NS_PER_MS
BURSTS = [name for name in FAMILIES if name.startswith("burst_")]


def case_of(name: str) -> Case:
    return FAMILIES[name].case(1)


def under(case: Case, policy: str = "edf_mh") -> Run:
    return run(replace(case, scheduler=SchedulerConfig(policy=policy)), bucket_ns=SLO_NS)


def test_under_overload_each_of_many_models_is_served() -> None:
    case = case_of("refusal_15")
    groups = {str(model.model_id): str(model.model_id) for model in case.cluster.models}
    done = run(replace(case, scheduler=SchedulerConfig(policy="edf_mh")), groups=groups)
    shares = [group.total().answered / group.total().arrived for group in done.groups.values()]
    assert min(shares) > 0.7 * sum(shares) / len(shares)


def test_what_is_calm_is_not_refused() -> None:
    """The second before a load that triples, and the one after it, lose next to nothing once what waits is served."""
    done = under(case_of("refusal_step"))
    assert done.summary.total(0, 9 * SLO_NS).num_refused <= 5
    assert done.summary.total(25 * SLO_NS, 30 * SLO_NS).num_refused <= 5


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
@pytest.mark.parametrize("name", BURSTS)
def test_a_burst_that_idle_workers_can_serve_is_served(name: str, policy: str) -> None:
    assert under(case_of(name), policy).summary.total().num_refused == 0
