"""Workers that come and go with the load: the product's forecast compared with a queue's length and a fitted latency.

A day of the Azure Functions trace of 2019 in virtual time, its functions dealt out to 244 models of the paper's Table 1. Their runs
take 384 times as long as on the paper's card, 0.4 to 5 s, so that 11.5 requests per second, as many as the invocations of
`day`, keep some fifteen workers busy; answers are due within 15 s. So the rate is thin, and each request weighs more than
on a fast card. A worker serves 60 s after it was asked for, with nothing on its device; the one that leaves is the one that is
cheapest to lose, and finishes what it has. A worker's hours count from when it was asked for until it has gone.

* `forecast`: the controller's own number of workers wanted (docs/beyond.md);
* `queue`: so many open requests per worker, asked every 15 s, as a HorizontalPodAutoscaler or KEDA does it, with a
  stabilisation of 300 s downwards;
* `latency`: a fit of latency over load per worker, corrected by the latency observed, with the load's trend, every minute, as
  SLA planners do it;
* `clairvoyant`: knows how many requests each minute brings, and asks for workers so far ahead that they are there. How many each
  minute needs is found by trying (`experiments.planning.clairvoyant`): the schedule of the fewest hours that still has 99.9 % inside
  the SLO. It is not proven to be the least.

Loads: `day`, 1,350 functions as recorded, of which one makes two fifths of how minutes differ; `region`, the mean day of 7,516 functions, whose
single functions matter as little as in a region; `starts`, the first hours of `region`, where each start takes as much longer as
one of Alibaba's GenTD26 took to load its base model; a load that doubles at once (`step`), a slow `wave`, and a `crowd` that comes within a
minute.

The trace is not part of the project: `--trace` or the variable `AZURE2019_TRACE` names the folder of
`azure2019_oneday_1440min_1350fn_A.csv.xz` and `azure2019_14daysum_1440min_distinct.csv.xz`. Without one, the
generator's day is played (`traces.synthetic`) for `day` and `region`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt

from clockwright.errors import ConfigError, Refusal
from clockwright.units import NS_PER_S
from controller.core import Scheduler
from controller.core.events import RefuseRequest, RequestArrived
from experiments.clockwork_paper import azure_replay
from experiments.clockwork_paper.azure_replay import NS_PER_MINUTE
from experiments.native import is_compiled
from experiments.planning.clairvoyant import Tried, fewest
from experiments.planning.scalers import FittedLatency, KnownLoad, NumberWanted, QueueLength
from experiments.simulator import Case, Cluster, Run, copies_of, run
from experiments.simulator.fleet import Fleet, FleetScaler, Seen
from experiments.study.pictures import BLACK, COLOURS, LINES, Curve, Panel
from experiments.study.study import NO_COLUMN, Row, Study, StudyRecord, own_rows
from modelzoo.profile import Noise, ProfileRow, load_profile
from traces.arrivals import TraceReplay, Workload
from traces.azure import read_azure_2019
from traces.minutes import MinuteTrace
from traces.synthetic import generate

#: This environment variable names a trace of one's own.
TRACE_VARIABLE = "AZURE2019_TRACE"
SCALERS = ("forecast", "queue", "latency")
LOADS = ("region", "day", "starts", "step", "wave", "crowd")
#: The recorded loads' files.
FILES = {
    "day": "azure2019_oneday_1440min_1350fn_A.csv.xz",
    "region": "azure2019_14daysum_1440min_distinct.csv.xz",
}

_TARGET = 0.999
_BUCKET_NS = 10 * NS_PER_S
# Counts of a replay are whole numbers.
_COUNT_SCALE = 0.01
# `latency` is fitted with so many times the workers that requests would keep busy one at a time, at this percentile.
_FITTED = (2.0, 1.5, 1.2, 1.0)
_PERCENTILE = 95
# Minutes of a row of the second table.
_STRETCH = 10
# Alibaba's GenTD26 (clusterdata, cluster-trace-v2026-GenAI): how long 7,531 base models took to load, in s: the
# 0th, 5th, ... 100th percentile.
_MODEL_LOADS_S = (
    1.33, 2.29, 2.63, 2.76, 2.92, 3.14, 3.64, 7.6, 20.06, 21.43, 22.72,
    24.21, 26.91, 33.02, 35.39, 36.92, 38.3, 39.82, 41.99, 45.45, 79.44,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is asked of whom."""

    #: Folder of the trace's files; empty: the generator's day.
    trace: str = field(
        default_factory=lambda: os.environ.get(TRACE_VARIABLE, ""), metadata={"said": "DIR"}
    )
    loads: tuple[str, ...] = LOADS
    scalers: tuple[str, ...] = SCALERS
    #: Minutes of `day` and `region`, and of `starts`.
    minutes: int = 1440
    starts_minutes: int = 360
    #: Requests per second on average.
    rate_rps: float = 11.5
    #: Table 1's runs take so many times as long; loads of weights take what they take there.
    exec_factor: int = 384
    #: Models of each row.
    copies: int = 4
    slo_s: float = 15.0
    start_s: int = 60
    #: The most workers.
    most: int = 80
    #: Open requests per worker that `queue` keeps, and the share of the SLO that `latency` keeps the 95th percentile below.
    queue_target: float = 2.0
    latency_share: float = 0.5
    #: Schedules that are tried for the clairvoyant, in addition to the first.
    tries: int = 1
    noise: Noise = field(default_factory=lambda: Noise(exec_sigma=0.003, load_sigma=0.003))
    seed: int = 36

    def __post_init__(self) -> None:
        for name, known in (("loads", LOADS), ("scalers", SCALERS)):
            if unknown := set(getattr(self, name)) - set(known):
                raise ConfigError(
                    f"{name}: found {min(unknown)!r}, expected some of {', '.join(known)}"
                )
        for name in ("minutes", "starts_minutes"):
            if not 1 <= getattr(self, name) <= 1440:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 1 to 1440")


@dataclass(frozen=True, slots=True)
class _Minute:
    """Workers that served at least, and on average; requests that arrived, and that missed their SLO."""

    least: int
    mean: float
    arrived: int
    missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A load under a scaler."""

    load: str
    scaler: str
    requests: int
    #: Share of all requests that were answered inside their SLO.
    attainment_pct: float
    #: From when each worker was asked for until it had gone, and that over the clairvoyant's.
    worker_hours: float
    hours_over_clairvoyant: float
    #: Workers that were asked for.
    starts: int
    most_workers: int
    p99_s: float
    cpu_s: float
    #: What each minute came to.
    minutes: Annotated[Sequence[_Minute], NO_COLUMN]


# --- loads ----------------------------------------------------------------------------------------


def rows_of(setting: Setting) -> list[ProfileRow]:
    """The rows of Table 1 that figure 8 has, slowed down."""
    rows = load_profile("table1").rows
    return [
        replace(
            rows[name],
            exec_ns={size: ns * setting.exec_factor for size, ns in rows[name].exec_ns.items()},
        )
        for name in sorted(rows)
        if name not in azure_replay.LEFT_OUT
    ]


def recorded(setting: Setting, load: str) -> MinuteTrace:
    """A recorded day, or the generator's.

    Raises:
        ConfigError: the trace is too short.
        TraceFormatError: the file is not a trace.
    """
    minutes = setting.starts_minutes if load == "starts" else setting.minutes
    if not setting.trace:
        return generate(1350, num_minutes=minutes, first_minute=0, seed=setting.seed)
    path = Path(setting.trace)
    trace = read_azure_2019(
        path / FILES["day" if load == "day" else "region"] if path.is_dir() else path
    )
    if trace.num_minutes < minutes:
        raise ConfigError(f"{path}: found {trace.num_minutes} minutes, expected {minutes} or more")
    return trace.between(trace.first_minute, trace.first_minute + minutes)


def case_of(setting: Setting, load: str) -> Case:
    """A load, before it has run."""
    models = tuple(model for row in rows_of(setting) for model in copies_of(row, setting.copies))
    names = [model.model_id for model in models]
    slo_ns = round(setting.slo_s * NS_PER_S)
    if load in ("day", "region", "starts"):
        trace = recorded(setting, load)
        # Dealt out in turn, so that each of the functions asked most has a model of its own.
        workload = trace.workload(
            names,
            slo_ns=slo_ns,
            scale=setting.rate_rps * 60 * trace.num_minutes / int(trace.totals.sum()),
            assignment="striped",
            seed=setting.seed,
        )
    else:
        # Popularity by Zipf's law, dealt out at random. Counts are scaled, so that the rare ones keep their rates.
        popular = 1 / np.arange(1, len(names) + 1) ** 0.9
        popular = np.random.default_rng(setting.seed).permutation(popular / popular.sum())
        rates = setting.rate_rps * shape_of(load)
        source = TraceReplay(
            counts=np.rint(np.outer(popular, rates * 60 / _COUNT_SCALE)).astype(np.int32),
            models=np.arange(len(names)),
            slo_ns=slo_ns,
            seed=setting.seed,
            scale=_COUNT_SCALE,
        )
        workload = Workload(models=tuple(names), sources=(source,))
    return Case(
        workload=workload,
        cluster=Cluster(models=models, num_workers=setting.most, noise=setting.noise),
        duration_ns=max(source.end_ns for source in workload.sources),
        seed=setting.seed,
    )


def shape_of(load: str) -> npt.NDArray[np.float64]:
    """The rate of each minute, over the mean rate of the recorded days."""
    if load == "step":
        return np.repeat([0.7, 1.4], 20)
    if load == "wave":
        return 1 + 0.5 * np.sin(np.arange(150) / 150 * 2 * np.pi)
    minutes = np.arange(40.0)
    return 0.7 + np.where(minutes < 15, 0.0, 1.4 * np.exp(-(minutes - 15) / 8))


def work_of(case: Case) -> list[float]:
    """Workers that each minute's requests would keep busy, one request at a time."""
    exec_s = np.array([model.row.exec_ns[1] / NS_PER_S for model in case.cluster.models])
    minutes = case.duration_ns // NS_PER_MINUTE
    work = np.zeros(minutes + 1)
    for arrivals in case.workload.arrivals():
        places = np.minimum(arrivals.time_ns // NS_PER_MINUTE, minutes)
        work += np.bincount(places, exec_s[arrivals.model], minlength=minutes + 1)
    return [float(seconds) / 60 for seconds in work[:minutes]]


# --- a run ----------------------------------------------------------------------------------------


class _Book:
    """Keeps what each minute came to: a scaler's looks, and the requests by when they arrived."""

    def __init__(self, scaler: FleetScaler, minutes: int) -> None:
        self._scaler = scaler
        self._ready: list[list[int]] = [[] for _ in range(minutes)]
        self._arrived, self._missed = [0] * minutes, [0] * minutes
        self.starts = self._before = 0

    def wanted(self, seen: Seen, /) -> int:
        """Ask the scaler."""
        minute = seen.now_ns // NS_PER_MINUTE
        if minute < len(self._ready):
            self._ready[minute].append(seen.num_ready)
        number = self._scaler.wanted(seen)
        self.starts += max(0, number - seen.num_ready - seen.num_joining)
        return number

    def arrived(self, request: RequestArrived, /) -> None:
        """A request is about to be opened."""
        self._arrived[request.arrival_ns // NS_PER_MINUTE] += 1

    def refused(self, request: RequestArrived, command: RefuseRequest, by: Scheduler, /) -> None:
        """The scheduler refuses a request."""

    def over(self, request: RequestArrived, refusal: Refusal | None, /) -> None:
        """A request is answered in time, or not."""
        if refusal is not None:
            self._missed[request.arrival_ns // NS_PER_MINUTE] += 1

    def minutes(self) -> list[_Minute]:
        """All of them."""
        return [
            _Minute(min(ready), sum(ready) / len(ready), arrived, missed)
            for ready, arrived, missed in zip(self._ready, self._arrived, self._missed, strict=True)
        ]


def starts_of(setting: Setting, load: str) -> tuple[int, ...]:
    """How long workers take to start."""
    more_s = _MODEL_LOADS_S if load == "starts" else (0.0,)
    return tuple(round((setting.start_s + s) * NS_PER_S) for s in more_s)


def play(
    setting: Setting, load: str, case: Case, scaler: FleetScaler, first: int
) -> tuple[Run, _Book]:
    """Run a load under a scaler, from so many workers on."""
    book = _Book(scaler, case.duration_ns // NS_PER_MINUTE)
    fleet = Fleet(scaler=book, num_first=first, starts_ns=starts_of(setting, load))
    return run(case, bucket_ns=_BUCKET_NS, progress_ns=NS_PER_MINUTE, watch=book, fleet=fleet), book


def clairvoyant(setting: Setting, load: str, case: Case) -> tuple[Run, _Book]:
    """The run of the schedule that takes the fewest hours, of those that were tried."""
    runs: dict[tuple[int, ...], tuple[Run, _Book]] = {}

    def tried(needs: Sequence[int]) -> Tried:
        scaler = KnownLoad(needs, max(starts_of(setting, load)))
        runs[tuple(needs)] = _, book = play(setting, load, case, scaler, needs[0])
        return [(minute.least, minute.missed) for minute in book.minutes()]

    needs = fewest(
        work_of(case),
        tried,
        num_requests=sum(len(arrivals.time_ns) for arrivals in case.workload.arrivals()),
        target=_TARGET,
        tries=setting.tries,
        tell=lambda words: print(f"  {load}, clairvoyant: {words}", flush=True),
    )
    return runs[tuple(needs)]


def fit(setting: Setting, case: Case) -> tuple[float, float]:
    """Latency over load per worker, from ten minutes with ever fewer workers: base in ns, and most requests per second."""
    minutes = min(10, case.duration_ns // NS_PER_MINUTE)
    end_ns = minutes * NS_PER_MINUTE
    short = replace(case, workload=case.workload.sliced(0, end_ns), duration_ns=end_ns)
    busy = sum(work_of(short)) / minutes
    points = []
    for part in _FITTED:
        workers = max(1, round(part * busy))
        cluster = replace(case.cluster, num_workers=workers)
        total = run(replace(short, cluster=cluster), bucket_ns=_BUCKET_NS).summary.total()
        points.append((total.arrived / (60 * minutes) / workers, total.latency_ns(_PERCENTILE)))
    # 1 / latency falls with the load in a straight line.
    slope, height = np.polyfit([x for x, _ in points], [1 / y for _, y in points], 1)
    return 1 / float(height), float(height / -slope)


def ask(setting: Setting) -> Iterator[Scaled]:
    """Every load under every scaler, the clairvoyant first."""
    for load in setting.loads:
        case = case_of(setting, load)
        done, book = clairvoyant(setting, load, case)
        best = _scaled(load, "clairvoyant", done, book, done.worker_ns)
        yield best
        for name in setting.scalers:
            scaler = _scaler(setting, name, case, max(starts_of(setting, load)))
            first = max(1, best.minutes[0].least)
            yield _scaled(load, name, *play(setting, load, case, scaler, first), done.worker_ns)


def _scaler(setting: Setting, name: str, case: Case, ahead_ns: int) -> FleetScaler:
    if name == "forecast":
        return NumberWanted()
    if name == "queue":
        return QueueLength(target=setting.queue_target)
    base_ns, most_rps = fit(setting, case)
    return FittedLatency(
        base_ns=base_ns,
        most_rps=most_rps,
        percentile=_PERCENTILE,
        target_ns=setting.latency_share * setting.slo_s * NS_PER_S,
        ahead_ns=ahead_ns,
    )


def _scaled(load: str, scaler: str, done: Run, book: _Book, least_ns: int) -> Scaled:
    total = done.summary.total()
    minutes = book.minutes()
    return Scaled(
        load=load,
        scaler=scaler,
        requests=total.arrived,
        attainment_pct=100 * total.answered / max(1, total.arrived),
        worker_hours=done.worker_ns / (3600 * NS_PER_S),
        hours_over_clairvoyant=done.worker_ns / least_ns,
        starts=book.starts,
        most_workers=max(minute.least for minute in minutes),
        p99_s=total.latency_ns(99) / NS_PER_S,
        cpu_s=done.cpu_s,
        minutes=minutes,
    )


def by_minutes(_setting: Setting, points: Sequence[Scaled]) -> Iterator[Row]:
    """Means of ten minutes: workers that served, and of the requests that arrived then the share that missed the SLO."""
    for point in points:
        for begin in range(0, len(point.minutes), _STRETCH):
            some = point.minutes[begin : begin + _STRETCH]
            arrived = sum(minute.arrived for minute in some)
            yield {
                "load": point.load,
                "scaler": point.scaler,
                "minute": begin,
                "offered_rps": arrived / (60 * len(some)),
                "workers": sum(minute.mean for minute in some) / len(some),
                "missed_pct": 100 * sum(minute.missed for minute in some) / max(1, arrived),
            }


def panels(_setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """Workers over a day, and what is missed; then each load's hours over what is missed."""
    first = str(recorded.rows[0]["load"])
    curves: dict[str, list[Curve]] = {"workers": [], "missed_pct": []}
    for place, name in enumerate(("clairvoyant", *SCALERS)):
        rows = [
            row
            for row in recorded.tables["_minutes"]
            if row["load"] == first and row["scaler"] == name
        ]
        for column, found in curves.items():
            if rows:
                x, y = [row["minute"] / 60 for row in rows], [row[column] for row in rows]
                colour = BLACK if name == "clairvoyant" else COLOURS[place]
                found.append(Curve(x=x, y=y, label=name, colour=colour, line=LINES[place]))
    forecast = next(r for r in recorded.rows if (r["load"], r["scaler"]) == (first, SCALERS[0]))
    over = forecast["hours_over_clairvoyant"]
    panel = Panel(
        title=f"Workers: the forecast takes {over:.2f} times the clairvoyant's hours",
        x="time, h", y="number of workers that serve", curves=curves["workers"],
    )  # fmt: skip
    late = Panel(
        title=f"The forecast answers {forecast['attainment_pct']:.2f} % inside the SLO",
        x="time, h", y="not inside the SLO, %", curves=curves["missed_pct"], legend="upper right",
    )  # fmt: skip
    return [[panel], [late]]


STUDY = Study(
    name="autoscale",
    setting=Setting(),
    ask=ask,
    key="{load}_{scaler}",
    tables={"": own_rows, "_minutes": by_minutes},
    title="A day's load for which workers take a minute to start (simulated).",
    panels=panels,
    extra=lambda *_: {"compiled": is_compiled()},
)
