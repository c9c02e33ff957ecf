"""What a controller keeps beyond its life: one SQLite file, one thread that uses it, one process that may.

Models that were added, applications, and what those and the scheduler have learned lie in tables of the one file. Callers
hand work to its thread, so the event loop waits for no disk, and no write overtakes another.
A write is one transaction: after a crash, or on a full disk, it is there as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from clockwright.errors import ConfigError, StoreError
from clockwright.foreign import printable
from clockwright.wire.leadership import Term

T = TypeVar("T")

# Number of the tables' layout. A file with another number is refused.
_LAYOUT = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS state (
    application TEXT NOT NULL, context TEXT NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (application, context)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS application (name TEXT PRIMARY KEY, settings TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS upload (
    number INTEGER PRIMARY KEY, folder TEXT NOT NULL, num_bytes INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS digest (file TEXT PRIMARY KEY, sha256 TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS term (lineage TEXT NOT NULL, generation INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS model (name TEXT PRIMARY KEY, upload INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS generation (name TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pin (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS routing (name TEXT PRIMARY KEY, now TEXT NOT NULL, before TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS learned (record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS quota (tenant TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;
"""

# Those that are read as a whole at start. A million users' states would take seconds to check.
_CHECKED = ("application", "upload", "model", "generation", "quota", "pin", "routing")
#: A file system's own folder, in its outermost one.
LOST_FOUND = "lost+found"


class StateFile:
    """The file, held against every other process until it is closed."""

    def __init__(self, path: Path | None, belongings: Path | None = None) -> None:
        """Open the file, or make it; None: tables in memory, which go with the process.

        `belongings` is a folder of files that only its rows explain: no file is made next to any. Raises ConfigError if
        another process uses it, it is damaged or lost, or it cannot be written to.
        """
        #: None: nothing outlives the process.
        self.path = path
        #: For people.
        self.name = "in memory" if path is None else str(path)
        self._lock = None if path is None else _held_lock(path)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        try:
            #: Only the thread may use it.
            self.connection = self.thread.submit(_open, path, belongings).result()
        except BaseException:
            self.thread.shutdown()
            self._release()
            raise

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do some work in the thread, after all that was asked for before.

        Raises StoreError if SQLite failed, and what the work was to write is not written.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.thread, work, self.connection)
        except sqlite3.Error as error:
            raise StoreError(f"state {self.name}: {error}") from error

    async def close(self) -> None:
        """Finish all work that was asked for, and let others have the file."""
        await self.run(sqlite3.Connection.close)
        self.thread.shutdown()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def read_digests(connection: sqlite3.Connection) -> dict[str, str]:
    """Read what `keep_digests` has kept."""
    return dict(connection.execute("SELECT file, sha256 FROM digest"))


def keep_digests(connection: sqlite3.Connection, digests: Mapping[str, str]) -> None:
    """Keep digests of files (`controller.models.digests`) for the next start, and no others."""
    with connection:
        connection.execute("DELETE FROM digest")
        connection.executemany("INSERT INTO digest VALUES (?, ?)", digests.items())


def begin_term(connection: sqlite3.Connection) -> Term:
    """Begin the next generation of the controllers that have used the file, one after the other."""
    with connection:
        found = connection.execute("SELECT lineage, generation FROM term").fetchone()
        if found is None:
            term = Term(secrets.token_hex(8), 1)
            connection.execute("INSERT INTO term VALUES (?, ?)", (term.lineage, term.generation))
        else:
            term = Term(*found).next()
            connection.execute("UPDATE term SET generation = ?", (term.generation,))
    return term


def sync_path(path: str | Path) -> None:
    """Have the disk take a file, or the entries of a folder.

    Raises OSError if it cannot be read, or the disk does not take it.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_folder(folder: Path) -> None:
    """Make a folder that is there still when the machine loses its power. Raises OSError if it cannot be made."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # One that is there may have been made just now, by a process that was killed.
    for each in missing or [folder]:
        # A folder of another user, which this one may not read, stays as it is.
        with suppress(PermissionError):
            sync_path(each.parent)


def _held_lock(path: Path) -> int:
    """Lock the file next to a state file, and write its holder into it; the kernel unlocks it at the process's end."""
    # A file of its own: SQLite drops its locks of the database when any handle of it is closed.
    lock = path.with_name(path.name + ".lock")
    try:
        _make_folder(path.parent)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            with suppress(OSError):  # A full disk; the lock holds all the same.
                os.pwrite(handle, f"process {os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(handle)
            raise
    except BlockingIOError:
        holder = printable(lock.read_text(errors="replace").strip()) or "another process"
        raise ConfigError(
            f"state {path}: {holder} uses it, expected one controller at a time"
        ) from None
    except OSError as error:
        raise ConfigError(f"state {path}: {error.filename}: {error.strerror}") from error
    return handle


def _open(path: Path | None, belongings: Path | None) -> sqlite3.Connection:
    # SQLite makes a new file in place of one that was lost, and what no row names is cleared away.
    try:
        if path is not None and belongings is not None and belongings.is_dir():
            is_lost = not path.exists() or path.stat().st_size == 0
            if is_lost and any(each.name != LOST_FOUND for each in belongings.iterdir()):
                raise ConfigError(
                    f"state {path}: the file is missing or empty, and {belongings} has files that belong to it:"
                    " restore the file, or move the folder away"
                )
    except OSError as error:
        raise ConfigError(f"state {path}: {error.filename}: {error.strerror}") from error
    try:
        connection = sqlite3.connect(":memory:" if path is None else path)
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise ConfigError(
            f"state {path}: {error}; expected a file of this program that is whole, and room on its disk"
        ) from None
    return connection


def _prepare(connection: sqlite3.Connection, path: Path | None) -> None:
    # The lock keeps other processes away. So the file of memory that they would share need not be made, and a
    # controller can start on a full disk.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    layout = connection.execute("PRAGMA user_version").fetchone()[0]
    if layout not in (0, _LAYOUT):
        raise ConfigError(
            f"state {path}: found layout {layout}, expected {_LAYOUT}; it is of another version"
        )
    connection.execute("PRAGMA journal_mode = WAL")
    # What an operator was told is done is on the disk, also when the machine loses its power.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")
    connection.executescript(_TABLES)
    if layout == 0:
        connection.execute(f"PRAGMA user_version = {_LAYOUT}")
        connection.commit()
    for table in _CHECKED:
        if (fault := connection.execute(f"PRAGMA quick_check({table})").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(f"table {table} is damaged: {printable(fault)}")
