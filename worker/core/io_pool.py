"""The memory for inputs and outputs between the steps of an Infer."""

from __future__ import annotations

from bisect import bisect_left, insort

# Tensors start on a cache line, which also suits vector instructions best.
ALIGNMENT_BYTES = 64


class IoPool:
    """Allocates slots in one fixed piece of memory, first fit.

    Slots live for milliseconds and there are tens of them, so a sorted list of gaps is enough.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        #: Gaps as (offset, bytes), by offset; no two touch.
        self._gaps: list[tuple[int, int]] = [(0, num_bytes)] if num_bytes else []
        self._slots: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """The size of the whole pool."""
        return self._num_bytes

    @property
    def num_slots(self) -> int:
        """The number of slots handed out."""
        return len(self._slots)

    def acquire(self, num_bytes: int) -> int | None:
        """Take a slot of at least `num_bytes`; its offset, or None if no gap is large enough."""
        wanted = max(aligned(num_bytes), ALIGNMENT_BYTES)
        for index, (offset, gap_bytes) in enumerate(self._gaps):
            if gap_bytes >= wanted:
                if gap_bytes == wanted:
                    del self._gaps[index]
                else:
                    self._gaps[index] = (offset + wanted, gap_bytes - wanted)
                self._slots[offset] = wanted
                return offset
        return None

    def release(self, offset: int) -> None:
        """Give a slot back, by the offset that `acquire` returned."""
        num_bytes = self._slots.pop(offset)
        index = bisect_left(self._gaps, (offset, 0))
        if index < len(self._gaps) and self._gaps[index][0] == offset + num_bytes:
            num_bytes += self._gaps.pop(index)[1]
        if index > 0 and sum(self._gaps[index - 1]) == offset:
            offset, before = self._gaps.pop(index - 1)
            num_bytes += before
        insort(self._gaps, (offset, num_bytes))

    def check(self) -> None:
        """Assert that gaps and slots cover the memory exactly once."""
        position = 0
        for offset, num_bytes in sorted([*self._gaps, *self._slots.items()]):
            assert offset == position, f"IO pool: found {offset}, expected {position}"
            position += num_bytes
        assert position == self._num_bytes, f"IO pool: {position} of {self._num_bytes} bytes"


def aligned(num_bytes: int) -> int:
    """Round up to `ALIGNMENT_BYTES`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
