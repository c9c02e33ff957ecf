"""What requests and actions of the last seconds say, read off the rows of telemetry when somebody asks.

Nothing is counted for it while requests are served. A look costs the loop at most `_ROWS_MAX` rows of each table;
where more came, it looks back less far and says how far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from clockwright.actions import ActionError
from clockwright.units import NS_PER_S, ModelId, WorkerId
from clockwright.v1 import control_pb2 as pb
from controller.telemetry import CANCELLED, OK, Telemetry

#: How far a look goes back. Less: few rows; more: what was sick looks sick for long.
_WINDOW_NS = 5 * NS_PER_S
_ROWS_MAX = 2000

_NO_ERROR, _TOO_LATE = ActionError.NONE.name, ActionError.TOO_LATE.name
# Taken back by the controller itself.
_WITHDRAWN = ActionError.WITHDRAWN.name


def recent_requests(telemetry: Telemetry, *, since_ns: int, now_ns: int) -> pb.RecentRequests:
    """Sum up the requests that ended lately; those that clients withdrew do not count.

    Args:
        telemetry: the controller's.
        since_ns: when the controller started.
        now_ns: the present.
    """
    since_ns = max(since_ns, now_ns - _WINDOW_NS)
    rows = telemetry.requests_since(since_ns, _ROWS_MAX)
    if len(rows) == _ROWS_MAX:
        since_ns = rows[-1][6]
    outcomes = Counter([row[7] for row in rows])
    latencies = sorted([(row[6] - row[3], row[4]) for row in rows if row[7] == OK])
    shares = sorted([latency_ns / slo_ns for latency_ns, slo_ns in latencies if slo_ns])
    num_cancelled = outcomes.pop(CANCELLED, 0)
    recent = pb.RecentRequests(
        over_ns=max(now_ns - since_ns, 1),
        requests=len(rows) - num_cancelled,
        answered=outcomes.pop(OK, 0),
        cold_starts=sum([row[12] for row in rows]),
        refusals=[pb.RefusalCount(reason=name, count=outcomes[name]) for name in sorted(outcomes)],
    )
    if latencies:
        recent.latency_ns_p50 = latencies[_rank(len(latencies), 50)][0]
        recent.latency_ns_p99 = latencies[_rank(len(latencies), 99)][0]
    if shares:
        recent.slo_share_p50 = shares[_rank(len(shares), 50)]
        recent.slo_share_p99 = shares[_rank(len(shares), 99)]
    return recent


def recent_actions(
    telemetry: Telemetry, kinds: Mapping[WorkerId, str], *, since_ns: int, now_ns: int
) -> dict[WorkerId, pb.RecentActions]:
    """Sum up the actions of each worker that ended lately; as `recent_requests`.

    Args:
        telemetry: the controller's.
        kinds: kind of each worker that is connected; others are left out.
        since_ns: when the controller started.
        now_ns: the present.
    """
    since_ns = max(since_ns, now_ns - _WINDOW_NS)
    rows = telemetry.actions_since(since_ns, _ROWS_MAX)
    if len(rows) == _ROWS_MAX:
        since_ns = rows[-1][13]
    over_ns = max(now_ns - since_ns, 1)
    # Numbers of too late and of failed actions, of loads and their time, of EXECs and what they were to take.
    sums: dict[WorkerId, list[int]] = {}
    # Time and number of EXECs of one model in one batch size.
    runs: dict[tuple[str, ModelId, int], dict[WorkerId, list[int]]] = {}
    for row in rows:
        worker_id, error, load, run = row[2], row[14], row[15], row[17]
        kind = kinds.get(worker_id)
        if kind is None or error == _WITHDRAWN:
            continue
        mine = sums.setdefault(worker_id, [0] * 6)
        if error == _TOO_LATE:
            mine[0] += 1
        elif error != _NO_ERROR:
            mine[1] += 1
        elif run is not None:
            mine[4] += 1
            mine[5] += row[11]
            same = runs.setdefault((kind, row[3], row[4]), {}).setdefault(worker_id, [0, 0])
            same[0] += run.duration_ns
            same[1] += 1
        elif load is not None:
            mine[2] += 1
            mine[3] += load.duration_ns
    exec_ns, compared_ns, others_ns = Counter[WorkerId](), Counter[WorkerId](), Counter[WorkerId]()
    for of_all in runs.values():
        means = sorted(
            (duration_ns / num, worker_id) for worker_id, (duration_ns, num) in of_all.items()
        )
        for place, (mean_ns, worker_id) in enumerate(means):
            num = of_all[worker_id][1]
            exec_ns[worker_id] += of_all[worker_id][0]
            if len(means) > 1:
                # The lower median of the others: a slow one among them makes nobody look fast.
                middle = (len(means) - 2) // 2
                other_ns = means[middle + (place <= middle)][0]
                compared_ns[worker_id] += round(num * mean_ns)
                others_ns[worker_id] += round(num * other_ns)
    return {
        worker_id: pb.RecentActions(
            over_ns=over_ns,
            infers=num_infers,
            loads=num_loads,
            exec_busy=exec_ns[worker_id] / over_ns,
            load_busy=load_ns / over_ns,
            exec_over_predicted=exec_ns[worker_id] / max(predicted_ns, 1),
            exec_over_others=compared_ns[worker_id] / max(others_ns[worker_id], 1),
            too_late=num_too_late,
            failed=num_failed,
        )
        for worker_id, (
            num_too_late,
            num_failed,
            num_loads,
            load_ns,
            num_infers,
            predicted_ns,
        ) in sums.items()
    }


def _rank(num: int, percent: int) -> int:
    """Position of a percentile in a sorted list."""
    return max(0, -(-num * percent // 100) - 1)
