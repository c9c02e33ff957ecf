"""What a worker and its controller tell each other besides actions and results: models, memory, heartbeats, leaving.

Each message is the header of a frame (`clockwright.wire.frames`) on the worker's one connection; a chunk of a file has
its content as payload. `Register` and its answer (`clockwright.wire.peer.Welcome`) travel in the call by which the
worker asks for that connection.

Times are on the worker's monotonic clock if the controller sends them to a worker or gets them from one; the
controller's end of the link translates.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from clockwright.errors import ProtocolError
from clockwright.units import TIME_NS_MAX
from clockwright.wire.bulk import Buffer
from clockwright.wire.frame_headers import MEMORIES_MAX, TOKEN_BYTES
from clockwright.wire.frames import Frame, make_frame
from clockwright.wire.tensors import TensorSpec

_Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Size = Annotated[int, Meta(ge=0)]
_Time = Annotated[int, Meta(gt=-TIME_NS_MAX, lt=TIME_NS_MAX)]
_MemoryBytes = Annotated[int, Meta(ge=0, le=1 << 48)]
_Memory = Annotated[int, Meta(gt=0, lt=MEMORIES_MAX)]
_Front = Annotated[int, Meta(gt=0, lt=1 << 32)]

# The first element of each message: `clockwright.wire.frame_headers` has smaller ones.
_TAG_MIN: Final = 32
_TAG_MAX: Final = 63


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A message that is the header of a frame."""


class BatchProfile(msgspec.Struct, array_like=True):
    """How long a batch takes."""

    batch_size: _Count
    exec_ns: int


class ReadyModel(_Message, tag=35):
    """A model is compiled and measured, and takes actions from now on."""

    model_id: str
    architecture_id: str = ""
    num_pages: _Count = 0
    weights_bytes: _Size = 0
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    #: Measured, or the modelled device's.
    load_ns: int = 0
    #: Ascending.
    batches: tuple[BatchProfile, ...] = ()
    #: The compiled model was found on disk.
    from_cache: bool = False
    #: `CardReport.clock_mhz` when the batches were measured; 0: not known.
    clock_mhz: _Count = 0
    #: Why its rows run one by one although larger batches were offered; empty if they do not.
    one_by_one: str = ""


class Held(msgspec.Struct, array_like=True):
    """A model that a worker has ready since an earlier connection, perhaps to another controller."""

    #: What the worker said of it then.
    ready: ReadyModel
    #: Digest of the offer that it answered (`offer_digest`).
    offer_digest: bytes
    #: Its weights are in pages of the cache.
    resident: bool = False


class Register(msgspec.Struct, array_like=True):
    """A worker asks for a connection. Further elements, of a later version, are ignored: the first tells the version."""

    #: `clockwright.wire.peer.PROTOCOL_VERSION` of the worker; a worker of another version is rejected.
    protocol_version: _Count
    #: Chosen by the worker, unique while it lives ("HOST-PID" unless set by the operator).
    worker_id: str = ""
    #: "cpu", "cuda:0", "modelled:table1".
    device: str = ""
    #: Estimates are kept per kind: two workers of one kind run the same kernels equally fast.
    gpu_kind: str = ""
    num_pages: _Count = 0
    page_bytes: _Size = 0
    arena_bytes: _Size = 0
    host: str = ""
    pid: _Count = 0
    held: tuple[Held, ...] = ()
    #: Where fronts bring inputs and get outputs past the controller: this host and port; 0: nowhere.
    payload_host: str = ""
    payload_port: _Count = 0
    #: Fingerprint of the worker's certificate there; empty: no TLS.
    payload_certificate_sha256: bytes = b""


class CardReport(msgspec.Struct, array_like=True):
    """What a look at a GPU showed."""

    #: Level of the clock that kernels run at, MHz; small changes do not count. 0: the card does not say.
    clock_mhz: _Count = 0
    #: The highest level.
    clock_mhz_max: _Count = 0
    #: What makes it slower than it could be, or wrong, in words; empty while it is well.
    complaints: tuple[str, ...] = ()


class Heartbeat(_Message, tag=32):
    """A sign of life, and a sample of the clocks."""

    #: Sender's monotonic clock, ns, when the message was handed to the socket.
    sent_ns: _Time
    #: Smallest (own clock at receipt - `sent_ns` of the peer) of the recent past. None: nothing was received yet.
    min_delta_ns: _Time | None = None
    #: From a worker that has just looked at its card.
    card: CardReport | None = None


class FileOffer(msgspec.Struct, array_like=True):
    """A file of a model."""

    #: Relative to the version folder; no "..", no absolute path.
    name: str
    num_bytes: _Size
    #: In hex.
    sha256: str


class ModelOffer(_Message, tag=38):
    """What the controller knows of a model before a worker has seen it."""

    model_id: str
    #: "model.onnx" and the files next to it.
    files: tuple[FileOffer, ...] = ()
    #: Ascending.
    batch_sizes: tuple[_Count, ...] = ()
    #: Sizes by symbol; a negative one is the largest of a dimension that stays open.
    fixed_dimensions: dict[str, int] = {}
    #: Row of the profile that a modelled device uses; empty: the model's own name.
    profile: str = ""


class ModelNeeded(_Message, tag=33):
    """The worker lacks the contents with these hashes; it has the others in its cache."""

    model_id: str
    sha256: tuple[str, ...]


class ModelChunk(_Message, tag=39):
    """A piece of a file, which is the payload."""

    model_id: str
    sha256: str
    offset: _Size
    last: bool = False


class ChunkReceived(_Message, tag=37):
    """Flow control: the controller keeps a few chunks in flight, so that actions never queue behind a file."""

    model_id: str = ""
    sha256: str = ""
    #: In all so far.
    num_bytes: _Size = 0


class ModelProgress(_Message, tag=34):
    """What the worker does with an offer: "compiling", "profiling batch 4"."""

    model_id: str
    stage: str


class ModelRefused(_Message, tag=36):
    """The worker cannot serve a model."""

    model_id: str
    reason: str
    #: Workers of another kind are to serve it: this says nothing about the model itself.
    for_others: bool = False


class ModelDrop(_Message, tag=40):
    """The worker is to forget a model."""

    model_id: str


class Drain(_Message, tag=41):
    """From a worker: it wants to leave, so send nothing new. From the controller: all is answered, leave."""

    reason: str


class Ended(_Message, tag=42):
    """The controller's last message: why it closes the connection."""

    reason: str


class MemoryOffer(_Message, tag=43):
    """Map these two files, which come with this message, and answer `MemoryMapped`.

    After that, an Infer's tensors may be there.
    """

    inputs_bytes: _MemoryBytes
    outputs_bytes: _MemoryBytes


class FurtherMemory(_Message, tag=44):
    """Map a file of a front, which comes with this message, to read inputs there, and answer `MemoryMapped`."""

    number: _Memory
    num_bytes: _MemoryBytes


class ForgetMemory(_Message, tag=45):
    """This memory is not used any more."""

    number: _Memory


class MemoryMapped(_Message, tag=46):
    """The worker has mapped memory."""

    #: 0: the controller's own, and that of the worker's outputs.
    number: Annotated[int, Meta(ge=0, lt=MEMORIES_MAX)] = 0


class ExpectFront(_Message, tag=47):
    """Accept inputs from the front with this token, and send it its outputs."""

    number: _Front
    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    #: Bytes of the largest inputs to one request.
    inputs_bytes_max: _Count


class FrontGone(_Message, tag=48):
    """A front is gone: it sends no inputs and waits for no outputs."""

    number: _Front


FromWorker = (
    Heartbeat
    | ModelNeeded
    | ModelProgress
    | ReadyModel
    | ModelRefused
    | ChunkReceived
    | MemoryMapped
    | Drain
)
ToWorker = (
    Heartbeat
    | ModelOffer
    | ModelChunk
    | ModelDrop
    | MemoryOffer
    | FurtherMemory
    | ForgetMemory
    | ExpectFront
    | FrontGone
    | Drain
    | Ended
)

encode = msgspec.msgpack.Encoder().encode
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

_AnyMessage = TypeVar("_AnyMessage")


def is_message(header: Buffer) -> bool:
    """Whether a frame has a message of this module as header, and not an action or a result."""
    return len(header) > 1 and _TAG_MIN <= header[1] <= _TAG_MAX


def frame(message: FromWorker | ToWorker, *payload: Buffer) -> list[Buffer]:
    """Make the frame of a message, as buffers to be sent one after the other."""
    return make_frame(encode(message), payload)


def decode_from_worker(received: Frame) -> FromWorker:
    """Read a worker's message. Raises ProtocolError if it is malformed."""
    if len(received[1]):
        raise ProtocolError(f"a message with a payload of {len(received[1])} bytes, expected 0")
    return _decode(_from_worker, received[0], "message of a worker")


def decode_to_worker(received: Frame) -> ToWorker:
    """Read a controller's message; as `decode_from_worker`."""
    return _decode(_to_worker, received[0], "message of a controller")


def _decode(decoder: msgspec.msgpack.Decoder[_AnyMessage], data: Buffer, what: str) -> _AnyMessage:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(data)} bytes that are no {what}: {error}") from None


def offer_digest(offer: ModelOffer) -> bytes:
    """The SHA-256 of an offer without the model's id: offers with equal digests get equal answers."""
    anonymous: Any = msgspec.structs.replace(offer, model_id="")
    return hashlib.sha256(encode(anonymous)).digest()
