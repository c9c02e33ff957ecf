"""Hot models that need more copies than memory leaves room for.

All memory is full when a model becomes hot. In `hotone` one model asks 2.5 times what one GPU can give, with an SLO shorter than its load, beside sixty that
trickle; `hotthree` has three such models on six GPUs; in `hotmoves` the hot model is another one every second;
`hotcold` is `hotone` with an SLO that a load can meet.
"""

from __future__ import annotations

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.policies.loads import NOISE, resnets
from experiments.policies.unseen.family import Family
from experiments.simulator import Case, Cluster
from traces.arrivals import Poisson, Source, Workload


def hot(
    seed: int,
    *,
    num_hot: int,
    num_others: int,
    hot_rps: float,
    other_rps: float,
    slo_ns: int,
    num_gpus: int,
    num_pages: int,
    stay_ns: int | None = None,
    duration_ns: int = 5 * NS_PER_S,
) -> Case:
    """Some hot models beside many that trickle, with equal SLOs.

    Args:
        seed: of the arrivals, and of the noise.
        num_hot: models that are hot at once.
        num_others: models that trickle.
        hot_rps: rate of each hot model.
        other_rps: rate of all others together.
        slo_ns: of every request.
        num_gpus: number of GPUs.
        num_pages: of each.
        stay_ns: after so long the next models are the hot ones; None: it is always the same.
        duration_ns: arrivals end here.
    """
    models = resnets(num_hot + num_others)
    stay_ns = stay_ns or duration_ns
    sources: list[Source] = [
        Poisson(
            models=range(len(models)),
            rate_rps=other_rps,
            slo_ns=slo_ns,
            end_ns=duration_ns,
            seed=seed,
        )
    ]
    # The others fill all memory first.
    for turn, begin_ns in enumerate(range(NS_PER_S, duration_ns, stay_ns)):
        first = turn * num_hot
        sources.append(
            Poisson(
                models=range(first, first + num_hot),
                rate_rps=num_hot * hot_rps,
                slo_ns=slo_ns,
                begin_ns=begin_ns,
                end_ns=min(begin_ns + stay_ns, duration_ns),
                seed=seed * 1_000 + turn,
            )
        )
    return Case(
        workload=Workload(models=tuple(m.model_id for m in models), sources=tuple(sources)),
        cluster=Cluster(models=models, num_workers=num_gpus, num_pages=num_pages, noise=NOISE),
        duration_ns=duration_ns,
        seed=seed,
    )


FAMILIES: tuple[Family, ...] = (
    Family(
        name="hotone",
        part="copies",
        begin_ns=NS_PER_S,
        case=lambda seed: hot(
            seed,
            num_hot=1,
            num_others=60,
            hot_rps=900,
            other_rps=120,
            slo_ns=9 * NS_PER_MS,
            num_gpus=4,
            num_pages=126,
        ),
    ),
    Family(
        name="hotthree",
        part="copies",
        begin_ns=NS_PER_S,
        case=lambda seed: hot(
            seed,
            num_hot=3,
            num_others=80,
            hot_rps=600,
            other_rps=100,
            slo_ns=9 * NS_PER_MS,
            num_gpus=6,
            num_pages=126,
        ),
    ),
    Family(
        name="hotmoves",
        part="copies",
        begin_ns=NS_PER_S,
        case=lambda seed: hot(
            seed,
            num_hot=1,
            num_others=60,
            hot_rps=900,
            other_rps=100,
            slo_ns=9 * NS_PER_MS,
            num_gpus=4,
            num_pages=126,
            stay_ns=NS_PER_S,
        ),
    ),
    Family(
        name="hotcold",
        part="copies",
        begin_ns=NS_PER_S,
        case=lambda seed: hot(
            seed,
            num_hot=1,
            num_others=60,
            hot_rps=1500,
            other_rps=100,
            slo_ns=40 * NS_PER_MS,
            num_gpus=4,
            num_pages=126,
        ),
    ),
)
