"""Clipper's figures: a quick variant of each."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clockwright.units import NS_PER_S
from controller.selection.policies import BUILT_IN, make_policy
from experiments.bench import selection as bench_selection
from experiments.clipper_paper import fig3, fig4, fig5, fig6, fig7, fig8, fig9, fig10
from experiments.clipper_paper.models import FORMS
from experiments.digits.stream import follow
from experiments.policies import floors
from experiments.results_file import RESULTS
from experiments.study.study import Study

SIZES = (1, 2, 4)
# Longer than any machine takes: what adapts is tested elsewhere.
SERVING: dict[str, Any] = {
    "slo_ms": 60_000,
    "batch_sizes": SIZES,
    "warmup_s": 0.05,
    "measured_s": 0.1,
}

#: By study, the shortest setting that has all kinds of rows.
QUICK: dict[str, tuple[Study[Any, Any], Any]] = {
    study.name: (study, setting)
    for study, setting in (
        (
            fig3.STUDY,
            fig3.Setting(kinds=("no_op",), batch_sizes=SIZES, runs=4, budget_s=0.01),
        ),
        (fig4.STUDY, fig4.Setting(kinds=("no_op",), **SERVING)),
        (
            fig5.STUDY,
            fig5.Setting(
                containers=(("native", "no_op"),),
                delays_ms=(0, 2),
                loads=(0.2, 0.5),
                adapt_s=0.05,
                **SERVING,
            ),
        ),
        (
            fig6.STUDY,
            fig6.Setting(
                real_replicas=(1,),
                kind="no_op",
                batch=8,
                replicas=(1,),
                simulated_warmup_ns=NS_PER_S // 8,
                simulated_ns=NS_PER_S // 8,
                **SERVING,
            ),
        ),
        (fig7.STUDY, fig7.Setting(seeds=(0, 1), sets=("alike",))),
        (
            fig8.STUDY,
            fig8.Setting(
                seeds=(0,),
                num_queries=2400,
                policies=("exp4-full", "exp4-full, as the paper"),
                arms=(),
            ),
        ),
        (fig10.STUDY, fig10.Setting(seeds=(0,), num_groups=3)),
    )
}
#: Asked twice. Nothing is timed in figures 7 and 8 either, and they draw from their seeds as this one does.
COMPUTED = ("clipper_fig10",)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


#: Asks the study of this name, once; gives its points and where its files are.
Produce = Callable[[str], tuple[list[Any], Path]]
#: Gives the points and the figures of the study of this name.
Asked = Callable[[str], tuple[list[Any], dict[str, float]]]


@pytest.fixture(scope="module")
def produced(tmp_path_factory: pytest.TempPathFactory) -> Produce:
    @functools.cache
    def produce(name: str) -> tuple[list[Any], Path]:
        study, setting = QUICK[name]
        directory = tmp_path_factory.mktemp(name)
        return list(study.produce(setting, directory)), directory

    return produce


@pytest.mark.parametrize("name", QUICK)
def test_a_figure_is_left_complete(name: str, produced: Produce, tmp_path: Path) -> None:
    study, setting = QUICK[name]
    points, directory = produced(name)
    assert points
    record = json.loads((directory / f"{name}.json").read_text())
    assert record["command"].startswith(f"python -m experiments {name}")
    assert record["figures"] == study.figures_of(setting, points)
    for entry in record["comparison"]:
        assert entry["ours"] == record["figures"][entry["figure"]]
    with (RESULTS / f"{name}.csv").open(encoding="utf-8") as recorded:
        columns = next(csv.reader(recorded))
    rows = _rows(directory / f"{name}.csv")
    assert rows
    assert list(rows[0]) == columns
    assert (directory / f"{name}.png").stat().st_size > 5_000
    if name in COMPUTED:
        study.produce(setting, tmp_path)
        for file in (f"{name}.csv", f"{name}.png"):
            assert (tmp_path / file).read_bytes() == (directory / file).read_bytes()


@pytest.fixture
def asked(produced: Produce) -> Asked:
    def ask(name: str) -> tuple[list[Any], dict[str, float]]:
        study, setting = QUICK[name]
        points, _ = produced(name)
        return points, study.figures_of(setting, points)

    return ask


def test_the_one_at_a_time_has_batches_of_one_and_nothing_late(asked: Asked) -> None:
    points, figures = asked("clipper_fig4")
    assert [(p.form, p.strategy) for p in points] == list(product(FORMS, fig4.STRATEGIES))
    for p in points:
        assert figures[f"{p.form}_no_op_{p.strategy}_rps"] == p.throughput_rps
        assert p.late_pct == 0
        if p.strategy == "none":
            assert p.mean_batch in (0.0, 1.0)


def test_every_load_is_offered_with_every_delay(asked: Asked) -> None:
    points, _ = asked("clipper_fig5")
    assert [(p.load, p.delay_ms) for p in points] == [(0.2, 0), (0.2, 2), (0.5, 0), (0.5, 2)]


def test_the_stream_follows_the_failure_and_returns(asked: Asked) -> None:
    points, figures = asked("clipper_fig8")
    # No policy beats an oracle that knows each phase's best model by more than an ensemble can.
    assert figures["oracle_error"] < figures["best_static_error"]
    returned = {p.name: p.returned for p in points}
    assert returned["exp4-full"] > returned["exp4-full, as the paper"]
    assert figures["returns_to_best"] == 1.0
    # The best model before the failure is the one that fails.
    (failed,) = (p.errors for p in points if p.errors["failed"] > 0.5)
    assert failed["before"] < 0.1


def test_five_small_forests_err_apart_and_agreement_tells(asked: Asked) -> None:
    points, figures = asked("clipper_fig7")
    assert figures["alike_majority_gain"] == fig7.gain(points, "majority")[0]
    # Whoever settles on one of them gives that away.
    assert figures["alike_exp4_full_error"] < figures["alike_best_single_error"]
    assert figures["alike_5_agree_error"] < figures["alike_fewer_error"]
    assert sum(
        figures[f"{fig7.key_of('alike', bucket)}_share"] for bucket in fig7.BUCKETS
    ) == pytest.approx(1)


def test_ones_own_group_s_model_errs_less_than_another_s_and_feedback_helps(asked: Asked) -> None:
    points, figures = asked("clipper_fig10")
    assert figures["wrong_group_error"] > figures["own_group_error"]
    # The first question comes before any feedback; the last ones after some.
    method = "policy, from nothing"
    assert fig10.error(points, method, 30) < fig10.error(points, method, 0, 8)


@pytest.mark.long
def test_figure_9_counts_every_query_of_a_live_run(tmp_path: Path) -> None:
    setting = fig9.Setting(sizes=(2,), seconds=0.5, rate_qps=20.0, slo_ms=5_000.0)
    mitigated, blocking = fig9.STUDY.produce(setting, tmp_path)
    # How many were in time is the machine's affair; that each query has an end is ours.
    assert mitigated.queries == blocking.queries == 10
    assert blocking.missing == 0
    record = json.loads((tmp_path / "clipper_fig9.json").read_text())["figures"]
    assert record["mitigated_queries"] == 10
    assert record["mitigated_late_answers"] == mitigated.answered_late
    assert len(_rows(tmp_path / "clipper_fig9.csv")) == 2
    assert (tmp_path / "clipper_fig9.png").stat().st_size > 5_000


def test_figure_9_counts_what_came_late_and_what_was_missing() -> None:
    outcomes = [
        fig9.QueryOutcome(10.0, "OK", True, 3, 1),
        fig9.QueryOutcome(60.0, "OK", False, 4, 0),
        fig9.QueryOutcome(90.0, "LATE"),
    ]
    point = fig9.point_of("mitigated", 4, outcomes, slo_ms=50.0)
    assert (point.queries, point.answered, point.answered_late) == (3, 2, 1)
    assert (point.refused_late, point.refused_otherwise) == (1, 0)
    assert point.missing == 1 / 8
    assert point.accuracy == 0.5


def test_the_costs_of_selection_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [path_row(1.0, 1.5)], [feedback_row(10, 30)]
    monkeypatch.setattr(bench_selection, "measure_live", lambda **_: measured)
    setting = bench_selection.Setting(calls=20, repeats=2, contexts=200)
    (found,) = bench_selection.STUDY.produce(setting, tmp_path)
    figures = found.figures
    assert figures["cache_feedback_speedup"] == 3.0
    assert figures["whole_path_application_1_more_p50_us"] == 500
    costs = [figures[f"select_combine_us_{n.replace('-', '_')}"] for n in BUILT_IN]
    assert figures["select_combine_us_4models"] == max(costs) > 0


def path_row(model: float, application: float) -> dict[str, float]:
    """Milliseconds."""
    return {
        f"{name}_{kind}_us": 1000 * times * (model if name == "model" else application)
        for name in bench_selection.MODELS_ASKED
        for kind, times in (("p50", 1), ("controller_cpu", 0.5))
    }


def test_selection_s_cost_is_compared_inside_a_round() -> None:
    # The machine is ten times slower in one round, and the application stumbles in another.
    rows = [path_row(1, 1.5), path_row(10, 15), path_row(1, 40)]
    figures = bench_selection.path_figures(rows)
    assert figures["whole_path_application_1_p50_ratio"] == 1.5
    assert figures["whole_path_model_p50_us"] == 1000
    assert figures["whole_path_application_4_more_controller_cpu_us"] == 2500
    assert "whole_path_model_p50_ratio" not in figures


@pytest.mark.long
def test_an_application_is_asked_beside_its_model() -> None:
    paths, feedbacks = bench_selection.measure_live(num_inputs=8, rounds=1)
    (row,) = paths
    names = list(bench_selection.MODELS_ASKED)
    assert {key.rpartition("_p50_us")[0] for key in row if key.endswith("_p50_us")} == set(names)
    assert all(row[f"{name}_p50_us"] > 0 for name in names)
    assert len(feedbacks) == 1


def feedback_row(uncached: float, cached: float) -> dict[str, float]:
    return {"cached": cached, "uncached": uncached}


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
    assert figures["feedback_cached_per_s"] == 20


def test_a_stream_is_the_same_again_with_the_same_seed() -> None:
    votes = np.random.default_rng(1).integers(0, 3, (3, 300))
    labels = np.random.default_rng(2).integers(0, 3, 300)
    trails = [
        follow(make_policy("exp3", {}), ["a", "b", "c"], votes, labels, seed=seed)
        for seed in (4, 4, 5)
    ]
    assert (trails[0].wrong == trails[1].wrong).all()
    assert (trails[0].wrong != trails[2].wrong).any()


@pytest.mark.parametrize("lost", [0.0, 1.0])
def test_a_stream_without_feedback_teaches_nothing(lost: float) -> None:
    labels = np.ones(200, np.int64)
    votes = np.stack([labels + 1, labels])
    policy = make_policy("exp4-full", {})
    trail = follow(policy, ["wrong", "right"], votes, labels, seed=0, delay_max=5, lost=lost)
    assert bool(trail.heaviest[-1]) is (lost == 0)


def test_modelled_replicas_are_what_was_recorded(tmp_path: Path) -> None:
    points = floors.FORMS["clipper_fig6"](tmp_path)
    assert floors.faults("clipper_fig6", tmp_path) == []
    assert {p.policy for p in points} == set(fig6.POLICIES)
