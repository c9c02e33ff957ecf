"""A request for inference as the service sees it, whichever server or stream it came by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from clockwright.bulk import Buffer
from controller.access.caller import Caller
from controller.front.statuses import Status, status_of

#: Makes the error of an answer that is too late, from the present in ns.
Late = Callable[[int], Exception]


#: A client's own headers; values of names in `-bin` are bytes.
Headers = Sequence[tuple[str, str | bytes]]


def find_header(headers: Headers, name: str) -> str:
    """Find the first header of a name; empty: there is none."""
    for key, value in headers:
        if key == name and isinstance(value, str):
            return value
    return ""


class Call(Protocol):
    """One request, which is to be answered once: by a message, or by an error that becomes a status."""

    #: The latest moment that is surely before the first byte came of the request, on the server's clock.
    arrival_ns: int
    #: Is called when the client gives the request up before it is answered.
    when_gone: Callable[[], object] | None
    #: Who asks.
    caller: Caller

    @property
    def timeout_ns(self) -> int | None:
        """Time from the arrival to the RPC deadline; None: there is none."""

    def header(self, name: str) -> str:
        """One of the client's own headers; empty: it sent none of that name."""

    def answer(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Answer with a message in parts, unless it is later than `latest_ns` as that is written."""

    def fail(self, error: Exception) -> None:
        """Answer with the status of an error."""

    def served(self, *, slow: bool) -> None:
        """Hear, before the answer, whether the request had used most of its SLO and was refused."""

    def missed(self) -> None:
        """Hear, before the refusal, that the request was past its SLO when somebody looked at it."""


class AwaitedCall:
    """A request whose answer somebody awaits: one of grpc.aio's, or one in a stream.

    Of an error its status is kept. The error holds the frames in which it was raised, and they would hold
    whoever keeps it, with the request's tensors.
    """

    def __init__(
        self,
        method: str,
        arrival_ns: int,
        caller: Caller,
        timeout_ns: int | None = None,
        headers: Headers = (),
    ) -> None:
        """Begin with a request that is not answered.

        Args:
            method: what was called, for people.
            arrival_ns: as `Call`.
            caller: as `Call`.
            timeout_ns: as `Call`.
            headers: the client's own.
        """
        self.arrival_ns = arrival_ns
        self.caller = caller
        self.timeout_ns = timeout_ns
        self.when_gone: Callable[[], object] | None = None
        self._method = method
        self._headers = headers
        self._ended = asyncio.get_running_loop().create_future()
        self._answer: tuple[Sequence[Buffer], int, Late] | None = None
        self._status: Status | None = None

    async def wait(self) -> None:
        """Wait until the request is answered; who stops waiting gives it up."""
        try:
            await self._ended
        except asyncio.CancelledError:
            if self.when_gone is not None:
                self.when_gone()
            raise

    def header(self, name: str) -> str:
        """Find one of the client's own headers."""
        return find_header(self._headers, name)

    def judge(self, now_ns: int) -> Sequence[Buffer] | Status:
        """Say what is to be written now: the answer, or a status in its place."""
        if self._answer is not None:
            message, latest_ns, late = self._answer
            if now_ns <= latest_ns:
                return message
            self._status = status_of(late(now_ns), method=self._method)
        assert self._status is not None
        return self._status

    def answer(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Hand an answer on, to be judged as it is written."""
        self._answer = (message, latest_ns, late)
        self._end()

    def fail(self, error: Exception) -> None:
        """Hand an error on."""
        self._status = status_of(error, method=self._method)
        self._end()

    def served(self, *, slow: bool) -> None:
        """Nobody throttles these."""

    def missed(self) -> None:
        """Nobody throttles these."""

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
