"""Groups of models side by side, each with a rate that may change: crowds, waves, tenants, refusals, hot models.

* `mixtures`: loads that change or are unlike in themselves. Where a step or a burst asks for more than there is, the
  bound of GPU time alone counts the idle time before and after: 27 % more than `memory` in `refusal_step`, twice as much
  in `on_off_over`. `edf_mh` has 96 and 87 % of that one.
* `copies`: hot models that need more copies than memory leaves room for. All memory is full when a model becomes hot.
* `small`: a giant among the small, and clients together with one that has many: no client floods, and none may starve.
* `refusals`: `refusal_...` ask for more than the GPUs can do, and stay there: what is refused is refused at once.
  `burst_...` bring everything in one instant to GPUs that are idle, no more than can be answered: each refusal is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from experiments.clockwork_paper.cases import resnets
from experiments.policies.load import (
    RESNET,
    ROWS,
    Group,
    Load,
    Stretch,
    case_of,
    hosted,
    mixture,
    ms,
    poisson,
    power_ms,
    row_of,
    s,
)
from experiments.simulator import Case, Faults, LostWorker, Network
from modelzoo.profile import ProfileRow
from traces.arrivals import ClosedLoop, Recorded, Source


def _power(first_ms: float, exponent: float, megabytes: int = 100) -> ProfileRow:
    """A network of `power_ms`; LOADs go at 12 GB/s."""
    name = f"power {exponent:g} of {first_ms:g} ms and {megabytes} MB"
    return row_of(name, megabytes / 12, power_ms(first_ms, exponent), megabytes=megabytes)


def _giant(load_ms: int) -> ProfileRow:
    """A network that fills much of a GPU and takes long to load."""
    exec_ms = {size: 20 + 20 * size for size in (1, 2, 4)}
    return row_of("giant", load_ms, exec_ms, megabytes=12.2 * load_ms)


def _steady(rate_rps: float, seconds: float = 4.0) -> tuple[Stretch, ...]:
    return ((0.0, seconds, rate_rps),)


def _wave(
    low_rps: float, high_rps: float, period_s: float, phase: float = 0.0
) -> tuple[Stretch, ...]:
    """A sine of 4 s in steps of 50 ms."""
    edges = np.arange(0.0, 4.0, 0.05)
    share = 0.5 - 0.5 * np.cos(2 * np.pi * (edges / period_s + phase))
    rates = low_rps + (high_rps - low_rps) * share
    return tuple(
        (at, at + 0.05, rate) for at, rate in zip(edges.tolist(), rates.tolist(), strict=True)
    )


def _on_off(
    rate_rps: float, on_s: float, off_s: float, first_s: float = 0.0
) -> tuple[Stretch, ...]:
    begins = np.arange(first_s, 4.0, on_s + off_s).tolist()
    return tuple((at, min(at + on_s, 4.0), rate_rps) for at in begins)


def _closed(
    seed: int, *, large: int, num_small: int, small: int, num_workers: int, slo_ms: int
) -> Case:
    """One model with many clients, together with some with few; all ask again when they are answered."""
    names = ("large", *(f"small-{number}" for number in range(num_small)))
    loops = [
        ClosedLoop(
            model=number,
            concurrency=small if number else large,
            slo_ns=ms(slo_ms),
            end_ns=s(5),
            start_jitter_ns=ms(50),
            seed=1000 * seed + number,
        )
        for number in range(len(names))
    ]
    models = tuple(hosted(name, RESNET) for name in names)
    return case_of(models, (), seed, 5, loops=loops, gpus=num_workers)


def _think(
    seed: int, *, num_models: int, clients: int, think_ms: float, slo_ms: int, num_workers: int
) -> Case:
    """People who think before they ask again, as many of the n-th model as its popularity gives it."""
    shares = 1 / np.arange(1, num_models + 1)
    loops = [
        ClosedLoop(
            model=model,
            concurrency=max(1, round(clients * share)),
            slo_ns=ms(slo_ms),
            end_ns=s(5),
            start_jitter_ns=ms(think_ms),
            seed=1000 * seed + model,
        )
        for model, share in enumerate((shares / shares.sum()).tolist())
    ]
    case = case_of(resnets(num_models), (), seed, 5, loops=loops, gpus=num_workers)
    return replace(case, network=Network(client_jitter_ns=ms(think_ms)))


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
    return case_of(resnets(len(sizes)), sources, seed, begin_s + 2, gpus=num_gpus)


_resnets = partial(Group, RESNET)
_copies = partial(mixture, group="copies", begin_s=1, shared=True, pages=126)


def _refusal(
    name: str,
    count: int,
    rate_rps: float,
    gpus: int = 1,
    *slos_ms: float,
    seconds: float = 3.0,
    zipf: float = 0.0,
    **others: Any,  # noqa: ANN401
) -> Load:
    """Models that are asked for all alike, with each of these SLOs; 100 ms if none is said."""
    slos_ms = slos_ms or (100,)
    steady = _steady(rate_rps / len(slos_ms), seconds)
    groups = [_resnets(count, steady, slo_ms, zipf=zipf) for slo_ms in slos_ms]
    group = "refusals"
    return mixture(
        f"refusal_{name}", *groups, group=group, gpus=gpus, begin_s=0, shared=True, **others
    )


_LOST = Faults(
    lost_workers=tuple(
        LostWorker(worker=worker, at_ns=ms(1000 + 700 * worker), back_ns=ms(1400 + 700 * worker))
        for worker in range(3)
    )
)
_MOVES = tuple((float(n), n + 1.0, 900.0) for n in range(1, 5))
_CROWD_MOVES = tuple((0.5 * n, 0.5 * n + 0.5, 1500.0) for n in range(1, 8))
_ZOO = [Group(row, 1, _steady(30, 3), 100) for row in list(ROWS.values())[:40]]

FAMILIES: tuple[Load, ...] = (
    # One model of many is asked for all at once; the GPUs could do it, or nearly.
    mixture("crowd_fits", _resnets(40, _steady(800), 50), _resnets(1, ((1.0, 2.5, 3500),), 50), gpus=6, pages=120),
    mixture(
        "crowd_of_two",
        _resnets(24, _steady(500), 80), _resnets(2, ((0.8, 1.6, 1900),), 80, moves=True),
        _resnets(1, ((2.0, 2.8, 2300),), 80), gpus=3, pages=90,
    ),
    mixture("crowd_moves", _resnets(30, _steady(450), 40), _resnets(8, _CROWD_MOVES, 40, moves=True), gpus=3, pages=105),
    # Days: waves of unlike lengths, some without requests at night.
    mixture(
        "waves_of_kinds",
        _resnets(10, _wave(0, 1500, 2.0), 50), Group(ROWS["densenet121"], 10, _wave(0, 700, 1.3), 80),
        Group(ROWS["resnet18_v2"], 10, _wave(50, 2500, 0.7), 30), gpus=3,
    ),
    mixture(
        "waves_opposed",
        _resnets(30, _wave(50, 2400, 2.0), 60), _resnets(30, _wave(50, 2400, 2.0, phase=0.5), 60), gpus=3, pages=160,
    ),
    # Giants and dwarfs.
    mixture(
        "giants_and_dwarfs",
        Group(_power(25, 0.8, 3000), 3, _steady(40), 400), Group(_power(0.5, 0.6, 20), 40, _steady(2500), 20), gpus=2,
    ),
    mixture(
        "giants_beyond",
        Group(_power(20, 0.9, 2000), 2, _steady(70), 300), Group(_power(1.0, 0.5, 40), 20, _steady(1500), 25), gpus=2,
    ),
    # Networks that gain much by batches together with some that gain nothing.
    mixture("flat_and_steep", Group(_power(4, 0.2), 8, _steady(1500), 40), Group(_power(2, 1.0), 8, _steady(900), 40), gpus=3),
    mixture("flat_alone", Group(_power(8, 0.1), 6, _steady(1800), 60), gpus=2),
    mixture("steep_and_averse", Group(_power(2, 1.2), 6, _steady(500), 60), Group(_power(1.5, 1.0), 6, _steady(900), 25), gpus=2),
    # Loads are what there is too little of.
    mixture("pcie_starved", _resnets(200, _steady(420), 120, zipf=0.4), gpus=2, pages=350, bound="memory"),
    mixture(
        "pcie_heavy",
        Group(_power(3, 0.7, 600), 60, _steady(120), 250, zipf=0.8), _resnets(40, _steady(200), 80),
        gpus=2, pages=600, bound="",
    ),
    # Very short SLOs together with very long ones, of unlike models and of the same.
    mixture(
        "short_and_long",
        Group(ROWS["resnet18_v2"], 5, _steady(500), 4), Group(ROWS["densenet121"], 10, _steady(500), 1500), gpus=3,
    ),
    mixture(
        "short_and_long_of_one",
        _resnets(6, _steady(500), 8), _resnets(6, _steady(1500), 800), gpus=3, shared=True, bound="",
    ),
    # On and off, with rates that no GPU follows.
    mixture("on_off", _resnets(12, _on_off(4200, 0.1, 0.3), 70), _resnets(12, _on_off(4200, 0.1, 0.3, 0.2), 70), gpus=3),
    mixture("on_off_over", _resnets(10, _on_off(6000, 0.15, 0.35), 50), _resnets(10, _steady(300), 50), gpus=2, bound="memory"),
    # Tenants of unlike sizes that all fit, or nearly.
    mixture(
        "tenants_unlike",
        _resnets(12, _steady(1300), 60, tenant="large"), _resnets(12, _steady(250), 60, tenant="middle"),
        _resnets(12, _steady(40), 60, tenant="small"), gpus=2, shared=True,
    ),
    mixture(
        "tenants_unlike_over",
        _resnets(12, _steady(2000), 60, tenant="large"), _resnets(12, _steady(400), 60, tenant="middle"),
        _resnets(12, _steady(60), 60, tenant="small"), gpus=2, shared=True, compared="small",
    ),
    # Workers leave and return, one after the other, under load that the rest cannot carry.
    mixture("workers_in_turn", _resnets(36, _steady(2300), 60), gpus=4, pages=200, fields={"faults": _LOST}, bound=""),
    # One large GPU, many small ones; hardly any load.
    mixture("many_gpus_few_models", _resnets(3, _steady(9000, 2.0), 25), gpus=12),
    mixture("zoo_of_one_each", _resnets(160, _steady(1100), 30, zipf=1.1), gpus=4, pages=420),
    # One model asks 2.5 times what a GPU can give, with an SLO shorter than its load, together with sixty that trickle; three such
    # models on six GPUs; another one every second; the first with an SLO that a load can meet.
    _copies("hotone", _resnets(61, _steady(120, 5), 9), _resnets(1, ((1, 5, 900),), 9), gpus=4),
    _copies("hotthree", _resnets(83, _steady(100, 5), 9), _resnets(3, ((1, 5, 1800),), 9), gpus=6),
    _copies("hotmoves", _resnets(61, _steady(100, 5), 9), _resnets(4, _MOVES, 9, moves=True), gpus=4),
    _copies("hotcold", _resnets(61, _steady(100, 5), 40), _resnets(1, ((1, 5, 1500),), 40), gpus=4),
    mixture(
        "giant", Group(_giant(900), 1, _steady(2, 5), 2500), _resnets(250, _steady(500, 5), 100),
        group="small", begin_s=0, bound="memory",
    ),
    mixture(
        "giant_quick", Group(_giant(300), 1, _steady(4, 5), 900), _resnets(220, _steady(400, 5), 100),
        group="small", begin_s=0, bound="memory",
    ),
    *(
        Load(name, "small", partial(_closed, **of), bound="rate", compared="small")
        for name, of in (
            ("small_clients", {"large": 200, "num_small": 30, "small": 2, "num_workers": 2, "slo_ms": 80}),
            ("small_clients_few", {"large": 96, "num_small": 10, "small": 1, "num_workers": 1, "slo_ms": 60}),
        )
    ),
    Load(
        "think",
        "small",
        partial(_think, num_models=40, clients=1600, think_ms=500, slo_ms=60, num_workers=2),
        bound="rate",
    ),
    # ResNet50 answers 361 r/s one by one and 1,117 r/s in batches of 16 on one GPU of Table 1.
    _refusal("15", 15, 1500),
    _refusal("600", 600, 2200, 4, bound="memory"),
    _refusal("600_cold", 600, 1100, 2, bound="memory"),
    _refusal("1", 1, 1700),
    _refusal("4_deep", 4, 9000),
    _refusal("15_light", 15, 880),
    _refusal("15_deep", 15, 6000),
    _refusal("15_six", 15, 10000, 6),
    _refusal("4_twenty", 4, 30000, 20, seconds=1.0),
    _refusal("100", 100, 1500, 2),
    _refusal("slos", 15, 1500, 1, 25, 100, bound=""),
    _refusal("slos_wide", 15, 1500, 1, 50, 100, 1000, bound=""),
    _refusal("tight", 15, 1500, 2, 25),
    _refusal("long", 15, 1800, 1, 500),
    # A fifth is for one model, and the others are too many by themselves: as in `popular`, there is no flood, and all
    # answers count. `edf_mh` answers 26 % of what is asked of models below the mean and 64 of all, `clockwork` 33 and
    # 59. With 1.5 instead of 1.1 for `fairness._MOST` it has 41 and 60, more of both; but as little as 1.3 costs
    # the thinking clients of `think` 4 in 100 answers.
    _refusal("zipf", 100, 2600, 2, zipf=1.0, bound="memory"),
    mixture("refusal_zoo", *_ZOO, group="refusals", gpus=2, begin_s=0, bound="memory"),
    mixture(
        "refusal_flood", _resnets(8, _steady(300, 3), 100), _resnets(1, ((0.5, 3, 2500),), 100),
        group="refusals", begin_s=0, compared="small",
    ),
    mixture(
        "refusal_step", _resnets(15, ((0, 1, 800), (1, 2, 3000), (2, 3, 800)), 100), group="refusals", gpus=2, begin_s=0,
        bound="memory",
    ),
    *(
        Load(f"burst_{name}", "refusals", partial(_bursts, **of), bound="")
        for name, of in (
            ("one", {"sizes": (90,)}),
            ("15", {"sizes": (4,) * 15}),
            ("uneven", {"sizes": (40, 10, 5, 2, 1, 1), "num_gpus": 1}),
            ("cold", {"sizes": (90,), "warm": False}),
            ("cold_six", {"sizes": (12,) * 6, "warm": False}),
        )
    ),
)  # fmt: skip
