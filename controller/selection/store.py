"""Where states and applications outlive the process: one SQLite file.

All of it runs in one thread of its own, in the order asked for, so that the event loop never waits for a
disk and an erasure is never overtaken by a write.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from clockwright.errors import ConfigError

T = TypeVar("T")

Address = tuple[str, str]

# Another layout gets another number, and a file of one that is not known here is refused.
_LAYOUT = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS state (
    application TEXT NOT NULL, context TEXT NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (application, context)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS application (name TEXT PRIMARY KEY, settings TEXT NOT NULL) WITHOUT ROWID;
"""


class Store:
    """States by application and context, and the applications; JSON inside."""

    def __init__(self, path: Path | None) -> None:
        """Open, or make, the file; None: in memory, gone with the process.

        Raises:
            ConfigError: it cannot be opened, or is no such file.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="selection-store")
        #: Whether anything is ever found here that was not in memory a moment ago.
        self.persistent = path is not None
        try:
            self._connection = self._thread.submit(_open, path).result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            raise ConfigError(f"selection store {path}: {error}") from None
        except ConfigError:
            self._thread.shutdown()
            raise

    async def load(self, address: Address) -> dict[str, Any] | None:
        """The record of a context, if there is one."""
        return await self._run(self._load, address)

    async def save(self, changes: Mapping[Address, Callable[[], dict[str, Any]]]) -> None:
        """Write records, all or none; each is made in the store's thread, of something immutable."""
        await self._run(self._save, changes)

    async def erase(self, application: str, context: str | None = None) -> int:
        """Erase a context, or all of an application; returns how many there were."""
        return await self._run(self._erase, application, context)

    async def applications(self) -> list[dict[str, Any]]:
        """Settings of all applications, by name."""
        return await self._run(self._applications)

    async def save_application(self, name: str, settings: Mapping[str, Any]) -> None:
        """Write the settings of an application."""
        await self._run(self._save_application, name, json.dumps(settings))

    async def remove_application(self, name: str) -> None:
        """Erase an application with all of its states."""
        await self._run(self._remove_application, name)

    async def close(self) -> None:
        """Finish what was asked for and close the file."""
        await self._run(self._connection.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _load(self, address: Address) -> dict[str, Any] | None:
        row = self._connection.execute(
            "SELECT record FROM state WHERE application = ? AND context = ?", address
        ).fetchone()
        return None if row is None else json.loads(row[0])

    def _save(self, changes: Mapping[Address, Callable[[], dict[str, Any]]]) -> None:
        rows = [(*address, json.dumps(make())) for address, make in changes.items()]
        with self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", rows)

    def _erase(self, application: str, context: str | None) -> int:
        with self._connection:
            if context is None:
                cursor = self._connection.execute(
                    "DELETE FROM state WHERE application = ?", (application,)
                )
            else:
                cursor = self._connection.execute(
                    "DELETE FROM state WHERE application = ? AND context = ?",
                    (application, context),
                )
        return cursor.rowcount

    def _applications(self) -> list[dict[str, Any]]:
        rows = self._connection.execute("SELECT settings FROM application ORDER BY name")
        return [json.loads(row[0]) for row in rows]

    def _save_application(self, name: str, settings: str) -> None:
        with self._connection:
            self._connection.execute(
                "INSERT OR REPLACE INTO application VALUES (?, ?)", (name, settings)
            )

    def _remove_application(self, name: str) -> None:
        with self._connection:
            self._connection.execute("DELETE FROM application WHERE name = ?", (name,))
            self._connection.execute("DELETE FROM state WHERE application = ?", (name,))


def _open(path: Path | None) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:" if path is None else path, check_same_thread=True)
    try:
        layout = connection.execute("PRAGMA user_version").fetchone()[0]
        if layout not in (0, _LAYOUT):
            raise ConfigError(
                f"selection store {path}: found layout {layout}, expected {_LAYOUT}; it is of another version"
            )
        # A crash of the process loses nothing that was written; one of the machine, the last moments.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")
        connection.executescript(_TABLES)
        connection.execute(f"PRAGMA user_version = {_LAYOUT}")
        connection.commit()
    except BaseException:
        connection.close()
        raise
    return connection
