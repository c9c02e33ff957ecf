"""Nothing that comes in by any method of any service does more than end its own call with a status."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from clockwright.v1 import control_pb2, inference_pb2
from clockwright.wire import peer
from clockwright.wire.worker_messages import Register
from controller.core import SchedulerConfig
from controller.process.app import running
from controller.process.config import ControllerConfig
from tests.kit.scripted_worker import LoopbackWorker

INFERENCE = "/inference.GRPCInferenceService/"
CONTROL = "/clockwright.v1.ControlService/"

UNARY: dict[str, type[Message]] = {
    f"{service}{method.name}": getattr(module, method.input_type.name)
    for module, service in ((inference_pb2, INFERENCE), (control_pb2, CONTROL))
    for method in module.DESCRIPTOR.services_by_name[service.strip("/").split(".")[-1]].methods
    if not (method.client_streaming or method.server_streaming)
} | {"/grpc.health.v1.Health/Check": inference_pb2.ServerLiveRequest}
STREAMS: dict[str, type[Message]] = {
    f"{CONTROL}AddModel": control_pb2.AddModelRequest,
    f"{INFERENCE}ModelStreamInfer": inference_pb2.ModelInferRequest,
}

# How a stranger's call may end; LATE is DEADLINE_EXCEEDED.
CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
}

TEXTS = (
    *("", "m", "n", "x", "y", "FP32", "1", "slo_ms", "exp4-full", "1/model.onnx", "../../x", "-rf"),
    *("\x1b[2J\nINFO: fine", "\0", "\u202e", "[" * 3000, "ü" * 300),
)
INTEGERS = (
    0,
    1,
    2,
    3,
    16,
    1000,
    2**31 - 1,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
    -1,
    -(2**31),
    -(2**63),
)
FLOATS = (0.0, 0.5, -1.0, 1e300, math.inf, math.nan)
RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 2**31 - 1),
}


def drawn_value(rng: random.Random, field: FieldDescriptor) -> object:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    least, most = RANGES[kind]
    return rng.choice([number for number in INTEGERS if least <= number <= most])


def fill(rng: random.Random, message: Any, depth: int = 0) -> None:  # noqa: ANN401
    """Set some fields of a message to plausible and to absurd values."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            continue
        count = rng.choice((1, 1, 2, 5)) if field.is_repeated else 1
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(count):
                entry = field.message_type.fields_by_name["value"]
                if entry.message_type is not None:
                    fill(rng, value[rng.choice(TEXTS)], depth + 1)
        elif field.message_type is not None:
            for _ in range(count if depth < 4 else 0):
                fill(rng, value.add() if field.is_repeated else value, depth + 1)
        elif field.is_repeated:
            value.extend(drawn_value(rng, field) for _ in range(count))
        else:
            setattr(message, field.name, drawn_value(rng, field))


def drawn_bytes(rng: random.Random, kind: type[Message]) -> bytes:
    """A message, a damaged one, one of very many fields, or anything at all."""
    message = kind()
    fill(rng, message)
    data = bytearray(message.SerializeToString())
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.choice((1, 2, 7, 100, 20_000)))
        case 1:
            return bytes((rng.randrange(1, 16) << 3 | rng.choice((0, 2)), 0)) * 600_000
        case 2 if data:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 3:
            del data[rng.randrange(len(data) + 1) :]
        case 4:
            data += rng.randbytes(rng.randrange(40))
    return bytes(data)


@pytest.mark.seeds(1)
def test_every_call_ends_with_a_status_of_ours_and_nothing_is_a_traceback(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"onnx")
    config = ControllerConfig(
        port=0,
        models_dir=tmp_path,
        heartbeat_interval_ms=20,
        upload_limit_bytes=1 << 20,
        # A worker that a busy machine holds up does not hang.
        scheduler=SchedulerConfig(action_timeout_ns=1000 * 10**9),
    )

    def check(method: str, sent: object, code: grpc.StatusCode, details: str) -> None:
        late = code is grpc.StatusCode.DEADLINE_EXCEEDED and details.startswith("LATE")
        denied = code is grpc.StatusCode.PERMISSION_DENIED and "--allow-client-shm" in details
        assert code in CODES or late or denied, (method, code, details, sent)
        assert details.isprintable(), (method, details)

    aio: Any = grpc.aio

    async def test() -> None:
        async with (
            running(config) as controller,
            LoopbackWorker(controller.port),
            aio.insecure_channel(f"127.0.0.1:{controller.port}") as channel,
        ):
            for method, kind in UNARY.items():
                for _ in range(25):
                    data = drawn_bytes(rng, kind)
                    call: Any = channel.unary_unary(method)(data)
                    check(method, data[:200], await call.code(), await call.details() or "")
            attach = f"/{peer.WORKER_SERVICE}/{peer.ATTACH}"
            for _ in range(100):
                data = registration(rng)
                call = channel.unary_unary(attach)(data)
                check(attach, data, await call.code(), await call.details() or "")
            for method, kind in STREAMS.items():
                for _ in range(25):
                    messages = [drawn_bytes(rng, kind) for _ in range(rng.randint(1, 5))]
                    # The server may end a stream before it has read all of it. The client of asyncio
                    # then says now and again only that it could not send.
                    code, details = await asyncio.to_thread(
                        stream, controller.port, method, messages
                    )
                    check(method, [message[:200] for message in messages], code, details)
            status = control_pb2.StatusResponse.FromString(
                await channel.unary_unary(f"{CONTROL}Status")(b"")
            )
            assert status.num_workers >= 1
            for name in ("ListModels", "ListWorkers", "ListApplications"):
                await channel.unary_unary(f"{CONTROL}{name}")(b"")

    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(test(), 300))
    for record in caplog.records:
        if "PollerCompletionQueue" in record.getMessage():
            continue  # gRPC's client for asyncio: the loop of a test before this one is closed.
        assert record.exc_info is None, record.getMessage()
        assert record.levelno < logging.ERROR, record.getMessage()
        assert record.getMessage().isprintable(), record.getMessage()


def stream(port: int, method: str, messages: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """Send messages, hang up, and hear what there is to hear."""
    channel: Any = grpc.insecure_channel(f"127.0.0.1:{port}")
    with channel:
        call: Any = channel.stream_stream(method)(iter(messages))
        with suppress(grpc.RpcError):
            assert all(isinstance(answer, bytes) for answer in call)
        return call.code(), call.details() or ""


def registration(rng: random.Random) -> bytes:
    """A worker's registration that is in order, or cut, or with a byte changed."""
    name = f"stranger-{rng.randrange(10)}"
    register = Register(peer.PROTOCOL_VERSION, name, "cpu", "cpu", 4, 1, host="elsewhere")
    data = bytearray(peer.encode(register))
    if rng.random() < 0.5:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randint(0, 2 * len(data))])
