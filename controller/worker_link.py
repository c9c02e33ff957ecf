"""The controller's end of `WorkerService`: one stream per GPU worker, and beside it a socket.

The stream controls, and is the sign of life; actions and results are frames on the socket
(`clockwright.frame_socket`). Actions stay in order among themselves. Between stream and socket only two orders
matter: a worker has a model before it says so, and a model is dropped when all its actions but evictions
are answered. Times are translated between the controller's clock and a worker's here and nowhere else.

A worker is not trusted: a message or frame that the protocol does not allow ends its stream. To the
scheduler this is a crash of the worker, and no other worker notices.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from clockwright import wire
from clockwright.actions import Action, ActionError, Infer
from clockwright.bulk import Buffer, check_fields, join_bulk
from clockwright.errors import ProtocolError
from clockwright.foreign import TEXT_CHARS_MAX, printable
from clockwright.frame_headers import APART, PLACE_BITS, WORDS_CHARS_MAX
from clockwright.frame_socket import FrameSocket, SocketListener
from clockwright.frames import (
    DIRECT_BYTES,
    LENGTH_BYTES,
    PLAIN_HEADER_BYTES,
    Frame,
    decode_result,
    encode_action,
    encode_expect,
    encode_forget,
    encode_front_gone,
    encode_further,
    encode_inputs,
    encode_memory,
    encode_withdrawal,
    mapped_number,
)
from clockwright.leadership import Term
from clockwright.tensors import DATATYPE_BYTES, TensorSpec
from clockwright.units import (
    DURATION_NS_MAX,
    TIME_NS_MAX,
    ActionId,
    ArchitectureId,
    GpuKind,
    ModelId,
    WorkerId,
)
from clockwright.v1 import worker_pb2 as pb
from controller.catalogue import Catalogue, Entry
from controller.clock_sync import ClockSync
from controller.core.events import ModelReady, WorkerJoined
from controller.held_tensors import HeldInput, Holder, SentOutput, has_held
from controller.model_folder import ModelFile, ModelFolder
from controller.runtime import Runtime
from controller.slabs import SLAB_BYTES_MIN, Arena, MappedMemory, Slabs

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
# The type stubs of grpcio leave this out.
EOF: object = getattr(grpc.aio, "EOF")  # noqa: B009

SERVICE, METHOD = wire.ATTACH_METHOD.removeprefix("/").split("/")

# A chunk occupies the stream for about a millisecond, which is what a heartbeat may have to wait for it.
CHUNK_BYTES = 1 << 20
# Chunks that are sent and not acknowledged: enough to keep a fast network busy.
CHUNKS_IN_FLIGHT = 4

_WORKER_ID = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")

# A worker that was told to leave and has not left after this long has its stream cut.
LEAVE_LIMIT_S = 5.0
# A worker that says nothing of what it was offered is not waited for by whoever adds a model. An honest one gives a
# model up that takes 600 s to compile, and says so.
OFFER_SILENCE_S = 900.0

# Only a handful of things can be wrong with a card, so more complaints are nonsense.
_COMPLAINTS_MAX = 100
#: Each has a stream, a socket and a place in every look at the cluster.
WORKERS_MAX = 1024

# Largest of what there is, and generously more. A petabyte of weights still fits in.
_ARENA_BYTES_MAX = 1 << 50
_CLOCK_MHZ_MAX = 100_000
_TENSORS_MAX = 256
_RANK_MAX = 32

# Files that a worker has asked for and was not sent. It asks for those of one model at a time.
_TRANSFERS_MAX = 20_000

# When a worker has been silent for this many heartbeats, another that registers under its name is taken for
# its successor. A busy machine skips a few heartbeats; a worker that starts again takes longer than that.
_SUSPICIOUS_TICKS = 10


@dataclass(frozen=True, slots=True)
class HeartbeatConfig:
    """How often each side sends a heartbeat, and after how much silence it gives the other up."""

    interval_ms: int = 200
    silence_limit_ms: int = 10_000


@dataclass(slots=True)
class _Transfer:
    """A file on its way to a worker."""

    model_id: ModelId
    file: ModelFile


@dataclass(slots=True)
class _SentInfer:
    """What is kept of an Infer until it is over."""

    #: Sizes that its outputs must have.
    rows: tuple[int, ...]
    output_row_bytes: tuple[int, ...]
    #: Slabs that the worker may read and write until then, whoever else has forgotten them.
    inputs: Sequence[Buffer]
    outputs: memoryview | None
    #: By number, the requests of fronts whose tensors go past the controller.
    holders: Mapping[int, Holder]


@dataclass(slots=True)
class WorkerLink:
    """One worker's stream and socket. By it the runtime sends actions, and the catalogue offers models."""

    runtime: Runtime
    catalogue: Catalogue
    heartbeats: HeartbeatConfig
    register: pb.Register
    #: The RPC. Its `read` and `write` take whole messages as bytes.
    context: Context
    #: Largest message that the server takes.
    message_bytes_max: int
    #: Where large tensors lie for workers of this host.
    slabs: Slabs
    #: The controller's, which orders carry; 0: they carry none.
    generation: int = 0
    #: Told when the worker has mapped memory, and of its outputs' memory when the worker is gone.
    shared: Callable[[WorkerLink], object] = lambda _: None
    unshared: Callable[[Arena], object] = lambda _: None
    #: What fronts call it; no other worker has had it.
    number: int = 0
    #: Told when fronts may come, and when they may not any more.
    came: Callable[[WorkerLink], object] = lambda _: None
    gone: Callable[[WorkerLink], object] = lambda _: None
    #: The worker's name, which it chose.
    worker_id: WorkerId = field(init=False)
    clock: ClockSync = field(default_factory=ClockSync)
    draining: bool = False
    #: The scheduler does not trust the worker any more and has let it go.
    dropped: bool = False
    #: The socket for actions and results is there, the clock offset is known, and the scheduler uses both.
    joined: bool = False
    #: Heartbeat intervals since the last sign of life.
    silent_ticks: int = 0
    #: The worker's last report on its GPU; empty where there is none.
    card: pb.Card = field(default_factory=pb.Card)
    #: Models that the worker cannot serve, and why.
    refused: dict[ModelId, str] = field(default_factory=dict)
    #: What it is to keep of what it holds: models in the cache first. Empty once it has joined.
    keeps: Sequence[pb.Held] = ()
    #: Models that were offered to the worker, which has not answered yet.
    _unanswered: set[ModelId] = field(default_factory=set)
    #: Heartbeat intervals since it last said something of any of them.
    _mute_ticks: int = 0
    #: Messages in order. They leave before any chunk.
    _outgoing: deque[bytes] = field(default_factory=deque)
    #: Chunks of files, in order.
    _chunks: deque[bytes] = field(default_factory=deque)
    _wake_writer: asyncio.Event = field(default_factory=asyncio.Event)
    _transfers: asyncio.Queue[_Transfer] = field(default_factory=asyncio.Queue)
    _chunk_permits: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(CHUNKS_IN_FLIGHT)
    )
    _num_unacknowledged: int = 0
    _heartbeat_due: bool = True
    #: Carries actions and results, once the worker has dialled.
    _data: FrameSocket | None = None
    _infers: dict[ActionId, _SentInfer] = field(default_factory=dict)
    #: Shared memory for its outputs, which the worker was offered; None: there is none.
    _outputs: Arena | None = None
    #: The worker has mapped that and the inputs'.
    _mapped: bool = False
    #: Fronts' memory that the worker was handed, by number, and those numbers that it has mapped.
    _further: dict[int, MappedMemory] = field(default_factory=dict)
    _further_mapped: dict[int, MappedMemory] = field(default_factory=dict)
    #: The output sizes of each model that the worker has ready: bytes of one row, by output, and of all.
    _output_row_bytes: dict[ModelId, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    #: Set once `WorkerLinks` does not list the worker any more.
    left: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set when the stream is to end; its result says why.
    _ended: asyncio.Future[str] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def __post_init__(self) -> None:
        self.worker_id = WorkerId(self.register.worker_id)

    # --- what the runtime and the catalogue ask for -------------------------------------------

    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        """Send an action, its window translated to the worker's clock, at the next `flush`."""
        offset_ns, data = self.clock.offset_ns, self._data
        assert offset_ns is not None, f"worker {self.worker_id} got an action before its clock"
        assert data is not None, f"worker {self.worker_id} got an action before it dialled"
        places: Sequence[int] = ()
        room: tuple[int, int] | None = None
        fronts: Sequence[int] = ()
        if isinstance(action, Infer):
            row_bytes, num_row_bytes = self._output_row_bytes[action.model_id]
            payload_bytes = sum(action.rows) * num_row_bytes
            slab: memoryview | None = None
            holders: dict[int, Holder] = {}
            inputs = payload
            if has_held(payload):
                payload, places, holders = self._without_held(action, payload)
            elif self._mapped:
                places = self._places(payload)
            if self._mapped and not holders:
                slab = self._take_outputs(payload_bytes)
                if slab is not None:
                    assert self._outputs is not None
                    room = self._outputs.find(slab), len(slab)
            sent = _SentInfer(action.rows, row_bytes, inputs, slab, holders)
            self._infers[action.action_id] = sent
            if holders:
                fronts = [
                    holders[index].number if index in holders else 0
                    for index in range(len(action.rows))
                ]
            # No result is longer than the longest that an Infer has asked for.
            reader = data.reader
            if payload_bytes > reader.payload_bytes_max:
                reader.payload_bytes_max = payload_bytes
            header_bytes = PLAIN_HEADER_BYTES + LENGTH_BYTES * len(action.rows) * len(row_bytes)
            if header_bytes > reader.header_bytes_max:
                reader.header_bytes_max = header_bytes
        data.hold(
            encode_action(
                action,
                payload,
                places=places,
                room=room,
                fronts=fronts,
                shift_ns=offset_ns,
                generation=self.generation,
            )
        )

    def flush(self, *, now: bool) -> None:
        """Send the actions that wait for it."""
        if self._data is not None:
            if now:
                self._data.flush()
            else:
                self._data.send(())

    def _without_held(
        self, action: Infer, payload: Sequence[Buffer]
    ) -> tuple[Sequence[Buffer], Sequence[int], dict[int, Holder]]:
        """Have fronts send what they hold of an Infer.

        Returns:
            What stands in the message for each input, where each lies, and whose tensors go past this link.
        """
        num_inputs = len(payload) // len(action.rows)
        tensors: list[Any] = list(payload)
        places, holders = [-1] * len(payload), dict[int, Holder]()
        for number, tensor in enumerate(tensors):
            if type(tensor) is HeldInput:
                index, holder = number // num_inputs, tensor.holder
                content = tensor.content
                if not (holder.is_local and self.is_local):
                    if index not in holders:
                        holders[index] = holder
                        holder.feed(tensor.ask_id, self.number, action.action_id, index)
                    if len(tensor) >= DIRECT_BYTES:
                        places[number] = APART
                        continue
                assert content is not None
                tensors[number] = tensor = content
            if self._mapped and len(tensor) >= SLAB_BYTES_MIN:
                places[number] = self._place(tensor)
        return tensors, places, holders

    @property
    def num_bytes(self) -> int:
        """Bytes that came by the socket, and went there."""
        return 0 if self._data is None else self._data.num_bytes

    @property
    def is_local(self) -> bool:
        """Whether it shares memory with the fronts of this host."""
        return self.slabs.inputs is not None and self._data is not None and self._data.hands_over

    @property
    def payload_address(self) -> str:
        """Where fronts bring inputs, HOST:PORT; empty: nowhere."""
        host, port = self.register.payload_host, self.register.payload_port
        return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") if port else ""

    def expect(self, front: int, token: bytes) -> bool:
        """Let a front come with a token to the address in `register`; False: there is none."""
        if not self.register.payload_port or self._data is None:
            return False
        self._data.send(encode_expect(front, token, self.message_bytes_max))
        return True

    def front_gone(self, front: int) -> None:
        """A front sends nothing any more, and waits for nothing."""
        if self._data is not None:
            self._data.send(encode_front_gone(front))

    def hand_on(
        self, front: int, action_id: int, index: int, tensors: Sequence[Buffer] | None
    ) -> None:
        """Hand a front's inputs on, which cannot reach the worker; None: there are none."""
        sent = self._infers.get(ActionId(action_id))
        if sent is None or self._data is None:
            return  # It is over.
        holder = sent.holders.get(index)
        if holder is None or holder.number != front:
            raise ProtocolError(
                f"action {action_id}: inputs to request {index}, which is another's"
            )
        self._data.send(encode_inputs(action_id, index, tensors))

    def _places(self, payload: Sequence[Buffer]) -> Sequence[int]:
        """Find the tensors that the worker can read where they are; empty: there is none."""
        if not any([len(tensor) >= SLAB_BYTES_MIN for tensor in payload]):
            return ()
        return [self._place(tensor) if len(tensor) >= SLAB_BYTES_MIN else -1 for tensor in payload]

    def _place(self, tensor: Buffer) -> int:
        inputs = self.slabs.inputs
        if inputs is not None and (begin := inputs.find(tensor)) >= 0:
            return begin
        for number, memory in self._further_mapped.items():
            if (begin := memory.find(tensor)) >= 0:
                return number << PLACE_BITS | begin
        return -1

    def _take_outputs(self, num_bytes: int) -> memoryview | None:
        """Take room for the outputs of an Infer; None: they come with its result."""
        if num_bytes < SLAB_BYTES_MIN or self._outputs is None:
            return None
        return self._outputs.take(num_bytes)

    def withdraw_action(self, action_id: ActionId) -> None:
        """Tell the worker to drop an action that it has not begun."""
        assert self._data is not None
        self._data.send(encode_withdrawal(action_id, generation=self.generation))

    def offer(self, model: Entry) -> None:
        """Offer the worker a model."""
        self._unanswered.add(model.model_id)
        self._post(pb.ToWorker(model_offer=_offer(model)).SerializeToString())

    def withdraw(self, model: Entry) -> None:
        """Take an offer back if it was not answered yet. The scheduler forgets models that were ready."""
        self.refused.pop(model.model_id, None)
        if model.model_id in self._unanswered:
            self.forget_model(model.model_id)

    def forget_model(self, model_id: ModelId) -> None:
        """Tell the worker to drop a model."""
        self._unanswered.discard(model_id)
        self._output_row_bytes.pop(model_id, None)
        drop = pb.ToWorker(model_drop=pb.ModelDrop(model_id=model_id))
        self._post(drop.SerializeToString())

    def close(self, reason: str) -> None:
        """Let the worker go: with an empty reason for good, when it has drained; else to start afresh."""
        self.draining = True
        self.catalogue.worker_left(self.worker_id)
        if reason:
            # No Drain is sent: a worker whose stream is cut registers again, with an empty cache.
            self.dropped = True
            self.cut(reason)
            return
        drain = pb.ToWorker(drain=pb.Drain(reason="all actions are answered"))
        self._post(drain.SerializeToString())
        asyncio.get_running_loop().call_later(LEAVE_LIMIT_S, self.cut, "told to leave")

    def cut(self, reason: str) -> None:
        """End the stream now."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def _post(self, message: bytes) -> None:
        self._outgoing.append(message)
        self._wake_writer.set()

    # --- the socket ---------------------------------------------------------------------------

    def dialled(self, sock: socket.socket) -> None:
        """The worker has dialled the socket for actions and results."""
        if self._ended.done():
            sock.close()
            return
        self._data = FrameSocket(sock, self._take_frames, self.cut)
        self._offer_memory(self._data)
        self._join_when_known()

    def hang_up(self) -> None:
        """Close the socket for actions and results."""
        if self._data is not None:
            self._data.close()
            self.gone(self)
        # The worker may still read and write for these, and nobody hears of it: what it reads is of no
        # account now, and what it writes to is never used again.
        self._infers.clear()
        if self._outputs is not None:
            self._outputs.close()
            self.unshared(self._outputs)
            self._outputs = None
        self._mapped = False
        self._further.clear()
        self._further_mapped.clear()

    def _offer_memory(self, data: FrameSocket) -> None:
        """Hand the shared memory over, if the worker is on this host."""
        inputs = self.slabs.inputs
        if inputs is None or not data.hands_over:
            return
        outputs = self.slabs.for_outputs()
        if outputs is None:
            return
        message = encode_memory(inputs.num_bytes, outputs.num_bytes)
        if data.hand_over(message, (inputs.fd, outputs.fd)):
            self._outputs = outputs
        else:
            outputs.close()

    @property
    def outputs(self) -> Arena | None:
        """Where its outputs lie, if it has mapped that; its file is open."""
        return self._outputs if self._mapped else None

    def share(self, memory: MappedMemory, file: int) -> None:
        """Hand a front's memory on, whose file is given, so that inputs need not travel."""
        if not self._mapped or self._data is None:
            return
        if self._data.hand_over(encode_further(memory.number, memory.num_bytes), (file,)):
            self._further[memory.number] = memory

    def unshare(self, memory: MappedMemory) -> None:
        """Have the worker forget a front's memory."""
        self._further_mapped.pop(memory.number, None)
        if self._further.pop(memory.number, None) is not None and self._data is not None:
            self._data.send(encode_forget(memory.number))

    def _take_mapped(self, number: int) -> None:
        """Take in that the worker has mapped some memory."""
        if number:
            if number in self._further:
                self._further_mapped[number] = self._further[number]
        elif self._outputs is not None:
            self._mapped = True
            self.shared(self)

    def _take_frames(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if self._ended.done():
                return
            number = mapped_number(frame[0])
            if number is None:
                self._take_result(frame)
            else:
                self._take_mapped(number)

    # --- the stream ---------------------------------------------------------------------------

    async def run(self) -> str:
        """Serve the stream until it ends, and say why it did."""
        parts = [
            asyncio.create_task(part)
            for part in (self._read(), self._write(), self._beat(), self._send_files())
        ]
        for part in parts:
            part.add_done_callback(self._part_ended)
        try:
            return await self._ended
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def _part_ended(self, part: asyncio.Task[None]) -> None:
        if part.cancelled():
            return
        error = part.exception()
        if error is None:
            self.cut("the worker closed the stream")
        elif isinstance(error, ProtocolError):
            self.cut(f"protocol error: {error}")
        elif isinstance(error, asyncio.InvalidStateError):
            self.cut("the connection broke")
        else:
            # This is a bug of ours. The worker reconnects and starts afresh.
            log.error("worker %s: its link failed", self.worker_id, exc_info=error)
            self.cut(f"its link failed: {error!r}")

    async def _read(self) -> None:
        while (message := await self.context.read()) is not EOF:
            received_ns = self.runtime.clock()
            self.silent_ticks = 0
            envelope = parse(message)
            self._take(envelope, received_ns)
            for further in envelope.next:
                self._take(parse(further), received_ns)

    async def _write(self) -> None:
        while True:
            await self.context.write(await self._next_message())

    async def _next_message(self) -> bytes:
        while True:
            if self._heartbeat_due:
                self._heartbeat_due = False
                # The heartbeat is stamped when it leaves and not when it fell due: time in this queue
                # must not count as delay on the way.
                beat = pb.Heartbeat(
                    sent_ns=self.runtime.clock(), min_delta_ns=self.clock.min_delta_ns
                )
                return pb.ToWorker(heartbeat=beat).SerializeToString()
            if self._outgoing:
                return wire.take_together(self._outgoing)
            if self._chunks:
                return self._chunks.popleft()
            self._wake_writer.clear()
            await self._wake_writer.wait()

    async def _beat(self) -> None:
        """Keep heartbeats going, and give the worker up after too much silence.

        Silence is counted in ticks of this loop, not in time. When this process was stopped for a while,
        the worker's messages lie in our buffers, and the worker is not to blame.
        """
        interval_ms = self.heartbeats.interval_ms
        undialled_ticks = 0
        while True:
            self._heartbeat_due = True
            self._wake_writer.set()
            await asyncio.sleep(interval_ms / 1000)
            self.silent_ticks += 1
            self._look_at_offers(interval_ms)
            ticks, fault = self.silent_ticks, "silent"
            if self._data is None:
                undialled_ticks += 1
                if undialled_ticks > ticks:
                    ticks, fault = undialled_ticks, "it has not dialled the socket for actions"
            else:
                self._data.tick()
                if self._data.stalled_ticks > ticks:
                    ticks, fault = self._data.stalled_ticks, "it takes no more actions"
            if ticks * interval_ms > self.heartbeats.silence_limit_ms:
                self.cut(f"{fault} for {ticks * interval_ms} ms")
                return

    def _look_at_offers(self, interval_ms: int) -> None:
        """Take a worker that says nothing of its offers for one that refuses them."""
        self._mute_ticks = self._mute_ticks + 1 if self._unanswered else 0
        if self._mute_ticks * interval_ms <= OFFER_SILENCE_S * 1000:
            return
        self._mute_ticks = 0
        reason = f"worker {self.worker_id} has said nothing of it for {OFFER_SILENCE_S:g} s"
        for model_id in list(self._unanswered):
            self.forget_model(model_id)
            self._refused(model_id, reason)

    async def _send_files(self) -> None:
        while True:
            transfer = await self._transfers.get()
            if self.catalogue.find_id(transfer.model_id) is None:
                continue  # The model was removed while other files were sent.
            try:
                await self._send_file(transfer)
            except OSError as error:
                reason = f"{transfer.file.name} cannot be read: {error}"
                self._refused(transfer.model_id, reason)
                self.forget_model(transfer.model_id)

    async def _send_file(self, transfer: _Transfer) -> None:
        """Send a file in chunks; the disk is waited for in a thread.

        The file may have changed since it was listed. Then the promised number of bytes is sent all the same,
        or fewer, of which the last chunk is marked: the worker finds that the sha256 differs, and says so.
        """
        file, offset, last = transfer.file, 0, False
        while not last:
            wanted = min(CHUNK_BYTES, file.num_bytes - offset)
            content = await asyncio.to_thread(_read_at, file.path, offset, wanted)
            last = offset + len(content) >= file.num_bytes or len(content) < wanted
            await self._chunk_permits.acquire()
            self._num_unacknowledged += 1
            self._post_chunk(transfer, offset, content, last)
            offset += len(content)

    def _post_chunk(self, transfer: _Transfer, offset: int, content: bytes, last: bool) -> None:
        chunk = pb.ModelChunk(
            model_id=transfer.model_id, sha256=transfer.file.sha256, offset=offset, last=last
        )
        header = pb.ToWorker(model_chunk=chunk).SerializeToString()
        self._chunks.append(join_bulk(header, wire.PAYLOAD_FIELD, [content]))
        self._wake_writer.set()

    # --- what the worker says -----------------------------------------------------------------

    def _take(self, envelope: pb.FromWorker, received_ns: int) -> None:
        if self._ended.done():
            return
        kind = envelope.WhichOneof("kind")
        if kind != "heartbeat":
            self._mute_ticks = 0
        match kind:
            case "heartbeat":
                self._take_heartbeat(envelope.heartbeat, received_ns)
            case "model_needed":
                self._take_needed(envelope.model_needed)
            case "chunk_received":
                if self._num_unacknowledged == 0:
                    raise ProtocolError("a chunk was acknowledged that was not sent")
                self._num_unacknowledged -= 1
                self._chunk_permits.release()
            case "model_progress":
                progress = envelope.model_progress
                if progress.model_id in self._unanswered:
                    stage = printable(progress.stage)
                    self.catalogue.model_progress(ModelId(progress.model_id), stage)
            case "model_ready":
                self._take_ready(envelope.model_ready)
            case "model_refused":
                refused = envelope.model_refused
                # Another was withdrawn a moment ago, or is answered already.
                if refused.model_id in self._unanswered:
                    reason = printable(refused.reason, WORDS_CHARS_MAX) or "no reason given"
                    self._refused(ModelId(refused.model_id), reason, for_others=refused.for_others)
            case "drain":
                reason = printable(envelope.drain.reason)
                log.info("worker %s wants to leave: %s", self.worker_id, reason)
                self.drain()
            case "register":
                raise ProtocolError("registered twice")
            case _:
                raise ProtocolError("a message of a kind that this version does not know")

    def drain(self) -> None:
        """Give the worker nothing new; the scheduler closes the link when all is answered."""
        if self.draining:
            return
        self.draining = True
        self.catalogue.worker_left(self.worker_id)
        if self.joined:
            self.runtime.drain_worker(self.worker_id)
        else:
            self.close("")

    def _take_heartbeat(self, beat: pb.Heartbeat, received_ns: int) -> None:
        peer_min = beat.min_delta_ns if beat.HasField("min_delta_ns") else None
        if max(abs(beat.sent_ns), abs(peer_min or 0)) > TIME_NS_MAX:
            raise ProtocolError(f"heartbeat sent at {beat.sent_ns} ns, delta {peer_min} ns")
        self.clock.heard(sent_ns=beat.sent_ns, received_ns=received_ns, peer_min_delta_ns=peer_min)
        self._join_when_known()
        if beat.HasField("card"):
            self._take_card(beat.card)

    def _take_card(self, card: pb.Card) -> None:
        if len(card.complaints) > _COMPLAINTS_MAX:
            raise ProtocolError(
                f"{len(card.complaints)} complaints of a card, expected {_COMPLAINTS_MAX} at most"
            )
        if max(card.clock_mhz, card.clock_mhz_max) > _CLOCK_MHZ_MAX:
            raise ProtocolError(
                f"a card at {card.clock_mhz} of {card.clock_mhz_max} MHz, expected {_CLOCK_MHZ_MAX} at most"
            )
        card.complaints[:] = map(printable, card.complaints)
        known, self.card = self.card, card
        for words in card.complaints:
            if words not in known.complaints:
                log.warning("worker %s: its GPU is unwell: %s", self.worker_id, words)
        for words in known.complaints:
            if words not in card.complaints:
                log.info("worker %s: its GPU is better: no more: %s", self.worker_id, words)
        if self.joined and card.clock_mhz:
            self.runtime.clock_seen(self.worker_id, card.clock_mhz)

    def _join_when_known(self) -> None:
        if self.joined or self.draining or self.clock.offset_ns is None or self._data is None:
            return
        self.joined = True
        self.came(self)
        register = self.register
        self.runtime.worker_joined(
            self,
            WorkerJoined(
                worker_id=self.worker_id,
                gpu_kind=GpuKind(register.gpu_kind),
                num_pages=register.num_pages,
            ),
        )
        if self.card.clock_mhz:
            self.runtime.clock_seen(self.worker_id, self.card.clock_mhz)
        log.info(
            "worker %s joined: device %s, %d pages, round trip %d us",
            self.worker_id,
            register.device,
            register.num_pages,
            self.clock.round_trip_ns // 1000,
        )
        keeps, self.keeps = self.keeps, ()
        for held in keeps:
            if not self._is_wanted(held):
                # Its pages are taken, and are free only when the worker says so: by registering again.
                self.cut("models have changed while it joined")
                return
            self._accept(held.ready, resident=held.resident)
        self.catalogue.worker_joined(self.worker_id, self)

    def choose_held(self) -> None:
        """Choose what the worker is to keep of what it holds."""
        wanted = [held for held in self.register.held if self._is_wanted(held)]
        self.keeps = sorted(wanted, key=lambda held: not held.resident)
        num_pages = sum(held.ready.num_pages for held in wanted if held.resident)
        if num_pages > self.register.num_pages or len({h.ready.model_id for h in wanted}) < len(
            wanted
        ):
            raise ProtocolError(
                f"it holds {len(wanted)} models in {num_pages} pages of {self.register.num_pages}"
            )

    def _is_wanted(self, held: pb.Held) -> bool:
        """Whether the worker would answer our offer of the model with just what it holds."""
        model = self.catalogue.find_id(ModelId(held.ready.model_id))
        return (
            model is not None
            and model.folder is not None
            and _offer_digest(model) == held.offer_digest
            and not self._fault_of(held.ready, model.folder)
            # Else it is refused, and keeps pages until it has heard of that.
            and (not model.ready_on or _tensors(held.ready) == (model.inputs, model.outputs))
        )

    def _take_result(self, frame: Frame) -> None:
        offset_ns = self.clock.offset_ns
        if offset_ns is None:
            raise ProtocolError("a result before any heartbeat")
        result, outputs, numbers = decode_result(frame, shift_ns=-offset_ns)
        if result.message:
            result.message = printable(result.message, WORDS_CHARS_MAX)
        sent = self._infers.pop(result.action_id, None)
        if sent is not None and result.error is ActionError.NONE:
            if numbers:
                outputs = self._with_sent(result.action_id, sent, outputs, numbers)
            elif not outputs and sent.outputs is not None:
                outputs = _cut_outputs(sent, sent.outputs)
            _check_outputs(result.action_id, sent, outputs)
        self.runtime.action_finished(self.worker_id, result, outputs)

    def _with_sent(
        self,
        action_id: ActionId,
        sent: _SentInfer,
        outputs: Sequence[Buffer],
        numbers: Sequence[int],
    ) -> list[Buffer]:
        """Put handles where outputs went to their fronts."""
        if not set(numbers) <= sent.holders.keys():
            raise ProtocolError(f"action {action_id}: outputs sent to nobody")
        rest = iter(outputs)
        found: list[Any] = []
        for index, rows in enumerate(sent.rows):
            for row_bytes in sent.output_row_bytes:
                if index in numbers:
                    found.append(SentOutput(self.number, action_id, index, rows * row_bytes))
                else:
                    found.append(next(rest, b""))
        return [*found, *rest]

    def _take_needed(self, needed: pb.ModelNeeded) -> None:
        model = self.catalogue.find_id(ModelId(needed.model_id))
        if model is None or model.folder is None:
            return  # The model was removed a moment ago.
        files = {file.sha256: file for file in model.folder.files}
        if self._transfers.qsize() + len(needed.sha256) > _TRANSFERS_MAX:
            raise ProtocolError(f"it waits for more than {_TRANSFERS_MAX} files, which is the most")
        for sha256 in dict.fromkeys(needed.sha256):
            file = files.get(sha256)
            if file is None:
                raise ProtocolError(
                    f"model {model.model_id} has no file with sha256 {sha256[:TEXT_CHARS_MAX]!r}"
                )
            self._transfers.put_nowait(_Transfer(model.model_id, file))

    def _take_ready(self, ready: pb.ModelReady) -> None:
        model_id = ModelId(ready.model_id)
        if model_id not in self._unanswered:
            return  # The offer was withdrawn a moment ago.
        self._unanswered.discard(model_id)
        model = self.catalogue.find_id(model_id)
        if model is None or model.folder is None:
            return  # The model was removed a moment ago.
        if fault := self._fault_of(ready, model.folder):
            self._refused(model_id, fault)
            self.forget_model(model_id)
        else:
            self._accept(ready, resident=False)

    def _fault_of(self, ready: pb.ModelReady, folder: ModelFolder) -> str:
        return _find_fault(
            ready,
            num_pages=self.register.num_pages,
            batch_sizes=folder.settings.batch_sizes,
            message_bytes_max=self.message_bytes_max,
        )

    def _accept(self, ready: pb.ModelReady, *, resident: bool) -> None:
        """The worker has a model ready, and in the cache too or not."""
        model_id = ModelId(ready.model_id)
        row_bytes = _row_bytes(ready.outputs)
        event = ModelReady(
            worker_id=self.worker_id,
            model_id=model_id,
            architecture_id=ArchitectureId(ready.architecture_id),
            num_pages=ready.num_pages,
            load_ns=ready.load_ns,
            # Not what no message could bring back.
            exec_ns={
                batch.batch_size: batch.exec_ns
                for batch in ready.batches
                if batch.batch_size * row_bytes <= self.message_bytes_max
            },
            clock_mhz=ready.clock_mhz,
            output_row_bytes=row_bytes,
            resident=resident,
        )
        if self.draining:
            return
        inputs, outputs = _tensors(ready)
        # Known before the scheduler is: it may send an Infer at once.
        self._output_row_bytes[model_id] = tuple(spec.row_bytes for spec in outputs), row_bytes
        known = self.catalogue.model_ready(
            event,
            inputs=inputs,
            outputs=outputs,
            weights_bytes=ready.weights_bytes,
            one_by_one=printable(ready.one_by_one, WORDS_CHARS_MAX),
        )
        if not known:
            self.forget_model(model_id)

    def _refused(self, model_id: ModelId, reason: str, *, for_others: bool = False) -> None:
        self._unanswered.discard(model_id)
        if self.catalogue.find_id(model_id) is None:
            return  # The model was removed a moment ago.
        if not for_others:
            self.refused[model_id] = reason
        if not self.draining:
            self.catalogue.model_refused(self.worker_id, model_id, reason, for_others=for_others)


class WorkerLinks:
    """All workers' streams, by worker id."""

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        heartbeats: HeartbeatConfig | None = None,
        *,
        message_bytes_max: int,
        slabs: Slabs,
        term: Term = Term(),  # noqa: B008  it is frozen
    ) -> None:
        self._runtime = runtime
        self._catalogue = catalogue
        self._heartbeats = heartbeats or HeartbeatConfig()
        self._message_bytes_max = message_bytes_max
        self._slabs = slabs
        self._term = term
        #: Where workers, and fronts, come for their second connection.
        self.listener = SocketListener(silence_limit_ms=self._heartbeats.silence_limit_ms)
        self._links: dict[WorkerId, WorkerLink] = {}
        self._last_number = 0
        #: Told when a worker takes fronts, and when it is gone.
        self.worker_came: Callable[[WorkerLink], object] = lambda _: None
        self.worker_gone: Callable[[WorkerLink], object] = lambda _: None
        #: Fronts' memory, which each worker of this host is handed.
        self._memories: dict[int, tuple[MappedMemory, int]] = {}
        #: Told of each worker's memory for outputs, when it is in use and when the worker is gone.
        self.outputs_shared: Callable[[Arena], object] = lambda _: None
        self.outputs_unshared: Callable[[Arena], object] = lambda _: None
        #: Why no worker is welcome any more; empty while they are.
        self._closing = ""
        self._all_left = asyncio.Event()
        self._all_left.set()

    @property
    def links(self) -> list[WorkerLink]:
        """Links of the workers that are connected, sorted by id."""
        return [self._links[worker_id] for worker_id in sorted(self._links)]

    def find(self, worker_id: WorkerId) -> WorkerLink | None:
        """Find the link of a worker."""
        return self._links.get(worker_id)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Make the service, on bytes: gRPC neither parses nor copies messages."""
        attach = grpc.stream_stream_rpc_method_handler(self._attach)
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: attach})

    def listen(self, host: str, port: int, path: Path) -> None:
        """Listen for the sockets of actions and results; see `SocketListener.listen`."""
        self.listener.listen(host, port, path)

    def stop_listening(self) -> None:
        """Take no more of these sockets."""
        self.listener.close()

    # --- fronts' memory -----------------------------------------------------------------------

    def share(self, memory: MappedMemory, file: int) -> None:
        """Hand a front's memory to all workers of this host, and to those that come, until `unshare`."""
        self._memories[memory.number] = memory, file
        for link in self._links.values():
            link.share(memory, file)

    def unshare(self, memory: MappedMemory) -> None:
        """Have all workers forget a front's memory."""
        self._memories.pop(memory.number, None)
        for link in self._links.values():
            link.unshare(memory)

    def _worker_shares(self, link: WorkerLink) -> None:
        for memory, file in self._memories.values():
            link.share(memory, file)
        assert link.outputs is not None
        self.outputs_shared(link.outputs)

    def _worker_is_gone(self, outputs: Arena) -> None:
        self.outputs_unshared(outputs)

    # --- streams ------------------------------------------------------------------------------

    async def close(self, reason: str) -> None:
        """End all streams, and wait until they have ended or `LEAVE_LIMIT_S` is over.

        No worker is sent home: like those of a controller that crashed, they dial until one answers.
        """
        self._closing = reason
        for link in self.links:
            link.cut(reason)
        try:
            async with asyncio.timeout(LEAVE_LIMIT_S):
                await self._all_left.wait()
        except TimeoutError:
            log.warning("%d workers' streams have not ended", len(self._links))

    async def _attach(self, _requests: AsyncIterator[bytes], context: Context) -> None:
        register = await self._registration(context)
        if register is None:
            return
        link = WorkerLink(
            self._runtime,
            self._catalogue,
            self._heartbeats,
            register,
            context,
            self._message_bytes_max,
            self._slabs,
            self._term.generation,
            self._worker_shares,
            self._worker_is_gone,
            self._new_number(),
            # Whoever is told may come later than this controller's first workers.
            lambda link: self.worker_came(link),
            lambda link: self.worker_gone(link),
        )
        try:
            link.choose_held()
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        token = self.listener.expect(link.dialled)
        try:
            await self._welcome(link, token)
            self._links[link.worker_id] = link
            self._all_left.clear()
            reason = "the connection broke"
            try:
                reason = await link.run()
            finally:
                self._remove(link, reason)
        finally:
            self.listener.forget(token)
            link.hang_up()
        # The reason is for the worker's log. The end of the stream alone tells it to register again.
        context.set_code(grpc.StatusCode.ABORTED)
        context.set_details(reason)

    def _new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _remove(self, link: WorkerLink, reason: str) -> None:
        link.left.set()
        if self._links.get(link.worker_id) is not link:
            return  # Its successor has taken its place.
        # A worker that drained was expected to leave; the operator should hear of any other. Which end of
        # a drained worker's stream closes first is chance, so the reason is no news.
        if self._closing:
            log.info("worker %s is left waiting: %s", link.worker_id, reason)
        elif link.draining and not link.dropped:
            log.info("worker %s left: it was drained", link.worker_id)
        else:
            log.warning("worker %s left: %s", link.worker_id, reason)
        del self._links[link.worker_id]
        if link.joined:
            self._runtime.worker_lost(link.worker_id)
            self._catalogue.worker_left(link.worker_id)
        if not self._links:
            self._all_left.set()

    async def _registration(self, context: Context) -> pb.Register | None:
        """Read the registration; None when the worker was rejected."""
        limit_s = self._heartbeats.silence_limit_ms / 1000
        try:
            async with asyncio.timeout(limit_s):
                message = await context.read()
            if message is EOF:
                return None
            envelope = parse(message)
            await self._send_away_when_closing(context)
            fault = self._find_fault(envelope)
        except TimeoutError:
            fault = f"no registration within {limit_s:g} s"
            envelope = pb.FromWorker()
        except ProtocolError as error:
            fault = str(error)
            envelope = pb.FromWorker()
        if fault:
            log.warning("worker %r is rejected: %s", envelope.register.worker_id[:200], fault)
            rejected = pb.ToWorker(rejected=pb.Rejected(reason=fault))
            await context.write(rejected.SerializeToString())
            return None
        return envelope.register

    async def _welcome(self, link: WorkerLink, token: bytes) -> None:
        """Tell a worker that it is welcome, and the way to the socket for actions and results."""
        welcome = pb.Welcome(
            heartbeat_interval_ms=self._heartbeats.interval_ms,
            silence_limit_ms=self._heartbeats.silence_limit_ms,
            socket_path=self.listener.path,
            socket_port=self.listener.port,
            token=token,
            lineage=self._term.lineage,
            generation=self._term.generation,
            keep=[held.ready.model_id for held in link.keeps],
        )
        await link.context.write(pb.ToWorker(welcome=welcome).SerializeToString())
        # Look again, because the write let others run: the controller may close now, and two workers of
        # one name may have come together.
        await self._send_away_when_closing(link.context)
        if fault := self._clash(link.register):
            await link.context.abort(grpc.StatusCode.ALREADY_EXISTS, fault)

    async def _send_away_when_closing(self, context: Context) -> None:
        """End the stream when the controller closes; a rejection would end the worker, so it gets none."""
        if self._closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._closing)

    def _find_fault(self, envelope: pb.FromWorker) -> str:
        """Say what is wrong with a first message; empty when nothing is."""
        if not envelope.HasField("register"):
            return f"expected Register as the first message, found {envelope.WhichOneof('kind')}"
        register = envelope.register
        if register.protocol_version != wire.PROTOCOL_VERSION:
            return (
                f"the worker speaks protocol version {register.protocol_version}, "
                f"the controller {wire.PROTOCOL_VERSION}"
            )
        if not _WORKER_ID.fullmatch(register.worker_id):
            return f"worker_id {register.worker_id[:200]!r}: expected 1 to 128 of A-Z a-z 0-9 _ . : @ -"
        for name in ("device", "gpu_kind"):
            if not getattr(register, name):
                return f"{name} is empty"
        if register.payload_port > 65535:
            return f"payload_port is {register.payload_port}, expected 65535 at most"
        if len(register.payload_certificate_sha256) not in (0, 32):
            return "payload_certificate_sha256 has not 32 bytes"
        for name in ("device", "gpu_kind", "host", "software_version", "payload_host"):
            text = getattr(register, name)
            if fault := _text_fault(text):
                return f"{name} {fault}"
        for name in ("num_pages", "page_bytes"):
            if getattr(register, name) == 0:
                return f"{name} is 0, expected at least 1"
        for name, num_bytes in (
            ("num_pages * page_bytes", register.num_pages * register.page_bytes),
            ("arena_bytes", register.arena_bytes),
        ):
            if num_bytes > _ARENA_BYTES_MAX:
                return f"{name} is {num_bytes}, expected {_ARENA_BYTES_MAX} at most"
        return self._clash(register)

    def _clash(self, register: pb.Register) -> str:
        """Make room for a worker under its name, or say why it cannot have it."""
        old = self._links.get(WorkerId(register.worker_id))
        if old is None:
            if len(self._links) >= WORKERS_MAX:
                return f"there are {len(self._links)} workers, expected {WORKERS_MAX} at most"
            return ""
        same_process = (old.register.host, old.register.pid) == (register.host, register.pid)
        if not same_process and old.silent_ticks < _SUSPICIOUS_TICKS:
            return (
                f"there is a worker {register.worker_id} already, "
                f"process {old.register.pid} on host {old.register.host}"
            )
        # The worker's connection broke without our noticing, and here it is again.
        self._remove(old, "replaced by its successor")
        old.cut("replaced by its successor")
        return ""


def parse(message: bytes) -> pb.FromWorker:
    """Read an envelope.

    Raises:
        ProtocolError: it is not a `FromWorker`, or has more in it than any has.
    """
    check_fields(message)
    try:
        return pb.FromWorker.FromString(message)
    except DecodeError:
        raise ProtocolError(f"{len(message)} bytes that are no FromWorker message") from None


def _cut_outputs(sent: _SentInfer, slab: memoryview) -> list[memoryview]:
    """Cut the slab of a batch into outputs, per request and per output."""
    outputs, begin = [], 0
    for rows in sent.rows:
        for row_bytes in sent.output_row_bytes:
            end = begin + rows * row_bytes
            outputs.append(slab[begin:end])
            begin = end
    return outputs


def _check_outputs(action_id: ActionId, sent: _SentInfer, payload: Sequence[Buffer]) -> None:
    expected = [rows * row_bytes for rows in sent.rows for row_bytes in sent.output_row_bytes]
    found = [len(tensor) for tensor in payload]
    if found != expected:
        raise ProtocolError(f"action {action_id}: outputs of {found} bytes, expected {expected}")


def _find_fault(
    ready: pb.ModelReady, *, num_pages: int, batch_sizes: Sequence[int], message_bytes_max: int
) -> str:
    """Say what cannot be true in a worker's description of a model; empty when all of it can.

    Args:
        ready: the description.
        num_pages: of the worker's cache.
        batch_sizes: that the worker was offered, ascending.
        message_bytes_max: a batch's outputs come in one message.
    """
    sizes = [batch.batch_size for batch in ready.batches[: len(batch_sizes) + 1]]
    if not sizes or sizes != sorted(set(sizes)) or not set(sizes) <= set(batch_sizes):
        return f"the worker reports batch sizes {sizes}, expected some of {list(batch_sizes)}, ascending"
    for batch in ready.batches:
        if not 0 < batch.exec_ns <= DURATION_NS_MAX:
            return (
                f"the worker reports exec_ns {batch.exec_ns} for batch {batch.batch_size},"
                f" expected 1 to {DURATION_NS_MAX}"
            )
    if not 0 < ready.load_ns <= DURATION_NS_MAX:
        return f"the worker reports load_ns {ready.load_ns}, expected 1 to {DURATION_NS_MAX}"
    if not 1 <= ready.num_pages <= num_pages:
        return f"it needs {ready.num_pages} pages, the worker's cache has {num_pages}"
    if ready.clock_mhz > _CLOCK_MHZ_MAX:
        return f"it was measured at {ready.clock_mhz} MHz, expected {_CLOCK_MHZ_MAX} at most"
    if not ready.architecture_id:
        return "the worker reports an empty architecture_id"
    if fault := _text_fault(ready.architecture_id):
        return f"architecture_id {fault}"
    if not (1 <= len(ready.inputs) <= _TENSORS_MAX and 1 <= len(ready.outputs) <= _TENSORS_MAX):
        return (
            f"it has {len(ready.inputs)} inputs and {len(ready.outputs)} outputs,"
            f" expected 1 to {_TENSORS_MAX} each"
        )
    for spec in (*ready.inputs, *ready.outputs):
        if fault := _text_fault(spec.name):
            return f"a tensor's name {fault}"
        if spec.datatype not in DATATYPE_BYTES:
            return (
                f"tensor {spec.name} has datatype {spec.datatype[:TEXT_CHARS_MAX]!r},"
                " which is not served"
            )
        shape = list(spec.row_shape[: _RANK_MAX + 1])
        if len(shape) > _RANK_MAX or any(size < 1 for size in shape):
            return (
                f"tensor {spec.name} has shape {shape}, expected {_RANK_MAX} dimensions at most,"
                " of 1 or more each"
            )
    if (num_bytes := sizes[0] * _row_bytes(ready.outputs)) > message_bytes_max:
        return (
            f"the outputs of batch {sizes[0]} have {num_bytes} bytes, a message"
            f" {message_bytes_max} at most (--max-message-mib)"
        )
    return ""


def _offer(model: Entry) -> pb.ModelOffer:
    folder = model.folder
    assert folder is not None, f"model {model.model_id} is malformed and was offered"
    return pb.ModelOffer(
        model_id=model.model_id,
        files=[
            pb.ModelFile(name=file.name, num_bytes=file.num_bytes, sha256=file.sha256)
            for file in folder.files
        ],
        batch_sizes=folder.settings.batch_sizes,
        fixed_dimensions=[
            pb.Dimension(name=name, size=size) for name, size in folder.settings.dimensions.items()
        ],
        # Not the id: generations and copies of a model cost the same.
        profile=folder.settings.profile or folder.name,
    )


def _offer_digest(model: Entry) -> bytes:
    if not model.offer_digest:
        model.offer_digest = wire.offer_digest(_offer(model))
    return model.offer_digest


def _tensors(ready: pb.ModelReady) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    return _specs(ready.inputs), _specs(ready.outputs)


def _row_bytes(specs: Sequence[pb.TensorSpec]) -> int:
    return sum(spec.row_bytes for spec in _specs(specs))


def _text_fault(text: str) -> str:
    """Say why a text cannot be a name; empty when it can."""
    if len(text) <= TEXT_CHARS_MAX and text.isprintable():
        return ""
    return (
        f"is '{printable(text, 80)}', {len(text)} characters,"
        f" expected {TEXT_CHARS_MAX} at most, all printable"
    )


def _specs(specs: Sequence[pb.TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(spec.name, spec.datatype, tuple(spec.row_shape)) for spec in specs)


def _read_at(path: Path, offset: int, num_bytes: int) -> bytes:
    # Opened for each chunk: a stream that is cut between two of them then leaves nothing open.
    with path.open("rb") as opened:
        opened.seek(offset)
        return opened.read(num_bytes)
