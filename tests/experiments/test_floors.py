"""Floors can fail: what is recorded, changed by a little, is noticed; and each form is played by a test."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.core_lines import CASES
from experiments.policies import floors
from experiments.policies.floors import COMPARED, FORMS, MORE_LINES, Floors, Taken
from experiments.results_file import RESULTS

CONTENT: dict[str, Any] = json.loads((RESULTS / "floors.json").read_text(encoding="utf-8"))
TESTS = Path(__file__).parent


def recorded(name: str) -> Taken:
    return Floors().forms[name]


def test_each_form_is_recorded_and_played_by_a_test() -> None:
    texts = [
        path.read_text(encoding="utf-8")
        for path in TESTS.glob("test_*.py")
        if path.name != Path(__file__).name
    ]
    assert set(CONTENT["forms"]) == set(FORMS)
    for name in FORMS:
        assert any(f'FORMS["{name}"]' in text and "floors.faults(" in text for text in texts), name
        assert Floors().faults(name, recorded(name)) == []


@pytest.mark.parametrize("name", FORMS)
def test_a_figure_that_changes_in_its_sixth_digit_is_named(name: str) -> None:
    before = recorded(name)
    key, value = max(before.figures.items(), key=lambda item: item[1])
    fault, hint = Floors().faults(
        name, replace(before, figures={**before.figures, key: value * (1 + 1e-6) or 1e-6})
    )
    assert fault.startswith(f"{name}: {key} is ")
    assert fault.endswith(f"recorded {value}")
    assert floors.COMMAND in hint


@pytest.mark.parametrize("name", [name for name in FORMS if recorded(name).tables])
def test_a_table_with_another_byte_is_named(name: str) -> None:
    before = recorded(name)
    file = min(before.tables)
    fault, _ = Floors().faults(name, replace(before, tables={**before.tables, file: "other"}))
    assert fault == f"{name}: {file} is not what was recorded"


def test_a_figure_or_a_table_that_is_gone_or_new_is_named() -> None:
    before = recorded("fig5")
    faults = Floors().faults("fig5", Taken(figures={"new": 1.0}, tables={}))
    assert len(faults) == len(before.figures) + 1 + len(before.tables) + 1
    assert "fig5: new is 1.0, recorded None" in faults


def test_edf_mh_may_lose_a_point_of_goodput_but_no_more() -> None:
    key = "edf_mh_overload_small_bound_share_pct"
    before = recorded("scenarios")
    best = Floors().best[f"scenarios_{key}"]
    for lost, below in ((0.9, False), (1.1, True)):
        # Recorded again after it fell, so that only the best ever says how far.
        now = replace(before, figures={**before.figures, key: best - lost})
        content = CONTENT | {"forms": CONTENT["forms"] | {"scenarios": asdict(now)}}
        faults = Floors(content).faults("scenarios", now)
        assert [key in fault and "--again" in fault for fault in faults] == [True] * below


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", COMPARED)
def test_a_tenth_more_lines_are_too_many_and_none_at_all_are_too_few(
    name: str, policy: str
) -> None:
    best = Floors().best[floors.lines_key(name, policy)]
    assert Floors().line_faults(name, policy, best) == []
    assert Floors().line_faults(name, policy, best * (1 + MORE_LINES) - 1) == []
    for lines in (1.1 * best, 0.0):
        (fault,) = Floors().line_faults(name, policy, lines)
        assert f"{lines:.1f} lines" in fault
        assert "--again" in fault


def test_to_record_again_keeps_the_best_and_forgets_what_is_no_more() -> None:
    forms = {"fig5": Taken(figures={"edf_mh_slo25_bound_share_pct": 90.0}, tables={})}
    now = {"core_lines_15x1_edf_mh": 400.0}
    before = {
        "fig5_edf_mh_slo25_bound_share_pct": 90.5,
        "core_lines_15x1_edf_mh": 390.0,
        "gone": 1.0,
    }
    assert floors.bests(forms, now, before) == {
        "fig5_edf_mh_slo25_bound_share_pct": 90.5,
        "core_lines_15x1_edf_mh": 390.0,
    }
    assert floors.bests(forms, now, {}) == {
        "fig5_edf_mh_slo25_bound_share_pct": 90.0,
        "core_lines_15x1_edf_mh": 400.0,
    }
