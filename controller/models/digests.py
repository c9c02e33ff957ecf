"""Digests of files, remembered over restarts: what has not changed is not read again.

A controller that starts again would else read every model from the disk before it serves.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from clockwright.units import NS_PER_MS

# Two changes within a tick of the file system's clock look like one. A file is remembered once its last change is
# older than any tick.
_TICK_NS = 100 * NS_PER_MS


class FileDigests:
    """SHA-256 and size of files, by what the file system says of each. May be used in any thread, one at a time."""

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        """Know what an earlier run has found; see `seen`."""
        self._known = dict(known or {})
        #: What was asked since, for the next run: a digest by the file's place, size and times.
        self.seen: dict[str, str] = {}

    def of(self, path: Path) -> tuple[str, int]:
        """Give the digest in hex, and the number of bytes; reads the file unless it is as it was.

        Raises OSError if it cannot be read.
        """
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            identity = _identity(before)
            if digest := self._known.get(identity):
                self.seen[identity] = digest
                return digest, before.st_size
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            num_bytes = file.tell()
            is_settled = time.time_ns() - before.st_ctime_ns > _TICK_NS
            if is_settled and _identity(os.fstat(file.fileno())) == identity:
                self._known[identity] = self.seen[identity] = digest
            return digest, num_bytes


def _identity(status: os.stat_result) -> str:
    # No program can set the time of the last change of its inode.
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
