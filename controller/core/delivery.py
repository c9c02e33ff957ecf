"""How long an action is on its way to a worker.

The way usually takes less than `dispatch_delay_ns`, and an action that comes a little later still starts
inside its window. But a window is a few milliseconds, and a batch of images takes tens of them where the
link is busy, or where the worker's process has to share its processor. If that were not planned for, every
action would come after its window, be refused, and be sent again, which keeps the link busy with inputs that
nobody uses. (Measured: 32 clients with 602 kB inputs got 2 answers per second where the link carried 800
requests.) So the delay is measured, and an action is planned to begin when it can be there.
"""

from __future__ import annotations

from collections import deque

from clockwright.units import NS_PER_MS

# The estimates of durations keep as many samples: enough to meet a bad one, few enough to forget it soon.
_WINDOW_SIZE = 10

# A delay that rules every request out is never measured again, so it is forgotten after this long without
# an action: what queued on the link has gone by then.
_FORGET_NS = 500 * NS_PER_MS


class DeliveryDelay:
    """How long actions are on their way to one worker."""

    __slots__ = ("_delay_ns", "_forget_ns", "_least_ns", "_samples", "_tolerance_ns")

    def __init__(self, *, least_ns: int, tolerance_ns: int) -> None:
        """Begin with the least.

        Args:
            least_ns: planned for always.
            tolerance_ns: how much later than planned an action may come without harm.
        """
        self._least_ns = least_ns
        self._tolerance_ns = tolerance_ns
        self._samples: deque[int] = deque(maxlen=_WINDOW_SIZE)
        self._delay_ns = least_ns
        self._forget_ns = 0

    def measured(self, delay_ns: int, now_ns: int) -> None:
        """An action was so long on its way."""
        delay_ns -= self._tolerance_ns
        if delay_ns <= self._least_ns and self._delay_ns == self._least_ns:
            return  # nothing to learn, as nearly always
        self._samples.append(delay_ns)
        self._delay_ns = max(self._least_ns, *self._samples)
        self._forget_ns = now_ns + _FORGET_NS

    def expected_ns(self, now_ns: int) -> int:
        """How long to allow for: the worst of the last few, less what does no harm."""
        if self._delay_ns > self._least_ns and now_ns >= self._forget_ns:
            self._samples.clear()
            self._delay_ns = self._least_ns
        return self._delay_ns
