"""The lease of controllers of one host: a file, and locks that the kernel releases when a process ends.

Next to the record lies a file of locks. Its first byte is locked while the record is read and written; each
leader keeps the byte of its generation locked for as long as it lives. So a leader that was killed is followed
at once. One that lives and does not renew, because it was stopped or hangs, is killed by its successor: it would
keep the state folder otherwise, and the kernel says for sure which process it is.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import signal
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from clockwright.errors import StoreError
from clockwright.units import NS_PER_S
from controller.process.lease.lease import LEASE_NS, LeaseRecord
from controller.process.lease.stores import FoundRecord, decode, encode

log = logging.getLogger(__name__)

# struct flock: type, whence, start, length, process.
_FLOCK: Final = struct.Struct("@hhqqi0q")
# The byte that is locked while the record is used; a generation's byte comes this many after it.
_TURN: Final = 0

# A turn takes less than a millisecond, unless the process that has it is stopped.
_PAUSE_S: Final = 0.005
_TURN_LIMIT_S: Final = LEASE_NS / NS_PER_S
# A killed process ends when the kernel has freed its memory.
_END_LIMIT_S: Final = 5.0


class LeaseFile:
    """A record in a file.

    The locks belong to the process, so a process has one store per file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Opened once. Closing any handle of a file gives all locks of the process on it back.
        self._locks: int | None = None

    def read(self) -> FoundRecord:
        """Do what `LeaseStore` says."""
        with self._turn() as locks:
            record = self._record()
            has_ended = (
                record is not None and not record.released and _locker(locks, _byte(record)) is None
            )
            return FoundRecord(record, has_ended)

    def swap(self, found: FoundRecord, record: LeaseRecord) -> bool:
        """Do what `LeaseStore` says."""
        with self._turn() as locks:
            if self._record() != found.record:
                return False
            former = found.record
            # One that has released the lease holds nothing any more, and ends by itself.
            if former is not None and former.term != record.term and not former.released:
                _kill(locks, _byte(former))
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte(record))
            scratch = self._path.with_name(self._path.name + ".new")
            try:
                scratch.write_bytes(encode(record))
                scratch.rename(self._path)
            except OSError as error:
                raise self._error(error) from error
            return True

    def close(self) -> None:
        """Do what `LeaseStore` says."""
        if self._locks is not None:
            os.close(self._locks)
            self._locks = None

    def _record(self) -> LeaseRecord | None:
        try:
            return decode(self._path.read_bytes(), where=str(self._path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error(error) from error

    @contextmanager
    def _turn(self) -> Iterator[int]:
        """Hold the lock of the record."""
        if self._locks is None:
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = self._path.with_name(self._path.name + ".lock")
                self._locks = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise self._error(error) from error
        locks = self._locks
        limit_s = time.monotonic() + _TURN_LIMIT_S
        while True:
            try:
                fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _TURN)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise self._error(error) from error
            if time.monotonic() > limit_s:
                # The process that has it was stopped just now, and blocks the lease.
                _kill(locks, _TURN)
                limit_s = time.monotonic() + _TURN_LIMIT_S
            time.sleep(_PAUSE_S)
        try:
            yield locks
        finally:
            fcntl.lockf(locks, fcntl.LOCK_UN, 1, _TURN)

    def _error(self, error: OSError) -> StoreError:
        return StoreError(f"lease {self._path}: {error.strerror}")


def _byte(record: LeaseRecord) -> int:
    """The byte that a record's holder keeps locked."""
    return _TURN + record.term.generation


def _locker(locks: int, byte: int) -> int | None:
    """Find the other process that has locked a byte; Returns 0 if it lives in another name space, None if the byte is free."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, process = _FLOCK.unpack(fcntl.fcntl(locks, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else process


def _kill(locks: int, byte: int) -> None:
    """Kill the process that has locked a byte, if there is one, and wait for its end."""
    process = _locker(locks, byte)
    if not process:
        return
    with suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(process)
        try:
            # It may have ended before it was opened, and its number may belong to another process.
            if _locker(locks, byte) != process:
                return
            log.warning("process %d leads and has not renewed its lease: killing it", process)
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], _END_LIMIT_S)
        finally:
            os.close(handle)


class FolderDirectory:
    """Entries in files of a folder, for controllers and fronts of one host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: What each file was when it was read: its number, and when it was changed.
        self._seen: dict[str, tuple[int, int]] = {}

    def put(self, key: str, data: bytes) -> None:
        """Do what `DirectoryStore` says."""
        path = self._folder / quote(key, safe="")
        # Two that write one entry have files of their own.
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch.write_bytes(data)
            scratch.rename(path)
        except OSError as error:
            raise self._error(error) from error

    def remove(self, key: str) -> None:
        """Do what `DirectoryStore` says."""
        try:
            (self._folder / quote(key, safe="")).unlink(missing_ok=True)
        except OSError as error:
            raise self._error(error) from error

    def changes(self) -> tuple[dict[str, bytes], frozenset[str]]:
        """Do what `DirectoryStore` says."""
        found: dict[str, bytes] = {}
        seen: dict[str, tuple[int, int]] = {}
        try:
            for entry in os.scandir(self._folder) if self._folder.is_dir() else ():
                if entry.name.startswith("."):
                    continue
                key = unquote(entry.name)
                with suppress(FileNotFoundError):  # removed at this moment
                    status = os.stat(entry.path)
                    if not stat.S_ISREG(status.st_mode):
                        continue  # A folder cannot be read, and a pipe never ends.
                    seen[key] = status.st_ino, status.st_mtime_ns
                    if seen[key] != self._seen.get(key):
                        found[key] = Path(entry.path).read_bytes()
        except OSError as error:
            raise self._error(error) from error
        gone, self._seen = frozenset(self._seen.keys() - seen.keys()), seen
        return found, gone

    def close(self) -> None:
        """Do what `DirectoryStore` says."""

    def _error(self, error: OSError) -> StoreError:
        return StoreError(f"directory {self._folder}: {error.strerror}")
