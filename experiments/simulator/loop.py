"""Virtual time: a heap of handlers, and the arrivals."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

#: Later than everything: the next arrival of a source that has ended.
NEVER_NS = 1 << 62


class Loop:
    """Calls handlers in order of time; among equals, in the order of the calls.

    Arrivals do not go through the heap, because their source is in order already, and there may be a hundred
    million of them.
    """

    __slots__ = ("_heap", "_serial", "arrival_ns", "arrive", "now_ns")

    def __init__(self) -> None:
        #: Virtual time, ns since the run began.
        self.now_ns = 0
        #: When to call `arrive` next; the callee sets it again.
        self.arrival_ns = NEVER_NS
        self.arrive: Callable[[], None] = _nothing
        self._heap: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._serial = 0

    def now(self) -> int:
        """Virtual time, ns since the run began: the clock of a ledger."""
        return self.now_ns

    @property
    def next_ns(self) -> int:
        """When something is to be done next; `NEVER_NS` or later: nothing is."""
        return min(self.arrival_ns, self._heap[0][0]) if self._heap else self.arrival_ns

    def at(self, time_ns: int, handler: Callable[[Any], None], argument: Any) -> None:  # noqa: ANN401
        """Call `handler(argument)` at a virtual time, not before the present."""
        self._serial += 1
        heappush(self._heap, (time_ns, self._serial, handler, argument))

    def run(self, until_ns: int) -> None:
        """Advance to `until_ns` inclusive."""
        heap = self._heap
        while True:
            arrival_ns = self.arrival_ns
            # Handlers go before an arrival at the same time, so the arrival finds earlier decisions done.
            if heap and heap[0][0] <= arrival_ns:
                if heap[0][0] > until_ns:
                    break
                self.now_ns, _, handler, argument = heappop(heap)
                handler(argument)
            elif arrival_ns <= until_ns:
                self.now_ns = arrival_ns
                self.arrive()
            else:
                break
        self.now_ns = max(self.now_ns, until_ns)


def _nothing() -> None:
    return
