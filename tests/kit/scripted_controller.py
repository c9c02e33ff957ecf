"""A controller that plays a script against a worker's link, one per connection."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import grpc.aio
import msgspec

from clockwright.units import NS_PER_MS, NS_PER_S, ActionId, ModelId
from clockwright.wire import frame_headers, frames, peer
from clockwright.wire import worker_messages as pb
from clockwright.wire.actions import Action, Infer, LoadWeights, Result
from clockwright.wire.bulk import Buffer
from tests.kit.scripted_worker import kind_of
from worker.action_thread import ActionThread
from worker.config import WorkerConfig
from worker.devices.device import Device
from worker.link import ControllerLink
from worker.models.file_store import FileStore
from worker.process import make_device

aio: Any = grpc.aio


LIMIT_S = 180.0


# Long enough that no test ends by silence unless it wants to.
BEATS: dict[str, Any] = {"heartbeat_interval_ms": 20, "silence_limit_ms": 200_000}


@dataclass
class Stream:
    """One worker's link, from the controller's side."""

    register: pb.Register
    #: Where the worker connects, and what the next connection there is.
    port: int
    dialled: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    #: The answer to the worker, once the script has one.
    answer: asyncio.Future[peer.Welcome | str]
    data: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    heartbeats: list[pb.Heartbeat] = field(default_factory=list)
    progress: list[str] = field(default_factory=list)
    #: Messages and results that were not read yet.
    arrived: list[pb.FromWorker] = field(default_factory=list)
    results: list[frames.Frame] = field(default_factory=list)
    #: Closed at the script's end.
    sockets: list[asyncio.StreamWriter] = field(default_factory=list)
    #: Requests of the last result whose outputs went to their fronts.
    sent: tuple[int, ...] = ()
    cut: frames.FrameReader = field(default_factory=frames.FrameReader)

    def reply(self, **changes: Any) -> bytes:  # noqa: ANN401
        """Welcome the worker; gives the token that it is to bring."""
        token = secrets.token_bytes(frame_headers.TOKEN_BYTES)
        fields = {"socket_port": self.port, "token": token, **BEATS, **changes}
        self.answer.set_result(peer.Welcome(**fields))
        return token

    def reject(self, reason: str) -> None:
        """Turn the worker away for good."""
        self.answer.set_result(reason)

    async def welcome(self, **changes: Any) -> None:  # noqa: ANN401
        """Welcome the worker, and wait until it has connected."""
        token = self.reply(**changes)
        self.data = reader, _ = await self.dialled.get()
        assert await reader.readexactly(frames.GREETING_BYTES) == frames.greeting(token)

    def order(self, action: Action, *payload: Buffer) -> None:
        """Send an action."""
        self.write(*frames.encode_action(action, payload))

    def write(self, *data: Buffer) -> None:
        """Send bytes."""
        assert self.data is not None
        self.data[1].write(b"".join(data))

    async def result(self) -> tuple[Result, list[bytes]]:
        """The next result, and its outputs."""
        while not self.results:
            await self._receive()
        result, outputs, self.sent = frames.decode_result(self.results.pop(0))
        return result, [bytes(output) for output in outputs]

    async def _receive(self) -> None:
        """Wait for bytes, and sort what they bring."""
        assert self.data is not None
        data = await self.data[0].read(1 << 16)
        assert data, "the worker closed the connection"
        while data:
            room = self.cut.room()
            piece, data = data[: len(room)], data[len(room) :]
            room[: len(piece)] = piece
            for frame in self.cut.received(len(piece)):
                if not pb.is_message(frame[0]):
                    self.results.append(frame)
                    continue
                message = pb.decode_from_worker(frame)
                if isinstance(message, pb.Heartbeat):
                    self.heartbeats.append(message)
                else:
                    self.arrived.append(message)

    async def send(self, message: pb.ToWorker, *payload: bytes) -> None:
        self.write(*pb.frame(message, *payload))

    async def send_last(self, message: pb.ToWorker) -> None:
        """Send what makes the worker leave, and wait until it has closed the connection."""
        await self.send(message)
        with contextlib.suppress(AssertionError, ConnectionError):
            while True:
                await self._receive()

    async def read(self) -> pb.FromWorker:
        """The next message that is neither a heartbeat nor progress."""
        while True:
            while not self.arrived:
                await self._receive()
            message = self.arrived.pop(0)
            if isinstance(message, pb.ModelProgress):
                self.progress.append(message.stage)
            else:
                return message

    async def read_heartbeat(self) -> None:
        """Wait for one more heartbeat."""
        seen = len(self.heartbeats)
        while len(self.heartbeats) == seen:
            await self._receive()

    async def expect(self, kind: str) -> Any:  # noqa: ANN401 - whatever that kind holds
        message = await self.read()
        assert kind_of(message) == kind, message
        return message

    async def heard(self) -> None:
        """Wait until the worker has taken in all messages that were sent before."""
        await self.chunk("nobody waits for it", b"x", slice(0, 1))
        await self.expect("chunk_received")

    async def offer(self, model_id: str, content: bytes, **kwargs: Any) -> None:  # noqa: ANN401
        sha256 = hashlib.sha256(content).hexdigest()
        file = pb.FileOffer(name="model.onnx", num_bytes=len(content), sha256=sha256)
        then = kwargs.pop("then", ())
        offer = pb.ModelOffer(model_id, (file,), **{"batch_sizes": (1, 2), **kwargs})
        self.write(*(part for message in (offer, *then) for part in pb.frame(message)))

    async def chunk(
        self, model_id: str, content: bytes, piece: slice, *, sha256: str = "", last: bool = False
    ) -> None:
        chunk = pb.ModelChunk(
            model_id=model_id,
            sha256=sha256 or hashlib.sha256(content).hexdigest(),
            offset=piece.start,
            last=last,
        )
        await self.send(chunk, content[piece])

    async def install(self, model_id: str, content: bytes) -> pb.ReadyModel:
        """Offer a model that the worker has never seen, and send it in two chunks."""
        await self.offer(model_id, content)
        needed = await self.expect("model_needed")
        assert list(needed.sha256) == [hashlib.sha256(content).hexdigest()]
        await self.chunk(model_id, content, slice(0, 50))
        assert (await self.expect("chunk_received")).num_bytes == 50
        await self.chunk(model_id, content, slice(50, len(content)), last=True)
        assert (await self.expect("chunk_received")).num_bytes == len(content)
        ready: pb.ReadyModel = await self.expect("ready_model")
        return ready

    async def act(self, action: LoadWeights | Infer, *payload: bytes) -> tuple[Result, list[bytes]]:
        self.order(action, *payload)
        result, outputs = await self.result()
        assert result.action_id == action.action_id
        return result, outputs


Script = Callable[[Stream], Awaitable[None]]


def load(action_id: int, model_id: str) -> LoadWeights:
    now = time.monotonic_ns()
    return LoadWeights(
        action_id=ActionId(action_id),
        model_id=ModelId(model_id),
        earliest_ns=now,
        latest_ns=now + 60 * NS_PER_S,
        expected_duration_ns=NS_PER_MS,
    )


def infer(
    action_id: int,
    model_id: str,
    *,
    rows: tuple[int, ...] = (1,),
    batch_size: int = 1,
    # Not so short that it runs where it is submitted.
    expected_ns: int = NS_PER_MS,
) -> Infer:
    now = time.monotonic_ns()
    return Infer(
        action_id=ActionId(action_id),
        model_id=ModelId(model_id),
        batch_size=batch_size,
        rows=rows,
        earliest_ns=now,
        latest_ns=now + 60 * NS_PER_S,
        expected_duration_ns=expected_ns,
    )


class ScriptedController:
    """Plays one script per stream, in order; what a script raises fails the test."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.failures: list[BaseException] = []
        self.done = asyncio.Event()
        self.port = 0
        self.dialled: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.Queue()
        )

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A worker has dialled the socket for actions."""
        await self.dialled.put((reader, writer))

    async def attach(self, data: bytes, context: Any) -> bytes:  # noqa: ANN401
        if not self._scripts:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no script is left")
        register = msgspec.msgpack.decode(data, type=pb.Register)
        answer: asyncio.Future[peer.Welcome | str] = asyncio.get_running_loop().create_future()
        stream = Stream(register, self.port, self.dialled, answer)
        self._playing = asyncio.create_task(self._play(self._scripts.pop(0), stream))
        found = await answer
        if isinstance(found, str):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, found)
            raise AssertionError
        return peer.encode(found)

    async def _play(self, script: Script, stream: Stream) -> None:
        try:
            await script(stream)
        except (AssertionError, ConnectionError) as error:
            self.failures.append(error)
            self._scripts.clear()
        finally:
            if not stream.answer.done():
                stream.answer.cancel()
            if stream.data is not None:
                stream.data[1].close()
            for socket in stream.sockets:
                socket.close()
            if not self._scripts:
                self.done.set()


@contextlib.asynccontextmanager
async def listening(controller: ScriptedController) -> AsyncIterator[str]:
    server = aio.server(options=[("grpc.max_receive_message_length", -1)])
    handler = grpc.unary_unary_rpc_method_handler(controller.attach)
    service = grpc.method_handlers_generic_handler(peer.WORKER_SERVICE, {peer.ATTACH: handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listener = await asyncio.start_server(controller.connected, "127.0.0.1", 0)
    controller.port = listener.sockets[0].getsockname()[1]
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        listener.close()


def play(
    tmp_path: Path,
    *scripts: Script,
    device: str = "modelled:0us",
    make: Callable[[WorkerConfig, FileStore], Device[Any]] = make_device,
    **settings: Any,  # noqa: ANN401
) -> None:
    """Attach a worker to a controller that plays the scripts; the last one must let it leave."""

    async def scenario() -> None:
        controller = ScriptedController(*scripts)
        async with listening(controller) as address:
            config = WorkerConfig(
                controller=address,
                device=device,
                num_pages=2,
                io_bytes=8 << 20,
                cache_dir=tmp_path / "cache",
                **settings,
            )
            files = FileStore(config.cache_dir)
            worker = make(config, files)
            actions = ActionThread()
            link: ControllerLink[Any] = ControllerLink(config, worker, files, actions)
            serving = asyncio.create_task(link.run())
            try:
                finished = asyncio.create_task(controller.done.wait())
                async with asyncio.timeout(LIMIT_S):
                    await asyncio.wait({serving, finished}, return_when=asyncio.FIRST_COMPLETED)
                    await finished
                    if not controller.failures:
                        await serving
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                await worker.close()
                actions.close()
        if controller.failures:
            raise controller.failures[0]
        await serving

    # Whoever has had the last word listens for as long as it takes.
    with mock.patch("worker.link._PART_LIMIT_S", LIMIT_S):
        asyncio.run(scenario())


async def drain(stream: Stream) -> None:
    await stream.send_last(pb.Drain("test over"))
