"""Profiles that are wrong: what workers announce differs from what their devices take.

`without` is the same load with true profiles.
"""

from __future__ import annotations

from typing_extensions import Unpack

from experiments.policies.load import Load, RandomLoad, at_random
from experiments.simulator import Faults, WrongProfile, copies_of
from modelzoo.profile import Noise, load_profile

_ROWS = load_profile("table1").rows


def _wrong(
    name: str, wrong: WrongProfile, *, models: int = 24, rows: int = 1, **load: Unpack[RandomLoad]
) -> Load:
    """So many models, dealt to the first rows of Table 1 in turn, or all ResNet50."""
    chosen = list(_ROWS.values())[:rows] if rows > 1 else [_ROWS["resnet50_v1b"]]
    hosted = tuple(
        model for row in chosen for model in copies_of(row, max(1, models // len(chosen)))
    )
    faulty, sound = ({"faults": Faults(wrong_profiles=faults)} for faults in ((wrong,), ()))
    load.setdefault("noise", Noise(exec_sigma=0.02, load_sigma=0.02))
    return at_random(name, "profiles", hosted, faulty, sound, **load)


def _exec(factor: float, *sizes: int, worker: int | None = None) -> WrongProfile:
    return WrongProfile(exec_factor=factor, sizes=sizes, worker=worker)


FAMILIES: tuple[Load, ...] = (
    # Longer than the SLO: whoever believes them asks nobody.
    _wrong("profile_long", _exec(3), rate_rps=600, slo_ms=7.5, gpus=4),
    _wrong("profile_long_zoo", _exec(3), rate_rps=500, slo_ms=16, gpus=6, rows=24),
    _wrong("profile_x10", _exec(10), rate_rps=900, slo_ms=25, gpus=3),
    # Too short: what is planned with them is late.
    _wrong("profile_half", _exec(0.5), rate_rps=1500, slo_ms=60, gpus=6, rows=24),
    _wrong("profile_tenth", _exec(0.1), rate_rps=1300, slo_ms=40, gpus=3),
    # Some sizes only: the large ones, or a hole in the middle.
    _wrong("profile_big", _exec(6, 8, 16), rate_rps=3200, slo_ms=50, gpus=4),
    _wrong("profile_big_zoo", _exec(4, 4, 8, 16), rate_rps=1500, slo_ms=80, gpus=4, rows=12),
    _wrong("profile_hole", _exec(8, 2, 4), rate_rps=1500, slo_ms=20, gpus=3),
    _wrong("profile_small_size", _exec(8, 1), rate_rps=400, slo_ms=15, gpus=2),
    # A load that is announced to take longer than the SLO, and one too short.
    _wrong(
        "profile_load_long", WrongProfile(load_factor=5),
        rate_rps=400, slo_ms=30, gpus=2, models=60, pages=140,
    ),
    _wrong(
        "profile_load_short", WrongProfile(load_factor=0.2),
        rate_rps=250, slo_ms=60, gpus=2, models=60, pages=140,
    ),
    # One worker of several announces a tenth.
    _wrong("profile_one_worker", _exec(0.1, worker=2), rate_rps=1500, slo_ms=30, gpus=4),
)  # fmt: skip
