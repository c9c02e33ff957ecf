"""A request for inference as the service sees it, whichever server or stream it came by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

#: Makes the error of an answer that is too late, from the present in ns.
Late = Callable[[int], Exception]


class Call(Protocol):
    """One request, which is to be answered once: by bytes, or by an error that becomes a status."""

    #: The latest moment that is surely before the first byte came of the request, on the server's clock.
    arrival_ns: int
    #: Is called when the client gives the request up before it is answered.
    when_gone: Callable[[], object] | None

    @property
    def timeout_ns(self) -> int | None:
        """Time from the arrival to the RPC deadline; None: there is none."""

    def answer(self, message: bytes, latest_ns: int, late: Late) -> None:
        """Answer, unless it is later than `latest_ns` as that is written."""

    def fail(self, error: Exception) -> None:
        """Answer with the status of an error."""

    def served(self, *, slow: bool) -> None:
        """Hear, before the answer, whether the request had used most of its SLO and was refused."""


class AwaitedCall:
    """A request whose answer somebody awaits: one of grpc.aio's, or one in a stream."""

    def __init__(self, arrival_ns: int, timeout_ns: int | None) -> None:
        self.arrival_ns = arrival_ns
        self.timeout_ns = timeout_ns
        self.when_gone: Callable[[], object] | None = None
        self._ended: asyncio.Future[tuple[bytes, int, Late] | Exception] | None = (
            asyncio.get_running_loop().create_future()
        )

    async def wait(self) -> tuple[bytes, int, Late] | Exception:
        """Wait for the arguments of `answer`, or of `fail`; who stops waiting gives the request up."""
        assert self._ended is not None
        try:
            return await self._ended
        except asyncio.CancelledError:
            if self.when_gone is not None:
                self.when_gone()
            raise
        finally:
            # An error holds the frames in which it was raised, and they this: it must not hold the error.
            self._ended = None

    def answer(self, message: bytes, latest_ns: int, late: Late) -> None:
        """Hand an answer on, to be judged as it is written."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result((message, latest_ns, late))

    def fail(self, error: Exception) -> None:
        """Hand an error on."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)

    def served(self, *, slow: bool) -> None:
        """Nobody throttles these."""
