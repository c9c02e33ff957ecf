"""Frames of actions and results: what goes in comes out, however it is cut, and nothing else does harm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright.errors import ProtocolError
from clockwright.units import ActionId, ModelId
from clockwright.wire import frame_headers, frames
from clockwright.wire.actions import (
    Action,
    ActionError,
    EvictWeights,
    FromFronts,
    Infer,
    LoadWeights,
    Result,
    StepTime,
)
from clockwright.wire.bulk import Buffer

ids = st.integers(0, 2**63 - 1).map(ActionId)
names = st.text(max_size=50).map(ModelId)
times = st.integers(-(2**60), 2**60)
durations = st.integers(0, 10**12)
# Some that are joined to their header, some that are not, and some that get memory of their own.
tensors = st.lists(
    st.one_of(st.binary(max_size=50), st.integers(0, 300_000).map(bytes)), max_size=5
)
actions = st.one_of(
    st.builds(EvictWeights, action_id=ids, model_id=names),
    st.builds(
        LoadWeights,
        action_id=ids,
        model_id=names,
        earliest_ns=times,
        latest_ns=times,
        expected_duration_ns=durations,
    ),
    st.builds(
        Infer,
        action_id=ids,
        model_id=names,
        batch_size=st.integers(0, 1000),
        rows=st.lists(st.integers(0, 100), max_size=20).map(tuple),
        earliest_ns=times,
        latest_ns=times,
        expected_duration_ns=durations,
    ),
)
steps = st.one_of(st.none(), st.builds(StepTime, times, times, durations, durations))
results = st.builds(
    Result,
    action_id=ids,
    error=st.sampled_from(ActionError),
    message=st.text(max_size=200),
    received_ns=times,
    load=steps,
    input=steps,
    exec=steps,
    output=steps,
    turn_ns=st.none() | times,
)


def carried(data: bytes, seed: int, reader: frames.FrameReader) -> list[frames.Frame]:
    """What a reader makes of bytes that come in pieces."""
    rng = random.Random(seed)
    found = []
    while data:
        room = reader.room()
        size = min(len(room), len(data), rng.choice((1, 7, 100, 5000, 1 << 20)))
        room[:size], data = data[:size], data[size:]
        found += reader.received(size)
    return found


def plain(payload: Sequence[Buffer]) -> list[bytes]:
    return [bytes(tensor) for tensor in payload]


@given(st.lists(st.tuples(actions, tensors), max_size=4), st.integers())
def test_actions_come_as_they_went_however_they_are_cut(
    sent: list[tuple[Action, list[bytes]]], seed: int
) -> None:
    sent = [(action, payload if isinstance(action, Infer) else []) for action, payload in sent]
    data = b"".join(part for each in sent for part in frames.encode_action(*each))
    found = [frames.decode_order(frame) for frame in carried(data, seed, frames.FrameReader())]
    assert [(order, plain(payload)) for order, payload, _ in found] == sent


@given(results, tensors, st.integers())
def test_results_come_as_they_went_and_their_times_are_shifted(
    result: Result, outputs: list[bytes], seed: int
) -> None:
    data = b"".join(frames.encode_result(result, outputs, shift_ns=7))
    (frame,) = carried(data, seed, frames.FrameReader())
    found, payload, _ = frames.decode_result(frame, shift_ns=-7)
    assert (found, plain(payload)) == (result, outputs)
    later, _, _ = frames.decode_result(frame)
    assert later.received_ns == result.received_ns + 7
    if result.turn_ns is not None:
        assert later.turn_ns == result.turn_ns + 7
    for before, after in ((result.load, later.load), (result.exec, later.exec)):
        if before is not None and after is not None:
            assert (after.begin_ns, after.end_ns) == (before.begin_ns + 7, before.end_ns + 7)
            assert after.duration_ns == before.duration_ns


INFER = Infer(
    action_id=ActionId(1),
    model_id=ModelId("m"),
    batch_size=1,
    rows=(1,),
    earliest_ns=1,
    latest_ns=2,
    expected_duration_ns=3,
)


def sent(payload: Sequence[Buffer], **where: Any) -> frames.Frame:  # noqa: ANN401
    data = b"".join(frames.encode_action(INFER, payload, **where))
    (frame,) = carried(data, 0, frames.FrameReader())
    return frame


def mapped(inputs: bytes = bytes(1000), outputs_bytes: int = 1000) -> frames.Memory:
    return frames.Memory({0: memoryview(inputs)}, memoryview(bytearray(outputs_bytes)))


def test_an_order_that_fronts_feed_has_a_generation_too() -> None:
    frame = sent([bytes(70_000)], places=[frame_headers.APART], fronts=[3], generation=5)
    order, payload, supply = frames.decode_order(frame, oldest=5)
    assert (order, plain(payload), supply) == (INFER, [b""], FromFronts((3,), {0: 70_000}))
    with pytest.raises(ProtocolError, match="of generation 5, expected 6 or later"):
        frames.decode_order(frame, oldest=6)
    untold = sent([bytes(70_000)], places=[frame_headers.APART], fronts=[3])
    assert frames.decode_order(untold)[2] == supply
    with pytest.raises(ProtocolError, match="of generation 0, expected 1 or later"):
        frames.decode_order(untold, oldest=1)


@given(st.lists(st.tuples(st.binary(max_size=300), st.booleans()), max_size=6))
def test_tensors_come_together_wherever_each_of_them_lies(
    tensors: list[tuple[bytes, bool]],
) -> None:
    memory, places = bytearray(), []
    for tensor, is_shared in tensors:
        places.append(len(memory) if is_shared else -1)
        memory += tensor if is_shared else b""
    frame = sent([tensor for tensor, _ in tensors], places=places, room=(3, 4))
    assert len(frame[1]) == sum(len(tensor) for tensor, is_shared in tensors if not is_shared)
    known = mapped(bytes(memory), outputs_bytes=7)
    order, payload, room = frames.decode_order(frame, known)
    assert (order, plain(payload)) == (INFER, [tensor for tensor, _ in tensors])
    assert isinstance(room, memoryview)
    room[:] = b"abcd"
    assert bytes(known.outputs) == b"\0\0\0abcd"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"places": [1000 - 9]}, "bytes 991 to 1001 of memory of 1000"),
        ({"places": [1000]}, "bytes 1000 to 1010 of memory of 1000"),
        ({"places": [1 << 48]}, "memory 1, which is not mapped"),
        ({"room": (999, 2)}, "bytes 999 to 1001 of memory of 1000"),
        ({"room": (0, 1001)}, "bytes 0 to 1001 of memory of 1000"),
        ({"room": (1 << 48, 0)}, "of memory of 1000"),
        ({"places": [-2]}, "inputs of no front"),
        ({"places": [-3]}, "no action"),
        ({"places": [(1 << 62) + (1 << 48)]}, "no action"),
        ({"room": (-1, 2)}, "no action"),
        ({"room": (0, -1)}, "no action"),
    ],
)
def test_what_does_not_lie_in_the_memory_is_a_protocol_error(
    where: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProtocolError, match=words):
        frames.decode_order(sent([bytes(10)], **where), mapped())


def test_a_room_of_three_figures_is_no_action() -> None:
    infer: Any = (frame_headers.INFER, 1, "m", 1, (1,), 1, 2, 3, [10], [], (0, 1, 2))
    with pytest.raises(ProtocolError, match="no action"):
        frames.decode_order((frame_headers.encode(infer), bytes(10)), mapped())


def test_as_many_places_as_tensors_are_expected() -> None:
    header, payload = sent([bytes(10), bytes(20)], places=[0, 10])
    order = msgspec.msgpack.decode(header)
    position = order.index([0, 10])
    for places in ([0], [0, 10, 20]):
        order[position] = places
        with pytest.raises(ProtocolError, match=f"{len(places)} places of 2 tensors"):
            frames.decode_order((msgspec.msgpack.encode(order), payload), mapped())
    # One of them lies in the payload, which is empty.
    order[position] = [0, -1]
    with pytest.raises(ProtocolError, match="tensors of 20 bytes in a payload of 0"):
        frames.decode_order((msgspec.msgpack.encode(order), payload), mapped())


@pytest.mark.parametrize("where", [{"places": [0]}, {"room": (0, 1)}])
def test_memory_that_is_not_mapped_cannot_be_meant(where: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="memory that is not mapped"):
        frames.decode_order(sent([bytes(10)], **where))


def test_inputs_in_shared_memory_can_only_be_read() -> None:
    _, (tensor,), _ = frames.decode_order(sent([b"abcd"], places=[2]), mapped(b"..abcd"))
    assert isinstance(tensor, memoryview)
    assert (bytes(tensor), tensor.readonly) == (b"abcd", True)


def test_a_wish_to_have_an_action_back_is_one() -> None:
    (frame,) = carried(
        b"".join(frames.encode_withdrawal(ActionId(5))), 0, frames.FrameReader()
    )  # fmt: skip
    order, payload, _ = frames.decode_order(frame)
    assert isinstance(order, frame_headers.Withdrawal)
    assert (order.action_id, payload) == (5, ())


def test_words_that_are_no_text_are_told_as_far_as_they_are() -> None:
    result = Result(action_id=ActionId(1), error=ActionError.DEVICE, message="no file \udcff")
    (frame,) = carried(b"".join(frames.encode_result(result)), 0, frames.FrameReader())
    assert frames.decode_result(frame)[0].message == "no file ?"


def test_words_that_are_too_long_are_cut() -> None:
    result = Result(action_id=ActionId(1), error=ActionError.DEVICE, message="ü" * 5000)
    data = b"".join(frames.encode_result(result))
    reader = frames.FrameReader(header_bytes_max=frames.PLAIN_HEADER_BYTES, payload_bytes_max=0)
    found, _, _ = frames.decode_result(carried(data, 0, reader)[0])
    assert found.message == "ü" * frame_headers.WORDS_CHARS_MAX


@pytest.mark.parametrize("header", [True, False])
def test_nothing_is_built_from_a_length_that_cannot_be(header: bool) -> None:
    reader = frames.FrameReader(header_bytes_max=100, payload_bytes_max=1000)
    lengths = (101, 0) if header else (0, 1001)
    room = reader.room()
    room[: frames.PREFIX.size] = frames.PREFIX.pack(*lengths)
    with pytest.raises(ProtocolError, match=rf"header of {lengths[0]} .* payload of {lengths[1]}"):
        reader.received(frames.PREFIX.size)
    assert len(reader.room()) == len(room)


@pytest.mark.seeds(1)
def test_garbage_is_a_protocol_error_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    result = Result(action_id=ActionId(1), exec=StepTime(1, 2, 3))
    whole = [
        b"".join(frames.encode_result(result, [b"abcd"])),
        b"".join(frames.encode_action(INFER, [b"abcd"])),
        b"".join(frames.encode_action(INFER, [b"abcd", b"efgh"], places=[100, -1], room=(8, 9))),
    ]
    memory = mapped()
    num_read = 0
    for _ in range(5000):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            data = bytearray(rng.randbytes(rng.choice((1, 8, 9, 30, 3000))))
        reader = frames.FrameReader(header_bytes_max=1000, payload_bytes_max=1000)
        try:
            for frame in carried(bytes(data), rng.randrange(1 << 30), reader):
                if rng.random() < 0.5:
                    frames.decode_order(frame, memory)
                else:
                    frames.decode_result(frame)
                num_read += 1
        except ProtocolError:
            continue
    assert num_read > 100  # Some changes are to times, or to tensors.


@given(
    st.lists(st.lists(st.binary(min_size=1, max_size=40), max_size=4), max_size=8), st.integers()
)
def test_what_a_socket_takes_piece_by_piece_arrives_in_order(
    sent: list[list[bytes]], seed: int
) -> None:
    rng, queue, arrived = random.Random(seed), frames.SendQueue(), bytearray()
    left = list(sent)
    while left or queue.num_bytes:
        if left and rng.random() < 0.5:
            queue.add(left.pop(0))
        if queue.num_bytes:
            waiting = b"".join(queue.buffers())
            taken = rng.randint(0, len(waiting))
            arrived += waiting[:taken]
            queue.sent(taken)
    assert arrived == b"".join(part for parts in sent for part in parts)
    assert queue.buffers() == []


def test_more_buffers_than_the_kernel_takes_go_in_several_calls() -> None:
    queue = frames.SendQueue()
    queue.add([b"x"] * 5000)
    num_calls = 0
    while queue.num_bytes:
        buffers = queue.buffers()
        assert len(buffers) <= 1024
        queue.sent(len(buffers))
        num_calls += 1
    assert num_calls > 1


def test_a_greeting_that_is_none_of_this_version_holds_no_token() -> None:
    token = bytes(range(frame_headers.TOKEN_BYTES))
    assert frames.token_of(frames.greeting(token)) == token
    assert len(frames.greeting(token)) == frames.GREETING_BYTES
    assert frames.token_of(b"GET / HTTP/1.1" + bytes(30)) is None
