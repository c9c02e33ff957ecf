"""Clipper's Figure 5: holding batches back that are not full, over the load that is offered.

Requests come by a Poisson process at shares of what the container does when more waits than any batch
takes. A batch that is not full waits until its oldest request has waited for the delay; batch sizes are
AIMD's, at an SLO of 20 ms. Three containers: linear SVM and random forest native, whose batches have a
fixed cost, and the linear SVM as ONNX, whose batches have next to none.

The container sends its next batch as soon as the last is back, so under load batches grow without any
delay; what a delay could add is measured here. No gRPC (`clipper_bench`): the thread that schedules also
offers the load, and when more comes than it can take in, less is served than before. So a delay's gain is told
by the most that is served at any load.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from clockwright.units import NS_PER_MS
from controller.core import SchedulerConfig
from experiments.clipper_paper.bench import Measured, Offered, Saturating, bench, together
from experiments.clipper_paper.models import held_out, prepared, write_folders
from experiments.results_file import RESULTS
from experiments.study.report import Comparison, picture, write_points

#: Section 4.3.2: "a 2ms batch delay provides a 3.3x improvement in throughput" for the Scikit-Learn SVM;
#: "Delayed batching provides no increase in throughput for the Spark SVM because Spark is already
#: relatively efficient at processing small batch sizes".
PAPER = {
    "paper_native_linear_svm_delay2_gain_ratio": 3.3,
    "paper_onnx_linear_svm_delay2_gain_ratio": 1.0,
}
COMPARISONS = (
    Comparison(
        key="native_linear_svm_delay2_gain_ratio",
        paper_key="paper_native_linear_svm_delay2_gain_ratio",
        reason=(
            "a batch leaves with all that came while the last one ran, so batches are large without "
            "a delay when requests wait; the log of the paper's run has batches of 5.7 rows without "
            "one, and its gain ends at the load that was offered"
        ),
    ),
    Comparison(
        key="onnx_linear_svm_delay2_gain_ratio",
        paper_key="paper_onnx_linear_svm_delay2_gain_ratio",
        reason="runs of seconds on a shared machine; see the other loads and delays",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured."""

    containers: tuple[tuple[str, str], ...] = (
        ("native", "linear_svm"),
        ("native", "random_forest"),
        ("onnx", "linear_svm"),
    )
    delays_ms: tuple[float, ...] = (0, 2, 5, 10)
    #: Shares of the saturated throughput. Ascending, because requests that one load leaves waiting are
    #: served under the next.
    loads: tuple[float, ...] = (0.2, 0.5, 0.8, 1.2)
    slo_ms: float = 20.0
    batch_sizes: tuple[int, ...] = tuple(2**power for power in range(11))
    outstanding: int = 2048
    #: How often every load is measured with every delay, in turns.
    rounds: int = 2
    #: Time under more requests than any batch takes, before anything is measured. AIMD begins with one
    #: row and adds two per batch, and the queue that builds up meanwhile belongs to no load.
    adapt_s: float = 5.0
    warmup_s: float = 0.5
    measured_s: float = 1.5
    seed: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayPoint:
    """One delay at one load."""

    form: str
    kind: str
    delay_ms: float
    load: float
    offered_rps: float
    throughput_rps: float
    mean_batch: float
    p50_ms: float
    p99_ms: float


def measure(setting: Setting) -> list[DelayPoint]:
    """Measure every delay at every load; delays take turns."""
    images, _ = held_out()
    points = []
    slo_ns = round(setting.slo_ms * NS_PER_MS)
    saturating = Saturating(outstanding=setting.outstanding)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_folders(directory, tuple(dict.fromkeys(kind for _, kind in setting.containers)))
        for form, kind in setting.containers:
            runs: dict[tuple[float, float], list[Measured]] = {}
            with prepared(directory, form, kind, setting.batch_sizes) as ready:
                with bench(ready, SchedulerConfig(policy="clipper"), images) as served:
                    saturated = served.run(
                        saturating,
                        slo_ns=slo_ns,
                        warmup_s=setting.adapt_s,
                        measured_s=setting.measured_s,
                    )
                # A container that answered nothing in a very short run is still offered a load.
                rates = {load: max(load * saturated.throughput_rps, 10.0) for load in setting.loads}
                for number, delay_ms in product(range(setting.rounds), setting.delays_ms):
                    config = SchedulerConfig(
                        policy="clipper", batch_delay_ns=round(delay_ms * NS_PER_MS)
                    )
                    with bench(ready, config, images) as served:
                        served.run(
                            saturating, slo_ns=slo_ns, warmup_s=0, measured_s=setting.adapt_s
                        )
                        for load, rate_rps in rates.items():
                            measured = served.run(
                                Offered(rate_rps=rate_rps, seed=setting.seed + number),
                                slo_ns=slo_ns,
                                warmup_s=setting.warmup_s,
                                measured_s=setting.measured_s,
                            )
                            runs.setdefault((load, delay_ms), []).append(measured)
            for load, delay_ms in product(setting.loads, setting.delays_ms):
                whole = together(runs[load, delay_ms])
                points.append(
                    DelayPoint(
                        form=form,
                        kind=kind,
                        delay_ms=delay_ms,
                        load=load,
                        offered_rps=rates[load],
                        throughput_rps=whole.throughput_rps,
                        mean_batch=whole.mean_batch,
                        p50_ms=whole.latency_ms(50),
                        p99_ms=whole.latency_ms(99),
                    )
                )
    return points


def figures_of(points: Sequence[DelayPoint]) -> dict[str, float]:
    """Name every number."""
    figures: dict[str, float] = {}
    most: dict[tuple[str, str, float], float] = {}
    for p in points:
        key = f"{p.form}_{p.kind}_load{100 * p.load:.0f}_delay{p.delay_ms:g}"
        figures[f"{key}_rps"] = p.throughput_rps
        figures[f"{key}_served_pct"] = 100 * p.throughput_rps / p.offered_rps
        figures[f"{key}_mean_batch"] = p.mean_batch
        figures[f"{key}_p99_ms"] = p.p99_ms
        container = (p.form, p.kind, p.delay_ms)
        most[container] = max(most.get(container, 0.0), p.throughput_rps)
    for (form, kind, delay_ms), rps in most.items():
        undelayed = most.get((form, kind, 0), 0.0)
        if delay_ms and undelayed:
            figures[f"{form}_{kind}_delay{delay_ms:g}_gain_ratio"] = rps / undelayed
    return figures | PAPER


def produce(setting: Setting, directory: Path = RESULTS) -> list[DelayPoint]:
    """Measure and write `clipper_fig5.json`, `.csv` and `.png`."""
    points = measure(setting)
    figures = figures_of(points)
    for p in points:
        print(
            f"{p.form:>6} {p.kind:<14} offered {p.offered_rps:8.0f} r/s, delay {p.delay_ms:4g} ms: "
            f"{p.throughput_rps:8.0f} r/s, mean batch {p.mean_batch:6.1f}, p99 {p.p99_ms:7.1f} ms"
        )
    draw(points, setting, directory / "clipper_fig5.png")
    write_points(
        "clipper_fig5",
        figures,
        COMPARISONS,
        points,
        setting,
        directory=directory,
        options=f"--seed {setting.seed}",
        seeds=[setting.seed],
    )
    return points


def draw(points: Sequence[DelayPoint], setting: Setting, target: Path) -> None:
    """Throughput, batch size and P99 over the load; a column per container, a line per delay."""
    rows: tuple[tuple[str, Callable[[DelayPoint], float]], ...] = (
        ("throughput, share of load", lambda p: p.throughput_rps / p.offered_rps),
        ("rows per batch", lambda p: p.mean_batch),
        ("P99, ms", lambda p: p.p99_ms),
    )
    columns = len(setting.containers)
    with picture(target, len(rows), columns, size=(3.6 * columns, 7), share_x=True) as grid:
        for column, (form, kind) in enumerate(setting.containers):
            grid[0][column].set_title(f"{kind.replace('_', ' ')}, {form}", fontsize="medium")
            for number, delay_ms in enumerate(setting.delays_ms):
                mine = [p for p in points if (p.form, p.kind, p.delay_ms) == (form, kind, delay_ms)]
                for row, (label, value) in enumerate(rows):
                    grid[row][column].plot(
                        [100 * p.load for p in mine],
                        [value(p) for p in mine],
                        marker=".",
                        color=f"C{number}",
                        label=f"{delay_ms:g} ms",
                    )
                    if column == 0:
                        grid[row][0].set_ylabel(label)
            grid[1][column].set_yscale("log")
            grid[2][column].set_yscale("log")
            grid[2][column].set_xlabel("offered load, % of saturated throughput")
        grid[0][0].legend(fontsize="x-small", title="delay", title_fontsize="x-small")


def main() -> None:
    """Produce the figure."""
    parser = argparse.ArgumentParser(description="Figure 5 of Clipper's paper.")
    parser.add_argument("--seed", type=int, default=Setting().seed)
    produce(Setting(seed=parser.parse_args().seed))


if __name__ == "__main__":
    main()
