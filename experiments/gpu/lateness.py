"""How late a worker's actions began, and by how much their durations differed from the predicted ones.

From the telemetry's action rows: how long after the moment it could have begun (its window open, its input staged, its
lane free, its weights there) each EXEC and LOAD began, and by how much EXEC and LOAD durations differed from the
predictions their actions carried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from clockwright.wire.actions import StepTime
from controller.telemetry.rows import ActionRow


def action_figures(actions: Iterable[ActionRow]) -> dict[str, float]:
    """How late actions began, and by how much their durations differed from the predicted ones."""
    rows = [row for row in actions if row.error == "NONE"]
    loads = [(row.load, row) for row in rows if row.load is not None]
    execs = [(row.exec, row) for row in rows if row.exec is not None]
    loaded: dict[str, list[int]] = {}
    for step, row in loads:
        loaded.setdefault(row.model_id, []).append(step.end_ns)
    for ends in loaded.values():
        ends.sort()
    late = sorted(_lateness(execs, loaded) + _lateness(loads, {}))
    figures = {
        "start_late_us_p50": _quantile(late, 0.5),
        "start_late_us_p99": _quantile(late, 0.99),
        "num_exec": float(len(execs)),
        "num_load": float(len(loads)),
    }
    if pauses := sorted(_pauses(execs, loaded)):
        # Without a queued EXEC there is no figure, which would look like no pause.
        figures["exec_pause_us_p50"] = _quantile(pauses, 0.5)
        figures["exec_pause_us_p99"] = _quantile(pauses, 0.99)
    for name, lane in (("exec", execs), ("load", loads)):
        errors = sorted(
            abs(step.duration_ns - row.expected_duration_ns) / 1000 for step, row in lane
        )
        figures[f"{name}_error_us_p50"] = _quantile(errors, 0.5)
        figures[f"{name}_error_us_p99"] = _quantile(errors, 0.99)
        completion = sorted(
            abs(step.end_ns - row.expected_begin_ns - row.expected_duration_ns) / 1000
            for step, row in lane
        )
        figures[f"{name}_completion_error_us_p99"] = _quantile(completion, 0.99)
    return figures


def _lateness(
    lane: Sequence[tuple[StepTime, ActionRow]], loaded: dict[str, list[int]]
) -> list[float]:
    """Microseconds between the moment a lane's steps could begin and the moment they did.

    Args:
        lane: the lane's steps, with their actions.
        loaded: for EXEC, the times at which each model's weights were there, in order.
    """
    lane_free_ns = 0
    late = []
    for step, row in sorted(lane, key=lambda each: each[0].begin_ns):
        able_ns = max(lane_free_ns, _ready_ns(step, row, loaded))
        late.append((step.begin_ns - able_ns) / 1000)
        lane_free_ns = step.end_ns
    return late


def _pauses(
    execs: Sequence[tuple[StepTime, ActionRow]], loaded: dict[str, list[int]]
) -> list[float]:
    """Microseconds between two EXEC in which the device did nothing though the second was ready.

    By the device's own durations: an EXEC in its queue begins, by the host's clock, when the one before
    ends, whatever the device did meanwhile, and is never late.
    """
    ordered = sorted(execs, key=lambda each: each[0].begin_ns)
    return [
        max(step.end_ns - before.end_ns - step.duration_ns, 0) / 1000
        for (before, _), (step, row) in pairwise(ordered)
        if _ready_ns(step, row, loaded) <= before.end_ns
    ]


def _ready_ns(step: StepTime, row: ActionRow, loaded: dict[str, list[int]]) -> int:
    """Time at which a step had all that it needs except its lane."""
    ready_ns = max(row.earliest_ns or 0, row.received_ns)
    if row.input is not None:
        ready_ns = max(ready_ns, row.input.end_ns)
    ends = loaded.get(row.model_id, [])
    if index := bisect_right(ends, step.begin_ns):
        ready_ns = max(ready_ns, ends[index - 1])
    return ready_ns


def _quantile(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return 0.0
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)], 1)
