"""Finds a model whose runs are longer than other models' requests can wait: it holds a device while they are refused."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from clockwright.errors import Refusal
from clockwright.units import ModelId
from clockwright.wire.actions import ActionError
from controller.telemetry.rows import ActionRow, RequestRow

_NO_ERROR = ActionError.NONE.name
_REFUSED = frozenset((Refusal.OVERLOADED.value, Refusal.LATE.value))
# On many devices some run of a model meets every request; it is the cause if it takes most of what they compute.
_BUSY_SHARE = 0.5
# Fewer may be chance. A smaller part of what other models' requests were refused for has other causes, too.
_BEHIND_MIN, _BEHIND_SHARE = 3, 0.5


@dataclass(frozen=True, slots=True)
class LongRuns:
    """The runs of one model, and the requests to others that met them."""

    model_id: ModelId
    #: The median of the runs.
    exec_ns: int
    #: The models of these requests, the most often refused first, and the shortest of their SLOs.
    others: tuple[ModelId, ...]
    slo_ns: int
    num_refused: int


def long_runs(requests: Sequence[RequestRow], actions: Sequence[ActionRow]) -> LongRuns | None:
    """Look at requests and actions of the same time. Returns None if no model keeps others waiting for too long.

    The model takes most of the devices' time. A request counts if its SLO is shorter than the runs, and one of them ran between its arrival and its deadline.
    """
    runs = [row for row in actions if row.exec is not None and row.error == _NO_ERROR]
    longest = max(runs, key=_exec_ns, default=None)
    if longest is None:
        return None
    model_id = longest.model_id
    mine = [row for row in runs if row.model_id == model_id]
    if sum(map(_exec_ns, mine)) < _BUSY_SHARE * sum(map(_exec_ns, runs)):
        return None
    exec_ns = round(statistics.median(map(_exec_ns, mine)))
    refused = [row for row in requests if row.outcome in _REFUSED and row.model_id != model_id]
    spans = sorted((row.exec.begin_ns, row.exec.end_ns) for row in mine if row.exec)
    # The latest end of the runs that began up to each.
    latest_ns = [end_ns for _, end_ns in spans]
    for index in range(1, len(latest_ns)):
        latest_ns[index] = max(latest_ns[index], latest_ns[index - 1])
    behind = []
    for row in refused:
        begun = bisect_right(spans, row.arrival_ns + row.slo_ns, key=lambda span: span[0])
        if row.slo_ns < exec_ns and begun and latest_ns[begun - 1] > row.arrival_ns:
            behind.append(row)
    if len(behind) < max(_BEHIND_MIN, _BEHIND_SHARE * len(refused)):
        return None
    counted = Counter(row.model_id for row in behind)
    others = tuple(each for each, _ in counted.most_common())
    return LongRuns(model_id, exec_ns, others, min(row.slo_ns for row in behind), len(behind))


def _exec_ns(row: ActionRow) -> int:
    return row.exec.duration_ns if row.exec is not None else 0
