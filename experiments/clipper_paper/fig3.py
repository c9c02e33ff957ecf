"""Clipper's Figure 3: how long a batch takes, over its size, by kind of model.

Each kind twice: native scikit-learn in a container process, and exported to ONNX on the CPU engine. A
duration is that of the worker's EXEC step: with the way to the container process and back, without the
copies of inputs and outputs, and without gRPC. No-op is what the way itself costs.

`max_batch_slo20` is the paper's maximum batch size under its SLO: where the P99 crosses 20 ms, between
the largest size within it and the next, linearly. For kinds whose P99 is within 20 ms at the largest size
measured, it is where the line through the medians meets 20 ms: beyond what was measured, as the table says
(`extrapolated`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from clockwright.units import NS_PER_MS
from experiments.clipper_paper.bench import answer, exec_ns
from experiments.clipper_paper.models import (
    FORMS,
    KINDS,
    held_out,
    labels_of,
    prepared,
    write_folders,
)
from experiments.results_file import RESULTS, write_results
from experiments.study.report import Comparison, compare, picture, show, write_csv

SLO_MS = 20.0

#: Section 4.3: "the maximum batch size that can be executed within a 20ms latency SLO differs by 241x
#: between the linear SVM [...] and the kernel SVM"; "the linear SVM can achieve throughput of nearly
#: 30,000 qps while the kernel SVM is limited to 200 qps under this SLO"; "a stable linear relationship".
PAPER = {
    "paper_max_batch_linear_over_kernel_svm_ratio": 241.0,
    "paper_linear_svm_rps_slo20": 30_000.0,
    "paper_kernel_svm_rps_slo20": 200.0,
}
_SMALL = (
    "digits of 64 values and 1,165 to learn from, where the paper's MNIST has 784 and up to 60,000: "
    "a row costs far less here, a kernel SVM's most of all"
)
COMPARISONS = (
    Comparison(
        key="native_max_batch_linear_over_kernel_svm_ratio",
        paper_key="paper_max_batch_linear_over_kernel_svm_ratio",
        reason=_SMALL,
    ),
    Comparison(
        key="native_linear_svm_rps_slo20", paper_key="paper_linear_svm_rps_slo20", reason=_SMALL
    ),
    Comparison(
        key="native_kernel_svm_rps_slo20", paper_key="paper_kernel_svm_rps_slo20", reason=_SMALL
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured."""

    kinds: tuple[str, ...] = KINDS
    batch_sizes: tuple[int, ...] = tuple(2**power for power in range(13))
    #: Runs of each batch size; fewer, but at least 3, when `budget_s` ends first.
    runs: int = 200
    budget_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class KindProfile:
    """One kind in one form."""

    form: str
    kind: str
    batch_sizes: tuple[int, ...]
    p50_ms: tuple[float, ...]
    p99_ms: tuple[float, ...]
    num_runs: tuple[int, ...]
    #: Share of the held-out digits that the model reads right.
    accuracy: float

    def line(self) -> tuple[float, float]:
        """Intercept and slope of the medians, ms and ms per row; least squares of the relative error."""
        return _line(self.batch_sizes, self.p50_ms)

    @property
    def r_squared(self) -> float:
        """Coefficient of determination of a line through the medians."""
        intercept, slope = np.polynomial.polynomial.polyfit(self.batch_sizes, self.p50_ms, 1)
        medians = np.array(self.p50_ms)
        error = medians - (intercept + slope * np.array(self.batch_sizes))
        return float(1 - (error**2).sum() / ((medians - medians.mean()) ** 2).sum())

    @property
    def max_batch(self) -> float:
        """Batch size at which the P99 reaches the SLO."""
        within = [i for i, p99_ms in enumerate(self.p99_ms) if p99_ms <= SLO_MS]
        if not within:
            return 1.0
        if self.extrapolated:
            intercept, slope = self.line()
            return max((SLO_MS - intercept) / slope, float(self.batch_sizes[-1]))
        last = within[-1]
        return float(
            np.interp(
                SLO_MS, self.p99_ms[last : last + 2], np.array(self.batch_sizes[last : last + 2])
            )
        )

    @property
    def extrapolated(self) -> bool:
        """Whether `max_batch` is beyond what was measured."""
        return self.p99_ms[-1] <= SLO_MS


def _line(sizes: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    x, y = np.array(sizes, float), np.array(values)
    # Relative errors, because sizes span three orders of magnitude and small batches would not count.
    intercept, slope = np.polynomial.polynomial.polyfit(x, y, 1, w=1 / y)
    return float(intercept), max(float(slope), 1e-9)


def measure(setting: Setting) -> list[KindProfile]:
    """Measure every kind in both forms."""
    images, labels = held_out()
    profiles = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_folders(directory, setting.kinds)
        number = max(size for size in setting.batch_sizes if size <= len(images))
        for kind in setting.kinds:
            for form in FORMS:
                with prepared(directory, form, kind, setting.batch_sizes) as (ready,):
                    samples = [
                        exec_ns(ready, size, images, runs=setting.runs, budget_s=setting.budget_s)
                        / NS_PER_MS
                        for size in setting.batch_sizes
                    ]
                    found = labels_of(answer(ready, images[:number]), ready.model)
                profiles.append(
                    KindProfile(
                        form=form,
                        kind=kind,
                        batch_sizes=setting.batch_sizes,
                        p50_ms=tuple(float(np.percentile(each, 50)) for each in samples),
                        p99_ms=tuple(float(np.percentile(each, 99)) for each in samples),
                        num_runs=tuple(len(each) for each in samples),
                        accuracy=float((found == labels[:number]).mean()),
                    )
                )
    return profiles


def figures_of(profiles: Sequence[KindProfile]) -> dict[str, float]:
    """Name every number."""
    figures: dict[str, float] = {}
    by_key = {(profile.form, profile.kind): profile for profile in profiles}
    for (form, kind), profile in by_key.items():
        key = f"{form}_{kind}"
        intercept, slope = profile.line()
        figures[f"{key}_max_batch_slo20"] = profile.max_batch
        figures[f"{key}_rps_slo20"] = profile.max_batch / (SLO_MS / 1e3)
        figures[f"{key}_fixed_us"] = intercept * 1e3
        figures[f"{key}_per_row_us"] = slope * 1e3
        figures[f"{key}_linear_r2"] = profile.r_squared
        if kind != "no_op":
            figures[f"{key}_accuracy"] = profile.accuracy
        for size, p50_ms in zip(profile.batch_sizes, profile.p50_ms, strict=True):
            figures[f"{key}_b{size}_p50_ms"] = p50_ms
    for form in FORMS:
        if (form, "linear_svm") in by_key and (form, "kernel_svm") in by_key:
            figures[f"{form}_max_batch_linear_over_kernel_svm_ratio"] = (
                by_key[form, "linear_svm"].max_batch / by_key[form, "kernel_svm"].max_batch
            )
    return figures | PAPER


def produce(setting: Setting, directory: Path = RESULTS) -> list[KindProfile]:
    """Measure and write `clipper_fig3.json`, `.csv` and `.png`."""
    profiles = measure(setting)
    figures = figures_of(profiles)
    for profile in profiles:
        beyond = " (extrapolated)" if profile.extrapolated else ""
        print(
            f"{profile.form:>6} {profile.kind:<20} batch 1 {profile.p50_ms[0]:8.3f} ms, "
            f"{profile.batch_sizes[-1]} {profile.p50_ms[-1]:8.3f} ms; within 20 ms "
            f"{profile.max_batch:9.0f} rows{beyond}, r2 {profile.r_squared:.3f}"
        )
    table = compare(figures, COMPARISONS)
    show(table)
    write_csv(
        directory / "clipper_fig3.csv",
        ["form", "kind", "batch_size", "p50_ms", "p99_ms", "runs", "extrapolated"],
        [
            (p.form, p.kind, size, p50_ms, p99_ms, runs, int(p.extrapolated))
            for p in profiles
            for size, p50_ms, p99_ms, runs in zip(
                p.batch_sizes, p.p50_ms, p.p99_ms, p.num_runs, strict=True
            )
        ],
    )
    draw(profiles, directory / "clipper_fig3.png")
    write_results(
        "clipper_fig3",
        figures,
        command="python -m experiments clipper_fig3",
        extra={"comparison": table, "setting": asdict(setting)},
        directory=directory,
    )
    return profiles


def draw(profiles: Sequence[KindProfile], target: Path) -> None:
    """Native at the left, ONNX at the right: median as a line, up to the P99 as a shade."""
    with picture(target, 1, len(FORMS), size=(10, 4)) as grid:
        for axes, form in zip(grid[0], FORMS, strict=True):
            for profile in profiles:
                if profile.form != form:
                    continue
                colour = f"C{KINDS.index(profile.kind)}"
                axes.plot(
                    profile.batch_sizes,
                    profile.p50_ms,
                    marker=".",
                    color=colour,
                    label=profile.kind.replace("_", " "),
                )
                axes.fill_between(
                    profile.batch_sizes, profile.p50_ms, profile.p99_ms, color=colour, alpha=0.2
                )
            axes.axhline(SLO_MS, color="black", ls=":", lw=1)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("batch size, rows")
            axes.set_title(
                "native, container process" if form == "native" else "ONNX, CPU engine",
                fontsize="medium",
            )
        grid[0][0].set_ylabel("EXEC, ms: median to P99")
        grid[0][0].legend(fontsize="x-small")


def main() -> None:
    """Produce the figure."""
    argparse.ArgumentParser(description="Figure 3 of Clipper's paper.").parse_args()
    produce(Setting())


if __name__ == "__main__":
    main()
