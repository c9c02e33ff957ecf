"""Links that are long, tremble, or differ from worker to worker.

`without` is the same load on short links. Where the SLO is tight or the GPUs are overloaded, the time that the
ways take is missed by every policy; there `without` has an SLO that is shorter by as much.
"""

from __future__ import annotations

from typing_extensions import Unpack

from clockwright.units import NS_PER_S
from experiments.policies.load import Load, RandomLoad, at_random, ms
from experiments.simulator import Network, copies_of
from modelzoo.profile import load_profile

_ROWS = load_profile("table1").rows
_SHORT = Network()


def _network(out_ms: float, back_ms: float | None = None, jitter_ms: float = 0.0) -> Network:
    back_ns = None if back_ms is None else ms(back_ms)
    return Network(delay_ns=ms(out_ms), up_delay_ns=back_ns, jitter_ns=ms(jitter_ms))


def _one_of_four(far: Network) -> Network:
    return Network(links=(far, _SHORT, _SHORT, _SHORT))


def _family(
    name: str,
    network: Network,
    *,
    models: int = 32,
    row: str = "resnet50_v1b",
    ways_ms: float = 0.0,
    **load: Unpack[RandomLoad],
) -> Load:
    """Equal models; `ways_ms` is what `without` lacks of the SLO."""
    load.setdefault("seconds", 4)
    return at_random(
        name,
        "links",
        copies_of(_ROWS[row], models),
        {"network": network},
        {"network": _SHORT},
        begin_ns=NS_PER_S // 2,
        ways_ms=ways_ms,
        **load,
    )


FAMILIES: tuple[Load, ...] = (
    _family("link_8ms", _network(8), rate_rps=800, slo_ms=80, gpus=3),
    _family("link_25ms", _network(25), rate_rps=800, slo_ms=140, gpus=3),
    _family("link_6ms_tight", _network(6), rate_rps=450, slo_ms=24, gpus=3, ways_ms=12),
    _family("link_12ms_overload", _network(12), rate_rps=3000, slo_ms=80, gpus=3, ways_ms=24),
    _family("link_10ms_bursts", _network(10), rate_rps=700, slo_ms=90, gpus=3, bursts_ms=80),
    _family(
        "link_15ms_loads", _network(15), models=150, pages=700,
        rate_rps=250, slo_ms=150, gpus=2, ways_ms=30,
    ),
    _family(
        "link_10ms_small", _network(10), row="resnet18_v2",
        rate_rps=2200, slo_ms=70, gpus=3, seconds=3,
    ),
    _family("link_3_and_16ms", _network(3, 16), rate_rps=800, slo_ms=60, gpus=3),
    _family("link_14_and_1ms", _network(14, 1), rate_rps=800, slo_ms=60, gpus=3),
    _family("link_one_far", _one_of_four(_network(18)), rate_rps=800, slo_ms=55, gpus=4),
    _family("link_one_too_far", _one_of_four(_network(40)), rate_rps=700, slo_ms=30, gpus=4),
    _family("link_jitter_2ms", _network(0.5, jitter_ms=2), rate_rps=700, slo_ms=45, gpus=3),
    _family("link_jitter_4ms", _network(1, jitter_ms=4), rate_rps=700, slo_ms=75, gpus=3),
    _family("link_9ms_jitter", _network(9, jitter_ms=1), rate_rps=700, slo_ms=70, gpus=3),
)  # fmt: skip
