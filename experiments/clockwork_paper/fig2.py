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
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.study.pictures import COLOURS, LINES, MARKERS, Curve, Panel, ticks
from experiments.study.study import Paper, Row, Study, StudyRecord
from modelzoo.build import write_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured."""

    architecture: str = "resnet18_v1"
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    rounds: int = 5
    #: Time that a round spends on each mode at each concurrency.
    round_s: float = 4.0


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

    @property
    def tail_pct(self) -> float:
        """By how much the EXECs' tail is longer than their median, which is all that a scheduler can predict."""
        return 100 * (self.exec_p99_ms / self.exec_p50_ms - 1)


#: A device of one model: runs one EXEC beside those of other indices, and returns at its end.
Device = Callable[[int], object]


def processor(setting: Setting) -> Device:
    """Sessions of one model, one for each EXEC that may run at the same time, warmed up."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = os.cpu_count() or 1
    options.inter_op_num_threads = 1
    # A thread that spins for work would take the time of EXECs beside it.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.onnx"
        write_model(setting.architecture, path)
        sessions = [
            ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            for _ in range(max(setting.concurrencies))
        ]
    (entry,) = sessions[0].get_inputs()
    shape = [dim if isinstance(dim, int) else 1 for dim in entry.shape]
    feed = {entry.name: np.random.default_rng(2).standard_normal(shape).astype(np.float32)}
    for session in sessions:
        session.run(None, feed)
    return lambda index: sessions[index].run(None, feed)


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
    for _, concurrency, mode in product(range(setting.rounds), setting.concurrencies, MODES):
        until_ns = time.monotonic_ns() + int(setting.round_s * NS_PER_S)
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


def figures_of(_setting: Setting, points: Sequence[ConcurrencyPoint]) -> dict[str, float]:
    """One mode beside the other."""
    of = {(point.mode, point.concurrency): point for point in points}
    concurrencies = sorted({point.concurrency for point in points})
    most = concurrencies[-1]
    # Each round is compared with the same round of the other mode.
    gains = [
        np.median(of["concurrent", c].throughputs_rps / of["one_at_a_time", c].throughputs_rps)
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
        title="but each takes longer, and nobody can say how long",
        y="EXEC, ms",
        curves=durations,
        levels={},
        log_y=True,
    )
    return [[panel, longer]]


_IDLE = "what one EXEC leaves idle of this processor, more or less than of a V100"
_FAIR = (
    "the operating system shares cores in fair slices, so the tail grows as the number of EXECs at once; a GPU's "
    "hardware queues are not fair"
)
_SHARED = "a shared virtual machine's processor, not a dedicated GPU; p99, not p99.99"

PAPER = (
    Paper("throughput_gain_pct", 25.0, _IDLE, ("{key}",)),
    Paper("tail_growth_ratio", 100.0, _FAIR, ("{key}",)),
    Paper("isolated_p9999_over_median_pct", 0.03, _SHARED, ("isolated_p99_over_median_pct",)),
)

STUDY = Study(
    name="fig2",
    setting=Setting(),
    ask=lambda setting: measure(setting, processor(setting)),
    key="{mode}_c{concurrency}",
    figures=figures_of,
    tables={"": rows},
    paper=PAPER,
    title="Several EXECs at once answer hardly more requests than one at a time, and each takes longer.",
    panels=panels,
)
