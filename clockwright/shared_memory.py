"""Memory that a front and the workers of its host map together: who makes it, and who maps what it is handed.

The kernel frees it with its last mapping, whoever dies first, and nothing of it has a name.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from clockwright.errors import ProtocolError

# `fcntl` lacks these names, or has them only in later versions of Python.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10


def make_shared(name: str, num_bytes: int, *, others_write: bool) -> tuple[int, mmap.mmap]:
    """Make memory that takes up what was touched of it; its size is fixed for good.

    Args:
        name: for people who look at the process's mappings.
        num_bytes: its size.
        others_write: whether whoever is handed the file may write there; else it maps to read.

    Returns:
        A file descriptor to be handed over, and our own mapping, which can be written.

    Raises:
        OSError: the kernel refuses, or has nothing of the kind.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        memory = mmap.mmap(fd, num_bytes)
        seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL
        fcntl.fcntl(fd, _ADD_SEALS, seals if others_write else seals | _SEAL_FUTURE_WRITE)
    except BaseException:
        os.close(fd)
        raise
    return fd, memory


def map_shared(fd: int, num_bytes: int, *, to_write: bool) -> memoryview:
    """Map memory of another process.

    Raises:
        ProtocolError: it is smaller than said, or could become so, which would kill who reads there.
        OSError: the kernel refuses.
    """
    if os.fstat(fd).st_size < num_bytes or not fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK:
        raise ProtocolError(f"shared memory that cannot be relied on to have {num_bytes} bytes")
    access = mmap.PROT_READ | mmap.PROT_WRITE if to_write else mmap.PROT_READ
    return memoryview(mmap.mmap(fd, num_bytes, prot=access))
