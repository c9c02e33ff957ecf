"""What it costs to be observed, measured on servers as users run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench import observe as bench_observe


@pytest.mark.long
def test_a_scrape_and_a_request_are_measured_with_everything_off_and_on(tmp_path: Path) -> None:
    figures = bench_observe.produce(1, 40, 50, tmp_path)
    record = json.loads((tmp_path / "observe.json").read_text())
    assert record["figures"] == figures
    assert set(record["aims"]) == {"metrics_scrape_ms_50_models", "loop_stall_ms", "on_ratio"}
    # A page of 50 models is made of some hundred lines.
    assert figures["page_bytes"] > 50_000
    assert all(figures[f"{variant}_us"] > 0 for variant in ("off", "off_again", "on"))
