"""Pressure: the part of the waiting work that counts when a lane's time is divided.

The waiting batches count in part, in full, or more than once, by the share of requests dropped of late: work
that will yet arrive competes for the same time.
"""

from __future__ import annotations

# Moore and Hodgson's rule sets in at the first share of requests dropped and is in full force at the second.
# Always on, it loses near saturation, where a burst that passes makes it drop what could have been served.
_FROM, _FULL = 0.02, 0.08


def pressure_of(dropped: float, gain: float) -> float:
    """How much the waiting work counts; 0: not at all, the most urgent is next.

    Under full force it counts (1 + gain * dropped) times, where a share of 0 to 1 was dropped of late.
    """
    if dropped <= _FROM:
        return 0.0
    ramp = min(1.0, (dropped - _FROM) / (_FULL - _FROM))
    return ramp * (1.0 + gain * dropped)
