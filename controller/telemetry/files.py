"""The telemetry's tables on disk: appended to, told apart by run, in new files as they grow.

`TelemetryFiles` appends the rows of `controller.telemetry.tables` to `requests.csv` and `actions.csv` in small
slices, so that the event loop can serve requests in between. Two columns stand before
those of a row: the number of the run that wrote it, and its time by the wall clock.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Generic, Self, TypeVar

from clockwright.errors import ConfigError
from clockwright.wire.actions import StepTime
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import CAPACITY

log = logging.getLogger(__name__)

#: A table goes on in a new file when its file has this size, and this many older files are kept: 2.3 GB,
#: some 10 million requests, per table.
FILE_BYTES: Final = 1 << 28
NUM_OLDER_FILES: Final = 8

_Row = TypeVar("_Row")

_REQUEST_FIELDS = list(RequestRow.__struct_fields__)
_STEPS = ("load", "input", "exec", "output")
_ACTION_FIELDS = [name for name in ActionRow.__struct_fields__ if name not in _STEPS]

#: Column `run` numbers the runs that wrote to a folder, from 1; `departure_utc` and `result_utc` are the
#: wall clock's times of `departure_ns` and `result_ns`, in ISO 8601.
REQUEST_COLUMNS = ["run", "departure_utc", *_REQUEST_FIELDS]
ACTION_COLUMNS = ["run", "result_utc", *_ACTION_FIELDS] + [
    f"{step}_{part}_ns" for step in _STEPS for part in ("begin", "end", "duration")
]

# A disk, a quota, or a limit of the process.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _request_values(row: RequestRow) -> Iterator[object]:
    return (_cell(getattr(row, name)) for name in _REQUEST_FIELDS)


def _action_values(row: ActionRow) -> Iterator[object]:
    yield from (_cell(getattr(row, name)) for name in _ACTION_FIELDS)
    for name in _STEPS:
        step: StepTime | None = getattr(row, name)
        if step is None:
            yield from ("", "", "")
        else:
            yield from (step.begin_ns, step.end_ns, step.duration_ns)


def _cell(value: object) -> object:
    # csv writes True as "True", which other readers take for text.
    return int(value) if isinstance(value, bool) else value


def _wall_zero_ns() -> int:
    """Unix time of the monotonic clock's zero. It changes when the wall clock is set."""
    return time.time_ns() - time.monotonic_ns()


class TelemetryFiles:
    """`requests.csv` and `actions.csv` in one directory, behind what earlier runs left there.

    A file that has reached its size, or whose columns are others, is renamed to `requests.1.csv`,
    `requests.2.csv` and so on, and a new one begins; of these the oldest are deleted.

    Where the disk takes no more, rows wait in memory, and beyond its capacity the oldest are dropped and
    counted. They are written as soon as there is room again.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity: int = CAPACITY,
        file_bytes: int | None = FILE_BYTES,
        wall_zero_ns: Callable[[], int] = _wall_zero_ns,
    ) -> None:
        """Open both files, with a header line where they are new. One process at a time writes to the folder.

        Beyond the capacity the oldest rows that wait are dropped. A table goes on in a new file at a size; None: never.
        Raises ConfigError if the folder cannot be written to, or another process writes to it.
        """
        self._failed = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                #: What is written now; the first run that wrote to the directory was 1.
                self.run = last_run(directory) + 1
                self.requests: TableFile[RequestRow] = TableFile(
                    directory / "requests.csv",
                    REQUEST_COLUMNS,
                    lambda row: row.departure_ns,
                    _request_values,
                    run=self.run,
                    capacity=capacity,
                    file_bytes=file_bytes,
                    wall_zero_ns=wall_zero_ns,
                )
                self.actions: TableFile[ActionRow] = TableFile(
                    directory / "actions.csv",
                    ACTION_COLUMNS,
                    lambda row: row.result_ns,
                    _action_values,
                    run=self.run,
                    capacity=capacity,
                    file_bytes=file_bytes,
                    wall_zero_ns=wall_zero_ns,
                )
            except BaseException:
                os.close(self._lock)
                raise
        except BlockingIOError:
            raise ConfigError(f"telemetry directory {directory}: another process uses it") from None
        except OSError as error:
            raise ConfigError(f"telemetry directory {directory}: {error}") from error

    def write_slice(self, max_rows: int = 64) -> bool:
        """Make the text of at most `max_rows` rows of each table; 64 take a fraction of a millisecond.

        Returns whether there is more to do before the next `flush`.
        """
        more = [table.format(max_rows) for table in (self.requests, self.actions)]
        return any(more)

    def flush(self) -> None:
        """Hand the text to the operating system; may block on the disk.

        A failing disk is logged once, and again when it recovers.
        """
        errors = [
            error for table in (self.requests, self.actions) if (error := table.flush()) is not None
        ]
        if errors:
            if not self._failed:
                log.error("telemetry waits in memory until it can be written: %s", errors[0])
        else:
            dropped = [table.take_dropped() for table in (self.requests, self.actions)]
            if self._failed or any(dropped):
                log.warning(
                    "telemetry is written; dropped before: %d requests, %d actions", *dropped
                )
        self._failed = bool(errors)

    def close(self) -> None:
        """Write everything that waits, and close."""
        self.flush()
        while not self._failed and self.write_slice(4096):
            self.flush()
        self.flush()
        waiting = [table.close() for table in (self.requests, self.actions)]
        if any(waiting):
            log.error("telemetry lacks the last %d requests and %d actions", *waiting)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(eq=False)
class TableFile(Generic[_Row]):
    """One table's rows on their way to the disk: first as rows, then as text."""

    path: Path
    columns: list[str]
    #: The time of a row that is given by the wall clock too.
    time_ns: Callable[[_Row], int]
    #: The cells of a row behind those of the run and the wall clock.
    values: Callable[[_Row], Iterator[object]]
    _: KW_ONLY
    run: int
    capacity: int
    file_bytes: int | None
    wall_zero_ns: Callable[[], int]

    def __post_init__(self) -> None:
        """Open the newest file, or make it. Raises OSError if that fails, and not because the disk is full."""
        self._header = ",".join(self.columns).encode() + b"\r\n"
        #: Since the count was last read.
        self._dropped = 0
        self._pending: deque[_Row] = deque()
        # A thread of its own may be flushing while more is formatted.
        self._text_lock = threading.Lock()
        self._text = bytearray()
        self._num_in_text = 0
        self._stuck = False
        self._file: int | None = None
        if self.path.exists():
            _cut_torn_row(self.path)
            if self.path.stat().st_size and not _begins_with(self.path, self._header):
                self._rename()
        # A disk that is full may have room again; nothing else that goes wrong now mends itself.
        if (error := self.flush()) is not None and error.errno not in _FULL:
            raise error

    def add(self, row: _Row) -> None:
        """Take a row. Where too many wait, the oldest is dropped."""
        if len(self._pending) >= self.capacity:
            self._pending.popleft()
            self._dropped += 1
        self._pending.append(row)

    def take_dropped(self) -> int:
        """How many rows were dropped since this was asked last."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def format(self, max_rows: int) -> bool:
        """Make text of some rows, unless the text before could not be written.

        Returns whether rows are left that could be formatted now.
        """
        if self._stuck:
            return False
        num_rows = min(max_rows, len(self._pending))
        if num_rows:
            zero_ns = self.wall_zero_ns()
            text = io.StringIO(newline="")
            writer = csv.writer(text)
            for _ in range(num_rows):
                row = self._pending.popleft()
                time_utc = _EPOCH + timedelta(microseconds=(zero_ns + self.time_ns(row)) // 1000)
                writer.writerow(
                    (self.run, time_utc.isoformat(timespec="microseconds"), *self.values(row))
                )
            with self._text_lock:
                self._text += text.getvalue().encode()
                self._num_in_text += num_rows
        return bool(self._pending)

    def flush(self) -> OSError | None:
        """Write the text; what the disk does not take stays, to the byte.

        Returns why not all of it could be written.
        """
        with self._text_lock:
            try:
                if self._text and self._file is not None and self._is_full():
                    os.close(self._file)
                    self._file = None
                    self._rename()
                if self._file is None:
                    self._open()
                assert self._file is not None
                while self._text:
                    # A disk that fills up takes a part first. The rest goes behind it later.
                    del self._text[: os.write(self._file, self._text)]
            except OSError as error:
                self._stuck = True
                return error
            self._num_in_text = 0
            self._stuck = False
            return None

    def close(self) -> int:
        """Close the file. Returns rows that were not written, or not to their end."""
        if self._file is not None:
            os.close(self._file)
        return len(self._pending) + self._num_in_text

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if not os.fstat(self._file).st_size:
            self._text[:0] = self._header

    def _is_full(self) -> bool:
        if self.file_bytes is None or self._file is None:
            return False
        size = os.fstat(self._file).st_size
        return size > len(self._header) and size + len(self._text) > self.file_bytes

    def _rename(self) -> None:
        """Keep the file under the next number, and delete the oldest."""
        older = table_files(self.path.parent, self.path.stem)[:-1]
        number = 1 + max((_number(path) for path in older), default=0)
        self.path.rename(self.path.with_suffix(f".{number}.csv"))
        if self.file_bytes is not None:
            for path in older[: max(0, len(older) + 1 - NUM_OLDER_FILES)]:
                path.unlink(missing_ok=True)


def table_files(directory: Path, name: str) -> list[Path]:
    """The files of a table (`requests` or `actions`) in a telemetry folder, the oldest first.

    `NAME.csv` is the last one.
    """
    found = [
        path for path in directory.glob(f"{name}.*.csv") if re.search(r"\.\d+\.csv$", path.name)
    ]
    return [*sorted(found, key=_number), directory / f"{name}.csv"]


def last_run(directory: Path) -> int:
    """The number of the run that left a row in a telemetry folder last; 0: none did."""
    return max(
        last_run_in(path)
        for name in ("requests", "actions")
        for path in table_files(directory, name)[-2:]
    )


def last_run_in(path: Path) -> int:
    """The number of the run that wrote the last row of a file; 0: it has no such row."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        header = file.readline()
        file.seek(max(len(header), path.stat().st_size - _MAX_ROW_BYTES))
        last = file.read().rstrip().rpartition(b"\n")[2]
    number = last.partition(b",")[0]
    return int(number) if header.startswith(b"run,") and number.isdigit() else 0


def _number(path: Path) -> int:
    return int(path.name.split(".")[-2])


# No row is longer.
_MAX_ROW_BYTES = 1 << 16


def _begins_with(path: Path, header: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _cut_torn_row(path: Path) -> None:
    """Cut what stands behind the last whole row: the process that wrote it was killed meanwhile."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MAX_ROW_BYTES))
        tail = file.read()
        if tail and not tail.endswith(b"\n") and b"\n" in tail:
            file.truncate(size - len(tail) + tail.rindex(b"\n") + 1)
