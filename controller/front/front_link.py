"""The controller's end of the links to fronts that are processes of their own.

A front asks by gRPC where the socket is, and gets a token (`front.proto`); all else travels there
(`link_frames`). Times are translated between the controller's clock and a front's here and nowhere else, as
workers' are, and no request arrives in the future.

A front checks requests against the description of a model that it was given, which has a number. Before a
request is asked here, its description is looked at again if anything has changed since: one that holds no more
makes the request stale, and the front begins it afresh.

A front is not trusted: what the protocol does not allow ends its link, and so does silence, or too much that
it leaves unread. To the scheduler its requests are withdrawn then, and no other front notices.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from clockwright import wire
from clockwright.bulk import Buffer
from clockwright.errors import ClockwrightError, ProtocolError, Refusal, RefusedError
from clockwright.foreign import printable
from clockwright.frames import HEADER_BYTES_MAX, Frame
from clockwright.v1 import front_pb2 as pb
from controller.catalogue import Catalogue
from controller.clock_sync import ClockSync
from controller.front import link_frames as frames
from controller.front.backend import Answerer, LocalBackend, ToldAnswer
from controller.front.door import Door
from controller.front.explanation import explain
from controller.front.methods import unary
from controller.front.statuses import status_of
from controller.runtime import Answer, NoAnswerError
from controller.selection.queries import Answered
from controller.worker_link import HeartbeatConfig
from controller.worker_socket import FrameSocket, SocketListener

log = logging.getLogger(__name__)

SERVICE = "clockwright.v1.FrontService"

# A front that asked for the way to the socket comes at once.
_DIAL_LIMIT_S = 10.0
# A front that leaves so many bytes of answers unread is as good as gone.
_UNREAD_BYTES_MAX = 256 << 20
# A front puts this many bytes of small tensors together beside one large message, at most.
_BESIDE_BYTES = 1 << 20


@dataclass(slots=True)
class _Description:
    """What fronts were told of a model or an application."""

    answerer: Answerer
    #: Of the catalogue, when it was found to hold.
    generation: int
    #: Of one row of each input.
    row_bytes: tuple[int, ...]

    @property
    def name(self) -> str:
        """What it is called."""
        return self.answerer.servable.name

    def check(self, ask: frames.Ask) -> None:
        """See that a request fits; its front has found so.

        Raises:
            ProtocolError: it does not.
        """
        rows = ask.rows
        expected = tuple([rows * num_bytes for num_bytes in self.row_bytes])
        if not 1 <= rows <= self.answerer.servable.max_rows or ask.lengths != expected:
            raise ProtocolError(
                f"request {ask.ask_id} to {self.name}: {rows} rows of {list(ask.lengths)} bytes"
            )


class _Asked:
    """A front's request, which waits for its answer here."""

    __slots__ = ("_explain", "_link", "_num_bytes", "_slo_end_ns", "ask_id", "over", "withdraw")

    def __init__(self, link: FrontLink, ask: frames.Ask, num_bytes: int, slo_end_ns: int) -> None:
        self.ask_id = ask.ask_id
        self.over = False
        self.withdraw: Callable[[], object] | None = None
        self._link = link
        self._explain = ask.explain
        self._num_bytes = num_bytes
        self._slo_end_ns = slo_end_ns

    def done(self) -> bool:
        """Whether nobody waits any more."""
        return self.over

    def begin(self) -> None:
        """Nothing here waits for a description."""

    def set_result(self, result: Answer | Answered | ToldAnswer) -> None:
        """Tell the front the answer."""
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
        self._link.failed(self, exception)

    def end(self, door: Door) -> None:
        """Nobody waits any more."""
        self.over = True
        door.leave(self._num_bytes)


class FrontLink:
    """One front's socket, and its open requests."""

    def __init__(self, links: FrontLinks, sock: socket.socket, name: str) -> None:
        """Begin to hear a front that has shown its token."""
        self.name = name
        #: Beats since the last sign of life.
        self.silent_ticks = 0
        self._links = links
        self._is_local = sock.family == socket.AF_UNIX
        self._clock = ClockSync()
        self._open: dict[int, _Asked] = {}
        self._data = FrameSocket(
            sock, self._take, self.lost, peer="front", unsent_bytes_max=_UNREAD_BYTES_MAX
        )
        self._data.reader.header_bytes_max = HEADER_BYTES_MAX
        self._data.reader.payload_bytes_max = links.message_bytes_max + _BESIDE_BYTES
        # What this turn of the event loop has to tell.
        self._answered: list[tuple[object, ...]] = []
        self._payload: list[Buffer] = []
        self._payload_bytes = 0
        self._refused: list[tuple[object, ...]] = []
        self._failed: list[tuple[object, ...]] = []
        self._stale: list[int] = []
        self._is_due = False
        self._is_over = False

    @property
    def offset_ns(self) -> int | None:
        """The front's clock minus ours; None: not known yet."""
        offset_ns = self._clock.offset_ns
        # On one host there is one clock, unless somebody has made it look otherwise.
        if self._is_local and offset_ns is not None and abs(offset_ns) <= self._clock.round_trip_ns:
            return 0
        return offset_ns

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
        self._answered.append(
            (asked.ask_id, departure_ns + (self.offset_ns or 0), parameters, lengths)
        )
        self._payload += outputs
        self._payload_bytes += sum(lengths)
        if self._payload_bytes > frames.PAYLOAD_BYTES or len(self._answered) >= frames.REQUESTS_MAX:
            self._flush()
        else:
            self._flush_soon()

    def failed(self, asked: _Asked, error: Exception) -> None:
        """Tell why there is no answer."""
        self._close(asked)
        self._fail(asked.ask_id, error)

    def beat(self) -> None:
        """Give a sign of life."""
        links = self._links
        beat = frames.Beat(
            links.clock(),
            self._clock.min_delta_ns,
            self._clock.offset_ns is not None,
            links.catalogue.generation,
            links.catalogue.ready,
        )
        self._data.send_now(frames.encode(beat))

    def tick(self) -> None:
        """Called at each beat: give a sign of life, and give up a front that gives none."""
        self.silent_ticks += 1
        self._data.tick()
        ticks, fault = self.silent_ticks, "silent"
        if self._data.stalled_ticks > ticks:
            ticks, fault = self._data.stalled_ticks, "it takes no more answers"
        silence_ms = ticks * self._links.heartbeats.interval_ms
        if silence_ms > self._links.heartbeats.silence_limit_ms:
            self.lost(f"{fault} for {silence_ms} ms")
        else:
            self.beat()

    def lost(self, reason: str) -> None:
        """Give the front up, and withdraw what it asked."""
        if self._is_over:
            return
        self._is_over = True
        self._data.close()
        self._links.left(self, reason)
        asked, self._open = list(self._open.values()), {}
        for each in asked:
            each.end(self._links.door)
            assert each.withdraw is not None
            each.withdraw()

    def _close(self, asked: _Asked) -> None:
        del self._open[asked.ask_id]
        asked.end(self._links.door)

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
        if self._answered or self._refused or self._failed or self._stale:
            self._flush()

    def _flush(self) -> None:
        told = frames.encode_told(
            self._answered, self._refused, self._failed, self._stale, self._payload
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
            elif isinstance(message, frames.Withdrawal):
                for ask_id in message.ask_ids:
                    asked = self._open.get(ask_id)
                    if asked is not None:
                        self._close(asked)
                        assert asked.withdraw is not None
                        asked.withdraw()
            elif isinstance(message, frames.Describe):
                described = self._links.describe(message)
                self._data.send(frames.encode(described))
            else:
                self._take_beat(message)

    def _take_beat(self, beat: frames.FrontBeat) -> None:
        was_known = self._clock.offset_ns is not None
        self._clock.heard(
            sent_ns=beat.sent_ns,
            received_ns=self._links.clock(),
            peer_min_delta_ns=beat.min_delta_ns,
        )
        for refusal, number in beat.refused.items():
            self._links.refused_at_doors(refusal, number)
        if not was_known:
            self.beat()

    def _take_asks(self, asks: Sequence[frames.Ask], frame: Frame) -> None:
        offset_ns = self.offset_ns
        if offset_ns is None:
            raise ProtocolError("a request before the front's clock is known")
        links, now_ns = self._links, self._links.clock()
        for ask, inputs in zip(asks, frames.cut_payload(frame, asks), strict=True):
            description = links.find(ask.number)
            if description is None:
                self._stale.append(ask.ask_id)
                self._flush_soon()
                continue
            description.check(ask)
            if ask.ask_id in self._open:
                raise ProtocolError(f"request {ask.ask_id} twice")
            num_bytes = sum(ask.lengths)
            try:
                links.door.enter(num_bytes)
            except RefusedError as error:
                self._fail(ask.ask_id, error)
                continue
            arrival_ns = min(ask.arrival_ns - offset_ns, now_ns)
            asked = _Asked(self, ask, num_bytes, arrival_ns + ask.slo_ns)
            self._open[ask.ask_id] = asked
            asked.withdraw = description.answerer.ask(asked, ask, inputs, arrival_ns)


class FrontLinks:
    """All fronts of a controller that are processes of their own."""

    def __init__(
        self,
        backend: LocalBackend,
        catalogue: Catalogue,
        listener: SocketListener,
        heartbeats: HeartbeatConfig | None = None,
        *,
        door: Door,
        message_bytes_max: int,
    ) -> None:
        """Take fronts.

        Args:
            backend: answers what they ask.
            catalogue: says when something is described otherwise.
            listener: takes their connections.
            heartbeats: how often each side gives a sign of life.
            door: bounds what all of them have open at once.
            message_bytes_max: bytes of the largest request.
        """
        self.clock = backend.clock
        self.catalogue = catalogue
        self.heartbeats = heartbeats or HeartbeatConfig()
        self.door = door
        self.message_bytes_max = message_bytes_max
        self._backend = backend
        self._listener = listener
        self._links: set[FrontLink] = set()
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

    # --- for the links ------------------------------------------------------------------------

    def describe(self, asked: frames.Describe) -> frames.Described:
        """Describe what a client names."""
        try:
            answerer = self._backend.find(asked.name, asked.version)
        except ClockwrightError as error:
            not_yet = isinstance(error, RefusedError) and error.refusal is Refusal.NO_WORKER
            failure = frames.Failure(*_failure(asked.query_id, error))
            return frames.Described(asked.query_id, 0, None, failure, not_yet)
        name = answerer.servable.name
        number = self._numbers.get(name, 0)
        if self.find(number) is None:
            self._descriptions.pop(number, None)
            self._last_number = number = self._last_number + 1
            generation = self.catalogue.generation
            row_bytes = tuple(spec.row_bytes for spec in answerer.servable.inputs)
            self._descriptions[number] = _Description(answerer, generation, row_bytes)
            self._numbers[name] = number
        return frames.described(asked.query_id, number, answerer.servable)

    def find(self, number: int) -> _Description | None:
        """Find the description of a number; None: it holds no more."""
        description = self._descriptions.get(number)
        if description is None:
            return None
        if description.generation != self.catalogue.generation:
            try:
                answerer: Answerer | None = self._backend.find(description.name, "")
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
        for _ in range(min(number, 1 << 20)):
            self._backend.refused_at_door(refusal)

    def left(self, link: FrontLink, reason: str) -> None:
        """A front's link is over."""
        self._links.discard(link)
        log.info("front %s left: %s", link.name, reason)

    # --- coming and going ---------------------------------------------------------------------

    async def _attach(self, request: pb.AttachFrontRequest) -> pb.AttachFrontResponse:
        if request.protocol_version != wire.PROTOCOL_VERSION:
            raise ProtocolError(
                f"the front speaks protocol version {request.protocol_version}, "
                f"the controller {wire.PROTOCOL_VERSION}"
            )
        name = f"{printable(request.host, 80)}-{request.pid}"
        token = self._listener.expect(lambda sock: self._dialled(sock, name))
        asyncio.get_running_loop().call_later(_DIAL_LIMIT_S, self._listener.forget, token)
        return pb.AttachFrontResponse(
            heartbeat_interval_ms=self.heartbeats.interval_ms,
            silence_limit_ms=self.heartbeats.silence_limit_ms,
            socket_path=self._listener.path,
            socket_port=self._listener.port,
            token=token,
            default_slo_ns=self._backend.default_slo_ns,
            message_bytes_max=self.message_bytes_max,
        )

    def _dialled(self, sock: socket.socket, name: str) -> None:
        self._links.add(FrontLink(self, sock, name))
        log.info("front %s joined", name)
        if self._timer is None:
            self._tick_later()

    def _tick_later(self) -> None:
        interval_s = self.heartbeats.interval_ms / 1000
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._tick)

    def _tick(self) -> None:
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
        for link in list(self._links):
            link.beat()


def _failure(ask_id: int, error: Exception) -> tuple[Any, ...]:
    code, text, details = status_of(error, method="ModelInfer")
    return ask_id, code.value[0], text, dict(details)
