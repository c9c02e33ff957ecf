"""What overload does: answers in time per second as more and more is asked of one GPU.

Fifteen copies of ResNet50 share one simulated GPU (Table 1 of Clockwork's paper); requests come as a Poisson
process, each with an SLO of 100 ms, from a tenth to three times of what the GPU could answer if every batch
were its best one (`density_rate`). A late answer does not count.

Two lines are Clockwright's. The others stand for servers that queue; all run on the same device and in the
same simulator:

* `infaas`: a queue per model, whatever waits goes as one batch of up to 16, the oldest first. Triton's dynamic
  batcher works so too, but lets models share the GPU's time in slices, which is not modelled.
* `clipper`: the same queues, batches limited by AIMD against the SLO.
* `one_by_one`: the same queues, no batches.

What is simulated here was measured live for a device of 10 ms per request: `experiments.bench.serve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from experiments.policies.one_gpu import OneGpu
from experiments.simulator import run
from experiments.study.compared import POLICIES
from experiments.study.pictures import Curve, Panel, lines
from experiments.study.study import Column, Study, StudyRecord, over

#: By the name with which keys begin: the scheduler.
SERVERS = {
    **{name: POLICIES[name] for name in ("edf_mh", "clockwork", "infaas", "clipper")},
    "one_by_one": SchedulerConfig(policy="clipper", batching="none"),
}


TITLE = (
    "Asked for more than a GPU can do, a server that queues answers no request in time. "
    "Clockwright refuses in time what would be late, and answers the rest (simulated)."
)


_LABELS = {
    "edf_mh": "Clockwright,\nedf_mh",
    "clockwork": "Clockwright,\nClockwork's policy",
    "infaas": "queues, batches\nof all that waits",
    "clipper": "queues, batches\nas Clipper sets them",
    "one_by_one": "queues, no batches",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(OneGpu):
    """How much is simulated."""

    servers: tuple[str, ...] = tuple(SERVERS)
    num_models: int = 15
    #: Offered loads, as multiples of what the GPU could answer.
    loads: tuple[float, ...] = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
    warmup_ns: int = 3 * NS_PER_S
    measured_ns: int = 10 * NS_PER_S
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One way of serving under one load."""

    server: str
    load: float
    offered_rps: Annotated[float, Column(figure="offered_x{load:g}_rps")]
    goodput_rps: float
    #: From arrival to refusal; 0: nothing was refused. A late answer is a refusal.
    refusal_p50_ms: float
    refusal_p99_ms: float


def measure(setting: Setting, server: str, load: float) -> LoadPoint:
    """Simulate one way of serving under one load."""
    case = setting.case(setting.num_models, load, setting.seed, scheduler=SERVERS[server])
    total = run(case).summary.total(setting.warmup_ns, case.duration_ns)
    seconds = setting.measured_ns / NS_PER_S
    return LoadPoint(
        server=server,
        load=load,
        offered_rps=total.arrived / seconds,
        goodput_rps=total.answered / seconds,
        refusal_p50_ms=total.refusal_ns(50) / NS_PER_MS,
        refusal_p99_ms=total.refusal_ns(99) / NS_PER_MS,
    )


def panels(setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """Goodput over offered load, a line for each way of serving."""
    capacity = setting.capacity_rps
    served = lines(
        recorded.rows,
        lambda row: 100 * row["load"],
        "goodput_rps",
        by=lambda row: _LABELS[row["server"]],
    )
    most = max(max(curve.x) for curve in served)
    bound = Curve(
        x=[0, 100, most],
        y=[0, capacity, capacity],
        line=":",
        label="bound: every batch\nthe best one",
    )
    panel = Panel(
        title="Answers in time, by how the server decides",
        x="requests offered, % of what is possible",
        y=f"answers within {setting.slo_ms} ms, r/s",
        curves=[bound, *served],
        marks={100: "overload"},
    )
    return [[panel]]


STUDY = Study(
    name="overload",
    setting=Setting(),
    ask=over(measure, server="servers", load="loads"),
    key="{server}_x{load:g}",
    figures=lambda setting, _: {"capacity_rps": setting.capacity_rps},
    title=TITLE,
    panels=panels,
)
