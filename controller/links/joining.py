"""The controller's half of joining (`clockwright.wire.peer`): peers that ask for a connection, until they connect."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from clockwright.errors import ProtocolError
from clockwright.wire import peer
from clockwright.wire.frame_socket import SocketListener
from clockwright.wire.leadership import Term
from clockwright.wire.peer import Welcome

log = logging.getLogger(__name__)

_Register = TypeVar("_Register", bound=msgspec.Struct)

# A peer that asked for a connection connects at once.
DIAL_LIMIT_S = 10.0
# A worker names every model that it has ready, in some 300 bytes: this is enough for the catalogue's `MODELS_MAX`.
_REGISTER_BYTES_MAX = 32 << 20
# Peers that have asked and not connected; beyond that the first of them are forgotten.
_EXPECTED_MAX = 1024


@dataclass(frozen=True, slots=True)
class HeartbeatConfig:
    """How often each side sends a heartbeat, and after how much silence it gives the other up."""

    interval_ms: int = 200
    silence_limit_ms: int = 10_000


class Shown(Protocol):
    """The credentials of a call."""

    @property
    def over(self) -> bool:
        """They expired or changed."""


class Messages(Protocol):
    """The messages of a call (`controller.front.methods`)."""

    async def read(self) -> bytes | None:
        """The next message. Returns None at the end."""

    async def write(self, message: bytes) -> None:
        """Send a message."""


async def answer(
    stream: Messages, kind: type[_Register], welcome: Callable[[_Register], Welcome]
) -> None:
    """Answer a peer that asks for a connection, and says of itself what `kind` has.

    Raises ProtocolError if it may not join, NoRoomError if there are too many, LinkEndedError if none may any more.
    """
    data = await stream.read()
    if data is not None:
        await stream.write(peer.encode(welcome(_decode(kind, data))))


def _decode(kind: type[_Register], data: bytes) -> _Register:
    what = kind.__name__
    if len(data) > _REGISTER_BYTES_MAX:
        raise ProtocolError(f"{what} of {len(data)} bytes, expected {_REGISTER_BYTES_MAX} at most")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(data)} bytes that are no {what}: {error}") from None


def check_version(found: int, what: str) -> None:
    """Check the protocol version that a peer speaks. Raises ProtocolError if it is another one than ours."""
    if found != peer.PROTOCOL_VERSION:
        raise ProtocolError(
            f"the {what} speaks protocol version {found}, the controller {peer.PROTOCOL_VERSION}"
        )


@dataclass(eq=False)
class Expected:
    """Peers that have asked for a connection and not connected yet, by name: only the latest call of each counts."""

    #: What the peers are, for messages.
    what: str
    listener: SocketListener
    heartbeats: HeartbeatConfig
    term: Term

    def __post_init__(self) -> None:
        self._tokens: dict[str, bytes] = {}

    def expect(self, name: str, connected: Callable[[socket.socket], None]) -> Welcome:
        """Make the answer to a peer that alone has its name; `connected` is given the connection, and owns it."""
        self.forget(name)
        if len(self._tokens) >= _EXPECTED_MAX:
            self.forget(next(iter(self._tokens)))

        def take(sock: socket.socket) -> None:
            self._tokens.pop(name, None)
            connected(sock)

        token = self._tokens[name] = self.listener.expect(take)
        asyncio.get_running_loop().call_later(DIAL_LIMIT_S, self._expect_no_more, name, token)
        return Welcome(
            heartbeat_interval_ms=self.heartbeats.interval_ms,
            silence_limit_ms=self.heartbeats.silence_limit_ms,
            socket_path=self.listener.path,
            socket_port=self.listener.port,
            token=token,
            lineage=self.term.lineage,
            generation=self.term.generation,
        )

    def forget(self, name: str) -> None:
        """Do not expect a peer any more."""
        self.listener.forget(self._tokens.pop(name, b""))

    def close(self) -> None:
        """Expect no peer any more."""
        for name in list(self._tokens):
            self.forget(name)

    def _expect_no_more(self, name: str, token: bytes) -> None:
        if self._tokens.get(name) == token:
            log.warning("%s %s has not connected for %g s", self.what, name, DIAL_LIMIT_S)
            self.forget(name)
