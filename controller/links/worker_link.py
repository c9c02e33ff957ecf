"""The controller's end of its links to workers.

A worker asks by gRPC for a connection (`clockwright.wire.peer`). Everything else travels there as frames: actions and
results (`clockwright.wire.frames`), and messages about models and the worker itself (`clockwright.wire.worker_messages`).
Times are translated between the controller's clock and a worker's here and in `worker_actions`, and nowhere else.

A worker is not trusted: a message that the protocol does not allow ends its link. For the scheduler the worker has
crashed then, and no other worker notices.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from clockwright.errors import LinkEndedError, ProtocolError
from clockwright.foreign import printable
from clockwright.units import NS_PER_S, ActionId, GpuKind, ModelId, WorkerId
from clockwright.wire import worker_messages as messages
from clockwright.wire.clock_sync import ClockSync
from clockwright.wire.frame_headers import HEADER_BYTES_MAX
from clockwright.wire.frame_socket import FrameSocket, SocketListener
from clockwright.wire.frames import Frame
from clockwright.wire.leadership import Term, address_of
from clockwright.wire.peer import Pulse, Welcome
from clockwright.wire.worker_messages import (
    CardReport,
    Drain,
    Ended,
    ExpectFront,
    FrontGone,
    Heartbeat,
    Held,
    MemoryMapped,
    Register,
)
from controller.core.events import WorkerJoined
from controller.links.joining import (
    Expected,
    HeartbeatConfig,
    Messages,
    Shown,
    answer,
    check_version,
)
from controller.links.slabs import Arena, MappedMemory, Slabs
from controller.links.worker_actions import WorkerActions
from controller.links.worker_claims import CLOCK_MHZ_MAX, registration_fault
from controller.links.worker_models import Claims, WorkerModels
from controller.models.catalogue import Catalogue
from controller.models.entry import Entry
from controller.models.learned import KINDS_MAX
from controller.runtime import Runtime

log = logging.getLogger(__name__)

# A worker that was told to leave and has not left after this long has its connection closed.
LEAVE_LIMIT_S = 5.0

# What a lost Infer holds may be written and read until the link ends, so a worker that loses many is let go.
LOST_MAX = 64

# Only a handful of things can be wrong with a card, so more complaints are nonsense.
_COMPLAINTS_MAX = 100
#: Each has a connection and a place in every view of the cluster.
WORKERS_MAX = 1024
# Workers that drained and left are remembered, so that their orchestrator ends them: so many, for so long.
_DRAINED_MAX, _DRAINED_NS = 256, 3600 * NS_PER_S

# When a worker has been silent for this many heartbeats, another that registers under its name is taken for
# its successor. A busy machine skips a few heartbeats; a worker that starts again takes longer than that.
_SUSPICIOUS_TICKS = 10


class WorkerLink:
    """One worker's connection. By it the runtime sends actions, and the catalogue offers models."""

    def __init__(
        self,
        links: WorkerLinks,
        sock: socket.socket,
        claims: Claims,
        keeps: Sequence[Held],
        shown: Shown,
    ) -> None:
        """Begin to serve a worker that has shown its token.

        `claims` is what it said, and `keeps` what it was told to keep.
        """
        #: What the worker said as it registered, its own name among it.
        self.register = claims.register
        self.worker_id = WorkerId(self.register.worker_id)
        #: Its number for fronts; no other worker has had it.
        self.number = links.new_number()
        self.pulse = links.new_pulse()
        self.draining = False
        #: The scheduler does not trust the worker any more and has let it go.
        self.dropped = False
        #: The clock offset is known, and the scheduler uses the link.
        self.joined = False
        #: The worker's last report on its GPU; empty for a worker without a GPU.
        self.card = CardReport()
        #: Set once `WorkerLinks` does not list the worker any more.
        self.left = asyncio.Event()
        self._shown = shown
        self._links = links
        self._runtime = links.runtime
        self._is_over = False
        self._data = FrameSocket(sock, self._take_frames, self.cut)
        self._data.reader.header_bytes_max = HEADER_BYTES_MAX
        self.actions = WorkerActions(
            self.worker_id,
            self.number,
            self._data,
            self.pulse.clock,
            links.slabs,
            generation=links.term.generation,
            finished=self._runtime.action_finished,
            shared=lambda: links.worker_shares(self),
            unshared=lambda outputs: links.outputs_unshared(outputs),
        )
        self.models = WorkerModels(
            self.worker_id,
            claims,
            keeps,
            self._data,
            know=self.actions.know,
            forget=self.actions.forget,
        )
        # What the runtime and the catalogue ask for.
        self.send = self.actions.send
        self.flush = self.actions.flush
        self.look = self._data.look
        self.withdraw_action = self.actions.withdraw_action
        self.offer: Callable[[Entry], None] = self.models.offer
        self.withdraw: Callable[[Entry], None] = self.models.withdraw
        self.forget_model: Callable[[ModelId], None] = self.models.forget_model
        self._sending = asyncio.create_task(self.models.send_files())
        self._sending.add_done_callback(self._part_ended)
        self._beat()

    @property
    def clock(self) -> ClockSync:
        """What is known of the worker's clock."""
        return self.pulse.clock

    @property
    def num_bytes(self) -> int:
        """Bytes that came from the worker, and went there."""
        return self._data.num_bytes

    # --- leaving ------------------------------------------------------------------------------

    def drain(self) -> None:
        """Give the worker nothing new; the scheduler closes the link when all is answered."""
        if self.draining:
            return
        self._no_more_models()
        if self.joined:
            self._runtime.drain_worker(self.worker_id)
        else:
            self.close("")

    def close(self, reason: str) -> None:
        """Let the worker go: with an empty reason for good, when it has drained; else to start afresh."""
        self._no_more_models()
        if reason:
            # No Drain is sent: a worker whose link ends registers again, with an empty cache.
            self.dropped = True
            self.cut(reason)
            return
        self._data.send(messages.frame(Drain("all actions are answered")))
        asyncio.get_running_loop().call_later(LEAVE_LIMIT_S, self.cut, "told to leave")

    def cut(self, reason: str) -> None:
        """End the link, and say why to the worker, if it still hears; the rest follows in the loop's next turn."""
        if self._is_over:
            return
        self._is_over = True
        self._sending.cancel()
        self._data.send_now(messages.frame(Ended(reason)))
        self._data.close()
        asyncio.get_running_loop().call_soon(self._links.ended, self, reason)

    def write_off(self, action_id: ActionId) -> None:
        """Take in that the result of an action is lost; end the link when too many are."""
        num_lost = self.actions.write_off(action_id)
        if num_lost > LOST_MAX:
            self.cut(f"it lost the results of {num_lost} Infers, expected {LOST_MAX} at most")

    def _no_more_models(self) -> None:
        self.draining = self.models.draining = True
        self._links.catalogue.worker_left(self.worker_id)

    def _part_ended(self, part: asyncio.Task[None]) -> None:
        if part.cancelled():
            return
        error = part.exception()
        # This is a bug of ours. The worker reconnects and starts afresh.
        log.error("worker %s: its link failed", self.worker_id, exc_info=error)
        self.cut(f"its link failed: {error!r}")

    # --- fronts -------------------------------------------------------------------------------

    @property
    def payload_address(self) -> str:
        """Where fronts send inputs, HOST:PORT; empty: the worker takes none from fronts."""
        host, port = self.register.payload_host, self.register.payload_port
        return address_of(host, port) if port else ""

    def expect(self, front: int, token: bytes) -> bool:
        """Let a front come with a token to the address in `register`. Returns whether there is such an address."""
        if not self.register.payload_port:
            return False
        expect = ExpectFront(front, token, self._links.message_bytes_max)
        self._data.send(messages.frame(expect))
        return True

    def front_gone(self, front: int) -> None:
        """Tell the worker that a front is gone."""
        self._data.send(messages.frame(FrontGone(front)))

    # --- what the worker says -----------------------------------------------------------------

    def tick(self) -> None:
        """Called at each heartbeat: send one, and end the link of a silent worker."""
        if self._is_over:
            return
        if self._shown.over:
            self.cut("its credentials expired or changed")
            return
        self.models.tick(self._links.heartbeats.interval_ms)
        self._data.tick()
        fault = self.pulse.tick(self._data.stalled_ticks, stalled="it takes no more actions")
        if fault:
            self.cut(fault)
        else:
            self._beat()

    def _beat(self) -> None:
        self._data.send_now(messages.frame(Heartbeat(*self.pulse.stamp())))

    def _take_frames(self, frames: Sequence[Frame]) -> None:
        self.pulse.silent_ticks = 0
        try:
            for frame in frames:
                if self._is_over:
                    return
                if messages.is_message(frame[0]):
                    self._take(messages.decode_from_worker(frame))
                else:
                    self.actions.take_result(frame)
        except ProtocolError as error:
            self.cut(f"protocol error: {error}")

    def _take(self, message: messages.FromWorker) -> None:
        if isinstance(message, Heartbeat):
            self.pulse.heard(message.sent_ns, message.min_delta_ns)
            self._join_when_known()
            if message.card is not None:
                self._take_card(message.card)
        elif isinstance(message, MemoryMapped):
            self.actions.take_mapped(message.number)
        elif isinstance(message, Drain):
            reason = printable(message.reason)
            log.info("worker %s wants to leave: %s", self.worker_id, reason)
            self.drain()
        else:
            self.models.take(message)

    def _take_card(self, card: CardReport) -> None:
        if len(card.complaints) > _COMPLAINTS_MAX:
            raise ProtocolError(
                f"{len(card.complaints)} complaints of a card, expected {_COMPLAINTS_MAX} at most"
            )
        if max(card.clock_mhz, card.clock_mhz_max) > CLOCK_MHZ_MAX:
            raise ProtocolError(
                f"a card at {card.clock_mhz} of {card.clock_mhz_max} MHz, expected {CLOCK_MHZ_MAX} at most"
            )
        card.complaints = tuple(map(printable, card.complaints))
        known, self.card = self.card, card
        for words in card.complaints:
            if words not in known.complaints:
                log.warning("worker %s: its GPU is unwell: %s", self.worker_id, words)
        for words in known.complaints:
            if words not in card.complaints:
                log.info("worker %s: its GPU is better: no more: %s", self.worker_id, words)
        if self.joined and card.clock_mhz:
            self._runtime.clock_seen(self.worker_id, card.clock_mhz)

    def _join_when_known(self) -> None:
        if self.joined or self.draining or self.clock.offset_ns is None:
            return
        self.joined = True
        self._links.worker_came(self)
        register = self.register
        self._runtime.worker_joined(
            self,
            WorkerJoined(
                worker_id=self.worker_id,
                gpu_kind=GpuKind(register.gpu_kind),
                num_pages=register.num_pages,
            ),
        )
        if self.card.clock_mhz:
            self._runtime.clock_seen(self.worker_id, self.card.clock_mhz)
        log.info(
            "worker %s joined: device %s, %d pages, round trip %d us",
            self.worker_id,
            register.device,
            register.num_pages,
            self.clock.round_trip_ns // 1000,
        )
        if not self.models.take_over():
            # Its pages are taken, and are free only when the worker says so: by registering again.
            self.cut("models have changed while it joined")
            return
        self._links.catalogue.worker_joined(self.worker_id, self)


class WorkerLinks:
    """All workers' links, by worker id."""

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
        """Take no workers yet.

        A request or an answer has so many bytes at most; `term` is the generation of this controller.
        """
        self.runtime = runtime
        self.catalogue = catalogue
        self.heartbeats = heartbeats or HeartbeatConfig()
        self.message_bytes_max = message_bytes_max
        self.slabs = slabs
        self.term = term
        #: Where workers, and fronts, connect.
        self.listener = SocketListener(silence_limit_ms=self.heartbeats.silence_limit_ms)
        self._expected = Expected("worker", self.listener, self.heartbeats, term)
        #: Kinds of workers that have been there.
        self._kinds: set[str] = set()
        self._links: dict[WorkerId, WorkerLink] = {}
        #: Workers that drained and left, the first first: of which kind, and when.
        self._drained: dict[WorkerId, tuple[str, int]] = {}
        self._last_number = 0
        #: Called when a worker takes fronts, and when it is gone.
        self.worker_came: Callable[[WorkerLink], object] = lambda _: None
        self.worker_gone: Callable[[WorkerLink], object] = lambda _: None
        #: Fronts' memory, which each worker of this host is handed.
        self._memories: dict[int, tuple[MappedMemory, int]] = {}
        #: Called with each worker's memory for outputs, when it is in use and when the worker is gone.
        self.outputs_shared: Callable[[Arena], object] = lambda _: None
        self.outputs_unshared: Callable[[Arena], object] = lambda _: None
        #: Why no worker is welcome any more; empty while they are.
        self._closing = ""
        self._all_left = asyncio.Event()
        self._all_left.set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def links(self) -> list[WorkerLink]:
        """Links of the workers that are connected, sorted by id."""
        return [self._links[worker_id] for worker_id in sorted(self._links)]

    def find(self, worker_id: WorkerId) -> WorkerLink | None:
        """Find the link of a worker."""
        return self._links.get(worker_id)

    def may_go(self, gpu_kind: GpuKind) -> tuple[WorkerId, ...]:
        """Workers of a kind that drained and left in the last hour, and have not come again."""
        since_ns = self.runtime.clock() - _DRAINED_NS
        return tuple(
            name
            for name, (kind, at_ns) in self._drained.items()
            if kind == gpu_kind and at_ns > since_ns
        )

    def listen(self, host: str, port: int, path: Path) -> None:
        """Listen for connections of workers and fronts; see `SocketListener.listen`."""
        self.listener.listen(host, port, path)

    def stop_listening(self) -> None:
        """Take no more connections."""
        self.listener.close()

    # --- fronts' memory -----------------------------------------------------------------------

    def share(self, memory: MappedMemory, file: int) -> None:
        """Hand a front's memory to all workers of this host, and to those that come, until `unshare`."""
        self._memories[memory.number] = memory, file
        for link in self._links.values():
            link.actions.share(memory, file)

    def unshare(self, memory: MappedMemory) -> None:
        """Have all workers forget a front's memory."""
        self._memories.pop(memory.number, None)
        for link in self._links.values():
            link.actions.unshare(memory)

    def worker_shares(self, link: WorkerLink) -> None:
        """A worker has mapped the memory that it shares with the controller."""
        for memory, file in self._memories.values():
            link.actions.share(memory, file)
        assert link.actions.outputs is not None
        self.outputs_shared(link.actions.outputs)

    # --- for the links ------------------------------------------------------------------------

    def new_number(self) -> int:
        """Make a number for a worker that no other worker has had."""
        self._last_number += 1
        return self._last_number

    def new_pulse(self) -> Pulse:
        """Begin to count a worker's heartbeats."""
        return Pulse(
            self.runtime.clock,
            interval_ms=self.heartbeats.interval_ms,
            silence_limit_ms=self.heartbeats.silence_limit_ms,
        )

    def ended(self, link: WorkerLink, reason: str) -> None:
        """A link is over."""
        self._remove(link, reason)
        self.worker_gone(link)
        link.actions.hang_up()

    # --- coming and going ------------------------------------------------------------------------------

    async def close(self, reason: str) -> None:
        """End all links, and wait until they have ended or `LEAVE_LIMIT_S` is over.

        No worker is sent home: like those of a controller that crashed, they dial until one answers.
        """
        self._closing = reason
        self._expected.close()
        for link in self.links:
            link.cut(reason)
        try:
            async with asyncio.timeout(LEAVE_LIMIT_S):
                await self._all_left.wait()
        except TimeoutError:
            log.warning("%d workers' links have not ended", len(self._links))

    async def attach(self, stream: Messages, caller: Shown) -> None:
        """Answer a worker that asks for a connection."""
        await answer(stream, Register, lambda register: self._welcome(register, caller))

    def _welcome(self, register: Register, shown: Shown) -> Welcome:
        check_version(register.protocol_version, "worker")
        if self._closing:
            raise LinkEndedError(self._closing)
        claims = Claims(register, self.catalogue, self.message_bytes_max)
        try:
            if fault := registration_fault(register) or self._clash(register):
                raise ProtocolError(fault)
            keeps = claims.choose_held()
        except ProtocolError as error:
            log.warning("worker %r is rejected: %s", register.worker_id[:200], error)
            raise
        welcome = self._expected.expect(
            register.worker_id, lambda sock: self._connected(sock, claims, keeps, shown)
        )
        welcome.keep = tuple(held.ready.model_id for held in keeps)
        return welcome

    def _connected(
        self, sock: socket.socket, claims: Claims, keeps: Sequence[Held], shown: Shown
    ) -> None:
        # Others may have come meanwhile.
        fault = self._closing or self._clash(claims.register)
        link = WorkerLink(self, sock, claims, keeps, shown)
        if fault:
            link.cut(fault)
            return
        self._links[link.worker_id] = link
        self._kinds.add(link.register.gpu_kind)
        self._drained.pop(link.worker_id, None)
        self._all_left.clear()
        if self._timer is None:
            self._tick_later()

    def _tick_later(self) -> None:
        interval_s = self.heartbeats.interval_ms / 1000
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._tick)

    def _tick(self) -> None:
        for link in self.links:
            link.tick()
        self._timer = None
        if self._links:
            self._tick_later()

    def _remove(self, link: WorkerLink, reason: str) -> None:
        link.left.set()
        if self._links.get(link.worker_id) is not link:
            return  # Its successor has taken its place.
        # A worker that drained was expected to leave; the operator should hear of any other.
        if self._closing:
            log.info("worker %s is left waiting: %s", link.worker_id, reason)
        elif link.draining and not link.dropped:
            log.info("worker %s left: it was drained", link.worker_id)
            self._drained[link.worker_id] = link.register.gpu_kind, self.runtime.clock()
            if len(self._drained) > _DRAINED_MAX:
                del self._drained[next(iter(self._drained))]
        else:
            log.warning("worker %s left: %s", link.worker_id, reason)
        del self._links[link.worker_id]
        if link.joined:
            self.runtime.worker_lost(link.worker_id)
            self.catalogue.worker_left(link.worker_id)
        if not self._links:
            self._all_left.set()

    def _clash(self, register: Register) -> str:
        """Make room for a worker under its name, or say why it cannot have it."""
        old, kind = self._links.get(WorkerId(register.worker_id)), register.gpu_kind
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            return (
                f"kind {kind!r} would be kind of worker number {len(self._kinds) + 1}, expected {KINDS_MAX} at most since the"
                " controller was started; their counts are kept, so restart it if some are gone for good"
            )
        if old is None:
            if len(self._links) >= WORKERS_MAX:
                return f"there are {len(self._links)} workers, expected {WORKERS_MAX} at most"
            return ""
        same_process = (old.register.host, old.register.pid) == (register.host, register.pid)
        if not same_process and old.pulse.silent_ticks < _SUSPICIOUS_TICKS:
            return (
                f"there is a worker {register.worker_id} already, "
                f"process {old.register.pid} on host {old.register.host}"
            )
        # The worker's connection broke without our noticing, and here it is again.
        self._remove(old, "replaced by its successor")
        old.cut("replaced by its successor")
        return ""
