"""The study of what certainty costs, in short: decisions come in time, and none is broken."""

from __future__ import annotations

from pathlib import Path

from clockwright.units import NS_PER_S
from experiments.policies.decide import STUDY, Setting


def test_decisions_come_in_time_and_are_kept_at_a_price(tmp_path: Path) -> None:
    setting = Setting(
        policies=("edf_mh",),
        nums_models=(4,),
        loads=(1.2,),
        parts=(0.05, 0.2),
        warmup_ns=NS_PER_S // 2,
        measured_ns=NS_PER_S,
        seeds=(1,),
    )
    points = STUDY.produce(setting, tmp_path)
    assert len(points) == 4
    figures = STUDY.figures(setting, points)
    assert figures["kept_min"] == 1
    assert figures["num_broken"] == 0
    assert figures["decided_p99_max"] <= 1
    assert figures["edf_mh_m4_s1_price_points_max"] < 10
    assert (tmp_path / "decide.png").exists()
