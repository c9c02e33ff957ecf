"""Aims exist once: what each says of a figure, of a record that is missing, and of one of another commit."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from experiments.gpu import __main__ as gpu
from experiments.results_file import RESULTS
from experiments.study import aims
from experiments.study.aims import AIMS, MET, MISSED, NOT_MEASURED, Aim, judged, within


@pytest.mark.parametrize(
    ("aim", "figure", "outcome"),
    [
        (Aim("us", at_most=5), 5.0, MET),
        (Aim("us", at_most=5), 5.1, MISSED),
        (Aim("rps", at_least=5), 5.0, MET),
        (Aim("rps", at_least=5), 4.9, MISSED),
        (within("gap_pct", 3), -2.9, MET),
        (within("gap_pct", 3), -3.1, MISSED),
        (within("gap_pct", 3), 3.1, MISSED),
        (within("gap_pct", 3), None, NOT_MEASURED),
    ],
)
def test_an_aim_is_met_missed_or_not_measured(aim: Aim, figure: float | None, outcome: str) -> None:
    assert aim.outcome(figure) == outcome


def test_an_aim_says_its_bounds_in_words() -> None:
    assert Aim("a", at_most=5).words == "at most 5"
    assert Aim("a", at_least=30_000).words == "at least 30,000"
    assert within("a", 3).words == "within ±3"
    assert Aim("a", at_least=0, minus="b").words == "at least 0 more than b"


def test_an_aim_may_bound_the_difference_of_two_figures() -> None:
    aim = Aim("a", at_least=0, minus="b")
    assert aim.measured({"a": 2.0, "b": 3.0}) == -1
    assert aim.measured({"b": 3.0}) is None


@pytest.mark.parametrize(
    ("aim", "figure", "shown"),
    [
        (Aim("pct", at_least=99.9), 99.89866, "99.899"),
        (Aim("pct", at_least=99.9), 99.90004, "99.9"),
        (Aim("lost", at_most=0), 1e-7, "1e-07"),
        (Aim("rps", at_least=30_000), 29_999.96, "29,999.96"),
        (Aim("rps", at_least=30_000), 30_000.4, "30,000"),
        (within("gap_pct", 3), -3.0004, "-3.0004"),
        (Aim("us", at_most=5), None, "-"),
    ],
)
def test_no_figure_is_rounded_to_the_other_side_of_its_bounds(
    aim: Aim, figure: float | None, shown: str
) -> None:
    assert aim.shown(figure) == shown


def test_each_aim_has_bounds_and_a_figure_of_its_own_and_a_record_has_what_it_is_judged_by() -> (
    None
):
    for record, mine in AIMS.items():
        assert len({aim.key for aim in mine}) == len(mine)
        assert all(aim.at_most is not None or aim.at_least is not None for aim in mine)
        path = RESULTS / f"{record}.json"
        if path.exists():
            figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
            missing = {aim.key for aim in mine if aim.measured(figures) is None}
            # Each part of `guard` runs alone. `core` was recorded before it had this case.
            assert not missing or record in {"guard", "core"}


def test_each_aim_that_a_record_misses_says_what_stands_in_the_way() -> None:
    missed = [row for row in judged() if row.outcome == MISSED]
    assert [f"{row.record} {row.aim.key}" for row in missed if not row.aim.obstacle] == []


def test_an_aim_that_is_missed_says_what_stands_in_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"fig7_right_bc_rps": 700.0, "fig7_left_multiple": 3.375}
    (tmp_path / "edf_mh.json").write_text(json.dumps({"figures": figures}))
    rows = {row.aim.key: row for row in judged(tmp_path) if row.record == "edf_mh"}
    assert rows["fig7_left_multiple"].outcome == MET
    assert rows["zoo_share"].outcome == NOT_MEASURED
    aims.show([rows["fig7_right_bc_rps"]])
    line = capsys.readouterr().out
    assert "700  at least 3,000" in line
    assert f"{MISSED}: {rows['fig7_right_bc_rps'].aim.obstacle}" in line


def test_a_part_of_make_gpu_that_left_nothing_in_this_run_is_not_measured(tmp_path: Path) -> None:
    figures = {"fig2": {"worst_goodput_gap_pct": -2.9}, "fig5": {"worst_goodput_gap_pct": -3.1}}
    figures["table1"] = {"resnet50_v1_load_to_copy_ratio": 0.93, "resnet50_v1_b1_runs": 9999.0}
    figures["fig6"] = {"num_instances_answered": 1001.0}
    for name, found in figures.items():
        when = "2026-01-01T11:59:59" if name == "fig6" else "2026-01-01T12:00:00"
        record = {"when": f"{when}+00:00", "figures": found}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    (tmp_path / "serve.json").write_text('{"when": "2026-01-01T12:00:')
    since = datetime(2026, 1, 1, 12, microsecond=700_000, tzinfo=UTC)
    rows = list(judged(tmp_path, room="gpu", since=since))
    aims.write(rows, tmp_path / "aims.csv")
    with (tmp_path / "aims.csv").open(newline="") as file:
        table = {(line["record"], line["figure"]): line["outcome"] for line in csv.DictReader(file)}
    assert len(table) == len(rows) == sum(len(AIMS[f"gpu/{name}"]) for name in parts())
    assert table["gpu/fig2", "worst_goodput_gap_pct"] == MET
    assert table["gpu/fig5", "worst_goodput_gap_pct"] == MISSED
    assert table["gpu/table1", "resnet50_v1_load_to_copy_ratio"] == MET
    assert table["gpu/table1", "resnet50_v1_b1_runs"] == MISSED
    # Nor is what an earlier run left, or half a record.
    assert list(table.values()).count(NOT_MEASURED) == len(rows) - 4


def test_every_part_of_make_gpu_that_measures_has_aims() -> None:
    assert {f"gpu/{name}" for name in parts()} == {name for name in AIMS if name.startswith("gpu/")}


def parts() -> set[str]:
    return {name for name, module, *_ in gpu.PARTS if module[0] == "experiments"}
