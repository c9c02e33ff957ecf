"""A controller that fronts feed has the throttle of its loop for them, too, and says what waited too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest

from clockwright import wire
from clockwright.bulk import Buffer
from clockwright.errors import Refusal
from clockwright.frames import FrameReader, greeting
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.v1 import front_pb2
from clockwright.v1 import inference_pb2 as pb
from controller import front_process
from controller.config import FrontConfig
from controller.front import link_frames as frames
from controller.front.throttle import WINDOW_NS, Throttle
from tests.kit.front_end import FrontEnd, serving, until

M = TypeVar("M", frames.Beat, frames.Described, frames.Told)

ATTACH = "/clockwright.v1.FrontService/Attach"
INFER = "/inference.GRPCInferenceService/ModelInfer"
# The type stubs want arguments that are optional.
_aio: Any = grpc.aio
# No machine is so slow.
PATIENT_MS = 100_000


def request(*, slo_ms: int = PATIENT_MS, model: str = "double") -> bytes:
    x = np.ones((1, 3), np.float32)
    return pb.ModelInferRequest(
        model_name=model,
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=x.shape)],
        raw_input_contents=[x.tobytes()],
        parameters={"slo_ms": pb.InferParameter(int64_param=slo_ms)},
    ).SerializeToString()


class BusyLoop:
    """What a throttle sees of a loop that never rests, on a clock that a test moves on."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.throttle = Throttle(lambda: self.now_ns, lambda: (self.now_ns, 0))


@asynccontextmanager
async def behind_a_front(
    directory: Path, throttle: Throttle
) -> AsyncIterator[tuple[FrontEnd, Any]]:
    """A controller with a throttle, and what asks it through a front process's parts."""
    async with serving(directory, throttle=throttle) as front_end:
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


def test_requests_that_end_slowly_while_the_loop_is_full_are_kept_out_until_it_rests(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        busy = BusyLoop()
        async with behind_a_front(tmp_path, busy.throttle) as (front_end, infer):
            await infer(request())
            front_end.worker.slow.add("double")
            while busy.throttle.rate_rps is None:
                busy.now_ns += WINDOW_NS
                await refused(infer(request(slo_ms=50)))
            front_end.worker.release()
            # The clock stands still, so the rate lets in nobody.
            told = await refused(infer(request(slo_ms=900)))
            assert told.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "the controller itself is busy all the time" in (told.details() or "")
            busy.now_ns += 2 * WINDOW_NS
            await infer(request())

    asyncio.run(main())


def test_a_request_that_has_time_waits_for_a_loop_that_others_find_full(tmp_path: Path) -> None:
    async def main() -> None:
        busy = BusyLoop()
        throttle = busy.throttle
        async with behind_a_front(tmp_path, throttle) as (front_end, infer):
            await infer(request())
            front_end.worker.slow.add("double")
            while throttle.rate_rps is None:
                busy.now_ns += WINDOW_NS
                await refused(infer(request(slo_ms=50)))
            front_end.worker.release()
            patient = [asyncio.ensure_future(infer(request())) for _ in range(3)]
            await until(lambda: throttle.num_waiting == 3)
            # What is refused, or withdrawn, beside it does not disturb it.
            await refused(infer(request(slo_ms=900)))
            patient.pop().cancel()

            def goes_on() -> bool:
                busy.now_ns += WINDOW_NS
                return all(call.done() for call in patient)

            await until(goes_on)
            await asyncio.gather(*patient)
            assert throttle.num_waiting == 0

    asyncio.run(main())


class RawFront:
    """A front that says what a test makes it say."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = FrameReader()

    @classmethod
    async def attached(cls, controller: str) -> RawFront:
        """Join, and have the controller know the clock."""
        async with _aio.insecure_channel(controller) as way:
            hello = front_pb2.AttachFrontRequest(
                protocol_version=wire.PROTOCOL_VERSION, instance="raw"
            )
            attach = way.unary_unary(ATTACH)
            welcome = front_pb2.AttachFrontResponse.FromString(
                await attach(hello.SerializeToString())
            )
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


def test_what_waited_for_longer_than_its_slo_is_refused_before_the_scheduler_hears_of_it(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        busy = BusyLoop()
        async with serving(tmp_path, throttle=busy.throttle) as front_end:
            front = await RawFront.attached(front_end.controller)
            front.say(frames.encode(frames.Describe(1, "double", "")))
            described = await front.hear(frames.Described)
            ask_id = 0
            while busy.throttle.rate_rps is None:
                busy.now_ns += WINDOW_NS
                ask_id += 1
                arrival_ns = time.monotonic_ns() - 200 * NS_PER_MS
                ask = (ask_id, described.number, 1, arrival_ns, 100 * NS_PER_MS, False, "", "")
                front.say(frames.encode_asks([(*ask, (12,), (), "", "")], [bytes(12)]))
                told = await front.hear(frames.Told)
                if told.refused:
                    (refused,) = told.refused
                    assert (refused.ask_id, refused.refusal) == (ask_id, Refusal.LATE)
                    assert refused.figures["latency_ns"] >= 200 * NS_PER_MS
            # A second of nothing else while the loop was full, and the throttle takes in less.
            assert busy.now_ns >= NS_PER_S
            assert front_end.runtime.telemetry.requests == []
            front.close()

    asyncio.run(main())
