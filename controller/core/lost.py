"""Counts the requests of a model that were refused lately although it had a copy: the worth of another copy."""

from __future__ import annotations

from clockwright.units import NS_PER_S

_HALF_LIFE_NS = NS_PER_S


class Lost:
    """Requests refused; what is older counts half as much every second."""

    __slots__ = ("_count", "_period")

    def __init__(self) -> None:
        self._count = 0.0
        self._period = 0

    def count(self, now_ns: int) -> None:
        """One was refused."""
        self._count = self.of_late(now_ns) + 1.0
        self._period = now_ns // _HALF_LIFE_NS

    def of_late(self, now_ns: int) -> float:
        """Their number, faded."""
        return float(self._count * 0.5 ** min(now_ns // _HALF_LIFE_NS - self._period, 64))
