"""Networks that gain little or lose by batches: memory-bound ones, big inputs, sizes that are not worth their time.

Each family is held against its bound B1, for no fault is at work.
"""

from __future__ import annotations

from collections.abc import Sequence

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.policies.loads import poisson
from experiments.policies.unseen.family import Family
from experiments.simulator import copies_of
from modelzoo.profile import Noise, ProfileRow, load_profile

_SIZES = (1, 2, 4, 8, 16)
_TABLE1 = load_profile("table1").rows


def _power_row(first_ms: float, exponent: float, *, sizes: Sequence[int] = _SIZES) -> ProfileRow:
    """EXEC of b rows takes `first_ms` times b to the power of `exponent`."""
    return ProfileRow(
        name=f"power {exponent:g} of {first_ms:g} ms",
        weights_bytes=60_000_000,
        load_ns=5 * NS_PER_MS,
        exec_ns={size: round(first_ms * size**exponent * NS_PER_MS) for size in sizes},
        input_bytes=600_000,
        output_bytes=4000,
    )


def _family(
    name: str,
    *rows: ProfileRow,
    copies: int,
    rate_rps: float,
    slo_ms: float,
    num_workers: int,
) -> Family:
    models = tuple(model for row in rows for model in copies_of(row, copies))
    return Family(
        name=name,
        part="averse",
        case=lambda seed: poisson(
            models,
            seed,
            num_gpus=num_workers,
            rate_rps=rate_rps,
            slo_ns=round(slo_ms * NS_PER_MS),
            duration_ns=5 * NS_PER_S,
            noise=Noise(),
        ),
    )


FAMILIES: tuple[Family, ...] = (
    _family("averse_115", _power_row(2, 1.15), copies=16, rate_rps=1300, slo_ms=40, num_workers=2),
    _family("averse_130", _power_row(3, 1.3), copies=12, rate_rps=1200, slo_ms=60, num_workers=3),
    _family("averse_105", _power_row(2.5, 1.05), copies=8, rate_rps=550, slo_ms=50, num_workers=1),
    # Dense up to 4, sparse above.
    _family(
        "averse_knee",
        ProfileRow(
            name="knee at 4",
            weights_bytes=60_000_000,
            load_ns=5 * NS_PER_MS,
            exec_ns={
                1: 2 * NS_PER_MS,
                2: 3 * NS_PER_MS,
                4: 5 * NS_PER_MS,
                8: 12 * NS_PER_MS,
                16: 30 * NS_PER_MS,
            },
        ),
        copies=12,
        rate_rps=2000,
        slo_ms=60,
        num_workers=2,
    ),
    _family(
        "averse_mix",
        _power_row(2, 1.15),
        _TABLE1["resnet50_v1b"],
        copies=8,
        rate_rps=1600,
        slo_ms=40,
        num_workers=2,
    ),
)
