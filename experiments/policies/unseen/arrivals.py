"""Arrivals, popularities and SLOs that the policies were not tuned to, on clusters of one kind.

Rates are chosen as shares of what the GPUs could do, some below it and some above, so that both order and
pruning count. Caches are cold at the start, and the first half second is not counted.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.clockwork_paper.cases import resnets, zoo
from experiments.policies.load import (
    ROWS,
    Load,
    alike,
    asked_at_random,
    case_of,
    hosted,
    ms,
    recorded,
    row_of,
    s,
)
from experiments.simulator import Case, Faults, LostWorker, Network, WorkerClock, copies_of
from traces.arrivals import FixedRate


def _zipf(count: int, exponent: float, seed: int) -> npt.NDArray[np.float64]:
    """Popularities that sum to 1, dealt out at random."""
    popularity = 1.0 / np.arange(1, count + 1) ** exponent
    popularity /= popularity.sum()
    return np.random.default_rng(2000 + seed).permutation(popularity)


def _times(
    generator: np.random.Generator, begin_s: float, end_s: float, rate_rps: float
) -> npt.NDArray[np.float64]:
    """Times of a Poisson process, in seconds."""
    number = generator.poisson(rate_rps * (end_s - begin_s))
    return begin_s + (end_s - begin_s) * generator.random(number)


def _together(seed: int) -> Case:
    """Groups of four models that are asked in the same instant."""
    generator = np.random.default_rng(seed)
    times_s = _times(generator, 0, 3, 110)
    groups = generator.integers(12, size=len(times_s))
    picks = (4 * groups[:, None] + np.arange(4)).ravel()
    return case_of(resnets(48), [recorded(np.repeat(times_s, 4), picks, 80, 3)], seed, 3, gpus=1)


def _gamma(seed: int) -> Case:
    """Gamma arrivals with a coefficient of variation of 4, model by model."""
    models, seconds, rps = zoo(36, 1000 + seed), 4.0, 40.0
    generator = np.random.default_rng(seed)
    shape = 1 / 16
    times, picks = [], []
    for model in range(len(models)):
        gaps = generator.gamma(shape, 1 / (rps * shape), size=round(rps * seconds * 4))
        arrivals = np.cumsum(gaps) - generator.random() * gaps[0]
        arrivals = arrivals[(arrivals >= 0) & (arrivals < seconds)]
        times.append(arrivals)
        picks.append(np.full(len(arrivals), model))
    source = recorded(np.concatenate(times), np.concatenate(picks), 50, seconds)
    return case_of(models, [source], seed, seconds, gpus=4)


def _functions(
    seed: int,
    *,
    functions: int,
    zipf: float,
    models: int,
    rate_rps: float,
    slo_ms: float,
    gpus: int,
) -> Case:
    """Functions like Azure's of 2021: Zipf, each on and off, with Pareto bursts and pauses."""
    seconds = 4.0
    generator = np.random.default_rng(seed)
    weights = _zipf(functions, zipf, seed)
    times, picks = [], []
    for function, weight in enumerate(weights):
        at_s = -float(generator.random())
        while at_s < seconds:
            burst_s, pause_s = 0.1 * (1 + generator.pareto(1.5, size=2))
            begin_s, end_s = max(0.0, at_s), min(seconds, at_s + burst_s)
            if end_s > begin_s:
                times.append(_times(generator, begin_s, end_s, 2 * rate_rps * weight))
                picks.append(np.full(len(times[-1]), function % models))
            at_s += burst_s + pause_s
    source = recorded(np.concatenate(times), np.concatenate(picks), slo_ms, seconds)
    return case_of(zoo(models, 1000 + seed), [source], seed, seconds, gpus=gpus)


def _metronomes(seed: int) -> Case:
    """Cameras: 40 streams of 30 frames a second, in phase but for 2 ms, one model each."""
    sources = [
        FixedRate(
            models=(model,),
            rate_rps=30,
            slo_ns=ms(33),
            jitter_ns=ms(2),
            end_ns=s(3),
            seed=100 * seed + model,
        )
        for model in range(40)
    ]
    return case_of(resnets(40), sources, seed, 3, gpus=5)


def _heavy(seed: int) -> Case:
    """Weights from 15 MB to 3 GB, Pareto; EXECs grow with their root."""
    count = 100
    generator = np.random.default_rng(seed)
    megabytes = np.minimum(15 * (1 + generator.pareto(1.0, size=count)), 3000)
    models = tuple(
        hosted(
            f"h{number}",
            row_of(
                f"h{number}",
                size / 12.0,
                {batch: 0.35 * size**0.5 * (0.4 + 0.6 * batch) for batch in (1, 2, 4, 8)},
                megabytes=size,
            ),
        )
        for number, size in enumerate(megabytes.tolist())
    )
    generator = np.random.default_rng(3000 + seed)
    times_s = _times(generator, 0, 4, 700)
    picks = generator.choice(count, size=len(times_s), p=_zipf(count, 0.8, seed))
    return case_of(models, [recorded(times_s, picks, 150, 4)], seed, 4, gpus=2)


# Late and lost messages, clocks that drift, slow EXECs, and all workers away for half a second.
_CHAOS = Faults(
    slow_probability=0.001,
    slow_factor=8,
    delay_probability=0.0005,
    delay_ns=150 * NS_PER_MS,
    loss_probability=0.00002,
    lost_workers=tuple(
        LostWorker(worker=worker, at_ns=2000 * NS_PER_MS, back_ns=2500 * NS_PER_MS)
        for worker in range(3)
    ),
    clocks=tuple(
        WorkerClock(offset_ns=NS_PER_S * worker, drift_ppb=20_000 * (1 - worker))
        for worker in range(3)
    ),
)

_family = partial(Load, group="arrivals", begin_ns=NS_PER_S // 2)
_asked = partial(asked_at_random, seconds=3, seeds=(1, 50))
_alike = partial(alike, group="arrivals", begin_s=0.5, seconds=3)


def _mixed(rps: float, gpus: int) -> Load:
    """Thirds of each model's requests at 15, 60 and 400 ms."""
    thirds = [(range(10), rps / 3, slo_ms) for slo_ms in (15, 60, 400)]
    name = "mixed_slos_light" if rps < 1000 else "mixed_slos_overload"
    return _family(name, case=_asked(resnets(10), *thirds, gpus=gpus, seeds=(10, 1)))


FAMILIES = (
    _family("together", case=_together),
    _family("gamma_cv4", case=_gamma),
    _family(
        "functions",
        case=partial(_functions, functions=300, zipf=1.2, models=150, rate_rps=1000, slo_ms=90, gpus=2),
        compared="small",
    ),
    # One function has 30 % of the requests. There is no flood.
    _family(
        "popular",
        case=partial(_functions, functions=400, zipf=1.3, models=200, rate_rps=1200, slo_ms=100, gpus=1),
    ),
    _family("metronomes", case=_metronomes),
    _mixed(1700, 2),
    _mixed(900, 3),
    _alike("tiny_slo_6ms", models=resnets(10), rate_rps=600, slo_ms=6, gpus=5),
    _alike("tiny_slo_2ms", models=copies_of(ROWS["resnet18_v2"], 1), rate_rps=550, slo_ms=2.5, gpus=4),
    # A network of 250 ms with an SLO of 11 s, which is a batch client's, together with interactive ones. The run is nearly three
    # times as long as that SLO: in a shorter one, a policy that leaves all of the slow to the time after the last arrival
    # answers everything.
    _family(
        "patient", bound="",
        case=_asked(
            (hosted("slow", row_of("slow", 8, {1: 250})), *resnets(12)),
            (range(1), 7, 11_000), (range(1, 13), 450, 40), seconds=30, gpus=3,
        ),
    ),
    _family("heavy_weights", case=_heavy),
    # 3,000 models that are asked once a minute together with 16 that are hot.
    _family(
        "rare_beside_hot", bound="",
        case=_asked(resnets(3016), (range(16), 500, 80), (range(16, 3016), 50, 80), seconds=4, gpus=2, pages=500),
    ),
    # Compiled for 4 and 8 only: single requests are padded.
    _alike("no_single", models=copies_of(row_of("wide", 8, {4: 4.8, 8: 7.2}), 9), rate_rps=800, slo_ms=35, gpus=2),
    # A network that takes as long for two as for one, and for eight as for four.
    _alike(
        "plateau_of_8", models=copies_of(row_of("plateau", 8, {1: 2.0, 2: 2.0, 4: 3.6, 8: 3.7, 16: 7.8}), 14),
        rate_rps=2400, slo_ms=45, gpus=2,
    ),
    _family(
        "chaos_of_3", bound="",
        case=_asked(
            resnets(40), (range(40), 1100, 70), seconds=4, gpus=3, faults=_CHAOS, network=Network(jitter_ns=50_000)
        ),
    ),
    _alike("one_model_8_gpus", models=copies_of(ROWS["densenet121"], 1), rate_rps=2000, slo_ms=60, gpus=8, seconds=2.5),
    _alike("overload_slo12", models=resnets(16), rate_rps=2500, slo_ms=12, gpus=3),
    _alike("overload_x4", models=resnets(24), rate_rps=7200, slo_ms=40, gpus=2, seconds=2.0),
)  # fmt: skip
