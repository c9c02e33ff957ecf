"""Clipper's Figure 4: three rules that set the batch size of a container, at an SLO of 20 ms.

`none` (one row at a time), `aimd` and `quantile` (`controller.core.policies.batching`), the `clipper` policy of the
production scheduler on real devices: native scikit-learn in a container process, and ONNX on the CPU
engine. More requests wait than any batch takes, as in the paper, so a *batch's* latency is what the SLO is
about, from sending to the result. The largest batch has 1,024 rows; models that run it well inside the SLO
end there with either strategy, and what limits them is the path. There is no gRPC between
(`clipper_paper.bench`): what the path carries without a model is the row `no_op`.

The strategies take turns on one container, each from a batch size of one; the warm-up is theirs to adapt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean
from typing import Annotated, Any

from controller.core import SchedulerConfig
from experiments.clipper_paper.bench import Serving, saturate
from experiments.clipper_paper.models import FORMS, KINDS, prepared
from experiments.study.pictures import Panel, lines
from experiments.study.study import ONLY_TABLE, Column, Paper, Study, StudyRecord

STRATEGIES = ("none", "aimd", "quantile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Serving):
    """How much is measured; AIMD adds two rows per batch, so its largest is its five hundredth."""

    kinds: tuple[str, ...] = KINDS
    forms: tuple[str, ...] = FORMS


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyPoint:
    """One strategy on one model."""

    form: str
    kind: str
    strategy: str
    throughput_rps: Annotated[float, Column(figure="{key}_rps")]
    mean_batch: float
    batch_p50_ms: Annotated[float, ONLY_TABLE]
    batch_p99_ms: float
    #: Share of the batches that took longer than the SLO, in percent.
    late_pct: Annotated[float, Column(figure="{key}_batches_late_pct")]


def measure(setting: Setting) -> Iterator[StrategyPoint]:
    """Measure every strategy on every model."""
    for form, kind in product(setting.forms, setting.kinds):
        with prepared(form, kind, setting.batch_sizes) as ready:
            for strategy in STRATEGIES:
                config = SchedulerConfig(policy="clipper", batching=strategy)
                measured = saturate(setting, ready, config)
                yield StrategyPoint(
                    form=form,
                    kind=kind,
                    strategy=strategy,
                    throughput_rps=measured.throughput_rps,
                    mean_batch=measured.mean_batch,
                    batch_p50_ms=measured.batch_ms(50),
                    batch_p99_ms=measured.batch_ms(99),
                    late_pct=measured.batches_late_pct(setting.slo_ns),
                )


def ratios(setting: Setting, points: Sequence[StrategyPoint]) -> dict[str, float]:
    """What the strategies gain over none, and over each other; what answered nothing in a very short run is left out."""
    rps = {(p.form, p.kind, p.strategy): p.throughput_rps for p in points}
    figures = {}
    for form in setting.forms:
        over = []
        for kind in setting.kinds:
            none, aimd, quantile = (rps[form, kind, strategy] for strategy in STRATEGIES)
            if none:
                figures[f"{form}_{kind}_aimd_gain_ratio"] = aimd / none
                figures[f"{form}_{kind}_quantile_gain_ratio"] = quantile / none
            over += [aimd / quantile] if quantile else []
        if all(over) and over:
            figures[f"{form}_aimd_over_quantile_ratio"] = geometric_mean(over)
    return figures


def panels(setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """Throughput above, P99 of batches below; three dots for each model."""
    kinds = list(dict.fromkeys(row["kind"] for row in recorded.rows))
    names = {float(at): kind.replace("_", "\n") for at, kind in enumerate(kinds)}
    labels = {"none": "no batches"}

    def panel(form: str, seen: str, column: str, y: str, **others: Any) -> Panel:  # noqa: ANN401
        curves = lines(
            (row for row in recorded.rows if row["form"] == form),
            lambda row: kinds.index(row["kind"]) + 0.2 * (STRATEGIES.index(row["strategy"]) - 1),
            column,
            by=lambda row: labels.get(row["strategy"], row["strategy"]),
            joined=False,
        )
        return Panel(
            title=f"{form}: {seen}", x="model", y=y, curves=curves, x_ticks=names, **others
        )

    forms = list(dict.fromkeys(row["form"] for row in recorded.rows))
    seen, slowest = "batches answer many times as much", "how long the slowest batches take"
    slo = {setting.slo_ms: "SLO"}
    return [
        [panel(form, seen, "throughput_rps", "throughput, r/s", log_y=True) for form in forms],
        [panel(form, slowest, "batch_p99_ms", "P99 of batches, ms", levels=slo) for form in forms],
    ]


_TWO_COSTS = (
    "a ratio of two costs: the container's fixed one per batch, and ours per request in Python, which is "
    "what batches cannot share and the paper's server in Rust hardly has; compare with the row no_op"
)

#: Section 4.3: "achieving up to a 26x throughput increase in the case of the Scikit-Learn linear SVM";
#: "the two batching strategies perform nearly identically".
PAPER = (
    Paper("native_linear_svm_aimd_gain_ratio", 26.0, _TWO_COSTS, ("{key}",)),
    Paper(
        "native_aimd_over_quantile_ratio",
        1.0,
        "geometric mean over the models; see the table for which of them differ",
        ("{key}",),
    ),
)

STUDY = Study(
    name="clipper_fig4",
    setting=Setting(),
    ask=measure,
    key="{form}_{kind}_{strategy}",
    figures=ratios,
    paper=PAPER,
    title="Batches answer many times as much as single requests, whichever rule finds their size.",
    panels=panels,
)
