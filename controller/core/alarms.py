"""Timers: when to check a request, the lanes of a worker, or a worker that may hang.

One timer serves three heaps of (time, serial, subject):

| heap       | subject | armed by                              | an entry counts while                 |
|------------|---------|---------------------------------------|---------------------------------------|
| `expiries` | request | `watch`                               | the request is open and its `watch_ns` is the entry's time |
| `wakeups`  | worker  | `wake_exec`, `wake_load`              | the worker's `exec_wakeup_ns` or `load_wakeup_ns` is the entry's time |
| `timeouts` | worker  | `expect_result`, `expect_result_until` | always: a worker has one at most (`watched`) |

An entry that no longer counts stays in its heap until it comes to the top. A `SortedList` would be tidier, as in
`eviction`: an entry leaves when it ceases to count. But there is an expiry per request: to add and remove it costs
2.7 us there with 600 requests open, to push it and pop it lazily 1.2 us. The other two heaps hold some entries per
worker, and are heaps so that all three are alike.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from clockwright.units import NS_PER_MS
from controller.core.config import SchedulerConfig
from controller.core.state import DONE, Request, SentAction, WorkerState

# A result may be missing for so long, or twice as long as the action should take, before its worker is suspected.
# A pause of the host may last as long; longer, and requests with ordinary SLOs have no time to go elsewhere.
SUSPECT_NS = 50 * NS_PER_MS

# Where a timer comes so much too late, this process stood still.
STOOD_STILL_NS = 20 * NS_PER_MS

# Expiries below this number are never swept.
_SWEEP_MIN = 1024


class Alarms:
    """The three heaps, first due first; the caller looks, takes out, and does what follows."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._lookahead_ns = config.lookahead_ns
        self._action_timeout_ns = config.action_timeout_ns
        #: When a waiting request becomes hopeless, or a sent one late.
        self.expiries: list[tuple[int, int, Request]] = []
        #: When a lane has room again.
        self.wakeups: list[tuple[int, int, WorkerState]] = []
        #: When the oldest action of a worker is overdue.
        self.timeouts: list[tuple[int, int, WorkerState]] = []
        self._sweep_at = _SWEEP_MIN
        # Breaks ties, so that subjects are never compared.
        self._serial = count()

    def next_ns(self) -> int | None:
        """The earliest time at which anything is due. Returns None if nothing is armed."""
        next_ns: int | None = None
        expiries = self.expiries
        while expiries:
            at_ns, _, request = expiries[0]
            if request.phase is not DONE and request.watch_ns == at_ns:
                next_ns = at_ns
                break
            heappop(expiries)
        wakeups = self.wakeups
        while wakeups:
            at_ns, _, worker = wakeups[0]
            if worker.exec_wakeup_ns == at_ns or worker.load_wakeup_ns == at_ns:
                if next_ns is None or at_ns < next_ns:
                    next_ns = at_ns
                break
            heappop(wakeups)
        timeouts = self.timeouts
        if timeouts and (next_ns is None or timeouts[0][0] < next_ns):
            next_ns = timeouts[0][0]
        return next_ns

    # --- requests -------------------------------------------------------------------------------

    def watch(self, request: Request, at_ns: int) -> None:
        """Look at an open request at a time, and not at the time that was arranged before."""
        request.watch_ns = at_ns
        heappush(self.expiries, (at_ns, next(self._serial), request))
        if len(self.expiries) > self._sweep_at:
            self._sweep()

    def watch_no_later(self, request: Request, at_ns: int) -> None:
        """Look at an open request at a time, or sooner if that is arranged already.

        A request that is sent and put back again and again, because its worker is always too late, must
        not leave an entry each time: with thousands of them one turn took seconds.
        """
        if at_ns < request.watch_ns:
            self.watch(request, at_ns)

    def expired(self) -> Request | None:
        """Take out the first of the `expiries`. Returns its request, or None if the entry no longer counts."""
        at_ns, _, request = heappop(self.expiries)
        return request if request.phase is not DONE and request.watch_ns == at_ns else None

    def _sweep(self) -> None:
        """Drop entries of answered requests: with SLOs of hours they would never come to the top."""
        self.expiries[:] = [
            entry
            for entry in self.expiries
            if entry[2].phase is not DONE and entry[2].watch_ns == entry[0]
        ]
        heapify(self.expiries)
        self._sweep_at = max(_SWEEP_MIN, 4 * len(self.expiries))

    # --- lanes ----------------------------------------------------------------------------------

    def wake_exec(self, worker: WorkerState, at_ns: int, now_ns: int) -> None:
        """Look at the exec lane at a time, or sooner, but after now."""
        at_ns = max(at_ns, now_ns + 1)
        # Every result shifts the lane's end a little; a wake-up that is close enough stays.
        slack_ns = min(self._lookahead_ns, worker.exec_lookahead_ns) // 16
        if worker.exec_wakeup_ns is None or at_ns < worker.exec_wakeup_ns - slack_ns:
            worker.exec_wakeup_ns = at_ns
            heappush(self.wakeups, (at_ns, next(self._serial), worker))

    def wake_load(self, worker: WorkerState, at_ns: int) -> None:
        """Look at the load lane at a time, and not at the time that was arranged before."""
        worker.load_wakeup_ns = at_ns
        heappush(self.wakeups, (at_ns, next(self._serial), worker))

    def woken(self) -> tuple[int, WorkerState]:
        """Take out the first of the `wakeups`: its time, and the worker.

        The worker may be gone, and neither of its lanes may wait for that time any more.
        """
        at_ns, _, worker = heappop(self.wakeups)
        return at_ns, worker

    # --- workers --------------------------------------------------------------------------------

    def expect_result(self, worker: WorkerState, sent: SentAction, *, alone: bool) -> None:
        """Look whether an action's result is overdue, unless an older action is looked at first.

        Where the worker is alone, lateness has no consequence until the worker is given up.
        """
        if not worker.watched:
            worker.watched = True
            at_ns = self.overdue_ns(sent) if alone else self.suspect_ns(sent)
            heappush(self.timeouts, (at_ns, next(self._serial), worker))

    def expect_result_until(self, worker: WorkerState, at_ns: int) -> None:
        """Look at the oldest action of a worker at a time; none is arranged yet."""
        worker.watched = True
        heappush(self.timeouts, (at_ns, next(self._serial), worker))

    def look_sooner(self, worker: WorkerState, at_ns: int) -> None:
        """Look at the oldest action of a worker at a time, and not at the time that was arranged before."""
        self.timeouts[:] = [entry for entry in self.timeouts if entry[2] is not worker]
        heapify(self.timeouts)
        self.expect_result_until(worker, at_ns)

    def timed_out(self) -> tuple[int, WorkerState]:
        """Take out the first of the `timeouts`: its time, and the worker whose oldest action has to be looked at.

        The worker may be gone.
        """
        at_ns, _, worker = heappop(self.timeouts)
        worker.watched = False
        return at_ns, worker

    def suspect_ns(self, sent: SentAction) -> int:
        """From this time on the result is late enough to do without the worker."""
        late_ns = max(SUSPECT_NS, 2 * sent.action.expected_duration_ns)
        return sent.expected_end_ns + min(late_ns, self._action_timeout_ns)

    def overdue_ns(self, sent: SentAction) -> int:
        """From this time on an action has waited for its result for too long.

        One that takes long may take twice as long, on a host that is busy with something else.
        """
        return sent.expected_end_ns + max(self._action_timeout_ns, sent.action.expected_duration_ns)
