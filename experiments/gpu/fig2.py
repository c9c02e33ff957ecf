"""Figure 2 on the card: one EXEC at a time against concurrent EXEC, and what the simulator makes of the former.

Closed-loop clients keep a number of requests outstanding. `one_at_a_time` hands them to one thread in the order they
came, as a worker does; `concurrent` runs each on a thread of its own, as a pool of serving threads would. Each EXEC that
may run at the same time as others has weights, captured kernels and a stream of its own. The two take turns, so that what else the
machine does falls on both. One at a time is predictable, so the simulator is to foresee its goodput from a single
client's EXEC; for concurrent EXEC it has no model.

The paper (section 2 and 3) measured a V100: in isolation the 99.99th percentile of an EXEC is within
0.03 % of its median; concurrency gains up to 25 % of throughput and costs a hundredfold tail.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise, product
from statistics import fmean
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clockwright.cli.worker_settings import default_cache_dir
from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from experiments.gpu.hardware import about, compiled_for, open_accelerator
from experiments.gpu.probe import ARCHITECTURE, BareKernel, bare_kernel
from experiments.simulator import Case, Cluster, HostedModel, Network
from experiments.study.pictures import COLOURS, LINES, MARKERS, Curve, Panel, ticks
from experiments.study.sides import simulated
from experiments.study.study import NO_COLUMN, Column, Paper, Row, Study, StudyRecord
from modelzoo.profile import ProfileRow
from traces.arrivals import ClosedLoop, Workload
from worker.devices.accelerator import Event, Stream
from worker.models.precision import Precision

_REHEARSAL_S = 0.5
_SIMULATED_NS = 2 * NS_PER_S
# No request is refused: the figure is about a device, not about a scheduler.
_SLO_NS = 100 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured."""

    device: str = "cuda:0"
    #: How long, all rounds together.
    seconds: float = 16.0
    architecture: str = ARCHITECTURE
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    rounds: int = 2

    def __post_init__(self) -> None:
        # Not a number is not more than 0, either.
        if not self.seconds > 0:
            raise ConfigError(f"--seconds: found {self.seconds:g}, expected more than 0")


class Exec(NamedTuple):
    """One execution; ns on the monotonic clock."""

    asked_ns: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyPoint:
    """One mode at one concurrency, over all rounds."""

    mode: str
    concurrency: int
    #: Throughput: median, least and most of the rounds.
    throughput_rps: float
    throughput_rps_min: float
    throughput_rps_max: float
    exec_p50_ms: float
    exec_p99_ms: float
    num_execs: float
    #: Throughput of each round.
    throughputs_rps: NDArray[np.float64]
    #: Durations of all EXECs, then the times from asking to their ends.
    exec_ms: NDArray[np.float64]
    latency_ms: NDArray[np.float64]
    #: What the simulator foresees of one at a time, and how much more that is; None: it has no model.
    simulated_rps: Annotated[float | None, Column()] = None
    goodput_gap_pct: Annotated[float | None, Column()] = None
    #: Whether convolutions and their ReLUs are one kernel in every executor.
    joined: Annotated[bool, NO_COLUMN] = True

    @property
    def tail_pct(self) -> float:
        """By how much the EXECs' tail is longer than their median, which is all that a scheduler can predict."""
        return 100 * (self.exec_p99_ms / self.exec_p50_ms - 1)


#: A device of one model: runs one EXEC at the same time as those of other indices, and returns at its end.
Device = Callable[[int], object]


class Card:
    """Captured kernels of one network, with a stream of its own for each EXEC that may run at the same time."""

    def __init__(self, setting: Setting) -> None:
        """Compile the network, capture its kernels for batch size 1, and run each once."""
        self._executors: list[tuple[BareKernel, Stream, Event]] = []
        folder, compiled = compiled_for(
            setting.architecture, Precision.FLOAT32, default_cache_dir()
        )
        for _ in range(max(setting.concurrencies)):
            # Kernels captured on one accelerator share the memory of their intermediates, so each gets its own.
            accelerator = open_accelerator(setting.device)
            kernel = bare_kernel(accelerator, folder, compiled, 1)
            self._executors.append((kernel, accelerator.stream(), accelerator.event()))
        for index in range(len(self._executors)):
            self.run(index)

    @property
    def joined(self) -> bool:
        """Whether convolutions and their ReLUs are one kernel in every executor."""
        return all(kernel.joined for kernel, _, _ in self._executors)

    def run(self, index: int) -> None:
        """Run one EXEC at the same time as those of other indices; returns at its end."""
        kernel, stream, done = self._executors[index]
        kernel.replay(stream)
        stream.record(done)
        done.synchronize()


def one_at_a_time(device: Device, concurrency: int, until_ns: int) -> list[Exec]:
    """Closed-loop clients before one executor that takes requests in order."""
    waiting = deque([time.monotonic_ns()] * concurrency)
    done: list[Exec] = []
    # At least one EXEC runs, even where a stalled machine wakes up after the end.
    while (begin_ns := time.monotonic_ns()) < until_ns or not done:
        device(0)
        done.append(Exec(waiting.popleft(), begin_ns, time.monotonic_ns()))
        waiting.append(done[-1].end_ns)  # its client asks again
    return done


def concurrent(device: Device, concurrency: int, until_ns: int) -> list[Exec]:
    """Closed-loop clients, each with an executor of its own."""

    def loop(index: int) -> list[Exec]:
        done: list[Exec] = []
        while (begin_ns := time.monotonic_ns()) < until_ns or not done:
            device(index)
            done.append(Exec(begin_ns, begin_ns, time.monotonic_ns()))
        return done

    with ThreadPoolExecutor(concurrency) as pool:
        return [entry for done in pool.map(loop, range(concurrency)) for entry in done]


MODES = {"one_at_a_time": one_at_a_time, "concurrent": concurrent}


def measure(setting: Setting, device: Device) -> list[ConcurrencyPoint]:
    """Let the modes take turns at every concurrency."""
    runs: dict[tuple[str, int], list[NDArray[np.int64]]] = {}
    turns = list(product(range(setting.rounds), setting.concurrencies, MODES))
    for _, concurrency, mode in turns:
        until_ns = time.monotonic_ns() + int(setting.seconds / len(turns) * NS_PER_S)
        done = MODES[mode](device, concurrency, until_ns)
        runs.setdefault((mode, concurrency), []).append(np.array(done))
    return [_point(mode, concurrency, rounds) for (mode, concurrency), rounds in runs.items()]


def _point(mode: str, concurrency: int, rounds: Sequence[NDArray[np.int64]]) -> ConcurrencyPoint:
    """Count EXECs, shape (EXEC, 3) as `Exec` has them, of each round."""
    rps = np.array(
        [len(done) * NS_PER_S / (done[:, 2].max() - done[:, 1].min()) for done in rounds]
    )
    asked_ns, begin_ns, end_ns = np.concatenate(rounds).T
    exec_ms = (end_ns - begin_ns) / NS_PER_MS
    p50_ms, p99_ms = np.percentile(exec_ms, (50, 99)).tolist()
    return ConcurrencyPoint(
        mode=mode,
        concurrency=concurrency,
        throughput_rps=float(np.median(rps)),
        throughput_rps_min=float(rps.min()),
        throughput_rps_max=float(rps.max()),
        exec_p50_ms=p50_ms,
        exec_p99_ms=p99_ms,
        num_execs=float(len(exec_ms)),
        throughputs_rps=rps,
        exec_ms=exec_ms,
        latency_ms=(end_ns - asked_ns) / NS_PER_MS,
    )


def predicted_rps(alone: Sequence[Exec], concurrency: int) -> float:
    """Goodput that the simulator predicts for closed-loop clients before one executor.

    Args:
        alone: a single client's EXECs, one after the other.
        concurrency: number of clients.
    """
    exec_ns = round(fmean(entry.end_ns - entry.begin_ns for entry in alone))
    gaps_ns = [after.begin_ns - before.end_ns for before, after in pairwise(alone)]
    row = ProfileRow(name="alone", weights_bytes=1, load_ns=1, exec_ns={1: exec_ns})
    loop = ClosedLoop(model=0, concurrency=concurrency, slo_ns=_SLO_NS, end_ns=_SIMULATED_NS)
    case = Case(
        workload=Workload(models=(row.name,), closed_loops=(loop,)),
        cluster=Cluster(
            models=(HostedModel(ModelId(row.name), row),),
            start_delay_ns=round(fmean(gaps_ns)) if gaps_ns else 0,
        ),
        network=Network(delay_ns=0, client_delay_ns=0),
        duration_ns=_SIMULATED_NS,
    )
    return simulated(case).side(_SIMULATED_NS // 2, _SIMULATED_NS).goodput_rps


def ask(setting: Setting) -> Iterator[ConcurrencyPoint]:
    """Measure, and predict each concurrency of one at a time."""
    # Read when CUDA starts. By default 8 hardware queues carry all streams, so of 16 EXECs some would wait for others only
    # because they share a queue, and concurrency would look better ordered than it is.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    card = Card(setting)
    alone = one_at_a_time(card.run, 1, time.monotonic_ns() + int(_REHEARSAL_S * NS_PER_S))
    for point in measure(setting, card.run):
        found = replace(point, joined=card.joined)
        if point.mode == "one_at_a_time":
            rps = predicted_rps(alone, point.concurrency)
            gap_pct = 100 * (rps / point.throughput_rps - 1)
            found = replace(found, simulated_rps=rps, goodput_gap_pct=gap_pct)
        yield found


def figures_of(_setting: Setting, points: Sequence[ConcurrencyPoint]) -> dict[str, float]:
    """One mode compared with the other."""
    of = {(point.mode, point.concurrency): point for point in points}
    concurrencies = sorted({point.concurrency for point in points})
    most = concurrencies[-1]
    # Each round is compared with the same round of the other mode.
    gains = [
        np.median(of["concurrent", c].throughputs_rps / of["one_at_a_time", c].throughputs_rps)
        for c in concurrencies
    ]
    gaps = [point.goodput_gap_pct for point in points if point.goodput_gap_pct is not None]
    return {
        "joined": float(all(point.joined for point in points)),
        "worst_goodput_gap_pct": max(gaps, key=abs, default=0.0),
        "throughput_gain_pct": 100 * (float(max(gains)) - 1),
        "tail_growth_ratio": of["concurrent", most].exec_p99_ms
        / of["one_at_a_time", most].exec_p99_ms,
        **{f"{mode}_c{most}_exec_p99_over_median_pct": of[mode, most].tail_pct for mode in MODES},
        "isolated_p99_over_median_pct": of["one_at_a_time", concurrencies[0]].tail_pct,
    }


def rows(_setting: Setting, points: Sequence[ConcurrencyPoint]) -> Iterator[Row]:
    """Rows of `fig2.csv`."""
    for point in points:
        run: Row = {"mode": point.mode, "concurrency": point.concurrency}
        for at in (1, 10, 25, 50, 75, 90, 95, 99):
            exec_ms, latency_ms = np.percentile((point.exec_ms, point.latency_ms), at, axis=1)
            yield {
                **run,
                "percentile": at,
                "exec_ms": float(exec_ms),
                "latency_ms": float(latency_ms),
            }


def panels(_setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """Throughput at the left, EXEC durations at the right, over the requests outstanding."""
    figures = recorded.figures
    at = sorted({row["concurrency"] for row in recorded.rows})
    throughput, durations = [], []
    for colour, line, marker, mode in zip(COLOURS, LINES, MARKERS, MODES, strict=False):
        rps, least_rps, most_rps, p50_ms, p99_ms = (
            np.array([figures[f"{mode}_c{concurrency}_{name}"] for concurrency in at])
            for name in (
                "throughput_rps", "throughput_rps_min", "throughput_rps_max",
                "exec_p50_ms", "exec_p99_ms",
            )
        )  # fmt: skip
        name = mode.replace("_", " ")
        spread = (rps - least_rps).tolist(), (most_rps - rps).tolist()
        looks = Curve(x=at, y=p50_ms.tolist(), colour=colour, marker=marker, line=line)
        throughput.append(replace(looks, y=rps.tolist(), spread=spread, label=name))
        durations.append(replace(looks, label=f"{name},\nmedian"))
        durations.append(replace(looks, y=p99_ms.tolist(), label=f"{name},\np99", width=0.8))
    gain_pct = figures["paper_throughput_gain_pct"]
    most = throughput[0].y[0] * (1 + gain_pct / 100)
    panel = Panel(
        title="Several EXECs at once do not answer more",
        x="number of requests outstanding",
        y="throughput, r/s",
        curves=throughput,
        levels={most: f"the paper's GPU: up to {gain_pct:.0f} % more"},
        log_x=True,
        x_ticks=ticks(at),
    )
    longer = replace(
        panel,
        title="but each takes longer, and its length is unpredictable",
        y="EXEC, ms",
        curves=durations,
        levels={},
        log_y=True,
    )
    return [[panel, longer]]


_ANOTHER = "another card and network than the paper's V100"

PAPER = (
    Paper("throughput_gain_pct", 25.0, _ANOTHER, ("{key}",)),
    Paper("tail_growth_ratio", 100.0, _ANOTHER, ("{key}",)),
    Paper(
        "isolated_p9999_over_median_pct",
        0.03,
        "p99, not p99.99, of a short run",
        ("isolated_p99_over_median_pct",),
    ),
)

STUDY = Study(
    name="fig2",
    command="gpu-fig2",
    folder="gpu",
    setting=Setting(),
    ask=ask,
    key="{mode}_c{concurrency}",
    figures=figures_of,
    tables={"": rows},
    paper=PAPER,
    title="Several EXECs at once answer hardly more requests than one at a time, and each takes longer.",
    panels=panels,
    extra=lambda setting, _: {"hardware": about(open_accelerator(setting.device))},
)
