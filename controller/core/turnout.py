"""How many requests of a model were served and lost of late: what its copies are worth, and what another would be."""

from __future__ import annotations

from clockwright.units import NS_PER_S

_HALF_LIFE_NS = NS_PER_S


class Turnout:
    """Requests served and lost; what is older counts half as much every second."""

    __slots__ = ("_lost", "_period", "_served")

    def __init__(self) -> None:
        self._served = 0.0
        self._lost = 0.0
        self._period = 0

    def count(self, now_ns: int, *, served: int = 0, lost: int = 0) -> None:
        """Requests went to a worker, or were refused."""
        self._fade(now_ns)
        self._served += served
        self._lost += lost

    def served(self, now_ns: int) -> float:
        """Requests that went to a worker."""
        self._fade(now_ns)
        return self._served

    def lost(self, now_ns: int) -> float:
        """Requests that were refused though the model had a copy."""
        self._fade(now_ns)
        return self._lost

    def _fade(self, now_ns: int) -> None:
        period = now_ns // _HALF_LIFE_NS
        if period != self._period:
            fade = 0.5 ** min(period - self._period, 64)
            self._served *= fade
            self._lost *= fade
            self._period = period
