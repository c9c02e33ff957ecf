"""Does the simulator tell the truth: the same workloads live over gRPC and simulated, side by side.

Live, a `clockwright up` with one worker serves a workload that the replay client sends: on modelled
devices, and on the processor with real models. The simulator is given the same workload, and what was
measured of the server in calibration runs before (`experiments.live.rehearsal`), never in the runs that are
compared. Both leave telemetry rows, which the same code sums up, without the first seconds, in which
weights are loaded.

Each workload is played several times live; the table has the median of each figure, with the spread.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import nan
from typing import Annotated, Any

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, PAGE_BYTES
from experiments.clockwork_paper.cases import case_of
from experiments.live.live_run import Served, hosted, play, unmeasured
from experiments.live.rehearsal import MeasuredCase, measured, rehearsals
from experiments.simulator import HostedModel
from experiments.study.aims import limit_of
from experiments.study.pictures import COLOURS, Curve, Panel
from experiments.study.sides import METRICS, Side, simulated
from experiments.study.study import NO_COLUMN, ONLY_TABLE, Column, Study, StudyRecord, own_rows
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import Bursty, ClosedLoop, Poisson, Source, Workload

NOISE = Noise(exec_sigma=0.01, load_sigma=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How long and how often."""

    #: Length of each live run; the first `warmup_s` are left out.
    seconds: float = 27.0
    warmup_s: float = 2.0
    #: Length of each calibration run.
    calibration_s: float = 4.0
    #: Number of live runs of each case, and of simulated ones with other seeds.
    repeats: int = 3
    seed: int = 1

    def __post_init__(self) -> None:
        for name, least in (("seconds", self.warmup_s + 0.1), ("repeats", 1)):
            if not getattr(self, name) >= least:
                found = getattr(self, name)
                raise ConfigError(f"{name} is {found:g}, expected {least:g} or more")

    @property
    def stretch_ns(self) -> tuple[int, int]:
        """Begin and end of what counts."""
        return round(self.warmup_s * NS_PER_S), round(self.seconds * NS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedCase:
    """A case that was played several times, and simulated."""

    what: str
    #: What the simulator was told. None: too little was answered to tell, so nothing was simulated.
    measured: MeasuredCase | None
    live: list[Side]
    simulated: list[Side]
    #: Why nothing was simulated; empty: it was.
    unmeasured: str = ""
    client_late_p99_ms: float
    #: Requests of each live run that are not in `live`, for they left no row.
    num_without_row: list[int]
    #: The machine's load average before; the case itself adds less than 1.
    load_average: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthLine:
    """A line of the table: one metric of one case, the medians of its runs."""

    case: str
    metric: str
    live: Annotated[float, Column(figure="{case}_{name}_{metric}")]
    live_min: Annotated[float, Column(figure="{case}_{name}_{metric}")]
    live_max: Annotated[float, Column(figure="{case}_{name}_{metric}")]
    #: None: nothing was simulated.
    simulated: Annotated[float | None, Column(figure="{case}_{name}_{metric}")]
    #: None: there is nothing to compare, as `reason` says.
    gap_pct: Annotated[float | None, Column(figure="{case}_{short}_{name}")]
    aim_pct: Annotated[float, ONLY_TABLE]
    reason: str
    #: The metric without its unit.
    short: Annotated[str, NO_COLUMN]
    of: PlayedCase


# --- cases ------------------------------------------------------------------------------------------


def cases(setting: Setting) -> dict[str, Served]:
    """What is played, by name."""
    ten = ProfileRow(
        name="ten", weights_bytes=PAGE_BYTES, load_ns=NS_PER_MS, exec_ns={1: 10 * NS_PER_MS}
    )
    three = (row_of("small", 6, 2), row_of("middle", 12, 4), row_of("large", 20, 8))
    batch, cold = row_of("net", 15, 5), row_of("net", 6, 2, load_ms=16, pages=4)
    steady = partial(modelled, setting, models=hosted(ten), noise=Noise())
    loops = [
        ClosedLoop(
            model=model,
            concurrency=concurrency,
            slo_ns=500 * NS_PER_MS,
            end_ns=setting.stretch_ns[1],
            start_jitter_ns=NS_PER_S,
            seed=setting.seed + model,
        )
        for model, concurrency in enumerate((8, 8, 4))
    ]
    return {
        "steady": steady(
            "one model of 10 ms, Poisson, 70 % of what the GPU can do", asked=[((0,), 70, 100)]
        ),
        "overload": steady(
            "the same at one and a half times what it can do", asked=[((0,), 150, 100)]
        ),
        "bursty": modelled(
            setting,
            "three models of unlike cost and SLO, batches up to 16, bursts of a second",
            models=[model for row in three for model in hosted(row)],
            asked=[((0,), 40, 200), ((1,), 20, 300), ((2,), 10, 500)],
            bursts_ns=NS_PER_S,
        ),
        "closed": modelled(
            setting,
            "20 closed-loop clients on three models, batches up to 16",
            models=hosted(batch, 3),
            loops=loops,
        ),
        # Half of the requests are for four models, the others for twelve that do not fit next to them.
        "cold": modelled(
            setting,
            "16 models where 8 fit, loads of 16 ms",
            models=hosted(cold, 16),
            asked=[(range(4), 20, 200), (range(4, 16), 20, 200)],
            num_pages=32,
        ),
        "processor": on_processor(
            setting,
            "three real networks on the processor, as measured there",
            {"cifar_resnet20_v1": 40, "cifar_resnet56_v1": 20, "cifar_resnet110_v1": 20},
            slo_ms=200,
        ),
    }


def row_of(
    name: str, base_ms: int, each_ms: int, *, load_ms: int = 8, pages: int = 2
) -> ProfileRow:
    """A model whose EXEC takes so long, and so much longer for each row."""
    return ProfileRow(
        name=name,
        weights_bytes=pages * PAGE_BYTES,
        load_ns=load_ms * NS_PER_MS,
        exec_ns={size: (base_ms + each_ms * size) * NS_PER_MS for size in (1, 2, 4, 8, 16)},
    )


def modelled(
    setting: Setting,
    what: str,
    *,
    models: Sequence[HostedModel],
    asked: Iterable[tuple[Sequence[int], float, int]] = (),
    loops: Iterable[ClosedLoop] = (),
    num_pages: int = 64,
    noise: Noise = NOISE,
    bursts_ns: int = 0,
    device: str = "",
) -> Served:
    """A case on one device, and who asks.

    Args:
        setting: how long, from which seed.
        what: the case, for people.
        models: what is served.
        asked: models by position, requests per second on average, and their SLO in ms.
        loops: clients in closed loops.
        num_pages: of the weights cache.
        noise: of the modelled device.
        bursts_ns: mean length of bursts, in which all is asked, and of the pauses between; 0: no bursts.
        device: as in `Served`.
    """
    sources: list[Source] = []
    for positions, rate_rps, slo_ms in asked:
        end_ns, seed = setting.stretch_ns[1], setting.seed + positions[0]
        slo_ns = slo_ms * NS_PER_MS
        common: Any = {"models": positions, "slo_ns": slo_ns, "end_ns": end_ns, "seed": seed}
        sources.append(
            Bursty(rate_rps=2 * rate_rps, burst_ns=bursts_ns, pause_ns=bursts_ns, **common)
            if bursts_ns
            else Poisson(rate_rps=rate_rps, **common)
        )
    case = case_of(
        tuple(models),
        sources,
        seed=setting.seed,
        end_ns=setting.stretch_ns[1],
        loops=loops,
        num_pages=num_pages,
        noise=noise,
    )
    return Served(case=case, what=what, device=device)


def on_processor(
    setting: Setting, what: str, rates_rps: Mapping[str, float], *, slo_ms: int
) -> Served:
    """Real networks, by name with the rate of each."""
    return modelled(
        setting,
        what,
        models=[model for name in rates_rps for model in hosted(unmeasured(name, (1, 2, 4)))],
        asked=[((index,), rate, slo_ms) for index, rate in enumerate(rates_rps.values())],
        device="cpu",
    )


def mix_of(served: Served) -> Workload | None:
    """What a real device has to be asked before: the same with other arrivals."""
    return served.case.workload.reseeded(1) if served.device else None


# --- running ----------------------------------------------------------------------------------------


def play_case(setting: Setting, served: Served) -> PlayedCase:
    """Calibrate, play a case live, and simulate it."""
    workload, stretch_ns = served.case.workload, setting.stretch_ns
    first = rehearsals(served, setting.calibration_s, mix_of(served))
    load_average = os.getloadavg()[0]
    played = play([*first, *[workload] * setting.repeats], served)
    runs = played.runs[len(first) :]
    live = [run.rows.side(*stretch_ns) for run in runs]
    given, unmeasured_for, told = None, "", []
    try:
        given = measured(served, played.runs[: len(first)], played.rows)
    except ValueError as error:
        unmeasured_for = str(error)
    else:
        seeds = range(setting.seed, setting.seed + setting.repeats)
        told = [replace(given.case, seed=seed) for seed in seeds]
    return PlayedCase(
        what=served.what,
        measured=given,
        live=live,
        simulated=[simulated(case).side(*stretch_ns) for case in told],
        unmeasured=unmeasured_for,
        client_late_p99_ms=statistics.median(run.report.lateness_ns_p99 for run in runs)
        / NS_PER_MS,
        num_without_row=[run.num_without_row for run in runs],
        load_average=load_average,
    )


def ask(setting: Setting) -> Iterator[TruthLine]:
    """Play every case, and compare each metric."""
    for name, served in cases(setting).items():
        played = play_case(setting, served)
        yield from (compare(name, short, metric, played) for short, metric in METRICS.items())


def compare(case: str, short: str, metric: str, played: PlayedCase) -> TruthLine:
    """Sum up one metric; without an answer in each live run there is no gap, and the reason says so."""
    live, told = (
        [getattr(side, metric) for side in sides] for sides in (played.live, played.simulated)
    )
    middle, middle_told = statistics.median(live), statistics.median(told) if told else None
    gap_pct = None
    if middle_told is not None and all(live):
        gap_pct = 100 * (middle_told / middle - 1)
    aim_pct = limit_of("truth", f"{short}_gap_pct")
    return TruthLine(
        case=case,
        metric=metric,
        live=middle,
        live_min=min(live),
        live_max=max(live),
        simulated=middle_told,
        gap_pct=gap_pct,
        aim_pct=aim_pct,
        reason=_reason(played, live, aim_pct, gap_pct),
        short=short,
        of=played,
    )


def _reason(
    played: PlayedCase,
    live: Sequence[float],
    aim_pct: float,
    gap_pct: float | None,
) -> str:
    """Say why there is no gap, or where one above the aim comes from, as far as the run itself shows it."""
    if silent := sum(not value for value in live):
        return f"no request was answered in {silent} of {len(live)} live runs"
    if gap_pct is None:
        return f"not simulated: {played.unmeasured}"
    if abs(gap_pct) <= aim_pct:
        return ""
    if lost := sum(played.num_without_row):
        return f"the server refused {lost} requests before its scheduler heard of them"
    load, cores = played.load_average, os.cpu_count() or 1
    if load > cores:
        return (
            f"the machine had other work: load average {load:.1f} on {cores} cores before the case"
        )
    return (
        f"not explained by this run; the client's lateness: p99 {played.client_late_p99_ms:.1f} ms"
    )


# --- the record -------------------------------------------------------------------------------------


def figures_of(_setting: Setting, lines: Sequence[TruthLine]) -> dict[str, float]:
    """The worst gaps of all cases; if a case has no gap, the worst is unknown."""
    figures: dict[str, float] = {}
    for short in METRICS:
        found = [line.gap_pct for line in lines if line.short == short]
        gaps = [gap for gap in found if gap is not None]
        if len(gaps) == len(found):
            figures[f"{short}_gap_pct"] = max(gaps, key=abs)
    return figures


def extra(setting: Setting, lines: Sequence[TruthLine]) -> dict[str, Any]:
    """The comparison, and each run on its own."""
    return {
        "comparison": list(own_rows(setting, lines)),
        "cases": {
            line.case: {
                "what": line.of.what,
                **(line.of.measured.about if line.of.measured else {}),
                **{
                    name: [asdict(side) for side in getattr(line.of, name)]
                    for name in ("live", "simulated")
                },
                "client_late_p99_ms": line.of.client_late_p99_ms,
                "num_without_row": line.of.num_without_row,
                "load_average": line.of.load_average,
            }
            for line in lines
        },
    }


def _staggered(names: Sequence[str]) -> dict[float, str]:
    """Names below the axis in two lines in turns, so that neighbours do not overlap."""
    return {place: ("\n" if place % 2 else "") + name for place, name in enumerate(names)}


def panels(_setting: Setting, kept: StudyRecord) -> list[list[Panel]]:
    """A panel for each metric: every case live, with the spread of its runs, and simulated."""
    found = []
    for name, title, unit in (
        ("goodput_rps", "Answers in time", "answers, r/s"),
        ("p50_ms", "Median of latency", "latency, ms"),
        ("p99_ms", "99th percentile of latency", "latency, ms"),
    ):
        rows = [row for row in kept.rows if row["metric"] == name]
        places = range(len(rows))
        spread = (
            [row["live"] - row["live_min"] for row in rows],
            [row["live_max"] - row["live"] for row in rows],
        )
        live = [row["live"] for row in rows]
        # An empty cell: nothing was simulated.
        told = [nan if row["simulated"] == "" else row["simulated"] for row in rows]
        looks = Curve(x=places, y=live, label="live", colour=COLOURS[0], line="", marker="o")
        curves = [
            replace(looks, spread=spread),
            replace(looks, y=told, label="simulated", colour=COLOURS[1], marker="x"),
        ]
        ticks = _staggered([row["case"] for row in rows])
        found.append(Panel(title=title, x="case", y=unit, curves=curves, x_ticks=ticks))
    return [found]


STUDY = Study(
    name="truth",
    setting=Setting(),
    ask=ask,
    key="{case}_{metric}",
    figures=figures_of,
    title="Live and simulated lie close together.",
    panels=panels,
    extra=extra,
)
