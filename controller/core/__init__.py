"""The scheduler: events in, commands out. No I/O, no clock, no randomness.

Theory of operation
-------------------
All choice is in one place (Clockwork, OSDI'20, section 4). The controller keeps a model of every
worker: which weights lie in its pages, what each lane is busy with and until when, and how long a load
or a batch takes there. As long as that model is right, a request's finish can be predicted before
anything is sent, and work that would be late is never begun.

A request arrives and is judged (`admission`): if no worker could finish it in time it is refused at
once, with the numbers. Otherwise it waits in its model's queue, in deadline order. Each lane of each
GPU is kept a few milliseconds ahead of itself (`lane`): whenever its predicted backlog falls below
the look-ahead, the policy (`clockwork`, `edf_mh`) chooses the next batch for the exec lane, or the next weights
for the load lane, and the mechanism (`scheduler`) sends the action with the window in which it may
start. The result re-anchors the lane, feeds the `estimator`, and makes room for the next action.
Binding late is what makes batches: requests gather while the GPU is busy.

Time enters as `now_ns`, so the simulator drives the same code on a virtual clock.
"""

from controller.core.config import EdfMhConfig, SchedulerConfig
from controller.core.scheduler import Scheduler
from controller.core.statistics import ModelStatistics, Statistics, WorkerStatistics

__all__ = [
    "EdfMhConfig",
    "ModelStatistics",
    "Scheduler",
    "SchedulerConfig",
    "Statistics",
    "WorkerStatistics",
]
