"""A generator of traces like that of Azure Functions 2019, calibrated on its published figures.

It serves when the trace itself is not at hand. It starts from `azure2019_calibration.json` and from nothing
else:

1. Functions. A function's total over 14 days is drawn, and what triggers it. The most popular hundredth
   makes 93 % of all invocations, and the plots of totals by trigger cannot resolve it (they end at a
   million, with an error of 0.01). So the head is drawn from the shares of invocations by top fraction
   and the ten exact totals, evenly over its ranks, its triggers in proportion to invocations; the body
   from the plots, each rescaled to what the head leaves of its trigger.
2. Timers fire regularly, most of them with a period that people choose and from minute 0.
3. All others have a rate that follows the hour of the day, and the minute of the hour a little. Around
   it their minutes are as regular or as bursty as functions of their rate and trigger are: below a
   variance-to-mean ratio (Fano) of 1 a part of the invocations is even and the rest Poisson, above 1 a
   gamma-distributed factor that lasts some minutes multiplies the rate.

The bursts are of independent functions: what makes many functions busy at once, but for the hour, is
not modelled. Nor are days of the week, and functions that come and go.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.arrivals import Floats, Ints
from traces.minutes import TIMER, FunctionKey, MinuteTrace

DAY_MINUTES = 1440
#: The published trace covers 14 days.
SCOPE_MINUTES = 14 * DAY_MINUTES

# Share of functions that make up the head, as described above.
_HEAD_FRACTION = 0.01

# Minutes between firings of timers, in the 500-function sample (the JSON's timer_periods_500fn). A day is
# added to them: a fifth of all timers have a total of 14.
_PERIODS = np.array(
    [1 / 60, 1 / 30, 1 / 12, 1 / 6, 1 / 2, 1, 2, 3, 5, 10, 15, 20, 30, 60, 120, 1440]
)

# Share of timers that fire from minute 0, and the share of the swing over the minutes of an hour that other
# functions have. Both are matched to the activity by minute of the hour in the 1,350-function sample: its
# peak of 1.73 at minute 0 came out as 1.59 with 0.7, and as 1.76 with 0.9 and a swing of 0.8.
_ON_THE_HOUR = 0.9
_MINUTE_SWING = 0.5

# Functions with more invocations per minute than this have none of that swing, which alone would make them
# burstier than such functions are.
_SWING_RATE_MAX = 10.0

# Minutes that share a gamma factor. With 3, counts of bursty functions had a lag-1 autocorrelation of
# 0.45 where the 8-hour sample has 0.1 and the one-day sample 0.2 to 0.7.
_BURST_MINUTES = 2

# Standard normal quantile of 0.9: where the JSON's Fano percentiles stand.
_Z90 = 1.2816

# Number of functions whose minutes are made at once: 1,440 minutes of 1,000 take 11 MB per array.
_BLOCK = 1000

Calibration = Mapping[str, Any]


@cache
def calibration() -> Calibration:
    """Read the figures that everything here is calibrated on."""
    text = files("traces").joinpath("azure2019_calibration.json").read_text(encoding="utf-8")
    figures: Calibration = json.loads(text)
    return figures


@dataclass(frozen=True, slots=True, eq=False)
class Population:
    """Functions, before any minute of them is drawn."""

    #: Trigger of each function.
    triggers: tuple[str, ...]
    #: Mean invocations of each function in 14 days; at least 1.
    totals: Floats
    #: Minutes between firings of each function; 0 for all but timers.
    periods: Floats


def draw_population(num_functions: int, *, seed: int) -> Population:
    """Draw functions as they appear in 14 days; 72,359 have the published head exactly."""
    if num_functions < 1:
        raise ValueError(f"num_functions is {num_functions}, expected at least 1")
    generator = np.random.default_rng([seed, 0])
    names, by_function, by_invocation = _trigger_mix()
    num_head = round(_HEAD_FRACTION * num_functions)
    # Evenly over the ranks, so that a small population is a fair one.
    ranks = (np.arange(num_head) + generator.random(num_head)) / num_functions
    totals = np.empty(num_functions)
    totals[:num_head] = _head_totals(ranks)
    triggers = np.empty(num_functions, np.int64)
    # No timer is in the head: the fastest known one fires once a second, which is just below it.
    head = np.where(np.array(names) == TIMER, 0.0, by_invocation)
    head /= head.sum()
    triggers[:num_head] = generator.choice(len(names), num_head, p=head)
    body = (by_function - _HEAD_FRACTION * head) / (1 - _HEAD_FRACTION)
    triggers[num_head:] = generator.choice(len(names), num_functions - num_head, p=body)
    for index, name in enumerate(names):
        members = num_head + np.flatnonzero(triggers[num_head:] == index)
        totals[members] = _body_totals(name, generator.random(len(members)))
    periods = np.zeros(num_functions)
    timers = np.flatnonzero(triggers == names.index(TIMER))
    periods[timers] = _timer_periods(generator, totals[timers])
    totals[timers] = SCOPE_MINUTES / periods[timers]
    order = generator.permutation(num_functions)
    return Population(
        tuple(names[index] for index in triggers[order]), totals[order], periods[order]
    )


def generate(
    num_functions: int, *, num_minutes: int = DAY_MINUTES, first_minute: int = 0, seed: int
) -> MinuteTrace:
    """Draw a trace of functions, many of which are never invoked if it is short; in no particular order.

    It begins at a minute of the day, UTC, and may be longer than a day. An app has one function: the figures say
    nothing about which functions go together.
    """
    if num_minutes < 1 or first_minute < 0:
        raise ValueError(
            f"num_minutes is {num_minutes} and first_minute {first_minute}, "
            "expected at least 1 and at least 0"
        )
    population = draw_population(num_functions, seed=seed)
    generator = np.random.default_rng([seed, 1])
    counts = np.empty((num_functions, num_minutes), np.int32)
    minutes = np.arange(first_minute, first_minute + num_minutes)
    clocked = population.periods > 0
    timers, others = np.flatnonzero(clocked), np.flatnonzero(~clocked)
    hours, swing = _hours(minutes), _swing(minutes)
    for members in _blocks(timers):
        counts[members] = _firings(generator, population.periods[members], minutes)
    for members in _blocks(others):
        rates = population.totals[members] / SCOPE_MINUTES
        fanos = _fanos(generator, [population.triggers[index] for index in members], rates)
        shape = np.where(rates[:, None] < _SWING_RATE_MAX, hours * swing, hours)
        counts[members] = _invocations(generator, rates[:, None] * shape, fanos, rates)
    keys = tuple(
        FunctionKey(f"owner-{number}", f"app-{number}", f"function-{number}", trigger)
        for number, trigger in enumerate(population.triggers)
    )
    return MinuteTrace(keys, counts, first_minute)


def _trigger_mix() -> tuple[list[str], Floats, Floats]:
    """Triggers, their shares of functions and of invocations in the released trace."""
    table = calibration()["trigger_mix_percent"]
    column = {name: position for position, name in enumerate(table["columns"])}
    rows = table["rows"]
    by_function = np.array([row[column["functions_released"]] for row in rows])
    by_invocation = np.array([row[column["invocations_released"]] for row in rows])
    names = [str(row[column["trigger"]]) for row in rows]
    return names, by_function / by_function.sum(), by_invocation / by_invocation.sum()


def _head_totals(ranks: Floats) -> Floats:
    """Totals of the most popular functions, by the fraction of functions that are more popular."""
    figures = calibration()
    num, all_invocations = (figures["scope_14d"][k] for k in ("functions", "total_invocations"))
    exact = np.sort(np.array(figures["top10_function_totals_14d"], np.float64))[::-1]
    # Mean total between two top fractions, at their geometric middle; the ten are known better.
    shares = [(0.0, 0.0)] + [
        (row["fraction_of_most_popular"], row["functions_released"])
        for row in figures["popularity_share_of_invocations_by_top_fraction"]
    ]
    knots = [(len(exact) / num, float(exact[-1]))]
    for (fraction, share), (next_fraction, next_share) in itertools.pairwise(shares):
        middle = np.sqrt(fraction * next_fraction)
        if middle > knots[0][0] and fraction < 2 * _HEAD_FRACTION:
            mean = (next_share - share) * all_invocations / (num * (next_fraction - fraction))
            knots.append((middle, mean))
    at, total = np.log(np.array(knots)).T
    drawn = np.exp(np.interp(np.log(np.maximum(ranks, 1 / num)), at, total))
    position = np.floor(ranks * num).astype(np.int64)
    known = exact[np.minimum(position, len(exact) - 1)]
    return np.asarray(np.where(position < len(exact), known, drawn), np.float64)


def _body_totals(trigger: str, quantiles: Floats) -> Floats:
    """Totals of all but the most popular functions of a trigger; whole numbers."""
    table = calibration()["cdf_total_14d_by_trigger"]
    rows = np.array(table["rows"], np.float64)
    cdf = rows[:, table["columns"].index(trigger)]
    # The plot ends below 1. The rest is the head, or the plot's reading error.
    cdf = cdf / cdf[-1]
    # The totals in (a, b] have the mass between their knots. No total is below 1.
    knots = np.concatenate(([0.0], np.log(rows[:, 0])))
    drawn = np.exp(np.interp(quantiles, np.concatenate(([0.0], cdf)), knots))
    # Round up from a hair less, because the logarithm of a whole number is not exact.
    return np.maximum(1.0, np.ceil(drawn - 1e-6))


def _timer_periods(generator: np.random.Generator, totals: Floats) -> Floats:
    """Minutes between firings of timers with these totals."""
    raw = SCOPE_MINUTES / totals
    distance = np.abs(np.log(raw)[:, None] - np.log(_PERIODS))
    nearest = _PERIODS[np.argmin(distance, axis=1)]
    known = calibration()["timer_periods_500fn"]
    regular = sum(known.values()) - known["irregular"] - known["fewer than 3 firings in 8 h"]
    chosen = generator.random(len(raw)) < regular / (regular + known["irregular"])
    # Periods beyond a day are whole days, as people choose them; the totals say how many.
    snapped = chosen & (raw < 1.5 * DAY_MINUTES)
    return np.where(snapped, nearest, raw)


def _firings(
    generator: np.random.Generator, periods: Floats, minutes: npt.NDArray[np.int64]
) -> Ints:
    """Firings of timers; shape (timer, minute)."""
    aligned = generator.random(len(periods)) < _ON_THE_HOUR
    # A period is counted from midnight, or from a whole minute after it. Periods below a minute are even.
    phases = np.where(aligned, 0.0, np.floor(generator.random(len(periods)) * periods))
    # Irregular periods, which are not in the table, fire at any time.
    free = ~np.isin(periods, _PERIODS)
    phases = np.where(free, generator.random(len(periods)) * periods, phases)
    edges = np.concatenate((minutes, minutes[-1:] + 1)).astype(np.float64)
    fired = np.ceil((edges - phases[:, None]) / periods[:, None] - 1e-9)
    return np.diff(fired, axis=1).astype(np.int64)


def _hours(minutes: npt.NDArray[np.int64]) -> Floats:
    """How busy the hour of each minute is; 1.0 on average of a day."""
    hours = np.array(calibration()["hour_of_day_multiplier"], np.float64)
    return np.asarray(hours[minutes // 60 % 24], np.float64)


def _swing(minutes: npt.NDArray[np.int64]) -> Floats:
    """How busy each minute is among those of its hour; 1.0 on average."""
    swing = np.array(calibration()["active_functions_by_minute_of_hour_1350fn"], np.float64)
    return np.asarray(1 + _MINUTE_SWING * (swing[minutes % 60] / swing.mean() - 1), np.float64)


def _fanos(generator: np.random.Generator, triggers: Sequence[str], rates: Floats) -> Floats:
    """Draw how bursty each function is, from those of its rate per minute and trigger."""
    figures = calibration()
    z = np.clip(generator.standard_normal(len(rates)), -2 * _Z90, 2 * _Z90)
    fanos = np.empty(len(rates))
    by_trigger = figures["per_minute_burstiness_500fn_by_trigger"]
    everything = figures["per_minute_burstiness_500fn_8h"]
    for index, (trigger, rate) in enumerate(zip(triggers, rates, strict=True)):
        own = next((c for c in by_trigger.get(trigger, ()) if _within(rate, c)), None)
        chosen = own or next((c for c in everything if _within(rate, c)), everything[0])
        low, middle, high = np.log(np.maximum(chosen["fano_p10_50_90"], 0.01))
        spread = high - middle if z[index] > 0 else middle - low
        fanos[index] = np.exp(middle + spread * z[index] / _Z90)
    return fanos


def _within(rate: float, rate_class: Mapping[str, Any]) -> bool:
    low, high = rate_class["rate_per_min"]
    return bool(low <= rate < high)


def _invocations(
    generator: np.random.Generator, expected: Floats, fanos: Floats, rates: Floats
) -> Ints:
    """Draw invocations of all but timers; shape (function, minute), that of `expected`."""
    even = np.clip(1 - fanos, 0.0, 1.0)[:, None]
    phases = generator.random((len(expected), 1))
    walked = np.floor(np.cumsum(expected * even, axis=1) + phases)
    regular = np.diff(walked, axis=1, prepend=0.0).astype(np.int64)
    bursty = np.flatnonzero(fanos > 1)
    random = expected * (1 - even)
    random[bursty] *= _bursts(generator, rates[bursty], fanos[bursty], expected.shape[1])
    return regular + generator.poisson(random)


def _bursts(
    generator: np.random.Generator, rates: Floats, fanos: Floats, num_minutes: int
) -> Floats:
    """Gamma factors of mean 1 that give Poisson counts this variance-to-mean ratio."""
    num_blocks = num_minutes // _BURST_MINUTES + 2
    # Var = rate + rate^2 v, so Fano = 1 + rate v.
    shape = (rates / (fanos - 1))[:, None]
    factors = generator.standard_gamma(np.broadcast_to(shape, (len(rates), num_blocks))) / shape
    factors = np.repeat(factors, _BURST_MINUTES, axis=1)
    offsets = generator.integers(0, _BURST_MINUTES, (len(rates), 1))
    return np.take_along_axis(factors, offsets + np.arange(num_minutes), axis=1)


def _blocks(members: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    return [members[begin : begin + _BLOCK] for begin in range(0, len(members), _BLOCK)]
