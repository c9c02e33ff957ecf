"""Models that do not fit, asked by timers: who knows the period knows what to evict.

`timers_*` are asked at a steady period each; `cyclic` asks one model more than fit in turn, where the least
recently used model is always the next one asked; `halftimers` mixes timers with models that are asked at random,
about which nothing is known, and so belongs to no share of timers; `jitter` has timers that are up to a twentieth of their period late. `random` has no
timers at all: what is learned must not mislead.
"""

from __future__ import annotations

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.policies.loads import NOISE, pressed, resnets
from experiments.policies.unseen.family import Family
from experiments.simulator import Case, Cluster
from traces.arrivals import FixedRate, Poisson, Recorded, Source, Workload


def timers(
    seed: int,
    *,
    num_models: int,
    period_ns: int,
    jitter_ns: int,
    slo_ns: int,
    num_gpus: int = 1,
    num_pages: int,
    duration_ns: int,
    random_rps: float = 0.0,
    num_random: int = 0,
) -> Case:
    """Each model asked exactly once per period, at a phase of its own, up to `jitter_ns` late.

    Besides them `num_random` models are asked at random, `random_rps` in all.
    """
    generator = np.random.default_rng(seed)
    phase_ns = generator.integers(period_ns, size=num_models)
    cycles = np.arange(-(-duration_ns // period_ns))
    times_ns = (phase_ns[None, :] + cycles[:, None] * period_ns).ravel()
    times_ns += generator.integers(jitter_ns + 1, size=len(times_ns))
    asked = np.tile(np.arange(num_models), len(cycles))
    order = np.argsort(times_ns, kind="stable")
    order = order[times_ns[order] < duration_ns]
    sources: list[Source] = [
        Recorded(times_ns=times_ns[order], models=asked[order], slo_ns=slo_ns, end_ns=duration_ns)
    ]
    if num_random:
        sources.append(
            Poisson(
                models=range(num_models, num_models + num_random),
                rate_rps=random_rps,
                slo_ns=slo_ns,
                end_ns=duration_ns,
                seed=seed,
            )
        )
    models = resnets(num_models + num_random)
    return Case(
        workload=Workload(models=tuple(m.model_id for m in models), sources=tuple(sources)),
        cluster=Cluster(models=models, num_workers=num_gpus, num_pages=num_pages, noise=NOISE),
        duration_ns=duration_ns,
        seed=seed,
    )


def cyclic(seed: int, *, num_models: int, rate_rps: float, slo_ns: int, num_pages: int) -> Case:
    """The models are asked in turn, at an even rate."""
    duration_ns = 5 * NS_PER_S
    models = resnets(num_models)
    source = FixedRate(
        models=range(num_models), rate_rps=rate_rps, slo_ns=slo_ns, end_ns=duration_ns
    )
    return Case(
        workload=Workload(models=tuple(m.model_id for m in models), sources=(source,)),
        cluster=Cluster(models=models, num_pages=num_pages, noise=NOISE),
        duration_ns=duration_ns,
        seed=seed,
    )


FAMILIES: tuple[Family, ...] = (
    Family(
        name="timers",
        part="timers",
        case=lambda seed: timers(
            seed,
            num_models=900,
            period_ns=3 * NS_PER_S,
            jitter_ns=2 * NS_PER_MS,
            slo_ns=25 * NS_PER_MS,
            num_pages=1376,
            duration_ns=45 * NS_PER_S,
        ),
        bound="residency",
        begin_ns=9 * NS_PER_S,
    ),
    Family(
        name="timers_short",
        part="timers",
        case=lambda seed: timers(
            seed,
            num_models=200,
            period_ns=NS_PER_S,
            jitter_ns=5 * NS_PER_MS,
            slo_ns=50 * NS_PER_MS,
            num_pages=400,
            duration_ns=27 * NS_PER_S,
        ),
        bound="residency",
        begin_ns=3 * NS_PER_S,
    ),
    Family(
        name="timers_two",
        part="timers",
        case=lambda seed: timers(
            seed,
            num_models=500,
            period_ns=NS_PER_S,
            jitter_ns=NS_PER_MS,
            slo_ns=30 * NS_PER_MS,
            num_gpus=2,
            num_pages=700,
            duration_ns=19 * NS_PER_S,
        ),
        bound="residency",
        begin_ns=3 * NS_PER_S,
    ),
    Family(
        name="halftimers",
        part="unforeseen",
        case=lambda seed: timers(
            seed,
            num_models=250,
            period_ns=2 * NS_PER_S,
            jitter_ns=10 * NS_PER_MS,
            slo_ns=50 * NS_PER_MS,
            num_pages=700,
            duration_ns=18 * NS_PER_S,
            random_rps=125,
            num_random=100,
        ),
        bound="residency",
        begin_ns=6 * NS_PER_S,
    ),
    Family(
        name="jitter",
        part="timers",
        case=lambda seed: timers(
            seed,
            num_models=250,
            period_ns=NS_PER_S,
            jitter_ns=50 * NS_PER_MS,
            slo_ns=50 * NS_PER_MS,
            num_pages=600,
            duration_ns=23 * NS_PER_S,
        ),
        bound="residency",
        begin_ns=3 * NS_PER_S,
    ),
    Family(
        name="thrash",
        part="timers",
        case=lambda seed: cyclic(
            seed, num_models=8, rate_rps=200, slo_ns=60 * NS_PER_MS, num_pages=49
        ),
        bound="residency",
        begin_ns=NS_PER_S,
    ),
    Family(
        name="random",
        part="unforeseen",
        case=lambda seed: pressed(
            resnets(300),
            seed,
            zipf=0.6,
            num_gpus=1,
            num_pages=1050,
            rate_rps=500,
            slo_ns=100 * NS_PER_MS,
            duration_ns=8 * NS_PER_S,
        ),
        bound="residency",
    ),
)
