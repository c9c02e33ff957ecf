"""Does the simulator tell the truth: the same workloads live over gRPC and simulated, side by side.

Live, a `clockwright up` with one worker serves a workload that the replay client sends: on modelled
devices, and on the processor with real models. The simulator is given the same workload, and what was
measured of the server in calibration runs before (`experiments.live.beside`), never in the runs that are
compared. Both leave telemetry rows, which the same code sums up, without the first seconds, in which
weights are loaded.

Each workload is played several times live; the table has the median of each figure, with the spread.

Requests reach a live controller later than the workload says, by the client's timers and by what else
the machine has to do. So each live run is simulated a second time, with its requests at the times at
which the controller had them: what is left of the gap then is the server's, not the client's.
"""

from __future__ import annotations

import os
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, PAGE_BYTES
from controller.telemetry import OK
from experiments.clockwork_paper.cases import case_of
from experiments.live.beside import MeasuredCase, as_arrived, measured, rehearsals, sides, slowed
from experiments.live.live_run import Served, hosted, play, unmeasured
from experiments.simulator import HostedModel
from experiments.study.aims import limit_of
from experiments.study.beside import Beside, say, worst
from experiments.study.pictures import COLOURS, Curve, Panel
from experiments.study.sides import METRICS, RunRows, Side, gap_pct, simulated
from experiments.study.study import Row, Study
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import Bursty, ClosedLoop, Poisson, Source, Workload

#: Largest gaps that the comparison aims at, in per cent.
AIMS = {metric: limit_of("truth", f"{metric}_gap_pct") for metric in METRICS}

NOISE = Noise(exec_sigma=0.01, load_sigma=0.01)
_PERCENTILES = tuple(range(101))


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
    #: Modelled devices take this many times as long, and their clients ask less often, with longer SLOs,
    #: by the same factor: so other work on the machine shows less. Bursts keep their length.
    slower: int = 1

    def __post_init__(self) -> None:
        for name, least in (("seconds", self.warmup_s + 0.1), ("slower", 1), ("repeats", 1)):
            if not getattr(self, name) >= least:
                found = getattr(self, name)
                raise ConfigError(f"{name} is {found:g}, expected {least:g} or more")

    @property
    def stretch_ns(self) -> tuple[int, int]:
        """Begin and end of what counts."""
        return round(self.warmup_s * NS_PER_S), round(self.seconds * NS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthLine(Beside):
    """A case; both sides are the medians of several runs."""

    case: str
    what: str
    measured: MeasuredCase
    live_runs: list[Side]
    simulated_runs: list[Side]
    #: Each live run simulated again with its requests as they arrived. Empty for closed loops, whose
    #: arrivals depend on the server.
    as_arrived: list[Side]
    #: Latencies of the answers of one run, live and simulated, at `_PERCENTILES`.
    latencies_ms: Mapping[str, Sequence[float]]
    #: The machine's load average before; the case itself adds less than 1.
    load_average: float


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
        # Half of the requests are for four models, the others for twelve that do not fit beside them.
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
        setting: how long, from which seed, how much slower.
        what: the case, for people.
        models: what is served.
        asked: models by position, requests per second on average, and their SLO in ms.
        loops: clients in closed loops.
        num_pages: of the weights cache.
        noise: of the modelled device.
        bursts_ns: mean length of bursts, in which all is asked, and of the pauses between; 0: there are none.
        device: as in `Served`.
    """
    sources: list[Source] = []
    for positions, rate_rps, slo_ms in asked:
        end_ns, seed = setting.stretch_ns[1], setting.seed + positions[0]
        common: Any = {
            "models": positions,
            "slo_ns": slo_ms * NS_PER_MS,
            "end_ns": end_ns,
            "seed": seed,
        }
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
    return Served(case=case if device else slowed(case, setting.slower), what=what, device=device)


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


def measure(setting: Setting, case: str) -> TruthLine:
    """Calibrate, play the case live, and simulate it."""
    served = cases(setting)[case]
    workload = served.case.workload
    first = rehearsals(served, setting.calibration_s, mix_of(served))
    load_before = os.getloadavg()[0]
    played = play([*first, *[workload] * setting.repeats], served)
    runs = played.runs[len(first) :]
    stretch_ns = setting.stretch_ns
    given = measured(served, played.runs[: len(first)], played.rows)
    seeded = (replace(given.case, seed=setting.seed + number) for number in range(setting.repeats))
    on_virtual_time = [simulated(each) for each in seeded]
    live = [run.rows.side(*stretch_ns) for run in runs]
    told = [rows.side(*stretch_ns) for rows in on_virtual_time]
    median = sorted(range(len(live)), key=lambda number: live[number].p99_ms)[len(live) // 2]
    return TruthLine(
        **sides(runs[median], None, *stretch_ns)
        | {
            "live": _middle(live),
            "simulated": _middle(told),
            "client_late_p99_ms": statistics.median(
                run.report.lateness_ns_p99 / NS_PER_MS for run in runs
            ),
        },
        case=case,
        what=served.what,
        measured=given,
        live_runs=live,
        simulated_runs=told,
        as_arrived=[
            simulated(replace(given.case, workload=as_arrived(workload, run.rows))).side(
                *stretch_ns
            )
            for run in runs
            if not workload.closed_loops
        ],
        latencies_ms={
            "live": _latencies_ms(runs[median].rows, setting),
            "simulated": _latencies_ms(on_virtual_time[-1], setting),
        },
        load_average=load_before,
    )


def _middle(several: Sequence[Side]) -> Side:
    """The median of each figure."""
    names = [entry.name for entry in fields(Side)]
    return Side(
        **{name: statistics.median(getattr(side, name) for side in several) for name in names}
    )


def _latencies_ms(rows: RunRows, setting: Setting) -> list[float]:
    begin_ns = rows.origin_ns + setting.stretch_ns[0]
    latencies_ms = [
        (row.departure_ns - row.arrival_ns) / NS_PER_MS
        for row in rows.requests
        if row.outcome == OK and row.arrival_ns >= begin_ns
    ]
    return [float(value) for value in np.percentile(latencies_ms or [0], _PERCENTILES)]


# --- the table --------------------------------------------------------------------------------------


def compared(_setting: Setting, lines: Iterable[TruthLine]) -> Iterator[Row]:
    """Rows of `truth.csv`: of each case, one per metric."""
    for line in lines:
        for metric, name in METRICS.items():
            live = [getattr(side, name) for side in line.live_runs]
            gap = getattr(line, f"{metric}_gap_pct")
            if gap is None:
                raise ValueError(f"{line.case}: nobody was answered live, expected somebody")
            as_arrived = _gap_as_arrived_pct(line, name, gap)
            yield {
                "case": line.case,
                "metric": name,
                "live": getattr(line.live, name),
                "live_min": min(live),
                "live_max": max(live),
                "simulated": getattr(line.simulated, name),
                "gap_pct": gap,
                "gap_as_arrived_pct": as_arrived,
                "aim_pct": AIMS[metric],
                "reason": _reason(line, metric, gap, as_arrived),
            }


def _gap_as_arrived_pct(line: TruthLine, name: str, usual_pct: float) -> float:
    """The median gap of live runs to their simulation; that of the workload where there is none."""
    gaps = [
        gap
        for live, again in zip(line.live_runs, line.as_arrived, strict=False)
        if (gap := gap_pct(live, again, name)) is not None
    ]
    return statistics.median(gaps) if gaps else usual_pct


def _reason(line: TruthLine, metric: str, gap: float, as_arrived: float) -> str:
    """Say where a gap above the aim comes from, as far as the run itself shows it."""
    aim_pct = AIMS[metric]
    if abs(gap) <= aim_pct:
        return ""
    load, cores = line.load_average, os.cpu_count() or 1
    if load > cores:
        return (
            f"the machine had other work: load average {load:.1f} on {cores} cores before the case"
        )
    if abs(as_arrived) <= aim_pct:
        return f"requests reached the controller late: the client's p99 is {line.client_late_p99_ms:.1f} ms"
    return "not explained by this run"


def figures_of(setting: Setting, lines: Sequence[TruthLine]) -> dict[str, float]:
    """The spread of live runs, gaps of requests as they arrived, and the worst gaps of all cases."""
    figures: dict[str, float] = {}
    arrived: dict[str, list[float]] = {}
    for row in compared(setting, lines):
        case, name = row["case"], str(row["metric"])
        metric = name.rpartition("_")[0]
        for edge in ("live_min", "live_max"):
            figures[f"{case}_{edge}_{name}"] = float(row[edge])
        gap = float(row["gap_as_arrived_pct"])
        figures[f"{case}_{metric}_gap_as_arrived_pct"] = gap
        arrived.setdefault(metric, []).append(gap)
    for metric, gaps in arrived.items():
        figures |= worst(lines, f"{metric}_gap_pct")
        figures[f"{metric}_gap_as_arrived_pct"] = max(gaps, key=abs)
    return figures


def extra(setting: Setting, lines: Sequence[TruthLine]) -> dict[str, Any]:
    """The comparison, and each run on its own."""
    return {
        "comparison": list(compared(setting, lines)),
        "cases": {
            line.case: {
                "what": line.what,
                **line.measured.about,
                "live": [asdict(side) for side in line.live_runs],
                "simulated": [asdict(side) for side in line.simulated_runs],
                "as_arrived": [asdict(side) for side in line.as_arrived],
                "load_average": line.load_average,
            }
            for line in lines
        },
    }


def panels(_setting: Setting, lines: Sequence[TruthLine]) -> list[list[Panel]]:
    """A panel for each case: how many answers were no slower."""
    found = [
        Panel(
            title=f"{textwrap.fill(line.what, 44)}\nsimulated p99 {line.p99_gap_pct or 0.0:+.1f} %",
            x="latency, ms",
            y="answers that were no slower, %",
            curves=[
                Curve(
                    x=line.latencies_ms[side], y=_PERCENTILES, label=side, colour=colour, line=style
                )
                for side, colour, style in (
                    ("live", COLOURS[0], "-"),
                    ("simulated", COLOURS[1], "--"),
                )
            ],
            y_range=(0, 100),
        )
        for line in lines
    ]
    return [found[:3], found[3:]]


STUDY = Study(
    name="truth",
    setting=Setting(),
    ask=lambda setting: (measure(setting, case) for case in cases(setting)),
    key="{case}",
    figures=figures_of,
    tables={"": compared},
    panels=panels,
    extra=extra,
    say=say,
)
