"""A client of gRPC on a bare socket: literal headers, no windows of its own, no library that hides a wait.

It sends what a test wants sent, well-formed or not, and says when each answer was there.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hpack import Decoder

#: Longer than any answer takes on the slowest machine.
PATIENCE_S = 180.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
#: Windows as large as HTTP/2 has them: the client takes all there is.
GREEDY = struct.pack(">HI", 4, 2**31 - 1)
_SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)
GREEDY_WINDOW = struct.pack(">I", 2**31 - 1 - 65_535)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream_id) + payload


def literal(name: str, value: str) -> bytes:
    """A header that goes into no table, shorter than 127 letters."""
    return b"\x00" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))


def headers(path: str = MODEL_INFER, *further: tuple[str, str]) -> bytes:
    pairs = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "test"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *further,
    )
    return b"".join(literal(name, value) for name, value in pairs)


def message(content: bytes) -> bytes:
    return struct.pack(">BI", 0, len(content)) + content


def call(stream_id: int, content: bytes, block: bytes | None = None, *, opened: int = 0) -> bytes:
    """All frames of a unary call; the content fits one frame.

    `opened`: by how much the stream's window is opened between headers and message, as gRPC's library does by 5.
    """
    block = headers() if block is None else block
    window = frame(WINDOW, 0, stream_id, struct.pack(">I", opened)) if opened else b""
    last = frame(DATA, END_STREAM, stream_id, message(content))
    return frame(HEADERS, END_HEADERS, stream_id, block) + window + last


@dataclass
class End:
    """How a call ended."""

    #: gRPC's code; None: the stream was reset.
    status: int | None
    text: str
    #: Messages that came before.
    messages: list[bytes]
    #: When its last byte, or one behind it, reached the client's kernel, on the monotonic clock: a client
    #: that the machine keeps waiting does not find answers late.
    time_ns: int
    headers: dict[str, str] = field(default_factory=dict)


class RawClient:
    """One connection."""

    def __init__(
        self, address: str, *, settings: bytes = GREEDY, window: bytes = GREEDY_WINDOW
    ) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.ended: dict[int, End] = {}
        self.reset: dict[int, int] = {}
        #: Whether the kernel stamped what was read last.
        self.stamped = False
        #: Code and text of a GOAWAY.
        self.goodbye: tuple[int, str] | None = None
        self.closed = False
        self._decoder = Decoder()
        self._buffer = bytearray()
        self._data: dict[int, bytearray] = {}
        self._next_id = 1
        self._num_pongs = 0
        opening = PREFACE + frame(SETTINGS, 0, 0, settings)
        self.send(opening + (frame(WINDOW, 0, 0, window) if window else b""))

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def infer(self, content: bytes, block: bytes | None = None) -> int:
        """Send a call; returns its stream."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        self.send(call(stream_id, content, block))
        return stream_id

    def next_id(self) -> int:
        stream_id, self._next_id = self._next_id, self._next_id + 2
        return stream_id

    def settle(self, timeout_s: float = PATIENCE_S) -> None:
        """Return when the server has read all that was sent, which the kernel stamps from now on.

        The kernel begins to stamp a while after somebody asked for it.
        """
        deadline_s = time.monotonic() + timeout_s
        num_stamped = 0
        while num_stamped < 2:
            assert time.monotonic() < deadline_s, "no stamped answer to a ping"
            num_awaited = self._num_pongs + 1
            self.send(frame(PING, 0, 0, b"settling"))
            while self._num_pongs < num_awaited:
                assert not self.closed, f"hung up: {self.goodbye}"
                assert time.monotonic() < deadline_s, "no answer to a ping"
                self.take(0.1)
            num_stamped += self.stamped

    def take(self, timeout_s: float = 0) -> bool:
        """Take in what has come; returns whether anything had."""
        if self.closed:
            return False
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        try:
            data, ancillary, _, _ = self.socket.recvmsg(1 << 20, 64)
        except ConnectionResetError:
            data, ancillary = b"", []
        now_ns = time.monotonic_ns()
        self.stamped = bool(ancillary)
        if ancillary:
            seconds, nanoseconds = struct.unpack_from("@ll", ancillary[0][2])
            now_ns -= max(time.time_ns() - (seconds * 10**9 + nanoseconds), 0)
        self.closed = not data
        self._buffer += data
        while len(self._buffer) >= 9:
            word, flags, stream_id = struct.unpack_from(">IBI", self._buffer)
            length = word >> 8
            if len(self._buffer) < 9 + length:
                break
            payload = bytes(self._buffer[9 : 9 + length])
            del self._buffer[: 9 + length]
            self._frame(word & 0xFF, flags, stream_id, payload, now_ns)
        return True

    def wait(self, stream_ids: Sequence[int], timeout_s: float = PATIENCE_S) -> list[End]:
        """Wait for the ends of calls."""
        deadline_s = time.monotonic() + timeout_s
        while not all(stream_id in self.ended for stream_id in stream_ids):
            assert not self.closed, f"hung up: {self.goodbye}"
            assert time.monotonic() < deadline_s, "no answer"
            self.take(0.1)
        return [self.ended[stream_id] for stream_id in stream_ids]

    def wait_messages(self, stream_id: int, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until so many messages of a call that goes on are here."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            content, found = self._data.get(stream_id, b""), 0
            position = 0
            while len(content) >= position + 5:
                position += 5 + int(struct.unpack_from(">I", content, position + 1)[0])
                found += position <= len(content)
            if found >= count:
                return
            assert time.monotonic() < deadline_s, f"{found} messages"
            self.take(0.1)

    def wait_closed(self, timeout_s: float = PATIENCE_S) -> tuple[int, str] | None:
        """Wait until the server hangs up; returns what it said."""
        deadline_s = time.monotonic() + timeout_s
        while not self.closed:
            assert time.monotonic() < deadline_s, "still open"
            self.take(0.1)
        return self.goodbye

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes, now_ns: int) -> None:
        if kind == DATA:
            self._data.setdefault(stream_id, bytearray()).extend(payload)
        elif kind == HEADERS:
            found = {str(name): str(value) for name, value in self._decoder.decode(payload)}
            if flags & END_STREAM:
                content = bytes(self._data.pop(stream_id, b""))
                messages = []
                while content:
                    (length,) = struct.unpack_from(">I", content, 1)
                    messages.append(content[5 : 5 + length])
                    content = content[5 + length :]
                status = found.get("grpc-status")
                self.ended[stream_id] = End(
                    None if status is None else int(status),
                    found.get("grpc-message", ""),
                    messages,
                    now_ns,
                    found,
                )
        elif kind == RST:
            self.reset[stream_id] = struct.unpack(">I", payload)[0]
            self.ended.setdefault(stream_id, End(None, "reset", [], now_ns))
        elif kind == PING and flags & ACK:
            self._num_pongs += 1
        elif kind in (SETTINGS, PING) and not flags & ACK:
            with suppress(BrokenPipeError, ConnectionResetError):  # It may have hung up behind it.
                self.socket.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == GOAWAY:
            code = struct.unpack_from(">I", payload, 4)[0]
            self.goodbye = (code, payload[8:].decode())
