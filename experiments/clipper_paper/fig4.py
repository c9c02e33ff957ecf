"""Clipper's Figure 4: three ways to set the batch size of a container, at an SLO of 20 ms.

`none` (one row at a time), `aimd` and `quantile` (`controller.core.policies.batching`), the `clipper` policy of the
production scheduler on real devices: native scikit-learn in a container process, and ONNX on the CPU
engine. More requests wait than any batch takes, as in the paper, so a *batch's* latency is what the SLO is
about, from sending to the result. The largest batch has 1,024 rows; models that run it well inside the SLO
end there with either strategy, and what limits them is the path. There is no gRPC between
(`clipper_bench`): what the path carries without a model is the row `no_op`.

The strategies take turns on one container, each from a batch size of one; the warm-up is theirs to adapt.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clockwright.units import NS_PER_MS
from controller.core import SchedulerConfig
from experiments.clipper_paper.bench import Measured, Saturating, bench
from experiments.clipper_paper.models import FORMS, KINDS, held_out, prepared, write_folders
from experiments.results_file import RESULTS
from experiments.study.report import Comparison, picture, write_points

STRATEGIES = ("none", "aimd", "quantile")

#: Section 4.3: "achieving up to a 26x throughput increase in the case of the Scikit-Learn linear SVM";
#: "the two batching strategies perform nearly identically".
PAPER = {
    "paper_native_linear_svm_aimd_gain_ratio": 26.0,
    "paper_native_aimd_over_quantile_ratio": 1.0,
}
COMPARISONS = (
    Comparison(
        key="native_linear_svm_aimd_gain_ratio",
        paper_key="paper_native_linear_svm_aimd_gain_ratio",
        reason=(
            "a ratio of two costs: the container's fixed one per batch, and ours per request in "
            "Python, which is what batches cannot share and the paper's server in Rust hardly has; "
            "compare with the row no_op"
        ),
    ),
    Comparison(
        key="native_aimd_over_quantile_ratio",
        paper_key="paper_native_aimd_over_quantile_ratio",
        reason="geometric mean over the models; see the table for which of them differ",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured."""

    kinds: tuple[str, ...] = KINDS
    forms: tuple[str, ...] = FORMS
    slo_ms: float = 20.0
    batch_sizes: tuple[int, ...] = tuple(2**power for power in range(11))
    #: Requests that always wait: twice the largest batch, so that the next batch is full when one ends.
    outstanding: int = 2048
    #: AIMD adds two rows per batch: five hundred batches to its largest.
    warmup_s: float = 5.0
    measured_s: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyPoint:
    """One strategy on one model."""

    form: str
    kind: str
    strategy: str
    throughput_rps: float
    mean_batch: float
    batch_p50_ms: float
    batch_p99_ms: float
    #: Share of the batches that took longer than the SLO, in percent.
    late_pct: float


def measure(setting: Setting) -> list[StrategyPoint]:
    """Measure every strategy on every model."""
    images, _ = held_out()
    points = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_folders(directory, setting.kinds)
        for form in setting.forms:
            for kind in setting.kinds:
                with prepared(directory, form, kind, setting.batch_sizes) as ready:
                    for strategy in STRATEGIES:
                        config = SchedulerConfig(policy="clipper", batching=strategy)
                        with bench(ready, config, images) as served:
                            measured = served.run(
                                Saturating(outstanding=setting.outstanding),
                                slo_ns=round(setting.slo_ms * NS_PER_MS),
                                warmup_s=setting.warmup_s,
                                measured_s=setting.measured_s,
                            )
                        points.append(_point(setting, form, kind, strategy, measured))
    return points


def _point(
    setting: Setting, form: str, kind: str, strategy: str, measured: Measured
) -> StrategyPoint:
    return StrategyPoint(
        form=form,
        kind=kind,
        strategy=strategy,
        throughput_rps=measured.throughput_rps,
        mean_batch=measured.mean_batch,
        batch_p50_ms=measured.batch_ms(50),
        batch_p99_ms=measured.batch_ms(99),
        late_pct=measured.batches_late_pct(round(setting.slo_ms * NS_PER_MS)),
    )


def figures_of(points: Sequence[StrategyPoint]) -> dict[str, float]:
    """Name every number."""
    figures: dict[str, float] = {}
    rps = {(p.form, p.kind, p.strategy): p.throughput_rps for p in points}
    for point in points:
        key = f"{point.form}_{point.kind}_{point.strategy}"
        figures[f"{key}_rps"] = point.throughput_rps
        figures[f"{key}_mean_batch"] = point.mean_batch
        figures[f"{key}_batch_p99_ms"] = point.batch_p99_ms
        figures[f"{key}_batches_late_pct"] = point.late_pct
    for form in dict.fromkeys(p.form for p in points):
        ratio, number = 1.0, 0
        for kind in dict.fromkeys(p.kind for p in points):
            none = rps[form, kind, "none"]
            if none:  # nothing came back in a very short run
                for strategy in STRATEGIES[1:]:
                    gain = rps[form, kind, strategy] / none
                    figures[f"{form}_{kind}_{strategy}_gain_ratio"] = gain
            if rps[form, kind, "quantile"]:
                ratio *= rps[form, kind, "aimd"] / rps[form, kind, "quantile"]
                number += 1
        if number:
            figures[f"{form}_aimd_over_quantile_ratio"] = ratio ** (1 / number)
    return figures | PAPER


def produce(setting: Setting, directory: Path = RESULTS) -> list[StrategyPoint]:
    """Measure and write `clipper_fig4.json`, `.csv` and `.png`."""
    points = measure(setting)
    figures = figures_of(points)
    for p in points:
        print(
            f"{p.form:>6} {p.kind:<20} {p.strategy:<9} {p.throughput_rps:8.0f} r/s, mean batch "
            f"{p.mean_batch:6.1f}, batch p99 {p.batch_p99_ms:6.1f} ms, {p.late_pct:4.1f} % late"
        )
    draw(points, setting, directory / "clipper_fig4.png")
    write_points(
        "clipper_fig4",
        figures,
        COMPARISONS,
        points,
        setting,
        directory=directory,
    )
    return points


def draw(points: Sequence[StrategyPoint], setting: Setting, target: Path) -> None:
    """Throughput above, P99 of batches below; a group of bars per model."""
    forms = list(dict.fromkeys(point.form for point in points))
    with picture(target, 2, len(forms), size=(5 * len(forms), 5), share_x=False) as grid:
        for column, form in enumerate(forms):
            kinds = list(dict.fromkeys(p.kind for p in points if p.form == form))
            for number, strategy in enumerate(STRATEGIES):
                mine = [p for p in points if (p.form, p.strategy) == (form, strategy)]
                places = [index + 0.27 * (number - 1) for index in range(len(mine))]
                heights = [p.throughput_rps for p in mine]
                grid[0][column].bar(places, heights, width=0.25, label=strategy)
                grid[1][column].bar(places, [p.batch_p99_ms for p in mine], width=0.25)
            for row in (0, 1):
                names = [kind.replace("_", "\n") for kind in kinds]
                grid[row][column].set_xticks(range(len(kinds)), names, fontsize="x-small")
            grid[0][column].set_yscale("log")
            grid[0][column].set_title(form, fontsize="medium")
            grid[1][column].axhline(setting.slo_ms, color="black", ls=":", lw=1)
        grid[0][0].set_ylabel("throughput, r/s")
        grid[1][0].set_ylabel("batch P99, ms")
        grid[1][0].legend(
            *grid[0][0].get_legend_handles_labels(), fontsize="x-small", title="batching"
        )


def main() -> None:
    """Produce the figure."""
    argparse.ArgumentParser(description="Figure 4 of Clipper's paper.").parse_args()
    produce(Setting())


if __name__ == "__main__":
    main()
