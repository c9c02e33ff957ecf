"""Clipper's figures: a quick variant of each."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from controller.selection.policies import BUILT_IN, make_policy
from experiments.bench import selection as bench_selection
from experiments.clipper_paper import fig7 as clipper_fig7
from experiments.clipper_paper import fig8 as clipper_fig8
from experiments.clipper_paper import fig9 as clipper_fig9
from experiments.clipper_paper import fig10 as clipper_fig10
from experiments.digits.stream import Delays, follow

QUICK8 = clipper_fig8.Setting(
    seeds=(0,),
    num_queries=2400,
    policies=("exp4-full", "exp4-full, as the paper"),
    arms=(),
)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_figure_8_follows_the_failure_and_returns(tmp_path: Path) -> None:
    results = clipper_fig8.produce(QUICK8, tmp_path)
    # No policy beats an oracle that knows each phase's best model by more than an ensemble can.
    assert results.mean("oracle") < results.mean("best static")
    assert results.returned["exp4-full"] > results.returned["exp4-full, as the paper"]
    record = json.loads((tmp_path / "clipper_fig8.json").read_text())
    assert record["figures"]["returns_to_best"] == 1.0
    assert record["figures"]["cumulative_error"] == results.mean("exp4-full")
    rows = {row["policy"]: row for row in _rows(tmp_path / "clipper_fig8.csv")}
    # The best model before the failure is the one that fails.
    failed = [name for name, row in rows.items() if float(row["failed error"]) > 0.5]
    assert len(failed) == 1
    assert float(rows[failed[0]]["before error"]) < 0.1
    assert (tmp_path / "clipper_fig8.png").stat().st_size > 10_000


def test_figure_7_shows_the_set_that_gains_and_the_one_that_does_not(tmp_path: Path) -> None:
    results = clipper_fig7.produce(clipper_fig7.Setting(num_splits=2, sets=("alike",)), tmp_path)
    found = results["alike"]
    record = json.loads((tmp_path / "clipper_fig7.json").read_text())["figures"]
    assert record["alike_majority_gain"] == found.gain("majority")[0]
    # Five small forests err apart: whoever settles on one of them gives that away.
    assert record["alike_exp4_full_error"] < record["alike_best_single_error"]
    assert record["alike_5_agree_error"] < record["alike_fewer_error"]
    assert sum(record[f"alike_{b.replace(' ', '_')}_share"] for b in clipper_fig7.BUCKETS) == (
        pytest.approx(1)
    )
    assert len(_rows(tmp_path / "clipper_fig7.csv")) == 2
    assert (tmp_path / "clipper_fig7.png").stat().st_size > 5_000


def test_figure_10_compares_one_model_for_all_with_ones_own(tmp_path: Path) -> None:
    results = clipper_fig10.produce(clipper_fig10.Setting(seeds=(0,), num_groups=3), tmp_path)
    record = json.loads((tmp_path / "clipper_fig10.json").read_text())["figures"]
    assert record["wrong_group_error"] > record["own_group_error"]
    assert record["own_group_error"] == results.error("own group")
    shapes = {results.matrix(method).shape for method in clipper_fig10.METHODS}
    assert len(shapes) == 1
    # The first question comes before any feedback; the last ones after some.
    assert results.error("policy, from nothing", 30) < results.error("policy, from nothing", 0, 8)
    assert (tmp_path / "clipper_fig10.png").stat().st_size > 5_000


@pytest.mark.long
def test_figure_9_counts_every_query_of_a_live_run(tmp_path: Path) -> None:
    setting = clipper_fig9.Setting(sizes=(2,), seconds=0.5, rate_qps=20.0, slo_ms=5_000.0)
    mitigated, blocking = clipper_fig9.produce(setting, tmp_path)
    # How many were in time is the machine's affair; that each query has an end is ours.
    assert len(mitigated.answers) == len(blocking.answers) == 10
    assert blocking.missing == 0
    record = json.loads((tmp_path / "clipper_fig9.json").read_text())["figures"]
    assert record["mitigated_queries"] == 10
    assert record["mitigated_late_answers"] == mitigated.late(setting.slo_ms)
    (row, _) = _rows(tmp_path / "clipper_fig9.csv")
    answered, late, otherwise = (
        int(row[key]) for key in ("answered", "refused LATE", "refused otherwise")
    )
    assert answered + late + otherwise == int(row["queries"])
    assert (tmp_path / "clipper_fig9.png").stat().st_size > 5_000


def test_figure_9_counts_what_came_late_and_what_was_missing() -> None:
    answers = [
        clipper_fig9.QueryOutcome(10.0, "OK", True, 3, 1),
        clipper_fig9.QueryOutcome(60.0, "OK", False, 4, 0),
        clipper_fig9.QueryOutcome(90.0, "LATE"),
    ]
    point = clipper_fig9.ArmPoint("mitigated", 4, answers)
    figures = clipper_fig9.figures_of([point], clipper_fig9.Setting(slo_ms=50.0))
    assert figures["mitigated_late_answers"] == 1
    assert figures["mitigated_refused_late"] == 1
    assert figures["mitigated_4_missing"] == 1 / 8
    assert figures["mitigated_4_accuracy"] == 0.5


def test_the_costs_of_selection_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [path_row(1.0, 1.5)], [feedback_row(10, 30)]
    monkeypatch.setattr(bench_selection, "measure_live", lambda **_: measured)
    (tmp_path / "clipper_fig9.json").write_text(
        json.dumps({"commit": "abc", "figures": {"mitigated_late_answers": 2}})
    )
    figures = bench_selection.produce(calls=20, repeats=2, num_contexts=200, directory=tmp_path)
    assert figures["cache_feedback_speedup"] == 3.0
    assert figures["mitigated_late_answers"] == 2
    assert figures["whole_path_application_1_more_cpu_us"] == 500
    assert "fig8_cumulative_error" not in figures
    costs = [figures[f"select_combine_us_{n.replace('-', '_')}"] for n in BUILT_IN]
    assert figures["select_combine_us_4models"] == max(costs) > 0


def path_row(model: float, application: float) -> dict[str, float]:
    """Milliseconds; p99 is thrice the median."""
    kinds = {"p50": 1, "p99": 3, "cpu": 1, "controller_cpu": 0.5}
    return {
        f"{name}_{kind}_us": 1000 * times * (model if name == "model" else application)
        for name in bench_selection.MODELS_ASKED
        for kind, times in kinds.items()
    }


def test_selection_s_cost_is_compared_inside_a_round() -> None:
    # The machine is ten times slower in one round, and the application stumbles in another.
    rows = [path_row(1, 1.5), path_row(10, 15), path_row(1, 40)]
    figures = bench_selection.path_figures(rows)
    assert figures["whole_path_application_1_p50_ratio"] == 1.5
    assert figures["whole_path_model_p50_us"] == 1000
    assert figures["whole_path_model_p99_us"] == 3000
    assert figures["whole_path_application_4_more_controller_cpu_us"] == 2500
    assert "whole_path_model_p50_ratio" not in figures


@pytest.mark.long
def test_an_application_is_asked_beside_its_model() -> None:
    paths, feedbacks = bench_selection.measure_live(num_inputs=8, rounds=1)
    (row,) = paths
    names = list(bench_selection.MODELS_ASKED)
    assert {key.rpartition("_p50_us")[0] for key in row if key.endswith("_p50_us")} == set(names)
    assert all(row[f"{name}_p99_us"] >= row[f"{name}_p50_us"] > 0 for name in names)
    assert len(feedbacks) == 1


def feedback_row(uncached: float, cached: float) -> dict[str, float]:
    rates = {"cached": cached, "uncached": uncached, "by_id": 50.0}
    return rates | {f"{name}_cpu_us": 1e6 / rate for name, rate in rates.items()}


def test_a_speedup_is_that_of_neighbours_and_the_median_of_rounds() -> None:
    # The machine slows down tenfold, and stumbles once over each.
    rows = [
        feedback_row(100, 200),
        feedback_row(90, 180),
        feedback_row(10, 20),
        feedback_row(1, 20),
        feedback_row(10, 2),
    ]
    figures = bench_selection.feedback_figures(rows)
    assert figures["cache_feedback_speedup"] == 2.0
    assert (figures["cache_feedback_speedup_min"], figures["cache_feedback_speedup_max"]) == (
        0.2,
        20.0,
    )
    assert figures["cache_feedback_cpu_ratio"] == pytest.approx(2.0)
    assert figures["feedback_cached_per_s"] == 20


def test_processor_time_is_counted_of_all_that_a_process_has_started() -> None:
    script = (
        "import subprocess, sys; p = subprocess.Popen(['cat']); print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        tree = bench_selection.process_tree(parent.pid)
        assert tree == [parent.pid, child]
        parent.stdin.close()
    # This process, which has imported half of the world, twice: as the kernel counts it and as it does.
    assert bench_selection.cpu_s([os.getpid()]) == pytest.approx(2 * time.process_time(), abs=1)


def test_a_stream_is_the_same_again_with_the_same_seed() -> None:
    votes = np.random.default_rng(1).integers(0, 3, (3, 300))
    labels = np.random.default_rng(2).integers(0, 3, 300)
    trails = [
        follow(make_policy("exp3", {}), ["a", "b", "c"], votes, labels, seed=seed)
        for seed in (4, 4, 5)
    ]
    assert (trails[0].wrong == trails[1].wrong).all()
    assert (trails[0].wrong != trails[2].wrong).any()


@pytest.mark.parametrize("reward_only", [False, True])
def test_a_stream_without_feedback_teaches_nothing(reward_only: bool) -> None:
    labels = np.ones(200, np.int64)
    votes = np.stack([labels, labels + 1])
    for lost, learned in ((1.0, False), (0.0, True)):
        trail = follow(
            make_policy("exp4-full", {}),
            ["right", "wrong"],
            votes[::-1],
            labels,
            seed=0,
            delays=Delays(5, lost),
            reward_only=reward_only,
        )
        # A reward compares nobody: it speaks of those who said what was served.
        assert bool(trail.heaviest[-1]) is (learned and not reward_only)
