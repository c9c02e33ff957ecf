"""The cores that this process may use, how they are written, and which of its threads come first on them."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clockwright.errors import ConfigError

# What `take_short_slices` takes; the kernel's least.
_SHORT_SLICE_NS: Final = 100_000
# The number of the kernel's sched_setattr by machine; that of sched_getattr is one more.
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may run on, in order; at least one."""
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        return tuple(range(os.cpu_count() or 1))


def granted_cores(root: Path = Path("/")) -> int:
    """How many cores this process can keep busy at once: those that it may run on, or what its quota pays for."""
    return max(int(_quota(root, float(len(usable_cores())))), 1)


def parse_cores(text: str) -> tuple[int, ...]:
    """Read cores such as `2-9,12`. Raises ConfigError if the text is something else."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            named = range(int(first), int(last if dash else first) + 1)
            if not named:
                raise ValueError(part)
            cores.update(named)
    except ValueError:
        raise ConfigError(
            f"cores: found {text!r}, expected numbers and ranges such as 2-9,12"
        ) from None
    return tuple(sorted(cores))


def spell_cores(cores: tuple[int, ...]) -> str:
    """Write what `parse_cores` reads."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][-1] == core - 1:
            ranges[-1][1:] = [core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, each)) for each in ranges)


# With this many cores and more, one of them is a small part, and the controller has it for itself.
_ENOUGH_TO_SPARE_ONE = 10


@dataclass(frozen=True, slots=True)
class Division:
    """Which workers compute on which cores of a machine."""

    #: The cores of each worker; empty: the kernel chooses.
    workers: tuple[tuple[int, ...], ...]
    #: Limit on threads of a model.
    threads: int
    #: The cores without computation, for the controller and the workers' other lanes. May be empty.
    aside: tuple[int, ...]
    #: What was decided, in one line.
    words: str


def divide_cores(
    usable: tuple[int, ...],
    num_workers: int,
    threads: int | None = None,
    given: tuple[int, ...] = (),
    granted: int | None = None,
) -> Division:
    """Divide a machine's cores among workers and the controller.

    Workers are bound to cores that no other process of ours uses, or that were named.

    Args:
        usable: the cores of this machine that may be used, in order.
        num_workers: at least one.
        threads: the most that a model has; None: one per core of its worker.
        given: the cores that workers are to compute on; empty: most or all of `usable`.
        granted: how many may be busy at once; None: all.
    """
    cores = given or usable
    num_cores = min(len(cores), granted or len(cores))
    spare = 0 if given or num_cores < _ENOUGH_TO_SPARE_ONE else 1
    each = threads or max((num_cores - spare) // num_workers, 1)
    up_to = "up to " if each > 1 else ""
    who = f"{_num(num_workers, 'worker')} of {up_to}{_num(each, 'thread')}"
    first = len(cores) - each * num_workers
    aside = tuple(core for core in usable if core not in cores[max(first, 0) :])
    # Threads must be able to leave a core that other processes use: next to busy ones, EXEC was twice as far from
    # its prediction when bound. And workers that share a machine by quotas would all be bound to its first cores.
    if first < 0 or num_cores < len(cores) or not (aside or given):
        words = f"{who} on {_num(num_cores, 'core')}, bound to none"
        return Division(((),) * num_workers, each, (), words)
    shares = tuple(cores[first + each * i : first + each * (i + 1)] for i in range(num_workers))
    words = f"{who} on cores {spell_cores(cores[first:])}"
    if aside:
        words += f", the controller on {spell_cores(aside)}"
        if problem := fifo_problem():
            words += f"; models run at ordinary priority: {problem}"
    else:
        words += ", which the controller shares"
    return Division(shares, each, aside, words)


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def fifo_problem(root: Path = Path("/")) -> str:
    """Why threads that compute all the time cannot run at real-time priority, in words; empty if they can."""
    with suppress(OSError, ValueError):
        path = root / "proc/sys/kernel/sched_rt_runtime_us"
        if (found := int(path.read_text(encoding="ascii"))) != -1:
            return f"kernel.sched_rt_runtime_us is {found}, not -1: the kernel would pause them"
    return fifo_right_problem()


def fifo_right_problem() -> str:
    """Why no thread of this process can run at real-time priority, in words; empty if one can."""
    if not hasattr(os, "sched_setscheduler"):
        return "this system has no such priority"
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, *before)
    except OSError:
        return "there is no right to it (CAP_SYS_NICE)"
    return ""


class _SchedAttr(ctypes.Structure):
    """`struct sched_attr` of the kernel, in its first form."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def take_short_slices() -> bool:
    """Have the calling thread come before ordinary ones when it wakes, and run in slices of 0.1 ms where others want its core.

    It needs no right. Next to a busy program on each of two cores, such a thread wakes 62 us late at the 99th percentile,
    and an ordinary one 3.7 ms (by hand).

    Returns:
        Whether it does: kernels before 6.12 know no such slices.
    """
    number = _SCHED_SETATTR.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    found, size = _SchedAttr(), ctypes.sizeof(_SchedAttr)
    syscall = ctypes.CDLL(None).syscall
    # The kernel takes all of it together.
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _SchedAttr(size=size, nice=niceness, runtime=_SHORT_SLICE_NS)
    if syscall(number, 0, ctypes.byref(wanted), 0) or syscall(
        number + 1, 0, ctypes.byref(found), size, 0
    ):
        return False
    return bool(found.runtime == _SHORT_SLICE_NS)


def _quota(root: Path, otherwise: float) -> float:
    """The cores' worth of time that the control groups around this process grant it."""
    found = otherwise
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            folder = base / path.strip("/")
            # Inside a container the path is the host's, and the files lie at the base.
            for group in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # no limit: "max" or -1, or no such file
                    if controllers:
                        quota = int((group / "cpu.cfs_quota_us").read_text(encoding="ascii"))
                        period = int((group / "cpu.cfs_period_us").read_text(encoding="ascii"))
                    else:
                        text = (group / "cpu.max").read_text(encoding="ascii")
                        quota, period = map(int, text.split())
                    if quota > 0:
                        found = min(found, quota / period)
                if group == base:
                    break
    return found
