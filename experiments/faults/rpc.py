"""gRPC's client over the world's sockets, as far as the product and its clients use grpcio's.

It speaks HTTP/2 by hand (RFC 9113), so that the product's own server is served bytes as from any client, in
pieces and over connections that break.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Self

import grpc
from hpack import Decoder
from hpack.hpack import encode_integer

from experiments.faults.sockets import Socket, create_connection

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_WINDOW_MAX = (1 << 31) - 1
_INITIAL_WINDOW = 65_535
_FRAME_BYTES = 16_384
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_CONNECT_LIMIT_S = 5.0
# After a connection broke, the next one waits so long.
_PAUSE_S = 0.1
# A client with open calls asks this often whether the server's host is still there, which may have lost its power.
_KEEPALIVE_S = 10.0

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream_id) + payload


def _literal(name: str, value: str | bytes) -> bytes:
    if isinstance(value, bytes):
        value = base64.b64encode(value).rstrip(b"=").decode()
    texts = name.encode(), value.encode()
    return b"\x00" + b"".join(encode_integer(len(text), 7) + text for text in texts)


class WorldCall:
    """One call; unary calls are streams of one message each way."""

    def __init__(
        self,
        channel: Channel,
        method: str,
        timeout: float | None,
        metadata: Sequence[tuple[str, str | bytes]],
    ) -> None:
        self.metadata = metadata
        self._channel = channel
        self._method = method
        self.stream_id = 0
        self.window = 0
        self.unsent: deque[tuple[bytes, bool]] = deque()
        #: Each with when the server sent its end.
        self._messages: deque[tuple[bytes, int]] = deque()
        #: When the message that was read last was sent.
        self.answer_sent_ns = 0
        self._data = bytearray()
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: tuple[tuple[str, str | bytes], ...] = ()
        self._something = asyncio.Event()
        #: When the server wrote the end of the answer, and when its host had got the first byte of the request.
        self.ended_ns = 0
        self.came_ns = 0
        self.position = 0
        #: By which its answers come.
        self.socket: Socket | None = None
        self._deadline: asyncio.TimerHandle | None = None
        if timeout is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(max(timeout, 0), self._too_late)
        self.timeout = timeout

    # --- what grpcio's calls have ---------------------------------------------------------------

    async def write(self, message: bytes) -> None:
        """Send a message."""
        if self._code is not None:
            raise asyncio.InvalidStateError("the call is over")
        self._channel.send(self, struct.pack(">BI", 0, len(message)) + bytes(message), last=False)

    async def done_writing(self) -> None:
        """Send nothing more."""
        if self._code is None:
            self._channel.send(self, b"", last=True)

    async def read(self) -> Any:
        """Receive a message.

        Raises:
            grpc.aio.AioRpcError: the call ended badly.
        """
        while not self._messages:
            if self._code is not None:
                if self._code is not grpc.StatusCode.OK:
                    raise self.error()
                return EOF
            self._something.clear()
            await self._something.wait()
        message, self.answer_sent_ns = self._messages.popleft()
        return message

    @property
    def next_position(self) -> int:
        """Where in its connection begins what is written next; 0: it has to wait for room."""
        return self._channel.next_position(self)

    def arrived_ns(self, position: int) -> int:
        """When the server's host got a byte of the connection by which an answer came; 0: it has not."""
        assert self.socket is not None
        return self.socket.arrived_ns(position)

    def was_held_up(self, since_ns: int) -> bool:
        """Whether the network did not take the answer as it was ready."""
        assert self.socket is not None
        return self.socket.was_full(since_ns)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self.read()) is not EOF:
            yield message

    async def code(self) -> grpc.StatusCode:
        """How it ended."""
        while self._code is None:
            self._something.clear()
            await self._something.wait()
        return self._code

    async def details(self) -> str:
        """Why."""
        await self.code()
        return self._details

    async def trailing_metadata(self) -> Any:
        """What came behind."""
        await self.code()
        return self._trailing

    def cancel(self) -> bool:
        """Give it up."""
        if self._code is not None:
            return False
        self._channel.reset(self)
        self.end(grpc.StatusCode.CANCELLED, "cancelled")
        return True

    # --- what the channel says ------------------------------------------------------------------

    def error(self) -> grpc.aio.AioRpcError:
        """Make the exception of its status."""
        assert self._code is not None
        return grpc.aio.AioRpcError(
            self._code,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(*self._trailing),
            self._details,
            None,
        )

    def received(self, data: bytes) -> None:
        """Take in a piece of messages."""
        self._data += data
        while len(self._data) >= 5:
            (length,) = struct.unpack_from(">I", self._data, 1)
            if len(self._data) < 5 + length:
                break
            message = bytes(self._data[5 : 5 + length])
            assert self.socket is not None
            self._messages.append((message, self.socket.last_sent_ns))
            del self._data[: 5 + length]
            self._something.set()

    def trailers(self, headers: dict[str, str | bytes]) -> None:
        """Take in the end."""
        code = _CODES.get(int(headers.get("grpc-status", 2)), grpc.StatusCode.UNKNOWN)
        self._trailing = tuple(
            (name, value) for name, value in headers.items() if name.endswith("-bin")
        )
        self.end(code, str(headers.get("grpc-message", "")))

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """It is over."""
        if self._code is None:
            self._code, self._details = code, details
            self._channel.calls.pop(self.stream_id, None)
            if self._deadline is not None:
                self._deadline.cancel()
            self._something.set()

    def _too_late(self) -> None:
        self._channel.reset(self)
        self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class Channel:
    """A connection to a server, made at the first call, and again at a call after it broke."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._again_s = 0.0
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        self.calls: dict[int, WorldCall] = {}
        self._socket: Socket | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._broken = ""
        self._decoder = Decoder()
        self._buffer = bytearray()
        self._unsent = bytearray()
        self._num_written = 0
        self._next_id = 1
        #: Calls that the server has ended.
        self._over: set[int] = set()
        self._window = _INITIAL_WINDOW
        self._initial_window = _INITIAL_WINDOW
        self._frame_bytes = _FRAME_BYTES

    def next_position(self, call: WorldCall) -> int:
        """Where what a call writes next begins; 0: there is no connection, or no room in a window."""
        has_room = call.window > 0 and self._window > 0 and not call.unsent
        return self._num_written if self._socket is not None and has_room else 0

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be asked here any more."""
        return bool(self._broken)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up."""
        if self._connecting is not None:
            self._connecting.cancel()
        self._is_closed = True
        self._break("the channel is closed")

    def stream_stream(self, method: str, *_: object, **__: object) -> Callable[..., WorldCall]:
        """Make what begins calls of a method."""

        def begin(
            requests: AsyncIterator[bytes] | None = None,
            timeout: float | None = None,
            metadata: Sequence[tuple[str, str | bytes]] = (),
        ) -> WorldCall:
            call = WorldCall(self, method, timeout, metadata)
            self._begin(call)
            if requests is not None:
                self._loop.create_task(_write_all(call, requests))
            return call

        return begin

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] = bytes,
        response_deserializer: Callable[[bytes], Any] = bytes,
        **_: object,
    ) -> Callable[..., Awaitable[Any]]:
        """Make what carries out calls of a method."""

        async def ask(
            request: Any,
            timeout: float | None = None,
            metadata: Sequence[tuple[str, str | bytes]] = (),
        ) -> Any:
            call = WorldCall(self, method, timeout, metadata)
            self._begin(call)
            try:
                message = request_serializer(request)
                with suppress(asyncio.InvalidStateError):
                    await call.write(message)
                    await call.done_writing()
                answer = await call.read()
                code = await call.code()
                if code is not grpc.StatusCode.OK or answer is EOF:
                    raise call.error()
                return response_deserializer(answer)
            finally:
                call.cancel()

        return ask

    # --- out ------------------------------------------------------------------------------------

    def _begin(self, call: WorldCall) -> None:
        if self._broken and not self._is_closed and self._loop.time() >= self._again_s:
            self._begin_afresh()
        if self._broken:
            call.end(grpc.StatusCode.UNAVAILABLE, self._broken)
            return
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())
        call.stream_id, self._next_id = self._next_id, self._next_id + 2
        call.window = self._initial_window
        self.calls[call.stream_id] = call
        pairs = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", call._method),
            (":authority", "world"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *call.metadata,
        ]
        if call.timeout is not None:
            pairs.append(("grpc-timeout", f"{max(round(call.timeout * 1e6), 1)}u"))
        block = b"".join(_literal(name, value) for name, value in pairs)
        call.position = self._num_written
        self._write(_frame(_HEADERS, _END_HEADERS, call.stream_id, block))

    def send(self, call: WorldCall, data: bytes, *, last: bool) -> None:
        """Send a part of a call's stream, as far as windows allow."""
        call.unsent.append((data, last))
        self._pump(call)

    def reset(self, call: WorldCall) -> None:
        """Tell the server that the client does not wait."""
        if call.stream_id in self.calls:
            self._write(_frame(_RST, 0, call.stream_id, struct.pack(">I", 8)))

    def _pump(self, call: WorldCall) -> None:
        while call.unsent:
            data, last = call.unsent[0]
            room = min(call.window, self._window, self._frame_bytes)
            if data and room <= 0:
                return
            part, rest = data[:room], data[room:]
            call.window -= len(part)
            self._window -= len(part)
            if rest:
                call.unsent[0] = rest, last
            else:
                call.unsent.popleft()
                while call.unsent and not call.unsent[0][0] and call.unsent[0][1]:
                    call.unsent.popleft()
                    last = True
            flags = _END_STREAM if last and not rest else 0
            self._write(_frame(_DATA, flags, call.stream_id, part))

    def _write(self, data: bytes) -> None:
        self._unsent += data
        self._num_written += len(data)
        self._flush()

    def _flush(self) -> None:
        sock = self._socket
        if sock is None or self._broken:
            return
        self._loop.remove_writer(sock)
        try:
            while self._unsent:
                num_bytes = sock.send(self._unsent)
                del self._unsent[:num_bytes]
        except BlockingIOError:
            self._loop.add_writer(sock, self._flush)
        except OSError as error:
            self._break(str(error))

    # --- in -------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        host, _, port = self._address.rpartition(":")
        try:
            sock = await asyncio.to_thread(create_connection, (host, int(port)), _CONNECT_LIMIT_S)
        except (OSError, TimeoutError) as error:
            self._break(f"failed to connect: {error}")
            return
        if self._broken:
            sock.close()
            return
        sock.setblocking(False)
        self._socket = sock
        settings = struct.pack(">HI", 4, _WINDOW_MAX)
        opening = _PREFACE + _frame(_SETTINGS, 0, 0, settings)
        opening += _frame(_WINDOW, 0, 0, struct.pack(">I", _WINDOW_MAX - _INITIAL_WINDOW))
        self._unsent[:0] = opening
        self._num_written += len(opening)
        for call in self.calls.values():
            call.position += len(opening)
        self._loop.add_reader(sock, self._readable)
        self._flush()
        self._loop.call_later(_KEEPALIVE_S, self._keep_alive, sock)

    def _keep_alive(self, sock: Socket) -> None:
        if self._socket is sock and not self._broken:
            if self.calls:
                self._write(_frame(_PING, 0, 0, bytes(8)))
            self._loop.call_later(_KEEPALIVE_S, self._keep_alive, sock)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv_segment()
        except BlockingIOError:
            return
        except OSError as error:
            self._break(str(error))
            return
        if not data:
            self._break("Socket closed")
            return
        self._buffer += data
        while len(self._buffer) >= 9:
            word, flags, stream_id = struct.unpack_from(">IBI", self._buffer)
            length = word >> 8
            if len(self._buffer) < 9 + length:
                break
            payload = bytes(self._buffer[9 : 9 + length])
            del self._buffer[: 9 + length]
            self._take(word & 0xFF, flags, stream_id, payload)

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        call = self.calls.get(stream_id)
        if call is not None:
            call.socket = self._socket
        if stream_id in self._over and kind in (_DATA, _HEADERS):
            assert self._socket is not None
            self._socket.process.world.fail(f"a call was answered again: {payload[:100]!r}")
        if kind == _DATA:
            if call is not None:
                call.received(payload)
        elif kind == _HEADERS:
            # The decoder gives text, unless it is asked for bytes.
            headers = {str(name): str(value) for name, value in self._decoder.decode(payload)}
            if flags & _END_STREAM:
                self._over.add(stream_id)
            if call is not None and flags & _END_STREAM:
                assert self._socket is not None
                call.ended_ns = self._socket.last_sent_ns
                call.came_ns = self._socket.arrived_ns(call.position)
                call.trailers({name: _value(name, value) for name, value in headers.items()})
        elif kind == _RST:
            if call is not None:
                call.end(grpc.StatusCode.UNAVAILABLE, "the stream was reset")
        elif kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == 4:
                    for each in self.calls.values():
                        each.window += value - self._initial_window
                    self._initial_window = value
                elif name == 5:
                    self._frame_bytes = value
            self._write(_frame(_SETTINGS, _ACK, 0))
            for each in list(self.calls.values()):
                self._pump(each)
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW:
            (more,) = struct.unpack(">I", payload)
            if stream_id == 0:
                self._window += more
            elif call is not None:
                call.window += more
            for each in list(self.calls.values()):
                self._pump(each)
        elif kind == _GOAWAY:
            (last_id,) = struct.unpack_from(">I", payload)
            for other_id, other in list(self.calls.items()):
                if other_id > last_id:
                    other.end(grpc.StatusCode.UNAVAILABLE, "the server goes away")

    def _break(self, reason: str) -> None:
        if self._broken:
            return
        self._broken = reason
        self._again_s = self._loop.time() + _PAUSE_S
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            self._socket.close()
        for call in list(self.calls.values()):
            call.end(grpc.StatusCode.UNAVAILABLE, reason)


def _value(name: str, value: str) -> str | bytes:
    if name.endswith("-bin"):
        return base64.b64decode(value + "=" * (-len(value) % 4))
    return value


async def _write_all(call: WorldCall, requests: AsyncIterator[bytes]) -> None:
    with suppress(asyncio.InvalidStateError):
        async for request in requests:
            await call.write(request)
        await call.done_writing()
