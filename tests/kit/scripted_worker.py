"""A worker that is a script, behind either of two links: a connection over the loopback, or none.

`LoopbackWorker` speaks the protocol, and every model is an echo. `InLoopWorker` lives in the controller's
event loop, and models are Python functions.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import struct
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from typing_extensions import override

from clockwright.client.channel import Access
from clockwright.errors import ConfigError, ProtocolError
from clockwright.units import NS_PER_MS, ActionId, ArchitectureId, GpuKind, ModelId, WorkerId
from clockwright.wire import frame_headers, frames, peer
from clockwright.wire import worker_messages as pb
from clockwright.wire.actions import (
    Action,
    ActionError,
    EvictWeights,
    Infer,
    LoadWeights,
    Result,
    StepTime,
)
from clockwright.wire.bulk import Buffer
from clockwright.wire.leadership import Fence
from clockwright.wire.tensors import DATATYPES, TensorSpec
from controller.core.events import ModelReady, WorkerJoined
from controller.models.catalogue import Catalogue, name_of
from controller.models.entry import Entry
from controller.runtime import Runtime
from tests.kit.stepped_models import history

_KINDS = {
    Infer: "infer",
    LoadWeights: "load_weights",
    EvictWeights: "evict_weights",
    frame_headers.Withdrawal: "withdraw_action",
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


def kind_of(message: object) -> str:
    """The name of a message's kind: "model_needed"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(message).__name__).lower()


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
    """A connection over the loopback. Accepts every model unless told otherwise, and answers each Infer with its inputs."""

    def __init__(
        self,
        port: int,
        worker_id: str = "w0",
        *,
        num_pages: int = 8,
        pid: int = 1,
        version: int = peer.PROTOCOL_VERSION,
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
        self.welcome = peer.Welcome()
        #: The connection, once it is there.
        self.data: asyncio.StreamWriter | None = None
        #: Everything received, by kind; the payload beside it.
        self.received: dict[str, list[tuple[Any, list[Buffer]]]] = {}
        self.files: dict[str, bytes] = {}
        #: What each order by the socket carries; 0 where it carries none.
        self.generations: list[int] = []
        #: Why the link ended: why the worker was rejected, "drain: ...", or the controller's last words.
        self.end = ""
        self.ended = asyncio.Event()
        self._news = asyncio.Condition()
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
        self._tasks = [asyncio.create_task(self._join())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.hang_up()
        await self._channel.close()

    def now_ns(self) -> int:
        return time.monotonic_ns() + self.skew_ns

    async def send(self, message: pb.FromWorker) -> None:
        if self.data is not None:
            self.data.writelines(pb.frame(message))

    def hang_up(self) -> None:
        if self.data is not None:
            self.data.close()

    def send_result(self, result: Result, outputs: Sequence[Buffer] = ()) -> None:
        assert self.data is not None
        self.data.writelines(frames.encode_result(result, outputs))

    async def wait_for(self, kind: str, count: int = 1) -> list[Any]:
        """Messages of a kind, once there are `count`."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.received.get(kind, [])) >= count)
        return [message for message, _ in self.received[kind]]

    async def beat(self) -> None:
        await self.send(pb.Heartbeat(self.now_ns(), self._min_delta_ns))

    async def beat_once(self) -> None:
        """As often as it takes to know each other's clocks."""
        await self.wait_for("heartbeat")
        await self.beat()

    async def _beat_on(self, interval_s: float) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(interval_s)

    async def _join(self) -> None:
        try:
            self.welcome = await peer.join(
                self._channel,
                peer.WORKER_SERVICE,
                self.register,
                Fence(),
                limit_s=60,
                shown=self.access.metadata,
            )
        except (ConfigError, ProtocolError) as error:
            self.end = str(error)
            self.ended.set()
            return
        await self._note("welcome", self.welcome, [])
        if not self.dials:
            return
        await self._dial()
        if self.beats:
            interval_s = self.welcome.heartbeat_interval_ms / 1000
            self._tasks.append(asyncio.create_task(self._beat_on(interval_s)))

    async def _dial(self) -> None:
        if self.over_tcp:
            reader, self.data = await asyncio.open_connection("127.0.0.1", self.welcome.socket_port)
        else:
            reader, self.data = await asyncio.open_unix_connection(self.welcome.socket_path)
        self.data.write(frames.greeting(self.welcome.token))
        self._tasks.append(asyncio.create_task(self._read(reader)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            await self._read_frames(reader)
        except ConnectionError as error:
            self.end = self.end or str(error)
        self.ended.set()

    async def _read_frames(self, reader: asyncio.StreamReader) -> None:
        cut = frames.FrameReader()
        while data := await reader.read(1 << 16):
            if not self.reads:
                return
            while data:
                room = cut.room()
                piece, data = data[: len(room)], data[len(room) :]
                room[: len(piece)] = piece
                for frame in cut.received(len(piece)):
                    if pb.is_message(frame[0]):
                        await self._take_in(pb.decode_to_worker(frame), [frame[1]])
                        continue
                    order, payload, _ = frames.decode_order(frame)
                    # A worker that maps nothing: all of its tensors come by the socket.
                    if not isinstance(order, frame_headers.Inputs):
                        self.generations.append(_generation(frame))
                        await self._take_order(order, payload)

    async def _take_order(
        self, order: Action | frame_headers.Withdrawal, payload: Sequence[Buffer]
    ) -> None:
        if isinstance(order, frame_headers.Withdrawal):
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

    async def _take_in(self, message: pb.ToWorker, payload: list[Buffer]) -> None:
        match message:
            case pb.Heartbeat():
                delta_ns = self.now_ns() - message.sent_ns
                if self._min_delta_ns is None or delta_ns < self._min_delta_ns:
                    self._min_delta_ns = delta_ns
            case pb.ModelOffer():
                await self._judge(message)
            case pb.ModelChunk():
                await self._store(message, bytes(payload[0]))
            case pb.Drain():
                self.end = f"drain: {message.reason}"
                self.hang_up()
            case pb.Ended():
                self.end = self.end or message.reason
        await self._note(kind_of(message), message, payload)

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
            await self.send(pb.ModelRefused(offer.model_id, reason))
        elif needed:
            await self.send(pb.ModelNeeded(offer.model_id, tuple(sorted(needed))))
        else:
            await self.ready(offer.model_id)

    async def _store(self, chunk: pb.ModelChunk, content: bytes) -> None:
        file = self._chunks.setdefault(chunk.sha256, bytearray())
        assert len(file) == chunk.offset
        file += content
        await self.send(pb.ChunkReceived(chunk.model_id, chunk.sha256, len(file)))
        if not chunk.last:
            return
        self.files[chunk.sha256] = bytes(self._chunks.pop(chunk.sha256))
        needed = self._wanted[chunk.model_id]
        needed.discard(chunk.sha256)
        if hashlib.sha256(self.files[chunk.sha256]).hexdigest() != chunk.sha256:
            await self.send(pb.ModelRefused(chunk.model_id, "sha256 differs"))
        elif not needed:
            await self.ready(chunk.model_id)

    async def ready(self, model_id: str, **changes: object) -> None:
        await self.send(self.description(model_id, **changes))

    def description(self, model_id: str, **changes: object) -> pb.ReadyModel:
        """What it says of a model."""
        fields: dict[str, Any] = {
            "architecture_id": "echo",
            "num_pages": 1,
            "weights_bytes": 1000,
            "inputs": (TensorSpec("x", "FP32", (4,)),),
            "outputs": (TensorSpec("y", "FP32", (4,)),),
            "load_ns": 100_000,
            "batches": tuple(pb.BatchProfile(n, self.exec_ns) for n in (1, 2, 4)),
        }
        return pb.ReadyModel(model_id=model_id, **{**fields, **changes})

    def hold_over(self, offer: pb.ModelOffer, *, resident: bool, **changes: object) -> None:
        """Say at the next registration that it has a model since an earlier stream."""
        held = pb.Held(
            self.description(offer.model_id, **changes), pb.offer_digest(offer), resident
        )
        self.register.held = (*self.register.held, held)

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
        for datatype in DATATYPES
    },
}


def _step(inputs: Sequence[Buffer]) -> list[Buffer]:
    state = (history(*struct.unpack("<qq", bytes(inputs[1]) + bytes(inputs[0])))).to_bytes(
        8, "little"
    )
    return [state, state]


#: Models that a test has to write itself (`write_stepped`).
STEPPED = {
    "history": Script(
        (TensorSpec("x", "INT64", (1,)), TensorSpec("h", "INT64", (1,))),
        (TensorSpec("y", "INT64", (1,)), TensorSpec("hn", "INT64", (1,))),
        _step,
    ),
}


def write_stepped(directory: Path, config: str = "") -> None:
    """Write the folder of `history`, whose answers tell all inputs of the steps before."""
    folder = directory / "history"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"scripted")
    if config:
        (folder / "config.toml").write_text(config)


_EVERY = ChainMap(SCRIPTS, STEPPED)  # tests add to these


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
        script = _EVERY.get(model.name)
        if model.name.startswith("preparing"):
            return
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

    def look(self) -> None:
        pass

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
            script = _EVERY[name]
            num_inputs = len(script.inputs)
            for first in range(0, len(payload), num_inputs):
                row = script.run(payload[first : first + num_inputs])
                if name in self.poisoned:
                    row[0] = (np.frombuffer(row[0], np.int64) + 1).tobytes()
                outputs += row
        self.runtime.action_finished(WORKER, result, outputs)

    def write_off(self, action_id: ActionId) -> None:
        """What it holds back is overtaken, and counts as lost; the result comes all the same."""

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
