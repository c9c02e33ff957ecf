"""Arrivals, popularities and SLOs that nobody tuned to, on clusters of one kind; workers that are lost.

Rates are chosen as shares of what the GPUs could do, some below it and some above, so that both order and
pruning count. Caches are cold at the start, and the first half second is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.clockwork_paper.cases import resnets, zoo
from experiments.policies.load import Load, case_of, hosted, ms, poisson, row_of, s
from experiments.simulator import (
    Case,
    Faults,
    HostedModel,
    LostWorker,
    Network,
    WorkerClock,
    copies_of,
)
from modelzoo.profile import load_profile
from traces.arrivals import Bursty, ClosedLoop, FixedRate, Recorded, Source

_TABLE = load_profile("table1").rows

#: A stretch of time: begin and end in seconds, and requests per second in it.
Stretch = tuple[float, float, float]


def _kinds(count: int, seed: int) -> tuple[HostedModel, ...]:
    """Models of all kinds of Table 1, drawn with replacement."""
    return zoo(count, 1000 + seed)


def _zipf(count: int, exponent: float, seed: int) -> npt.NDArray[np.float64]:
    """Popularities that sum to 1, dealt out at random."""
    popularity = 1.0 / np.arange(1, count + 1) ** exponent
    popularity /= popularity.sum()
    return np.random.default_rng(2000 + seed).permutation(popularity)


def _recorded(
    times_s: npt.NDArray[np.float64], models: npt.NDArray[np.integer], slo_ms: float, end_s: float
) -> Recorded:
    times_ns = (times_s * NS_PER_S).astype(np.int64)
    return Recorded(times_ns=times_ns, models=models, slo_ns=ms(slo_ms), end_ns=s(end_s))


def _times(generator: np.random.Generator, stretches: Sequence[Stretch]) -> npt.NDArray[np.float64]:
    """A Poisson process whose rate changes, in seconds."""
    return np.concatenate(
        [
            begin + (end - begin) * generator.random(generator.poisson(rate * (end - begin)))
            for begin, end, rate in stretches
        ]
    )


def _popular(
    popularity: npt.NDArray[np.float64], rps: float, slo_ms: float, seconds: float, seed: int
) -> Recorded:
    """A Poisson process whose requests go to models by popularity."""
    generator = np.random.default_rng(3000 + seed)
    times_s = _times(generator, [(0, seconds, rps)])
    models = generator.choice(len(popularity), size=len(times_s), p=popularity)
    return _recorded(times_s, models, slo_ms, seconds)


# --- bursts -------------------------------------------------------------------------------------------


def _switching(seed: int) -> Case:
    """All models switch together between a tenth and twice of what the GPUs can, some 150 ms each."""
    generator, models, seconds = np.random.default_rng(seed), resnets(20), 3.0
    stretches: list[Stretch] = []
    at_s, high = 0.0, False
    while at_s < seconds:
        end_s = min(seconds, at_s + generator.exponential(0.15))
        stretches.append((at_s, end_s, 4800.0 if high else 400.0))
        at_s, high = end_s, not high
    times_s = _times(generator, stretches)
    picks = generator.integers(len(models), size=len(times_s))
    return case_of(models, [_recorded(times_s, picks, 40, seconds)], seed, seconds, gpus=3)


def _day(seed: int) -> Case:
    """A day in four seconds: two halves of the models, half a day apart."""
    generator, models, seconds = np.random.default_rng(seed), _kinds(24, seed), 4.0
    sources = []
    for half, phase in ((0, 0.0), (1, np.pi)):
        candidates = _times(generator, [(0, seconds, 1300.0)])
        wave = 0.05 + 0.95 * (0.5 - 0.5 * np.cos(2 * np.pi * candidates / seconds + phase))
        times_s = candidates[generator.random(len(candidates)) < wave]
        picks = 12 * half + generator.integers(12, size=len(times_s))
        sources.append(_recorded(times_s, picks, 60, seconds))
    return case_of(models, sources, seed, seconds, gpus=3)


def _crowd(seed: int) -> Case:
    """One of 30 models goes from 25 to 3,000 r/s for a second; memory is half of what all need."""
    seconds = 3.0
    generator = np.random.default_rng(5000 + seed)
    crowd = _times(generator, [(1.0, 2.0, 3000.0)])
    sources: list[Source] = [
        poisson(range(30), 750, 60, seconds, seed),
        _recorded(crowd, np.zeros(len(crowd), np.int64), 60, seconds),
    ]
    return case_of(resnets(30), sources, seed, seconds, gpus=4, pages=105)


def _together(seed: int) -> Case:
    """Groups of four models that are asked in the same instant."""
    seconds = 3.0
    generator = np.random.default_rng(seed)
    times_s = _times(generator, [(0, seconds, 110.0)])
    groups = generator.integers(12, size=len(times_s))
    picks = (4 * groups[:, None] + np.arange(4)).ravel()
    source = _recorded(np.repeat(times_s, 4), picks, 80, seconds)
    return case_of(resnets(48), [source], seed, seconds, gpus=1)


def _gamma(seed: int) -> Case:
    """Gamma arrivals with a coefficient of variation of 4, model by model."""
    models, seconds, rps = _kinds(36, seed), 4.0, 40.0
    generator = np.random.default_rng(seed)
    shape = 1 / 16
    times, picks = [], []
    for model in range(len(models)):
        gaps = generator.gamma(shape, 1 / (rps * shape), size=round(rps * seconds * 4))
        arrivals = np.cumsum(gaps) - generator.random() * gaps[0]
        arrivals = arrivals[(arrivals >= 0) & (arrivals < seconds)]
        times.append(arrivals)
        picks.append(np.full(len(arrivals), model))
    source = _recorded(np.concatenate(times), np.concatenate(picks), 50, seconds)
    return case_of(models, [source], seed, seconds, gpus=4)


def _step(seed: int) -> Case:
    """Half, three times, and half of what the GPUs can."""
    seconds = 4.0
    generator = np.random.default_rng(seed)
    times_s = _times(generator, [(0, 1.5, 500.0), (1.5, 2.5, 3000.0), (2.5, seconds, 500.0)])
    picks = generator.integers(20, size=len(times_s))
    source = _recorded(times_s, picks, 70, seconds)
    return case_of(_kinds(20, seed), [source], seed, seconds, gpus=2)


def _functions(seed: int) -> Case:
    """Functions like Azure's of 2021: Zipf, each on and off, with Pareto bursts and pauses."""
    seconds, num_functions, num_models = 4.0, 300, 150
    generator = np.random.default_rng(seed)
    weights = _zipf(num_functions, 1.2, seed)
    times, picks = [], []
    for function, weight in enumerate(weights):
        at_s = -float(generator.random())
        while at_s < seconds:
            burst_s, pause_s = 0.1 * (1 + generator.pareto(1.5, size=2))
            begin_s, end_s = max(0.0, at_s), min(seconds, at_s + burst_s)
            if end_s > begin_s:
                arrivals = _times(generator, [(begin_s, end_s, 2 * 1000 * weight)])
                times.append(arrivals)
                picks.append(np.full(len(arrivals), function % num_models))
            at_s += burst_s + pause_s
    source = _recorded(np.concatenate(times), np.concatenate(picks), 90, seconds)
    return case_of(_kinds(num_models, seed), [source], seed, seconds, gpus=2)


def _independent_bursts(seed: int) -> Case:
    """Each model bursts by itself; one in five is in a burst at a time."""
    seconds = 4.0
    sources = [
        Bursty(
            models=(model,),
            rate_rps=280,
            burst_ns=ms(100),
            pause_ns=ms(400),
            slo_ns=ms(35),
            end_ns=s(seconds),
            seed=100 * seed + model,
        )
        for model in range(25)
    ]
    return case_of(resnets(25), sources, seed, seconds, gpus=2)


def _metronomes(seed: int) -> Case:
    """Cameras: 40 streams of 30 frames a second, in phase but for 2 ms, one model each."""
    seconds = 3.0
    sources = [
        FixedRate(
            models=(model,),
            rate_rps=30,
            slo_ns=ms(33),
            jitter_ns=ms(2),
            end_ns=s(seconds),
            seed=100 * seed + model,
        )
        for model in range(40)
    ]
    return case_of(resnets(40), sources, seed, seconds, gpus=5)


# --- SLOs ---------------------------------------------------------------------------------------------


def _mixed(rps: float, gpus: int) -> Callable[[int], Case]:
    """Thirds of each model's requests at 15, 60 and 400 ms."""

    def case(seed: int) -> Case:
        sources = [
            poisson(range(10), rps / 3, slo_ms, 3.0, 10 * seed + number)
            for number, slo_ms in enumerate((15, 60, 400))
        ]
        return case_of(resnets(10), sources, seed, 3.0, gpus=gpus)

    return case


def _plain(
    network: str, count: int, rps: float, slo_ms: float, gpus: int, seconds: float = 3.0
) -> Callable[[int], Case]:
    """Equally popular copies of one network."""
    return lambda seed: case_of(
        copies_of(_TABLE[network], count),
        [poisson(range(count), rps, slo_ms, seconds, seed)],
        seed,
        seconds,
        gpus=gpus,
    )


def _patient(seed: int) -> Case:
    """A network of 250 ms with an SLO of 11 s, which is a batch client's, beside interactive ones.

    The run is nearly three times as long as that SLO: in a shorter one, whoever leaves all of the slow to the
    time after the last arrival answers everything.
    """
    seconds = 30.0
    slow = hosted("slow", row_of("slow", 8, {1: 250}))
    sources = [
        poisson(range(1), 7, 11_000, seconds, seed),
        poisson(range(1, 13), 450, 40, seconds, seed + 50),
    ]
    return case_of((slow, *resnets(12)), sources, seed, seconds, gpus=3)


# --- popularity and sizes -----------------------------------------------------------------------------


def _heavy(seed: int) -> Case:
    """Weights from 15 MB to 3 GB, Pareto; EXECs grow with their root."""
    seconds, count = 4.0, 100
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
    source = _popular(_zipf(count, 0.8, seed), 700, 150, seconds, seed)
    return case_of(models, [source], seed, seconds, gpus=2)


def _rare(seed: int) -> Case:
    """3,000 models that are asked once a minute beside 16 that are hot."""
    seconds = 4.0
    sources = [
        poisson(range(16), 500, 80, seconds, seed),
        poisson(range(16, 3016), 50, 80, seconds, seed + 50),
    ]
    return case_of(resnets(3016), sources, seed, seconds, gpus=2, pages=500)


def _zipf_memory(exponent: float, rps: float) -> Callable[[int], Case]:
    """More ResNets than memory holds."""
    return lambda seed: case_of(
        resnets(220),
        [_popular(_zipf(220, exponent, seed), rps, 90, 3.0, seed)],
        seed,
        3.0,
        gpus=1,
        pages=700,
    )


def _no_single(seed: int) -> Case:
    """Compiled for 4 and 8 only: single requests are padded."""
    models = copies_of(row_of("wide", 8, {4: 3.0 + 0.6 * 3, 8: 3.0 + 0.6 * 7}), 9)
    return case_of(models, [poisson(range(9), 800, 35, 3.0, seed)], seed, 3.0, gpus=2)


def _plateau(seed: int) -> Case:
    """A network that takes as long for two as for one, and for eight as for four."""
    row = row_of("plateau", 8, {1: 2.0, 2: 2.0, 4: 3.6, 8: 3.7, 16: 7.8})
    models = copies_of(row, 14)
    return case_of(models, [poisson(range(14), 2400, 45, 3.0, seed)], seed, 3.0, gpus=2)


def _giant(seed: int) -> Case:
    """A network that fills half of a GPU's memory, beside many small ones that fill the rest."""
    row = row_of("giant", 800, {1: 30, 2: 50}, megabytes=688 * (16 << 20) / 1e6)
    sources = [
        poisson(range(1), 3, 2000, 5.0, seed),
        poisson(range(1, 161), 350, 90, 5.0, seed + 50),
    ]
    return case_of((hosted("giant", row), *resnets(160)), sources, seed, 5.0, gpus=1)


# --- closed loops -------------------------------------------------------------------------------------


def _loops(seed: int) -> Case:
    """A model with 120 clients beside 20 with three each."""
    models, seconds = resnets(21), 3.0
    loops = tuple(
        ClosedLoop(
            model=model,
            concurrency=3 if model else 120,
            slo_ns=ms(70),
            end_ns=s(seconds),
            start_jitter_ns=ms(20),
            seed=seed + model,
        )
        for model in range(len(models))
    )
    return case_of(models, [], seed, seconds, gpus=2, loops=loops)


# --- what goes wrong ----------------------------------------------------------------------------------


def _loss(seed: int) -> Case:
    """Five GPUs at three quarters; two are lost and one of these comes back."""
    case = case_of(resnets(30), [poisson(range(30), 1900, 45, 4.0, seed)], seed, 4.0, gpus=5)
    lost = (
        LostWorker(worker=0, at_ns=1500 * NS_PER_MS),
        LostWorker(worker=1, at_ns=1600 * NS_PER_MS, back_ns=2700 * NS_PER_MS),
    )
    return replace(case, faults=Faults(lost_workers=lost))


def _chaos(seed: int) -> Case:
    """Late and lost messages, clocks that drift, slow EXECs, and all workers away for half a second."""
    case = case_of(resnets(40), [poisson(range(40), 1100, 70, 4.0, seed)], seed, 4.0, gpus=3)
    faults = Faults(
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
            WorkerClock(offset_ns=1_000_000_000 * worker, drift_ppb=20_000 * (1 - worker))
            for worker in range(3)
        ),
    )
    return replace(case, faults=faults, network=Network(jitter_ns=50_000))


_family = partial(Load, group="arrivals", begin_ns=NS_PER_S // 2)

FAMILIES = (
    _family("switching", case=_switching),
    _family("day", case=_day),
    _family("crowd", case=_crowd),
    _family("together", case=_together),
    _family("gamma_cv4", case=_gamma),
    _family("step_x3", case=_step),
    _family("functions", case=_functions, compared="small"),
    _family("independent_bursts", case=_independent_bursts),
    _family("metronomes", case=_metronomes),
    _family("mixed_slos_overload", case=_mixed(1700, 2)),
    _family("mixed_slos_light", case=_mixed(900, 3)),
    _family("tiny_slo_6ms", case=_plain("resnet50_v1b", 10, 600, 6, 5)),
    _family("tiny_slo_2ms", case=_plain("resnet18_v2", 1, 550, 2.5, 4)),
    _family("patient", case=_patient, bound=""),
    _family("heavy_weights", case=_heavy),
    _family("rare_beside_hot", case=_rare, bound=""),
    _family("zipf_half", case=_zipf_memory(0.5, 400), bound=""),
    _family("zipf_one", case=_zipf_memory(1.0, 550), bound=""),
    _family("no_single", case=_no_single),
    _family("plateau_of_8", case=_plateau),
    _family("giant_beside_small", case=_giant, bound=""),
    _family("loops_of_120_and_3", case=_loops, bound="rate", compared="small"),
    _family("two_workers_lost", case=_loss, bound=""),
    _family("chaos_of_3", case=_chaos, bound=""),
    _family("one_model_8_gpus", case=_plain("densenet121", 1, 2000, 60, 8, 2.5)),
    _family("overload_slo12", case=_plain("resnet50_v1b", 16, 2500, 12, 3)),
    _family("overload_x4", case=_plain("resnet50_v1b", 24, 7200, 40, 2, 2.0)),
)
