"""The fewest workers that knowing the load allows: what each minute needs, found by trying."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

#: What a schedule came to, by minute: the workers that were there, and the requests that missed their SLO.
Tried = Sequence[tuple[int, int]]

# So many times what is first thought to be needed is tried.
_PARTS = (1.0, 0.9, 0.8)


@dataclass(slots=True)
class Needs:
    """What is known of each minute: by number of workers, the requests that missed their SLO."""

    minutes: list[dict[int, int]] = field(default_factory=list)

    def add(self, tried: Tried) -> None:
        """Take in a run; of two with as many workers, the worse counts."""
        if not self.minutes:
            self.minutes = [{} for _ in tried]
        for known, (workers, missed) in zip(self.minutes, tried, strict=True):
            known[workers] = max(missed, known.get(workers, 0))

    def cheapest(self, may_miss: float) -> list[int]:
        """The schedule of the fewest hours that misses no more than so many requests, of all that were tried.

        More workers are taken to miss no more. A start takes a minute of a worker in addition to what it serves, so the hours
        are those of `hours_of`.
        """
        ladders = [_ladder(known) for known in self.minutes]
        place = [len(ladder) - 1 for ladder in ladders]
        needs = [ladder[-1][0] for ladder in ladders]
        left = may_miss - sum(ladder[-1][1] for ladder in ladders)
        version = [0] * len(needs)
        heap: list[tuple[float, int, int]] = []

        def offer(minute: int) -> None:
            """The step down of a minute, by what it misses for each worker-minute that it saves."""
            version[minute] += 1
            if not place[minute]:
                return
            workers, missed = ladders[minute][place[minute] - 1]
            saved = _saved(needs, minute, workers)
            price = (missed - ladders[minute][place[minute]][1]) / saved if saved > 0 else math.inf
            heapq.heappush(heap, (price, minute, version[minute]))

        for minute in range(len(needs)):
            offer(minute)
        while heap:
            price, minute, number = heapq.heappop(heap)
            if number != version[minute] or math.isinf(price):
                continue
            workers, missed = ladders[minute][place[minute] - 1]
            more = missed - ladders[minute][place[minute]][1]
            if more > left:
                continue
            left -= more
            place[minute] -= 1
            needs[minute] = workers
            for near in range(max(0, minute - 2), min(len(needs), minute + 3)):
                offer(near)
        return needs


def hours_of(needs: Sequence[int]) -> float:
    """Hours of workers that a schedule by minutes takes, each start a minute ahead; who is needed again so soon stays."""
    held = [max(pair) for pair in zip(needs, [*needs[1:], 0], strict=True)]
    return sum(held) / 60


def _saved(needs: Sequence[int], minute: int, workers: int) -> float:
    """Worker-minutes that fewer in one minute save."""
    begin, end = max(0, minute - 1), minute + 2
    near = list(needs[begin:end])
    before = 60 * hours_of(near)
    near[minute - begin] = workers
    return before - 60 * hours_of(near)


def _ladder(known: dict[int, int]) -> list[tuple[int, int]]:
    """Numbers of workers that are worth it, ascending, each with what it misses."""
    ladder: list[tuple[int, int]] = []
    for workers, missed in sorted(known.items()):
        if ladder and missed >= ladder[-1][1]:
            continue
        ladder.append((workers, missed))
    return ladder


def fewest(
    first: Sequence[float],
    play: Callable[[Sequence[int]], Tried],
    *,
    num_requests: int,
    target: float,
    tries: int = 3,
    tell: Callable[[str], None] = lambda _: None,
) -> list[int]:
    """Find a schedule of workers by minutes that meets the target in about the fewest hours.

    Args:
        first: what each minute is first thought to need.
        play: runs a schedule.
        num_requests: of a run.
        target: share of all requests that are to be inside their SLO.
        tries: how often the best of what is known is tried, and what it misses is learned.
        tell: is told what is found.

    Returns:
        Of those that were run and met the target, the one of the fewest hours; of all, if none did, the one of the most.
    """
    needs = Needs()
    best: list[int] | None = None
    largest: list[int] = []
    may_miss = (1 - target) * num_requests
    allowed = may_miss

    def tried(schedule: list[int]) -> int:
        nonlocal best, largest
        found = play(schedule)
        needs.add(found)
        missed = sum(count for _, count in found)
        tell(
            f"{hours_of(schedule):.1f} worker-hours miss {missed:,} of the {may_miss:,.0f} allowed"
        )
        if missed <= may_miss and (best is None or hours_of(schedule) < hours_of(best)):
            best = schedule
        if not largest or hours_of(schedule) > hours_of(largest):
            largest = schedule
        return missed

    for part in _PARTS:
        tried([max(1, math.ceil(part * need)) for need in first])
    for _ in range(tries):
        missed = tried(needs.cheapest(allowed))
        # What is known of a minute had other neighbours.
        allowed = max(0.2 * may_miss, allowed * may_miss / max(missed, 0.5 * may_miss))
    return best or largest
