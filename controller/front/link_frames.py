"""What a front process and its controller tell each other, as frames (`clockwright.frames`).

A front asks (`Asks`), withdraws (`Withdrawn`), wants things described (`Describe`), and hears what became of
all that (`Told`, `Described`). What happens in a turn of an event loop travels in one message. A request
takes some 30 bytes there and its answer 12, beside the tensors. A `Beat` of either side is the sign of life,
and tells clocks.

Large tensors lie in shared memory, or the front keeps them (`APART`) and sends them to the worker that it is told
(`Feed`), which sends it the outputs. What cannot go that way goes through here (`HandOn`).

Every time is on the front's clock; the controller's end translates (`front_link`).

Nothing is built from a length before the length is found to be possible: see `clockwright.frames`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from clockwright.bulk import Buffer
from clockwright.errors import Denial, ProtocolError, Refusal
from clockwright.frame_headers import APART, TOKEN_BYTES
from clockwright.frames import Frame, make_frame
from clockwright.tensors import TensorSpec
from clockwright.units import NAME_CHARS_MAX, SLO_NS_MAX, TIME_NS_MAX
from controller.front.early_quotas import TENANTS_MAX
from controller.front.oip import Servable

#: A message is closed when it holds so many requests, or so many bytes of tensors: a large tensor shall not keep
#: the small ones waiting that came before it.
REQUESTS_MAX: Final = 1024
PAYLOAD_BYTES: Final = 64 << 10
#: Requests of which a beat says that the front has refused them by itself. More are only counted.
EARLY_TOLD_MAX: Final = 64

_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Time = Annotated[int, Meta(gt=-TIME_NS_MAX, lt=TIME_NS_MAX)]
_Slo = Annotated[int, Meta(gt=0, le=SLO_NS_MAX)]
_Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
_Words = Annotated[str, Meta(max_length=1 << 16)]
_Counts = tuple[_Count, ...]
Parameters = dict[str, bool | int | str]

_ASKS, _WITHDRAWAL, _DESCRIBE, _FRONT_BEAT, _TOLD, _DESCRIBED, _BEAT = range(7)
_MEMORY, _MAPPED, _FORGET, _RETURNED = range(7, 11)
_WORKER, _WORKER_GONE, _FEED, _HAND_ON, _SPENT = range(11, 16)

# Where a tensor lies, as in `clockwright.frames`.
_Place = Annotated[int, Meta(ge=APART, lt=1 << 62)]


class Ask(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """One request."""

    ask_id: _Id
    #: The description that its front has checked it against.
    number: _Id
    rows: _Count
    arrival_ns: _Time
    slo_ns: _Slo
    explain: bool
    #: Its caller's, where the front knows callers.
    tenant: _Name
    context: _Name
    #: Bytes of its inputs.
    lengths: _Counts
    #: Where each lies in the front's memory; -1: in the payload, which holds those of all requests in their order;
    #: `APART`: the front keeps it. Empty: all are in the payload.
    places: tuple[_Place, ...]
    #: Who may say what became of an application's answer.
    owner: _Words
    #: What its client calls it; empty: it has no name.
    request_id: _Name

    @property
    def traced(self) -> bool:
        """What a trace wants to know, `explain` says."""
        return False


class Asks(msgspec.Struct, array_like=True, tag=_ASKS, forbid_unknown_fields=True):
    """Requests of a turn."""

    asks: tuple[Ask, ...]


class Withdrawn(msgspec.Struct, array_like=True, tag=_WITHDRAWAL, forbid_unknown_fields=True):
    """Nobody waits for these any more."""

    ask_ids: tuple[_Id, ...]


class Describe(msgspec.Struct, array_like=True, tag=_DESCRIBE, forbid_unknown_fields=True):
    """What does a client name so?"""

    query_id: _Id
    name: _Name
    version: _Name


class RefusedEarly(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A request with a name that a front has refused by itself, for whoever asks what became of it."""

    #: What its client calls it, and what was asked for.
    request_id: _Name
    name: _Name
    tenant: _Name
    rows: _Count
    arrival_ns: _Time
    departure_ns: _Time
    slo_ns: _Slo
    #: What its tenant may have, as in `core.quotas.Exceeded`.
    bound: Literal["rate_rps", "slo_ns_min", "slo_ns_max"]
    expected: Annotated[float, Meta(ge=0, le=float(SLO_NS_MAX))]
    retry_ns: _Time | None


class FrontBeat(msgspec.Struct, array_like=True, tag=_FRONT_BEAT, forbid_unknown_fields=True):
    """A front's sign of life."""

    #: As late as possible before it leaves.
    sent_ns: _Time
    #: Smallest (own clock at receipt - the peer's `sent_ns`) of the recent past; None: nothing was received.
    min_delta_ns: _Time | None
    #: Requests that the front has refused since its last beat, by reason.
    refused: dict[Refusal, _Count]
    #: Calls that it has denied since then.
    denied: dict[Denial, _Count]
    #: Requests that it has refused since then because their tenant's rate was used up, by tenant.
    refused_early: Annotated[dict[_Name, _Count], Meta(max_length=TENANTS_MAX)]
    #: The first of them that have a name.
    early: Annotated[tuple[RefusedEarly, ...], Meta(max_length=EARLY_TOLD_MAX)]


class ToldOutputs(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A request that is answered."""

    ask_id: _Id
    expected_departure_ns: _Time
    #: What the response says beside its tensors; None: nothing.
    parameters: Parameters | None
    #: Bytes of its outputs, and where they lie, as in `Ask`: in the memory of a worker.
    lengths: _Counts
    places: tuple[_Place, ...]
    #: A worker has sent them: its number, the action's, and the request's in the action; None: it has not.
    sent: tuple[_Id, _Id, _Count] | None


class Refused(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A request that the scheduler refuses; the figures are in ns."""

    ask_id: _Id
    refusal: Refusal
    figures: dict[str, int]
    detail: str


class Failure(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Any other error, as the status that the client shall get."""

    ask_id: _Id
    code: _Count
    text: str
    #: Trailing metadata; text in UTF-8.
    details: dict[str, bytes]


class Told(msgspec.Struct, array_like=True, tag=_TOLD, forbid_unknown_fields=True):
    """What became of requests."""

    answered: tuple[ToldOutputs, ...]
    refused: tuple[Refused, ...]
    failed: tuple[Failure, ...]
    #: Their description holds no more.
    stale: tuple[_Id, ...]
    #: Nobody looks at an input of theirs in the front's memory any more; once for each such input.
    freed: tuple[_Id, ...]


class _Tensor(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    datatype: str
    row_shape: tuple[int, ...]


class _Servable(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    version: str
    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Tensor, ...]
    max_rows: int
    slo_ns: int | None
    has_contexts: bool


class Described(msgspec.Struct, array_like=True, tag=_DESCRIBED, forbid_unknown_fields=True):
    """What a client names so, or why that cannot be said."""

    query_id: _Id
    #: What requests call it by.
    number: _Id
    servable: _Servable | None
    failure: Failure | None
    #: No worker has described it yet, and one may soon.
    not_yet: bool
    #: Its inputs may stay with the front until a worker is named.
    is_held: bool

    def read(self) -> Servable:
        """Make what a front checks requests against."""
        found = self.servable
        if found is None:
            raise ProtocolError("a description without anything described")
        return Servable(
            found.name,
            found.version,
            _read_tensors(found.inputs),
            _read_tensors(found.outputs),
            found.max_rows,
            found.slo_ns,
            found.has_contexts,
        )


class Beat(msgspec.Struct, array_like=True, tag=_BEAT, forbid_unknown_fields=True):
    """A controller's sign of life."""

    sent_ns: _Time
    min_delta_ns: _Time | None
    #: Requests may come: the front's clock is known.
    known: bool
    #: Another number whenever something may be described otherwise than before.
    generation: _Id
    #: Every model is ready, or known to be unfit.
    ready: bool


class LentMemory(msgspec.Struct, array_like=True, tag=_MEMORY, forbid_unknown_fields=True):
    """Map the file that comes with this, and say so: tensors may lie there then.

    A front's holds inputs. A controller's holds the outputs of one worker, and is called by a number.
    """

    number: _Id
    num_bytes: Annotated[int, Meta(gt=0, le=1 << 48)]


class Mapped(msgspec.Struct, array_like=True, tag=_MAPPED, forbid_unknown_fields=True):
    """The memory of that number is mapped."""

    number: _Id


class Forget(msgspec.Struct, array_like=True, tag=_FORGET, forbid_unknown_fields=True):
    """Nothing comes from that memory any more."""

    number: _Id


class Returned(msgspec.Struct, array_like=True, tag=_RETURNED, forbid_unknown_fields=True):
    """The front looks at an output of these no more; once for each output in a worker's memory."""

    ask_ids: tuple[_Id, ...]


class WorkerThere(msgspec.Struct, array_like=True, tag=_WORKER, forbid_unknown_fields=True):
    """A worker takes inputs from this front, and sends it outputs, if it can be reached."""

    number: _Id
    host: _Words
    port: Annotated[int, Meta(gt=0, lt=1 << 16)]
    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    #: The fingerprint of its certificate; empty: TLS is not spoken there.
    certificate_sha256: Annotated[bytes, Meta(max_length=32)]


class WorkerGone(msgspec.Struct, array_like=True, tag=_WORKER_GONE, forbid_unknown_fields=True):
    """A worker is gone, and with it all that it was sent."""

    number: _Id


class Feed(msgspec.Struct, array_like=True, tag=_FEED, forbid_unknown_fields=True):
    """Send the inputs of requests to workers, and expect their outputs from there."""

    #: The request, the worker's number, the action's, and the request's in the action.
    feeds: tuple[tuple[_Id, _Id, _Id, _Count], ...]


class SpentTenants(msgspec.Struct, array_like=True, tag=_SPENT, forbid_unknown_fields=True):
    """Tenants ask for what they may not have."""

    #: The tenant, until when it is refused whatever comes, and its rate in requests per second.
    rates: tuple[tuple[_Name, _Time, Annotated[float, Meta(gt=0)]], ...]
    #: The tenant, an SLO in ns, and whether it is the least that it may have, or the largest.
    slos: tuple[tuple[_Name, _Slo, bool], ...]


class HandOn(msgspec.Struct, array_like=True, tag=_HAND_ON, forbid_unknown_fields=True):
    """Hand inputs on to a worker that the front cannot reach; they are the payload."""

    worker: _Id
    action_id: _Id
    index: _Count
    #: None: there are none, because nobody waits for the answer any more.
    lengths: _Counts | None


_encode = msgspec.msgpack.Encoder().encode
FromFront = Asks | Withdrawn | Describe | FrontBeat | LentMemory | Mapped | Returned | HandOn
FromController = (
    Told
    | Described
    | Beat
    | LentMemory
    | Mapped
    | Forget
    | WorkerThere
    | WorkerGone
    | Feed
    | SpentTenants
)
_from_front: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
_from_controller: msgspec.msgpack.Decoder[FromController] = msgspec.msgpack.Decoder(FromController)


def encode_asks(asks: Sequence[tuple[object, ...]], payload: Sequence[Buffer]) -> list[Buffer]:
    """Make the frame of requests; each is the fields of an `Ask` in their order."""
    return make_frame(_encode((_ASKS, asks)), payload)


def encode_told(
    answered: Sequence[tuple[object, ...]],
    refused: Sequence[tuple[object, ...]],
    failed: Sequence[tuple[object, ...]],
    stale: Sequence[int],
    freed: Sequence[int],
    payload: Sequence[Buffer],
) -> list[Buffer]:
    """Make the frame of a `Told`, of whose entries each is the fields in their order."""
    return make_frame(_encode((_TOLD, answered, refused, failed, stale, freed)), payload)


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


def described(query_id: int, number: int, servable: Servable, *, is_held: bool) -> Described:
    """Make the answer to a `Describe`; `is_held`: inputs may stay with the front."""
    found = _Servable(
        servable.name,
        servable.version,
        _tensors(servable.inputs),
        _tensors(servable.outputs),
        servable.max_rows,
        servable.slo_ns,
        servable.has_contexts,
    )
    return Described(query_id, number, found, None, not_yet=False, is_held=is_held)


def decode_from_front(header: Buffer) -> FromFront:
    """Read what a front sent.

    Raises:
        ProtocolError: no front of this version sends that.
    """
    try:
        return _from_front.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(header)} bytes that no front sends: {error}") from None


def decode_from_controller(header: Buffer) -> FromController:
    """Read what a controller sent.

    Raises:
        ProtocolError: no controller of this version sends that.
    """
    try:
        return _from_controller.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(header)} bytes that no controller sends: {error}") from None


def cut_payload(
    frame: Frame,
    entries: Sequence[Ask] | Sequence[ToldOutputs],
    look: Callable[[int, int, int], Buffer],
) -> Iterator[list[Buffer]]:
    """Cut a payload into the tensors of each entry, but for those that lie elsewhere.

    Args:
        frame: with the payload.
        entries: all of its message.
        look: finds a tensor by its entry's id, place and length.

    Raises:
        ProtocolError: the lengths are not those of the payload.
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
    """Cut the inputs that are to be handed on out of their frame; None: there are none.

    Raises:
        ProtocolError: the lengths are not those of the payload.
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


def _tensors(specs: Sequence[TensorSpec]) -> tuple[_Tensor, ...]:
    return tuple(_Tensor(spec.name, spec.datatype, spec.row_shape) for spec in specs)


def _read_tensors(tensors: Sequence[_Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(each.name, each.datatype, each.row_shape) for each in tensors)
