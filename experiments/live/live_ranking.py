"""Are policies ranked live as they are simulated: the same workloads over gRPC and on virtual time.

Four policies serve the same workloads, one at a load that can be carried and one that cannot: on two
modelled devices, and on the processor with real networks. Beside each run the same workload is simulated,
with what was measured of the server in calibration runs before (`truth` says how far apart the two are).

A pair of policies is *told apart* by the simulator when a figure of theirs differs by more than the
simulator is held to, 3 % of goodput or 10 % of a median latency (`study.aims`). The number to look at is
how many of these pairs have the same order live.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S, PAGE_BYTES
from experiments.live import truth
from experiments.live.live_run import LiveModel, play
from experiments.live.truth import AIMS, TruthCase
from experiments.results_file import RESULTS, write_results
from experiments.study.compared import POLICIES
from experiments.study.pictures import colour_of
from experiments.study.report import picture, write_csv
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import Poisson, Workload

#: Figures by which policies are compared, under each load.
METRICS = {"moderate": ("goodput_rps", "p50_ms"), "overload": ("goodput_rps",)}
_AIM = {"goodput_rps": AIMS["goodput"], "p50_ms": AIMS["p50"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How long, and which policies."""

    policies: tuple[str, ...] = ("clockwork", "clockwork1ms", "edf_mh", "clipper")
    run: truth.Setting = field(
        default_factory=lambda: truth.Setting(
            duration_ns=8 * NS_PER_S, warmup_ns=NS_PER_S, calibration_s=2.0
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingLine:
    """One policy under one load on one device."""

    device: str
    load: str
    policy: str
    live: truth.RunFigures
    simulated: truth.RunFigures
    #: How late the live run's client sent its requests.
    lateness_p99_ms: float

    @property
    def key(self) -> str:
        """The case as the names of its figures spell it."""
        return f"{self.device}_{self.load}"


# --- loads ----------------------------------------------------------------------------------------


def loads(setting: Setting) -> dict[str, dict[str, TruthCase]]:
    """By device, then by load; the loads of a device have the same models."""
    return {
        device: {load: case(setting, share) for load, share in shares.items()}
        for device, case, shares in (
            ("mixed", _mixed, {"moderate": 0.5, "overload": 1.7}),
            ("tight", _tight, {"moderate": 0.4, "overload": 1.0}),
            ("processor", _processor, {"moderate": 0.8, "overload": 3.0}),
        )
    }


def _mixed(setting: Setting, share: float) -> TruthCase:
    """Requests of unlike cost: the choice of what to drop matters."""
    rows = (_row("small", 5, 1), _row("middle", 8, 3), _row("large", 12, 8))
    return _modelled(setting, rows, copies=2, rate_rps=140 * share, slo_ms=60)


def _tight(setting: Setting, share: float) -> TruthCase:
    """An SLO of a few EXECs: the time of each decision matters."""
    return _modelled(setting, (_row("net", 4, 1),), copies=6, rate_rps=400 * share, slo_ms=20)


def _row(name: str, base_ms: int, each_ms: int) -> ProfileRow:
    return ProfileRow(
        name=name,
        weights_bytes=2 * PAGE_BYTES,
        load_ns=8 * NS_PER_MS,
        exec_ns={size: (base_ms + each_ms * size) * NS_PER_MS for size in (1, 2, 4, 8, 16)},
    )


def _modelled(
    setting: Setting, rows: tuple[ProfileRow, ...], *, copies: int, rate_rps: float, slo_ms: int
) -> TruthCase:
    names = tuple(f"{row.name}-{copy}" for row in rows for copy in range(copies))
    source = Poisson(
        models=range(len(names)),
        rate_rps=rate_rps,
        slo_ns=slo_ms * NS_PER_MS,
        end_ns=setting.run.duration_ns,
        seed=setting.run.seed,
    )
    return TruthCase(
        name="modelled",
        what=f"{len(names)} models of {len(rows)} costs on a modelled device, {rate_rps:g} r/s",
        models=tuple(
            LiveModel(name=row.name, copies=copies, batch_sizes=tuple(row.exec_ns)) for row in rows
        ),
        rows=rows,
        workload=Workload(models=names, sources=(source,)),
        noise=Noise(exec_sigma=0.01, load_sigma=0.01),
    )


# 1, 5 and some 70 ms of two cores: at these rates about all that slow ones can do, half of what fast ones can. The quick one is first,
# because it is what pauses between EXECs are measured with.
_NETWORKS_RPS = {"cifar_resnet20_v1": 50, "cifar_resnet110_v1": 40, "cifar_wideresnet16_10": 10}
_PROCESSOR_SLO_MS = 250


def _processor(setting: Setting, share: float) -> TruthCase:
    workload, rehearsal = (
        Workload(
            models=tuple(_NETWORKS_RPS),
            sources=tuple(
                Poisson(
                    models=(index,),
                    rate_rps=share * rate_rps,
                    slo_ns=_PROCESSOR_SLO_MS * NS_PER_MS,
                    end_ns=setting.run.duration_ns,
                    seed=seed + index,
                )
                for index, rate_rps in enumerate(_NETWORKS_RPS.values())
            ),
        )
        for seed in (setting.run.seed, setting.run.seed + 1000)
    )
    return TruthCase(
        name="processor",
        what=f"three networks on the processor, {share * sum(_NETWORKS_RPS.values()):g} r/s",
        models=tuple(
            LiveModel(name=name, copies=1, batch_sizes=(1, 2, 4), architecture=name)
            for name in _NETWORKS_RPS
        ),
        rows=(),
        workload=workload,
        rehearsal=rehearsal,
    )


# --- running --------------------------------------------------------------------------------------


def measure(device: str, cases: Mapping[str, TruthCase], setting: Setting) -> list[RankingLine]:
    """Calibrate on one server; then, on a server for each policy, play every load, and simulate it."""
    first = next(iter(cases.values()))
    profile = truth.profile_of(first, setting.run)
    calibrated = play(
        truth.calibrations(first, setting.run),
        models=first.models,
        profile=profile,
        num_pages=first.num_pages,
    )
    lines = []
    for policy in setting.policies:
        played = play(
            [case.workload for case in cases.values()],
            models=first.models,
            profile=profile,
            num_pages=first.num_pages,
            scheduler=POLICIES[policy],
        )
        for (load, case), run in zip(cases.items(), played.runs, strict=True):
            _, given = truth.as_measured(case, setting.run, calibrated.runs, calibrated.rows)
            simulated, _ = truth.simulate_once(
                replace(given, scheduler=POLICIES[policy]), setting.run
            )
            report = run.report
            lines.append(
                RankingLine(
                    device=device,
                    load=load,
                    policy=policy,
                    live=truth.figures_of(run.requests, run.actions, report.begin_ns, setting.run),
                    simulated=simulated,
                    lateness_p99_ms=report.lateness_ns_p99 / NS_PER_MS,
                )
            )
            line = lines[-1]
            print(
                f"{line.key} {policy}: live {line.live.goodput_rps:.1f} r/s, "
                f"{line.live.p50_ms:.1f} ms; simulated {simulated.goodput_rps:.1f} r/s, "
                f"{simulated.p50_ms:.1f} ms",
                flush=True,
            )
    return lines


# --- the comparison -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
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


def pairs_of(lines: Sequence[RankingLine]) -> list[Pair]:
    """Every pair that the simulator tells apart, under every load, by every metric."""
    pairs = []
    for one, other in combinations(lines, 2):
        if one.key != other.key:
            continue
        for metric in METRICS[one.load]:
            low, high = sorted((one, other), key=lambda line: getattr(line.simulated, metric))
            simulated = getattr(high.simulated, metric), getattr(low.simulated, metric)
            if simulated[0] > simulated[1] * (1 + _AIM[metric] / 100):
                pairs.append(
                    Pair(
                        case=one.key,
                        metric=metric,
                        higher=high.policy,
                        lower=low.policy,
                        simulated=simulated,
                        live=(getattr(high.live, metric), getattr(low.live, metric)),
                    )
                )
    return pairs


def figures_of(lines: Sequence[RankingLine]) -> dict[str, float]:
    """Name every number."""
    figures: dict[str, float] = {}
    for line in lines:
        for side in ("live", "simulated"):
            of: truth.RunFigures = getattr(line, side)
            key = f"{line.key}_{line.policy}_{side}"
            figures[f"{key}_goodput_rps"] = of.goodput_rps
            figures[f"{key}_p50_ms"] = of.p50_ms
    pairs = pairs_of(lines)
    for case in dict.fromkeys(line.key for line in lines):
        mine = [pair for pair in pairs if pair.case == case]
        figures[f"{case}_pairs"] = len(mine)
        figures[f"{case}_pairs_same_order"] = sum(pair.same_order for pair in mine)
    figures["pairs"] = len(pairs)
    figures["pairs_same_order"] = sum(pair.same_order for pair in pairs)
    return figures


def ranking(lines: Sequence[RankingLine], case: str, metric: str, side: str) -> list[str]:
    """Policies by a figure, the highest first."""
    mine = [line for line in lines if line.key == case]
    mine.sort(key=lambda line: getattr(getattr(line, side), metric), reverse=True)
    return [line.policy for line in mine]


def produce(setting: Setting, directory: Path = RESULTS) -> list[RankingLine]:
    """Measure everything and write `live_ranking.json`, `live_ranking.csv` and `live_ranking.png`."""
    load_before = os.getloadavg()[0]
    lines = []
    described = loads(setting)
    for device, cases in described.items():
        lines += measure(device, cases, setting)
    pairs = pairs_of(lines)
    for pair in pairs:
        if not pair.same_order:
            print(f"{pair.case} {pair.metric}: {pair.higher} and {pair.lower} change places live")
    write_csv(
        directory / "live_ranking.csv",
        ["device", "load", "policy", "side", *truth.RunFigures.__dataclass_fields__],
        [
            (line.device, line.load, line.policy, side, *asdict(getattr(line, side)).values())
            for line in lines
            for side in ("live", "simulated")
        ],
    )
    draw(lines, directory / "live_ranking.png")
    write_results(
        "live_ranking",
        figures_of(lines),
        command=f"python -m experiments live_ranking --seed {setting.run.seed}",
        seeds=[setting.run.seed],
        extra={
            "rankings": {
                f"{case}_{metric}": {
                    side: ranking(lines, case, metric, side) for side in ("live", "simulated")
                }
                for case in dict.fromkeys(line.key for line in lines)
                for metric in METRICS[case.partition("_")[2]]
            },
            "pairs": [asdict(pair) | {"same_order": pair.same_order} for pair in pairs],
            "what": {
                f"{device}_{load}": case.what
                for device, cases in described.items()
                for load, case in cases.items()
            },
            "lateness_p99_ms": {
                f"{line.key}_{line.policy}": line.lateness_p99_ms for line in lines
            },
            "load_averages": [load_before, os.getloadavg()[0]],
            "setting": asdict(setting),
        },
        directory=directory,
    )
    return lines


def draw(lines: Sequence[RankingLine], target: Path) -> None:
    """A panel for each metric: what a live run measured over what the simulator says, and the line of equals."""
    from matplotlib.ticker import LogLocator, NullFormatter

    shown = (
        ("goodput_rps", "Answers in time", "per second"),
        ("p50_ms", "Median latency, where all is answered,", "ms"),
    )
    with picture(target, 1, len(shown), size=(9.6, 4.8)) as grid:
        axes: Any
        for axes, (metric, what, unit) in zip(grid[0], shown, strict=True):
            mine = [line for line in lines if metric in METRICS[line.load]]
            pairs = [(getattr(line.simulated, metric), getattr(line.live, metric)) for line in mine]
            # A policy that answers nobody, live and simulated alike, has no place on these scales.
            ends = np.array([0.8 * min(filter(None, sum(pairs, ()))), 1.25 * max(sum(pairs, ()))])
            off = _AIM[metric] / 100
            axes.plot(ends, ends, color="black", lw=1)
            axes.fill_between(ends, ends * (1 - off), ends * (1 + off), color="#dddddd", zorder=0)
            for policy, marker in zip(
                dict.fromkeys(line.policy for line in mine), "os^D", strict=False
            ):
                places = [
                    pair for pair, line in zip(pairs, mine, strict=True) if line.policy == policy
                ]
                axes.scatter(
                    *zip(*places, strict=True),
                    color=colour_of(policy),
                    marker=marker,
                    s=50,
                    label=policy,
                )
            axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(NullFormatter())
            axes.set_title(
                f"{what} live\nand simulated; grey: within {_AIM[metric]:g} %", loc="left"
            )
            axes.set_xlabel(f"simulated, {unit}")
            axes.set_ylabel(f"live, {unit}")
            axes.legend()


def recorded(directory: Path = RESULTS) -> list[RankingLine]:
    """Read the table, so that the picture can be drawn without a run."""
    with (directory / "live_ranking.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    record = json.loads((directory / "live_ranking.json").read_text(encoding="utf-8"))
    whole = ("arrived", "refused", "cold")
    sides = []
    for row in rows:
        columns = [entry.name for entry in fields(truth.RunFigures)]
        values: dict[str, Any] = {n: (int if n in whole else float)(row[n]) for n in columns}
        sides.append(truth.RunFigures(**values))
    return [
        RankingLine(
            device=row["device"],
            load=row["load"],
            policy=row["policy"],
            live=live,
            simulated=simulated,
            lateness_p99_ms=record["lateness_p99_ms"][
                f"{row['device']}_{row['load']}_{row['policy']}"
            ],
        )
        for row, live, simulated in zip(rows[::2], sides[::2], sides[1::2], strict=True)
    ]


def main() -> None:
    """Measure as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draw", action="store_true", help="only draw what is recorded")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(recorded(), RESULTS / "live_ranking.png")
        return
    setting = Setting()
    produce(replace(setting, run=replace(setting.run, seed=arguments.seed)))


if __name__ == "__main__":
    main()
