"""How much processor time and memory a server takes, process by process, as the kernel counts it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# The command of each process that a server starts, and what it is called here.
_ROLES = ("worker", "front")


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def cpu_ns(pids: Iterable[int]) -> int:
    """Processor time of processes so far, to the ns; threads that have ended do not count."""
    used_ns = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                used_ns += int((task / "schedstat").read_text().split()[0])
    return used_ns


def rss_bytes(process: int | str) -> int:
    """Memory that a process has resident; `self`: this one."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def roles(pid: int) -> dict[str, list[int]]:
    """The processes of a server by what they are: `controller`, which is `pid`, `worker`, `front` and `other`."""
    found: dict[str, list[int]] = {"controller": [pid]}
    for child in family(pid)[1:]:
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        role = next((name for name in _ROLES if name in words), "other")
        found.setdefault(role, []).append(child)
    return found
