"""Figure 8: eight hours of the Azure trace on 4,026 models and 6 GPUs, SLO 100 ms.

The workload is that of `azure_replay`. From a trace of one's own, which `--trace` or the environment
variable `AZURE2019_TRACE` names (a file, or the folder it lies in), and from the generator.

Every finished minute is a row of `fig8.csv` at once, so that a run that was cut off is still data. A run of
another policy, or at another rate, can be added to those that are recorded (`--add`).
Memory does not grow with the length of the run: the JSON keeps what it was at every tenth of it.

Devices have noise of 0.3 %, and nothing else disturbs a run: no outliers, no delays of hosts or network beyond
a constant, and no time of the controller. `--charged` replays a short stretch twice, without and with the
measured costs of the controller's core (`experiments.simulator.costs`), and names the bottleneck of both.

The bound (B1, `experiments.bounds.density_bound`) is computed for some minutes of the run, each as if
it had the GPUs for itself, with everything resident. It counts answers to requests that arrive in these
minutes, the figure answers given in them: at most an SLO's worth of requests apart.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.errors import ClockwrightError, ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.bounds import BoundProblem, Cost, density_bound
from experiments.bounds.density import shares
from experiments.clockwork_paper.azure_replay import (
    NS_PER_MINUTE,
    Setting,
    case_of,
    generated,
    hosted_models,
    recorded,
)
from experiments.native import is_compiled
from experiments.results_file import RESULTS, add_results, write_results
from experiments.simulator import Case, Progress, bottleneck, run
from experiments.simulator.costs import measured
from experiments.simulator.costs import sources as costs_from
from experiments.simulator.summary import Bucket, Summary
from experiments.study.report import Comparison, compare, show
from experiments.study.study import POLICIES, PREDICTIVE
from traces.arrivals import TraceReplay, Workload
from traces.minutes import MinuteTrace

#: This environment variable names a trace of one's own.
TRACE_VARIABLE = "AZURE2019_TRACE"

#: Section 6.5, "Clockwork with realistic workloads".
PAPER = {
    "paper_offered_rps": 4860.6,
    "paper_goodput_rps": 4860.5,
    "paper_failed_requests": 4511.0,
    "paper_max_ms": 100.0,
    "paper_cold_models_per_min": 2190.0,
    "paper_cold_rps": 178.0,
    "paper_cold_pct": 3.7,
}

#: Names of the sources at the paper's rate. At another rate, `_x` and its multiple of the paper's follow.
SOURCES = ("trace", "generator")

#: The bound is computed for the first whole hour's minute, then for one minute in `_BOUND_EVERY`.
_FIRST_BOUND = 1
_BOUND_EVERY = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Minute:
    """One row of the table: what a minute of one run came to."""

    policy: str
    source: str
    minute: int
    offered_rps: float
    goodput_rps: float
    failed: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    #: Mean over batches, then mean over the requests in them.
    mean_batch_size: float
    mean_batch_size_by_request: float
    #: Models with a cold start.
    cold_models: int
    cold_rps: float
    #: Shares of all GPUs' time.
    exec_busy: float
    load_busy: float


@dataclass(slots=True, kw_only=True)
class ReplayOutcome:
    """A run, or as much of it as there was time for."""

    policy: str
    source: str
    minutes: list[Minute]
    total: Bucket
    num_requests: int
    wall_s: float
    cpu_s: float
    #: Highest resident memory of the process so far.
    peak_rss_mib: float
    #: Resident memory at every tenth of the run, the first after one tenth.
    rss_mib: list[float]
    #: The bound over the minutes for which it was computed; answers per second.
    bound_rps: float = 0.0
    bounded_goodput_rps: float = 0.0
    #: Least GPU time that the requests of the bounded minutes need, as a share of all GPUs' time.
    least_load: float = 0.0
    num_bounded: int = 0
    #: Mean number of models that are asked in a minute.
    active_models: float = 0.0
    #: By part, as `Summary.utilisations`.
    busy: dict[str, float] = field(default_factory=dict)


class _EnoughError(Exception):
    """The wall time is used up."""


def measure(
    setting: Setting,
    policy: str,
    source: str,
    trace: MinuteTrace,
    *,
    num_minutes: int | None = None,
    wall_limit_s: float | None = None,
    table: Path | None = None,
) -> ReplayOutcome:
    """Simulate a trace.

    Args:
        setting: the cluster to which it is replayed.
        policy: one of `study.POLICIES`.
        source: what to call the trace.
        trace: the trace to replay.
        num_minutes: how many of its minutes to simulate; None: all.
        wall_limit_s: stop at the end of the minute in which this is over; None: never.
        table: every finished minute is added to this file at once.
    """
    case = case_of(setting, trace, POLICIES[policy], num_minutes=num_minutes)
    length = case.duration_ns // NS_PER_MINUTE
    minutes: list[Minute] = []
    rss_mib: dict[int, float] = {}
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    summary: Summary | None = None

    def finish(summary: Summary, until: int) -> None:
        for number in range(len(minutes), until):
            minutes.append(_minute(policy, source, number, summary))
            # Sets of names would take most of the memory that the run keeps.
            summary.buckets[number].cold_models.clear()
            if table is not None:
                _append(table, minutes[-1])

    def on_progress(progress: Progress) -> None:
        nonlocal summary
        summary = progress.summary
        done = progress.simulated_ns // NS_PER_MINUTE
        # An EXEC that ends in this minute may have begun in the last.
        finish(summary, min(done - 1, length))
        if done * 10 // length > len(rss_mib):
            rss_mib[done] = _rss_mib()
        if not done % max(1, length // 48):
            _say(case, progress, minutes, begin_cpu_s)
        if wall_limit_s is not None and minutes and progress.wall_s > wall_limit_s:
            raise _EnoughError

    try:
        summary = run(
            case, bucket_ns=NS_PER_MINUTE, on_progress=on_progress, progress_ns=NS_PER_MINUTE
        ).summary
        finish(summary, length)
    except _EnoughError:
        print(f"cut off after {len(minutes)} minutes", flush=True)
    assert summary is not None
    total = summary.total(0, len(minutes) * NS_PER_MINUTE)
    outcome = ReplayOutcome(
        policy=policy,
        source=source,
        minutes=minutes,
        total=total,
        num_requests=summary.total().arrived,
        wall_s=time.perf_counter() - begin_s,
        cpu_s=time.process_time() - begin_cpu_s,
        peak_rss_mib=_peak_rss_mib(),
        rss_mib=list(rss_mib.values()),
        active_models=_active_models(case.workload, len(minutes)),
        busy=summary.utilisations(0, len(minutes) * NS_PER_MINUTE),
    )
    _bound(outcome, case.workload, setting)
    return outcome


def _minute(policy: str, source: str, number: int, summary: Summary) -> Minute:
    bucket = summary.buckets[number]
    begin_ns, end_ns = number * NS_PER_MINUTE, (number + 1) * NS_PER_MINUTE
    return Minute(
        policy=policy,
        source=source,
        minute=number,
        offered_rps=bucket.arrived / 60,
        goodput_rps=bucket.answered / 60,
        failed=bucket.num_refused,
        p50_ms=bucket.latency_ns(50) / NS_PER_MS,
        p99_ms=bucket.latency_ns(99) / NS_PER_MS,
        max_ms=bucket.latency_ns(100) / NS_PER_MS,
        mean_batch_size=bucket.mean_batch_size,
        mean_batch_size_by_request=_by_request(bucket),
        cold_models=len(bucket.cold_models),
        cold_rps=bucket.cold_answered / 60,
        exec_busy=summary.utilisation(bucket.exec_ns, begin_ns, end_ns),
        load_busy=summary.utilisation(bucket.load_ns, begin_ns, end_ns),
    )


def _active_models(workload: Workload, num_minutes: int) -> float:
    """Mean number of models with a request in a minute."""
    active = 0.0
    for source in workload.sources:
        assert isinstance(source, TraceReplay)
        for minute in range(num_minutes):
            expected = np.bincount(source.models, source.counts[:, minute] * source.scale)
            active += float(-np.expm1(-expected).sum())
    return active / num_minutes


def _by_request(bucket: Bucket) -> float:
    answers = sum(size * number for size, number in bucket.batches.items())
    squares = sum(size * size * number for size, number in bucket.batches.items())
    return squares / answers if answers else 0.0


def _append(table: Path, minute: Minute) -> None:
    row = asdict(minute)
    with table.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(
            f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row.values()
        )


def _say(case: Case, progress: Progress, minutes: Sequence[Minute], begin_cpu_s: float) -> None:
    if not minutes:
        return
    last = minutes[-1]
    speed = sum(minute.offered_rps for minute in minutes) * 60 / progress.wall_s
    print(
        f"{progress.simulated_ns / case.duration_ns:6.1%} in {progress.wall_s:6.0f} s "
        f"({time.process_time() - begin_cpu_s:.0f} s of CPU), {speed:,.0f} requests/s, "
        f"{_rss_mib():.0f} MiB; minute {last.minute}: {last.goodput_rps:.0f} of "
        f"{last.offered_rps:.0f} r/s, p99 {last.p99_ms:.1f} ms, {last.cold_models} cold models",
        flush=True,
    )


def _rss_mib() -> float:
    """Resident memory of the process now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _peak_rss_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _bound(outcome: ReplayOutcome, workload: Workload, setting: Setting) -> None:
    """Compute B1 for some of the minutes that were simulated."""
    wanted = range(_FIRST_BOUND, len(outcome.minutes), _BOUND_EVERY)
    if not wanted:
        return
    costs = [Cost(model.row.exec_ns) for model in hosted_models(setting)]
    bounded = load_ns = 0.0
    for begin_ns, times, models in _minutes_of(workload, wanted):
        case = BoundProblem(
            arrival_ns=times,
            model=models,
            slo_ns=np.full(len(times), setting.slo_ns),
            costs=costs,
            num_gpus=setting.num_workers,
            start_ns=begin_ns,
        )
        bounded += density_bound(case)
        load_ns += float(shares(case).sum())
    outcome.num_bounded = len(wanted)
    outcome.bound_rps = bounded / (60 * len(wanted))
    outcome.bounded_goodput_rps = sum(
        outcome.minutes[number].goodput_rps for number in wanted
    ) / len(wanted)
    outcome.least_load = load_ns / (NS_PER_MINUTE * len(wanted) * setting.num_workers)


def _minutes_of(
    workload: Workload, wanted: range
) -> Iterator[tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Begin, arrival times and models of some minutes."""
    pieces: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
    following = iter(wanted)
    begin_ns = next(following) * NS_PER_MINUTE
    for arrivals in workload.arrivals():
        inside = (arrivals.time_ns >= begin_ns) & (arrivals.time_ns < begin_ns + NS_PER_MINUTE)
        pieces.append((arrivals.time_ns[inside], arrivals.model[inside]))
        if arrivals.time_ns[-1] >= begin_ns + NS_PER_MINUTE:
            times, models = (np.concatenate(column) for column in zip(*pieces, strict=True))
            yield begin_ns, times, models
            pieces = []
            number = next(following, None)
            if number is None:
                return
            begin_ns = number * NS_PER_MINUTE
    times, models = (np.concatenate(column) for column in zip(*pieces, strict=True))
    yield begin_ns, times, models


def figures_of(outcomes: Sequence[ReplayOutcome], num_gpus: int) -> dict[str, float]:
    """Name every number."""
    figures: dict[str, float] = {}
    for outcome in outcomes:
        key = f"{outcome.policy}_{outcome.source}"
        total, minutes = outcome.total, outcome.minutes
        seconds = 60 * len(minutes)
        answered = max(total.answered, 1)
        figures |= {
            f"{key}_minutes": len(minutes),
            f"{key}_requests": total.arrived,
            f"{key}_offered_rps": total.arrived / seconds,
            f"{key}_goodput_rps": total.answered / seconds,
            f"{key}_failed_requests": total.num_refused,
            f"{key}_failed_ppm": 1e6 * total.num_refused / max(total.arrived, 1),
            # Admitted requests that were answered or given up after the deadline.
            f"{key}_late_per_million": 1e6 * total.refused.get("LATE", 0) / max(total.arrived, 1),
            f"{key}_p50_ms": total.latency_ns(50) / NS_PER_MS,
            f"{key}_p99_ms": total.latency_ns(99) / NS_PER_MS,
            f"{key}_p9999_ms": total.latency_ns(99.99) / NS_PER_MS,
            f"{key}_max_ms": total.latency_ns(100) / NS_PER_MS,
            f"{key}_refusal_p50_ms": total.refusal_ns(50) / NS_PER_MS,
            f"{key}_refusal_p99_ms": total.refusal_ns(99) / NS_PER_MS,
            f"{key}_front_busy_pct": 100 * outcome.busy["front"],
            f"{key}_controller_busy_pct": 100 * outcome.busy["controller"],
            f"{key}_mean_batch_size": total.mean_batch_size,
            f"{key}_mean_batch_size_by_request": _by_request(total),
            f"{key}_cold_models_per_min": sum(m.cold_models for m in minutes) / len(minutes),
            f"{key}_active_models_per_min": outcome.active_models,
            f"{key}_cold_rps": total.cold_answered / seconds,
            f"{key}_cold_pct": 100 * total.cold_answered / answered,
            f"{key}_exec_busy_pct": 100 * total.exec_ns / (seconds * NS_PER_S * num_gpus),
            f"{key}_load_busy_pct": 100 * total.load_ns / (seconds * NS_PER_S * num_gpus),
            f"{key}_wall_s": outcome.wall_s,
            f"{key}_cpu_s": outcome.cpu_s,
            f"{key}_peak_rss_mib": outcome.peak_rss_mib,
        }
        if outcome.num_bounded:
            figures |= {
                f"bound_{outcome.source}_goodput_rps": outcome.bound_rps,
                f"bound_{outcome.source}_gpu_load_pct": 100 * outcome.least_load,
                f"{key}_bounded_goodput_rps": outcome.bounded_goodput_rps,
                f"{key}_bound_share_pct": 100 * outcome.bounded_goodput_rps / outcome.bound_rps,
            }
    return figures | PAPER


_ANOTHER_TRACE = (
    "another trace: the paper's was never published, and in its authors' words differs substantially "
    "from the one that was; fewer models are asked in a minute here (active_models_per_min)"
)


def comparisons(outcomes: Sequence[ReplayOutcome]) -> list[Comparison]:
    """Our numbers that the paper's text has as well."""
    reasons = {
        "goodput_rps": "",
        "failed_requests": "modelled devices have noise of 0.3 %, not the outliers of real hosts",
        "max_ms": "answers are planned to end 5 ms before the deadline, and no outlier delays them",
        "cold_models_per_min": _ANOTHER_TRACE,
        "cold_rps": _ANOTHER_TRACE,
        "cold_pct": _ANOTHER_TRACE,
    }
    return [
        Comparison(
            key=f"{outcome.policy}_{outcome.source}_{metric}",
            paper_key=f"paper_{metric}",
            reason=reason,
        )
        for outcome in outcomes
        for metric, reason in reasons.items()
    ]


def produce(
    setting: Setting,
    sources: Mapping[str, tuple[MinuteTrace, int | None]],
    *,
    policies: Sequence[str] = PREDICTIVE,
    directory: Path = RESULTS,
    wall_limit_s: float | None = None,
    add: bool = False,
    charged: Collection[str] = (),
    command: str = "python -m experiments fig8",
) -> list[ReplayOutcome]:
    """Measure everything and write `fig8.json`, `fig8.csv` and `fig8.png`.

    Args:
        setting: the replay and its cluster.
        sources: by name, the trace and how many of its minutes are replayed.
        policies: each replays every source.
        directory: where the files go.
        wall_limit_s: limit of each replay.
        add: keep the runs recorded there, except those that are repeated.
        charged: sources in which the controller's core is charged what it was measured to cost.
        command: the command line that repeats all of it.

    Raises:
        FileNotFoundError: there is no record to add to.
    """
    table = directory / "fig8.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    again = {(policy, source) for policy in policies for source in sources}
    kept = [m for m in read_table(table) if (m.policy, m.source) not in again] if add else []
    table.write_text(",".join(column.name for column in fields(Minute)) + "\n", encoding="utf-8")
    for minute in kept:
        _append(table, minute)
    outcomes = []
    for source, (trace, num_minutes) in sources.items():
        for policy in policies:
            print(f"{policy}, {source}: {len(trace.functions):,} functions", flush=True)
            outcome = measure(
                replace(setting, costs=measured()) if source in charged else setting,
                policy,
                source,
                trace,
                num_minutes=num_minutes,
                wall_limit_s=wall_limit_s,
                table=table,
            )
            outcomes.append(outcome)
            # Write after each run, because a later one may be cut off.
            if add:
                _add(setting, outcome, directory, command)
            else:
                _write(setting, outcomes, directory, command)
            draw(read_table(table), directory / "fig8.png")
    return outcomes


def read_table(table: Path) -> list[Minute]:
    """Every minute that is recorded."""
    kinds = {column.name: column.type for column in fields(Minute)}
    make = {"str": str, "int": int, "float": float}
    with table.open(newline="", encoding="utf-8") as file:
        return [
            Minute(**{name: make[str(kinds[name])](cell) for name, cell in row.items()})
            for row in csv.DictReader(file)
        ]


def _write(
    setting: Setting, outcomes: Sequence[ReplayOutcome], directory: Path, command: str
) -> None:
    figures = figures_of(outcomes, setting.num_workers)
    write_results(
        "fig8",
        figures,
        command=command,
        seeds=[setting.seed],
        extra=_about(setting, outcomes, figures),
        directory=directory,
    )


def _add(setting: Setting, outcome: ReplayOutcome, directory: Path, command: str) -> None:
    figures = figures_of([outcome], setting.num_workers)
    add_results(
        "fig8",
        figures,
        part=f"{outcome.policy}_{outcome.source}",
        command=command,
        extra=_about(setting, [outcome], figures),
        directory=directory,
    )


def _about(
    setting: Setting, outcomes: Sequence[ReplayOutcome], figures: Mapping[str, float]
) -> dict[str, Any]:
    # At another rate there is nothing to compare.
    of_paper = [outcome for outcome in outcomes if outcome.source in SOURCES]
    comparison = compare(figures, comparisons(of_paper))
    show(comparison)
    return {
        "comparison": comparison,
        "refused": {
            f"{o.policy}_{o.source}": dict(sorted(o.total.refused.items())) for o in outcomes
        },
        "bottleneck": {f"{o.policy}_{o.source}": bottleneck(o.busy)[0] for o in outcomes},
        "rss_mib_at_tenths": {f"{o.policy}_{o.source}": o.rss_mib for o in outcomes},
        "compiled": is_compiled(),
        "charged_costs": asdict(measured()) | {"sources": costs_from()},
        "setting": asdict(setting),
    }


def draw(minutes: Sequence[Minute], target: Path) -> None:
    """The paper's stack of panels over time, one column per run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs: dict[tuple[str, str], list[Minute]] = {}
    # A stretch of minutes that is there to be compared with its twin has no shape over time.
    stretches = ("_free", "_charged")
    long = [minute for minute in minutes if not minute.source.endswith(stretches)]
    for minute in long or minutes:
        runs.setdefault((minute.policy, minute.source), []).append(minute)
    figure, columns = pyplot.subplots(
        5,
        len(runs),
        figsize=(2 + 4.5 * len(runs), 9),
        layout="constrained",
        sharex="col",
        squeeze=False,
    )
    for ((policy, source), run_minutes), panels in zip(runs.items(), columns.T, strict=True):
        at = [minute.minute for minute in run_minutes]
        rate, latency, batch, cold, cold_rate = panels
        rate.plot(at, [m.offered_rps for m in run_minutes], label="offered")
        rate.plot(at, [m.goodput_rps for m in run_minutes], label="goodput", ls=":")
        rate.set_ylabel("requests/s")
        rate.set_title(f"{policy}, {source}", fontsize="medium")
        for name in ("max", "p99", "p50"):
            latency.plot(at, [getattr(m, f"{name}_ms") for m in run_minutes], label=name)
        latency.set_ylabel("latency, ms")
        batch.plot(at, [m.mean_batch_size for m in run_minutes], label="per batch")
        batch.plot(at, [m.mean_batch_size_by_request for m in run_minutes], label="per request")
        batch.set_ylabel("batch size")
        cold.plot(at, [m.cold_models for m in run_minutes])
        cold.set_ylabel("cold models\nper minute")
        cold_rate.plot(at, [m.cold_rps for m in run_minutes])
        cold_rate.set_ylabel("cold\nrequests/s")
        cold_rate.set_xlabel("time, minutes")
        for panel in panels:
            panel.set_ylim(bottom=0)
        for panel in (rate, latency, batch):
            panel.legend(fontsize="x-small", loc="lower right")
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Produce the figure."""
    parser = argparse.ArgumentParser(description="Figure 8 of the paper.")
    parser.add_argument(
        "--trace",
        type=Path,
        default=os.environ.get(TRACE_VARIABLE),
        help=f"invocations per minute, file or folder (or ${TRACE_VARIABLE}); without: generator only",
    )
    parser.add_argument("--minutes", type=int, default=480, help="of the trace (default 480)")
    parser.add_argument(
        "--generator-minutes", type=int, default=60, help="of the generated one (default 60)"
    )
    parser.add_argument("--wall-limit", type=float, help="seconds for each; cut off after")
    parser.add_argument("--seed", type=int, default=Setting().seed)
    parser.add_argument(
        "--policies", nargs="+", default=PREDICTIVE, metavar="POLICY", choices=list(POLICIES)
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, help="so many times the paper's requests (default 1)"
    )
    parser.add_argument(
        "--source", choices=SOURCES, help="only this one (default: both, if there is a trace)"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep recorded runs of other policies, sources and rates"
    )
    parser.add_argument(
        "--charged",
        action="store_true",
        help="each source twice, without and with the controller's measured costs, as NAME_free and NAME_charged",
    )
    options = parser.parse_args()
    if not 0.01 <= options.rate <= 100:
        parser.error(f"--rate is {options.rate:g}, expected 0.01 to 100")
    if options.add and not (RESULTS / "fig8.json").exists():
        parser.error(f"--add: there is no {RESULTS / 'fig8.json'} to add to")
    setting = Setting(seed=options.seed, rate_rps=options.rate * Setting().rate_rps)
    for name in ("minutes", "generator_minutes"):
        if not 2 <= getattr(options, name) <= setting.num_minutes:
            parser.error(f"--{name} is {getattr(options, name)}, expected 2 to 480")
    sources: dict[str, tuple[MinuteTrace, int | None]] = {}
    try:
        if options.trace is not None:
            sources["trace"] = recorded(setting, Path(options.trace)), options.minutes
    except (ClockwrightError, ConfigError) as error:
        parser.error(str(error))
    sources["generator"] = generated(setting), options.generator_minutes
    if options.source is not None:
        if options.source not in sources:
            parser.error("--source trace: expected --trace as well")
        sources = {options.source: sources[options.source]}
    if options.rate != 1:
        sources = {f"{name}_x{options.rate:g}": source for name, source in sources.items()}
    if options.charged:
        sources = {
            f"{name}_{costs}": source
            for name, source in sources.items()
            for costs in ("free", "charged")
        }
    command = "python -m experiments fig8"
    if options.trace is not None:
        command += f" --trace DIR --minutes {options.minutes}"
    command += f" --generator-minutes {options.generator_minutes} --seed {options.seed}"
    command += f" --policies {' '.join(options.policies)} --rate {options.rate:g}"
    if options.source is not None:
        command += f" --source {options.source}"
    for flag in ("charged", "add"):
        if getattr(options, flag):
            command += f" --{flag}"
    produce(
        setting,
        sources,
        policies=options.policies,
        wall_limit_s=options.wall_limit,
        add=options.add,
        charged=[name for name in sources if name.endswith("_charged")],
        command=command,
    )


if __name__ == "__main__":
    main()
