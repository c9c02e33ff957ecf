"""Measures the simulator's parameters on a live server: overheads, and the cost of models.

Closed-loop clients measure in runs of their own. One client on an idle server shows the delays of both
directions. Six clients of one model show the pause between two EXECs of a busy lane, and how long EXECs of every
batch size take while client, controller and worker share the processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from clockwright.units import NS_PER_S, NS_PER_US
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import OK
from experiments.simulator import Network
from experiments.study.sides import RunRows
from modelzoo.profile import ProfileRow
from traces.arrivals import ClosedLoop, Workload

_CROWD = 6
# Fewer of a kind do not tell how they vary.
_ENOUGH = 10
_SLO_NS = 10 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The simulator's parameters."""

    #: Nothing but samples, one per request: the times from its arrival until its EXEC has its turn on an idle lane,
    #: with all work of controller and worker in between; from the EXEC's end until it departs; and from a response's
    #: departure to the arrival of the client's next request.
    network: Network
    #: Pauses between two EXECs of a busy lane.
    start_delay_ns: int

    def describe(self) -> dict[str, float]:
        """Percentiles in us instead of every sample, for people."""
        said = {"start_delay_us": self.start_delay_ns / NS_PER_US}
        for name in ("down", "up", "client"):
            samples_ns = getattr(self.network, f"{name}_samples_ns")
            for percent in (5, 50, 90, 99):
                value = float(np.percentile(samples_ns, percent)) / NS_PER_US
                said[f"{name}_us_p{percent}"] = round(value, 1)
        return said


def calibration_workloads(model: str, seconds: float) -> list[Workload]:
    """One client alone, then several."""
    end_ns = round(seconds * NS_PER_S)
    loops = (
        ClosedLoop(model=0, concurrency=concurrency, slo_ns=_SLO_NS, end_ns=end_ns)
        for concurrency in (1, _CROWD)
    )
    return [Workload(models=(model,), closed_loops=(loop,)) for loop in loops]


def calibrate(alone: RunRows, crowd: RunRows, rehearsal: RunRows | None = None) -> Calibration:
    """Take the overheads from the two runs of `calibration_workloads`.

    Args:
        alone: the run of one client.
        crowd: the run of several clients.
        rehearsal: a run whose requests come as rarely as in what is to be simulated: a server that was
            idle for a while takes longer on the way. Its requests that found the lane idle are taken
            instead of those of `alone`, where there are enough.

    Raises:
        ValueError: too few requests were answered to tell.
    """
    pairs = list(_answered(alone))
    gaps_ns = _gaps_ns(crowd.actions)
    if len(pairs) < _ENOUGH or len(gaps_ns) < _ENOUGH:
        raise ValueError(
            f"{len(pairs)} requests of one client and {len(gaps_ns)} EXECs without a pause: expected "
            "10 or more of each"
        )
    start_delay_ns = int(np.median(gaps_ns))
    down_ns, up_ns = [], []
    undisturbed = [] if rehearsal is None else _undisturbed(rehearsal)
    for request, action in undisturbed if len(undisturbed) >= _ENOUGH else pairs:
        assert action.exec is not None
        down_ns.append(max(0, action.exec.begin_ns - start_delay_ns - request.arrival_ns))
        up_ns.append(max(0, request.departure_ns - action.exec.end_ns))
    turns_ns = (
        after.arrival_ns - before.departure_ns for (before, _), (after, _) in pairwise(pairs)
    )
    network = Network(
        delay_ns=0,
        client_delay_ns=0,
        down_samples_ns=tuple(down_ns),
        up_samples_ns=tuple(up_ns),
        client_samples_ns=tuple(max(0, turn_ns) for turn_ns in turns_ns),
    )
    return Calibration(network=network, start_delay_ns=start_delay_ns)


def measured_row(
    row: ProfileRow, actions: Iterable[ActionRow]
) -> tuple[ProfileRow, dict[int, tuple[int, ...]]]:
    """Replace a row's durations by what was measured of its model, and say which EXECs took how long.

    Real durations come in heaps, because a core's caches are warm or cold and its neighbour is busy or idle: no noise
    around a median tells of that. A batch size that came up fewer than ten times varies as the next smaller one
    that did, or else as the smallest: around its own median, or, where it never came up, around its share by the row.

    Returns:
        The row, of medians, and durations by batch size, in ns; empty: no EXEC was measured.
    """
    done = [action for action in actions if action.error == "NONE"]
    loads_ns = [action.load.duration_ns for action in done if action.load is not None]
    execs_ns: dict[int, list[int]] = {}
    for action in done:
        if action.exec is not None:
            execs_ns.setdefault(action.batch_size, []).append(action.exec.duration_ns)
    exec_ns, samples_ns = dict(row.exec_ns), dict[int, tuple[int, ...]]()
    often = {
        size: some for size in sorted(exec_ns) if len(some := execs_ns.get(size, [])) >= _ENOUGH
    }
    nearest = next(iter(often), 0)
    for size in sorted(exec_ns) if often else ():
        nearest = size if size in often else nearest
        if size in execs_ns:
            share = float(np.median(execs_ns[size]) / np.median(often[nearest]))
        else:
            share = row.exec_ns[size] / row.exec_ns[nearest]
        samples_ns[size] = tuple(round(share * duration_ns) for duration_ns in often[nearest])
        exec_ns[size] = int(np.median(samples_ns[size]))
    load_ns = int(np.median(loads_ns)) if loads_ns else row.load_ns
    return replace(row, load_ns=load_ns, exec_ns=exec_ns), samples_ns


def _answered(run: RunRows) -> Iterator[tuple[RequestRow, ActionRow]]:
    """Requests as they came, with the Infers that answered them, but for those that waited for their weights."""
    actions = {action.action_id: action for action in run.actions}
    for request in sorted(run.requests, key=lambda row: row.arrival_ns):
        action = None if request.action_id is None else actions.get(request.action_id)
        if request.outcome == OK and not request.cold and action and action.exec:
            yield request, action


def _undisturbed(run: RunRows) -> list[tuple[RequestRow, ActionRow]]:
    """Requests that ran alone, on a lane that was idle when they came."""
    found = []
    lane_free_ns = 0
    for request, action in _answered(run):
        assert action.exec is not None
        if action.num_requests == 1 and request.arrival_ns >= lane_free_ns:
            found.append((request, action))
        lane_free_ns = max(lane_free_ns, action.exec.end_ns)
    return found


def _gaps_ns(actions: Sequence[ActionRow]) -> list[int]:
    """Pauses of the EXEC lane while the next Infer was there and its input staged."""
    infers = sorted(
        (action.exec.begin_ns, action.exec.end_ns, action.input.end_ns)
        for action in actions
        if action.exec is not None and action.input is not None
    )
    return [
        begin_ns - before_ns
        for (_, before_ns, _), (begin_ns, _, staged_ns) in pairwise(infers)
        if staged_ns <= before_ns
    ]
