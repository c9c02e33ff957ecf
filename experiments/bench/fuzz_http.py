"""What the fuzz sends to REST, to the port of metrics and to reflection, and what reads the first two in its process.

The listeners are the real ones, from the first byte of HTTP on. Behind them stands a stub that neither decides nor computes.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from google.protobuf.message import Message
from typing_extensions import override

from clockwright.errors import BadRequestError
from clockwright.v1 import reflection_pb2
from clockwright.wire.bulk import join_bulk
from clockwright.wire.tensors import TensorSpec
from controller.access.authoriser import Authoriser
from controller.access.caller import Caller
from controller.dashboard.site import DashboardSite
from controller.front.admission.limits import AdmissionLimits
from controller.front.http.calls import Call, Directly
from controller.front.http.http2_server import Http2Server
from controller.front.http.rest import RestApp
from controller.front.http.rest_server import RestServer
from controller.front.methods import INFERENCE, METHODS, ROUTES, Method
from controller.front.oip.json_form import JsonRequest, read_request
from controller.front.oip.protocol import RAW_INPUT_FIELD, CheckedRequest, Servable
from controller.links.slabs import Slabs
from controller.metrics.app import MonitoringApp

_MESSAGE_BYTES_MAX: Final = 4 << 20
# Turns of the loop in which a request that is whole is answered, unless it is packed.
_TURNS: Final = 6

#: Words of JSON at which kinds, depths, widths and alphabets go over.
JSON_WORDS: Final = (
    *b"NaN -Infinity 1e999 1e400 1.5 12 -1 -0 5e-324 1e-310 null true [] {} [[1],2] [1,[2]]".split(),
    *b"9223372036854775808 -9223372036854775809 18446744073709551616 [[[]],[[1]]]".split(),
    *rb'"\ud800" "\udc00\ud800" "\u0000" "" {"a":1} "x" "FP16" "BOOL" "BYTES" "UINT64"'.split(),
    *b'"parameters" "binary_data_size" "shared_memory_region" "data" "\xff"'.split(),
    *(b"0." + b"0" * 300 + b"1", b"9" * 400, b'"' + b"a" * 3000 + b'"', b"[" * 3000),
    *(b"[" * 300 + b"]" * 300, b"[" * 32 + b"1" + b"]" * 32, b'{"a":' * 3000),
    b'{"a":' * 300 + b"1" + b"}" * 300,
)
#: Likewise of HTTP and of queries; those of JSON go into bodies.
HTTP_WORDS: Final = (
    *b"GET POST PUT DELETE HEAD OPTIONS CONNECT HTTP/1.0 HTTP/2.0 Host Origin Expect upgrade".split(),
    *b"chunked gzip deflate x-gzip identity close keep-alive 100-continue Transfer-Encoding".split(),
    *b"Content-Encoding Content-Length Inference-Header-Content-Length Authorization".split(),
    *b"nan 1e400 0 -1 +1 %00 %ff %2F % .. * http://h/ %ED%A0%80 id=%ED%A0%80 [::1".split(),
    *(b"9" * 19, b"9" * 5000, b"\xb2", b"\xff\xfe", b"\r\n", b"\n\n", b"\x00", b"200000\r\n"),
    *(b"name=" + b"a" * 2000, b"a=b&" * 500, b"a" * 9000, b"x: y\r\n" * 300),
)

_JSON_BYTES: Final = re.compile(rb"Inference-Header-Content-Length: ([0-9]{1,18})")
_BODY_BYTES: Final = re.compile(rb"\r\nContent-Length: ([0-9]{1,18})")

Take = Callable[[bytes], Awaitable[None]]


class FaultError(Exception):
    """A door has admitted to an error of its own."""


# --- who reads ------------------------------------------------------------------------------------


async def _turn() -> None:
    await asyncio.sleep(0)


async def read_json_body(data: bytes) -> None:
    """Read a request for inference in JSON slice by slice; of HTTP there is no more before it than the JSON's length."""
    head, _, body = data.partition(b"\r\n\r\n")
    found = _JSON_BYTES.search(head)
    # The listener has checked the number.
    json_bytes = None if found is None else min(int(found[1]), len(body))
    with suppress(BadRequestError):
        await read_request(body, json_bytes, model="double", version="1", pause=_turn, slo_ms=10)


class _Transport(asyncio.Transport):
    """A socket that takes everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self._closing = False

    @override
    def write(self, data: Any) -> None:
        self.written += data

    @override
    def get_write_buffer_size(self) -> int:
        return 0

    @override
    def is_closing(self) -> bool:
        return self._closing

    @override
    def close(self) -> None:
        self._closing = True

    abort = close

    @override
    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def check(self) -> None:
        """Look for errors that were admitted to."""
        if b"HTTP/1.1 500" in self.written:
            raise FaultError(bytes(self.written[-200:]).decode("latin-1"))


def _silent(method: Method) -> Callable[[Message, Caller], Awaitable[Message]]:
    """Answer a method with a message that says nothing."""

    async def answer(_: Message, __: Caller) -> Message:
        return method.response()

    return answer


async def rest_reader(infer: Callable[[bytes], object]) -> Take:
    """Make REST's door without a socket, in the loop that runs.

    Args:
        infer: reads the requests for inference that come through.

    Returns:
        Takes what a client sends before it closes the connection, from the first byte of HTTP on; raises `FaultError` where the server
        admits to an error of its own, or what it raised.
    """
    grpc = _server()
    rest = RestApp(grpc)
    servable = Servable("double", "1", (), (TensorSpec("y", "FP32", (3,)),), 1, None)
    outputs = [struct.pack("<3f", 1, 2, float("nan"))]

    def answer(call: Call, request: JsonRequest) -> None:
        header = request.message.SerializeToString()
        infer(join_bulk(header, RAW_INPUT_FIELD, request.raw))
        asked = CheckedRequest("", 1, [], [0], 1, "default", False, "", "", b"")
        request.answer = asked, servable, outputs, {}
        call.answer((), 1 << 62, lambda _: BadRequestError("late"))

    handlers: dict[Method, Any] = {method: _silent(method) for _, method in ROUTES}
    rest.serve(handlers | {METHODS[f"/{INFERENCE}/ModelInfer"]: Directly(answer)})
    return _taker(rest, grpc)


def _server() -> Http2Server:
    """A server of gRPC that listens nowhere."""
    server = Http2Server(
        clock=time.monotonic_ns,
        door=AdmissionLimits(max_requests=100, max_bytes=1 << 30),
        max_message_bytes=_MESSAGE_BYTES_MAX,
        max_connections=100,
        slabs=Slabs(0),
        authoriser=Authoriser(),
    )
    server.turns.stop()
    return server


def _taker(asgi: Any, grpc: Http2Server) -> Take:  # noqa: ANN401  an ASGI application
    """Make a server of HTTP/1.1 without a socket; gives what `rest_reader` does."""
    raised: list[Exception] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401  ASGI's
        try:
            await asgi(scope, receive, send)
        except Exception as error:
            raised.append(error)  # uvicorn would make a 500 of it, unless an answer has begun.

    guarded: Any = app
    server = RestServer(guarded, grpc)
    make: Any = server.config.http_protocol_class
    tasks = server.state.tasks

    async def take(data: bytes) -> None:
        raised.clear()
        transport = _Transport()
        connection = make(server, "ipv4:127.0.0.1:1", crowded=None, floor_ns=0)
        connection.connection_made(transport)
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            if not transport.is_closing():
                connection.data_received(part)
            for _ in range(_TURNS):
                if tasks:
                    await asyncio.sleep(0)
        connection.connection_lost(None)
        while tasks:
            await asyncio.wait(tasks)
        if raised:
            raise raised[0]
        transport.check()

    return take


class _Views:
    """Shows nothing, whatever is asked."""

    def __getattr__(self, _: str) -> Callable[..., Awaitable[bytes]]:
        return self._show

    async def _show(self, *names: str) -> bytes:
        return msgspec.json.encode(names)


class _Live:
    """Makes each look once, at once."""

    has_room = True
    has_room_to_ask = True

    async def look(self, make: Callable[[], Awaitable[bytes]]) -> bytes:
        return await make()

    async def watch(
        self, _: str, make: Callable[[], Awaitable[bytes]]
    ) -> AsyncGenerator[bytes, None]:
        yield await make()


class _Pages:
    async def make(self, *, openmetrics: bool) -> list[bytes]:
        return [b"# EOF\n"] if openmetrics else []


async def metrics_reader() -> Take:
    """Make the port of metrics and of the dashboard without a socket, in the loop that runs.

    Returns:
        As `rest_reader`.
    """
    views: Any = _Views()
    live: Any = _Live()
    site = DashboardSite(views, live)
    app = MonitoringApp(_Pages(), Authoriser(), only_here=False, site=site)
    return _taker(app, _server())


def with_lengths(message: bytes) -> bytes:
    """Make the lengths in a request's head those of its body again: what was changed is taken for JSON."""
    head, end, body = message.partition(b"\r\n\r\n")
    said = _BODY_BYTES.search(head)
    if said is None:
        return message
    found = _JSON_BYTES.search(head)
    if found is not None:
        json_bytes = max(int(found[1]) + len(body) - int(said[1]), 0)
        head = _JSON_BYTES.sub(b"Inference-Header-Content-Length: %d" % json_bytes, head)
    return _BODY_BYTES.sub(b"\r\nContent-Length: %d" % len(body), head) + end + body


# --- good messages --------------------------------------------------------------------------------


def _http(line: str, *headers: str, body: bytes | None = None) -> bytes:
    length = [] if body is None else [f"Content-Length: {len(body)}"]
    head = "\r\n".join([f"{line} HTTP/1.1", "Host: localhost", *length, *headers, "", ""])
    return head.encode() + (body or b"")


_INFER: Final = "POST /v2/models/double/infer"
_TENSOR: Final = {"name": "x", "shape": [1, 3], "datatype": "FP32"}


def _asked(
    tensor: Mapping[str, object], tail: bytes = b"", times: int = 1, **more: object
) -> bytes:
    """A request for inference: JSON, and the tensors behind it."""
    text = json.dumps({"inputs": [{**_TENSOR, **tensor}] * times, **more}).encode()
    return _http(_INFER, f"Inference-Header-Content-Length: {len(text)}", body=text + tail)


_WHOLE: Final = _asked(
    {"data": [1, -2.5, 3e-5]},
    parameters={"slo_ms": 100, "timeout": 1e5, "context": "ann", "priority": True},
)
_SHORT: Final = (
    _WHOLE,
    _asked({"data": [[1, 2, 3]]}, id="\u20ac\U0001f600"),
    _asked(
        {"parameters": {"binary_data_size": 12}},
        bytes(12),
        outputs=[{"name": "y", "parameters": {"binary_data": True}}],
    ),
    _asked(
        {"parameters": {"shared_memory_region": "r"}},
        times=3,
        parameters={"binary_data_output": True},
    ),
    _asked({"datatype": "BOOL", "data": [True, False, True]}),
    _asked({"datatype": "UINT64", "data": [1, 2, (1 << 64) - 1]}),
)


def json_bodies() -> list[bytes]:
    """What `read_json_body` reads: short ones, and tensors of several slices."""
    rows = [[round(0.1234567 * row * column, 6) for column in range(400)] for row in range(8)]
    slow = [5e-324, 2.2250738585072011e-308, 1.00000005e-38] * 10
    long = _asked({"shape": [8, 400], "data": rows}), _asked({"shape": [30], "data": slow})
    return [*_SHORT, *long]


def rest_requests() -> list[bytes]:
    """Requests of HTTP for all of REST's routes."""
    text = _WHOLE.partition(b"\r\n\r\n")[2]
    chunks = b"%x\r\n%b\r\n%x;a=b\r\n%b\r\n0\r\n\r\n" % (9, text[:9], len(text) - 9, text[9:])
    slo, tenant = "x-clockwright-slo-ms: 20", "x-clockwright-tenant: t"
    packed = gzip.compress(text + b" " * 100_000)
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "Expect: 100-continue")
    found = [
        *_SHORT,
        _http(_INFER, "Content-Encoding: gzip", body=packed),
        _http(_INFER, "Inference-Header-Content-Length: 0", slo, body=bytes(12)),
        _http(_INFER, "Transfer-Encoding: chunked", tenant) + chunks,
        _http(_INFER, slo, tenant, "X-A: b", body=text),
        _http("GET /v2/models/none") + _http("HEAD /v2/health/live", "Connection: close"),
        _http("GET /v2", *upgrade),
    ]
    bodies: dict[str, Any] = {
        "RepositoryModelLoad": {"parameters": {"a": 1, "b": "c", "d": True}},
        "SystemSharedMemoryRegister": {"key": "/k", "offset": 0, "byte_size": "64"},
        "Feedback": {"items": [{"query_id": "q", "label": 1}, {"query_id": "q", "reward": 0.5}]},
        "PutApplication": {
            "models": ["a", "b"],
            "slo_ns": "1000000",
            "options_json": '{"learning_rate": [0.5, {"a": 1}]}',
        },
    }
    for route, method in ROUTES:
        path = "/" + route.pattern.replace("{", "").replace("}", "")
        body = bodies.get(method.name)
        query = "" if body else "?context=ann&name=a%20b"
        data = json.dumps(body).encode() if body else b""
        found.append(_http(f"{route.verb} {path}{query}", "Authorization: Bearer k", body=data))
    return found


def metrics_requests() -> list[bytes]:
    """Requests of HTTP for metrics and for all that dashboards ask for."""
    looks = (
        *("/metrics", "/", "/live/overview", "/live/models", "/live/pages", "/live/timeline"),
        *("/live/model?name=double", "/live/applications?name=app&context=ann%20b"),
        *("/look/history?name=double", "/look/request?id=00112233%2D1", "/nothing?a=b;c=d"),
    )
    headers = ("Accept: application/openmetrics-text", "Authorization: Bearer k")
    sites = ("Sec-Fetch-Site: same-origin", "Origin: http://localhost", "Content-Length: 0")
    seen = [_http(f"GET {look}", *headers) for look in looks]
    for look in looks:
        seen.append(_http(f"HEAD {look}", *sites) + _http(f"GET {look}", "Connection: close"))
    return seen


def reflection_requests() -> list[bytes]:
    """Requests for reflection of all kinds."""
    pb = reflection_pb2.ReflectionRequest
    asked = (
        pb(host="h", list_services="*"),
        pb(file_by_filename="inference.proto"),
        pb(file_containing_symbol="inference.GRPCInferenceService.ModelInfer"),
        pb(file_containing_symbol="clockwright.v1.ControlService"),
    )
    return [each.SerializeToString() for each in asked]
