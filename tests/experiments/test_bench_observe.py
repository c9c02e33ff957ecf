"""What it costs to be observed, measured on servers as users run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench import observe as bench_observe
from experiments.study.aims import AIMS


@pytest.mark.long
def test_a_scrape_and_a_request_are_measured_with_everything_off_and_on(tmp_path: Path) -> None:
    setting = bench_observe.Setting(rounds=1, seconds=0.1, models=50)
    (found,) = bench_observe.STUDY.produce(setting, tmp_path)
    figures = found.figures
    record = json.loads((tmp_path / "observe.json").read_text())
    assert record["figures"] == figures
    keys = {aim.key.replace("4000", "50") for aim in AIMS["observe"]}
    assert keys <= figures.keys()
    # A page of 50 models is made of some hundred lines.
    assert figures["page_bytes"] > 50_000
    assert all(
        figures[f"{variant}_us"] > 0 for variant in ("off", "off_again", "metrics", "on", "traced")
    )
