"""Overload with many models, and bursts: what is refused is refused at once, and nothing that could be served.

The families named `refusal_...` ask for more than the GPUs can do, and stay there. Those named `burst_...` bring
everything in one instant to GPUs that are idle, no more than can be answered: each refusal is a wrong one.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.clockwork_paper.cases import case_of, resnets
from experiments.clockwork_paper.cases import zoo as models_of_all_kinds
from experiments.policies.load import Load
from experiments.simulator import Case
from modelzoo.profile import Noise
from traces.arrivals import Poisson, Recorded, Source

_case_of = partial(case_of, noise=Noise(exec_sigma=0.003, load_sigma=0.01))


def _steady(
    seed: int,
    *,
    num_models: int,
    num_gpus: int,
    rate_rps: float,
    slos_ms: tuple[int, ...] = (100,),
    duration_s: float = 3.0,
    zipf: float = 0.0,
    zoo: bool = False,
) -> Case:
    """Poisson arrivals at one rate; SLOs, where there are several, in each model alike."""
    models = models_of_all_kinds(num_models, seed) if zoo else resnets(num_models)
    popularity = 1.0 / np.arange(1, num_models + 1) ** zipf
    popularity = np.random.default_rng(seed).permutation(popularity / popularity.sum())
    end_ns = int(duration_s * NS_PER_S)
    groups = [((*range(num_models),), 1.0)]
    if zipf:
        groups = [((model,), float(share)) for model, share in enumerate(popularity)]
    sources = [
        Poisson(
            models=group,
            rate_rps=rate_rps * share / len(slos_ms),
            slo_ns=slo_ms * NS_PER_MS,
            end_ns=end_ns,
            seed=1000 * seed + number * len(slos_ms) + index,
        )
        for number, (group, share) in enumerate(groups)
        for index, slo_ms in enumerate(slos_ms)
    ]
    return _case_of(models, sources, seed=seed, end_ns=end_ns, num_gpus=num_gpus)


def _flood(seed: int, *, calm_rps: float, flood_rps: float) -> Case:
    """Eight models asked calmly, and a ninth that floods."""
    end_ns = 3 * NS_PER_S
    sources = [
        Poisson(
            models=(*range(8),), rate_rps=calm_rps, slo_ns=100 * NS_PER_MS, end_ns=end_ns, seed=seed
        ),
        Poisson(
            models=(8,),
            rate_rps=flood_rps,
            slo_ns=100 * NS_PER_MS,
            begin_ns=NS_PER_S // 2,
            end_ns=end_ns,
            seed=seed + 50,
        ),
    ]
    return _case_of(resnets(9), sources, seed=seed, end_ns=end_ns)


def _step(seed: int, *, before_rps: float, after_rps: float, num_models: int) -> Case:
    """A calm load that triples within an instant, and falls back."""
    sources = [
        Poisson(
            models=(*range(num_models),),
            rate_rps=rate_rps,
            slo_ns=100 * NS_PER_MS,
            begin_ns=begin_ns,
            end_ns=end_ns,
            seed=seed + 50 * index,
        )
        for index, (rate_rps, begin_ns, end_ns) in enumerate(
            (
                (before_rps, 0, NS_PER_S),
                (after_rps, NS_PER_S, 2 * NS_PER_S),
                (before_rps, 2 * NS_PER_S, 3 * NS_PER_S),
            )
        )
    ]
    return _case_of(resnets(num_models), sources, seed=seed, end_ns=3 * NS_PER_S, num_gpus=2)


def _bursts(seed: int, *, sizes: tuple[int, ...], num_gpus: int = 2, warm: bool = True) -> Case:
    """As many requests per model as `sizes` says, in one instant; then 200 ms without, ten times.

    Warm: each model was asked for one at a time before.
    """
    begin_ns, period_ns = NS_PER_S if warm else 0, 200 * NS_PER_MS
    times, models = [], []
    for number in range(10 if warm else 1):
        for model, size in enumerate(sizes):
            times += [begin_ns + number * period_ns] * size
            models += [model] * size
    end_ns = begin_ns + 10 * period_ns
    sources: list[Source] = [
        Recorded(
            times_ns=np.array(times, np.int64),
            models=np.array(models),
            slo_ns=100 * NS_PER_MS,
            end_ns=end_ns,
        )
    ]
    if warm:
        sources.append(
            Poisson(
                models=(*range(len(sizes)),),
                rate_rps=20.0 * len(sizes),
                slo_ns=100 * NS_PER_MS,
                end_ns=begin_ns - 100 * NS_PER_MS,
                seed=seed,
            )
        )
    return _case_of(resnets(len(sizes)), sources, seed=seed, end_ns=end_ns, num_gpus=num_gpus)


# Where some models ask for far more than others and not all can be served, isolation decides whom.
_SHARED_OUT = ("refusal_flood", "refusal_zipf")

_one, _two = (partial(_steady, num_gpus=number) for number in (1, 2))
_TWENTY = partial(_steady, num_models=4, num_gpus=20, rate_rps=30000, duration_s=1.0)
_WIDE_MS = (50, 100, 1000)

#: ResNet50 answers 361 r/s one by one and 1,117 r/s in batches of 16 on one GPU of Table 1.
FAMILIES: tuple[Load, ...] = tuple(
    Load(
        name=name,
        group="refusals",
        case=case,
        bound=bound,
        compared="small" if name in _SHARED_OUT else "all",
    )
    for name, bound, case in (
        ("refusal_15", "density", partial(_one, num_models=15, rate_rps=1500)),
        ("refusal_600", "memory", partial(_steady, num_models=600, num_gpus=4, rate_rps=2200)),
        ("refusal_600_cold", "memory", partial(_two, num_models=600, rate_rps=1100)),
        ("refusal_1", "density", partial(_one, num_models=1, rate_rps=1700)),
        ("refusal_4_deep", "density", partial(_one, num_models=4, rate_rps=9000)),
        ("refusal_15_light", "density", partial(_one, num_models=15, rate_rps=880)),
        ("refusal_15_deep", "density", partial(_one, num_models=15, rate_rps=6000)),
        ("refusal_15_six", "density", partial(_steady, num_models=15, num_gpus=6, rate_rps=10000)),
        ("refusal_4_twenty", "density", _TWENTY),
        ("refusal_100", "density", partial(_two, num_models=100, rate_rps=1500)),
        ("refusal_slos", "", partial(_one, num_models=15, rate_rps=1500, slos_ms=(25, 100))),
        ("refusal_slos_wide", "", partial(_one, num_models=15, rate_rps=1500, slos_ms=_WIDE_MS)),
        ("refusal_tight", "density", partial(_two, num_models=15, rate_rps=1500, slos_ms=(25,))),
        ("refusal_long", "density", partial(_one, num_models=15, rate_rps=1800, slos_ms=(500,))),
        ("refusal_zipf", "memory", partial(_two, num_models=100, rate_rps=2600, zipf=1.0)),
        ("refusal_zoo", "memory", partial(_two, num_models=40, rate_rps=1200, zoo=True)),
        ("refusal_flood", "density", partial(_flood, calm_rps=300, flood_rps=2500)),
        ("refusal_step", "density", partial(_step, before_rps=800, after_rps=3000, num_models=15)),
        ("burst_one", "", partial(_bursts, sizes=(90,))),
        ("burst_15", "", partial(_bursts, sizes=(4,) * 15)),
        ("burst_uneven", "", partial(_bursts, sizes=(40, 10, 5, 2, 1, 1), num_gpus=1)),
        ("burst_cold", "", partial(_bursts, sizes=(90,), warm=False)),
        ("burst_cold_six", "", partial(_bursts, sizes=(12,) * 6, warm=False)),
    )
)
