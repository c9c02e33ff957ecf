"""Requests that are checked once for many mean what they would mean if each were checked."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clockwright.errors import BadRequestError
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.tensors import TensorSpec, Variable
from controller.front.oip.protocol import CheckedRequest, Servable, parse_request, read_request
from controller.front.remote.remote_backend import RemoteDescription
from controller.front.services.templates import (
    FIELDS_MAX,
    KEY_BYTES_MAX,
    TEMPLATES_MAX,
    Templates,
    cut_request,
)
from tests.kit.front_end import serving_in_thread
from tests.kit.raw_http2 import RawClient

A = TensorSpec("a", "FP32", (2,))
B = TensorSpec("b", "INT64", ())
OUTPUTS = (TensorSpec("y", "FP32", (2,)), TensorSpec("z", "FP16", (1,)))
STEPS = Servable("m", "3", (A, B), OUTPUTS[:1], 1, None, has_contexts=True)
SERVABLE = Servable("m", "3", (A, B), OUTPUTS, 16, None, has_contexts=True, steps=STEPS)
Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor


DESCRIBED = RemoteDescription(SERVABLE, 1, is_held=True)


def long_way(data: bytes, rpc_remaining_s: float | None = None) -> CheckedRequest | None:
    """What parsing and checking yield; None: the request is refused."""
    try:
        return read_request(
            parse_request(data), SERVABLE, rpc_remaining_s=rpc_remaining_s, default_slo_ns=7
        )
    except BadRequestError:
        return None


def learn(templates: Templates, data: bytes) -> None:
    """Keep the template of a request, if it is good."""
    cut = cut_request(data)
    checked = long_way(data)
    if cut is not None and checked is not None and templates.find(cut, generation=0) is None:
        templates.add(cut, parse_request(data), DESCRIBED, checked)


def short_way(
    templates: Templates, data: bytes, rpc_remaining_s: float | None = None
) -> CheckedRequest | None:
    """What a template yields; None: there is none that fits."""
    known = templates.known(data, generation=0, rpc_remaining_s=rpc_remaining_s, default_slo_ns=7)
    cut = cut_request(data)
    template = None if cut is None else templates.find(cut, generation=0)
    filled = None
    if cut is not None and template is not None:
        filled = template.fill(cut, rpc_remaining_s=rpc_remaining_s, default_slo_ns=7)
    # What is laid out as before is found in fewer steps.
    assert known is None or known == (filled, DESCRIBED)
    return filled


def field(number: int, content: bytes, padding: int = 0) -> bytes:
    """A field of bytes, the varint of its length longer than it need be by so many bytes."""
    length = len(content)
    groups = []
    while True:
        groups.append(length & 0x7F)
        length >>= 7
        if not length:
            break
    groups += [0] * padding
    varint = bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])
    return bytes((number << 3 | 2,)) + varint + content


def parameter(name: str, value: pb.InferParameter) -> bytes:
    whole = pb.ModelInferRequest()
    whole.parameters[name].CopyFrom(value)
    return whole.SerializeToString()


def tensors(rows: int) -> list[bytes]:
    return [
        field(5, Input(name="a", datatype="FP32", shape=[rows, 2]).SerializeToString()),
        field(5, Input(name="b", datatype="INT64", shape=[rows]).SerializeToString()),
    ]


# What requests are made of: mostly good parts, and some that are none.
NAMES = st.sampled_from([field(1, b"m"), field(1, b"m"), field(1, b"other")])
PARAMETERS = st.lists(
    st.sampled_from(
        [
            parameter("slo_ms", pb.InferParameter(int64_param=50)),
            parameter("slo_ms", pb.InferParameter(double_param=0.25)),
            parameter("timeout", pb.InferParameter(int64_param=9000)),
            parameter("tenant", pb.InferParameter(string_param="t")),
            parameter("explain", pb.InferParameter(bool_param=True)),
            parameter("slo_ms", pb.InferParameter(string_param="soon")),
            parameter("sequence_id", pb.InferParameter(int64_param=1)),
            parameter("sequence_id", pb.InferParameter(int64_param=0)),
            parameter("sequence_id", pb.InferParameter(string_param="one")),
            parameter("sequence_start", pb.InferParameter(bool_param=True)),
        ]
    ),
    max_size=2,
)
WANTED = st.lists(
    st.sampled_from([field(6, Output(name=name).SerializeToString()) for name in ("y", "z")]),
    max_size=2,
)
# A length of 126 makes the length of its entry take two bytes.
CONTEXTS = st.lists(
    st.one_of(
        st.text(max_size=8).map(str.encode),
        st.binary(max_size=3),
        st.sampled_from([b"x" * 125, b"x" * 126, b"x" * 300]),
    ),
    max_size=2,
)
IDS = st.lists(
    st.one_of(st.text(max_size=8).map(str.encode), st.binary(max_size=3), st.just(b"x" * 300)),
    max_size=2,
)


def context(content: bytes, padding: int = 0) -> bytes:
    """The parameter `context`."""
    value = field(3, content, padding)
    return field(4, field(1, b"context") + field(2, value, padding), padding)


@dataclass
class Own:
    """What is a request's own: the rest is its key."""

    ids: list[bytes]
    contexts: list[bytes]
    raw: list[bytes]
    paddings: int

    def parts(self) -> list[bytes]:
        ids = [field(3, content, self.paddings) for content in self.ids]
        ids += [context(content, self.paddings) for content in self.contexts]
        return ids + [field(7, content, self.paddings) for content in self.raw]


@st.composite
def own(draw: st.DrawFn, rows: int) -> Own:
    sizes = draw(st.sampled_from([(8, 8)] * 4 + [(8, 4), (8,), (8, 8, 8), ()]))
    raw = [draw(st.binary(min_size=size * rows, max_size=size * rows)) for size in sizes]
    return Own(draw(IDS), draw(CONTEXTS), raw, draw(st.integers(0, 1)))


@st.composite
def alike(draw: st.DrawFn) -> list[bytes]:
    """Two requests that differ in ids and tensors, and one of them with something else changed."""
    rows = draw(st.sampled_from([1, 2, 3]))
    key = [draw(NAMES), *draw(PARAMETERS), *draw(st.permutations(tensors(rows))), *draw(WANTED)]
    first = b"".join(key + draw(own(rows)).parts())
    parts = draw(own(rows)).parts()
    # The parts of the key keep their order; what is the request's own may stand anywhere.
    second = list(key)
    in_order = draw(st.booleans())
    for part in parts:
        second.insert(len(second) if in_order else draw(st.integers(0, len(second))), part)
    data = b"".join(second)
    position = draw(st.integers(0, len(data) - 1))
    flipped = bytes((data[position] ^ draw(st.integers(1, 255)),))
    changed = data[:position] + flipped + data[position + 1 :]
    return [first, data, draw(st.sampled_from([changed, data[:position], data + field(7, b"")]))]


@settings(max_examples=400, deadline=None)
@given(requests=alike(), rpc_remaining_s=st.sampled_from([None, 0.5]))
def test_what_a_template_yields_is_what_checking_would_yield(
    requests: list[bytes], rpc_remaining_s: float | None
) -> None:
    templates = Templates()
    for data in requests:
        found = short_way(templates, data, rpc_remaining_s)
        if found is not None:
            assert found == long_way(data, rpc_remaining_s)
        learn(templates, data)


@given(
    ids=st.tuples(st.text(max_size=20), st.text(max_size=20)),
    contents=st.tuples(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16)),
)
def test_requests_that_differ_in_id_and_tensors_alone_share_a_template(
    ids: tuple[str, str], contents: tuple[bytes, bytes]
) -> None:
    templates = Templates()
    found = []
    for request_id, content in zip(ids, contents, strict=True):
        request = pb.ModelInferRequest(model_name="m", id=request_id)
        request.parameters["slo_ms"].int64_param = 50
        request.inputs.add(name="b", datatype="INT64", shape=[1])
        request.inputs.add(name="a", datatype="FP32", shape=[1, 2])
        request.raw_input_contents.extend([content[:8], content[8:]])
        data = request.SerializeToString()
        found.append(short_way(templates, data))
        learn(templates, data)
    assert found == [None, long_way(data)]


def test_requests_of_other_users_share_a_template_and_keep_their_contexts() -> None:
    templates = Templates()
    whole = [field(1, b"m"), *tensors(1), field(7, bytes(8)), field(7, bytes(8))]
    learn(templates, b"".join([context(b"ann"), *whole]))
    found = [
        short_way(templates, b"".join([context(user), *whole])) for user in (b"ann", b"bob", b"")
    ]
    assert [checked and checked.context for checked in found] == ["ann", "bob", ""]
    # A request without one may be laid out as another that is known.
    assert short_way(templates, b"".join(whole)) is None


def test_steps_of_all_sequences_share_a_template() -> None:
    templates = Templates()
    rest = b"".join([*tensors(1), field(7, bytes(8)), field(7, bytes(8))])

    def step(**choice: Any) -> bytes:  # noqa: ANN401
        return field(1, b"m") + parameter("sequence_id", pb.InferParameter(**choice)) + rest

    learn(templates, step(int64_param=1))
    learn(templates, step(string_param="a"))
    found = [
        short_way(templates, data)
        for data in (
            step(int64_param=(1 << 62) + 1),
            step(string_param="b" * 100),
            step(string_param="b" * 300),
            step(int64_param=0),
            field(1, b"m") + rest,
        )
    ]
    steps = [checked and checked.step and checked.step.sequence for checked in found]
    assert steps == [(1 << 62) + 1, "b" * 100, None, None, None]


def test_a_big_tensor_stays_a_view_of_the_message() -> None:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(100_000)])
    data = request.SerializeToString()
    cut = cut_request(data)
    assert cut is not None
    [tensor] = cut.raw
    assert isinstance(tensor, memoryview)
    assert tensor.obj is data


@pytest.mark.parametrize(
    "data",
    [
        field(1, b"m") * (FIELDS_MAX + 1),
        field(7, b"") * (FIELDS_MAX + 1),
        field(1, bytes(KEY_BYTES_MAX)),
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\x7f",
        field(1, b"m")[:-1],
        field(1, b"m") + b"\x0a",
        field(1, b"m") + b"\x3a\x80",
        field(8, b"unknown"),
        b"\x08\x01",
        b"\x0b\x0c",
    ],
)
def test_what_is_out_of_the_ordinary_is_not_cut(data: bytes) -> None:
    assert cut_request(data) is None


def test_templates_are_bounded_and_go_with_their_generation() -> None:
    templates = Templates()
    parts = b"".join(tensors(1)) + field(7, bytes(8)) * 2
    for number in range(TEMPLATES_MAX + 10):
        tenant = parameter("tenant", pb.InferParameter(string_param=str(number)))
        learn(templates, field(1, b"m") + tenant + parts)
        if number == 0:
            first = cut_request(field(1, b"m") + tenant + parts)
    last = cut_request(field(1, b"m") + tenant + parts)
    assert first is not None
    assert last is not None
    assert templates.find(first, generation=0) is None
    assert templates.find(last, generation=0) is not None
    assert templates.find(last, generation=1) is None
    assert templates.find(last, generation=0) is None


def test_tensors_in_typed_contents_make_no_template() -> None:
    request = pb.ModelInferRequest(model_name="m")
    contents = pb.InferTensorContents(fp32_contents=[1, 2])
    request.inputs.add(name="a", datatype="FP32", shape=[1, 2], contents=contents)
    contents = pb.InferTensorContents(int64_contents=[3])
    request.inputs.add(name="b", datatype="INT64", shape=[1], contents=contents)
    data = request.SerializeToString()
    assert long_way(data) is not None
    templates = Templates()
    learn(templates, data)
    assert short_way(templates, data) is None


def test_a_request_that_is_laid_out_as_one_before_is_known_in_few_steps() -> None:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(8), bytes(8)])
    request.inputs.add(name="a", datatype="FP32", shape=[1, 2])
    request.inputs.add(name="b", datatype="INT64", shape=[1])
    templates, data = Templates(), request.SerializeToString()

    def known(data: bytes, generation: int = 0) -> CheckedRequest | None:
        found = templates.known(data, generation=generation, rpc_remaining_s=None, default_slo_ns=7)
        return None if found is None else found[0]

    assert known(data) is None
    learn(templates, data)
    request.raw_input_contents[1] = struct.pack("<q", 5)
    data = request.SerializeToString()
    assert known(data) == long_way(data)
    # Nothing of it holds when the models are others, or a byte of its layout is another.
    assert known(data, generation=1) is None
    assert known(data.replace(b"INT64", b"INT32")) is None
    assert known(data[:-10] + b"\x32" + data[-9:]) is None


def test_a_request_like_those_before_hears_at_once_that_its_model_is_gone(tmp_path: Path) -> None:
    request = pb.ModelInferRequest(model_name="double")
    request.parameters["slo_ms"].int64_param = 600_000
    request.inputs.add(name="x", datatype="FP32", shape=(1, 3))
    request.raw_input_contents.append(struct.pack("<3f", 1, 2, 3))
    data = request.SerializeToString()
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        ends = [client.wait([client.infer(data)])[0] for _ in range(3)]
        assert [end.status for end in ends] == [0, 0, 0]
        assert len({end.messages[0] for end in ends}) == 1
        server.do(lambda front: front.catalogue.remove("double"))
        [end] = client.wait([client.infer(data)])
        assert end.status == 5
        assert "there is no model 'double'" in end.text


def test_tensors_of_open_sizes_carry_them_the_short_way_too() -> None:
    vary = Variable(1 << 10, ("length",), (64,), 4)
    spec = TensorSpec("a", "UINT8", (-1,), vary=vary)
    servable = Servable("m", "3", (spec,), (spec,), 64, None)
    templates = Templates()

    def request(length: int, content: bytes) -> tuple[bytes, CheckedRequest]:
        data = pb.ModelInferRequest(
            model_name="m",
            inputs=[Input(name="a", datatype="UINT8", shape=[1, length])],
            raw_input_contents=[content * length],
        ).SerializeToString()
        read = read_request(parse_request(data), servable, rpc_remaining_s=None, default_slo_ns=7)
        return data, read

    for length in (3, 5):
        data, checked = request(length, b"a")
        cut = cut_request(data)
        assert cut is not None
        assert templates.find(cut, generation=0) is None
        described = RemoteDescription(servable, 1, is_held=True)
        templates.add(cut, parse_request(data), described, checked)
    for length in (5, 3):
        data, expected = request(length, b"b")
        known = templates.known(data, generation=0, rpc_remaining_s=None, default_slo_ns=7)
        assert known is not None
        assert known[0] == expected
