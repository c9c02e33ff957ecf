"""Lanes without threads, for a device that only spends time.

A LOAD or an EXEC begins, and a timer ends it; INPUT and OUTPUT take no time. So any number of such devices needs the one
thread that reads their connections (`worker.action_thread`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from typing_extensions import override

from worker.action_thread import ActionThread
from worker.core.lanes import Lane, Step, WaitUntil
from worker.devices.device import M, TimedDevice
from worker.lane_threads import LaneThreads, Outcome
from worker.timing import SPIN_NS

_TIMED = (Lane.LOAD, Lane.EXEC)


class LaneTimers(LaneThreads[M]):
    """Runs the lanes of a `TimedDevice`."""

    # The thread that submits actions serves other devices meanwhile.
    short_ns = SPIN_NS

    def __init__(
        self,
        device: TimedDevice[M],
        on_outcome: Callable[[Outcome], None],
        actions: ActionThread,
    ) -> None:
        """Make the lanes; `on_outcome` is as of `LaneThreads`, and `actions` ends the steps."""
        super().__init__(device, on_outcome)
        self._timed = device
        self._actions = actions
        #: Lanes to look at before the lock is let go.
        self._roused: list[Lane] = []
        self._is_looking = False
        #: When a lane that waits is looked at again.
        self._looks_ns: dict[Lane, int] = {}

    @override
    def start(self) -> None:
        pass  # there are no threads

    @override
    def _rouse(self, lane: Lane) -> None:
        self._roused.append(lane)
        if self._is_looking:
            return
        self._is_looking = True
        try:
            while self._roused:
                self._look(self._roused.pop(0))
        finally:
            self._is_looking = False

    def _look(self, lane: Lane) -> None:
        """Begin the next step of a lane, if one is due. Call it with the lock held."""
        now_ns = time.monotonic_ns()
        due = self._next(lane, now_ns)
        if isinstance(due, WaitUntil):
            self._look_at(lane, due.time_ns)
        elif due is None:
            pass
        elif lane in _TIMED:
            due.duration_ns = self._timed.duration_ns(due)
            self._actions.call_at(now_ns + due.duration_ns, partial(self._end, due, now_ns))
        else:
            failure, outputs = self._carry_out(due)
            self._finish(due, now_ns, time.monotonic_ns(), failure)
            self._after_change(due, outputs)
            return
        # What is too late was refused.
        self._after_change()

    def _look_at(self, lane: Lane, time_ns: int) -> None:
        if self._looks_ns.get(lane, time_ns + 1) > time_ns:
            self._looks_ns[lane] = time_ns
            self._actions.call_at(time_ns, partial(self._look_again, lane, time_ns))

    # --- called by the thread of actions -----------------------------------------------------------

    def _look_again(self, lane: Lane, time_ns: int) -> None:
        with self._lock:
            if self._looks_ns.get(lane) == time_ns:
                del self._looks_ns[lane]
                self._rouse(lane)

    def _end(self, step: Step[M], begin_ns: int) -> None:
        """The time of a LOAD or an EXEC is over."""
        with self._lock:
            self._finish(step, begin_ns, time.monotonic_ns())
            self._after_change(step)
