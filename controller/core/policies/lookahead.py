"""How far ahead of a lane to decide: measured, not set."""

from __future__ import annotations

from clockwright.units import NS_PER_MS, NS_PER_US
from clockwright.wire.actions import Infer
from controller.core.events import ActionSucceeded
from controller.core.lag import NO_MATTER_NS
from controller.core.state import SentAction, WorkerState

#: A look-ahead is never shorter: a lane would run dry before its look-ahead can grow.
SHORTEST_LOOKAHEAD_NS = NS_PER_MS // 4

# An idle gap shorter than this is no reason to decide earlier.
_GAP_NS = 20 * NS_PER_US
# Without a gap the look-ahead shrinks by this part of itself; a gap adds its own length. With gaps of a
# fifth of it, they come at one batch in some fifty.
_SHRINK_DIVISOR = 256


def adapted_lookahead_ns(
    lookahead_ns: int,
    *,
    last_end_ns: int,
    waiting_since_ns: int,
    staged_ns: int,
    begin_ns: int,
    longest_ns: int,
) -> int:
    """Look-ahead of an exec lane after an Infer: as short as leaves no gaps while work is waiting.

    The look-ahead so comes to cover the way to the worker, the INPUT copy, the timer's coarseness and the
    errors of prediction, without any of them being known.

    Args:
        lookahead_ns: before the Infer.
        last_end_ns: end of the EXEC before.
        waiting_since_ns: from then on only the look-ahead can have kept the Infer from being sent.
        staged_ns: when its inputs were in place. The time from then, or from the end of the EXEC before,
            to the begin is the device's own: no look-ahead shortens it.
        begin_ns: of the Infer's EXEC.
        longest_ns: the look-ahead's upper bound.
    """
    if waiting_since_ns >= last_end_ns - lookahead_ns:
        return lookahead_ns  # it came too late to keep the lane busy
    gap_ns = min(begin_ns, staged_ns) - last_end_ns
    if gap_ns > _GAP_NS:
        return max(lookahead_ns, min(lookahead_ns + gap_ns, longest_ns))
    return max(lookahead_ns - lookahead_ns // _SHRINK_DIVISOR, SHORTEST_LOOKAHEAD_NS)


def adapt_lookahead(
    worker: WorkerState,
    sent: SentAction,
    event: ActionSucceeded,
    *,
    longest_ns: int,
    now_ns: int,
) -> None:
    """Set both lanes' look-ahead after an Infer of the worker, whose `exec_end_ns` is the end of the EXEC before.

    While results lie unread, it becomes short, so that batches grow. Full ones cannot: they would only be fewer.
    """
    if event.unread_ns > NO_MATTER_NS and not _is_full(sent):
        shorter_ns = worker.exec_lookahead_ns * 7 // 8
        worker.exec_lookahead_ns = worker.load_lookahead_ns = max(shorter_ns, SHORTEST_LOOKAHEAD_NS)
        return
    staged_ns, link_ns = event.staged_ns, worker.link.excess_ns
    if staged_ns is None:
        staged_ns = event.begin_ns
    else:
        round_trip_ns = staged_ns - sent.action.earliest_ns + now_ns - event.end_ns
        round_trip_ns = max(0, round_trip_ns - link_ns)  # what the link's length takes comes on top
        error_ns = abs(sent.expected_end_ns - sent.back_ns - event.end_ns)
        longest_ns = min(longest_ns, 2 * (round_trip_ns + error_ns))
    worker.exec_lookahead_ns = worker.load_lookahead_ns = adapted_lookahead_ns(
        worker.exec_lookahead_ns,
        last_end_ns=worker.exec_end_ns,
        waiting_since_ns=max(sent.requests[0].arrival_ns, sent.copy.ready_ns) + link_ns,
        staged_ns=staged_ns,
        begin_ns=event.begin_ns,
        longest_ns=longest_ns,
    )


def _is_full(sent: SentAction) -> bool:
    """Whether no larger batch can run."""
    assert isinstance(sent.action, Infer)
    return sent.action.batch_size == sent.copy.estimates.sizes[-1]
