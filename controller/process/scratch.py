"""A folder for what goes with the process; one that was killed leaves its own to the next."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

# Folders of the second kind are locked as long as their process lives.
_NEW, _LOCKED = "clockwright-new-", "clockwright-run-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder among the system's temporary files; it is deleted in the end, however the process ends."""
    # It is locked before it has the name by which other processes look for abandoned folders.
    new = Path(tempfile.mkdtemp(prefix=_NEW))
    handle = os.open(new, os.O_RDONLY)
    folder = new.with_name(new.name.replace(_NEW, _LOCKED, 1))
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        new.rename(folder)
        yield folder
    finally:
        for path in (folder, new):
            shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def clear_left_behind() -> None:
    """Delete folders of this user's processes that were killed. Takes time: they may hold whole models."""
    for path in Path(tempfile.gettempdir()).glob(f"{_LOCKED}*"):
        with suppress(OSError):  # It belongs to another user, or another process clears it too.
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.geteuid():
                    log.info("%s is deleted: the process that made it was killed", path)
                    shutil.rmtree(path)
            finally:
                os.close(handle)
