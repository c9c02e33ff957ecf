"""The one core of the controller's process, where the case charges for what is done there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from experiments.simulator.loop import Loop

_Job = tuple[int, Callable[[Any], None], Any]


class CpuCore:
    """Does one thing after the other, first come, first served.

    A job's handler is called when its time is used up. What the handler gives rise to, actions to be
    sent for example, takes its time right after it, before the next job begins.
    """

    __slots__ = ("_busy", "_later_ns", "_loop", "_waiting")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: deque[_Job] = deque()
        self._busy = False
        self._later_ns = 0

    def __len__(self) -> int:
        """Jobs that wait, and the one that runs."""
        return len(self._waiting) + self._busy

    def take(self, cost_ns: int, handler: Callable[[Any], None], argument: Any) -> None:  # noqa: ANN401
        """Call `handler(argument)` once the core has had time for everything before it, and for it."""
        job = (cost_ns, handler, argument)
        if self._busy:
            self._waiting.append(job)
        else:
            self._busy = True
            self._begin(job)

    def charge(self, cost_ns: int) -> int:
        """Take time for something that the present handler gives rise to.

        Returns:
            When it is done, ns of virtual time.
        """
        self._later_ns += cost_ns
        return self._loop.now_ns + self._later_ns

    def _begin(self, job: _Job) -> None:
        self._loop.at(self._loop.now_ns + job[0], self._finish, job)

    def _finish(self, job: _Job) -> None:
        self._later_ns = 0
        job[1](job[2])
        if self._later_ns:
            self._loop.at(self._loop.now_ns + self._later_ns, self._next, None)
        else:
            self._next(None)

    def _next(self, _: None) -> None:
        self._later_ns = 0
        if self._waiting:
            self._begin(self._waiting.popleft())
        else:
            self._busy = False
