"""States and applications in one SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from clockwright.errors import ConfigError
from controller.selection.core.contexts import Address
from controller.selection.stores.database import Database

# Number of the tables' layout. A file with another number is refused.
_LAYOUT = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS state (
    application TEXT NOT NULL, context TEXT NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (application, context)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS application (name TEXT PRIMARY KEY, settings TEXT NOT NULL) WITHOUT ROWID;
"""


class SqliteDatabase(Database):
    """A file. Only the thread that has opened it may use it."""

    faults: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, path: str | Path | None) -> None:
        """Open the file, or make it; None: a database in memory.

        Raises:
            ConfigError: it cannot be opened, or is not such a file.
        """
        self.name = "in memory" if path is None else str(path)
        try:
            self._connection = _open(path)
        except sqlite3.Error as error:
            raise ConfigError(f"selection store {path}: {error}") from None

    @override
    def load(self, address: Address) -> str | None:
        row = self._connection.execute(
            "SELECT record FROM state WHERE application = ? AND context = ?", address
        ).fetchone()
        return None if row is None else str(row[0])

    @override
    def save(self, records: Mapping[Address, str]) -> None:
        rows = [(*address, record) for address, record in records.items()]
        with self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", rows)

    @override
    def erase(self, application: str, context: str) -> bool:
        with self._connection:
            cursor = self._connection.execute(
                "DELETE FROM state WHERE application = ? AND context = ?", (application, context)
            )
        return cursor.rowcount > 0

    @override
    def applications(self) -> dict[str, str]:
        rows = self._connection.execute("SELECT name, settings FROM application ORDER BY name")
        return dict(rows)

    @override
    def save_application(self, name: str, settings: str, *, forget: bool) -> None:
        with self._connection:
            if forget:
                self._connection.execute("DELETE FROM state WHERE application = ?", (name,))
            self._connection.execute(
                "INSERT OR REPLACE INTO application VALUES (?, ?)", (name, settings)
            )

    @override
    def remove_application(self, name: str) -> None:
        with self._connection:
            self._connection.execute("DELETE FROM application WHERE name = ?", (name,))
            self._connection.execute("DELETE FROM state WHERE application = ?", (name,))

    @override
    def has_lost_everything(self) -> bool:
        return False

    @override
    def close(self) -> None:
        self._connection.close()


def _open(path: str | Path | None) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:" if path is None else path, check_same_thread=True)
    try:
        layout = connection.execute("PRAGMA user_version").fetchone()[0]
        if layout not in (0, _LAYOUT):
            raise ConfigError(
                f"selection store {path}: found layout {layout}, expected {_LAYOUT}; it is of another version"
            )
        # With WAL and NORMAL, a crash of the process loses nothing that was written, and a crash of the
        # machine loses the last moments.
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
