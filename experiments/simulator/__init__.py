"""The production controller core and worker cores on a virtual clock.

Nothing here decides which action runs when: `controller.core.Scheduler` and `worker.core.lanes.Core` decide,
exactly as they do live. This package supplies their surroundings: clocks, links, devices that take the time
a profile says, clients, and faults.

    clients -> VirtualController (Scheduler) -> VirtualLink -> Worker (Core, device times)
            -> VirtualLink -> VirtualController

A run is a value: the same `Case` gives the same rows, bit for bit.
"""

from experiments.simulator.case import (
    Case,
    Cluster,
    CpuCosts,
    Faults,
    HostedModel,
    LostWorker,
    Network,
    WorkerClock,
    WorkerKind,
    WrongProfile,
    copies_of,
    slower_kind,
)
from experiments.simulator.controller import production_scheduler
from experiments.simulator.run import Progress, Run, run
from experiments.simulator.summary import Bucket, Summary, bottleneck

__all__ = [
    "Bucket",
    "Case",
    "Cluster",
    "CpuCosts",
    "Faults",
    "HostedModel",
    "LostWorker",
    "Network",
    "Progress",
    "Run",
    "Summary",
    "WorkerClock",
    "WorkerKind",
    "WrongProfile",
    "bottleneck",
    "copies_of",
    "production_scheduler",
    "run",
    "slower_kind",
]
