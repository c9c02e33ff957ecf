"""Which parts of a piece of memory are taken: pure bookkeeping, which touches no memory.

Blocks have sizes of powers of two (Knuth's buddy system): both to take and to give back one costs as many
steps as there are sizes, and neighbours that are free become one again. The lowest that fits is taken, because
what was used lately lies low, and its pages are there.

Source: D. E. Knuth, "The Art of Computer Programming", volume 1, section 2.5, algorithms R and S.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

#: Smallest block. Smaller tensors travel faster with their action.
BLOCK_BYTES_MIN: Final = 64 << 10


class SlabBook:
    """Keeps the book of one piece of memory."""

    def __init__(self, num_bytes: int) -> None:
        """Begin with all of it free; what is beyond a power of two is left alone."""
        self._num_orders = max((num_bytes // BLOCK_BYTES_MIN).bit_length(), 0)
        #: Size of the part that is used.
        self.num_bytes = BLOCK_BYTES_MIN << self._num_orders - 1 if self._num_orders else 0
        #: Bytes of all blocks that are taken.
        self.used_bytes = 0
        # Beginnings of free blocks by order. What is in a heap and not in its set is out of date.
        self._free: list[set[int]] = [set() for _ in range(self._num_orders)]
        self._heaps: list[list[int]] = [[] for _ in range(self._num_orders)]
        self._taken: dict[int, int] = {}
        if self._num_orders:
            self._put(self._num_orders - 1, 0)

    def take(self, num_bytes: int) -> int | None:
        """Take a block. Returns where it begins, or None if there is no room."""
        wanted = ((num_bytes - 1) // BLOCK_BYTES_MIN).bit_length() if num_bytes > 0 else 0
        order = wanted
        while order < self._num_orders and not self._free[order]:
            order += 1
        if order >= self._num_orders:
            return None
        free, heap = self._free[order], self._heaps[order]
        while (begin := heappop(heap)) not in free:
            pass
        free.remove(begin)
        while order > wanted:
            order -= 1
            self._put(order, begin + (BLOCK_BYTES_MIN << order))
        self._taken[begin] = wanted
        self.used_bytes += BLOCK_BYTES_MIN << wanted
        return begin

    def give_back(self, begin: int) -> None:
        """Free a block that was taken. Raises KeyError if none that is taken begins there."""
        order = self._taken.pop(begin)
        self.used_bytes -= BLOCK_BYTES_MIN << order
        while order < self._num_orders - 1:
            buddy = begin ^ (BLOCK_BYTES_MIN << order)
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            begin = min(begin, buddy)
            order += 1
        self._put(order, begin)

    def _put(self, order: int, begin: int) -> None:
        free, heap = self._free[order], self._heaps[order]
        free.add(begin)
        heappush(heap, begin)
        if len(heap) > 64 + 2 * len(free):
            heap[:] = sorted(free)
