"""Networks that gain little or lose by batches: memory-bound ones, big inputs, sizes that are not worth their time.

Each family is held against its bound B1, for no fault is at work.
"""

from __future__ import annotations

from typing_extensions import Unpack

from experiments.policies.load import Load, RandomLoad, at_random, power_ms, row_of
from experiments.simulator import copies_of
from modelzoo.profile import Noise, ProfileRow, load_profile


def _power_row(first_ms: float, exponent: float) -> ProfileRow:
    """EXEC of b rows takes `first_ms` times b to the power of `exponent`."""
    name, exec_ms = f"power {exponent:g} of {first_ms:g} ms", power_ms(first_ms, exponent)
    return row_of(name, 5, exec_ms, megabytes=60, input_bytes=600_000, output_bytes=4000)


def _family(name: str, *rows: ProfileRow, copies: int, **load: Unpack[RandomLoad]) -> Load:
    models = tuple(model for row in rows for model in copies_of(row, copies))
    load.setdefault("noise", Noise())
    return at_random(name, "averse", models, {}, **load)


# Dense up to 4, sparse above.
_KNEE = row_of("knee at 4", 5, {1: 2, 2: 3, 4: 5, 8: 12, 16: 30}, megabytes=60)

FAMILIES: tuple[Load, ...] = (
    _family("averse_115", _power_row(2, 1.15), copies=16, rate_rps=1300, slo_ms=40, gpus=2),
    _family("averse_130", _power_row(3, 1.3), copies=12, rate_rps=1200, slo_ms=60, gpus=3),
    _family("averse_105", _power_row(2.5, 1.05), copies=8, rate_rps=550, slo_ms=50, gpus=1),
    _family("averse_knee", _KNEE, copies=12, rate_rps=2000, slo_ms=60, gpus=2),
    _family(
        "averse_mix", _power_row(2, 1.15), load_profile("table1").rows["resnet50_v1b"],
        copies=8, rate_rps=1600, slo_ms=40, gpus=2,
    ),
)  # fmt: skip
