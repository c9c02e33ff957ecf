"""Links that carry less than the GPUs would take, held against what they carry (`experiments.bounds`)."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import Unpack

from clockwright.units import NS_PER_S
from experiments.policies.load import Load, RandomLoad, at_random, hosted, ms
from experiments.simulator import Network
from modelzoo.profile import load_profile

_ROW = load_profile("table1").rows["resnet50_v1b"]
_GIGABIT = 125_000_000

# By size of inputs and of outputs, in kB.
_Sizes = tuple[tuple[int, int], ...]


def _family(
    name: str, network: Network, sizes: _Sizes = ((602, 4),), **load: Unpack[RandomLoad]
) -> Load:
    """Thirty models that differ in what they take from a link, in turn."""
    rows = [
        replace(_ROW, name=f"in{i}_out{o}", input_bytes=1000 * i, output_bytes=1000 * o)
        for i, o in sizes
    ]
    models = tuple(hosted(f"m{number}", rows[number % len(rows)]) for number in range(30))
    load.setdefault("seconds", 4)
    changes = {"network": network}
    return at_random(name, "thin_links", models, changes, begin_ns=NS_PER_S // 2, **load)


def _thin(bytes_per_s: int = _GIGABIT, delay_ms: float = 0.1, jitter_ms: float = 0.0) -> Network:
    return Network(bytes_per_s=bytes_per_s, delay_ns=ms(delay_ms), jitter_ns=ms(jitter_ms))


_ONE_OF_FOUR = Network(links=(_thin(_GIGABIT // 2), *(3 * (_thin(20 * _GIGABIT),))))

FAMILIES: tuple[Load, ...] = (
    _family("thin_65pct", _thin(), rate_rps=400, slo_ms=90, gpus=3),
    _family("thin_90pct", _thin(), rate_rps=560, slo_ms=120, gpus=3),
    _family("thin_160pct", _thin(), rate_rps=1000, slo_ms=90, gpus=3),
    _family("thin_300pct", _thin(), rate_rps=1850, slo_ms=70, gpus=3),
    _family("thin_10gbit", _thin(10 * _GIGABIT), rate_rps=1200, slo_ms=60, gpus=3),
    _family("thin_mixed", _thin(), ((600, 4), (40, 4), (150, 4)), rate_rps=1100, slo_ms=90, gpus=3),
    _family("thin_outputs", _thin(), ((10, 500),), rate_rps=1100, slo_ms=90, gpus=3),
    _family(
        "thin_100mbit_small", _thin(_GIGABIT // 10), ((24, 4),), rate_rps=1100, slo_ms=60, gpus=3
    ),
    _family("thin_one_of_four", _ONE_OF_FOUR, rate_rps=900, slo_ms=50, gpus=4),
    _family("thin_and_long", _thin(delay_ms=8), rate_rps=850, slo_ms=110, gpus=3),
    _family("thin_and_jittery", _thin(jitter_ms=1.5), rate_rps=500, slo_ms=90, gpus=3),
)
