"""A run as a Chrome trace, which ui.perfetto.dev and chrome://tracing show.

One process per worker, with a track for each lane (LOAD, INPUT, EXEC, OUTPUT), and below them what was
predicted and the windows in which actions could begin. One process for requests, with an asynchronous
slice from arrival to departure for each, and a track of arrivals, from which an arrow leads to the EXEC
that answered. Slices of a lane that overlap get a second track.

Both tables are read once and side by side, and events are written as they come, so memory does not
grow with the run. Viewers sort events themselves.

Format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Arrows are its flow events `s` and `f`; they bind to slices of threads only, therefore the arrivals.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from clockwright.units import NS_PER_US
from controller.telemetry.files import ACTION_COLUMNS, REQUEST_COLUMNS
from controller.telemetry.tables import OK
from experiments.telemetry.tables import TelemetryRow, TelemetryTable

_Event = dict[str, object]

_REQUESTS_PID = 1
_ARRIVALS_TID = 1
# Each kind of track has room for this many slices that overlap. Thread ids are unique in the whole
# file, because Perfetto takes two threads with the same id for one.
_TRACKS_PER_KIND = 64
_KINDS = (
    "LOAD", "INPUT", "EXEC", "OUTPUT", "LOAD predicted", "EXEC predicted", "LOAD window", "EXEC window"
)  # fmt: skip
_STEPS = ("load", "input", "exec", "output")
_PREDICTED_STEP = {"LoadWeights": "LOAD", "Infer": "EXEC"}

# A lane's slices follow each other, but a worker's times are translated by an offset that is estimated
# again all the time. Overlaps up to this are cut instead of put on a second track.
_CLOCK_ERROR_NS = 100 * NS_PER_US

# EXECs remembered for the requests they answer. Requests depart right after; those of an EXEC that was
# too late for all of them never come.
_MAX_REMEMBERED = 100_000

_ACTION_NUMBERS = ["action_id", *(name for name in ACTION_COLUMNS if name.endswith("_ns"))]
_REQUEST_NUMBERS = ["request_id", *(name for name in REQUEST_COLUMNS if name.endswith("_ns"))]


@dataclass(slots=True)
class Exported:
    """Counts of what an export wrote."""

    num_actions: int = 0
    num_requests: int = 0
    num_arrows: int = 0


def export_chrome_trace(directory: Path, target: Path, *, windows: bool = True) -> Exported:
    """Write `actions.csv` and `requests.csv` of the last run in a folder as a Chrome trace.

    Args:
        directory: a telemetry folder, of a live or a simulated run.
        target: the JSON file; replaced if it exists. Incomplete when an error is raised.
        windows: tracks for the windows of actions, too.

    Raises:
        TraceFormatError: a table is missing or not what it should be; names the file and the line.
        OSError: `target` cannot be written.
    """
    with ExitStack() as stack:
        actions = TelemetryTable(directory, "actions", ACTION_COLUMNS, stack)
        requests = TelemetryTable(directory, "requests", REQUEST_COLUMNS, stack)
        file = stack.enter_context(target.open("w", encoding="utf-8"))
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        export = _Export(file, windows=windows)
        waiting = iter(actions)
        action = next(waiting, None)
        for request in requests:
            # An answer departs when its action's result is there, so these are enough.
            departure_ns = requests.number(request, "departure_ns")
            while action is not None and actions.number(action, "result_ns") <= departure_ns:
                export.action(action, actions)
                action = next(waiting, None)
            export.request(request, requests)
        while action is not None:
            export.action(action, actions)
            action = next(waiting, None)
        file.write("\n]}\n")
    return export.exported


class _Export:
    def __init__(self, file: TextIO, *, windows: bool) -> None:
        self.exported = Exported()
        self._file = file
        self._separator = "\n"
        self._windows = windows
        self._pids: dict[str, int] = {}
        #: By process and kind: the end of each track's last slice.
        self._ends_ns: dict[tuple[int, str], list[int]] = {}
        #: Where each Infer's EXEC slice stands: pid, tid and begin.
        self._execs: dict[tuple[str, str], tuple[int, int, int]] = {}
        self._name("process", _REQUESTS_PID, _REQUESTS_PID, "requests", 0)
        self._name("thread", _REQUESTS_PID, _ARRIVALS_TID, "arrivals", 0)

    def _write(self, **event: object) -> None:
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"

    # --- actions -------------------------------------------------------------------------------

    def action(self, row: TelemetryRow, table: TelemetryTable) -> None:
        """Slices of an action's steps, its prediction and its window."""
        numbers = {name: table.optional(row, name) for name in _ACTION_NUMBERS}
        pid = self._pid(row["worker_id"])
        args: dict[str, object] = {
            name: numbers.get(name, value) for name, value in row.items() if value
        }
        name = row["model_id"]
        if row["type"] == "Infer":
            name += f" x{row['batch_size']}"
        for step in _STEPS:
            begin_ns, end_ns = numbers[f"{step}_begin_ns"], numbers[f"{step}_end_ns"]
            if begin_ns is None or end_ns is None:
                continue
            if end_ns < begin_ns:
                raise table.error(f"{step} ends at {end_ns}, before it begins at {begin_ns}")
            tid, begin_ns = self._slice(pid, step.upper(), name, begin_ns, end_ns, args)
            if step == "exec":
                self._execs[row["worker_id"], row["action_id"]] = pid, tid, begin_ns
                if len(self._execs) > _MAX_REMEMBERED:
                    del self._execs[next(iter(self._execs))]
        if planned := _PREDICTED_STEP.get(row["type"]):
            args = {"action_id": numbers["action_id"], "error": row["error"]}
            begin_ns, duration_ns = numbers["expected_begin_ns"], numbers["expected_duration_ns"]
            if begin_ns is not None and duration_ns is not None:
                if duration_ns < 0:
                    raise table.error(f"expected_duration_ns is {duration_ns}, expected 0 or more")
                end_ns = begin_ns + duration_ns
                self._slice(pid, f"{planned} predicted", name, begin_ns, end_ns, args)
            earliest_ns, latest_ns = numbers["earliest_ns"], numbers["latest_ns"]
            if self._windows and earliest_ns is not None and latest_ns is not None:
                if latest_ns < earliest_ns:
                    raise table.error(f"latest_ns {latest_ns} is before earliest_ns {earliest_ns}")
                self._slice(pid, f"{planned} window", name, earliest_ns, latest_ns, args)
        self.exported.num_actions += 1

    def _slice(
        self, pid: int, kind: str, name: str, begin_ns: int, end_ns: int, args: dict[str, object]
    ) -> tuple[int, int]:
        """Write a slice on a track of its kind that is free; returns the track and the begin."""
        tid, free_ns = self._track(pid, kind, begin_ns, end_ns)
        begin_ns = max(begin_ns, free_ns)
        self._write(
            name=name, cat=kind, ph="X", pid=pid, tid=tid, ts=_us(begin_ns),
            dur=_us(end_ns - begin_ns), args=args,
        )  # fmt: skip
        return tid, begin_ns

    def _track(self, pid: int, kind: str, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """A track for a slice, and until when it is taken: a little after `begin_ns` at most."""
        # Numbers left free for more of the kind keep them together in a viewer.
        first_tid = (pid * len(_KINDS) + _KINDS.index(kind)) * _TRACKS_PER_KIND
        ends_ns = self._ends_ns.setdefault((pid, kind), [])
        cut_ns = min(_CLOCK_ERROR_NS, (end_ns - begin_ns) // 2)
        for index, taken_ns in enumerate(ends_ns):
            if taken_ns <= begin_ns + cut_ns:
                ends_ns[index] = end_ns
                return first_tid + index, taken_ns
        index = len(ends_ns)
        if index == _TRACKS_PER_KIND:
            # A viewer cannot show more tracks: the last one shows that there are many slices.
            taken_ns = ends_ns[-1]
            ends_ns[-1] = max(taken_ns, end_ns)
            return first_tid + index - 1, min(taken_ns, end_ns)
        tid = first_tid + index
        self._name("thread", pid, tid, kind if index == 0 else f"{kind} ({index + 1})", tid)
        ends_ns.append(end_ns)
        return tid, begin_ns

    def _pid(self, worker_id: str) -> int:
        pid = self._pids.get(worker_id)
        if pid is None:
            pid = self._pids[worker_id] = _REQUESTS_PID + 1 + len(self._pids)
            self._name("process", pid, pid, f"worker {worker_id}", pid)
        return pid

    # --- requests ------------------------------------------------------------------------------

    def request(self, row: TelemetryRow, table: TelemetryTable) -> None:
        """A slice from arrival to departure, and an arrow to the EXEC that answered it."""
        numbers = {name: table.number(row, name) for name in _REQUEST_NUMBERS}
        arrival_ns, departure_ns = numbers["arrival_ns"], numbers["departure_ns"]
        if departure_ns < arrival_ns:
            raise table.error(f"departure_ns {departure_ns} is before arrival_ns {arrival_ns}")
        request_id, model_id = numbers["request_id"], row["model_id"]
        args: dict[str, object] = {
            name: numbers.get(name, value) for name, value in row.items() if value
        }
        common: _Event = {"name": model_id, "pid": _REQUESTS_PID, "tid": _REQUESTS_PID}
        asynchronous = common | {"cat": "request", "id": request_id}
        write = self._write
        write(**asynchronous, ph="b", ts=_us(arrival_ns), args=args)
        write(**asynchronous, ph="e", ts=_us(departure_ns))
        # The slice is as short as the clock allows, so that arrivals do not overlap.
        arrival = common | {"tid": _ARRIVALS_TID}
        write(**arrival, cat="arrival", ph="X", ts=_us(arrival_ns), dur=_us(1), args=args)
        execution = self._execs.get((row["worker_id"], row["action_id"]))
        if row["outcome"] == OK and execution is not None:
            pid, tid, begin_ns = execution
            flow: _Event = {"name": "request", "cat": "flow", "id": request_id}
            begin: _Event = {"pid": _REQUESTS_PID, "tid": _ARRIVALS_TID, "ts": _us(arrival_ns)}
            write(**flow, **begin, ph="s")
            # `bp` binds the arrow to the slice around it, not to the next one.
            write(**flow, ph="f", bp="e", pid=pid, tid=tid, ts=_us(begin_ns))
            self.exported.num_arrows += 1
        self.exported.num_requests += 1

    def _name(self, what: str, pid: int, tid: int, name: str, order: int) -> None:
        for event, args in (("name", {"name": name}), ("sort_index", {"sort_index": order})):
            self._write(name=f"{what}_{event}", ph="M", pid=pid, tid=tid, args=args)


def _us(time_ns: int) -> float:
    # The format's unit. A double holds nanoseconds of 100 days exactly, as microseconds to 3 places.
    return time_ns / NS_PER_US
