"""Overload with many models, and bursts: what is refused is refused at once, and nothing that could be served.

The families named `refusal_...` ask for more than the GPUs can do, and stay there. Those named `burst_...` bring
everything in one instant to GPUs that are idle, no more than can be answered: each refusal is a wrong one.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from experiments.clockwork_paper.cases import resnets
from experiments.clockwork_paper.cases import zoo as models_of_all_kinds
from experiments.policies.load import Load, case_of, ms, poisson, s
from experiments.simulator import Case
from modelzoo.profile import Noise
from traces.arrivals import Recorded, Source

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
    groups: list[tuple[range, float]] = [(range(num_models), 1.0)]
    if zipf:
        popularity = 1.0 / np.arange(1, num_models + 1) ** zipf
        popularity = np.random.default_rng(seed).permutation(popularity / popularity.sum())
        groups = [(range(m, m + 1), share) for m, share in enumerate(popularity.tolist())]
    asked = [(group, share, slo_ms) for group, share in groups for slo_ms in slos_ms]
    sources = [
        poisson(group, rate_rps * share / len(slos_ms), slo_ms, duration_s, 1000 * seed + number)
        for number, (group, share, slo_ms) in enumerate(asked)
    ]
    return _case_of(models, sources, seed, duration_s, gpus=num_gpus)


def _flood(seed: int, *, calm_rps: float, flood_rps: float) -> Case:
    """Eight models asked calmly, and a ninth that floods."""
    sources = [
        poisson(range(8), calm_rps, 100, 3, seed),
        poisson((8,), flood_rps, 100, 3, seed + 50, begin_s=0.5),
    ]
    return _case_of(resnets(9), sources, seed, 3)


def _step(seed: int, *, before_rps: float, after_rps: float, num_models: int) -> Case:
    """A calm load that triples within an instant, and falls back."""
    sources = [
        poisson(range(num_models), rate_rps, 100, at_s + 1, seed + 50 * at_s, begin_s=at_s)
        for at_s, rate_rps in enumerate((before_rps, after_rps, before_rps))
    ]
    return _case_of(resnets(num_models), sources, seed, 3, gpus=2)


def _bursts(seed: int, *, sizes: tuple[int, ...], num_gpus: int = 2, warm: bool = True) -> Case:
    """As many requests per model as `sizes` says, in one instant; then 200 ms without, ten times.

    Warm: each model was asked for one at a time before.
    """
    models, (begin_s, number) = range(len(sizes)), (1.0, 10) if warm else (0.0, 1)
    at_ns = s(begin_s) + ms(200) * np.arange(number)
    sources: list[Source] = [
        Recorded(
            times_ns=np.repeat(at_ns, sum(sizes)),
            models=np.tile(np.repeat(models, sizes), number),
            slo_ns=ms(100),
            end_ns=s(begin_s + 2),
        )
    ]
    if warm:
        sources.append(poisson(models, 20.0 * len(sizes), 100, begin_s - 0.1, seed))
    return _case_of(resnets(len(sizes)), sources, seed, begin_s + 2, gpus=num_gpus)


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
