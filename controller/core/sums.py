"""Sums over keys that come and go: how many rows go before a deadline, however many requests wait.

Numbers are summed at several levels, at each over ranges of 64 times the length. A prefix is then the sum of at
most 63 ranges per level, and of those few that the last level has in all.
"""

from __future__ import annotations

from typing import Final

_BITS: Final = 6
# The last level has ranges of 2^42 ns, 73 minutes: an SLO of a day is 20 of them.
_LEVELS: Final = 8


class SumsInOrder:
    """Numbers by an integer key, a time in ns; those of equal keys add up."""

    __slots__ = ("_levels", "total")

    def __init__(self) -> None:
        #: By level: the sum over each range of keys that has one.
        self._levels: list[dict[int, int]] = []
        self.total = 0

    def add(self, key: int, number: int) -> None:
        """Add a number, more than 0, under a key; a negative one takes back what was added."""
        if not self._levels:  # made late, because most models have none
            self._levels = [{} for _ in range(_LEVELS)]
        self.total += number
        for sums in self._levels:
            total = sums.get(key, 0) + number
            if total:
                sums[key] = total
            else:
                del sums[key]
            key >>= _BITS

    def before(self, key: int) -> int:
        """Sum of what stands under smaller keys."""
        if not self.total:
            return 0
        total = 0
        for sums in self._levels[:-1]:
            for sibling in range(key >> _BITS << _BITS, key):
                total += sums.get(sibling, 0)
            key >>= _BITS
        return total + sum([number for each, number in self._levels[-1].items() if each < key])
