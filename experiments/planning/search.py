"""The cheapest size that meets the target.

One kind alone is searched from the bound upwards in growing steps, then by halves. Among mixtures that are cheaper than the
best size so far, the largest are tried first: if one misses, so do all that have no more of any kind. That takes about
as many trials as there are sizes along the border.

More workers are taken to do no worse, and longer SLOs to miss no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS
from experiments.bounds import BoundProblem, residency_bound
from experiments.bounds.simulated import problem_of
from experiments.planning.question import Question, Size
from experiments.planning.trials import Trial, Tries


@dataclass(kw_only=True)
class Search:
    """What is known of which sizes meet a target, and the search for the cheapest."""

    question: Question
    tries: Tries
    trials: dict[Size, Trial] = field(default_factory=dict)
    #: Sizes that meet the target, and such that miss it.
    meeting: set[Size] = field(default_factory=set)
    missing: set[Size] = field(default_factory=set)

    _problems: dict[frozenset[int], BoundProblem] = field(default_factory=dict)
    _bounded: dict[Size, bool] = field(default_factory=dict)

    def _problem(self, kinds: frozenset[int]) -> BoundProblem | None:
        """What the first seed asks, of workers of some kinds; None: it depends on the answers."""
        question = self.question
        if question.case.workload.closed_loops:
            return None
        if kinds not in self._problems:
            one_of_each = tuple(int(kind in kinds) for kind in range(len(question.kinds)))
            case = question.case_of(one_of_each)
            self._problems[kinds] = problem_of(case, question.warmup_ns)
        return self._problems[kinds]

    def check_reachable(self) -> None:
        """Refuse SLOs that no number of workers meets.

        Raises:
            ConfigError: too many requests have an SLO that is shorter than one run of their model on the fastest
                kind; or a model runs on no kind.
        """
        case, kinds = self.question.case, self.question.kinds
        for model in case.cluster.models:
            if all(kind.row_of(model.row) is None for kind in kinds):
                raise ConfigError(f"model {model.model_id} runs on no kind of worker, expected one")
        problem = self._problem(frozenset(range(len(kinds))))
        if problem is None:
            return
        dead = problem.latest_ns < problem.arrival_ns
        if np.count_nonzero(dead) <= (1 - self.question.target) * len(problem):
            return
        worst = int(np.bincount(problem.model[dead]).argmax())
        place = int(np.flatnonzero(dead & (problem.model == worst))[0])
        least_ns = min(problem.costs[worst].exec_ns.values())
        raise ConfigError(
            f"model {case.workload.models[worst]} has {problem.slo_ns[place] / NS_PER_MS:.3g} ms of its SLO left after the "
            f"network, but a run takes {least_ns / NS_PER_MS:.3g} ms on the fastest kind of worker: no "
            "number of workers meets that; a longer SLO does, or a faster kind"
        )

    def is_bounded(self, size: Size) -> bool:
        """Whether no schedule could meet the target with a size, given the arrivals of the first seed."""
        if size not in self._bounded:
            self._bounded[size] = self._is_bounded(size)
        return self._bounded[size]

    def _is_bounded(self, size: Size) -> bool:
        if not sum(size):
            return True
        problem = self._problem(frozenset(kind for kind, count in enumerate(size) if count))
        if problem is None:
            return False
        cluster = self.question.case_of(size).cluster
        number = sum(size)
        # Each worker brings a link and a device.
        wires = [
            replace(wires, bytes_per_s=wires.bytes_per_s * number / problem.num_gpus)
            for wires in problem.wires
        ]
        pages = max(map(cluster.pages_of_worker, range(number)))
        problem = replace(problem, num_gpus=number, pages_per_gpu=pages, wires=wires)
        needed = math.ceil(self.question.target * len(problem))
        return residency_bound(problem) < needed

    def meets(self, size: Size) -> bool:
        """Whether a size meets the target."""
        if any(_covers(size, other) for other in self.meeting):
            return True
        if any(_covers(other, size) for other in self.missing):
            return False
        found = not self.is_bounded(size) and self.tried(size)
        (self.meeting if found else self.missing).add(size)
        return found

    def tried(self, size: Size) -> bool:
        """Whether the trial of a size says that it meets the target."""
        if size not in self.trials:
            self.trials[size] = self.tries.trial(self.question, size)
        return bool(self.trials[size].meets)

    def alone(self, kind: int) -> Size | None:
        """The fewest workers of a kind, in addition to those that are there; None: `most_workers` are too few."""
        least, most = self.question.least, self.question.most_workers

        def of(count: int) -> Size:
            return (*least[:kind], count, *least[kind + 1 :])

        def is_open(count: int) -> bool:
            size = of(count)
            return not (
                any(_covers(other, size) for other in self.missing) or self.is_bounded(size)
            )

        def meets(count: int) -> bool | None:
            found = self.meets(of(count))
            return found or (None if self._is_hopeless(of(count)) else False)

        first = _first(least[kind] - 1, most, is_open)
        found = first and _first(first - 1, most, meets)
        return of(found) if found else None

    def _is_hopeless(self, size: Size) -> bool:
        """Whether half of it or less does hardly worse: something else limits than the number of workers."""
        if size not in self.trials:
            return False
        answered = self.trials[size].attainment
        return any(
            answered < 1.05 * other.attainment and 1 - answered > 0.95 * (1 - other.attainment)
            for other in self.trials.values()
            if sum(size) >= 2 * sum(other.size) and _covers(size, other.size)
        )

    def cheapest(self) -> Size | None:
        """The size of the least price that meets the target; of equals, the one with the fewest workers."""
        question = self.question
        if self.meets(question.least):
            return question.least
        alone = {kind: self.alone(kind) for kind in range(len(question.kinds))}
        best = min(filter(None, alone.values()), key=self._rank, default=None)
        if len(alone) == 1 or (best is None and not self._are_halves()):
            return best
        # More of a kind than it takes alone is of no use.
        most = [size[kind] if size else question.most_workers for kind, size in alone.items()]
        while candidate := self._most_hopeful(best, most):
            if self.meets(candidate):
                best = candidate
        return best

    def confirmed(self) -> Trial | None:
        """Give the cheapest size that meets the target with `most_runs` seeds, too: of many sizes some meet it by luck."""
        while (size := self.cheapest()) is not None:
            if self.tried(size):
                self.tries.extend(self.question, self.trials[size])
            if self.trials[size].meets:
                return self.trials[size]
            self.meeting.discard(size)
            self.missing.add(size)
        return None

    def _are_halves(self) -> bool:
        """Whether each kind lacks models, so that only several can serve all."""
        models = self.question.case.cluster.models
        return all(
            any(kind.row_of(model.row) is None for model in models) for kind in self.question.kinds
        )

    def _rank(self, size: Size) -> tuple[float, int]:
        return self.question.price(size), sum(size)

    def _most_hopeful(self, best: Size | None, most: list[int]) -> Size | None:
        """Give a largest size of those that are cheaper than the best and not known to miss."""
        open_sizes = {
            size
            for size in self._sizes(most)
            if (best is None or self._rank(size) < self._rank(best))
            and not any(_covers(other, size) for other in self.missing)
        }
        for size in sorted(open_sizes, key=sum, reverse=True):
            larger = (
                (*size[:kind], size[kind] + 1, *size[kind + 1 :]) for kind in range(len(size))
            )
            if not any(other in open_sizes for other in larger):
                return size
        return None

    def _sizes(self, most: list[int]) -> Iterator[Size]:
        ranges = (
            range(least, high + 1) for least, high in zip(self.question.least, most, strict=True)
        )
        return product(*ranges)


def _first(low: int, most: int, holds: Callable[[int], bool | None]) -> int | None:
    """The least number above `low` for which something holds, as it does for all larger ones.

    Returns:
        None if it does not hold up to `most`, or if there is no hope (None) before.
    """
    step, high = 1, low + 1
    while not (found := holds(high)):
        if found is None or high >= most:
            return None
        low, high, step = high, min(most, high + step), 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _covers(size: Size, other: Size) -> bool:
    """Whether a size has at least as many workers of each kind as another."""
    return all(mine >= its for mine, its in zip(size, other, strict=True))
