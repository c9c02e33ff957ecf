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

from dataclasses import dataclass, field, replace
from typing import Annotated

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from experiments.bounds import Cost, density_rate
from experiments.clockwork_paper.cases import poisson
from experiments.simulator import copies_of, run
from experiments.study.compared import POLICIES
from experiments.study.pictures import Curve, Panel, lines
from experiments.study.study import Column, Study, StudyRecord, over
from modelzoo.profile import Noise, load_profile

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
class Setting:
    """How much is simulated."""

    servers: tuple[str, ...] = tuple(SERVERS)
    architecture: str = "resnet50_v1b"
    num_models: int = 15
    slo_ms: int = 100
    #: Offered loads, as multiples of what the GPU could answer.
    loads: tuple[float, ...] = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
    warmup_ns: int = 3 * NS_PER_S
    measured_ns: int = 10 * NS_PER_S
    noise: Noise = field(default_factory=lambda: Noise(exec_sigma=0.003, load_sigma=0.003))
    seed: int = 1

    @property
    def capacity_rps(self) -> float:
        """Requests per second that the GPU could answer if every batch were the best one."""
        row = load_profile("table1").row_for(self.architecture)
        return density_rate([Cost(row.exec_ns)], slo_ns=self.slo_ms * NS_PER_MS)


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
    row = load_profile("table1").row_for(setting.architecture)
    end_ns = setting.warmup_ns + setting.measured_ns
    case = poisson(
        copies_of(row, setting.num_models),
        setting.seed,
        num_gpus=1,
        rate_rps=load * setting.capacity_rps,
        slo_ns=setting.slo_ms * NS_PER_MS,
        duration_ns=end_ns,
        noise=setting.noise,
    )
    total = run(replace(case, scheduler=SERVERS[server])).summary.total(setting.warmup_ns, end_ns)
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
