"""Cutting tensors out of messages and putting them in, against protobuf's own idea of both."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from clockwright.errors import ProtocolError
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.bulk import join_bulk, split_bulk, total_bytes

RAW = 7
chunks = st.lists(st.binary(max_size=300), max_size=6)


def message(name: str, request_id: str, raw: list[bytes]) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        model_name=name,
        id=request_id,
        parameters={"slo_ms": pb.InferParameter(double_param=2.5)},
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", shape=[1, -1])],
        raw_input_contents=raw,
    )


@given(st.text(max_size=40), st.text(max_size=40), chunks)
def test_splitting_gives_what_protobuf_would_parse(
    name: str, request_id: str, raw: list[bytes]
) -> None:
    header, entries = split_bulk(message(name, request_id, raw).SerializeToString(), RAW)
    assert [bytes(entry) for entry in entries] == raw
    assert pb.ModelInferRequest.FromString(header) == message(name, request_id, [])


@given(st.text(max_size=40), chunks)
def test_joining_gives_what_protobuf_would_serialise(name: str, raw: list[bytes]) -> None:
    joined = join_bulk(message(name, "", []).SerializeToString(), RAW, raw)
    assert pb.ModelInferRequest.FromString(joined) == message(name, "", raw)


@given(chunks, chunks)
def test_entries_may_lie_anywhere_in_the_message(first: list[bytes], second: list[bytes]) -> None:
    # Fields may come in any order and in pieces; a concatenation of messages is their merge.
    name = pb.ModelInferRequest(model_name="m").SerializeToString()
    data = join_bulk(b"", RAW, first) + name + join_bulk(b"", RAW, second)
    header, entries = split_bulk(data, RAW)
    assert header == name
    assert [bytes(entry) for entry in entries] == first + second


def test_entries_are_views_not_copies() -> None:
    data = message("m", "", [bytes(1 << 20)]).SerializeToString()
    _, (entry,) = split_bulk(data, RAW)
    assert entry.obj is data
    assert total_bytes([entry, b"abc"]) == (1 << 20) + 3


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_or_left_to_protobuf(data: bytes) -> None:
    try:
        header, entries = split_bulk(data, RAW)
        parsed = pb.ModelInferRequest.FromString(header)
    except (ProtocolError, DecodeError):
        return
    # What is taken is what protobuf reads from the whole of it.
    parsed.raw_input_contents.extend(bytes(entry) for entry in entries)
    assert parsed == pb.ModelInferRequest.FromString(data)


@given(chunks, st.data())
def test_a_message_cut_short_is_never_taken_for_a_whole_one(
    raw: list[bytes], data: st.DataObject
) -> None:
    whole = message("model", "id", raw).SerializeToString()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        header, entries = split_bulk(cut, RAW)
        parsed = pb.ModelInferRequest.FromString(header)
    except (ProtocolError, DecodeError):
        return
    # Cut between two fields: then it is a message, of the fields before the cut.
    assert (parsed, len(entries)) != (message("model", "id", []), len(raw))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x3a\x05ab", "field 7 claims 5 bytes, 2 are left"),
        (b"\x3a", "ends inside a tag or length"),
        (b"\x3a\x80", "ends inside a tag or length"),
        (b"\x3b", "field 7 has wire type 3"),
        (b"\xff" * 11, "varint longer than ten bytes"),
    ],
)
def test_malformed_messages_are_named(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        split_bulk(data, RAW)
