"""A flood takes what others leave: short simulations of the unseen families of floods and small clients."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace

import pytest

from clockwright.units import NS_PER_S
from controller.core import EdfMhConfig, SchedulerConfig
from experiments.policies.scenarios import scenarios
from experiments.policies.unseen import FAMILIES
from experiments.simulator import Case, run

CHOSEN = ("flood_tenant", "flood_shared", "flood_bursts", "flood_cold", "flood_names")


def played(case: Case, isolation: float) -> Counter[str]:
    """Answers by the first part of the tenant's name, or the model's where there are no tenants."""
    asking = [name for name in case.workload.tenants if name] or case.workload.models
    scheduler = SchedulerConfig(policy="edf_mh", edf_mh=EdfMhConfig(isolation=isolation))
    groups = {name: re.split(r"\W|_", name)[0] for name in asking}
    done = run(replace(case, scheduler=scheduler), groups=groups)
    return Counter({name: group.total().answered for name, group in done.groups.items()})


@functools.cache
def answered(name: str, isolation: float) -> Counter[str]:
    return played(FAMILIES[name].case(1), isolation)


def innocent_share(name: str, *, isolation: float) -> float:
    without = FAMILIES[name].without
    assert without is not None
    return answered(name, isolation)["innocent"] / played(without(1), isolation)["innocent"]


@pytest.mark.parametrize("name", [*CHOSEN, pytest.param("flood_gpus", marks=pytest.mark.long)])
def test_the_innocent_keep_what_they_have_without_the_flood(name: str) -> None:
    assert innocent_share(name, isolation=1.0) >= 0.85


def test_without_isolation_a_flood_takes_nearly_everything() -> None:
    assert innocent_share("flood_tenant", isolation=0.0) < 0.3


@pytest.mark.parametrize("name", ["flood_tenant", "flood_shared"])
def test_a_flooding_tenant_gets_no_more_than_eight_others_together(name: str) -> None:
    """It asks for four times what they do, and none of them asks for more than a ninth of what there is."""
    isolated, alone = answered(name, 1.0), answered(name, 0.0)
    assert 0 < isolated["flood"] < isolated["innocent"]
    assert alone["flood"] > 4 * alone["innocent"]


def test_beside_large_clients_no_policy_isolates_the_small_for_two_points() -> None:
    """`isolation_cost_points_small_clients`, by GPU time alone."""
    case = FAMILIES["small_clients"].case(1)
    loops = case.workload.closed_loops
    large, small = loops[0], loops[1:]
    exec_ns = case.cluster.models[0].row.exec_ns
    # Two clients of a model fill no more than a batch of two.
    small_ns = min(exec_ns[size] / size for size in exec_ns if size <= small[0].concurrency)
    large_ns = min(exec_ns[size] / size for size in exec_ns)
    assert large.concurrency >= max(exec_ns)
    # Each client asks at least once in an SLO.
    asked_rps = sum(loop.concurrency * NS_PER_S / loop.slo_ns for loop in small)
    most_rps = case.cluster.num_workers * NS_PER_S / large_ns

    def of_most(share: float) -> float:
        """The most answers, as a part of what is possible, where the small have such a share of theirs."""
        return 1 - share * asked_rps * (small_ns / large_ns - 1) / most_rps

    # Without isolation they are 95 % of it.
    assert of_most(0.85) < 0.71
    assert of_most(0.2) < 0.935


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
    isolated, alone = (
        answered("small_clients_few", isolation)["small"] for isolation in (1.0, 0.0)
    )
    assert isolated > 3 * alone


def test_small_clients_get_no_less_with_more_isolation_and_the_large_no_more() -> None:
    curve = [answered("small_clients_few", isolation) for isolation in (0.0, 0.25, 0.5, 0.75, 1.0)]
    small = [answers["small"] for answers in curve]
    large = [answers["large"] for answers in curve]
    assert small == sorted(small)
    assert large == sorted(large, reverse=True)


def test_what_the_flood_is_refused_is_refused_at_once_where_a_model_is_shared() -> None:
    case = replace(FAMILIES["flood_shared"].case(1), scheduler=SchedulerConfig(policy="edf_mh"))
    total = run(case).summary.total()
    assert total.num_refused > 1000
    assert total.refusal_ns(50) < 5_000_000
