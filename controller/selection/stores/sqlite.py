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

    def __init__(
        self, connection: sqlite3.Connection, name: str, *, rows_max: int | None = None
    ) -> None:
        """Take the connection of a state file, whose thread alone may call the methods.

        About `rows_max` contexts are kept of a file in memory; None: all are. The name is for messages.
        """
        self.name = name
        self._rows_max = rows_max
        self._connection = connection

    @override
    def open(self) -> None:
        """Do nothing: the owner of the state file opened it."""

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
            if self._rows_max is not None:
                self._forget_surplus(self._rows_max)

    def _forget_surplus(self, rows_max: int) -> None:
        """Forget some contexts if there are too many: a tenth at a time, because drawing them takes a sort."""
        (found,) = self._connection.execute("SELECT count(*) FROM state").fetchone()
        if found > rows_max + rows_max // 10:
            self._connection.execute(
                "DELETE FROM state WHERE (application, context) IN (SELECT application, context FROM state"
                " WHERE context <> '' ORDER BY random() LIMIT ?)",
                (found - rows_max,),
            )

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
