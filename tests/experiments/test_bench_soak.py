"""The figures of an hour of churn."""

from __future__ import annotations

import pytest

from experiments.bench.soak import Occupied, figures_of


def test_slopes_are_per_hour_and_rises_compare_the_halves() -> None:
    sizes = {
        "controller": Occupied([100.0, 101.0, 102.0, 103.0], [10, 10, 12, 11], [3, 3, 3, 3]),
        "worker": Occupied([50.0, 50.0, 50.0, 50.0], [9, 9, 9, 9], [2, 4, 3, 3]),
    }
    figures = figures_of(sizes, look_s=30)
    assert figures["soak_controller_rss_slope_mib_per_h"] == pytest.approx(120)
    assert figures["soak_rss_slope_mib_per_h"] == pytest.approx(120)
    assert figures["soak_controller_handles_rise"] == 2
    assert figures["soak_worker_threads_rise"] == -1
    assert figures["soak_worker_rss_mib"] == 50


def test_the_first_looks_can_be_left_out() -> None:
    size = Occupied([90.0, 100.0, 100.0], [8, 10, 10], [2, 3, 3])
    figures = figures_of({"controller": size.since(1)}, look_s=30)
    assert figures["soak_rss_slope_mib_per_h"] == pytest.approx(0, abs=1e-6)
    assert figures["soak_controller_handles_rise"] == 0
