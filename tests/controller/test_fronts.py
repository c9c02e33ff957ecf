"""The server of HTTP/2 does what gRPC's own clients expect: messages of every kind and size, deadlines, ends."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from clockwright.client.channel import OPTIONS
from clockwright.errors import ConfigError, LinkEndedError
from clockwright.wire.bulk import Buffer
from controller.access.authoriser import Authoriser
from controller.access.caller import Caller
from controller.access.roles import Role
from controller.front.admission.limits import AdmissionLimits
from controller.front.http.calls import Call, Directly
from controller.front.http.http2_server import Http2Server
from controller.front.http.tls import server_context
from controller.front.methods import CallStream, Method, OnStream
from controller.front.oip.statuses import Status, ToldStatusError
from controller.links.slabs import Slabs
from controller.process.config import ControllerConfig
from tests.kit.certificates import self_signed
from tests.kit.front_end import until

SERVICE = "test.Service"
MESSAGE_BYTES_MAX = 80 << 20


class Service:
    """Handlers of all kinds, as this project writes them."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.waiting = 0

    def handlers(self) -> dict[Method, Any]:
        return {
            a_method("Echo"): OnStream(self.echo),
            a_method("Seen"): Directly(self.seen),
            a_method("Left"): OnStream(self.time_left),
            a_method("Fail"): self.fail,
            a_method("Raise"): self.crash,
            a_method("Wait"): self.wait,
            a_method("Count", takes_stream=True): OnStream(self.count),
            a_method("Repeat", gives_stream=True): OnStream(self.repeat),
            a_method("Talk", takes_stream=True, gives_stream=True): OnStream(self.talk),
        }

    async def echo(self, stream: CallStream, _: Caller) -> None:
        await stream.write(await stream.read() or b"")

    def seen(self, call: Call, _: Buffer) -> None:
        back = (("back-bin", bytes(range(256))), ("back", call.header("there")))
        call.fail(ToldStatusError(Status(grpc.StatusCode.ABORTED, "seen", back)))

    async def time_left(self, stream: CallStream, _: Caller) -> None:
        left_s = stream.time_left_s()
        await stream.write(b"none" if left_s is None else b"%d" % round(left_s))

    async def fail(self, _: StringValue, caller: Caller) -> StringValue:
        details = (("why-bin", b"\0\1"),)
        raise ToldStatusError(Status(grpc.StatusCode.NOT_FOUND, "100 % gone: ä\n", details))

    async def crash(self, _: StringValue, caller: Caller) -> StringValue:
        raise RuntimeError("a bug")

    async def wait(self, request: StringValue, _: Caller) -> StringValue:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.left.append(request.value)
        return StringValue()

    async def count(self, stream: CallStream, _: Caller) -> None:
        await stream.write(b"%d" % sum([len(data) async for data in stream]))

    async def repeat(self, stream: CallStream, _: Caller) -> None:
        for number in range(int(await stream.read() or b"0")):
            await stream.write(b"%d" % number)

    async def talk(self, stream: CallStream, _: Caller) -> None:
        while (data := await stream.read()) is not None:
            await stream.write(data * 2)
        raise LinkEndedError("enough")


def a_method(name: str, **traits: Any) -> Method:  # noqa: ANN401
    return Method(SERVICE, name, Role.INFERENCE, StringValue, StringValue, **traits)


def a_text(text: str) -> bytes:
    return StringValue(value=text).SerializeToString()


class Running:
    """A server of `Service` in a thread of its own."""

    def __init__(
        self,
        address: str,
        service: Service,
        loop: asyncio.AbstractEventLoop,
        certificate: Path | None,
    ) -> None:
        self.address = address
        #: That of a server behind TLS.
        self.certificate = certificate
        self.service = service
        self.loop = loop

    def channel(self, module: Any = grpc) -> Any:  # noqa: ANN401
        """A channel of `grpc` or `grpc.aio`."""
        # The types of gRPC's stubs want serializers, and streams at once; its clients do not.
        if self.certificate is None:
            return module.insecure_channel(self.address, options=OPTIONS)
        credentials = grpc.ssl_channel_credentials(self.certificate.read_bytes())
        return module.secure_channel(self.address, credentials, options=OPTIONS)

    def until(self, condition: Callable[[], bool]) -> None:
        asyncio.run_coroutine_threadsafe(until(condition), self.loop).result(60)


async def start(service: Service, tls: ssl.SSLContext | None = None) -> tuple[Http2Server, str]:
    loop = asyncio.get_running_loop()
    server = Http2Server(
        clock=lambda: int(loop.time() * 1e9),
        door=AdmissionLimits(max_requests=1000, max_bytes=1 << 30),
        max_message_bytes=MESSAGE_BYTES_MAX,
        max_connections=100,
        slabs=Slabs(1 << 20),
        authoriser=Authoriser(),
        tls=tls,
    )
    server.serve(service.handlers())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["plain", "behind tls"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    certificate, tls = None, None
    if request.param == "behind tls":
        certificate, key = request.getfixturevalue("files")
        tls = server_context(certificate, key)
    service = Service()
    started: list[Running] = []
    ready = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        server, address = await start(service, tls)
        started.append(Running(address, service, asyncio.get_running_loop(), certificate))
        ready.set()
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield started[0]
    finally:
        started[0].loop.call_soon_threadsafe(stop.set)
        thread.join()


@pytest.fixture
def channel(running: Running) -> Iterator[Any]:
    with running.channel() as channel:
        yield channel


def unary(channel: Any, name: str) -> Any:  # noqa: ANN401
    return channel.unary_unary(f"/{SERVICE}/{name}")


@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 70_000, 5 << 20, 64 << 20])
def test_messages_of_every_size_come_and_go_unchanged(channel: Any, size: int) -> None:  # noqa: ANN401
    content = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    assert unary(channel, "Echo")(content) == content


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_read(channel: Any, compression: grpc.Compression) -> None:  # noqa: ANN401
    content = b"squeeze me " * 10_000
    assert unary(channel, "Echo")(content, compression=compression) == content


def test_text_comes_in_and_text_and_bytes_go_back(channel: Any) -> None:  # noqa: ANN401
    with pytest.raises(grpc.RpcError) as caught:
        unary(channel, "Seen")(b"", metadata=(("there", "x y"),))
    ended: Any = caught.value
    found = {key: value for key, value in ended.trailing_metadata() if key.startswith("back")}
    assert found == {"back": "x y", "back-bin": bytes(range(256))}


@pytest.mark.parametrize(
    ("timeout_s", "seen"), [(None, b"none"), (1000, b"1000"), (90_000, b"90000")]
)
def test_handlers_see_the_rpc_deadline(
    channel: Any,  # noqa: ANN401
    timeout_s: float | None,
    seen: bytes,
) -> None:
    answer = unary(channel, "Left")(b"", timeout=timeout_s)
    # gRPC rounds what it sends up, by a hundredth at most.
    assert answer == seen or 1 <= int(answer) / int(seen) < 1.02


def test_an_aborted_call_has_its_status_whole(channel: Any) -> None:  # noqa: ANN401
    with pytest.raises(grpc.RpcError) as caught:
        unary(channel, "Fail")(b"")
    error: Any = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "100 % gone: ä\n")
    assert ("why-bin", b"\0\1") in error.trailing_metadata()


def test_a_handler_that_fails_ends_its_own_call_only(channel: Any) -> None:  # noqa: ANN401
    with pytest.raises(grpc.RpcError) as caught:
        unary(channel, "Raise")(b"")
    error: Any = caught.value
    assert error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    assert "RuntimeError" in error.details()
    assert unary(channel, "Echo")(b"still here") == b"still here"


def test_an_unknown_method_is_unimplemented(channel: Any) -> None:  # noqa: ANN401
    with pytest.raises(grpc.RpcError) as caught:
        unary(channel, "Nothing")(b"")
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_that_is_too_large_is_refused_in_grpcs_words(channel: Any) -> None:  # noqa: ANN401
    with pytest.raises(grpc.RpcError) as caught:
        unary(channel, "Echo")(bytes(MESSAGE_BYTES_MAX + 1))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()
    assert unary(channel, "Echo")(b"still here") == b"still here"


def test_a_deadline_that_passes_ends_the_handler(running: Running, channel: Any) -> None:  # noqa: ANN401
    with pytest.raises(grpc.RpcError) as caught:
        unary(channel, "Wait")(a_text("a"), timeout=0.2)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    running.until(lambda: len(running.service.left) == running.service.waiting)


def test_a_cancelled_call_ends_its_handler(running: Running, channel: Any) -> None:  # noqa: ANN401
    call = unary(channel, "Wait").future(a_text("b"))
    running.until(lambda: running.service.waiting == 1)
    call.cancel()
    running.until(lambda: running.service.left == ["b"])


def test_many_messages_make_one_answer(channel: Any) -> None:  # noqa: ANN401
    count: Any = channel.stream_unary(f"/{SERVICE}/Count")
    assert count(bytes(1 << 20) for _ in range(50)) == b"%d" % (50 << 20)
    assert count(iter(())) == b"0"


def test_one_message_makes_many_answers(channel: Any) -> None:  # noqa: ANN401
    repeat: Any = channel.unary_stream(f"/{SERVICE}/Repeat")
    assert list(repeat(b"1000")) == [b"%d" % number for number in range(1000)]


def test_a_conversation_goes_on_after_the_client_has_closed_its_half(channel: Any) -> None:  # noqa: ANN401
    talk: Any = channel.stream_stream(f"/{SERVICE}/Talk")
    answers = talk(iter([b"a", b"b" * 100_000, b"", b"c" * (3 << 20)]))
    assert [next(answers) for _ in range(4)] == [b"aa", b"b" * 200_000, b"", b"c" * (6 << 20)]
    with pytest.raises(grpc.RpcError) as caught:
        next(answers)
    error: Any = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.ABORTED, "enough")


def test_a_call_that_a_stop_cuts_short_hears_that_the_server_drains() -> None:
    async def main() -> None:
        service = Service()
        server, address = await start(service)
        channel: Any = grpc.aio.insecure_channel(address)
        async with channel:
            call = channel.unary_unary(f"/{SERVICE}/Wait")(a_text("w"))
            while not service.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await server.stop(0)
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert (await call.details()).startswith("DRAINING")
            assert "grpc-status-details-bin" in dict(await call.trailing_metadata())
        assert service.left == ["w"]

    asyncio.run(main())


def test_a_server_that_stops_lets_calls_finish() -> None:
    async def main() -> None:
        service = Service()
        server, address = await start(service)
        channel: Any = grpc.aio.insecure_channel(address)
        async with channel:
            talk: Any = channel.stream_stream(f"/{SERVICE}/Talk")()
            await talk.write(b"x")
            assert await talk.read() == b"xx"
            stopping = asyncio.create_task(server.stop(60))
            await asyncio.sleep(0)
            await talk.write(b"y")
            assert await talk.read() == b"yy"
            await talk.done_writing()
            assert await talk.code() is grpc.StatusCode.ABORTED
            await stopping

    asyncio.run(main())


def test_a_front_that_may_have_no_requests_open_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="max_open_requests is 0, expected more than 0"):
        ControllerConfig(max_open_requests=0)
