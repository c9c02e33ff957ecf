"""Figure 2 on the card: one EXEC at a time against concurrent EXEC, and what the simulator makes of the former.

As on the processor (`experiments.clockwork_paper.fig2`), with captured kernels in place of sessions: each EXEC that
may run beside others has weights, kernels and a stream of its own. One at a time is predictable, so the
simulator is to foresee its goodput from a single client's EXEC; for concurrent EXEC it has no model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_S, ModelId
from experiments.clockwork_paper import fig2
from experiments.gpu.hardware import about, compiled_for, open_accelerator
from experiments.gpu.probe import ARCHITECTURE, BareKernel, bare_kernel
from experiments.simulator import Case, Cluster, HostedModel, Network
from experiments.study.bench import Findings, bench
from experiments.study.sides import simulated
from modelzoo.profile import ProfileRow
from traces.arrivals import ClosedLoop, Workload
from worker.config import default_cache_dir
from worker.devices.accelerator import Event, Stream
from worker.models.precision import Precision

_REHEARSAL_S = 0.5
_SIMULATED_NS = 2 * NS_PER_S
# Nobody is refused: the figure is about a device, not about a scheduler.
_SLO_NS = 100 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured."""

    device: str = "cuda:0"
    #: How long, all rounds together.
    seconds: float = 16.0
    architecture: str = ARCHITECTURE
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    rounds: int = 2

    def __post_init__(self) -> None:
        # Not a number is not more than 0, either.
        if not self.seconds > 0:
            raise ConfigError(f"--seconds: found {self.seconds:g}, expected more than 0")


class Card:
    """Captured kernels of one network, with a stream of its own for each EXEC that may run at the same time."""

    def __init__(self, setting: Setting) -> None:
        """Compile the network, capture its kernels for batch size 1, and run each once."""
        self._executors: list[tuple[BareKernel, Stream, Event]] = []
        folder, compiled = compiled_for(
            setting.architecture, Precision.FLOAT32, default_cache_dir()
        )
        for _ in range(max(setting.concurrencies)):
            # Kernels captured on one accelerator share the memory of their intermediates, so each gets its own.
            accelerator = open_accelerator(setting.device)
            kernel = bare_kernel(accelerator, folder, compiled, 1)
            self._executors.append((kernel, accelerator.stream(), accelerator.event()))
        for index in range(len(self._executors)):
            self.run(index)

    @property
    def joined(self) -> bool:
        """Whether convolutions and their ReLUs are one kernel in every executor."""
        return all(kernel.joined for kernel, _, _ in self._executors)

    def run(self, index: int) -> None:
        """Run one EXEC beside those of other indices; returns at its end."""
        kernel, stream, done = self._executors[index]
        kernel.replay(stream)
        stream.record(done)
        done.synchronize()


def predicted_rps(alone: Sequence[fig2.Exec], concurrency: int) -> float:
    """Goodput that the simulator predicts for closed-loop clients before one executor.

    Args:
        alone: a single client's EXECs, one after the other.
        concurrency: number of clients.
    """
    exec_ns = round(fmean(entry.end_ns - entry.begin_ns for entry in alone))
    gaps_ns = [after.begin_ns - before.end_ns for before, after in pairwise(alone)]
    row = ProfileRow(name="alone", weights_bytes=1, load_ns=1, exec_ns={1: exec_ns})
    loop = ClosedLoop(model=0, concurrency=concurrency, slo_ns=_SLO_NS, end_ns=_SIMULATED_NS)
    case = Case(
        workload=Workload(models=(row.name,), closed_loops=(loop,)),
        cluster=Cluster(
            models=(HostedModel(ModelId(row.name), row),),
            start_delay_ns=round(fmean(gaps_ns)) if gaps_ns else 0,
        ),
        network=Network(delay_ns=0, client_delay_ns=0),
        duration_ns=_SIMULATED_NS,
    )
    return simulated(case).side(_SIMULATED_NS // 2, _SIMULATED_NS).goodput_rps


def measure(setting: Setting) -> Findings:
    """The same figures as on the processor, and the prediction for each concurrency."""
    # Read when CUDA starts. By default 8 hardware queues carry all streams, so of 16 EXECs some would wait for others only
    # because they share a queue, and concurrency would look better ordered than it is.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    turns = setting.rounds * len(setting.concurrencies) * len(fig2.MODES)
    asked = fig2.Setting(
        concurrencies=setting.concurrencies, rounds=setting.rounds, round_s=setting.seconds / turns
    )
    card = Card(setting)
    alone = fig2.one_at_a_time(card.run, 1, time.monotonic_ns() + int(_REHEARSAL_S * NS_PER_S))
    points = fig2.measure(asked, card.run)
    figures = {"joined": float(card.joined), **fig2.STUDY.figures_of(asked, points)}
    for point in points:
        if point.mode == "one_at_a_time":
            simulated_rps = predicted_rps(alone, point.concurrency)
            gap_pct = 100 * (simulated_rps / point.throughput_rps - 1)
            figures[f"{point.mode}_c{point.concurrency}_simulated_rps"] = simulated_rps
            figures[f"{point.mode}_c{point.concurrency}_goodput_gap_pct"] = gap_pct
    gaps = [value for key, value in figures.items() if key.endswith("_goodput_gap_pct")]
    return Findings(
        {**figures, "worst_goodput_gap_pct": max(gaps, key=abs)},
        extra={"hardware": about(open_accelerator(setting.device))},
    )


STUDY = bench("gpu-fig2", Setting(), measure, record="fig2", folder="gpu")
