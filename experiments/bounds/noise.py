"""Bounds on work whose durations are random, as `Noise` has them: exp(N(0, sigma)) times what the row says.

A policy knows nothing of a duration before it is over, so luck does not add up. With Z normal,
exp(sigma Z) >= 1 + sigma Z: the durations of executions that the rows give d1, d2, ... sum to at least
S - sigma |M|, with S = d1 + d2 + ... and M a martingale of variance at most dmax S, whatever was decided. So but
for a chance of `FAILURE_PROBABILITY`

    S - sigma sqrt(2 L dmax (S + dmax)) <= the time there is,    L = ln(1 / FAILURE_PROBABILITY),

where time is a little more than there is, for the last execution of each GPU: it may end after the end, and
answers in time only if it is short. One execution is no shorter than exp(-z sigma) times its row, where z is so
large that none of all is.
"""

from __future__ import annotations

import math

FAILURE_PROBABILITY = 1e-9


def extreme(number: int) -> float:
    """How many standard deviations none of so many draws is away from the mean."""
    return math.sqrt(2 * math.log(2 * max(number, 1) / FAILURE_PROBABILITY))


def work_ns(
    time_ns: float, sigma: float, longest_ns: float, *, num_gpus: int, number: int, sums: int = 1
) -> float:
    """The most work, by the rows' durations, that is done in some time.

    Args:
        time_ns: of all GPUs together.
        sigma: of the noise; 0: durations are exactly the rows'.
        longest_ns: the longest duration of a row.
        num_gpus: each has one execution that may not end in time.
        number: executions that could be of use, at most.
        sums: how many such sums are held to this bound at once.
    """
    if not sigma:
        return time_ns
    # What surely ends too late is not begun; the rest overruns by less than this.
    time_ns += num_gpus * 2 * sigma * extreme(number + num_gpus) * longest_ns
    chance = math.log(sums / FAILURE_PROBABILITY)
    spread = sigma * math.sqrt(2 * chance * longest_ns)
    root = (spread + math.sqrt(spread**2 + 4 * (time_ns + longest_ns))) / 2
    return root**2 - longest_ns
