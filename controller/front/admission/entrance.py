"""Requests that a busy event loop cannot begin at once: which of them wait for it, and which are refused. No I/O.

A loop that has more to do than it can do must not begin all that it reads: it would answer everything late. So the
number inside is bounded, those that wait here and those that were begun and have no answer yet: a request is refused
at once, before its tensors are parsed, unless all of them can be answered within a part of its SLO, at the pace of the
answers given lately, refusals by the scheduler included. `INSIDE_LEAST` are let in whatever the pace, or batches would be
small, and the pace never better. What a device is still to answer does not count: with twenty devices and runs of 30 ms, a
loop that counted it gave 0.6 of the answers that it gives without (by hand).

To refuse costs least where a gRPC call comes whole and its headers repeat those of an earlier call of its connection byte
for byte: then nothing is made of it, and calls behind it that repeat it are refused with it (`Gate`). Others, such as calls
whose `grpc-timeout` varies, have their headers decoded before. A connection is read less often while the loop has no
time to spare: a read and the answer to it cost more than the refusals of many calls.

A loop with time to spare begins everything: how many wait for a device is the scheduler's to judge. Whether it has any
is looked up in the kernel's figures for its thread, once in a window of time.

A turn of the loop begins requests for a part of the shortest SLO; what is read beyond that waits here for the next
turns. Each source (a connection, mostly) has a queue, and turns take from the sources in rotation; in a queue the
request that must begin first is first. While the loop is behind, a source that asks for much more than the others
gets what they leave. So a source that floods the loop delays no other.

A loop that is busy has its turns farther apart: it sleeps a little between them, so that requests come in together and
batches are large. That costs each request less than it saves, and gives the processor to workers that share it.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from clockwright.errors import Refusal, RefusedError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US
from controller.front.admission.limits import AdmissionLimits

#: A turn of the loop begins requests for this part of the shortest SLO that was asked lately, within these bounds. Short
#: turns spoil batches, and cost the loop more per request; long ones are spent of each SLO.
TURN_PART: Final = 0.15
TURN_NS_LEAST, TURN_NS_MOST = NS_PER_MS // 2, 4 * NS_PER_MS
#: All inside must be answered within this part of a request's SLO, from its arrival, for it to be let in.
PART: Final = 0.5
#: The same while the loop has been behind for less than the request's SLO: it catches up with a burst, or with what
#: came during a standstill, so that most of what has little time left can be served.
PART_AT_FIRST: Final = 0.8
#: All inside must be answered within this, or within this part of the SLO where that is longer, and twice that as long as the
#: loop has been behind for less than the SLO. More requests inside cost more each, and a loop that answers them reads
#: nothing meanwhile. Over one connection at twice the capacity, with an SLO of 100 ms, 0.85 of the capacity are in time;
#: 0.65 where half of the SLO is the only bound.
INSIDE_NS_MOST, INSIDE_PART = 25 * NS_PER_MS, 0.25
#: A request that has waited for less is never past its SLO: what no model could do is for the scheduler to say, with its
#: figures.
YOUNG_NS: Final = 2 * NS_PER_MS
#: The SLO that counts where it is not known yet.
UNSTATED_SLO_NS: Final = 100 * NS_PER_MS
#: So many are let in whatever the pace: a large batch.
INSIDE_LEAST: Final = 16
#: So many wait at most.
WAITING_MAX: Final = 10_000
#: How often there is a look at the loop's time and pace. A window must hold some turns of a loop that is behind.
WINDOW_NS: Final = 25 * NS_PER_MS
#: A loop that is idle for less than this part of a window is behind.
_IDLE_LEAST: Final = 0.08
#: Turns of a loop that is used for more than this part of a window are put farther apart, up to as long as a turn may
#: begin requests, where so many requests are under way; they come closer again where it is used for less than that part, or
#: where it has time to spare and yet more requests are under way than were answered in the window: then a worker has its
#: results ready, and waits for the next turn. With 8 connections this doubles what is in time at one and a half times the
#: capacity.
_USED_MOST, _USED_LEAST, _TOGETHER_LEAST = 0.85, 0.6, 8
#: Turns are so far apart at most: a worker has a few milliseconds of work in hand.
PERIOD_NS_MOST: Final = 2 * NS_PER_MS
#: A loop that was not behind for so long has caught up.
_CALM_NS: Final = 100 * NS_PER_MS
#: What an answer is thought to take before the loop was ever behind.
_FIRST_PACE_NS: Final = 100 * NS_PER_US
#: A source floods if it asks for more than so many times the average and a large batch, both by the window before and by this
#: one as far as it went; next to one other in both windows none does. It gets no more than is fair, or what the others leave:
#: of what can be answered, or of this part while the loop has no time to spare. Such sources share it. The rest is for what
#: the others ask for beyond what they did.
_FAIR, _PROMISED_PART = 2, 0.85
#: A source that asks for fewer in a window is read at once: hardly ever would a pause gather two of its requests.
_OFTEN: Final = 4
#: While the loop has no time to spare, a source is left unread for this part of the shortest SLO, which counts within these
#: bounds; or for all of it while others are on shift. A shift lasts for so many windows.
_PAUSE_PART, _SHIFT_WINDOWS = 0.25, 2
_PAUSED_SLO_NS_LEAST, _PAUSED_SLO_NS_MOST = 8 * NS_PER_MS, 64 * NS_PER_MS
#: The part of a new measure in the pace, where that is better than it was, and where it is worse: a loop that gave fewer
#: answers may have stood still, or was asked for no more. And the most by which one makes it longer.
_NEW_PART, _WORSE_PART, _GROW_MOST = 0.5, 0.05, 2.0
#: The figures of a refusal are so old at most: to make them again for each would cost more than to serve one.
_FIGURES_NS: Final = NS_PER_S


class Waiting(Protocol):
    """A request that can wait."""

    @property
    def over(self) -> bool:
        """Whether its client has given it up."""

    def begin_waiting(self) -> object:
        """Serve it: its turn has come."""

    def refuse(self) -> object:
        """Refuse it: its turn did not come in time."""


class Turns(Protocol):
    """Knows when the present turn of the event loop began."""

    began_ns: int
    #: How far apart turns begin at least.
    period_ns: int

    def used(self) -> None:
        """Something came in, so this is a turn."""

    def soon(self, work: Callable[[], object]) -> None:
        """Do something at the end of this turn, or before that."""


@dataclass(slots=True)
class _Place:
    """One request's."""

    #: It must have begun by then.
    latest_ns: int
    request: Waiting


def _urgency(place: _Place) -> int:
    """The key by which a queue is in order: the most urgent is last."""
    return -place.latest_ns


class _Sources:
    """What sources ask for, window by window, while the loop is behind.

    Where several times as much is asked as can be answered, they take shifts. Those off shift are read so seldom that
    nearly all they ask for is refused, many at once, and the time goes to requests that are young.
    """

    def __init__(self) -> None:
        # Requests by source in this window, and in the one before; and the most that is fair.
        self._asked: dict[object, int] = {}
        self._before: dict[object, int] = {}
        self._num_asked = 0
        self._fair = math.inf
        # Those let in in this window, and the most of a source that asks for more than is fair. Part of what is inside would not
        # do as a bound: where answers leave in the turn that read their requests, nothing stays inside.
        self._let_in: dict[object, int] = {}
        self._left = math.inf
        self._off_shift: set[object] = set()
        # The SLO of which pauses are a part.
        self._paused_slo_ns = _PAUSED_SLO_NS_LEAST
        self._num_windows = 0

    def asked(self, source: object, count: int) -> None:
        self._asked[source] = self._asked.get(source, 0) + count
        self._num_asked += count

    def let_in(self, source: object) -> None:
        self._let_in[source] = self._let_in.get(source, 0) + 1

    def has_had_enough(self, source: object) -> bool:
        """Whether a source floods, and has had what the others leave."""
        asked = self._asked.get(source, 0)
        if asked <= self._fair:
            return False
        # By the window before alone, all would flood as soon as all ask for more. What is left is too little then: the pace
        # is that of the requests before.
        if asked <= self._fair_of(self._num_asked, len(self._before)):
            return False
        # What it asked for itself, while that was fair, is not the others'.
        own = self._before.get(source, 0)
        most = self._left + (own if own <= self._fair else 0)
        return self._let_in.get(source, 0) >= most

    @staticmethod
    def _fair_of(num_asked: int, num_sources: int) -> float:
        return INSIDE_LEAST + _FAIR * num_asked / num_sources

    def end_window(self, num_answered: float, promised_part: float) -> None:
        """Begin a new window; so many can be answered in one, and those that ask for too much get what is left of a part."""
        self._before, self._asked = self._asked, {}
        asked = self._before
        self._fair = self._fair_of(self._num_asked, len(asked)) if asked else math.inf
        self._num_asked = 0
        modest = [number for number in asked.values() if number <= self._fair]
        num_floods = len(asked) - len(modest)
        left = promised_part * num_answered - sum(modest)
        self._let_in, self._left = {}, left / max(num_floods, 1)
        wanted = sum(modest) + (max(left, 0) if num_floods else 0)
        num_shifts = max(1, round(wanted / num_answered))
        self._num_windows += 1
        on_shift = [*asked][self._num_windows // _SHIFT_WINDOWS % num_shifts :: num_shifts]
        self._off_shift = asked.keys() - on_shift

    def shortest_slo(self, slo_ns: int) -> None:
        """Take in the shortest SLO that was asked lately."""
        self._paused_slo_ns = min(max(slo_ns, _PAUSED_SLO_NS_LEAST), _PAUSED_SLO_NS_MOST)

    def pause_ns(self, source: object) -> int:
        """For how long a source is left unread."""
        if self._before.get(source, 0) < _OFTEN:
            return 0
        return round((1 if source in self._off_shift else _PAUSE_PART) * self._paused_slo_ns)


class Entrance:
    """Has requests wait for an event loop that is busy, and says which it has no time for."""

    def __init__(
        self,
        clock: Callable[[], int],
        turns: Turns,
        door: AdmissionLimits,
        *,
        soon: Callable[[Callable[[], None]], object],
        used_ns: Callable[[], int],
    ) -> None:
        """Let everything in until the loop is behind.

        Args:
            clock: the present in ns.
            turns: knows when the present turn began.
            door: counts the requests that were begun, and those that are over.
            soon: calls something in the next turn.
            used_ns: how long the loop ran, or wanted to and could not, since some moment; `thread_used_ns`, mostly.
        """
        #: What is busy, for people.
        self.whose = "the controller itself"
        #: Requests that wait, those included whose clients have given them up.
        self.num_waiting = 0
        #: Whether the loop has no time to spare; and whether it has none, or has some because it refuses what comes.
        self.is_pressed = self.behind = False
        #: Time that passes from one answer to the next while the loop is behind, in ns. The scheduler's refusals count.
        self.pace_ns = float(_FIRST_PACE_NS)
        #: A turn begins requests for so long at most.
        self.turn_ns = TURN_NS_LEAST
        # The shortest SLO of those judged in this window; 0: none was.
        self._least_slo_ns = 0
        #: The turns of the event loop.
        self.turns = turns
        #: The part of the requests that were begun that does not wait for the loop, but for a device.
        self.share_elsewhere: Callable[[], float] = lambda: 0.0
        # As many as that were at the last look.
        self._elsewhere = 0
        self._clock, self._door = clock, door
        self._soon, self._look = soon, used_ns
        # By source, in the order in which it is their turn.
        self._queues: dict[object, list[_Place]] = {}
        self._has_scheduled = False
        # When the present window began, what the loop had used, and the requests that were over.
        self._window_ns, self._used_ns, self._ended = clock(), used_ns(), door.num_ended
        self._sources = _Sources()
        # Requests that were refused for want of time in this window.
        self._num_refused = 0
        # When the loop was behind for the first time without a calm since, and for the last time.
        self._since_ns = self._behind_ns = -_CALM_NS
        self._refusal: RefusedError | None = None
        self._refusal_ns = -_FIGURES_NS

    def has_time(self, now_ns: int, arrival_ns: int, *, judged: bool = False) -> bool:
        """Whether a request that came then may begin at once, and need not be judged unless it was: `may_enter`."""
        if now_ns - self._window_ns >= WINDOW_NS:
            self._end_window(now_ns)
        is_free = judged or (not self.behind and now_ns - arrival_ns <= YOUNG_NS)
        return is_free and self._has_turn(now_ns)

    def _has_turn(self, now_ns: int) -> bool:
        """Whether a request that may enter begins in this turn."""
        return not self.num_waiting and now_ns - self.turns.began_ns < self.turn_ns

    def may_enter(
        self, source: object, arrival_ns: int, slo_ns: int, now_ns: int, besides: int = 0
    ) -> bool:
        """Whether a request can be answered in time with all that are inside, and its source has not had its part.

        Args:
            source: where it comes from; sources have equal rights.
            arrival_ns: when it came.
            slo_ns: its SLO.
            now_ns: the present.
            besides: so many of the same source are about to enter, too.
        """
        if not 0 < self._least_slo_ns <= slo_ns:
            self._least_slo_ns = slo_ns
        latest_ns = self._latest_ns(arrival_ns, slo_ns, now_ns)
        ahead = besides
        if self.num_waiting:
            queue, sources = self._queues.get(source), len(self._queues)
            if queue is None:
                sources += 1
            else:
                ahead += len(queue) - bisect_left(queue, -latest_ns, key=_urgency)
            # The sources take turns, so that each of the others comes up as often as this one.
            ahead = min((ahead + 1) * sources - 1, self.num_waiting + besides)
        if self.behind:
            ahead += self._begun()
            self._sources.asked(source, 1)
            if self._sources.has_had_enough(source):
                self._num_refused += 1
                return False
        if ahead < INSIDE_LEAST:
            ahead = 0
        room_ns = latest_ns - now_ns
        most = max(INSIDE_NS_MOST, int(INSIDE_PART * slo_ns))
        room_ns = min(room_ns, most if self._lasts(slo_ns, now_ns) else 2 * most)
        if ahead * self.pace_ns <= room_ns and self.num_waiting + besides < WAITING_MAX:
            if self.behind:
                self._sources.let_in(source)
            return True
        self._num_refused += 1
        return False

    def _begun(self) -> int:
        """Requests that were begun and that the loop has to answer, whatever devices do."""
        return max(self._door.num_requests - self._elsewhere, 0)

    def pause_ns(self, source: object, longest_ns: int) -> int:
        """How long a source is left unread after it was read while the loop is pressed, so that more comes together."""
        return min(longest_ns, self._sources.pause_ns(source))

    def asked(self, source: object, count: int) -> None:
        """Count requests of a source that were refused without a question each."""
        if self.behind:
            self._sources.asked(source, count)
            self._num_refused += count

    def _latest_ns(self, arrival_ns: int, slo_ns: int, now_ns: int) -> int:
        """When the answers must have been given to all that are inside as a request enters."""
        if slo_ns <= YOUNG_NS:
            # No model can do that, which the scheduler says with its figures.
            arrival_ns, slo_ns = now_ns, UNSTATED_SLO_NS
        part = PART if self._lasts(slo_ns, now_ns) else PART_AT_FIRST
        return arrival_ns + int(slo_ns * part)

    def _lasts(self, slo_ns: int, now_ns: int) -> bool:
        """Whether the loop has been behind for longer than an SLO."""
        return now_ns - self._behind_ns <= _CALM_NS and now_ns - self._since_ns > slo_ns

    def enter(
        self,
        source: object,
        request: Waiting,
        arrival_ns: int,
        slo_ns: int,
        *,
        judged: bool = False,
    ) -> bool:
        """Begin a request at once or when its turn comes; returns whether it was not refused.

        Args:
            source: as `may_enter`.
            request: is begun now or later, or refused later.
            arrival_ns: as `may_enter`.
            slo_ns: as `may_enter`.
            judged: `may_enter` let it in before.
        """
        now_ns = self._clock()
        if not judged and not self.may_enter(source, arrival_ns, slo_ns, now_ns):
            return False
        if self._has_turn(now_ns):
            request.begin_waiting()
            return True
        latest_ns = self._latest_ns(arrival_ns, slo_ns, now_ns)
        queue = self._queues.get(source)
        if queue is None:
            queue = self._queues[source] = []
        queue.insert(bisect_left(queue, -latest_ns, key=_urgency), _Place(latest_ns, request))
        self.num_waiting += 1
        self._schedule_turn()
        return True

    def _schedule_turn(self) -> None:
        if self._queues and not self._has_scheduled:
            self._has_scheduled = True
            self._soon(self._turn)

    def _turn(self) -> None:
        """Begin requests in a turn of their own."""
        self._has_scheduled = False
        queues = self._queues
        began_ns = now_ns = self._clock()
        try:
            while queues and now_ns - began_ns < self.turn_ns:
                source = next(iter(queues))
                queue = queues.pop(source)
                place = queue.pop()
                if queue:
                    queues[source] = queue
                self.num_waiting -= 1
                if place.request.over:
                    continue
                if now_ns > place.latest_ns:
                    place.request.refuse()
                else:
                    place.request.begin_waiting()
                now_ns = self._clock()
        finally:
            # Also if one of them failed: the others still wait.
            self._schedule_turn()

    def _end_window(self, now_ns: int) -> None:
        """Find out whether the loop is behind, its pace, and how far apart its turns are to be."""
        elapsed_ns, ended, used_ns = now_ns - self._window_ns, self._door.num_ended, self._look()
        used = (used_ns - self._used_ns) / elapsed_ns
        self.is_pressed = used > 1 - _IDLE_LEAST
        # A loop that has time because it refuses what comes may have none if it let everything in.
        refused_ns, self._num_refused = self._num_refused * self.pace_ns, 0
        would_use = used + refused_ns / elapsed_ns
        self.behind = self.is_pressed or (self.behind and would_use > 1 - _IDLE_LEAST)
        turns = self.turns
        under_way, period_ns = self._door.num_requests, turns.period_ns
        if used < _USED_LEAST or under_way < _TOGETHER_LEAST:
            turns.period_ns = period_ns // 2
        elif not self.is_pressed and under_way > ended - self._ended:
            turns.period_ns = min(period_ns, max(period_ns // 2, self.turn_ns // 8))
        elif used > _USED_MOST:
            period_ns = max(2 * period_ns, self.turn_ns // 4)
            turns.period_ns = min(period_ns, self.turn_ns, PERIOD_NS_MOST)
        if self._least_slo_ns:
            slo_ns, self._least_slo_ns = self._least_slo_ns, 0
            self.turn_ns = min(max(int(TURN_PART * slo_ns), TURN_NS_LEAST), TURN_NS_MOST)
            self._sources.shortest_slo(slo_ns)
        if self.behind:
            self._elsewhere = round(self.share_elsewhere() * under_way)
            if now_ns - self._behind_ns > _CALM_NS + elapsed_ns:
                self._since_ns = now_ns
            self._behind_ns = now_ns
            pace_ns = min(used, 1.0) * elapsed_ns / max(ended - self._ended, 1)
            part = _NEW_PART if pace_ns < self.pace_ns else _WORSE_PART
            self.pace_ns += part * (min(pace_ns, _GROW_MOST * self.pace_ns) - self.pace_ns)
        self._window_ns, self._used_ns, self._ended = now_ns, used_ns, ended
        part = _PROMISED_PART if self.is_pressed else 1
        self._sources.end_window(elapsed_ns / self.pace_ns, part)

    def refusal(self, now_ns: int) -> RefusedError:
        """Make the refusal of a request for which the loop has no time. Within a second it is the same."""
        refusal = self._refusal
        if refusal is None or now_ns - self._refusal_ns > _FIGURES_NS:
            pace_ns, inside = round(self.pace_ns), self.num_waiting + self._begun()
            self._refusal_ns = now_ns
            self._refusal = refusal = RefusedError(
                Refusal.OVERLOADED,
                f"{self.whose} is busy all the time: found {inside} requests inside and"
                f" {pace_ns / NS_PER_US:.0f} us from one answer to the next, expected that they take"
                f" {100 * PART:.0f} % of the SLO at most, and {100 * INSIDE_PART:.0f} % or {INSIDE_NS_MOST // NS_PER_MS} ms"
                " where this lasts; and that a connection that asks for much more than the others leaves them their part",
                figures={"inside": inside, "controller_ns": pace_ns},
            )
        return refusal


def thread_used_ns() -> Callable[[], int]:
    """Make a reader of how long the calling thread has run, and has waited for a processor, in ns.

    Where the kernel does not tell how long it has waited, that is left out.
    """
    stat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    # Some sandboxes have the file, with nothing but zeros in it.
    if not stat.exists() or not any(map(int, stat.read_bytes().split())):
        return time.thread_time_ns

    def read() -> int:
        # The kernel brings the file up to date at its tick, and whenever it is asked for this time.
        time.thread_time_ns()
        ran, waited, _ = stat.read_bytes().split()
        return int(ran) + int(waited)

    return read
