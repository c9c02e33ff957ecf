"""Figures of the requests and actions of the last seconds, read from the rows of telemetry on demand.

Nothing is counted for it while requests are served. A look costs the loop at most `_ROWS_MAX` rows of each table;
where more came, it looks back less far and says how far.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from clockwright.units import NS_PER_S, ModelId, WorkerId
from clockwright.v1 import control_pb2 as pb
from clockwright.wire.actions import ActionError
from controller.core import KindStatistics
from controller.models.catalogue import name_of
from controller.telemetry.rows import ActionRow
from controller.telemetry.tables import CANCELLED, COUNTERS, OK, Telemetry

#: How far a look goes back. Less: few rows; more: what was sick looks sick for long.
_WINDOW_NS = 5 * NS_PER_S
_ROWS_MAX = 2000

_NO_ERROR, _TOO_LATE = ActionError.NONE.name, ActionError.TOO_LATE.name
# Taken back by the controller itself.
_WITHDRAWN = ActionError.WITHDRAWN.name


def recent_requests(telemetry: Telemetry, *, since_ns: int, now_ns: int) -> pb.RecentRequests:
    """Sum up the requests that ended lately, since the controller's start at most.

    Those that clients withdrew do not count.
    """
    since_ns = max(since_ns, now_ns - _WINDOW_NS)
    rows = telemetry.requests_since(since_ns, _ROWS_MAX)
    if len(rows) == _ROWS_MAX:
        since_ns = rows[-1].departure_ns
    outcomes = Counter([row.outcome for row in rows])
    done = [row for row in rows if row.outcome == OK]
    latencies = sorted([row.departure_ns - row.arrival_ns for row in done])
    shares = sorted(
        [(row.departure_ns - row.arrival_ns) / row.slo_ns for row in done if row.slo_ns]
    )
    num_cancelled = outcomes.pop(CANCELLED, 0)
    recent = pb.RecentRequests(
        over_ns=max(now_ns - since_ns, 1),
        requests=len(rows) - num_cancelled,
        answered=outcomes.pop(OK, 0),
        counters={each.name: sum(map(each.of, done)) for each in COUNTERS},
        refusals=[pb.RefusalCount(reason=name, count=outcomes[name]) for name in sorted(outcomes)],
    )
    if latencies:
        recent.latency_ns_p50 = latencies[_rank(len(latencies), 50)]
        recent.latency_ns_p99 = latencies[_rank(len(latencies), 99)]
    if found := telemetry.long_runs_since(since_ns, _ROWS_MAX):
        recent.long_runs.CopyFrom(
            pb.LongRuns(
                model_id=name_of(found.model_id),
                exec_ns=found.exec_ns,
                others=dict.fromkeys(map(name_of, found.others)),
                slo_ns=found.slo_ns,
                refused=found.num_refused,
            )
        )
    if shares:
        recent.slo_share_p50 = shares[_rank(len(shares), 50)]
        recent.slo_share_p99 = shares[_rank(len(shares), 99)]
    return recent


def recent_actions(
    telemetry: Telemetry, kinds: Mapping[WorkerId, str], *, since_ns: int, now_ns: int
) -> dict[WorkerId, pb.RecentActions]:
    """Sum up the actions that ended lately, of each worker whose kind is given; as `recent_requests`."""
    since_ns = max(since_ns, now_ns - _WINDOW_NS)
    rows = telemetry.actions_since(since_ns, _ROWS_MAX)
    if len(rows) == _ROWS_MAX:
        since_ns = rows[-1].result_ns
    over_ns = max(now_ns - since_ns, 1)
    # What a look costs is the time in here: nothing is done for each row that can be done for many.
    runs: defaultdict[WorkerId, list[ActionRow]] = defaultdict(list)
    alike: defaultdict[tuple[str, ModelId, int], list[ActionRow]] = defaultdict(list)
    loads: defaultdict[WorkerId, list[int]] = defaultdict(list)
    num_failed: defaultdict[WorkerId, Counter[bool]] = defaultdict(Counter)
    for row in rows:
        worker_id, error = row.worker_id, row.error
        kind = kinds.get(worker_id)
        if kind is None:
            continue
        if error == _NO_ERROR:
            if row.exec is not None:
                runs[worker_id].append(row)
                alike[kind, row.model_id, row.batch_size].append(row)
            elif row.load is not None:
                loads[worker_id].append(row.load.duration_ns)
        elif error != _WITHDRAWN:
            num_failed[worker_id][error == _TOO_LATE] += 1
    over_others = _over_others(alike.values()) if len(runs) > 1 else {}
    told = {}
    for worker_id in runs.keys() | loads.keys() | num_failed.keys():
        mine = runs[worker_id]
        exec_ns = sum([row.exec.duration_ns for row in mine if row.exec])
        told[worker_id] = pb.RecentActions(
            over_ns=over_ns,
            infers=len(mine),
            loads=len(loads[worker_id]),
            exec_busy=exec_ns / over_ns,
            load_busy=sum(loads[worker_id]) / over_ns,
            exec_over_predicted=exec_ns / max(sum([row.expected_duration_ns for row in mine]), 1),
            exec_over_others=over_others.get(worker_id, 0.0),
            too_late=num_failed[worker_id][True],
            failed=num_failed[worker_id][False],
        )
    return told


def kind_info(row: KindStatistics) -> pb.KindInfo:
    """Say what a kind of worker did, and fell short of."""
    return pb.KindInfo(
        **{field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    )


def _over_others(groups: Iterable[Sequence[ActionRow]]) -> dict[WorkerId, float]:
    """How many times as long each worker's EXECs took as those of others.

    Who ran nothing that another ran, too, is missing. A group has the EXECs of one kind of worker, of one model, in one
    batch size.
    """
    compared_ns, others_ns = Counter[WorkerId](), Counter[WorkerId]()
    for group in groups:
        if len(group) == 1:
            continue
        took: dict[WorkerId, list[int]] = {}
        for row in group:
            if row.exec is not None:
                took.setdefault(row.worker_id, []).append(row.exec.duration_ns)
        if len(took) == 1:
            continue
        means = sorted([(sum(each) / len(each), worker_id) for worker_id, each in took.items()])
        # The lower median of the others: a slow one among them makes no worker look fast.
        middle = (len(means) - 2) // 2
        for place, (mean_ns, worker_id) in enumerate(means):
            num = len(took[worker_id])
            compared_ns[worker_id] += round(num * mean_ns)
            others_ns[worker_id] += round(num * means[middle + (place <= middle)][0])
    return {
        worker_id: duration_ns / max(others_ns[worker_id], 1)
        for worker_id, duration_ns in compared_ns.items()
    }


def _rank(num: int, percent: int) -> int:
    return max(0, -(-num * percent // 100) - 1)
