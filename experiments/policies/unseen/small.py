"""Small clients beside large ones, and giants among the small: nobody floods, and nobody is to be starved.

Whoever is small, or the giant, has a tenant or a model whose name begins with `small` or `giant`.
"""

from __future__ import annotations

from functools import partial

from experiments.policies.load import Load, case_of, hosted, ms, poisson, row_of, s
from experiments.simulator import Case
from modelzoo.profile import load_profile
from traces.arrivals import ClosedLoop

_RESNET50 = load_profile("table1").row_for("resnet50_v1b")
_SECONDS = 5


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
    exec_ms = {size: 20 + 20 * size for size in (1, 2, 4)}
    row = row_of("giant", load_ms, exec_ms, megabytes=12.2 * load_ms)
    others = (hosted(f"other-{number}", _RESNET50) for number in range(num_small))
    sources = (
        poisson((0,), giant_rps, giant_slo_ms, _SECONDS, 1000 * seed),
        poisson(range(1, num_small + 1), small_rps, 100, _SECONDS, 1000 * seed + 1),
    )
    return case_of((hosted("giant", row), *others), sources, seed, _SECONDS)


def _closed(
    seed: int, *, large: int, num_small: int, small: int, num_workers: int, slo_ms: int
) -> Case:
    """One model with many clients, beside some with few; all ask again when they are answered."""
    names = ("large", *(f"small-{number}" for number in range(num_small)))
    loops = [
        ClosedLoop(
            model=number,
            concurrency=small if number else large,
            slo_ns=ms(slo_ms),
            end_ns=s(_SECONDS),
            start_jitter_ns=ms(50),
            seed=1000 * seed + number,
        )
        for number in range(len(names))
    ]
    models = tuple(hosted(name, _RESNET50) for name in names)
    return case_of(models, (), seed, _SECONDS, loops=loops, gpus=num_workers)


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
