"""The sockets of REST: who hangs up, is slow, sends too much or what is none, has no key, or comes by TLS."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import random
import socket
import ssl
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from clockwright.errors import Refusal
from controller.access.authoriser import Authoriser, Rules
from controller.access.grants import Grant, digest, id_of, make_key
from controller.access.roles import Role
from controller.front.admission.limits import AdmissionLimits
from controller.front.admission.pressure import MemoryPressure
from controller.front.http import listener, rest_server
from controller.front.http.rest_server import _PIPELINED_MAX, HEADERS_BYTES_MAX, RestServer
from controller.front.http.tls import server_context
from controller.front.methods import ROUTES
from controller.front.oip.json_form import JSON_BYTES_MAX
from tests.kit.addresses import own_address
from tests.kit.certificates import self_signed
from tests.kit.front_end import MESSAGE_BYTES_MAX, FrontEnd, FrontEndInThread, serving_in_thread
from tests.kit.full_entrance import FullEntrance, HeldEntrance

LONG = {"slo_ms": 600_000}
QUESTION: dict[str, Any] = {
    "inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}],
    "parameters": LONG,
}
INFER = "/v2/models/double/infer"
BODY = json.dumps(QUESTION).encode()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEndInThread]:
    with serving_in_thread(tmp_path_factory.mktemp("models"), rest=True) as running:
        yield running
        # Whatever was sent, nothing of it is kept.
        running.until(lambda front: front.runtime.num_waiting == 0)


def request_of(body: bytes = BODY, path: str = INFER, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def answer(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """Read one answer; 0 where the server hung up."""
    data = b""
    while b"\r\n\r\n" not in data:
        with suppress(ConnectionError):
            if part := sock.recv(1):
                data += part
                continue
        return 0, {}
    head = data.decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    body = b""
    while len(body) < length and (part := sock.recv(length - len(body))):
        body += part
    return int(head.split()[1]), json.loads(body)


def swept_by_hand(server: FrontEndInThread) -> RestServer:
    """The server of REST, which sweeps no more by itself: the test counts the sweeps."""

    def stop_sweeping(each: FrontEnd) -> RestServer:
        assert each.rest_server is not None
        assert each.rest_server._sweeper is not None
        each.rest_server._sweeper.cancel()
        return each.rest_server

    return server.do(stop_sweeping)


def is_served(server: FrontEndInThread) -> bool:
    with dial(server.rest) as sock:
        sock.sendall(request_of())
        status, told = answer(sock)
    return status == 200 and told["outputs"][0]["data"] == [2, 4, 6]


def post(
    server: FrontEndInThread, body: object = QUESTION, path: str = INFER, **headers: str
) -> Any:  # noqa: ANN401
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://{server.rest}{path}"
    return requests.post(url, json=body, headers=named, timeout=60)


# --- connections ----------------------------------------------------------------------------------


@pytest.mark.parametrize("front", ["here", "apart"])
def test_a_client_that_hangs_up_withdraws_its_request(tmp_path: Path, front: str) -> None:
    with serving_in_thread(tmp_path, front=front, rest=True) as server:
        server.do(lambda front_end: setattr(front_end.worker, "hold", True))
        with dial(server.rest) as sock:
            sock.sendall(request_of())
            server.until(lambda each: each.runtime.num_waiting == 1)
        server.until(lambda each: each.runtime.num_waiting == 0)
        assert server.do(lambda each: each.runtime.telemetry.total.cancelled) == 1


def test_requests_behind_each_other_are_answered_in_their_order(server: FrontEndInThread) -> None:
    paths = [INFER, "/v2/models/none/infer", INFER, "/nowhere", INFER]
    with dial(server.rest) as sock:
        sock.sendall(b"".join(request_of(path=path) for path in paths))
        assert [answer(sock)[0] for _ in paths] == [200, 404, 200, 404, 200]
        # Empty lines end headers, and in a body nothing.
        sock.sendall(request_of(BODY + b"\r\n" * 50_000) * 2)
        assert [answer(sock)[0] for _ in range(2)] == [200, 200]
        # It comes in pieces, one byte each, on the same connection.
        for byte in request_of():
            sock.sendall(bytes((byte,)))
        assert answer(sock)[0] == 200


def test_of_requests_behind_each_other_a_bounded_number_is_taken_in_and_all_are_answered(
    tmp_path: Path,
) -> None:
    number = 300
    with serving_in_thread(tmp_path, rest=True) as server, dial(server.rest) as sock:
        server.do(lambda each: setattr(each.worker, "hold", True))
        door = server.front_end.rest_server
        assert door is not None
        sock.sendall(request_of())
        server.until(lambda each: bool(each.worker.infers))
        (connection,) = door.connections
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(
                sock.sendall, b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n" * number
            )
            server.until(lambda _: len(connection.pipeline) == _PIPELINED_MAX)
            for _ in range(100):
                assert server.do(lambda _: len(connection.pipeline)) == _PIPELINED_MAX

            def release(each: FrontEnd) -> None:
                each.worker.hold = False
                each.worker.release()

            server.do(release)
            for _ in range(number + 1):
                assert answer(sock)[0] == 200
                assert len(connection.pipeline) <= _PIPELINED_MAX
            sending.result()


def test_empty_lines_in_a_body_are_no_work(
    server: FrontEndInThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[int] = []
    pieces: list[int] = []

    def counting(kind: type[asyncio.Protocol], lengths: list[int]) -> None:
        take = kind.data_received

        def data_received(self: asyncio.Protocol, data: bytes) -> None:
            lengths.append(len(data))
            take(self, data)

        monkeypatch.setattr(kind, "data_received", data_received)

    counting(rest_server._Connection, came)
    counting(HttpToolsProtocol, pieces)
    with dial(server.rest) as sock:
        sock.sendall(request_of(BODY + b"\n" * (1 << 20)) + request_of())
        assert [answer(sock)[0] for _ in range(2)] == [200, 200]
    assert sum(pieces) == sum(came)
    # One more where the body ends, and where as many empty lines as may be ends of requests were in its beginning.
    assert len(pieces) <= len(came) + 2


def test_who_waits_behind_others_requests_is_not_slow(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path, rest=True) as server, dial(server.rest) as sock:
        server.do(lambda each: setattr(each.worker, "hold", True))
        door = swept_by_hand(server)
        sock.sendall(request_of())
        server.until(lambda each: bool(each.worker.infers))
        (connection,) = door.connections
        num = _PIPELINED_MAX + 1
        sock.sendall(request_of() * num)
        server.until(lambda _: len(connection.pipeline) == _PIPELINED_MAX)
        assert connection._held
        assert connection._coming
        for _ in range(rest_server._COMING_MAX + 2):
            server.do(lambda _: connection.sweep())
            assert connection.idle_sweeps == 0

        def release(each: FrontEnd) -> None:
            each.worker.hold = False
            each.worker.release()

        server.do(release)
        assert [answer(sock)[0] for _ in range(1 + num)] == [200] * (1 + num)
        # Whose request does not come is slow all the same, from its others' answers on.
        sock.sendall(request_of()[:-1])
        server.until(lambda _: connection._coming)
        for _ in range(rest_server._COMING_MAX + 1):
            assert not connection.transport.is_closing()
            server.do(lambda _: connection.sweep())
        assert answer(sock)[0] == 0


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        (("Content-Length: 3", "Content-Length: 4"), "Duplicate Content-Length"),
        (("Content-Length: 3", "Transfer-Encoding: chunked"), "with Content-Length"),
        (("Content-Length: x",), "in Content-Length"),
        (("Transfer-Encoding: gzip",), "`Transfer-Encoding`"),
    ],
)
def test_a_header_that_http_does_not_allow_is_named(
    server: FrontEndInThread, headers: tuple[str, ...], named: str
) -> None:
    lines = ("POST /v2/models/double/infer HTTP/1.1", "Host: localhost", *headers, "", "{}")
    with dial(server.rest) as sock:
        sock.sendall("\r\n".join(lines).encode())
        status, told = answer(sock)
    assert status == 400
    assert told["error"].startswith("found no request of HTTP/1.1, expected one: ")
    assert named in told["error"]


def test_what_is_no_http_behind_others_is_not_answered_in_their_place(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path, rest=True) as server, dial(server.rest) as sock:
        server.do(lambda each: setattr(each.worker, "hold", True))
        sock.sendall(request_of())
        server.until(lambda each: bool(each.worker.infers))
        sock.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n")
        assert answer(sock)[0] == 0


def test_who_hangs_up_at_once_or_with_requests_behind_each_other_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_in_thread(tmp_path, rest=True) as server:
        door = server.front_end.rest_server
        assert door is not None

        def accept_one_that_is_gone(_: FrontEnd) -> None:
            # Nobody accepts while this runs.
            with dial(server.rest) as sock:
                sock.sendall(request_of())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        for _ in range(3):
            server.do(accept_one_that_is_gone)
        server.do(lambda each: setattr(each.worker, "hold", True))
        with dial(server.rest) as sock:
            sock.sendall(request_of() * 3)
            server.until(lambda each: each.runtime.num_waiting == 1)
        server.until(lambda each: each.runtime.num_waiting == 0 and not door.state.tasks)
        server.until(lambda _: not door._num_open)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_who_hangs_up_while_long_data_is_read_is_asked_for_no_more(tmp_path: Path) -> None:
    body = BODY.replace(b"[1, 2, 3]", b"[1, %b 2, 3]" % (b" " * 50_000))
    assert len(body) > 50_000
    with serving_in_thread(tmp_path, rest=True) as server:
        door = server.front_end.rest_server
        assert door is not None
        slicing = door.config.app._slicing  # type: ignore[union-attr]
        server.run(slicing.acquire())
        with dial(server.rest) as sock:
            sock.sendall(request_of(body))
            server.until(lambda _: bool(slicing._waiters))
        server.until(lambda _: not door.connections)
        server.do(lambda _: slicing.release())
        server.until(lambda _: not door.state.tasks)
        assert not server.do(lambda each: each.runtime.telemetry.requests)
        assert server.do(lambda _: door.door.num_bytes) == 0
        assert is_served(server)


def test_a_requests_clock_starts_with_its_first_byte(tmp_path: Path) -> None:
    ahead_ns = 0
    clock: Callable[[], int] = lambda: time.monotonic_ns() + ahead_ns  # noqa: E731
    with serving_in_thread(tmp_path, rest=True, clock=clock) as server, dial(server.rest) as sock:
        # The first bytes of the second have been read when the first is answered.
        data = request_of()
        sock.sendall(data + data[:40])
        assert answer(sock)[0] == 200
        ahead_ns = 1000 * 10**9
        sock.sendall(data[40:])
        status, told = answer(sock)
        assert (status, told["reason"]) == (504, "LATE")


def test_a_request_is_as_old_as_its_connections_wait_to_be_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_ns = 0
    clock: Callable[[], int] = lambda: time.monotonic_ns() + ahead_ns  # noqa: E731
    monkeypatch.setattr(listener, "_ACCEPTS_PER_TURN", 1)
    accepted = RestServer._accepted

    def accept_and_wait(self: RestServer, *what: Any) -> None:  # noqa: ANN401
        nonlocal ahead_ns
        accepted(self, *what)
        ahead_ns = 1000 * 10**9

    monkeypatch.setattr(RestServer, "_accepted", accept_and_wait)
    with serving_in_thread(tmp_path, rest=True, clock=clock) as server, ExitStack() as stack:
        gate = threading.Event()
        server.loop.call_soon_threadsafe(gate.wait)
        socks = [stack.enter_context(dial(server.rest)) for _ in range(6)]
        for sock in socks:
            sock.sendall(request_of())
        gate.set()
        # All had come when the first was accepted, however many turns later the others are.
        assert [answer(sock)[0] for sock in socks[1:]] == [504] * 5


def test_an_answer_that_would_be_late_is_not_sent(tmp_path: Path) -> None:
    ahead_ns = 0
    clock: Callable[[], int] = lambda: time.monotonic_ns() + ahead_ns  # noqa: E731
    with serving_in_thread(tmp_path, rest=True, clock=clock) as server, dial(server.rest) as sock:
        server.do(lambda each: setattr(each.worker, "hold", True))
        sock.sendall(request_of())
        server.until(lambda each: bool(each.worker.infers))

        def release(each: FrontEnd) -> None:
            nonlocal ahead_ns
            ahead_ns = 1000 * 10**9
            each.worker.hold = False
            each.worker.release()

        server.do(release)
        status, told = answer(sock)
        assert (status, told["reason"]) == (504, "LATE")


def test_who_is_slow_is_given_up_and_the_idle_make_room(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path, rest=True, max_connections=2) as server:
        door = swept_by_hand(server)

        def sweep(times: int) -> None:
            def work(_: FrontEnd) -> None:
                for each in door.connections * times:
                    each.sweep()

            server.do(work)

        with dial(server.rest) as slow, dial(server.rest) as busy:
            busy.sendall(request_of())
            assert answer(busy)[0] == 200
            slow.sendall(request_of()[:-1])
            with dial(server.rest) as third:
                third.sendall(request_of())
                status, told = answer(third)
            assert (status, told["reason"]) == (429, "OVERLOADED")
            assert "connections, expected 2 at most" in told["error"]
            server.until(lambda _: len(door.connections) == 2)
            sweep(3)  # `busy` has nothing open since; `slow` may still come.
            assert is_served(server)
            assert answer(busy)[0] == 0
            slow.sendall(request_of()[-1:])
            assert answer(slow)[0] == 200
            slow.sendall(request_of()[:50])
            server.until(lambda _: len(door.connections) == 1)
            sweep(119)
            slow.sendall(request_of()[50:60])
            sweep(3)
            assert answer(slow)[0] == 0


def test_empty_lines_behind_an_answer_keep_no_connection_open(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path, rest=True) as server, dial(server.rest) as sock:
        door = swept_by_hand(server)
        sock.sendall(request_of())
        assert answer(sock)[0] == 200
        (connection,) = door.connections
        server.until(lambda _: connection.timeout_keep_alive_task is not None)
        sock.sendall(b"\r\n")
        server.until(lambda _: connection.timeout_keep_alive_task is None)
        for _ in range(rest_server._IDLE_MAX):
            server.do(lambda _: connection.sweep())
        assert not connection.transport.is_closing()
        server.do(lambda _: connection.sweep())
        assert answer(sock)[0] == 0


# --- what is sent ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x00\xf1\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nbad header: 1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_what_is_no_http_is_told_so_and_harms_nobody(server: FrontEndInThread, data: bytes) -> None:
    with dial(server.rest) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert answer(sock)[0] in (0, 400, 404)
    assert is_served(server)


def test_chance_finds_no_request_that_breaks_it(server: FrontEndInThread) -> None:
    chance = random.Random(15)
    good = request_of(BODY, INFER, "Inference-Header-Content-Length: 12", "Authorization: Bearer x")
    for _ in range(150):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with dial(server.rest) as sock:
            sock.sendall(data[: chance.randrange(len(data))] if chance.random() < 0.2 else data)
            sock.shutdown(socket.SHUT_WR)
            assert answer(sock)[0] in (0, 200, 400, 401, 404, 405, 413, 415, 429, 431)
    assert is_served(server)


@pytest.mark.parametrize("pieces", [1, 50])
@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"x" * HEADERS_BYTES_MAX,
        b"GET / HTTP/1.1\r\nx: " + b"x" * HEADERS_BYTES_MAX,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * (HEADERS_BYTES_MAX // 6),
        b"GET / HTTP/1.1\r\nx: " + b"x" * HEADERS_BYTES_MAX + b"\r\n\r\n",
        b"\r\n" * HEADERS_BYTES_MAX,
        request_of()[: -len(BODY)].replace(
            b"Content-Length: ", b"Transfer-Encoding: chunked\r\nx: "
        )
        + b"0\r\nx: "
        + b"x" * HEADERS_BYTES_MAX,
    ],
)
def test_headers_without_end_are_not_kept(
    server: FrontEndInThread, data: bytes, pieces: int
) -> None:
    size = -(-len(data) // pieces)
    with dial(server.rest) as sock:
        with suppress(ConnectionError):
            for position in range(0, len(data), size):
                sock.sendall(data[position : position + size])
            # More than one read, which may end in what is not looked into.
            for _ in range(20):
                sock.sendall(b"x" * HEADERS_BYTES_MAX)
        assert answer(sock)[0] in (0, 400, 431)
    assert is_served(server)


def test_a_body_that_is_too_large_is_not_kept_and_the_connection_goes_on(
    server: FrontEndInThread,
) -> None:
    with dial(server.rest) as sock:
        sock.sendall(request_of(bytes(MESSAGE_BYTES_MAX + 1)))
        status, told = answer(sock)
        assert (status, told["error"]) == (
            413,
            f"found a body of {MESSAGE_BYTES_MAX + 1} bytes, expected {MESSAGE_BYTES_MAX} at most",
        )
        head = request_of(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        chunk = b"%x\r\n%b\r\n" % (1 << 16, bytes(1 << 16))
        sock.sendall(head + chunk * (MESSAGE_BYTES_MAX // (1 << 16) + 1) + b"0\r\n\r\n")
        assert answer(sock)[0] == 413
        sock.sendall(request_of())
        assert answer(sock)[0] == 200


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_packed_body_is_unpacked_no_further_than_it_may_be(
    server: FrontEndInThread, pack: Callable[[bytes], bytes]
) -> None:
    encoding = "Content-Encoding: " + ("gzip" if pack is gzip.compress else "deflate")
    packed = pack(BODY)
    with dial(server.rest) as sock:
        for body, status in (
            (packed, 200),
            (pack(BODY + b" " * (1 << 20)), 200),
            (pack(bytes(MESSAGE_BYTES_MAX + 1)), 413),
            (pack(bytes(1 << 28)), 413),
            (packed[:-5], 400),
            (packed + b"x", 400),
            (BODY, 400),
            (b"", 400),
            (packed, 200),
        ):
            sock.sendall(request_of(body, INFER, encoding))
            assert answer(sock)[0] == status
        sock.sendall(request_of(packed, INFER, "Content-Encoding: br"))
        status, told = answer(sock)
        assert status == 415
        assert "expected gzip, deflate or identity" in told["error"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "got `array`"),
        ('{"inputs":' * 50_000, "expected"),
        ('{"inputs": [], "x": ' + "[" * 100_000, "too deep"),
        (
            '{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": ' + "[" * 90_000,
            "deep",
        ),
        (
            '{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": '
            + "[" * 33
            + "1"
            + "]" * 33
            + "}]}",
            "33 lists in each other",
        ),
        ("\xff", "the body is not what is expected"),
        ("", "an empty body"),
        ('{"inputs": []} 1234', "send header Inference-Header-Content-Length"),
        ("null", "Expected `object`"),
        (
            '{"inputs": [], "parameters": {' + ",".join(f'"{i}": 1' for i in range(1025)) + "}}",
            "1025",
        ),
        (
            '{"inputs": ['
            + ",".join(
                [
                    '{"name": "x", "shape": [], "datatype": "", "parameters": {"shared_memory_region": "r"}}'
                ]
                * 1025
            )
            + "]}",
            "1025",
        ),
        ('{"inputs": [], "x": "' + "x" * JSON_BYTES_MAX + '"}', "bytes, expected"),
    ],
)
def test_json_has_bounds_and_whoever_meets_them_is_told(
    server: FrontEndInThread, text: str, words: str
) -> None:
    with dial(server.rest) as sock:
        sock.sendall(request_of(text.encode("latin-1")))
        status, told = answer(sock)
        assert status in (400, 413)
        assert words in told["error"]
    assert is_served(server)


def test_a_page_of_another_site_reaches_nothing(server: FrontEndInThread) -> None:
    path = "/v2/repository/models/double/unload"
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": f"evil.example:{server.rest.rpartition(':')[2]}"},
    ):
        assert post(server, {}, path, **headers).status_code == 403
    for headers in (
        {"Origin": f"http://{server.rest}"},
        {"Host": "localhost"},
        {"Host": "[::1]:8000"},
    ):
        assert post(server, **headers).status_code == 200


# --- room -----------------------------------------------------------------------------------------


def test_what_the_door_has_no_room_for_is_refused_and_nothing_stays_counted(tmp_path: Path) -> None:
    counted: list[Refusal] = []
    door = AdmissionLimits(
        max_requests=2, max_bytes=1 << 20, count=lambda refusal, _: counted.append(refusal)
    )
    with serving_in_thread(tmp_path, rest=True, door=door) as server:
        server.do(lambda front: setattr(front.worker, "hold", True))
        inside = [dial(server.rest) for _ in range(2)]
        for sock in inside:
            sock.sendall(request_of())
        server.until(lambda front: front.runtime.num_waiting == 2)
        refused = post(server)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "2 open requests, expected 2 at most" in refused.json()["error"]
        large = requests.post(f"http://{server.rest}{INFER}", data=bytes(3 << 20), timeout=60)
        assert large.status_code == 429
        assert "bytes of open requests" in large.json()["error"]

        def release(front: FrontEnd) -> None:
            front.worker.hold = False
            front.worker.release()

        server.do(release)
        for sock in inside:
            assert answer(sock)[0] == 200
            sock.close()
        # A body that never ends is counted until its client hangs up.
        with dial(server.rest) as sock:
            sock.sendall(request_of(bytes(1 << 19))[:-1])
            server.until(lambda _: door.num_bytes > 1 << 18)
        server.until(lambda _: door.num_bytes == 0 and door.num_requests == 0)
        assert set(counted) == {Refusal.OVERLOADED}
        pressure = MemoryPressure(100 << 20)
        pressure.see(99 << 20)
        server.do(lambda _: door.memory_is(pressure))
        assert "memory is short" in post(server).json()["error"]
        ready = requests.get(f"http://{server.rest}/v2/health/ready", timeout=60)
        assert (ready.status_code, ready.json()) == (400, {"ready": False})


def test_a_loop_that_has_no_time_refuses_at_once(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path, rest=True, entrance=FullEntrance) as server:
        refused = post(server)
        assert refused.status_code == 429
        assert "is busy all the time" in refused.json()["error"]
        assert refused.headers["retry-after"] == "1"
        assert requests.get(f"http://{server.rest}/v2/health/live", timeout=60).status_code == 200


def test_a_request_whose_header_says_that_it_has_time_waits_for_a_busy_loop(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path, rest=True, entrance=HeldEntrance) as server:
        assert post(server, x_clockwright_slo_ms="30000").status_code == 429
        answers: list[int] = []
        asking = threading.Thread(
            target=lambda: answers.append(post(server, x_clockwright_slo_ms="60000").status_code)
        )
        asking.start()
        server.until(lambda front: HeldEntrance.of(front.server).num_waiting == 1)
        server.do(lambda front: HeldEntrance.of(front.server).open())
        asking.join()
        assert answers == [200]


def test_a_draining_server_is_not_ready_and_refuses(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path, rest=True) as server:

        def drain(front: FrontEnd) -> None:
            front.runtime.draining = True
            front.runtime.close_admission()

        server.do(drain)
        assert requests.get(f"http://{server.rest}/v2/health/ready", timeout=60).status_code == 400
        refused = post(server)
        assert (refused.status_code, refused.json()["reason"]) == (503, "DRAINING")
        assert "retry-after" not in refused.headers


# --- who ------------------------------------------------------------------------------------------


def test_every_path_needs_the_role_of_its_method(tmp_path: Path) -> None:
    def a_grant(name: str, *roles: Role, tenant: str = "") -> tuple[str, Grant]:
        key = make_key(name.encode().ljust(4)[:4], "s" * 43)
        return key, Grant(name, frozenset(roles), tenant, key_id=id_of(key), key_sha256=digest(key))

    asks, its_grant = a_grant("asks", Role.INFERENCE, tenant="gold")
    rules = Rules((its_grant,), anonymous=frozenset((Role.HEALTH,)), anonymous_tenants=False)
    with serving_in_thread(tmp_path, rest=True, authoriser=Authoriser(rules)) as server:

        def ask(verb: str, path: str, **headers: str) -> Any:  # noqa: ANN401
            url = f"http://{server.rest}{path}"
            return requests.request(verb, url, headers=headers, json={}, timeout=60)

        for route, method in ROUTES:
            path = "/" + route.pattern.format(
                name="double",
                version="1",
                model_name="double",
                model_id="double",
                application="a",
                context="c",
                request_id="1",
            )
            role = method.role
            nobody = ask(route.verb, path)
            stranger = ask(route.verb, path, Authorization="Bearer cw_none")
            known = ask(route.verb, path, Authorization=f"Bearer {asks}")
            if role is Role.HEALTH:
                assert nobody.status_code == 200
                continue
            assert (nobody.status_code, nobody.json()["reason"]) == (401, "NO_CREDENTIALS")
            assert nobody.headers["www-authenticate"] == "Bearer"
            assert (stranger.status_code, stranger.json()["reason"]) == (401, "UNKNOWN_CREDENTIALS")
            if role is not Role.INFERENCE:
                assert (known.status_code, known.json()["reason"]) == (403, "NOT_ALLOWED")
                assert role.value in known.json()["error"]
        good = {"Authorization": f"Bearer {asks}"}
        assert post(server, **good).status_code == 200
        named = {**QUESTION, "id": "mine"}
        url = f"http://{server.rest}{INFER}"
        assert requests.post(url, json=named, headers=good, timeout=60).status_code == 200
        own = ask("GET", "/v2/requests/mine/own", **good)
        assert (own.json()["outcome"], own.json()["tenant"]) == ("OK", "gold")
        assert post(server, triton_grpc_protocol_key=asks).status_code == 200
        other = post(server, x_clockwright_tenant="silver", **good)
        assert (other.status_code, other.json()["reason"]) == (403, "NOT_ALLOWED")
        # What a front says of who asks is heard from fronts only, and never in HTTP.
        told = post(server, clockwright_caller_bin="xxxx")
        assert told.status_code == 401
        with dial(server.rest) as sock:
            twice = [f"Authorization: Bearer {key}" for key in (asks, "x")]
            sock.sendall(request_of(BODY, INFER, *twice))
            assert answer(sock)[0] == 400


@pytest.mark.skipif(own_address() is None, reason="the machine has no address but the loopback's")
def test_other_machines_have_to_use_tls_and_this_one_may(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    tls = server_context(*files, protocol="http/1.1")
    with serving_in_thread(tmp_path, rest=True, rest_tls=tls, host="0.0.0.0") as server:
        url = f"https://localhost:{server.rest.rpartition(':')[2]}"
        with requests.Session() as session:
            # Else a bundle that the environment names would count.
            session.trust_env, session.verify = False, str(files[0])
            for _ in range(3):
                assert session.post(url + INFER, json=QUESTION, timeout=60).status_code == 200
            large = {"inputs": [], "x": "x" * (2 << 20)} | QUESTION
            assert session.post(url + INFER, json=large, timeout=60).status_code == 200
        assert is_served(server)
        elsewhere = f"{own_address()}:{server.rest.rpartition(':')[2]}"
        with dial(elsewhere) as sock:
            sock.sendall(request_of())
            assert answer(sock)[0] == 0
        # Neither who says nothing nor who says no more than a byte keeps others out.
        with dial(server.rest), dial(server.rest) as sock:
            sock.sendall(b"\x16")
            assert is_served(server)
        context = ssl.create_default_context(cafile=str(files[0]))
        context.set_alpn_protocols(["h2", "http/1.1"])
        with (
            dial(elsewhere) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as sealed,
        ):
            assert sealed.selected_alpn_protocol() == "http/1.1"
            sealed.sendall(request_of())
            assert answer(sealed)[0] == 200


def test_who_begins_tls_and_says_no_more_makes_room(
    tmp_path: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_SPARE_CONNECTIONS", 1)
    tls = server_context(*files, protocol="http/1.1")
    with (
        serving_in_thread(tmp_path, rest=True, rest_tls=tls, max_connections=2) as server,
        ExitStack() as stack,
    ):
        door = swept_by_hand(server)
        crowd = [stack.enter_context(dial(server.rest)) for _ in range(3)]
        for sock in crowd[1:]:
            sock.sendall(b"\x16")
        server.until(lambda _: door._num_open == 3 and len(door._silent) == 1)
        with dial(server.rest) as sock:
            assert answer(sock)[0] == 0
        for _ in range(2):
            server.do(lambda _: door.sweep())
        url = f"https://localhost:{server.rest.rpartition(':')[2]}"
        with requests.Session() as session:
            session.trust_env, session.verify = False, str(files[0])
            assert session.post(url + INFER, json=QUESTION, timeout=60).status_code == 200
        assert [answer(sock)[0] for sock in crowd[:2]] == [0, 0]
