"""A gRPC server of our own on plain sockets: it knows when a request came, and refuses cheaply.

Methods are those of `controller.front.methods`, each with its handler. Those that are called often are answered without
a task (`Directly`).

A call's clock starts no later than its first byte reached the kernel (`arrival_clock`, and the kernel's own stamp
where one segment brought it), so that nothing this process did meanwhile, nor anything that was done to
it, is hidden from the request's SLO. Whether an answer is in time is judged as it is written.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grpc
from typing_extensions import override

from clockwright.errors import ConfigError, DeniedError, Refusal, RefusedError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, TIME_NS_MAX
from clockwright.wire.bulk import Buffer, check_fields
from controller.access.authoriser import Authoriser, credentials_of
from controller.access.caller import Caller
from controller.front.admission.entrance import YOUNG_NS, Entrance, thread_used_ns
from controller.front.admission.limits import AdmissionLimits
from controller.front.http.arrival_clock import ArrivalClock
from controller.front.http.calls import Directly, Late, check_local, find_header
from controller.front.http.http2 import (
    CallHeaders,
    CallReceived,
    ErrorCode,
    Event,
    Gate,
    HalfClosed,
    Http2Connection,
    Http2Error,
    LastMessage,
    MessageReceived,
    RequestBegun,
    StreamReset,
    status_block,
)
from controller.front.http.listener import Listener
from controller.front.http.peer_socket import READ_BYTES_MORE, UNSENT_BYTES_MAX, PeerSocket
from controller.front.methods import Method, OnStream
from controller.front.oip import unsupported
from controller.front.oip.refusals import NoAnswerError
from controller.front.oip.statuses import Status, ToldStatusError, status_of
from controller.links.slabs import Slabs

log = logging.getLogger(__name__)

#: A client that sends requests and reads no answers has so many served at most; then its stream waits.
STREAM_REQUESTS_MAX = 1024
#: While requests wait, so many reads follow each other of a connection that sent more than one takes: what cannot be
#: served is refused in time.
_READS_PER_TURN = 8
#: While the loop has no time to spare, a connection is read again after so long for each that is open at most.
_PAUSE_NS_EACH = 200 * NS_PER_US
#: To look whether a request is in vain costs as much as to let two in. So while the loop has no time to spare, all are looked
#: at only where that was of use lately: each that was in vain is worth so many looks, up to so many. Else one in so many is.
_WORTH_EACH, _WORTH_MAX, _LOOK_EVERY = 8, 16, 16
#: Answers that are written after one look at the clock: some 50 us' worth.
_ANSWERS_PER_LOOK = 32
#: To send them is thought to take so long at most: a standstill does not come again at once.
_SENDING_NS_MOST = 2 * NS_PER_MS
#: Answers beyond this many bytes that one client leaves unread are replaced by refusals; and so are those of a request
#: with several, which would come for as long as nothing is read.
_UNREAD_ANSWER_BYTES_MAX = 256 << 20
_UNREAD_SEVERAL_BYTES_MAX = 8 << 20
# Before this time is an answer due in whose place there is an error already.
_PAST_NS = -TIME_NS_MAX

#: Handlers that are cancelled as the server stops get this long.
_END_LIMIT_S = 1.0

_SWEEP_S = 1.0
#: Sweeps of silence after which a peer is pinged, and after which it is given up.
_PING_AFTER = 20
_SILENCE_MAX = 30
#: Sweeps within which a call that takes one message has to have brought it, however large.
_COMING_MAX = 120
#: Sweeps in which a request may be on its way before its connection counts as idle.
_COMING_SOON = 10
#: Sweeps without a call after which a connection makes room when there are too many.
_IDLE_MIN = 2
#: Calls that bring nothing and make room together: to find whose they are takes a look at all connections.
_QUIET_CALLS_GIVEN_UP = 64
#: Connections that stay open for so many sweeps, so that their clients can read why they are closed.
_LEAVING_MAX = 64
_LEAVING_SWEEPS = 3
#: Sweeps in which a peer takes nothing of what waits for it.
_STALL_MAX = 30


class ServedMethod:
    """A method, and what this server does with its calls."""

    __slots__ = (
        "bounded",
        "directly",
        "early_refusals",
        "form",
        "handler",
        "kind",
        "method",
        "name",
        "single",
        "slo_ns",
        "spared",
    )

    def __init__(self, method: Method, handler: Any) -> None:  # noqa: ANN401
        """`handler`: a coroutine function, an `OnStream`, or `Directly`."""
        self.method = method
        self.name = method.name
        self.handler = handler
        direct = handler if isinstance(handler, Directly) else None
        # Both are there of the methods whose calls ask for them.
        self.directly: Any = None if direct is None else direct.answer
        self.form = None if direct is None else direct.form
        self.slo_ns: Any = None if direct is None else direct.slo_ns
        #: Finds requests that are in vain; None: none are looked for.
        self.early_refusals: Any = None if direct is None else direct.early_refusals
        self.bounded = method.bounded
        #: Whether it takes one request, which is answered without a task.
        self.single = direct is not None and direct.form is None
        #: Whether its messages come in even if they find no room: workers register and report on streams.
        self.spared = method.takes_stream and method.gives_stream and not method.bounded
        if direct is not None:
            self.kind = _Call if direct.form is None else _StreamedCall
        else:
            self.kind = _StreamCall if isinstance(handler, OnStream) else _UnaryCall


class _Call:
    """One call. Most change few of these, so that they begin as the class's."""

    #: The client sends no more.
    half_closed = False
    #: The client has sent a request, and may send others.
    has_asked = False
    #: The gate of its read let it in.
    judged = False
    #: Nothing can be answered any more.
    over = False
    when_gone: Callable[[], object] | None = None
    takes_several = False
    unread_bytes_max = _UNREAD_ANSWER_BYTES_MAX
    #: The answer that is to be written at the end of this turn.
    ready: tuple[Sequence[Buffer], int, Late] | None = None
    _message: Buffer | None = None
    _sweeps = 0

    def __init__(
        self,
        peer: _Peer,
        stream_id: int,
        request: CallHeaders,
        method: ServedMethod,
        arrival_ns: int,
    ) -> None:
        assert request.caller is not None
        self.arrival_ns = arrival_ns
        self.caller = request.caller
        self.method = method
        self.stream_id = stream_id
        self._peer = peer
        self.request = request

    @property
    def timeout_ns(self) -> int | None:
        """Time from the arrival to the RPC deadline. Returns None if the call has no deadline."""
        return self.request.timeout_ns

    def header(self, name: str) -> str:
        """Find one of the client's own headers."""
        return find_header(self.request.metadata, name)

    def answer(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """End the call with an answer, which is written and judged with the others of this turn."""
        if not self.over:
            self.ready = (message, latest_ns, late)
            self._peer.answer_soon(self)

    def give(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Do nothing: it has one answer."""

    def fail(self, error: Exception) -> None:
        """End the call with the status of an error."""
        if not self.over:
            block = self._peer.server.block_of(error, self.method.name)
            self._peer.connection.send_end(self.stream_id, block)
            self.finish()
            self._peer.flush_soon()

    # --- for the entrance ---------------------------------------------------------------------

    def wait(self, message: Buffer) -> None:
        """Keep the message until the call's turn comes; it counts as unread."""
        self._message = message
        self._peer.hold(self.stream_id, len(message))

    def begin_waiting(self) -> None:
        """Serve the call, which waited."""
        message, self._message = self._message, None
        assert message is not None
        self._peer.message_read(self.stream_id, len(message))
        self.method.directly(self, message)

    def refuse(self) -> None:
        """End a call for which the loop has no time."""
        self._message = None
        server = self._peer.server
        server.door.count(Refusal.OVERLOADED, 1)
        self._peer.refuse(self, server.busy_block(self.method.name, server.clock()))

    def refuse_late(self) -> None:
        """End a call that had waited for longer than its SLO when it was read."""
        server = self._peer.server
        server.door.count(Refusal.LATE, 1)
        self._peer.refuse(self, server.late_block)

    # --- for the connection -------------------------------------------------------------------

    def begin(self) -> None:
        """Start with what there is to do before a message is here."""

    def message_received(self, message: Buffer, _arrival_ns: int) -> None:
        """A message of the client is complete."""
        if self._message is not None:
            self.end_with(grpc.StatusCode.INTERNAL, "found 2 messages, expected one")
            return
        self._message = message

    def last_received(self, message: Buffer, arrival_ns: int) -> None:
        """A message of the client is complete, and it sends no more."""
        if self._message is None:
            self.received(message)
        else:
            self.message_received(message, arrival_ns)

    def closed_by_client(self) -> None:
        """The client sends no more: answer its one message."""
        self.half_closed = True
        message, self._message = self._message, None
        if message is None:
            self.end_with(grpc.StatusCode.INTERNAL, "found 0 messages, expected one")
            return
        self._peer.message_read(self.stream_id, len(message))
        self.received(message)

    def received(self, message: Buffer) -> None:
        """The one message of the call is here."""
        self.half_closed = True
        self._peer.server.let_in(self._peer, self, self.method, message)

    def gone(self) -> None:
        """The client gave the call up, or cannot be reached any more."""
        if not self.over:
            self.finish()
            self._stop()

    def give_up(self, error: Exception) -> None:
        """The server cannot go on with the call, whether it is being served or still comes in."""
        self.fail(error)
        self._stop()

    def end_with(self, code: grpc.StatusCode, text: str, *, stop: bool = True) -> None:
        """End the call with a status that is no refusal; `stop`: tell its handler to stop."""
        if not self.over:
            number: int = code.value[0]
            self._peer.connection.send_end(self.stream_id, status_block(number, text))
            self.finish()
            self._peer.flush_soon()
        if stop:
            self._stop()

    def sweep(self) -> bool:
        """Say, once a second, whether the request takes too long to come."""
        self._sweeps += 1
        return self._sweeps > _COMING_MAX and not self.half_closed

    @property
    def is_at_work(self) -> bool:
        """Whether there is more to it than headers and the slow beginning of a request."""
        return self.half_closed or self.has_asked or self._sweeps < _COMING_SOON

    def deliver(self, message: Sequence[Buffer]) -> None:
        """Write the answer, which is in time."""
        self._peer.connection.answer(self.stream_id, message)
        self.finish()

    def finish(self) -> None:
        """Nothing is answered any more."""
        self.over = True
        self._peer.call_over(self.stream_id)

    def _stop(self) -> None:
        if self.when_gone is not None:
            self.when_gone()


class _StreamedCall(_Call):
    """A call with any number of requests, each of which is answered when its answer is ready, without a task.

    The RPC deadline is the call's and none of theirs.
    """

    def __init__(
        self,
        peer: _Peer,
        stream_id: int,
        request: CallHeaders,
        method: ServedMethod,
        arrival_ns: int,
    ) -> None:
        super().__init__(peer, stream_id, request, method, arrival_ns)
        # Unread messages with their arrivals, and the requests that are being served.
        self._waiting: deque[tuple[Buffer, int]] = deque()
        self._open: set[_StreamedRequest] = set()
        self._going_on = False

    @override
    def message_received(self, message: Buffer, arrival_ns: int) -> None:
        self._sweeps = 0
        self.has_asked = True
        self._peer.quiet.pop(self.stream_id, None)
        self._waiting.append((message, arrival_ns))
        self._go_on()

    @override
    def last_received(self, message: Buffer, arrival_ns: int) -> None:
        self._peer.connection.hold(self.stream_id, len(message))
        self.half_closed = True
        self.message_received(message, arrival_ns)

    @override
    def closed_by_client(self) -> None:
        self.half_closed = True
        self._go_on()

    @override
    def sweep(self) -> bool:
        return self._peer.connection.is_gathering(self.stream_id) and super().sweep()

    @override
    def finish(self) -> None:
        super().finish()
        self._waiting.clear()

    @override
    def _stop(self) -> None:
        requests, self._open = self._open, set()
        for request in requests:
            request.gone()

    @property
    def server(self) -> Http2Server:
        """The server of the stream."""
        return self._peer.server

    def send(self, message: Sequence[Buffer]) -> None:
        """Send one of the stream's messages."""
        self._peer.connection.send_message(self.stream_id, message)

    def answer_soon(self, request: _StreamedRequest | _OneOfSeveral) -> None:
        """Write the answer that a request has ready, with the others of this turn."""
        self._peer.answer_soon(request)

    def flush_soon(self) -> None:
        """Send what was written at the end of this turn."""
        self._peer.flush_soon()

    def request_over(self, request: _StreamedRequest) -> None:
        """A request is answered: others may begin."""
        self._open.discard(request)
        self._go_on()
        if not self._open and not self.half_closed and not self.over:
            self._peer.quiet[self.stream_id] = self

    def _go_on(self) -> None:
        """Begin with requests that wait, as far as the client takes answers; end behind the last answer."""
        if self._going_on or self.over:
            return
        # A request that fails at once comes back here before the next one begins.
        self._going_on = True
        peer = self._peer
        while self._waiting and len(self._open) < STREAM_REQUESTS_MAX and not self.over:
            if peer.is_behind(self.stream_id):
                peer.when_room(self.stream_id, self._go_on)
                break
            message, arrival_ns = self._waiting.popleft()
            peer.message_read(self.stream_id, len(message))
            request = _StreamedRequest(self, message, arrival_ns)
            self._open.add(request)
            peer.server.let_in(peer, request, self.method, message)
        self._going_on = False
        if self.half_closed and not self._waiting and not self._open and not self.over:
            peer.connection.send_end(self.stream_id, status_block(0))
            self.finish()
            peer.flush_soon()


class _StreamedRequest:
    """A request in a stream."""

    __slots__ = (
        "_call", "_message", "_num_unwritten", "arrival_ns", "caller", "over", "ready", "when_gone"
    )  # fmt: skip
    timeout_ns = None
    judged = False
    takes_several = True
    unread_bytes_max = _UNREAD_ANSWER_BYTES_MAX

    def __init__(self, call: _StreamedCall, message: Buffer, arrival_ns: int) -> None:
        self.arrival_ns = arrival_ns
        self.caller = call.caller
        self.when_gone: Callable[[], object] | None = None
        #: Nothing can be answered any more.
        self.over = False
        #: The answer that is to be written at the end of this turn.
        self.ready: tuple[Sequence[Buffer], int, Late] | None = None
        self._call = call
        self._message = message
        # Answers of several that are to be written at the end of this turn.
        self._num_unwritten = 0

    def header(self, name: str) -> str:
        """Find one of the headers of its stream."""
        return self._call.header(name)

    def answer(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Answer, which is written and judged with the others of this turn."""
        if not self.over:
            self.ready = (message, latest_ns, late)
            self._call.answer_soon(self)

    def give(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Give one of several answers, likewise."""
        if not self.over:
            self._num_unwritten += 1
            self._call.answer_soon(_OneOfSeveral(self, (message, latest_ns, late)))

    def fail(self, error: Exception) -> None:
        """Answer with the text of an error, behind what is given already; the stream goes on."""
        if self._num_unwritten and not self.over:
            self._call.answer_soon(_OneOfSeveral(self, ((), _PAST_NS, lambda _: error)))
        else:
            self.end_with(error)

    def end_with(self, error: Exception) -> None:
        """Answer with the text of an error now."""
        if not self.over:
            method = self._call.method
            code, text, _ = status_of(error, method=method.name)
            assert method.form is not None
            self._send([method.form.error(text, code.name, self._message)])

    def wait(self, _: Buffer) -> None:
        """Keep the message until the request's turn comes, as it is kept anyway."""

    def begin_waiting(self) -> None:
        """Serve the request, which waited."""
        directly = self._call.method.directly
        assert directly is not None
        directly(self, self._message)

    def refuse(self) -> None:
        """Answer a request for which the loop has no time."""
        self.fail(self._call.server.busy())

    def refuse_late(self) -> None:
        """Answer a request that had waited for longer than its SLO when it was read."""
        server = self._call.server
        server.door.count(Refusal.LATE, 1)
        self.fail(server.late)

    def deliver(self, message: Sequence[Buffer], *, is_last: bool = True) -> None:
        """Write the answer, which is in time."""
        form = self._call.method.form
        assert form is not None
        if not is_last:
            self._num_unwritten -= 1
        self._send(form.answer(message), is_last=is_last)

    def gone(self) -> None:
        """The client gave the stream up, or cannot be reached any more."""
        self.over = True
        if self.when_gone is not None:
            self.when_gone()

    def _send(self, message: Sequence[Buffer], *, is_last: bool = True) -> None:
        self.over = is_last
        self._call.send(message)
        if is_last:
            self._call.request_over(self)
        self._call.flush_soon()


class _OneOfSeveral:
    """An answer of a request that has several, but for the last."""

    __slots__ = ("_request", "ready")
    unread_bytes_max = _UNREAD_SEVERAL_BYTES_MAX

    def __init__(
        self, request: _StreamedRequest, ready: tuple[Sequence[Buffer], int, Late]
    ) -> None:
        self._request = request
        self.ready = ready

    @property
    def over(self) -> bool:
        """Whether nothing can be answered any more."""
        return self._request.over

    def deliver(self, message: Sequence[Buffer]) -> None:
        """Write the answer, which is in time."""
        self._request.deliver(message, is_last=False)

    def fail(self, error: Exception) -> None:
        """End the request with an error in place of this answer; nothing more is asked for it."""
        self._request.end_with(error)
        self._request.gone()


class _UnaryCall(_Call):
    """A call with one request, which a handler answers in a task."""

    task: asyncio.Task[None] | None = None

    @override
    def received(self, message: Buffer) -> None:
        self.half_closed = True
        # What comes in parts is a view, which protobuf cannot read.
        self.task = self._peer.server.begin_task(self._run(bytes(message)))

    @override
    def _stop(self) -> None:
        super()._stop()
        if self.task is not None:
            self.task.cancel()

    async def _run(self, data: bytes) -> None:
        try:
            message = await self._ask(data)
        except asyncio.CancelledError:
            if not self.over:
                raise
        except Exception as error:
            self.fail(error)
        else:
            if not self.over:
                self.deliver((message,))
                self._peer.flush_soon()

    async def _ask(self, data: bytes) -> bytes:
        method = self.method.method
        if method.local_only:
            check_local(self._peer.name, method.name)
        check_fields(data, fields_max=method.fields_max, bytes_max=method.bytes_max)
        answer = await self.method.handler(method.request.FromString(data), self.caller)
        return answer.SerializeToString()  # type: ignore[no-any-return]


class _StreamCall(_Call):
    """A call whose messages a handler reads and writes in a task: the `CallStream` that it is given."""

    task: asyncio.Task[None] | None = None

    def __init__(
        self,
        peer: _Peer,
        stream_id: int,
        request: CallHeaders,
        method: ServedMethod,
        arrival_ns: int,
    ) -> None:
        super().__init__(peer, stream_id, request, method, arrival_ns)
        # Unread messages with their arrivals.
        self._messages: deque[tuple[Buffer, int]] = deque()
        self._reader: asyncio.Future[None] | None = None

    # --- for the handler ----------------------------------------------------------------------

    async def read(self) -> bytes | None:
        """Do what `CallStream` says."""
        while not self._messages:
            if self.half_closed or self.over:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message, self.arrival_ns = self._messages.popleft()
        self._peer.message_read(self.stream_id, len(message))
        return bytes(message)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self.read()) is not None:
            yield message

    async def write(self, message: bytes) -> None:
        """Do what `CallStream` says."""
        if self.over:
            raise asyncio.InvalidStateError("the call is over")
        peer = self._peer
        peer.connection.send_message(self.stream_id, (message,))
        peer.flush()
        await peer.room(self.stream_id)

    def time_left_s(self) -> float | None:
        """Do what `CallStream` says. It counts from the arrival of the message that was read last."""
        if self.request.timeout_ns is None:
            return None
        left_ns = self.request.timeout_ns - (self._peer.server.clock() - self.arrival_ns)
        return max(left_ns, 0) / NS_PER_S

    # --- for the connection -------------------------------------------------------------------

    @override
    def begin(self) -> None:
        if self.method.method.takes_stream:
            self.task = self._peer.server.begin_task(self._run())

    @override
    def message_received(self, message: Buffer, arrival_ns: int) -> None:
        if self.task is None:
            super().message_received(message, arrival_ns)
        else:
            self._sweeps = 0
            self.has_asked = True
            self._messages.append((message, arrival_ns))
            _wake(self._reader)

    @override
    def last_received(self, message: Buffer, arrival_ns: int) -> None:
        if self.task is None:
            super().last_received(message, arrival_ns)
        else:
            self._peer.connection.hold(self.stream_id, len(message))
            self.message_received(message, arrival_ns)
            self.closed_by_client()

    @override
    def closed_by_client(self) -> None:
        if self.task is None:
            super().closed_by_client()
        else:
            self.half_closed = True
            _wake(self._reader)

    @override
    def received(self, message: Buffer) -> None:
        self.half_closed = True
        self._peer.connection.hold(self.stream_id, len(message))
        self._messages.append((message, self.arrival_ns))
        self.task = self._peer.server.begin_task(self._run())

    @override
    def sweep(self) -> bool:
        coming = self.task is None or self._peer.connection.is_gathering(self.stream_id)
        return coming and super().sweep()

    @override
    def finish(self) -> None:
        super().finish()
        _wake(self._reader)

    @override
    def _stop(self) -> None:
        super()._stop()
        if self.task is not None:
            self.task.cancel()

    async def _run(self) -> None:
        try:
            await self.method.handler.handle(self, self.caller)
        except asyncio.CancelledError:
            if not self.over:
                raise
        except Exception as error:
            self.fail(error)
        else:
            self.end_with(grpc.StatusCode.OK, "", stop=False)


class _Peer:
    """One connection."""

    def __init__(
        self,
        server: Http2Server,
        sock: socket.socket,
        address: tuple[Any, ...],
        *,
        floor_ns: int,
        crowded: bool,
    ) -> None:
        self.server = server
        self.name = (
            f"ipv6:[{address[0]}]:{address[1]}"
            if len(address) > 2
            else (f"ipv4:{address[0]}:{address[1]}")
        )
        self.connection = Http2Connection(
            max_message_bytes=server.max_message_bytes, allocate=server.slabs.room
        )
        #: There are too many connections: this one's calls are refused.
        self.crowded = crowded
        self.closed = False
        #: Sweeps since it had a call.
        self.idle_sweeps = 0
        self._socket = PeerSocket(
            sock,
            self.name,
            server.tls,
            server.turns,
            server.buffer,
            floor_ns=floor_ns,
            readable=self._readable,
            drained=self._drained,
            lost=self.lost,
        )
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, _Call] = {}
        #: Calls that the limits on admission count and that have sent no request: the oldest first.
        self.quiet: dict[int, _Call] = {}
        # Calls whose answers are ready.
        self._answers: list[_Call | _StreamedRequest | _OneOfSeveral] = []
        self._held_bytes = 0
        # Until then it is left unread while the loop has no time to spare.
        self._paused_until_ns = 0
        # What goes on when the client has taken a stream's messages.
        self._writers: dict[int, Callable[[], object]] = {}
        self._flushing = False
        self._silent_sweeps = 0
        self._stalled_sweeps = 0
        # When the frame began to come that was not complete at the last sweep, and sweeps since.
        self._partial_since_ns: int | None = None
        self._partial_sweeps = 0
        self._unread_before = 0
        self.flush()

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of answers that the client does not take."""
        return self._socket.unsent_bytes + self.connection.queued_bytes

    # --- in -----------------------------------------------------------------------------------

    def _readable(self) -> None:
        server = self.server
        server.turns.used()
        now_ns, entrance = server.clock(), server.entrance
        if entrance.is_pressed:
            if now_ns < self._paused_until_ns:
                self._socket.put_off()
                return  # More comes in together, at less cost for each.
            self._paused_until_ns = now_ns + entrance.pause_ns(self, server.longest_pause_ns)
        reads = 0
        while self._read() and reads < _READS_PER_TURN:
            reads += 1

    def _read(self) -> bool:
        """Take in what is there. Returns whether there is more, and no time for it."""
        server, connection = self.server, self.connection
        received = self._socket.receive(None if self._socket.is_sealed else connection.direct())
        if received is None:
            return False
        view, num_direct, arrival_ns = received
        self._silent_sweeps = 0
        now_ns = server.clock()
        gate, has_time = None, server.entrance.has_time(now_ns, arrival_ns)
        if not has_time or now_ns < server.early_refusals.until_ns:
            gate = server.gate.begin(self, arrival_ns, now_ns, has_time=has_time)
        # What this turn leads to is written at its end, all together.
        self._flushing = True
        try:
            for event in connection.receive(view, arrival_ns, num_direct=num_direct, gate=gate):
                self._handle(event)
        except Http2Error as error:
            log.info("connection of %s: %s", self.name, error)
            self.hang_up(error.code, str(error))
            return False
        except Exception:
            # Else calls that were half read would wait for ever.
            log.exception("connection of %s", self.name)
            self.hang_up(ErrorCode.INTERNAL_ERROR, "internal error")
            return False
        finally:
            self._flushing = False
            if gate is not None:
                server.gate.end()
        self._weigh()
        self.flush()
        if self._writers:
            self._wake_writers()
        return not has_time and not self.closed and self._socket.has_more

    def _handle(self, event: Event) -> None:
        stream_id = event.stream_id
        if isinstance(event, CallReceived):
            call = self._begin(stream_id, event.request, event.arrival_ns)
            if call is not None:
                call.judged = event.judged
                call.last_received(event.message, event.arrival_ns)
            return
        if isinstance(event, RequestBegun):
            call = self._begin(stream_id, event.request, event.arrival_ns)
            if call is not None and call.method.bounded:
                self.quiet[stream_id] = call
            return
        call = self._calls.get(stream_id)
        if call is None:
            return
        if isinstance(event, LastMessage):
            self.quiet.pop(stream_id, None)
            call.last_received(event.message, event.arrival_ns)
        elif isinstance(event, MessageReceived):
            if call.method.bounded:
                self.server.turns.asked()
            call.message_received(event.message, event.arrival_ns)
        elif isinstance(event, HalfClosed):
            self.quiet.pop(stream_id, None)
            call.closed_by_client()
        elif isinstance(event, StreamReset):
            call.gone()
        else:
            call.end_with(_STATUS_CODES[event.status], event.text)

    def _begin(self, stream_id: int, request: CallHeaders, arrival_ns: int) -> _Call | None:
        server = self.server
        method = server.methods.get(request.path)
        if method is None:
            text = f"Method not found: {request.path[:200]}"
            if (words := unsupported.METHODS.get(request.path)) is not None:
                text += f"; {words}"
            block = status_block(grpc.StatusCode.UNIMPLEMENTED.value[0], text)
            self.connection.send_end(stream_id, block)
            return None
        caller = request.caller
        if (caller is None or caller.over) and not self._admit(stream_id, request, method):
            return None
        if (
            method.bounded
            and (self.crowded or server.num_calls >= server.door.max_requests)
            and (fault := server.find_fault(self.crowded)) is not None
        ):
            self.connection.send_end(stream_id, _block_of(fault, method.name))
            return None
        self.idle_sweeps = 0
        if method.bounded:
            server.turns.asked()
        if request.encoding != "identity":
            self._socket.read_less()
        call = self._calls[stream_id] = method.kind(self, stream_id, request, method, arrival_ns)
        server.num_calls += 1
        if method.directly is None:
            call.begin()
        return call

    def _admit(self, stream_id: int, request: CallHeaders, method: ServedMethod) -> bool:
        """Find out who calls; end the call of one who may not."""
        try:
            self._identify(request, method)
        except DeniedError as error:
            log.info("%s: %s", self.name, error)
            self.connection.send_end(stream_id, _block_of(error, method.name))
            return False
        return True

    def _identify(self, request: CallHeaders, method: ServedMethod) -> Caller:
        credentials = credentials_of(request.metadata, self._socket.certificate)
        authoriser = self.server.authoriser
        request.caller = authoriser.admit(method.method, credentials, now_s=time.time())
        return request.caller

    def _look_again(self, call: _Call) -> None:
        """End a call whose caller may not make it any more."""
        try:
            call.caller = self._identify(call.request, call.method)
        except DeniedError as error:
            log.info("%s: %s", self.name, error)
            call.give_up(error)

    def _weigh(self) -> None:
        """Report the bytes held for messages to the admission limits; refuse incoming messages if they are too many."""
        if self.connection.held_bytes == self._held_bytes or self.closed:
            return  # The limits have this figure, or know that the connection released all of it.
        door = self.server.door
        before, self._held_bytes = self._held_bytes, self.connection.held_bytes
        door.num_bytes += self._held_bytes - before
        if self._held_bytes > before and door.is_short:
            self._give_up_large()
        if self._held_bytes > before and not door.has_room:
            for stream_id in self.connection.holding():
                if door.has_room:
                    break
                call = self._calls.get(stream_id)
                if call is not None and not call.method.spared:
                    call.give_up(door.no_room(0))  # Which weighs again what is left.

    def _give_up_large(self) -> None:
        """Give up calls whose messages take up more than there is memory for, before all of a message is here."""
        door = self.server.door
        for stream_id in self.connection.holding():
            call = self._calls.get(stream_id)
            if call is None or not call.method.bounded:
                continue  # Operators and workers still get in.
            if self.connection.bytes_held_by(stream_id) > door.refused_from:
                call.give_up(door.no_memory())

    def hold(self, stream_id: int, num_bytes: int) -> None:
        """A message has to wait, and counts as unread until `message_read`."""
        self.connection.hold(stream_id, num_bytes)

    def refuse(self, call: _Call, block: bytes) -> None:
        """End a call with a status that was made before."""
        self.connection.send_end(call.stream_id, block)
        call.finish()
        self.flush_soon()

    def message_read(self, stream_id: int, num_bytes: int) -> None:
        """A message was handed on."""
        self.connection.message_read(stream_id, num_bytes)
        self._weigh()
        self.flush_soon()

    # --- out ----------------------------------------------------------------------------------

    def answer_soon(self, call: _Call | _StreamedRequest | _OneOfSeveral) -> None:
        """Write the answer that a call has ready, with the others of this turn."""
        self._answers.append(call)
        if not self._flushing:
            self.flush_soon()

    def _write_answers(self) -> None:
        """Put the answers that are ready, and still in time, behind what is queued."""
        server, sock, connection = self.server, self._socket, self.connection
        while self._answers:
            answers, self._answers = (
                self._answers[:_ANSWERS_PER_LOOK],
                self._answers[_ANSWERS_PER_LOOK:],
            )
            looked_ns = server.clock()
            # By then they are with the kernel, if it takes as long as it did lately.
            sent_ns = looked_ns + server.sending_ns
            for call in answers:
                if call.over or call.ready is None:
                    continue
                message, latest_ns, late = call.ready
                if sent_ns > latest_ns:
                    call.fail(late(sent_ns))
                elif sock.unsent_bytes + connection.queued_bytes > call.unread_bytes_max:
                    what = "bytes of answers that this client does not read"
                    unread = self.num_unread_bytes
                    call.fail(server.door.crowded(what, unread, call.unread_bytes_max))
                else:
                    call.deliver(message)
            self._write()
            took_ns = server.clock() - looked_ns
            server.sending_ns += max(took_ns - server.sending_ns, -server.sending_ns // 8)
            server.sending_ns = min(server.sending_ns, _SENDING_NS_MOST)

    def flush_soon(self) -> None:
        """Write what is queued at the end of this turn, with what else there will be."""
        if not self._flushing and not self.closed:
            self._flushing = True
            self.server.turns.soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = False
        self.flush()

    def flush(self) -> None:
        """Write what is ready and queued, as far as the socket takes it."""
        if self._answers:
            self._write_answers()
        self._write()

    def _write(self) -> None:
        if not self.closed:
            self._socket.write(self.connection)

    def _drained(self) -> None:
        """All is sent that had to wait."""
        self._wake_writers()
        self.server.something_ended()

    async def room(self, stream_id: int) -> None:
        """Wait until the client has taken a stream's messages, or nearly so."""
        while self.is_behind(stream_id):
            future = self._loop.create_future()
            self.when_room(stream_id, functools.partial(_wake, future))
            await future

    def when_room(self, stream_id: int, go_on: Callable[[], object]) -> None:
        """Call something when the client has taken a stream's messages, or nearly so, or the stream is over."""
        self._writers[stream_id] = go_on

    def is_behind(self, stream_id: int) -> bool:
        """Whether the client has still to take messages of a stream, or much else."""
        return not self.closed and (
            self._socket.unsent_bytes > UNSENT_BYTES_MAX or self.connection.queued_on(stream_id)
        )

    def _wake_writers(self) -> None:
        for stream_id in [i for i in self._writers if not self.is_behind(i)]:
            self._writers.pop(stream_id)()

    # --- the end ------------------------------------------------------------------------------

    def call_over(self, stream_id: int) -> None:
        """A call is answered, or given up."""
        if self.quiet:
            self.quiet.pop(stream_id, None)
        if self._calls.pop(stream_id, None) is not None:
            server = self.server
            server.num_calls -= 1
            if not server.num_calls:
                server.something_ended()
        if self.connection.held_bytes != self._held_bytes:
            self._weigh()

    def sweep(self) -> None:
        """Look after the connection, once a second."""
        # libuv reports a broken connection once, and then stops watching it. If bytes were still unread at that
        # time, the report was missed.
        if broken := self._socket.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.lost(os.strerror(broken))
            return
        self.connection.forgive()
        self._silent_sweeps += 1
        at_work = self.num_unread_bytes or any(call.is_at_work for call in self._calls.values())
        self.idle_sweeps = 0 if at_work else self.idle_sweeps + 1
        if self._silent_sweeps == _PING_AFTER:
            self.connection.ping()
            self.flush()
        elif self._silent_sweeps >= _SILENCE_MAX:
            self.hang_up(ErrorCode.NO_ERROR, "the client is silent")
            return
        since_ns = self.connection.partial_since_ns
        stands = since_ns is not None and since_ns == self._partial_since_ns
        self._partial_since_ns = since_ns
        self._partial_sweeps = (
            self._partial_sweeps + 1 if stands or not self.connection.greeted else 0
        )
        if self._partial_sweeps > _COMING_MAX:
            text = f"a frame did not come within {_COMING_MAX * _SWEEP_S:g} s"
            self.hang_up(ErrorCode.ENHANCE_YOUR_CALM, text)
            return
        for call in [call for call in self._calls.values() if call.sweep()]:
            text = f"the request did not come within {_COMING_MAX * _SWEEP_S:g} s"
            call.end_with(grpc.StatusCode.CANCELLED, text)
        for call in [call for call in self._calls.values() if call.caller.over]:
            self._look_again(call)
        unread, self._unread_before = self._unread_before, self.num_unread_bytes
        stalled = 0 < unread <= self._unread_before
        self._stalled_sweeps = self._stalled_sweeps + 1 if stalled else 0
        if self._stalled_sweeps >= _STALL_MAX:
            self.leave_unread()

    def go_away(self) -> None:
        """Ask the client to open no more calls."""
        self.connection.go_away()
        self.flush()

    def make_room(self) -> None:
        """Hang up in favour of others; a call that is on its way was not looked at, so it can be repeated."""
        self.hang_up(ErrorCode.NO_ERROR, "others need the room of an idle connection")

    def leave_unread(self) -> None:
        """Hang up, because the client takes no answers; the reason may reach it, for no window holds it back."""
        text = f"the client leaves {self.num_unread_bytes} bytes of answers unread"
        self.hang_up(ErrorCode.ENHANCE_YOUR_CALM, text)

    def give_up_quiet(self) -> bool:
        """End some calls that bring no request, in favour of others; returns whether there were any."""
        calls = [*islice(self.quiet.values(), _QUIET_CALLS_GIVEN_UP)]
        for call in calls:
            self.server.door.count(Refusal.OVERLOADED, 1)
            text = "the front is full: others need the room of a call that brings no request"
            call.give_up(RefusedError(Refusal.OVERLOADED, text))
        return bool(calls)

    def hang_up(self, code: ErrorCode, text: str) -> None:
        """Say why the connection ends, and end it; all calls are given up."""
        self.connection.close(code, text)
        self.flush()
        if self.closed:
            return
        self._end(text)
        if self._socket.unsent_bytes:
            self._socket.sock.close()  # Who reads nothing does not hear it.
        else:
            self.server.let_go(self._socket.sock)

    def drain(self) -> None:
        """Tell all calls that the server stops."""
        self.flush()
        for call in list(self._calls.values()):
            text = "the server is shutting down and answers nothing more"
            call.give_up(RefusedError(Refusal.DRAINING, text))
        self.connection.close(ErrorCode.NO_ERROR, "the server is shutting down")
        self._flush_now()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open and nothing unsent."""
        return not self._calls and not self._socket.unsent_bytes

    def lost(self, reason: str) -> None:
        """Hang up; all calls are given up."""
        if not self.closed:
            self._end(reason)
            self._socket.sock.close()

    def _end(self, reason: str) -> None:
        """Give all calls up, and leave the socket alone from now on."""
        self.closed = True
        log.debug("connection of %s is over: %s", self.name, reason)
        self._socket.leave()
        for call in list(self._calls.values()):
            call.gone()
        self.server.door.num_bytes -= self._held_bytes
        self._held_bytes = 0
        self._wake_writers()
        self.server.peer_left(self)


class _NothingInVain:
    """Stands for `EarlyRefusals` where no method has any."""

    until_ns = 0


class _ReadGate:
    """Refuses calls of a read before anything is made of them.

    They are past their SLO, or the loop has no time for them, or they are in vain.
    """

    def __init__(self, server: Http2Server) -> None:
        self._server = server
        #: As `Gate` says.
        self.like_bytes = 0
        self._source: object = None
        self._now_ns = self._arrival_ns = 0
        # The longest SLO that was refused for want of time, behind which none as short is let in.
        self._shut_ns = 0
        self._num_let = 0
        # How many were refused, and whether the last was late.
        self._num_late = self._num_busy = 0
        self._is_late = False
        # What found the last to be in vain, if that was the reason; and what was asked in this read.
        self._found_by: Any = None
        self._asked: Any = None
        # So many looks whether one is in vain are worth it; and requests that were let in without a look.
        self._worth = self._num_unseen = 0
        # The loop has time for what is read.
        self._has_time = True

    def begin(self, source: object, arrival_ns: int, now_ns: int, *, has_time: bool) -> Gate:
        """Judge what a source sent, which came at `arrival_ns`, until `end`; `has_time`: only what is in vain is refused."""
        self._has_time = has_time
        self._source, self._arrival_ns, self._now_ns = source, arrival_ns, now_ns
        return self

    def end(self) -> None:
        """Count what was refused, all at once."""
        count = self._server.door.count
        if self._num_late:
            count(Refusal.LATE, self._num_late)
        if self._num_busy:
            count(Refusal.OVERLOADED, self._num_busy)
        self._num_let = self._num_late = self._num_busy = self._shut_ns = 0
        if self._asked is not None:
            self._asked.end()
            self._asked = None

    def judge(self, request: CallHeaders, data: bytes, begin: int, end: int) -> bytes | bool:
        """Do what `Gate` says. Calls whose callers are not known are not judged."""
        server, caller = self._server, request.caller
        method = server.methods.get(request.path)
        if method is None or not method.single or caller is None or caller.over:
            return False
        if self._has_time:
            return self._in_vain(method, request, data, begin, end) or False
        slo_ns, self.like_bytes = method.slo_ns(data, request.timeout_ns, begin, end)
        now_ns, arrival_ns = self._now_ns, self._arrival_ns
        self._found_by = None
        if now_ns - arrival_ns > slo_ns > YOUNG_NS:
            self._is_late = True
            self._num_late += 1
            return server.late_block
        if slo_ns > self._shut_ns:
            if server.entrance.may_enter(self._source, arrival_ns, slo_ns, now_ns, self._num_let):
                self._num_unseen += 1
                if self._worth or self._num_unseen >= _LOOK_EVERY:
                    block = self._in_vain(method, request, data, begin, end)
                    if block is not None:
                        return block
                self._num_let += 1
                return True
            self._shut_ns = slo_ns
        self._is_late = False
        self._num_busy += 1
        return server.busy_block(method.name, now_ns)

    def _in_vain(
        self, method: ServedMethod, request: CallHeaders, data: bytes, begin: int, end: int
    ) -> bytes | None:
        """Refuse a call that would be refused the long way."""
        early_refusals, now_ns = method.early_refusals, self._now_ns
        assert request.caller is not None
        if early_refusals is None or now_ns >= early_refusals.until_ns or request.caller.tenant:
            return None
        self._asked = early_refusals
        words = early_refusals.find(data, begin, end, request.timeout_ns, self._arrival_ns, now_ns)
        self._num_unseen = 0
        if words is None:
            self._worth = max(self._worth - 1, 0)
            return None
        self._worth = min(self._worth + _WORTH_EACH, _WORTH_MAX)
        self._found_by, self.like_bytes = early_refusals, words.num_bytes
        return self._server.block_of(words.error, method.name)

    def refused_alike(self, count: int) -> None:
        """Do what `Gate` says."""
        self._server.entrance.asked(self._source, count)
        if self._found_by is not None:
            self._found_by.alike(count)
            return
        if self._is_late:
            self._num_late += count
        else:
            self._num_busy += count


@dataclass(eq=False, kw_only=True)
class Http2Server:
    """Serves methods of gRPC on sockets of its own. It lives in one event loop."""

    #: The present in ns, at the pace of the monotonic clock.
    clock: Callable[[], int]
    #: Is told the bytes of messages that are coming in, and says when there is no room.
    door: AdmissionLimits
    #: Longest message that is taken.
    max_message_bytes: int
    #: Connections beyond which calls of methods that are answered directly, and of their services, are refused.
    max_connections: int
    #: Where large messages are received.
    slabs: Slabs
    #: Says who may call what.
    authoriser: Authoriser
    #: Is required of clients on other machines; None: TLS is off. Set `tls` again to change it for new connections.
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        #: How long it takes from the look at whether answers are in time until they are with the kernel: the longest of
        #: the last few.
        self.sending_ns = 0
        #: Calls that are open, whether they have been sent or not.
        self.num_calls = 0
        #: What every connection receives into, one at a time.
        self.buffer = memoryview(bytearray(READ_BYTES_MORE))
        self.turns = ArrivalClock(self.clock)
        self.entrance = Entrance(
            self.clock,
            self.turns,
            self.door,
            soon=asyncio.get_running_loop().call_soon,
            used_ns=thread_used_ns(),
        )
        self.gate = _ReadGate(self)
        # The end of calls for which the loop has no time, and the refusal for which it was made.
        self._busy: tuple[RefusedError | None, bytes] = (None, b"")
        #: The refusal of requests that had waited for longer than their SLO when they were read, and the end of calls.
        self.late = RefusedError(
            Refusal.LATE, "waited for longer than its SLO before the controller could look at it"
        )
        self.late_block = _block_of(self.late, "ModelInfer")
        # A status that another process decided, and the end of calls with it.
        self._told: tuple[Status | None, bytes] = (None, b"")
        #: Finds requests that are in vain, of the one method whose are looked for.
        self.early_refusals: Any = _NothingInVain()
        #: By path.
        self.methods: dict[str, ServedMethod] = {}
        self._peers: dict[_Peer, None] = {}
        self._listener = Listener(
            self.turns,
            max_connections=lambda: self.max_connections,
            num_open=lambda: len(self._peers),
            make_room=self._give_up_idlest,
            accepted=self._accepted,
        )
        # Connections that are over, whose clients may still read why; and sweeps until they are closed.
        self._leaving: dict[socket.socket, int] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what is served -----------------------------------------------------------------------

    @property
    def longest_pause_ns(self) -> int:
        """How long a connection is left unread at most while the loop has no time to spare."""
        return _PAUSE_NS_EACH * len(self._peers)

    def serve(self, handlers: Mapping[Method, Any]) -> None:
        """Serve these methods: by a coroutine function each, an `OnStream`, or `Directly`."""
        for method, handler in handlers.items():
            served = self.methods[method.path] = ServedMethod(method, handler)
            self.early_refusals = served.early_refusals or self.early_refusals

    def find_fault(self, crowded_connection: bool) -> RefusedError | None:
        """Say why a call cannot be taken; None: it can."""
        if crowded_connection:
            return self.door.crowded("connections", len(self._peers), self.max_connections)
        if self.num_calls >= self.door.max_requests and not self._make_room():
            return self.door.crowded("open calls", self.num_calls, self.door.max_requests)
        return None

    def _make_room(self) -> bool:
        """End calls that bring nothing, of whom has most of them; returns whether there were any."""
        return max(self._peers, key=lambda peer: len(peer.quiet)).give_up_quiet()

    def block_of(self, error: Exception, name: str) -> bytes:
        """Make the end of a call that fails; reuses the bytes while all calls end with the same status."""
        if isinstance(error, NoAnswerError):
            error.block = error.block or _block_of(error, name)
            return error.block
        if not isinstance(error, ToldStatusError):
            return _block_of(error, name)
        if error.status is not self._told[0]:
            self._told = error.status, _block_of(error, name)
        return self._told[1]

    def let_in(
        self, peer: _Peer, request: _Call | _StreamedRequest, method: ServedMethod, message: Buffer
    ) -> None:
        """Serve a request whose message is here; or have it wait, or refuse it, where the loop is busy."""
        now_ns = self.clock()
        if self.entrance.has_time(now_ns, request.arrival_ns, judged=request.judged):
            method.directly(request, message)
        else:
            self._judge(peer, request, method, message, now_ns)

    def _judge(
        self,
        peer: _Peer,
        request: _Call | _StreamedRequest,
        method: ServedMethod,
        message: Buffer,
        now_ns: int,
    ) -> None:
        slo_ns, _ = method.slo_ns(message, request.timeout_ns, 0, len(message))
        if now_ns - request.arrival_ns > slo_ns > YOUNG_NS:
            request.refuse_late()
            return
        request.wait(message)
        entrance, arrival_ns = self.entrance, request.arrival_ns
        if not entrance.enter(peer, request, arrival_ns, slo_ns, judged=request.judged):
            request.refuse()

    def busy(self) -> RefusedError:
        """Count a request for which the loop has no time. Returns its refusal."""
        self.door.count(Refusal.OVERLOADED, 1)
        return self.entrance.refusal(self.clock())

    def busy_block(self, name: str, now_ns: int) -> bytes:
        """Make the end of a call for which the loop has no time, the same bytes within a second."""
        refusal = self.entrance.refusal(now_ns)
        if refusal is not self._busy[0]:
            self._busy = refusal, _block_of(refusal, name)
        return self._busy[1]

    # --- life ---------------------------------------------------------------------------------

    def add_insecure_port(self, address: str, *, shared: bool = False) -> int:
        """Listen on HOST:PORT; port 0 takes any free one, which is returned. Raises ConfigError if that cannot be.

        With `shared`, other processes of this user may listen there too, and get connections each.
        """
        try:
            return self._listener.add(address, shared=shared)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error

    async def start(self) -> None:
        """Accept connections."""
        self._listener.start()
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(_SWEEP_S, self._keep_sweeping)

    async def stop(self, grace: float | None) -> None:
        """Stop: accept nothing more, give open calls `grace` seconds, end the others with DRAINING."""
        loop = asyncio.get_running_loop()
        self._listener.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for peer in list(self._peers):
            peer.go_away()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace or 0):
                while not all(peer.is_idle for peer in self._peers):
                    self._ended = loop.create_future()
                    await self._ended
        for peer in list(self._peers):
            peer.drain()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_LIMIT_S)
        for peer in list(self._peers):
            peer.lost("the server stopped")
        for sock in list(self._leaving):
            self._close(sock)
        self.turns.stop()

    def peer_left(self, peer: _Peer) -> None:
        """A connection is over."""
        self._peers.pop(peer, None)
        self.something_ended()

    def let_go(self, sock: socket.socket) -> None:
        """Close a connection behind its last words: at once it would take them back, with something left to read."""
        if len(self._leaving) >= _LEAVING_MAX:
            sock.close()
            return
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        self._leaving[sock] = _LEAVING_SWEEPS
        asyncio.get_running_loop().add_reader(sock, self._discard, sock)

    def _discard(self, sock: socket.socket) -> None:
        """Read and drop the bytes of a connection that is over."""
        try:
            num_bytes = sock.recv_into(self.buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            num_bytes = 0
        if not num_bytes:
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        del self._leaving[sock]
        asyncio.get_running_loop().remove_reader(sock)
        sock.close()

    def something_ended(self) -> None:
        """The last call is over, or a connection, or all is sent."""
        _wake(self._ended)

    def begin_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a handler; the server keeps it alive."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _accepted(self, sock: socket.socket, address: tuple[Any, ...], floor_ns: int) -> None:
        too_many = len(self._peers) >= self.max_connections
        peer = _Peer(self, sock, address, floor_ns=floor_ns, crowded=too_many)
        if not peer.closed:  # Its client may be gone already.
            self._peers[peer] = None

    def _give_up_idlest(self) -> bool:
        """Have the connection that was idle for longest make room, if any was for long.

        Its client connects again when it asks.
        """
        idlest = max(self._peers, key=lambda peer: peer.idle_sweeps)
        if idlest.idle_sweeps < _IDLE_MIN:
            return False
        idlest.make_room()
        return True

    def _keep_sweeping(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._keep_sweeping)
        self.sweep()

    def sweep(self) -> None:
        """Look after all connections, once a second."""
        for peer in list(self._peers):
            if not peer.closed:
                peer.sweep()
        for sock, sweeps in list(self._leaving.items()):
            self._leaving[sock] = sweeps - 1
            if sweeps <= 1:
                self._close(sock)
        unread_bytes = sum(peer.num_unread_bytes for peer in self._peers)
        while unread_bytes > self.door.max_bytes:
            # A bound for each would be none for all: who leaves most unread makes room.
            greediest = max(self._peers, key=lambda peer: peer.num_unread_bytes)
            unread_bytes -= greediest.num_unread_bytes
            greediest.leave_unread()


_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _block_of(error: Exception, name: str) -> bytes:
    code, text, details = status_of(error, method=name)
    return status_block(code.value[0], text, details)


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
