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

What is simulated here was measured live for a device of 10 ms per request: `experiments.bench.overload`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from experiments.bounds import Cost, density_rate
from experiments.clockwork_paper.cases import poisson
from experiments.simulator import copies_of, run
from experiments.study.compared import POLICIES
from experiments.study.pictures import BLACK, COLOURS, colour_of
from experiments.study.report import picture
from experiments.study.study import Column, Study, StudyRecord, over
from modelzoo.profile import Noise, load_profile

#: By the name with which keys begin: the scheduler.
SERVERS = {
    **{name: POLICIES[name] for name in ("edf_mh", "clockwork", "infaas", "clipper")},
    "one_by_one": SchedulerConfig(policy="clipper", batching="none"),
}


TITLE = (
    "Asked for more than a GPU can do, a server that queues answers nobody in time. "
    "Clockwright refuses in time what would be late, and answers the rest (simulated)."
)


@dataclass(frozen=True, slots=True)
class _Look:
    """How a server is drawn."""

    label: str
    colour: str
    line: str
    marker: str
    #: The label stands beside the point of this load, moved by so many points.
    label_at: float
    label_offset: tuple[int, int]


_LOOKS = {
    "edf_mh": _Look("Clockwright, edf_mh", colour_of("edf_mh"), "-", "o", 1.5, (-75, 14)),
    "clockwork": _Look(
        "Clockwright, Clockwork's policy", colour_of("clockwork"), "-", "s", 1.5, (-20, -24)
    ),
    "infaas": _Look(
        "queues, batches of all that waits", colour_of("infaas"), "--", "D", 0.5, (8, 2)
    ),
    "clipper": _Look(
        "queues, batches as Clipper sets them", colour_of("clipper"), ":", "^", 0.6, (10, 5)
    ),
    "one_by_one": _Look("queues, no batches", COLOURS[-1], "-.", "v", 0.75, (10, 34)),
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


def draw(target: Path, setting: Setting, recorded: StudyRecord) -> None:
    """Goodput over offered load, a line for each way of serving."""
    points = [SimpleNamespace(**row) for row in recorded.rows]
    capacity = setting.capacity_rps
    with picture(target, 1, 1, size=(9, 5.2)) as grid:
        axes = grid[0, 0]
        most = max(point.load for point in points)
        for server, look in _LOOKS.items():
            mine = [point for point in points if point.server == server]
            if not mine:
                continue
            axes.plot(
                [point.load for point in mine],
                [point.goodput_rps for point in mine],
                color=look.colour, ls=look.line, lw=3, marker=look.marker, ms=7, clip_on=False,
            )  # fmt: skip
            at = min(mine, key=lambda point: abs(point.load - look.label_at))
            axes.annotate(
                look.label, (at.load, at.goodput_rps), look.label_offset,
                textcoords="offset points", fontsize=13, color=look.colour, fontweight="bold",
            )  # fmt: skip
        axes.plot([0, 1, most], [0, capacity, capacity], color=BLACK, lw=1.5, ls=":", zorder=0)
        axes.annotate(
            f"bound, {capacity:.0f} r/s: every batch the best one", (most, capacity), (0, 7),
            textcoords="offset points", ha="right", fontsize=13,
        )  # fmt: skip
        axes.axvspan(1, most, color="#f2f2f2", zorder=-1)
        axes.text(
            most, 0.03 * capacity, "overload: more is asked than the GPU can do ",
            ha="right", fontsize=13, color="#444444",
        )  # fmt: skip
        axes.set_xlim(0, most)
        axes.set_ylim(0, 1.15 * capacity)
        axes.tick_params(labelsize=13)
        axes.set_xlabel("requests offered, times what the GPU can do", fontsize=14)
        axes.set_ylabel(f"answers within {setting.slo_ms} ms, r/s", fontsize=14)
        words = TITLE.replace(". ", ".\n")
        axes.set_title(words, fontsize=14, loc="left", fontweight="bold", x=-0.1)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)


STUDY = Study(
    name="overload",
    setting=Setting(),
    ask=over(measure, server="servers", load="loads"),
    key="{server}_x{load:g}",
    figures=lambda setting, _: {"capacity_rps": setting.capacity_rps},
    title=TITLE,
    picture=draw,
)
