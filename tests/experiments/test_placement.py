"""Placement in the simulator: unlike workers, timers, hot models; shares with generous room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import EdfMhConfig, SchedulerConfig
from experiments.bounds import BoundProblem, Cost, memory_bound, residency_bound
from experiments.bounds.simulated import problem_of
from experiments.policies.unseen import FAMILIES
from experiments.policies.unseen.timers import timers
from experiments.simulator import Case, Summary, run


def summary_of(case: Case, **pieces: bool) -> Summary:
    scheduler = SchedulerConfig(policy="edf_mh", edf_mh=EdfMhConfig(**pieces))  # type: ignore[arg-type]
    return run(replace(case, scheduler=scheduler)).summary


def answered_share(case: Case, **pieces: bool) -> float:
    total = summary_of(case, **pieces).total()
    return total.answered / total.arrived


@pytest.fixture(scope="module")
def periodic() -> Case:
    """150 models asked once a second, of which a quarter fits."""
    return timers(1, num_models=150, jitter_ms=2, slo_ms=30, pages=280, seconds=8)


def test_on_kinds_that_differ_by_one_factor_the_schedule_is_the_same() -> None:
    case = replace(FAMILIES["unlike_factor"].case(1), duration_ns=NS_PER_S)
    assert summary_of(case) == summary_of(case, suits=False)


@pytest.mark.long
def test_models_are_left_to_the_kinds_that_suit_them() -> None:
    case = replace(FAMILIES["unlike_nine"].case(1), duration_ns=2 * NS_PER_S)
    steered, other = summary_of(case).total(), summary_of(case, suits=False).total()
    assert steered.answered >= 0.99 * steered.arrived
    assert other.answered < 0.97 * other.arrived
    assert steered.latency_ns(50) < other.latency_ns(50) / 3


def test_who_knows_the_period_keeps_what_is_asked_next(periodic: Case) -> None:
    known = answered_share(periodic)
    assert known > answered_share(periodic, prefetch=False) - 0.01
    assert known > 1.15 * answered_share(periodic, next_use=False)


def test_pages_that_no_model_fits_in_and_those_of_a_running_load_keep_nothing() -> None:
    """Two models asked in turn, of which one fits, and which take long to load."""
    problem = BoundProblem(
        arrival_ns=np.arange(50) * 2 * NS_PER_MS,
        model=np.arange(50) % 2,
        slo_ns=np.full(50, 2 * NS_PER_MS),
        costs=[Cost(exec_ns={1: NS_PER_MS}, load_ns=10 * NS_PER_MS, num_pages=7)] * 2,
        pages_per_gpu=13,
    )
    # To keep one answers 25. A model is asked again 3 ms after the latest begin: in 100 ms 7 pages keep 33.
    assert residency_bound(problem) == 33
    # Thirteen pages that all could be used would keep all of them.
    assert residency_bound(replace(problem, pages_per_gpu=14)) == 50


def test_no_policy_beats_the_residency_bound_which_is_looser_than_the_memory_bound(
    periodic: Case,
) -> None:
    problem = problem_of(periodic, 0)
    bound = residency_bound(problem)
    assert summary_of(periodic).total().answered <= bound <= len(problem)
    short = problem.window(0, 2 * NS_PER_S)
    assert memory_bound(short) <= residency_bound(short)
