"""Are policies ranked live as they are simulated: the same workloads over gRPC and on virtual time.

Four policies serve the same workloads, one at a load that can be carried and one that cannot: on two
modelled devices, and on the processor with real networks. Beside each run the same workload is simulated,
with what was measured of the server in calibration runs before (`truth` says how far apart the two are).

A pair of policies is *told apart* by the simulator when a figure of theirs differs by more than the
simulator is held to, 3 % of goodput or 10 % of a median latency (`study.aims`). The number to look at is
how many of these pairs have the same order live.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise
from typing import Any

from experiments.live.live_run import Served, hosted, play
from experiments.live.rehearsal import measured, rehearsals, sides
from experiments.live.truth import Setting as RunSetting
from experiments.live.truth import mix_of, modelled, on_processor, row_of
from experiments.study.aims import limit_of
from experiments.study.beside import Beside, by_side, say
from experiments.study.compared import POLICIES
from experiments.study.pictures import Curve, Panel, colour_of
from experiments.study.sides import simulated
from experiments.study.study import Study, StudyRecord
from modelzoo.profile import ProfileRow

#: Figures by which policies are compared, under each load.
METRICS = {"moderate": ("goodput_rps", "p50_ms"), "overload": ("goodput_rps",)}
_AIM = {
    "goodput_rps": limit_of("truth", "goodput_gap_pct"),
    "p50_ms": limit_of("truth", "p50_gap_pct"),
}

# 1, 5 and some 70 ms of two cores: at these rates about all that slow ones can do, half of what fast ones can. The quick one is first,
# because it is what pauses between EXECs are measured with.
_NETWORKS_RPS = {"cifar_resnet20_v1": 50, "cifar_resnet110_v1": 40, "cifar_wideresnet16_10": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(RunSetting):
    """How long, and which policies."""

    policies: tuple[str, ...] = ("clockwork", "clockwork1ms", "edf_mh", "clipper")
    seconds: float = 8.0
    warmup_s: float = 1.0
    calibration_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked(Beside):
    """One policy under one load on one device."""

    device: str
    load: str
    policy: str

    @property
    def case(self) -> str:
        """The case as the names of its figures spell it."""
        return f"{self.device}_{self.load}"


def loads(setting: Setting) -> dict[str, dict[str, Served]]:
    """By device, then by load; the loads of a device have the same models."""

    def mixed(share: float) -> Served:
        # Requests of unlike cost: the choice of what to drop matters.
        rows = (row_of("small", 5, 1), row_of("middle", 8, 3), row_of("large", 12, 8))
        return _modelled(setting, rows, copies=2, rate_rps=140 * share, slo_ms=60)

    def tight(share: float) -> Served:
        # An SLO of a few EXECs: the time of each decision matters.
        return _modelled(setting, (row_of("net", 4, 1),), copies=6, rate_rps=400 * share, slo_ms=20)

    def processor(share: float) -> Served:
        rates_rps = {name: share * rate_rps for name, rate_rps in _NETWORKS_RPS.items()}
        what = f"three networks on the processor, {sum(rates_rps.values()):g} r/s"
        return on_processor(setting, what, rates_rps, slo_ms=250)

    return {
        device: dict(zip(METRICS, map(case, shares), strict=True))
        for device, case, shares in (
            ("mixed", mixed, (0.5, 1.7)),
            ("tight", tight, (0.4, 1.0)),
            ("processor", processor, (0.8, 3.0)),
        )
    }


def _modelled(
    setting: Setting, rows: tuple[ProfileRow, ...], *, copies: int, rate_rps: float, slo_ms: int
) -> Served:
    models = [model for row in rows for model in hosted(row, copies)]
    what = f"{len(models)} models of {len(rows)} costs on a modelled device, {rate_rps:g} r/s"
    asked = [(range(len(models)), rate_rps, slo_ms)]
    return modelled(setting, what, models=models, asked=asked)


def ask(setting: Setting) -> Iterator[Ranked]:
    """Calibrate on one server; then, on a server for each policy, play every load, and simulate it."""
    for device, by_load in loads(setting).items():
        first = next(iter(by_load.values()))
        calibrated = play(rehearsals(first, setting.calibration_s, mix_of(first)), first)
        for policy in setting.policies:
            case = replace(first.case, scheduler=POLICIES[policy])
            workloads = [served.case.workload for served in by_load.values()]
            played = play(workloads, replace(first, case=case))
            for load, workload, run in zip(by_load, workloads, played.runs, strict=True):
                served = replace(first, case=replace(case, workload=workload))
                told = None
                with suppress(ValueError):  # Too little was answered to tell what to simulate.
                    told = simulated(measured(served, calibrated.runs, calibrated.rows).case)
                both = sides(run, told, *setting.stretch_ns)
                yield Ranked(device=device, load=load, policy=policy, **both)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two policies that the simulator tells apart, the one with the higher figure first."""

    case: str
    metric: str
    higher: str
    lower: str
    simulated: tuple[float, float]
    live: tuple[float, float]

    @property
    def same_order(self) -> bool:
        """Whether the two have the simulated order live, too."""
        return self.live[0] > self.live[1]


def pairs_of(lines: Sequence[Ranked]) -> list[Pair]:
    """Every pair that the simulator tells apart, under every load, by every metric."""
    pairs = []
    for one, other in combinations(lines, 2):
        if one.case != other.case or one.simulated is None or other.simulated is None:
            continue
        for metric in METRICS[one.load]:
            low, high = sorted((one, other), key=lambda line: getattr(line.simulated, metric))
            told, live = (
                (getattr(getattr(high, side), metric), getattr(getattr(low, side), metric))
                for side in ("simulated", "live")
            )
            if told[0] > told[1] * (1 + _AIM[metric] / 100):
                pairs.append(Pair(one.case, metric, high.policy, low.policy, told, live))
    return pairs


def figures_of(_setting: Setting, lines: Sequence[Ranked]) -> dict[str, float]:
    """How many pairs the simulator tells apart, and how many of them have the same order live."""
    figures: dict[str, float] = {}
    pairs = pairs_of(lines)
    for case in ("", *dict.fromkeys(line.case for line in lines)):
        mine = [pair.same_order for pair in pairs if case in ("", pair.case)]
        start = f"{case}_" if case else ""
        figures |= {f"{start}pairs": len(mine), f"{start}pairs_same_order": sum(mine)}
    return figures


def extra(setting: Setting, lines: Sequence[Ranked]) -> dict[str, Any]:
    """The pairs, and what the cases are."""
    return {
        "pairs": [asdict(pair) | {"same_order": pair.same_order} for pair in pairs_of(lines)],
        "what": {
            f"{device}_{load}": served.what
            for device, by_load in loads(setting).items()
            for load, served in by_load.items()
        },
        "load_average": os.getloadavg()[0],
    }


def panels(_setting: Setting, kept: StudyRecord) -> list[list[Panel]]:
    """A panel for each metric: what a live run measured over what the simulator says, and the line of equals."""
    found = []
    for metric, what, unit in (
        ("goodput_rps", "Answers in time", "r/s"),
        ("p50_ms", "Median latency, where all is answered,", "ms"),
    ):
        # A simulated row follows its live one, where there is one.
        places = [
            (one["policy"], other[metric], one[metric])
            for one, other in pairwise(kept.rows)
            if other["side"] == "simulated" and metric in METRICS[one["load"]]
        ]
        # A policy that answers nobody, live and simulated alike, has no place on these scales.
        values = [value for _, *both in places for value in both if value]
        ends = 0.8 * min(values, default=1), 1.25 * max(values, default=1)
        curves = [Curve(x=ends, y=ends)]
        for share in (1 - _AIM[metric] / 100, 1 + _AIM[metric] / 100):
            curves.append(Curve(x=ends, y=[share * end for end in ends], line=":", width=1))
        for policy, marker in zip(
            dict.fromkeys(name for name, *_ in places), "os^Dv<>", strict=False
        ):
            told = [told for name, told, _ in places if name == policy]
            live = [live for name, _, live in places if name == policy]
            looks = Curve(x=told, y=live, label=policy, colour=colour_of(policy))
            curves.append(replace(looks, line="", marker=marker))
        found.append(
            Panel(
                title=f"{what} live\nand simulated; dotted: {_AIM[metric]:g} % apart",
                x=f"simulated, {unit}",
                y=f"live, {unit}",
                curves=curves,
                log_x=True,
                log_y=True,
                x_range=ends,
                y_range=ends,
            )
        )
    return [found]


STUDY = Study(
    name="live_ranking",
    setting=Setting(),
    ask=ask,
    key="{device}_{load}_{policy}",
    figures=figures_of,
    tables={"": by_side},
    title="Most policies have the order live that they have simulated.",
    panels=panels,
    extra=extra,
    say=say,
)
