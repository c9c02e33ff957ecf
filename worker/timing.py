"""Waits until a time, and sets the priorities of threads.

Measured on a busy machine of two cores: a plain `time.sleep` wakes 80 us late at the median; with the
kernel's timer slack removed, at real-time priority and spinning the last 50 us, 0.2 us, and 5 us at p99.
If one other Python thread is busy, the interpreter's default switch interval makes any of these 5 ms.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from clockwright.cores import granted_cores, take_short_slices

logger = logging.getLogger(__name__)

# A spinning Python thread holds the GIL, so the spin is bounded by what others may be delayed.
SPIN_NS = 50_000

_SWITCH_INTERVAL_S = 1e-4
_PR_SET_TIMERSLACK = 29
# Above ordinary threads, below whatever the system itself runs at real-time priority.
_FIFO_PRIORITY = 10
_BACKGROUND_NICENESS = 10
# A thread that serves is so much less nice than its process. At equal niceness it waits until the slice of another
# program's thread is over: beside a busy program on each core, that was nine tenths of how much EXECs of milliseconds varied.
_LEAD = 10

_told_no_realtime = False
# Whether threads that wait are too many for this process's cores to have real-time priority.
_is_crowded = False


def sleep_until(time_ns: int) -> None:
    """Return at `time_ns` of the monotonic clock, or at once if it has passed."""
    remaining_ns = time_ns - time.monotonic_ns() - SPIN_NS
    if remaining_ns > 0:
        time.sleep(remaining_ns / 1e9)
    while time.monotonic_ns() < time_ns:
        pass


def tune_process(*, num_devices: int) -> None:
    """Let threads take turns ten times faster than Python does by default.

    Where devices are more than cores, threads that wait do not have real-time priority. It displaces the thread on the core
    where it wakes, whether others are idle or not: with twenty devices, controller and clients on two cores, goodput was
    60 % instead of 97 %. With one device of 2 ms at three times its capacity it was 83 % instead of 79 % (both by hand). Devices
    of other processes do not count.
    """
    global _is_crowded
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _is_crowded = num_devices > granted_cores()


def tune_thread(*, waits: bool = False, alone: bool = False) -> None:
    """Prepare the calling thread for serving; whatever the system forbids is left out.

    Its threads get a larger share of a core than those of other programs. On a host with a GPU the process keeps to the
    cores near the GPU (`worker.devices.gpu_health.stay_near`).

    Args:
        waits: the thread mostly waits, and runs before all ordinary ones when it wakes: at real-time priority, or in short
            slices (`take_short_slices`) if that is forbidden, or cores are few (`tune_process`). The kernel stops a real-time
            thread that computes for 0.95 s of a second.
        alone: the thread computes, and nothing else runs on its core: it has real-time priority.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    is_first = alone or (waits and not _is_crowded)
    if is_first:
        try:
            # 0 is the calling thread, not its process.
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_FIFO_PRIORITY))
            return
        except (AttributeError, OSError):
            pass
    if not (waits and take_short_slices()) and is_first:
        _tell_no_realtime()
    if hasattr(os, "setpriority"):
        with suppress(OSError):
            niceness = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, 0, max(niceness - _LEAD, -20))


def bind_thread(cores: Sequence[int]) -> None:
    """Keep the calling thread, and threads that it starts, on these cores, which exist."""
    if hasattr(os, "sched_setaffinity"):
        # 0 is the calling thread, not its process.
        os.sched_setaffinity(0, cores)


def tune_background_thread() -> None:
    """Let the calling thread run after those that serve."""
    if hasattr(os, "setpriority"):
        # On Linux a thread's native id names that thread alone.
        os.setpriority(os.PRIO_PROCESS, 0, _BACKGROUND_NICENESS)


def _tell_no_realtime() -> None:
    global _told_no_realtime
    if not _told_no_realtime:
        _told_no_realtime = True
        logger.info(
            "no right to real-time priority (CAP_SYS_NICE): actions may start late by milliseconds "
            "when the machine is busy"
        )
