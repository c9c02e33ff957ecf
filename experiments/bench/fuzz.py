"""Millions of broken messages: nothing may crash on one, stand still for long, or keep memory.

Messages of every kind that comes in from outside (requests, in JSON too, frames of HTTP/2, of workers and of fronts,
HTTP/1.1 for REST, for metrics and for dashboards, reflection, operators' messages, credentials) are made from good ones:
bytes changed, cut, doubled, put together again, and in texts words changed for others. Most go to what reads them, in this
process; some go over sockets to all ports of a server that runs, which must answer good calls among them.

    make bench NAME=bench-fuzz
    make bench NAME=bench-fuzz ARGS="--messages 100000"

Four figures go to `guard.json`, part `fuzz`: `fuzzed_messages`; `fuzz_crashes`, which counts whatever is raised that
no caller expects, internal errors that a server admits to, and servers that ended; `loop_stall_ms_max`, the longest
that one message took its reader without letting others have their turn, or that the server let a client wait while
there was a processor for it; `rss_growth_mib`, of this process or of the server, whichever grew more.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
import selectors
import socket
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError

from clockwright.client.channel import OPTIONS
from clockwright.errors import BadRequestError, ClockwrightError, ProtocolError
from clockwright.units import ActionId, ModelId
from clockwright.v1 import control_pb2, inference_pb2
from clockwright.wire import frame_headers, frames, peer, worker_messages
from clockwright.wire.actions import Infer, LoadWeights, Result, StepTime
from clockwright.wire.tensors import TensorSpec
from controller.access.authoriser import Authoriser, Rules, credentials_of
from controller.access.grants import Grant, digest
from controller.access.roles import Role
from controller.front.http.http2 import PREFACE, Http2Connection, Http2Error
from controller.front.methods import METHODS
from controller.front.oip.protocol import Servable, parse_request, peek_request, read_request
from controller.front.remote import link_frames
from controller.front.services.templates import cut_request
from controller.port import Answered, Ask, Failed, Stale, Told
from controller.selection.messages import read_application, read_feedback
from experiments.bench import fuzz_http
from experiments.live.local_server import LocalServer, folders
from experiments.live.open_loop_client import frame, header_block
from experiments.live.processor_time import rss_bytes
from experiments.study.bench import Findings, bench
from modelzoo.build import write_model

#: This part of them goes to a server that runs.
LIVE_PART: Final = 0.01

# Numbers at which lengths, signs and widths go over.
_EDGES: Final = (
    *(b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01"),
    *(struct.pack(">I", 1 << 31), struct.pack("<I", (1 << 32) - 1), struct.pack("<q", -1)),
    *(b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"[" * 50, b"\xed\xa0\x80"),
)
_BYTES_MAX: Final = 1 << 14
# A process that has just begun grows for reasons of its own: the first part of its messages does not count.
_WARM_UP_PART: Final = 0.1
_BATCH: Final = 1000

# Words of texts, and lists and objects without others in them.
_WORD: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\w.+%-]+', re.ASCII)
_GROUP: Final = re.compile(rb"\[[^\[\]{}]*\]|\{[^\[\]{}]*\}")
# So many of the broken texts are broken in words alone.
_ONLY_WORDS_PART: Final = 0.6

Spans = Sequence[tuple[int, int]]
#: Words that are put into heads of messages, and into bodies.
Words = tuple[Sequence[bytes], Sequence[bytes]]
#: Reads a message; what has others have their turn meanwhile gives the steps between.
Read = Callable[[bytes], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is sent."""

    messages: int = 10_000_000
    seed: int = 14


@dataclass(slots=True)
class Found:
    """What a fuzz has found."""

    num_messages: int = 0
    #: What was raised, by reader and error, and a message that did it.
    crashes: dict[str, bytes] = field(default_factory=dict)
    num_crashes: int = 0
    stall_ns_max: int = 0
    rss_growth_bytes: int = 0

    def crash(self, what: str, message: bytes) -> None:
        """Note an error that no caller expects."""
        self.num_crashes += 1
        self.crashes.setdefault(what, message)

    def rounds(self, num_messages: int, process: int | str) -> Iterator[None]:
        """Go on until so many more messages were noted; then note by how much a process grew meanwhile."""
        begin, before = self.num_messages, 0
        while self.num_messages - begin < num_messages:
            yield
            num_done = self.num_messages - begin
            if not before and num_messages > num_done >= num_messages * _WARM_UP_PART:
                before = rss_bytes(process)
        gc.collect()
        grown = rss_bytes(process) - before if before else 0
        self.rss_growth_bytes = max(self.rss_growth_bytes, grown)


class Mutator:
    """Breaks good messages."""

    def __init__(
        self, rng: random.Random, seeds: Sequence[bytes], words: Words | None = None
    ) -> None:
        """Begin to break.

        Args:
            rng: draws.
            seeds: good messages.
            words: take the places of others in messages of HTTP; None: these are none.
        """
        self._rng = rng
        self._seeds = seeds
        self._words = words
        self._spans = {} if words is None else {seed: _spans(seed) for seed in seeds}
        self._bytes_max = max(_BYTES_MAX, 2 * max(map(len, seeds)))

    def draw(self) -> bytes:
        """Make a message, which is broken as a rule."""
        rng = self._rng
        seed = rng.choice(self._seeds)
        if self._words is not None:
            # What is right but for one word comes further than what is no text any more.
            seed = self._change_word(seed, self._words)
            if rng.random() < _ONLY_WORDS_PART:
                return seed[: self._bytes_max]
        message = bytearray(seed)
        for _ in range(1 + int(rng.random() * 3)):
            size = len(message)
            at = int(rng.random() * (size + 1))
            kind = int(rng.random() * 8)
            if kind <= 2 and at < size:
                message[at] = int(rng.random() * 256)
            elif kind == 3:
                message[at:at] = rng.choice(_EDGES)
            elif kind == 4:
                del message[at : at + int(rng.random() * 20)]
            elif kind == 5:
                message[at:at] = message[at : at + int(rng.random() * 64)] * int(rng.random() * 8)
            elif kind == 6:
                other = rng.choice(self._seeds)
                message[at:] = other[int(rng.random() * len(other)) :]
            elif at < size:
                del message[at:]
        return bytes(message[: self._bytes_max])

    def _change_word(self, seed: bytes, words: Words) -> bytes:
        rng = self._rng
        head, body = self._spans[seed]
        in_body = bool(body) and rng.random() < 0.7
        begin, end = rng.choice(body if in_body else head)
        message = seed[:begin] + rng.choice(words[in_body]) + seed[end:]
        return fuzz_http.with_lengths(message) if in_body else message


def _spans(seed: bytes) -> tuple[Spans, Spans]:
    """Find what may take another's place in a message's head, and in its body."""
    end_of_head = seed.find(b"\r\n\r\n")
    found = [match.span() for kind in (_WORD, _GROUP) for match in kind.finditer(seed)]
    head = [span for span in found if span[1] <= end_of_head]
    return head, [span for span in found if span[0] > end_of_head]


# --- who reads ------------------------------------------------------------------------------------

_SERVABLE = Servable(
    "double", "1", (TensorSpec("x", "FP32", (3,)),), (TensorSpec("y", "FP32", (3,)),), 8, None, True
)


def _read_request(data: bytes) -> None:
    peek_request(data)
    cut_request(data)
    with suppress(BadRequestError):
        read_request(
            parse_request(data), _SERVABLE, rpc_remaining_s=None, default_slo_ns=100_000_000
        )


class _Http2Reader:
    """A connection that is opened again whenever the last one has ended, or has taken enough."""

    _left = 0
    _connection: Http2Connection

    def __call__(self, data: bytes) -> None:
        """Take in some bytes as if they had come on a socket."""
        if not self._left:
            self._left = 200
            self._connection = Http2Connection(max_message_bytes=1 << 20)
            self._connection.receive(PREFACE + frame(4, 0, 0, b""))
        self._left -= 1
        connection = self._connection
        try:
            room = connection.direct()
            direct = 0 if room is None else min(len(room), len(data))
            if room is not None:
                room[:direct] = data[:direct]
            connection.receive(memoryview(data)[direct:], num_direct=direct)
            connection.take_output()
        except Http2Error as error:
            connection.close(error.code, str(error))
            connection.take_output()
            self._left = 0


def _read_worker(data: bytes) -> None:
    with suppress(ProtocolError):
        worker_messages.decode_from_worker((data, b""))


def _read_front(data: bytes) -> None:
    for decode in (link_frames.decode_from_front, link_frames.decode_from_controller):
        with suppress(ProtocolError):
            decode(data)


def _read_data(data: bytes) -> None:
    frame = data, data[len(data) // 2 :]
    decoders: tuple[Callable[[frames.Frame], object], ...] = (
        frames.decode_result,
        frames.decode_order,
        frames.decode_inputs,
        frames.decode_outputs,
    )
    for decode in decoders:
        with suppress(ProtocolError):
            decode(frame)
    reader = frames.FrameReader(header_bytes_max=1 << 16, payload_bytes_max=1 << 16)
    with suppress(ProtocolError):
        for begin in range(0, len(data), 4096):
            part = data[begin : begin + 4096]
            while part:
                room = reader.room()
                taken = min(len(room), len(part))
                room[:taken] = part[:taken]
                reader.received(taken)
                part = part[taken:]


def _read_operator(data: bytes) -> None:
    with suppress(DecodeError, BadRequestError):
        read_application(control_pb2.PutApplicationRequest.FromString(data).application)
    with suppress(DecodeError):
        for item in control_pb2.FeedbackRequest.FromString(data).items[:100]:
            with suppress(BadRequestError):
                read_feedback(item)


_KEY = "cw_00112233_" + "a" * 43
_GRANT = Grant("web", frozenset((Role.INFERENCE,)), key_id="00112233", key_sha256=digest(_KEY))
_AUTHORISER = Authoriser(Rules(grants=(_GRANT,), anonymous=frozenset()))


def _read_credentials(data: bytes) -> None:
    text = data.decode("latin-1")
    with suppress(ClockwrightError):
        _AUTHORISER.admit(
            METHODS["/inference.GRPCInferenceService/ModelInfer"],
            credentials_of([("authorization", text), ("triton-grpc-protocol-x", text)]),
            now_s=0,
        )


# --- good messages --------------------------------------------------------------------------------


def _requests() -> list[bytes]:
    raw = inference_pb2.ModelInferRequest(
        model_name="double", id="r", raw_input_contents=[bytes(12)]
    )
    raw.inputs.add(name="x", datatype="FP32", shape=[1, 3])
    raw.parameters["slo_ms"].int64_param = 100
    raw.parameters["context"].string_param = "ann"
    typed = inference_pb2.ModelInferRequest(model_name="double")
    contents = typed.inputs.add(name="x", datatype="FP32", shape=[1, 3]).contents
    contents.fp32_contents.extend((1, 2, 3))
    typed.outputs.add(name="y").parameters["shared_memory_region"].string_param = "r"
    large = inference_pb2.ModelInferRequest(
        model_name="double", raw_input_contents=[bytes(96)] * 200
    )
    large.inputs.add(name="x", datatype="FP32", shape=[8, 3])
    return [message.SerializeToString() for message in (raw, typed, large)]


def _conversations() -> list[bytes]:
    parts = []
    for number, request in enumerate(_requests()):
        stream_id = 2 * number + 1
        message = b"\x00" + struct.pack(">I", len(request)) + request
        block = header_block("h") + b"\x00\x0cgrpc-timeout\x021S"
        parts.append(frame(1, 4, stream_id, block) + frame(0, 1, stream_id, message))
        parts.append(frame(1, 0, stream_id, block[:20]) + frame(9, 4, stream_id, block[20:]))
        parts.append(frame(3, 0, stream_id, bytes(4)))
    parts += [
        frame(4, 0, 0, struct.pack(">HI", 4, 100)),
        frame(6, 0, 0, bytes(8)),
        frame(8, 0, 0, struct.pack(">I", 1000)),
        frame(0, 8, 1, b"\x03" + bytes(20)),
    ]
    return parts


def _from_workers() -> list[bytes]:
    specs = (TensorSpec("x", "FP32", (3,)),)
    ready = worker_messages.ReadyModel(
        "m",
        "a",
        num_pages=1,
        load_ns=1,
        inputs=specs,
        outputs=specs,
        batches=(worker_messages.BatchProfile(1, 1),),
    )
    card = worker_messages.CardReport(1000, 2000, ("hot",))
    beat, mapped = worker_messages.Heartbeat(1, 2, card), worker_messages.MemoryMapped(1)
    sent = (ready, beat, mapped, worker_messages.Drain("bye"))
    return [*map(worker_messages.encode, sent)]


def _registers() -> list[bytes]:
    worker = worker_messages.Register(peer.PROTOCOL_VERSION, "w", "cpu", "k", 1, 1, 1)
    front = peer.FrontRegister(peer.PROTOCOL_VERSION, "here", 1, instance="f")
    return [*map(peer.encode, (worker, front)), b""]


def _from_fronts() -> list[bytes]:
    ask = Ask(1, 1, 1, 1, "gold", "name", "ann", "key", ask_id=1, lengths=(12,))
    told: list[Told] = [
        Answered(1, ask_id=1, lengths=(12,)),
        Failed(3, "why", {"a-bin": b"x"}, 1),
        Stale(1),
    ]
    there = link_frames.WorkerThere(1, "host", 9000, bytes(frame_headers.TOKEN_BYTES), b"")
    framed: tuple[Sequence[Any], ...] = (
        link_frames.encode_asks([ask, ask], []),
        link_frames.encode_answers(told, [], []),
        link_frames.encode(link_frames.Describe(1, "m", "")),
        link_frames.encode(
            link_frames.Described(1, 1, _SERVABLE, None, not_yet=False, is_held=True)
        ),
        link_frames.encode(link_frames.FrontBeat(1, None, {}, {}, {}, ())),
        link_frames.encode_hand_on(1, 2, 0, []),
        link_frames.encode(there),
        link_frames.encode(link_frames.Feed(((1, 1, 2, 0),))),
    )
    # What lies behind the prefix of a frame.
    return [bytes(b"".join(parts))[frames.PREFIX.size :] for parts in framed]


def _data_frames() -> list[bytes]:
    step = StepTime(1, 2, 1)
    times: dict[str, int] = {"earliest_ns": 1, "latest_ns": 2, "expected_duration_ns": 1}
    model = ModelId("m")
    load = LoadWeights(action_id=ActionId(1), model_id=model, **times)
    infer = Infer(action_id=ActionId(2), model_id=model, batch_size=2, rows=(1, 1), **times)
    result = Result(action_id=ActionId(2), received_ns=1, input=step, exec=step, output=step)
    framed = (
        frames.encode_action(load),
        frames.encode_action(infer, [bytes(12), bytes(12)]),
        frames.encode_result(result, [bytes(12)]),
        frames.encode_action(
            infer, [bytes(12)] * 2, places=[frame_headers.APART] * 2, fronts=(1, 2), generation=3
        ),
        frames.encode_inputs(2, 1, [bytes(12)]),
        frames.encode_outputs(2, 1, [bytes(12)]),
    )
    whole = [bytes(b"".join(parts)) for parts in framed]
    return whole + [message[frames.PREFIX.size :] for message in whole]


def _from_operators() -> list[bytes]:
    application = control_pb2.Application(
        name="app", models=["a", "b"], options_json='{"learning_rate": [0.5, {"a": 1}]}', slo_ns=1
    )
    feedback = control_pb2.FeedbackRequest()
    feedback.items.add(query_id="q", label=1)
    feedback.items.add(query_id="q", reward=0.5)
    put = control_pb2.PutApplicationRequest(application=application)
    quota = control_pb2.SetQuotaRequest(tenant="t", quota=control_pb2.Quota(rate_rps=1))
    return [message.SerializeToString() for message in (put, feedback, quota)]


#: Words for those of HTTP.
_WORDS: Final = {
    "json": (fuzz_http.HTTP_WORDS, fuzz_http.JSON_WORDS),
    "rest": (fuzz_http.HTTP_WORDS, fuzz_http.JSON_WORDS),
    "metrics": (fuzz_http.HTTP_WORDS, fuzz_http.HTTP_WORDS),
}


def good_messages() -> dict[str, list[bytes]]:
    """Good messages for each reader."""
    return {
        "request": _requests(),
        "http2": _conversations(),
        "worker": _from_workers(),
        "register": _registers(),
        "front": _from_fronts(),
        "data": _data_frames(),
        "operator": _from_operators(),
        "credentials": [f"Bearer {_KEY}".encode(), b"Bearer a.b.c", _KEY.encode(), b"Basic x"],
        "json": fuzz_http.json_bodies(),
        "rest": fuzz_http.rest_requests(),
        "metrics": fuzz_http.metrics_requests(),
        "reflection": fuzz_http.reflection_requests(),
    }


def mutators(seed: object) -> dict[str, Mutator]:
    """Make who breaks messages for each reader."""
    return {
        name: Mutator(random.Random(f"{seed} {name}"), good, _WORDS.get(name))
        for name, good in good_messages().items()
    }


@contextmanager
def readers() -> Iterator[dict[str, Read]]:
    """Who reads what comes from outside; some have an event loop, which ends with the block."""
    with closing(asyncio.new_event_loop()) as loop:
        rest = loop.run_until_complete(fuzz_http.rest_reader(_read_request))
        metrics = loop.run_until_complete(fuzz_http.metrics_reader())
        yield {
            "request": _read_request,
            "http2": _Http2Reader(),
            "worker": _read_worker,
            "front": _read_front,
            "data": _read_data,
            "operator": _read_operator,
            "credentials": _read_credentials,
            "json": fuzz_http.read_json_body,
            "rest": lambda data: loop.run_until_complete(rest(data)),
            "metrics": lambda data: loop.run_until_complete(metrics(data)),
        }


def steps_of(read: Read, data: bytes) -> Iterator[None]:
    """Read a message without an event loop; yields where others would have their turn."""
    waiting = read(data)
    if waiting is not None:
        yield from waiting.__await__()


# --- in this process ------------------------------------------------------------------------------


def fuzz_readers(found: Found, num_messages: int, seed: int) -> None:
    """Have all readers read so many broken messages, each as many."""
    breaking = mutators(seed)
    with readers() as reading:
        for _ in found.rounds(num_messages, "self"):
            for name, read in reading.items():
                read_batch(found, name, read, breaking[name], _BATCH)


def read_batch(found: Found, name: str, read: Read, mutator: Mutator, count: int) -> None:
    """Have a reader read so many messages, and note the outcome of it."""
    clock = time.thread_time_ns  # What others take of the machine is no stall.
    stall_ns = 0
    for _ in range(count):
        message = mutator.draw()
        begin_ns = clock()
        try:
            for _ in steps_of(read, message):
                stall_ns = max(stall_ns, clock() - begin_ns)
                begin_ns = clock()
        except Exception as error:
            found.crash(f"{name}: {type(error).__name__}: {str(error)[:200]}", message)
        stall_ns = max(stall_ns, clock() - begin_ns)
    found.num_messages += count
    found.stall_ns_max = max(found.stall_ns_max, stall_ns)


# --- over sockets ---------------------------------------------------------------------------------

_METHODS: Final = {
    f"/{service}/{method}": reader
    for service, reader, methods in (
        ("inference.GRPCInferenceService", "request", "ModelInfer"),
        ("inference.GRPCInferenceService", "operator", "ModelReady ModelMetadata RepositoryIndex"),
        ("clockwright.v1.ControlService", "operator", "Status ListModels PutApplication Feedback"),
        ("clockwright.v1.ControlService", "operator", "SetQuota ListQuotas Explain"),
        (peer.FRONT_SERVICE, "register", peer.ATTACH),
        (peer.WORKER_SERVICE, "register", peer.ATTACH),
        ("grpc.health.v1.Health", "operator", "Check"),
        ("grpc.reflection.v1.ServerReflection", "reflection", "ServerReflectionInfo"),
    )
    for method in methods.split()
}
_LIVE = "/inference.GRPCInferenceService/ServerLive"
# Calls under way at once, and messages that a raw connection sends before it hangs up.
_CALLS_AT_ONCE: Final = 64
_RAW_MESSAGES: Final = 50
# Behind each message of HTTP, so that the server hangs up when it has answered; what it takes for the rest of the
# message, or follows without an end, is left when nothing has come for so long.
_LAST: Final = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_QUIET_S: Final = 0.2
_FAULTS: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def fuzz_server(
    found: Found, address: str, process: int, num_messages: int, seed: int, http: Mapping[str, str]
) -> None:
    """Send a server so many broken messages: as calls, as bytes of connections, and in HTTP/1.1.

    Args:
        found: takes what is found.
        address: HOST:PORT of gRPC.
        process: id of the server's process.
        num_messages: in all.
        seed: of every draw.
        http: HOST:PORT of its other doors, by the readers whose messages go there.
    """
    breaking = mutators(f"{seed} live")
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        for _ in found.rounds(num_messages, process):
            _call_batch(found, channel, breaking)
            _send_raw(found, address, breaking["http2"])
            for name, door in http.items():
                send_http(found, name, door, breaking[name])


def _call_batch(found: Found, channel: grpc.Channel, breaking: Mapping[str, Mutator]) -> None:
    calls = []
    stub: Any = channel
    for method, reader in islice(cycle(_METHODS.items()), _CALLS_AT_ONCE):
        message = breaking[reader].draw()
        calls.append((method, message, stub.unary_unary(method).future(message, timeout=60)))
    # A good one among them is answered.
    calls.append((_LIVE, b"", stub.unary_unary(_LIVE).future(b"", timeout=60)))
    for method, message, call in calls:
        error = call.exception()
        if error is not None and (error.code() in _FAULTS or method == _LIVE):
            found.crash(f"{method}: {error.code().name}: {error.details()}", message)
    found.num_messages += _CALLS_AT_ONCE


def _send_raw(found: Found, address: str, mutator: Mutator) -> None:
    host, _, port = address.rpartition(":")
    # It closes the connection of a client that breaks the protocol.
    with socket.create_connection((host, int(port)), timeout=60) as sock, suppress(OSError):
        sock.sendall(PREFACE + frame(4, 0, 0, b""))
        for _ in range(_RAW_MESSAGES):
            sock.sendall(mutator.draw())
    found.num_messages += _RAW_MESSAGES


def send_http(found: Found, name: str, address: str, mutator: Mutator) -> None:
    """Send some messages at once, by a connection each, and look for errors of the server's own in the answers."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(_RAW_MESSAGES):
            message = mutator.draw()
            sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            with suppress(OSError):
                sock.sendall(message + _LAST)
            selector.register(sock, selectors.EVENT_READ, message)
        while selector.get_map() and (ready := selector.select(_QUIET_S)):
            for key, _ in ready:
                answer = _receive(key.fileobj)
                if b"HTTP/1.1 500" in answer:
                    found.crash(f"{name}: {answer[-300:].decode('latin-1')}", key.data)
                if not answer:
                    selector.unregister(key.fileobj)
    found.num_messages += _RAW_MESSAGES


def _receive(sock: Any) -> bytes:  # noqa: ANN401  selectors know files of all kinds
    try:
        return bytes(sock.recv(1 << 16))
    except OSError:
        return b""  # It has closed the connection of a client that breaks the protocol.


# --- the benchmark --------------------------------------------------------------------------------


def measure(setting: Setting) -> Findings:
    """Read and send broken messages."""
    num_live = int(setting.messages * LIVE_PART)
    found = Found()
    fuzz_readers(found, setting.messages - num_live, setting.seed)
    with tempfile.TemporaryDirectory() as scratch:
        write_model("mlp-16-4", Path(scratch) / "models" / "double" / "1" / "model.onnx")
        more = ("--device", "modelled:1ms", "--http-port", "0", "--metrics-port", "0")
        with LocalServer([*folders(scratch), *more]) as server:
            http = {"rest": server.rest, "metrics": server.metrics}
            doors = {name: urlsplit(url).netloc for name, url in http.items()}
            fuzz_server(found, server.address, server.process.pid, num_live, setting.seed, doors)
            if server.process.poll() is not None:
                found.crash("the server has ended", b"")
    figures: dict[str, float] = {
        "fuzzed_messages": found.num_messages,
        "fuzz_crashes": found.num_crashes,
        "loop_stall_ms_max": found.stall_ns_max / 1e6,
        "rss_growth_mib": found.rss_growth_bytes / (1 << 20),
    }
    crashes = [f"CRASH {what}: {message[:200].hex()}" for what, message in found.crashes.items()]
    return Findings(figures, fault="\n".join(crashes))


STUDY = bench("bench-fuzz", Setting(), measure, record="guard", part="fuzz")
