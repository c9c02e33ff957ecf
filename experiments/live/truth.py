"""Does the simulator tell the truth: the same workloads live over gRPC and simulated, side by side.

Live, a `clockwright up` with one worker serves a workload that the replay client sends: on modelled
devices, and on the processor with real models. The simulator is given the same workload, and what was
measured of the server in calibration runs before (`experiments.live.calibration`), never in the runs that are
compared. Both leave telemetry rows, which the same code sums up, without the first seconds, in which
weights are loaded.

Each workload is played several times live; the table has the median of each figure, with the spread.

Requests reach a live controller later than the workload says, by the client's timers and by what else
the machine has to do. So each live run is simulated a second time, with its requests at the times at
which the controller had them: what is left of the gap then is the server's, not the client's.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S, PAGE_BYTES, ModelId
from controller.telemetry import OK, ActionRow, RequestRow, Telemetry
from experiments.live.calibration import Calibration, calibrate, calibration_workloads, measured_row
from experiments.live.live_run import LiveModel, LiveRun, play
from experiments.results_file import RESULTS, write_results
from experiments.simulator import Case, Cluster, HostedModel, run, summarise
from experiments.study.aims import limit_of
from experiments.study.pictures import COLOURS
from experiments.study.report import picture, write_csv
from modelzoo.profile import Noise, Profile, ProfileRow
from traces.arrivals import Bursty, ClosedLoop, Poisson, Recorded, Source, Workload

#: Largest gaps that the comparison aims at, in per cent.
AIMS = {metric: limit_of("truth", f"{metric}_gap_pct") for metric in ("goodput", "p50", "p99")}

_BUCKET_NS = NS_PER_S // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How long and how often."""

    #: Length of each live run; the first `warmup_ns` are left out.
    duration_ns: int = 27 * NS_PER_S
    warmup_ns: int = 2 * NS_PER_S
    #: Length of each calibration run.
    calibration_s: float = 4.0
    #: Number of live runs of each case, and of simulated ones with other seeds.
    repeats: int = 3
    seed: int = 1
    #: Modelled devices take this many times as long, and their clients ask less often, with longer SLOs,
    #: by the same factor: so other work on the machine shows less. Bursts keep their length.
    slower: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthCase:
    """One line of the table, before it has run."""

    name: str
    what: str
    models: tuple[LiveModel, ...]
    #: Durations on a modelled device, by model's name; empty: the processor runs the models.
    rows: tuple[ProfileRow, ...]
    workload: Workload
    #: The same mix with other arrivals, from which real models' durations are taken. A network that runs
    #: again and again finds its weights in the processor's caches; among others it does not.
    rehearsal: Workload | None = None
    num_pages: int = 64
    noise: Noise = field(default_factory=Noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of one run, live or simulated."""

    goodput_rps: float
    p50_ms: float
    p99_ms: float
    arrived: int
    refused: int
    cold: int
    mean_batch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthLine:
    """One line of the table."""

    case: TruthCase
    calibration: Calibration
    #: Noise and durations that the simulator was told.
    noise: Noise
    rows: tuple[ProfileRow, ...]
    live: list[RunFigures]
    simulated: list[RunFigures]
    #: Each live run simulated again with its requests as they arrived. Empty for closed loops, whose
    #: arrivals depend on the server.
    as_arrived: list[RunFigures]
    #: Latencies of the answered requests of one run, in ms, ascending.
    live_latencies_ms: list[float]
    simulated_latencies_ms: list[float]
    #: Each live run as its clients saw it.
    clients: list[dict[str, float]]
    #: The machine's load average before and after; the case itself adds less than 1.
    load_averages: tuple[float, float]


# --- cases ------------------------------------------------------------------------------------------


def cases(setting: Setting) -> list[TruthCase]:
    """The table's lines."""
    modelled = [
        _poisson(setting, "steady", 70, "one model of 10 ms, Poisson, 70 % of what the GPU can do"),
        _poisson(setting, "overload", 150, "the same at one and a half times what it can do"),
        _bursty(setting),
        _closed(setting),
        _cold(setting),
    ]
    return [*(_slowed(case, setting.slower) for case in modelled), _processor(setting)]


def _slowed(case: TruthCase, factor: int) -> TruthCase:
    """The same case on a modelled device that takes longer for everything."""
    rows = tuple(
        replace(
            row,
            load_ns=row.load_ns * factor,
            exec_ns={size: exec_ns * factor for size, exec_ns in row.exec_ns.items()},
        )
        for row in case.rows
    )
    sources: list[Source] = []
    for source in case.workload.sources:
        assert isinstance(source, Poisson | Bursty)
        sources.append(
            replace(source, rate_rps=source.rate_rps / factor, slo_ns=source.slo_ns * factor)
        )
    loops = tuple(replace(loop, slo_ns=loop.slo_ns * factor) for loop in case.workload.closed_loops)
    workload = replace(case.workload, sources=tuple(sources), closed_loops=loops)
    return replace(case, rows=rows, workload=workload)


def _row(name: str, base_ms: float, per_row_ms: float, *, pages: int = 2) -> ProfileRow:
    return ProfileRow(
        name=name,
        weights_bytes=pages * PAGE_BYTES,
        load_ns=pages * 4 * NS_PER_MS,
        exec_ns={
            size: round((base_ms + per_row_ms * size) * NS_PER_MS) for size in (1, 2, 4, 8, 16)
        },
    )


def _modelled(row: ProfileRow, copies: int = 1) -> LiveModel:
    return LiveModel(name=row.name, copies=copies, batch_sizes=tuple(row.exec_ns))


def _poisson(setting: Setting, name: str, rate_rps: float, what: str) -> TruthCase:
    row = ProfileRow(
        name="ten", weights_bytes=PAGE_BYTES, load_ns=NS_PER_MS, exec_ns={1: 10 * NS_PER_MS}
    )
    arrivals = Poisson(
        models=(0,),
        rate_rps=rate_rps,
        slo_ns=100 * NS_PER_MS,
        end_ns=setting.duration_ns,
        seed=setting.seed,
    )
    return TruthCase(
        name=name,
        what=what,
        models=(_modelled(row),),
        rows=(row,),
        workload=Workload(models=("ten",), sources=(arrivals,)),
    )


def _bursty(setting: Setting) -> TruthCase:
    rows = (_row("small", 6, 2), _row("middle", 12, 4), _row("large", 20, 8))
    sources = tuple(
        Bursty(
            models=(index,),
            rate_rps=rate_rps,
            burst_ns=NS_PER_S,
            pause_ns=NS_PER_S,
            slo_ns=slo_ms * NS_PER_MS,
            end_ns=setting.duration_ns,
            seed=setting.seed + index,
        )
        for index, (rate_rps, slo_ms) in enumerate(((80, 200), (40, 300), (20, 500)))
    )
    return TruthCase(
        name="bursty",
        what="three models of unlike cost and SLO, batches up to 16, bursts of a second",
        models=tuple(map(_modelled, rows)),
        rows=rows,
        workload=Workload(models=tuple(row.name for row in rows), sources=sources),
        noise=Noise(exec_sigma=0.01, load_sigma=0.01),
    )


def _closed(setting: Setting) -> TruthCase:
    row = _row("net", 15, 5)
    loops = tuple(
        ClosedLoop(
            model=index,
            concurrency=concurrency,
            slo_ns=500 * NS_PER_MS,
            end_ns=setting.duration_ns,
            start_jitter_ns=NS_PER_S,
            seed=setting.seed + index,
        )
        for index, concurrency in enumerate((8, 8, 4))
    )
    return TruthCase(
        name="closed",
        what="20 closed-loop clients on three models, batches up to 16",
        models=(_modelled(row, len(loops)),),
        rows=(row,),
        workload=Workload(
            models=tuple(f"net-{index}" for index in range(len(loops))), closed_loops=loops
        ),
        noise=Noise(exec_sigma=0.01, load_sigma=0.01),
    )


def _cold(setting: Setting) -> TruthCase:
    row, copies = _row("net", 6, 2, pages=4), 16
    # Half of the requests are for four models, the others for twelve that do not fit beside them.
    sources = tuple(
        Poisson(
            models=models,
            rate_rps=20,
            slo_ns=200 * NS_PER_MS,
            end_ns=setting.duration_ns,
            seed=setting.seed + models[0],
        )
        for models in (range(4), range(4, copies))
    )
    return TruthCase(
        name="cold",
        what="16 models where 8 fit, loads of 16 ms",
        models=(_modelled(row, copies),),
        rows=(row,),
        workload=Workload(models=tuple(f"net-{index}" for index in range(copies)), sources=sources),
        num_pages=32,
        noise=Noise(exec_sigma=0.01, load_sigma=0.01),
    )


def _processor(setting: Setting) -> TruthCase:
    architectures = ("cifar_resnet20_v1", "cifar_resnet56_v1", "cifar_resnet110_v1")
    workload, rehearsal = (
        Workload(
            models=architectures,
            sources=tuple(
                Poisson(
                    models=(index,),
                    rate_rps=rate_rps,
                    slo_ns=200 * NS_PER_MS,
                    end_ns=setting.duration_ns,
                    seed=seed + index,
                )
                for index, rate_rps in enumerate((40, 20, 20))
            ),
        )
        for seed in (setting.seed, setting.seed + 1000)
    )
    return TruthCase(
        name="processor",
        what="three real networks on the processor, as measured there",
        models=tuple(
            LiveModel(name=name, copies=1, batch_sizes=(1, 2, 4), architecture=name)
            for name in architectures
        ),
        rows=(),
        workload=workload,
        rehearsal=rehearsal,
    )


# --- running ----------------------------------------------------------------------------------------


def compare_case(case: TruthCase, setting: Setting) -> TruthLine:
    """Calibrate, play the case live, and simulate it."""
    workloads = calibrations(case, setting)
    load_before = os.getloadavg()[0]
    played = play(
        [*workloads, *[case.workload] * setting.repeats],
        models=case.models,
        profile=profile_of(case, setting),
        num_pages=case.num_pages,
    )
    first, runs = played.runs[: len(workloads)], played.runs[len(workloads) :]
    calibration, given = as_measured(case, setting, first, played.rows)
    live = [figures_of(r.requests, r.actions, r.report.begin_ns, setting) for r in runs]
    simulated, simulated_requests = _simulate(given, setting)
    as_arrived = [
        simulate_once(replace(given, workload=_as_arrived(case.workload, live_run)), setting)[0]
        for live_run in runs
        if not case.workload.closed_loops
    ]
    middle = sorted(range(len(live)), key=lambda index: live[index].p99_ms)[len(live) // 2]
    return TruthLine(
        case=case,
        calibration=calibration,
        noise=given.cluster.noise,
        rows=tuple(model.row for model in given.cluster.models),
        live=live,
        simulated=simulated,
        as_arrived=as_arrived,
        live_latencies_ms=_latencies_ms(
            runs[middle].requests, runs[middle].report.begin_ns, setting
        ),
        simulated_latencies_ms=_latencies_ms(simulated_requests, 0, setting),
        clients=[_client(run) for run in runs],
        load_averages=(load_before, os.getloadavg()[0]),
    )


def calibrations(case: TruthCase, setting: Setting) -> list[Workload]:
    """Workloads that have to be played so that the case can be simulated."""
    # Modelled devices have known durations; the overheads of each real model are measured.
    calibrated = case.workload.models[:1] if case.rows else case.workload.models
    workloads = [
        workload
        for model in calibrated
        for workload in calibration_workloads(model, setting.calibration_s)
    ]
    return workloads if case.rehearsal is None else [*workloads, case.rehearsal]


def profile_of(case: TruthCase, setting: Setting) -> Profile | None:
    """Profile of the modelled device; None: the processor runs the models."""
    if not case.rows:
        return None
    rows = {row.name: row for row in case.rows}
    return Profile(name=case.name, rows=rows, noise=case.noise, seed=setting.seed)


def as_measured(
    case: TruthCase, setting: Setting, runs: Sequence[LiveRun], reported: Mapping[str, ProfileRow]
) -> tuple[Calibration, Case]:
    """Describe a case to the simulator.

    Args:
        case: what is to be simulated.
        setting: how long the case runs.
        runs: the runs of its `calibrations`.
        reported: by model, the costs that the worker reported.
    """
    alone, crowd = runs[:2]
    calibration = calibrate(alone, crowd, None if case.rehearsal is None else runs[-1])
    models, noise = _costs(case, profile_of(case, setting), reported, runs)
    return calibration, Case(
        workload=case.workload,
        cluster=Cluster(
            models=models,
            num_pages=case.num_pages,
            # Calibrated durations contain the copies, so a copy takes no time of its own.
            copy_bytes_per_s=1 << 60,
            start_delay_ns=calibration.start_delay_ns,
            noise=noise,
        ),
        network=calibration.network(),
        duration_ns=setting.duration_ns,
        seed=setting.seed,
    )


def _costs(
    case: TruthCase,
    profile: Profile | None,
    reported: Mapping[str, ProfileRow],
    runs: Sequence[LiveRun],
) -> tuple[tuple[HostedModel, ...], Noise]:
    """Durations of each model: its profile's, or the worker's as calibration corrects them."""
    if profile is not None:
        return (
            tuple(
                HostedModel(ModelId(name), profile.row_for(name)) for name in case.workload.models
            ),
            profile.noise,
        )
    models, sigmas = [], []
    for index, name in enumerate(case.workload.models):
        rehearsed = [_only(name, run) for run in runs[2 * len(case.workload.models) :]]
        # A run that was too short to ask the model says nothing of it.
        alone = runs[2 * index : 2 * index + 2]
        row, noise = measured_row(
            reported[name], [run for run in rehearsed if run.actions] or alone
        )
        models.append(HostedModel(ModelId(name), row))
        sigmas.append(noise.exec_sigma)
    return tuple(models), Noise(exec_sigma=statistics.fmean(sigmas))


def _only(model: str, run: LiveRun) -> LiveRun:
    """A run's successful Infers of one model, as if there had been no others."""
    actions = tuple(a for a in run.actions if a.model_id == model and a.exec is not None)
    return replace(run, actions=actions)


def _simulate(given: Case, setting: Setting) -> tuple[list[RunFigures], list[RequestRow]]:
    """The figures of each seed, and the requests of the last."""
    figures: list[RunFigures] = []
    requests: list[RequestRow] = []
    for number in range(setting.repeats):
        summed_up, requests = simulate_once(replace(given, seed=setting.seed + number), setting)
        figures.append(summed_up)
    return figures, requests


def simulate_once(given: Case, setting: Setting) -> tuple[RunFigures, list[RequestRow]]:
    """The figures of one run, and its requests."""
    telemetry = Telemetry()
    run(given, telemetry=telemetry)
    requests = list(telemetry.requests)
    return figures_of(requests, telemetry.actions, 0, setting), requests


def _as_arrived(workload: Workload, live: LiveRun) -> Workload:
    """The requests of a live run at the times at which the controller had them."""
    begin_ns = live.report.begin_ns
    sources: list[Source] = []
    for index, name in enumerate(workload.models):
        rows = [row for row in live.requests if row.model_id == name]
        times_ns = np.array([row.arrival_ns - begin_ns for row in rows], np.int64)
        for slo_ns in sorted({row.slo_ns for row in rows}):
            chosen = times_ns[[row.slo_ns == slo_ns for row in rows]]
            sources.append(
                Recorded(
                    times_ns=chosen,
                    models=np.full(len(chosen), index),
                    slo_ns=slo_ns,
                    end_ns=int(chosen.max()) + 1,
                )
            )
    return Workload(models=workload.models, sources=tuple(sources))


def figures_of(
    requests: Iterable[RequestRow], actions: Iterable[ActionRow], begin_ns: int, setting: Setting
) -> RunFigures:
    """Sum up a run whose time 0 is `begin_ns` of its rows."""
    summary = summarise(requests, actions, bucket_ns=_BUCKET_NS, num_workers=1, origin_ns=begin_ns)
    total = summary.total(setting.warmup_ns, setting.duration_ns)
    return RunFigures(
        goodput_rps=summary.rate(total.answered, setting.warmup_ns, setting.duration_ns),
        p50_ms=total.latency_ns(50) / NS_PER_MS,
        p99_ms=total.latency_ns(99) / NS_PER_MS,
        arrived=total.arrived,
        refused=total.num_refused,
        cold=total.cold_answered,
        mean_batch=total.mean_batch_size,
    )


def _latencies_ms(requests: Iterable[RequestRow], begin_ns: int, setting: Setting) -> list[float]:
    return sorted(
        (row.departure_ns - row.arrival_ns) / NS_PER_MS
        for row in requests
        if row.outcome == OK and row.departure_ns >= begin_ns + setting.warmup_ns
    )


def _client(run: LiveRun) -> dict[str, float]:
    report = run.report
    return {
        "goodput_rps": report.goodput_rps,
        "p50_ms": report.latency_ns_p50 / NS_PER_MS,
        "p99_ms": report.latency_ns_p99 / NS_PER_MS,
        "lateness_p99_ms": report.lateness_ns_p99 / NS_PER_MS,
    }


# --- the table --------------------------------------------------------------------------------------

_METRICS = {"goodput": "goodput_rps", "p50": "p50_ms", "p99": "p99_ms"}


def tabulate(line: TruthLine) -> list[dict[str, Any]]:
    """A case's rows of the table, one per metric."""
    table = []
    for metric, name in _METRICS.items():
        live = [getattr(figures, name) for figures in line.live]
        simulated = statistics.median(getattr(figures, name) for figures in line.simulated)
        middle = statistics.median(live)
        gap_pct = 100 * (simulated / middle - 1) if middle else math.inf
        as_arrived_pct = _gap_as_arrived_pct(line, name, gap_pct)
        table.append(
            {
                "case": line.case.name,
                "metric": name,
                "live": middle,
                "live_min": min(live),
                "live_max": max(live),
                "simulated": simulated,
                "gap_pct": gap_pct,
                "gap_as_arrived_pct": as_arrived_pct,
                "aim_pct": AIMS[metric],
                "reason": _reason(line, metric, gap_pct, as_arrived_pct),
            }
        )
    return table


def _gap_as_arrived_pct(line: TruthLine, name: str, gap_pct: float) -> float:
    """The median gap of live runs to their simulation; that of the workload where there is none."""
    gaps = [
        100 * (getattr(simulated, name) / getattr(live, name) - 1)
        for live, simulated in zip(line.live, line.as_arrived, strict=False)
        if getattr(live, name)
    ]
    return statistics.median(gaps) if gaps else gap_pct


def _reason(line: TruthLine, metric: str, gap_pct: float, as_arrived_pct: float) -> str:
    """Say where a gap above the aim comes from, as far as the run itself shows it."""
    aim_pct = AIMS[metric]
    if abs(gap_pct) <= aim_pct:
        return ""
    load, cores = line.load_averages[0], os.cpu_count() or 1
    if load > cores:
        return (
            f"the machine had other work: load average {load:.1f} on {cores} cores before the case"
        )
    if abs(as_arrived_pct) <= aim_pct:
        late_ms = statistics.median(client["lateness_p99_ms"] for client in line.clients)
        return f"requests reached the controller late: the client's p99 is {late_ms:.1f} ms"
    return "not explained by this run"


def produce(setting: Setting, directory: Path = RESULTS) -> list[TruthLine]:
    """Run all cases; leave JSON, CSV and PNG in a directory."""
    lines = []
    for case in cases(setting):
        lines.append(compare_case(case, setting))
        for row in tabulate(lines[-1]):
            print(
                f"{row['case']:10} {row['metric']:12} live {row['live']:8.2f} "
                f"({row['live_min']:.2f} .. {row['live_max']:.2f})  simulated {row['simulated']:8.2f} "
                f" {row['gap_pct']:+.1f} % (as arrived {row['gap_as_arrived_pct']:+.1f} %) "
                f"{row['reason']}".rstrip(),
                flush=True,
            )
    write(lines, setting, directory)
    return lines


def write(lines: Sequence[TruthLine], setting: Setting, directory: Path) -> None:
    """Write the three files."""
    table = [row for line in lines for row in tabulate(line)]
    figures: dict[str, float] = {}
    for row in table:
        metric, _, unit = row["metric"].rpartition("_")
        for side in ("live", "live_min", "live_max", "simulated"):
            figures[f"{row['case']}_{side}_{metric}_{unit}"] = row[side]
        for gap in ("gap_pct", "gap_as_arrived_pct"):
            figures[f"{row['case']}_{metric}_{gap}"] = row[gap]
    for metric in _METRICS:
        for gap in ("gap_pct", "gap_as_arrived_pct"):
            gaps = [figures[f"{line.case.name}_{metric}_{gap}"] for line in lines]
            figures[f"{metric}_{gap}"] = max(gaps, key=abs)
    write_csv(directory / "truth.csv", list(table[0]), [list(row.values()) for row in table])
    _draw(lines, directory / "truth.png")
    write_results(
        "truth",
        figures,
        command=(
            f"python -m experiments truth --seed {setting.seed} --slower {setting.slower} "
            f"--seconds {setting.duration_ns // NS_PER_S}"
        ),
        seeds=[setting.seed],
        extra={
            "setting": asdict(setting),
            "comparison": table,
            "cases": {line.case.name: _describe(line) for line in lines},
        },
        directory=directory,
    )


def _describe(line: TruthLine) -> dict[str, Any]:
    return {
        "what": line.case.what,
        "calibration": line.calibration.describe(),
        "noise": asdict(line.noise),
        "rows": {row.name: asdict(row) for row in line.rows},
        "live": [asdict(figures) for figures in line.live],
        "simulated": [asdict(figures) for figures in line.simulated],
        "as_arrived": [asdict(figures) for figures in line.as_arrived],
        "clients": line.clients,
        "load_averages": line.load_averages,
    }


def _draw(lines: Sequence[TruthLine], target: Path) -> None:
    columns = 3
    rows = -(-len(lines) // columns)
    with picture(target, rows, columns, size=(12, 3.8 * rows)) as grid:
        axes: Any
        for axes, line in zip(grid.flat, lines, strict=False):
            for label, values, colour, style in (
                ("live", line.live_latencies_ms, COLOURS[0], "-"),
                ("simulated", line.simulated_latencies_ms, COLOURS[1], "--"),
            ):
                shares = 100 * np.arange(1, len(values) + 1) / max(1, len(values))
                axes.plot(values, shares, label=label, color=colour, ls=style, lw=2)
            p99 = next(row for row in tabulate(line) if row["metric"] == _METRICS["p99"])
            gap = f"simulated p99 {p99['gap_pct']:+.1f} %"
            axes.set_title(
                f"{textwrap.fill(line.case.what, 48)}\n{gap}", fontsize="small", loc="left"
            )
            axes.set_xlabel("latency, ms")
            axes.set_ylabel("answers that were no slower, %")
            axes.set_ylim(0, 100)
            axes.grid(visible=True, lw=0.3)
            axes.legend()
        for axes in grid.flat[len(lines) :]:
            axes.set_visible(False)


def main() -> None:
    """Compare as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--slower", type=int, default=1, help="stretch modelled cases, on a machine with other work"
    )
    parser.add_argument("--seconds", type=int, default=27, help="of each live run")
    arguments = parser.parse_args()
    for name, least in (("slower", 1), ("seconds", 3)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name}: found {getattr(arguments, name)}, expected {least} or more")
    produce(
        Setting(
            seed=arguments.seed,
            slower=arguments.slower,
            duration_ns=arguments.seconds * NS_PER_S,
        )
    )


if __name__ == "__main__":
    main()
