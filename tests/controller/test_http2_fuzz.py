"""Random conversations with the core of the HTTP/2 server: whatever the peer does, the books stay true."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from controller.front.http.http2 import (
    MESSAGE_COST_BYTES,
    PREFACE,
    CallHeaders,
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
from tests.kit.random_peer import RandomPeer
from tests.kit.raw_http2 import RST, SETTINGS, frame, headers

MAX_MESSAGE_BYTES = 200_000
FRAMES = 1500
BLOCKS = [headers(), headers("/a/B", ("grpc-timeout", "1S")), headers("/a/C", ("x-bin", "AAA"))]


def some_content(rng: random.Random) -> bytes:
    return bytes(rng.choice([0, 1, 10, 100, 20_000, 40_000, 50_000, 150_000]))


class Open:
    """A gate that lets every call in."""

    like_bytes = 0

    def judge(self, request: CallHeaders, data: bytes, begin: int, end: int) -> bool:
        return True

    def refused_alike(self, count: int) -> None:
        raise AssertionError("none was refused")


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
        view, gate = memoryview(data)[num_direct:], self.rng.choice([None, Open()])
        for event in self.connection.receive(view, num_direct=num_direct, gate=gate):
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


def converse_for(rng: random.Random, count: int) -> None:
    """Exchange so many frames, on as many connections as that takes."""
    num_frames = num_wholly_served = 0
    while num_frames < count:
        peer = RandomPeer(rng, BLOCKS, some_content)
        with suppress(Http2Error):
            converse(peer, rng.choice([10, 100, FRAMES]))
            num_wholly_served += 1
        num_frames += peer.num_drawn
    assert num_wholly_served


@pytest.mark.seeds(8)
def test_the_books_of_a_connection_stay_true_whatever_the_peer_sends(seed: int) -> None:
    converse_for(random.Random(seed), FRAMES)


@pytest.mark.long
@pytest.mark.seeds(8)
def test_the_books_stay_true_for_a_million_frames(seed: int) -> None:
    # A long run draws five times as many seeds.
    converse_for(random.Random(seed), 1_000_000 // 8 // 5)


def converse(peer: RandomPeer, num_frames: int) -> None:
    """Talk for so many frames, or until the peer breaks the protocol."""
    rng, server = peer.rng, Server(peer.rng)
    pending = PREFACE + frame(SETTINGS, 0, 0)
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
