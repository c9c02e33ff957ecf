"""The scenarios that policies are compared on, and the table made of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US
from experiments.clockwork_paper import azure_replay, fig5, fig6, fig7, fig9, scale
from experiments.clockwork_paper.cases import closed
from experiments.policies import ablation, edf_mh, floors
from experiments.policies.contest import Contender, Outcome, Row, Setting, measure, run_all
from experiments.policies.edf_mh import COMPARED
from experiments.policies.floors import FORMS, SCENARIOS
from experiments.policies.load import Load
from experiments.policies.scenarios import (
    azure,
    further_scenarios,
    larger,
    named,
    ramp,
    scenarios,
    shared,
)
from experiments.simulator import Case
from experiments.study.aims import limit_of
from experiments.study.compared import POLICIES
from modelzoo.profile import load_profile

OVERLOAD, _, CLOSED = SCENARIOS


def test_no_policy_is_above_the_bound_and_edf_mh_is_nearer_to_it(tmp_path: Path) -> None:
    outcomes: dict[tuple[str, str], Outcome] = FORMS["scenarios"](tmp_path)
    assert floors.faults("scenarios", tmp_path) == []
    for scenario in SCENARIOS:
        theirs, ours = (outcomes[scenario.key, policy] for policy in ("clockwork", "edf_mh"))
        for outcome in (theirs, ours):
            assert 0 < outcome.answered <= outcome.bound
        assert ours.bound_share > theirs.bound_share + 0.05


@pytest.mark.long
def test_a_device_that_takes_a_moment_to_begin_costs_no_more_than_that_moment() -> None:
    def slow_to_begin(seed: int) -> Case:
        case = closed(seed, slo_ms=10, duration_ns=2 * NS_PER_S)
        return replace(case, cluster=replace(case.cluster, start_delay_ns=60 * NS_PER_US))

    prompt = replace(CLOSED, case=lambda seed: closed(seed, slo_ms=10, duration_ns=2 * NS_PER_S))
    shares = [
        measure(scenario, POLICIES["edf_mh"], 1).goodput_rps
        for scenario in (prompt, replace(CLOSED, case=slow_to_begin))
    ]
    # 60 us of the 4 ms that a batch takes, and of the 10 that it has.
    assert shares[1] > 0.95 * shares[0]


def test_inputs_that_take_long_to_be_copied_leave_no_gap_between_full_batches() -> None:
    scenario = replace(CLOSED, case=lambda seed: closed(seed, slo_ms=500, duration_ns=3 * NS_PER_S))
    outcome = measure(scenario, POLICIES["edf_mh"], 1)
    # 0.8 ms for the inputs of 16, beside 16.6 ms of EXEC.
    assert outcome.mean_batch_size > 15.9
    assert outcome.exec_busy > 0.995


def test_batch_clients_are_counted_apart_and_leave_the_others_in_time() -> None:
    case = partial(shared, num_batch=12, concurrency=16, multiple=5.0, seconds=3)
    scenario = Load("small", "fig7_right", case, NS_PER_S)
    outcome = measure(scenario, POLICIES["edf_mh"], 1)
    assert outcome.asked == pytest.approx(2 * 1200, rel=0.1)
    assert outcome.share > 0.97
    assert outcome.batch_rps > 1000


def test_every_scenario_has_a_name_of_its_own() -> None:
    keys = [scenario.key for scenario in (*scenarios(), *further_scenarios())]
    assert len(set(keys)) == len(keys)
    for contender in ablation.pieces():
        for prefix in contender.only:
            assert any(key.startswith(prefix) for key in keys), (contender.name, prefix)


def test_every_case_of_the_paper_is_among_the_scenarios() -> None:
    groups = Counter(scenario.group for scenario in scenarios())
    assert groups["fig5"] == len(fig5.Setting().slos_ms)
    seven = fig7.Setting()
    assert groups["fig7_left"] == (len(seven.nums_models) * len(seven.rates_rps) * seven.num_stages)
    assert groups["fig7_right"] == len(seven.scenarios) * seven.num_stages
    assert groups["scale"] == sum(
        len(size.slos_ms) for size in scale.Setting().sizes if not size.costs.charged
    )
    keys = {scenario.key for scenario in scenarios()}
    assert {f"azure_x1_{model.name}" for model in fig9.NOISE_MODELS} <= keys
    assert "fig6_ramp" in keys


def test_the_ramp_ends_with_all_models_as_figure_6_does() -> None:
    case = ramp(1)
    assert len(case.workload.models) == fig6.Setting().num_models + 1
    last_s = case.workload.expected_requests(case.duration_ns - NS_PER_S, case.duration_ns)
    assert last_s == pytest.approx(fig6.MAJOR_RPS + fig6.MINOR_RPS)


def test_a_stretch_of_the_azure_replay_has_the_full_hour_in_it() -> None:
    case = azure(1, rate=1.5, noise="noisy", warmup_s=5, measured_s=20)
    assert case.duration_ns == 25 * NS_PER_S
    assert case.faults.slow_probability
    hour_ns = 10 * NS_PER_S
    before, after = (
        case.workload.expected_requests(begin_ns, begin_ns + 5 * NS_PER_S)
        for begin_ns in (hour_ns - 5 * NS_PER_S, hour_ns)
    )
    assert after > before
    assert after / 5 > 1.5 * azure_replay.Setting().rate_rps


def test_a_line_of_the_scale_table_has_its_gpus_and_begins_before_the_hour() -> None:
    case = larger(1, num_gpus=150, slo_ms=25, warmup_s=1, measured_s=1)
    assert case.cluster.num_workers == 150
    assert case.duration_ns == 2 * NS_PER_S
    assert {source.slo_ns for source in case.workload.sources} == {25 * NS_PER_MS}


def outcome(answered: int, **changes: float) -> Outcome:
    whole = Outcome(
        asked_by={"model": 100},
        answered_by={"model": answered},
        refused={"LATE": 1},
        bound=90,
        seconds=2.0,
        p50_ms=5.0,
        exec_busy=0.9,
        load_busy=0.1,
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
        Row(load=scenario, policy=policy, outcomes=(outcome(answered[scenario.key, policy]),))
        for scenario in (OVERLOAD, closed_loop)
        for policy in COMPARED
    ]
    figures = edf_mh.figures_of(rows)
    assert figures["worst_vs_clockwork_points"] == pytest.approx(-10)  # 36 and 45 of 90
    assert figures["worst_vs_clockwork1ms_points"] == pytest.approx(-20)
    assert figures["overload_share_min"] == pytest.approx(70 / 90)
    assert figures["fig5_slo10_rps"] == 18
    assert figures["p5_model_share"] == 0.7
    assert figures["p5_model_share_of_bound"] == pytest.approx(0.7 / 0.9)


def test_latency_is_compared_where_gpus_are_idle_and_told_apart_where_answers_differ() -> None:
    def rows_of(
        name: str, busy: float, answered: int, p50_ms: float, loading: float = 0.0
    ) -> list[Row]:
        scenario = replace(OVERLOAD, name=name)
        return [
            Row(
                load=scenario,
                policy=policy,
                outcomes=(outcome(number, exec_busy=busy, load_busy=loading, p50_ms=ms),),
            )
            for policy, number, ms in (
                ("clockwork", answered, 10.0),
                ("clockwork1ms", answered, 10.0),
                ("edf_mh", answered, p50_ms),
            )
        ]

    rows = [
        *rows_of("busy", busy=0.9, answered=100, p50_ms=90.0),
        *rows_of("loading", busy=0.5, answered=100, p50_ms=90.0, loading=0.8),
        *rows_of("short", busy=0.5, answered=60, p50_ms=20.0),
        *rows_of("idle", busy=0.5, answered=100, p50_ms=8.0),
    ]
    figures = edf_mh.figures_of(rows)
    assert figures["p50_ratio_max_at_low_utilisation"] == pytest.approx(2.0)
    assert figures["p50_ratio_mean_at_low_utilisation"] == pytest.approx(1.4)
    assert figures["p50_ratio_max_at_low_utilisation_all_answered"] == pytest.approx(0.8)


def test_no_aim_is_more_than_the_densest_batch_that_fits_can_give() -> None:
    exec_ns = load_profile("table1").row_for("resnet50_v1b").exec_ns
    # Input, output and the way there and back take more than 0.3 of the 10 ms.
    dense = max(size / ns for size, ns in exec_ns.items() if ns + 300_000 <= 10 * NS_PER_MS)
    assert limit_of("edf_mh", "fig5_slo10_rps") == pytest.approx(0.99 * dense * NS_PER_S, rel=0.001)


def test_the_table_and_the_figures_are_written(tmp_path: Path) -> None:
    rows: list[Row] = FORMS["edf_mh"](tmp_path)
    assert floors.faults("edf_mh", tmp_path) == []
    assert [row.policy for row in rows] == list(COMPARED)
    figures = json.loads((tmp_path / "edf_mh.json").read_text())["figures"]
    assert figures["worst_vs_clockwork_points"] > -0.2
    for row in rows:
        key = f"{row.policy}_{row.load.key}"
        assert 0 < figures[f"{key}_bound_share"] <= 1
    lines = (tmp_path / "edf_mh.csv").read_text().splitlines()
    assert len(lines) == 1 + len(rows)


def test_an_ablation_needs_no_bounds_but_those_of_closed_loops() -> None:
    only = ("fig5_slo250", "fig7_left_n12_r600_x1.5")
    setting = Setting(seeds=(1,), processes=1, bounds=False)
    loads = [scenario for scenario in scenarios() if scenario.key.startswith(only)]
    rows = list(run_all(loads, [Contender(name="all", config=POLICIES["edf_mh"])], setting, named))
    assert {row.load.group: row.outcomes[0].bound > 0 for row in rows} == {
        "fig5": True,
        "fig7_left": False,
    }
    for row in rows:
        assert len(row.outcomes) == 1
        assert 0 < row.points < 100


def test_a_piece_s_worth_is_what_is_lost_without_it(tmp_path: Path) -> None:
    rows: list[Row] = FORMS["ablation"](tmp_path)
    assert floors.faults("ablation", tmp_path) == []
    assert [row.policy for row in rows] == ["all", "next_use", "prefetch"]
    figures = json.loads((tmp_path / "ablation.json").read_text())["figures"]
    whole = figures["all_unseen_random_goodput_pct"]
    for piece in ("next_use", "prefetch"):
        without = figures[f"{piece}_unseen_random_goodput_pct"]
        assert figures[f"{piece}_unseen_random_worth_points"] == pytest.approx(whole - without)
