"""Lane and estimator by themselves."""

from __future__ import annotations

import pytest

from clockwright.units import NS_PER_MS, ActionId
from controller.core.estimator import FORGET_INTERVAL_NS, WINDOW_SIZE, DurationWindow, Estimates
from controller.core.timeline import Timeline

ONE, TWO, THREE = ActionId(1), ActionId(2), ActionId(3)


def test_an_idle_lane_is_free_now() -> None:
    assert Timeline().available_ns(7) == 7


def test_actions_run_back_to_back() -> None:
    lane = Timeline()
    lane.push(ONE, begin_ns=10, duration_ns=5, now_ns=10)
    lane.push(TWO, begin_ns=15, duration_ns=7, now_ns=10)
    assert lane.available_ns(10) == 22


def test_a_reported_end_re_anchors_what_follows() -> None:
    lane = Timeline()
    lane.push(ONE, begin_ns=10, duration_ns=5, now_ns=10)
    lane.push(TWO, begin_ns=15, duration_ns=7, now_ns=10)
    lane.complete(ONE, end_ns=18)
    assert lane.available_ns(18) == 25


def test_an_overdue_action_is_assumed_to_end_right_now() -> None:
    lane = Timeline()
    lane.push(ONE, begin_ns=10, duration_ns=5, now_ns=10)
    lane.push(TWO, begin_ns=15, duration_ns=7, now_ns=10)
    assert lane.available_ns(40) == 47
    assert lane.late(40)
    assert not lane.late(14)


def test_a_gap_before_an_action_is_kept() -> None:
    lane = Timeline()
    lane.push(ONE, begin_ns=10, duration_ns=5, now_ns=10)
    lane.push(TWO, begin_ns=30, duration_ns=5, now_ns=10)  # waits for a load until 30
    assert lane.available_ns(10) == 35


def test_an_action_before_the_lane_is_free_is_our_bug() -> None:
    lane = Timeline()
    lane.push(ONE, begin_ns=10, duration_ns=5, now_ns=10)
    with pytest.raises(AssertionError, match="1 ns before the lane is free"):
        lane.push(TWO, begin_ns=14, duration_ns=5, now_ns=10)


def test_completion_out_of_order_takes_out_its_share() -> None:
    lane = Timeline()
    for place, action in enumerate((ONE, TWO, THREE)):
        lane.push(action, begin_ns=10 + 5 * place, duration_ns=5, now_ns=10)
    lane.complete(TWO, end_ns=12)
    assert lane.available_ns(12) == 20


def test_the_estimate_is_an_upper_percentile_of_the_last_ten() -> None:
    window = DurationWindow(1000)
    for duration_ns in range(100, 100 + 10 * WINDOW_SIZE, 10):
        window.add(duration_ns)
    # The last ten are 100 to 190, then ... : the largest two are 10 apart, 0.91 of the way up.
    largest = 100 + 10 * WINDOW_SIZE - 10
    assert window.estimate_ns == largest - 10 + 9
    assert window.floor_ns == largest - 90


def test_an_outlier_is_forgotten_at_most_once_per_interval() -> None:
    window = DurationWindow(10)
    window.add(500)
    window.add(400)
    window.forget_largest(FORGET_INTERVAL_NS)
    window.forget_largest(FORGET_INTERVAL_NS + 1)
    assert window.estimate_ns > 300  # 500 is gone, 400 not yet
    window.forget_largest(2 * FORGET_INTERVAL_NS)
    assert window.estimate_ns == 10


def test_measurements_count_before_they_are_confirmed_and_as_outliers_too() -> None:
    window = DurationWindow(10)
    for worker in (1, 2, 1, 2):
        window.add_unconfirmed(worker, 100 * worker)
    assert (window.estimate_ns, window.floor_ns) == (200, 10)
    window.forget_largest(FORGET_INTERVAL_NS)
    window.settle(2, confirmed=False)
    assert 90 < window.estimate_ns <= 100
    window.settle(1, confirmed=True)
    window.settle(1, confirmed=False)
    assert 90 < window.estimate_ns <= 100
    window.forget_largest(2 * FORGET_INTERVAL_NS)
    window.forget_largest(3 * FORGET_INTERVAL_NS)
    assert window.estimate_ns == 10


def test_something_is_known_also_when_all_is_forgotten_and_taken_back() -> None:
    window = DurationWindow(500)
    window.add_unconfirmed(1, 20)
    window.add_unconfirmed(1, 10)
    window.forget_largest(FORGET_INTERVAL_NS)
    assert 19 <= window.estimate_ns <= 20
    window.settle(1, confirmed=False)
    assert (window.estimate_ns, window.floor_ns) == (20, 20)


def test_however_many_are_unconfirmed_what_was_known_before_comes_back() -> None:
    window = DurationWindow(10)
    for _ in range(3 * WINDOW_SIZE):
        window.add_unconfirmed(1, 50)
    assert (window.estimate_ns, window.floor_ns) == (50, 50)
    window.settle(1, confirmed=False)
    assert window.estimate_ns == 10


def test_sizes_that_fit_and_sizes_that_cover() -> None:
    estimates = Estimates(load_ns=1, exec_ns={8: 80, 2: 30, 4: 44})
    assert estimates.sizes == (2, 4, 8)
    assert estimates.fit == [-1, -1, 0, 0, 1, 1, 1, 1, 2]
    assert estimates.cover == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert estimates.ns_per_row == 10
    estimates.measured_exec(8, 160 * NS_PER_MS)
    assert estimates.ns_per_row == 11
