"""Models that do not fit, asked by timers: who knows the period knows what to evict.

`timers_*` are asked at a steady period each; `cyclic` asks one model more than fit in turn, where the least
recently used model is always the next one asked; `halftimers` mixes timers with models that are asked at random,
about which nothing is known, and so belongs to no share of timers; `jitter` has timers that are up to a twentieth of their period late. `random` has no
timers at all: what is learned must not mislead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.clockwork_paper.cases import pressed, resnets
from experiments.policies.load import Load, case_of, ms, poisson, s
from experiments.simulator import Case
from traces.arrivals import FixedRate, Recorded, Source


def timers(
    seed: int,
    *,
    num_models: int,
    period_s: int = 1,
    jitter_ms: int,
    slo_ms: int,
    gpus: int = 1,
    pages: int,
    seconds: int,
    random_rps: float = 0.0,
    num_random: int = 0,
) -> Case:
    """Each model asked exactly once per period, at a phase of its own, up to `jitter_ms` late.

    Besides them `num_random` models are asked at random, `random_rps` in all.
    """
    generator = np.random.default_rng(seed)
    period_ns, jitter_ns, duration_ns = s(period_s), ms(jitter_ms), s(seconds)
    phase_ns = generator.integers(period_ns, size=num_models)
    cycles = np.arange(-(-duration_ns // period_ns))
    times_ns = (phase_ns[None, :] + cycles[:, None] * period_ns).ravel()
    times_ns += generator.integers(jitter_ns + 1, size=len(times_ns))
    asked = np.tile(np.arange(num_models), len(cycles))
    order = np.argsort(times_ns, kind="stable")
    order = order[times_ns[order] < duration_ns]
    asked_ns, models = times_ns[order], asked[order]
    sources: list[Source] = [
        Recorded(times_ns=asked_ns, models=models, slo_ns=ms(slo_ms), end_ns=duration_ns)
    ]
    if num_random:
        of_random = range(num_models, num_models + num_random)
        sources.append(poisson(of_random, random_rps, slo_ms, seconds, seed))
    return case_of(resnets(num_models + num_random), sources, seed, seconds, gpus=gpus, pages=pages)


def _cyclic(seed: int) -> Case:
    """Eight models where seven fit, asked in turn at an even rate."""
    source = FixedRate(models=range(8), rate_rps=200, slo_ns=ms(60), end_ns=s(5))
    return case_of(resnets(8), [source], seed, 5, pages=49)


_unpopular = partial(
    pressed,
    resnets(300),
    zipf=0.6,
    num_gpus=1,
    num_pages=1050,
    rate_rps=500,
    slo_ns=100 * NS_PER_MS,
    duration_ns=8 * NS_PER_S,
)


def _timers(
    name: str,
    num_models: int,
    *,
    group: str = "timers",
    period_s: int = 1,
    **others: Any,  # noqa: ANN401
) -> Load:
    """Timers, counted after three periods."""
    case = partial(timers, num_models=num_models, period_s=period_s, **others)
    return Load(name, group, case, 3 * s(period_s), bound="residency")


FAMILIES: tuple[Load, ...] = (
    _timers("timers", 900, period_s=3, jitter_ms=2, slo_ms=25, pages=1376, seconds=45),
    _timers("timers_short", 200, jitter_ms=5, slo_ms=50, pages=400, seconds=27),
    _timers("timers_two", 500, jitter_ms=1, slo_ms=30, pages=700, seconds=19, gpus=2),
    _timers(
        "halftimers", 250, group="unforeseen", period_s=2, jitter_ms=10, slo_ms=50, pages=700,
        seconds=18, random_rps=125, num_random=100,
    ),
    _timers("jitter", 250, jitter_ms=50, slo_ms=50, pages=600, seconds=23),
    Load(name="thrash", group="timers", case=_cyclic, bound="residency", begin_ns=NS_PER_S),
    Load(name="random", group="unforeseen", case=_unpopular, bound="residency"),
)  # fmt: skip
