"""The work that open requests to pipelines have before them, by the workers that do it and by when it is due. Pure.

The scheduler sees a request of a pipeline only when its stage has come. So it cannot see that those who wait for the first
stage will all need the others, too, on the same devices.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

# Deadlines are told apart as far as this, 8 ms: a sum has few terms.
_BUCKET_BITS: Final = 23


class Backlog:
    """Sums of work, each for one group of workers."""

    def __init__(self) -> None:
        #: By group and by time, in buckets: work in ns, and how many requests' stages it is.
        self._work: dict[Hashable, dict[int, tuple[int, int]]] = {}

    def add(self, group: Hashable, due_ns: int, work_ns: int) -> None:
        """Add the work of a stage whose pipeline is due at a time."""
        self._change(group, due_ns, work_ns, 1)

    def remove(self, group: Hashable, due_ns: int, work_ns: int) -> None:
        """Take away what was added: the stage is over, or is not wanted any more."""
        self._change(group, due_ns, -work_ns, -1)

    def ahead_ns(self, group: Hashable, due_ns: int) -> int:
        """The work of a group that is due before a time, or about then."""
        bucket = due_ns >> _BUCKET_BITS
        found = self._work.get(group, {})
        return sum([work_ns for place, (work_ns, _) in found.items() if place <= bucket])

    def _change(self, group: Hashable, due_ns: int, work_ns: int, number: int) -> None:
        bucket = due_ns >> _BUCKET_BITS
        buckets = self._work.setdefault(group, {})
        before_ns, count = buckets.get(bucket, (0, 0))
        if count + number:
            buckets[bucket] = before_ns + work_ns, count + number
        else:
            del buckets[bucket]
            if not buckets:
                del self._work[group]
