"""Are policies ranked live as they are simulated: the cases of `truth` at two loads, with each policy.

Every policy serves a load that can be carried and one that cannot, on a modelled device and on the processor. The simulator
tells a pair of policies *apart* if a figure of theirs differs by more than `truth` is held to (`study.aims`). The figures
to look at: `pairs`, those that it tells apart, and `pairs_same_order`, those of them that have the same order live.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

from experiments.live import truth
from experiments.live.live_run import Served, hosted, play
from experiments.live.rehearsal import measured, rehearsals, sides
from experiments.study.aims import limit_of
from experiments.study.beside import Beside, by_side, say
from experiments.study.compared import POLICIES
from experiments.study.sides import METRICS, simulated
from experiments.study.study import Study

#: Metrics that rank policies under each load. A latency counts only where all is answered.
LOADS = {"moderate": ("goodput", "p50"), "overload": ("goodput",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(truth.Setting):
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


def cases(setting: Setting) -> dict[str, list[Served]]:
    """By device, a case for each load, of the same models."""
    rows = [truth.row_of(*costs) for costs in (("small", 5, 1), ("middle", 8, 3), ("large", 12, 8))]
    models = [model for row in rows for model in hosted(row, 2)]
    # 1, 5 and some 70 ms of two cores. The quick one is first: it is the one that calibration asks.
    rates = {"cifar_resnet20_v1": 50, "cifar_resnet110_v1": 40, "cifar_wideresnet16_10": 10}
    what = "unlike costs"
    return {
        "mixed": [
            truth.modelled(setting, what, models=models, asked=[(range(6), 140 * share, 60)])
            for share in (0.5, 1.7)
        ],
        "processor": [
            truth.on_processor(setting, what, {k: share * v for k, v in rates.items()}, slo_ms=250)
            for share in (0.8, 3.0)
        ],
    }


def ask(setting: Setting) -> Iterator[Ranked]:
    """Calibrate on one server; then start a server for each policy, play every load on it, and simulate each."""
    for device, loads in cases(setting).items():
        first, workloads = loads[0], [served.case.workload for served in loads]
        calibrated = play(rehearsals(first, setting.calibration_s, truth.mix_of(first)), first)
        for policy in setting.policies:
            case = replace(first.case, scheduler=POLICIES[policy])
            played = play(workloads, replace(first, case=case))
            for load, workload, run in zip(LOADS, workloads, played.runs, strict=True):
                served = replace(first, case=replace(case, workload=workload))
                rows = None
                with suppress(ValueError):  # Too little was answered to calibrate the simulator.
                    rows = simulated(measured(served, calibrated.runs, calibrated.rows).case)
                both = sides(run, rows, *setting.stretch_ns)
                yield Ranked(device=device, load=load, policy=policy, **both)


def pairs_of(lines: Sequence[Ranked]) -> list[dict[str, Any]]:
    """Every pair that the simulator tells apart, by each metric, with whether it has the same order live."""
    pairs = []
    for (high, low), metric in product(permutations(lines, 2), METRICS):
        if (high.device, high.load) != (low.device, low.load) or metric not in LOADS[high.load]:
            continue
        if high.simulated is None or low.simulated is None:
            continue
        live, told = (
            [getattr(side, METRICS[metric]) for side in both]
            for both in ((high.live, low.live), (high.simulated, low.simulated))
        )
        if told[0] > told[1] * (1 + limit_of("truth", f"{metric}_gap_pct") / 100):
            names = {"device": high.device, "load": high.load, "metric": metric}
            names |= {"higher": high.policy, "lower": low.policy}
            pairs.append({**names, "same_order": live[0] > live[1]})
    return pairs


def figures_of(_setting: Setting, lines: Sequence[Ranked]) -> dict[str, float]:
    """How many pairs the simulator tells apart, and how many of them have the same order live."""
    same = [pair["same_order"] for pair in pairs_of(lines)]
    return {"pairs": len(same), "pairs_same_order": sum(same)}


STUDY = Study(
    name="live_ranking",
    setting=Setting(),
    ask=ask,
    key="{device}_{load}_{policy}",
    figures=figures_of,
    tables={"": by_side},
    extra=lambda _, lines: {"pairs": pairs_of(lines)},
    say=say,
)
