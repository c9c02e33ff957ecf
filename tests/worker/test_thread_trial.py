"""A graph gets as many threads as gain more than they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from worker.compiling.thread_trial import Durations, choose_threads, judge


def _ms(**durations: tuple[float, float]) -> Durations:
    """By threads, a run of one row and one of four."""
    return {
        int(count.removeprefix("t")): {1: int(one * 1e6), 4: int(four * 1e6)}
        for count, (one, four) in durations.items()
    }


@pytest.mark.parametrize(
    ("durations", "chosen"),
    [
        (_ms(t1=(40, 160), t2=(20, 80)), 2),
        (_ms(t1=(40, 160), t2=(38, 152)), 1),
        (_ms(t1=(40, 160), t2=(20, 80), t4=(10, 40), t7=(9.5, 38)), 4),
        (_ms(t1=(0.02, 0.03), t2=(0.04, 0.025)), 1),
    ],
    ids=["twice as fast", "hardly a gain", "a gain up to four", "slower alone"],
)
def test_the_fewest_threads_win_that_are_nearly_the_fastest(
    durations: Durations, chosen: int
) -> None:
    assert judge(durations, durations) == chosen


def test_on_a_busy_machine_long_runs_get_all_threads_and_short_ones_one() -> None:
    def disturbed(durations: Durations) -> Durations:
        return {count: each if count == 1 else {} for count, each in durations.items()}

    long = _ms(t1=(40, 160), t2=(70, 300), t4=(90, 400))
    short = _ms(t1=(0.02, 0.03), t2=(9, 9), t4=(9, 9))
    assert judge(disturbed(long), long) == 4
    assert judge(disturbed(short), short) == 1


def test_all_numbers_of_threads_run_all_batches_equally_often() -> None:
    runs: Counter[tuple[int, int]] = Counter()

    def launch(count: int, size: int) -> Callable[[], None]:
        return lambda: runs.update([(count, size)])

    launches = {count: {size: launch(count, size) for size in (1, 4)} for count in (1, 2, 3)}
    assert choose_threads(launches) in launches
    assert len(runs) == 6
    assert len(set(runs.values())) == 1
