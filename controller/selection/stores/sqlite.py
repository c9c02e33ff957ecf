"""States and applications in one SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from clockwright.errors import ConfigError
from controller.selection.core.contexts import Address

# Another layout gets another number, and a file of one that is not known here is refused.
_LAYOUT = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS state (
    application TEXT NOT NULL, context TEXT NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (application, context)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS application (name TEXT PRIMARY KEY, settings TEXT NOT NULL) WITHOUT ROWID;
"""


class SqliteDatabase:
    """See `Database`; of the thread that has opened it."""

    faults: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, path: str | Path | None) -> None:
        """Open, or make, the file; None: in memory.

        Raises:
            ConfigError: it cannot be opened, or is no such file.
        """
        self.name = "in memory" if path is None else str(path)
        try:
            self._connection = _open(path)
        except sqlite3.Error as error:
            raise ConfigError(f"selection store {path}: {error}") from None

    def load(self, address: Address) -> str | None:
        """See `Database`."""
        row = self._connection.execute(
            "SELECT record FROM state WHERE application = ? AND context = ?", address
        ).fetchone()
        return None if row is None else str(row[0])

    def save(self, records: Mapping[Address, str]) -> None:
        """See `Database`."""
        rows = [(*address, record) for address, record in records.items()]
        with self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", rows)

    def erase(self, application: str, context: str) -> bool:
        """See `Database`."""
        with self._connection:
            cursor = self._connection.execute(
                "DELETE FROM state WHERE application = ? AND context = ?", (application, context)
            )
        return cursor.rowcount > 0

    def applications(self) -> dict[str, str]:
        """See `Database`."""
        rows = self._connection.execute("SELECT name, settings FROM application ORDER BY name")
        return dict(rows)

    def save_application(self, name: str, settings: str, *, forget: bool) -> None:
        """See `Database`."""
        with self._connection:
            if forget:
                self._connection.execute("DELETE FROM state WHERE application = ?", (name,))
            self._connection.execute(
                "INSERT OR REPLACE INTO application VALUES (?, ?)", (name, settings)
            )

    def remove_application(self, name: str) -> None:
        """See `Database`."""
        with self._connection:
            self._connection.execute("DELETE FROM application WHERE name = ?", (name,))
            self._connection.execute("DELETE FROM state WHERE application = ?", (name,))

    def close(self) -> None:
        """See `Database`."""
        self._connection.close()


def _open(path: str | Path | None) -> sqlite3.Connection:
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
