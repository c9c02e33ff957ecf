"""States and applications in tables of a state file."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from typing_extensions import override

from controller.selection.core.contexts import Address
from controller.selection.stores.database import Database


class SqliteDatabase(Database):
    """Those tables; the file's owner makes and closes them."""

    faults: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        """Take the connection of a state file, whose thread alone may call the methods."""
        self.name = name
        self._connection = connection

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
        """Leave the connection to the file's owner."""
