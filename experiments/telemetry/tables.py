"""The telemetry of a run, read back from its files, a row at a time.

A folder may hold several runs; these readers give the last one.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from clockwright.errors import TraceFormatError
from clockwright.units import ActionId, ModelId, RequestId, WorkerId
from clockwright.wire.actions import StepTime
from controller.telemetry.files import (
    ACTION_COLUMNS,
    REQUEST_COLUMNS,
    last_run,
    last_run_in,
    table_files,
)
from controller.telemetry.rows import ActionRow, RequestRow

TelemetryRow = dict[str, str]

RowT = TypeVar("RowT", RequestRow, ActionRow)


def read_requests(directory: Path) -> Iterator[RequestRow]:
    """Give the rows of the folder's last run in `requests.csv`.

    Raises:
        TraceFormatError: the table is missing or not what it should be; names the file and the line.
    """
    return _read(directory, "requests", REQUEST_COLUMNS, RequestRow)


def read_actions(directory: Path) -> Iterator[ActionRow]:
    """Give the rows of the folder's last run in `actions.csv`.

    Raises:
        TraceFormatError: the table is missing or not what it should be; names the file and the line.
    """
    return _read(directory, "actions", ACTION_COLUMNS, ActionRow)


def _read(directory: Path, name: str, columns: Sequence[str], kind: type[RowT]) -> Iterator[RowT]:
    """A row's fields say by their types what their cells hold."""
    cells = [(column, _CELLS[hint]) for column, hint in get_type_hints(kind).items()]
    with ExitStack() as stack:
        table = TelemetryTable(directory, name, columns, stack)
        for row in table:
            yield kind(*(read(table, row, column) for column, read in cells))


class TelemetryTable:
    """A telemetry table, a row of its last run at a time."""

    def __init__(
        self, directory: Path, name: str, columns: Sequence[str], stack: ExitStack
    ) -> None:
        """Open the table.

        Args:
            directory: the telemetry folder.
            name: `requests` or `actions`.
            columns: what it has to have.
            stack: closes the files.

        Raises:
            TraceFormatError: the table is missing, or lacks a column.
        """
        self._columns = columns
        self._stack = stack
        files = table_files(directory, name)
        #: 0: no row says its run, which is an error that the row's reader names.
        self._run = last_run(directory)
        first = len(files) - 1
        while self._run and first and last_run_in(files[first - 1]) == self._run:
            first -= 1
        self._files = iter(files[first:])
        self._open(next(self._files))

    def __iter__(self) -> Iterator[TelemetryRow]:
        while True:
            while (cells := self._next()) is not None:
                if len(cells) != len(self._header):
                    raise self.error(f"{len(cells)} cells, expected {len(self._header)}")
                row = dict(zip(self._header, cells, strict=True))
                if not self._run or row["run"] == str(self._run):
                    yield row
            following = next(self._files, None)
            if following is None:
                return
            self._open(following)

    def _open(self, path: Path) -> None:
        self._path = path
        try:
            file = self._stack.enter_context(path.open(encoding="utf-8", newline=""))
        except OSError as error:
            raise TraceFormatError(f"{path}: {error.strerror}") from None
        self._reader = csv.reader(file, strict=True)
        header = self._next()
        if header is None:
            raise TraceFormatError(f"{path}: empty, expected a line of column names")
        missing = [name for name in self._columns if name not in header]
        if missing:
            raise TraceFormatError(f"{path}:1: no column {', '.join(missing)}")
        self._header = header

    def number(self, row: TelemetryRow, column: str) -> int:
        """A cell that has to hold a whole number, in the row read last."""
        try:
            return int(row[column])
        except ValueError:
            found = row[column]
            raise self.error(f"{column} is {found!r}, expected a whole number") from None

    def decimal(self, row: TelemetryRow, column: str) -> float:
        """A cell that has to hold a number, in the row read last."""
        try:
            return float(row[column])
        except ValueError:
            raise self.error(f"{column} is {row[column]!r}, expected a number") from None

    def optional(self, row: TelemetryRow, column: str) -> int | None:
        """A cell that may be empty, else has to hold a whole number."""
        return self.number(row, column) if row[column] else None

    def error(self, text: str) -> TraceFormatError:
        """An error that names the row read last."""
        return TraceFormatError(f"{self._path}:{self._reader.line_num}: {text}")

    def _next(self) -> list[str] | None:
        try:
            return next(self._reader, None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise self.error(str(error)) from None


def _step(table: TelemetryTable, row: TelemetryRow, step: str) -> StepTime | None:
    if not row[f"{step}_begin_ns"]:
        return None
    return StepTime(
        *(table.number(row, f"{step}_{part}_ns") for part in ("begin", "end", "duration"))
    )


#: What reads a cell, by the type of its field.
_CELLS: Mapping[Any, Callable[[TelemetryTable, TelemetryRow, str], Any]] = {
    **dict.fromkeys((int, RequestId, ActionId), TelemetryTable.number),
    float: TelemetryTable.decimal,
    **dict.fromkeys((int | None, ActionId | None), TelemetryTable.optional),
    **dict.fromkeys((str, ModelId, WorkerId), lambda _, row, column: row[column]),
    WorkerId | None: lambda _, row, column: row[column] or None,
    bool: lambda table, row, column: bool(table.number(row, column)),
    StepTime | None: _step,
}
