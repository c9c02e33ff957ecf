"""Memory that a front and the workers of its host share: making it, and mapping a received file.

It has no name, and the kernel frees it with its last mapping, in whatever order processes end.
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
    """Make shared memory of a fixed size; pages take up room when they are first touched.

    The name is for people who look at the process's mappings. Unless `others_write`, receivers of the file may only
    read. Returns a file descriptor to send, and our own writable mapping. Raises OSError if the kernel refuses.
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

    Raises ProtocolError if it is smaller than stated, or could shrink, which would kill its readers; OSError if the
    kernel refuses.
    """
    if os.fstat(fd).st_size < num_bytes or not fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK:
        raise ProtocolError(f"shared memory that cannot be relied on to have {num_bytes} bytes")
    access = mmap.PROT_READ | mmap.PROT_WRITE if to_write else mmap.PROT_READ
    return memoryview(mmap.mmap(fd, num_bytes, prot=access))
