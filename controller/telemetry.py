"""What happened: two append-only tables, a row per request and a row per action.

Every figure, live or simulated, is computed from these rows. All times are nanoseconds on the
controller's monotonic clock unless a column says otherwise; its zero is arbitrary, so only
differences mean anything outside the process.

The tables keep the last rows in memory. `TelemetryFiles` writes them to `requests.csv` and
`actions.csv` in small slices, so that whoever owns the event loop can serve requests in between.
"""

from __future__ import annotations

import csv
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, TypeVar

from clockwright.actions import StepTime
from clockwright.errors import ConfigError, Refusal
from clockwright.units import ActionId, ModelId, RequestId, WorkerId

#: Rows kept per table. About 100 MB when both are full.
CAPACITY = 200_000

OK = "OK"
CANCELLED = "CANCELLED"

_Row = TypeVar("_Row")


@dataclass(slots=True, kw_only=True)
class RequestRow:
    """One request, complete once it was answered, refused or cancelled."""

    request_id: RequestId
    model_id: ModelId
    #: Rows of the request, that is its share of a batch.
    rows: int
    #: When the front end had the whole request in hand.
    arrival_ns: int
    #: Latency objective; the deadline is `arrival_ns + slo_ns`.
    slo_ns: int
    #: When the answer or refusal was handed to the front end.
    departure_ns: int = 0
    #: "OK", "CANCELLED" or the name of a `Refusal`.
    outcome: str = ""
    #: No resident copy at arrival. Known for answered requests only, like all that follows.
    cold: bool = False
    worker_id: WorkerId | None = None
    #: The Infer that answered it.
    action_id: ActionId | None = None
    batch_size: int = 0
    #: Departure as predicted when the Infer was sent.
    expected_departure_ns: int = 0


@dataclass(slots=True, kw_only=True)
class ActionRow:
    """One action, complete once its result arrived or its worker was lost."""

    action_id: ActionId
    #: "LoadWeights", "Infer" or "EvictWeights".
    type: str
    worker_id: WorkerId
    model_id: ModelId
    #: Infer only: compiled batch size, rows in it, and requests they came from.
    batch_size: int = 0
    rows: int = 0
    num_requests: int = 0
    #: When it was handed to the worker's link.
    sent_ns: int = 0
    #: The window; none for EvictWeights.
    earliest_ns: int | None = None
    latest_ns: int | None = None
    #: As predicted when sent.
    expected_begin_ns: int = 0
    expected_duration_ns: int = 0
    #: When the worker had it in hand, and when the controller had the result.
    received_ns: int = 0
    result_ns: int = 0
    #: "NONE", the name of an `ActionError`, or "WORKER_LOST".
    error: str = ""
    #: Steps that were not reached are None. `begin_ns` and `end_ns` by the worker's wall clock,
    #: translated; `duration_ns` is how long the device itself was busy.
    load: StepTime | None = None
    input: StepTime | None = None
    exec: StepTime | None = None
    output: StepTime | None = None


@dataclass(slots=True)
class Counts:
    """Totals since start, of one model or of all."""

    requests: int = 0
    answered: int = 0
    cancelled: int = 0
    #: Answered requests whose model was not resident when they arrived.
    cold_starts: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, row: RequestRow) -> None:
        """Count a complete row."""
        self.requests += 1
        if row.outcome == OK:
            self.answered += 1
            self.cold_starts += row.cold
        elif row.outcome == CANCELLED:
            self.cancelled += 1
        else:
            self.refusals[row.outcome] += 1


class Telemetry:
    """The last rows of both tables, and totals."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        #: In order of departure.
        self.requests: deque[RequestRow] = deque(maxlen=capacity)
        #: In order of completion.
        self.actions: deque[ActionRow] = deque(maxlen=capacity)
        self.total = Counts()
        self.by_model: dict[ModelId, Counts] = {}
        self._files: TelemetryFiles | None = None

    def add_request(self, row: RequestRow) -> None:
        """Append a complete row; the caller changes it no more."""
        self.requests.append(row)
        self.total.add(row)
        counts = self.by_model.get(row.model_id)
        if counts is None:
            counts = self.by_model[row.model_id] = Counts()
        counts.add(row)
        if self._files is not None:
            self._files.pending_requests.append(row)

    def refused_at_door(self, refusal: Refusal) -> None:
        """Count a request that the front refused before it knew enough of it for a row."""
        self.total.requests += 1
        self.total.refusals[refusal.value] += 1

    def add_action(self, row: ActionRow) -> None:
        """Append a complete row; the caller changes it no more."""
        self.actions.append(row)
        if self._files is not None:
            self._files.pending_actions.append(row)

    def write_to(self, files: TelemetryFiles) -> None:
        """From now on every row goes to `files` as well."""
        self._files = files


REQUEST_COLUMNS = [column.name for column in fields(RequestRow)]

_STEPS = ("load", "input", "exec", "output")
_ACTION_FIELDS = [column.name for column in fields(ActionRow) if column.name not in _STEPS]
ACTION_COLUMNS = _ACTION_FIELDS + [
    f"{step}_{part}_ns" for step in _STEPS for part in ("begin", "end", "duration")
]


def request_values(row: RequestRow) -> Iterator[object]:
    """Values of a row in the order of `REQUEST_COLUMNS`."""
    return (_cell(getattr(row, name)) for name in REQUEST_COLUMNS)


def action_values(row: ActionRow) -> Iterator[object]:
    """Values of a row in the order of `ACTION_COLUMNS`."""
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


class TelemetryFiles:
    """`requests.csv` and `actions.csv` in one directory; replaces those of an earlier run."""

    def __init__(self, directory: Path, *, capacity: int = CAPACITY) -> None:
        """Open both files and write their header lines.

        Args:
            directory: made when it does not exist.
            capacity: rows that may wait to be written; beyond it the oldest are lost.

        Raises:
            ConfigError: the directory cannot be written to.
        """
        self.pending_requests: deque[RequestRow] = deque(maxlen=capacity)
        self.pending_actions: deque[ActionRow] = deque(maxlen=capacity)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._requests = _open(directory / "requests.csv", REQUEST_COLUMNS)
            self._actions = _open(directory / "actions.csv", ACTION_COLUMNS)
        except OSError as error:
            raise ConfigError(f"telemetry directory {directory}: {error}") from error

    def write_slice(self, max_rows: int = 64) -> bool:
        """Write at most `max_rows` waiting rows of each table; 64 take a fraction of a millisecond.

        Returns:
            Whether rows are left.
        """
        _write(self._requests, map(request_values, _take(self.pending_requests, max_rows)))
        _write(self._actions, map(action_values, _take(self.pending_actions, max_rows)))
        return bool(self.pending_requests or self.pending_actions)

    def flush(self) -> None:
        """Hand what was written to the operating system; may block on the disk."""
        self._requests.flush()
        self._actions.flush()

    def close(self) -> None:
        """Write everything that waits, and close."""
        while self.write_slice():
            pass
        self._requests.close()
        self._actions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open(path: Path, columns: list[str]) -> TextIO:
    # The buffer outlasts a second of rows, so the disk is met in `flush` only.
    file = path.open("w", encoding="utf-8", newline="", buffering=1 << 22)
    csv.writer(file).writerow(columns)
    return file


def _write(file: TextIO, rows: Iterable[Iterator[object]]) -> None:
    csv.writer(file).writerows(rows)


def _take(rows: deque[_Row], max_rows: int) -> Iterator[_Row]:
    for _ in range(min(max_rows, len(rows))):
        yield rows.popleft()
