"""What stands in the headers of frames (`clockwright.frames`), and how it is checked.

Apart from them, because msgspec looks at the types of these records as the module is loaded, and mypyc, which
compiles the other (`make native`), leaves nothing of them.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from clockwright.actions import ActionError
from clockwright.units import DURATION_NS_MAX, TIME_NS_MAX

TOKEN_BYTES: Final = 32
#: Most bytes of a header, whatever it holds.
HEADER_BYTES_MAX: Final = 1 << 20
#: Words on an action may quote an engine or two; what is longer is cut by the sender.
WORDS_CHARS_MAX: Final = 1000

_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Time = Annotated[int, Meta(gt=-TIME_NS_MAX, lt=TIME_NS_MAX)]
_Duration = Annotated[int, Meta(ge=0, le=DURATION_NS_MAX)]
_Words = Annotated[str, Meta(max_length=WORDS_CHARS_MAX)]
_Counts = Annotated[tuple[_Count, ...], Meta(max_length=HEADER_BYTES_MAX)]

# Where something lies in shared memory: the memory's number and, in so many bits, the offset. -1: it travels in
# the payload.
PLACE_BITS: Final = 48
#: The place of a tensor that travels between a front and a worker.
APART: Final = -2
_MEMORIES_MAX: Final = 1 << 14
_Place = Annotated[int, Meta(ge=APART, lt=_MEMORIES_MAX << PLACE_BITS)]
_Number = Annotated[int, Meta(gt=0, lt=_MEMORIES_MAX)]
_Places = Annotated[tuple[_Place, ...], Meta(max_length=HEADER_BYTES_MAX)]
_Size = Annotated[int, Meta(ge=0, le=1 << 48)]
_FrontNumber = Annotated[int, Meta(gt=0, lt=1 << 32)]

INFER, LOAD, EVICT, WITHDRAW, RESULT, MEMORY, MAPPED, FURTHER, FORGET = range(9)
EXPECT, FRONT_GONE, INPUTS, OUTPUTS = range(9, 13)


class InferHeader(msgspec.Struct, array_like=True, tag=INFER, forbid_unknown_fields=True, gc=False):
    """Compute a batch. What it says beside `Infer`: where tensors lie, and the controller's generation."""

    action_id: _Id
    model_id: _Words
    batch_size: _Count
    rows: _Counts
    earliest_ns: _Time
    latest_ns: _Time
    expected_duration_ns: _Duration
    lengths: _Counts
    places: _Places
    room: tuple[_Size, _Size] | None
    generation: _Id = 0
    fronts: _Counts = ()


class LoadHeader(msgspec.Struct, array_like=True, tag=LOAD, forbid_unknown_fields=True, gc=False):
    """Load a model's weights."""

    action_id: _Id
    model_id: _Words
    earliest_ns: _Time
    latest_ns: _Time
    expected_duration_ns: _Duration
    generation: _Id = 0


class EvictHeader(msgspec.Struct, array_like=True, tag=EVICT, forbid_unknown_fields=True, gc=False):
    """Let go of a model's weights."""

    action_id: _Id
    model_id: _Words
    generation: _Id = 0


class Withdrawal(
    msgspec.Struct, array_like=True, tag=WITHDRAW, forbid_unknown_fields=True, gc=False
):
    """Drop an action if its LOAD or EXEC has not begun; its result says WITHDRAWN then.

    An action that has begun is finished and reported as usual, and one that is not there has been reported
    already.
    """

    action_id: _Id
    generation: _Id = 0


class MemoryOffer(
    msgspec.Struct, array_like=True, tag=MEMORY, forbid_unknown_fields=True, gc=False
):
    """Map these files, which come with the first bytes of a connection, and say `MAPPED`.

    From then on an Infer's tensors may lie there.
    """

    inputs_bytes: _Size
    outputs_bytes: _Size


class FurtherMemory(
    msgspec.Struct, array_like=True, tag=FURTHER, forbid_unknown_fields=True, gc=False
):
    """Map a further file, which comes with this frame, to read inputs there, and say so (`encode_mapped`).

    It is that of a front which is a process of its own.
    """

    number: _Number
    num_bytes: _Size


class ForgetMemory(
    msgspec.Struct, array_like=True, tag=FORGET, forbid_unknown_fields=True, gc=False
):
    """Nothing comes from such memory any more."""

    number: _Number


class ExpectFront(
    msgspec.Struct, array_like=True, tag=EXPECT, forbid_unknown_fields=True, gc=False
):
    """Let the front that shows this token send inputs, and send it its outputs."""

    number: _FrontNumber
    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    #: Bytes of the largest inputs to one request.
    inputs_bytes_max: _Count


class FrontGone(
    msgspec.Struct, array_like=True, tag=FRONT_GONE, forbid_unknown_fields=True, gc=False
):
    """Nothing comes from a front any more, and nobody there waits for outputs."""

    number: _FrontNumber


class Inputs(msgspec.Struct, array_like=True, tag=INPUTS, forbid_unknown_fields=True, gc=False):
    """A front's inputs to one request of an Infer, in their order, without those that came with the action."""

    action_id: _Id
    #: The request's number in the action.
    index: _Count
    #: None: nobody waits for its answer any more, so there are none.
    lengths: _Counts | None


class Outputs(msgspec.Struct, array_like=True, tag=OUTPUTS, forbid_unknown_fields=True, gc=False):
    """The outputs of one request of an Infer, for its front."""

    action_id: _Id
    index: _Count
    lengths: _Counts


class MappedHeader(
    msgspec.Struct, array_like=True, tag=MAPPED, forbid_unknown_fields=True, gc=False
):
    """Memory is mapped; 0: the controller's own."""

    number: Annotated[int, Meta(ge=0, lt=_MEMORIES_MAX)]


class StepHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """`clockwright.actions.StepTime`."""

    begin_ns: _Time
    end_ns: _Time
    duration_ns: _Duration
    spared_ns: _Duration = 0


class ResultHeader(
    msgspec.Struct, array_like=True, tag=RESULT, forbid_unknown_fields=True, gc=False
):
    """`clockwright.actions.Result`."""

    action_id: _Id
    error: ActionError
    message: _Words
    received_ns: _Time
    load: StepHeader | None
    input: StepHeader | None
    exec: StepHeader | None
    output: StepHeader | None
    lengths: _Counts
    sent: _Counts = ()


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(
    InferHeader
    | LoadHeader
    | EvictHeader
    | Withdrawal
    | MemoryOffer
    | FurtherMemory
    | ForgetMemory
    | ExpectFront
    | FrontGone
    | Inputs
).decode
decode_inputs = msgspec.msgpack.Decoder(Inputs).decode
decode_outputs = msgspec.msgpack.Decoder(Outputs).decode
decode_mapped = msgspec.msgpack.Decoder(MappedHeader).decode
decode_result = msgspec.msgpack.Decoder(ResultHeader).decode
