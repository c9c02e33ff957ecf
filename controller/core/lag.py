"""How far the controller itself is behind: how long results lie unread, as long as all of them do.

An answer leaves when its result is read, not when it is there. So while the controller is short of time, a request is
admitted only if that is in time, too. A pause that is over says nothing about the next answers: what counts is the
least delay of a stretch of time, and only if it lasts.
"""

from __future__ import annotations

from clockwright.units import NS_PER_MS

#: Timers of event loops are so coarse. A result that lies unread for longer tells that the controller is short of time.
NO_MATTER_NS = NS_PER_MS
# Too short: a pause counts. Too long: requests are admitted, sent and answered too late meanwhile.
_STRETCH_NS = 10 * NS_PER_MS


class Lag:
    """Least delay of the results read lately."""

    __slots__ = ("_least_ns", "_ns", "_until_ns", "is_late")

    def __init__(self) -> None:
        #: The last result was late. Else `at` is 0 at all times.
        self.is_late = False
        # The least delays of the previous stretch and of the present one, and when the present one ends.
        self._ns = self._least_ns = self._until_ns = 0

    def read(self, unread_ns: int, now_ns: int) -> None:
        """A result is read that lay there for so long."""
        if unread_ns <= NO_MATTER_NS:
            self._ns = self._until_ns = 0
            self.is_late = False
        elif now_ns < self._until_ns:
            self._least_ns = min(self._least_ns, unread_ns)
        else:
            lasts = now_ns < self._until_ns + _STRETCH_NS
            self._ns = self._least_ns if lasts else 0
            self.is_late = True
            self._least_ns, self._until_ns = unread_ns, now_ns + _STRETCH_NS

    def at(self, now_ns: int) -> int:
        """How long a result that comes soon will lie unread, in ns. 0 where the controller is on time."""
        return min(self._ns, self._least_ns) if now_ns < self._until_ns + _STRETCH_NS else 0
