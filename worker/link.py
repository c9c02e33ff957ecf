"""The worker's end of the stream to the controller.

One asyncio loop. The stream controls, and is the sign of life; actions and results go by a socket beside it
(`worker.controller_socket`), to which the controller's welcome shows the way. Times on both are this machine's: the
controller translates.

When the stream is lost, so is everything that was asked for: the worker forgets all actions and dials again. Its
models stay as they are, and it tells the next controller which it holds and which of them are in the weights
cache. Before it dials, it lets running steps end: if the controller was right to give up on an action, the next
action would only wait behind the stuck one.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import grpc.aio
from google.protobuf.message import DecodeError

from clockwright import __version__, leader_search, wire
from clockwright.actions import FromFronts, Infer, Result
from clockwright.bulk import SMALL_MESSAGE_BYTES, Buffer, split_bulk
from clockwright.channel import Access
from clockwright.errors import ConfigError, DeviceGoneError, ProtocolError
from clockwright.frame_headers import ExpectFront, FrontGone, Inputs, Withdrawal
from clockwright.frame_socket import SocketListener
from clockwright.leader_search import LeaderSearch
from clockwright.leadership import Fence, Term, host_of
from clockwright.own_certificate import make_certificate
from clockwright.units import PAGE_BYTES, ActionId, ModelId
from clockwright.v1 import worker_pb2 as pb
from worker.config import WorkerConfig
from worker.controller_socket import ControllerSocket, Order
from worker.devices.device import Device, GpuHealth, M, QueueingDevice, WatchedDevice
from worker.front_sockets import FrontSockets
from worker.lane_threads import LaneThreads, Outcome
from worker.models.file_store import FileStore
from worker.offers import Offers, encode_ready

logger = logging.getLogger(__name__)

# grpc has no types of its own, and the published stubs lag behind grpc.aio.
aio: Any = grpc.aio
_Call = Any

MAX_MESSAGE_BYTES = 512 * 1024 * 1024
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # No keepalive: our heartbeats show more, that the other side's event loop turns.
    # A channel per attempt, so that ours is the only back-off.
    ("grpc.use_local_subchannel_pool", 1),
    *leader_search.OPTIONS,
]
# Between attempts to reach a controller: a part of the time for which there has been none. So one that starts
# again finds its workers at once, and one that is gone for long is left in peace.
_PAUSE_PART, _PAUSE_S, _PAUSE_S_MAX = 0.1, 0.05, 2.0
# Different reasons for which a controller is not there that are logged until it is.
_PROBLEMS_TOLD = 4
# The controller answers a Register at once; a peer that does not is no controller.
_WELCOME_LIMIT_S = 10.0
# How long the controller may take to end the stream after our last message.
_PART_LIMIT_S = 2.0
# No action of a GPU takes seconds: a step that does not end in this time never will.
_STEP_LIMIT_S = 10.0
_STEP_LOOK_S = 0.02
# What still runs is told of after so many looks.
_STEPS_TOLD = 10

# How long TCP waits for a sign of life of a front's machine. The controller says when a front is gone.
_FRONT_SILENCE_MS = 10_000
_ANY_PORT = 9

# Source: Clockwork's minimum filter over both directions (network clock synchronisation).
_CLOCK_SAMPLES = 64


def _open_channel(access: Access, address: str) -> Any:  # noqa: ANN401  grpc.aio's
    return access.async_channel(address, options=_OPTIONS)


class _End(enum.Enum):
    """How a stream ended."""

    LOST = enum.auto()
    DRAINED = enum.auto()


class ControllerLink(Generic[M]):
    """Keeps a device attached to a controller, over one stream after the other."""

    def __init__(self, config: WorkerConfig, device: Device[M], files: FileStore) -> None:
        self._config = config
        self._device = device
        self._files = files
        self._leaving = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._session: _Session[M] | None = None
        self._lanes: LaneThreads[M] = LaneThreads(device, self._on_outcome, self._on_lost)
        #: Keeps orders out of controllers that others have followed.
        self._fence = Fence()
        #: Models that are ready since whichever stream, and the digests of their offers.
        self._held: dict[ModelId, tuple[bytes, M]] = {}
        # Why there is no controller, in the words that were logged.
        self._told: set[str] = set()
        self._fronts = _listen_for_fronts(config)
        self._health: GpuHealth | None = None
        #: A step never ends, so its lane's thread can never be joined.
        self._hangs = False

    def leave(self) -> None:
        """Ask the controller for permission to go, then go."""
        self._leaving.set()

    async def run(self) -> None:
        """Serve until told to leave, by the controller or by `leave`.

        Raises:
            ConfigError: the controller rejected this worker.
            DeviceGoneError: the device hangs. Threads of this process will never end.
        """
        self._lanes.start()
        watching: asyncio.Task[None] | None = None
        if isinstance(self._device, WatchedDevice):
            watching = asyncio.create_task(self._device.watch(self._on_health))
        lost_s = time.monotonic()
        try:
            access = self._config.access
            dial = functools.partial(_open_channel, access)
            async with LeaderSearch(
                self._config.controllers, dial, lambda: access.metadata
            ) as search:
                while not self._leaving.is_set():
                    address = await search.find()
                    problem = search.problem
                    if address is not None:
                        session = await self._serve(search, address)
                        if session.end is _End.DRAINED:
                            logger.info("drained: leaving")
                            return
                        if session.welcomed:
                            lost_s = time.monotonic()
                            self._told.clear()
                        problem = session.problem
                    # gRPC has no words of its own for a controller that ends the stream while the worker still
                    # writes: then the reason comes with another attempt.
                    if problem not in self._told and len(self._told) < _PROBLEMS_TOLD:
                        self._told.add(problem)
                        name = address or self._config.controller
                        logger.warning("controller %s: %s; trying again", name, problem)
                    pause_s = _PAUSE_PART * (time.monotonic() - lost_s)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(max(pause_s, _PAUSE_S), _PAUSE_S_MAX)):
                            await self._leaving.wait()
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait([watching])
            self._fronts.listener.close()
            if not self._hangs:
                await asyncio.to_thread(self._lanes.stop)

    async def _serve(self, search: LeaderSearch, address: str) -> _Session[M]:
        """Serve a controller until its stream ends, or another leads."""
        session = self._session = _Session(
            self._config,
            address,
            self._device,
            self._files,
            self._lanes,
            self._held,
            self._fence,
            self._fronts,
            self._leaving,
        )
        if self._health is not None:
            session.tell_health(self._health)
        watching = asyncio.create_task(self._watch(search, session))
        try:
            await session.run()
        finally:
            self._session = None
            watching.cancel()
            await asyncio.wait([watching])
            if not self._lanes.drop_actions():
                self._held.clear()
        await self._let_steps_end()
        return session

    async def _watch(self, search: LeaderSearch, session: _Session[M]) -> None:
        """End a session when another controller leads, whatever this one does or says."""
        successor, term = await search.wait_for_successor(session.address, lambda: session.term)
        session.give_way(f"controller {successor} leads now", term)

    async def _let_steps_end(self) -> None:
        """Wait for steps that still run when nobody waits for their results any more.

        Whatever a controller would send meanwhile would wait behind them and be lost, time after time. A device that
        computes here does so however slowly, or has a time limit itself, and is waited for until its worker leaves.
        For others the limit is a count of looks, not of time: a pause of this process is no proof that they hang.

        Raises:
            DeviceGoneError: a step does not end.
        """
        may_hang = isinstance(self._device, QueueingDevice)
        looks = 0
        while self._lanes.is_running and (may_hang or not self._leaving.is_set()):
            if may_hang and looks >= _STEP_LIMIT_S / _STEP_LOOK_S:
                self._hangs = True
                raise DeviceGoneError(f"an action has not ended for {_STEP_LIMIT_S:g} s")
            if looks == _STEPS_TOLD:
                logger.warning("an action of before still runs: joining again when it has ended")
            looks += 1
            await asyncio.sleep(_STEP_LOOK_S)

    def _on_health(self, health: GpuHealth) -> None:
        self._health = health
        if self._session is not None:
            self._session.tell_health(health)

    def _on_outcome(self, outcome: Outcome) -> None:
        # Called from any thread, with the lanes' lock held: none comes after `drop_actions` of what was before.
        session = self._session
        if session is not None:
            session.tell_outcome(*outcome)

    def _on_lost(self, reason: str) -> None:
        # The results before it are with the socket.
        self._loop.call_soon_threadsafe(self._give_up, reason)

    def _give_up(self, reason: str) -> None:
        if self._session is not None:
            self._session.give_up(reason)


@dataclass(frozen=True, slots=True)
class _ForFronts:
    """Where fronts bring inputs."""

    listener: SocketListener
    #: Empty: they speak no TLS there, as this worker does not with its controller.
    certificate_sha256: bytes


def _listen_for_fronts(config: WorkerConfig) -> _ForFronts:
    """Listen where fronts bring inputs; where that cannot be, they go by the controller."""
    listener, certificate_sha256 = SocketListener(silence_limit_ms=_FRONT_SILENCE_MS), b""
    if config.access.speaks_tls:
        listener.tls, certificate_sha256 = make_certificate()
    try:
        listener.listen(_payload_host(config), config.payload_port)
    except OSError as error:
        logger.warning(
            "fronts send inputs by the controller: cannot listen on %s, port %d: %s",
            config.payload_host or "the address that the controller sees",
            config.payload_port,
            error.strerror or error,
        )
    return _ForFronts(listener, certificate_sha256)


def _payload_host(config: WorkerConfig) -> str:
    """Where fronts bring inputs; unless somebody says, the address by which the first controller is reached.

    Raises:
        OSError: the controller's address is not known, or there is no way to it.
    """
    if config.payload_host:
        return config.payload_host
    (family, kind, protocol, _, where), *_ = socket.getaddrinfo(
        host_of(config.controllers[0]), _ANY_PORT, type=socket.SOCK_DGRAM
    )
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(where)  # Sends nothing: it finds the way.
        return str(sock.getsockname()[0])


class _Session(Generic[M]):
    """One stream, from dialling to its end."""

    def __init__(
        self,
        config: WorkerConfig,
        address: str,
        device: Device[M],
        files: FileStore,
        lanes: LaneThreads[M],
        held: dict[ModelId, tuple[bytes, M]],
        fence: Fence,
        fronts: _ForFronts,
        leaving: asyncio.Event,
    ) -> None:
        self._for_fronts = fronts
        self._fronts = FrontSockets(fronts.listener, lanes.submit, self._refuse)
        self._config = config
        #: The controller that is dialled.
        self.address = address
        #: Its generation, once it has said so.
        self.term: Term | None = None
        self._fence = fence
        #: Set when another controller leads.
        self._given_way: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._device = device
        self._lanes = lanes
        self._held = held
        self._leaving = leaving
        self._loop = asyncio.get_running_loop()
        self._offers: Offers[M] = Offers(device, files, self._send, self._hold)
        self._outgoing: deque[bytes] = deque()
        # A heartbeat is stamped when it is written: time in our queue is no delay of the network.
        self._heartbeat_due = False
        #: The last look at the GPU, until a heartbeat has told it.
        self._health: GpuHealth | None = None
        self._something = asyncio.Event()
        self._deltas: deque[int] = deque(maxlen=_CLOCK_SAMPLES)
        self._heard_ns = 0
        #: Heartbeat intervals since the controller's last message.
        self._silent_ticks = 0
        self.end = _End.LOST
        self._unknown_told = False
        self._given_up = False
        self.welcomed = False
        #: Carries actions and results once the worker is welcome.
        self.data: ControllerSocket | None = None
        #: Why the stream ended, in words.
        self.problem = "closed the stream"

    async def run(self) -> None:
        """Serve until the stream ends; `end` and `problem` tell how it did.

        Raises:
            ConfigError: the controller rejected this worker.
        """
        self._send(pb.FromWorker(register=self._register()))
        access = self._config.access
        try:
            shown, opened = access.metadata, _open_channel(access, self.address)
        except ConfigError as error:
            # Files that are being renewed are not whole at each moment: the next attempt reads them again.
            self.problem = str(error)
            self._fronts.close()
            return
        async with opened as channel:
            call = channel.stream_stream(wire.ATTACH_METHOD)(metadata=shown)
            tasks = [
                asyncio.create_task(self._write(call)),
                asyncio.create_task(self._read(call)),
                asyncio.create_task(self._ask_to_leave()),
                asyncio.create_task(self._offers.run()),
                asyncio.create_task(self._wait_for_successor()),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._conclude(task)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                call.cancel()
                self._fronts.close()
                if self.data is not None:
                    self.data.close()
                    # Its thread may run a step; nothing of this stream is submitted to the next.
                    await asyncio.wait([self.data.over], timeout=_PART_LIMIT_S)

    def _conclude(self, task: asyncio.Task[None]) -> None:
        """Note why a task ended; only a rejection goes further up."""
        try:
            task.result()
        except ConfigError:
            raise
        except aio.AioRpcError as error:
            self.problem = f"{error.code().name}: {error.details()}"
        except (ProtocolError, TimeoutError) as error:
            self.problem = str(error)
        except asyncio.CancelledError:
            self.problem = "the stream was cancelled"
        except Exception as error:
            # Our own bug. The stream starts afresh, and people get to see it.
            logger.exception("the stream failed")
            self.problem = f"{type(error).__name__}: {error}"

    def give_way(self, reason: str, successor: Term) -> None:
        """End the stream now: another controller leads, and this one's orders are of no account any more."""
        self._fence.admits(successor)
        if self.data is not None and self.term is not None:
            self.data.oldest = max(self.term.generation + 1, successor.generation)
        if not self._given_way.done():
            self._given_way.set_result(reason)

    async def _wait_for_successor(self) -> None:
        raise ProtocolError(await self._given_way)

    def give_up(self, reason: str) -> None:
        """End the stream once what was queued is sent: the device is lost."""
        self.problem = f"the device is lost: {reason}"
        self._given_up = True
        if self.data is not None:
            self.data.finish()
        self._something.set()

    # --- out ------------------------------------------------------------------------------------

    def tell_outcome(self, result: Result, outputs: Sequence[Buffer]) -> None:
        """Tell what became of an action; from any thread."""
        if self.data is not None:
            self.data.send(result, *self._fronts.send_outputs(result.action_id, outputs))

    def _refuse(self, result: Result) -> None:
        if self.data is not None:
            self.data.send(result)

    def tell_health(self, health: GpuHealth) -> None:
        """Tell the controller at once what a look at the GPU showed: until then it does not know the clock."""
        self._health = health
        if self.welcomed:  # nothing goes before the registration
            self._heartbeat_due = True
            self._something.set()

    def _send(self, message: pb.FromWorker) -> None:
        self._outgoing.append(message.SerializeToString())
        self._something.set()

    async def _write(self, call: _Call) -> None:
        # gRPC raises these when the stream ends while a message of ours is being written.
        with contextlib.suppress(asyncio.InvalidStateError, aio.InternalError):
            await self._write_until_given_up(call)
        # `_read` learns how the controller ends the stream, or how it ended.
        await asyncio.sleep(_PART_LIMIT_S)

    async def _write_until_given_up(self, call: _Call) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            while self._outgoing or self._heartbeat_due:
                if self._heartbeat_due:
                    self._heartbeat_due = False
                    await call.write(self._heartbeat())
                else:
                    await call.write(wire.take_together(self._outgoing))
            if self._given_up:
                # The controller reads up to the end of the socket and then ends the stream.
                if self.data is None:
                    await call.done_writing()
                return

    def _heartbeat(self) -> bytes:
        heartbeat = pb.Heartbeat(min_delta_ns=min(self._deltas) if self._deltas else None)
        if (health := self._health) is not None:
            self._health = None
            heartbeat.card.clock_mhz = health.clock_mhz
            heartbeat.card.clock_mhz_max = health.clock_mhz_max
            heartbeat.card.complaints.extend(health.complaints)
        heartbeat.sent_ns = time.monotonic_ns()
        return pb.FromWorker(heartbeat=heartbeat).SerializeToString()

    async def _beat(self, interval_ms: int, silence_limit_ms: int) -> None:
        """Send heartbeats; ends with a TimeoutError when the controller has fallen silent.

        Silence is counted in ticks of this loop, not in time: after a pause of this process, the
        controller's messages lie unread in our buffers, and the controller is not to blame.
        """
        while True:
            self._heartbeat_due = True
            self._something.set()
            await asyncio.sleep(interval_ms / 1e3)
            self._silent_ticks += 1
            if self._silent_ticks * interval_ms > silence_limit_ms:
                raise TimeoutError(f"silent for {self._silent_ticks * interval_ms} ms")

    async def _ask_to_leave(self) -> None:
        await self._leaving.wait()
        self.end = _End.DRAINED
        if self.welcomed:
            logger.info("asking the controller to be drained")
            self._send(pb.FromWorker(drain=pb.Drain(reason="the worker was told to stop")))
            await asyncio.sleep(self._config.drain_limit_s)
            logger.warning("not drained after %g s: leaving", self._config.drain_limit_s)

    # --- in -------------------------------------------------------------------------------------

    async def _read(self, call: _Call) -> None:
        """Handle messages until the stream ends."""
        async with asyncio.timeout(_WELCOME_LIMIT_S):
            welcome = await self._read_welcome(call)
        term = Term(welcome.lineage, welcome.generation)
        if not self._fence.admits(term):
            raise ProtocolError(
                f"it leads in generation {term.generation}, and "
                f"another has followed it in {self._fence.newest.generation}"
            )
        self.term = term
        # Before any action can come.
        for model_id in self._held.keys() - set(welcome.keep):
            self._drop(ModelId(model_id))
        try:
            tls = self._config.access.tls_context()
        except ConfigError as error:
            # As when it dials.
            raise ProtocolError(str(error)) from None
        self.data = ControllerSocket(host_of(self.address), welcome, tls, self._take)
        self.welcomed = True
        logger.info("attached to controller %s as %s", self.address, self._config.name)
        beat = asyncio.create_task(
            self._beat(welcome.heartbeat_interval_ms, welcome.silence_limit_ms)
        )
        parts = {beat, asyncio.create_task(self._read_on(call)), asyncio.create_task(self._last())}
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in parts:
                task.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _last(self) -> None:
        """End when the socket for actions has ended.

        Raises:
            ProtocolError: always; says why.
        """
        assert self.data is not None
        reason = await self.data.over
        # The stream says more about it, if it ends too.
        await asyncio.sleep(_PART_LIMIT_S)
        raise ProtocolError(reason)

    def _take(
        self,
        order: Order,
        payload: Sequence[Buffer],
        where: memoryview | FromFronts | None,
    ) -> None:
        # Called by the data link's thread.
        if isinstance(order, Withdrawal):
            if not self._fronts.withdraw(ActionId(order.action_id)):
                self._lanes.withdraw(ActionId(order.action_id))
        elif isinstance(order, Inputs):
            self._fronts.hand_on(order, payload)
        elif isinstance(order, ExpectFront):
            self._loop.call_soon_threadsafe(self._fronts.expect, order)
        elif isinstance(order, FrontGone):
            self._loop.call_soon_threadsafe(self._fronts.front_gone, order.number)
        elif isinstance(where, FromFronts):
            assert isinstance(order, Infer)
            self._fronts.take(order, payload, where)
        else:
            self._lanes.submit(order, payload, where)

    async def _read_welcome(self, call: _Call) -> pb.Welcome:
        data = await call.read()
        if data is aio.EOF:
            raise ProtocolError("closed the stream before a welcome")
        message, _ = _decode(data)
        kind = message.WhichOneof("kind")
        if kind == "rejected":
            raise ConfigError(
                f"controller {self.address} rejected this worker: {message.rejected.reason}"
            )
        if kind != "welcome":
            raise ProtocolError(f"sent {kind!r} first, expected 'welcome'")
        welcome = message.welcome
        if not 0 < welcome.heartbeat_interval_ms < welcome.silence_limit_ms:
            raise ProtocolError(
                f"heartbeat interval {welcome.heartbeat_interval_ms} ms, expected more than 0 and "
                f"less than the silence limit, {welcome.silence_limit_ms} ms"
            )
        return welcome

    async def _read_on(self, call: _Call) -> None:
        while True:
            data = await call.read()
            if data is aio.EOF:
                return
            self._heard_ns = time.monotonic_ns()
            self._silent_ticks = 0
            for message, payload in _decode_all(data):
                if message.WhichOneof("kind") == "drain":
                    self.end = _End.DRAINED
                    return
                self._handle(message, payload)

    def _handle(self, message: pb.ToWorker, payload: Sequence[memoryview | bytes]) -> None:
        match message.WhichOneof("kind"):
            case "heartbeat":
                self._deltas.append(self._heard_ns - message.heartbeat.sent_ns)
            case "model_offer":
                self._offers.offer(message.model_offer)
            case "model_chunk":
                self._offers.chunk(message.model_chunk, payload)
            case "model_drop":
                model_id = ModelId(message.model_drop.model_id)
                self._offers.withdraw(model_id)
                self._drop(model_id)
            case "welcome" | "rejected" as kind:
                raise ProtocolError(f"sent a second {kind!r}")
            case _:
                if not self._unknown_told:
                    self._unknown_told = True
                    logger.warning(
                        "controller %s sent a message of an unknown kind: ignored",
                        self.address,
                    )

    def _hold(self, model: M, offer_digest: bytes) -> None:
        self._held[model.model_id] = offer_digest, model
        self._lanes.add_model(model)

    def _drop(self, model_id: ModelId) -> None:
        self._held.pop(model_id, None)
        self._lanes.remove_model(model_id)

    def _register(self) -> pb.Register:
        resident = set(self._lanes.resident())
        return pb.Register(
            protocol_version=wire.PROTOCOL_VERSION,
            worker_id=self._config.name,
            device=self._config.device,
            gpu_kind=self._device.gpu_kind,
            num_pages=self._device.limits.num_pages,
            page_bytes=PAGE_BYTES,
            arena_bytes=self._device.limits.arena_bytes,
            host=socket.gethostname(),
            pid=os.getpid(),
            software_version=__version__,
            held=[
                pb.Held(
                    ready=encode_ready(model),
                    offer_digest=digest,
                    resident=model_id in resident,
                )
                for model_id, (digest, model) in self._held.items()
            ],
            payload_host=self._for_fronts.listener.host,
            payload_port=self._for_fronts.listener.port,
            payload_certificate_sha256=self._for_fronts.certificate_sha256,
        )


def _decode_all(data: bytes) -> Iterator[tuple[pb.ToWorker, Sequence[memoryview | bytes]]]:
    """Decode a message and the messages that travelled inside it."""
    message, payload = _decode(data)
    yield message, payload
    for further in message.next:
        yield _decode(further)


def _decode(data: bytes) -> tuple[pb.ToWorker, Sequence[memoryview | bytes]]:
    payload: Sequence[memoryview | bytes] | None = None
    if len(data) > SMALL_MESSAGE_BYTES:
        data, payload = split_bulk(data, wire.PAYLOAD_FIELD, entries_max=None)
    try:
        message = pb.ToWorker.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"sent {len(data)} bytes that are no message: {error}") from None
    return message, message.payload if payload is None else payload
