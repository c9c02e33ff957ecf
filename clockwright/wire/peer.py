"""What both ends of a link to a worker or front do: joining, signs of life, clocks, and giving a silent peer up.

A peer asks the controller by gRPC for a connection (`join`). The call shows who it is, and its answer (`Welcome`) says
where the controller listens, and with which token the connection begins. Everything else travels as frames on that
connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
import msgspec

from clockwright.errors import ConfigError, ProtocolError
from clockwright.wire.clock_sync import ClockSync
from clockwright.wire.leadership import Fence, Term
from clockwright.wire.tls_faults import tls_fault

#: What both ends have to share: a peer of another version is rejected and told both versions.
PROTOCOL_VERSION: Final = 7

ATTACH: Final = "Attach"
WORKER_SERVICE: Final = "clockwright.v1.WorkerService"
FRONT_SERVICE: Final = "clockwright.v1.FrontService"

# Statuses by which a controller says that it will never take this peer.
_FOR_GOOD = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


class FrontRegister(msgspec.Struct, array_like=True):
    """A front asks for a connection. Further elements, of a later version, are ignored."""

    protocol_version: int
    #: For people.
    host: str = ""
    pid: int = 0
    #: It finds out who its clients are. Where the controller does, a front that does not is rejected.
    knows_callers: bool = False
    #: Outputs that it got over earlier connections, that lie in a worker's memory, and that it still uses: the id of
    #: the request, once for each output. Workers may overwrite all others.
    still_looks_at: tuple[int, ...] = ()
    #: A name that no other front has, the same at each attempt.
    instance: str = ""


class Welcome(msgspec.Struct, array_like=True, kw_only=True):
    """The controller's answer to a peer that may join."""

    #: How often each side sends a heartbeat, and after how much silence it gives the other up.
    heartbeat_interval_ms: int = 0
    silence_limit_ms: int = 0
    #: Where to connect: this file on the controller's own host, else this port of the host that the peer dialled.
    socket_path: str = ""
    socket_port: int = 0
    #: The first bytes of that connection; they are valid once.
    token: bytes = b""
    #: The controller's generation; a peer obeys none that is older than the newest of the same lineage. Empty and
    #: 0: nothing is kept from one controller to the next.
    lineage: str = ""
    generation: int = 0
    #: For a worker: ids of held models that it is to keep. It drops all others before it connects.
    keep: tuple[str, ...] = ()
    #: For a front: SLO of requests that name none, to servables that have none; and the largest request.
    default_slo_ns: int = 0
    message_bytes_max: int = 0


encode = msgspec.msgpack.Encoder().encode
_decode_welcome = msgspec.msgpack.Decoder(Welcome).decode


async def join(
    channel: Any,  # noqa: ANN401  grpc.aio's
    service: str,
    register: msgspec.Struct,
    fence: Fence,
    *,
    limit_s: float,
    shown: Sequence[tuple[str, str]],
) -> Welcome:
    """Ask a controller for a connection; it answers within `limit_s`. The fence knows the newest generation so far.

    Raises ConfigError if the controller rejects the peer, and would do so again; ProtocolError if it does not answer,
    or not like a controller, or another has followed it.
    """
    attach = channel.unary_unary(f"/{service}/{ATTACH}")
    try:
        answer = await attach(encode(register), timeout=limit_s, metadata=shown)
    except grpc.aio.AioRpcError as error:
        if error.code() in _FOR_GOOD:
            raise ConfigError(error.details() or error.code().name) from None
        text = f"{error.code().name}: {error.details()}"
        words = tls_fault(text)
        raise ProtocolError(f"{words} ({text})" if words else text) from None
    try:
        welcome = _decode_welcome(answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"answered {len(answer)} bytes that are no welcome: {error}") from None
    if not 0 < welcome.heartbeat_interval_ms < welcome.silence_limit_ms:
        raise ProtocolError(
            f"heartbeat interval {welcome.heartbeat_interval_ms} ms, expected more than 0 and "
            f"less than the silence limit, {welcome.silence_limit_ms} ms"
        )
    if not fence.admits(Term(welcome.lineage, welcome.generation)):
        raise ProtocolError(
            f"it leads in generation {welcome.generation}, and "
            f"another has followed it in {fence.newest.generation}"
        )
    return welcome


class Pulse:
    """The signs of life on one link, and what they tell of the peer's clock.

    Silence is counted in ticks of this process, not in time: after a pause of this process the peer's messages lie
    unread in its buffers, and the peer is not to blame.
    """

    def __init__(
        self, clock: Callable[[], int], *, interval_ms: int, silence_limit_ms: int
    ) -> None:
        """Begin with a peer that was just heard, and is given up after `silence_limit_ms` without a sign of life."""
        self.interval_s = interval_ms / 1000
        self.clock = ClockSync()
        #: Heartbeat intervals since the last sign of life.
        self.silent_ticks = 0
        self._now_ns = clock
        self._interval_ms = interval_ms
        self._silence_limit_ms = silence_limit_ms

    def stamp(self) -> tuple[int, int | None]:
        """The time and the smallest difference of clocks for a heartbeat that is sent now."""
        return self._now_ns(), self.clock.min_delta_ns

    def heard(
        self, sent_ns: int, min_delta_ns: int | None, *, received_ns: int | None = None
    ) -> None:
        """Take in a heartbeat: when it was sent, and the smallest difference, both on the peer's clock.

        It came now by default.
        """
        self.clock.heard(
            sent_ns=sent_ns,
            received_ns=self._now_ns() if received_ns is None else received_ns,
            peer_min_delta_ns=min_delta_ns,
        )

    def tick(self, stalled_ticks: int = 0, *, stalled: str = "") -> str:
        """Count an interval. Returns why the peer is given up; empty while it is not.

        Args:
            stalled_ticks: intervals since the peer last read anything, while data waits for it.
            stalled: words for that.
        """
        self.silent_ticks += 1
        ticks, fault = self.silent_ticks, "silent"
        if stalled_ticks > ticks:
            ticks, fault = stalled_ticks, stalled
        silence_ms = ticks * self._interval_ms
        return f"{fault} for {silence_ms} ms" if silence_ms > self._silence_limit_ms else ""
