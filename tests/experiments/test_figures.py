"""A quick variant of every figure: its files, its shape, its bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_S
from experiments.clockwork_paper import (
    fig5,
    fig6,
    fig7,
    fig9,
    scale,
)
from experiments.clockwork_paper.stretch import problems
from experiments.policies import floors
from experiments.policies.floors import (
    COMPARED,
    FORMS,
    QUICK5,
    QUICK6,
    QUICK7,
    QUICK9,
    QUICK_SCALE,
)
from experiments.study.study import StudyRecord, beside_paper, read_recorded
from modelzoo.profile import Noise

Quick5 = tuple[list[fig5.SloPoint], Path]
Quick6 = tuple[list[fig6.Ramp], Path]
Quick7 = tuple[list[fig7.Stages], Path]
Quick9 = tuple[list[fig9.Errors], Path]
QuickScale = tuple[list[scale.ScaleResult], Path]


@pytest.fixture(scope="module")
def quick5(tmp_path_factory: pytest.TempPathFactory) -> Quick5:
    directory = tmp_path_factory.mktemp("fig5")
    return FORMS["fig5"](directory), directory


def _record(quick: tuple[list[Any], Path]) -> StudyRecord:
    (path,) = quick[1].glob("*.json")
    endings = [table.stem.removeprefix(path.stem) for table in quick[1].glob("*.csv")]
    assert path.with_suffix(".png").stat().st_size > 10_000
    return read_recorded(quick[1], path.stem, endings)


def test_no_policy_of_figure_5_beats_its_bound(quick5: Quick5) -> None:
    for point in quick5[0]:
        assert 0 <= point.goodput_rps <= point.bound_rps, point.policy
        assert 0 < point.exec_busy <= 1


def test_at_500_ms_clockwork_and_infaas_are_level_and_at_25_ms_only_clockwork_answers(
    quick5: Quick5,
) -> None:
    goodput = {(point.policy, point.slo_ms): point.goodput_rps for point in quick5[0]}
    assert goodput["infaas", 500] == pytest.approx(goodput["clockwork", 500], rel=0.05)
    assert goodput["clockwork", 500] > 0.9 * quick5[0][-1].bound_rps
    assert goodput["clockwork", 25] > 0.5 * quick5[0][0].bound_rps
    assert goodput["clipper", 25] == goodput["infaas", 25] == 0


def test_figure_5_leaves_numbers_a_table_and_a_picture(quick5: Quick5) -> None:
    points, record = quick5[0], _record(quick5)
    figures = record.figures
    assert figures["clockwork_slo500_goodput_rps"] == points[1].goodput_rps
    assert figures["bound_slo25_goodput_rps"] == points[0].bound_rps
    compared = {row["figure"] for row in record.record["comparison"]}
    assert compared >= {"edf_mh_slo500_goodput_rps", "clipper_collapse_slo_ms"}
    assert figures["clockwork_collapse_slo_ms"] == 25
    assert figures["infaas_collapse_slo_ms"] == 500
    assert len(record.rows) == len(points) == len(QUICK5.policies) * 2
    assert len(record.tables["_cdf"]) == len(points) * len(fig5.PERCENTILES)


def test_latencies_of_clockwork_end_near_the_slo_refusals_included(quick5: Quick5) -> None:
    tight = quick5[0][0]
    assert (tight.policy, tight.slo_ms) == ("clockwork", 25)
    assert list(tight.latency_ms) == sorted(tight.latency_ms)
    # The last client hears a tenth of the SLO before its deadline, which is what is kept free of it.
    assert tight.latency_ms[-1] == pytest.approx(22.5, rel=0.02)


def test_figure_5_says_how_long_refusals_took(quick5: Quick5) -> None:
    points, record = quick5[0], _record(quick5)
    clockwork = next(p for p in points if (p.policy, p.slo_ms) == ("clockwork", 25))
    assert 0 < clockwork.refusal_p50_ms <= clockwork.refusal_p99_ms <= 25.01
    # A policy that refuses nothing tells by answering late.
    infaas = next(p for p in points if (p.policy, p.slo_ms) == ("infaas", 25))
    assert infaas.refusal_p50_ms > 25
    for point in (clockwork, infaas):
        for percent in (50, 99):
            key = f"{point.policy}_slo25_refusal_p{percent}_ms"
            assert record.figures[key] == getattr(point, f"refusal_p{percent}_ms")
    assert all(row["refusal_p50_ms"] <= row["refusal_p99_ms"] for row in record.rows)


@pytest.fixture(scope="module")
def quick7(tmp_path_factory: pytest.TempPathFactory) -> Quick7:
    directory = tmp_path_factory.mktemp("fig7")
    return FORMS["fig7"](directory), directory


def test_no_policy_of_figure_7_beats_its_bound(quick7: Quick7) -> None:
    for point in quick7[0]:
        for stage in point.stages:
            assert 0 <= stage.satisfaction <= stage.bound <= 1, point
            assert 0 <= stage.bc_rps <= stage.bc_bound_rps, point


def test_figure_7_is_met_at_large_slos_and_not_at_the_execution_time_itself(quick7: Quick7) -> None:
    for point in quick7[0]:
        first, *_, last = point.stages
        assert first.satisfaction < fig7.SATISFIED <= last.satisfaction


def test_batch_clients_get_what_is_left_and_more_when_latency_sensitive_ones_are_refused(
    quick7: Quick7,
) -> None:
    for shared in quick7[0]:
        first, *_, last = shared.stages
        if shared.mix.num_bc:
            assert last.bc_rps > 0.5 * last.bc_bound_rps
            if shared.policy == "clockwork":  # edf_mh keeps GPUs free whether or not that helps
                assert first.bc_rps > last.bc_rps
        else:
            assert {stage.bc_rps for stage in shared.stages} == {0.0}


def test_figure_7_leaves_numbers_tables_and_a_picture(quick7: Quick7) -> None:
    points, record = quick7[0], _record(quick7)
    right = [point for point in points if point.mix in QUICK7.right]
    figures = record.figures
    for case in ("n12_r600", "n12_r2400"):
        bound = figures[f"bound_{case}_slo_multiple"]
        assert bound <= figures[f"clockwork_{case}_slo_multiple"]
        assert f"paper_{case}_slo_multiple" in figures
    bound = figures["bound_ls_slo_multiple"]
    assert bound <= figures["clockwork_m0_slo_multiple"] <= figures["clockwork_m12c16_slo_multiple"]
    assert figures["paper_m12c16_slo_multiple"] == 11.4
    assert 0 < figures["clockwork_m12c16_slo50_bc_bound_share_pct"] <= 100
    assert len(record.tables["_left"]) == QUICK7.num_stages * (len(points) - len(right))
    assert len(record.tables["_right"]) == QUICK7.num_stages * len(right)


@pytest.mark.parametrize(
    ("satisfaction", "multiple"),
    [([1.0, 1.0], 1.0), ([1.0, 0.9, 0.99, 1.0], 2.25), ([1.0, 0.98], None)],
)
def test_a_multiple_is_met_only_when_all_above_it_are(
    satisfaction: list[float], multiple: float | None
) -> None:
    assert fig7.lowest_multiple(satisfaction) == multiple


@pytest.fixture(scope="module")
def quick6(tmp_path_factory: pytest.TempPathFactory) -> Quick6:
    directory = tmp_path_factory.mktemp("fig6")
    return FORMS["fig6"](directory), directory


def test_no_policy_of_figure_6_beats_its_bounds(quick6: Quick6) -> None:
    for ramp in quick6[0]:
        answered = zip(*ramp.answered.values(), ramp.bounds, strict=True)
        assert all(0 < major + minor <= bound for major, minor, bound in answered), ramp.policy
        assert all(row[busy] <= 1 for row in ramp.rows for busy in ("exec_busy", "load_busy"))
        assert 0 < ramp.window_answered <= ramp.window_bound


def test_figure_6_goes_from_one_bottleneck_to_the_other(quick6: Quick6) -> None:
    for ramp in quick6[0]:
        lead, first, *_, last = ramp.rows
        assert lead["minor_goodput_rps"] == lead["minor_arrived_rps"]
        assert lead["major_arrived_rps"] == 0
        assert first["exec_busy"] > last["exec_busy"]
        assert last["minor_mean_ms"] < first["minor_mean_ms"]
        assert last["load_busy"] > max(0.9, first["load_busy"])
        assert last["minor_goodput_rps"] > 0.9 * last["minor_arrived_rps"]
        assert last["major_cold_rps"] > 0.5 * last["major_goodput_rps"]
        # 19 instances beside Minor fit: those of the first 19 steps.
        assert ramp.memory_full_ns is not None
        assert 19 * QUICK6.step_ns <= ramp.memory_full_ns < QUICK6.bucket_ns


def test_figure_6_leaves_numbers_a_table_and_a_picture(quick6: Quick6) -> None:
    record = _record(quick6)
    figures = record.figures
    for policy in QUICK6.policies:
        for case in ("end", "all", "window"):
            bound = figures[f"bound_{case}_goodput_rps"]
            assert 0 < figures[f"{policy}_{case}_goodput_rps"] <= bound
        for paper in fig6.PAPER:
            # The twentieth minute is beyond this ramp.
            present = f"{policy}_{paper.key}" in figures
            assert present == (paper.key != "min20_minor_mean_ms"), paper.key
    assert len(record.rows) == sum(len(ramp.rows) for ramp in quick6[0])


def test_figure_6_counts_every_request_in_the_second_of_its_arrival(quick6: Quick6) -> None:
    case = fig6.case_of(QUICK6, "clockwork")
    expected = [len(bucket) for bucket in problems(case, QUICK6.buckets)]
    for ramp in quick6[0]:
        # Buckets of a second: a rate is a number.
        assert [r["major_arrived_rps"] + r["minor_arrived_rps"] for r in ramp.rows] == expected


def test_figure_6_refuses_stretches_that_are_not_whole_buckets() -> None:
    with pytest.raises(ConfigError, match="multiple of bucket_ns"):
        replace(QUICK6, num_models=501)


@pytest.fixture(scope="module")
def quick9(tmp_path_factory: pytest.TempPathFactory) -> Quick9:
    directory = tmp_path_factory.mktemp("fig9")
    return FORMS["fig9"](directory), directory


def test_the_estimator_of_figure_9_errs_to_the_safe_side_and_by_as_much_as_the_noise(
    quick9: Quick9,
) -> None:
    quiet, noisy = quick9[0]
    for result in (quiet, noisy):
        # The highest of ten measurements: the eleventh is higher one time in eleven.
        assert result.under_share("infer") == pytest.approx(1 / 11, abs=0.04)
        assert result.under_share("infer_completion") < result.under_share("infer")
        assert 0 < result.goodput_rps <= result.bound_rps
        for quantity in fig9.QUANTITIES:
            num = sum(len(errors_us) for errors_us in result.by_sign_us(quantity).values())
            assert num <= len(result.errors_ns[quantity])
    assert noisy.by_sign_us("infer")["over"].mean() > 3 * quiet.by_sign_us("infer")["over"].mean()


def test_figure_9_without_noise_predicts_every_duration(quick9: Quick9) -> None:
    exact = fig9.measure(QUICK9, "clockwork", fig9.NoiseModel(name="none", noise=Noise()))
    assert len(exact.errors_ns["infer"]) > 100
    assert not exact.errors_ns["infer"].any()
    assert not exact.errors_ns["load"].any()


def test_figure_9_leaves_numbers_a_table_and_a_picture(quick9: Quick9) -> None:
    record = _record(quick9)
    for result in quick9[0]:
        key = f"clockwork_{result.noise_model}"
        assert record.figures[f"{key}_bound_share_pct"] <= 100
        assert record.figures[f"bound_{result.noise_model}_goodput_rps"] == result.bound_rps
        for name in ("infer_over_p99_us", "infer_completion_under_p99_us"):
            assert record.figures[f"{key}_{name}"] > 0
            assert f"paper_{result.noise_model}_{name}" in record.figures
    assert {model["name"] for model in record.record["setting"]["noise_models"]} == {
        "quiet",
        "noisy",
    }
    assert {row["sign"] for row in record.rows} == {"over", "under"}


@pytest.fixture(scope="module")
def quick_scale(tmp_path_factory: pytest.TempPathFactory) -> QuickScale:
    directory = tmp_path_factory.mktemp("scale")
    return FORMS["scale"](directory), directory


def test_a_line_of_the_scale_table_that_charges_the_core_names_it_as_the_bottleneck(
    quick_scale: QuickScale,
) -> None:
    results, record = quick_scale[0], _record(quick_scale)
    for policy in COMPARED:
        free, charged = (
            next(r for r in results if (r.policy, r.slo_ms, r.costs) == (policy, 5, costs))
            for costs in ("none", "charged")
        )
        assert free.arrived == charged.arrived
        # 2 ms of one core for each of 600 requests in a second.
        assert charged.answered < free.answered / 2
        assert charged.bottleneck == "front"
        assert charged.front_busy_pct == pytest.approx(100, abs=1)
        assert charged.refusal_p50_ms > 5
        assert free.front_busy_pct == 0
        assert free.bottleneck in ("EXEC", "PCIe")
        assert record.record["bottleneck"][f"{policy}_gpus1_slo5_charged"] == "front"
    assert {row["bottleneck"] for row in record.rows} >= {"front"}
    within = next(size for size in scale.Setting().sizes if size.label == "_charged_within")
    assert within.rate_rps < within.costs.requests_per_s(1)


def test_no_policy_of_the_scale_table_beats_its_bound(quick_scale: QuickScale) -> None:
    for result in quick_scale[0]:
        assert 0 <= result.answered <= result.bound <= result.arrived
        assert result.answered or result.costs == "charged"
        assert result.max_ms <= result.slo_ms


def test_an_slo_below_what_a_load_takes_costs_satisfaction(quick_scale: QuickScale) -> None:
    for policy in QUICK_SCALE.policies:
        wide, tight, _ = (result for result in quick_scale[0] if result.policy == policy)
        assert (wide.slo_ms, tight.slo_ms) == (100, 5)
        assert wide.arrived == tight.arrived
        assert tight.answered < wide.answered


def test_the_scale_table_leaves_numbers_a_table_and_a_picture(quick_scale: QuickScale) -> None:
    results, record = quick_scale[0], _record(quick_scale)
    for result in results:
        key = f"{result.policy}_{result.case}"
        assert record.figures[f"{key}_goodput_rps"] == result.answered
        assert record.figures[f"bound_{result.case}_goodput_rps"] == result.bound
        share_pct = record.figures[f"{key}_bound_share_pct"]
        assert share_pct == 100 * result.answered / result.bound
    assert record.record["setting"]["sizes"][0]["measured_ns"] == NS_PER_S
    assert {f"paper_{paper.key}" for paper in scale.PAPER} <= set(record.figures)
    assert len(record.rows) == len(results)


def test_every_number_of_the_paper_in_the_scale_table_is_compared(quick_scale: QuickScale) -> None:
    results = [replace(quick_scale[0][0], case=f"gpus20_slo{slo_ms}") for slo_ms in (25, 100)]
    figures = scale.STUDY.figures_of(QUICK_SCALE, results)
    assert {row["figure"] for row in beside_paper(scale.PAPER, figures, ("clockwork",))} == {
        f"clockwork_{paper.key}" for paper in scale.PAPER if paper.number
    }


def test_the_short_forms_of_figures_5_to_9_and_of_the_scale_table_are_as_recorded(
    quick5: Quick5,
    quick6: Quick6,
    quick7: Quick7,
    quick9: Quick9,
    quick_scale: QuickScale,
) -> None:
    for form in (quick5, quick6, quick7, quick9, quick_scale):
        directory = form[1]
        name = min(directory.glob("*.json")).stem
        assert floors.faults(name, directory) == []
