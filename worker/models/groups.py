"""Which requests of a batch run together, where their sizes are not the same or one may fail. No I/O, no arrays.

Requests of equal sizes are joined. Where the model answers a row as before when it is padded (`OpenSizes.pads`), sizes
that are nearly equal are joined, too: one more run costs about as much as so many elements of padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from clockwright.errors import ModelError

T = TypeVar("T")


@dataclass(slots=True)
class RunGroup:
    """Requests that run together, padded to the largest of each size."""

    sizes: tuple[int, ...]
    #: Their positions in the batch.
    requests: list[int]
    rows: int

    @property
    def elements(self) -> int:
        """What is computed, padding included."""
        return self.rows * prod(self.sizes)


def group_requests(
    rows: Sequence[int],
    sizes: Sequence[tuple[int, ...]],
    may_pad: Sequence[bool],
    *,
    elements_max: int,
    run_elements: int,
) -> list[RunGroup]:
    """RunGroup requests whose rows do not mix.

    Args:
        rows: of each request.
        sizes: of each, those of its open dimensions.
        may_pad: whether it may be padded.
        elements_max: the batch was predicted for so many elements, which padding must not exceed, all groups together.
        run_elements: one more run takes as long as so many elements.
    """
    alike: dict[tuple[tuple[int, ...], bool], RunGroup] = {}
    for index, (number, size, pads) in enumerate(zip(rows, sizes, may_pad, strict=True)):
        group = alike.setdefault((size, pads), RunGroup(size, [], 0))
        group.requests.append(index)
        group.rows += number
    groups = list(alike.values())
    spare = elements_max - sum(group.elements for group in groups)
    padding = sorted((group for (_, pads), group in alike.items() if pads), key=_size, reverse=True)
    done = [group for (_, pads), group in alike.items() if not pads]
    for group in padding:
        if done and (last := done[-1]) in padding:
            wide = tuple(map(max, last.sizes, group.sizes))
            more = (last.rows + group.rows) * prod(wide) - last.elements - group.elements
            if more <= min(spare, run_elements):
                spare -= more
                last.sizes = wide
                last.requests += group.requests
                last.rows += group.rows
                continue
        done.append(group)
    return done


def _size(group: RunGroup) -> int:
    return prod(group.sizes)


def run_or_each(
    requests: Sequence[int], run: Callable[[Sequence[int]], Sequence[T]]
) -> list[T | str]:
    """Run requests of a batch together, and each alone if that fails.

    Args:
        requests: their positions in the batch.
        run: takes some of them; raises a ModelError if it fails.

    Returns:
        What each run gave of each request, or why that failed.
    """
    try:
        return list(run(requests))
    except ModelError as error:
        if len(requests) == 1:
            return [str(error)]
    return [answer for index in requests for answer in run_or_each([index], run)]
