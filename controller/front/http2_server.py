"""A gRPC server of our own on plain sockets: it knows when a request came, and refuses for next to nothing.

It takes the handlers that `grpc.aio.server` takes, and gives them a context that does what they use of
grpc.aio's. Methods that are called often are answered without a task (`answer_directly`).

A call's clock starts no later than its first byte reached the kernel (`turns`, and the kernel's own stamp
where one segment brought it), so that nothing this process did meanwhile, nor anything that was done to
it, is hidden from the request's SLO. Whether an answer is in time is judged as it is written.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import logging
import os
import socket
import ssl
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import islice
from typing import Any, NoReturn, Self

import grpc
from typing_extensions import override

from clockwright.bulk import Buffer
from clockwright.errors import ConfigError, DeniedError, Refusal, RefusedError
from clockwright.units import NS_PER_S
from controller.access.authoriser import Authoriser, Certificate, credentials_of
from controller.access.caller import CALLER, Caller
from controller.front import unsupported
from controller.front.calls import Call, Late, find_header
from controller.front.door import Door
from controller.front.http2 import (
    CallHeaders,
    CallReceived,
    ErrorCode,
    Event,
    HalfClosed,
    Http2Connection,
    Http2Error,
    LastMessage,
    MessageReceived,
    RequestBegun,
    StreamReset,
    status_block,
)
from controller.front.statuses import Status, ToldStatusError, status_of
from controller.front.throttle import Throttle, thread_times
from controller.front.tls import HANDSHAKE_RECORD, TlsSession
from controller.front.turns import Turns
from controller.front.waiting_line import PATIENT_NS
from controller.slabs import Slabs

log = logging.getLogger(__name__)

EOF: object = getattr(grpc.aio, "EOF")  # noqa: B009

#: Small requests that come together fit in, and what is read of a large one before its place is known is little.
_READ_BYTES = 64 << 10
#: Where that was not all.
_READ_BYTES_MORE = 256 << 10
#: From a client that compresses: what it sends may be a thousand times as large when it is unpacked, in one turn.
_READ_BYTES_COMPRESSED = 16 << 10
#: Connections beyond `max_connections` that are kept to tell their calls why they are refused; those beyond
#: that are closed unheard.
_SPARE_CONNECTIONS = 64
_BACKLOG = 4096
_ACCEPTS_PER_TURN = 64
#: With so much that the socket does not take, nothing more is read from a peer until it reads itself.
_UNSENT_BYTES_MAX = 1 << 20
#: So much is made one piece before it is written; larger parts are not copied.
_JOINED_BYTES_MAX = 64 << 10
#: A client that sends requests and reads no answers has so many served at most; then its stream waits.
STREAM_REQUESTS_MAX = 1024
#: Pieces that the kernel is handed at once; Linux takes 1,024.
_PARTS_PER_CALL = 256
#: Answers that are written after one look at the clock: some 50 us' worth.
_ANSWERS_PER_LOOK = 32
#: Answers beyond this many bytes that one client leaves unread are replaced by refusals.
_UNREAD_ANSWER_BYTES_MAX = 256 << 20
#: The receive buffer of a connection, as the kernel counts it. What does not fit waits with the sender,
#: where its age cannot be seen: here are some seconds of small requests.
_RECEIVE_BUFFER_BYTES = 4 << 20

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
#: Connections whose clients get so many sweeps to read why they were hung up on.
_LEAVING_MAX = 64
_LEAVING_SWEEPS = 3
#: Sweeps in which a peer takes nothing of what waits for it.
_STALL_MAX = 30

_SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)
_TIMESPEC = struct.Struct("@ll")
_TCP_INFO_BYTES = 160
#: `tcpi_bytes_received` and `tcpi_data_segs_in` of Linux's `struct tcp_info`.
_RECEIVED = struct.Struct("@128xQ16xI")


def _states_none(_: Buffer) -> int | None:
    return None


@dataclass(slots=True, frozen=True)
class StreamForm:
    """How a stream says what a call of its own would: its requests are answered alike, and its messages differ."""

    #: Makes a message of an answer.
    answer: Callable[[Sequence[Buffer]], Sequence[Buffer]]
    #: Makes a message of an error's text and the request.
    error: Callable[[str, Buffer], Buffer]


@dataclass(slots=True)
class Method:
    """What to do with the calls of one method."""

    path: str
    #: Answers a request without a task; None: `handler` does.
    directly: Callable[[Call, Buffer], None] | None
    handler: grpc.RpcMethodHandler[Any, Any] | None
    #: Refused when the front is full.
    bounded: bool
    #: What its answers look like where it takes a stream of requests; None: it takes one.
    form: StreamForm | None = None
    #: The SLO that a request states; None: none.
    stated_slo_ns: Callable[[Buffer], int | None] = _states_none

    @property
    def spared(self) -> bool:
        """Whether its messages come in even if they find no room: workers register and report on streams."""
        handler = self.handler
        return (
            not self.bounded
            and handler is not None
            and bool(handler.request_streaming and handler.response_streaming)
        )


class _Call:
    """One call. Most change few of these, so that they begin as the class's."""

    #: The client sends no more.
    half_closed = False
    #: The client has sent a request, and may send others.
    has_asked = False
    #: The throttle has not let it in, and it may have time to wait.
    may_wait = False
    #: Nothing can be answered any more.
    over = False
    when_gone: Callable[[], object] | None = None
    #: The answer that is to be written at the end of this turn.
    ready: tuple[Sequence[Buffer], int, Late] | None = None
    _message: Buffer | None = None
    _sweeps = 0

    def __init__(
        self, peer: _Peer, stream_id: int, request: CallHeaders, method: Method, arrival_ns: int
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
        """Time from the arrival to the RPC deadline; None: there is none."""
        return self.request.timeout_ns

    def header(self, name: str) -> str:
        """Find one of the client's own headers."""
        return find_header(self.request.metadata, name)

    def answer(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """End the call with an answer, which is written and judged with the others of this turn."""
        if not self.over:
            self.ready = (message, latest_ns, late)
            self._peer.answer_soon(self)

    def fail(self, error: Exception) -> None:
        """End the call with the status of an error."""
        if not self.over:
            block = self._peer.server.block_of(error, self.method.path)
            self._peer.connection.send_end(self.stream_id, block)
            self.finish()
            self._peer.flush_soon()

    def served(self, *, slow: bool) -> None:
        """Tell the throttle, which let the call in, how that ended."""
        self._peer.server.throttle.ended(slow=slow)

    def missed(self) -> None:
        """Tell the throttle, which let the call in, that it was looked at too late."""
        self._peer.server.throttle.missed()

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
        if self.may_wait:
            self._peer.server.wait(self, self.method, message)
            return
        assert self.method.directly is not None
        self.method.directly(self, message)

    def gone(self) -> None:
        """The client gave the call up, or cannot be reached any more."""
        if not self.over:
            self.finish()
            self._stop()

    def give_up(self, error: Exception) -> None:
        """The server cannot go on with the call, whether it is being served or still comes in."""
        self.fail(error)
        self._stop()

    def end_with(self, code: grpc.StatusCode, text: str) -> None:
        """End the call with a status that is no refusal."""
        if not self.over:
            number: int = code.value[0]
            self._peer.connection.send_end(self.stream_id, status_block(number, text))
            self.finish()
            self._peer.flush_soon()
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
        """Whoever serves the call need not go on."""
        if self.when_gone is not None:
            self.when_gone()


class _StreamedCall(_Call):
    """A call with any number of requests, each of which is answered when its answer is ready, without a task.

    The RPC deadline is the call's and none of theirs.
    """

    def __init__(
        self, peer: _Peer, stream_id: int, request: CallHeaders, method: Method, arrival_ns: int
    ) -> None:
        super().__init__(peer, stream_id, request, method, arrival_ns)
        # Messages that nobody has looked at, with their arrivals; and the requests that are being served.
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

    def send(self, message: Sequence[Buffer]) -> None:
        """Send one of the stream's messages."""
        self._peer.connection.send_message(self.stream_id, message)

    def answer_soon(self, request: _StreamedRequest) -> None:
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
        peer, directly = self._peer, self.method.directly
        assert directly is not None
        while self._waiting and len(self._open) < STREAM_REQUESTS_MAX and not self.over:
            if peer.is_behind(self.stream_id):
                peer.when_room(self.stream_id, self._go_on)
                break
            message, arrival_ns = self._waiting.popleft()
            peer.message_read(self.stream_id, len(message))
            request = _StreamedRequest(self, message, arrival_ns)
            self._open.add(request)
            if peer.server.throttle.admit():
                directly(request, message)
            else:
                peer.server.wait(request, self.method, message)
        self._going_on = False
        if self.half_closed and not self._waiting and not self._open and not self.over:
            peer.connection.send_end(self.stream_id, status_block(0))
            self.finish()
            peer.flush_soon()


class _StreamedRequest:
    """A request in a stream."""

    __slots__ = ("_call", "_message", "arrival_ns", "caller", "over", "ready", "when_gone")
    timeout_ns = None

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

    def header(self, name: str) -> str:
        """Find one of the headers of its stream."""
        return self._call.header(name)

    def answer(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Answer, which is written and judged with the others of this turn."""
        if not self.over:
            self.ready = (message, latest_ns, late)
            self._call.answer_soon(self)

    def fail(self, error: Exception) -> None:
        """Answer with the text of an error; the stream goes on."""
        if not self.over:
            method = self._call.method
            _, text, _ = status_of(error, method=method.path.rpartition("/")[2])
            assert method.form is not None
            self._send([method.form.error(text, self._message)])

    def served(self, *, slow: bool) -> None:
        """Tell the throttle, which let the request in, how that ended."""
        self._call.served(slow=slow)

    def missed(self) -> None:
        """Tell the throttle, which let the request in, that it was looked at too late."""
        self._call.missed()

    def deliver(self, message: Sequence[Buffer]) -> None:
        """Write the answer, which is in time."""
        form = self._call.method.form
        assert form is not None
        self._send(form.answer(message))

    def gone(self) -> None:
        """The client gave the stream up, or cannot be reached any more."""
        self.over = True
        if self.when_gone is not None:
            self.when_gone()

    def _send(self, message: Sequence[Buffer]) -> None:
        self.over = True
        self._call.send(message)
        self._call.request_over(self)
        self._call.flush_soon()


class HandledCall(_Call):
    """A call that a coroutine answers, and the context that it gets: what is used of grpc.aio's."""

    def __init__(
        self, peer: _Peer, stream_id: int, request: CallHeaders, method: Method, arrival_ns: int
    ) -> None:
        super().__init__(peer, stream_id, request, method, arrival_ns)
        #: In a stream, `arrival_ns` is of the message that was read last.
        self.task: asyncio.Task[None] | None = None
        # Messages that nobody has read, with their arrivals.
        self._messages: deque[tuple[Buffer, int]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing: Sequence[tuple[str, str | bytes]] = ()

    # --- grpc.aio's context -------------------------------------------------------------------

    async def read(self) -> Any:  # noqa: ANN401  what the method's deserializer makes
        """The next message; `EOF` when the client sends no more."""
        while not self._messages:
            if self.half_closed or self.over:
                return EOF
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message, self.arrival_ns = self._messages.popleft()
        self._peer.message_read(self.stream_id, len(message))
        return self._parse(message)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401  as `read`
        message = await self.read()
        if message is EOF:
            raise StopAsyncIteration
        return message

    async def write(self, message: Any) -> None:  # noqa: ANN401  what the method's serializer takes
        """Send a message; returns when the client has taken what was sent before, or nearly so."""
        if self.over:
            raise asyncio.InvalidStateError("the call is over")
        assert self.method.handler is not None
        if (serialize := self.method.handler.response_serializer) is not None:
            message = serialize(message)
        peer = self._peer
        peer.connection.send_message(self.stream_id, (message,))
        peer.flush()
        await peer.room(self.stream_id)

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> NoReturn:
        """End the call with a status, by an exception."""
        self._code, self._details, self._trailing = code, details, trailing_metadata
        raise grpc.aio.AbortError(details)

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the code of the status at the end."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Set the text of the status at the end."""
        self._details = details

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Set what else the client hears at the end."""
        self._trailing = metadata

    def code(self) -> grpc.StatusCode:
        """The code so far."""
        return self._code

    def details(self) -> str:
        """The text so far."""
        return self._details

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """The client's own headers."""
        return self.request.metadata

    def peer(self) -> str:
        """The client's address, as gRPC writes it."""
        return self._peer.name

    def time_remaining(self) -> float | None:
        """What is left to the RPC deadline, in s; None: there is none. It counts from the arrival."""
        if self.request.timeout_ns is None:
            return None
        left_ns = self.request.timeout_ns - (self._peer.server.clock() - self.arrival_ns)
        return max(left_ns, 0) / NS_PER_S

    def cancelled(self) -> bool:
        """Whether the client gave the call up, or its connection broke."""
        return self.over

    def done(self) -> bool:
        """Whether the call is over."""
        return self.over

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have something called when the call is over."""
        self._callbacks.append(callback)

    # --- for the connection -------------------------------------------------------------------

    @override
    def begin(self) -> None:
        handler = self.method.handler
        if handler is not None and handler.request_streaming:
            self.task = self._peer.server.begin_task(self._run(self))

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
        self.task = self._peer.server.begin_task(self._run(message))

    @override
    def sweep(self) -> bool:
        coming = self.task is None or self._peer.connection.is_gathering(self.stream_id)
        return coming and super().sweep()

    @override
    def finish(self) -> None:
        super().finish()
        _wake(self._reader)
        for callback in self._callbacks:
            callback(self)

    @override
    def _stop(self) -> None:
        super()._stop()
        if self.task is not None:
            self.task.cancel()

    def _parse(self, message: Buffer) -> Any:  # noqa: ANN401
        assert self.method.handler is not None
        parse = self.method.handler.request_deserializer
        # What comes in parts is a view, which not everybody can read.
        data = bytes(message)
        return data if parse is None else parse(data)

    async def _run(self, request: Any) -> None:  # noqa: ANN401  bytes, or the iterator of a stream
        handler = self.method.handler
        assert handler is not None
        CALLER.set(self.caller)
        try:
            if not handler.request_streaming:
                request = self._parse(request)
            if handler.response_streaming:
                behaviour: Any = handler.stream_stream or handler.unary_stream
                result = behaviour(request, self)
                if inspect.isasyncgen(result):
                    async for message in result:
                        await self.write(message)
                else:
                    await result
            else:
                behaviour = handler.stream_unary or handler.unary_unary
                response = await behaviour(request, self)
                if self._code is grpc.StatusCode.OK and not self.over:
                    serialize = handler.response_serializer
                    message = response if serialize is None else serialize(response)
                    self._peer.connection.send_message(self.stream_id, (message,))
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            if not self.over:
                raise
        except Exception as error:
            self.fail(error)
        if not self.over:
            number: int = self._code.value[0]
            block = status_block(number, self._details, self._trailing)
            self._peer.connection.send_end(self.stream_id, block)
            self.finish()
            self._peer.flush_soon()


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
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, _Call] = {}
        #: Calls that are counted at the door and bring no request: the longest first.
        self.quiet: dict[int, _Call] = {}
        # Calls whose answers are ready.
        self._answers: list[_Call | _StreamedRequest] = []
        self._held_bytes = 0
        # Every byte that is unread came later than this.
        self._floor_ns = floor_ns
        # The last read took all that was there.
        self._emptied = False
        self._bytes_read = 0
        # Bytes to read at a time, if they are few; None: it depends on what there is.
        self._read_bytes: int | None = None
        self._segments: int | None = 0
        self._reading = True
        # What goes on when the client has taken a stream's messages.
        self._writers: dict[int, Callable[[], object]] = {}
        # Whether this connection is encrypted is known when its first byte is here.
        self._begun = server.tls is None
        self._tls: TlsSession | None = None
        self._certificate: Certificate | None = None
        self._is_local = ip_address(address[0].partition("%")[0]).is_loopback
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._flushing = False
        self._silent_sweeps = 0
        self._stalled_sweeps = 0
        # When the frame began to come that was not complete at the last sweep, and sweeps since.
        self._partial_since_ns: int | None = None
        self._partial_sweeps = 0
        self._unread_before = 0
        self._loop.add_reader(sock, self._readable)
        self.flush()

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of answers that the client does not take."""
        return self._unsent_bytes + self.connection.queued_bytes

    # --- in -----------------------------------------------------------------------------------

    def _readable(self) -> None:
        server = self.server
        server.turns.used()
        connection = self.connection
        direct = None if self._tls is not None else connection.direct()
        num_wanted = self._read_bytes
        if num_wanted is None:
            num_wanted = _READ_BYTES if self._emptied else _READ_BYTES_MORE
        shared = server.buffer[:num_wanted]
        try:
            num_bytes, ancillary, _, _ = self._socket.recvmsg_into(
                (shared,) if direct is None else (direct, shared), 64
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.lost(error.strerror or str(error))
            return
        if not num_bytes:
            self.lost("the client hung up")
            return
        num_direct = 0 if direct is None else min(num_bytes, len(direct))
        room = len(shared) if direct is None else len(shared) + len(direct)
        arrival_ns = self._arrival_ns(num_bytes, ancillary, emptied=num_bytes < room)
        self._silent_sweeps = 0
        view: Buffer = shared[: num_bytes - num_direct]
        if server.tls is not None:
            plaintext = self._unsealed(shared[:num_bytes])
            if plaintext is None:
                return
            view = plaintext
        # What this turn leads to is written at its end, all together.
        self._flushing = True
        try:
            for event in connection.receive(view, arrival_ns, num_direct=num_direct):
                self._handle(event)
        except Http2Error as error:
            log.info("connection of %s: %s", self.name, error)
            self.hang_up(error.code, str(error))
            return
        finally:
            self._flushing = False
        self._weigh()
        self.flush()
        if self._writers:
            self._wake_writers()

    def _unsealed(self, data: memoryview) -> Buffer | None:
        """Read what came on a server that has TLS; None: the connection is over.

        Clients on this machine may come without it, as workers and operators do.
        """
        tls_context = self.server.tls
        assert tls_context is not None
        if not self._begun:
            self._begun = True
            if data[0] == HANDSHAKE_RECORD:
                self._tls = TlsSession(tls_context)
            elif not self._is_local:
                self.lost("found no TLS, expected it")
                return None
        if self._tls is None:
            return data
        try:
            was_established = self._tls.established
            plaintext = self._tls.receive(data)
            if self._tls.established and not was_established:
                self._certificate = self._tls.client_certificate()
        except ssl.SSLError as error:
            log.info("connection of %s: %s", self.name, error)
            self._seal_output()
            self.lost(str(error))
            return None
        if self._tls.closed and not plaintext:
            self.lost("the client hung up")
            return None
        return plaintext

    def _arrival_ns(
        self, num_bytes: int, ancillary: Sequence[tuple[int, int, bytes]], *, emptied: bool
    ) -> int:
        """Find a time that is not after the first of the bytes just read came; see to the next's.

        `emptied`: these were all.
        """
        server = self.server
        if self._emptied and server.turns.bound_ns > self._floor_ns:
            self._floor_ns = server.turns.bound_ns
        arrival_ns = self._floor_ns
        self._emptied = emptied
        self._bytes_read += num_bytes
        if not ancillary:
            return arrival_ns
        seconds, nanoseconds = _TIMESPEC.unpack_from(ancillary[0][2])
        age_ns = time.time_ns() - (seconds * NS_PER_S + nanoseconds)
        last_ns: int = server.clock() - age_ns
        if age_ns < 0 or last_ns < self._floor_ns:
            return arrival_ns  # Somebody set the wall clock.
        # It is when the last of the bytes came, and those unread came behind it.
        self._floor_ns = last_ns
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _TCP_INFO_BYTES:
            return arrival_ns
        received, segments = _RECEIVED.unpack_from(info)
        # The kernel's figures are of this read if nothing came meanwhile. One segment came at one time.
        before, self._segments = self._segments, segments if received == self._bytes_read else None
        if before is not None and self._segments == before + 1:
            return last_ns
        return arrival_ns

    def _handle(self, event: Event) -> None:
        stream_id = event.stream_id
        if isinstance(event, CallReceived):
            call = self._begin(stream_id, event.request, event.arrival_ns)
            if call is not None:
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
        method = server.methods.get(request.path) or server.method(request)
        if method is None:
            text = f"Method not found: {request.path[:200]}"
            if (words := unsupported.METHODS.get(request.path)) is not None:
                text += f"; {words}"
            block = status_block(grpc.StatusCode.UNIMPLEMENTED.value[0], text)
            self.connection.send_end(stream_id, block)
            return None
        caller = request.caller
        if (caller is None or caller.over) and not self._admit(stream_id, request):
            return None
        if (
            method.bounded
            and (self.crowded or server.num_calls >= server.door.max_requests)
            and (fault := server.find_fault(self.crowded)) is not None
        ):
            self.connection.send_end(stream_id, _block_of(fault, method.path))
            return None
        single = method.directly is not None and method.form is None
        may_wait = False
        if single and not server.throttle.admit():
            may_wait = (request.timeout_ns or 0) >= PATIENT_NS
            if not may_wait:
                self.connection.send_end(stream_id, server.busy_block(method.path))
                return None
        self.idle_sweeps = 0
        if method.bounded:
            server.turns.asked()
        if request.encoding != "identity":
            self._read_bytes = _READ_BYTES_COMPRESSED
        kind = _Call if single else HandledCall if method.directly is None else _StreamedCall
        call = self._calls[stream_id] = kind(self, stream_id, request, method, arrival_ns)
        if may_wait:
            call.may_wait = True
        server.num_calls += 1
        if not single:
            call.begin()
        return call

    def _admit(self, stream_id: int, request: CallHeaders) -> bool:
        """Find out who calls; end the call of one who may not."""
        try:
            self._identify(request)
        except DeniedError as error:
            log.info("%s: %s", self.name, error)
            self.connection.send_end(stream_id, _block_of(error, request.path))
            return False
        return True

    def _identify(self, request: CallHeaders) -> Caller:
        credentials = credentials_of(request.metadata, self._certificate)
        request.caller = self.server.authoriser.admit(request.path, credentials, now_s=time.time())
        return request.caller

    def _look_again(self, call: _Call) -> None:
        """End a call whose caller may not make it any more."""
        try:
            call.caller = self._identify(call.request)
        except DeniedError as error:
            log.info("%s: %s", self.name, error)
            call.give_up(error)

    def _weigh(self) -> None:
        """Tell the door how much of messages is here; refuse what is coming in if that is too much."""
        if self.connection.held_bytes == self._held_bytes or self.closed:
            return  # The door knows it, or was told that all of it is gone.
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

    def message_read(self, stream_id: int, num_bytes: int) -> None:
        """A message was handed on."""
        self.connection.message_read(stream_id, num_bytes)
        self._weigh()
        self.flush_soon()

    # --- out ----------------------------------------------------------------------------------

    def answer_soon(self, call: _Call | _StreamedRequest) -> None:
        """Write the answer that a call has ready, with the others of this turn."""
        self._answers.append(call)
        if not self._flushing:
            self.flush_soon()

    def _write_answers(self) -> None:
        """Put the answers that are ready, and still in time, behind what is queued."""
        server, connection = self.server, self.connection
        while self._answers:
            answers, self._answers = (
                self._answers[:_ANSWERS_PER_LOOK],
                self._answers[_ANSWERS_PER_LOOK:],
            )
            now_ns = server.clock()
            for call in answers:
                if call.over or call.ready is None:
                    continue
                message, latest_ns, late = call.ready
                if now_ns > latest_ns:
                    call.fail(late(now_ns))
                elif self._unsent_bytes + connection.queued_bytes > _UNREAD_ANSWER_BYTES_MAX:
                    what = "bytes of answers that this client does not read"
                    unread = self.num_unread_bytes
                    call.fail(server.door.crowded(what, unread, _UNREAD_ANSWER_BYTES_MAX))
                else:
                    call.deliver(message)
            if self._answers:
                self._write()

    def flush_soon(self) -> None:
        """Write what is queued at the end of this turn, with what else there will be."""
        if not self._flushing and not self.closed:
            self._flushing = True
            self._loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = False
        self.flush()

    def flush(self) -> None:
        """Write what is ready and queued, as far as the socket takes it."""
        if self._answers:
            self._write_answers()
        self._write()

    def _write(self) -> None:
        if self.closed or not self._begun:
            return
        if self._tls is not None:
            self._seal_output()
            return
        if parts := self.connection.take_output():
            self._queue(parts)

    def _seal_output(self) -> None:
        assert self._tls is not None
        if self._tls.established and (parts := self.connection.take_output()):
            self._tls.seal(b"".join(parts))
        if sealed := self._tls.take_output():
            self._queue([sealed])

    def _queue(self, parts: Sequence[Buffer]) -> None:
        waiting = bool(self._unsent)
        for part in parts:
            self._unsent_bytes += len(part)
        if len(parts) > 1 and self._unsent_bytes <= _JOINED_BYTES_MAX:
            parts = [b"".join(parts)]
        if not waiting and len(parts) == 1:
            # As nearly always: all that is queued is one piece, and the socket takes it.
            (part,) = parts
            try:
                sent = self._socket.send(part)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self.lost(error.strerror or str(error))
                return
            self._unsent_bytes -= sent
            if not self._unsent_bytes:
                return
            parts = [memoryview(part)[sent:]]
        self._unsent.extend(memoryview(part) for part in parts if part)
        if not waiting:
            self._send()

    def _send(self) -> None:
        unsent = self._unsent
        try:
            while unsent:
                if len(unsent) == 1:
                    sent = self._socket.send(unsent[0])
                else:
                    sent = self._socket.sendmsg([*islice(unsent, _PARTS_PER_CALL)])
                self._unsent_bytes -= sent
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = unsent[0][sent:]
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._socket, self._writable)
            if self._unsent_bytes > _UNSENT_BYTES_MAX and self._reading:
                self._reading = self._emptied = False
                self._loop.remove_reader(self._socket)
        except OSError as error:
            self.lost(error.strerror or str(error))

    def _writable(self) -> None:
        self._loop.remove_writer(self._socket)
        self._send()
        if self.closed or self._unsent:
            return
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._socket, self._readable)
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
            self._unsent_bytes > _UNSENT_BYTES_MAX or self.connection.queued_on(stream_id)
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
        # libuv tells of a broken connection once, and watches it no more. If there was still something to read
        # then, nobody has heard of it.
        if broken := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
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
            self.server.door.count(Refusal.OVERLOADED)
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
        if self._unsent:
            self._socket.close()  # Who reads nothing does not hear it.
        else:
            self.server.let_go(self._socket)

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
        return not self._calls and not self._unsent

    def lost(self, reason: str) -> None:
        """Hang up; all calls are given up."""
        if not self.closed:
            self._end(reason)
            self._socket.close()

    def _end(self, reason: str) -> None:
        """Give all calls up, and leave the socket alone from now on."""
        self.closed = True
        log.debug("connection of %s is over: %s", self.name, reason)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        for call in list(self._calls.values()):
            call.gone()
        self.server.door.num_bytes -= self._held_bytes
        self._held_bytes = 0
        self._wake_writers()
        self.server.peer_left(self)


class Http2Server:
    """Serves gRPC's handlers on sockets of its own. It lives in one event loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], int],
        door: Door,
        max_message_bytes: int,
        max_connections: int,
        slabs: Slabs,
        authoriser: Authoriser,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Make a server that listens nowhere yet.

        Args:
            clock: the present in ns, at the pace of the monotonic clock.
            door: is told the bytes of messages that are coming in, and says when there is no room.
            max_message_bytes: longest message that is taken.
            max_connections: connections beyond which calls of methods that are answered directly, and of
                their services, are refused.
            slabs: where large messages are received.
            authoriser: says who may call what.
            tls: is required of clients on other machines; None: nobody has it. Set `tls` anew, and those
                who connect from then on get another.
        """
        self.clock = clock
        self.door = door
        self.max_message_bytes = max_message_bytes
        self.max_connections = max_connections
        self.slabs = slabs
        self.authoriser = authoriser
        self.tls = tls
        #: Calls that are open, whether they have been sent or not.
        self.num_calls = 0
        #: What every connection receives into, one at a time.
        self.buffer = memoryview(bytearray(_READ_BYTES_MORE))
        self.turns = Turns(clock)
        self.throttle = Throttle(clock, thread_times())
        # What those hear whom the throttle keeps out, and the rate at which it was made.
        self._busy: tuple[float | None, bytes] = (None, b"")
        # A status that somebody else has decided, and the end of calls with it.
        self._told: tuple[Status | None, bytes] = (None, b"")
        #: By path, of those that were called or are answered directly.
        self.methods: dict[str, Method] = {}
        self._bounded: set[str] = set()
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        # Every connection that is not accepted came later than this, per socket; None: there is none.
        self._listening: dict[socket.socket, int | None] = {}
        self._peers: dict[_Peer, None] = {}
        # Connections that are over, whose clients may still read why; and sweeps until they are closed.
        self._leaving: dict[socket.socket, int] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what is served -----------------------------------------------------------------------

    def add_generic_rpc_handlers(
        self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]
    ) -> None:
        """Serve what these handlers know."""
        self._generic += handlers

    def answer_directly(
        self,
        service: str,
        name: str,
        answer: Callable[[Call, Buffer], None],
        form: StreamForm | None = None,
        *,
        stated_slo_ns: Callable[[Buffer], int | None] = _states_none,
    ) -> None:
        """Have a method's requests answered by a function that is called with each message.

        All calls of the service are refused while the front is full.

        Args:
            service: the service's full name.
            name: the method's.
            answer: is to see to it that `Call.answer` or `Call.fail` is called. It does not raise.
            form: of a method that takes a stream and answers with one; None: the method is unary.
            stated_slo_ns: finds the SLO that a request states, without a look at its tensors.
        """
        self._bounded.add(service)
        path = f"/{service}/{name}"
        self.methods[path] = Method(path, answer, None, True, form, stated_slo_ns)

    def method(self, request: CallHeaders) -> Method | None:
        """Find out what to do with the first call of a method; None: there is no such method."""
        call = _CallDetails(request.path, request.metadata)
        for generic in self._generic:
            handler = generic.service(call)
            if handler is not None:
                bounded = request.path[1:].partition("/")[0] in self._bounded
                method = Method(request.path, None, handler, bounded)
                self.methods[request.path] = method
                return method
        return None

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

    def block_of(self, error: Exception, path: str) -> bytes:
        """Make the end of a call that fails; the same bytes while the same is told to everybody."""
        if not isinstance(error, ToldStatusError):
            return _block_of(error, path)
        if error.status is not self._told[0]:
            self._told = error.status, _block_of(error, path)
        return self._told[1]

    def busy_block(self, path: str) -> bytes:
        """Make the end of a call that the throttle keeps out; the same bytes while its rate is the same."""
        rate_rps = self.throttle.rate_rps
        if rate_rps != self._busy[0]:
            self._busy = rate_rps, _block_of(self.throttle.refusal(), path)
        self.door.count(Refusal.OVERLOADED)
        return self._busy[1]

    def wait(self, request: _Call | _StreamedRequest, method: Method, message: Buffer) -> None:
        """Have a request wait that the throttle has not let in, or refuse it."""
        slo_ns = method.stated_slo_ns(message) or request.timeout_ns or 0
        try:
            if slo_ns < PATIENT_NS:
                raise self.busy()
            self.door.enter(len(message))
        except RefusedError as error:
            request.fail(error)
            return
        latest_ns = request.arrival_ns + slo_ns // 2
        begin = functools.partial(self._begin_waiting, request, method, message)
        refuse = functools.partial(self._refuse_waiting, request, len(message))
        if not self.throttle.wait(request, begin, refuse, latest_ns):
            refuse()

    def _begin_waiting(
        self, request: _Call | _StreamedRequest, method: Method, message: Buffer
    ) -> None:
        self.door.leave(len(message))
        assert method.directly is not None
        method.directly(request, message)

    def _refuse_waiting(self, request: _Call | _StreamedRequest, num_bytes: int) -> None:
        self.door.leave(num_bytes)
        if not request.over:
            request.fail(self.busy())

    def busy(self) -> RefusedError:
        """Make the refusal of a request that the throttle keeps out."""
        self.door.count(Refusal.OVERLOADED)
        return self.throttle.refusal()

    # --- life ---------------------------------------------------------------------------------

    def add_insecure_port(self, address: str, *, shared: bool = False) -> int:
        """Listen on HOST:PORT; port 0 takes any free one, which is returned.

        Args:
            address: where.
            shared: other processes of this user may listen there too, and get connections each.

        Raises:
            ConfigError: the address cannot be used.
        """
        try:
            sockets = listening_sockets(address, shared=shared)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
        for sock in sockets:
            self._listening[sock] = None
            port: int = sock.getsockname()[1]
        return port

    async def start(self) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.add_reader(sock, self._accept, sock)
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)

    async def stop(self, grace: float | None) -> None:
        """Stop: accept nothing more, give open calls `grace` seconds, end the others with DRAINING."""
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.remove_reader(sock)
            sock.close()
        self._listening.clear()
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
        """Read what nobody wants to know from a connection that is over."""
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

    def _accept(self, listening: socket.socket) -> None:
        self.turns.used()
        floor_ns = self._listening[listening]
        if floor_ns is None:
            floor_ns = self._listening[listening] = self.turns.bound_ns
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                self._listening[listening] = None
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                log.warning("no connection can be accepted: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(0.1, self._accept_again, listening)
                return
            while len(self._peers) >= self.max_connections and self._give_up_idlest():
                pass
            if len(self._peers) >= self.max_connections + _SPARE_CONNECTIONS:
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            too_many = len(self._peers) >= self.max_connections
            self._peers[_Peer(self, sock, address, floor_ns=floor_ns, crowded=too_many)] = None

    def _give_up_idlest(self) -> bool:
        """Have the connection that was idle for longest make room, if any was for long.

        Its client connects again when it asks.
        """
        idlest = max(self._peers, key=lambda peer: peer.idle_sweeps)
        if idlest.idle_sweeps < _IDLE_MIN:
            return False
        idlest.make_room()
        return True

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _sweep(self) -> None:
        for peer in list(self._peers):
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
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)


@dataclass(slots=True)
class _CallDetails(grpc.HandlerCallDetails):
    method: str
    invocation_metadata: Any


_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _block_of(error: Exception, path: str) -> bytes:
    code, text, details = status_of(error, method=path.rpartition("/")[2])
    return status_block(code.value[0], text, details)


def listening_sockets(address: str, *, shared: bool) -> list[socket.socket]:
    """Listen on HOST:PORT, on all addresses of the host and on one port; the arguments are those of `add_insecure_port`.

    Raises:
        OSError: the address cannot be used.
    """
    host, _, port_text = address.rpartition(":")
    port = int(port_text)
    found = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    with ExitStack() as stack:
        sockets = []
        for family, kind, protocol, _, where in found:
            sock = stack.enter_context(socket.socket(family, kind, protocol))
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, len(found) > 1)
            _prepare(sock)
            sock.bind((where[0], port, *where[2:]))
            sock.listen(_BACKLOG)
            port = sock.getsockname()[1]
            sockets.append(sock)
        stack.pop_all()
    return sockets


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def _prepare(sock: socket.socket) -> None:
    """Have the kernel stamp what comes, and hold a lot of it; accepted sockets inherit both."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    # Linux makes the buffer fit the mark, and leaves it when the mark goes down again. SO_RCVBUF would
    # end the kernel's own tuning of it.
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _RECEIVE_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
