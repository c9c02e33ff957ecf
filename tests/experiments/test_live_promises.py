"""What is made of the client's accounts, and a short run of the whole."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.live import live_promises
from experiments.live.live_promises import PromiseCase, Setting, figures_of
from experiments.live.open_loop import Account, End

OK: End = ("ok", "")
REFUSED: End = ("refused", "OVERLOADED")
BARE: End = ("other", "CANCELLED")


def account(*ends: tuple[End, float], slo_ms: int, sent_late_ms: float = 0.0) -> Account:
    """A request per 10 ms, with its end and how many ms after sending that came."""
    due_ns = np.arange(len(ends), dtype=np.int64) * 10_000_000
    sent_ns = due_ns + round(sent_late_ms * 1e6)
    taken_ns = np.array([round(ms * 1e6) for _, ms in ends], np.int64)
    seconds = len(ends) / 100
    return Account(due_ns, sent_ns, sent_ns + taken_ns, [end for end, _ in ends], slo_ms, seconds)


def case(part: str, *accounts: Account, multiple: float = 1.0) -> Sequence[PromiseCase]:
    return [
        PromiseCase(
            part=part, num_models=1, slo_ms=each.slo_ms, capacity_rps=50.0,
            multiple=multiple, account=each,
        )
        for each in accounts
    ]  # fmt: skip


def test_late_successes_refusals_and_other_ends_of_all_cases_are_in_the_figures() -> None:
    first = account((OK, 5), (OK, 11), (REFUSED, 1), (REFUSED, 3), slo_ms=10)
    first.kept = np.array([True, True, False, False])
    second = account((OK, 40), (OK, 49), (REFUSED, 10), (BARE, 900), slo_ms=50, sent_late_ms=2)
    figures = figures_of([*case("device", first, multiple=3), *case("flood", second, multiple=3)])
    assert figures["requests"] == 8
    assert figures["late_success_per_million"] == 250_000
    assert figures["late_kept_per_million"] == 250_000
    # The client itself was late by 2 ms, and that made one more late.
    assert (first.num_late_of_due, second.num_late_of_due, second.num_late) == (1, 1, 0)
    assert figures["other_ends"] == 1
    assert figures["refusal_ms_p50"] == (2 + 10) / 2
    assert figures["refusal_slo_share_p50_worst"] == 0.2
    # One answer in time in 40 ms, of 50 possible per second.
    assert figures["device_1_x3_goodput_share_worst"] == pytest.approx(25 / 50)


def test_below_the_capacity_goodput_is_a_share_of_what_was_asked() -> None:
    quiet = account((OK, 5), *[(REFUSED, 0)] * 3, slo_ms=10)
    (found,) = case("device", quiet)
    assert found.goodput_share == pytest.approx(25 / 50)
    more = replace(found, capacity_rps=1000.0)
    assert more.goodput_share == pytest.approx(25 / 100)


def test_a_flood_s_goodput_is_a_share_of_the_device_s_and_a_pause_has_no_time_to_refusal() -> None:
    flood = account((OK, 5), (REFUSED, 1), slo_ms=100)
    pause = account((OK, 5), (REFUSED, 3000), (OK, 3000), slo_ms=100)
    figures = figures_of([*case("flood", flood, multiple=20), *case("pause", pause)])
    assert figures["goodput_20x_share"] == pytest.approx(50 / 100)
    assert figures["refusal_ms_p99"] == figures["flood_refusal_ms_p99"] == 1
    assert figures["pause_late_successes"] == 1


@pytest.mark.long
def test_a_short_run_leaves_a_row_for_each_case(tmp_path: Path) -> None:
    setting = Setting(
        multiples=(0.5,), slos_ms=(100,), concurrencies=(2,), seconds=0.5, num_models=(2,), flood_rps=200,
        flood_seconds=0.5, pause_seconds=0.5, parts=("device", "flood", "pause"),
    )  # fmt: skip
    cases = live_promises.STUDY.produce(setting, tmp_path)
    with (tmp_path / "live_promises.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["part"] for row in rows] == ["device", "flood", "pause"]
    for row, found in zip(rows, cases, strict=True):
        assert int(row["offered"]) == found.account.num_offered > 0
        ends = ("in_time", "late_successes", "refused", "other_ends")
        assert sum(int(row[end]) for end in ends) == int(row["offered"])
    record = json.loads((tmp_path / "live_promises.json").read_text())
    assert record["figures"] == figures_of(cases)
    assert record["kernel_stamps"] is True
