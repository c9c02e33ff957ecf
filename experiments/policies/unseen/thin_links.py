"""Links that carry less than the GPUs would take, held against what they carry (`experiments.bounds`)."""

from __future__ import annotations

from dataclasses import replace

from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from experiments.policies.loads import poisson
from experiments.policies.unseen.family import Family
from experiments.simulator import Case, HostedModel, Network
from modelzoo.profile import load_profile

_ROW = load_profile("table1").rows["resnet50_v1b"]
_BEGIN_NS = NS_PER_S // 2
_GIGABIT = 125_000_000

# By size of inputs and of outputs, in kB.
_Sizes = tuple[tuple[int, int], ...]


def _family(
    name: str,
    network: Network,
    *,
    rate_rps: float,
    slo_ms: float,
    num_workers: int,
    sizes: _Sizes = ((602, 4),),
    num_models: int = 30,
    seconds: int = 4,
) -> Family:
    """A family of models that differ in what they take from a link, in turn.

    Args:
        name: the family's.
        network: with its thin links.
        rate_rps: mean rate of all models together.
        slo_ms: of every request.
        num_workers: GPUs.
        sizes: of inputs and outputs.
        num_models: in all.
        seconds: length of the run.
    """

    def case(seed: int) -> Case:
        models = tuple(
            HostedModel(
                ModelId(f"m{number}"),
                replace(
                    _ROW,
                    name=f"in{sizes[number % len(sizes)][0]}_out{sizes[number % len(sizes)][1]}",
                    input_bytes=1000 * sizes[number % len(sizes)][0],
                    output_bytes=1000 * sizes[number % len(sizes)][1],
                ),
            )
            for number in range(num_models)
        )
        load = poisson(
            models,
            seed,
            num_gpus=num_workers,
            rate_rps=rate_rps,
            slo_ns=round(slo_ms * NS_PER_MS),
            duration_ns=seconds * NS_PER_S,
        )
        return replace(load, network=network)

    return Family(name=name, part="thin_links", case=case, begin_ns=_BEGIN_NS)


def _thin(bytes_per_s: int, delay_ms: float = 0.1, jitter_ms: float = 0.0) -> Network:
    return Network(
        bytes_per_s=bytes_per_s,
        delay_ns=round(delay_ms * NS_PER_MS),
        jitter_ns=round(jitter_ms * NS_PER_MS),
    )


FAMILIES = (
    _family("thin_65pct", _thin(_GIGABIT), rate_rps=400, slo_ms=90, num_workers=3),
    _family("thin_90pct", _thin(_GIGABIT), rate_rps=560, slo_ms=120, num_workers=3),
    _family("thin_160pct", _thin(_GIGABIT), rate_rps=1000, slo_ms=90, num_workers=3),
    _family("thin_300pct", _thin(_GIGABIT), rate_rps=1850, slo_ms=70, num_workers=3),
    _family("thin_10gbit", _thin(10 * _GIGABIT), rate_rps=1200, slo_ms=60, num_workers=3),
    _family(
        "thin_mixed",
        _thin(_GIGABIT),
        sizes=((600, 4), (40, 4), (150, 4)),
        rate_rps=1100,
        slo_ms=90,
        num_workers=3,
    ),
    _family(
        "thin_outputs", _thin(_GIGABIT), sizes=((10, 500),), rate_rps=1100, slo_ms=90, num_workers=3
    ),
    _family(
        "thin_100mbit_small",
        _thin(_GIGABIT // 10),
        sizes=((24, 4),),
        rate_rps=1100,
        slo_ms=60,
        num_workers=3,
    ),
    _family(
        "thin_one_of_four",
        Network(links=(_thin(_GIGABIT // 2), *(3 * (_thin(20 * _GIGABIT),)))),
        rate_rps=900,
        slo_ms=50,
        num_workers=4,
    ),
    _family("thin_and_long", _thin(_GIGABIT, delay_ms=8), rate_rps=850, slo_ms=110, num_workers=3),
    _family(
        "thin_and_jittery", _thin(_GIGABIT, jitter_ms=1.5), rate_rps=500, slo_ms=90, num_workers=3
    ),
)
