"""Actions and results as frames between a controller and a worker.

A connection begins with a greeting (`greeting`). Then the controller sends actions and withdrawals, and the worker
sends results. Each is a frame: the length of its header and that of its payload (`PREFIX`),
the header, which is an array in msgpack, and the payload, tensors whose lengths the header names.

On one host large tensors are in memory that both have mapped, and the header gives their places (`clockwright.wire.worker_messages.MemoryOffer`).
Tensors of a front on another host travel between that front and the worker (`encode_inputs`, `encode_outputs`); the
controller tells the front the worker and action, and the worker the front.

Every length is checked before it is used: `FrameReader` bounds both parts of a frame, and the types of the headers
bound every number, text and list. msgspec checks them while it decodes: encoding and decoding an action and its
result takes 7.6 us; with `struct`, and without any check, it took 12.6 us.

An order may end with the generation of its controller (`clockwright.wire.leadership`), for workers that understand it.

`shift_ns` is added to every time when encoding or decoding: the controller passes the worker's clock offset, the
worker passes nothing.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec
import numpy as np

from clockwright.errors import ProtocolError
from clockwright.units import ActionId, ModelId
from clockwright.wire import frame_headers as headers
from clockwright.wire.actions import (
    Action,
    EvictWeights,
    FromFronts,
    Infer,
    LoadWeights,
    Result,
    StepTime,
)
from clockwright.wire.bulk import Buffer, total_bytes
from clockwright.wire.frame_headers import (
    APART,
    HEADER_BYTES_MAX,
    PLACE_BITS,
    TOKEN_BYTES,
    WORDS_CHARS_MAX,
)

#: Bytes of the header and of the payload.
PREFIX: Final = struct.Struct("<II")
PREFIX_BYTES: Final = PREFIX.size

_MAGIC: Final = b"CWF4"
GREETING_BYTES: Final = len(_MAGIC) + TOKEN_BYTES

#: Limit on the bytes of a payload.
PAYLOAD_BYTES_MAX: Final = (1 << 32) - 1
#: Bytes of a header without lengths of tensors.
PLAIN_HEADER_BYTES: Final = 8 << 10
#: Bytes that the length of one tensor takes in a header, at most.
LENGTH_BYTES: Final = 5

#: A tensor of at least this size is worth a message of its own between front and worker.
DIRECT_BYTES: Final = 64 << 10

# Size of the receive buffer. An incomplete frame larger than the second figure gets its own memory, and the rest is
# received into it.
_GATHERED_BYTES: Final = 256 << 10
_OWN_BYTES: Final = 64 << 10
# Smaller payloads are copied behind their header: one buffer costs less than several.
_JOINED_BYTES: Final = 16 << 10
# The kernel takes 1,024 buffers in one call.
_BUFFERS_MAX: Final = 512


class Memory:
    """A controller's memory as a worker has it mapped."""

    # Not a dataclass, because mypyc knows no type memoryview for its fields.
    __slots__ = ("inputs", "outputs")

    def __init__(self, inputs: dict[int, memoryview], outputs: memoryview) -> None:
        #: By number; 0: the controller's own.
        self.inputs = inputs
        self.outputs = outputs


#: Header and payload.
Frame = tuple[Buffer, Buffer]


def greeting(token: bytes) -> bytes:
    """The first bytes of a connection, with the token of the controller's welcome."""
    return _MAGIC + token


def token_of(greeting: bytes) -> bytes | None:
    """The token in the first `GREETING_BYTES` of a connection; None: this is no worker of this version."""
    return greeting[len(_MAGIC) :] if greeting.startswith(_MAGIC) else None


def encode_action(
    action: Action,
    payload: Sequence[Buffer] = (),
    *,
    places: Sequence[int] = (),
    room: tuple[int, int] | None = None,
    fronts: Sequence[int] = (),
    shift_ns: int = 0,
    generation: int = 0,
) -> list[Buffer]:
    """Make the frame of an action, as buffers to be sent one after the other.

    Args:
        action: what is asked.
        payload: an Infer's inputs, per request and per input.
        places: place of each in memory that the worker has mapped; -1: in the payload, or `APART`. Empty: all are in
            the payload.
        room: place and bytes for the outputs in that memory; None: they come with the result.
        fronts: those that send inputs and wait for outputs, as in `FromFronts`; empty: no front.
        shift_ns: is added to every time.
        generation: the controller's; 0: not sent.
    """
    told = (generation,) if generation else ()
    if isinstance(action, EvictWeights):
        return make_frame(
            headers.encode((headers.EVICT, action.action_id, action.model_id, *told)), ()
        )
    earliest_ns, latest_ns = action.earliest_ns + shift_ns, action.latest_ns + shift_ns
    expected_ns = action.expected_duration_ns
    if isinstance(action, LoadWeights):
        load = (
            headers.LOAD,
            action.action_id,
            action.model_id,
            earliest_ns,
            latest_ns,
            expected_ns,
        )
        return make_frame(headers.encode((*load, *told)), ())
    infer: tuple[object, ...] = (
        headers.INFER,
        action.action_id,
        action.model_id,
        action.batch_size,
        action.rows,
        earliest_ns,
        latest_ns,
        expected_ns,
        [len(tensor) for tensor in payload],
        places,
        room,
    )
    if fronts:
        infer = (*infer, generation, fronts)
    elif generation:
        infer = (*infer, generation)
    if places:
        payload = [tensor for tensor, place in zip(payload, places, strict=True) if place == -1]
    return make_frame(headers.encode(infer), payload)


def encode_withdrawal(action_id: ActionId, *, generation: int = 0) -> list[Buffer]:
    """Make the frame that withdraws an action; `generation` as in `encode_action`."""
    told = (generation,) if generation else ()
    return make_frame(headers.encode((headers.WITHDRAW, action_id, *told)), ())


def encode_inputs(action_id: int, index: int, tensors: Sequence[Buffer] | None) -> list[Buffer]:
    """Make the frame of a front's inputs to one request of an Infer; None: the request was withdrawn."""
    if tensors is None:
        return make_frame(headers.encode((headers.INPUTS, action_id, index, None)), ())
    lengths = [len(tensor) for tensor in tensors]
    return make_frame(headers.encode((headers.INPUTS, action_id, index, lengths)), tensors)


def encode_outputs(action_id: int, index: int, tensors: Sequence[Buffer]) -> list[Buffer]:
    """Make the frame of the outputs of one request of an Infer, for its front."""
    lengths = [len(tensor) for tensor in tensors]
    return make_frame(headers.encode((headers.OUTPUTS, action_id, index, lengths)), tensors)


def decode_inputs(frame: Frame) -> tuple[headers.Inputs, Sequence[Buffer]]:
    """Read what a front sent to a worker. Raises ProtocolError if the frame is malformed."""
    try:
        inputs = headers.decode_inputs(frame[0])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(frame[0])} bytes that are no inputs: {error}") from None
    return inputs, _cut(inputs.action_id, frame[1], inputs.lengths or ())


def decode_outputs(frame: Frame) -> tuple[headers.Outputs, Sequence[Buffer]]:
    """Read what a worker sent to a front. Raises ProtocolError if the frame is malformed."""
    try:
        outputs = headers.decode_outputs(frame[0])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(frame[0])} bytes that are no outputs: {error}") from None
    return outputs, _cut(outputs.action_id, frame[1], outputs.lengths)


def encode_result(
    result: Result,
    outputs: Sequence[Buffer] = (),
    *,
    sent: Sequence[int] = (),
    shift_ns: int = 0,
) -> list[Buffer]:
    """Make the frame of a result, with the outputs of a successful Infer, per request and per output.

    `sent` numbers the requests whose outputs went to their fronts, and are not among these; `shift_ns` is added to
    every time.
    """
    message = result.message
    if message:
        # An engine's message may be long, and not valid text.
        message = message[:WORDS_CHARS_MAX].encode(errors="replace").decode()
    header: tuple[object, ...] = (
        headers.RESULT,
        result.action_id,
        result.error,
        message,
        result.received_ns + shift_ns,
        None if result.load is None else _encode_step(result.load, shift_ns),
        None if result.input is None else _encode_step(result.input, shift_ns),
        None if result.exec is None else _encode_step(result.exec, shift_ns),
        None if result.output is None else _encode_step(result.output, shift_ns),
        [len(tensor) for tensor in outputs],
    )
    if result.turn_ns is not None:
        header = (*header, sent, result.turn_ns + shift_ns)
    elif sent:
        header = (*header, sent)
    return make_frame(headers.encode(header), outputs)


def decode_order(
    frame: Frame, memory: Memory | None = None, *, oldest: int = 0
) -> tuple[
    Action | headers.Withdrawal | headers.Inputs,
    Sequence[Buffer],
    memoryview | FromFronts | None,
]:
    """Read what a controller sent.

    Args:
        frame: its header and payload.
        memory: the controller's memory that is mapped here.
        oldest: orders of earlier generations are refused.

    Returns:
        The order; the inputs of an Infer (empty if a front sends them), or inputs that the controller forwards for a
        front; and for an Infer the place of its outputs, or the tensors that travel directly; None: neither.

    Raises:
        ProtocolError: the frame is malformed, or of an earlier generation.
    """
    header, payload = frame
    try:
        order = headers.decode_order(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(header)} bytes that are no action: {error}") from None
    if oldest and not isinstance(order, headers.Inputs) and order.generation < oldest:
        raise ProtocolError(
            f"action {order.action_id} is of generation {order.generation}, expected {oldest} or later"
        )
    if isinstance(order, headers.InferHeader):
        infer = Infer(
            action_id=ActionId(order.action_id),
            model_id=ModelId(order.model_id),
            batch_size=order.batch_size,
            rows=order.rows,
            earliest_ns=order.earliest_ns,
            latest_ns=order.latest_ns,
            expected_duration_ns=order.expected_duration_ns,
        )
        if order.fronts:
            return infer, *_supplied(order, payload, memory)
        if not order.places and order.room is None:
            return infer, _cut(order.action_id, payload, order.lengths), None
        if memory is None:
            raise ProtocolError(f"action {order.action_id}: tensors in memory that is not mapped")
        room = None
        if order.room is not None:
            room = _look(order.action_id, memory.outputs, *order.room)
        return infer, _gather(order, payload, memory.inputs), room
    if isinstance(order, headers.Inputs):
        return order, _cut(order.action_id, payload, order.lengths or ()), None
    _cut(order.action_id, payload, ())
    if isinstance(order, headers.Withdrawal):
        return order, (), None
    action_id, model_id = ActionId(order.action_id), ModelId(order.model_id)
    if isinstance(order, headers.EvictHeader):
        return EvictWeights(action_id=action_id, model_id=model_id), (), None
    load = LoadWeights(
        action_id=action_id,
        model_id=model_id,
        earliest_ns=order.earliest_ns,
        latest_ns=order.latest_ns,
        expected_duration_ns=order.expected_duration_ns,
    )
    return load, (), None


def decode_result(
    frame: Frame, *, shift_ns: int = 0
) -> tuple[Result, Sequence[Buffer], tuple[int, ...]]:
    """Read a result, its outputs, and which requests' outputs were sent to fronts; `shift_ns` is added to every time.

    Raises ProtocolError if the frame is not a result, or has an unknown error or impossible times.
    """
    header, payload = frame
    try:
        found = headers.decode_result(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(header)} bytes that are no result: {error}") from None
    result = Result(
        action_id=ActionId(found.action_id),
        error=found.error,
        message=found.message,
        received_ns=found.received_ns + shift_ns,
        load=None if found.load is None else _decode_step(found.load, shift_ns),
        input=None if found.input is None else _decode_step(found.input, shift_ns),
        exec=None if found.exec is None else _decode_step(found.exec, shift_ns),
        output=None if found.output is None else _decode_step(found.output, shift_ns),
        turn_ns=None if found.turn_ns is None else found.turn_ns + shift_ns,
    )
    return result, _cut(found.action_id, payload, found.lengths), found.sent


def make_frame(header: bytes, payload: Sequence[Buffer]) -> list[Buffer]:
    """Make a frame, as buffers to be sent one after the other."""
    num_bytes = total_bytes(payload)
    prefix = PREFIX.pack(len(header), num_bytes)
    if num_bytes <= _JOINED_BYTES:
        return [b"".join((prefix, header, *payload))]
    return [prefix + header, *payload]


def _cut(action_id: int, payload: Buffer, lengths: Sequence[int]) -> Sequence[Buffer]:
    if sum(lengths) != len(payload):
        raise ProtocolError(
            f"action {action_id}: tensors of {sum(lengths)} bytes in a payload of {len(payload)}"
        )
    if len(lengths) == 1:
        return (payload,)
    view, begin, tensors = memoryview(payload), 0, []
    for length in lengths:
        tensors.append(view[begin : begin + length])
        begin += length
    return tensors


def _gather(
    order: headers.InferHeader, payload: Buffer, memories: Mapping[int, memoryview]
) -> Sequence[Buffer]:
    """Find an Infer's tensors, in shared memory or in the payload."""
    if not order.places:
        return _cut(order.action_id, payload, order.lengths)
    _check_places(order)
    where = list(zip(order.lengths, order.places, strict=True))
    inline = iter(
        _cut(order.action_id, payload, [length for length, place in where if place == -1])
    )
    tensors: list[Buffer] = []
    for length, place in where:
        if place < 0:
            tensors.append(next(inline) if place == -1 else b"")
            continue
        memory = memories.get(place >> PLACE_BITS)
        if memory is None:
            number = place >> PLACE_BITS
            raise ProtocolError(f"action {order.action_id}: memory {number}, which is not mapped")
        begin = place & (1 << PLACE_BITS) - 1
        tensors.append(_look(order.action_id, memory, begin, length))
    return tensors


def _supplied(
    order: headers.InferHeader, payload: Buffer, memory: Memory | None
) -> tuple[Sequence[Buffer], FromFronts]:
    """Find the inputs of an Infer with fronts, and those that the fronts still have to send."""
    num_requests = len(order.rows)
    if len(order.fronts) != num_requests or order.room is not None:
        raise ProtocolError(f"action {order.action_id}: {len(order.fronts)} fronts, or a room")
    inputs = _gather(order, payload, {} if memory is None else memory.inputs)
    awaited = {
        number: length
        for number, (length, place) in enumerate(zip(order.lengths, order.places, strict=False))
        if place == APART
    }
    if len(inputs) % num_requests:
        raise ProtocolError(f"action {order.action_id}: {len(inputs)} inputs of {num_requests}")
    num_inputs = len(inputs) // num_requests
    if not all(order.fronts[number // num_inputs] for number in awaited):
        raise ProtocolError(f"action {order.action_id}: inputs of no front")
    return inputs, FromFronts(order.fronts, awaited)


def _check_places(order: headers.InferHeader) -> None:
    if len(order.places) != len(order.lengths):
        raise ProtocolError(
            f"action {order.action_id}: {len(order.places)} places of {len(order.lengths)} tensors"
        )
    if APART in order.places and not order.fronts:
        raise ProtocolError(f"action {order.action_id}: inputs of no front")


def _look(action_id: int, memory: memoryview, begin: int, num_bytes: int) -> memoryview:
    if begin + num_bytes > len(memory):
        raise ProtocolError(
            f"action {action_id}: bytes {begin} to {begin + num_bytes} of memory of {len(memory)}"
        )
    return memory[begin : begin + num_bytes]


def _encode_step(step: StepTime, shift_ns: int) -> tuple[int, ...]:
    times = step.begin_ns + shift_ns, step.end_ns + shift_ns, step.duration_ns
    return (*times, step.spared_ns) if step.spared_ns else times


def _decode_step(step: headers.StepHeader, shift_ns: int) -> StepTime:
    return StepTime(
        step.begin_ns + shift_ns, step.end_ns + shift_ns, step.duration_ns, step.spared_ns
    )


class FrameReader:
    """Cuts a stream of bytes into frames. It does no I/O: the caller receives into `room`."""

    def __init__(
        self,
        *,
        header_bytes_max: int = HEADER_BYTES_MAX,
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    ) -> None:
        #: Longest header and payload that the peer may send; the owner may change them between frames.
        self.header_bytes_max = header_bytes_max
        self.payload_bytes_max = payload_bytes_max
        self._gathered = memoryview(bytearray(_GATHERED_BYTES))
        self._end = 0
        #: The large frame that is being received, where its payload begins in it, and how much is there.
        self._own: memoryview | None = None
        self._own_payload = 0
        self._own_end = 0

    def room(self) -> memoryview:
        """Buffer for the next bytes; never empty."""
        if self._own is not None:
            return self._own[self._own_end :]
        return self._gathered[self._end :]

    def received(self, num_bytes: int) -> list[Frame]:
        """Accept the first bytes of `room`. Returns the frames that they complete.

        Raises ProtocolError if a frame is longer than allowed.
        """
        if (own := self._own) is not None:
            self._own_end += num_bytes
            if self._own_end < len(own):
                return []
            self._own = None
            return [(own[PREFIX_BYTES : self._own_payload], own[self._own_payload :])]
        gathered, data = self._gathered, b""
        begin, end = 0, self._end + num_bytes
        frames: list[Frame] = []
        while end - begin >= PREFIX_BYTES:
            header_bytes, payload_bytes = PREFIX.unpack_from(gathered, begin)
            if header_bytes > self.header_bytes_max or payload_bytes > self.payload_bytes_max:
                raise self._too_long(header_bytes, payload_bytes)
            header_begin = begin + PREFIX_BYTES
            payload_begin = header_begin + header_bytes
            frame_end = payload_begin + payload_bytes
            if frame_end > end:
                if frame_end - begin > _OWN_BYTES:
                    self._own = np.empty(frame_end - begin, np.uint8).data
                    self._own[: end - begin] = gathered[begin:end]
                    self._own_payload, self._own_end = payload_begin - begin, end - begin
                    begin = end
                break
            if not data:
                # Parts of bytes are cheap; parts of a view are views first.
                data = bytes(gathered[:end])
            frames.append((data[header_begin:payload_begin], data[payload_begin:frame_end]))
            begin = frame_end
        self._end = end - begin
        if begin and self._end:
            gathered[: self._end] = gathered[begin:end]
        return frames

    def _too_long(self, header_bytes: int, payload_bytes: int) -> ProtocolError:
        return ProtocolError(
            f"a frame with a header of {header_bytes} bytes and a payload of {payload_bytes},"
            f" expected {self.header_bytes_max} and {self.payload_bytes_max} at most"
        )


class SendQueue:
    """Bytes that wait for a socket. It does no I/O."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._buffers: deque[Buffer] = deque()

    def add(self, buffers: Sequence[Buffer]) -> None:
        """Queue buffers; they must stay as they are until they are sent."""
        self._buffers.extend(buffers)
        self.num_bytes += total_bytes(buffers)

    def buffers(self) -> list[Buffer]:
        """The buffers to send next, as many as the kernel takes in one call."""
        if len(self._buffers) <= _BUFFERS_MAX:
            return list(self._buffers)
        return list(islice(self._buffers, _BUFFERS_MAX))

    def sent(self, num_bytes: int) -> None:
        """Remove the bytes that the socket accepted."""
        self.num_bytes -= num_bytes
        if not self.num_bytes:
            self._buffers.clear()
            return
        while num_bytes:
            first = self._buffers[0]
            if num_bytes < len(first):
                self._buffers[0] = memoryview(first)[num_bytes:]
                return
            num_bytes -= len(first)
            self._buffers.popleft()
