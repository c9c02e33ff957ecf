"""The worker's end of its link to the controller.

The worker asks the controller by gRPC for a connection (`clockwright.wire.peer`), on which everything else travels
(`worker.controller_socket`). A thread reads it and hands actions to the lanes; what else the controller says is handled
here, in one asyncio loop. Each device of a process has a link of its own: what ends one concerns no other. Times are this machine's: the controller translates.

When the connection is lost, the worker forgets all actions and connects again. Its models stay as they are, and it
tells the next controller which it holds and which of them are in the weights cache. Before it connects, it lets running
steps end: if the controller was right to give up on an action, the next action would only wait behind the stuck one.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import os
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from clockwright.client.channel import Access
from clockwright.errors import ConfigError, DeviceGoneError, ProtocolError
from clockwright.units import PAGE_BYTES, ActionId, ModelId
from clockwright.wire import leader_search, peer
from clockwright.wire import worker_messages as messages
from clockwright.wire.actions import FromFronts, Infer, Result
from clockwright.wire.bulk import Buffer
from clockwright.wire.frame_headers import Inputs, Withdrawal
from clockwright.wire.frame_socket import SocketListener
from clockwright.wire.leader_search import LeaderSearch
from clockwright.wire.leadership import Fence, Term, host_of
from clockwright.wire.own_certificate import make_certificate
from clockwright.wire.peer import Pulse
from clockwright.wire.worker_messages import (
    CardReport,
    Drain,
    Ended,
    ExpectFront,
    FrontGone,
    Heartbeat,
    Held,
    ModelChunk,
    ModelDrop,
    ModelOffer,
    Register,
)
from worker.action_thread import ActionThread
from worker.config import WorkerConfig
from worker.controller_socket import ControllerSocket, Order
from worker.devices.device import (
    Device,
    GpuHealth,
    M,
    QueueingDevice,
    TimedDevice,
    WatchedDevice,
)
from worker.front_sockets import FrontSockets
from worker.lane_threads import LaneThreads, Outcome
from worker.lane_timers import LaneTimers
from worker.models.file_store import FileStore
from worker.offers import Offers, describe

logger = logging.getLogger(__name__)

_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    # The answer names all models to keep.
    ("grpc.max_receive_message_length", -1),
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
# How long the controller may take to end the connection after our last message.
_PART_LIMIT_S = 2.0
# No action of a GPU takes seconds: a step that does not end in this time never will.
_STEP_LIMIT_S = 10.0
_STEP_LOOK_S = 0.02
# A step that still runs is logged after so many looks.
_STEPS_TOLD = 10

# How long TCP waits for a sign of life of a front's machine. The controller says when a front is gone.
_FRONT_SILENCE_MS = 10_000
_ANY_PORT = 9


def _open_channel(access: Access, address: str) -> Any:  # noqa: ANN401  grpc.aio's
    return access.async_channel(address, options=_OPTIONS)


class _End(enum.Enum):
    """How a link ended."""

    LOST = enum.auto()
    DRAINED = enum.auto()


class ControllerLink(Generic[M]):
    """Keeps a device attached to a controller, over one link after the other."""

    def __init__(
        self, config: WorkerConfig, device: Device[M], files: FileStore, actions: ActionThread
    ) -> None:
        """Serve nothing yet.

        The device belongs to this link; `actions` reads the connections of all devices of this process.
        """
        self._config = config
        self._actions = actions
        self._device = device
        self._files = files
        self._leaving = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._session: _Session[M] | None = None
        self._lanes: LaneThreads[M]
        if isinstance(device, TimedDevice):
            self._lanes = LaneTimers(device, self._on_outcome, actions)
        else:
            self._lanes = LaneThreads(device, self._on_outcome, self._on_lost)
        #: Keeps orders out of controllers that others have followed.
        self._fence = Fence()
        #: Models that are ready since this link or an earlier one, and the digests of their offers.
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

        Raises ConfigError if the controller rejected this worker; DeviceGoneError if the device hangs. Threads of this
        process will never end.
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
                self._config.controller, dial, lambda: access.metadata
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
        """Serve a controller until the link ends, or another leads."""
        session = self._session = _Session(
            self._actions,
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
        """Wait for steps that still run although their results are not wanted any more.

        Whatever a controller would send meanwhile would wait behind them and be lost, time after time. A device that
        computes here ends its run, even one that would never end, or has a time limit. A run that begins just now may
        not see that it is to end, so it is told again. For other devices the limit is a count of looks, not of time: a
        pause of this process is no proof that they hang. Raises DeviceGoneError if a step does not end.
        """
        may_hang = isinstance(self._device, QueueingDevice)
        looks = 0
        while self._lanes.is_running:
            self._device.end_exec()
            if may_hang and looks >= _STEP_LIMIT_S / _STEP_LOOK_S:
                self._hangs = True
                raise DeviceGoneError(f"an action has not ended for {_STEP_LIMIT_S:g} s")
            if looks == _STEPS_TOLD:
                logger.warning(
                    "an action of the previous connection still runs: going on when it has ended"
                )
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
    """Where fronts send inputs."""

    listener: SocketListener
    #: Empty: they speak no TLS there, as this worker does not with its controller.
    certificate_sha256: bytes


def _listen_for_fronts(config: WorkerConfig) -> _ForFronts:
    """Listen for fronts' inputs. If that fails, inputs come through the controller."""
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
    """Where fronts send inputs: as configured, else the address from which the first controller is reached.

    Raises OSError if the controller's address is not known, or no route leads to it.
    """
    if config.payload_host:
        return config.payload_host
    (family, kind, protocol, _, where), *_ = socket.getaddrinfo(
        host_of(config.controllers[0]), _ANY_PORT, type=socket.SOCK_DGRAM
    )
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(where)  # Sends nothing: it selects the route.
        return str(sock.getsockname()[0])


class _Session(Generic[M]):
    """One link, from joining to its end."""

    def __init__(
        self,
        actions: ActionThread,
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
        self._actions = actions
        self._config = config
        #: The controller that is dialled.
        self.address = address
        #: Its generation, once it has said so.
        self.term: Term | None = None
        self._fence = fence
        #: Set when the link is to end, with the reason.
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._device = device
        self._lanes = lanes
        self._held = held
        self._leaving = leaving
        self._loop = asyncio.get_running_loop()
        self._offers: Offers[M] = Offers(device, files, self._send, self._hold)
        #: The last look at the GPU, until a heartbeat has told it.
        self._health: GpuHealth | None = None
        self._pulse: Pulse | None = None
        self.end = _End.LOST
        self.welcomed = False
        #: The connection, once the worker is welcome.
        self.data: ControllerSocket | None = None
        #: Why the worker itself ends the link.
        self._given_up = ""
        #: Why the link ended, in words.
        self.problem = "closed the connection"

    async def run(self) -> None:
        """Serve until the link ends; `end` and `problem` tell how it did.

        Raises ConfigError if the controller rejected this worker.
        """
        access = self._config.access
        try:
            tls = access.tls_context()
            shown, opened = access.metadata, _open_channel(access, self.address)
        except ConfigError as error:
            # Files that are being renewed are not whole at each moment: the next attempt reads them again.
            self.problem = str(error)
            self._fronts.close()
            return
        async with opened as channel:
            tasks = [
                asyncio.create_task(self._serve(channel, shown, tls)),
                asyncio.create_task(self._ask_to_leave()),
                asyncio.create_task(self._offers.run()),
                asyncio.create_task(self._wait_for_end()),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._conclude(task)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._fronts.close()
                if self.data is not None:
                    self.data.close()
                    # The thread of actions may run a step; nothing of this link is submitted to the next.
                    await asyncio.wait([self.data.over], timeout=_PART_LIMIT_S)

    def _conclude(self, task: asyncio.Task[None]) -> None:
        """Note why a task ended; only a rejection goes further up."""
        try:
            task.result()
        except ConfigError:
            raise
        except (ProtocolError, TimeoutError) as error:
            self.problem = str(error)
        except asyncio.CancelledError:
            self.problem = "the link was cancelled"
        except Exception as error:
            # Our own bug. The link starts afresh, and people get to see it.
            logger.exception("the link failed")
            self.problem = f"{type(error).__name__}: {error}"

    def give_way(self, reason: str, successor: Term) -> None:
        """End the link now: another controller leads, and this one's orders do not count any more."""
        self._fence.admits(successor)
        if self.data is not None and self.term is not None:
            self.data.oldest = max(self.term.generation + 1, successor.generation)
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def _wait_for_end(self) -> None:
        self.problem = await self._ended

    def give_up(self, reason: str) -> None:
        """End the link once what was queued is sent: the device is lost."""
        problem = self._given_up = f"the device is lost: {reason}"
        if self.data is None:
            self._end(problem)
            return
        # The controller reads up to the end of the connection, and closes it.
        self.data.finish()
        self._loop.call_later(_PART_LIMIT_S, self._end, problem)

    # --- out ------------------------------------------------------------------------------------

    def tell_outcome(self, result: Result, outputs: Sequence[Buffer]) -> None:
        """Send the outcome of an action; may be called in any thread."""
        if self.data is not None:
            self.data.send(result, *self._fronts.send_outputs(result.action_id, outputs))

    def _refuse(self, result: Result) -> None:
        if self.data is not None:
            self.data.send(result)

    def tell_health(self, health: GpuHealth) -> None:
        """Tell the controller at once what a look at the GPU showed: until then it does not know the clock."""
        self._health = health
        self._beat()

    def _send(self, message: messages.FromWorker) -> None:
        if self.data is not None:
            self.data.send_message(message)

    def _beat(self) -> None:
        if self.data is None or self._pulse is None:
            return
        health, self._health = self._health, None
        card = None
        if health is not None:
            card = CardReport(health.clock_mhz, health.clock_mhz_max, tuple(health.complaints))
        self.data.send_message(Heartbeat(*self._pulse.stamp(), card))

    async def _keep_beating(self, data: ControllerSocket, pulse: Pulse) -> None:
        """Send heartbeats; ends with a TimeoutError when the controller has fallen silent."""
        while True:
            self._beat()
            await asyncio.sleep(pulse.interval_s)
            if data.has_heard():
                pulse.silent_ticks = 0
            if fault := pulse.tick():
                raise TimeoutError(fault)

    async def _ask_to_leave(self) -> None:
        await self._leaving.wait()
        self.end = _End.DRAINED
        if self.welcomed:
            logger.info("asking the controller to be drained")
            self._send(Drain("the worker was told to stop"))
            await asyncio.sleep(self._config.drain_limit_s)
            logger.warning("not drained after %g s: leaving", self._config.drain_limit_s)

    # --- in -------------------------------------------------------------------------------------

    async def _serve(
        self,
        channel: Any,  # noqa: ANN401  grpc.aio's
        shown: Sequence[tuple[str, str]],
        tls: ssl.SSLContext | None,
    ) -> None:
        """Join, connect, and serve until the connection ends."""
        try:
            welcome = await peer.join(
                channel,
                peer.WORKER_SERVICE,
                self._register(),
                self._fence,
                limit_s=_WELCOME_LIMIT_S,
                shown=shown,
            )
        except ConfigError as error:
            raise ConfigError(f"controller {self.address} rejected this worker: {error}") from None
        self.term = Term(welcome.lineage, welcome.generation)
        # Before any action can come.
        for model_id in self._held.keys() - set(welcome.keep):
            self._drop(ModelId(model_id))
        pulse = self._pulse = Pulse(
            time.monotonic_ns,
            interval_ms=welcome.heartbeat_interval_ms,
            silence_limit_ms=welcome.silence_limit_ms,
        )
        data = self.data = ControllerSocket(
            self._actions, host_of(self.address), welcome, tls, self._take, self._hear
        )
        self.welcomed = True
        logger.info("attached to controller %s as %s", self.address, self._config.name)
        beating = asyncio.create_task(self._keep_beating(data, pulse))
        try:
            parts: set[asyncio.Future[Any]] = {beating, data.over}
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if beating.done():
                beating.result()
            # Else the controller has said why.
            if not self._ended.done():
                raise ProtocolError(data.over.result())
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    def _take(
        self,
        order: Order,
        payload: Sequence[Buffer],
        where: memoryview | FromFronts | None,
    ) -> None:
        # Called by the thread of actions.
        if isinstance(order, Withdrawal):
            if not self._fronts.withdraw(ActionId(order.action_id)):
                self._lanes.withdraw(ActionId(order.action_id))
        elif isinstance(order, Inputs):
            self._fronts.hand_on(order, payload)
        elif isinstance(where, FromFronts):
            assert isinstance(order, Infer)
            self._fronts.take(order, payload, where)
        else:
            self._lanes.submit(order, payload, where)

    def _hear(self, message: messages.ToWorker, payload: Buffer, received_ns: int) -> None:
        """Handle a message that is no action; called by the loop."""
        try:
            self._handle(message, payload, received_ns)
        except ProtocolError as error:
            self._end(str(error))
        except Exception as error:
            # Our own bug. The link starts afresh, and people get to see it.
            logger.exception("the link failed")
            self._end(f"{type(error).__name__}: {error}")

    def _handle(self, message: messages.ToWorker, payload: Buffer, received_ns: int) -> None:
        match message:
            case Heartbeat():
                if self._pulse is not None:
                    self._pulse.heard(
                        message.sent_ns, message.min_delta_ns, received_ns=received_ns
                    )
            case ModelOffer():
                self._offers.offer(message)
            case ModelChunk():
                self._offers.chunk(message, payload)
            case ModelDrop():
                model_id = ModelId(message.model_id)
                self._offers.withdraw(model_id)
                self._drop(model_id)
            case ExpectFront():
                self._fronts.expect(message)
            case FrontGone():
                self._fronts.front_gone(message.number)
            case Drain():
                self.end = _End.DRAINED
                self._end("drained")
            case Ended():
                self._end(self._given_up or message.reason)

    def _hold(self, model: M, offer_digest: bytes) -> None:
        self._held[model.model_id] = offer_digest, model
        self._lanes.add_model(model)

    def _drop(self, model_id: ModelId) -> None:
        self._held.pop(model_id, None)
        self._lanes.remove_model(model_id)

    def _register(self) -> Register:
        resident = set(self._lanes.resident())
        return Register(
            protocol_version=peer.PROTOCOL_VERSION,
            worker_id=self._config.name,
            device=self._config.device,
            gpu_kind=self._device.gpu_kind,
            num_pages=self._device.limits.num_pages,
            page_bytes=PAGE_BYTES,
            arena_bytes=self._device.limits.arena_bytes,
            host=socket.gethostname(),
            pid=os.getpid(),
            held=tuple(
                Held(describe(model), digest, model_id in resident)
                for model_id, (digest, model) in self._held.items()
            ),
            payload_host=self._for_fronts.listener.host,
            payload_port=self._for_fronts.listener.port,
            payload_certificate_sha256=self._for_fronts.certificate_sha256,
        )
