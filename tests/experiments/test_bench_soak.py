"""The figures of an hour of churn."""

from __future__ import annotations

import pytest

from experiments.bench.soak import figures_of


def test_slopes_are_per_hour_and_rises_compare_the_halves() -> None:
    looks = {
        "controller": [(100.0, 10, 3), (101.0, 10, 3), (102.0, 12, 3), (103.0, 11, 3)],
        "worker": [(50.0, 9, 2), (50.0, 9, 4), (50.0, 9, 3), (50.0, 9, 3)],
    }
    figures = figures_of(looks, look_s=30)
    assert figures["soak_controller_rss_slope_mib_per_h"] == pytest.approx(120)
    assert figures["soak_rss_slope_mib_per_h"] == pytest.approx(120)
    assert figures["soak_controller_handles_rise"] == 2
    assert figures["soak_worker_threads_rise"] == -1
    assert figures["soak_worker_rss_mib"] == 50


def test_the_first_looks_can_be_left_out() -> None:
    looks = {"controller": [(90.0, 8, 2), (100.0, 10, 3), (100.0, 10, 3)]}
    figures = figures_of(looks, look_s=30, first=1)
    assert figures["soak_rss_slope_mib_per_h"] == pytest.approx(0, abs=1e-6)
    assert figures["soak_controller_handles_rise"] == 0
