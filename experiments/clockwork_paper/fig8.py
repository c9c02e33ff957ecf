"""Figure 8: eight hours of the Azure trace on 4,026 models and 6 GPUs, SLO 100 ms.

The workload is that of `azure_replay`. From a trace of one's own, which `--trace` or the environment
variable `AZURE2019_TRACE` names (a file, or the folder it lies in), and from the generator.

A run that is interrupted, or reaches `--wall-limit-s`, is still data: the minutes that it finished. A run of
another policy, or at another rate, can be added to those that are recorded (`--add`).
Memory does not grow with the length of the run: the JSON keeps what it was at every tenth of it.

Devices have noise of 0.3 %, and nothing else disturbs a run: no outliers, no delays of hosts or network beyond
a constant, and no time of the controller. `--charged` replays each source twice, without and with the
measured costs of the controller's core (`experiments.simulator.costs`), and names the bottleneck of both.

The bound (B1, `experiments.bounds.density_bound`) is computed for some minutes of the run, each as if
it had the GPUs for itself, with everything resident. It counts answers to requests that arrive in these
minutes, the figure answers given in them: at most an SLO's worth of requests apart.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS
from experiments.bounds import BoundProblem, Cost, density_bound
from experiments.bounds.density import shares
from experiments.clockwork_paper import azure_replay
from experiments.clockwork_paper.azure_replay import NS_PER_MINUTE, case_of, hosted_models
from experiments.native import is_compiled
from experiments.simulator import Case, CpuCosts, Progress, bottleneck, run
from experiments.simulator.costs import measured
from experiments.simulator.costs import sources as costs_from
from experiments.simulator.summary import Bucket, Summary
from experiments.study.compared import POLICIES, Compared
from experiments.study.pictures import Curve, Panel, of_policy
from experiments.study.study import NO_COLUMN, Column, Paper, Row, Study, StudyRecord
from traces.arrivals import TraceReplay, Workload
from traces.minutes import MinuteTrace

#: This environment variable names a trace of one's own.
TRACE_VARIABLE = "AZURE2019_TRACE"

#: Names of the sources at the paper's rate. At another rate, `_x` and its multiple of the paper's follow.
SOURCES = ("trace", "generator")

#: The bound is computed for the first whole hour's minute, then for one minute in `_BOUND_EVERY`.
_FIRST_BOUND = 1
_BOUND_EVERY = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Compared):
    """What is replayed, and how much of it."""

    #: Invocations per minute, file or folder; empty: the generator only.
    trace: str = field(
        default_factory=lambda: os.environ.get(TRACE_VARIABLE, ""), metadata={"said": "DIR"}
    )
    #: Minutes of the trace, and of the generated one.
    minutes: int = 480
    generator_minutes: int = 60
    #: So many times the paper's requests.
    rate: float = 1.0
    #: Only this source; empty: both, where there is a trace.
    source: str = ""
    #: Each source twice, without and with the controller's measured costs, as NAME_free and NAME_charged.
    charged: bool = False
    #: Each replay is cut off at the end of the minute in which it has taken so long; 0: never.
    wall_limit_s: float = 0.0
    #: The cluster, and the trace at the paper's rate.
    replay: azure_replay.Setting = field(default_factory=azure_replay.Setting)
    seed: int = 8

    def __post_init__(self) -> None:
        Compared.__post_init__(self)
        if not 0.01 <= self.rate <= 100:
            raise ConfigError(f"rate is {self.rate:g}, expected 0.01 to 100")
        if self.source not in ("", *SOURCES[0 if self.trace else 1 :]):
            raise ConfigError(f"source is {self.source!r}, expected trace, with one, or generator")
        for name in ("minutes", "generator_minutes"):
            if not 1 <= getattr(self, name) <= self.replay.num_minutes:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, expected 1 to {self.replay.num_minutes}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOutcome:
    """A run, or as much of it as there was time for."""

    policy: str
    source: str
    minutes: int
    requests: int
    offered_rps: float
    goodput_rps: float
    failed_requests: int
    failed_ppm: float
    #: Admitted requests that were answered or given up after the deadline.
    late_per_million: float
    p50_ms: float
    p99_ms: float
    p9999_ms: float
    max_ms: float
    refusal_p50_ms: float
    refusal_p99_ms: float
    front_busy_pct: float
    controller_busy_pct: float
    #: Mean over batches, then mean over the requests in them.
    mean_batch_size: float
    mean_batch_size_by_request: float
    cold_models_per_min: float
    #: Mean number of models that are asked in a minute.
    active_models_per_min: float
    cold_rps: float
    cold_pct: float
    exec_busy_pct: float
    load_busy_pct: float
    wall_s: float
    cpu_s: float
    #: Highest resident memory of the process so far.
    peak_rss_mib: float
    #: The bound over the minutes for which it was computed, and the least GPU time that their requests need, as a
    #: share of all GPUs' time; None: the run is too short.
    bound_rps: Annotated[float | None, Column(figure="bound_{source}_goodput_rps")] = None
    gpu_load_pct: Annotated[float | None, Column(figure="bound_{source}_gpu_load_pct")] = None
    bounded_goodput_rps: Annotated[float | None, Column()] = None
    bound_share_pct: Annotated[float | None, Column()] = None
    #: What every minute came to.
    rows: tuple[Row, ...]
    #: Resident memory at every tenth of the run, the first after one tenth.
    rss_mib: tuple[float, ...]
    #: Refused requests by outcome.
    refused: dict[str, int]
    bottleneck: Annotated[str, NO_COLUMN]


class _EnoughError(Exception):
    """The wall time is used up."""


def replays(setting: Setting) -> Iterator[tuple[str, MinuteTrace, int, CpuCosts]]:
    """Name, trace, minutes and costs of everything that each policy replays.

    Raises:
        ConfigError: the trace cannot be found, or is too short.
    """
    replay = replace(setting.replay, seed=setting.seed)
    for name in SOURCES[0 if setting.trace else 1 :]:
        if setting.source in ("", name):
            recorded = name == "trace"
            minutes = setting.minutes if recorded else setting.generator_minutes
            trace = (
                azure_replay.recorded(replay, Path(setting.trace))
                if recorded
                else azure_replay.generated(replay)
            )
            full = name if setting.rate == 1 else f"{name}_x{setting.rate:g}"
            if setting.charged:
                yield f"{full}_free", trace, minutes, replay.costs
                yield f"{full}_charged", trace, minutes, measured()
            else:
                yield full, trace, minutes, replay.costs


def ask(setting: Setting) -> Iterator[ReplayOutcome]:
    """Replay every source under every policy."""
    for source, trace, minutes, costs in replays(setting):
        replay = _replay(setting, costs)
        for policy in setting.policies:
            print(f"{policy}, {source}: {len(trace.functions):,} functions", flush=True)
            case = case_of(replay, trace, POLICIES[policy], num_minutes=minutes)
            yield measure(replay, policy, source, case, wall_limit_s=setting.wall_limit_s)


def _replay(setting: Setting, costs: CpuCosts) -> azure_replay.Setting:
    rate_rps = setting.rate * setting.replay.rate_rps
    return replace(setting.replay, rate_rps=rate_rps, costs=costs, seed=setting.seed)


def cases(setting: Setting) -> dict[str, Case]:
    """Every source's replay under the first policy."""
    scheduler = POLICIES[setting.policies[0]]
    return {
        source: case_of(_replay(setting, costs), trace, scheduler, num_minutes=minutes)
        for source, trace, minutes, costs in replays(setting)
    }


def measure(
    replay: azure_replay.Setting,
    policy: str,
    source: str,
    case: Case,
    *,
    wall_limit_s: float = 0.0,
) -> ReplayOutcome:
    """Simulate a replay.

    Args:
        replay: what the case was made of.
        policy: the name of who schedules.
        source: what to call the trace.
        case: the run.
        wall_limit_s: stop at the end of the minute in which this is over; 0: never.
    """
    length = case.duration_ns // NS_PER_MINUTE
    rows: list[Row] = []
    rss_mib: dict[int, float] = {}
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    summary: Summary | None = None

    def finish(summary: Summary, until: int) -> None:
        for number in range(len(rows), until):
            rows.append(_minute(policy, source, number, summary))
            # Sets of names would take most of the memory that the run keeps.
            summary.buckets[number].cold_models.clear()

    def on_progress(progress: Progress) -> None:
        nonlocal summary
        summary = progress.summary
        done = progress.simulated_ns // NS_PER_MINUTE
        # An EXEC that ends in this minute may have begun in the last.
        finish(summary, min(done - 1, length))
        if done * 10 // length > len(rss_mib):
            rss_mib[done] = _rss_mib()
        if rows and not done % max(1, length // 48):
            print(_said(case, progress, rows, begin_cpu_s), flush=True)
        if wall_limit_s and rows and progress.wall_s > wall_limit_s:
            raise _EnoughError

    try:
        summary = run(
            case, bucket_ns=NS_PER_MINUTE, on_progress=on_progress, progress_ns=NS_PER_MINUTE
        ).summary
        finish(summary, length)
    except (_EnoughError, KeyboardInterrupt):
        if not rows:
            raise
        print(f"cut off after {len(rows)} minutes", flush=True)
    assert summary is not None
    end_ns = len(rows) * NS_PER_MINUTE
    total = summary.total(0, end_ns)
    busy = summary.utilisations(0, end_ns)
    seconds, all_gpus_ns = 60 * len(rows), end_ns * replay.num_workers
    return ReplayOutcome(
        policy=policy,
        source=source,
        minutes=len(rows),
        requests=total.arrived,
        offered_rps=total.arrived / seconds,
        goodput_rps=total.answered / seconds,
        failed_requests=total.num_refused,
        failed_ppm=1e6 * total.num_refused / max(total.arrived, 1),
        late_per_million=1e6 * total.refused.get("LATE", 0) / max(total.arrived, 1),
        p50_ms=total.latency_ns(50) / NS_PER_MS,
        p99_ms=total.latency_ns(99) / NS_PER_MS,
        p9999_ms=total.latency_ns(99.99) / NS_PER_MS,
        max_ms=total.latency_ns(100) / NS_PER_MS,
        refusal_p50_ms=total.refusal_ns(50) / NS_PER_MS,
        refusal_p99_ms=total.refusal_ns(99) / NS_PER_MS,
        front_busy_pct=100 * busy["front"],
        controller_busy_pct=100 * busy["controller"],
        mean_batch_size=total.mean_batch_size,
        mean_batch_size_by_request=_by_request(total),
        cold_models_per_min=sum(int(row["cold_models"]) for row in rows) / len(rows),
        active_models_per_min=_active_models(case.workload, len(rows)),
        cold_rps=total.cold_answered / seconds,
        cold_pct=100 * total.cold_answered / max(total.answered, 1),
        exec_busy_pct=100 * total.exec_ns / all_gpus_ns,
        load_busy_pct=100 * total.load_ns / all_gpus_ns,
        wall_s=time.perf_counter() - begin_s,
        cpu_s=time.process_time() - begin_cpu_s,
        peak_rss_mib=_peak_rss_mib(),
        rows=tuple(rows),
        rss_mib=tuple(rss_mib.values()),
        refused=dict(sorted(total.refused.items())),
        bottleneck=bottleneck(busy)[0],
        **_bound(rows, case.workload, replay),
    )


def _minute(policy: str, source: str, number: int, summary: Summary) -> Row:
    bucket = summary.buckets[number]
    begin_ns, end_ns = number * NS_PER_MINUTE, (number + 1) * NS_PER_MINUTE
    return {
        "policy": policy,
        "source": source,
        "minute": number,
        "offered_rps": bucket.arrived / 60,
        "goodput_rps": bucket.answered / 60,
        "failed": bucket.num_refused,
        "p50_ms": bucket.latency_ns(50) / NS_PER_MS,
        "p99_ms": bucket.latency_ns(99) / NS_PER_MS,
        "max_ms": bucket.latency_ns(100) / NS_PER_MS,
        # Mean over batches, then mean over the requests in them.
        "mean_batch_size": bucket.mean_batch_size,
        "mean_batch_size_by_request": _by_request(bucket),
        # Models with a cold start.
        "cold_models": len(bucket.cold_models),
        "cold_rps": bucket.cold_answered / 60,
        # Shares of all GPUs' time.
        "exec_busy": summary.utilisation(bucket.exec_ns, begin_ns, end_ns),
        "load_busy": summary.utilisation(bucket.load_ns, begin_ns, end_ns),
    }


def _said(case: Case, progress: Progress, rows: Sequence[Row], begin_cpu_s: float) -> str:
    last = rows[-1]
    speed = sum(float(row["offered_rps"]) for row in rows) * 60 / progress.wall_s
    return (
        f"{progress.simulated_ns / case.duration_ns:6.1%} in {progress.wall_s:6.0f} s "
        f"({time.process_time() - begin_cpu_s:.0f} s of CPU), {speed:,.0f} requests/s, "
        f"{_rss_mib():.0f} MiB; minute {last['minute']}: {last['goodput_rps']:.0f} of "
        f"{last['offered_rps']:.0f} r/s, p99 {last['p99_ms']:.1f} ms, {last['cold_models']} cold models"
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


def _bound(rows: Sequence[Row], workload: Workload, replay: azure_replay.Setting) -> dict[str, Any]:
    """Fields of an outcome that B1 gives, for some of the minutes that were simulated."""
    wanted = range(_FIRST_BOUND, len(rows), _BOUND_EVERY)
    if not wanted:
        return {}
    costs = [Cost(model.row.exec_ns) for model in hosted_models(replay)]
    bounded = load_ns = 0.0
    for begin_ns, times, models in _minutes_of(workload, wanted):
        case = BoundProblem(
            arrival_ns=times,
            model=models,
            slo_ns=np.full(len(times), replay.slo_ns),
            costs=costs,
            num_gpus=replay.num_workers,
            start_ns=begin_ns,
        )
        bounded += density_bound(case)
        load_ns += float(shares(case).sum())
    bound_rps = bounded / (60 * len(wanted))
    goodput_rps = sum(float(rows[number]["goodput_rps"]) for number in wanted) / len(wanted)
    return {
        "bound_rps": bound_rps,
        "gpu_load_pct": 100 * (load_ns / (NS_PER_MINUTE * len(wanted) * replay.num_workers)),
        "bounded_goodput_rps": goodput_rps,
        "bound_share_pct": 100 * goodput_rps / bound_rps,
    }


def _minutes_of(
    workload: Workload, wanted: range
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Begin, arrival times and models of some minutes."""
    pieces: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
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


def rows_of(_setting: Setting, outcomes: Sequence[ReplayOutcome]) -> Iterator[Row]:
    """Rows of `fig8.csv`."""
    for outcome in outcomes:
        yield from outcome.rows


def panels(setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """A column for the paper's rate and one for the most: what is asked and answered, how late, how cold."""
    # A stretch of minutes that is there to be compared with its twin has no shape over time.
    stretches = ("_free", "_charged")
    sources = list(dict.fromkeys(str(row["source"]) for row in recorded.rows))
    long = [source for source in sources if not source.endswith(stretches)] or sources
    return [
        list(row)
        for row in zip(
            *(
                _over_time(setting, recorded, source)
                for source in dict.fromkeys((long[0], long[-1]))
            ),
            strict=True,
        )
    ]


def _over_time(setting: Setting, recorded: StudyRecord, source: str) -> list[Panel]:
    """How a source fares, minute by minute."""
    rows: list[Mapping[str, Any]] = [row for row in recorded.rows if row["source"] == source]
    of = {
        policy: [row for row in rows if row["policy"] == policy]
        for policy in dict.fromkeys(str(row["policy"]) for row in rows)
    }
    papers = recorded.figures if source in SOURCES else {}
    slo_ms = setting.replay.slo_ns / NS_PER_MS

    # Hours of minutes are a smear; of ten minutes are drawn the mean, and of latency the worst.
    stretch = max(1, len(rows) // len(of) // 48)

    def curve(policy: str, column: str) -> Curve:
        cells = np.array([row[column] for row in of[policy]], np.float64)
        begins = range(0, len(cells), stretch)
        taken = np.max if column == "p99_ms" else np.mean
        heights = [float(taken(cells[begin : begin + stretch])) for begin in begins]
        return Curve(x=[begin + (stretch - 1) / 2 for begin in begins], y=heights)

    def curves(column: str) -> list[Curve]:
        return [of_policy(policy, curve(policy, column)) for policy in of]

    least = min(
        sum(row["goodput_rps"] for row in mine) / sum(row["offered_rps"] for row in mine)
        for mine in of.values()
    )
    offered = replace(curve(next(iter(of)), "offered_rps"), label="offered", line=":")
    latest_ms = max(float(row["p99_ms"]) for row in rows)
    name, _, multiple = source.partition("_x")
    about = {"trace": "Azure's trace", "generator": "Generated"}.get(name, name)
    about += f", {multiple} times the rate" if multiple else ""
    panel = Panel(
        # Not rounded up: all are in time only where none is late.
        title=f"{about}: {int(least * 1e4) / 100} % or more are in time",
        x="time, minutes",
        y="answers in time, r/s",
        curves=[*curves("goodput_rps"), offered],
    )
    return [
        panel,
        replace(
            panel,
            title=f"{about}: no minute's p99 is above {latest_ms:.0f} ms",
            y="p99 of latency, ms",
            curves=curves("p99_ms"),
            levels={slo_ms: "SLO"},
        ),
        replace(
            panel,
            title=f"{about}: models that are cold in a minute",
            y="number of models",
            curves=curves("cold_models"),
            levels={
                number: f"the paper's mean: {number:,.0f}"
                for key, number in papers.items()
                if key == "paper_cold_models_per_min"
            },
        ),
    ]


def extra(_setting: Setting, outcomes: Sequence[ReplayOutcome]) -> dict[str, Any]:
    """What was refused, what was the bottleneck, and how much memory it took."""
    of = {f"{outcome.policy}_{outcome.source}": outcome for outcome in outcomes}
    return {
        "refused": {key: outcome.refused for key, outcome in of.items()},
        "bottleneck": {key: outcome.bottleneck for key, outcome in of.items()},
        "rss_mib_at_tenths": {key: outcome.rss_mib for key, outcome in of.items()},
        "compiled": is_compiled(),
        "charged_costs": asdict(measured()) | {"sources": costs_from()},
    }


_ANOTHER_TRACE = (
    "another trace: the paper's was never published, and in its authors' words differs substantially "
    "from the one that was; fewer models are asked in a minute here (active_models_per_min)"
)
# At another rate there is nothing to compare.
_OURS = tuple(f"{{policy}}_{source}_{{key}}" for source in SOURCES)

#: Section 6.5, "Clockwork with realistic workloads".
PAPER = (
    Paper("offered_rps", 4860.6, ours=()),
    Paper("goodput_rps", 4860.5, ours=_OURS),
    Paper(
        "failed_requests",
        4511.0,
        "modelled devices have noise of 0.3 %, not the outliers of real hosts",
        _OURS,
    ),
    Paper(
        "max_ms",
        100.0,
        "answers are planned to end 5 ms before the deadline, and no outlier delays them",
        _OURS,
    ),
    Paper("cold_models_per_min", 2190.0, _ANOTHER_TRACE, _OURS),
    Paper("cold_rps", 178.0, _ANOTHER_TRACE, _OURS),
    Paper("cold_pct", 3.7, _ANOTHER_TRACE, _OURS),
)

STUDY = Study(
    name="fig8",
    setting=Setting(),
    ask=ask,
    key="{policy}_{source}",
    tables={"": rows_of},
    paper=PAPER,
    title="A cloud's requests for thousands of models are answered in time, and nine tenths of twice as many (simulated).",
    panels=panels,
    cases=cases,
    extra=extra,
)
