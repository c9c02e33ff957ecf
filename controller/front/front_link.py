"""The controller's end of the links to fronts that are processes of their own.

A front asks by gRPC where the socket is, and gets a token (`front.proto`); all else travels there
(`link_frames`). Times are translated between the controller's clock and a front's here and nowhere else, as
workers' are, and no request arrives in the future.

A front checks requests against the description of a model that it was given, which has a number. Before a
request is asked here, its description is looked at again if anything has changed since: one that holds no more
makes the request stale, and the front begins it afresh.

A front is believed who its clients are, and nothing else: what the protocol does not allow ends its link, and
so does silence, or too much that it leaves unread, or the end of what it has shown. To the scheduler its requests are withdrawn then, and no other front notices.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from clockwright import wire
from clockwright.bulk import Buffer, total_bytes
from clockwright.errors import (
    ClockwrightError,
    Denial,
    NoRoomError,
    ProtocolError,
    Refusal,
    RefusedError,
)
from clockwright.foreign import printable
from clockwright.frame_headers import APART, HEADER_BYTES_MAX, PLACE_BITS, TOKEN_BYTES
from clockwright.frame_socket import FrameSocket
from clockwright.frames import DIRECT_BYTES, Frame
from clockwright.leadership import Term
from clockwright.units import NS_PER_MS
from clockwright.v1 import front_pb2 as pb
from controller.access.caller import CALLER, Caller
from controller.catalogue import Catalogue
from controller.clock_sync import ClockSync
from controller.core.quotas import Exceeded
from controller.front import link_frames as frames
from controller.front.backend import LocalAnswerer, LocalBackend, OverQuotaError, ToldAnswer
from controller.front.door import Door
from controller.front.explanation import explain
from controller.front.methods import unary
from controller.front.statuses import status_of
from controller.front.throttle import Throttle
from controller.front.waiting_line import PATIENT_NS
from controller.held_tensors import HeldInput, SentOutput
from controller.runtime import Answer, NoAnswerError
from controller.selection.queries import Answered
from controller.slabs import SLAB_BYTES_MIN, Arena, MappedMemory
from controller.worker_link import HeartbeatConfig, WorkerLink, WorkerLinks

log = logging.getLogger(__name__)

SERVICE = "clockwright.v1.FrontService"

#: Fronts at once; each has memory of its own that workers map.
FRONTS_MAX = 256
# A front that asked for the way to the socket comes at once.
_DIAL_LIMIT_S = 10.0
# A front that leaves so many bytes of answers unread is as good as gone.
_UNREAD_BYTES_MAX = 256 << 20
# Process, user and group of a peer.
_CREDENTIALS = struct.Struct("iII")
# What no model could do in time anyway is for the scheduler to refuse, with its figures.
_JUDGED_NS = 2 * NS_PER_MS
# A front puts this many bytes of small tensors together beside one large message, at most.
_BESIDE_BYTES = 1 << 20


@dataclass(slots=True)
class _Size:
    """How large a request is with so many rows."""

    #: Bytes of each input, and of all.
    lengths: tuple[int, ...]
    num_bytes: int
    #: A tensor that it has, or gets, is worth a message of its own.
    is_large: bool


@dataclass(slots=True)
class _Description:
    """What fronts were told of a model or an application."""

    answerer: LocalAnswerer
    #: The generation of the catalogue at which it was found to hold.
    generation: int
    #: Bytes of a row of each input, and of the largest output.
    row_bytes: tuple[int, ...]
    output_row_bytes: int
    #: By rows, as far as requests had so many.
    _sizes: dict[int, _Size] = field(default_factory=dict)

    @property
    def keeps_inputs(self) -> bool:
        """Whether something may be learned from inputs when their request is over."""
        return self.answerer.keeps_inputs

    @property
    def name(self) -> str:
        """What it is called."""
        return self.answerer.servable.name

    def check(self, ask: frames.Ask) -> _Size:
        """Find that a request fits, as its front has found; returns how large it is.

        Raises:
            ProtocolError: it does not.
        """
        rows = ask.rows
        size = self._sizes.get(rows)
        if size is None and 1 <= rows <= self.answerer.servable.max_rows:
            lengths = tuple([rows * num_bytes for num_bytes in self.row_bytes])
            largest = max((*lengths, rows * self.output_row_bytes))
            size = self._sizes[rows] = _Size(lengths, sum(lengths), largest >= DIRECT_BYTES)
        if size is None or ask.lengths != size.lengths:
            raise ProtocolError(
                f"request {ask.ask_id} to {self.name}: {rows} rows of {list(ask.lengths)} bytes"
            )
        return size


class _Asked:
    """A front's request, which waits for its answer here."""

    __slots__ = (
        "_explain",
        "_link",
        "_num_bytes",
        "_slo_end_ns",
        "_slo_ns",
        "ask_id",
        "over",
        "withdraw",
    )

    def __init__(self, link: FrontLink, ask: frames.Ask, num_bytes: int, arrival_ns: int) -> None:
        self.ask_id = ask.ask_id
        self.over = False
        self.withdraw: Callable[[], object] | None = None
        self._link = link
        self._explain = ask.explain
        self._num_bytes = num_bytes
        self._slo_ns = ask.slo_ns
        self._slo_end_ns = arrival_ns + ask.slo_ns

    def done(self) -> bool:
        """Whether nobody waits any more."""
        return self.over

    def begin(self) -> None:
        """Nothing here waits for a description."""

    def set_result(self, result: Answer | Answered | ToldAnswer) -> None:
        """Tell the front the answer."""
        self._link.links.throttle.ended(slow=False)
        parameters: frames.Parameters | None
        if isinstance(result, Answer):
            departure_ns = result.command.expected_departure_ns
            # The front knows where the SLO came from.
            parameters = explain(result, slo_source="") if self._explain else None
        elif isinstance(result, Answered):
            departure_ns, parameters = self._slo_end_ns, result.parameters
        else:
            departure_ns, parameters = result.expected_departure_ns, result.parameters
        self._link.answered(self, departure_ns, parameters, result.outputs)

    def set_exception(self, exception: Exception) -> None:
        """Tell the front why there is no answer."""
        links = self._link.links
        links.throttle.ended(slow=links.clock() > self._slo_end_ns - self._slo_ns / 2)
        self._link.failed(self, exception)

    def end(self, door: Door) -> None:
        """Nobody waits any more."""
        self.over = True
        door.leave(self._num_bytes)


class FrontLink:
    """One front's socket, and its open requests."""

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
        """Begin to hear a front that has shown its token, is this caller, and looks at these outputs still."""
        self.name = name
        #: The same whenever it attaches.
        self.instance = instance
        self._caller = caller
        #: What workers call it.
        self.number = links.new_front()
        #: Whether it shares memory with the workers of this host.
        self.is_local = sock.family == socket.AF_UNIX
        #: Where it comes from, HOST:PORT; empty: this host.
        self.address = address
        self.joined_ns = links.clock()
        #: Beats since the last sign of life.
        self.silent_ticks = 0
        #: The front's clock minus ours; None: not known yet.
        self.offset_ns: int | None = None
        self.links = links
        self._clock = ClockSync()
        self._open: dict[int, _Asked] = {}
        self._data = FrameSocket(
            sock,
            self._take,
            self.lost,
            peer="front",
            unsent_bytes_max=_UNREAD_BYTES_MAX,
            takes_files=True,
        )
        # The front's memory for inputs, and whose inputs nobody looks at any more: noted in any thread.
        self._file = -1
        self._memory: MappedMemory | None = None
        self._freed: deque[int] = deque()
        self._own_thread = threading.get_ident()
        # Workers' memory for outputs that the front was handed, what of it it has mapped, and the outputs that
        # it looks at.
        self._offered: dict[int, Arena] = {}
        self._outputs: dict[int, Arena] = {}
        self._lent = lent
        self._process = _process_of(sock)
        # Workers of other hosts that it was told of, and what it is to send them.
        self._workers: dict[int, WorkerLink] = {}
        self._feeds: list[tuple[int, int, int, int]] = []
        self._data.reader.header_bytes_max = HEADER_BYTES_MAX
        self._data.reader.payload_bytes_max = links.message_bytes_max + _BESIDE_BYTES
        # What this turn of the event loop has to tell.
        self._answered: list[tuple[object, ...]] = []
        self._payload: list[Buffer] = []
        self._payload_bytes = 0
        self._refused: list[tuple[object, ...]] = []
        self._failed: list[tuple[object, ...]] = []
        self._stale: list[int] = []
        #: Whose rates are used up, until when, and what they are.
        self._spent: dict[str, tuple[int, float]] = {}
        #: Who may not have an SLO below, or above, which.
        self._slos: dict[tuple[str, bool], int] = {}
        self._is_due = False
        self._is_over = False

    @property
    def num_open(self) -> int:
        """Requests that are not answered."""
        return len(self._open)

    @property
    def workers(self) -> Sequence[WorkerLink]:
        """Workers with which it shares no memory."""
        return list(self._workers.values())

    @property
    def num_bytes(self) -> int:
        """Bytes that came from the front, and went there."""
        return self._data.num_bytes

    # --- what is told -------------------------------------------------------------------------

    def answered(
        self,
        asked: _Asked,
        departure_ns: int,
        parameters: frames.Parameters | None,
        outputs: Sequence[Buffer],
    ) -> None:
        """Tell an answer."""
        self._close(asked)
        lengths = [len(tensor) for tensor in outputs]
        num_bytes = sum(lengths)
        places: Sequence[int] = ()
        sent: tuple[int, int, int] | None = None
        if outputs and isinstance(handle := outputs[0], SentOutput):
            sent = handle.worker, handle.action_id, handle.index
            outputs, places, num_bytes = (), [APART] * len(lengths), 0
        elif self._outputs and max(lengths, default=0) >= SLAB_BYTES_MIN:
            places = [self._place(tensor) for tensor in outputs]
            lent = [tensor for tensor, at in zip(outputs, places, strict=True) if at >= 0]
            if lent:
                self._lent[asked.ask_id] = lent
            outputs = [tensor for tensor, at in zip(outputs, places, strict=True) if at < 0]
            num_bytes = total_bytes(outputs)
        departure_ns += self.offset_ns or 0
        self._answered.append((asked.ask_id, departure_ns, parameters, lengths, places, sent))
        self._payload += outputs
        self._payload_bytes += num_bytes
        if self._payload_bytes > frames.PAYLOAD_BYTES or len(self._answered) >= frames.REQUESTS_MAX:
            self._flush()
        elif not self._is_due:
            self._flush_soon()

    def _place(self, tensor: Buffer) -> int:
        if len(tensor) >= SLAB_BYTES_MIN:
            for number, arena in self._outputs.items():
                if (begin := arena.find(tensor)) >= 0:
                    return number << PLACE_BITS | begin
        return -1

    def feed(self, ask_id: int, worker: int, action_id: int, index: int) -> None:
        """Have the front send the inputs of a request to a worker; see `Holder`."""
        self._feeds.append((ask_id, worker, action_id, index))
        self._flush_soon()

    def meet(self, worker: WorkerLink) -> None:
        """Let the front and a worker that share no memory reach each other."""
        if self.is_local and worker.is_local:
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
        """Let the front look at a worker's outputs where they lie."""
        # One without memory of its own is not on this host, or wants none.
        if self._memory is not None and outputs.fd >= 0:
            message = frames.encode_one(frames.LentMemory(number, outputs.num_bytes))
            if self._data.hand_over(message, (outputs.fd,)):
                self._offered[number] = outputs

    def forget(self, number: int) -> None:
        """A worker is gone."""
        self._outputs.pop(number, None)
        if self._offered.pop(number, None) is not None:
            self._data.send(frames.encode(frames.Forget(number)))

    def failed(self, asked: _Asked, error: Exception) -> None:
        """Tell why there is no answer."""
        self._close(asked)
        self._fail(asked.ask_id, error)

    def _free(self, ask_id: int) -> None:
        """Nobody looks at an input any more. Called in any thread."""
        self._freed.append(ask_id)
        if threading.get_ident() == self._own_thread and not self._is_over:
            self._flush_soon()

    def beat(self) -> None:
        """Give a sign of life."""
        if self._freed:
            self._flush_soon()
        links = self.links
        beat = frames.Beat(
            links.clock(),
            self._clock.min_delta_ns,
            self._clock.offset_ns is not None,
            links.catalogue.generation,
            links.is_ready,
        )
        self._data.send_now(frames.encode(beat))

    def tick(self) -> None:
        """Called at each beat: give a sign of life, and give up a front that gives none."""
        if self._caller.over:
            self.lost("what it has shown is good no more, or means something else")
            return
        self.silent_ticks += 1
        self._data.tick()
        ticks, fault = self.silent_ticks, "silent"
        if self._data.stalled_ticks > ticks:
            ticks, fault = self._data.stalled_ticks, "it takes no more answers"
        silence_ms = ticks * self.links.heartbeats.interval_ms
        if silence_ms > self.links.heartbeats.silence_limit_ms:
            self.lost(f"{fault} for {silence_ms} ms")
        else:
            self.beat()

    def lost(self, reason: str) -> None:
        """Give the front up, and withdraw what it asked."""
        if self._is_over:
            return
        self._is_over = True
        self._data.close()
        for worker in self._workers.values():
            worker.front_gone(self.number)
        self._workers.clear()
        self.links.left(self, reason)
        if self._memory is not None:
            self.links.unshare(self._memory)
            self._memory = None
        if self._file >= 0:
            os.close(self._file)
        if self._lent:
            # The front may still read, in answers that are on their way to clients: nothing else is to be
            # written there while it lives.
            self.links.keep_while_alive(self._process, self._lent, self.instance)
        elif self._process >= 0:
            os.close(self._process)
        asked, self._open = list(self._open.values()), {}
        # All first: as one is withdrawn, the scheduler may refuse others, whom nobody tells any more.
        for each in asked:
            each.end(self.links.door)
        for each in asked:
            assert each.withdraw is not None
            each.withdraw()

    def _close(self, asked: _Asked) -> None:
        del self._open[asked.ask_id]
        asked.end(self.links.door)

    def _fail(self, ask_id: int, error: Exception) -> None:
        if isinstance(error, NoAnswerError):
            self._refused.append((ask_id, error.refusal, error.figures, error.detail))
        else:
            self._failed.append(_failure(ask_id, error))
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_due = False
        if self._feeds:
            feeds, self._feeds = self._feeds, []
            self._data.send_now(frames.encode(frames.Feed(tuple(feeds))))
        if self._answered or self._refused or self._failed or self._stale or self._freed:
            self._flush()

    def _flush(self) -> None:
        if self._spent or self._slos:
            spent = frames.SpentTenants(
                tuple([(tenant, *rate) for tenant, rate in self._spent.items()]),
                tuple(
                    [
                        (tenant, slo_ns, is_least)
                        for (tenant, is_least), slo_ns in self._slos.items()
                    ]
                ),
            )
            self._spent, self._slos = {}, {}
            self._data.send(frames.encode(spent))
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        told = frames.encode_told(
            self._answered, self._refused, self._failed, self._stale, freed, self._payload
        )
        self._answered, self._refused, self._failed, self._stale = [], [], [], []
        self._payload, self._payload_bytes = [], 0
        self._data.send_now(told)

    # --- what it says -------------------------------------------------------------------------

    def _take(self, received: Sequence[Frame]) -> None:
        self.silent_ticks = 0
        for frame in received:
            if self._is_over:
                return
            message = frames.decode_from_front(frame[0])
            if isinstance(message, frames.Asks):
                self._take_asks(message.asks, frame)
            elif isinstance(message, frames.Withdrawn):
                for ask_id in message.ask_ids:
                    asked = self._open.get(ask_id)
                    if asked is not None:
                        self._close(asked)
                        assert asked.withdraw is not None
                        asked.withdraw()
            elif isinstance(message, frames.Describe):
                self._data.send(frames.encode(self.links.describe(message)))
            elif isinstance(message, frames.FrontBeat):
                self._take_beat(message)
            elif isinstance(message, frames.Returned):
                for ask_id in message.ask_ids:
                    if lent := self._lent.get(ask_id):
                        lent.pop()
                    if not lent:
                        self._lent.pop(ask_id, None)
            elif isinstance(message, frames.LentMemory):
                self._take_memory(message)
            elif isinstance(message, frames.HandOn):
                self._hand_on(message, frame)
            elif message.number in self._offered:
                self._outputs[message.number] = self._offered[message.number]

    def _take_memory(self, offer: frames.LentMemory) -> None:
        """Map the front's memory, and have the workers map it."""
        if self._memory is not None or not self._data.files:
            raise ProtocolError("memory that was handed over already, or not at all")
        self._file = self._data.files.popleft()
        try:
            self._memory = MappedMemory(self.links.new_number(), self._file, offer.num_bytes)
        except OSError as error:
            log.warning("the memory of front %s cannot be mapped: %s", self.name, error)
            return
        self._data.send(frames.encode(frames.Mapped(offer.number)))
        self.links.share(self._memory, self._file, self)

    def _hand_on(self, message: frames.HandOn, frame: Frame) -> None:
        worker = self._workers.get(message.worker)
        if worker is None:
            return  # It is gone.
        tensors = frames.cut_hand_on(message, frame)
        worker.hand_on(self.number, message.action_id, message.index, tensors)

    def _look(self, ask_id: int, place: int, num_bytes: int) -> Buffer:
        if place == APART:
            if num_bytes < DIRECT_BYTES:
                raise ProtocolError(f"request {ask_id}: {num_bytes} bytes that its front keeps")
            return b""
        if self._memory is None:
            raise ProtocolError(f"request {ask_id}: inputs in memory that is not mapped")
        return self._memory.look(place, num_bytes, functools.partial(self._free, ask_id))

    def _take_beat(self, beat: frames.FrontBeat) -> None:
        was_known = self.offset_ns is not None
        self._clock.heard(
            sent_ns=beat.sent_ns,
            received_ns=self.links.clock(),
            peer_min_delta_ns=beat.min_delta_ns,
        )
        self.offset_ns = offset_ns = self._clock.offset_ns
        # On one host there is one clock, unless somebody has made it look otherwise.
        if self.is_local and offset_ns is not None and abs(offset_ns) <= self._clock.round_trip_ns:
            self.offset_ns = 0
        for refusal, number in beat.refused.items():
            self.links.refused_at_doors(refusal, number)
        for denial, number in beat.denied.items():
            self.links.denied_at_fronts(denial, number)
        for tenant, number in beat.refused_early.items():
            self.links.refused_early(tenant, number)
        for told in beat.early:
            self.links.keep_early(told, self.offset_ns or 0)
        if not was_known:
            self.beat()

    def _take_asks(self, asks: Sequence[frames.Ask], frame: Frame) -> None:
        offset_ns = self.offset_ns
        if offset_ns is None:
            raise ProtocolError("a request before the front's clock is known")
        links, open_, throttle = self.links, self._open, self.links.throttle
        now_ns = links.clock()
        for ask, inputs in zip(asks, frames.cut_payload(frame, asks, self._look), strict=True):
            description = links.find(ask.number)
            if description is None:
                self._stale.append(ask.ask_id)
                self._flush_soon()
                continue
            size = description.check(ask)
            if description.keeps_inputs and APART in ask.places:
                # Its front was told otherwise, before its answers were kept.
                self._stale.append(ask.ask_id)
                self._flush_soon()
                continue
            if ask.ask_id in open_:
                raise ProtocolError(f"request {ask.ask_id} twice")
            # The answer's way to the front is spent of its SLO, so it counts as though it were spent already. Half of
            # the round trip is exact, however the ways share it: what the offset errs by, the way errs by, too.
            arrival_ns = min(ask.arrival_ns - offset_ns, now_ns) - self._clock.round_trip_ns // 2
            if (waits := not throttle.admit()) and ask.slo_ns < PATIENT_NS:
                self._is_busy(ask.ask_id)
                continue
            if now_ns > arrival_ns + ask.slo_ns > arrival_ns + _JUDGED_NS:
                self._too_late(ask, now_ns - arrival_ns)
                continue
            try:
                links.door.enter(size.num_bytes)
            except RefusedError as error:
                self._fail(ask.ask_id, error)
                continue
            asked = _Asked(self, ask, size.num_bytes, arrival_ns)
            open_[ask.ask_id] = asked
            if waits:
                asked.withdraw = _nothing
                begin = functools.partial(self._begin_waiting, asked, ask, inputs, size, arrival_ns)
                refuse = functools.partial(self._refuse_waiting, asked)
                if not throttle.wait(asked, begin, refuse, arrival_ns + ask.slo_ns // 2):
                    refuse()
            else:
                self._begin(asked, ask, inputs, size, arrival_ns, description)

    def _begin(
        self,
        asked: _Asked,
        ask: frames.Ask,
        inputs: Sequence[Buffer],
        size: _Size,
        arrival_ns: int,
        description: _Description,
    ) -> None:
        """Have a request answered that is let in."""
        if description.keeps_inputs:
            if ask.places:
                # For longer than the request is open, perhaps, and the front's word is not enough for that.
                inputs = [bytes(tensor) for tensor in inputs]
        elif APART in ask.places or (size.is_large and self._workers):
            inputs = self._held(ask, inputs)
        try:
            asked.withdraw = description.answerer.ask(asked, ask, inputs, arrival_ns)
        except RefusedError as error:
            if isinstance(error, OverQuotaError):
                self._tell_spent(ask.tenant, error.exceeded)
            self.failed(asked, error)

    def _begin_waiting(
        self,
        asked: _Asked,
        ask: frames.Ask,
        inputs: Sequence[Buffer],
        size: _Size,
        arrival_ns: int,
    ) -> None:
        """A request that waited is let in, if what it was checked against holds still."""
        description = self.links.find(ask.number)
        if description is None or (description.keeps_inputs and APART in ask.places):
            self._close(asked)
            self._stale.append(ask.ask_id)
            self._flush_soon()
        else:
            self._begin(asked, ask, inputs, size, arrival_ns, description)

    def _refuse_waiting(self, asked: _Asked) -> None:
        if not asked.over:
            self._close(asked)
            self._is_busy(asked.ask_id)

    def _is_busy(self, ask_id: int) -> None:
        """Refuse a request that the throttle keeps out."""
        self._failed.append((ask_id, *self.links.busy()))
        self._flush_soon()

    def _tell_spent(self, tenant: str, exceeded: Exceeded) -> None:
        """Have the front refuse by itself what is refused here whatever comes."""
        if exceeded.bound in ("slo_ns_min", "slo_ns_max"):
            self._slos[tenant, exceeded.bound == "slo_ns_min"] = round(exceeded.expected)
        elif exceeded.until_ns is not None:
            # What the front has on its way by then arrives later, and the two clocks may differ by so much.
            until_ns = exceeded.until_ns + (self.offset_ns or 0) - self._clock.round_trip_ns
            self._spent[tenant] = until_ns, exceeded.expected

    def _too_late(self, ask: frames.Ask, waited_ns: int) -> None:
        """Refuse a request that waited for longer than its SLO before this loop looked at it."""
        links = self.links
        links.throttle.missed()
        links.refused_at_doors(Refusal.LATE, 1)
        figures = {
            "slo_ns": ask.slo_ns,
            "latency_ns": waited_ns,
            "expected_latency_ns": waited_ns,
        }
        self._refused.append((ask.ask_id, Refusal.LATE, figures, ""))
        self._flush_soon()

    def _held(self, ask: frames.Ask, inputs: Sequence[Buffer]) -> list[Buffer]:
        """Have handles stand for the inputs of a request."""
        places = ask.places or [-1] * len(inputs)
        held = [
            HeldInput(self, ask.ask_id, length, None if place == APART else tensor)
            for length, place, tensor in zip(ask.lengths, places, inputs, strict=True)
        ]
        # Nobody but the links looks at more of a tensor than its length.
        return cast("list[Buffer]", held)


class FrontLinks:
    """All fronts of a controller that are processes of their own."""

    def __init__(
        self,
        backend: LocalBackend,
        catalogue: Catalogue,
        workers: WorkerLinks,
        heartbeats: HeartbeatConfig | None = None,
        *,
        door: Door,
        throttle: Throttle,
        message_bytes_max: int,
        knows_callers: bool = False,
        term: Term = Term(),  # noqa: B008  it is frozen
    ) -> None:
        """Take fronts.

        Args:
            backend: answers what they ask.
            catalogue: says when something is described otherwise.
            workers: whose memory and theirs is mapped by each other; where they are dialled, fronts are too.
            heartbeats: how often each side gives a sign of life.
            door: bounds what all of them have open at once.
            throttle: this event loop's, whoever asks it.
            message_bytes_max: bytes of the largest request.
            knows_callers: clients have to show something, and so at fronts.
            term: the generation in which this controller leads.
        """
        self._term = term
        self._knows_callers = knows_callers
        self.clock = backend.clock
        self.catalogue = catalogue
        self.heartbeats = heartbeats or HeartbeatConfig()
        self.door = door
        self.throttle = throttle
        # What fronts are told whom the throttle keeps out, and the rate at which it was made.
        self._busy: tuple[float | None, tuple[Any, ...]] = (None, ())
        self.message_bytes_max = message_bytes_max
        self._backend = backend
        self._workers = workers
        self._listener = workers.listener
        self._last_memory = 0
        self._outputs: dict[Arena, int] = {}
        workers.outputs_shared = self._worker_shares
        workers.outputs_unshared = self._worker_is_gone
        workers.worker_came = self._worker_came
        workers.worker_gone = self._worker_gone
        self._last_front = 0
        # What fronts that are given up may still read, with a descriptor that tells of their end; -1: nothing tells.
        self._kept: dict[str, tuple[int, dict[int, list[Buffer]]]] = {}
        self._links: dict[FrontLink, None] = {}
        # By which token each front that is to dial shows that it is the one: the latest alone.
        self._tokens: dict[str, bytes] = {}
        #: Whether every model was ready, or known to be unfit, at the last beat: it takes a look at each.
        self.is_ready = catalogue.ready
        self._descriptions: dict[int, _Description] = {}
        self._numbers: dict[str, int] = {}
        self._last_number = 0
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

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Make the service that fronts ask for the way."""
        attach = unary("Attach", pb.AttachFrontRequest, self._attach)
        return grpc.method_handlers_generic_handler(SERVICE, {"Attach": attach})

    def close(self) -> None:
        """Hang up: fronts keep what is open for the next controller."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for link in list(self._links):
            link.lost("the controller is shutting down")
        for instance in list(self._kept):
            self._take_kept(instance)

    # --- for the links ------------------------------------------------------------------------

    def describe(self, asked: frames.Describe) -> frames.Described:
        """Describe what a client names."""
        try:
            answerer = self._backend.find(asked.name, asked.version)
        except ClockwrightError as error:
            not_yet = isinstance(error, RefusedError) and error.refusal is Refusal.NO_WORKER
            failure = frames.Failure(*_failure(asked.query_id, error))
            return frames.Described(asked.query_id, 0, None, failure, not_yet, is_held=False)
        name = answerer.servable.name
        number = self._numbers.get(name, 0)
        if self.find(number) is None:
            self._descriptions.pop(number, None)
            self._last_number = number = self._last_number + 1
            generation = self.catalogue.generation
            servable = answerer.servable
            row_bytes = tuple(spec.row_bytes for spec in servable.inputs)
            output_row_bytes = max([spec.row_bytes for spec in servable.outputs], default=0)
            description = _Description(answerer, generation, row_bytes, output_row_bytes)
            self._descriptions[number] = description
            self._numbers[name] = number
        is_held = not self._descriptions[number].keeps_inputs
        return frames.described(asked.query_id, number, answerer.servable, is_held=is_held)

    def find(self, number: int) -> _Description | None:
        """Find the description of a number; None: it holds no more."""
        description = self._descriptions.get(number)
        if description is None:
            return None
        if description.generation != self.catalogue.generation:
            try:
                answerer: LocalAnswerer | None = self._backend.find(description.name, "")
            except ClockwrightError:
                answerer = None
            if answerer is None or answerer.servable != description.answerer.servable:
                del self._descriptions[number]
                del self._numbers[description.name]
                return None
            description.answerer = answerer
            description.generation = self.catalogue.generation
        return description

    def refused_at_doors(self, refusal: Refusal, number: int) -> None:
        """Count what a front has refused."""
        self._backend.refused_at_door(refusal, number)

    def refused_early(self, tenant: str, number: int) -> None:
        """Count what a front has refused because a tenant's rate was used up."""
        self._backend.refused_early(tenant, number)

    def keep_early(self, told: frames.RefusedEarly, offset_ns: int) -> None:
        """Keep what a front has refused, for whoever asks about it; its clock is so far ahead."""
        self._backend.keep_early(told, offset_ns)

    def denied_at_fronts(self, denial: Denial, number: int) -> None:
        """Count what a front has denied."""
        for _ in range(min(number, 1 << 20)):
            self._backend.denied(denial)

    def left(self, link: FrontLink, reason: str) -> None:
        """A front's link is over."""
        self._links.pop(link, None)
        log.info("front %s left: %s", link.name, reason)

    def busy(self) -> tuple[Any, ...]:
        """Count a request that the throttle keeps out, and say what it hears: the same while the rate is the same."""
        rate_rps = self.throttle.rate_rps
        if rate_rps != self._busy[0]:
            self._busy = rate_rps, _failure(0, self.throttle.refusal())[1:]
        self.door.count(Refusal.OVERLOADED)
        return self._busy[1]

    # --- memory -------------------------------------------------------------------------------

    def new_front(self) -> int:
        """Make a number for a front, which no other has had."""
        self._last_front += 1
        return self._last_front

    def new_number(self) -> int:
        """Make a number for memory, which no other has had."""
        self._last_memory += 1
        return self._last_memory

    def share(self, memory: MappedMemory, file: int, link: FrontLink) -> None:
        """Let workers read a front's memory, whose file is given, and the front theirs."""
        self._workers.share(memory, file)
        for arena, number in list(self._outputs.items()):
            link.offer(number, arena)

    def unshare(self, memory: MappedMemory) -> None:
        """A front is gone."""
        self._workers.unshare(memory)

    def keep_while_alive(self, process: int, views: dict[int, list[Buffer]], instance: str) -> None:
        """Keep views until a front's process has ended, or the front says at what it looks.

        Args:
            process: descriptor that tells of its end; -1: nothing tells.
            views: by request.
            instance: the front.
        """
        views = self._take_kept(instance) | views
        if process < 0:
            log.warning("a front that is gone may still read outputs: they are kept")
        else:
            asyncio.get_running_loop().add_reader(process, self._take_kept, instance)
        self._kept[instance] = process, views

    def _take_kept(self, instance: str) -> dict[int, list[Buffer]]:
        """Keep nothing for a front any more; returns what was kept."""
        process, views = self._kept.pop(instance, (-1, {}))
        if process >= 0:
            asyncio.get_running_loop().remove_reader(process)
            os.close(process)
        return views

    def _still_lent(self, instance: str, looks: Counter[int]) -> dict[int, list[Buffer]]:
        """Let go of what a front got over earlier connections, but for that at which it looks, as it says."""
        for link in list(self._links):
            if link.instance == instance:
                link.lost("replaced by its successor")
        views = self._take_kept(instance)
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
        number = self._outputs[outputs] = self.new_number()
        for link in list(self._links):
            link.offer(number, outputs)

    def _worker_is_gone(self, outputs: Arena) -> None:
        number = self._outputs.pop(outputs, 0)
        for link in list(self._links):
            link.forget(number)

    # --- coming and going ---------------------------------------------------------------------

    async def _attach(self, request: pb.AttachFrontRequest) -> pb.AttachFrontResponse:
        if request.protocol_version != wire.PROTOCOL_VERSION:
            raise ProtocolError(
                f"the front speaks protocol version {request.protocol_version}, "
                f"the controller {wire.PROTOCOL_VERSION}"
            )
        if not request.instance:
            raise ProtocolError("instance: found none, expected a name that no other front has")
        if self._knows_callers and not request.knows_callers:
            raise ProtocolError(
                "the front lets everybody in, and the controller does not: expected --keys (or"
                " --jwt-issuer) there too"
            )
        if len(self._links) >= FRONTS_MAX:
            raise NoRoomError(f"found {len(self._links)} fronts, expected {FRONTS_MAX} at most")
        name = f"{printable(request.host, 80)}-{request.pid}"
        caller = CALLER.get()
        token = self._listener.expect(lambda sock: self._dialled(sock, name, caller, request))
        # What it said at an earlier attempt holds no more.
        self._listener.forget(self._tokens.pop(request.instance, b""))
        self._tokens[request.instance] = token
        asyncio.get_running_loop().call_later(
            _DIAL_LIMIT_S, self._expect_no_more, request.instance, token
        )
        return pb.AttachFrontResponse(
            heartbeat_interval_ms=self.heartbeats.interval_ms,
            silence_limit_ms=self.heartbeats.silence_limit_ms,
            socket_path=self._listener.path,
            socket_port=self._listener.port,
            token=token,
            default_slo_ns=self._backend.default_slo_ns,
            message_bytes_max=self.message_bytes_max,
            lineage=self._term.lineage,
            generation=self._term.generation,
        )

    def _expect_no_more(self, instance: str, token: bytes) -> None:
        self._listener.forget(token)
        if self._tokens.get(instance) == token:
            del self._tokens[instance]

    def _dialled(
        self, sock: socket.socket, name: str, caller: Caller, request: pb.AttachFrontRequest
    ) -> None:
        try:
            address = "" if sock.family == socket.AF_UNIX else _say(sock.getpeername())
        except OSError as error:
            log.info("front %s broke its connection as it joined: %s", name, error.strerror)
            sock.close()
            return
        self.is_ready = self.catalogue.ready
        self._tokens.pop(request.instance, None)
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
        """Tell the fronts of a new generation, of which a turn of the loop may bring thousands."""
        if self._links and not self._is_renewed:
            self._is_renewed = True
            asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        self._is_renewed = False
        self.is_ready = self.catalogue.ready
        for link in list(self._links):
            link.beat()


def _failure(ask_id: int, error: Exception) -> tuple[Any, ...]:
    code, text, details = status_of(error, method="ModelInfer")
    told = {name: each.encode() if isinstance(each, str) else each for name, each in details}
    return ask_id, code.value[0], text, told


def _nothing() -> None:
    pass


def _say(address: tuple[Any, ...]) -> str:
    host, port, *_ = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _process_of(sock: socket.socket) -> int:
    """Open a descriptor that tells when the process at the other end has ended; -1: nothing tells."""
    if sock.family != socket.AF_UNIX:
        return -1
    try:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(credentials)
        return os.pidfd_open(pid)
    except OSError:
        return -1  # It has ended, or lives in another name space.
