"""The benchmark of crowds, small: every case is measured against a real server."""

from __future__ import annotations

from experiments.bench.crowd import Setting, measure_all


def test_each_case_has_its_figures() -> None:
    setting = Setting(num_connections=8, num_names=5, rounds=1, seconds=0.1, warm_s=0.0)
    measured = measure_all(setting)
    figures = measured.figures
    units = ("us", "rps", "p50_ms", "p99_ms")
    expected = {f"{case}_{unit}" for case in setting.cases for unit in units}
    assert set(figures) == expected
    assert all(figure > 0 for figure in figures.values())
    assert figures["connections_p50_ms"] <= figures["connections_p99_ms"]
    assert {key: [value] for key, value in figures.items()} == measured.extra["rounds"]
