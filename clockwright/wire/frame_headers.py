"""The headers of frames (`clockwright.wire.frames`), and their checks.

They have a module of their own because msgspec reads the types of these records at import, and mypyc, which compiles
`frames` (`make native`), removes them.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from clockwright.units import DURATION_NS_MAX, TIME_NS_MAX
from clockwright.wire.actions import ActionError

TOKEN_BYTES: Final = 32
#: Limit on the bytes of any header.
HEADER_BYTES_MAX: Final = 1 << 20
#: Limit on an action's error message, which may quote an engine; the sender cuts longer ones.
WORDS_CHARS_MAX: Final = 1000

_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Time = Annotated[int, Meta(gt=-TIME_NS_MAX, lt=TIME_NS_MAX)]
_Duration = Annotated[int, Meta(ge=0, le=DURATION_NS_MAX)]
_Words = Annotated[str, Meta(max_length=WORDS_CHARS_MAX)]
_Counts = Annotated[tuple[_Count, ...], Meta(max_length=HEADER_BYTES_MAX)]

# Place in shared memory: the memory's number and, in this many bits, the offset. -1: in the payload.
PLACE_BITS: Final = 48
#: The place of a tensor that travels between a front and a worker.
APART: Final = -2
MEMORIES_MAX: Final = 1 << 14
#: The number of the memory that a worker writes outputs to, where an input is an earlier output of its own.
OWN_OUTPUTS: Final = MEMORIES_MAX
_Place = Annotated[int, Meta(ge=APART, lt=OWN_OUTPUTS + 1 << PLACE_BITS)]
_Places = Annotated[tuple[_Place, ...], Meta(max_length=HEADER_BYTES_MAX)]
_Size = Annotated[int, Meta(ge=0, le=1 << 48)]

INFER, LOAD, EVICT, WITHDRAW, RESULT, INPUTS, OUTPUTS = range(7)


class InferHeader(msgspec.Struct, array_like=True, tag=INFER, forbid_unknown_fields=True, gc=False):
    """`Infer`, with the places of its tensors and the controller's generation."""

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
    """Evict a model's weights."""

    action_id: _Id
    model_id: _Words
    generation: _Id = 0


class Withdrawal(
    msgspec.Struct, array_like=True, tag=WITHDRAW, forbid_unknown_fields=True, gc=False
):
    """Drop an action if its LOAD or EXEC has not begun; its result says WITHDRAWN then.

    An action that has begun is finished and reported as usual; an unknown one has been reported already.
    """

    action_id: _Id
    generation: _Id = 0


class Inputs(msgspec.Struct, array_like=True, tag=INPUTS, forbid_unknown_fields=True, gc=False):
    """A front's inputs to one request of an Infer, in their order, without those that came with the action."""

    action_id: _Id
    #: The request's number in the action.
    index: _Count
    #: None: the request was withdrawn, so it has no inputs.
    lengths: _Counts | None


class Outputs(msgspec.Struct, array_like=True, tag=OUTPUTS, forbid_unknown_fields=True, gc=False):
    """The outputs of one request of an Infer, for its front."""

    action_id: _Id
    index: _Count
    lengths: _Counts


class StepHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """`clockwright.wire.actions.StepTime`."""

    begin_ns: _Time
    end_ns: _Time
    duration_ns: _Duration
    spared_ns: _Duration = 0


class ResultHeader(
    msgspec.Struct, array_like=True, tag=RESULT, forbid_unknown_fields=True, gc=False
):
    """`clockwright.wire.actions.Result`."""

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
    turn_ns: _Time | None = None


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(
    InferHeader | LoadHeader | EvictHeader | Withdrawal | Inputs
).decode
decode_inputs = msgspec.msgpack.Decoder(Inputs).decode
decode_outputs = msgspec.msgpack.Decoder(Outputs).decode
decode_result = msgspec.msgpack.Decoder(ResultHeader).decode
