"""When memory gets short: what is refused then, and when it is taken again. No I/O.

A process that goes beyond its limit is killed with all that it has open. So large requests are refused when there
is little left, and all when there is hardly any, as Envoy's overload manager does; operators still get in. What
was refused is taken again only when some more is free, because each change is one that clients notice.
"""

from __future__ import annotations

import enum


class MemoryState(enum.Enum):
    """What is refused for want of memory. The values are the wire's."""

    AMPLE = "AMPLE"
    LARGE_REFUSED = "LARGE_REFUSED"
    ALL_REFUSED = "ALL_REFUSED"


#: Parts of the limit at which large requests, and all, are refused.
LARGE_PART, ALL_PART = 0.85, 0.95
#: A state is left when this part of the limit less is in use than when it began.
_HYSTERESIS_PART = 0.03

#: Requests of so many bytes are large.
LARGE_BYTES = 64 << 10

#: By state: messages of so many bytes, or more, are refused.
REFUSED_FROM = {
    MemoryState.AMPLE: 1 << 62,
    MemoryState.LARGE_REFUSED: LARGE_BYTES,
    MemoryState.ALL_REFUSED: 0,
}


class MemoryPressure:
    """Follows how much memory is in use."""

    def __init__(self, limit_bytes: int) -> None:
        """Begin with enough of it; more than the limit is never to be in use."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.state = MemoryState.AMPLE

    def see(self, used_bytes: int) -> bool:
        """Take in how many bytes are in use; says whether the state is another now."""
        self.used_bytes = used_bytes
        before = self.state
        part = used_bytes / self.limit_bytes
        all_part, large_part = ALL_PART, LARGE_PART
        if before is MemoryState.ALL_REFUSED:
            all_part -= _HYSTERESIS_PART
        if before is not MemoryState.AMPLE:
            large_part -= _HYSTERESIS_PART
        if part >= all_part:
            self.state = MemoryState.ALL_REFUSED
        elif part >= large_part:
            self.state = MemoryState.LARGE_REFUSED
        else:
            self.state = MemoryState.AMPLE
        return self.state is not before
