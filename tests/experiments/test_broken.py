"""What is made of runs with a broken worker, and a short run of the whole."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import broken
from experiments.broken import Case, Setting, figures_of
from experiments.open_loop import Account


def case(fault: str, goodput_rps: float, *, since: str = "start", policy: str = "edf_mh") -> Case:
    nothing = np.zeros(0, np.int64)
    return Case(
        policy=policy, num_workers=2, fault=fault, since=since, load=0.8, goodput_rps=goodput_rps,
        healthy_rps=100.0, account=Account(nothing, nothing, nothing, [], 50, 1.0),
    )  # fmt: skip


def test_a_fault_s_share_is_that_of_its_worst_case_and_hangs_of_both_kinds_are_one() -> None:
    figures = figures_of(
        [
            case("fast_fail", 97.0),
            case("fast_fail", 96.0, since="mid-run"),
            case("hang", 99.0),
            case("silent", 50.0, policy="clockwork"),
            case("slow", 101.0),
        ]
    )
    assert figures["fast_fail_share"] == 0.96
    assert figures["hang_share"] == 0.5
    assert figures["slow_share"] == 1.01
    assert "bad_load_share" not in figures
    assert figures["clockwork_1of2_silent_start_x0.8_share"] == 0.5
    assert figures["edf_mh_1of2_fast_fail_mid_run_x0.8_share"] == 0.96


@pytest.mark.parametrize("fault", ["fast_fail", "silent"])
def test_a_short_run_has_the_fault_in_it_and_leaves_its_files(fault: str, tmp_path: Path) -> None:
    setting = Setting(
        policies=("edf_mh",), clusters=(2,), faults=(fault,), overloaded=(), num_models=2, num_pages=2,
        load=0.2, seconds=0.5, slo_ms=1000,
    )  # fmt: skip
    cases = broken.produce(setting, tmp_path)
    assert [(found.fault, found.since) for found in cases] == [(fault, "start"), (fault, "mid-run")]
    for found in cases:
        assert found.healthy_rps > 0
        assert found.account.num_offered > 0
        assert not found.account.others
    with (tmp_path / "broken.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["share"]) for row in rows] == pytest.approx(
        [found.share for found in cases], rel=1e-4
    )
    record = json.loads((tmp_path / "broken.json").read_text())
    assert record["figures"] == figures_of(cases)
