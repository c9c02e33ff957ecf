"""Confines a process that reads untrusted models.

Memory and the size of files are limited for the whole process, processor time for each job. The process also
loses access to other processes' shared memory and to the network, and cannot gain privileges.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
from pathlib import Path
from typing import Final

# Linux: unshare(2) and prctl(2).
_CLONE_NEWIPC: Final = 0x08000000
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_NO_NEW_PRIVS: Final = 38


def confine(memory_bytes: int) -> None:
    """Bound this process's memory and files, and cut it off from network and shared memory.

    Call it while the process has one thread: Linux gives a new user namespace to such a process only.

    Args:
        memory_bytes: of private memory, on the heap and mapped; and of each file.
    """
    # Not RLIMIT_AS: torch reserves tens of GiB of addresses that it never uses.
    _limit(resource.RLIMIT_DATA, memory_bytes)
    _limit(resource.RLIMIT_FSIZE, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        # Where the system forbids it, the limits have to do.
        user, group = os.geteuid(), os.getegid()
        if user == 0:
            # Root needs no user namespace for this, and in one it could not read what belongs to others.
            libc.unshare(_CLONE_NEWIPC | _CLONE_NEWNET)
        elif libc.unshare(_CLONE_NEWIPC | _CLONE_NEWNET | _CLONE_NEWUSER) == 0:
            # Who it is stays as it was, for libraries that ask.
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                Path(f"/proc/self/{name}").write_text(text, encoding="ascii")


def allow_cpu(seconds: float) -> None:
    """Have the kernel end this process with SIGXCPU after this much more processor time, over all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (_at_most(limit, most), most))


def _limit(what: int, value: int) -> None:
    _, most = resource.getrlimit(what)
    value = _at_most(value, most)
    resource.setrlimit(what, (value, value))


def _at_most(value: int, most: int) -> int:
    return value if most == resource.RLIM_INFINITY else min(value, most)
