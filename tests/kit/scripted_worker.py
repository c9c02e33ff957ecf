"""A worker that is a script, behind either of two links: a stream over the loopback, or none.

`LoopbackWorker` speaks the protocol, and every model is an echo. `InLoopWorker` lives in the controller's
event loop, and models are Python functions.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import msgspec
import numpy as np
from typing_extensions import override

from clockwright import frames, wire
from clockwright.actions import (
    Action,
    ActionError,
    EvictWeights,
    Infer,
    LoadWeights,
    Result,
    StepTime,
)
from clockwright.bulk import Buffer
from clockwright.channel import Access
from clockwright.tensors import DATATYPE_BYTES, TensorSpec
from clockwright.units import NS_PER_MS, ActionId, ArchitectureId, GpuKind, ModelId, WorkerId
from clockwright.v1 import worker_pb2 as pb
from controller.catalogue import Catalogue, Entry, name_of
from controller.core.events import ModelReady, WorkerJoined
from controller.runtime import Runtime

# The type stubs want arguments that are optional.


_KINDS = {
    Infer: "infer",
    LoadWeights: "load_weights",
    EvictWeights: "evict_weights",
    frames.Withdrawal: "withdraw_action",
}


class ScriptedWorker:
    """Answers every action at once, or, held back, when the test says so; its links are below."""

    def __init__(self, *, hold: bool = False) -> None:
        #: Keep actions with a window until they are released.
        self.hold = hold
        #: What is kept, with the payload.
        self.held: list[tuple[Action, Sequence[Buffer]]] = []

    def keeps(self, action: Action) -> bool:
        """Whether the answer to an action has to wait."""
        return self.hold

    def take_held(self) -> list[tuple[Action, Sequence[Buffer]]]:
        """Give out what was held back; from now on nothing is."""
        self.hold = False
        held, self.held = self.held, []
        return held


# Elements of the orders that carry a generation behind them, by their first.
_ORDER_LENGTHS = {0: 11, 1: 6, 2: 3, 3: 2}


def _generation(frame: frames.Frame) -> int:
    order = msgspec.msgpack.decode(frame[0])
    place = _ORDER_LENGTHS.get(order[0], len(order))
    return order[place] if len(order) > place else 0


def done(action: Action, step: StepTime) -> Result:
    """A success whose every step took the same time."""
    result = Result(action_id=action.action_id, received_ns=step.begin_ns)
    if isinstance(action, LoadWeights):
        result.load = step
    elif isinstance(action, Infer):
        result.input = result.exec = result.output = step
    return result


def withdrawn(action: Action, received_ns: int) -> Result:
    """What a worker says of an action that was taken back in time."""
    return Result(action_id=action.action_id, error=ActionError.WITHDRAWN, received_ns=received_ns)


class LoopbackWorker(ScriptedWorker):
    """A stream and a socket over the loopback. Accepts every model unless told otherwise, and answers each Infer with its inputs."""

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
        hold: bool = False,
        beats: bool = True,
        dials: bool = True,
        over_tcp: bool = False,
        access: Access | None = None,
    ) -> None:
        super().__init__(hold=hold)
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
        self.beats = beats
        self.dials = dials
        self.over_tcp = over_tcp
        self.access = access or Access()
        #: Whether it takes what comes by the socket.
        self.reads = True
        self.welcome = pb.Welcome()
        #: The socket for actions and results, once it is there.
        self.data: asyncio.StreamWriter | None = None
        #: Everything received, by kind; the payload beside it.
        self.received: dict[str, list[tuple[Any, list[Buffer]]]] = {}
        self.files: dict[str, bytes] = {}
        #: What each order by the socket carries; 0 where it carries none.
        self.generations: list[int] = []
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
        self._channel = self.access.async_channel(f"127.0.0.1:{self.port}", options=options)
        self.call = self._channel.stream_stream(wire.ATTACH_METHOD)(metadata=self.access.metadata)
        # Where it may not join, the call is over before that, and `end` says why.
        with suppress(grpc.aio.AioRpcError):
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
        if self.data is not None:
            self.data.close()
        self.call.cancel()
        await self._channel.close()

    def now_ns(self) -> int:
        return time.monotonic_ns() + self.skew_ns

    async def send(self, message: pb.FromWorker) -> None:
        await self.write(message.SerializeToString())

    def send_result(self, result: Result, outputs: Sequence[Buffer] = ()) -> None:
        assert self.data is not None
        self.data.writelines(frames.encode_result(result, outputs))

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

    async def _dial(self) -> None:
        if self.over_tcp:
            reader, self.data = await asyncio.open_connection("127.0.0.1", self.welcome.socket_port)
        else:
            reader, self.data = await asyncio.open_unix_connection(self.welcome.socket_path)
        self.data.write(frames.greeting(self.welcome.token))
        self._tasks.append(asyncio.create_task(self._read_actions(reader)))

    async def _read_actions(self, reader: asyncio.StreamReader) -> None:
        cut = frames.FrameReader()
        while data := await reader.read(1 << 16):
            if not self.reads:
                return
            while data:
                room = cut.room()
                piece, data = data[: len(room)], data[len(room) :]
                room[: len(piece)] = piece
                for frame in cut.received(len(piece)):
                    order, payload, _ = frames.decode_order(frame)
                    # A worker that maps nothing: all of its tensors come by the socket.
                    if not isinstance(order, frames.Arrangement | frames.Inputs):
                        self.generations.append(_generation(frame))
                        await self._take_order(order, payload)

    async def _take_order(
        self, order: Action | frames.Withdrawal, payload: Sequence[Buffer]
    ) -> None:
        if isinstance(order, frames.Withdrawal):
            self._withdraw(order.action_id)
        elif isinstance(order, EvictWeights):
            pass
        elif self.keeps(order):
            self.held.append((order, payload))
        else:
            await self.answer(order, payload)
        await self._note(_KINDS[type(order)], order, list(payload))

    async def _note(self, kind: str, message: Any, payload: list[Buffer]) -> None:  # noqa: ANN401
        async with self._news:
            self.received.setdefault(kind, []).append((message, payload))
            self._news.notify_all()

    async def _take_in(self, envelope: pb.ToWorker, now_ns: int) -> None:
        kind = envelope.WhichOneof("kind")
        assert kind is not None
        await self._take(kind, getattr(envelope, kind), list(envelope.payload), now_ns)
        await self._note(kind, getattr(envelope, kind), list(envelope.payload))
        if kind == "rejected":
            self.end = envelope.rejected.reason
        if kind == "drain":
            self.end = f"drain: {envelope.drain.reason}"
            await self.call.done_writing()

    async def _take(self, kind: str, message: Any, payload: list[bytes], now_ns: int) -> None:  # noqa: ANN401
        match kind:
            case "welcome":
                self.welcome = message
                if self.dials:
                    await self._dial()
                if self.beats:
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

    def _withdraw(self, action_id: int) -> None:
        """Drop an action that is held back; any other is answered already."""
        for number, (action, _) in enumerate(self.held):
            if action.action_id == action_id:
                del self.held[number]
                self.send_result(withdrawn(action, self.now_ns()))
                return

    async def release(self) -> None:
        """Answer what was held back, and from now on everything."""
        for action, payload in self.take_held():
            await self.answer(action, payload)

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
        await self.send(pb.FromWorker(model_ready=self.description(model_id, **changes)))

    def description(self, model_id: str, **changes: object) -> pb.ModelReady:
        """What it says of a model."""
        fields: dict[str, Any] = {
            "architecture_id": "echo",
            "num_pages": 1,
            "weights_bytes": 1000,
            "inputs": [pb.TensorSpec(name="x", datatype="FP32", row_shape=[4])],
            "outputs": [pb.TensorSpec(name="y", datatype="FP32", row_shape=[4])],
            "load_ns": 100_000,
            "batches": [pb.BatchProfile(batch_size=n, exec_ns=self.exec_ns) for n in (1, 2, 4)],
        }
        return pb.ModelReady(model_id=model_id, **{**fields, **changes})

    def hold_over(self, offer: pb.ModelOffer, *, resident: bool, **changes: object) -> None:
        """Say at the next registration that it has a model since an earlier stream."""
        self.register.held.add(
            ready=self.description(offer.model_id, **changes),
            offer_digest=wire.offer_digest(offer),
            resident=resident,
        )

    async def answer(self, action: Action, payload: Sequence[Buffer]) -> None:
        """Do what an action asks for, at once."""
        begin_ns = self.now_ns()
        self.send_result(done(action, StepTime(begin_ns, begin_ns + 1000, 1000)), payload)


# --- in the controller's loop ---------------------------------------------------------------------

WORKER = WorkerId("scripted")
BATCH_SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Script:
    """A model that the scripted worker knows."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: Input bytes of one request to output bytes.
    run: Callable[[Sequence[Buffer]], list[Buffer]]
    #: What an EXEC is said to take beforehand.
    exec_ns: int = NS_PER_MS
    load_ns: int = NS_PER_MS


def _double(inputs: Sequence[Buffer]) -> list[Buffer]:
    with np.errstate(all="ignore"):  # What clients send may be any bytes.
        return [(np.frombuffer(inputs[0], np.float32) * 2).tobytes()]


def _mixed(inputs: Sequence[Buffer]) -> list[Buffer]:
    a = np.frombuffer(inputs[0], np.int64).reshape(-1, 2)
    b = np.frombuffer(inputs[1], np.float32).reshape(-1, 2, 2)
    return [(a + 1).tobytes(), b.sum(axis=2, dtype=np.float32).tobytes()]


def _label(shift: int) -> Callable[[Sequence[Buffer]], list[Buffer]]:
    """Says the first number, or one that is `shift` off, and is 0.7 sure of it."""

    def run(inputs: Sequence[Buffer]) -> list[Buffer]:
        labels = np.frombuffer(inputs[0], np.float32).reshape(-1, 3)[:, 0].astype(np.int64)
        labels = (labels + shift) % 4
        chances = np.full((len(labels), 4), 0.1, np.float32)
        chances[np.arange(len(labels)), labels] = 0.7
        return [labels.tobytes(), chances.tobytes()]

    return run


X = TensorSpec("x", "FP32", (3,))
Y = TensorSpec("y", "FP32", (3,))
LABELLED = (TensorSpec("label", "INT64", ()), TensorSpec("probabilities", "FP32", (4,)))
SCRIPTS = {
    "double": Script((X,), (Y,), _double),
    "mixed": Script(
        (TensorSpec("a", "INT64", (2,)), TensorSpec("b", "FP32", (2, 2))),
        (TensorSpec("a_plus_1", "INT64", (2,)), TensorSpec("b_sum", "FP32", (2,))),
        _mixed,
    ),
    # 602 kB in.
    "image": Script(
        (TensorSpec("image", "FP32", (3, 224, 224)),),
        (TensorSpec("first", "FP32", (2,)),),
        lambda inputs: [bytes(inputs[0][:8])],
    ),
    # Classifiers: right, wrong, and those of which few fit into an SLO of seconds.
    **{
        name: Script((X,), LABELLED, _label(shift), exec_ns)
        for name, shift, exec_ns in (
            ("right", 0, NS_PER_MS),
            ("right-too", 0, NS_PER_MS),
            ("wrong", 1, NS_PER_MS),
            ("worse", 2, NS_PER_MS),
            ("long-1", 0, 2000 * NS_PER_MS),
            ("long-2", 0, 2000 * NS_PER_MS),
            ("long-3", 1, 2000 * NS_PER_MS),
        )
    },
    "cold": Script((X,), LABELLED, _label(0), load_ns=10_000 * NS_PER_MS),
    **{
        f"echo-{datatype}": Script(
            (TensorSpec("x", datatype, (2,)),), (TensorSpec("y", datatype, (2,)),), list
        )
        for datatype in DATATYPE_BYTES
    },
}


class InLoopWorker(ScriptedWorker):
    """A link inside the controller's event loop: models do what `SCRIPTS` says."""

    def __init__(self, runtime: Runtime, catalogue: Catalogue) -> None:
        super().__init__()
        self.runtime = runtime
        self.catalogue = catalogue
        #: What is held back is being computed, so it cannot be taken back.
        self.has_begun = False
        #: Models whose Infer actions are kept until `release`, ones that fail, and ones whose labels
        #: are all one off.
        self.slow: set[str] = set()
        self.failing: set[str] = set()
        self.poisoned: set[str] = set()
        #: All Infer actions so far.
        self.infers: list[Infer] = []

    def join(self) -> None:
        self.runtime.worker_joined(
            self, WorkerJoined(worker_id=WORKER, gpu_kind=GpuKind("scripted"), num_pages=1000)
        )
        self.catalogue.worker_joined(WORKER, self)

    def leave(self) -> None:
        self.catalogue.worker_left(WORKER)
        self.runtime.worker_lost(WORKER)

    def offer(self, model: Entry) -> None:
        script = SCRIPTS.get(model.name)
        if script is None:
            self.catalogue.model_refused(WORKER, model.model_id, "it is not in the script")
            return
        event = ModelReady(
            worker_id=WORKER,
            model_id=model.model_id,
            architecture_id=ArchitectureId(model.name),
            num_pages=1,
            load_ns=script.load_ns,
            exec_ns=dict.fromkeys(BATCH_SIZES, script.exec_ns),
        )
        self.catalogue.model_ready(
            event, inputs=script.inputs, outputs=script.outputs, weights_bytes=1
        )

    def withdraw(self, model: Entry) -> None:
        pass

    @override
    def keeps(self, action: Action) -> bool:
        slow = self.hold or name_of(action.model_id) in self.slow
        return slow and isinstance(action, Infer)

    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        if isinstance(action, Infer):
            self.infers.append(action)
        if self.keeps(action):
            self.held.append((action, payload))
        else:
            asyncio.get_running_loop().call_soon(self._finish, action, payload)

    def flush(self, *, now: bool) -> None:
        pass

    def release(self) -> None:
        self.slow.clear()
        for action, payload in self.take_held():
            self._finish(action, payload)

    def _finish(self, action: Action, payload: Sequence[Buffer]) -> None:
        now_ns = self.runtime.clock()
        # It takes no time but says it did: what it says is what the scheduler then predicts.
        result = done(action, StepTime(now_ns, now_ns, NS_PER_MS))
        outputs: list[Buffer] = []
        if isinstance(action, Infer):
            name = name_of(action.model_id)
            if name in self.failing:
                result.error, result.message = ActionError.DEVICE, "it does not feel like it"
            script = SCRIPTS[name]
            num_inputs = len(script.inputs)
            for first in range(0, len(payload), num_inputs):
                row = script.run(payload[first : first + num_inputs])
                if name in self.poisoned:
                    row[0] = (np.frombuffer(row[0], np.int64) + 1).tobytes()
                outputs += row
        self.runtime.action_finished(WORKER, result, outputs)

    def withdraw_action(self, action_id: ActionId) -> None:
        """Answer that an action which is held back was dropped."""
        if self.has_begun:
            return
        for number, (action, _) in enumerate(self.held):
            if action.action_id == action_id:
                del self.held[number]
                result = withdrawn(action, self.runtime.clock())
                asyncio.get_running_loop().call_soon(
                    self.runtime.action_finished, WORKER, result, ()
                )
                return

    def forget_model(self, model_id: ModelId) -> None:
        pass

    def close(self, reason: str) -> None:
        pass
