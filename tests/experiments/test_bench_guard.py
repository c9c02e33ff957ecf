"""What keys and TLS cost a request, measured on servers as users run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench import guard as bench_guard
from experiments.results_file import add_results, write_results


@pytest.mark.long
def test_all_variants_are_asked_and_the_record_keeps_what_others_have_found(
    tmp_path: Path,
) -> None:
    write_results("guard", {}, command="by hand", directory=tmp_path)
    add_results("guard", {"seeds": 3}, part="other", command="by hand", directory=tmp_path)
    setting = bench_guard.Setting(rounds=1, seconds=0.1)
    (found,) = bench_guard.STUDY.produce(setting, tmp_path)
    figures = found.figures
    record = json.loads((tmp_path / "guard.json").read_text())
    assert record["figures"]["seeds"] == 3
    assert record["cost"]["keys"] == list(figures)
    assert figures["refusal_early_controller_us"] < figures["refusal_late_controller_us"]
    for size in ("small", "large"):
        assert all(
            figures[f"cost_{size}_{name}_us"] > 0
            for name in ("off", "keys", "keys_tls", "keys_tls_quotas")
        )
        assert f"cost_{size}_keys_tls_quotas_ratio" in figures
