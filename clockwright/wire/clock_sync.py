"""Estimates what a worker's clock shows, from heartbeats alone.

Both ends stamp each heartbeat when they send it. When one arrives, its receiver notes the difference to its
own clock: the delay on the way, plus or minus the clocks' offset. Queueing only adds to the delay, so the
smallest difference of the recent past is the truest. From the smallest ones of both directions follow the
offset (half their difference) and the round trip (their sum). The error is half the difference of the two
ways' shortest delays, far below a millisecond in one machine room. Source: Clockwork (network.h), Mills,
"Network Time Protocol", RFC 5905 section 10.

Clocks drift, so old samples must go. At 50 parts per million, the most that a crystal drifts, the minimum
over a window is wrong by half of what builds up in it: 25 us per second of window.

Under load one direction may queue for longer than the window while the other does not: with big inputs on
their way to a busy worker, an estimate was wrong by half of 30 ms. So an estimate comes with a bound of its
error, half its round trip. It is kept, and the bound grows while it ages, until a new estimate cannot be
worse (as NTP's root distance, RFC 5905 section 11).
"""

from __future__ import annotations

from collections import deque

# 6.4 s of heartbeats every 200 ms: long enough to meet a quiet moment, short enough to keep the error
# from drift below 160 us.
WINDOW_SIZE = 32

# Two crystals apart from each other, at 50 parts per million each.
_DRIFT_PPM_MAX = 100


class MinimumFilter:
    """The smallest of the last samples."""

    __slots__ = ("_samples",)

    def __init__(self, window_size: int = WINDOW_SIZE) -> None:
        self._samples: deque[int] = deque(maxlen=window_size)

    def add(self, sample: int) -> None:
        """Take in a sample; the oldest one leaves when the window is full."""
        self._samples.append(sample)

    @property
    def value(self) -> int | None:
        """The smallest sample of the window; None before the first."""
        return min(self._samples, default=None)


class ClockSync:
    """Offset and round trip to one peer. All times are `int` ns of the clock that is named."""

    __slots__ = (
        "_backward",
        "_error_ns",
        "_estimated_ns",
        "_forward",
        "offset_ns",
        "round_trip_ns",
    )

    def __init__(self) -> None:
        self._backward = MinimumFilter()
        self._forward: int | None = None
        #: Bound of the error of `offset_ns` when it was estimated.
        self._error_ns = 0
        #: Time of that estimate, on our clock.
        self._estimated_ns = 0
        #: The peer's clock minus ours; None until a heartbeat went each way.
        self.offset_ns: int | None = None
        #: Sum of the shortest delays when the offset was taken; never negative unless a clock jumped.
        self.round_trip_ns = 0

    @property
    def min_delta_ns(self) -> int | None:
        """Smallest difference of our clock at receipt and the peer's stamp; the next heartbeat says it."""
        return self._backward.value

    def heard(self, *, sent_ns: int, received_ns: int, peer_min_delta_ns: int | None) -> None:
        """Take in a heartbeat: when it was sent on the peer's clock, and received on ours.

        `peer_min_delta_ns` is None while the peer has heard nothing.
        """
        self._backward.add(received_ns - sent_ns)
        if peer_min_delta_ns is not None:
            self._forward = peer_min_delta_ns
        backward, forward = self._backward.value, self._forward
        if backward is None or forward is None:
            return
        error_ns = max(0, forward + backward) // 2
        age_ns = received_ns - self._estimated_ns
        if self.offset_ns is None or error_ns <= self._error_ns + age_ns * _DRIFT_PPM_MAX // 10**6:
            self.offset_ns = (forward - backward) // 2
            self.round_trip_ns = forward + backward
            self._error_ns, self._estimated_ns = error_ns, received_ns
