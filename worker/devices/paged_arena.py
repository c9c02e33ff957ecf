"""The processor's weights cache: pages, and an arena in which the pages of one model lie side by side.

A kernel reads weights at addresses without gaps, but a model's pages may be anywhere. A GPU's EXEC copies them together.
Here the operating system moves the pages by its page tables: 15 us for a page of 16 MiB, which takes 1.2 ms to copy. For
the 102 MB of a ResNet-50 that is 0.1 ms instead of 8 to 12 ms, which was an eighth of a batch of one on one core, and a
quarter on two.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from clockwright.units import PAGE_BYTES
from worker.engines.onnxruntime import Bytes, address_of

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
# Linux 5.7: what was moved away leaves its addresses taken, so that nothing else of this process comes to lie there.
_MREMAP_DONTUNMAP = 4


class PagedArena:
    """Pages with homes of their own, some of which are shown in the arena."""

    def __init__(self, num_pages: int, arena_bytes: int, *, moves: bool | None = None) -> None:
        """Take the memory of the pages, and that of the arena where pages have to be copied.

        Args:
            num_pages: those of the cache.
            arena_bytes: the most that is shown at once.
            moves: whether pages are moved instead of copied. None: if this system can move them.
        """
        self.moves = can_move_pages() if moves is None else moves
        self._homes = _addresses(num_pages)
        self._homes.fill(0)  # every page is touched, so that no use faults later
        #: What is shown begins with the first byte.
        self.arena = _addresses(-(-arena_bytes // PAGE_BYTES))
        if not self.moves:
            self.arena.fill(0)
        #: The pages in the arena, in their order there.
        self._shown: tuple[int, ...] = ()
        self._lock = threading.Lock()

    def write(self, page: int, content: Bytes) -> None:
        """Fill a page that no running kernel reads, from its begin."""
        with self._lock:
            if page in self._shown:
                # What is shown belongs to a model that has been evicted.
                self._bring_home()
        self._homes[page * PAGE_BYTES :][: len(content)] = content

    def show(self, pages: Sequence[int], num_bytes: int) -> None:
        """Have the arena begin with so many bytes of these pages; nothing else is there afterwards.

        Raises OSError if the system does not move them.
        """
        if not self.moves:
            for place, page in enumerate(pages):
                begin = place * PAGE_BYTES
                part = self.arena[begin : min(begin + PAGE_BYTES, num_bytes)]
                part[:] = self._homes[page * PAGE_BYTES :][: len(part)]
            return
        with self._lock:
            if self._shown == pages:
                return
            self._bring_home()
            for place, page in enumerate(pages):
                _move(_page(self._homes, page), _page(self.arena, place))
                self._shown += (page,)

    def _bring_home(self) -> None:
        while self._shown:
            *others, last = self._shown
            _move(_page(self.arena, len(others)), _page(self._homes, last))
            self._shown = tuple(others)


@cache
def can_move_pages() -> bool:
    """Whether this system moves memory from address to address and keeps both taken."""
    ends = _addresses(2)
    ends[0] = 1
    try:
        _move(_page(ends, 0), _page(ends, 1))
    except (OSError, AttributeError):  # an older kernel, or another system
        return False
    return bool(ends[PAGE_BYTES] == 1 and ends[0] == 0)


def _addresses(num_pages: int) -> Bytes:
    """Take addresses for whole pages, from a multiple of a page on; what is touched there takes memory."""
    # Moving is quick where both ends are aligned alike with the tables that are moved.
    memory = mmap.mmap(-1, (num_pages + 1) * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    begin = -address_of(everything) % PAGE_BYTES
    return everything[begin : begin + num_pages * PAGE_BYTES]


def _page(memory: Bytes, index: int) -> int:
    return address_of(memory) + index * PAGE_BYTES


@cache
def _mremap() -> Callable[[int, int, int, int, int], int | None]:
    function = ctypes.CDLL(None, use_errno=True).mremap
    size = ctypes.c_size_t
    function.argtypes = (ctypes.c_void_p, size, size, ctypes.c_int, ctypes.c_void_p)
    function.restype = ctypes.c_void_p
    return function


def _move(source: int, target: int) -> None:
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if _mremap()(source, PAGE_BYTES, PAGE_BYTES, flags, target) != target:
        number = ctypes.get_errno()
        raise OSError(number, f"a page cannot be moved: {os.strerror(number)}")
