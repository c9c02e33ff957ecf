"""The scenarios that policies are compared on, and the table made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.figures import ablation, edf_mh
from experiments.figures.edf_mh import COMPARED, Row, key_of
from experiments.figures.scenarios import (
    Outcome,
    Scenario,
    bound_of,
    closed,
    measure,
    poisson,
    pressed,
    resnets,
    scenarios,
    shared,
    zoo,
)
from experiments.figures.study import POLICIES

OVERLOAD = Scenario(
    "small",
    "overload",
    lambda seed: poisson(
        resnets(12),
        seed,
        num_gpus=2,
        rate_rps=1800,
        slo_ns=25 * NS_PER_MS,
        duration_ns=2 * NS_PER_S,
    ),
    NS_PER_S,
)
PRESSED = Scenario(
    "small",
    "zoo",
    lambda seed: pressed(
        zoo(60, seed),
        seed,
        zipf=0.8,
        num_gpus=1,
        num_pages=100,
        rate_rps=300,
        slo_ns=100 * NS_PER_MS,
        duration_ns=2 * NS_PER_S,
    ),
    NS_PER_S,
    bound="memory",
)
CLOSED = Scenario(
    "small",
    "fig5",
    lambda seed: closed(seed, slo_ms=50, duration_ns=2 * NS_PER_S),
    NS_PER_S,
    bound="rate",
)


@pytest.mark.parametrize("scenario", [OVERLOAD, PRESSED, CLOSED], ids=key_of)
def test_no_policy_is_above_the_bound_and_edf_mh_is_nearer_to_it(scenario: Scenario) -> None:
    bound = bound_of(scenario, 1)
    outcomes = {
        name: measure(scenario, POLICIES[name], 1, bound=bound) for name in ("clockwork", "edf_mh")
    }
    for outcome in outcomes.values():
        assert 0 < outcome.answered <= bound
    assert outcomes["edf_mh"].bound_share > 0.85
    assert outcomes["edf_mh"].bound_share > outcomes["clockwork"].bound_share + 0.05


def test_batch_clients_are_counted_apart_and_leave_the_others_in_time() -> None:
    scenario = Scenario(
        "small",
        "fig7_right",
        lambda seed: shared(seed, multiple=5.0, duration_ns=3 * NS_PER_S),
        NS_PER_S,
    )
    outcome = measure(scenario, POLICIES["edf_mh"], 1)
    assert outcome.arrived == pytest.approx(2 * 1200, rel=0.1)
    assert outcome.share > 0.97
    assert outcome.batch_rps > 1000


def test_every_scenario_has_a_name_of_its_own() -> None:
    keys = [key_of(scenario) for scenario in scenarios()]
    assert len(set(keys)) == len(keys)
    for prefix in ablation.SCENARIOS:
        assert any(key.startswith(prefix) for key in keys), prefix


def outcome(answered: int, **changes: float) -> Outcome:
    whole = Outcome(
        arrived=100,
        answered=answered,
        late=1,
        bound=90,
        cold=0,
        seconds=2.0,
        p5_model_share=0.5,
        worst_model_share=0.4,
        p50_ms=5.0,
        batch_rps=10.0,
        exec_busy=0.9,
        mean_batch_size=2.0,
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_the_worst_difference_is_found_over_all_scenarios() -> None:
    closed_loop = replace(CLOSED, name="slo10")
    answered = {
        ("overload_small", "clockwork"): 50,
        ("overload_small", "clockwork1ms"): 60,
        ("overload_small", "edf_mh"): 70,
        ("fig5_slo10", "clockwork"): 45,
        ("fig5_slo10", "clockwork1ms"): 54,
        ("fig5_slo10", "edf_mh"): 36,
    }
    rows = [
        Row(
            scenario=scenario,
            policy=policy,
            outcomes=(outcome(answered[key_of(scenario), policy]),),
        )
        for scenario in (OVERLOAD, closed_loop)
        for policy in COMPARED
    ]
    figures = edf_mh.figures_of(rows)
    assert figures["worst_vs_clockwork_points"] == pytest.approx(-10)  # 36 and 45 of 90
    assert figures["worst_vs_clockwork1ms_points"] == pytest.approx(-20)
    assert figures["overload_share_min"] == pytest.approx(70 / 90)
    assert figures["fig5_slo10_rps"] == 18
    assert figures["p5_model_share"] == 0.5


def test_the_table_and_the_figures_are_written(tmp_path: Path) -> None:
    setting = edf_mh.Setting(seeds=(1,), only=("fig7_left_n12_r600",), bench=False)
    rows = edf_mh.produce(setting, tmp_path)
    assert [row.policy for row in rows] == list(COMPARED)
    figures = json.loads((tmp_path / "edf_mh.json").read_text())["figures"]
    assert figures["worst_vs_clockwork_points"] > -0.2
    for row in rows:
        key = f"{row.policy}_{key_of(row.scenario)}"
        assert 0 < figures[f"{key}_bound_share"] <= 1
    lines = (tmp_path / "edf_mh.csv").read_text().splitlines()
    assert len(lines) == 1 + len(rows)
