"""Loads that change or are unlike in themselves: crowds, waves, tenants of unlike sizes, steep and flat networks.

Each family puts groups of models side by side; a group has networks, a rate that may change, and SLOs. Caches are
cold at the start, and the first half second is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from clockwright.units import NS_PER_S
from experiments.policies.load import Load, case_of, hosted, ms, power_ms, row_of, s
from experiments.simulator import Case, Faults, HostedModel, LostWorker
from modelzoo.profile import ProfileRow, load_profile
from traces.arrivals import Recorded

_ROWS = load_profile("table1").rows
_RESNET = _ROWS["resnet50_v1b"]
_NO_FAULTS = Faults()

#: A stretch of time: begin and end in seconds, and requests per second of the whole group in it.
Stretch = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Some models that are asked alike."""

    row: ProfileRow
    count: int
    stretches: Sequence[Stretch]
    slo_ms: float
    #: Exponent of the models' popularity: 0 for equal ones.
    zipf: float = 0.0
    #: Each stretch has one model only, the next one in turn.
    moves: bool = False
    #: Whose requests these are; empty: nobody's.
    tenant: str = ""


def _power(first_ms: float, exponent: float, megabytes: int = 100) -> ProfileRow:
    """A network of `power_ms`; LOADs go at 12 GB/s."""
    name = f"power {exponent:g} of {first_ms:g} ms and {megabytes} MB"
    return row_of(name, megabytes / 12, power_ms(first_ms, exponent), megabytes=megabytes)


def _steady(rate_rps: float, seconds: float = 4.0) -> tuple[Stretch, ...]:
    return ((0.0, seconds, rate_rps),)


def _wave(
    low_rps: float, high_rps: float, period_s: float, phase: float = 0.0, seconds: float = 4.0
) -> tuple[Stretch, ...]:
    """A sine in steps of 50 ms."""
    edges = np.arange(0.0, seconds, 0.05)
    share = 0.5 - 0.5 * np.cos(2 * np.pi * (edges / period_s + phase))
    rates = low_rps + (high_rps - low_rps) * share
    return tuple(
        (at, at + 0.05, rate) for at, rate in zip(edges.tolist(), rates.tolist(), strict=True)
    )


def _on_off(
    rate_rps: float, on_s: float, off_s: float, first_s: float = 0.0, seconds: float = 4.0
) -> tuple[Stretch, ...]:
    begins = np.arange(first_s, seconds, on_s + off_s).tolist()
    return tuple((at, min(at + on_s, seconds), rate_rps) for at in begins)


def _requests(group: Group, first: int, tenant: int, generator: np.random.Generator) -> Recorded:
    """A Poisson process whose rate changes."""
    times, models = [], []
    ranks = np.arange(1, group.count + 1, dtype=np.float64)
    popularity: npt.NDArray[np.float64] = np.power(ranks, -group.zipf)
    popularity /= popularity.sum()
    for turn, (begin_s, end_s, rate_rps) in enumerate(group.stretches):
        number = generator.poisson(rate_rps * (end_s - begin_s))
        times.append(np.sort(begin_s + (end_s - begin_s) * generator.random(number)))
        if group.moves:
            models.append(np.full(number, first + turn % group.count))
        else:
            models.append(first + generator.choice(group.count, size=number, p=popularity))
    return Recorded(
        times_ns=(np.concatenate(times) * NS_PER_S).astype(np.int64),
        models=np.concatenate(models),
        tenants=(tenant,) * sum(map(len, models)),
        slo_ns=ms(group.slo_ms),
        end_ns=s(max(end_s for _, end_s, _ in group.stretches)),
    )


def _family(
    name: str,
    *groups: Group,
    gpus: int,
    pages: int = 1376,
    faults: Faults = _NO_FAULTS,
    shared: bool = False,
    compared: Literal["all", "small"] = "all",
    bound: str = "density",
) -> Load:
    """A family of groups side by side; where models are shared, all groups ask for those of the first."""

    def case(seed: int) -> Case:
        models: list[HostedModel] = []
        sources = []
        tenants = sorted({group.tenant for group in groups} | {""})
        for number, group in enumerate(groups):
            first = 0 if shared else len(models)
            if not shared or not number:
                models += [hosted(f"{number}-{index}", group.row) for index in range(group.count)]
            generator = np.random.default_rng((seed, number))
            sources.append(_requests(group, first, tenants.index(group.tenant), generator))
        seconds = max(source.end_ns for source in sources) / NS_PER_S
        case = case_of(
            tuple(models), sources, seed, seconds, gpus=gpus, pages=pages, tenants=tuple(tenants)
        )
        return replace(case, faults=faults)

    return Load(name, "mixtures", case, NS_PER_S // 2, compared=compared, bound=bound)


def _resnets(count: int, stretches: Sequence[Stretch], slo_ms: float, **others: Any) -> Group:  # noqa: ANN401
    return Group(row=_RESNET, count=count, stretches=stretches, slo_ms=slo_ms, **others)


#: One model of many is asked for all at once; the GPUs could do it, or nearly.
CROWDS: tuple[Load, ...] = (
    _family(
        "crowd_fits",
        _resnets(40, _steady(800), 50), _resnets(1, ((1.0, 2.5, 3500),), 50),
        gpus=6, pages=120,
    ),
    _family(
        "crowd_of_two",
        _resnets(24, _steady(500), 80),
        _resnets(2, ((0.8, 1.6, 1900),), 80, moves=True),
        _resnets(1, ((2.0, 2.8, 2300),), 80),
        gpus=3, pages=90,
    ),
    _family(
        "crowd_moves",
        _resnets(30, _steady(450), 40),
        _resnets(8, tuple((0.5 * n, 0.5 * n + 0.5, 1500) for n in range(1, 8)), 40, moves=True),
        gpus=3, pages=105,
    ),
)  # fmt: skip

FAMILIES: tuple[Load, ...] = (
    *CROWDS,
    # Days: waves of unlike lengths, some with nobody at night.
    _family(
        "waves_of_kinds",
        Group(row=_RESNET, count=10, stretches=_wave(0, 1500, 2.0), slo_ms=50),
        Group(row=_ROWS["densenet121"], count=10, stretches=_wave(0, 700, 1.3), slo_ms=80),
        Group(row=_ROWS["resnet18_v2"], count=10, stretches=_wave(50, 2500, 0.7), slo_ms=30),
        gpus=3,
    ),
    _family(
        "waves_opposed",
        _resnets(30, _wave(50, 2400, 2.0), 60),
        _resnets(30, _wave(50, 2400, 2.0, phase=0.5), 60),
        gpus=3, pages=160,
    ),
    # Giants and dwarfs.
    _family(
        "giants_and_dwarfs",
        Group(row=_power(25, 0.8, 3000), count=3, stretches=_steady(40), slo_ms=400),
        Group(row=_power(0.5, 0.6, 20), count=40, stretches=_steady(2500), slo_ms=20),
        gpus=2,
    ),
    _family(
        "giants_beyond",
        Group(row=_power(20, 0.9, 2000), count=2, stretches=_steady(70), slo_ms=300),
        Group(row=_power(1.0, 0.5, 40), count=20, stretches=_steady(1500), slo_ms=25),
        gpus=2,
    ),
    # Networks that gain much by batches beside some that gain nothing.
    _family(
        "flat_and_steep",
        Group(row=_power(4, 0.2), count=8, stretches=_steady(1500), slo_ms=40),
        Group(row=_power(2, 1.0), count=8, stretches=_steady(900), slo_ms=40),
        gpus=3,
    ),
    _family(
        "flat_alone",
        Group(row=_power(8, 0.1), count=6, stretches=_steady(1800), slo_ms=60),
        gpus=2,
    ),
    _family(
        "steep_and_averse",
        Group(row=_power(2, 1.2), count=6, stretches=_steady(500), slo_ms=60),
        Group(row=_power(1.5, 1.0), count=6, stretches=_steady(900), slo_ms=25),
        gpus=2,
    ),
    # Loads are what there is too little of.
    _family(
        "pcie_starved",
        _resnets(200, _steady(420), 120, zipf=0.4),
        gpus=2, pages=350, bound="memory",
    ),
    _family(
        "pcie_heavy",
        Group(row=_power(3, 0.7, 600), count=60, stretches=_steady(120), slo_ms=250, zipf=0.8),
        Group(row=_RESNET, count=40, stretches=_steady(200), slo_ms=80),
        gpus=2, pages=600, bound="",
    ),
    # Very short SLOs beside very long ones, of unlike models and of the same.
    _family(
        "short_and_long",
        Group(row=_ROWS["resnet18_v2"], count=5, stretches=_steady(500), slo_ms=4),
        Group(row=_ROWS["densenet121"], count=10, stretches=_steady(500), slo_ms=1500),
        gpus=3,
    ),
    _family(
        "short_and_long_of_one",
        _resnets(6, _steady(500), 8),
        _resnets(6, _steady(1500), 800),
        gpus=3, shared=True, bound="",
    ),
    # On and off, with rates that no GPU follows.
    _family(
        "on_off",
        _resnets(12, _on_off(4200, 0.1, 0.3), 70),
        _resnets(12, _on_off(4200, 0.1, 0.3, first_s=0.2), 70),
        gpus=3,
    ),
    _family(
        "on_off_over",
        _resnets(10, _on_off(6000, 0.15, 0.35), 50),
        _resnets(10, _steady(300), 50),
        gpus=2,
    ),
    # Tenants of unlike sizes that all fit, or nearly.
    _family(
        "tenants_unlike",
        _resnets(12, _steady(1300), 60, tenant="large"),
        _resnets(12, _steady(250), 60, tenant="middle"),
        _resnets(12, _steady(40), 60, tenant="small"),
        gpus=2, shared=True,
    ),
    _family(
        "tenants_unlike_over",
        _resnets(12, _steady(2000), 60, tenant="large"),
        _resnets(12, _steady(400), 60, tenant="middle"),
        _resnets(12, _steady(60), 60, tenant="small"),
        gpus=2, shared=True, compared="small",
    ),
    # Workers leave and return, one after the other, under load that the rest cannot carry.
    _family(
        "workers_in_turn",
        _resnets(36, _steady(2300), 60),
        gpus=4, pages=200,
        faults=Faults(
            lost_workers=tuple(
                LostWorker(
                    worker=worker,
                    at_ns=ms(1000 + 700 * worker),
                    back_ns=ms(1400 + 700 * worker),
                )
                for worker in range(3)
            )
        ),
        bound="",
    ),
    # One large GPU, many small ones; hardly any load.
    _family("many_gpus_few_models", _resnets(3, _steady(9000, 2.0), 25), gpus=12),
    _family("zoo_of_one_each", _resnets(160, _steady(1100), 30, zipf=1.1), gpus=4, pages=420),
)  # fmt: skip
