"""The generator against the published figures of the trace, not against itself.

Tolerances of CDFs are the error with which the JSON's were read off plots (0.02), and what sampling adds.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from clockwright.units import NS_PER_MS
from traces.arrivals import Floats
from traces.minutes import MinuteTrace
from traces.synthetic import (
    DAY_MINUTES,
    SCOPE_MINUTES,
    Population,
    calibration,
    draw_population,
    generate,
)

NUM_PUBLISHED = 72_359
FIRST_MINUTE = 479
FIGURES = calibration()


@cache
def population() -> Population:
    return draw_population(NUM_PUBLISHED, seed=0)


@cache
def working_day() -> MinuteTrace:
    """Eight hours, from 07:59, as the 500-function sample."""
    return generate(17_000, num_minutes=480, first_minute=FIRST_MINUTE, seed=1)


def of_trigger(name: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array([trigger == name for trigger in population().triggers])


@pytest.mark.parametrize(
    ("fraction", "share"),
    [
        (row["fraction_of_most_popular"], row["functions_released"])
        for row in FIGURES["popularity_share_of_invocations_by_top_fraction"]
    ],
)
def test_the_most_popular_functions_have_their_share(fraction: float, share: float) -> None:
    totals = np.sort(population().totals)[::-1]
    top = totals[: round(fraction * len(totals))].sum() / totals.sum()
    assert top == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(("fraction", "share"), [(0.01, 0.934), (0.1, 0.995)])
def test_a_small_population_is_as_skewed(fraction: float, share: float) -> None:
    tops = []
    for seed in range(10):
        totals = np.sort(draw_population(4026, seed=seed).totals)[::-1]
        tops.append(totals[: round(fraction * len(totals))].sum() / totals.sum())
    assert np.mean(tops) == pytest.approx(share, abs=0.02)


def test_the_ten_most_popular_functions_are_the_published_ones() -> None:
    found = np.sort(population().totals)[::-1][:10].tolist()
    assert found == FIGURES["top10_function_totals_14d"]


def test_all_invocations_are_as_many_as_published() -> None:
    published = FIGURES["scope_14d"]["total_invocations"]
    assert population().totals.sum() == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(
    ("per_day", "share"),
    [
        (row["avg_daily_invocations"], row["functions_released"])
        for row in FIGURES["cdf_average_daily_invocations"]
    ],
)
def test_rates_are_distributed_as_published(per_day: float, share: float) -> None:
    found = np.mean(population().totals / 14 <= per_day)
    assert found == pytest.approx(share, abs=0.02)


def test_functions_at_most_once_an_hour_and_once_a_minute() -> None:
    # 0.61 and 0.92 of the functions in the released trace.
    assert np.mean(population().totals <= SCOPE_MINUTES / 60) == pytest.approx(0.61, abs=0.03)
    assert np.mean(population().totals <= SCOPE_MINUTES) == pytest.approx(0.92, abs=0.03)


@pytest.mark.parametrize("row", FIGURES["trigger_mix_percent"]["rows"], ids=lambda row: row[0])
def test_triggers_are_mixed_as_published(row: list[float]) -> None:
    # The released column adds up to 105.7 %.
    every = sum(other[3] for other in FIGURES["trigger_mix_percent"]["rows"])
    assert np.mean(of_trigger(str(row[0]))) == pytest.approx(row[3] / every, abs=0.01)


def test_timers_make_few_of_the_invocations() -> None:
    totals = population().totals
    # Published: 1.8 %.
    assert 0.005 < totals[of_trigger("timer")].sum() / totals.sum() < 0.02


@pytest.mark.parametrize(
    ("trigger", "tolerance"),
    # Periods that people choose move a timer's total by half at most, an event's plot ends at 0.916.
    [("http", 0.02), ("queue", 0.03), ("orchestration", 0.03), ("timer", 0.06), ("event", 0.06)],
)
def test_totals_of_each_trigger_are_distributed_as_published(
    trigger: str, tolerance: float
) -> None:
    table = FIGURES["cdf_total_14d_by_trigger"]
    column = table["columns"].index(trigger)
    totals = population().totals[of_trigger(trigger)]
    for row in table["rows"]:
        # A total that follows from a chosen period may miss a whole number by a rounding.
        found = np.mean(totals <= row[0] * 1.001)
        assert found == pytest.approx(row[column], abs=tolerance), row[0]


def test_timers_have_the_periods_that_people_choose() -> None:
    known = FIGURES["timer_periods_500fn"]
    fired = sum(known.values()) - known["fewer than 3 firings in 8 h"]
    periods = population().periods[of_trigger("timer")]
    periods = periods[periods <= 480 / 3]
    every_minute = known["every 1 min"] + known["1 per min"]
    for minutes, count in [
        (1, every_minute),
        (5, known["every 5 min"]),
        (10, known["every 10 min"]),
    ]:
        assert np.mean(periods == minutes) == pytest.approx(count / fired, abs=0.04)
    for minutes, count in [(15, known["every 15 min"]), (60, known["every 60 min"])]:
        assert np.mean(periods == minutes) == pytest.approx(count / fired, abs=0.04)


def test_the_minutes_of_an_hour_are_as_busy_as_in_the_sample() -> None:
    active = np.count_nonzero(working_day().counts, axis=0)
    minute = (np.arange(480) + FIRST_MINUTE) % 60
    found = np.array([active[minute == m].mean() for m in range(60)])
    found /= found.mean()
    sample = np.array(FIGURES["active_functions_by_minute_of_hour_1350fn"])
    assert found[[0, 30]] == pytest.approx(sample[[0, 30]], abs=0.1)
    assert found == pytest.approx(sample, abs=0.15)
    # Half of the other sample's functions are timers: the same shape, higher peaks.
    other = np.array(FIGURES["active_functions_by_minute_of_hour_500fn"])
    assert np.asarray(np.corrcoef(found, other))[0, 1] > 0.95


@cache
def hours() -> Floats:
    day = generate(10_000, num_minutes=DAY_MINUTES, seed=2)
    return np.asarray(day.counts.reshape(len(day.counts), 24, 60).sum(axis=(0, 2)), np.float64)


def test_the_hours_of_a_day_are_as_busy_as_published() -> None:
    # Single giants with bursts of their own move the sum of an hour.
    found = hours() / hours().mean()
    assert found == pytest.approx(FIGURES["hour_of_day_multiplier"], abs=0.06)


@pytest.mark.parametrize(
    "known", FIGURES["per_minute_burstiness_500fn_8h"], ids=lambda known: str(known["rate_per_min"])
)
def test_minutes_are_as_bursty_as_in_the_sample(known: dict[str, list[float]]) -> None:
    counts = working_day().counts.astype(np.float64)
    rates = counts.mean(axis=1)
    low, high = known["rate_per_min"]
    members = (rates >= low) & (rates < high)
    fanos = np.var(counts[members], axis=1) / rates[members]
    found = np.percentile(fanos, [10, 50, 90])
    published = np.array(known["fano_p10_50_90"])
    # The sample has 7 to 185 functions in a class. Within a factor of two, or half of Poisson's 1.
    assert np.all(found <= 2 * published + 0.5)
    assert np.all(found >= published / 2 - 0.5)
    zero = np.median(np.mean(counts[members] == 0, axis=1))
    assert zero == pytest.approx(known["zero_minute_share_p50"], abs=0.1)


def test_a_generated_trace_carries_its_rate() -> None:
    expected = draw_population(17_000, seed=1).totals.sum() / SCOPE_MINUTES
    assert working_day().totals.sum() / 480 == pytest.approx(expected, rel=0.1)


def test_a_trace_is_repeated_exactly_by_its_seed() -> None:
    first, again, other = (generate(300, num_minutes=90, seed=seed) for seed in (3, 3, 4))
    assert first.functions == again.functions
    assert np.array_equal(first.counts, again.counts)
    assert not np.array_equal(first.counts, other.counts)


def test_a_generated_trace_drives_models() -> None:
    trace = generate(2000, num_minutes=5, seed=5)
    models = [f"m{number}" for number in range(100)]
    workload = trace.workload(models, slo_ns=100 * NS_PER_MS, timers="even", seed=1)
    workload = workload.scaled(1000 / workload.expected_requests())
    assert sum(1 for _ in workload) == pytest.approx(1000, abs=150)


def test_there_is_no_trace_of_nothing() -> None:
    with pytest.raises(ValueError, match="num_functions is 0"):
        generate(0, seed=0)
    with pytest.raises(ValueError, match="num_minutes is 0"):
        generate(1, num_minutes=0, seed=0)
