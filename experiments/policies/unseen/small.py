"""Small clients beside large ones, and giants among the small: nobody floods, and nobody is to be starved.

Whoever is small, or the giant, has a tenant or a model whose name begins with `small` or `giant`.
"""

from __future__ import annotations

from functools import partial

from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from experiments.clockwork_paper.cases import case_of
from experiments.policies.load import Load
from experiments.simulator import Case, HostedModel
from modelzoo.profile import ProfileRow, load_profile
from traces.arrivals import ClosedLoop, Poisson

_RESNET50 = load_profile("table1").row_for("resnet50_v1b")
_DURATION_NS = 5 * NS_PER_S


def _giant(
    seed: int,
    *,
    load_ms: int,
    giant_rps: float,
    giant_slo_ms: int,
    num_small: int,
    small_rps: float,
) -> Case:
    """A model of half the memory that takes long to load, beside many that do not fit either."""
    row = ProfileRow(
        name="giant",
        weights_bytes=load_ms * 12_200_000,
        load_ns=load_ms * NS_PER_MS,
        exec_ns={size: (20 + 20 * size) * NS_PER_MS for size in (1, 2, 4)},
    )
    models = (
        HostedModel(ModelId("giant"), row),
        *(HostedModel(ModelId(f"other-{number}"), _RESNET50) for number in range(num_small)),
    )
    sources = (
        Poisson(
            models=(0,),
            rate_rps=giant_rps,
            slo_ns=giant_slo_ms * NS_PER_MS,
            end_ns=_DURATION_NS,
            seed=1000 * seed,
        ),
        Poisson(
            models=range(1, num_small + 1),
            rate_rps=small_rps,
            slo_ns=100 * NS_PER_MS,
            end_ns=_DURATION_NS,
            seed=1000 * seed + 1,
        ),
    )
    return case_of(models, sources, seed=seed, end_ns=_DURATION_NS)


def _closed(
    seed: int, *, large: int, num_small: int, small: int, num_workers: int, slo_ms: int
) -> Case:
    """One model with many clients, beside some with few; all ask again when they are answered."""
    models = (
        HostedModel(ModelId("large"), _RESNET50),
        *(HostedModel(ModelId(f"small-{number}"), _RESNET50) for number in range(num_small)),
    )
    loops = tuple(
        ClosedLoop(
            model=number,
            concurrency=small if number else large,
            slo_ns=slo_ms * NS_PER_MS,
            end_ns=_DURATION_NS,
            start_jitter_ns=50 * NS_PER_MS,
            seed=1000 * seed + number,
        )
        for number in range(len(models))
    )
    return case_of(models, loops=loops, seed=seed, end_ns=_DURATION_NS, num_gpus=num_workers)


_FEW = partial(_closed, large=96, num_small=10, small=1, num_workers=1, slo_ms=60)
_SOME = partial(_closed, large=200, num_small=30, small=2, num_workers=2, slo_ms=80)
_SLOW = partial(_giant, load_ms=900, giant_rps=2, giant_slo_ms=2500, num_small=250, small_rps=500)
_QUICK = partial(_giant, load_ms=300, giant_rps=4, giant_slo_ms=900, num_small=220, small_rps=400)

FAMILIES: tuple[Load, ...] = (
    Load(name="giant", group="small", case=_SLOW, bound="memory"),
    Load(name="giant_quick", group="small", case=_QUICK, bound="memory"),
    Load(name="small_clients", group="small", case=_SOME, bound="rate", compared="small"),
    Load(name="small_clients_few", group="small", case=_FEW, bound="rate", compared="small"),
)
