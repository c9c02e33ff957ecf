"""Memory of the host that a device copies from or to: allocated once, with every page present."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

_MIB = 1 << 20
# Linux 5.14: allocate all pages now. If memory runs out, the call fails and the process lives.
_MADV_POPULATE_WRITE = 23
# Memory is taken in pieces: the process still hears signals, as taking 10 GiB takes seconds, and sees what is left.
_PIECE_BYTES = 256 << 20
# The machine keeps so much, or the kernel would end a process.
_SPARE_BYTES = 128 << 20
# A virtual machine may get more memory when it runs short. If it gets none for so long, there is no more.
_GROWTH_S = 2.0


def present_memory(num_bytes: int, *, file: int | None = None, root: Path = Path("/")) -> mmap.mmap:
    """Take zeroed memory in one mapping, every page of it present, near the core that asks.

    The memory is shared (a memfd), not private. So a fork makes no copies on later writes, and pages that a device
    knows by their physical address stay where they are.

    The limits of control groups are checked beforehand. The machine's free memory is checked before each piece,
    because a virtual machine may get more memory as it uses it.

    Args:
        num_bytes: the size, which is rounded up to whole pages.
        file: a file in memory of this size, which other processes map too. None: a new one.
        root: the root of the file system that says how much memory is available.

    Raises:
        MemoryError: the memory does not suffice; says how much there is.
    """
    size = max(-(-num_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
    needed = f"{size // _MIB} MiB of the host's memory are needed"
    # The kernel would promise more, and end the process when the pages are taken.
    granted = granted_bytes(root)
    present = 0 if file is None else 512 * os.fstat(file).st_blocks
    if granted is not None and size - present > granted:
        raise MemoryError(f"{needed}, {granted // _MIB} MiB are granted to this process")
    try:
        mapping = _map(size, file)
        for begin in range(0, size, _PIECE_BYTES):
            piece = min(_PIECE_BYTES, size - begin)
            left = _wait_for(piece + _SPARE_BYTES, root) if present < size else None
            if left is not None and left < piece + _SPARE_BYTES:
                mapping.close()
                raise MemoryError(
                    f"{needed}; after {begin // _MIB} MiB there are {left // _MIB} MiB left, and "
                    f"{_SPARE_BYTES // _MIB} MiB of them stay with the machine"
                )
            _take(mapping, begin, piece)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size // _MIB} MiB of the host's memory: {error}") from None
    return mapping


def _wait_for(num_bytes: int, root: Path) -> int | None:
    """Wait some time until this much is available, and return what is available."""
    end_s = time.monotonic() + _GROWTH_S
    while True:
        found = available_bytes(root)
        if found is None or found >= num_bytes or time.monotonic() > end_s:
            return found
        time.sleep(0.05)


def granted_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the control groups around this process still grant. Returns None if they set no limit."""
    return min(_group_bytes(root), default=None)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory available without swapping, limited by the machine and by each control group around this process.

    Args:
        root: the root of the file system that says so.

    Returns:
        Bytes. None if the system does not say.
    """
    found = list(_group_bytes(root))
    with contextlib.suppress(OSError):
        text = (root / "proc/meminfo").read_text(encoding="ascii")
        if match := re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE):
            found.append(int(match[1]) * 1024)
    return min(found, default=None)


def _map(size: int, file: int | None) -> mmap.mmap:
    if file is not None:
        mapping = mmap.mmap(file, size)
    elif not hasattr(os, "memfd_create"):
        return mmap.mmap(-1, size)
    else:
        file = os.memfd_create("clockwright")
        try:
            os.ftruncate(file, size)
            mapping = mmap.mmap(file, size)
        finally:
            os.close(file)
    # Fewer pages to take and to lock, where the system allows it (shmem_enabled).
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _take(mapping: mmap.mmap, begin: int, num_bytes: int) -> None:
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, begin, num_bytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # An older kernel has no such advice: touch every page by hand.
        for position in range(begin, begin + num_bytes, mmap.PAGESIZE):
            mapping[position] = 0


def _group_bytes(root: Path) -> Iterator[int]:
    """Bytes that each control group with a limit still grants; its page cache counts as free."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            base, limit_file, usage_file = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit_file, usage_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.strip("/")
        # Inside a container the path is the host's, and the files lie at the base.
        for group in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # no limit: "max", or no such file
                limit = int((group / limit_file).read_text(encoding="ascii"))
                usage = int((group / usage_file).read_text(encoding="ascii"))
                yield max(limit - usage + _cache_bytes(group), 0)
            if group == base:
                break


def _cache_bytes(group: Path) -> int:
    """Bytes of page cache that the kernel gives back when asked.

    Active pages count too: every file that was read twice is active, as those of an installation are.
    """
    text = (group / "memory.stat").read_text(encoding="ascii")
    # Version 1 has two figures: the group's alone, and the total with all groups below it.
    total = "total_" if "total_inactive_file" in text else ""
    return sum(map(int, re.findall(rf"^{total}(?:in)?active_file (\d+)$", text, re.MULTILINE)))
