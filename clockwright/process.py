"""Settings of our processes for memory and garbage, and their end with the process that started them."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from contextlib import suppress

# A request leaves cycles of five objects behind, all of them gRPC's. A collection costs as much as it finds,
# so rare collections save nothing and stop the process for long: 50,000 objects took 25 to 80 ms, every 4 s
# at 1,200 requests/s; 2,000 take 1 to 2 ms, at the same rate of requests. Old objects are mostly rows of
# telemetry, not garbage, and are looked at every five million.
_COLLECT_AFTER = (2_000, 10, 250)

_PR_SET_PDEATHSIG = 1


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
    """Have SIGHUP not end this process, whatever it does at the moment.

    An operator who has changed files sends it to all that run, and not all have something to read again, or have it
    yet. Unlike a signal that is ignored, it means to programs that this one starts what it always does.
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
    128 KiB anew each time, so that every page faults again. C libraries without `mallopt` are left alone.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 64 << 20)
        mallopt(trim_threshold, 256 << 20)
        mallopt(top_pad, 32 << 20)


def give_back_memory() -> None:
    """Give what is free back to the kernel, which takes as long as there is much of it. Any thread may."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def collect_rarely() -> None:
    """Have a process that has just begun import in peace: nearly all that it makes then stays.

    By default the collector looks at what is new after 700 objects, and takes a tenth of the time of an import.
    """
    gc.set_threshold(100_000)


def freeze_garbage(*, collect: bool = True) -> None:
    """Never look again at what there is now: 2 million objects take 205 ms to walk.

    Args:
        collect: look a last time. A process that has just begun need not: it has some thousand cycles at most.
    """
    if collect:
        gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
