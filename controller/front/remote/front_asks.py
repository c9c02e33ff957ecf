"""A front's requests at the controller: taken in, asked, and answered. The socket is `front_link`'s.

A front checks requests against its description of the model, which has a number. If anything has changed since, the
description is checked again here. If it does not hold any more, the request is stale, and the front begins it
again with a new description. If a request does not fit the description that holds, it fails alone.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import cast

from clockwright.errors import ProtocolError, Refusal, RefusedError
from clockwright.units import NO_REQUEST, RequestId
from clockwright.wire.bulk import Buffer, total_bytes
from clockwright.wire.frame_headers import APART
from clockwright.wire.frame_socket import FrameSocket
from clockwright.wire.frames import DIRECT_BYTES, Frame
from controller.front.admission.entrance import YOUNG_NS, Entrance
from controller.front.admission.limits import AdmissionLimits
from controller.front.remote import link_frames as frames
from controller.front.remote.backend import LocalBackend
from controller.front.remote.descriptions import AskSize, Description, Descriptions
from controller.front.remote.front_memory import FrontMemory
from controller.links.held_tensors import HeldInput, SentOutput
from controller.links.slabs import SLAB_BYTES_MIN
from controller.links.worker_link import WorkerLink
from controller.port import INTERNAL, Answered, Ask, Failed, Refused, Stale, Told
from controller.runtime import late_figures


class Shared:
    """What the requests of all fronts have in common."""

    def __init__(
        self,
        backend: LocalBackend,
        descriptions: Descriptions,
        door: AdmissionLimits,
        entrance: Entrance,
    ) -> None:
        self.backend = backend
        self.descriptions = descriptions
        self.door = door
        self.entrance = entrance

    def busy(self) -> Refused:
        """Count a request for which this event loop has no time. Returns its refusal."""
        self.door.count(Refusal.OVERLOADED, 1)
        return refused_by(self.entrance.refusal(self.backend.clock()))


class FrontAsk:
    """A front's request: the sink of its answer here."""

    __slots__ = ("_asks", "_num_bytes", "_waiting", "ask_id", "over", "request_id")

    def __init__(self, asks: FrontAsks, ask: Ask, num_bytes: int) -> None:
        self.ask_id = ask.ask_id
        self.over = False
        #: The number that withdraws it; 0: not asked yet.
        self.request_id = NO_REQUEST
        self._asks = asks
        self._num_bytes = num_bytes
        self._waiting: tuple[Ask, Sequence[Buffer], AskSize] | None = None

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """Send the front the answer or the refusal."""
        if self.over:
            return  # The front is lost: all its requests are withdrawn, one after the other.
        asks = self._asks
        told.ask_id = self.ask_id
        if isinstance(told, Answered):
            asks.answered(self, told, outputs)
        else:
            asks.unanswered(self, told)

    def wait(self, ask: Ask, inputs: Sequence[Buffer], size: AskSize) -> None:
        """Wait for a turn of the event loop."""
        self._waiting = ask, inputs, size

    def begin_waiting(self) -> None:
        """Have the request answered, whose turn has come."""
        assert self._waiting is not None
        (ask, inputs, size), self._waiting = self._waiting, None
        self._asks.begin_waiting(self, ask, inputs, size)

    def refuse(self) -> None:
        """Refuse the request: its turn did not come in time."""
        self._asks.refuse_waiting(self)

    def end(self, door: AdmissionLimits) -> None:
        """Close the request: it leaves the limits on admission."""
        self.over = True
        door.leave(self._num_bytes, begun=self._waiting is None)


class FrontAsks:
    """The open requests of one front."""

    def __init__(
        self,
        number: int,
        data: FrameSocket,
        memory: FrontMemory,
        workers: Mapping[int, WorkerLink],
        shared: Shared,
        *,
        is_local: bool,
    ) -> None:
        """Begin with none. Workers call the front by its number; `workers` are those without memory shared with it.

        With `is_local` it shares memory with the workers of this host.
        """
        self.number = number
        self.is_local = is_local
        self.shared = shared
        #: The front's clock minus ours (None: not known yet), and the round trip.
        self.offset_ns: int | None = None
        self.round_trip_ns = 0
        self._data = data
        self._memory = memory
        self._workers = workers
        self._open: dict[int, FrontAsk] = {}
        # Requests with an input that is not read any more, one entry per input; any thread appends.
        self._freed: deque[int] = deque()
        self._own_thread = threading.get_ident()
        #: Inputs that the front is to send to workers.
        self._feeds: list[tuple[int, int, int, int]] = []
        # Answers of this turn of the event loop.
        self._told: list[Told] = []
        self._payload: list[Buffer] = []
        self._payload_bytes = 0
        self._is_due = False
        self._is_over = False

    @property
    def num_open(self) -> int:
        """Requests that are not answered."""
        return len(self._open)

    # --- what is told -------------------------------------------------------------------------

    def answered(self, asked: FrontAsk, told: Answered, outputs: Sequence[Buffer]) -> None:
        """Send an answer."""
        if not told.more:
            self._close(asked)
        lengths = told.lengths = tuple([len(tensor) for tensor in outputs])
        num_bytes = sum(lengths)
        if outputs and isinstance(handle := outputs[0], SentOutput):
            told.sent = handle.worker, handle.action_id, handle.index
            told.places = (APART,) * len(lengths)
            outputs, num_bytes = (), 0
        elif self._memory.has_outputs and max(lengths, default=0) >= SLAB_BYTES_MIN:
            places = told.places = tuple(self._memory.lend(asked.ask_id, outputs))
            outputs = [tensor for tensor, at in zip(outputs, places, strict=True) if at < 0]
            num_bytes = total_bytes(outputs)
        told.expected_departure_ns += self.offset_ns or 0
        self._told.append(told)
        self._payload += outputs
        self._payload_bytes += num_bytes
        if self._payload_bytes > frames.PAYLOAD_BYTES or len(self._told) >= frames.REQUESTS_MAX:
            self._flush()
        elif not self._is_due:
            self._flush_soon()

    def unanswered(self, asked: FrontAsk, told: Told) -> None:
        """Send the reason why a request is not answered."""
        self._close(asked)
        if isinstance(told, Refused) and told.spent is not None and told.spent[2]:
            # What the front has on its way by then arrives later, and the two clocks may differ by so much.
            bound, rate_rps, until_ns = told.spent
            until_ns += (self.offset_ns or 0) - self.round_trip_ns
            told.spent = bound, rate_rps, until_ns
        self._tell(told)

    def _tell(self, told: Told) -> None:
        self._told.append(told)
        self._flush_soon()

    def feed(self, ask_id: int, worker: int, action_id: int, index: int) -> None:
        """Have the front send the inputs of a request to a worker; see `Holder`."""
        self._feeds.append((ask_id, worker, action_id, index))
        self._flush_soon()

    def free(self, ask_id: int) -> None:
        """An input is not read any more. Called in any thread."""
        self._freed.append(ask_id)
        if threading.get_ident() == self._own_thread and not self._is_over:
            self._flush_soon()

    def tell_freed(self) -> None:
        """Tell the front which inputs are not read any more, if any."""
        if self._freed:
            self._flush_soon()

    def lost(self) -> None:
        """The front is lost: withdraw its requests."""
        self._is_over = True
        asked, self._open = list(self._open.values()), {}
        # End all of them first: when one is withdrawn, the scheduler may refuse others, and the front is not told.
        for each in asked:
            each.end(self.shared.door)
        for each in asked:
            self.shared.backend.withdraw(each.request_id)

    def _close(self, asked: FrontAsk) -> None:
        del self._open[asked.ask_id]
        asked.end(self.shared.door)

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.shared.entrance.turns.soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_due = False
        if self._feeds:
            feeds, self._feeds = self._feeds, []
            self._data.send_now(frames.encode(frames.Feed(tuple(feeds))))
        if self._told or self._freed:
            self._flush()

    def _flush(self) -> None:
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        frame = frames.encode_answers(self._told, freed, self._payload)
        self._told, self._payload, self._payload_bytes = [], [], 0
        self._data.send_now(frame)

    # --- what it asks -------------------------------------------------------------------------

    def withdraw(self, ask_ids: Sequence[int]) -> None:
        """The front withdraws these requests."""
        for ask_id in ask_ids:
            asked = self._open.get(ask_id)
            if asked is not None:
                self._close(asked)
                self.shared.backend.withdraw(asked.request_id)

    def _look(self, ask_id: int, place: int, num_bytes: int) -> Buffer:
        if place == APART:
            if num_bytes < DIRECT_BYTES:
                raise ProtocolError(f"request {ask_id}: {num_bytes} bytes that its front keeps")
            return b""
        return self._memory.look(ask_id, place, num_bytes, functools.partial(self.free, ask_id))

    def take(self, asks: Sequence[Ask], frame: Frame) -> None:
        """Take requests in. Raises ProtocolError if their frame is malformed."""
        offset_ns = self.offset_ns
        if offset_ns is None:
            raise ProtocolError("a request before the front's clock is known")
        shared, open_, entrance = self.shared, self._open, self.shared.entrance
        entrance.turns.used()
        now_ns = shared.backend.clock()
        for ask, inputs in zip(asks, frames.cut_payload(frame, asks, self._look), strict=True):
            description = shared.descriptions.find(ask.target)
            if description is None:
                self._tell(Stale(ask.ask_id))
                continue
            try:
                size = description.check(ask)
            except ProtocolError as error:
                # Its front has a bug. The link stays, for the front's other requests.
                self._tell(Failed(INTERNAL, str(error), ask_id=ask.ask_id))
                continue
            if description.keeps_inputs(ask) and APART in ask.places:
                # The answers began to be kept after its front got the description.
                self._tell(Stale(ask.ask_id))
                continue
            if ask.ask_id in open_:
                raise ProtocolError(f"request {ask.ask_id} twice")
            # The answer's way to the front is spent of its SLO, so it counts as though it were spent already. Half of
            # the round trip is exact, however the ways share it: what the offset errs by, the way errs by, too.
            ask.arrival_ns = min(ask.arrival_ns - offset_ns, now_ns) - self.round_trip_ns // 2
            due_ns = ask.arrival_ns + ask.slo_ns
            if now_ns > due_ns > ask.arrival_ns + YOUNG_NS:
                self._too_late(ask, now_ns - ask.arrival_ns)
                continue
            try:
                shared.door.enter(size.num_bytes)
            except RefusedError as error:
                refused = refused_by(error)
                refused.ask_id = ask.ask_id
                self._tell(refused)
                continue
            asked = open_[ask.ask_id] = FrontAsk(self, ask, size.num_bytes)
            if entrance.has_time(shared.backend.clock(), ask.arrival_ns):
                self._begin(asked, ask, inputs, size, description)
                continue
            asked.wait(ask, inputs, size)
            if not entrance.enter(self, asked, ask.arrival_ns, ask.slo_ns):
                self.refuse_waiting(asked)

    def _begin(
        self,
        asked: FrontAsk,
        ask: Ask,
        inputs: Sequence[Buffer],
        size: AskSize,
        description: Description,
    ) -> None:
        if description.keeps_inputs(ask):
            if ask.places:
                # For longer than the request is open, perhaps, and the front's word is not enough for that.
                inputs = [bytes(tensor) for tensor in inputs]
        elif APART in ask.places or (size.is_large and self._workers):
            inputs = self._held(ask, inputs)
        asked.request_id = self.shared.backend.ask(description.described, ask, inputs, asked)

    def begin_waiting(
        self, asked: FrontAsk, ask: Ask, inputs: Sequence[Buffer], size: AskSize
    ) -> None:
        """Admit a request that waited, if its description still holds."""
        description = self.shared.descriptions.find(ask.target)
        if description is None or (description.keeps_inputs(ask) and APART in ask.places):
            self._close(asked)
            self._tell(Stale(ask.ask_id))
        else:
            self._begin(asked, ask, inputs, size, description)

    def refuse_waiting(self, asked: FrontAsk) -> None:
        """Refuse a request for which this event loop has no time."""
        self._close(asked)
        refused = self.shared.busy()
        refused.ask_id = asked.ask_id
        self._tell(refused)

    def _too_late(self, ask: Ask, waited_ns: int) -> None:
        """Refuse a request that waited for longer than its SLO before this loop looked at it."""
        self.shared.backend.refused_at_door(Refusal.LATE)
        figures = late_figures(ask.slo_ns, waited_ns, waited_ns)
        self._tell(Refused(Refusal.LATE, figures, ask_id=ask.ask_id))

    def _held(self, ask: Ask, inputs: Sequence[Buffer]) -> list[Buffer]:
        places = ask.places or [-1] * len(inputs)
        held = [
            HeldInput(self, ask.ask_id, length, None if place == APART else tensor)
            for length, place, tensor in zip(ask.lengths, places, inputs, strict=True)
        ]
        # Only the links read more of a tensor than its length.
        return cast("list[Buffer]", held)


def refused_by(error: RefusedError) -> Refused:
    """Turn an error into the refusal that the front gets."""
    return Refused(error.refusal, error.figures, message=error.message)
