"""The delay and the bandwidth of a worker's link, which is planned like a lane.

Two things delay a message, and they need opposite treatment. On a *long* link actions must be sent early, with many
under way. On a *thin* one they must be sent late: what is sent too early only queues. So both are measured separately,
in each direction:

* The **length** is the least of the last delays. What varies above it (jitter) is planned for by a high
  quantile, less what does no harm.
* The **time per byte** comes from messages that had to wait for the one before: such a pair arrives as far
  apart as the second takes on the wire. Jitter stretches and shrinks those distances alike, so a quantile
  below the middle is zero on a link that is not thin. No message is faster than its own bytes, which bounds
  the time per byte from above, and so a link that other traffic kept busy recovers at once.

On a thin link only a message that did not wait measures the length: a queue that counts as length is kept up for ever.
Messages that arrive in the same moment count once: if a process stood still, that is one pause, not twenty long delays.

**The clock of a worker's lanes.** All times of `exec_lane` and `load_lane`, of copies' loads and of actions
under way are those at which the controller *hears* of them: the worker's time plus the return delay. So an
answer's return delay is part of its run, on near and far workers alike, and no rule above this file knows of links: a
batch is in time when its end, as heard, is not after `due_ns`. Only `ExecLanes` and `Dispatch`, which write windows
for workers, and `Results`, which reads their reports, translate.

The link of a worker on the same machine, or in the same rack, is shorter than what is planned for always.
Nothing is learned from it then but how short it was last: two comparisons per result.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from clockwright.units import NS_PER_MS
from controller.core.events import LearnedLink

# Enough to tell the largest delay from the usual ones, few enough to follow a link that changes within a
# second of work.
_WINDOW_SIZE = 64

_WINDOW_NS = 1000 * NS_PER_MS

# This part of the window is planned for, and never its last two: a message that is late alone is an event, and says
# nothing of the next.
_QUANTILE, _EVENTS = 0.95, 2

# Messages that arrive within this of each other were delayed by the same thing.
_SAME_MOMENT_NS = NS_PER_MS

# Distances of queued messages: the number that is kept, and the least number that counts.
_PAIRS, _PAIRS_LEAST = 24, 5
_PAIRS_QUANTILE = 0.4

# Messages under way of which the wire's work is known; with more, it is taken for less than it is.
_PENDING_MOST = 256

# A message that arrives further behind the one before than it takes on the wire did not wait for that one.
_APART = 1.05
_SOON_NS = NS_PER_MS // 50

# Size of a message without tensors, so that a link which carries only so many messages is thin too.
_MESSAGE_BYTES = 1000

# Bytes that take less per message are not worth planning.
_NO_MATTER_NS = NS_PER_MS // 5

# The bound of the time per byte by single messages is loosened by this part with each message.
_LOOSEN = 1 / 64

# The length of a way back below this is left to the margin.
_SHORT_BACK_NS = NS_PER_MS

# What queued has gone after this long without an action. A length that rules requests out is never measured
# again, so it is forgotten: after as long where a request was refused for it, after longer in any case.
_FORGET_NS = 500 * NS_PER_MS
_FORGET_ALL_NS = 2000 * NS_PER_MS


class OneWay:
    """One direction of a link."""

    __slots__ = (
        "_arrived_ns",
        "_least_ns",
        "_most_per_byte",
        "_ordered",
        "_ordered_pairs",
        "_pairs",
        "_pairs_bytes",
        "_pairs_per_byte",
        "_pending",
        "_reached",
        "_samples",
        "_sent_bytes",
        "_short_ns",
        "_times_ns",
        "_tolerance_ns",
        "free_ns",
        "last_wire_ns",
        "length_ns",
        "ns",
        "ns_per_byte",
        "variation_ns",
    )

    def __init__(self, *, least_ns: int, short_ns: int, tolerance_ns: int) -> None:
        """Begin with a way on which nothing was measured.

        Args:
            least_ns: planned for always.
            short_ns: a way that is not longer counts as having no length.
            tolerance_ns: how much later than planned a message may come without harm.
        """
        self._least_ns = least_ns
        self._short_ns = short_ns
        self._tolerance_ns = tolerance_ns
        #: The last delays, less what bytes explain, and when each arrived.
        self._samples: deque[int] = deque(maxlen=_WINDOW_SIZE)
        self._times_ns: deque[int] = deque(maxlen=_WINDOW_SIZE)
        # The delays by size. A busy process takes every link for unusual, and sorting them for each result
        # costs it more than all else that is learned.
        self._ordered: list[int] = []
        #: The last distances of queued messages, in ns per byte, and the bytes of each.
        self._pairs: deque[tuple[float, int]] = deque(maxlen=_PAIRS)
        # The distances by size, the bytes of all of them, and the time per byte that they tell.
        self._ordered_pairs: list[tuple[float, int]] = []
        self._pairs_bytes = 0
        self._pairs_per_byte = 0.0
        #: When the last message that was measured arrived, and the bytes sent until then, its own included.
        self._arrived_ns = 0
        self._reached = 0
        self._sent_bytes = 0
        #: When each message that was not measured yet was sent, and the bytes sent until then.
        self._pending: deque[tuple[int, int]] = deque(maxlen=_PENDING_MOST)
        self._most_per_byte = 0.0
        #: Planned time of a message without bytes.
        self.ns = least_ns
        #: The part of it for delays beyond the least.
        self.variation_ns = 0
        #: The least of the last delays; 0 where that is short.
        self.length_ns = 0
        #: 0: bytes take no time that matters.
        self.ns_per_byte = 0.0
        #: When the bytes sent until now have left the wire.
        self.free_ns = 0
        #: How long the last message was on the wire.
        self.last_wire_ns = 0

    @property
    def is_usual(self) -> bool:
        """Whether a whole window of delays gave nothing to plan for."""
        return (
            len(self._samples) == _WINDOW_SIZE
            and self.ns == self._least_ns
            and not self.length_ns
            and not self.ns_per_byte
        )

    def wire_ns(self, num_bytes: int) -> int:
        """How long a message is on the wire."""
        return int((num_bytes + _MESSAGE_BYTES) * self.ns_per_byte)

    def send(self, at_ns: int, num_bytes: int) -> int:
        """A message is put on the wire behind those before; returns the bytes sent until now, its own included."""
        self._sent_bytes += num_bytes + _MESSAGE_BYTES
        self._pending.append((at_ns, self._sent_bytes))
        self.last_wire_ns = self.wire_ns(num_bytes)
        self.free_ns = max(self.free_ns, at_ns) + self.last_wire_ns
        return self._sent_bytes

    def measured(self, sent_ns: int, arrived_ns: int, *, num_bytes: int, sent_bytes: int) -> None:
        """A message arrived.

        Args:
            sent_ns: when it was put on the wire.
            arrived_ns: when it was there.
            num_bytes: of its tensors.
            sent_bytes: what `send` returned; 0: it was sent before anything was kept.
        """
        delay_ns = max(0, arrived_ns - sent_ns)
        apart_ns = arrived_ns - self._arrived_ns
        between = sent_bytes - self._reached if sent_bytes else num_bytes
        waited = True
        if between > 0:
            # Until the one before had left the wire, this one waited.
            queued = self._arrived_ns > 0 and sent_ns <= self._arrived_ns - self._least() + _SOON_NS
            self._learn_rate(apart_ns, delay_ns, num_bytes, between, queued=queued)
            self._reached = max(self._reached, sent_bytes)
            if self.ns_per_byte:
                wire_ns = between * self.ns_per_byte
                waited = sent_ns < self._arrived_ns and apart_ns < _APART * wire_ns + _SOON_NS
                delay_ns = max(0, delay_ns - self.wire_ns(num_bytes))
        if (not self.ns_per_byte or not waited) and self._take(arrived_ns, delay_ns):
            self._plan()
        self._arrived_ns = max(self._arrived_ns, arrived_ns)
        if self.ns_per_byte:
            self._find_free()

    def recall(self, length_ns: int, ns_per_byte: float, now_ns: int) -> None:
        """Plan with what an earlier controller had learned, until messages say otherwise."""
        if ns_per_byte:
            self.ns_per_byte = self._most_per_byte = ns_per_byte
            # As few messages as count, of a size that matters.
            num_bytes = max(_MESSAGE_BYTES, int(_NO_MATTER_NS / ns_per_byte) + 1)
            for _ in range(_PAIRS_LEAST):
                self._take_pair(ns_per_byte, num_bytes)
        if length_ns:
            self._take(now_ns, length_ns)
            self._plan()

    def was_short(self, arrived_ns: int, delay_ns: int) -> None:
        """A message arrived while nothing was kept, and there was no need to."""
        self._take(arrived_ns, delay_ns)

    def _take(self, arrived_ns: int, delay_ns: int) -> bool:
        """Take a delay in; returns whether the window is another one than before."""
        samples, times, ordered = self._samples, self._times_ns, self._ordered
        if times and 0 <= arrived_ns - times[-1] < _SAME_MOMENT_NS:
            if delay_ns <= samples[-1]:
                return False
            del ordered[bisect_left(ordered, samples[-1])]
            samples[-1] = delay_ns
            insort(ordered, delay_ns)
            return True
        if len(samples) == _WINDOW_SIZE:
            del ordered[bisect_left(ordered, samples[0])]
        samples.append(delay_ns)
        times.append(arrived_ns)
        insort(ordered, delay_ns)
        while times[0] < arrived_ns - _WINDOW_NS:
            times.popleft()
            del ordered[bisect_left(ordered, samples.popleft())]
        return True

    def _least(self) -> int:
        return self._ordered[0] if self._ordered else 0

    def _learn_rate(
        self, apart_ns: int, delay_ns: int, num_bytes: int, between: int, *, queued: bool
    ) -> None:
        """Learn the time per byte from a message, and from its distance to the one before."""
        most = delay_ns / (num_bytes + _MESSAGE_BYTES)
        loosened = self._most_per_byte * (1 + _LOOSEN)
        self._most_per_byte = min(most, loosened) if loosened else most
        if queued:
            self._take_pair(max(0, apart_ns) / between, between)
        per_byte = min(self._pairs_per_byte, self._most_per_byte)
        if abs(per_byte - self.ns_per_byte) > 0.1 * self.ns_per_byte:
            # The bytes now explain another part of the delays so far.
            self.ns_per_byte = per_byte
            self._forget_delays()
            self.length_ns, self.ns, self.variation_ns = 0, self._least_ns, 0

    def _take_pair(self, per_byte: float, num_bytes: int) -> None:
        """Take in the distance of a message that waited for the one before."""
        pairs, ordered = self._pairs, self._ordered_pairs
        if len(pairs) == _PAIRS:
            oldest = pairs[0]
            self._pairs_bytes -= oldest[1]
            del ordered[bisect_left(ordered, oldest)]
        pair = per_byte, num_bytes
        pairs.append(pair)
        insort(ordered, pair)
        self._pairs_bytes += num_bytes
        self._pairs_per_byte = 0.0
        if len(pairs) < _PAIRS_LEAST:
            return
        # Each counts by its bytes: a message without any tells nothing of what tensors take.
        left = _PAIRS_QUANTILE * self._pairs_bytes
        index = 0
        while left > 0:
            left -= ordered[index][1]
            index += 1
        quantile = ordered[index - 1][0]
        if quantile * self._pairs_bytes >= _NO_MATTER_NS * len(pairs):
            self._pairs_per_byte = quantile

    def _find_free(self) -> None:
        """Take up the wire where the last message that was measured left it."""
        pending, reached, per_byte = self._pending, self._reached, self.ns_per_byte
        while pending and pending[0][1] <= reached:
            pending.popleft()
        free_ns = self._arrived_ns - self._least()
        for sent_ns, sent_bytes in pending:
            free_ns = max(free_ns, sent_ns) + int((sent_bytes - reached) * per_byte)
            reached = sent_bytes
        self.free_ns = free_ns

    def _plan(self) -> None:
        ordered = self._ordered
        length_ns = ordered[0]
        self.length_ns = length_ns = length_ns if length_ns > self._short_ns else 0
        number = len(ordered)
        usual = max(0, min(int(number * _QUANTILE), number - 1 - _EVENTS))
        high_ns = ordered[usual] - self._tolerance_ns
        self.ns = max(self._least_ns, length_ns, high_ns)
        self.variation_ns = self.ns - max(self._least_ns, length_ns)

    def forget_variation(self) -> None:
        """Only the length stays of what was measured, and the time per byte."""
        if self._ordered:
            least_ns = self._ordered[0]
            at_ns = self._times_ns[self._samples.index(least_ns)]
            self._forget_delays()
            self._take(at_ns, least_ns)
        self.ns = max(self._least_ns, self.length_ns)
        self.variation_ns = 0

    def _forget_delays(self) -> None:
        self._samples.clear()
        self._times_ns.clear()
        self._ordered.clear()

    def forget(self) -> None:
        """Forget everything that was measured."""
        self._forget_delays()
        self._pending.clear()
        self._pairs.clear()
        self._ordered_pairs.clear()
        self._pairs_bytes = 0
        self._pairs_per_byte = 0.0
        self.length_ns = self.free_ns = self.variation_ns = 0
        self.ns = self._least_ns
        self.ns_per_byte = self._most_per_byte = 0.0


class LinkPlan:
    """Both ways of one worker's link."""

    __slots__ = (
        "_is_stale",
        "_measured_ns",
        "_news_ns",
        "_short_at_ns",
        "_short_back_ns",
        "_short_out_ns",
        "back",
        "excess_ns",
        "is_thin",
        "is_usual",
        "out",
        "there_ns",
        "unusual",
        "usual_ns",
    )

    def __init__(
        self, *, least_ns: int, tolerance_ns: int, unusual: set[LinkPlan] | None = None
    ) -> None:
        """Begin with a link on which nothing was measured.

        Args:
            least_ns: the least delay to the worker that is planned for.
            tolerance_ns: how much later than planned an action, or an answer, may come without harm.
            unusual: the set of links that are not usual, to which this one adds itself. May be None.
        """
        #: The links that have to be planned for, this one among them or not.
        self.unusual = set() if unusual is None else unusual
        #: The longest way out of a usual link.
        self.usual_ns = least_ns
        self._news_ns = least_ns + tolerance_ns
        self.out = OneWay(least_ns=least_ns, short_ns=least_ns, tolerance_ns=tolerance_ns)
        self.back = OneWay(least_ns=0, short_ns=_SHORT_BACK_NS, tolerance_ns=tolerance_ns)
        #: Nothing of it has to be planned for beyond the least, and nothing is kept.
        self.is_usual = True
        #: How much longer the ways there and back are than what is planned for always: lanes are fed so much
        #: earlier.
        self.excess_ns = 0
        #: Bytes take time on it.
        self.is_thin = False
        #: On a thin link, when an action without bytes could begin; `Dispatch` notes it before it asks a policy.
        self.there_ns = 0
        self._measured_ns = 0
        self._is_stale = False
        #: The last ways that were no news, and when; at first none.
        self._short_out_ns = self._short_back_ns = 0
        self._short_at_ns = -_WINDOW_NS

    def is_news(self, out_ns: int, back_ns: int, now_ns: int) -> bool:
        """Whether the ways of an action and of its result are to be learned from.

        The last that were not are delays like all others to what comes after: without them the first batch that
        queues on a thin link would be taken for its length, and more and more sent to fill it.
        """
        if self.is_usual:
            if out_ns <= self._news_ns and back_ns <= _SHORT_BACK_NS:
                self._short_out_ns, self._short_back_ns, self._short_at_ns = out_ns, back_ns, now_ns
                return False
            if now_ns - self._short_at_ns < _WINDOW_NS:
                self.out.was_short(self._short_at_ns, self._short_out_ns)
                self.back.was_short(self._short_at_ns, self._short_back_ns)
        return True

    def learned(self, now_ns: int) -> None:
        """A result was measured on one way, or on both."""
        self.is_thin = bool(self.out.ns_per_byte or self.back.ns_per_byte)
        self.is_usual = False
        self.unusual.add(self)
        self._measured_ns, self._is_stale = now_ns, False
        self.excess_ns = self.out.ns + self.back.ns - self.usual_ns
        if self.out.is_usual and self.back.is_usual:
            self._forget()

    def recall(self, link: LearnedLink, now_ns: int) -> None:
        """Plan with what an earlier controller had learned; like what was measured, it is soon forgotten."""
        self.out.recall(link.out_length_ns, link.out_ns_per_byte, now_ns)
        self.back.recall(link.back_length_ns, link.back_ns_per_byte, now_ns)
        self.learned(now_ns)

    def way_ns(self, now_ns: int) -> int:
        """Way there and back of an action without bytes, on a wire that is free."""
        if self.is_usual:
            return self.usual_ns
        silent_ns = now_ns - self._measured_ns
        if silent_ns >= _FORGET_ALL_NS:
            self._forget()
        elif silent_ns >= _FORGET_NS and not self._is_stale:
            self._is_stale = True
            self.out.forget_variation()
            self.back.forget_variation()
            self.excess_ns = self.out.ns + self.back.ns - self.usual_ns
        return self.usual_ns + self.excess_ns

    def expected_ns(self, now_ns: int, in_bytes: int = 0, out_bytes: int = 0) -> int:
        """How long to allow for until an action that is sent now could begin, as heard of here.

        It takes along its inputs, and its result brings the outputs.
        """
        way_ns = self.way_ns(now_ns)
        if not self.is_thin:
            return way_ns
        out, back = self.out, self.back
        queued_ns = max(0, out.free_ns - now_ns)
        return way_ns + queued_ns + out.wire_ns(in_bytes) + back.wire_ns(out_bytes)

    def wire_ns(self, in_bytes: int, out_bytes: int) -> int:
        """The time that an action's inputs or its outputs take the wire, whichever is longer."""
        return max(self.out.wire_ns(in_bytes), self.back.wire_ns(out_bytes))

    @property
    def length_ns(self) -> int:
        """Length of both ways."""
        return self.out.length_ns + self.back.length_ns

    def room_ns(self, lane_room_ns: int, lookahead_ns: int) -> int:
        """When to send the next batch on a thin link, deciding `lookahead_ns` ahead of lane and wire.

        `lane_room_ns` is when to send it if bytes took no time.
        """
        out = self.out
        return max(lane_room_ns - out.last_wire_ns, out.free_ns - lookahead_ns)

    def begin_ns(self, free_ns: int, in_bytes: int, out_bytes: int, exec_ns: int) -> int:
        """When an action could begin that is sent at the time of `there_ns`, as heard of here.

        Args:
            free_ns: when its lane is free.
            in_bytes: inputs that it takes along.
            out_bytes: outputs that its result will bring. Where they take longer than the EXEC, they wait for
                those of the action before.
            exec_ns: duration of its EXEC.
        """
        out_ns = self.back.wire_ns(out_bytes)
        free_ns += max(0, out_ns - exec_ns)
        return max(free_ns, self.there_ns + self.out.wire_ns(in_bytes) + out_ns)

    def doubt(self, now_ns: int) -> None:
        """The link alone rules a request out: forget what was long ago, or nothing would ever be sent again."""
        if not self.is_usual and now_ns >= self._measured_ns + _FORGET_NS:
            self._forget()

    def _forget(self) -> None:
        self.out.forget()
        self.back.forget()
        self.is_usual, self.is_thin, self.excess_ns = True, False, 0
        self.unusual.discard(self)
