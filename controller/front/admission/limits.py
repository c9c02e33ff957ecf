"""How much may be inside the front at once, and the refusal of what is more."""

from __future__ import annotations

from collections.abc import Callable

from clockwright.errors import Refusal, RefusedError
from controller.front.admission.pressure import (
    ALL_PART,
    LARGE_BYTES,
    LARGE_PART,
    REFUSED_FROM,
    MemoryPressure,
    MemoryState,
)


class AdmissionLimits:
    """Counts the requests that are open, and their bytes.

    It bounds what waits, for all clients and protocols: beyond the bound, an immediate refusal is worth more
    to a client than memory that runs out.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_bytes: int,
        count: Callable[[Refusal, int], object] = lambda _, __: None,
    ) -> None:
        """Let so much in; bytes are of all messages that are open or on their way in.

        `count` is told how many are refused.
        """
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        #: Is told of refusals, and how many.
        self.count = count
        #: Messages of so many bytes, or more, are refused: there is no memory for them.
        self.refused_from = REFUSED_FROM[MemoryState.AMPLE]
        self._pressure: MemoryPressure | None = None
        #: Requests inside, and those that were begun and are over, however they ended.
        self.num_requests = 0
        self.num_ended = 0
        #: Bytes of those requests, and of messages that are not complete yet.
        self.num_bytes = 0

    def memory_is(self, pressure: MemoryPressure) -> None:
        """Refuse what there is no memory for from now on."""
        self._pressure = pressure
        self.refused_from = REFUSED_FROM[pressure.state]

    @property
    def is_shut(self) -> bool:
        """Whether every request is refused for want of memory."""
        return self.refused_from == 0

    @property
    def is_short(self) -> bool:
        """Whether some requests are refused for want of memory."""
        return self.refused_from <= LARGE_BYTES

    @property
    def has_room(self) -> bool:
        """Whether the bytes inside are within their bound."""
        return self.num_bytes <= self.max_bytes

    def enter(self, num_bytes: int) -> None:
        """Let a request in, which is to `leave`. Raises RefusedError if there is no room."""
        if num_bytes >= self.refused_from:
            raise self.no_memory()
        if self.num_requests >= self.max_requests:
            raise self.crowded("open requests", self.num_requests, self.max_requests)
        if self.num_bytes + num_bytes > self.max_bytes:
            raise self.no_room(num_bytes)
        self.num_requests += 1
        self.num_bytes += num_bytes

    def grow(self, num_bytes: int) -> None:
        """Let a request that has entered take up more, which is to `leave` with it.

        Raises RefusedError if there is no room.
        """
        if self.num_bytes + num_bytes > self.max_bytes:
            raise self.no_room(num_bytes)
        self.num_bytes += num_bytes

    def shrink(self, num_bytes: int) -> None:
        """A request that had grown takes up less again."""
        self.num_bytes -= num_bytes

    def leave(self, num_bytes: int, *, begun: bool = True) -> None:
        """A request that had entered is over; `begun`: it did more than wait."""
        self.num_requests -= 1
        self.num_ended += begun
        self.num_bytes -= num_bytes

    def no_memory(self) -> RefusedError:
        """Make the refusal of a message for which the process has no memory."""
        assert self._pressure is not None
        used, limit = self._pressure.used_bytes, self._pressure.limit_bytes
        self.count(Refusal.OVERLOADED, 1)
        what = (
            f"requests of {self.refused_from} bytes and more are"
            if self.refused_from
            else "all requests are"
        )
        return RefusedError(
            Refusal.OVERLOADED,
            f"memory is short: found {used >> 20} MiB in use, expected less than"
            f" {(LARGE_PART if self.refused_from else ALL_PART) * limit / (1 << 20):.0f} of {limit >> 20};"
            f" {what} refused",
            figures={"memory_bytes": used, "memory_limit_bytes": limit},
        )

    def no_room(self, num_bytes: int) -> RefusedError:
        """Make the refusal of a message for which there is no memory."""
        return self.crowded(
            f"bytes of open requests besides the {num_bytes} of this one",
            self.num_bytes,
            self.max_bytes,
        )

    def crowded(self, what: str, found: int, bound: int) -> RefusedError:
        """Make the refusal of what is more than the front takes at once."""
        self.count(Refusal.OVERLOADED, 1)
        return RefusedError(
            Refusal.OVERLOADED,
            f"the front is full: found {found} {what}, expected {bound} at most",
            figures={"found": found, "bound": bound},
        )
