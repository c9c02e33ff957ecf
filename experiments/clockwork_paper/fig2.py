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

import argparse
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from typing_extensions import override

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.results_file import RESULTS, write_results
from experiments.study.report import Comparison, compare, show, write_csv
from modelzoo.build import write_model

MODES = ("one_at_a_time", "concurrent")

PAPER = {
    "paper_throughput_gain_pct": 25.0,
    "paper_tail_growth_ratio": 100.0,
    "paper_isolated_p9999_over_median_pct": 0.03,
}


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
    #: Throughput of each round.
    throughput_rps: tuple[float, ...]
    exec_ms: NDArray[np.float64]
    #: Times from asking to the end of the EXEC.
    latency_ms: NDArray[np.float64]

    @property
    def median_rps(self) -> float:
        """Median throughput of the rounds."""
        return float(np.median(self.throughput_rps))

    def exec_percentile_ms(self, percentile: float) -> float:
        """Percentile of the duration of all EXECs."""
        return float(np.percentile(self.exec_ms, percentile))


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
    return ConcurrencyPoint(
        mode=mode,
        concurrency=concurrency,
        throughput_rps=tuple(
            len(entries)
            * NS_PER_S
            / (max(e.end_ns for e in entries) - min(e.begin_ns for e in entries))
            for entries in rounds
        ),
        exec_ms=np.array([e.end_ns - e.begin_ns for e in done]) / NS_PER_MS,
        latency_ms=np.array([e.end_ns - e.asked_ns for e in done]) / NS_PER_MS,
    )


def figures_of(points: Sequence[ConcurrencyPoint]) -> dict[str, float]:
    """Name every number."""
    figures: dict[str, float] = {}
    by_key = {(point.mode, point.concurrency): point for point in points}
    for point in points:
        key = f"{point.mode}_c{point.concurrency}"
        figures[f"{key}_throughput_rps"] = point.median_rps
        figures[f"{key}_throughput_rps_min"] = min(point.throughput_rps)
        figures[f"{key}_throughput_rps_max"] = max(point.throughput_rps)
        for percentile, name in ((50, "p50"), (99, "p99"), (95, "p95")):
            figures[f"{key}_exec_{name}_ms"] = point.exec_percentile_ms(percentile)
        figures[f"{key}_latency_p99_ms"] = float(np.percentile(point.latency_ms, 99))
        figures[f"{key}_num_execs"] = float(len(point.exec_ms))
    concurrencies = sorted({point.concurrency for point in points})
    # Each round is compared with the same round of the other mode.
    figures["throughput_gain_pct"] = max(
        100
        * (
            float(
                np.median(
                    np.array(by_key["concurrent", c].throughput_rps)
                    / np.array(by_key["one_at_a_time", c].throughput_rps)
                )
            )
            - 1
        )
        for c in concurrencies
    )
    most = concurrencies[-1]
    figures["tail_growth_ratio"] = by_key["concurrent", most].exec_percentile_ms(99) / by_key[
        "one_at_a_time", most
    ].exec_percentile_ms(99)
    # A scheduler cannot predict the tail beyond the median; each mode has its own.
    for mode in MODES:
        point = by_key[mode, most]
        figures[f"{mode}_c{most}_exec_p99_over_median_pct"] = 100 * (
            point.exec_percentile_ms(99) / point.exec_percentile_ms(50) - 1
        )
    isolated = by_key["one_at_a_time", concurrencies[0]]
    figures["isolated_p99_over_median_pct"] = 100 * (
        isolated.exec_percentile_ms(99) / isolated.exec_percentile_ms(50) - 1
    )
    return figures | PAPER


COMPARISONS = (
    Comparison(
        key="throughput_gain_pct",
        paper_key="paper_throughput_gain_pct",
        reason="what one EXEC leaves idle of this processor, more or less than of a V100",
    ),
    Comparison(
        key="tail_growth_ratio",
        paper_key="paper_tail_growth_ratio",
        reason=(
            "the operating system shares cores in fair slices, so the tail grows as the number of "
            "EXECs at once; a GPU's hardware queues are not fair"
        ),
    ),
    Comparison(
        key="isolated_p99_over_median_pct",
        paper_key="paper_isolated_p9999_over_median_pct",
        reason="a shared virtual machine's processor, not a dedicated GPU; p99, not p99.99",
    ),
)


def produce(setting: Setting, directory: Path = RESULTS) -> list[ConcurrencyPoint]:
    """Measure and write `fig2.json`, `fig2.csv` and `fig2.png`."""
    points = measure(setting, Processor(setting))
    figures = figures_of(points)
    table = compare(figures, COMPARISONS)
    for point in points:
        print(
            f"{point.mode:>13} x{point.concurrency:<2} {point.median_rps:6.1f} r/s, EXEC p50 "
            f"{point.exec_percentile_ms(50):6.2f} ms, p99 {point.exec_percentile_ms(99):6.2f} ms"
        )
    show(table)
    write_csv(
        directory / "fig2.csv",
        ["mode", "concurrency", "percentile", "exec_ms", "latency_ms"],
        [
            (
                point.mode,
                point.concurrency,
                percentile,
                point.exec_percentile_ms(percentile),
                float(np.percentile(point.latency_ms, percentile)),
            )
            for point in points
            for percentile in (1, 10, 25, 50, 75, 90, 95, 99)
        ],
    )
    draw(points, directory / "fig2.png")
    write_results(
        "fig2",
        figures,
        command="python -m experiments fig2",
        extra={
            "comparison": table,
            "setting": {
                "architecture": setting.architecture,
                "rounds": setting.rounds,
                "round_s": setting.round_s,
            },
        },
        directory=directory,
    )
    return points


def draw(points: Sequence[ConcurrencyPoint], target: Path) -> None:
    """Throughput at the left, EXEC durations over concurrency at the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    panels: list[Any] = [left, right]
    for mode in MODES:
        mine = sorted((p for p in points if p.mode == mode), key=lambda p: p.concurrency)
        places = range(len(mine))
        spread = [
            [p.median_rps - min(p.throughput_rps) for p in mine],
            [max(p.throughput_rps) - p.median_rps for p in mine],
        ]
        name = mode.replace("_", " ")
        left.errorbar(places, [p.median_rps for p in mine], yerr=spread, marker="o", label=name)
        (line,) = right.plot(
            places, [p.exec_percentile_ms(50) for p in mine], marker="o", label=f"{name}, median"
        )
        right.plot(
            places,
            [p.exec_percentile_ms(99) for p in mine],
            marker="^",
            ls=":",
            color=line.get_color(),
            label=f"{name}, p99",
        )
    ticks = sorted({point.concurrency for point in points})
    for panel in panels:
        panel.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
        panel.set_xlabel("requests outstanding")
        panel.legend(fontsize="x-small")
    left.set_ylim(bottom=0)
    left.set_ylabel("throughput, r/s")
    right.set_yscale("log")
    right.set_ylabel("EXEC, ms")
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Produce the figure."""
    argparse.ArgumentParser(description="Figure 2 of the paper.").parse_args()
    produce(Setting())


if __name__ == "__main__":
    main()
