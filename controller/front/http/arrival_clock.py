"""When did the bytes come: what an event loop can know of the time at which it was not looking.

Bytes that a loop reads have waited since some moment after its last look at the socket. `ArrivalClock` knows a
moment before that look, however long the loop, or the process, or the machine stood still in between. A
request whose clock starts there is never younger than it seems.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from clockwright.units import NS_PER_MS, NS_PER_S

log = logging.getLogger(__name__)

#: How far apart two looks are at most, while clients ask: what the bound costs a request, twice over,
#: when the kernel tells no better.
BUSY_PERIOD_NS = 2 * NS_PER_MS
IDLE_PERIOD_NS = 10 * NS_PER_MS

_BUSY_FOR_NS = NS_PER_S


class ArrivalClock:
    """Marks the turns of the running loop.

    A mark is a callback that the loop runs among the others which are ready, and it never has two of them
    waiting. So the loop polls its sockets between two marks. What a callback of the loop reads now was not
    there at the poll before the present one, or it would have been read then; and the last mark but one
    came before that poll.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        """Begin to mark turns, until `stop`."""
        #: The present in ns.
        self.clock = clock
        self._loop = asyncio.get_running_loop()
        self._older_ns = self._newer_ns = self._asked_ns = clock()
        #: Turns in which something comes in begin so far apart at least. The loop sleeps meanwhile, so that more
        #: comes in together, at less cost for each; 0: it does not.
        self.period_ns = 0
        #: A read of this turn left bytes behind: the next turn does not wait.
        self.left_unread = False
        # Clients asked lately. Otherwise nothing is to come in that a pause would gather.
        self._is_busy = False
        #: When something came in first in this turn.
        self.began_ns = self._newer_ns
        self._next: asyncio.Handle | None = None
        # What is to be done at the end of this turn.
        self._works: list[Callable[[], object]] = []
        self._late_ns = 0
        self._due_ns = self._newer_ns + IDLE_PERIOD_NS
        self._timer = self._loop.call_later(IDLE_PERIOD_NS / NS_PER_S, self._beat)

    @property
    def bound_ns(self) -> int:
        """A time before the bytes came that are read now from a socket which was empty before."""
        return self._older_ns

    def lag_ns(self) -> int:
        """How late the loop is, or was at its last beat: the least that anything waited lately."""
        return max(self.clock() - self._due_ns, self._late_ns, 0)

    def unread_ns(self) -> int:
        """How long bytes that are read now may have waited because the loop was busy; 0 where it was on time."""
        return max(self.clock() - self._due_ns, 0) + self._late_ns

    def asked(self) -> None:
        """A client asks: look often for a while. Lifesigns of workers alone are no reason to."""
        self._asked_ns = self._newer_ns

    def used(self) -> None:
        """Something came in: mark this turn."""
        if self._next is None:
            self.began_ns = self.clock()
            self._next = self._loop.call_soon(self._mark)

    def soon(self, work: Callable[[], object]) -> None:
        """Do something at the end of this turn, or at `work_now` before that."""
        if not self._works:
            self._loop.call_soon(self.work_now)
        self._works.append(work)

    def work_now(self) -> None:
        """Do what was to be done `soon`."""
        works, self._works = self._works, []
        for work in works:
            try:
                work()
            except Exception:
                # Else a bug in one would cost the others.
                log.exception("what was to be done at the end of a turn failed")

    def stop(self) -> None:
        """Mark no more turns."""
        self._timer.cancel()

    def _mark(self) -> None:
        self._next = None
        self.work_now()
        if self.period_ns and self._is_busy and not self.left_unread:
            left_ns = self.period_ns - (self.clock() - self.began_ns)
            if left_ns > 0:
                time.sleep(left_ns / NS_PER_S)
        self.left_unread = False
        self._older_ns, self._newer_ns = self._newer_ns, self.clock()

    def _beat(self) -> None:
        now_ns = self.clock()
        # uvloop's timers are up to a millisecond early or late by nature.
        self._late_ns = max(now_ns - self._due_ns - NS_PER_MS, 0)
        self._is_busy = now_ns - self._asked_ns < _BUSY_FOR_NS
        period_ns = BUSY_PERIOD_NS if self._is_busy else IDLE_PERIOD_NS
        self._due_ns = now_ns + period_ns
        self._timer = self._loop.call_later(period_ns / NS_PER_S, self._beat)
        self.used()
