"""The REST API: takes paths and JSON of the Open Inference Protocol, calls the methods of gRPC, and answers in JSON.

It is an ASGI application and decides nothing. Each path is a method of a gRPC service (`controller.front.methods`); it needs
the role of that method, its body becomes the method's message, and the handlers that answer are those of gRPC. So
whatever holds there (who may, quotas, bounds, deadlines) holds here, and a front that is a process of its own hands
the same calls on to its controller.

An error is `{"error": TEXT}`; a refusal also has its `reason` and `figures`. 429 stands for what was refused for
want of room or time, with `Retry-After` only where a retry can help; 504 for an answer that would be late.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, unquote_to_bytes

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from clockwright.errors import BadRequestError, DeniedError, Refusal, RefusedError
from clockwright.foreign import quote
from clockwright.units import NS_PER_MS, NS_PER_S, SLO_NS_MAX
from clockwright.wire.bulk import Buffer
from controller.access.authoriser import Certificate, credentials_of
from controller.access.caller import Caller
from controller.front.admission.entrance import UNSTATED_SLO_NS
from controller.front.http.calls import Late, check_local
from controller.front.http.http2_server import Http2Server
from controller.front.http.several import SeveralAnswers
from controller.front.methods import INFERENCE, METHODS, ROUTES, Method, OnStream, Route
from controller.front.oip.generate_form import GenerateRequest, read_generate
from controller.front.oip.json_form import (
    read_json,
    read_object,
    read_request,
    read_row,
    write_json,
)
from controller.front.oip.json_messages import RestRequest
from controller.front.oip.statuses import DETAILS, Status, status_of
from controller.front.oip.unsupported import NO_CUDA, NO_LOGGING, NO_TRACES
from controller.links.slabs import SLAB_BYTES_MIN

log = logging.getLogger(__name__)

#: Headers of requests, in small letters as ASGI has them. An objective there and one in the body: the shorter holds.
SLO_HEADER: Final = "x-clockwright-slo-ms"
DECIDE_HEADER: Final = "x-clockwright-decide-within-ms"
TENANT_HEADER: Final = "x-clockwright-tenant"
#: Header of refusals: which `Refusal` or `Denial` it is.
REFUSED_HEADER: Final = "x-clockwright-refused"

#: Header that says how many bytes of a request or an answer are JSON, with tensors behind them.
_JSON_BYTES: Final = "inference-header-content-length"

# How zlib names the packings that HTTP knows, and how much is unpacked in one turn of the loop.
_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
_UNPACKED_BYTES: Final = 256 << 10

_INFER: Final = METHODS[f"/{INFERENCE}/ModelInfer"]

#: Statuses of HTTP by those of gRPC; 500 for all others.
HTTP_STATUSES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

_Headers = list[tuple[bytes, bytes]]


class Connection(Protocol):
    """One client's connection, whose requests are answered one behind the other."""

    #: The client's address, as gRPC writes it.
    peer: str
    #: What it has shown in TLS.
    certificate: Certificate | None
    #: There are too many connections: this one's requests are refused, with this.
    crowded: RefusedError | None
    #: Is called when the client hangs up.
    when_gone: Callable[[], object] | None


@dataclass(slots=True)
class Origin:
    """Where a request comes from; servers put it into the scope's `extensions` as `clockwright`."""

    connection: Connection
    #: The latest moment that is surely before its first byte came.
    arrival_ns: int


@dataclass(slots=True)
class Response:
    """A response of HTTP."""

    status: int
    body: Sequence[Buffer]
    headers: _Headers
    #: What comes behind the body; None: nothing does.
    events: AsyncIterator[bytes] | None = None


class HttpError(Exception):
    """A request is none of those that there are, or too large."""

    def __init__(self, status: int, text: str, headers: _Headers | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or []


class _GoneError(Exception):
    """The client hung up."""


class _Turn:
    """A request's, at a busy event loop."""

    def __init__(self) -> None:
        #: Whether it is let in.
        self.came: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        """Whether its client has stopped waiting."""
        return self.came.done()

    def begin_waiting(self) -> None:
        """Let it in."""
        self.came.set_result(True)

    def refuse(self) -> None:
        """Refuse the request, if its client still waits."""
        if not self.over:
            self.came.set_result(False)


class _RestCall:
    """A request for inference, whose answer is awaited.

    It keeps the status of an error, not the error. An error refers to the frames in which it was raised, and
    so would keep the request's tensors in memory.
    """

    #: HTTP has no deadline.
    timeout_ns: int | None = None
    takes_several = False

    def __init__(self, arrival_ns: int, caller: Caller, headers: Mapping[str, str]) -> None:
        self.arrival_ns = arrival_ns
        self.caller = caller
        self.when_gone: Callable[[], object] | None = None
        self._headers = headers
        self._ended = asyncio.get_running_loop().create_future()
        self._answer: tuple[int, Late] | None = None
        self._status: Status | None = None

    async def wait(self) -> None:
        """Wait until the request is answered; who stops waiting gives it up."""
        try:
            await self._ended
        except asyncio.CancelledError:
            if self.when_gone is not None:
                self.when_gone()
            raise

    def header(self, name: str) -> str:
        """Find one of the client's own headers."""
        return self._headers.get(name, "")

    def judge(self, now_ns: int) -> Status | None:
        """Say which status is to be written now; None: it is the answer's turn."""
        if self._status is None and self._answer is not None:
            latest_ns, late = self._answer
            if now_ns > latest_ns:
                self._status = status_of(late(now_ns), method="ModelInfer")
        return self._status

    def answer(self, _: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Have the answer, which the request has, judged as it is written."""
        self._answer = (latest_ns, late)
        self._end()

    def give(self, _: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Do nothing: it has one answer."""

    def fail(self, error: Exception) -> None:
        """Hand an error on."""
        self._status = status_of(error, method="ModelInfer")
        self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


class _OneMessage:
    """The stream of a call that has one message each way, for a handler that takes them as they travel."""

    def __init__(self, request: bytes, arrival_ns: int) -> None:
        self.arrival_ns = arrival_ns
        self.answer = b""
        self._requests = [request]

    def time_left_s(self) -> float | None:
        """HTTP has no deadline."""
        return None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (request := await self.read()) is not None:
            yield request

    async def read(self) -> bytes | None:
        """Give the request, once."""
        return self._requests.pop() if self._requests else None

    async def write(self, message: bytes) -> None:
        """Take the answer."""
        self.answer = message


class RestApp:
    """Answers HTTP; services mount on it as on a server of gRPC."""

    def __init__(self, server: Http2Server, *, only_here: bool = False) -> None:
        """Answer nothing yet.

        The server answers the same methods in gRPC; its bounds, clock and credentials hold for both. `only_here`: only
        clients of this machine reach it, so that any other machine's name shows an attack (DNS rebinding).
        """
        self._clock = server.clock
        self._door = server.door
        self._server = server
        self._authoriser = server.authoriser
        self._slabs = server.slabs
        self._max_message_bytes = server.max_message_bytes
        self._only_here = only_here
        self._slicing = asyncio.Lock()
        self._handlers: dict[Method, Any] = {}

    def serve(self, handlers: Mapping[Method, Any]) -> None:
        """Answer for these methods: by a coroutine function each, an `OnStream`, or `Directly`."""
        self._handlers.update(handlers)

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Answer one request, as ASGI has it."""
        assert scope["type"] == "http"
        try:
            answer = await self._answer(scope, receive)
        except _GoneError:
            return
        if answer.events is not None:
            await self._send_events(answer, answer.events, scope, send)
            return
        length = sum(map(len, answer.body))
        headers = [(b"content-length", b"%d" % length), *answer.headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        # In one piece: each is a call of the kernel's.
        body = answer.body[0] if len(answer.body) == 1 else b"".join(answer.body)
        await send({"type": "http.response.body", "body": body})

    async def _send_events(
        self,
        answer: Response,
        events: AsyncIterator[bytes],
        scope: Mapping[str, Any],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Send events as they come. While the client does not read, `send` waits."""
        connection = scope["extensions"]["clockwright"].connection
        try:
            await send(
                {"type": "http.response.start", "status": answer.status, "headers": answer.headers}
            )
            async for part in events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            connection.when_gone = None

    async def _answer(
        self, scope: Mapping[str, Any], receive: Callable[[], Awaitable[Any]]
    ) -> Response:
        origin: Origin = scope["extensions"]["clockwright"]
        infers = False
        raw_path: bytes = scope["raw_path"]
        name = quote(raw_path.decode("latin-1"))
        try:
            headers = read_headers(scope["headers"])
            check_site(headers, only_here=self._only_here)
            find = _find_known if len(raw_path) <= _PATH_BYTES_KEPT else _find
            # The server sends no body of an answer to HEAD.
            verb = "GET" if scope["method"] == "HEAD" else scope["method"]
            route, method, names = find(verb, raw_path)
            name = method.name
            caller = self._admit(method, headers, origin.connection)
            if origin.connection.crowded is not None:
                raise origin.connection.crowded
            infers = method is _INFER
            self._server.turns.used()
            if infers and not self._server.entrance.has_time(self._clock(), origin.arrival_ns):
                await self._wait_for_turn(headers, origin)
            bytes_max = self._max_message_bytes if infers else route.bytes_max
            body = await self._read_body(headers, receive, bytes_max, infers=infers)
            if infers:
                form = route.pattern.rpartition("/")[2]
                return await self._answer_infer(names, headers, body, origin, caller, form)
            query = {key: each[0] for key, each in parse_qs(_text(scope["query_string"])).items()}
            asked = RestRequest(names, query, _read_fields(body))
            request = method.request()
            route.fill(request, asked)
            told, status = route.tell(await self._ask(method, request, origin, caller), asked)
            return Response(status, (write_json(told),), [(b"content-type", b"application/json")])
        except (_GoneError, asyncio.CancelledError):
            raise
        except HttpError as error:
            if infers:
                self._handlers[_INFER].malformed()
            return _error(error.status, str(error), error.headers)
        except Exception as error:
            if infers and isinstance(error, BadRequestError):
                self._handlers[_INFER].malformed()
            return answer_of(status_of(error, method=name))

    async def _wait_for_turn(self, headers: Mapping[str, str], origin: Origin) -> None:
        """Wait until a busy event loop has time for a request.

        Its body is not read yet. So where no header says its SLO, a usual one counts, from now on. Raises RefusedError
        if the loop has none in time.
        """
        slo_ns, arrival_ns = UNSTATED_SLO_NS, self._clock()
        if (slo_ms := _read_ms(headers, SLO_HEADER)) is not None:
            slo_ns, arrival_ns = round(slo_ms * NS_PER_MS), origin.arrival_ns
        turn = _Turn()
        entrance = self._server.entrance
        if not entrance.enter(origin.connection, turn, arrival_ns, slo_ns):
            turn.refuse()
        if not await turn.came:
            raise self._server.busy()

    def _admit(self, method: Method, headers: Mapping[str, str], connection: Connection) -> Caller:
        credentials = credentials_of(headers.items(), connection.certificate)
        try:
            return self._authoriser.admit(method, credentials, now_s=time.time())
        except DeniedError as error:
            log.info("%s: %s", connection.peer, error)
            raise

    async def _read_body(
        self,
        headers: Mapping[str, str],
        receive: Callable[[], Awaitable[Any]],
        bytes_max: int,
        *,
        infers: bool,
    ) -> Buffer:
        """Receive a body, and keep at most the bytes that the limits allow.

        Raises HttpError if it is too large, or packed in an unknown way; BadRequestError if it is packed wrongly;
        RefusedError if there is no room for it; _GoneError if the client hung up.
        """
        length = headers.get("content-length", "")
        # Nothing is kept of a body that is known to be too large.
        if len(length) > 18 or (length.isdecimal() and int(length) > bytes_max):
            raise _too_large(length[:20], bytes_max)
        door, held = self._door, 0
        parts: list[bytes] = []
        try:
            async for part in _parts(receive, headers.get("content-encoding", "identity")):
                parts.append(part)
                held += len(part)
                door.num_bytes += len(part)
                if held > bytes_max:
                    raise _too_large(f"more than {bytes_max}", bytes_max)
                if infers and held >= door.refused_from:
                    raise door.no_memory()
                if infers and not door.has_room:
                    raise door.no_room(held)
            if held < SLAB_BYTES_MIN or _JSON_BYTES not in headers:
                return parts[0] if len(parts) == 1 else b"".join(parts)
            # Nearly all of it are tensors, which workers of this host can read there.
            room, position = self._slabs.room(held), 0
            for part in parts:
                room[position : position + len(part)] = part
                position += len(part)
            return room
        finally:
            # From here on `AdmissionLimits.enter` counts what is asked.
            door.num_bytes -= held

    async def _answer_infer(
        self,
        names: Mapping[str, str],
        headers: Mapping[str, str],
        body: Buffer,
        origin: Origin,
        caller: Caller,
        form: str,
    ) -> Response:
        json_bytes = _json_bytes(headers, len(body))
        named: dict[str, Any] = {
            "model": names["name"],
            "version": names.get("version", ""),
            "slo_ms": _read_ms(headers, SLO_HEADER),
            "decide_within_ms": _read_ms(headers, DECIDE_HEADER),
            "tenant": headers.get(TENANT_HEADER, ""),
        }
        connection = origin.connection
        if form != "infer":
            plain = read_generate(body, **named)
            return await self._answer_several(plain, headers, origin, caller, form)
        if json_bytes == 0:
            request = read_row(body, **named)
        else:
            # Other requests run while it is read. So its bytes count meanwhile, and its client may leave.
            gone = asyncio.Event()
            connection.when_gone = gone.set
            self._door.num_bytes += len(body)
            try:
                pause = functools.partial(self._pause, gone)
                request = await read_request(body, json_bytes, pause=pause, **named)
            finally:
                self._door.num_bytes -= len(body)
                connection.when_gone = None
        self._place(request.raw, body)
        call = _RestCall(origin.arrival_ns, caller, headers)
        connection.when_gone = lambda: _give_up(call)
        self._handlers[_INFER].answer(call, request)
        try:
            await call.wait()
        finally:
            connection.when_gone = None
        if (status := call.judge(self._clock())) is not None:
            return answer_of(status)
        text, binary = request.write_answer()
        # To write it takes time, too.
        if (status := call.judge(self._clock())) is not None:
            return answer_of(status)
        if not binary:
            return Response(200, (text,), [(b"content-type", b"application/json")])
        return Response(
            200,
            (text, *binary),
            [
                (b"content-type", b"application/octet-stream"),
                (_JSON_BYTES.encode(), b"%d" % len(text)),
            ],
        )

    async def _answer_several(
        self,
        request: GenerateRequest,
        headers: Mapping[str, str],
        origin: Origin,
        caller: Caller,
        form: str,
    ) -> Response:
        connection, at_once = origin.connection, form == "generate"
        call = SeveralAnswers(
            origin.arrival_ns,
            caller,
            headers,
            request,
            self._clock,
            self._door.crowded,
            at_once=at_once,
        )
        connection.when_gone = call.leave
        self._handlers[_INFER].answer(call, request)
        status = await call.begun()
        if status is None and not at_once:
            # The connection keeps telling of its client until the last event.
            return Response(200, (), [(b"content-type", b"text/event-stream")], call.events())
        connection.when_gone = None
        if status is not None:
            return answer_of(status)
        return Response(200, (call.whole(),), [(b"content-type", b"application/json")])

    async def _pause(self, gone: asyncio.Event) -> None:
        """Let others have their turn; of all who read what is long, one goes on in each.

        Raises _GoneError if the client hung up.
        """
        async with self._slicing:
            await asyncio.sleep(0)
        if gone.is_set():
            raise _GoneError

    def _place(self, raw: list[Buffer], body: Buffer) -> None:
        """Put large tensors where workers of this host can read them, unless the body lies there already."""
        elsewhere = [
            index
            for index, part in enumerate(raw)
            if isinstance(part, bytes) or isinstance(body, bytes)
        ]
        num_bytes = sum(len(raw[index]) for index in elsewhere)
        if num_bytes < SLAB_BYTES_MIN:
            return
        room, position = self._slabs.room(num_bytes), 0
        for index in elsewhere:
            end = position + len(raw[index])
            room[position:end] = raw[index]
            raw[index] = room[position:end]
            position = end

    async def _ask(
        self, method: Method, request: Message, origin: Origin, caller: Caller
    ) -> Message:
        """Have a method answered. Raises HttpError if this server does not have it; Exception as its handler does."""
        handler = self._handlers.get(method)
        if handler is None:
            raise HttpError(501, f"this server does not have {method.name}")
        if method.local_only:
            check_local(origin.connection.peer, method.name)
        if not isinstance(handler, OnStream):
            answer: Message = await handler(request, caller)
            return answer
        stream = _OneMessage(request.SerializeToString(), origin.arrival_ns)
        await handler.handle(stream, caller)
        return method.response.FromString(stream.answer)


def _give_up(call: _RestCall) -> None:
    if call.when_gone is not None:
        call.when_gone()
    call.fail(RefusedError(Refusal.LATE, "the client hung up"))


async def _parts(receive: Callable[[], Awaitable[Any]], encoding: str) -> AsyncIterator[bytes]:
    """Receive a body in parts, unpacked; each part comes at once, so that the caller can stop early.

    Raises HttpError if the encoding is unknown; BadRequestError if it is packed wrongly; _GoneError if the client hung
    up.
    """
    unpacker = None
    encoding = encoding.strip().lower().removeprefix("x-")
    if encoding != "identity":
        if encoding not in _WINDOW_BITS:
            known = ", ".join(_WINDOW_BITS)
            words = f"Content-Encoding: found {quote(encoding)}, expected {known} or identity"
            raise HttpError(415, words, [(b"accept-encoding", known.encode())])
        unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    more = True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise _GoneError
        part: bytes = event["body"]
        more = event["more_body"]
        if unpacker is None:
            yield part
            continue
        try:
            # What is left inside comes out although nothing is put in.
            while (unpacked := unpacker.decompress(part, _UNPACKED_BYTES)) or part:
                yield unpacked
                part = unpacker.unconsumed_tail
                # A kilobyte may be a megabyte, and others wait.
                await asyncio.sleep(0)
        except zlib.error as error:
            raise BadRequestError(f"the body is not {encoding}: {error}") from None
        # What stands behind the end would be kept, however long it is.
        if unpacker.unused_data or not (more or unpacker.eof):
            raise BadRequestError(
                f"the body is not {encoding}: it has another end than is expected"
            )


def answer_of(status: Status) -> Response:
    """Make the response of a call that is not answered."""
    told: dict[str, Any] = {"error": status.text}
    headers: _Headers = []
    http = HTTP_STATUSES.get(status.code, 500)
    found = status_pb2.Status()
    for name, detail in status.details:
        if name == DETAILS and isinstance(detail, bytes):
            found.ParseFromString(detail)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for each in found.details:
        if each.Unpack(info):
            told["reason"] = info.reason
            headers.append((REFUSED_HEADER.encode(), info.reason.encode()))
            told["figures"] = {
                name: int(figure)
                for name, figure in sorted(info.metadata.items())
                if figure.lstrip("-").isdecimal()
            }
        elif each.Unpack(retry):
            retry_s = retry.retry_delay.ToNanoseconds() / NS_PER_S
            headers.append((b"retry-after", b"%d" % max(math.ceil(retry_s), 1)))
    if http == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return _error(http, told, headers)


def _error(status: int, told: str | dict[str, Any], headers: _Headers) -> Response:
    if isinstance(told, str):
        told = {"error": told}
    headers = [(b"content-type", b"application/json"), *headers]
    return Response(status, (write_json(told),), headers)


def _too_large(found: str, bytes_max: int) -> HttpError:
    return HttpError(413, f"found a body of {found} bytes, expected {bytes_max} at most")


# --- headers ----------------------------------------------------------------------------------


def read_headers(found: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Index headers by name; those that come twice become one, as HTTP has it.

    Raises HttpError if one of those comes twice that say who asks, whom, or what the body is.
    """
    headers: dict[str, str] = {}
    for name, value in found:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        if key in headers:
            if key in _ONCE:
                raise HttpError(400, f"found header {key} twice, expected it once")
            text = f"{headers[key]}, {text}"
        headers[key] = text
    return headers


_ONCE = frozenset(
    ("authorization", "host", "origin", _JSON_BYTES, SLO_HEADER, DECIDE_HEADER, TENANT_HEADER)
)


def check_site(headers: Mapping[str, str], *, only_here: bool) -> None:
    """Refuse requests of another site's page: the browser may reach a server that the site cannot.

    Raises HttpError if the page is another's, or a name stands for this machine that is not its own.
    """
    host = headers.get("host", "")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise HttpError(403, f"Origin: found {quote(origin)}, expected none or this server's own")
    if only_here and not _may_be_here(host):
        raise HttpError(
            403,
            f"Host: found {quote(host)}, expected localhost or an address: it listens there only",
        )


def _may_be_here(host: str) -> bool:
    """Whether a host is one of this machine's names: a word without a dot, or an address, which needs no DNS."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if "." not in name:
        return True
    try:
        ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def _read_ms(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        found_ms = float(text)
    except ValueError:
        found_ms = math.nan
    # The comparison is false for what is no number.
    if not 0 < found_ms <= SLO_NS_MAX / 1e6:
        raise BadRequestError(
            f"header {name}: found {quote(text)}, expected more than 0 and at most"
            f" {SLO_NS_MAX // 1_000_000} milliseconds"
        )
    return found_ms


def _json_bytes(headers: Mapping[str, str], body_bytes: int) -> int | None:
    text = headers.get(_JSON_BYTES)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 18 or int(text) > body_bytes:
        raise BadRequestError(
            f"header Inference-Header-Content-Length: found {quote(text)}, expected 0 to {body_bytes}, which"
            " is the length of the body"
        )
    return int(text)


def _text(data: bytes) -> str:
    return data.decode("latin-1")


# --- paths ------------------------------------------------------------------------------------


def _read_fields(body: Buffer) -> dict[str, Any]:
    if not body:
        return {}
    fields: dict[str, Any] = read_json(body, read_object)
    return fields


# What Triton's clients may ask for besides, and what there is instead.
_MODEL: Final = "v2/models/{name}"
_UNSUPPORTED: Final = tuple(
    (pattern.split("/"), words)
    for pattern, words in (
        ("v2/trace/setting", NO_TRACES),
        (f"{_MODEL}/trace/setting", NO_TRACES),
        ("v2/logging", NO_LOGGING),
        ("v2/cudasharedmemory/region/{name}/register", NO_CUDA),
    )
)


def _find(verb: str, raw_path: bytes) -> tuple[Route, Method, dict[str, str]]:
    """Find the route of a path, its method, and what its placeholders stand for.

    Raises HttpError if no route has this path and verb.
    """
    # Each for itself: a slash may be part of a name, and be no path then.
    segments = [unquote_to_bytes(each).decode(errors="replace") for each in _split(raw_path)]
    verbs = []
    for route, method, pattern in _BY_LENGTH.get(len(segments), ()):
        names = _match(pattern, segments)
        if names is not None:
            if route.verb == verb:
                return route, method, names
            verbs.append(route.verb)
    path = quote(raw_path.decode("latin-1"))
    if verbs:
        allow = ", ".join(verbs).replace("GET", "GET, HEAD")
        raise HttpError(
            405, f"{path}: found {quote(verb)}, expected {allow}", [(b"allow", allow.encode())]
        )
    for pattern, words in _UNSUPPORTED:
        if len(pattern) == len(segments) and _match(pattern, segments) is not None:
            raise HttpError(501, words)
    raise HttpError(404, f"there is no {path} here")


# Routes never change, so those of recent paths are cached: to find one takes as long as to read a small request.
# Longer paths than this are not cached, because no ordinary client sends them.
_PATH_BYTES_KEPT: Final = 256
_find_known = functools.lru_cache(maxsize=4096)(_find)


def _split(raw_path: bytes) -> list[bytes]:
    return raw_path.removeprefix(b"/").removesuffix(b"/").split(b"/")


def _match(pattern: Sequence[str], segments: Sequence[str]) -> dict[str, str] | None:
    names = {}
    for expected, found in zip(pattern, segments, strict=True):
        if expected[0] == "{":
            names[expected[1:-1]] = found
        elif expected != found:
            return None
    return names


def _by_length() -> Mapping[int, Sequence[tuple[Route, Method, Sequence[str]]]]:
    found: dict[int, list[tuple[Route, Method, Sequence[str]]]] = {}
    for route, method in ROUTES:
        pattern = route.pattern.split("/")
        found.setdefault(len(pattern), []).append((route, method, pattern))
    return found


_BY_LENGTH = _by_length()
