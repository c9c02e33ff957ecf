"""Slow steps, wrong profiles and batch-averse networks: what they cost, on short simulations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core import EdfMhConfig, SchedulerConfig
from experiments.policies.load import Load
from experiments.policies.unseen import FAMILIES
from experiments.simulator import Case, run

#: Long enough to lose every size that can be lost.
SHORT_NS = 1_500_000_000


def answered(case: Case, scheduler: SchedulerConfig) -> float:
    """Share of the requests that were answered in time."""
    total = run(replace(case, duration_ns=SHORT_NS, scheduler=scheduler)).summary.total()
    return total.answered / total.arrived


def share(family: Load, policy: str) -> float:
    """Answers beside those of the same load without the fault."""
    assert family.without is not None
    scheduler = SchedulerConfig(policy=policy)
    return answered(family.case(1), scheduler) / answered(family.without(1), scheduler)


@pytest.mark.parametrize("name", ["spikes_busy", "spikes_x5"])
def test_slow_steps_cost_little_more_than_their_own_answers(name: str) -> None:
    assert share(FAMILIES[name], "edf_mh") > 0.92


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
@pytest.mark.parametrize("name", ["profile_long", "profile_hole", "profile_tenth"])
def test_wrong_profiles_are_found_out_within_a_moment(name: str, policy: str) -> None:
    assert share(FAMILIES[name], policy) > 0.9


def test_where_batches_cost_more_than_they_bring_the_densest_size_answers_most() -> None:
    case = FAMILIES["averse_130"].case(1)
    densest = answered(case, SchedulerConfig(policy="edf_mh"))
    largest = answered(case, SchedulerConfig(policy="edf_mh", edf_mh=EdfMhConfig(densest=False)))
    assert densest > 1.1 * largest
