"""Figure 2: one EXEC at a time against concurrent EXEC, for real, on this machine's processor.

The device is the processor with all its cores, as a GPU is one device with all its multiprocessors:
each EXEC may use every core. Closed-loop clients keep a number of requests outstanding. `one_at_a_time`
hands them to one thread in the order they came, as a worker does; `concurrent` runs each on a thread
and session of its own, as a pool of serving threads would. The two take turns, so that what else the
machine does falls on both.

The paper (section 2 and 3) measured a V100: in isolation the 99.99th percentile of an EXEC is within
0.03 % of its median; concurrency gains up to 25 % of throughput and costs a hundredfold tail.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from typing_extensions import override

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.study.pictures import COLOURS, LINES, MARKERS, Curve, Panel
from experiments.study.study import Paper, Row, Study, StudyRecord
from modelzoo.build import write_model

MODES = ("one_at_a_time", "concurrent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured."""

    architecture: str = "resnet18_v1"
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    rounds: int = 5
    #: Time that a round spends on each mode at each concurrency.
    round_s: float = 4.0
    #: Threads that one EXEC may use; 0: as many as there are cores.
    num_threads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exec:
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
    exec_p95_ms: float
    latency_p99_ms: float
    num_execs: float
    #: Throughput of each round.
    throughputs_rps: tuple[float, ...]
    #: Durations of all EXECs, then the times from asking to their ends.
    exec_ms: NDArray[np.float64]
    latency_ms: NDArray[np.float64]

    @property
    def tail_pct(self) -> float:
        """By how much the EXECs' tail is longer than their median, which is all that a scheduler can predict."""
        return 100 * (self.exec_p99_ms / self.exec_p50_ms - 1)


class ConcurrentDevice(Protocol):
    """A device that runs one model, as often at the same time as is asked."""

    def run(self, index: int) -> None:
        """Run one EXEC beside the EXECs of other indices; returns at its end."""


class Processor(ConcurrentDevice):
    """Sessions of one model, one for each EXEC that may run at the same time."""

    def __init__(self, setting: Setting) -> None:
        """Build the model and warm every session up."""
        threads = setting.num_threads or os.cpu_count() or 1
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # A thread that spins for work would take the time of EXECs beside it.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "model.onnx"
            write_model(setting.architecture, path)
            self._sessions = [
                ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
                for _ in range(max(setting.concurrencies))
            ]
        (entry,) = self._sessions[0].get_inputs()
        shape = [dim if isinstance(dim, int) else 1 for dim in entry.shape]
        rows = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
        self._feed = {entry.name: rows}
        for index in range(len(self._sessions)):
            self.run(index)

    @override
    def run(self, index: int) -> None:
        self._sessions[index].run(None, self._feed)


def one_at_a_time(device: ConcurrentDevice, concurrency: int, until_ns: int) -> list[Exec]:
    """Closed-loop clients before one executor that takes requests in order."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for _ in range(concurrency):
        waiting.put(time.monotonic_ns())
    done: list[Exec] = []
    # At least one EXEC runs, even where a stalled machine wakes up after the end.
    while (begin_ns := time.monotonic_ns()) < until_ns or not done:
        asked_ns = waiting.get()
        device.run(0)
        end_ns = time.monotonic_ns()
        done.append(Exec(asked_ns=asked_ns, begin_ns=begin_ns, end_ns=end_ns))
        waiting.put(end_ns)  # its client asks again
    return done


def concurrent(device: ConcurrentDevice, concurrency: int, until_ns: int) -> list[Exec]:
    """Closed-loop clients, each with an executor of its own."""
    done: list[list[Exec]] = [[] for _ in range(concurrency)]

    def loop(index: int) -> None:
        while (begin_ns := time.monotonic_ns()) < until_ns or not done[index]:
            device.run(index)
            done[index].append(
                Exec(asked_ns=begin_ns, begin_ns=begin_ns, end_ns=time.monotonic_ns())
            )

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted((entry for part in done for entry in part), key=lambda entry: entry.end_ns)


_RUNNERS: dict[str, Callable[[ConcurrentDevice, int, int], list[Exec]]] = {
    "one_at_a_time": one_at_a_time,
    "concurrent": concurrent,
}


def measure(setting: Setting, device: ConcurrentDevice) -> list[ConcurrencyPoint]:
    """Let the modes take turns at every concurrency."""
    runs: dict[tuple[str, int], list[list[Exec]]] = {}
    for _ in range(setting.rounds):
        for concurrency in setting.concurrencies:
            for mode in MODES:
                until_ns = time.monotonic_ns() + int(setting.round_s * NS_PER_S)
                done = _RUNNERS[mode](device, concurrency, until_ns)
                runs.setdefault((mode, concurrency), []).append(done)
    return [_point(mode, concurrency, rounds) for (mode, concurrency), rounds in runs.items()]


def _point(mode: str, concurrency: int, rounds: Sequence[Sequence[Exec]]) -> ConcurrencyPoint:
    done = [entry for entries in rounds for entry in entries]
    throughputs_rps = tuple(
        len(entries)
        * NS_PER_S
        / (max(e.end_ns for e in entries) - min(e.begin_ns for e in entries))
        for entries in rounds
    )
    exec_ms = np.array([e.end_ns - e.begin_ns for e in done]) / NS_PER_MS
    latency_ms = np.array([e.end_ns - e.asked_ns for e in done]) / NS_PER_MS
    p50_ms, p95_ms, p99_ms = np.percentile(exec_ms, (50, 95, 99)).tolist()
    return ConcurrencyPoint(
        mode=mode,
        concurrency=concurrency,
        throughput_rps=float(np.median(throughputs_rps)),
        throughput_rps_min=min(throughputs_rps),
        throughput_rps_max=max(throughputs_rps),
        exec_p50_ms=p50_ms,
        exec_p95_ms=p95_ms,
        exec_p99_ms=p99_ms,
        latency_p99_ms=float(np.percentile(latency_ms, 99)),
        num_execs=float(len(done)),
        throughputs_rps=throughputs_rps,
        exec_ms=exec_ms,
        latency_ms=latency_ms,
    )


def figures_of(_setting: Setting, points: Sequence[ConcurrencyPoint]) -> dict[str, float]:
    """One mode beside the other."""
    of = {(point.mode, point.concurrency): point for point in points}
    concurrencies = sorted({point.concurrency for point in points})
    most = concurrencies[-1]
    # Each round is compared with the same round of the other mode.
    gains = [
        np.median(
            np.array(of["concurrent", c].throughputs_rps)
            / np.array(of["one_at_a_time", c].throughputs_rps)
        )
        for c in concurrencies
    ]
    return {
        "throughput_gain_pct": 100 * (float(max(gains)) - 1),
        "tail_growth_ratio": of["concurrent", most].exec_p99_ms
        / of["one_at_a_time", most].exec_p99_ms,
        **{f"{mode}_c{most}_exec_p99_over_median_pct": of[mode, most].tail_pct for mode in MODES},
        "isolated_p99_over_median_pct": of["one_at_a_time", concurrencies[0]].tail_pct,
    }


def rows(_setting: Setting, points: Sequence[ConcurrencyPoint]) -> Iterator[Row]:
    """Rows of `fig2.csv`."""
    for point in points:
        for percentile in (1, 10, 25, 50, 75, 90, 95, 99):
            yield {
                "mode": point.mode,
                "concurrency": point.concurrency,
                "percentile": percentile,
                "exec_ms": float(np.percentile(point.exec_ms, percentile)),
                "latency_ms": float(np.percentile(point.latency_ms, percentile)),
            }


def panels(_setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """Throughput at the left, EXEC durations at the right, over the requests outstanding."""
    figures = recorded.figures
    at = sorted({row["concurrency"] for row in recorded.rows})
    throughput, durations = [], []
    for colour, line, marker, mode in zip(COLOURS, LINES, MARKERS, MODES, strict=False):

        def of(name: str, mode: str = mode) -> list[float]:
            return [figures[f"{mode}_c{concurrency}_{name}"] for concurrency in at]

        name = mode.replace("_", " ")
        rps = np.array(of("throughput_rps"))
        spread = (
            list(rps - of("throughput_rps_min")),
            list(np.array(of("throughput_rps_max")) - rps),
        )
        looks = Curve(x=at, y=(), colour=colour, marker=marker, line=line)
        throughput.append(replace(looks, y=rps.tolist(), spread=spread, label=name))
        durations.append(replace(looks, y=of("exec_p50_ms"), label=f"{name},\nmedian"))
        durations.append(replace(looks, y=of("exec_p99_ms"), label=f"{name},\np99", width=0.8))
    x, ticks = "number of requests outstanding", {float(number): str(number) for number in at}
    gain_pct = figures["paper_throughput_gain_pct"]
    paper = {
        throughput[0].y[0] * (1 + gain_pct / 100): f"the paper's GPU: up to {gain_pct:.0f} % more"
    }
    return [
        [
            Panel(
                title="Several EXECs at once do not answer more",
                x=x, y="throughput, r/s", curves=throughput, levels=paper, log_x=True, x_ticks=ticks,
            ),
            Panel(
                title="but each takes longer, and nobody can say how long",
                x=x, y="EXEC, ms", curves=durations, log_x=True, log_y=True, x_ticks=ticks,
            ),
        ]
    ]  # fmt: skip


PAPER = (
    Paper(
        "throughput_gain_pct",
        25.0,
        "what one EXEC leaves idle of this processor, more or less than of a V100",
        ("{key}",),
    ),
    Paper(
        "tail_growth_ratio",
        100.0,
        "the operating system shares cores in fair slices, so the tail grows as the number of "
        "EXECs at once; a GPU's hardware queues are not fair",
        ("{key}",),
    ),
    Paper(
        "isolated_p9999_over_median_pct",
        0.03,
        "a shared virtual machine's processor, not a dedicated GPU; p99, not p99.99",
        ("isolated_p99_over_median_pct",),
    ),
)

STUDY = Study(
    name="fig2",
    setting=Setting(),
    ask=lambda setting: measure(setting, Processor(setting)),
    key="{mode}_c{concurrency}",
    figures=figures_of,
    tables={"": rows},
    paper=PAPER,
    title="Several EXECs at once answer hardly more requests than one at a time, and each takes longer.",
    panels=panels,
)
