"""B7: what it costs to refuse at once, for policies that cannot foresee arrivals.

A policy that waits sees which requests find mates, and drops those that found none. One that refuses a request
when it arrives does not know yet, and now and then refuses the one that would have made a batch. How much that
costs at least is computed for models that are all asked alike, by Poisson arrivals, at one SLO.

Batches cost a price per GPU time and whatever is refused at once gains a price, both chosen here. Whoever keeps
the GPUs' time and refuses the part at once that is asked for then gains at least what it answers. Apart from the
two prices models have nothing to do with each other: what happens in the others says nothing of what one will be
asked. So no policy gains more than the best policy for one model does, times the number of models. (This is weak
duality, as in the bound of restless bandits by Whittle, 1988.) That best policy is found by value iteration.

All that is rounded favours the policy. Time goes by in slots, everybody decides at the end of a slot, and each
request may wait until the end of the slot in which it would be too late. A batch may begin whenever it is paid
for, and in time for the smallest batch is in time for all. Weights are everywhere. A request beyond the number
that may wait for one model is answered at no cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from clockwright.units import NS_PER_S
from experiments.bounds.case import Cost

#: A refusal is at once within this part of the SLO.
AT_ONCE = 0.1

# Value iteration ends when its two bounds are so close, as a part of the requests; the upper one counts.
_GAP = 1e-4
_MAX_SWEEPS = 4000
_MAX_TRIALS = 60

_Indices = NDArray[np.int64]
_Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeCase:
    """Models asked alike and for ever by Poisson arrivals, all resident on every GPU."""

    cost: Cost
    num_models: int
    num_gpus: int
    #: Requests per second to all models together.
    rate_rps: float
    slo_ns: int


def at_once_bound(
    case: AlikeCase, part: float = 0.0, *, slot_ns: int, max_waiting: int = 4
) -> float:
    """The share of requests, 0 to 1, that any policy which cannot foresee answers in the long run at most (B7).

    Args:
        case: what is asked, of which GPUs.
        part: of all requests refused, those within a tenth of the SLO are this part at least.
        slot_ns: shorter slots make the bound tighter.
        max_waiting: requests that may wait for one model. It should seldom be more; the bound holds, but is
            loose, where it is.
    """
    if min(case.cost.exec_of(padding=True)) > case.slo_ns:
        return 0.0
    model = _OneModel(case, slot_ns, max_waiting)
    asked_per_slot = case.rate_rps / case.num_models * slot_ns / NS_PER_S

    def share(prices: _Values) -> float:
        gpu_price, refusal_price = abs(prices[0]), abs(prices[1]) if part else 0.0
        gain = model.gain(gpu_price, refusal_price, part)
        gain += gpu_price * case.num_gpus * slot_ns / model.unit_ns / case.num_models
        return float(gain / asked_per_slot - refusal_price * part)

    # Any prices give a bound. At the first guess a batch of one is just worth its GPU time.
    guesses = np.array([[1.0, 0.1], [1.1, 0.1], [1.0, 0.2]])
    done = minimize(
        share,
        guesses[0],
        method="Nelder-Mead",
        options={"maxfev": _MAX_TRIALS, "xatol": 1e-3, "fatol": _GAP, "initial_simplex": guesses},
    )
    return min(float(done.fun), 1.0)


class _OneModel:
    """The requests that wait for one model, and the best that can become of them at given prices.

    A state is the ages of those that wait, in slots, at the end of a slot.
    """

    def __init__(self, case: AlikeCase, slot_ns: int, max_waiting: int) -> None:
        exec_ns = case.cost.exec_of(padding=True)
        #: GPU time is counted in batches of one.
        self.unit_ns = exec_ns[0]
        self._asked = case.rate_rps / case.num_models * slot_ns / NS_PER_S
        self._most = max_waiting
        # The ages at which a request is refused at once or not any more, and at which it is served or dropped.
        last = math.ceil((case.slo_ns - exec_ns[0]) / slot_ns)
        early = min(math.ceil(AT_ONCE * case.slo_ns / slot_ns), last)
        # The least time to serve so many, in as many batches as one likes.
        self._times = [0.0]
        for count in range(1, max_waiting + 1):
            sizes = range(1, min(count, len(exec_ns)) + 1)
            self._times.append(
                min(self._times[count - k] + exec_ns[k - 1] / self.unit_ns for k in sizes)
            )
        states = [
            ages[::-1]
            for number in range(max_waiting + 1)
            for ages in combinations_with_replacement(range(last + 1), number)
        ]
        place = {ages: index for index, ages in enumerate(states)}

        # It pays to decide as late as possible, and then the oldest first; -1: cannot be.
        self._refused: list[_Indices] = []
        self._served: list[_Indices] = []
        self._later: list[_Indices] = []
        for number in range(max_waiting + 1):
            refused, served, later = (np.full(len(states), -1) for _ in range(3))
            for index, ages in enumerate(states):
                if number <= ages.count(early):
                    first = ages.index(early) if number else 0
                    refused[index] = place[ages[:first] + ages[first + number :]]
                due = ages.count(last)
                if not number or (due and number <= len(ages)):
                    served[index] = place[ages[max(number, due) :]]
                if not due and len(ages) + number <= max_waiting:
                    later[index] = place[tuple(age + 1 for age in ages) + (0,) * number]
            self._refused.append(refused)
            self._served.append(served)
            self._later.append(later)
        self._waiting = np.array([len(ages) for ages in states])
        self._values = np.zeros(len(states))

    def gain(self, gpu_price: float, refusal_price: float, part: float) -> float:
        """The most that can be gained per slot, from above."""
        answer = 1.0 + part * refusal_price
        arrivals = [math.exp(-self._asked)]
        for number in range(1, self._most + 1):
            arrivals.append(arrivals[-1] * self._asked / number)
        # By the number that waits already: the chance that all arrivals of a slot fill what room is left, and how
        # many more there are in the mean.
        rooms = range(self._most, -1, -1)
        fill = [1.0 - sum(arrivals[:room]) for room in rooms]
        beyond = [
            self._asked - sum(1.0 - sum(arrivals[: number + 1]) for number in range(room))
            for room in rooms
        ]
        best_of_one = max(answer, refusal_price)
        no_room = best_of_one * np.array(beyond)[self._waiting]
        chances = []
        for number, alone in enumerate(arrivals):
            there = self._waiting + number
            filling = np.where(there == self._most, np.array(fill)[self._waiting], 0.0)
            chances.append(np.where(there < self._most, alone, filling))

        served_gain = [answer * n - gpu_price * time for n, time in enumerate(self._times)]
        refused_gain = [refusal_price * n for n in range(self._most + 1)]
        values = self._values
        high = 0.0
        for _ in range(_MAX_SWEEPS):
            after = no_room.copy()
            for chance, later in zip(chances, self._later, strict=True):
                after += np.where(later >= 0, chance * values[later], 0.0)
            kept = _best(self._served, after, served_gain)
            found = _best(self._refused, kept, refused_gain)
            change = found - values
            high = float(change.max())
            values = found - found[0]
            if high - float(change.min()) < _GAP * self._asked:
                break
        self._values = values
        return high


def _best(moves: list[_Indices], values: _Values, gains: list[float]) -> _Values:
    """The most by state: what so many requests gain, and the value of the state without them."""
    best = np.full(len(values), -np.inf)
    for move, gain in zip(moves, gains, strict=True):
        can = np.flatnonzero(move >= 0)
        best[can] = np.maximum(best[can], gain + values[move[can]])
    return best
