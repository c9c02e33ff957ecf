"""A worker that only speaks the protocol: every model is an echo, and time is what the test says."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from clockwright import wire
from clockwright.actions import Action, Infer, LoadWeights, Result, StepTime
from clockwright.bulk import join_bulk
from clockwright.v1 import worker_pb2 as pb

# The type stubs want arguments that are optional.
_aio: Any = grpc.aio


class ScriptedWorker:
    """Accepts every model unless told otherwise, and answers each Infer with its inputs."""

    def __init__(
        self,
        port: int,
        worker_id: str = "w0",
        *,
        num_pages: int = 8,
        pid: int = 1,
        version: int = wire.PROTOCOL_VERSION,
        skew_ns: int = 0,
        exec_ns: int = 100_000,
        refuse: Callable[[str], str] = lambda _model_id: "",
        answers_actions: bool = True,
        beats: bool = True,
    ) -> None:
        self.register = pb.Register(
            protocol_version=version,
            worker_id=worker_id,
            device="scripted",
            gpu_kind="scripted",
            num_pages=num_pages,
            page_bytes=1 << 24,
            arena_bytes=1 << 24,
            host="here",
            pid=pid,
        )
        self.port = port
        self.skew_ns = skew_ns
        self.exec_ns = exec_ns
        self.refuse = refuse
        self.answers_actions = answers_actions
        self.beats = beats
        #: Everything received, by kind; the payload beside it.
        self.received: dict[str, list[tuple[Any, list[bytes]]]] = {}
        #: Actions that were not answered.
        self.held: list[tuple[Action, list[bytes]]] = []
        self.files: dict[str, bytes] = {}
        #: Why the stream ended: Rejected's reason, "drain: ...", or the RPC's details.
        self.end = ""
        self.ended = asyncio.Event()
        self._news = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._wanted: dict[str, set[str]] = {}
        self._min_delta_ns: int | None = None
        self._chunks: dict[str, bytearray] = {}

    async def __aenter__(self) -> Self:
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = _aio.insecure_channel(f"127.0.0.1:{self.port}", options=options)
        self.call = self._channel.stream_stream(wire.ATTACH_METHOD)()
        await self.send(pb.FromWorker(register=self.register))
        self._tasks = [asyncio.create_task(self._read())]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.call.cancel()
        await self._channel.close()

    def now_ns(self) -> int:
        return time.monotonic_ns() + self.skew_ns

    async def send(self, message: pb.FromWorker, payload: tuple[bytes, ...] = ()) -> None:
        await self.write(join_bulk(message.SerializeToString(), wire.PAYLOAD_FIELD, payload))

    async def write(self, data: bytes) -> None:
        """Send bytes. One at a time: gRPC takes no second write while one is under way."""
        async with self._writing:
            await self.call.write(data)

    async def wait_for(self, kind: str, count: int = 1) -> list[Any]:
        """Messages of a kind, once there are `count`."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.received.get(kind, [])) >= count)
        return [message for message, _ in self.received[kind]]

    async def beat(self) -> None:
        beat = pb.Heartbeat(sent_ns=self.now_ns(), min_delta_ns=self._min_delta_ns)
        await self.send(pb.FromWorker(heartbeat=beat))

    async def beat_once(self) -> None:
        """As often as it takes to know each other's clocks."""
        await self.wait_for("heartbeat")
        await self.beat()

    async def _beat_on(self, interval_s: float) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(interval_s)

    async def _read(self) -> None:
        try:
            async for data in self.call:
                now_ns = self.now_ns()
                first = pb.ToWorker.FromString(data)
                for further in (first, *map(pb.ToWorker.FromString, first.next)):
                    await self._take_in(further, now_ns)
            self.end = self.end or await self.call.details()
        except grpc.aio.AioRpcError as error:
            self.end = self.end or error.details() or ""
        self.ended.set()

    async def _take_in(self, envelope: pb.ToWorker, now_ns: int) -> None:
        kind = envelope.WhichOneof("kind")
        assert kind is not None
        await self._take(kind, getattr(envelope, kind), list(envelope.payload), now_ns)
        async with self._news:
            entry = (getattr(envelope, kind), list(envelope.payload))
            self.received.setdefault(kind, []).append(entry)
            self._news.notify_all()
        if kind == "rejected":
            self.end = envelope.rejected.reason
        if kind == "drain":
            self.end = f"drain: {envelope.drain.reason}"
            await self.call.done_writing()

    async def _take(self, kind: str, message: Any, payload: list[bytes], now_ns: int) -> None:  # noqa: ANN401
        match kind:
            case "welcome" if self.beats:
                interval_s = message.heartbeat_interval_ms / 1000
                self._tasks.append(asyncio.create_task(self._beat_on(interval_s)))
            case "heartbeat":
                delta_ns = now_ns - message.sent_ns
                if self._min_delta_ns is None or delta_ns < self._min_delta_ns:
                    self._min_delta_ns = delta_ns
            case "model_offer":
                await self._judge(message)
            case "model_chunk":
                await self._store(message, payload[0])
            case "infer" | "load_weights":
                self.held.append((wire.decode_action(pb.ToWorker(**{kind: message})), payload))
                if self.answers_actions:
                    await self.release()

    async def release(self) -> None:
        """Answer what was held back, and from now on everything."""
        self.answers_actions = True
        while self.held:
            await self.answer(*self.held.pop(0))

    async def _judge(self, offer: pb.ModelOffer) -> None:
        needed = {file.sha256 for file in offer.files} - self.files.keys()
        self._wanted[offer.model_id] = needed
        if reason := self.refuse(offer.model_id):
            refused = pb.ModelRefused(model_id=offer.model_id, reason=reason)
            await self.send(pb.FromWorker(model_refused=refused))
        elif needed:
            wanted = pb.ModelNeeded(model_id=offer.model_id, sha256=sorted(needed))
            await self.send(pb.FromWorker(model_needed=wanted))
        else:
            await self.ready(offer.model_id)

    async def _store(self, chunk: pb.ModelChunk, content: bytes) -> None:
        file = self._chunks.setdefault(chunk.sha256, bytearray())
        assert len(file) == chunk.offset
        file += content
        receipt = pb.ChunkReceived(
            model_id=chunk.model_id, sha256=chunk.sha256, num_bytes=len(file)
        )
        await self.send(pb.FromWorker(chunk_received=receipt))
        if not chunk.last:
            return
        self.files[chunk.sha256] = bytes(self._chunks.pop(chunk.sha256))
        needed = self._wanted[chunk.model_id]
        needed.discard(chunk.sha256)
        if hashlib.sha256(self.files[chunk.sha256]).hexdigest() != chunk.sha256:
            refused = pb.ModelRefused(model_id=chunk.model_id, reason="sha256 differs")
            await self.send(pb.FromWorker(model_refused=refused))
        elif not needed:
            await self.ready(chunk.model_id)

    async def ready(self, model_id: str, **changes: object) -> None:
        fields: dict[str, Any] = {
            "architecture_id": "echo",
            "num_pages": 1,
            "weights_bytes": 1000,
            "inputs": [pb.TensorSpec(name="x", datatype="FP32", row_shape=[4])],
            "outputs": [pb.TensorSpec(name="y", datatype="FP32", row_shape=[4])],
            "load_ns": 100_000,
            "batches": [pb.BatchProfile(batch_size=n, exec_ns=self.exec_ns) for n in (1, 2, 4)],
        }
        ready = pb.ModelReady(model_id=model_id, **{**fields, **changes})
        await self.send(pb.FromWorker(model_ready=ready))

    async def answer(self, action: Action, payload: list[bytes]) -> None:
        """Do what an action asks for, at once."""
        begin_ns = self.now_ns()
        step = StepTime(begin_ns, begin_ns + 1000, 1000)
        result = Result(action_id=action.action_id, received_ns=begin_ns)
        if isinstance(action, LoadWeights):
            result.load = step
        else:
            assert isinstance(action, Infer)
            result.input = result.exec = result.output = step
        await self.send(wire.encode_result(result), tuple(payload))
