"""REST's requests with several answers: each an event as it comes (server-sent events), or all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

from clockwright.errors import BadRequestError, RefusedError
from clockwright.wire.bulk import Buffer
from controller.access.caller import Caller
from controller.front.http.calls import Late
from controller.front.oip.generate_form import GenerateRequest, joined
from controller.front.oip.json_form import JSON_ELEMENTS_MAX, write_json
from controller.front.oip.statuses import Status, status_of

#: Events that the client of one request leaves unread; with more of them it is ended. All that gRPC's may leave on one
#: connection are as many (`http2_server`).
UNREAD_BYTES_MAX: Final = 8 << 20


class SeveralAnswers:
    """A request for inference as plain JSON: the call that its answers are given to."""

    timeout_ns: int | None = None
    takes_several = True

    def __init__(
        self,
        arrival_ns: int,
        caller: Caller,
        headers: Mapping[str, str],
        request: GenerateRequest,
        clock: Callable[[], int],
        crowded: Callable[[str, int, int], RefusedError],
        *,
        at_once: bool,
    ) -> None:
        """Begin without answers. The request has each answer while it is given; with `at_once` all are one response."""
        self.arrival_ns = arrival_ns
        self.caller = caller
        self.when_gone: Callable[[], object] | None = None
        self._headers = headers
        self._request = request
        self._clock = clock
        self._crowded = crowded
        self._at_once = at_once
        self._answers: list[dict[str, list[Any]]] = []
        self._num_elements = 0
        # What is to be sent.
        self._events: list[bytes] = []
        self._num_bytes = 0
        self._status: Status | None = None
        self._is_over = False
        self._news = asyncio.Event()

    def header(self, name: str) -> str:
        """Find one of the client's own headers."""
        return self._headers.get(name, "")

    # --- for the service ----------------------------------------------------------------------

    def give(self, _: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Take an answer that the request has, if it is in time and there is room for it."""
        if self._is_over:
            return
        try:
            self._take(latest_ns, late)
        except (BadRequestError, RefusedError) as error:
            self.fail(error)
            if self.when_gone is not None:
                self.when_gone()

    def answer(self, _: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Do the same with the last."""
        self.give(_, latest_ns, late)
        self._end()

    def fail(self, error: Exception) -> None:
        """End with an error: a status, or behind the first event an event."""
        if self._is_over:
            return
        self._status = status_of(error, method="ModelInfer")
        if self._answers:
            self._events.append(_event({"error": self._status.text}))
        self._end()

    def _take(self, latest_ns: int, late: Late) -> None:
        now_ns = self._clock()
        if now_ns > latest_ns:
            raise late(now_ns)
        answer = self._request.plain_answer()
        if self._at_once:
            self._num_elements += sum(map(len, answer.values()))
            if self._num_elements > JSON_ELEMENTS_MAX:
                raise BadRequestError(
                    f"found {self._num_elements} elements in all answers, expected {JSON_ELEMENTS_MAX} at most at once;"
                    " ask with generate_stream"
                )
            self._answers.append(answer)
            return
        if self._num_bytes > UNREAD_BYTES_MAX:
            what = "bytes of answers that this client does not read"
            raise self._crowded(what, self._num_bytes, UNREAD_BYTES_MAX)
        self._answers = [answer]
        event = _event(self._request.head() | joined(self._answers))
        self._events.append(event)
        self._num_bytes += len(event)
        self._news.set()

    def _end(self) -> None:
        self._is_over = True
        self._news.set()

    # --- for the connection -------------------------------------------------------------------

    async def begun(self) -> Status | None:
        """Wait for the first event, or for all answers; returns the status if it is missing, or if not all came.

        Who stops waiting gives the request up.
        """
        try:
            await self._news.wait()
        except asyncio.CancelledError:
            self.leave()
            raise
        return self._status if self._at_once or not self._answers else None

    def whole(self) -> bytes:
        """Write all answers as one."""
        return write_json(self._request.head() | joined(self._answers))

    async def events(self) -> AsyncIterator[bytes]:
        """Give what is to be sent, as it comes; who stops before the end gives the request up."""
        try:
            while not self._is_over or self._events:
                await self._news.wait()
                self._news.clear()
                events, self._events, self._num_bytes = self._events, [], 0
                if events:
                    yield b"".join(events)
        finally:
            self.leave()

    def leave(self) -> None:
        """The client does not wait any more."""
        self._is_over = True
        self._news.set()
        if self.when_gone is not None:
            self.when_gone()


def _event(told: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % write_json(told)
