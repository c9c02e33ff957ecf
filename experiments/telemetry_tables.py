"""The telemetry of a run, read back from its files, a row at a time."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from clockwright.actions import StepTime
from clockwright.errors import TraceFormatError
from clockwright.units import ActionId, ModelId, RequestId, WorkerId
from controller.telemetry import ACTION_COLUMNS, REQUEST_COLUMNS, ActionRow, RequestRow

TelemetryRow = dict[str, str]


def read_requests(directory: Path) -> Iterator[RequestRow]:
    """Give the rows of `requests.csv`.

    Raises:
        TraceFormatError: the table is missing or not what it should be; names the file and the line.
    """
    with ExitStack() as stack:
        table = TelemetryTable(directory / "requests.csv", REQUEST_COLUMNS, stack)
        for row in table:
            action_id = table.optional(row, "action_id")
            yield RequestRow(
                request_id=RequestId(table.number(row, "request_id")),
                model_id=ModelId(row["model_id"]),
                rows=table.number(row, "rows"),
                arrival_ns=table.number(row, "arrival_ns"),
                slo_ns=table.number(row, "slo_ns"),
                departure_ns=table.number(row, "departure_ns"),
                outcome=row["outcome"],
                cold=bool(table.number(row, "cold")),
                worker_id=WorkerId(row["worker_id"]) if row["worker_id"] else None,
                action_id=None if action_id is None else ActionId(action_id),
                batch_size=table.number(row, "batch_size"),
                expected_departure_ns=table.number(row, "expected_departure_ns"),
            )


def read_actions(directory: Path) -> Iterator[ActionRow]:
    """Give the rows of `actions.csv`.

    Raises:
        TraceFormatError: the table is missing or not what it should be; names the file and the line.
    """
    with ExitStack() as stack:
        table = TelemetryTable(directory / "actions.csv", ACTION_COLUMNS, stack)
        for row in table:
            yield ActionRow(
                action_id=ActionId(table.number(row, "action_id")),
                type=row["type"],
                worker_id=WorkerId(row["worker_id"]),
                model_id=ModelId(row["model_id"]),
                batch_size=table.number(row, "batch_size"),
                rows=table.number(row, "rows"),
                num_requests=table.number(row, "num_requests"),
                sent_ns=table.number(row, "sent_ns"),
                earliest_ns=table.optional(row, "earliest_ns"),
                latest_ns=table.optional(row, "latest_ns"),
                expected_begin_ns=table.number(row, "expected_begin_ns"),
                expected_duration_ns=table.number(row, "expected_duration_ns"),
                received_ns=table.number(row, "received_ns"),
                result_ns=table.number(row, "result_ns"),
                error=row["error"],
                load=_step(table, row, "load"),
                input=_step(table, row, "input"),
                exec=_step(table, row, "exec"),
                output=_step(table, row, "output"),
            )


def _step(table: TelemetryTable, row: TelemetryRow, step: str) -> StepTime | None:
    if not row[f"{step}_begin_ns"]:
        return None
    return StepTime(
        *(table.number(row, f"{step}_{part}_ns") for part in ("begin", "end", "duration"))
    )


class TelemetryTable:
    """A telemetry table, a row at a time."""

    def __init__(self, path: Path, columns: Sequence[str], stack: ExitStack) -> None:
        self._path = path
        try:
            file = stack.enter_context(path.open(encoding="utf-8", newline=""))
        except OSError as error:
            raise TraceFormatError(f"{path}: {error.strerror}") from None
        self._reader = csv.reader(file, strict=True)
        header = self._next()
        if header is None:
            raise TraceFormatError(f"{path}: empty, expected a line of column names")
        missing = [name for name in columns if name not in header]
        if missing:
            raise TraceFormatError(f"{path}:1: no column {', '.join(missing)}")
        self._header = header

    def __iter__(self) -> Iterator[TelemetryRow]:
        while (cells := self._next()) is not None:
            if len(cells) != len(self._header):
                raise self.error(f"{len(cells)} cells, expected {len(self._header)}")
            yield dict(zip(self._header, cells, strict=True))

    def number(self, row: TelemetryRow, column: str) -> int:
        """A cell that has to hold a whole number, in the row read last."""
        try:
            return int(row[column])
        except ValueError:
            found = row[column]
            raise self.error(f"{column} is {found!r}, expected a whole number") from None

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
