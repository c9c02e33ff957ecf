"""Fronts apart from their controller: what they tell each other, and what becomes of requests when one goes."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import msgspec
import numpy as np
import pytest

from clockwright import Client, Feedback, UnknownModelError
from clockwright.client.operator import Operator
from clockwright.errors import ProtocolError
from clockwright.units import NS_PER_MS
from clockwright.v1 import control_pb2
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire import peer
from clockwright.wire.frames import greeting, make_frame
from clockwright.wire.tensors import TensorSpec, Variable
from controller.front.oip.protocol import Servable
from controller.front.remote.backend import LocalDescription
from controller.front.remote.descriptions import AskSize, Description, Descriptions
from controller.front.remote.link_frames import Describe
from controller.port import Ask, Streaming
from controller.process import front_process
from controller.process.config import FrontConfig
from tests.kit.double import INFER, PATIENT_MS, first, request
from tests.kit.front_end import FrontEnd, serving, serving_in_thread, until

# The type stubs want arguments that are optional.
_aio: Any = grpc.aio


@asynccontextmanager
async def front(
    controller: str, *, clock: Callable[[], int] = time.monotonic_ns
) -> AsyncIterator[Any]:
    """A front of a controller, as a channel to it."""
    config = FrontConfig(controller=controller, port=0)
    async with (
        front_process.serving(config, clock=clock) as running,
        _aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        yield channel


def port_of(front_end: FrontEnd) -> int:
    return int(front_end.controller.rpartition(":")[2])


async def test_a_controller_that_starts_again_gets_what_is_open_and_each_request_one_answer(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as gone:
        gone.worker.slow.add("double")
        address = gone.controller
        async with front(address) as channel:
            infer = channel.unary_unary(INFER)
            before = [asyncio.ensure_future(infer(request(n))) for n in range(40)]
            await until(lambda: gone.runtime.num_waiting == 40)
            await gone.hang_up()
            # Nobody is there. What comes now waits too.
            meanwhile = [asyncio.ensure_future(infer(request(n))) for n in range(40, 60)]
            async with serving(tmp_path, port=port_of(gone)) as back:
                answers = await asyncio.gather(*before, *meanwhile)
                assert [first(answer) for answer in answers] == [2 * n for n in range(60)]
                rows = sum(sum(infer.rows) for infer in back.worker.infers)
                assert rows == 60  # None of them twice.


async def test_without_a_controller_a_request_is_refused_when_its_time_is_over(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as gone, front(gone.controller) as channel:
        infer = channel.unary_unary(INFER)
        assert first(await infer(request(1))) == 2
        await gone.hang_up()
        begun_s = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError, match="could not be reached") as caught:
            await infer(request(1, slo_ms=300))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - begun_s >= 0.3


async def test_a_request_that_its_controller_calls_malformed_fails_alone_and_the_link_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Description.check

    def garbled(description: Description, ask: Ask) -> AskSize:
        ask.rows += ask.rows == 2
        return check(description, ask)

    monkeypatch.setattr(Description, "check", garbled)
    async with serving(tmp_path) as front_end, front(front_end.controller) as channel:
        infer = channel.unary_unary(INFER)
        front_end.worker.slow.add("double")
        good = [asyncio.ensure_future(infer(request(n))) for n in range(5)]
        await until(lambda: front_end.runtime.num_waiting == 5)
        assert front_end.fronts is not None
        links = front_end.fronts.links
        with pytest.raises(grpc.aio.AioRpcError, match=r"double: 3 rows of \[24\]") as caught:
            await infer(request(1, 2))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        front_end.worker.release()
        assert [first(each) for each in await asyncio.gather(*good)] == [0, 2, 4, 6, 8]
        assert front_end.fronts.links == links


async def test_requests_of_a_front_that_is_gone_are_withdrawn_and_others_are_served(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as front_end, front(front_end.controller) as other:
        front_end.worker.slow.add("right")
        async with front(front_end.controller) as channel:
            infer = channel.unary_unary(INFER)
            open_ = [asyncio.ensure_future(infer(request(n, model="right"))) for n in range(5)]
            await until(lambda: front_end.runtime.num_waiting == 5)
            for each in open_:
                each.cancel()
            await asyncio.wait(open_)
        await until(lambda: front_end.runtime.num_waiting == 0)
        assert first(await other.unary_unary(INFER)(request(4))) == 8


async def test_a_front_is_given_up_though_its_requests_are_refused_as_others_of_it_are_withdrawn(
    tmp_path: Path,
) -> None:
    ahead_ns = 0
    async with serving(tmp_path, clock=lambda: time.monotonic_ns() + ahead_ns) as front_end:
        front_end.worker.slow.add("double")
        async with front(front_end.controller) as channel:
            infer = channel.unary_unary(INFER)
            asked = [asyncio.ensure_future(infer(request(n))) for n in range(40)]
            await until(lambda: front_end.runtime.num_waiting == 40)
            # All are late now, and the scheduler finds that out as the first is withdrawn.
            ahead_ns = 2 * PATIENT_MS * NS_PER_MS
            assert front_end.fronts is not None
            front_end.fronts.close()
            assert front_end.runtime.num_waiting == 0
            for each in asked:
                each.cancel()


async def test_a_client_that_leaves_withdraws_its_request_through_the_front(tmp_path: Path) -> None:
    async with serving(tmp_path) as front_end, front(front_end.controller) as channel:
        front_end.worker.slow.add("double")
        call = channel.unary_unary(INFER)(request(1))
        sent = asyncio.ensure_future(call)
        await until(lambda: front_end.runtime.num_waiting == 1)
        call.cancel()
        await asyncio.wait([sent])
        await until(lambda: front_end.runtime.num_waiting == 0)


@pytest.mark.parametrize("ahead_s", [-7200, 3600])
async def test_the_clock_of_a_front_is_translated(tmp_path: Path, ahead_s: int) -> None:
    def skewed() -> int:
        return time.monotonic_ns() + ahead_s * 1_000_000_000

    async with (
        serving(tmp_path) as front_end,
        front(front_end.controller, clock=skewed) as channel,
    ):
        explained = request(1, explain=True)
        answer = await channel.unary_unary(INFER)(explained)
        parameters = pb.ModelInferResponse.FromString(answer).parameters
        assert 0 <= parameters["measured_us"].int64_param < PATIENT_MS * 1000


async def test_a_request_is_decided_behind_a_front_as_without_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as front_end, front(front_end.controller) as channel:
        asked = pb.ModelInferRequest.FromString(request(1, explain=True))
        asked.parameters["decide_within_ms"].double_param = PATIENT_MS / 2
        answer = await channel.unary_unary(INFER)(asked.SerializeToString())
        parameters = pb.ModelInferResponse.FromString(answer).parameters
        assert 0 < parameters["decided_us"].int64_param < PATIENT_MS * 1000
        (row,) = front_end.runtime.telemetry.requests
        assert row.arrival_ns < row.decided_ns <= row.departure_ns


async def test_a_model_that_is_removed_is_gone_from_every_front_at_once(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as front_end,
        front(front_end.controller) as one,
        front(front_end.controller) as two,
    ):
        channels = one, two
        for channel in channels:
            assert first(await channel.unary_unary(INFER)(request(1))) == 2
        front_end.catalogue.remove("double")
        for channel in channels:
            with pytest.raises(grpc.aio.AioRpcError, match="there is no model 'double'"):
                await channel.unary_unary(INFER)(request(1))
            right = await channel.unary_unary(INFER)(request(1, model="right"))
            assert pb.ModelInferResponse.FromString(right).model_name == "right"


def test_applications_are_put_asked_and_taught_through_any_front(tmp_path: Path) -> None:
    one = np.array([[1, 0, 0]], np.float32)
    application = control_pb2.Application(
        name="app",
        models=["right", "wrong"],
        no_cache=True,
    )
    with (
        serving_in_thread(tmp_path, front="apart") as server,
        Operator(server.address) as operator,
        Client(server.address) as apart,
        Client(server.front_end.controller) as own,
    ):
        server.until(lambda front_end: front_end.catalogue.ready)
        with pytest.raises(UnknownModelError):
            apart.infer("app", one, slo_ms=PATIENT_MS)
        operator.put_application(application)
        for asked, taught in ((apart, own), (own, apart)):
            result = asked.infer("app", one, slo_ms=PATIENT_MS)
            assert result.outputs["label"].tolist() == [1]
            (outcome,) = taught.feedback(Feedback(result.query_id, label=1))
            assert outcome.status == "APPLIED"
        operator.remove_application("app")
        with pytest.raises(UnknownModelError):
            apart.infer("app", one, slo_ms=PATIENT_MS)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff" * 64,
        b"".join(bytes(part) for part in make_frame(b"\x93\x00\x01\x02", ())),
        # Requests, before the clock is known.
        b"".join(bytes(part) for part in make_frame(b"\x92\x00\x90", (b"surplus",))),
    ],
    ids=["no frame", "no message", "too early"],
)
async def test_a_front_that_talks_nonsense_is_hung_up_on_and_others_are_served(
    tmp_path: Path, nonsense: bytes
) -> None:
    async with serving(tmp_path) as front_end, front(front_end.controller) as channel:
        assert front_end.fronts is not None
        async with _aio.insecure_channel(front_end.controller) as way:
            hello = peer.FrontRegister(protocol_version=peer.PROTOCOL_VERSION, instance="raw")
            answer = await way.unary_unary("/clockwright.v1.FrontService/Attach")(
                peer.encode(hello)
            )
        welcome = msgspec.msgpack.decode(answer, type=peer.Welcome)
        reader, writer = await asyncio.open_connection("127.0.0.1", welcome.socket_port)
        writer.write(greeting(welcome.token) + nonsense)
        while await reader.read(1 << 16):
            pass
        writer.close()
        await until(lambda: front_end.fronts is not None and front_end.fronts.num_fronts == 1)
        assert first(await channel.unary_unary(INFER)(request(4))) == 8


@pytest.mark.parametrize(
    ("rows", "lengths", "fits"),
    [
        (1, (40,), True),
        (8, (40,), True),
        (8, (8 * 64,), True),
        (8, (8 * 64 + 1,), False),
        (8, (), False),
        (9, (40,), False),
    ],
)
def test_a_row_of_much_work_fits_where_a_request_may_have_one_row(
    rows: int, lengths: tuple[int, ...], fits: bool
) -> None:
    spec = TensorSpec("x", "UINT8", (-1,), vary=Variable(64, ("length",), (32,), 4))
    servable = Servable("m", "1", (spec,), (spec,), 1, None, largest_batch=8)
    subject: Any = None
    description = Description(LocalDescription(servable, subject, subject), 0)
    ask = Ask(0, rows, 0, NS_PER_MS, lengths=lengths)
    with nullcontext() if fits else pytest.raises(ProtocolError):
        assert description.check(ask).lengths == lengths


@pytest.mark.parametrize("max_steps", [0, 8])
@pytest.mark.parametrize("streaming", [None, Streaming(NS_PER_MS, 8)])
def test_a_front_asks_for_several_answers_where_there_are_several(
    max_steps: int, streaming: Streaming | None
) -> None:
    spec = TensorSpec("x", "UINT8", (1,))
    servable = Servable("m", "1", (spec,), (spec,), 1, None, max_steps=max_steps)
    subject: Any = None
    description = Description(LocalDescription(servable, subject, subject), 0)
    ask = Ask(0, 1, 0, NS_PER_MS, lengths=(1,), streaming=streaming)
    fits = (streaming is not None) == (max_steps > 0)
    with nullcontext() if fits else pytest.raises(ProtocolError, match="answer"):
        assert description.check(ask).lengths == (1,)


def test_a_front_that_resets_its_connection_as_it_joins_is_no_error(tmp_path: Path) -> None:
    errors: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        async with serving(tmp_path) as front_end:
            fronts = front_end.fronts
            assert fronts is not None
            async with _aio.insecure_channel(front_end.controller) as way:
                hello = peer.FrontRegister(protocol_version=peer.PROTOCOL_VERSION, instance="raw")
                answer = await way.unary_unary("/clockwright.v1.FrontService/Attach")(
                    peer.encode(hello)
                )
            welcome = msgspec.msgpack.decode(answer, type=peer.Welcome)
            # The loop hears of all of it when it is over: nothing waits here.
            with socket.create_connection(("127.0.0.1", welcome.socket_port)) as sock:
                sock.sendall(greeting(welcome.token))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await until(lambda: welcome.token not in fronts._expected._tokens.values())
            assert fronts.num_fronts == 0
            async with front(front_end.controller) as channel:
                assert first(await channel.unary_unary(INFER)(request(4))) == 8

    asyncio.run(main())
    assert errors == []


async def test_a_front_of_another_version_without_a_name_or_at_the_end_is_told_so(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path) as front_end,
        _aio.insecure_channel(front_end.controller) as channel,
    ):
        hello = peer.FrontRegister(protocol_version=peer.PROTOCOL_VERSION + 1)
        attach = channel.unary_unary("/clockwright.v1.FrontService/Attach")
        with pytest.raises(grpc.aio.AioRpcError, match="protocol version"):
            await attach(peer.encode(hello))
        hello.protocol_version = peer.PROTOCOL_VERSION
        with pytest.raises(grpc.aio.AioRpcError, match="instance: found none"):
            await attach(peer.encode(hello))
        hello.instance = "raw"
        welcome = msgspec.msgpack.decode(await attach(peer.encode(hello)), type=peer.Welcome)
        assert front_end.fronts is not None
        front_end.fronts.close()
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await attach(peer.encode(hello))
        # Nor is one taken that was on its way.
        with socket.create_connection(("127.0.0.1", welcome.socket_port)) as sock:
            sock.sendall(greeting(welcome.token))
            assert await asyncio.to_thread(sock.recv, 1) == b""
        assert front_end.fronts.num_fronts == 0


def test_descriptions_of_versions_that_are_gone_are_forgotten() -> None:
    spec = TensorSpec("x", "UINT8", (1,))
    backend, catalogue, subject = Mock(), Mock(generation=0), Mock()

    def find(name: str, version: str) -> LocalDescription:
        if int(version) < catalogue.generation:
            raise UnknownModelError(f"there is no model {name}")
        return LocalDescription(
            Servable(name, version, (spec,), (spec,), 1, None), subject, subject
        )

    backend.find = find
    descriptions = Descriptions(backend, catalogue)
    for version in range(2500):
        catalogue.generation = version
        told = descriptions.describe(Describe(version, "m", str(version)))
        assert descriptions.find(told.number) is not None
    assert len(descriptions) <= 1001
