"""A front's connection to its controller, which may break and come back: found, attached, kept alive.

`remote_backend` sends and takes the messages on it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from clockwright.client.channel import OPTIONS, Access
from clockwright.errors import ConfigError, ProtocolError
from clockwright.wire import leader_search, peer
from clockwright.wire.bulk import Buffer
from clockwright.wire.data_socket import dial, prepare
from clockwright.wire.frame_headers import HEADER_BYTES_MAX
from clockwright.wire.frame_socket import FrameSocket
from clockwright.wire.frames import PAYLOAD_BYTES_MAX, Frame, greeting
from clockwright.wire.leader_search import LeaderSearch
from clockwright.wire.leadership import Fence, Term, host_of
from clockwright.wire.peer import FrontRegister, Pulse
from controller.front.remote import link_frames as frames
from controller.links.slabs import Slabs

log = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (
    *OPTIONS,
    # A channel per attempt, so that ours is the only back-off.
    ("grpc.use_local_subchannel_pool", 1),
    *leader_search.OPTIONS,
)

# A controller that runs answers sooner.
_ATTACH_LIMIT_S = 5.0
# Between attempts to reach a controller. Requests that wait have little slack, so attempts are frequent.
_BACKOFF_S, _BACKOFF_S_MAX = 0.02, 0.5


class LinkEvents(Protocol):
    """Called as the link to the controller opens, closes and brings messages."""

    def opened(self, data: FrameSocket, silence_limit_ms: int) -> None:
        """A connection is open; requests may be sent once the controller has joined."""

    def joined(self) -> None:
        """The controller is there and knows our clock."""

    def ready(self) -> None:
        """Every model is ready, or known to be unfit."""

    def renewed(self) -> None:
        """All descriptions may have changed."""

    def take(self, message: frames.FromController, frame: Frame, data: FrameSocket) -> None:
        """Take a message other than a heartbeat."""

    def left(self, *, was_joined: bool) -> None:
        """The link to the controller is lost."""

    def make_beat(self, sent_ns: int, min_delta_ns: int | None) -> frames.FrontBeat:
        """Make a heartbeat, with the counts since the last one."""

    def still_looks_at(self) -> Iterable[int]:
        """Drop outputs that are not read any more. Returns the request of each output that still is."""


class ControllerConnection:
    """The connection to the controller at an address, which may be lost and come back."""

    def __init__(
        self,
        controller: str,
        slabs: Slabs,
        listener: LinkEvents,
        *,
        joining: Access | None = None,
        knows_callers: bool = False,
        clock: Callable[[], int],
    ) -> None:
        """Begin without a controller; `run` connects to it.

        Where it is: as for `read_addresses`. `joining` are the credentials that the front sends.
        """
        self._clock = clock
        #: The controller's, once it was there.
        self.default_slo_ns = 0
        self.message_bytes_max = 0
        #: For calls that the controller answers itself; None: not connected.
        self.channel: Any = None
        self._reachable = asyncio.Event()
        #: Set when a controller is there for the first time.
        self.attached = asyncio.Event()
        self._controller = controller
        self._fence = Fence()
        #: The generation of the controller that is dialled, once it has said so.
        self._term: Term | None = None
        self.joining = joining or Access()
        #: Headers by which the controller knows this front: those with which it was dialled last.
        self.shown: Sequence[tuple[str, str]] = ()
        self._knows_callers = knows_callers
        self._slabs = slabs
        self._listener = listener
        self._data: FrameSocket | None = None
        #: Heartbeats on the connection; None: not connected.
        self._pulse: Pulse | None = None
        self._peer_generation = -1
        #: The controller is there and knows our clock.
        self.joined = False
        self._instance = secrets.token_hex(8)

    async def wait_for_channel(self, limit_s: float) -> Any:  # noqa: ANN401  grpc.aio's
        """The channel for calls that the controller answers itself. Returns None if it was not connected in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._reachable.wait()
        return self.channel

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return self._data is not None

    def send(self, message: frames.FromFront) -> None:
        """Send a message with the others of this turn."""
        if self._data is not None:
            self._data.send(frames.encode(message))

    def send_now(self, buffers: Sequence[Buffer]) -> None:
        """Send frames."""
        if self._data is not None:
            self._data.send_now(buffers)

    def _take_frames(self, received: Sequence[Frame]) -> None:
        pulse = self._pulse
        if pulse is None:
            return
        pulse.silent_ticks = 0
        for frame in received:
            if self._data is None:
                return
            message = frames.decode_from_controller(frame[0])
            if isinstance(message, frames.Beat):
                self._take_beat(message, pulse)
            else:
                self._listener.take(message, frame, self._data)

    def _take_beat(self, beat: frames.Beat, pulse: Pulse) -> None:
        pulse.heard(beat.sent_ns, beat.min_delta_ns)
        if not beat.known:
            self.beat()
            return
        if beat.generation != self._peer_generation:
            self._peer_generation = beat.generation
            self._listener.renewed()
        if beat.ready:
            self._listener.ready()
        if not self.joined:
            self.joined = True
            self.attached.set()
            self._listener.joined()

    async def run(self) -> None:
        """Keep a controller attached, for good. Raises ConfigError if it takes no front of this version."""
        backoff_s = _BACKOFF_S
        told = ""
        async with LeaderSearch(
            self._controller, self._open_channel, lambda: self.joining.metadata
        ) as search:
            while True:
                address = await search.find()
                reason, joined = search.problem, False
                if address is not None:
                    reason, joined = await self._serve(search, address)
                if joined:
                    told, backoff_s = "", _BACKOFF_S
                if reason != told:
                    told = reason
                    name = address or self._controller
                    log.warning("controller %s: %s; trying again", name, reason)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)

    def _open_channel(self, address: str) -> Any:  # noqa: ANN401  grpc.aio's
        return self.joining.async_channel(address, options=_CHANNEL_OPTIONS)

    async def _serve(self, search: LeaderSearch, address: str) -> tuple[str, bool]:
        """Attach to a controller, until the connection ends or another leads; as `_attach`."""
        self._term = None
        try:
            # Files that are being renewed are not whole at each moment: the next attempt reads them again.
            self.shown, opened = self.joining.metadata, self._open_channel(address)
        except ConfigError as error:
            return str(error), False
        async with opened as channel:
            attached = asyncio.create_task(self._attach(channel, address))
            followed = asyncio.create_task(search.wait_for_successor(address, lambda: self._term))
            try:
                await asyncio.wait((attached, followed), return_when=asyncio.FIRST_COMPLETED)
                if attached.done():
                    return attached.result()
                successor, term = followed.result()
                self._fence.admits(term)
                return f"controller {successor} leads now", self._term is not None
            finally:
                for task in (attached, followed):
                    task.cancel()
                await asyncio.gather(attached, followed, return_exceptions=True)

    async def _attach(self, channel: Any, address: str) -> tuple[str, bool]:  # noqa: ANN401  grpc.aio's
        """Serve one connection; says why it ended, and whether it was of use."""
        # What comes back from now on is told over the connection that this begins.
        looks = self._listener.still_looks_at()
        register = FrontRegister(
            protocol_version=peer.PROTOCOL_VERSION,
            host=socket.gethostname(),
            pid=os.getpid(),
            knows_callers=self._knows_callers,
            still_looks_at=tuple(looks),
            instance=self._instance,
        )
        try:
            welcome = await peer.join(
                channel,
                peer.FRONT_SERVICE,
                register,
                self._fence,
                limit_s=_ATTACH_LIMIT_S,
                shown=self.shown,
            )
        except ConfigError as error:
            raise ConfigError(f"controller {address} takes no front: {error}") from None
        except ProtocolError as error:
            return str(error), False
        self._term = Term(welcome.lineage, welcome.generation)
        try:
            port, path = welcome.socket_port, welcome.socket_path
            if self._slabs.inputs is None:
                path = ""  # As on another host: nothing is shared.
            sock = await asyncio.to_thread(
                dial,
                host_of(address),
                port,
                path,
                limit_s=_ATTACH_LIMIT_S,
                tls=self.joining.tls_context(),
            )
        except ConfigError as error:
            return str(error), False
        except (OSError, TimeoutError) as error:
            return f"its socket cannot be reached: {error}", False
        sock.setblocking(False)
        with suppress(OSError):
            prepare(sock, silence_limit_ms=welcome.silence_limit_ms)
        self.default_slo_ns = welcome.default_slo_ns
        self.message_bytes_max = welcome.message_bytes_max
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        end = functools.partial(_end, ended)
        data = FrameSocket(sock, self._take_frames, end, peer="controller", takes_files=True)
        data.reader.header_bytes_max = HEADER_BYTES_MAX
        data.reader.payload_bytes_max = PAYLOAD_BYTES_MAX
        self._data, self.channel = data, channel
        pulse = self._pulse = Pulse(
            self._clock,
            interval_ms=welcome.heartbeat_interval_ms,
            silence_limit_ms=welcome.silence_limit_ms,
        )
        self._listener.opened(data, welcome.silence_limit_ms)
        self._reachable.set()
        data.send_now([greeting(welcome.token)])
        arena = self._slabs.inputs
        if arena is not None and data.hands_over:
            message = frames.encode_one(frames.LentMemory(0, arena.num_bytes))
            data.hand_over(message, (arena.fd,))
        beating = asyncio.get_running_loop().create_task(self._beats(pulse, ended))
        try:
            reason = await ended
        finally:
            beating.cancel()
            await asyncio.wait([beating])
            data.close()
            joined = self.joined
            self._detach()
        return reason, joined

    def _detach(self) -> None:
        self._data = self.channel = None
        self._reachable.clear()
        was_joined, self.joined = self.joined, False
        self._pulse = None
        self._peer_generation = -1
        self._listener.left(was_joined=was_joined)

    async def _beats(self, pulse: Pulse, ended: asyncio.Future[str]) -> None:
        while not ended.done():
            self.beat()
            await asyncio.sleep(pulse.interval_s)
            if fault := pulse.tick():
                _end(ended, fault)

    def beat(self) -> None:
        """Send a heartbeat."""
        if self._data is not None and self._pulse is not None:
            beat = self._listener.make_beat(*self._pulse.stamp())
            self._data.send_now(frames.encode(beat))


def _end(ended: asyncio.Future[str], reason: str) -> None:
    if not ended.done():
        ended.set_result(reason)
