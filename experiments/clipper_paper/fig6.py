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

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from experiments.clipper_paper.bench import Saturating, bench
from experiments.clipper_paper.models import held_out, prepared, write_folders
from experiments.results_file import RESULTS
from experiments.simulator import Case, Cluster, Network, copies_of, run
from experiments.study.report import Comparison, picture, write_points
from modelzoo.profile import ProfileRow
from traces.arrivals import ClosedLoop, Workload

#: Bits per second of the port that all remote replicas share; None: a network that costs nothing.
NETWORKS: dict[str, int | None] = {"free": None, "10gbps": 10_000_000_000, "1gbps": 1_000_000_000}
POLICIES = ("clipper", "clockwork")

_EXEC_NS = 26 * NS_PER_MS
# Far above any waiting time here, because the figure is about throughput.
_SLO_NS = 60 * NS_PER_S

#: Section 4.4.1: "a 3.95x throughput increase from 19,500 qps when using a single model container running
#: on a local GPU to 77,000 qps"; with 1 Gbps "the network becomes saturated when replicating to a second
#: remote machine": two remote replicas make 39,000 qps of 3,072 bytes, 0.96 Gbps.
PAPER = {
    "paper_clipper_10gbps_r1_rps": 19_500.0,
    "paper_clipper_10gbps_r4_rps": 77_000.0,
    "paper_clipper_10gbps_r4_speedup_ratio": 3.95,
}
_ONE_BATCH = (
    "one batch under way per container, so a replica idles while its next batch crosses the network; "
    "the paper's prototype has two under way (47 ms for batches of 26 ms in its logs)"
)
COMPARISONS = tuple(
    Comparison(
        key=f"{policy}_10gbps_{metric}",
        paper_key=f"paper_clipper_10gbps_{metric}",
        reason=_ONE_BATCH if policy == "clipper" else "",
    )
    for policy in POLICIES
    for metric in ("r1_rps", "r4_rps", "r4_speedup_ratio")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured and simulated."""

    #: Numbers of real replicas; any above the number of cores is left out.
    real_replicas: tuple[int, ...] = (1, 2)
    kind: str = "kernel_svm"
    slo_ms: float = 20.0
    batch_sizes: tuple[int, ...] = tuple(2**power for power in range(9))
    warmup_s: float = 3.0
    measured_s: float = 4.0
    #: A modelled device runs batches of this size only.
    batch: int = 512
    row_bytes: int = 32 * 32 * 3
    #: Numbers of modelled replicas.
    replicas: tuple[int, ...] = (1, 2, 3, 4, 8)
    simulated_warmup_ns: int = NS_PER_S // 2
    simulated_ns: int = 2 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPoint:
    """Throughput of one number of replicas."""

    #: `real`, or one of `POLICIES`.
    policy: str
    #: One of `NETWORKS`; empty for real replicas.
    network: str
    replicas: int
    throughput_rps: float
    #: Traffic of the rows that travel to remote replicas.
    port_gbps: float = 0.0


def measure_real(setting: Setting) -> list[ReplicaPoint]:
    """Measure containers on this machine."""
    images, _ = held_out()
    points = []
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_folders(directory, (setting.kind,))
        for replicas in setting.real_replicas:
            if replicas > cores:
                continue
            with (
                prepared(
                    directory, "native", setting.kind, setting.batch_sizes, count=replicas
                ) as ready,
                bench(ready, SchedulerConfig(policy="clipper"), images) as served,
            ):
                measured = served.run(
                    Saturating(outstanding=2 * setting.batch_sizes[-1] * replicas),
                    slo_ns=round(setting.slo_ms * NS_PER_MS),
                    warmup_s=setting.warmup_s,
                    measured_s=setting.measured_s,
                )
            points.append(
                ReplicaPoint(
                    policy="real",
                    network="",
                    replicas=replicas,
                    throughput_rps=measured.throughput_rps,
                )
            )
    return points


def simulate(setting: Setting, policy: str, network: str, replicas: int) -> ReplicaPoint:
    """Modelled replicas: one here, the others behind the port that they share."""
    bits_per_s = NETWORKS[network]
    local_rps = _simulated_rps(setting, policy, 1, None)
    port_rps = 0.0
    if replicas > 1:
        share = None if bits_per_s is None else bits_per_s // 8 // (replicas - 1)
        port_rps = _simulated_rps(setting, policy, replicas - 1, share)
    return ReplicaPoint(
        policy=policy,
        network=network,
        replicas=replicas,
        throughput_rps=local_rps + port_rps,
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


def figures_of(points: Sequence[ReplicaPoint]) -> dict[str, float]:
    """Name every number."""
    figures: dict[str, float] = {}
    alone = {(p.policy, p.network): p.throughput_rps for p in points if p.replicas == 1}
    for p in points:
        key = f"{p.policy}_{p.network}".rstrip("_")
        figures[f"{key}_r{p.replicas}_rps"] = p.throughput_rps
        if p.replicas > 1 and alone.get((p.policy, p.network)):
            speedup = p.throughput_rps / alone[p.policy, p.network]
            figures[f"{key}_r{p.replicas}_speedup_ratio"] = speedup
        if p.network and NETWORKS[p.network] and p.replicas > 1:
            figures[f"{key}_r{p.replicas}_port_gbps"] = p.port_gbps
    figures["num_cores"] = float(os.cpu_count() or 1)
    return figures | PAPER


def produce(setting: Setting, directory: Path = RESULTS) -> list[ReplicaPoint]:
    """Measure, simulate and write `clipper_fig6.json`, `.csv` and `.png`."""
    points = measure_real(setting)
    points += [
        simulate(setting, policy, network, replicas)
        for policy in POLICIES
        for network in NETWORKS
        for replicas in setting.replicas
    ]
    figures = figures_of(points)
    for p in points:
        print(f"{p.policy:>9} {p.network:>6} x{p.replicas}: {p.throughput_rps:8.0f} r/s")
    draw(points, directory / "clipper_fig6.png")
    write_points(
        "clipper_fig6",
        figures,
        COMPARISONS,
        points,
        setting,
        directory=directory,
        seeds=[0],
    )
    return points


def draw(points: Sequence[ReplicaPoint], target: Path) -> None:
    """Real ones at the left, modelled ones at the right, with the line of perfect scaling."""
    with picture(target, 1, 2, size=(9, 3.6)) as grid:
        left, right = grid[0]
        for axes, shown in (
            (left, [p for p in points if p.policy == "real"]),
            (right, [p for p in points if p.policy != "real"]),
        ):
            for policy, network in dict.fromkeys((p.policy, p.network) for p in shown):
                mine = [p for p in shown if (p.policy, p.network) == (policy, network)]
                axes.plot(
                    [p.replicas for p in mine],
                    [p.throughput_rps for p in mine],
                    marker="o" if policy != "clockwork" else "^",
                    ls="-" if policy != "clockwork" else "--",
                    color=f"C{list(NETWORKS).index(network)}" if network else "C3",
                    label=f"{policy}, {network}" if network else "container processes",
                )
            counts = sorted({p.replicas for p in shown})
            first = max((p.throughput_rps for p in shown if p.replicas == 1), default=0.0)
            axes.plot(counts, [first * count for count in counts], color="black", ls=":", lw=1)
            axes.set_xticks(counts)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("replicas")
            axes.legend(fontsize="x-small")
        left.set_ylabel("throughput, r/s")
        left.set_title(f"real, {os.cpu_count()} cores", fontsize="medium")
        right.set_title("modelled GPUs", fontsize="medium")


def main() -> None:
    """Produce the figure."""
    argparse.ArgumentParser(description="Figure 6 of Clipper's paper.").parse_args()
    produce(Setting())


if __name__ == "__main__":
    main()
