"""Settings of our processes for memory and garbage, and their end with the process that started them."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# A request leaves cycles of five objects behind, all of them gRPC's. A collection costs as much as it finds,
# so rare collections save nothing and stop the process for long: 50,000 objects took 25 to 80 ms, every 4 s
# at 1,200 requests/s; 2,000 take 1 to 2 ms, at the same rate of requests. Old objects are mostly rows of
# telemetry, not garbage, and are looked at every five million.
_COLLECT_AFTER = (2_000, 10, 250)

_PR_SET_PDEATHSIG = 1

_MADV_COLLAPSE = 25
_HUGE_BYTES = 2 << 20
# Python's pieces of memory that are taken at once: what a controller comes to. In each fit so many of the largest
# objects that Python keeps there, of 512 bytes with their head.
_PIECES_KEPT = 24
_BLOCKS_PER_PIECE = 1984
_BLOCK_BYTES = 479
_kept: list[bytes] = []
# The stack of a thread uses less.
_PIECE_BYTES_MIN = 1 << 20
# Larger ones are a device's. To move a gigabyte takes half a second.
_PIECE_BYTES_MAX = 256 << 20


def end_with(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it is gone.

    Only Linux can do this; on other systems nothing happens. If the parent has died already, this process
    exits at once.

    Args:
        parent_pid: process id of the parent, which started this process.
        number: the signal.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        sys.exit(f"the process {parent_pid} that started this one is gone")


def outlive_hangups() -> None:
    """Have SIGHUP not end this process at any time.

    An operator who changed files may send it to all processes, also to those with nothing to read again. Unlike an
    ignored signal, programs that this one starts keep its default meaning.
    """
    signal.signal(signal.SIGHUP, lambda *_: None)


def how_it_ended(status: int) -> str:
    """Say a process's exit status in words; negative ones are signals, as `subprocess` has them."""
    if status == 0:
        return "has left"
    if status > 0:
        return f"ended with {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def keep_big_blocks() -> None:
    """Have glibc keep freed blocks of megabytes instead of giving them back to the kernel.

    A tensor message is allocated and freed per request, and glibc maps and unmaps blocks above
    128 KiB each time, so that every page faults again. C libraries without `mallopt` are left alone.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 64 << 20)
        mallopt(trim_threshold, 256 << 20)
        mallopt(top_pad, 32 << 20)


def keep_together() -> None:
    """Have Python take memory for its small objects in large pieces, before imports take what lies between.

    It takes pieces of 1 MiB as it needs them, into the gaps first, and those that stand alone fit into no huge page.
    """
    blocks = [bytes(_BLOCK_BYTES) for _ in range(_PIECES_KEPT * _BLOCKS_PER_PIECE)]
    # A piece without any object would go back to the kernel.
    _kept.extend(blocks[::_BLOCKS_PER_PIECE])


def use_huge_pages() -> None:
    """Move the memory in use into huge pages, which takes some ms. Nothing happens before Linux 6.1 and elsewhere.

    A request touches objects all over Python's memory, and after each wait the processor has to find their pages
    again.
    """
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        for begin, end in _pieces_in_use(Path("/proc/self/smaps").read_text(encoding="utf-8")):
            for page in range(-(-begin // _HUGE_BYTES) * _HUGE_BYTES, end, _HUGE_BYTES):
                # Returns an error where nothing is in use, or where the piece ends.
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_BYTES), _MADV_COLLAPSE)


def _pieces_in_use(smaps: str) -> Iterator[tuple[int, int]]:
    """Find the memory that is neither of a file nor a thread's stack: where each piece begins and ends."""
    begin = end = 0
    for line in smaps.splitlines():
        first, *words = line.split()
        if not first.endswith(":"):
            begin = end = 0
            if words[0] == "rw-p" and words[3] == "0" and words[4:] in ([], ["[heap]"]):
                begin, end = (int(number, 16) for number in first.split("-"))
        elif first == "Rss:":
            used_bytes = int(words[0]) << 10
            if _PIECE_BYTES_MIN <= used_bytes <= end - begin <= _PIECE_BYTES_MAX:
                yield begin, end


def give_back_memory() -> None:
    """Give free memory back to the kernel; takes time in proportion. Any thread may call it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def collect_rarely() -> None:
    """Turn garbage collection off while a new process imports: nearly all objects made then stay.

    By default the collector looks at what is new after 700 objects, and takes a tenth of the time of an import.
    """
    gc.set_threshold(100_000)


def freeze_garbage(*, collect: bool = True) -> None:
    """Exclude all present objects from garbage collection: 2 million take 205 ms to walk.

    `collect` has it run once before. A new process need not: it has some thousand cycles at most.
    """
    if collect:
        gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
