"""Devices, links and profiles that are not what they should be; networks that lose by batches.

* `spikes`: now and then a step takes many times as long as it should, as by a pause of the host.
* `links` are long, tremble, or differ from worker to worker. Where the SLO is tight or the GPUs are overloaded, the time
  that the ways take is missed by every policy; the same load without the fault has an SLO that is shorter by as much.
* `thin_links` carry less than the GPUs would take; what they carry is the bound.
* `profiles`: what workers announce differs from what their devices take.
* `averse`: large batches are not worth their time. There is no fault, so the bound is the measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.clockwork_paper.cases import resnets
from experiments.policies.load import RESNET, ROWS, Load, alike, hosted, ms, power_ms, row_of
from experiments.simulator import Faults, HostedModel, Network, WrongProfile, copies_of
from modelzoo.profile import Noise, ProfileRow

_TREMBLING = Noise(exec_sigma=0.02, load_sigma=0.02)
# Bytes per second.
_GIGABIT = 125_000_000


def _spiked(name: str, share: float, factor: float, *load: Any, **others: Any) -> Load:  # noqa: ANN401
    """A share of LOADs and EXECs takes so many times as long as usual."""
    fault = {"faults": Faults(slow_probability=share, slow_factor=factor)}
    models = others.pop("models", resnets(24))
    others |= {"fault": fault, "faultless": True, "noise": _TREMBLING}
    return alike(name, "spikes", models, *load, **others)


def _link(
    out_ms: float, back_ms: float | None = None, jitter_ms: float = 0.0, gigabits: float = 0.0
) -> Network:
    return Network(
        delay_ns=ms(out_ms),
        up_delay_ns=None if back_ms is None else ms(back_ms),
        jitter_ns=ms(jitter_ms),
        bytes_per_s=int(gigabits * _GIGABIT) or None,
    )


def _one_of_four(odd: Network, usual: Network) -> Network:
    return Network(links=(odd, usual, usual, usual))


def _far(name: str, network: Network, *load: Any, **others: Any) -> Load:  # noqa: ANN401
    models = others.pop("models", resnets(32))
    others = {"seconds": 4, "begin_s": 0.5, "faultless": True} | others
    return alike(name, "links", models, *load, fault={"network": network}, **others)


def _thin(
    name: str,
    network: Network,
    *load: Any,  # noqa: ANN401
    sizes: Sequence[tuple[int, int]] = ((602, 4),),
) -> Load:
    """Thirty models that differ in what they take from a link, in turn; sizes of inputs and outputs are in kB."""
    rows = [
        replace(RESNET, name=f"in{i}_out{o}", input_bytes=1000 * i, output_bytes=1000 * o)
        for i, o in sizes
    ]
    models = tuple(hosted(f"m{number}", rows[number % len(rows)]) for number in range(30))
    fault = {"network": network}
    return alike(name, "thin_links", models, *load, fault=fault, seconds=4, begin_s=0.5)


def _zoo(count: int, rows: int) -> tuple[HostedModel, ...]:
    """So many models of the first rows of Table 1."""
    chosen = list(ROWS.values())[:rows]
    return tuple(model for row in chosen for model in copies_of(row, count // rows))


def _wrong(name: str, wrong: WrongProfile, *load: Any, **others: Any) -> Load:  # noqa: ANN401
    models = others.pop("models", resnets(24))
    others |= {"fault": {"faults": Faults(wrong_profiles=(wrong,))}, "faultless": True}
    return alike(name, "profiles", models, *load, noise=_TREMBLING, **others)


def _exec(factor: float, *sizes: int, worker: int | None = None) -> WrongProfile:
    return WrongProfile(exec_factor=factor, sizes=sizes, worker=worker)


def _power(first_ms: float, exponent: float) -> ProfileRow:
    """EXEC of b rows takes `first_ms` times b to the power of `exponent`."""
    name, exec_ms = f"power {exponent:g} of {first_ms:g} ms", power_ms(first_ms, exponent)
    return row_of(name, 5, exec_ms, megabytes=60, input_bytes=600_000, output_bytes=4000)


# Dense up to 4, sparse above.
_KNEE = row_of("knee at 4", 5, {1: 2, 2: 3, 4: 5, 8: 12, 16: 30}, megabytes=60)
_TWO_KINDS = (*copies_of(_power(2, 1.15), 8), *copies_of(RESNET, 8))
_averse = partial(alike, noise=Noise())
_GIGABIT_LINK = _link(0.1, gigabits=1)
_SMALL = copies_of(ROWS["resnet18_v1b"], 60)

# What follows the fault, or the models, is the rate of all models, the SLO in ms, and the number of GPUs.
FAMILIES: tuple[Load, ...] = (
    # Busy, the queue fills batches of all sizes: the sizes that one slow EXEC takes away are missed at once.
    _spiked("spikes_busy", 0.003, 10, 2400, 50, 4),
    _spiked("spikes_x5", 0.01, 5, 1500, 30, 3),
    _spiked("spikes_x50", 0.001, 50, 1800, 40, 4),
    _spiked("spikes_often", 0.02, 10, 1200, 60, 4),
    # Below the factor at which an estimate leaves a measurement out.
    _spiked("spikes_x2", 0.02, 2.5, 1500, 25, 3),
    # Overload for as long as it takes to lose every size.
    _spiked("spikes_overload", 0.001, 20, 1900, 50, 2, models=resnets(12), seconds=10),
    # Little work and little time: one slow EXEC rules the only size out that is ever run.
    _spiked("spikes_tight", 0.003, 10, 700, 12, 4),
    _spiked("spikes_light", 0.001, 50, 150, 9, 1, models=resnets(2), seconds=20),
    _spiked("spikes_many_gpus", 0.005, 20, 3000, 20, 12, models=_SMALL, seconds=4),
    # Half of the models fit: loads are slow too.
    _spiked("spikes_loads", 0.01, 8, 300, 60, 2, models=resnets(60), pages=105, seconds=8),
    _spiked("spikes_bursts", 0.004, 20, 1200, 40, 4, bursts_ms=150),
    _far("link_8ms", _link(8), 800, 80, 3),
    _far("link_25ms", _link(25), 800, 140, 3),
    _far("link_6ms_tight", _link(6), 450, 24, 3, ways_ms=12),
    _far("link_12ms_overload", _link(12), 3000, 80, 3, ways_ms=24),
    _far("link_10ms_bursts", _link(10), 700, 90, 3, bursts_ms=80),
    _far("link_15ms_loads", _link(15), 250, 150, 2, models=resnets(150), pages=700, ways_ms=30),
    _far("link_10ms_small", _link(10), 2200, 70, 3, models=copies_of(ROWS["resnet18_v2"], 32), seconds=3),
    _far("link_3_and_16ms", _link(3, 16), 800, 60, 3),
    _far("link_14_and_1ms", _link(14, 1), 800, 60, 3),
    _far("link_one_far", _one_of_four(_link(18), Network()), 800, 55, 4),
    _far("link_one_too_far", _one_of_four(_link(40), Network()), 700, 30, 4),
    _far("link_jitter_2ms", _link(0.5, jitter_ms=2), 700, 45, 3),
    _far("link_jitter_4ms", _link(1, jitter_ms=4), 700, 75, 3),
    _far("link_9ms_jitter", _link(9, jitter_ms=1), 700, 70, 3),
    _thin("thin_65pct", _GIGABIT_LINK, 400, 90, 3),
    _thin("thin_90pct", _GIGABIT_LINK, 560, 120, 3),
    _thin("thin_160pct", _GIGABIT_LINK, 1000, 90, 3),
    _thin("thin_300pct", _GIGABIT_LINK, 1850, 70, 3),
    _thin("thin_10gbit", _link(0.1, gigabits=10), 1200, 60, 3),
    _thin("thin_mixed", _GIGABIT_LINK, 1100, 90, 3, sizes=((600, 4), (40, 4), (150, 4))),
    _thin("thin_outputs", _GIGABIT_LINK, 1100, 90, 3, sizes=((10, 500),)),
    _thin("thin_100mbit_small", _link(0.1, gigabits=0.1), 1100, 60, 3, sizes=((24, 4),)),
    _thin("thin_one_of_four", _one_of_four(_link(0.1, gigabits=0.5), _link(0.1, gigabits=20)), 900, 50, 4),
    _thin("thin_and_long", _link(8, gigabits=1), 850, 110, 3),
    _thin("thin_and_jittery", _link(0.1, jitter_ms=1.5, gigabits=1), 500, 90, 3),
    # Longer than the SLO: a policy that trusts them asks no worker.
    _wrong("profile_long", _exec(3), 600, 7.5, 4),
    _wrong("profile_long_zoo", _exec(3), 500, 16, 6, models=_zoo(24, 24)),
    _wrong("profile_x10", _exec(10), 900, 25, 3),
    # Too short: what is planned with them is late.
    _wrong("profile_half", _exec(0.5), 1500, 60, 6, models=_zoo(24, 24)),
    _wrong("profile_tenth", _exec(0.1), 1300, 40, 3),
    # Some sizes only: the large ones, or a hole in the middle.
    _wrong("profile_big", _exec(6, 8, 16), 3200, 50, 4),
    _wrong("profile_big_zoo", _exec(4, 4, 8, 16), 1500, 80, 4, models=_zoo(24, 12)),
    _wrong("profile_hole", _exec(8, 2, 4), 1500, 20, 3),
    _wrong("profile_small_size", _exec(8, 1), 400, 15, 2),
    # A load that is announced to take longer than the SLO, and one too short.
    _wrong("profile_load_long", WrongProfile(load_factor=5), 400, 30, 2, models=resnets(60), pages=140),
    _wrong("profile_load_short", WrongProfile(load_factor=0.2), 250, 60, 2, models=resnets(60), pages=140),
    # One worker of several announces a tenth.
    _wrong("profile_one_worker", _exec(0.1, worker=2), 1500, 30, 4),
    _averse("averse_115", "averse", copies_of(_power(2, 1.15), 16), 1300, 40, 2),
    _averse("averse_130", "averse", copies_of(_power(3, 1.3), 12), 1200, 60, 3),
    _averse("averse_105", "averse", copies_of(_power(2.5, 1.05), 8), 550, 50, 1),
    _averse("averse_knee", "averse", copies_of(_KNEE, 12), 2000, 60, 2),
    _averse("averse_mix", "averse", _TWO_KINDS, 1600, 40, 2),
)  # fmt: skip
