"""Files of models that were added by upload: a folder per upload, which goes with the last of its models."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path

from clockwright.errors import NoRoomError

# What a file occupies on a disk even when it is empty.
_BLOCK_BYTES = 4096


class Spool:
    """A folder for uploads, which together have a limit."""

    def __init__(self, directory: Path, *, bytes_max: int) -> None:
        """Keep uploads below `directory`.

        Args:
            directory: exists, and is nobody else's.
            bytes_max: what all uploads that are there, or under way, may have together.
        """
        self._directory = directory
        self._bytes_max = bytes_max
        self._num_bytes = 0
        self._folders: dict[Path, int] = {}
        self._numbers = itertools.count(1)

    def new_folder(self) -> Path:
        """Begin an upload; whoever does makes the folder, and discards it."""
        folder = self._directory / str(next(self._numbers))
        self._folders[folder] = 0
        return folder

    def grow(self, folder: Path, num_bytes: int = _BLOCK_BYTES) -> None:
        """Make room for bytes that are about to be written; by default for a new file.

        Raises:
            NoRoomError: there is none.
        """
        if self._num_bytes + num_bytes > self._bytes_max:
            raise NoRoomError(
                f"uploaded models have {self._num_bytes} bytes, and {num_bytes} more were found; expected"
                f" {self._bytes_max} in all at most (--upload-limit-mib)"
            )
        self._num_bytes += num_bytes
        self._folders[folder] += num_bytes

    def discard(self, folder: Path) -> asyncio.Future[None]:
        """Delete an upload's files, in a thread; a second time it does nothing."""
        self._num_bytes -= self._folders.pop(folder, 0)
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(None, shutil.rmtree, folder, True)
