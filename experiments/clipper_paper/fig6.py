"""Clipper's Figure 6: throughput over the number of replicas.

*Real*: container processes of the kernel SVM on this machine, as many as it has cores. One core also
carries the scheduler, so the last replica is never a whole one; no cluster is claimed.

*Modelled*: the production scheduler and worker cores in the simulator, on devices that take 26 ms for a
batch of 512, as the logs of Clipper's prototype say of the paper's GPU (19,500 r/s). One replica is on the machine of
the scheduler, the others share its one network port: 10 Gbps, 1 Gbps, or one that costs nothing. A row
is 3,072 bytes, a 32 x 32 colour image, with which the paper's remark on 1 Gbps holds to the number. Requests
always wait, so local and remote replicas do not influence each other and are run apart.
`clipper` has one batch under way per container; `clockwork` sends the next before the last is back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Annotated

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from experiments.clipper_paper.bench import Serving, saturate
from experiments.clipper_paper.models import prepared
from experiments.simulator import Case, Cluster, Network, copies_of, run
from experiments.study.pictures import Curve, Panel, lines, of_paper, ticks
from experiments.study.study import ONLY_RECORD, ONLY_TABLE, Column, Paper, Study, StudyRecord
from modelzoo.profile import ProfileRow
from traces.arrivals import ClosedLoop, Workload

#: Bits per second of the port that all remote replicas share; None: a network that costs nothing.
NETWORKS: dict[str, int | None] = {"free": None, "10gbps": 10_000_000_000, "1gbps": 1_000_000_000}
POLICIES = ("clipper", "clockwork")

_EXEC_NS = 26 * NS_PER_MS
# Far above any waiting time here, because the figure is about throughput.
_SLO_NS = 60 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Serving):
    """How much is measured and simulated."""

    #: Numbers of real replicas; any above the number of cores is left out.
    real_replicas: tuple[int, ...] = (1, 2)
    kind: str = "kernel_svm"
    batch_sizes: tuple[int, ...] = tuple(2**power for power in range(9))
    warmup_s: float = 3.0
    measured_s: float = 4.0
    #: A modelled device runs batches of this size only.
    batch: int = 512
    row_bytes: int = 32 * 32 * 3
    #: Numbers of modelled replicas.
    replicas: tuple[int, ...] = (1, 2, 3, 4, 8)
    #: Until it is known how little a thin link carries, batches that are sent whole come too late.
    simulated_warmup_ns: int = 4 * NS_PER_S
    simulated_ns: int = 2 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPoint:
    """Throughput of one number of replicas."""

    #: `real`, or one of `POLICIES`.
    policy: str
    #: One of `NETWORKS`; empty for real replicas.
    network: str
    #: Both, for the keys.
    place: Annotated[str, ONLY_RECORD]
    replicas: int
    throughput_rps: Annotated[float, Column(figure="{key}_rps")]
    #: Traffic of the rows that travel to remote replicas.
    port_gbps: Annotated[float, ONLY_TABLE] = 0.0


def measure(setting: Setting) -> Iterator[ReplicaPoint]:
    """Measure containers on this machine, then simulate the others."""
    for replicas in setting.real_replicas:
        if replicas > (os.cpu_count() or 1):
            continue
        with prepared("native", setting.kind, setting.batch_sizes, count=replicas) as ready:
            measured = saturate(setting, ready, SchedulerConfig(policy="clipper"))
        yield ReplicaPoint(
            policy="real",
            network="",
            place="real",
            replicas=replicas,
            throughput_rps=measured.throughput_rps,
        )
    for policy, network, replicas in product(POLICIES, NETWORKS, setting.replicas):
        yield simulate(setting, policy, network, replicas)


def simulate(setting: Setting, policy: str, network: str, replicas: int) -> ReplicaPoint:
    """Modelled replicas: one here, the others behind the port that they share."""
    bits_per_s = NETWORKS[network]
    port_rps = 0.0
    if replicas > 1:
        share = None if bits_per_s is None else bits_per_s // 8 // (replicas - 1)
        port_rps = _simulated_rps(setting, policy, replicas - 1, share)
    return ReplicaPoint(
        policy=policy,
        network=network,
        place=f"{policy}_{network}",
        replicas=replicas,
        throughput_rps=_simulated_rps(setting, policy, 1, None) + port_rps,
        port_gbps=port_rps * setting.row_bytes * 8 / 1e9,
    )


@cache  # one replica alone is part of every count
def _simulated_rps(setting: Setting, policy: str, replicas: int, bytes_per_s: int | None) -> float:
    row = ProfileRow(
        name="gpu",
        weights_bytes=1,
        load_ns=NS_PER_MS,
        exec_ns={setting.batch: _EXEC_NS},
        input_bytes=setting.row_bytes,
        output_bytes=8,
    )
    models = copies_of(row, 1)
    end_ns = setting.simulated_warmup_ns + setting.simulated_ns
    # Four batches per replica: whatever is under way, the next one is full.
    loop = ClosedLoop(
        model=0, concurrency=4 * setting.batch * replicas, slo_ns=_SLO_NS, end_ns=end_ns
    )
    case = Case(
        workload=Workload(models=(models[0].model_id,), closed_loops=(loop,)),
        cluster=Cluster(models=models, num_workers=replicas),
        duration_ns=end_ns,
        network=Network(bytes_per_s=bytes_per_s),
        scheduler=SchedulerConfig(policy=policy),
    )
    bucket_ns = NS_PER_S // 20
    total = run(case, bucket_ns=bucket_ns).summary.total(setting.simulated_warmup_ns, end_ns)
    return total.answered / (setting.simulated_ns / NS_PER_S)


def scaling(_setting: Setting, points: Sequence[ReplicaPoint]) -> dict[str, float]:
    """What several replicas do compared with one, and what the port carries for them."""
    alone = {p.place: p.throughput_rps for p in points if p.replicas == 1}
    figures = {"num_cores": float(os.cpu_count() or 1)}
    for p in points:
        if p.replicas > 1 and alone.get(p.place):
            figures[f"{p.place}_r{p.replicas}_speedup_ratio"] = p.throughput_rps / alone[p.place]
        if p.replicas > 1 and NETWORKS.get(p.network):
            figures[f"{p.place}_r{p.replicas}_port_gbps"] = p.port_gbps
    return figures


def panels(_setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """Real ones at the left, modelled ones at the right, with the line of perfect scaling and the paper's points."""
    row = []
    for title, real in (
        ("Real containers share the cores of one machine", True),
        ("Modelled GPUs scale to what the network port carries", False),
    ):
        shown = [point for point in recorded.rows if (point["policy"] == "real") is real]
        counts = sorted({point["replicas"] for point in shown})
        first = max((p["throughput_rps"] for p in shown if p["replicas"] == 1), default=0.0)
        curves = lines(
            shown,
            "replicas",
            "throughput_rps",
            by=lambda p: f"{p['policy']} {p['network']}".replace("gbps", " Gbps").strip(),
        )
        perfect = [first * number for number in counts]
        curves.append(Curve(x=counts, y=perfect, label="perfect", line=":"))
        if not real:
            paper = [recorded.figures[f"paper_clipper_10gbps_r{number}_rps"] for number in (1, 4)]
            curves.append(of_paper([1, 4], paper, "x the paper,\n10 Gbps"))
        row.append(
            Panel(
                title=title,
                x="number of replicas",
                y="throughput, r/s",
                curves=curves,
                x_ticks=ticks(counts),
            )
        )
    return [row]


_ONE_BATCH = (
    "one batch under way per container, so a replica idles while its next batch crosses the network; "
    "the paper's prototype has two under way (47 ms for batches of 26 ms in its logs)"
)

#: Section 4.4.1: "a 3.95x throughput increase from 19,500 qps when using a single model container running
#: on a local GPU to 77,000 qps"; with 1 Gbps "the network becomes saturated when replicating to a second
#: remote machine": two remote replicas make 39,000 qps of 3,072 bytes, 0.96 Gbps.
PAPER = tuple(
    Paper(f"clipper_10gbps_{what}", number, _ONE_BATCH, ("{key}", f"clockwork_10gbps_{what}"))
    for what, number in (("r1_rps", 19_500.0), ("r4_rps", 77_000.0), ("r4_speedup_ratio", 3.95))
)

STUDY = Study(
    name="clipper_fig6",
    setting=Setting(),
    ask=measure,
    key="{place}_r{replicas}",
    figures=scaling,
    paper=PAPER,
    title="Replicas multiply the throughput until the cores, or the network, are full.",
    panels=panels,
)
