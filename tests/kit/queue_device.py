"""A device with a queue whose EXECs end when the test says so."""

from __future__ import annotations

import queue
import threading
from typing import Any

from tests.kit.worker_models import ThreadedDevice
from worker.core.lanes import Step
from worker.devices.device import Launched
from worker.models.served_model import ServedModel


class Ticket:
    """An EXEC that ends when the test says so."""

    def __init__(self, step: Step[ServedModel]) -> None:
        self.step = step
        self.ended = threading.Event()

    def is_done(self) -> bool:
        return self.ended.is_set()


class QueueDevice(ThreadedDevice):
    """Runs EXEC in the order of their launches, each until it is told to end."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **settings)
        self.launched: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self.refuses: set[int] = set()

    def launch_exec(self, step: Step[Any]) -> Ticket:
        if step.action.action_id in self.refuses:
            raise RuntimeError("no room in the queue")
        ticket = Ticket(step)
        self.launched.put(ticket)
        return ticket

    def finish_exec(self, step: Step[Any], launched: Launched) -> None:
        assert isinstance(launched, Ticket)
        assert launched.ended.wait(60)
        step.duration_ns = 7

    def next_launch(self) -> Ticket:
        return self.launched.get(timeout=60)
