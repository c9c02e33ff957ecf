"""The offset between two clocks, from heartbeats over a way that only adds delay."""

import random

import pytest

from clockwright.wire.clock_sync import ClockSync

MS = 1_000_000


def exchange(
    *, skew_ns: int, num_beats: int, drift_ppm: float = 0.0, seed: int = 1, queue_ms: float = 2.0
) -> tuple[ClockSync, int]:
    """Heartbeats each way every 200 ms, delayed by 50 us and exponential queueing.

    Returns our estimate, and the true offset at the end.
    """
    rng = random.Random(seed)
    ours, theirs = ClockSync(), ClockSync()
    now_ns = 10**12

    def peer(time_ns: int) -> int:
        return round(time_ns * (1 + drift_ppm * 1e-6)) + skew_ns

    def delay_ns() -> int:
        return 50_000 + round(rng.expovariate(1 / (queue_ms * MS)))

    for _ in range(num_beats):
        now_ns += 200 * MS
        theirs.heard(
            sent_ns=now_ns,
            received_ns=peer(now_ns + delay_ns()),
            peer_min_delta_ns=ours.min_delta_ns,
        )
        ours.heard(
            sent_ns=peer(now_ns),
            received_ns=now_ns + delay_ns(),
            peer_min_delta_ns=theirs.min_delta_ns,
        )
    return ours, peer(now_ns) - now_ns


def test_the_offset_is_unknown_until_a_heartbeat_went_each_way() -> None:
    clock = ClockSync()
    assert clock.offset_ns is None
    assert clock.min_delta_ns is None
    clock.heard(sent_ns=1000, received_ns=1500, peer_min_delta_ns=None)
    assert clock.offset_ns is None
    assert clock.min_delta_ns == 500
    clock.heard(sent_ns=2000, received_ns=2400, peer_min_delta_ns=800)
    assert clock.offset_ns == 200
    assert clock.round_trip_ns == 1200


def test_equal_delays_give_the_exact_offset_of_either_sign() -> None:
    for skew_ns in (-(10**15), -7, 0, 7, 10**15):
        clock = ClockSync()
        clock.heard(sent_ns=5000 + skew_ns, received_ns=5000 + 300, peer_min_delta_ns=300 + skew_ns)
        assert clock.offset_ns == skew_ns
        assert clock.round_trip_ns == 600


@pytest.mark.seeds(20)
def test_queueing_is_filtered_out(seed: int) -> None:
    clock, truth_ns = exchange(skew_ns=-3 * 10**15, num_beats=64, seed=seed)
    assert clock.offset_ns is not None
    # Queueing is 2 ms on average; the least of 32 samples is 60 us.
    assert abs(clock.offset_ns - truth_ns) < 0.4 * MS
    assert clock.round_trip_ns >= 100_000


def test_a_drifting_clock_is_followed() -> None:
    for drift_ppm in (-50.0, 50.0):
        clock, truth_ns = exchange(
            skew_ns=10**9, num_beats=3000, drift_ppm=drift_ppm, queue_ms=0.02
        )
        assert clock.offset_ns is not None
        assert abs(clock.offset_ns - truth_ns) < 0.2 * MS


def test_a_minute_of_queueing_in_one_direction_does_not_move_the_offset() -> None:
    clock = ClockSync()
    skew_ns = 10**9
    for beat in range(400):
        now_ns = beat * 200 * MS
        # After a while the peer's window holds only samples with queueing, and ours has good ones.
        forward_ns = 30 * MS if beat > 100 else MS // 10
        clock.heard(
            sent_ns=now_ns + skew_ns,
            received_ns=now_ns + MS // 10,
            peer_min_delta_ns=skew_ns + forward_ns,
        )
        assert clock.offset_ns == skew_ns


def test_a_clock_that_jumped_is_believed_in_the_end() -> None:
    for jump_ns in (-(10**10), 10**10):
        clock = ClockSync()
        for beat in range(400):
            now_ns = beat * 200 * MS
            skew_ns = jump_ns if beat > 100 else 0
            # Both windows hold older samples for a while.
            forward_ns = min(0, jump_ns) if 100 < beat <= 132 else skew_ns
            clock.heard(
                sent_ns=now_ns + skew_ns,
                received_ns=now_ns + MS // 10,
                peer_min_delta_ns=forward_ns + MS // 10,
            )
        assert clock.offset_ns == jump_ns
