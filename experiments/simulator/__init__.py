"""The production controller core and worker cores on a virtual clock.

Nothing here decides what runs when: `controller.core.Scheduler` and `worker.core.lanes.Core` do, exactly as
they do live. This package supplies what they are wired to in a live system: clocks, links, devices
that take the time a profile says, clients, and faults.

    clients -> Controller (Scheduler) -> Link -> Worker (Core, device times) -> Link -> Controller

A run is a value: the same `Case` gives the same rows, bit for bit.
"""

from experiments.simulator.case import (
    Case,
    Cluster,
    Faults,
    HostedModel,
    LostWorker,
    Network,
    WorkerClock,
    copies_of,
)
from experiments.simulator.controller import production_scheduler
from experiments.simulator.run import Progress, Run, run
from experiments.simulator.summary import Bucket, Summary, summarise

__all__ = [
    "Bucket",
    "Case",
    "Cluster",
    "Faults",
    "HostedModel",
    "LostWorker",
    "Network",
    "Progress",
    "Run",
    "Summary",
    "WorkerClock",
    "copies_of",
    "production_scheduler",
    "run",
    "summarise",
]
