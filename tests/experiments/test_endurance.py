"""What is made of long overloads and of own requests beside a neighbour's."""

from __future__ import annotations

import re

import numpy as np
import pytest

from experiments.bench.endurance import Setting, decay_of, neighbour_figures
from experiments.live.open_loop import Account, End
from experiments.study.results_page import TEMPLATE

OK: End = ("ok", "")
REFUSED: End = ("refused", "OVERLOADED")


def account(ends: list[tuple[End, float]], seconds: float) -> Account:
    """Requests spread evenly over the run; with each its end and how many ms after sending that came."""
    due_ns = (np.arange(len(ends)) * seconds * 1e9 / len(ends)).astype(np.int64)
    taken_ns = np.array([round(ms * 1e6) for _, ms in ends], np.int64)
    return Account(due_ns, due_ns, due_ns + taken_ns, [end for end, _ in ends], 100, seconds)


def test_decay_is_what_the_last_tenth_answers_less_than_the_first() -> None:
    first, last = [(OK, 20.0)] * 10, [(OK, 30.0)] * 6 + [(REFUSED, 3.0)] * 4
    ends = first * 9 + last
    figures = decay_of(account(ends, 100.0), [50.0 + tenth for tenth in range(10)])
    assert figures["decay_pct"] == pytest.approx(40)
    assert figures["goodput_rps"] == pytest.approx(0.96)
    assert figures["refusal_p50_ms_first_tenth"] == 0
    assert figures["refusal_p50_ms_last_tenth"] == 3
    assert figures["rss_growth_mib"] == 8


def test_own_latency_beside_a_neighbour_is_told_as_a_ratio_of_the_same_turn() -> None:
    alone = [account([(OK, ms)] * 50, 1.0) for ms in (20.0, 40.0, 20.0)]
    beside = [account([(OK, ms)] * 49 + [(REFUSED, 1.0)], 1.0) for ms in (22.0, 40.0, 30.0)]
    flood = [account([(REFUSED, 2.0)] * 99 + [(OK, 90.0)], 1.0)] * 3
    figures = neighbour_figures({"alone": alone, "beside": beside, "flood": flood})
    assert figures["p99_ratio"] == pytest.approx(1.1)
    assert figures["alone_in_time_pct"] == 100
    assert figures["beside_in_time_pct"] == 98
    assert figures["flood_goodput_rps"] == 1


def test_the_page_of_results_asks_for_numbers_that_the_record_has() -> None:
    some = account([(OK, 20.0)] * 100, 10.0)
    usual = Setting()
    figures = {
        f"overload_x{multiple:g}_{name}"
        for multiple in usual.multiples
        for name in decay_of(some, [1.0] * 10)
    } | {
        f"neighbour_{where}_{name}"
        for where in ("apart", "shared")
        for name in neighbour_figures({key: [some] for key in ("alone", "beside", "flood")})
    }
    wanted = set(re.findall(r"\{endurance\[([\w.]+)\]", TEMPLATE.read_text(encoding="utf-8")))
    assert wanted
    assert wanted <= figures
