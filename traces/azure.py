"""Readers for Microsoft's published traces of Azure Functions.

2019 (Shahrad et al., "Serverless in the Wild", USENIX ATC 2020): one file a day, `HashOwner, HashApp,
HashFunction, Trigger`, then a column per minute. Label c is minute c - 1 of the day: the hourly timers
stand at 1, 61, 121, ... Files with some of the minutes only are read as well.

2021 (Zhang et al., SOSP 2021): one row per invocation, `app, func, end_timestamp, duration`, in seconds.

Both are read as plain text, `.xz` or `.gz`. A line that does not fit raises TraceFormatError with file and
number: a trace that is read wrongly gives figures that look right.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clockwright.errors import TraceFormatError
from clockwright.units import NS_PER_S
from traces.arrivals import Recorded, Workload
from traces.minutes import FunctionKey, MinuteTrace, assign
from traces.trace_lines import format_error, lines_of

_ID_COLUMNS = ["HashOwner", "HashApp", "HashFunction", "Trigger"]
_MINUTES_PER_DAY = 1440
_COUNT_MAX = int(np.iinfo(np.int32).max)


def read_azure_2019(path: Path) -> MinuteTrace:
    """Read one day, or some minutes of it.

    Raises TraceFormatError if the file is not of that form; says where and what was expected; ConfigError if it cannot
    be opened.
    """
    lines = lines_of(path)
    first_label, num_minutes = _read_header(path, next(lines, ""))
    functions: list[FunctionKey] = []
    rows: list[npt.NDArray[np.int32]] = []
    for number, line in enumerate(lines, 2):
        owner, app, function, trigger, counts = _cut(path, number, line, num_minutes)
        functions.append(FunctionKey(owner, app, function, trigger))
        rows.append(_read_counts(path, number, counts, first_label, num_minutes))
    if not rows:
        raise format_error(path, 2, "the file has a header and no functions")
    return MinuteTrace(tuple(functions), np.stack(rows), first_label - 1)


@dataclass(frozen=True, slots=True, eq=False)
class InvocationTrace:
    """Single invocations, in order of their start."""

    #: App and name of every function that was invoked.
    functions: tuple[tuple[str, str], ...]
    #: Each invocation's position in `functions`.
    function: npt.NDArray[np.int64]
    #: Start of each invocation, since the start of the trace; the first is 0.
    start_ns: npt.NDArray[np.int64]
    duration_ns: npt.NDArray[np.int64]

    def workload(
        self,
        models: Sequence[str],
        *,
        slo_ns: int,
        scale: float = 1.0,
        striped: bool = False,
        seed: int = 0,
        apps: bool = False,
    ) -> Workload:
        """Ask models when functions were invoked, `scale` times each; durations are not used.

        With `striped` functions are dealt out in turn; otherwise neighbours in popularity share a model. With `apps`
        requests carry the name of their function's app as their tenant.
        """
        owners = [app if apps else "" for app, _ in self.functions]
        tenants = {name: index for index, name in enumerate(dict.fromkeys(("", *owners)))}
        totals = np.bincount(self.function, minlength=len(self.functions))
        assigned = assign(totals, len(models), "striped" if striped else "contiguous")
        source = Recorded(
            times_ns=self.start_ns,
            models=assigned[self.function],
            tenants=np.array([tenants[owner] for owner in owners], np.int64)[self.function],
            slo_ns=slo_ns,
            end_ns=int(self.start_ns[-1]) + 1,
            seed=seed,
            scale=scale,
        )
        return Workload(models=tuple(models), sources=(source,), tenants=tuple(tenants))


def read_azure_2021(path: Path) -> InvocationTrace:
    """Read single invocations. Columns may stand in any order; others are passed over.

    An invocation starts at `end_timestamp - duration`. Invocations under way when the recording began start before its
    zero; the first start is taken as time 0. Raises TraceFormatError if the file is not of that form; says where and
    what was expected; ConfigError if it cannot be opened.
    """
    lines = lines_of(path)
    header = _header(path, next(lines, ""))
    missing = [name for name in ("app", "func", "end_timestamp", "duration") if name not in header]
    if missing:
        raise format_error(path, 1, f"found columns {_quoted(header)}, missing {_quoted(missing)}")
    app, func = header.index("app"), header.index("func")
    end, duration = header.index("end_timestamp"), header.index("duration")
    functions: dict[tuple[str, str], int] = {}
    numbers: list[int] = []
    starts_s: list[float] = []
    durations_s: list[float] = []
    for number, line in enumerate(lines, 2):
        cells = line.split(",")
        if len(cells) != len(header):
            raise format_error(path, number, f"found {len(cells)} cells, expected {len(header)}")
        duration_s = _seconds(path, number, "duration", cells[duration])
        if duration_s < 0:
            raise format_error(path, number, f"duration is {cells[duration]}, expected at least 0")
        key = cells[app], cells[func]
        numbers.append(functions.setdefault(key, len(functions)))
        durations_s.append(duration_s)
        starts_s.append(_seconds(path, number, "end_timestamp", cells[end]) - duration_s)
    if not numbers:
        raise format_error(path, 2, "the file has a header and no invocations")
    starts = np.array(starts_s)
    order = np.argsort(starts, kind="stable")
    starts = np.rint((starts[order] - starts.min()) * NS_PER_S).astype(np.int64)
    durations = np.rint(np.array(durations_s)[order] * NS_PER_S).astype(np.int64)
    return InvocationTrace(tuple(functions), np.array(numbers)[order], starts, durations)


def _read_header(path: Path, line: str) -> tuple[int, int]:
    """Return the first minute's label and the number of minutes."""
    header = _header(path, line)
    if header[:4] != _ID_COLUMNS:
        missing = [name for name in _ID_COLUMNS if name not in header]
        problem = f"missing {_quoted(missing)}" if missing else f"found {_quoted(header[:4])}"
        raise format_error(path, 1, f"expected the first columns {_quoted(_ID_COLUMNS)}: {problem}")
    labels = header[4:]
    if not labels:
        raise format_error(path, 1, "found no minute columns, expected labels from 1 to 1440")
    for position, label in enumerate(labels):
        if not (label.isascii() and label.isdigit() and 1 <= int(label) <= _MINUTES_PER_DAY):
            raise format_error(path, 1, f"found column {label!r}, expected a minute from 1 to 1440")
        expected = int(labels[0]) + position
        if int(label) != expected:
            raise format_error(path, 1, f"minute {expected} is missing: found column {label}")
    return int(labels[0]), len(labels)


def _header(path: Path, line: str) -> list[str]:
    if not line:
        raise format_error(path, 1, "the file is empty, expected a header")
    # Some tools begin a file with a byte order mark.
    return [name.strip() for name in line.split(",")]


def _cut(path: Path, number: int, line: str, num_minutes: int) -> list[str]:
    found, expected = line.count(",") + 1, len(_ID_COLUMNS) + num_minutes
    if found != expected:
        raise format_error(path, number, f"found {found} cells, expected {expected}")
    return line.split(",", 4)


def _read_counts(
    path: Path, number: int, text: str, first_label: int, num_minutes: int
) -> npt.NDArray[np.int32]:
    try:
        with warnings.catch_warnings():
            # If numpy cannot read the text to the end, it only warns.
            warnings.simplefilter("error")
            counts = np.fromstring(text, np.int64, sep=",")
    except (ValueError, DeprecationWarning):
        counts = np.empty(0, np.int64)
    if len(counts) != num_minutes or counts.min() < 0 or counts.max() > _COUNT_MAX:
        raise _bad_count(path, number, text, first_label)
    return counts.astype(np.int32)


def _bad_count(path: Path, number: int, text: str, first_label: int) -> TraceFormatError:
    for label, cell in enumerate(text.split(","), first_label):
        digits = cell.strip()
        if not (digits.isascii() and digits.isdigit() and int(digits) <= _COUNT_MAX):
            return format_error(
                path,
                number,
                f"column {label} is {cell!r}, expected a whole number from 0 to {_COUNT_MAX}",
            )
    return format_error(path, number, "the counts cannot be read")


def _seconds(path: Path, number: int, column: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise format_error(path, number, f"{column} is {cell!r}, expected a number of seconds")
    return value


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
