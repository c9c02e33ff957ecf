"""Figure 8: eight hours of the Azure trace on 4,026 models and 6 GPUs, SLO 100 ms.

The workload is that of `azure_replay`. From a trace of one's own, which `--trace` or the environment
variable `AZURE2019_TRACE` names (a file, or the folder it lies in), and from the generator.

A run that is interrupted is still data: the minutes that it finished. A run of another policy, or at another
rate, can be added to those that are recorded (`--add`). Memory does not grow with the length of the run.

Devices have noise of 0.3 %, and nothing else disturbs a run: no outliers, no delays of hosts or network beyond
a constant, and no time of the controller.

The bound (B1, `experiments.bounds.density_bound`) is computed for some minutes of the run, each as if
it had the GPUs for itself, with everything resident. It counts answers to requests that arrive in these
minutes, the figure answers given in them: at most an SLO's worth of requests apart.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS
from experiments.bounds import density_bound
from experiments.bounds.density import shares
from experiments.clockwork_paper import azure_replay
from experiments.clockwork_paper.azure_replay import NS_PER_MINUTE
from experiments.clockwork_paper.stretch import problems
from experiments.native import is_compiled
from experiments.simulator import Case, Progress, run
from experiments.simulator.summary import Bucket, Summary
from experiments.study.compared import POLICIES, Compared
from experiments.study.pictures import BLACK, Panel, by_policy
from experiments.study.study import Paper, Row, Study, StudyRecord, key_of
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
    #: By what their keys have behind policy and source.
    numbers: Mapping[str, float]
    #: The numbers of the source under any policy, likewise; empty: the run is too short.
    bound: Mapping[str, float]
    #: What every minute came to.
    rows: tuple[Row, ...]


def replays(setting: Setting) -> Iterator[tuple[str, Callable[[str], Case]]]:
    """Name of every source, and its replay under a policy.

    Raises:
        ConfigError: the trace cannot be found, or is too short.
    """
    rate_rps = setting.rate * setting.replay.rate_rps
    replay = replace(setting.replay, rate_rps=rate_rps, seed=setting.seed)
    for name in SOURCES[0 if setting.trace else 1 :]:
        if setting.source in ("", name):
            if name == "trace":
                trace, minutes = azure_replay.recorded(replay, Path(setting.trace)), setting.minutes
            else:
                trace, minutes = azure_replay.generated(replay), setting.generator_minutes

            def case_of(policy: str, trace: MinuteTrace = trace, minutes: int = minutes) -> Case:
                return azure_replay.case_of(replay, trace, POLICIES[policy], num_minutes=minutes)

            yield name if setting.rate == 1 else f"{name}_x{setting.rate:g}", case_of


def ask(setting: Setting) -> Iterator[ReplayOutcome]:
    """Replay every source under every policy."""
    for source, case_of in replays(setting):
        for policy in setting.policies:
            print(f"{policy}, {source}:", flush=True)
            yield measure(policy, source, case_of(policy))


def measure(policy: str, source: str, case: Case) -> ReplayOutcome:
    """Simulate the replay of a source under a policy."""
    length = case.duration_ns // NS_PER_MINUTE
    rows: list[Row] = []
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
        if rows and not done % max(1, length // 48):
            print(f"{done} of {length} minutes in {progress.wall_s:.0f} s: {rows[-1]}", flush=True)

    try:
        summary = run(
            case, bucket_ns=NS_PER_MINUTE, on_progress=on_progress, progress_ns=NS_PER_MINUTE
        ).summary
        finish(summary, length)
    except KeyboardInterrupt:
        if not rows:
            raise
        print(f"cut off after {len(rows)} minutes", flush=True)
    assert summary is not None
    end_ns = len(rows) * NS_PER_MINUTE
    total = summary.total(0, end_ns)
    busy = summary.utilisations(0, end_ns)
    seconds, all_gpus_ns = 60 * len(rows), end_ns * case.cluster.num_workers
    numbers = _numbers(total, seconds)
    failed = numbers.pop("failed")
    del numbers["cold_models"]
    numbers |= {
        "minutes": len(rows),
        "requests": total.arrived,
        "failed_requests": failed,
        "failed_ppm": 1e6 * failed / max(total.arrived, 1),
        # Admitted requests that were answered or given up after the deadline.
        "late_per_million": 1e6 * total.refused.get("LATE", 0) / max(total.arrived, 1),
        "p9999_ms": total.latency_ns(99.99) / NS_PER_MS,
        "refusal_p50_ms": total.refusal_ns(50) / NS_PER_MS,
        "refusal_p99_ms": total.refusal_ns(99) / NS_PER_MS,
        "front_busy_pct": 100 * busy["front"],
        "controller_busy_pct": 100 * busy["controller"],
        "cold_models_per_min": sum(int(row["cold_models"]) for row in rows) / len(rows),
        "active_models_per_min": _active_models(case.workload, len(rows)),
        "cold_pct": 100 * total.cold_answered / max(total.answered, 1),
        "exec_busy_pct": 100 * total.exec_ns / all_gpus_ns,
        "load_busy_pct": 100 * total.load_ns / all_gpus_ns,
        "wall_s": time.perf_counter() - begin_s,
        "cpu_s": time.process_time() - begin_cpu_s,
        # The most that the process has had so far.
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }
    ours, bound = _bound(rows, case)
    return ReplayOutcome(
        policy=policy, source=source, numbers=numbers | ours, bound=bound, rows=tuple(rows)
    )


def _numbers(bucket: Bucket, seconds: float) -> dict[str, float]:
    """What both a minute and the run have."""
    answers = sum(size * number for size, number in bucket.batches.items())
    squares = sum(size * size * number for size, number in bucket.batches.items())
    return {
        "offered_rps": bucket.arrived / seconds,
        "goodput_rps": bucket.answered / seconds,
        "failed": bucket.num_refused,
        "p50_ms": bucket.latency_ns(50) / NS_PER_MS,
        "p99_ms": bucket.latency_ns(99) / NS_PER_MS,
        "max_ms": bucket.latency_ns(100) / NS_PER_MS,
        # Mean over batches, then mean over the requests in them.
        "mean_batch_size": bucket.mean_batch_size,
        "mean_batch_size_by_request": squares / answers if answers else 0.0,
        # Models with a cold start.
        "cold_models": len(bucket.cold_models),
        "cold_rps": bucket.cold_answered / seconds,
    }


def _minute(policy: str, source: str, number: int, summary: Summary) -> Row:
    """A row of `fig8.csv`; busy is a share of all GPUs' time."""
    bucket = summary.buckets[number]
    begin_ns, end_ns = number * NS_PER_MINUTE, (number + 1) * NS_PER_MINUTE
    return {
        "policy": policy,
        "source": source,
        "minute": number,
        **_numbers(bucket, 60),
        "exec_busy": summary.utilisation(bucket.exec_ns, begin_ns, end_ns),
        "load_busy": summary.utilisation(bucket.load_ns, begin_ns, end_ns),
    }


def _active_models(workload: Workload, num_minutes: int) -> float:
    """Mean number of models with a request in a minute."""
    active = 0.0
    for source in workload.sources:
        assert isinstance(source, TraceReplay)
        for minute in range(num_minutes):
            expected = np.bincount(source.models, source.counts[:, minute] * source.scale)
            active += float(-np.expm1(-expected).sum())
    return active / num_minutes


def _bound(rows: Sequence[Row], case: Case) -> tuple[dict[str, float], dict[str, float]]:
    """What B1 says of some of the minutes that were simulated.

    Returns:
        What was answered in them, and its share of the bound; then the bound, and the least GPU time that their
        requests need, as a share of all GPUs' time. Both are empty where the run is too short.
    """
    wanted = range(_FIRST_BOUND, len(rows), _BOUND_EVERY)
    if not wanted:
        return {}, {}
    bounded = load_ns = 0.0
    for minute in problems(case, ((n * NS_PER_MINUTE, (n + 1) * NS_PER_MINUTE) for n in wanted)):
        bounded += density_bound(minute)
        load_ns += float(shares(minute).sum())
    bound_rps = bounded / (60 * len(wanted))
    goodput_rps = sum(float(rows[number]["goodput_rps"]) for number in wanted) / len(wanted)
    all_gpus_ns = NS_PER_MINUTE * len(wanted) * case.cluster.num_workers
    return {
        "bounded_goodput_rps": goodput_rps,
        "bound_share_pct": 100 * goodput_rps / bound_rps,
    }, {"goodput_rps": bound_rps, "gpu_load_pct": 100 * (load_ns / all_gpus_ns)}


def figures_of(_setting: Setting, outcomes: Sequence[ReplayOutcome]) -> dict[str, float]:
    """Every number under its key."""
    figures: dict[str, float] = {}
    for of in outcomes:
        figures |= {f"{of.policy}_{of.source}_{name}": n for name, n in of.numbers.items()}
        figures |= {f"bound_{of.source}_{name}": n for name, n in of.bound.items()}
    return figures


def panels(setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """A column for the paper's rate and one for the most: what is asked and answered, how late, how cold."""
    sources = list(dict.fromkeys(str(row["source"]) for row in recorded.rows))
    shown = dict.fromkeys((sources[0], sources[-1]))
    columns = [_over_time(setting, recorded, source) for source in shown]
    return [list(row) for row in zip(*columns, strict=True)]


def _over_time(setting: Setting, recorded: StudyRecord, source: str) -> list[Panel]:
    """How a source fares, minute by minute."""
    of: dict[str, list[Mapping[str, Any]]] = {}
    for row in recorded.rows:
        if row["source"] == source:
            of.setdefault(row["policy"], []).append(row)
    # Hours of minutes are a smear; of ten minutes are drawn the mean, and of latency the worst.
    stretch = max(1, max(map(len, of.values())) // 48)
    rows = [
        {
            "policy": policy,
            "minute": begin + (stretch - 1) / 2,
            "p99_ms": max(row["p99_ms"] for row in mine[begin : begin + stretch]),
            **{
                name: float(np.mean([row[name] for row in mine[begin : begin + stretch]]))
                for name in ("offered_rps", "goodput_rps", "cold_models")
            },
        }
        for policy, mine in of.items()
        for begin in range(0, len(mine), stretch)
    ]
    least = min(
        sum(row["goodput_rps"] for row in mine) / sum(row["offered_rps"] for row in mine)
        for mine in of.values()
    )
    latest_ms = max(row["p99_ms"] for row in rows)
    offered = replace(
        by_policy(rows, "minute", "offered_rps")[0], label="offered", line=":", colour=BLACK
    )
    name, _, multiple = source.partition("_x")
    about = {"trace": "Azure's trace", "generator": "Generated"}[name]
    about += f", {multiple} times the rate" if multiple else ""
    cold = recorded.figures["paper_cold_models_per_min"]
    panel = Panel(
        # Not rounded up: all are in time only where none is late.
        title=f"{about}: {int(least * 1e4) / 100} % or more are in time",
        x="time, minutes", y="answers in time, r/s",
        curves=[*by_policy(rows, "minute", "goodput_rps"), offered],
    )  # fmt: skip
    late = replace(
        panel, title=f"{about}: no minute's p99 is above {latest_ms:.0f} ms", y="p99 of latency, ms",
        curves=by_policy(rows, "minute", "p99_ms"),
        levels={setting.replay.slo_ns / NS_PER_MS: "SLO"},
    )  # fmt: skip
    colder = replace(
        panel, title=f"{about}: models that are cold in a minute", y="number of models",
        curves=by_policy(rows, "minute", "cold_models"),
        levels={} if multiple else {cold: f"the paper's mean: {cold:,.0f}"},
    )  # fmt: skip
    return [panel, late, colder]


_ANOTHER_TRACE = (
    "another trace: the paper's was never published, and in its authors' words differs substantially "
    "from the one that was; fewer models are asked in a minute here (active_models_per_min)"
)
_NO_OUTLIERS = "modelled devices have noise of 0.3 %, not the outliers of real hosts"
_PLANNED = "answers are planned to end 5 ms before the deadline, and no outlier delays them"
# At another rate there is nothing to compare.
_OURS = tuple(f"{{policy}}_{source}_{{key}}" for source in SOURCES)

#: Section 6.5, "Clockwork with realistic workloads".
PAPER = (
    Paper("offered_rps", 4860.6, ours=()),
    Paper("goodput_rps", 4860.5, ours=_OURS),
    Paper("failed_requests", 4511.0, _NO_OUTLIERS, _OURS),
    Paper("max_ms", 100.0, _PLANNED, _OURS),
    Paper("cold_models_per_min", 2190.0, _ANOTHER_TRACE, _OURS),
    Paper("cold_rps", 178.0, _ANOTHER_TRACE, _OURS),
    Paper("cold_pct", 3.7, _ANOTHER_TRACE, _OURS),
)

STUDY = Study(
    name="fig8",
    setting=Setting(),
    ask=ask,
    key="{policy}_{source}",
    figures=figures_of,
    say=lambda key, outcome: f"{key_of(key, outcome)}: {outcome.numbers}",
    tables={"": lambda _, outcomes: (row for outcome in outcomes for row in outcome.rows)},
    paper=PAPER,
    title="A cloud's requests for thousands of models are answered in time, and nine tenths of twice as many (simulated).",
    panels=panels,
    extra=lambda *_: {"compiled": is_compiled()},
)
