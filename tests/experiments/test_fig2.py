"""Figure 2's quick variant: what it measures, not how fast this machine is."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.clockwork_paper import fig2

QUICK = fig2.Setting(architecture="tiny_conv", concurrencies=(1, 3), rounds=2, round_s=0.05)


@pytest.fixture(scope="module")
def device() -> fig2.Device:
    return fig2.processor(QUICK)


def test_one_at_a_time_never_overlaps_and_keeps_the_order(device: fig2.Device) -> None:
    done = fig2.one_at_a_time(device, 3, time.monotonic_ns() + 50_000_000)
    assert done
    for before, after in pairwise(done):
        assert before.end_ns <= after.begin_ns
        assert before.asked_ns <= after.asked_ns


def test_concurrent_runs_every_client(device: fig2.Device) -> None:
    done = fig2.concurrent(device, 3, time.monotonic_ns() + 50_000_000)
    assert done
    assert all(entry.asked_ns == entry.begin_ns < entry.end_ns for entry in done)


def test_figure_2_leaves_numbers_a_table_and_a_picture(tmp_path: Path) -> None:
    points = fig2.STUDY.produce(QUICK, tmp_path)
    assert {(p.mode, p.concurrency) for p in points} == {
        (mode, concurrency) for mode in fig2.MODES for concurrency in QUICK.concurrencies
    }
    record = json.loads((tmp_path / "fig2.json").read_text())
    figures = record["figures"]
    for point in points:
        assert figures[f"{point.mode}_c{point.concurrency}_num_execs"] == len(point.exec_ms) > 0
    assert [row["figure"] for row in record["comparison"]] == [
        "throughput_gain_pct",
        "tail_growth_ratio",
        "isolated_p99_over_median_pct",
    ]
    assert (tmp_path / "fig2.csv").exists()
    assert (tmp_path / "fig2.png").stat().st_size > 0
