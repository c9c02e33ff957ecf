"""A controller that fronts feed has the entrance of its loop for them, too, and says what waited too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import msgspec
import numpy as np
import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire import peer
from clockwright.wire.bulk import Buffer
from clockwright.wire.frames import FrameReader, greeting
from controller.front.admission.entrance import Entrance
from controller.front.remote import link_frames as frames
from controller.port import Ask, Refused
from controller.process import front_process
from controller.process.config import FrontConfig
from tests.kit.front_end import FrontEnd, serving, until
from tests.kit.full_entrance import FullEntrance, HeldEntrance

M = TypeVar("M", frames.Answers, frames.Beat, frames.Described)

ATTACH = "/clockwright.v1.FrontService/Attach"
INFER = "/inference.GRPCInferenceService/ModelInfer"
# The type stubs want arguments that are optional.
_aio: Any = grpc.aio
# No machine is so slow.
PATIENT_MS = 100_000
# What `HeldEntrance` refuses.
IMPATIENT_MS = 30_000


def request(*, slo_ms: int = PATIENT_MS, model: str = "double") -> bytes:
    x = np.ones((1, 3), np.float32)
    return pb.ModelInferRequest(
        model_name=model,
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=x.shape)],
        raw_input_contents=[x.tobytes()],
        parameters={"slo_ms": pb.InferParameter(int64_param=slo_ms)},
    ).SerializeToString()


@asynccontextmanager
async def behind_a_front(
    directory: Path, entrance: Callable[..., Entrance]
) -> AsyncIterator[tuple[FrontEnd, Any]]:
    """A controller with an entrance, and what asks it through a front process's parts."""
    async with serving(directory, entrance=entrance) as front_end:
        config = FrontConfig(controller=front_end.controller, port=0)
        async with (
            front_process.serving(config) as front,
            _aio.insecure_channel(f"127.0.0.1:{front.port}") as channel,
        ):
            yield front_end, channel.unary_unary(INFER)


async def refused(call: Any) -> grpc.aio.AioRpcError:  # noqa: ANN401
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_requests_of_a_front_are_refused_by_a_loop_that_has_no_time(tmp_path: Path) -> None:
    async with behind_a_front(tmp_path, FullEntrance) as (front_end, infer):
        told = await refused(infer(request(slo_ms=IMPATIENT_MS)))
        assert told.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the controller itself is busy all the time" in (told.details() or "")
        assert front_end.runtime.telemetry.requests == []


async def test_a_request_that_has_time_waits_for_a_loop_that_others_find_full(
    tmp_path: Path,
) -> None:
    async with behind_a_front(tmp_path, HeldEntrance) as (front_end, infer):
        entrance = HeldEntrance.of(front_end.server)
        patient = [asyncio.ensure_future(infer(request())) for _ in range(3)]
        await until(lambda: entrance.num_waiting == 3)
        # What is refused, or withdrawn, beside it does not disturb it.
        await refused(infer(request(slo_ms=IMPATIENT_MS)))
        patient.pop().cancel()
        await until(lambda: any(waiting.over for waiting in entrance.held))
        entrance.open()
        await asyncio.gather(*patient)
        assert front_end.runtime.telemetry.total.answered == 2
        # Those that were never begun cost the loop too little to count in its pace.
        assert front_end.server is not None
        assert front_end.server.door.num_ended == 2


class RawFront:
    """A front that says what a test makes it say."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = FrameReader()

    @classmethod
    async def attached(cls, controller: str) -> RawFront:
        """Join, and have the controller know the clock."""
        async with _aio.insecure_channel(controller) as way:
            hello = peer.FrontRegister(protocol_version=peer.PROTOCOL_VERSION, instance="raw")
            attach = way.unary_unary(ATTACH)
            answer = await attach(peer.encode(hello))
            welcome = msgspec.msgpack.decode(answer, type=peer.Welcome)
        front = cls(*await asyncio.open_unix_connection(welcome.socket_path))
        front.say([greeting(welcome.token)])
        least_ns: int | None = None
        while True:
            front.say(
                frames.encode(frames.FrontBeat(time.monotonic_ns(), least_ns, {}, {}, {}, ()))
            )
            beat = await front.hear(frames.Beat)
            if beat.known:
                return front
            delta_ns = time.monotonic_ns() - beat.sent_ns
            least_ns = delta_ns if least_ns is None else min(least_ns, delta_ns)

    def say(self, buffers: Sequence[Buffer]) -> None:
        """Send."""
        self._writer.write(b"".join(buffers))

    async def hear(self, kind: type[M]) -> M:
        """Wait for a message of one kind, and pass over those of others."""
        while True:
            data = await self._reader.read(1 << 16)
            assert data, "the controller hung up"
            self._frames.room()[: len(data)] = data
            for header, _ in self._frames.received(len(data)):
                message = frames.decode_from_controller(header)
                if isinstance(message, kind):
                    return message

    def close(self) -> None:
        """Leave."""
        self._writer.close()


async def test_what_waited_for_longer_than_its_slo_is_refused_before_the_scheduler_hears_of_it(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as front_end:
        front = await RawFront.attached(front_end.controller)
        front.say(frames.encode(frames.Describe(1, "double", "")))
        described = await front.hear(frames.Described)
        arrival_ns = time.monotonic_ns() - 200 * NS_PER_MS
        ask = Ask(described.number, 1, arrival_ns, 100 * NS_PER_MS, ask_id=1, lengths=(12,))
        front.say(frames.encode_asks([ask], [bytes(12)]))
        (told,) = (await front.hear(frames.Answers)).told
        assert isinstance(told, Refused)
        assert (told.ask_id, told.refusal) == (1, Refusal.LATE)
        assert told.figures["latency_ns"] >= 200 * NS_PER_MS
        assert front_end.runtime.telemetry.requests == []
        front.close()
