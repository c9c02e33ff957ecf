"""Whether workers have the time for one more stream of steps that come in a beat. Pure.

What is tested, exactly. A batch of b steps fits a beat if two of them, one after the other, fit into the beat and into the
SLO: a step that comes as a batch begins waits for its end, and runs in the next one. A worker with n streams of a model can
have batches of n steps at most. Of the sizes that fit, the one that takes least time per step counts; if none fits, the
stream is refused. The work of a model's streams is spread evenly over the workers that have the model, and what streams
of other models take there is added. The mean of those workers may be busy for `LOAD_MOST` of the time.

What is not tested: requests without a beat, which the scheduler refuses when there is no time; and loads of weights, because
a model that steps every beat stays loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from clockwright.units import ModelId, WorkerId

#: With more work than that, steps wait for each other longer than their deadlines allow too often (study `bench-streams`).
LOAD_MOST: Final = 0.85


@dataclass(frozen=True, slots=True)
class StreamBeat:
    """Streams of one model whose steps come alike."""

    model: ModelId
    #: The time between two steps of a stream, and the time allowed for each.
    every_ns: int
    slo_ns: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a model's steps take, and where they may run."""

    #: By batch size.
    exec_ns: Mapping[int, int]
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class BeatLoad:
    """How busy the workers of a model would be."""

    #: The share of their time; infinite: no batch is fast enough for the beat.
    share: float
    #: The time that a step takes, as part of the best batch, and that batch's size; of the new stream's model.
    step_ns: int
    batch_size: int


def step_cost(capacity: Capacity, beat: StreamBeat, streams: int) -> tuple[int, int]:
    """Find what a step takes in the best batch that fits, with the streams of this beat on all workers.

    Returns nanoseconds per step, and the batch size; 0 if none fits.
    """
    each = -(-streams // max(len(capacity.workers), 1))
    within_ns = min(beat.every_ns, beat.slo_ns)
    fits = [
        (-(-exec_ns // min(size, each)), size)
        for size, exec_ns in sorted(capacity.exec_ns.items())
        if 2 * exec_ns <= within_ns
    ]
    return min(fits, default=(0, 0))


def load_with(
    beat: StreamBeat, live: Mapping[StreamBeat, int], capacities: Mapping[ModelId, Capacity]
) -> BeatLoad:
    """How busy the workers of a model are with one more stream of a beat.

    `live` counts the streams of each beat without it; models without a worker are left out of `capacities`.
    """
    mine = capacities.get(beat.model)
    if mine is None or not mine.workers:
        return BeatLoad(float("inf"), 0, 0)
    streams = {**live, beat: live.get(beat, 0) + 1}
    busy = dict.fromkeys(mine.workers, 0.0)
    step_ns = size = 0
    for each, number in streams.items():
        capacity = capacities.get(each.model)
        if capacity is None or not capacity.workers:
            continue
        cost_ns, best = step_cost(capacity, each, number)
        if each == beat:
            step_ns, size = cost_ns, best
        if not best:
            # Live streams were admitted when batches were faster: the whole beat is theirs.
            cost_ns = min(capacity.exec_ns.values(), default=0)
        share = number * cost_ns / each.every_ns / len(capacity.workers)
        for worker in busy.keys() & set(capacity.workers):
            busy[worker] += share
    if not size:
        return BeatLoad(float("inf"), 0, 0)
    return BeatLoad(sum(busy.values()) / len(busy), step_ns, size)


def longest_gap_ns(exec_ns: Mapping[int, int], streams: int) -> int:
    """How long it takes at most from step to step of a stream, where each is asked as soon as the one before has ended.

    All streams of a worker, and fewer as they end, wait for each other then, whatever part of the time is free. A number
    just below a batch size is worst, because batches are not filled up.
    """
    sizes = sorted(exec_ns, reverse=True)
    fewer = [size - 1 for size in sizes if 1 < size <= streams]
    return max(_gap_ns(exec_ns, sizes, number) for number in (streams, *fewer))


def _gap_ns(exec_ns: Mapping[int, int], sizes: Sequence[int], streams: int) -> int:
    # When the last step ended of those who wait, and of those in the batch that runs.
    waiting, num_running, end_ns = deque([0] * streams), 0, 0
    longest_ns = num_steps = 0
    while num_steps < 3 * streams:
        if not waiting:
            waiting.extend([end_ns] * num_running)
            num_running = 0
        size = next((size for size in sizes if size <= len(waiting)), sizes[-1])
        begin_ns, end_ns = end_ns, end_ns + exec_ns[size]
        number = min(size, len(waiting))
        longest_ns = max(longest_ns, end_ns - waiting[0])
        for _ in range(number):
            waiting.popleft()
        # The next batch is chosen while the one before runs.
        waiting.extend([begin_ns] * num_running)
        num_running = number
        num_steps += number
    return longest_ns
