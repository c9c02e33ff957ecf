"""Lane and estimator by themselves."""

from __future__ import annotations

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S, ActionId
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


def test_what_is_skipped_takes_no_time_and_is_still_to_be_completed() -> None:
    lane = Timeline()
    lane.push(ONE, begin_ns=10, duration_ns=5, now_ns=10)
    lane.push(TWO, begin_ns=20, duration_ns=5, now_ns=10)  # behind a gap
    lane.push(THREE, begin_ns=25, duration_ns=7, now_ns=10)
    assert lane.skip(TWO)
    assert not lane.skip(TWO)
    assert lane.available_ns(10) == 22
    lane.complete(ONE, end_ns=15)
    lane.complete(TWO, end_ns=15)
    assert lane.available_ns(15) == 22
    assert lane.skip(THREE)  # the first, which was to run from 15 to 22
    assert lane.available_ns(15) == 15
    lane.push(ONE, begin_ns=15, duration_ns=5, now_ns=15)
    lane.complete(THREE, end_ns=16)
    assert lane.available_ns(16) == 21


def test_the_estimate_is_an_upper_percentile_of_the_last_ten() -> None:
    window = DurationWindow(1000)
    for duration_ns in range(100, 100 + 10 * WINDOW_SIZE, 10):
        window.add(duration_ns)
    # The last ten are 100 to 190, then ... : the largest two are 10 apart, 0.91 of the way up.
    largest = 100 + 10 * WINDOW_SIZE - 10
    assert window.estimate_ns == largest - 10 + 9
    assert window.floor_ns == largest - 90


def test_a_sample_that_stands_in_the_way_is_forgotten_at_most_once_per_interval() -> None:
    window = DurationWindow(10)
    window.add(500)
    window.add(400)
    window.doubt(20, FORGET_INTERVAL_NS, tries=False)
    window.doubt(20, FORGET_INTERVAL_NS + 1, tries=False)
    assert window.estimate_ns > 300  # 500 is gone, 400 not yet
    window.doubt(20, 2 * FORGET_INTERVAL_NS, tries=False)
    assert window.estimate_ns == 10


@pytest.mark.parametrize(("num_slow", "believed"), [(1, False), (3, False), (4, True)])
def test_samples_far_above_the_others_are_left_out_while_they_are_few(
    num_slow: int, believed: bool
) -> None:
    window = DurationWindow(100)
    for number in range(WINDOW_SIZE):
        window.add(1000 if number % 2 and number < 2 * num_slow else 100)
    assert (window.estimate_ns > 900) == believed
    assert (window.estimate_ns == 100) != believed


def test_two_slow_ones_in_a_row_are_believed_at_once() -> None:
    window = DurationWindow(100)
    for _ in range(WINDOW_SIZE):
        window.add(100)
    window.add(1000)
    assert window.estimate_ns == 100
    window.add(1000)
    assert window.estimate_ns == 1000
    window.add(100)
    assert window.estimate_ns == 100


def test_measurements_count_before_they_are_confirmed_and_as_outliers_too() -> None:
    window = DurationWindow(100)
    for worker in (1, 2, 1, 2):
        window.add_unconfirmed(worker, 100 + 10 * worker)
    assert (window.estimate_ns, window.floor_ns) == (120, 100)
    window.doubt(110, FORGET_INTERVAL_NS, tries=False)
    window.settle(2, confirmed=False)
    assert 100 < window.estimate_ns <= 110
    window.settle(1, confirmed=True)
    window.settle(1, confirmed=False)
    assert 100 < window.estimate_ns <= 110
    window.doubt(100, 2 * FORGET_INTERVAL_NS, tries=False)
    assert window.estimate_ns == 100


def test_something_is_known_also_when_all_is_forgotten_and_taken_back() -> None:
    window = DurationWindow(30)
    window.add_unconfirmed(1, 20)
    window.forget_above(20)
    assert window.estimate_ns == 20
    window.settle(1, confirmed=False)
    assert (window.estimate_ns, window.floor_ns) == (20, 20)


# --- what is not measured any more ------------------------------------------------------------------


def exec_of(**factors: float) -> dict[int, int]:
    """Like ResNet50's: less time per row the larger the batch."""
    usual_ms = {1: 2.8, 2: 4.0, 4: 5.9, 8: 9.4, 16: 16.8}
    return {
        size: round(ms * factors.get(f"size{size}", 1.0) * NS_PER_MS)
        for size, ms in usual_ms.items()
    }


def run_for_a_while(estimates: Estimates, *sizes: int, batches: int = 100) -> None:
    for number in range(batches):
        size = sizes[number % len(sizes)]
        estimates.measured_exec(size, exec_of()[size])


def test_a_size_that_is_not_run_any_more_forgets_what_took_it_away() -> None:
    estimates = Estimates(load_ns=1, exec_ns=exec_of())
    estimates.measured_exec(16, 10 * exec_of()[16])
    assert estimates.exec_ns[4] > 9 * exec_of()[16]
    run_for_a_while(estimates, 4, 8)
    assert estimates.exec_ns[4] == exec_of()[16]


def test_a_size_whose_every_sample_is_incredible_is_tried_and_one_good_run_is_enough() -> None:
    estimates = Estimates(load_ns=1, exec_ns=exec_of(size16=5))
    for _ in range(WINDOW_SIZE):  # the GPU was slow for a while, and runs only small batches since
        estimates.measured_exec(16, 5 * exec_of()[16])
    run_for_a_while(estimates, 4, 8)
    assert estimates.exec_ns[4] <= 2 * exec_of()[8]
    estimates.measured_exec(16, exec_of()[16])
    assert estimates.exec_ns[4] == exec_of()[16]


def test_a_size_that_is_slow_indeed_is_tried_ever_more_seldom() -> None:
    slow_ns = 5 * exec_of()[16]
    estimates = Estimates(load_ns=1, exec_ns=exec_of(size16=5))
    num_trials = 0
    for _ in range(5000):
        run_for_a_while(estimates, 4, 8, batches=1)
        if estimates.exec_ns[4] < slow_ns:
            num_trials += 1
            estimates.measured_exec(16, slow_ns)
    assert 2 <= num_trials <= 6


def test_a_size_that_is_seldom_filled_keeps_what_was_measured_of_it() -> None:
    estimates = Estimates(load_ns=1, exec_ns=exec_of())
    for percent in range(80, 130, 5):
        estimates.measured_exec(16, percent * exec_of()[16] // 100)
    before_ns = estimates.exec_ns[4]
    run_for_a_while(estimates, 1, 2, 4, 8, batches=1000)
    assert estimates.exec_ns[4] == before_ns


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0])
def test_a_profile_that_nobody_confirmed_errs_as_its_measured_neighbours_do(factor: float) -> None:
    factors = {f"size{size}": factor for size in exec_of()}
    estimates = Estimates(load_ns=1, exec_ns=exec_of(**factors))
    run_for_a_while(estimates, 1, batches=3 * WINDOW_SIZE)
    assert estimates.exec_ns == pytest.approx(list(exec_of().values()), rel=0.01)


def test_a_profile_that_is_wrong_for_some_sizes_is_held_against_the_others() -> None:
    estimates = Estimates(load_ns=1, exec_ns=exec_of(size2=8, size8=6, size16=6))
    run_for_a_while(estimates, 1, 4, batches=40)
    assert estimates.exec_ns[1] <= exec_of()[4]
    assert estimates.exec_ns[3] <= 2 * exec_of()[4]
    assert estimates.exec_ns[4] <= 4 * exec_of()[4]


def test_what_rules_every_request_out_is_tried_though_nobody_ever_measured_less() -> None:
    window = DurationWindow(30)
    window.doubt(10, 0, tries=True)
    assert window.estimate_ns == 30
    window.doubt(10, FORGET_INTERVAL_NS, tries=True)
    assert window.estimate_ns <= 10
    assert not window.measured  # so that nobody is called slow who takes longer
    window.add(6)
    assert (window.estimate_ns, window.measured) == (6, True)


def test_a_profile_that_nobody_confirmed_is_not_tried_for_one_request_but_soon() -> None:
    """It ruled out all requests of a network for as long as a measurement does."""
    window = DurationWindow(100)
    window.doubt(20, NS_PER_S, tries=True)
    assert window.estimate_ns == 100
    window.doubt(20, NS_PER_S + FORGET_INTERVAL_NS // 4, tries=True)
    assert window.estimate_ns <= 20


def test_trials_that_show_how_slow_it_is_become_rare() -> None:
    window = DurationWindow(30)
    num_trials = 0
    for ms in range(60_000):
        if window.estimate_ns > 10:
            window.doubt(10, ms * NS_PER_MS, tries=True)
        else:
            num_trials += 1
            window.add(30)
    assert 3 <= num_trials <= 8


def test_nothing_is_tried_for_a_request_that_asks_for_the_absurd() -> None:
    window = DurationWindow(1000)
    for ms in range(10_000):
        window.doubt(10, ms * NS_PER_MS, tries=True)
    assert window.estimate_ns == 1000


@pytest.mark.parametrize("bad_clock", [False, True])
def test_a_good_run_after_a_long_pause_counts_for_more_than_what_was_before(
    bad_clock: bool,
) -> None:
    window = DurationWindow(10)
    for _ in range(WINDOW_SIZE):
        window.add(100)
    for now_ns in (0, NS_PER_S, 3 * NS_PER_S):
        window.doubt(20, now_ns, tries=True)
    assert window.estimate_ns <= 20
    if bad_clock:
        window.add_unconfirmed(1, 10)
    else:
        window.add(10)
    assert window.estimate_ns == 10


# --- density --------------------------------------------------------------------------------------------


def test_the_densest_size_is_the_largest_where_batches_pay_and_the_smallest_where_they_cost() -> (
    None
):
    pays = Estimates(load_ns=1, exec_ns=exec_of())
    assert pays.densest == pays.fit
    costs = Estimates(load_ns=1, exec_ns={1: 20, 2: 44, 4: 97})
    for size, duration_ns in ((1, 20), (2, 44), (4, 97)):
        costs.measured_exec(size, duration_ns)
    for _ in range(50):
        costs.measured_exec(1, 20)
    assert costs.densest == [-1, 0, 0, 0, 0]


def test_a_size_that_was_never_run_counts_as_dense_until_it_is() -> None:
    estimates = Estimates(load_ns=1, exec_ns={1: 20, 2: 44})
    for _ in range(50):
        estimates.measured_exec(1, 20)
    assert estimates.densest == [-1, 0, 1]
    estimates.measured_exec(2, 44)
    for _ in range(50):
        estimates.measured_exec(1, 20)
    assert estimates.densest == [-1, 0, 0]


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
    for size, duration_ns in ((2, 30), (4, 44), (8, 160)):
        estimates.measured_exec(size, duration_ns)
    assert estimates.ns_per_row == 11
