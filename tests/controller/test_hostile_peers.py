"""Peers that mean harm: others are served meanwhile and afterwards, and our own server says what was wrong."""

from __future__ import annotations

import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from clockwright.v1 import inference_pb2 as pb
from controller.front.admission.limits import AdmissionLimits
from tests.kit.front_end import serving_in_thread
from tests.kit.raw_http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    RST,
    SETTINGS,
    WINDOW,
    RawClient,
    call,
    frame,
    headers,
    literal,
    message,
)

#: More of them than any bound allows, or so many that memory would tell.
MANY = 25_000
MIB = 1 << 20


def question() -> bytes:
    request = pb.ModelInferRequest(model_name="double")
    request.parameters["slo_ms"].int64_param = 600_000
    request.inputs.add(name="x", datatype="FP32", shape=(1, 3))
    request.raw_input_contents.append(struct.pack("<3f", 1, 2, 3))
    return request.SerializeToString()


def opened(stream_id: int) -> bytes:
    return frame(HEADERS, END_HEADERS, stream_id, headers())


def rapid_reset() -> Iterator[bytes]:
    # A slow machine forgives some thousands while it reads them.
    for stream_id in range(1, 2 * 60_000, 2):
        yield opened(stream_id) + frame(RST, 0, stream_id, bytes(4))


def continuations() -> Iterator[bytes]:
    yield frame(HEADERS, 0, 1, literal("a", "b"))
    for _ in range(MANY):
        yield frame(CONTINUATION, 0, 1, literal("a", "b"))


def empty_continuations() -> Iterator[bytes]:
    yield frame(HEADERS, 0, 1)
    for _ in range(MANY):
        yield frame(CONTINUATION, 0, 1)


def settings_flood() -> Iterator[bytes]:
    for number in range(MANY):
        yield frame(SETTINGS, 0, 0, struct.pack(">HI", 4, number))


def settings_with_many_streams() -> Iterator[bytes]:
    for stream_id in range(1, 10_000, 2):
        yield opened(stream_id)
    for number in range(MANY):
        yield frame(SETTINGS, 0, 0, struct.pack(">HI", 4, number))


def pings() -> Iterator[bytes]:
    for _ in range(MANY):
        yield frame(PING, 0, 0, bytes(8))


def hpack_bomb() -> Iterator[bytes]:
    # One long value goes into the table; each octet behind it is the whole of it again.
    value = b"\x40\x01a\x7f\x81\x1e" + b"v" * 4000
    yield frame(HEADERS, END_HEADERS, 1, headers() + value + b"\xbe" * 12_000)


def empty_fields() -> Iterator[bytes]:
    # A field without name or value takes three octets on the wire.
    for stream_id in range(1, 2 * 1100, 2):
        yield frame(HEADERS, END_HEADERS, stream_id, b"\x00\x00\x00" * 5400)


def long_padding() -> Iterator[bytes]:
    yield opened(1)
    for _ in range(MANY):
        yield frame(DATA, PADDED, 1, b"\xff" + bytes(255))


def window_beyond_all() -> Iterator[bytes]:
    yield opened(1)
    for _ in range(3):
        yield frame(WINDOW, 0, 1, struct.pack(">I", 2**31 - 1))


def windows_of_one() -> Iterator[bytes]:
    yield opened(1)
    for _ in range(MANY):
        yield frame(WINDOW, 0, 1, struct.pack(">I", 1))


def too_long_a_frame() -> Iterator[bytes]:
    yield opened(1) + struct.pack(">IBI", (16 * MIB - 1) << 8 | DATA, 0, 1)


def too_short_a_frame() -> Iterator[bytes]:
    yield frame(PING, 0, 0, b"1234567")


def zero_windows() -> Iterator[bytes]:
    yield frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    for stream_id in range(1, 6000, 2):
        yield call(stream_id, question())


def dribbled_windows() -> Iterator[bytes]:
    # Answers in frames of one byte each. No more windows than the calls earn, since one that comes before its
    # answer is there brings nothing.
    yield frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    for stream_id in range(1, 400, 2):
        yield call(stream_id, question())
    for number in range(20_000):
        yield frame(WINDOW, 0, 1 + 2 * (number % 200), struct.pack(">I", 1))


def calls_of_headers_alone() -> Iterator[bytes]:
    for stream_id in range(1, 2 * (MANY - 1000), 2):
        yield opened(stream_id)


def half_closed_streams() -> Iterator[bytes]:
    for stream_id in range(1, 2 * MANY, 2):
        yield frame(HEADERS, END_HEADERS | END_STREAM, stream_id, headers())


def streams_that_ask_once() -> Iterator[bytes]:
    block = headers("/inference.GRPCInferenceService/ModelStreamInfer")
    for stream_id in range(1, 2 * 12_000, 2):
        yield frame(HEADERS, END_HEADERS, stream_id, block) + frame(
            DATA, 0, stream_id, message(b"")
        )


def messages_that_are_none() -> Iterator[bytes]:
    for stream_id in range(1, 2 * MANY, 2):
        yield opened(stream_id) + frame(DATA, 0, stream_id, b"\x02\0\0\0\x01x")


def lies_about_lengths() -> Iterator[bytes]:
    for stream_id in range(1, 2 * 2000, 2):
        yield opened(stream_id) + frame(DATA, 0, stream_id, struct.pack(">BI", 0, 4 * MIB) + b"x")


def long_headers() -> Iterator[bytes]:
    # A field that is in the table takes one octet.
    for number in range(1000):
        block = headers("/a/B", ("n", str(number))) + b"\x84" * 300
        yield frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, block)


def priorities() -> Iterator[bytes]:
    for number in range(MANY):
        yield frame(2, 0, 2 * number + 1, bytes(5))


def frames_of_no_known_type() -> Iterator[bytes]:
    for number in range(MANY):
        yield frame(10 + number % 200, 255, number, bytes(number % 100))


def data_behind_the_end() -> Iterator[bytes]:
    yield opened(1) + frame(DATA, END_STREAM, 1, message(question())[:9])
    for _ in range(1000):
        yield frame(DATA, 0, 1, bytes(1000))


def headers_behind_the_end() -> Iterator[bytes]:
    for _ in range(MANY):
        yield frame(HEADERS, END_HEADERS | END_STREAM, 1, headers())


ATTACKS = [
    rapid_reset,
    continuations,
    empty_continuations,
    settings_flood,
    settings_with_many_streams,
    pings,
    hpack_bomb,
    empty_fields,
    long_padding,
    window_beyond_all,
    windows_of_one,
    too_long_a_frame,
    too_short_a_frame,
    data_behind_the_end,
    headers_behind_the_end,
    zero_windows,
    dribbled_windows,
    calls_of_headers_alone,
    half_closed_streams,
    streams_that_ask_once,
    messages_that_are_none,
    lies_about_lengths,
    long_headers,
    priorities,
    frames_of_no_known_type,
]


def send_all(client: RawClient, frames: Iterator[bytes]) -> None:
    """Send it in large pieces, as far as the server listens."""
    pending = bytearray()
    with suppress(BrokenPipeError, ConnectionResetError):
        for each in frames:
            pending += each
            if len(pending) > 64 << 10:
                client.send(bytes(pending))
                pending.clear()
                client.take()
        client.send(bytes(pending))
        client.take(0.05)


#: What our own server says of each before it hangs up; of the others nothing is worth an end.
SAID = {
    "rapid_reset": "calls taken back before they were sent",
    "continuations": "found headers of",
    "empty_continuations": "found headers of 0 bytes in 18 frames",
    "settings_flood": "frames that bring nothing",
    "settings_with_many_streams": "frames that bring nothing",
    "pings": "frames that bring nothing",
    "hpack_bomb": "A header list larger than",
    "empty_fields": "A header list larger than",
    "long_padding": "frames that bring nothing",
    "window_beyond_all": "found WINDOW_UPDATE by",
    "windows_of_one": "frames that bring nothing",
    "too_long_a_frame": "found a frame of 16777215 bytes",
    "too_short_a_frame": "found PING of 7 bytes",
    "headers_behind_the_end": "found headers again on stream 1",
    "messages_that_are_none": "frames that bring nothing, the last a message that is none",
    "long_headers": "frames that bring nothing, the last a field of long headers",
    "priorities": "frames that bring nothing, the last a type 2",
    "frames_of_no_known_type": "frames that bring nothing, the last a type",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_others_are_served_while_a_peer_attacks_and_it_is_told_what_was_wrong(
    tmp_path: Path, attack: Callable[[], Iterator[bytes]]
) -> None:
    door = AdmissionLimits(max_requests=10_000, max_bytes=64 * MIB)
    with (
        serving_in_thread(tmp_path, door=door) as server,
        RawClient(server.address) as other,
        RawClient(server.address, settings=b"", window=b"") as attacker,
    ):
        assert other.wait([other.infer(question())])[0].status == 0
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        thread = threading.Thread(target=send_all, args=(attacker, attack()))
        thread.start()
        statuses = set()
        while thread.is_alive():
            statuses.add(other.wait([other.infer(question())])[0].status)
        thread.join()
        assert other.wait([other.infer(question())])[0].status == 0
        assert statuses <= {0}
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        assert grown_kib < 100 << 10
        said = SAID.get(attack.__name__)
        if attack is data_behind_the_end and attacker.closed:
            # The call may be over, and nobody remembers it, or not yet.
            said = "found DATA behind the end of stream 1"
        if attack is dribbled_windows and attacker.closed:
            # On a busy machine windows come before the answers that they are for.
            said = "frames that bring nothing"
        if said is None:
            assert not attacker.closed
        else:
            attacker.wait_closed()
            assert attacker.goodbye is not None
            assert said in attacker.goodbye[1]
        attacker.socket.close()
        server.until(lambda _: door.num_bytes == 0)


def test_hundreds_of_idle_connections_keep_nobody_out(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server:
        leave_idle(server.address, 300)


@pytest.mark.long
def test_thousands_of_idle_connections_keep_nobody_out(tmp_path: Path) -> None:
    # Those of our own server are more than it keeps, so that the longest idle make room.
    with serving_in_thread(tmp_path) as server, many_file_handles(12_000):
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        leave_idle(server.address, 5000)
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        assert grown_kib < 200 << 10


@pytest.mark.long
def test_thousands_of_idle_connections_that_are_all_kept_have_a_bound(tmp_path: Path) -> None:
    with (
        many_file_handles(12_000),
        serving_in_thread(tmp_path, max_connections=6000) as server,
    ):
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        leave_idle(server.address, 5000)
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        # A connection is 50 KiB, with its client.
        assert grown_kib < 250 << 10


def leave_idle(address: str, count: int) -> None:
    """Open connections and leave them alone; a client that comes then is served."""
    with ExitStack() as stack:
        for _ in range(count):
            host, _, port = address.rpartition(":")
            idle = stack.enter_context(socket.create_connection((host, int(port))))
            with suppress(BrokenPipeError, ConnectionResetError):  # There may be too many.
                idle.sendall(PREFACE + frame(SETTINGS, 0, 0))
        status: int | None = None
        while status != 0:
            # Until some were idle for long enough to make room, it hears why it is not served, or nothing.
            with RawClient(address) as client, suppress(AssertionError, OSError):
                status = client.wait([client.infer(question())])[0].status


@contextmanager
def many_file_handles(count: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < count:
        pytest.skip(f"a process may have {limits[1]} file handles here, {count} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], count), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_requests_that_come_byte_by_byte_keep_nobody_waiting(tmp_path: Path) -> None:
    data = PREFACE + frame(SETTINGS, 0, 0) + call(1, question())
    with (
        serving_in_thread(tmp_path) as server,
        RawClient(server.address) as other,
        ExitStack() as stack,
    ):
        host, _, port = server.address.rpartition(":")
        slow = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(100)
        ]
        for position in range(len(data) - 1):
            for each in slow:
                each.sendall(data[position : position + 1])
            if position % 20 == 0:
                assert other.wait([other.infer(question())])[0].status == 0
        # Now they are all in the middle of a call, and hear of it when they have sent the rest.
        for each in slow:
            each.sendall(data[-1:])
        server.until(lambda running: running.runtime.telemetry.total.answered >= 100)
