"""The controller's end of the links to fronts that are processes of their own.

A front asks by gRPC for a connection (`clockwright.wire.peer`). All else travels on that connection (`link_frames`).
Only this module and `front_asks` translate times between the controller's clock and a front's. No request arrives in
the future.

The controller trusts a front to name its clients, and in nothing else. A link ends when the front breaks the protocol,
is silent, leaves too many bytes unread, or when its credentials expire. The front's requests are then withdrawn from
the scheduler, and no other front notices.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Sequence

from clockwright.errors import (
    LinkEndedError,
    NoRoomError,
    ProtocolError,
)
from clockwright.foreign import printable
from clockwright.wire.bulk import Buffer
from clockwright.wire.frame_headers import HEADER_BYTES_MAX, TOKEN_BYTES
from clockwright.wire.frame_socket import FrameSocket
from clockwright.wire.frames import Frame
from clockwright.wire.leadership import Term, address_of
from clockwright.wire.peer import FrontRegister, Pulse, Welcome
from controller.access.caller import Caller
from controller.front.admission.entrance import Entrance
from controller.front.admission.limits import AdmissionLimits
from controller.front.remote import link_frames as frames
from controller.front.remote.backend import LocalBackend
from controller.front.remote.descriptions import Descriptions
from controller.front.remote.front_asks import FrontAsks, Shared
from controller.front.remote.front_memory import FrontMemory, SharedMemories, process_of
from controller.links.joining import Expected, HeartbeatConfig, Messages, answer, check_version
from controller.links.slabs import Arena
from controller.links.worker_link import WorkerLink, WorkerLinks
from controller.models.catalogue import Catalogue

log = logging.getLogger(__name__)

#: Fronts at once; each has memory of its own that workers map.
FRONTS_MAX = 256
# A front that leaves so many bytes of answers unread counts as lost.
_UNREAD_BYTES_MAX = 256 << 20
# At most this many bytes of small tensors may come in one message in addition to its largest request.
_BESIDE_BYTES = 1 << 20


class FrontLink:
    """One front's connection, and the heartbeats on it."""

    def __init__(
        self,
        links: FrontLinks,
        sock: socket.socket,
        address: str,
        name: str,
        caller: Caller,
        instance: str,
        lent: dict[int, list[Buffer]],
    ) -> None:
        """Begin to serve a front that has shown its token, with its caller and the outputs that it still reads."""
        self.name = name
        #: The same whenever it attaches.
        self.instance = instance
        self._caller = caller
        #: Its number for workers.
        self.number = links.new_front()
        #: Whether it shares memory with the workers of this host.
        self.is_local = sock.family == socket.AF_UNIX
        #: Where it comes from, HOST:PORT; empty: this host.
        self.address = address
        self.joined_ns = links.clock()
        self._links = links
        self._pulse = Pulse(
            links.clock,
            interval_ms=links.heartbeats.interval_ms,
            silence_limit_ms=links.heartbeats.silence_limit_ms,
        )
        # Workers of other hosts that it was told of.
        self._workers: dict[int, WorkerLink] = {}
        self.memory = FrontMemory(links.memories, name, instance, process_of(sock), lent)
        self._is_over = False
        self._data = FrameSocket(
            sock,
            self._take,
            self.lost,
            peer="front",
            unsent_bytes_max=_UNREAD_BYTES_MAX,
            takes_files=True,
        )
        self._data.reader.header_bytes_max = HEADER_BYTES_MAX
        self._data.reader.payload_bytes_max = links.message_bytes_max + _BESIDE_BYTES
        self.asks = FrontAsks(
            self.number,
            self._data,
            self.memory,
            self._workers,
            links.shared,
            is_local=self.is_local,
        )

    @property
    def workers(self) -> Sequence[WorkerLink]:
        """Workers with which it shares no memory."""
        return list(self._workers.values())

    @property
    def num_bytes(self) -> int:
        """Bytes that came from the front, and went there."""
        return self._data.num_bytes

    def meet(self, worker: WorkerLink) -> None:
        """Let the front and a worker that share no memory reach each other."""
        if self.is_local and worker.actions.is_local:
            return
        token = secrets.token_bytes(TOKEN_BYTES)
        self._workers[worker.number] = worker
        if worker.expect(self.number, token):
            said = worker.register
            there = frames.WorkerThere(
                worker.number,
                said.payload_host,
                said.payload_port,
                token,
                said.payload_certificate_sha256,
            )
            self._data.send(frames.encode(there))

    def part(self, worker: WorkerLink) -> None:
        """A worker is gone."""
        if self._workers.pop(worker.number, None) is not None:
            self._data.send(frames.encode(frames.WorkerGone(worker.number)))

    def offer(self, number: int, outputs: Arena) -> None:
        """Let the front map a worker's memory for outputs."""
        self.memory.offer(number, outputs, self._data)

    def forget(self, number: int) -> None:
        """A worker is gone."""
        self.memory.forget(number, self._data)

    def beat(self) -> None:
        """Send a heartbeat."""
        self.asks.tell_freed()
        links = self._links
        beat = frames.Beat(
            *self._pulse.stamp(),
            self._pulse.clock.offset_ns is not None,
            links.catalogue.generation,
            links.is_ready,
        )
        self._data.send_now(frames.encode(beat))

    def tick(self) -> None:
        """Called at each beat: send a heartbeat, and end the link of a silent front."""
        if self._caller.over:
            self.lost("its credentials expired or changed")
            return
        self._data.tick()
        fault = self._pulse.tick(self._data.stalled_ticks, stalled="it takes no more answers")
        if fault:
            self.lost(fault)
        else:
            self.beat()

    def lost(self, reason: str) -> None:
        """End the link, and withdraw the front's requests."""
        if self._is_over:
            return
        self._is_over = True
        self._data.close()
        for worker in self._workers.values():
            worker.front_gone(self.number)
        self._workers.clear()
        self._links.left(self, reason)
        self.memory.lost()
        self.asks.lost()

    def _take(self, received: Sequence[Frame]) -> None:
        self._pulse.silent_ticks = 0
        for frame in received:
            if self._is_over:
                return
            message = frames.decode_from_front(frame[0])
            if isinstance(message, frames.Asks):
                self.asks.take(message.asks, frame)
            elif isinstance(message, frames.Withdrawn):
                self.asks.withdraw(message.ask_ids)
            elif isinstance(message, frames.Describe):
                described = self._links.shared.descriptions.describe(message)
                self._data.send(frames.encode(described))
            elif isinstance(message, frames.FrontBeat):
                self._take_beat(message)
            elif isinstance(message, frames.Returned):
                self.memory.returned(message.ask_ids)
            elif isinstance(message, frames.LentMemory):
                self.memory.take(message, self._data)
            elif isinstance(message, frames.HandOn):
                self._hand_on(message, frame)
            else:
                self.memory.mapped(message.number)

    def _hand_on(self, message: frames.HandOn, frame: Frame) -> None:
        worker = self._workers.get(message.worker)
        if worker is None:
            return  # It is gone.
        tensors = frames.cut_hand_on(message, frame)
        worker.actions.hand_on(self.number, message.action_id, message.index, tensors)

    def _take_beat(self, beat: frames.FrontBeat) -> None:
        clock = self._pulse.clock
        was_known = clock.offset_ns is not None
        self._pulse.heard(beat.sent_ns, beat.min_delta_ns)
        offset_ns, round_trip_ns = clock.offset_ns, clock.round_trip_ns
        # Processes of one host share a clock, unless a time namespace shifts it.
        if self.is_local and offset_ns is not None and abs(offset_ns) <= round_trip_ns:
            offset_ns = 0
        self.asks.offset_ns, self.asks.round_trip_ns = offset_ns, round_trip_ns
        backend = self._links.shared.backend
        for refusal, number in beat.refused.items():
            backend.refused_at_door(refusal, number)
        for denial, number in beat.denied.items():
            backend.denied(denial, number)
        backend.bad_request(beat.bad_requests)
        for tenant, number in beat.refused_early.items():
            backend.refused_early(tenant, number)
        for told in beat.early:
            backend.keep_early(told, offset_ns or 0)
        if not was_known:
            self.beat()


class FrontLinks:
    """All fronts of a controller that are processes of their own."""

    def __init__(
        self,
        backend: LocalBackend,
        catalogue: Catalogue,
        workers: WorkerLinks,
        heartbeats: HeartbeatConfig | None = None,
        *,
        door: AdmissionLimits,
        entrance: Entrance,
        message_bytes_max: int,
        knows_callers: bool = False,
        term: Term = Term(),  # noqa: B008  it is frozen
    ) -> None:
        """Take fronts. They and the workers map each other's memory, and connect to the same listener.

        `door` bounds the open requests of all fronts together, `entrance` admits all requests of this event loop; with
        `knows_callers` clients need credentials there, too.
        """
        self._knows_callers = knows_callers
        self.clock = backend.clock
        self.catalogue = catalogue
        self.heartbeats = heartbeats or HeartbeatConfig()
        self.shared = Shared(backend, Descriptions(backend, catalogue), door, entrance)
        self.memories = SharedMemories(workers)
        self.message_bytes_max = message_bytes_max
        self._workers = workers
        workers.outputs_shared = self._worker_shares
        workers.outputs_unshared = self._worker_is_gone
        workers.worker_came = self._worker_came
        workers.worker_gone = self._worker_gone
        self._last_front = 0
        self._links: dict[FrontLink, None] = {}
        self._expected = Expected("front", workers.listener, self.heartbeats, term)
        self._is_closed = False
        #: Whether every model was ready, or known to be unfit, at the last beat: it takes a look at each.
        self.is_ready = catalogue.ready
        self._timer: asyncio.TimerHandle | None = None
        self._is_renewed = False
        catalogue.watch(self._renewed)

    @property
    def num_fronts(self) -> int:
        """Fronts that are connected."""
        return len(self._links)

    @property
    def links(self) -> Sequence[FrontLink]:
        """Links of the fronts that are connected, in the order in which they came."""
        return list(self._links)

    @property
    def num_bytes(self) -> int:
        """Bytes that came from these fronts, and went there."""
        return sum(link.num_bytes for link in self._links)

    def close(self) -> None:
        """Close all links, and take no front any more: fronts keep their open requests for the next controller."""
        self._is_closed = True
        self._expected.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for link in list(self._links):
            link.lost("the controller is shutting down")
        self.memories.close()

    # --- for the links ------------------------------------------------------------------------
    def left(self, link: FrontLink, reason: str) -> None:
        """A front's link is over."""
        self._links.pop(link, None)
        log.info("front %s left: %s", link.name, reason)

    def new_front(self) -> int:
        """Make a number for a front that no other front has had."""
        self._last_front += 1
        return self._last_front

    def _still_lent(self, instance: str, looks: Counter[int]) -> dict[int, list[Buffer]]:
        """Free outputs that a front got over earlier connections, except those that it says it still reads."""
        for link in list(self._links):
            if link.instance == instance:
                link.lost("replaced by its successor")
        views = self.memories.take_kept(instance)
        return {
            ask_id: views[ask_id][:number] for ask_id, number in looks.items() if ask_id in views
        }

    def _worker_came(self, worker: WorkerLink) -> None:
        for link in list(self._links):
            link.meet(worker)

    def _worker_gone(self, worker: WorkerLink) -> None:
        for link in list(self._links):
            link.part(worker)

    def _worker_shares(self, outputs: Arena) -> None:
        number = self.memories.outputs[outputs] = self.memories.new_number()
        for link in list(self._links):
            link.offer(number, outputs)

    def _worker_is_gone(self, outputs: Arena) -> None:
        number = self.memories.outputs.pop(outputs, 0)
        for link in list(self._links):
            link.forget(number)

    # --- coming and going ---------------------------------------------------------------------

    async def attach(self, stream: Messages, caller: Caller) -> None:
        """Answer a front that asks for a connection."""
        await answer(stream, FrontRegister, lambda request: self._welcome(request, caller))

    def _welcome(self, request: FrontRegister, caller: Caller) -> Welcome:
        check_version(request.protocol_version, "front")
        if self._is_closed:
            raise LinkEndedError("the controller is shutting down")
        if not request.instance:
            raise ProtocolError("instance: found none, expected a name that no other front has")
        if self._knows_callers and not request.knows_callers:
            raise ProtocolError(
                "the front admits all callers, and the controller does not: expected --keys (or"
                " --jwt-issuer) there too"
            )
        if len(self._links) >= FRONTS_MAX:
            raise NoRoomError(f"found {len(self._links)} fronts, expected {FRONTS_MAX} at most")
        name = f"{printable(request.host, 80)}-{request.pid}"
        welcome = self._expected.expect(
            request.instance, lambda sock: self._connected(sock, name, caller, request)
        )
        welcome.default_slo_ns = self.shared.backend.default_slo_ns
        welcome.message_bytes_max = self.message_bytes_max
        return welcome

    def _connected(
        self, sock: socket.socket, name: str, caller: Caller, request: FrontRegister
    ) -> None:
        try:
            address = "" if sock.family == socket.AF_UNIX else address_of(*sock.getpeername()[:2])
        except OSError as error:
            log.info("front %s broke its connection as it joined: %s", name, error.strerror)
            sock.close()
            return
        self.is_ready = self.catalogue.ready
        lent = self._still_lent(request.instance, Counter(request.still_looks_at))
        link = FrontLink(self, sock, address, name, caller, request.instance, lent)
        self._links[link] = None
        for worker in self._workers.links:
            if worker.joined:
                link.meet(worker)
        log.info("front %s joined", name)
        if self._timer is None:
            self._tick_later()

    def _tick_later(self) -> None:
        interval_s = self.heartbeats.interval_ms / 1000
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._tick)

    def _tick(self) -> None:
        self.is_ready = self.catalogue.ready
        for link in list(self._links):
            link.tick()
        self._timer = None
        if self._links:
            self._tick_later()

    def _renewed(self) -> None:
        """Tell the fronts of a new generation, once per turn of the loop, which may bring thousands."""
        if self._links and not self._is_renewed:
            self._is_renewed = True
            asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        self._is_renewed = False
        self.is_ready = self.catalogue.ready
        for link in list(self._links):
            link.beat()
