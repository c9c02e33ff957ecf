"""How many workers a load needs: samples go in, a number comes out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from clockwright.units import NS_PER_S
from controller.core.capacity import (
    START_NS,
    START_NS_MAX,
    CapacityConfig,
    KindSample,
    StartTimes,
    WorkersNeeded,
)

S = NS_PER_S
#: Nothing is learned of what a worker can do.
FIXED = CapacityConfig(fullness=0.8, least_fullness=0.8, most_fullness=0.8)
#: Two start-up times of a minute.
PATIENCE = 120
#: After so long, nothing is known of what was before.
LATER = 4 * PATIENCE


def second(workers: int, work: float = 0.0, **fields: Any) -> KindSample:  # noqa: ANN401
    """A second in which so many seconds of work were done, 100 requests for each."""
    num_run = round(100 * work)
    return KindSample(over_ns=S, num_workers=workers, work_ns=work * S, num_run=num_run, **fields)


def run(
    load: Callable[[int], KindSample],
    seconds: int,
    config: CapacityConfig = FIXED,
    start_s: int = 60,
) -> list[int]:
    """The number after each second."""
    capacity = WorkersNeeded(config)
    told = []
    for at in range(seconds):
        capacity.take(load(at), now_ns=(at + 1) * S, start_ns=start_s * S)
        told.append(capacity.wanted)
    return told


def noisy(seed: int, mean: float, seconds: int) -> list[float]:
    """Work of each second: requests at random times, 100 a second for each worker's worth."""
    draw = random.Random(seed)
    return [max(0.0, draw.gauss(mean, math.sqrt(mean / 100))) for _ in range(seconds)]


@pytest.mark.parametrize(
    ("sample", "workers", "limit"),
    [
        (second(4), 1, ""),
        (second(4, 2.0), 3, "exec"),
        # As much again was refused.
        (second(4, 4.0, num_for_exec=400), 10, "exec"),
        (second(4, 4.0, num_for_exec=100), 7, "exec"),
        # Nothing could run at all.
        (second(4, num_for_exec=10), 5, "exec"),
        (second(4, num_for_loads=10), 5, "loads"),
        # The PCIe lanes are busier than the others.
        (second(4, 1.0, load_ns=4 * S), 5, "loads"),
        # Unless that is because some have just come.
        (second(4, 1.0, load_ns=4 * S, num_young=1), 2, "exec"),
        # Each serves 50 a second; those of two more were refused for want of their pages.
        (second(4, 2.0, num_for_pages=100), 6, "pages"),
        (second(4, 2.0, num_for_links=1), 5, "links"),
        (second(0), 0, ""),
        (second(0, num_without_worker=3), 1, ""),
    ],
)
def test_the_number_is_what_runs_and_what_was_refused(
    sample: KindSample, workers: int, limit: str
) -> None:
    capacity = WorkersNeeded(FIXED)
    for at in range(1, LATER + 62):
        capacity.take(sample if at > LATER else second(0), now_ns=at * S, start_ns=60 * S)
    assert (capacity.wanted, capacity.limit) == (workers, limit)


@pytest.mark.parametrize("seed", range(8))
def test_more_load_never_needs_fewer(seed: int) -> None:
    draw = random.Random(seed)
    level, works = 1.0, []
    for _ in range(900):
        level = min(max(level + draw.gauss(0, 0.05), 0.0), 8.0)
        works.append((level, draw.random() < 0.1))
    factor = draw.uniform(1.0, 3.0)
    numbers = []
    for times in (1.0, factor):
        numbers.append(
            run(
                lambda at: second(
                    4,
                    works[at][0] * times,  # noqa: B023
                    num_for_exec=round(20 * times * works[at][0]) * works[at][1],  # noqa: B023
                ),
                900,
            )
        )
    assert all(more >= less for less, more in zip(*numbers, strict=True))
    assert numbers[1][-1] <= math.ceil(factor * numbers[0][-1]) + 1


@pytest.mark.parametrize("mean", [0.3, 1.0, 3.3, 12.0])
@pytest.mark.parametrize("seed", range(2))
def test_at_a_constant_load_the_number_is_constant(seed: int, mean: float) -> None:
    works = noisy(seed, mean, 2400)
    workers = math.ceil(mean / 0.8)
    told = run(lambda at: second(workers, works[at]), 2400, CapacityConfig())[LATER:]
    changes = sum(a != b for a, b in pairwise(told))
    # It may fall once after a burst, and rise for the next.
    assert changes <= 4
    assert max(told) - min(told) <= 1
    assert max(told) <= workers + 2


def test_the_number_rises_at_once_and_falls_when_less_was_enough_for_long() -> None:
    told = run(lambda at: second(8, 6.0 if at < 1000 else 0.5), 2000)
    assert told[999] == 8
    fell = next(at for at, number in enumerate(told) if at > 1000 and number < 8)
    assert PATIENCE <= fell - 1000 <= PATIENCE + 20
    assert told[-1] == 1
    told = run(
        lambda at: second(2, 1.0 if at < 1000 else 1.5, num_for_exec=300 * (at >= 1000)), 1010
    )
    assert told[999] == 2
    # With so much more in all ten seconds that count, three times as many.
    assert told[1001] > 2
    assert told[-1] == 6


def test_after_an_overload_a_request_refused_now_and_then_keeps_no_worker() -> None:
    """Three workers do a sixth of what they could, and a pause of their machine costs a request in two thousand."""

    def load(at: int) -> KindSample:
        if at < LATER:
            return second(1, 1.0, num_for_exec=100)
        return second(3, 0.5, num_for_exec=at % 40 == 0)

    told = run(load, LATER + 600, CapacityConfig())
    assert told[LATER - 1] == 3
    assert set(told[LATER + PATIENCE + 60 :]) == {1}


def test_what_was_short_while_a_load_rose_keeps_no_worker_after_it() -> None:
    """In its first seconds it looks as small as it is afterwards; half of an overload that one worker would carry."""

    def load(at: int) -> KindSample:
        if LATER <= at < LATER + 40:
            # At first, what has time to wait does.
            return second(1, 1.0, num_for_exec=3 if at < LATER + 20 else 100)
        if LATER + 40 <= at < LATER + 80:
            return second(3, 2.0, num_young=2 if at < LATER + 70 else 0)
        return second(1 if at < LATER else 3, 0.5)

    told = run(load, LATER + 480)
    assert told[LATER + 79] == 3
    assert set(told[LATER + 80 + PATIENCE + 60 :]) == {1}


def test_a_longer_start_holds_the_number_for_longer() -> None:
    def fell(start_s: int) -> int:
        told = run(lambda at: second(4, 3.0 if at < 1600 else 0.5), 3300, start_s=start_s)
        return next(at for at, number in enumerate(told) if at > 1600 and number < 4)

    assert fell(60) < fell(120) < fell(300)


def test_what_there_is_at_the_beginning_stays_until_it_is_known_that_less_is_enough() -> None:
    told = run(lambda at: second(6, 0.5), 2 * PATIENCE)
    assert told[: PATIENCE - 1] == [6] * (PATIENCE - 1)
    assert told[-1] == 1


def test_workers_of_an_earlier_controller_may_come_one_by_one() -> None:
    capacity = WorkersNeeded(FIXED)
    capacity.recall(7, 0.8)
    for at in range(1, PATIENCE):
        capacity.take(second(min(at // 10, 7), 0.5), now_ns=at * S, start_ns=60 * S)
        assert capacity.wanted == 7


def test_workers_are_asked_for_before_a_rising_load_needs_them() -> None:
    start_s = 60
    works = noisy(1, 1.0, 4000)

    def work(at: int) -> float:
        return works[at] + max(0, at - LATER) / 200

    told = run(lambda at: second(40, work(at)), 3600, start_s=start_s)
    late = [
        at
        for at in range(LATER + 3 * start_s, 3500)
        # By when it would be ready, there are as many as the load needs then.
        if told[at] < (1.0 + (at + start_s - 5 - LATER) / 200) / 0.8
    ]
    assert len(late) < 0.05 * len(told)
    # Not by far too many.
    needed = (1.0 + (3500 + start_s - LATER) / 200) / 0.8
    assert told[3500] <= needed + 3


def test_what_comes_at_the_same_time_of_each_hour_is_expected_then() -> None:
    """An hour of ten minutes here: at its half, four times the load for ten seconds."""
    config = CapacityConfig(
        fullness=0.8, least_fullness=0.8, most_fullness=0.8, period_ns=600 * S, least_patience_ns=S
    )
    works = noisy(5, 1.0, 6000)

    def work(at: int) -> float:
        return works[at] * (4 if at % 600 // 10 == 30 else 1)

    told = run(lambda at: second(6, work(at)), 6000, config, start_s=10)
    needed = 4 / 0.8
    for hour in (7, 8, 9):
        begin = 600 * hour + 300
        # By the time that it comes, what was asked for a start-up before is ready.
        assert told[begin - 11] >= needed - 1
        assert told[begin - 11] <= needed + 1
        # Long before it, and after it, there is no need.
        assert told[begin - 60] == told[begin + 120] == 2
    # The first time nobody could know.
    assert told[289] == 2


def test_what_was_learned_of_the_hour_is_recalled() -> None:
    capacity = WorkersNeeded(replace(FIXED, period_ns=600 * S, least_patience_ns=S))
    capacity.recall(0, 0.8, [*[1.0] * 30, 4.0, *[1.0] * 29])
    told = {}
    for at in range(1, 310):
        capacity.take(second(6, 1.0), now_ns=at * S, start_ns=10 * S)
        told[at] = capacity.wanted
    assert (told[240], told[290]) == (2, 5)


def test_noise_is_no_trend() -> None:
    works = noisy(3, 4.0, 3000)
    told = run(lambda at: second(5, works[at]), 3000)
    assert max(told[LATER:]) <= 6


def test_refusals_show_that_a_worker_does_less_than_it_should_and_it_is_learned() -> None:
    """Work in bursts: each worker does no more than 0.5 on average."""
    capacity, workers = WorkersNeeded(), 2
    for at in range(3000):
        asked = 2.0
        done = min(asked, 0.5 * workers)
        refused = round(100 * (asked - done))
        capacity.take(
            second(workers, done, num_for_exec=refused), now_ns=(at + 1) * S, start_ns=60 * S
        )
        if at % 60 == 59:
            workers = capacity.wanted
    # Four do it; what was learned fades slowly, so that it is tried whether fewer do.
    assert 4 <= capacity.wanted <= 6
    assert capacity.fullness < 0.65


def test_more_than_was_expected_of_a_worker_is_learned_too() -> None:
    capacity, told = WorkersNeeded(), []
    ten_seconds = KindSample(over_ns=10 * S, num_workers=4, work_ns=42 * S, num_run=4200)
    for at in range(1200):
        capacity.take(ten_seconds, now_ns=(at + 1) * 10 * S, start_ns=60 * S)
        told.append(capacity.wanted)
    # It asks for one more as long as it does not know.
    assert (max(told), told[-1]) == (5, 4)


def test_an_overload_by_far_teaches_nothing_of_what_a_worker_does() -> None:
    """Ten times the load for ten minutes, and no more workers come."""
    capacity = WorkersNeeded()
    for at in range(1200):
        refused = 7200 if at >= 600 else 0
        capacity.take(second(1, 0.8, num_for_exec=refused), now_ns=(at + 1) * S, start_ns=60 * S)
    assert capacity.wanted == 4
    assert capacity.fullness > 0.75


def test_a_shortage_of_pages_is_remembered_and_for_longer_each_time() -> None:
    """Three workers have too few pages, four have enough; EXEC time would let one do."""
    capacity, workers, history = WorkersNeeded(FIXED), 1, []
    for at in range(20_000):
        lacks = 20 if workers < 4 else 0
        capacity.take(
            second(workers, 0.5, num_for_pages=lacks), now_ns=(at + 1) * S, start_ns=60 * S
        )
        if at % 60 == 59:
            workers = capacity.wanted
        history.append(workers)
    falls = [at for at in range(1, 20_000) if history[at] < history[at - 1]]
    assert history[1000] in (4, 5)
    assert 1 <= len(falls) <= 8
    gaps = [b - a for a, b in pairwise(falls)]
    assert gaps == sorted(gaps)


def test_clients_that_ask_again_and_again_do_not_make_it_grow_without_bounds() -> None:
    told = run(lambda at: second(2, 1.6, num_for_exec=100_000), 400)
    assert max(told) == 8
    told = run(lambda at: second(3, 0.1, num_for_pages=100_000), 400)
    assert max(told) == 6


def test_a_refusal_now_and_then_asks_for_no_worker() -> None:
    # 0.02 % of the requests.
    told = run(lambda at: second(4, 3.0, num_for_exec=at % 30 == 20), 2000)
    assert set(told) == {4}
    # Where as many are 0.5 % of all, it does.
    told = run(lambda at: second(4, 0.1, num_for_exec=at % 20 == 0), 2000)
    assert told[-1] == 5


def test_a_worker_that_does_not_come_keeps_no_other_from_leaving() -> None:
    # Ten were wanted, four came; then the load goes.
    busy = run(lambda at: second(4, 4.0, num_for_exec=400 * (at < 100)), 2000)
    idle = run(lambda at: second(4, 4.0 * (at < 100), num_for_exec=400 * (at < 100)), 2000)
    assert max(busy[20:100]) == max(idle[20:100]) == 10
    assert busy[-1] == 5
    assert idle[-1] == 1


def test_a_start_is_from_when_the_worker_was_asked_for() -> None:
    starts = StartTimes()
    assert starts.start_ns == START_NS
    starts.missing(2, 10 * S)
    starts.missing(3, 20 * S)
    starts.ready(50 * S, is_back=False)
    starts.missing(2, 50 * S)
    starts.ready(70 * S, is_back=False)
    starts.ready(60 * S + 60 * S, is_back=False)
    assert list(starts.starts_ns) == [40 * S, 60 * S, 100 * S]
    # Nobody asked for this one.
    starts.ready(200 * S, is_back=False)
    assert starts.start_ns == 100 * S


def test_a_worker_that_was_lost_and_is_back_is_no_start() -> None:
    starts = StartTimes()
    starts.missing(1, 10 * S)
    starts.ready(11 * S, is_back=True)
    starts.missing(0, 11 * S)
    assert not starts.starts_ns
    starts.missing(1, 20 * S)
    starts.missing(0, 30 * S)  # it is not wanted any more
    starts.missing(1, 40 * S)
    starts.ready(100_000 * S, is_back=False)
    assert list(starts.starts_ns) == [START_NS_MAX]


def test_most_starts_are_no_longer_than_what_is_planned_with() -> None:
    starts = StartTimes()
    starts.recall([each * S for each in range(1, 101)])
    # The latest twenty.
    assert sum(each * S <= starts.start_ns for each in range(81, 101)) == 18
