"""Requests that a busy event loop does not take now, and that have time to wait until it does. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from clockwright.units import NS_PER_S

#: A request whose SLO is at least this long may wait; to others a refusal at once is worth more.
PATIENT_NS: Final = NS_PER_S

#: So many wait: they count as open, and others need room too.
WAITING_MAX: Final = 1024


class InLine(Protocol):
    """A request, to whoever has it wait."""

    @property
    def over(self) -> bool:
        """Whether nobody waits for its answer any more."""


@dataclass(slots=True)
class _Place:
    """One request's."""

    request: InLine
    begin: Callable[[], None]
    refuse: Callable[[], None]
    latest_ns: int


class WaitingLine:
    """Who waits, in the order in which they came."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._places: deque[_Place] = deque()

    def __len__(self) -> int:
        """How many wait, those included whose clients have left."""
        return len(self._places)

    def enter(
        self,
        request: InLine,
        begin: Callable[[], None],
        refuse: Callable[[], None],
        *,
        latest_ns: int,
        now_ns: int,
        rate_rps: float,
    ) -> bool:
        """Let a request wait, unless too many do, or its turn would come too late at that rate.

        Args:
            request: says when nobody waits for it any more.
            begin: is called when its turn comes.
            refuse: is called when its turn does not come in time, or nobody waits for it any more.
            latest_ns: its turn must have come by then.
            now_ns: the present.
            rate_rps: so many have their turn per second.
        """
        if len(self._places) >= WAITING_MAX:
            return False
        if now_ns + (len(self._places) + 1) / rate_rps * NS_PER_S > latest_ns:
            return False
        self._places.append(_Place(request, begin, refuse, latest_ns))
        return True

    def advance(self, now_ns: int, admit: Callable[[], bool]) -> None:
        """Begin with those for whom there is time now, and refuse those for whom it is too late.

        Args:
            now_ns: the present.
            admit: says whether there is time for one more, which counts then.
        """
        places = self._places
        while places:
            place = places[0]
            if place.request.over or now_ns > place.latest_ns:
                places.popleft().refuse()
            elif admit():
                places.popleft().begin()
            else:
                break
