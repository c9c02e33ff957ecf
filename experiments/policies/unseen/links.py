"""Links that are long, tremble, or differ from worker to worker.

`without` is the same load on short links. Where the SLO is tight or the GPUs are overloaded, the time that the
ways take is missed by every policy; there `without` has an SLO that is shorter by as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.policies.loads import poisson
from experiments.policies.unseen.family import Family
from experiments.simulator import Case, Network, copies_of
from modelzoo.profile import load_profile

_ROWS = load_profile("table1").rows
_BEGIN_NS = NS_PER_S // 2
_SHORT = Network()


def _network(out_ms: float, back_ms: float | None = None, jitter_ms: float = 0.0) -> Network:
    return Network(
        delay_ns=round(out_ms * NS_PER_MS),
        up_delay_ns=None if back_ms is None else round(back_ms * NS_PER_MS),
        jitter_ns=round(jitter_ms * NS_PER_MS),
    )


def _unlike(links: Sequence[Network]) -> Network:
    return Network(links=tuple(links))


def _family(
    name: str,
    network: Network,
    *,
    rate_rps: float,
    slo_ms: float,
    num_workers: int,
    num_models: int = 32,
    row: str = "resnet50_v1b",
    num_pages: int = 1376,
    bursty: bool = False,
    ways_ms: float = 0.0,
    seconds: int = 4,
) -> Family:
    """A family of equal models.

    Args:
        name: the family's.
        network: with its fault.
        rate_rps: mean rate of all models together.
        slo_ms: of every request.
        num_workers: GPUs.
        num_models: copies of the row.
        row: of Table 1.
        num_pages: of each GPU's weights cache.
        bursty: in bursts and pauses of 80 ms in the mean; else a Poisson process.
        ways_ms: what `without` lacks of the SLO.
        seconds: length of the run.
    """

    def case(seed: int, slo_ms: float = slo_ms) -> Case:
        load = poisson(
            copies_of(_ROWS[row], num_models),
            seed,
            num_gpus=num_workers,
            rate_rps=rate_rps,
            slo_ns=round(slo_ms * NS_PER_MS),
            duration_ns=seconds * NS_PER_S,
            num_pages=num_pages,
            bursts_ns=80 * NS_PER_MS * bursty,
        )
        return replace(load, network=network)

    return Family(
        name=name,
        part="links",
        case=case,
        without=lambda seed: replace(case(seed, slo_ms - ways_ms), network=_SHORT),
        begin_ns=_BEGIN_NS,
    )


FAMILIES = (
    _family("link_8ms", _network(8), rate_rps=800, slo_ms=80, num_workers=3),
    _family("link_25ms", _network(25), rate_rps=800, slo_ms=140, num_workers=3),
    _family("link_6ms_tight", _network(6), rate_rps=450, slo_ms=24, num_workers=3, ways_ms=12),
    _family(
        "link_12ms_overload", _network(12), rate_rps=3000, slo_ms=80, num_workers=3, ways_ms=24
    ),
    _family("link_10ms_bursts", _network(10), rate_rps=700, slo_ms=90, num_workers=3, bursty=True),
    _family(
        "link_15ms_loads",
        _network(15),
        rate_rps=250,
        slo_ms=150,
        num_workers=2,
        num_models=150,
        num_pages=700,
        ways_ms=30,
    ),
    _family(
        "link_10ms_small",
        _network(10),
        row="resnet18_v2",
        rate_rps=2200,
        slo_ms=70,
        num_workers=3,
        seconds=3,
    ),
    _family("link_3_and_16ms", _network(3, 16), rate_rps=800, slo_ms=60, num_workers=3),
    _family("link_14_and_1ms", _network(14, 1), rate_rps=800, slo_ms=60, num_workers=3),
    _family(
        "link_one_far",
        _unlike([_network(18), _SHORT, _SHORT, _SHORT]),
        rate_rps=800,
        slo_ms=55,
        num_workers=4,
    ),
    _family(
        "link_one_too_far",
        _unlike([_network(40), _SHORT, _SHORT, _SHORT]),
        rate_rps=700,
        slo_ms=30,
        num_workers=4,
    ),
    _family("link_jitter_2ms", _network(0.5, jitter_ms=2), rate_rps=700, slo_ms=45, num_workers=3),
    _family("link_jitter_4ms", _network(1, jitter_ms=4), rate_rps=700, slo_ms=75, num_workers=3),
    _family("link_9ms_jitter", _network(9, jitter_ms=1), rate_rps=700, slo_ms=70, num_workers=3),
)
