"""A request for inference as the service sees it, by gRPC or REST."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from clockwright.bulk import Buffer
from controller.access.caller import Caller

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
