"""How many of the requests for a lane were dropped of late, and for how many models that closes it."""

from __future__ import annotations

from clockwright.units import NS_PER_MS
from controller.core.shares import ServedShare

# What was counted before counts half as much after each window.
_WINDOW_NS = 50 * NS_PER_MS

# With fewer dropped, a burst that passes would close models whose requests could be served.
_FROM = 0.01

# The share closed follows what is missing of the aim, by this much per window.
_STEP = 0.3
_MOST = 0.95


class Gate:
    """What became of the requests for one exec lane, or for all loads, and the share of models closed for it."""

    __slots__ = ("_at_door", "_fate", "_served", "_share", "_turned_away", "_until_ns", "_waited")

    def __init__(self) -> None:
        # Requests of late: served; refused after they waited, by prediction, by the gate.
        self._served = self._waited = self._at_door = self._turned_away = 0.0
        #: Those that were not turned away, over seconds.
        self._fate = ServedShare()
        self._share = 0.0
        self._until_ns = 0

    def served(self, number: int, now_ns: int) -> None:
        """Requests went to a worker."""
        self._served += number
        self._fate.count(now_ns, served=number)

    def dropped(self, now_ns: int, *, waited: bool) -> None:
        """A request was refused for want of time, at arrival or later."""
        if waited:
            self._waited += 1
        else:
            self._at_door += 1
        self._fate.count(now_ns, dropped=1)

    def share_closed(self, at_once: float, now_ns: int) -> float:
        """The share of models that are closed now; 0 where nearly nothing is dropped.

        Args:
            at_once: share of all requests dropped that is to be refused at arrival.
            now_ns: the present.
        """
        if now_ns >= self._until_ns:
            self._follow(at_once, now_ns)
        return self._share

    def share_of(self, fate: ServedShare, closed: float) -> float:
        """The share of time for which one model is closed: more where more of it is dropped in the end.

        Args:
            fate: what became of its requests.
            closed: what `share_closed` says.
        """
        mean = 1.0 - self._fate.beside(1.0)
        if mean <= 0.0:
            return closed
        return min(closed * (1.0 - fate.beside(1.0 - mean)) / mean, _MOST)

    def turned_away(self) -> None:
        """A request is refused because its model is closed."""
        self._turned_away += 1

    def _follow(self, at_once: float, now_ns: int) -> None:
        """A window is over: close more models, or fewer."""
        dropped = self._waited + self._at_door + self._turned_away
        total = dropped + self._served
        if now_ns >= self._until_ns + _WINDOW_NS or not total:
            self._served = self._waited = self._at_door = self._turned_away = self._share = 0.0
        elif self._waited + self._at_door < _FROM * total:
            # What the gate itself refuses is no sign that there is still too much.
            self._share = self._share / 2 if self._share > _FROM else 0.0
        else:
            missing = at_once * dropped - self._at_door - self._turned_away
            self._share = min(max(self._share + _STEP * missing / total, 0.0), _MOST)
        self._served /= 2
        self._waited /= 2
        self._at_door /= 2
        self._turned_away /= 2
        self._until_ns = now_ns + _WINDOW_NS
