"""How far ahead of a lane to decide, and how much time to keep for an answer's way: measured, not set."""

from __future__ import annotations

from clockwright.units import NS_PER_MS, NS_PER_US

#: A look-ahead is never shorter: a lane would run dry before its look-ahead can grow.
SHORTEST_LOOKAHEAD_NS = NS_PER_MS // 4

# An idle gap shorter than this is no reason to decide earlier.
_GAP_NS = 20 * NS_PER_US
# Without a gap the look-ahead shrinks by this part of itself; a gap adds its own length. With gaps of a
# fifth of it, they come at one batch in some fifty.
_SHRINK_DIVISOR = 256

# The peak of the delays fades by this part per action: a pause of the host is forgotten after a few
# thousand.
_FADE = 1 / 2048
# Beyond the largest delay seen, because the next may be larger.
_MARGIN_FACTOR = 1.25


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

    It so comes to cover the way to the worker, the INPUT copy, the timer's coarseness and the errors of
    prediction, without any of them being known.

    Args:
        lookahead_ns: as it was.
        last_end_ns: end of the EXEC before.
        waiting_since_ns: from then on only the look-ahead can have kept the Infer from being sent.
        staged_ns: when its inputs were in place. What passes between that, or the EXEC before, and the
            begin is the device's own, and no look-ahead shortens it.
        begin_ns: of its EXEC.
        longest_ns: never longer than this.
    """
    if waiting_since_ns >= last_end_ns - lookahead_ns:
        return lookahead_ns  # it came too late to keep the lane busy
    gap_ns = min(begin_ns, staged_ns) - last_end_ns
    if gap_ns > _GAP_NS:
        return max(lookahead_ns, min(lookahead_ns + gap_ns, longest_ns))
    return max(lookahead_ns - lookahead_ns // _SHRINK_DIVISOR, SHORTEST_LOOKAHEAD_NS)


class Margin:
    """Largest recent delay of a result beyond the predicted end of its EXEC, and some to spare."""

    __slots__ = ("_largest_ns", "_peak_ns", "ns")

    def __init__(self, largest_ns: int) -> None:
        self._largest_ns = largest_ns
        self._peak_ns = largest_ns / _MARGIN_FACTOR
        #: Never more than it begins with.
        self.ns = largest_ns

    def measured(self, delay_ns: int) -> None:
        """A result came so long after the predicted end."""
        self._peak_ns = max(delay_ns, self._peak_ns * (1 - _FADE))
        self.ns = min(int(self._peak_ns * _MARGIN_FACTOR), self._largest_ns)
