"""The parts that the scheduler's rooms share."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.alarms import Alarms
from controller.core.books import Books
from controller.core.config import SchedulerConfig
from controller.core.events import Command
from controller.core.health import Health
from controller.core.lag import Lag
from controller.core.policy import Policy, Traits


@dataclass(frozen=True, slots=True)
class CoreParts:
    """Each room takes what it needs."""

    config: SchedulerConfig
    traits: Traits
    #: Chooses batches and loads.
    policy: Policy
    #: The state of requests, models and workers.
    books: Books
    #: When to look again.
    alarms: Alarms
    #: How far the controller itself is behind.
    lag: Lag
    #: Which workers are avoided.
    health: Health
    #: Rooms add commands; `Scheduler.handle` takes them out after each event.
    commands: list[Command]
