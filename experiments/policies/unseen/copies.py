"""Hot models that need more copies than memory leaves room for.

All memory is full when a model becomes hot. In `hotone` one model asks 2.5 times what one GPU can give, with an SLO shorter than its load, beside sixty that
trickle; `hotthree` has three such models on six GPUs; in `hotmoves` the hot model is another one every second;
`hotcold` is `hotone` with an SLO that a load can meet.
"""

from __future__ import annotations

from functools import partial

from clockwright.units import NS_PER_S
from experiments.clockwork_paper.cases import resnets
from experiments.policies.load import Load, case_of, poisson
from experiments.simulator import Case

_SECONDS = 5


def hot(
    seed: int,
    *,
    others: int,
    hot_rps: float,
    other_rps: float,
    slo_ms: int = 9,
    num_hot: int = 1,
    gpus: int = 4,
    stay_s: int = _SECONDS,
) -> Case:
    """Some hot models beside many that trickle, with equal SLOs.

    Args:
        seed: of the arrivals, and of the noise.
        others: models that trickle.
        hot_rps: rate of each hot model.
        other_rps: rate of all others together.
        slo_ms: of every request.
        num_hot: models that are hot at once.
        gpus: number of GPUs.
        stay_s: after so long the next models are the hot ones.
    """
    models = resnets(num_hot + others)
    sources = [poisson(range(len(models)), other_rps, slo_ms, _SECONDS, seed)]
    # The others fill all memory first.
    for turn, begin_s in enumerate(range(1, _SECONDS, stay_s)):
        of_turn = range(turn * num_hot, (turn + 1) * num_hot)
        end_s = min(begin_s + stay_s, _SECONDS)
        rate_rps, own_seed = num_hot * hot_rps, seed * 1_000 + turn
        sources.append(poisson(of_turn, rate_rps, slo_ms, end_s, own_seed, begin_s=begin_s))
    return case_of(models, sources, seed, _SECONDS, gpus=gpus, pages=126)


FAMILIES: tuple[Load, ...] = tuple(
    Load(name=name, group="copies", begin_ns=NS_PER_S, case=case)
    for name, case in (
        ("hotone", partial(hot, others=60, hot_rps=900, other_rps=120)),
        ("hotthree", partial(hot, others=80, hot_rps=600, other_rps=100, num_hot=3, gpus=6)),
        ("hotmoves", partial(hot, others=60, hot_rps=900, other_rps=100, stay_s=1)),
        ("hotcold", partial(hot, others=60, hot_rps=1500, other_rps=100, slo_ms=40)),
    )
)
