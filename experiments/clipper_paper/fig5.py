"""Clipper's Figure 5: holding batches back that are not full, over the load that is offered.

Requests come by a Poisson process at shares of what the container does when more waits than any batch
takes. A batch that is not full waits until its oldest request has waited for the delay; batch sizes are
AIMD's, at an SLO of 20 ms. Three containers: linear SVM and random forest native, whose batches have a
fixed cost, and the linear SVM as ONNX, whose batches have next to none.

The container sends its next batch as soon as the last is back, so under load batches grow without any
delay; what a delay could add is measured here. No gRPC (`clipper_paper.bench`): the thread that schedules also
offers the load, and when more comes than it can take in, less is served than before. So a delay's gain is told
by the most that is served at any load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

from clockwright.units import NS_PER_MS
from controller.core import SchedulerConfig
from experiments.clipper_paper.bench import Bench, Measured, Serving, saturate
from experiments.clipper_paper.models import prepared
from experiments.study.pictures import Panel, Value, lines, unlabelled
from experiments.study.study import ONLY_RECORD, ONLY_TABLE, Column, Paper, Study, StudyRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Serving):
    """How much is measured."""

    containers: tuple[tuple[str, str], ...] = (
        ("native", "linear_svm"),
        ("native", "random_forest"),
        ("onnx", "linear_svm"),
    )
    delays_ms: tuple[int, ...] = (0, 2, 5, 10)
    #: Shares of the saturated throughput. Ascending, because requests that one load leaves waiting are
    #: served under the next.
    loads: tuple[float, ...] = (0.2, 0.5, 0.8, 1.2)
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
    delay_ms: int
    load: Annotated[float, ONLY_TABLE]
    #: For the keys.
    load_pct: Annotated[int, ONLY_RECORD]
    offered_rps: Annotated[float, ONLY_TABLE]
    throughput_rps: Annotated[float, Column(figure="{key}_rps")]
    mean_batch: float
    p50_ms: Annotated[float, ONLY_TABLE]
    p99_ms: float


def measure(setting: Setting) -> Iterator[DelayPoint]:
    """Measure every delay at every load; delays take turns."""
    for form, kind in setting.containers:
        runs: dict[tuple[float, int], Measured] = {}
        with prepared(form, kind, setting.batch_sizes) as ready:
            adapted = replace(setting, warmup_s=setting.adapt_s)
            saturated = saturate(adapted, ready, SchedulerConfig(policy="clipper"))
            # A container that answered nothing in a very short run is still offered a load.
            rates = {load: max(load * saturated.throughput_rps, 10.0) for load in setting.loads}
            adapting = replace(setting, warmup_s=0, measured_s=setting.adapt_s)
            for number, delay_ms in product(range(setting.rounds), setting.delays_ms):
                config = SchedulerConfig(policy="clipper", batch_delay_ns=delay_ms * NS_PER_MS)
                seed = setting.seed + number
                with closing(Bench(ready, config)) as served:
                    served.run(adapting, outstanding=setting.outstanding)
                    for load, rate_rps in rates.items():
                        runs.setdefault((load, delay_ms), Measured())
                        runs[load, delay_ms] += served.run(setting, rate_rps=rate_rps, seed=seed)
        for load, delay_ms in product(setting.loads, setting.delays_ms):
            whole = runs[load, delay_ms]
            yield DelayPoint(
                form=form,
                kind=kind,
                delay_ms=delay_ms,
                load=load,
                load_pct=round(100 * load),
                offered_rps=rates[load],
                throughput_rps=whole.throughput_rps,
                mean_batch=whole.mean_batch,
                p50_ms=whole.latency_ms(50),
                p99_ms=whole.latency_ms(99),
            )


def gains(_setting: Setting, points: Sequence[DelayPoint]) -> dict[str, float]:
    """The most that is served with a delay, at any load, compared with the most without."""
    most: dict[tuple[str, str, int], float] = {}
    for p in points:
        container = (p.form, p.kind, p.delay_ms)
        most[container] = max(most.get(container, 0.0), p.throughput_rps)
    return {
        f"{form}_{kind}_delay{delay_ms}_gain_ratio": rps / undelayed
        for (form, kind, delay_ms), rps in most.items()
        if delay_ms and (undelayed := most.get((form, kind, 0)))
    }


def panels(_setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """What is served and batch sizes over the load; a column per container, a line per delay."""
    containers = list(dict.fromkeys((row["form"], row["kind"]) for row in recorded.rows))

    def panel(form: str, kind: str, value: Value, **others: Any) -> Panel:  # noqa: ANN401
        mine = [row for row in recorded.rows if (row["form"], row["kind"]) == (form, kind)]
        curves = lines(
            mine, lambda row: 100 * row["load"], value, by=lambda row: f"delay {row['delay_ms']} ms"
        )
        # Labels of the row are read at its end.
        shown = curves if (form, kind) == containers[-1] else unlabelled(curves)
        seen = f"{kind.replace('_', ' ')}, {form}: {others.pop('title')}"
        return Panel(title=seen, x="offered load, % of the most", curves=shown, **others)

    def served_pct(row: Mapping[str, Any]) -> float:
        return 100 * float(row["throughput_rps"]) / float(row["offered_rps"])

    return [
        [
            panel(form, kind, served_pct, title="what is served", y="served, % of the load")
            for form, kind in containers
        ],
        [
            panel(
                form, kind, "mean_batch", title="batches grow by themselves", y="batch size, rows",
                log_y=True,
            )
            for form, kind in containers
        ],
    ]  # fmt: skip


_LARGE_ANYWAY = (
    "a batch leaves with all that came while the last one ran, so batches are large without a delay when "
    "requests wait; the log of the paper's run has batches of 5.7 rows without one, and its gain ends at the "
    "load that was offered"
)

#: Section 4.3.2: "a 2ms batch delay provides a 3.3x improvement in throughput" for the Scikit-Learn SVM;
#: "Delayed batching provides no increase in throughput for the Spark SVM because Spark is already
#: relatively efficient at processing small batch sizes".
PAPER = (
    Paper("native_linear_svm_delay2_gain_ratio", 3.3, _LARGE_ANYWAY, ("{key}",)),
    Paper(
        "onnx_linear_svm_delay2_gain_ratio",
        1.0,
        "runs of seconds on a shared machine; see the other loads and delays",
        ("{key}",),
    ),
)

STUDY = Study(
    name="clipper_fig5",
    setting=Setting(),
    ask=measure,
    key="{form}_{kind}_load{load_pct}_delay{delay_ms}",
    figures=gains,
    paper=PAPER,
    title="To wait before a batch leaves adds little: under load batches are large without.",
    panels=panels,
)
