"""Random conversations with the core of the HTTP/2 server: whatever the peer does, the books stay true."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import pytest

from controller.front.http2 import (
    MESSAGE_COST_BYTES,
    PREFACE,
    CallReceived,
    HalfClosed,
    Http2Connection,
    Http2Error,
    LastMessage,
    MessageBroken,
    MessageReceived,
    RequestBegun,
    StreamReset,
    status_block,
)
from tests.kit.raw_http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    RST,
    SETTINGS,
    WINDOW,
    call,
    frame,
    headers,
    message,
)

MAX_MESSAGE_BYTES = 200_000
FRAMES = 1500
BLOCKS = [headers(), headers("/a/B", ("grpc-timeout", "1S")), headers("/a/C", ("x-bin", "AAA"))]


class Peer:
    """Sends frames: most of them such as clients send, some broken, some at the wrong time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.next_id = 1
        #: Open streams, and what is left to send of the message under way.
        self.open: dict[int, bytes] = {}

    def some_frames(self) -> bytes:
        rng = self.rng
        stream_id = rng.choice([*self.open, 0])
        match rng.randrange(14):
            case 0 | 1 | 2:
                content = rng.randbytes(rng.choice([0, 1, 100, 20_000]))
                return call(self._new(), content, rng.choice(BLOCKS))
            case 3 | 4:
                stream_id = self._new()
                self.open[stream_id] = message(bytes(rng.choice([0, 10, 50_000, 150_000])))
                return frame(HEADERS, END_HEADERS, stream_id, rng.choice(BLOCKS))
            case 5 | 6 | 7 | 8 | 9 if self.open:
                return self._go_on()
            case 10:
                size = struct.pack(">I", rng.choice([1, 1000, 1 << 16]))
                return frame(WINDOW, 0, stream_id, size)
            case 11:
                value = rng.choice([0, 10, 65_535, 1 << 20])
                return frame(SETTINGS, 0, 0, struct.pack(">HI", 4, value))
            case 12 if stream_id:
                del self.open[stream_id]
                return frame(RST, 0, stream_id, bytes(4))
            case _ if rng.random() < 0.01:
                return self._broken(stream_id)
            case _:
                return frame(PING, 0, 0, bytes(8))

    def _new(self) -> int:
        stream_id, self.next_id = self.next_id, self.next_id + 2
        return stream_id

    def _go_on(self) -> bytes:
        rng = self.rng
        stream_id = rng.choice(list(self.open))
        left = self.open[stream_id]
        part = left[: rng.choice([1, 5, 9, 16_000, 16_384, len(left)])]
        self.open[stream_id] = left[len(part) :]
        flags = 0
        if not self.open[stream_id] or rng.random() < 0.02:
            if rng.random() < 0.7:
                flags = END_STREAM
                del self.open[stream_id]
            else:
                self.open[stream_id] = message(bytes(rng.choice([0, 3, 40_000])))
        if rng.random() < 0.1:
            padding = rng.randrange(20)
            return frame(DATA, flags | PADDED, stream_id, bytes((padding,)) + part + bytes(padding))
        return frame(DATA, flags, stream_id, part)

    def _broken(self, stream_id: int) -> bytes:
        rng = self.rng
        kind, flags = rng.randrange(12), rng.randrange(256)
        return rng.choice(
            [
                frame(kind, flags, stream_id, rng.randbytes(rng.randrange(40))),
                frame(WINDOW, 0, stream_id, struct.pack(">I", rng.choice([0, 2**31 - 1]))),
                frame(RST, 0, rng.randrange(1 << 31), bytes(4)),
                frame(HEADERS, 0, self._new(), headers()[:30]) + frame(CONTINUATION, 0, 1),
                frame(DATA, 0, stream_id, struct.pack(">BI", 2, 10)),
                frame(DATA, 0, stream_id, struct.pack(">BI", 0, 1 << 30)),
                rng.randbytes(rng.randrange(1, 50)),
            ]
        )


class Server:
    """Answers as the real one does, and keeps books of its own."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.connection = Http2Connection(max_message_bytes=MAX_MESSAGE_BYTES)
        #: Open calls, with the lengths of the messages that are unread.
        self.calls: dict[int, list[int]] = {}

    def receive(self, data: bytes) -> None:
        room = self.connection.direct()
        num_direct = 0 if room is None else min(len(room), len(data))
        if room is not None:
            room[:num_direct] = data[:num_direct]
        for event in self.connection.receive(memoryview(data)[num_direct:], num_direct=num_direct):
            stream_id = event.stream_id
            match event:
                case CallReceived() | RequestBegun():
                    assert stream_id not in self.calls
                    self.calls[stream_id] = []
                case _ if stream_id not in self.calls:
                    pass  # It was ended for an event before.
                case MessageReceived():
                    self.calls[stream_id].append(len(event.message))
                case StreamReset():
                    del self.calls[stream_id]
                case MessageBroken():
                    self._end(stream_id)
                case LastMessage() | HalfClosed():
                    pass

    def do_something(self) -> None:
        for stream_id in list(self.calls):
            choice = self.rng.randrange(6)
            if choice == 0 and self.calls[stream_id]:
                self.connection.message_read(stream_id, self.calls[stream_id].pop())
            elif choice == 1:
                size = self.rng.choice([0, 40, 5000, 70_000])
                self.connection.answer(stream_id, self.parts(size))
                del self.calls[stream_id]
            elif choice == 2:
                size = self.rng.choice([0, 9, 30_000])
                self.connection.send_message(stream_id, self.parts(size))
            elif choice == 3 and self.rng.random() < 0.3:
                self._end(stream_id)

    def parts(self, size: int) -> list[bytes]:
        first = self.rng.randint(0, size)
        return [bytes(first), bytes(size - first)]

    def _end(self, stream_id: int) -> None:
        self.connection.send_end(stream_id, status_block(3, "no"))
        del self.calls[stream_id]

    def check(self) -> None:
        unread = sum(sum(sizes) + MESSAGE_COST_BYTES * len(sizes) for sizes in self.calls.values())
        assert self.connection.held_bytes >= unread
        assert self.connection.queued_bytes >= 0


@pytest.mark.seeds(8)
def test_the_books_of_a_connection_stay_true_whatever_the_peer_sends(seed: int) -> None:
    rng = random.Random(seed)
    num_frames = num_connections = num_wholly_served = 0
    while num_frames < FRAMES:
        num_connections += 1
        with suppress(Http2Error):
            num_frames += converse(rng, FRAMES - num_frames)
            num_wholly_served += 1
        num_frames += 1
    assert num_wholly_served


def converse(rng: random.Random, num_frames: int) -> int:
    """Talk until somebody breaks the protocol, or for so many frames; returns how many they were."""
    peer, server = Peer(rng), Server(rng)
    pending = PREFACE + frame(SETTINGS, 0, 0)
    num_frames = rng.randrange(num_frames) + 1
    for _ in range(num_frames):
        pending += peer.some_frames()
        while len(pending) > rng.choice([0, 0, 0, 5000, 100_000]):
            size = rng.choice([1, 9, 100, 65_536, 262_144])
            server.receive(pending[:size])
            pending = pending[size:]
            server.check()
        server.do_something()
        server.check()
        server.connection.take_output()
    server.receive(pending)
    # All is given back with the last call.
    for stream_id in range(1, peer.next_id, 2):
        server.receive(frame(RST, 0, stream_id, bytes(4)))
    assert server.calls == {}
    assert (server.connection.held_bytes, server.connection.queued_bytes) == (0, 0)
    return num_frames
