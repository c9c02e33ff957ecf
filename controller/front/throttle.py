"""How many requests a busy event loop takes: no more than it can finish.

The scheduler knows what devices can do, not what the loop around it can. Where the loop is the limit, every
request that comes in takes time from those that are nearly done, so that at three times what the loop can
do nothing is finished at all. What is refused at the door costs a quarter of what is served; so the door
lets in a rate that leaves the loop a little idle.

What a request takes of the loop is measured while the loop is full, over all that it ended and refused then. A
loop with less to do shows another figure: its turns are smaller, and each has costs of its own. The first
rate follows from that measure and from how many requests come; then the rate is found by trial, because
what comes changes.

How long the loop was idle is what the kernel says its thread neither ran nor waited for a processor: on a
machine that others use, a loop that is kept waiting has no more room than one that computes. So the rate
follows from both. But only what it ran is what requests cost; the rest is told as what others took.

A request that has a second or more is not refused while it can wait for its turn (`waiting_line`): a loop that is
late by some ten milliseconds endangers only what is due soon. Those that wait have half of the rate, so that
neither they nor those in haste keep the others out.

Additive steps are too slow here, since a loop may serve 100 requests per second or 10,000: the rate
falls and grows by factors, as each window of time shows the loop idle or not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from clockwright.errors import Refusal, RefusedError
from clockwright.units import NS_PER_US
from controller.front.waiting_line import InLine, WaitingLine

#: A window must hold some turns of a loop that is late, and be short beside what clients notice.
WINDOW_NS = 25_000_000

# A loop that is idle for less than this part of a window has no room, and more than this part of those that
# it let in were slow: only both together say that it lets in too much. A device that has too much to
# do is the scheduler's to judge; and a loop that is busy with refusals gains nothing from more of them.
_IDLE_LEAST = 0.05
_SLOW_MOST = 0.1

# A window ends with the first request after its time: one so long, in which the loop was idle, says that nobody
# has asked for that long.
_QUIET_NS = 10 * WINDOW_NS
_QUIET_USED = 0.5

# One long turn (a large message) fills a window and says nothing of the next.
_FULL_WINDOWS = 3

_FALL, _GROW = 0.8, 1.1
# A loop that is idle for most of a window has room for much more, and whoever asks now did not cause the flood.
_GROW_MOST = 1.5

# After a standstill the loop finds requests past their SLO, too, until it has caught up. A loop that has found
# nothing else for so long does not.
_MISSED_WINDOWS = 40

# What a refusal at the door takes of the loop, beside a request that is served.
_REFUSAL_SHARE = 0.25

# A measure of some windows may mislead: so much of what was let in is let in at least.
_FIRST_FALL_MOST = 0.25

# Lower than this the rate does not fall, or one request that occupies the loop for long would shut out all.
_RATE_LEAST = 100.0

# Others on the machine are worth a word from here on.
_WAITED_PCT_TOLD = 10

# Requests that come together are let in together: what the rate allows in so many seconds.
_BURST_S = 0.01

# How often there is a look at those who wait.
_LOOK_S = 0.005


class Throttle:
    """Says of each request whether the loop has time for it."""

    def __init__(self, clock: Callable[[], int], times: Callable[[], tuple[int, int]]) -> None:
        """Let everything in until the loop is busy all the time.

        Args:
            clock: the present in ns.
            times: how long the loop ran, and how long it wanted to and could not, since some moment;
                `thread_times`, for example.
        """
        #: What is busy, for people.
        self.whose = "the controller itself"
        self._clock, self._look = clock, times
        self._window_ns = clock()
        # As the window began; None: nobody looked.
        self._times: tuple[int, int] | None = times()
        self._num_taken = 0
        self._num_refused = 0
        self._num_ended = 0
        self._num_slow = 0
        self._num_missed = 0
        self._num_full = 0
        # What the loop ran and waited in the last windows, all full, and the requests that it was for.
        self._ran_ns, self._waited_ns, self._full_requests = 0, 0, 0.0
        #: What a request takes of a full loop, in ns; 0 until one was full.
        self.request_ns = 0
        #: The part of a full loop's time in which others had its processor.
        self.waited_part = 0.0
        #: Requests per second that came in the last window.
        self.offered_rps = 0.0
        #: Requests per second that are let in; None: all.
        self.rate_rps: float | None = None
        self._tokens = 0.0
        # The tokens of those who wait.
        self._line_tokens = 0.0
        self._filled_ns = self._window_ns
        self._line = WaitingLine()
        self._timer: asyncio.TimerHandle | None = None

    def refusal(self) -> RefusedError:
        """Make the refusal of a request for which the event loop has no time; nobody has counted it."""
        rate_rps, offered_rps = round(self.rate_rps or 0), round(self.offered_rps)
        cost, waited_pct = "", round(100 * self.waited_part)
        if self.request_ns:
            cost = f", a request takes {self.request_ns / NS_PER_US:.0f} us of it"
            if waited_pct >= _WAITED_PCT_TOLD:
                cost += f", and others have its processor {waited_pct} % of the time"
        return RefusedError(
            Refusal.OVERLOADED,
            f"{self.whose} is busy all the time{cost}: it lets in {rate_rps} requests/s, "
            f"{offered_rps} arrive",
            figures={
                "rate_rps": rate_rps,
                "controller_ns": self.request_ns,
                "waited_pct": waited_pct,
                "offered_rps": offered_rps,
            },
        )

    def admit(self) -> bool:
        """Whether a request is let in; it counts as one that was."""
        now_ns = self._clock()
        if now_ns - self._window_ns >= WINDOW_NS:
            self._end_window(now_ns)
        if self.rate_rps is not None:
            self._fill(self.rate_rps, now_ns)
            if self._tokens < 1:
                self._num_refused += 1
                return False
            self._tokens -= 1
        self._num_taken += 1
        return True

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._line)

    def wait(
        self,
        request: InLine,
        begin: Callable[[], None],
        refuse: Callable[[], None],
        latest_ns: int,
    ) -> bool:
        """Have a request wait that was not let in, and look after it in the running loop.

        Args:
            request: says when nobody waits for it any more.
            begin: is called when its turn comes; it is let in then.
            refuse: is called when its turn does not come in time, or nobody waits for it any more.
            latest_ns: its turn must have come by then.

        Returns:
            Whether it waits; if not, too many do, or its turn would come too late.
        """
        if self.rate_rps is None or not self._line.enter(
            request,
            begin,
            refuse,
            latest_ns=latest_ns,
            now_ns=self._clock(),
            rate_rps=self.rate_rps,
        ):
            return False
        self._num_refused -= 1
        if self._timer is None:
            self._look_later()
        return True

    def advance(self) -> None:
        """Begin with those whose turn has come."""
        now_ns = self._clock()
        if now_ns - self._window_ns >= WINDOW_NS:
            self._end_window(now_ns)
        if self.rate_rps is not None:
            self._fill(self.rate_rps, now_ns)
        self._line.advance(now_ns, self._admit_waiting)

    def _admit_waiting(self) -> bool:
        if self.rate_rps is not None:
            if self._line_tokens < 1:
                return False
            self._line_tokens -= 1
        self._num_taken += 1
        return True

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look_at_line)

    def _look_at_line(self) -> None:
        self._timer = None
        self.advance()
        if self._line and self._timer is None:
            self._look_later()

    def _fill(self, rate_rps: float, now_ns: int) -> None:
        """Give what the rate gives since the last time; those who wait get half, and what the others leave."""
        gained, most = rate_rps * (now_ns - self._filled_ns) / 1e9, max(1.0, rate_rps * _BURST_S)
        self._filled_ns = now_ns
        waiting = bool(self._line)
        self._tokens += gained / 2 if waiting else gained
        left, self._tokens = max(self._tokens - most, 0.0), min(self._tokens, most)
        self._line_tokens = min(self._line_tokens + gained / 2 + left, most) if waiting else 0.0

    def ended(self, *, slow: bool) -> None:
        """A request that was let in is over; it was slow if it had used most of its SLO and was refused."""
        self._num_ended += 1
        self._num_slow += slow

    def missed(self) -> None:
        """A request that was let in had waited for longer than its SLO before the loop looked at it."""
        self._num_missed += 1

    def _end_window(self, now_ns: int) -> None:
        elapsed_ns = now_ns - self._window_ns
        taken_rps = self._num_taken * 1e9 / elapsed_ns
        self.offered_rps = (self._num_taken + self._num_refused) * 1e9 / elapsed_ns
        slow = self._num_slow > _SLOW_MOST * self._num_ended
        poor = slow or self._num_missed > _SLOW_MOST * self._num_ended
        # A look opens a file. Where few requests are slow, and all are let in, nobody asks how busy the loop was.
        times = self._look() if poor or self.rate_rps is not None else None
        full, quiet, grow = False, False, _GROW
        if times is not None and self._times is not None:
            ran_ns, waited_ns = times[0] - self._times[0], times[1] - self._times[1]
            used = (ran_ns + waited_ns) / elapsed_ns
            full = poor and 1 - used < _IDLE_LEAST
            quiet = elapsed_ns > _QUIET_NS and used < _QUIET_USED
            # Half of the way to where it would be full.
            grow = max(_GROW, min(0.5 + 0.5 / max(used, 0.1), _GROW_MOST))
            if poor:
                # What is refused unseen takes less than what is served.
                self._measure(ran_ns, waited_ns, full=full and slow)
        self._num_full = self._num_full + 1 if full else 0
        if self.rate_rps is None:
            if self._num_full >= (_FULL_WINDOWS if slow else _MISSED_WINDOWS):
                self._set(max(self._first_rps(taken_rps), _RATE_LEAST), now_ns)
        elif self._num_full:
            self._set(max(_FALL * min(self.rate_rps, taken_rps), _RATE_LEAST), now_ns)
        elif (quiet or self.offered_rps < self.rate_rps / 2) and not self._line:
            self.rate_rps = None  # It keeps nobody out, or would not if they came evenly.
        else:
            self._set(grow * self.rate_rps, now_ns)
        self._window_ns, self._times = now_ns, times
        self._num_taken = self._num_refused = 0
        self._num_ended = self._num_slow = self._num_missed = 0

    def _measure(self, ran_ns: int, waited_ns: int, *, full: bool) -> None:
        """Take in a window; only what a loop did while it was full says what it can do."""
        if not full:
            self._ran_ns, self._waited_ns, self._full_requests = 0, 0, 0.0
            return
        self._ran_ns += ran_ns
        self._waited_ns += waited_ns
        self._full_requests += self._num_ended + _REFUSAL_SHARE * self._num_refused
        if self._full_requests >= 1:
            self.request_ns = round(self._ran_ns / self._full_requests)
            self.waited_part = self._waited_ns / (self._ran_ns + self._waited_ns)

    def _first_rps(self, taken_rps: float) -> float:
        """The rate that a full loop has time for, beside the refusal of all others that come."""
        if not self.request_ns:
            return _FALL * taken_rps
        possible_rps = (1 - self.waited_part) * (1 - _IDLE_LEAST) * 1e9 / self.request_ns
        rate_rps = (possible_rps - _REFUSAL_SHARE * self.offered_rps) / (1 - _REFUSAL_SHARE)
        return max(min(rate_rps, _FALL * taken_rps), _FIRST_FALL_MOST * taken_rps)

    def _set(self, rate_rps: float, now_ns: int) -> None:
        if self.rate_rps is None:
            self._tokens, self._filled_ns = 0.0, now_ns
        self.rate_rps = rate_rps


def thread_times() -> Callable[[], tuple[int, int]]:
    """Make a reader of how long the calling thread has run, and has waited for a processor, in ns.

    Where the kernel does not tell (it is Linux that does), the thread seems never to have run.
    """
    stat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if not stat.exists():
        return lambda: (0, 0)

    def read() -> tuple[int, int]:
        # Opened each time, which is once in a window: nobody has to close it at the end.
        ran, waited, _ = stat.read_bytes().split()
        return int(ran), int(waited)

    return read
