"""What a front process and its controller tell each other, as frames (`clockwright.wire.frames`).

A front sends requests (`Asks`), withdraws them (`Withdrawn`) and asks for descriptions (`Describe`). The controller
sends `Answers` and `Described`. A request is an `Ask` and its answer a `Told`, as in one process (`controller.port`).
All requests of one turn of the event loop travel in one message. A request takes some 30 bytes there and its answer
12, without the tensors. Heartbeats (`FrontBeat` and `Beat`) also compare the clocks.

Large tensors lie in shared memory, or the front keeps them (`APART`) until the controller names a worker (`Feed`).
The front then exchanges tensors with that worker. If it cannot reach the worker, the controller passes the inputs on
(`HandOn`).

Every time is on the front's clock; the controller's end translates (`front_link`).

A length is checked before memory is allocated for it, as in `clockwright.wire.frames`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from clockwright.errors import Denial, ProtocolError, Refusal
from clockwright.units import SLO_NS_MAX
from clockwright.wire.bulk import Buffer
from clockwright.wire.frame_headers import TOKEN_BYTES
from clockwright.wire.frames import Frame, make_frame
from controller.front.admission.early_quotas import TENANTS_MAX
from controller.front.oip.protocol import Servable
from controller.port import (
    Answered,
    Ask,
    Bound,
    Count,
    Failed,
    Id,
    Name,
    Time,
    Told,
    Words,
)

#: A message is closed when it holds so many requests, or so many bytes of tensors: a large tensor shall not keep
#: the small ones waiting that came before it.
REQUESTS_MAX: Final = 1024
PAYLOAD_BYTES: Final = 64 << 10
#: Requests of which a beat says that the front has refused them by itself. More are only counted.
EARLY_TOLD_MAX: Final = 64

_ASKS, _WITHDRAWAL, _DESCRIBE, _FRONT_BEAT, _TOLD, _DESCRIBED, _BEAT = range(7)
_MEMORY, _MAPPED, _FORGET, _RETURNED = range(7, 11)
_WORKER, _WORKER_GONE, _FEED, _HAND_ON = range(11, 15)


class Asks(msgspec.Struct, array_like=True, tag=_ASKS, forbid_unknown_fields=True):
    """Requests of a turn."""

    asks: tuple[Ask, ...]


class Withdrawn(msgspec.Struct, array_like=True, tag=_WITHDRAWAL, forbid_unknown_fields=True):
    """These requests are withdrawn."""

    ask_ids: tuple[Id, ...]


class Describe(msgspec.Struct, array_like=True, tag=_DESCRIBE, forbid_unknown_fields=True):
    """Asks for the description of a name that a client gave."""

    query_id: Id
    name: Name
    version: Name


class RefusedEarly(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A named request that a front refused by itself, so that the controller can explain it."""

    ask: Ask
    #: What was asked.
    name: Name
    departure_ns: Time
    #: The tenant's bounds, as in `core.quotas.Exceeded`.
    bound: Bound
    expected: Annotated[float, Meta(ge=0, le=float(SLO_NS_MAX))]
    retry_ns: Time | None


class FrontBeat(msgspec.Struct, array_like=True, tag=_FRONT_BEAT, forbid_unknown_fields=True):
    """A front's heartbeat."""

    #: As late as possible before it leaves.
    sent_ns: Time
    #: Smallest (own clock at receipt - the peer's `sent_ns`) of the recent past; None: nothing was received.
    min_delta_ns: Time | None
    #: Requests that the front has refused since its last beat, by reason.
    refused: dict[Refusal, Count]
    #: Calls that it has denied since then.
    denied: dict[Denial, Count]
    #: Requests that it has refused since then because their tenant's rate was used up, by tenant.
    refused_early: Annotated[dict[Name, Count], Meta(max_length=TENANTS_MAX)]
    #: The first of them that have a name.
    early: Annotated[tuple[RefusedEarly, ...], Meta(max_length=EARLY_TOLD_MAX)]
    #: Requests since then that were malformed, or did not fit what they name.
    bad_requests: Count = 0


class Answers(msgspec.Struct, array_like=True, tag=_TOLD, forbid_unknown_fields=True):
    """Answers and refusals of requests."""

    told: tuple[Told, ...]
    #: Requests with an input in the front's memory that is not read any more; one entry per input.
    freed: tuple[Id, ...]


class Described(msgspec.Struct, array_like=True, tag=_DESCRIBED, forbid_unknown_fields=True):
    """The description of a name, or the error."""

    query_id: Id
    #: The number that requests name it by.
    number: Id
    servable: Servable | None
    failure: Failed | None
    #: No worker has described it yet, and one may soon.
    not_yet: bool
    #: Its inputs may stay with the front until a worker is named.
    is_held: bool

    def read(self) -> Servable:
        """Make what a front checks requests against."""
        if self.servable is None:
            raise ProtocolError("a description without anything described")
        return self.servable


class Beat(msgspec.Struct, array_like=True, tag=_BEAT, forbid_unknown_fields=True):
    """A controller's heartbeat."""

    sent_ns: Time
    min_delta_ns: Time | None
    #: Requests may come: the front's clock is known.
    known: bool
    #: Changes whenever a description may have changed.
    generation: Id
    #: Every model is ready, or known to be unfit.
    ready: bool


class LentMemory(msgspec.Struct, array_like=True, tag=_MEMORY, forbid_unknown_fields=True):
    """Map the file that comes with this, and say so: tensors may lie there then.

    A front's holds inputs. A controller's holds the outputs of one worker, and is called by a number.
    """

    number: Id
    num_bytes: Annotated[int, Meta(gt=0, le=1 << 48)]


class Mapped(msgspec.Struct, array_like=True, tag=_MAPPED, forbid_unknown_fields=True):
    """The memory of that number is mapped."""

    number: Id


class Forget(msgspec.Struct, array_like=True, tag=_FORGET, forbid_unknown_fields=True):
    """Nothing comes from that memory any more."""

    number: Id


class Returned(msgspec.Struct, array_like=True, tag=_RETURNED, forbid_unknown_fields=True):
    """Requests with an output in a worker's memory that is not read any more; one entry per output."""

    ask_ids: tuple[Id, ...]


class WorkerThere(msgspec.Struct, array_like=True, tag=_WORKER, forbid_unknown_fields=True):
    """A worker takes inputs from this front, and sends it outputs, if it can be reached."""

    number: Id
    host: Words
    port: Annotated[int, Meta(gt=0, lt=1 << 16)]
    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    #: The fingerprint of its certificate; empty: TLS is not spoken there.
    certificate_sha256: Annotated[bytes, Meta(max_length=32)]


class WorkerGone(msgspec.Struct, array_like=True, tag=_WORKER_GONE, forbid_unknown_fields=True):
    """A worker is gone; inputs that it was sent are lost."""

    number: Id


class Feed(msgspec.Struct, array_like=True, tag=_FEED, forbid_unknown_fields=True):
    """Send the inputs of requests to workers, and expect their outputs from there."""

    #: The request, the worker's number, the action's, and the request's in the action.
    feeds: tuple[tuple[Id, Id, Id, Count], ...]


class HandOn(msgspec.Struct, array_like=True, tag=_HAND_ON, forbid_unknown_fields=True):
    """Pass on inputs, which are the payload, to a worker that the front cannot reach."""

    worker: Id
    action_id: Id
    index: Count
    #: None: no inputs, because the request is withdrawn.
    lengths: tuple[Count, ...] | None


_encode = msgspec.msgpack.Encoder().encode
FromFront = Asks | Withdrawn | Describe | FrontBeat | LentMemory | Mapped | Returned | HandOn
FromController = (
    Answers | Described | Beat | LentMemory | Mapped | Forget | WorkerThere | WorkerGone | Feed
)
_from_front: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
_from_controller: msgspec.msgpack.Decoder[FromController] = msgspec.msgpack.Decoder(FromController)


def encode_asks(asks: Sequence[Ask], payload: Sequence[Buffer]) -> list[Buffer]:
    """Make the frame of requests."""
    return make_frame(_encode((_ASKS, asks)), payload)


def encode_answers(
    told: Sequence[Told], freed: Sequence[int], payload: Sequence[Buffer]
) -> list[Buffer]:
    """Make the frame of an `Answers`."""
    return make_frame(_encode((_TOLD, told, freed)), payload)


def encode_hand_on(
    worker: int, action_id: int, index: int, tensors: Sequence[Buffer] | None
) -> list[Buffer]:
    """Make the frame of a `HandOn`; None: there are no inputs."""
    lengths = None if tensors is None else [len(tensor) for tensor in tensors]
    return make_frame(_encode((_HAND_ON, worker, action_id, index, lengths)), tensors or ())


def encode(message: FromFront | FromController) -> list[Buffer]:
    """Make the frame of a message without tensors."""
    return make_frame(_encode(message), ())


def encode_one(message: LentMemory) -> bytes:
    """Make the frame of a message that is sent with a file."""
    (frame,) = make_frame(_encode(message), ())
    return bytes(frame)


def decode_from_front(header: Buffer) -> FromFront:
    """Read what a front sent. Raises ProtocolError if no front of this version sends that."""
    try:
        return _from_front.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(header)} bytes that no front sends: {error}") from None


def decode_from_controller(header: Buffer) -> FromController:
    """Read what a controller sent. Raises ProtocolError if no controller of this version sends that."""
    try:
        return _from_controller.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(header)} bytes that no controller sends: {error}") from None


def cut_payload(
    frame: Frame,
    entries: Sequence[Ask] | Sequence[Answered],
    look: Callable[[int, int, int], Buffer],
) -> Iterator[list[Buffer]]:
    """Cut a payload into the tensors of each entry, but for those that lie elsewhere, which `look` finds.

    Raises ProtocolError if the lengths are not those of the payload.
    """
    payload = memoryview(frame[1])
    begin = 0
    for entry in entries:
        tensors: list[Buffer] = []
        if not entry.places:
            for length in entry.lengths:
                tensors.append(payload[begin : begin + length])
                begin += length
        elif len(entry.places) != len(entry.lengths):
            raise ProtocolError(f"{len(entry.places)} places of {len(entry.lengths)} tensors")
        else:
            for length, place in zip(entry.lengths, entry.places, strict=True):
                if place == -1:
                    tensors.append(payload[begin : begin + length])
                    begin += length
                else:
                    tensors.append(look(entry.ask_id, place, length))
        if begin > len(payload):
            break
        yield tensors
    if begin != len(payload):
        raise ProtocolError(f"tensors of {begin} bytes in a payload of {len(payload)}")


def cut_hand_on(message: HandOn, frame: Frame) -> list[Buffer] | None:
    """Cut the inputs to pass on out of their frame. Returns None if the request is withdrawn.

    Raises ProtocolError if the lengths are not those of the payload.
    """
    payload = memoryview(frame[1])
    if sum(message.lengths or ()) != len(payload):
        raise ProtocolError(f"inputs of {message.lengths} bytes in a payload of {len(payload)}")
    if message.lengths is None:
        return None
    begin, tensors = 0, []
    for length in message.lengths:
        tensors.append(payload[begin : begin + length])
        begin += length
    return list(tensors)
