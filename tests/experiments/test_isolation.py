"""A flood takes what others leave: short simulations of the unseen families of floods and small clients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core import EdfMhConfig, SchedulerConfig
from experiments.policies.load import Load
from experiments.policies.scenarios import scenarios
from experiments.policies.unseen import FAMILIES
from experiments.simulator import Case, run

CHOSEN = ("flood_tenant", "flood_shared", "flood_gpus", "flood_bursts", "flood_cold", "flood_names")


def answered(case: Case, among: str, *, isolation: float) -> int:
    """Answers to those whose tenant, or model where there are no tenants, has such a name."""
    asking = [name for name in case.workload.tenants if name] or case.workload.models
    done = run(
        replace(
            case,
            scheduler=SchedulerConfig(policy="edf_mh", edf_mh=EdfMhConfig(isolation=isolation)),
        ),
        groups={name: among for name in asking if name.startswith(among)},
    )
    return done.groups[among].total().answered


def innocent_share(family: Load, *, isolation: float) -> float:
    assert family.without is not None
    beside = answered(family.case(1), "innocent", isolation=isolation)
    return beside / answered(family.without(1), "innocent", isolation=isolation)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_innocent_keep_what_they_have_without_the_flood(name: str) -> None:
    assert innocent_share(FAMILIES[name], isolation=1.0) >= 0.85


def test_without_isolation_a_flood_takes_nearly_everything() -> None:
    assert innocent_share(FAMILIES["flood_tenant"], isolation=0.0) < 0.3


@pytest.mark.parametrize("name", ["flood_tenant", "flood_shared"])
def test_a_flooding_tenant_gets_no_more_than_eight_others_together(name: str) -> None:
    """It asks for four times what they do, and none of them asks for more than a ninth of what there is."""
    case = FAMILIES[name].case(1)
    flood, others = (answered(case, who, isolation=1.0) for who in ("flood", "innocent"))
    assert flood < others
    assert answered(case, "flood", isolation=0.0) > 4 * answered(case, "innocent", isolation=0.0)


@pytest.mark.long
def test_where_nobody_floods_isolation_costs_a_zoo_next_to_nothing() -> None:
    (scenario,) = (each for each in scenarios() if each.key == "zoo_zoo600_slo100")
    case = scenario.case(1)
    alone, isolated = (
        run(
            replace(
                case,
                scheduler=SchedulerConfig(edf_mh=EdfMhConfig(isolation=isolation)),
            )
        ).summary.total()
        for isolation in (0.0, 1.0)
    )
    assert isolated.answered > alone.answered - 0.01 * alone.arrived


def test_small_clients_are_not_starved_beside_a_large_one() -> None:
    case = FAMILIES["small_clients_few"].case(1)
    assert answered(case, "small", isolation=1.0) > 3 * answered(case, "small", isolation=0.0)


def test_what_the_flood_is_refused_is_refused_at_once_where_a_model_is_shared() -> None:
    case = replace(FAMILIES["flood_shared"].case(1), scheduler=SchedulerConfig(policy="edf_mh"))
    total = run(case).summary.total()
    assert total.num_refused > 1000
    assert total.refusal_ns(50) < 5_000_000
