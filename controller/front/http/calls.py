"""A request for inference as the service sees it, by gRPC or REST."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any, Protocol

from clockwright.errors import NotAllowedError
from clockwright.units import SLO_NS_MAX
from clockwright.wire.bulk import Buffer
from controller.access.caller import Caller

#: Makes the error of an answer that is too late, from the present in ns.
Late = Callable[[int], Exception]


#: A client's own headers; values of names in `-bin` are bytes.
Headers = Sequence[tuple[str, str | bytes]]


def find_header(headers: Headers, name: str) -> str:
    """Find the first header of a name. Returns an empty value if the name is missing."""
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
    #: Whether it can be answered several times.
    takes_several: bool

    @property
    def timeout_ns(self) -> int | None:
        """Time from the arrival to the RPC deadline. Returns None if the call has no deadline."""

    def header(self, name: str) -> str:
        """One of the client's own headers; empty: it sent none of that name."""

    def answer(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Answer with a message in parts, unless it is later than `latest_ns` as that is written."""

    def give(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Give an answer, as `answer` does, of several of which it is not the last.

        Who does not read them, or gets one too late, gets an error in its place, and has given the request up.
        """

    def fail(self, error: Exception) -> None:
        """Answer with the status of an error."""


@dataclass(slots=True, frozen=True)
class StreamForm:
    """How a stream says what a call of its own would: its requests are answered alike, and its messages differ."""

    #: Makes a message of an answer.
    answer: Callable[[Sequence[Buffer]], Sequence[Buffer]]
    #: Makes a message of an error's text, the name of its status, and the request.
    error: Callable[[str, str, Buffer], Buffer]


def _has_none(_data: Buffer, timeout_ns: int | None, _begin: int, _end: int) -> tuple[int, int]:
    return SLO_NS_MAX if timeout_ns is None else timeout_ns, 0


@dataclass(slots=True, frozen=True)
class Directly:
    """Answers the requests of a method that is called often, without a task."""

    #: Sees to it that `Call.answer` or `Call.fail` is called for each message. It does not raise.
    answer: Callable[[Call, Any], None]
    #: What its answers look like where the method takes a stream of requests; None: it takes one.
    form: StreamForm | None = None
    #: Finds the SLO of a request without a look at its tensors: from bytes, the call's `timeout_ns`, and where in the
    #: bytes the message begins and ends. Gives how many bytes of the message said it, too.
    slo_ns: Callable[[Buffer, int | None, int, int], tuple[int, int]] = _has_none
    #: Counts a request that could not be read, so that `answer` never sees it.
    malformed: Callable[[], None] = lambda: None
    #: Finds requests that are in vain; None: none are looked for.
    early_refusals: Any = None


def is_local(peer: str) -> bool:
    """Whether a client, named as gRPC does it, is on this machine."""
    kind, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    address = ip_address(host) if kind in ("ipv4", "ipv6") else None
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    return kind == "unix" or (address is not None and address.is_loopback)


def check_local(peer: str, method: str) -> None:
    """Look whether a client, named as gRPC does it, is on this machine. Raises NotAllowedError if it is not."""
    if not is_local(peer):
        raise NotAllowedError(f"{method} is for clients on this machine, found one at {peer}")
