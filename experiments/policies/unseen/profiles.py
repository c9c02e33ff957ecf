"""Profiles that are wrong: what workers announce differs from what their devices take.

`without` is the same load with true profiles.
"""

from __future__ import annotations

from dataclasses import replace

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.policies.loads import poisson
from experiments.policies.unseen.family import Family
from experiments.simulator import Case, Faults, WrongProfile, copies_of
from modelzoo.profile import Noise, load_profile

_ROWS = load_profile("table1").rows


def _misprofiled(
    name: str,
    *wrong: WrongProfile,
    rate_rps: float,
    slo_ms: float,
    num_workers: int,
    num_models: int = 24,
    num_rows: int = 1,
    num_pages: int = 1376,
    seconds: int = 5,
    sigma: float = 0.02,
) -> Family:
    """A family of `num_models` models, dealt to the first rows of Table 1 in turn, or all ResNet50."""

    def case(seed: int, profiles: tuple[WrongProfile, ...]) -> Case:
        rows = list(_ROWS.values())[:num_rows] if num_rows > 1 else [_ROWS["resnet50_v1b"]]
        models = tuple(
            model for row in rows for model in copies_of(row, max(1, num_models // len(rows)))
        )
        load = poisson(
            models,
            seed,
            num_gpus=num_workers,
            rate_rps=rate_rps,
            slo_ns=round(slo_ms * NS_PER_MS),
            duration_ns=seconds * NS_PER_S,
            num_pages=num_pages,
            noise=Noise(exec_sigma=sigma, load_sigma=sigma),
        )
        return replace(load, faults=Faults(wrong_profiles=profiles))

    return Family(
        name=name,
        part="profiles",
        case=lambda seed: case(seed, wrong),
        without=lambda seed: case(seed, ()),
    )


_LONG = WrongProfile(exec_factor=3)

FAMILIES: tuple[Family, ...] = (
    # Longer than the SLO: whoever believes them asks nobody.
    _misprofiled("profile_long", _LONG, rate_rps=600, slo_ms=7.5, num_workers=4),
    _misprofiled("profile_long_zoo", _LONG, rate_rps=500, slo_ms=16, num_workers=6, num_rows=24),
    _misprofiled(
        "profile_x10", WrongProfile(exec_factor=10), rate_rps=900, slo_ms=25, num_workers=3
    ),
    # Too short: what is planned with them is late.
    _misprofiled(
        "profile_half",
        WrongProfile(exec_factor=0.5),
        rate_rps=1500,
        slo_ms=60,
        num_workers=6,
        num_rows=24,
    ),
    _misprofiled(
        "profile_tenth", WrongProfile(exec_factor=0.1), rate_rps=1300, slo_ms=40, num_workers=3
    ),
    # Some sizes only: the large ones, or a hole in the middle.
    _misprofiled(
        "profile_big",
        WrongProfile(exec_factor=6, sizes=(8, 16)),
        rate_rps=3200,
        slo_ms=50,
        num_workers=4,
    ),
    _misprofiled(
        "profile_big_zoo",
        WrongProfile(exec_factor=4, sizes=(4, 8, 16)),
        rate_rps=1500,
        slo_ms=80,
        num_workers=4,
        num_rows=12,
    ),
    _misprofiled(
        "profile_hole",
        WrongProfile(exec_factor=8, sizes=(2, 4)),
        rate_rps=1500,
        slo_ms=20,
        num_workers=3,
    ),
    _misprofiled(
        "profile_small_size",
        WrongProfile(exec_factor=8, sizes=(1,)),
        rate_rps=400,
        slo_ms=15,
        num_workers=2,
    ),
    # A load that is announced to take longer than the SLO, and one too short.
    _misprofiled(
        "profile_load_long",
        WrongProfile(load_factor=5),
        rate_rps=400,
        slo_ms=30,
        num_workers=2,
        num_models=60,
        num_pages=140,
    ),
    _misprofiled(
        "profile_load_short",
        WrongProfile(load_factor=0.2),
        rate_rps=250,
        slo_ms=60,
        num_workers=2,
        num_models=60,
        num_pages=140,
    ),
    # One worker of several announces a tenth.
    _misprofiled(
        "profile_one_worker",
        WrongProfile(exec_factor=0.1, worker=2),
        rate_rps=1500,
        slo_ms=30,
        num_workers=4,
    ),
)
