"""The sans-I/O core of the HTTP/2 server: any cut of the bytes, any frames, hostile peers."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.front.http.http2 import (
    DIRECT_BYTES_MIN,
    HEADER_BLOCK_BYTES_MAX,
    IDLE_FRAMES_MAX,
    MESSAGE_COST_BYTES,
    PREFACE,
    RESETS_MAX,
    UNREAD_BYTES_MAX,
    WINDOW_BYTES,
    CallHeaders,
    CallReceived,
    ErrorCode,
    Event,
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
    ACK,
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

MAX_MESSAGE_BYTES = 1 << 20


def greeted(**settings: int) -> Http2Connection:
    """A connection whose peer has sent its preface and settings, and heard ours."""
    connection = Http2Connection(max_message_bytes=MAX_MESSAGE_BYTES)
    known = {"initial_window": 4, "max_frame": 5}
    pairs = b"".join(struct.pack(">HI", known[name], value) for name, value in settings.items())
    connection.receive(PREFACE + frame(SETTINGS, 0, 0, pairs))
    connection.take_output()
    return connection


def sent_by(connection: Http2Connection) -> list[tuple[int, int, int, bytes]]:
    """Frames that a connection queued: type, flags, stream, payload."""
    data = b"".join(connection.take_output())
    frames = []
    while data:
        word, flags, stream_id = struct.unpack_from(">IBI", data)
        frames.append((word & 0xFF, flags, stream_id, data[9 : 9 + (word >> 8)]))
        data = data[9 + (word >> 8) :]
    return frames


def apart(events: list[Event]) -> list[Event]:
    """The same events, with what came in one piece as if it had come in parts."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, CallReceived):
            stream_id, arrival_ns = event.stream_id, event.arrival_ns
            found.append(RequestBegun(stream_id, event.request, arrival_ns))
            found.append(MessageReceived(stream_id, event.message, arrival_ns))
            found.append(HalfClosed(stream_id))
        elif isinstance(event, LastMessage):
            found.append(MessageReceived(event.stream_id, event.message, event.arrival_ns))
            found.append(HalfClosed(event.stream_id))
        else:
            found.append(event)
    return found


def messages_in(events: list[Event]) -> list[bytes]:
    return [bytes(event.message) for event in apart(events) if isinstance(event, MessageReceived)]


def summary(events: list[Event]) -> list[object]:
    return [
        (type(event).__name__, event.stream_id, getattr(event, "message", ""))
        for event in apart(events)
    ]


def receive_as_a_server(connection: Http2Connection, data: bytes) -> list[Event]:
    """Have a connection receive bytes as a socket would bring them, the first ones where they belong."""
    room = connection.direct()
    num_direct = 0 if room is None else min(len(room), len(data))
    if room is not None:
        room[:num_direct] = data[:num_direct]
    return connection.receive(data[num_direct:], num_direct=num_direct)


def refused(connection: Http2Connection, data: bytes) -> Http2Error:
    with pytest.raises(Http2Error) as caught:
        connection.receive(data)
    return caught.value


# --- what a peer may do ---------------------------------------------------------------------------


def test_a_small_call_is_headers_a_message_and_the_end() -> None:
    begun, received = greeted().receive(call(1, b"hello"), 17)
    assert isinstance(begun, RequestBegun)
    assert begun.request.path == "/inference.GRPCInferenceService/ModelInfer"
    assert received == LastMessage(1, b"hello", 17)


def test_a_call_whose_headers_are_known_is_one_event_and_is_not_held() -> None:
    connection = greeted()
    connection.receive(call(1, b"first"), 17)
    [event] = connection.receive(call(3, b"second"), 18)
    assert isinstance(event, CallReceived)
    assert (event.stream_id, event.message, event.arrival_ns) == (3, b"second", 18)
    assert event.request.path == "/inference.GRPCInferenceService/ModelInfer"
    assert connection.held_bytes == 0
    assert [type(e) for e in apart([event])] == [RequestBegun, MessageReceived, HalfClosed]


def test_a_call_with_known_headers_that_opens_its_window_is_one_event() -> None:
    connection = greeted(initial_window=3)
    connection.receive(call(1, b"first"), 17)
    [event] = connection.receive(call(3, b"second", opened=7), 18)
    assert isinstance(event, CallReceived)
    assert event.message == b"second"
    # The window is open by both: 10 bytes of the 15 leave.
    connection.answer(3, [b"0123456789"])
    assert [len(f[3]) for f in sent_by(connection) if f[0] == DATA] == [10]


class Refusing:
    """A gate that refuses messages whose beginning is `busy`, and notes what it was asked."""

    like_bytes = 4

    def __init__(self) -> None:
        self.judged: list[bytes] = []
        self.num_alike = 0

    def judge(self, request: CallHeaders, data: bytes, begin: int, end: int) -> bytes | bool:
        self.judged.append(data[begin:end])
        return status_block(8, "busy") if data.startswith(b"busy", begin) else True

    def refused_alike(self, count: int) -> None:
        self.num_alike += count


@pytest.mark.parametrize("opened", [0, 5])
def test_calls_like_one_that_was_refused_are_refused_with_it(opened: int) -> None:
    connection, gate = greeted(), Refusing()
    connection.receive(call(1, b"first"))
    many = b"".join(
        call(number, b"busy, %04d" % number, opened=opened) for number in range(3, 203, 2)
    )
    rest = call(203, b"idle", opened=opened)
    cut = call(205, b"busy, 0205", opened=opened)
    [event] = connection.receive(many + rest + cut[:-1], gate=gate)
    assert isinstance(event, CallReceived)
    assert event.message == b"idle"
    assert gate.judged == [b"busy, 0003", b"idle"]
    assert gate.num_alike == 99
    ends = [f for f in sent_by(connection) if f[0] == HEADERS]
    assert [stream_id for _, _, stream_id, _ in ends] == list(range(3, 203, 2))
    assert all(
        flags == END_HEADERS | END_STREAM and b"busy" in block for _, flags, _, block in ends
    )
    # One that was cut off waits for its rest.
    assert connection.receive(cut[-1:] + call(207, b"busy, 0207", opened=opened), gate=gate) == []
    assert gate.judged[2:] == [b"busy, 0205"]
    assert gate.num_alike == 100
    assert [f[2] for f in sent_by(connection)] == [205, 207]


def test_a_call_that_was_cut_off_came_when_its_beginning_did_and_needs_no_gate_for_its_rest() -> (
    None
):
    connection = greeted()
    connection.receive(call(1, b"first"))
    second = call(3, b"second")
    assert connection.receive(second[:-3], 17, gate=Refusing()) == []
    assert connection.receive(second[-3:-1], 18, gate=Refusing()) == []
    event, other = connection.receive(second[-1:] + call(5, b"third"), 19)
    assert isinstance(event, CallReceived)
    assert isinstance(other, CallReceived)
    assert (event.message, event.arrival_ns, other.arrival_ns) == (b"second", 17, 19)


@pytest.mark.parametrize(
    "begun",
    [
        frame(HEADERS, END_HEADERS, 3, headers()),
        frame(HEADERS, END_HEADERS, 3, headers()) + frame(DATA, 0, 3, message(b"second"))[:-1],
        call(3, bytes(DIRECT_BYTES_MIN))[:-1],
    ],
    ids=["headers", "more", "large"],
)
def test_behind_a_gate_other_calls_that_are_cut_off_begin(begun: bytes) -> None:
    connection = greeted()
    connection.receive(call(1, b"first"))
    assert [type(e) for e in connection.receive(begun, gate=Refusing())] == [RequestBegun]


@pytest.mark.parametrize(
    "different",
    [
        call(5, b"idle, 0005"),
        call(5, b"busy, 00005"),
        call(5, b"busy, 0005", headers("/inference.GRPCInferenceService/ModelReady")),
        call(5, b"busy, 0005", opened=5),
    ],
    ids=["beginning", "length", "headers", "window"],
)
def test_calls_unlike_one_that_was_refused_are_judged_for_themselves(different: bytes) -> None:
    connection, gate = greeted(), Refusing()
    connection.receive(call(1, b"first"))
    connection.receive(call(3, b"busy, 0003") + different, gate=gate)
    assert gate.num_alike == 0


@pytest.mark.parametrize("stream_id", [1, 3, 4, 2**31 + 5])
def test_no_number_of_a_stream_is_taken_twice_or_from_the_server_with_calls_alike(
    stream_id: int,
) -> None:
    connection, gate = greeted(), Refusing()
    connection.receive(call(1, b"first"))
    with suppress(Http2Error):
        connection.receive(call(3, b"busy, 0003") + call(stream_id, b"busy, 0004"), gate=gate)
    assert gate.num_alike == 0
    assert [f[2] for f in sent_by(connection) if f[0] == HEADERS][:1] == [3]


def test_calls_refused_together_fill_the_connections_window_as_others_do() -> None:
    connection, gate = greeted(), Refusing()
    connection.receive(call(1, b"first"))
    content = b"busy" + bytes(16_000)
    for number in range(3, 1003, 100):
        calls = b"".join(call(number + more, content) for more in range(0, 100, 2))
        assert connection.receive(calls, gate=gate) == []
    # 8 MB came, twice as much as the window: it was opened again, by what had come at each time.
    frames = sent_by(connection)
    opened = sum(struct.unpack(">I", f[3])[0] for f in frames if f[0] == WINDOW and not f[2])
    assert 7 << 20 < opened <= 500 * (len(content) + 5) + 10
    assert len([f for f in frames if f[0] == HEADERS]) == 500


@pytest.mark.parametrize("opened", [2**31 - 3, 2**31 - 1])
def test_a_window_beyond_the_greatest_is_refused_between_headers_and_message(opened: int) -> None:
    connection = greeted(initial_window=3)
    connection.receive(call(1, b"first"))
    error = refused(connection, call(3, b"second", opened=opened))
    assert error.code == ErrorCode.FLOW_CONTROL_ERROR


def test_a_large_message_is_received_where_it_belongs() -> None:
    connection = greeted()
    content = bytes(range(256)) * 2000
    data = call(1, content)
    connection.receive(data[:60_000], 17)
    room = connection.direct()
    assert room is not None
    assert len(room) == len(data) - 60_000
    room[:100_000] = data[60_000:160_000]
    assert connection.receive(b"", 18, num_direct=100_000) == []
    assert connection.held_bytes == 160_000 - len(data) + len(content)
    room = connection.direct()
    assert room is not None
    room[:] = data[160_000:]
    # What lies behind it in the socket comes by the same look.
    events = connection.receive(call(3, b"next"), 19, num_direct=len(room))
    received, closed, *others = apart(events)
    assert isinstance(received, MessageReceived)
    assert (bytes(received.message), received.arrival_ns) == (content, 17)
    assert closed == HalfClosed(1)
    assert messages_in(others) == [b"next"]
    assert connection.direct() is None


def interleaved(contents: dict[int, bytes]) -> list[bytes]:
    """Frames of several streams in turns, the last ones padded."""
    parts = [frame(HEADERS, END_HEADERS, stream_id, headers()) for stream_id in contents]
    for begin in range(0, max(map(len, contents.values())), 16_000):
        for stream_id, content in contents.items():
            part = content[begin : begin + 16_000]
            if begin + 16_000 < len(content):
                parts.append(frame(DATA, 0, stream_id, part))
            elif part:
                padded = b"\x03" + part + bytes(3)
                parts.append(frame(DATA, END_STREAM | PADDED, stream_id, padded))
    return parts


def traffic() -> bytes:
    """Everything that a peer may send: split, padded, compressed, continued, mixed."""
    block = headers("/a/B", ("grpc-encoding", "gzip"), ("grpc-timeout", "10S"))
    squeezed = gzip.compress(b"squeezed" * 100)
    content = message(b"x" * 40_000)
    return b"".join(
        (
            PREFACE,
            frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20)),
            call(1, b"one"),
            frame(HEADERS, 0, 3, block[:20]),
            frame(CONTINUATION, 0, 3, block[20:40]),
            frame(CONTINUATION, END_HEADERS, 3, block[40:]),
            frame(PING, 0, 0, b"12345678"),
            frame(DATA, 0, 3, struct.pack(">BI", 1, len(squeezed)) + squeezed),
            frame(HEADERS, END_HEADERS | PADDED, 5, b"\x07" + headers() + bytes(7)),
            frame(DATA, 0, 5, content[:3]),
            frame(DATA, PADDED, 5, b"\x05" + content[3:20_000] + bytes(5)),
            frame(DATA, 0, 3, message(b"") + message(b"z")[:4]),
            frame(DATA, END_STREAM, 3, message(b"z")[4:]),
            frame(DATA, END_STREAM, 5, content[20_000:]),
            frame(HEADERS, END_HEADERS, 7, headers()),
            frame(RST, 0, 7, struct.pack(">I", 8)),
            frame(0xFA, 0, 0, b"whatever"),
            frame(DATA, END_STREAM | PADDED, 7, b"\x02" + bytes(2)),
            call(9, b"in one piece"),
            frame(HEADERS, END_HEADERS, 11, headers()),
            frame(DATA, END_STREAM, 11, message(b"large" * 20_000)),
            *interleaved({13: message(b"split" * 20_000), 15: message(b"parts" * 30_000)}),
            call(17, b"last"),
        )
    )


@settings(max_examples=200, deadline=None)
@given(cuts=st.lists(st.integers(0, len(traffic())), max_size=40))
def test_however_the_bytes_are_cut_the_events_are_the_same(cuts: list[int]) -> None:
    whole = Http2Connection(max_message_bytes=MAX_MESSAGE_BYTES)
    events = whole.receive(traffic())
    connection = Http2Connection(max_message_bytes=MAX_MESSAGE_BYTES)
    cut_events: list[Event] = []
    data, previous = traffic(), 0
    for cut in [*sorted(cuts), len(data)]:
        cut_events += receive_as_a_server(connection, data[previous:cut])
        previous = cut
    assert summary(cut_events) == summary(events)
    # Messages of calls that came in one piece were never held.
    for each, event in [(whole, e) for e in events] + [(connection, e) for e in cut_events]:
        if isinstance(event, MessageReceived):
            each.message_read(event.stream_id, len(event.message))
    assert connection.held_bytes == whole.held_bytes == 0


def test_bytes_that_come_one_by_one_are_understood() -> None:
    connection = Http2Connection(max_message_bytes=MAX_MESSAGE_BYTES)
    events = [e for byte in traffic() for e in connection.receive(bytes((byte,)))]
    assert messages_in(events) == [
        b"one",
        b"squeezed" * 100,
        b"",
        b"z",
        b"x" * 40_000,
        b"in one piece",
        b"large" * 20_000,
        b"split" * 20_000,
        b"parts" * 30_000,
        b"last",
    ]
    assert StreamReset(7) in events


def test_a_message_has_the_arrival_of_its_first_byte() -> None:
    connection = greeted()
    data = call(1, b"x" * 100)
    events = connection.receive(data[:5], 10)
    events += connection.receive(data[5:-50], 20)
    events = apart(events + connection.receive(data[-50:] + call(3, b"next"), 30))
    assert [e.arrival_ns for e in events if isinstance(e, RequestBegun)] == [10, 30]
    assert [e.arrival_ns for e in events if isinstance(e, MessageReceived)] == [20, 30]


def test_headers_in_the_peers_table_mean_what_they_meant_when_they_were_sent() -> None:
    connection = greeted()
    encoder = Encoder()
    paths = ["/a/A", "/a/B", "/a/A", "/a/C", "/a/A", "/a/B", "/a/A", "/a/A"]
    found = []
    for number, path in enumerate(paths):
        pairs = [(":method", "POST"), (":path", path), ("content-type", "application/grpc")]
        pairs.append(("grpc-timeout", f"{number % 3}S"))
        block = encoder.encode(pairs)
        [begun] = connection.receive(frame(HEADERS, END_HEADERS, 2 * number + 1, block))
        assert isinstance(begun, RequestBegun)
        found.append((begun.request.path, begun.request.timeout_ns))
    assert found == [(path, number % 3 * 10**9) for number, path in enumerate(paths)]


def test_long_headers_that_come_again_are_decoded_once_and_fill_no_memory() -> None:
    connection = greeted()
    streams = count(1, 2)

    def request(token: str) -> CallHeaders:
        block = b"".join(
            Encoder().encode([(name, value, True)], huffman=False)
            for name, value in (
                *((":method", "POST"), (":path", "/a/B"), ("content-type", "application/grpc")),
                ("authorization", f"Bearer {token}"),
            )
        )
        [begun] = connection.receive(frame(HEADERS, END_HEADERS, next(streams), block))
        assert isinstance(begun, RequestBegun)
        connection.receive(frame(RST, 0, begun.stream_id, bytes(4)))
        return begun.request

    long = "t" * 3000
    first = request(long)
    assert request(long) is first
    # Whoever shows another each time has all of them forgotten now and then, and goes on.
    tracemalloc.start()
    try:
        for number in range(2000):
            request(f"{number:04}" * 750)
        assert tracemalloc.get_traced_memory()[0] < 2 << 20
    finally:
        tracemalloc.stop()
    again = request(long)
    assert again is not first
    assert request(long) is again


@pytest.mark.parametrize(
    ("encoding", "squeeze"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_compressed_messages_are_inflated_up_to_the_limit(
    encoding: str, squeeze: Callable[[bytes], bytes]
) -> None:
    block = headers("/a/B", ("grpc-encoding", encoding))

    def send(content: bytes) -> list[Event]:
        body = struct.pack(">BI", 1, len(content)) + content
        opening = frame(HEADERS, END_HEADERS, 1, block)
        return greeted().receive(opening + frame(DATA, END_STREAM, 1, body))

    assert messages_in(send(squeeze(b"abc" * 1000))) == [b"abc" * 1000]
    [_, bomb, *_] = send(squeeze(bytes(MAX_MESSAGE_BYTES + 1)))
    assert isinstance(bomb, MessageBroken)
    assert "larger than max" in bomb.text
    for broken in (b"no such thing", squeeze(b"abc")[:-3]):
        [_, event, *_] = send(broken)
        assert isinstance(event, MessageBroken)


def test_a_message_longer_than_the_limit_is_refused_before_it_comes() -> None:
    connection = greeted()
    opening = frame(HEADERS, END_HEADERS, 1, headers())
    announced = struct.pack(">BI", 0, MAX_MESSAGE_BYTES + 1)
    [_, broken] = connection.receive(opening + frame(DATA, 0, 1, announced))
    assert broken == MessageBroken(
        1, 8, f"Received message larger than max ({MAX_MESSAGE_BYTES + 1} vs. {MAX_MESSAGE_BYTES})"
    )


# --- answers --------------------------------------------------------------------------------------


def answered(connection: Http2Connection, content: bytes) -> None:
    connection.receive(call(1, b"question"))
    connection.send_message(1, (content,))
    connection.send_end(1, status_block(0))


def test_an_answer_waits_for_the_streams_window() -> None:
    connection = greeted(initial_window=10)
    answered(connection, b"0123456789")
    assert [f[0] for f in sent_by(connection) if f[2]] == [HEADERS, DATA]
    assert connection.queued_bytes == 5
    connection.receive(frame(WINDOW, 0, 1, struct.pack(">I", 100)))
    (kind, _, _, rest), (end, flags, _, _) = sent_by(connection)
    assert (kind, rest, end, flags & END_STREAM) == (DATA, b"56789", HEADERS, END_STREAM)
    assert connection.queued_bytes == 0


def test_an_answer_waits_for_the_connections_window() -> None:
    connection = greeted(initial_window=1 << 20)
    answered(connection, bytes(100_000))
    assert sum(len(f[3]) for f in sent_by(connection) if f[0] == DATA) == 65_535
    connection.receive(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 20)))
    frames = sent_by(connection)
    assert sum(len(f[3]) for f in frames if f[0] == DATA) == 100_005 - 65_535
    assert frames[-1][0] == HEADERS


@given(
    st.lists(st.sampled_from([0, 1, 9, 16_000, 16_379, 16_384, 40_000]), min_size=1, max_size=5),
    st.sampled_from([1, 100, 16_384, 1 << 20]),
    st.sampled_from([1000, 16_384, 1 << 20]),
)
def test_an_answer_in_parts_arrives_in_one_piece(
    sizes: list[int], initial_window: int, increment: int
) -> None:
    connection = greeted(initial_window=initial_window)
    connection.receive(call(1, b"question"))
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]
    connection.answer(1, parts)
    frames = sent_by(connection)
    while frames[-1][0] != HEADERS or not frames[-1][1] & END_STREAM:
        update = frame(WINDOW, 0, 0, struct.pack(">I", increment))
        connection.receive(update + frame(WINDOW, 0, 1, struct.pack(">I", increment)))
        frames += sent_by(connection)
    assert b"".join(f[3] for f in frames if f[0] == DATA) == message(b"".join(parts))
    assert max(len(f[3]) for f in frames) <= 16_384
    assert connection.queued_bytes == 0


def test_a_large_answer_is_sent_from_where_it_lies() -> None:
    connection = greeted(initial_window=1 << 20)
    connection.receive(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 20)))
    connection.receive(call(1, b"question"))
    tensor = bytes(100_000)
    connection.answer(1, (b"header", memoryview(tensor)))
    out = connection.take_output()
    lies_there = [part for part in out if isinstance(part, memoryview) and part.obj is tensor]
    assert sum(map(len, lies_there)) == len(tensor)


def test_a_smaller_initial_window_holds_for_open_streams() -> None:
    connection = greeted(initial_window=100)
    connection.receive(call(1, b"question"))
    connection.receive(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)))
    connection.send_message(1, (b"answer",))
    assert DATA not in [f[0] for f in sent_by(connection)]
    connection.receive(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 100)))
    assert [f[3][5:] for f in sent_by(connection) if f[0] == DATA] == [b"answer"]


def test_settings_are_acknowledged_before_what_they_allow_is_sent() -> None:
    connection = greeted(initial_window=10)
    answered(connection, b"0123456789")
    sent_by(connection)
    connection.receive(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 100)))
    assert [f[0] for f in sent_by(connection)] == [SETTINGS, DATA, HEADERS]


@pytest.mark.parametrize("length", [20_000, 89_999, 99_995, 100_000])
def test_no_frame_is_longer_than_the_peer_allows(length: int) -> None:
    connection = greeted(initial_window=1 << 20, max_frame=20_000)
    connection.receive(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 20)))
    content = bytes(range(250)) * 400
    answered(connection, content[:length])
    frames = sent_by(connection)
    sizes = [len(f[3]) for f in frames if f[0] == DATA]
    assert max(sizes) == 20_000
    sent = b"".join(f[3] for f in frames if f[0] == DATA)
    assert sent == message(content[:length])
    assert frames[-1][0] == HEADERS
    assert connection.queued_bytes == 0


def test_a_call_that_ends_early_lets_the_client_stop_sending() -> None:
    connection = greeted()
    connection.receive(frame(HEADERS, END_HEADERS, 1, headers()))
    connection.send_end(1, status_block(8, "full"))
    assert [f[0] for f in sent_by(connection)] == [HEADERS, RST]
    # What was under way is no error.
    assert connection.receive(frame(DATA, END_STREAM, 1, message(b"late"))) == []


def test_who_sends_gets_new_room_and_who_is_not_read_does_not() -> None:
    connection = greeted()
    connection.receive(frame(HEADERS, END_HEADERS, 1, headers()))
    content = message(bytes(500_000))
    for _ in range(40):
        connection.receive(frame(DATA, 0, 1, content))
        connection.message_read(1, 500_000)
    assert {f[2] for f in sent_by(connection) if f[0] == WINDOW} == {0, 1}
    error = refused(connection, frame(DATA, 0, 1, content) * 80)
    assert error.code is ErrorCode.FLOW_CONTROL_ERROR
    assert connection.held_bytes <= 2 * WINDOW_BYTES


def test_messages_that_are_coming_in_or_unread_are_known_to_be_held() -> None:
    connection = greeted()
    for stream_id in (1, 3, 5):
        connection.receive(frame(HEADERS, END_HEADERS, stream_id, headers()))
    connection.receive(frame(DATA, 0, 1, message(b"whole")))
    connection.receive(frame(DATA, 0, 3, message(b"in pieces")[:9]))
    assert connection.holding() == [1, 3]
    connection.message_read(1, len(b"whole"))
    assert connection.holding() == [3]


def test_empty_messages_that_nobody_reads_end_their_call() -> None:
    connection = greeted()
    connection.receive(frame(HEADERS, END_HEADERS, 1, headers()))
    found: list[Event] = []
    while not any(isinstance(event, MessageBroken) for event in found):
        found += connection.receive(frame(DATA, 0, 1, message(b"") * 10_000))
        assert len(found) * MESSAGE_COST_BYTES < 2 * UNREAD_BYTES_MAX
    connection.send_end(1, status_block(8, "unread"))
    assert connection.held_bytes == 0


# --- what a peer may not do -----------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    frames=st.lists(
        st.tuples(
            st.integers(0, 12),
            st.integers(0, 255),
            st.integers(0, 9),
            st.binary(max_size=60) | st.just(headers()) | st.just(message(b"abc")),
        ),
        max_size=30,
    ),
    tail=st.binary(max_size=40),
)
def test_no_frames_raise_anything_but_the_protocols_error(
    frames: list[tuple[int, int, int, bytes]], tail: bytes
) -> None:
    connection = greeted()
    try:
        for kind, flags, stream_id, payload in frames:
            for event in connection.receive(frame(kind, flags, stream_id, payload)):
                if isinstance(event, HalfClosed):
                    connection.send_message(event.stream_id, (b"ans", b"wer"))
                    connection.send_end(event.stream_id, status_block(0))
        connection.receive(tail)
    except Http2Error as error:
        connection.close(error.code, str(error))
    connection.take_output()


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_no_bytes_raise_anything_but_the_protocols_error(data: bytes) -> None:
    for connection in (greeted(), Http2Connection(max_message_bytes=100)):
        with suppress(Http2Error):
            connection.receive(data)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(PING, 0, 0, bytes(8)), ErrorCode.ENHANCE_YOUR_CALM),
        (frame(SETTINGS, 0, 0), ErrorCode.ENHANCE_YOUR_CALM),
        (frame(SETTINGS, ACK, 0), ErrorCode.ENHANCE_YOUR_CALM),
        (frame(2, 0, 1, bytes(5)), ErrorCode.ENHANCE_YOUR_CALM),
        (frame(0xFA, 0, 0), ErrorCode.ENHANCE_YOUR_CALM),
        (frame(DATA, 0, 1), ErrorCode.ENHANCE_YOUR_CALM),
        (frame(WINDOW, 0, 1, struct.pack(">I", 1)), ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_a_flood_of_frames_that_bring_nothing_ends(data: bytes, code: ErrorCode) -> None:
    connection = greeted()
    connection.receive(frame(HEADERS, END_HEADERS, 1, headers()))
    assert refused(connection, data * (IDLE_FRAMES_MAX + 1)).code is code


def test_pings_between_requests_or_as_time_goes_by_are_no_flood() -> None:
    connection = greeted()
    ping = frame(PING, 0, 0, bytes(8))
    for number in range(IDLE_FRAMES_MAX):
        connection.receive(ping * 5 + call(2 * number + 1, b""))
        connection.send_end(2 * number + 1, status_block(0))
        connection.take_output()
    for _ in range(20):
        connection.receive(ping * 900)
        connection.forgive()


def test_calls_that_are_taken_back_at_once_end_the_connection() -> None:
    connection = greeted()
    opened = frame(HEADERS, END_HEADERS, 0, headers())

    def pair(number: int) -> bytes:
        stream_id = struct.pack(">I", 2 * number + 1)
        return opened[:5] + stream_id + opened[9:] + frame(RST, 0, 2 * number + 1, bytes(4))

    connection.receive(b"".join(map(pair, range(RESETS_MAX))))
    assert refused(connection, pair(RESETS_MAX)).code is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "data",
    [
        frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, b"") * 100,
        frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, bytes(10_000)) * 3,
        frame(HEADERS, 0, 1, bytes(HEADER_BLOCK_BYTES_MAX + 1)),
        frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, bytes(8)),
        # A header of 4,000 bytes that goes into the table, and is named a thousand times.
        frame(HEADERS, END_HEADERS, 1, b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000 + b"\xbe" * 1000),
    ],
    ids=["many-empty", "long", "long-frame", "interrupted", "bomb"],
)
def test_headers_that_do_not_end_do(data: bytes) -> None:
    refused(greeted(), data)


def test_a_lie_about_a_messages_length_costs_nothing() -> None:
    connection = greeted()
    for number in range(1000):
        opened = frame(HEADERS, END_HEADERS, 2 * number + 1, headers())
        announced = struct.pack(">BI", 0, MAX_MESSAGE_BYTES)
        connection.receive(opened + frame(DATA, 0, 2 * number + 1, announced + b"x"))
    assert connection.held_bytes == 1000


def test_a_stream_that_ends_inside_a_message_is_broken() -> None:
    connection = greeted()
    opened = frame(HEADERS, END_HEADERS, 1, headers())
    events = connection.receive(opened + frame(DATA, END_STREAM, 1, message(b"whole")[:-1]))
    assert [type(event) for event in events] == [RequestBegun, MessageBroken, HalfClosed]
    assert connection.held_bytes == 0


def test_what_is_not_grpc_hears_so_as_http() -> None:
    connection = greeted()
    get = headers().replace(b"\x04POST", b"\x03GET")
    text = headers().replace(b"\x10application/grpc", b"\x0atext/plain")
    found = []
    for stream_id, block in ((1, get), (3, text)):
        assert connection.receive(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)) == []
        found += [f[3][2:] for f in sent_by(connection)]
    assert found == [b"405", b"415"]
