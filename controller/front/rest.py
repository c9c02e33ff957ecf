"""The REST door: paths and JSON of the Open Inference Protocol in, the methods behind gRPC's door asked, JSON out.

It is an ASGI application and decides nothing. Each path is a method of a gRPC service; it needs the role of
that method, its body becomes the method's message, and the handlers that answer are those of gRPC. So
whatever holds there (who may, quotas, bounds, deadlines) holds here, and a front that is a process of its own hands
the same calls on to its controller.

An error is `{"error": TEXT}`; a refusal has its `reason` beside, and `figures`. 429 stands for what was refused for
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
from typing import Annotated, Any, Final, Protocol
from urllib.parse import parse_qs, unquote_to_bytes

import grpc
import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from clockwright.bulk import HEADER_BYTES_MAX, Buffer, total_bytes
from clockwright.errors import BadRequestError, DeniedError, Refusal, RefusedError
from clockwright.units import NS_PER_MS, NS_PER_S, SLO_NS_MAX
from clockwright.v1 import control_pb2 as control
from clockwright.v1 import inference_pb2 as pb
from controller.access.authoriser import Authoriser, Certificate, credentials_of
from controller.access.caller import CALLER, Caller
from controller.front.calls import Call, Late, find_header
from controller.front.door import Door
from controller.front.oip import quote
from controller.front.oip_json import (
    fields_of,
    read_json,
    read_object,
    read_raw_request,
    read_request,
    set_parameters,
    write_answer,
    write_json,
)
from controller.front.statuses import DETAILS, Status, status_of
from controller.front.throttle import Throttle
from controller.front.unsupported import NO_CONFIG, NO_CUDA, NO_LOGGING, NO_TRACES
from controller.front.waiting_line import PATIENT_NS
from controller.slabs import SLAB_BYTES_MIN, Slabs

log = logging.getLogger(__name__)

#: Headers of requests, in small letters as ASGI has them. An objective there and one in the body: the shorter holds.
SLO_HEADER: Final = "x-clockwright-slo-ms"
TENANT_HEADER: Final = "x-clockwright-tenant"
#: Header of refusals: which `Refusal` or `Denial` it is.
REFUSED_HEADER: Final = "x-clockwright-refused"

#: Header that says how many bytes of a request or an answer are JSON, with tensors behind them.
_JSON_BYTES: Final = "inference-header-content-length"

# What is read in a millisecond or two, and longer than anything that is right.
_BODY_BYTES_MAX: Final = 128 << 10

# How zlib names the packings that HTTP knows, and how much is unpacked in one turn of the loop.
_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
_UNPACKED_BYTES: Final = 256 << 10

_INFERENCE, _CONTROL = "/inference.GRPCInferenceService/", "/clockwright.v1.ControlService/"
_INFER = _INFERENCE + "ModelInfer"

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


@dataclass(slots=True)
class RestRequest:
    """What a path and a body say."""

    #: What the placeholders in the path's pattern stand for.
    names: dict[str, str]
    #: What the query says: the first value of each name.
    query: dict[str, str]
    #: What the body's JSON says; empty where there is none.
    fields: dict[str, Any]


class HttpError(Exception):
    """A request is none of those that there are, or too large."""

    def __init__(self, status: int, text: str, headers: _Headers | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or []


class _GoneError(Exception):
    """The client hung up."""


@dataclass(frozen=True, slots=True)
class Route:
    """A path, and the method that answers it."""

    verb: str
    #: `{name}` stands for any segment, and means the field of the request's message.
    pattern: str
    #: Path of the method in gRPC, which says what role it takes.
    path: str
    request: type[Message]
    response: type[Message]
    #: Makes the request's message.
    fill: Callable[[Message, RestRequest], None]
    #: Makes what is answered, as JSON can say it, and the status.
    tell: Callable[[Any, RestRequest], tuple[Any, int]]
    #: Longest body that is taken, unless it is an inference's.
    bytes_max: int


class _Turn:
    """A request's, at a busy event loop."""

    def __init__(self) -> None:
        #: Whether it is let in.
        self.came: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.came.done()

    def begin(self) -> None:
        """Let it in."""
        self.came.set_result(True)

    def refuse(self) -> None:
        """Keep it out, if anybody still wants to know."""
        if not self.over:
            self.came.set_result(False)


class _RestCall:
    """A request for inference, whose answer is awaited.

    Of an error its status is kept. The error holds the frames in which it was raised, and they would hold
    whoever keeps it, with the request's tensors.
    """

    #: HTTP has no deadline.
    timeout_ns: int | None = None

    def __init__(
        self, arrival_ns: int, caller: Caller, headers: Mapping[str, str], throttle: Throttle
    ) -> None:
        self.arrival_ns = arrival_ns
        self.caller = caller
        self.when_gone: Callable[[], object] | None = None
        self._headers = tuple(headers.items())
        self._throttle = throttle
        self._ended = asyncio.get_running_loop().create_future()
        self._answer: tuple[Sequence[Buffer], int, Late] | None = None
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
        return find_header(self._headers, name)

    def judge(self, now_ns: int) -> Sequence[Buffer] | Status:
        """Say what is to be written now: the answer, or a status in its place."""
        if self._answer is not None:
            message, latest_ns, late = self._answer
            if now_ns <= latest_ns:
                return message
            self._status = status_of(late(now_ns), method="ModelInfer")
        assert self._status is not None
        return self._status

    def answer(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        """Hand an answer on, to be judged as it is written."""
        self._answer = (message, latest_ns, late)
        self._end()

    def fail(self, error: Exception) -> None:
        """Hand an error on."""
        self._status = status_of(error, method="ModelInfer")
        self._end()

    def served(self, *, slow: bool) -> None:
        """Tell the throttle."""
        self._throttle.ended(slow=slow)

    def missed(self) -> None:
        """Tell the throttle."""
        self._throttle.missed()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


class _Context:
    """What a handler is told of a call, and sets of its end: what is used of grpc.aio's context."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.code = grpc.StatusCode.OK
        self.text = ""
        self.details: Sequence[tuple[str, str | bytes]] = ()
        self.messages: list[bytes] = []

    def peer(self) -> str:
        """The client's address, as gRPC writes it."""
        return self._peer

    def time_remaining(self) -> float | None:
        """Time to the deadline of the call, in s; HTTP has none."""
        return None

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the code of the status at the end."""
        self.code = code

    def set_details(self, details: str) -> None:
        """Set the text of the status at the end."""
        self.text = details

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Set what else the client hears at the end."""
        self.details = metadata

    async def write(self, message: bytes) -> None:
        """Take a message of a handler that answers with a stream, of which there is one."""
        self.messages.append(message)


@dataclass(slots=True)
class _CallDetails(grpc.HandlerCallDetails):
    method: str
    invocation_metadata: Any = ()


class RestApp:
    """Answers HTTP; services mount on it as on a server of gRPC."""

    def __init__(
        self,
        *,
        clock: Callable[[], int],
        door: Door,
        throttle: Throttle,
        authoriser: Authoriser,
        slabs: Slabs,
        max_message_bytes: int,
        only_here: bool = False,
    ) -> None:
        """Answer nothing yet.

        Args:
            clock: the present in ns; that of `Origin.arrival_ns`.
            door: bounds what is open at once, together with the other door's.
            throttle: says for which requests the event loop has time.
            authoriser: says who may call what.
            slabs: where large messages are put.
            max_message_bytes: longest body that is taken.
            only_here: clients of this machine alone reach it, so that a name which is none of this machine's is
                somebody's trick (DNS rebinding).
        """
        self._clock = clock
        self._door = door
        self._throttle = throttle
        self._authoriser = authoriser
        self._slabs = slabs
        self._max_message_bytes = max_message_bytes
        self._only_here = only_here
        self._slicing = asyncio.Lock()
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._infer: Callable[[Call, Buffer], None] | None = None

    def add_generic_rpc_handlers(
        self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]
    ) -> None:
        """Answer with what these handlers know."""
        self._generic += handlers

    def answer_directly(self, answer: Callable[[Call, Buffer], None]) -> None:
        """Have requests for inference answered by a function: it calls `Call.answer` or `Call.fail`."""
        self._infer = answer

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
        length = sum(map(len, answer.body))
        headers = [(b"content-length", b"%d" % length), *answer.headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        # In one piece: each is a call of the kernel's.
        body = answer.body[0] if len(answer.body) == 1 else b"".join(answer.body)
        await send({"type": "http.response.body", "body": body})

    async def _answer(
        self, scope: Mapping[str, Any], receive: Callable[[], Awaitable[Any]]
    ) -> Response:
        origin: Origin = scope["extensions"]["clockwright"]
        raw_path: bytes = scope["raw_path"]
        name = quote(raw_path.decode("latin-1"))
        try:
            headers = _headers(scope["headers"])
            check_site(headers, only_here=self._only_here)
            find = _find_known if len(raw_path) <= _PATH_BYTES_KEPT else _find
            # The server sends no body of an answer to HEAD.
            verb = "GET" if scope["method"] == "HEAD" else scope["method"]
            route, names = find(verb, raw_path)
            name = route.path.rpartition("/")[2]
            caller = self._admit(route, headers, origin.connection)
            if origin.connection.crowded is not None:
                raise origin.connection.crowded
            if route.path == _INFER and not self._throttle.admit():
                await self._wait_for_turn(headers, origin.arrival_ns)
            body = await self._read_body(route, headers, receive)
            if route.path == _INFER:
                return await self._answer_infer(names, headers, body, origin, caller)
            query = {key: each[0] for key, each in parse_qs(_text(scope["query_string"])).items()}
            asked = RestRequest(names, query, _read_fields(body))
            return await self._answer_other(route, asked, origin, caller)
        except (_GoneError, asyncio.CancelledError):
            raise
        except HttpError as error:
            return _error(error.status, str(error), error.headers)
        except Exception as error:
            return answer_of(status_of(error, method=name))

    async def _wait_for_turn(self, headers: Mapping[str, str], arrival_ns: int) -> None:
        """Wait until a busy event loop has time for a request, which has time if its header says so.

        Raises:
            RefusedError: it has none, or the loop has none in time.
        """
        slo_ns = round((_slo_ms(headers) or 0) * NS_PER_MS)
        turn = _Turn()
        if slo_ns < PATIENT_NS or not self._throttle.wait(
            turn, turn.begin, turn.refuse, arrival_ns + slo_ns // 2
        ):
            turn.refuse()
        if not await turn.came:
            self._door.count(Refusal.OVERLOADED)
            raise self._throttle.refusal()

    def _admit(self, route: Route, headers: Mapping[str, str], connection: Connection) -> Caller:
        credentials = credentials_of(headers.items(), connection.certificate)
        try:
            return self._authoriser.admit(route.path, credentials, now_s=time.time())
        except DeniedError as error:
            log.info("%s: %s", connection.peer, error)
            raise

    async def _read_body(
        self, route: Route, headers: Mapping[str, str], receive: Callable[[], Awaitable[Any]]
    ) -> Buffer:
        """Receive a body, of which no more is kept than may be.

        Raises:
            HttpError: it is too large, or packed in an unknown way.
            BadRequestError: it is packed wrongly.
            RefusedError: there is no room for it.
            _GoneError: the client hung up.
        """
        infers = route.path == _INFER
        bytes_max = self._max_message_bytes if infers else route.bytes_max
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
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            # From here on `Door.enter` counts what is asked.
            door.num_bytes -= held

    async def _answer_infer(
        self,
        names: Mapping[str, str],
        headers: Mapping[str, str],
        body: Buffer,
        origin: Origin,
        caller: Caller,
    ) -> Response:
        json_bytes, slo_ms = _json_bytes(headers, len(body)), _slo_ms(headers)
        tenant = headers.get(TENANT_HEADER, "")
        if json_bytes == 0:
            asked = RestRequest(dict(names), {}, {})
            described = await self._ask(_METADATA, asked, origin, caller)
            if isinstance(described, Status):
                return answer_of(described)
            assert isinstance(described, pb.ModelMetadataResponse)
            parts, form = read_raw_request(body, described, slo_ms=slo_ms, tenant=tenant)
        else:
            # Others have their turn while it is read, so it has to count meanwhile, and nobody may want it any more.
            gone = asyncio.Event()
            origin.connection.when_gone = gone.set
            self._door.num_bytes += len(body)
            try:
                parts, form = await read_request(
                    body,
                    json_bytes,
                    model=names["name"],
                    version=names.get("version", ""),
                    pause=functools.partial(self._pause, gone),
                    slo_ms=slo_ms,
                    tenant=tenant,
                )
            finally:
                self._door.num_bytes -= len(body)
                origin.connection.when_gone = None
        call = _RestCall(origin.arrival_ns, caller, headers, self._throttle)
        connection = origin.connection
        connection.when_gone = lambda: _give_up(call)
        assert self._infer is not None
        self._infer(call, self._whole(parts))
        try:
            await call.wait()
        finally:
            connection.when_gone = None
        message = call.judge(self._clock())
        if isinstance(message, Status):
            return answer_of(message)
        text, binary = write_answer(b"".join(message), form)
        # To write it takes time, too.
        message = call.judge(self._clock())
        if isinstance(message, Status):
            return answer_of(message)
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

    async def _pause(self, gone: asyncio.Event) -> None:
        """Let others have their turn; of all who read what is long, one goes on in each.

        Raises:
            _GoneError: the client hung up.
        """
        async with self._slicing:
            await asyncio.sleep(0)
        if gone.is_set():
            raise _GoneError

    def _whole(self, parts: Sequence[Buffer]) -> Buffer:
        """Put a message's parts behind each other; a large one where workers of this host can read it."""
        num_bytes = total_bytes(parts)
        if num_bytes < SLAB_BYTES_MIN:
            return b"".join(parts)
        room, position = self._slabs.room(num_bytes), 0
        for part in parts:
            room[position : position + len(part)] = part
            position += len(part)
        return room

    async def _answer_other(
        self, route: Route, asked: RestRequest, origin: Origin, caller: Caller
    ) -> Response:
        response = await self._ask(route, asked, origin, caller)
        if isinstance(response, Status):
            return answer_of(response)
        told, status = route.tell(response, asked)
        return Response(status, (write_json(told),), [(b"content-type", b"application/json")])

    async def _ask(
        self, route: Route, asked: RestRequest, origin: Origin, caller: Caller
    ) -> Message | Status:
        """Ask the method of a route; gives what it answers, or why it does not."""
        request = route.request()
        route.fill(request, asked)
        context: Any = _Context(origin.connection.peer)
        CALLER.set(caller)
        data = await self._handle(route.path, request.SerializeToString(), context)
        if context.code is not grpc.StatusCode.OK:
            return Status(context.code, context.text, tuple(context.details))
        response = route.response()
        response.ParseFromString(data)
        return response

    async def _handle(self, path: str, data: bytes, context: Any) -> bytes:  # noqa: ANN401
        details = _CallDetails(path)
        for generic in self._generic:
            handler = generic.service(details)
            if handler is None:
                continue
            if handler.unary_unary is not None:
                behave: Any = handler.unary_unary
                answer: bytes = await behave(data, context)
                return answer
            behave = handler.stream_stream
            await behave(_once(data), context)
            return context.messages[0] if context.messages else b""
        raise HttpError(501, f"this server does not have {path.rpartition('/')[2]}")


def _give_up(call: _RestCall) -> None:
    """Withdraw a request whose client is gone."""
    if call.when_gone is not None:
        call.when_gone()
    call.fail(RefusedError(Refusal.LATE, "the client hung up"))


async def _parts(receive: Callable[[], Awaitable[Any]], encoding: str) -> AsyncIterator[bytes]:
    """Receive a body in parts, unpacked; nothing is held back, so that whoever takes them can stop.

    Raises:
        HttpError: it is packed in a way that nobody here knows.
        BadRequestError: it is packed wrongly.
        _GoneError: the client hung up.
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


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


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


def _headers(found: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Index headers by name; those that come twice become one, as HTTP has it, but where that changes whom they mean."""
    headers: dict[str, str] = {}
    for name, value in found:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        if key in headers:
            if key in _ONCE:
                raise HttpError(400, f"found header {key} twice, expected it once")
            text = f"{headers[key]}, {text}"
        headers[key] = text
    return headers


_ONCE = frozenset(("authorization", "host", "origin", _JSON_BYTES, SLO_HEADER, TENANT_HEADER))


def check_site(headers: Mapping[str, str], *, only_here: bool) -> None:
    """Refuse what a page of another site makes a browser send: it may reach a server that strangers do not.

    Raises:
        HttpError: the page is another's, or a name stands for this machine that is not its own.
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
    """Whether a host is one of this machine's names: a word without a dot, or an address, which nobody resolves."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if "." not in name:
        return True
    try:
        ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def _slo_ms(headers: Mapping[str, str]) -> float | None:
    text = headers.get(SLO_HEADER)
    if text is None:
        return None
    try:
        slo_ms = float(text)
    except ValueError:
        slo_ms = math.nan
    # The comparison is false for what is no number.
    if not 0 < slo_ms <= SLO_NS_MAX / 1e6:
        raise BadRequestError(
            f"header {SLO_HEADER}: found {quote(text)}, expected more than 0 and at most"
            f" {SLO_NS_MAX // 1_000_000} milliseconds"
        )
    return slo_ms


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


def _fill(message: Message, asked: RestRequest) -> None:
    """Fill in a message from the body's fields, and then the path's."""
    try:
        json_format.ParseDict(asked.fields, message)
    except (json_format.ParseError, RecursionError) as error:
        raise BadRequestError(f"the body is not what is expected: {error}") from None
    for name, text in asked.names.items():
        setattr(message, name, text)


def _fill_parameters(message: Message, asked: RestRequest) -> None:
    """Fill in what loads or unloads a model, whose parameters are plain values in JSON."""
    fields = dict(asked.fields)
    parameters = fields.pop("parameters", None) or {}
    _fill(message, RestRequest(asked.names, asked.query, fields))
    if not isinstance(parameters, dict) or not all(
        isinstance(value, bool | int | str) for value in parameters.values()
    ):
        raise BadRequestError("parameters: expected an object of truth values, numbers or strings")
    set_parameters(getattr(message, "parameters"), parameters, where="")  # noqa: B009


def _fill_put(message: Message, asked: RestRequest) -> None:
    assert isinstance(message, control.PutApplicationRequest)
    _fill(message.application, asked)
    message.replace = True


class _FeedbackItem(msgspec.Struct, forbid_unknown_fields=True):
    query_id: str
    label: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    reward: float | None = None


def _fill_feedback(message: Message, asked: RestRequest) -> None:
    """Fill in feedback: there may be thousands of items, for which `json_format` takes too long."""
    assert isinstance(message, control.FeedbackRequest)
    try:
        items = msgspec.convert(asked.fields.get("items", []), list[_FeedbackItem])
    except msgspec.ValidationError as error:
        raise BadRequestError(f"items: {error}") from None
    for item in items:
        message.items.add(query_id=item.query_id, label=item.label, reward=item.reward)


def _fill_query(message: Message, asked: RestRequest) -> None:
    known = message.DESCRIPTOR.fields_by_name
    for name in asked.query:
        if name not in known:
            raise BadRequestError(f"query: found {quote(name)}, expected {' or '.join(known)}")
    _fill(message, RestRequest(asked.query | asked.names, {}, {}))


def _tell(response: Message, _: RestRequest) -> tuple[Any, int]:
    return fields_of(response), 200


def _tell_ready(response: Message, asked: RestRequest) -> tuple[Any, int]:
    """Say whether something is ready, in words and by the status: load balancers look at nothing else."""
    told = asked.names | fields_of(response)
    return told, 200 if any(value is True for value in told.values()) else 400


def _tell_list(response: pb.RepositoryIndexResponse, _: RestRequest) -> tuple[Any, int]:
    return [fields_of(model) for model in response.models], 200


def _tell_regions(response: pb.SystemSharedMemoryStatusResponse, _: RestRequest) -> tuple[Any, int]:
    return [fields_of(response.regions[name]) for name in sorted(response.regions)], 200


_MODEL = "v2/models/{name}"
_VERSION = f"{_MODEL}/versions/{{version}}"
_REGIONS = "v2/systemsharedmemory"
_REGION = f"{_REGIONS}/region/{{name}}"


def _oip(
    verb: str,
    pattern: str,
    method: str,
    *,
    fill: Callable[[Message, RestRequest], None] = _fill,
    tell: Callable[[Any, RestRequest], tuple[Any, int]] = _tell,
) -> Route:
    request, response = getattr(pb, f"{method}Request"), getattr(pb, f"{method}Response")
    path = _INFERENCE + method
    return Route(verb, pattern, path, request, response, fill, tell, _BODY_BYTES_MAX)


def _control(
    verb: str,
    pattern: str,
    method: str,
    *,
    messages: str = "",
    fill: Callable[[Message, RestRequest], None] = _fill,
    bytes_max: int = _BODY_BYTES_MAX,
) -> Route:
    messages = messages or method
    request = getattr(control, f"{messages}Request")
    response = getattr(control, f"{messages}Response")
    return Route(verb, pattern, _CONTROL + method, request, response, fill, _tell, bytes_max)


_METADATA: Final = _oip("GET", _MODEL, "ModelMetadata")

ROUTES: Final = (
    _oip("GET", "v2/health/live", "ServerLive", tell=_tell_ready),
    _oip("GET", "v2/health/ready", "ServerReady", tell=_tell_ready),
    _oip("GET", "v2", "ServerMetadata"),
    # In front of the model of that name, as Triton has it.
    _oip("GET", "v2/models/stats", "ModelStatistics"),
    _oip("GET", f"{_MODEL}/stats", "ModelStatistics"),
    _oip("GET", f"{_VERSION}/stats", "ModelStatistics"),
    _oip("GET", f"{_MODEL}/ready", "ModelReady", tell=_tell_ready),
    _oip("GET", f"{_VERSION}/ready", "ModelReady", tell=_tell_ready),
    _METADATA,
    _oip("GET", _VERSION, "ModelMetadata"),
    _oip("POST", f"{_MODEL}/infer", "ModelInfer"),
    _oip("POST", f"{_VERSION}/infer", "ModelInfer"),
    _oip("POST", "v2/repository/index", "RepositoryIndex", tell=_tell_list),
    _oip(
        "POST",
        "v2/repository/models/{model_name}/load",
        "RepositoryModelLoad",
        fill=_fill_parameters,
    ),
    _oip(
        "POST",
        "v2/repository/models/{model_name}/unload",
        "RepositoryModelUnload",
        fill=_fill_parameters,
    ),
    _oip("GET", f"{_REGIONS}/status", "SystemSharedMemoryStatus", tell=_tell_regions),
    _oip("GET", f"{_REGION}/status", "SystemSharedMemoryStatus", tell=_tell_regions),
    _oip("POST", f"{_REGION}/register", "SystemSharedMemoryRegister"),
    _oip("POST", f"{_REGION}/unregister", "SystemSharedMemoryUnregister"),
    _oip("POST", f"{_REGIONS}/unregister", "SystemSharedMemoryUnregister"),
    _control("GET", "v2/applications", "ListApplications", fill=_fill_query),
    _control("GET", "v2/applications/{name}", "ListApplications", fill=_fill_query),
    _control("PUT", "v2/applications/{name}", "PutApplication", fill=_fill_put),
    _control("DELETE", "v2/applications/{name}", "RemoveApplication"),
    _control("DELETE", "v2/applications/{application}/contexts/{context}", "EraseContext"),
    _control("GET", "v2/requests/{request_id}", "Explain"),
    _control("GET", "v2/requests/{request_id}/own", "ExplainOwn", messages="Explain"),
    _control("POST", "v2/feedback", "Feedback", fill=_fill_feedback, bytes_max=HEADER_BYTES_MAX),
)


# What Triton's clients may ask for besides, and what there is instead.
_CUDA: Final = "v2/cudasharedmemory"
_UNSUPPORTED: Final = tuple(
    (pattern.split("/"), words)
    for pattern, words in (
        ("v2/trace/setting", NO_TRACES),
        (f"{_MODEL}/trace/setting", NO_TRACES),
        ("v2/logging", NO_LOGGING),
        (f"{_MODEL}/config", NO_CONFIG),
        (f"{_VERSION}/config", NO_CONFIG),
        (f"{_CUDA}/status", NO_CUDA),
        (f"{_CUDA}/unregister", NO_CUDA),
        (f"{_CUDA}/region/{{name}}/status", NO_CUDA),
        (f"{_CUDA}/region/{{name}}/register", NO_CUDA),
        (f"{_CUDA}/region/{{name}}/unregister", NO_CUDA),
    )
)


def _find(verb: str, raw_path: bytes) -> tuple[Route, dict[str, str]]:
    """Find the route of a path, and what its placeholders stand for.

    Raises:
        HttpError: there is none.
    """
    # Each for itself: a slash may be part of a name, and be no path then.
    segments = [unquote_to_bytes(each).decode(errors="replace") for each in _split(raw_path)]
    verbs = []
    for route, pattern in _BY_LENGTH.get(len(segments), ()):
        names = _match(pattern, segments)
        if names is not None:
            if route.verb == verb:
                return route, names
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


# Where paths lead is kept, which nobody changes: to find it takes as long as to read a small request. Longer
# paths than this are a stranger's.
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


def _by_length() -> Mapping[int, Sequence[tuple[Route, Sequence[str]]]]:
    found: dict[int, list[tuple[Route, Sequence[str]]]] = {}
    for route in ROUTES:
        pattern = route.pattern.split("/")
        found.setdefault(len(pattern), []).append((route, pattern))
    return found


_BY_LENGTH = _by_length()
