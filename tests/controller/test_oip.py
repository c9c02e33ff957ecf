"""Requests decoded and checked, answers encoded; no server."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright.errors import BadRequestError
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire import bulk
from clockwright.wire.bulk import ENTRIES_MAX, FIELDS_MAX, SMALL_MESSAGE_BYTES
from clockwright.wire.tensors import DATATYPES, TensorSpec, Variable
from clockwright.wire.texts import cut_texts
from controller.front.oip.classification import Classes
from controller.front.oip.protocol import (
    CheckedRequest,
    Servable,
    check_decision,
    encode_response,
    encode_stream_error,
    leave_work_ahead,
    parse_request,
    read_request,
    request_slo_ns,
    unpack_outputs,
    wrap_for_stream,
)

A = TensorSpec("a", "FP32", (2,))
B = TensorSpec("b", "INT64", ())
INPUTS = (A, B)
OUTPUTS = (TensorSpec("y", "FP32", (2,)), TensorSpec("z", "FP16", (1,)))
Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor
Contents = pb.InferTensorContents
Parameter = pb.InferParameter

GOOD_A = Input(name="a", datatype="FP32", shape=[1, 2])
GOOD_B = Input(name="b", datatype="INT64", shape=[1])


def message(**fields: object) -> pb.ModelInferRequest:
    """A good request, with some fields changed."""
    good: dict[str, Any] = {
        "model_name": "m",
        "inputs": [GOOD_A, GOOD_B],
        "raw_input_contents": [bytes(8), bytes(8)],
    }
    return pb.ModelInferRequest(**{**good, **fields})


def servable(
    inputs: tuple[TensorSpec, ...] = INPUTS,
    outputs: tuple[TensorSpec, ...] = OUTPUTS,
    has_contexts: bool = False,
) -> Servable:
    return Servable(
        name="m",
        version="3",
        inputs=inputs,
        outputs=outputs,
        max_rows=16,
        slo_ns=None,
        has_contexts=has_contexts,
    )


def decode(
    request: pb.ModelInferRequest,
    inputs: tuple[TensorSpec, ...] = INPUTS,
    outputs: tuple[TensorSpec, ...] = OUTPUTS,
    *,
    has_contexts: bool = False,
) -> CheckedRequest:
    parsed = parse_request(request.SerializeToString())
    return read_request(
        parsed, servable(inputs, outputs, has_contexts), rpc_remaining_s=None, default_slo_ns=1
    )


def one_input(
    datatype: str, contents: pb.InferTensorContents | None, num: int = 2
) -> CheckedRequest:
    spec = TensorSpec("x", datatype, (num,))
    tensor = Input(name="x", datatype=datatype, shape=[1, num], contents=contents)
    request = pb.ModelInferRequest(model_name="m", inputs=[tensor])
    return decode(request, inputs=(spec,))


# --- tensors --------------------------------------------------------------------------------------


def test_rows_that_differ_are_compared_with_an_input_that_has_rows() -> None:
    setting = TensorSpec("setting", "INT64", (), None)
    inputs = [Input(name="setting", datatype="INT64"), GOOD_A]
    inputs.append(Input(name="b", datatype="INT64", shape=[2]))
    raw = [bytes(8), bytes(8), bytes(16)]
    with pytest.raises(BadRequestError, match="expected 1 as in input 'a'"):
        decode(message(inputs=inputs, raw_input_contents=raw), inputs=(setting, *INPUTS))


@given(st.integers(1, 16), st.permutations([0, 1]), st.integers(0, 2**32 - 1))
def test_raw_tensors_come_out_in_the_models_order(rows: int, order: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = [rng.bytes(rows * 8), rng.bytes(rows * 8)]
    tensors = [
        Input(name="a", datatype="FP32", shape=[rows, 2]),
        Input(name="b", datatype="INT64", shape=[rows]),
    ]
    decoded = decode(
        message(inputs=[tensors[i] for i in order], raw_input_contents=[data[i] for i in order])
    )
    assert decoded.rows == rows
    assert [bytes(buffer) for buffer in decoded.inputs] == data


def test_a_big_tensor_stays_a_view_of_the_message() -> None:
    spec = TensorSpec("x", "UINT8", (4 * SMALL_MESSAGE_BYTES,))
    tensor = Input(name="x", datatype="UINT8", shape=[1, 4 * SMALL_MESSAGE_BYTES])
    raw = np.random.default_rng(1).bytes(4 * SMALL_MESSAGE_BYTES)
    data = pb.ModelInferRequest(
        model_name="m", inputs=[tensor], raw_input_contents=[raw]
    ).SerializeToString()
    asked = read_request(
        parse_request(data), servable(inputs=(spec,)), rpc_remaining_s=None, default_slo_ns=1
    )
    (view,) = asked.inputs
    assert isinstance(view, memoryview)
    assert view.obj is data
    assert view == raw


@pytest.mark.parametrize(
    ("datatype", "field", "dtype", "values"),
    [
        ("BOOL", "bool_contents", "bool", [True, False]),
        ("INT8", "int_contents", "int8", [-128, 127]),
        ("INT16", "int_contents", "int16", [-(2**15), 2**15 - 1]),
        ("INT32", "int_contents", "int32", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", "int64", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", "uint8", [0, 255]),
        ("UINT16", "uint_contents", "uint16", [0, 2**16 - 1]),
        ("UINT32", "uint_contents", "uint32", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", "uint64", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", "float32", [1.5, -math.inf]),
        ("FP64", "fp64_contents", "float64", [0.1, 1e300]),
    ],
)
def test_typed_contents_become_the_bytes_numpy_has(
    datatype: str, field: str, dtype: str, values: list[Any]
) -> None:
    fields: dict[str, Any] = {field: values}
    decoded = one_input(datatype, Contents(**fields))
    assert bytes(decoded.inputs[0]) == np.array(values, dtype).tobytes()


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_typed_floats_keep_every_bit_that_they_had(values: list[float]) -> None:
    decoded = one_input("FP32", Contents(fp32_contents=values), num=len(values))
    assert bytes(decoded.inputs[0]) == struct.pack(f"<{len(values)}f", *values)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_raw_only(datatype: str) -> None:
    with pytest.raises(BadRequestError, match="found no raw_input_contents, expected them"):
        one_input(datatype, None)


def test_outputs_are_those_asked_for_in_that_order() -> None:
    assert list(decode(message()).outputs) == [0, 1]
    assert list(decode(message(outputs=[Output(name="z"), Output(name="y")])).outputs) == [1, 0]
    assert list(decode(message(outputs=[Output(name="z")])).outputs) == [1]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"inputs": [GOOD_A], "raw_input_contents": [bytes(8)]}, r"input 'b' is missing: found 'a', expected 'a', 'b'"),
        (
            {"inputs": [GOOD_A, Input(name="c"), GOOD_B], "raw_input_contents": [bytes(8)] * 3},
            "inputs: found 'c' too many, expected 'a', 'b'",
        ),
        ({"inputs": [GOOD_A, GOOD_A]}, "input 'a': found twice, expected once"),
        ({"inputs": [], "raw_input_contents": []}, "input 'a' is missing: found none"),
        (
            {"inputs": [Input(name="a", datatype="FP64", shape=[1, 2]), GOOD_B]},
            "input 'a': found datatype 'FP64', expected FP32",
        ),
        (
            {"inputs": [Input(name="a", datatype="BYTES", shape=[1, 2]), GOOD_B]},
            "found datatype 'BYTES', expected FP32",
        ),
        (
            {"inputs": [Input(name="a", datatype="float", shape=[1, 2]), GOOD_B]},
            "found datatype 'float' .no datatype of the protocol.",
        ),
        (
            {"inputs": [Input(name="a", datatype="FP32", shape=[1, 3]), GOOD_B]},
            r"input 'a': found shape \[1, 3\], expected \[-1, 2\] with 1 to 16 in place of -1",
        ),
        (
            {"inputs": [Input(name="a", datatype="FP32", shape=[2]), GOOD_B]},
            r"input 'a': found shape \[2\], expected \[-1, 2\]",
        ),
        (
            {"inputs": [GOOD_A, Input(name="b", datatype="INT64")]},
            r"input 'b': found shape \[\], expected \[-1\]",
        ),
        (
            {"inputs": [Input(name="a", datatype="FP32", shape=[17, 2]), GOOD_B]},
            r"input 'a': found 17 rows \(shape\[0\]\), expected 1 to 16",
        ),
        (
            {"inputs": [Input(name="a", datatype="FP32", shape=[0, 2]), GOOD_B]},
            "found 0 rows",
        ),
        (
            {"inputs": [Input(name="a", datatype="FP32", shape=[-1, 2]), GOOD_B]},
            "found -1 rows",
        ),
        (
            {"inputs": [GOOD_A, Input(name="b", datatype="INT64", shape=[2])]},
            "input 'b': found 2 rows .*, expected 1 as in input 'a'",
        ),
        (
            {"raw_input_contents": [bytes(8), bytes(9)]},
            r"input 'b': found 9 raw bytes, expected 8 for INT64 \[1\]",
        ),
        (
            {"raw_input_contents": [bytes(8)]},
            "raw_input_contents: found 1 entries, expected one for each of the 2 inputs",
        ),
        (
            {
                "inputs": [
                    Input(name="a", datatype="FP32", shape=[1, 2], contents=Contents(fp32_contents=[1, 2])),
                    GOOD_B,
                ]
            },
            "contents field must not be specified when using raw_input_contents for 'a' for model 'm'",
        ),
        (
            {
                "inputs": [
                    Input(name="a", datatype="FP32", shape=[1, 2], contents=Contents(fp64_contents=[1, 2])),
                    GOOD_B,
                ],
                "raw_input_contents": [],
            },
            "input 'a': found contents.fp64_contents, expected contents.fp32_contents for FP32",
        ),
        (
            {
                "inputs": [
                    Input(name="a", datatype="FP32", shape=[1, 2], contents=Contents(fp32_contents=[1])),
                    GOOD_B,
                ],
                "raw_input_contents": [],
            },
            "input 'a': found 1 elements in contents.fp32_contents, expected 2",
        ),
        ({"raw_input_contents": []}, "input 'a': found 0 elements"),
        ({"outputs": [Output(name="w")]}, "output 'w': found no such output, expected some of 'y', 'z'"),
        ({"outputs": [Output(name="y"), Output(name="y")]}, "output 'y': found twice"),
        (
            {"outputs": [Output(name="y", parameters={"classification": Parameter(int64_param=0)})]},
            "output 'y': parameter classification: found 0, expected 1 or more",
        ),
        (
            {"outputs": [Output(name="y", parameters={"classification": Parameter(string_param="3")})]},
            "output 'y': parameter classification: found string_param, expected int64_param",
        ),
        (
            {
                "inputs": [
                    Input(
                        name="a", datatype="FP32", shape=[1, 2],
                        parameters={"shared_memory_region": Parameter(string_param="r")},
                    ),
                    GOOD_B,
                ]
            },
            "input 'a': found no shared_memory_byte_size, expected it with shared_memory_region",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_what_was_found_and_expected(
    bad: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadRequestError, match=text):
        decode(message(**bad))


def test_a_typed_element_out_of_range_is_named() -> None:
    with pytest.raises(BadRequestError, match="from -5 to 300, expected all in the range of INT8"):
        one_input("INT8", Contents(int_contents=[300, -5]))


def test_messages_stay_short_whatever_the_client_calls_things() -> None:
    long = Input(name="n" * 100_000, datatype="d" * 100_000, shape=[1] * 100_000)
    bad: list[dict[str, Any]] = [
        {"inputs": [long, GOOD_B]},
        {"inputs": [GOOD_A, GOOD_B, long], "raw_input_contents": [bytes(8)] * 3},
        {"inputs": [Input(name="a", datatype="FP32", shape=[1] * 100_000), GOOD_B]},
        {"outputs": [Output(name="o" * 100_000)]},
    ]
    for fields in bad:
        with pytest.raises(BadRequestError) as caught:
            decode(message(**fields))
        assert len(str(caught.value)) < 500


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (b"\x3a\x00", "found more than 1024 entries of field 7, expected 1024 at most"),
        (b"\x78\x00", "found more than 8192 fields, expected 8192 at most"),
        (b"\x2a\x00", "found more than 8192 fields"),
        (b"\x32\x00", "found more than 8192 fields"),
    ],
    ids=["raw tensors", "unknown fields", "inputs", "outputs"],
)
def test_a_message_of_millions_of_fields_is_given_up_after_some_thousands(
    monkeypatch: pytest.MonkeyPatch, field: bytes, words: str
) -> None:
    looked_at = 0
    look = bulk._field

    def counted(message: bytes, position: int, end: int) -> tuple[int, int, int]:
        nonlocal looked_at
        looked_at += 1
        return look(message, position, end)

    monkeypatch.setattr(bulk, "_field", counted)
    with pytest.raises(BadRequestError, match=words):
        parse_request(field * (8 << 20))
    assert looked_at <= ENTRIES_MAX + FIELDS_MAX + 1


def test_only_raw_tensors_may_be_large() -> None:
    nested = Input(name="a", datatype="FP32", shape=[1] * (2 << 20))
    with pytest.raises(
        BadRequestError, match=r"found \d+ bytes besides raw tensors, expected 1048576"
    ):
        parse_request(message(inputs=[nested]).SerializeToString())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"inputs": [Input()] * 1025, "raw_input_contents": []},
            "inputs: found 1025, expected 1024 at most",
        ),
        ({"outputs": [Output()] * 1025}, "outputs: found 1025, expected 1024 at most"),
        (
            {"raw_input_contents": [b""] * 1025},
            "found 1025 entries, expected one for each of the 2",
        ),
    ],
)
def test_a_small_message_of_many_fields_is_counted_before_it_is_read(
    fields: dict[str, Any], words: str
) -> None:
    request = message(**fields)
    assert request.ByteSize() < SMALL_MESSAGE_BYTES
    with pytest.raises(BadRequestError, match=words):
        decode(request)


# --- garbage --------------------------------------------------------------------------------------


def consume(data: bytes) -> None:
    """Do all that the front end does with the bytes of a request.

    What it takes is a message to protobuf too, and what goes to a worker fits the model.
    """
    try:
        taken = read_request(
            parse_request(data), servable(), rpc_remaining_s=None, default_slo_ns=1
        )
    except BadRequestError:
        return
    assert taken.request_id == pb.ModelInferRequest.FromString(data).id
    assert 1 <= taken.rows <= servable().max_rows
    # A row of either input has 8 bytes.
    assert [memoryview(tensor).nbytes for tensor in taken.inputs] == [8 * taken.rows] * 2
    assert set(taken.outputs) <= set(range(len(OUTPUTS)))
    assert taken.slo_ns > 0


@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_a_bad_request_or_a_good_one(data: bytes, big: bool) -> None:
    # The padding is a field that no message has. With it, the bytes take the way of big messages.
    padding = b"\x9a\x06\x80\x80\x02" + bytes(32768) if big else b""
    consume(padding + data)


@given(st.data())
def test_a_good_request_with_some_bytes_changed_is_a_bad_request_or_a_good_one(
    data: st.DataObject,
) -> None:
    parameters = {"slo_ms": Parameter(double_param=3), "explain": Parameter(bool_param=True)}
    good = bytearray(message(parameters=parameters, outputs=[Output(name="y")]).SerializeToString())
    for _ in range(data.draw(st.integers(1, 5))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    consume(bytes(good))


# --- the SLO --------------------------------------------------------------------------------------


def slo(
    parameters: dict[str, pb.InferParameter],
    *,
    rpc_remaining_s: float | None = None,
    model_slo_ns: int | None = None,
) -> tuple[int, str]:
    return request_slo_ns(
        message(parameters=parameters),
        rpc_remaining_s=rpc_remaining_s,
        model_slo_ns=model_slo_ns,
        default_slo_ns=100 * NS_PER_MS,
    )


def test_the_slo_comes_from_the_first_place_that_names_one() -> None:
    parameters = {"slo_ms": Parameter(int64_param=25), "timeout": Parameter(int64_param=30_000)}
    assert slo(parameters, rpc_remaining_s=1, model_slo_ns=7) == (25 * NS_PER_MS, "slo_ms")
    del parameters["slo_ms"]
    assert slo(parameters, rpc_remaining_s=1, model_slo_ns=7) == (30 * NS_PER_MS, "timeout")
    assert slo({}, rpc_remaining_s=2, model_slo_ns=7)[1] == "rpc_deadline"
    assert slo({}, model_slo_ns=7) == (7, "model")
    assert slo({}) == (100 * NS_PER_MS, "default")


@pytest.mark.parametrize(
    "parameter",
    [
        Parameter(int64_param=25),
        Parameter(uint64_param=25),
        Parameter(double_param=25.0),
        Parameter(string_param="25"),
        Parameter(string_param=" 2.5e1 "),
    ],
)
def test_slo_ms_may_be_any_number(parameter: pb.InferParameter) -> None:
    assert slo({"slo_ms": parameter}) == (25 * NS_PER_MS, "slo_ms")


@pytest.mark.parametrize(
    ("name", "parameter", "text"),
    [
        ("slo_ms", Parameter(int64_param=0), "found 0, expected more than 0"),
        ("slo_ms", Parameter(int64_param=-1), "found -1, expected more than 0"),
        ("slo_ms", Parameter(double_param=math.nan), "found nan"),
        ("slo_ms", Parameter(double_param=math.inf), "found inf"),
        ("slo_ms", Parameter(uint64_param=2**64 - 1), "at most 86400000 milliseconds"),
        ("slo_ms", Parameter(string_param="nan"), "found nan"),
        ("slo_ms", Parameter(string_param="soon"), "found 'soon', expected a number"),
        ("slo_ms", Parameter(bool_param=True), "found bool_param, expected int64_param"),
        ("slo_ms", Parameter(), "found no value"),
        ("timeout", Parameter(int64_param=0), "parameter timeout: found 0"),
        ("timeout", Parameter(int64_param=-5), "parameter timeout: found -5"),
        ("timeout", Parameter(double_param=5), "found double_param, expected int64_param"),
        ("timeout", Parameter(string_param="5"), "found string_param"),
    ],
)
def test_an_slo_that_is_none_is_a_bad_request(
    name: str, parameter: pb.InferParameter, text: str
) -> None:
    with pytest.raises(BadRequestError, match=text):
        slo({name: parameter})


@given(st.floats(0, 1e12))
def test_the_rpc_deadline_never_gives_more_than_is_left(remaining_s: float) -> None:
    slo_ns, source = slo({}, rpc_remaining_s=remaining_s)
    assert source == "rpc_deadline"
    assert 1 <= slo_ns <= max(remaining_s * NS_PER_S - NS_PER_MS, 1)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"explain": Parameter(string_param="yes")}, "found string_param, expected bool_param"),
        (
            {"sequence_id": Parameter(int64_param=3)},
            "parameter sequence_id: 'm' has no state and no controls",
        ),
        (
            {"sequence_id": Parameter(bool_param=True)},
            "parameter sequence_id: found bool_param, expected int64_param or string_param",
        ),
        (
            {"sequence_start": Parameter(bool_param=True)},
            "parameter sequence_start: found without sequence_id, expected with it",
        ),
    ],
)
def test_parameters_that_cannot_be_honoured_are_bad_requests(
    parameters: dict[str, pb.InferParameter], text: str
) -> None:
    with pytest.raises(BadRequestError, match=text):
        decode(message(parameters=parameters))


def test_a_step_of_a_model_that_answers_several_times_is_told_whose_the_state_is() -> None:
    asked = message(parameters={"sequence_id": Parameter(int64_param=3)})
    model = replace(servable(), max_steps=4)
    with pytest.raises(BadRequestError, match=r"'m' answers several times, .* leave the parameter"):
        read_request(
            parse_request(asked.SerializeToString()), model, rpc_remaining_s=None, default_slo_ns=1
        )


def test_a_tenant_is_a_string_of_no_great_length() -> None:
    assert decode(message()).tenant == ""
    assert decode(message(parameters={"tenant": Parameter(string_param="ann")})).tenant == "ann"
    with pytest.raises(BadRequestError, match=r"tenant: found int64_param, expected string_param"):
        decode(message(parameters={"tenant": Parameter(int64_param=7)}))
    with pytest.raises(
        BadRequestError, match=r"tenant: found 257 characters, expected 256 at most"
    ):
        decode(message(parameters={"tenant": Parameter(string_param="a" * 257)}))
    with pytest.raises(BadRequestError, match=r"^id: found 257 characters, expected 256 at most"):
        decode(message(id="a" * 257))


def test_a_context_is_read_for_those_who_have_contexts_and_passes_by_others() -> None:
    ann = message(parameters={"context": Parameter(string_param="ann")})
    assert decode(ann, has_contexts=True).context == "ann"
    assert decode(ann).context == ""
    odd = message(parameters={"context": Parameter(int64_param=7)})
    assert decode(odd).context == ""
    with pytest.raises(BadRequestError, match=r"context: found int64_param, expected string_param"):
        decode(odd, has_contexts=True)


def test_explain_is_asked_for_by_a_bool() -> None:
    assert decode(message(parameters={"explain": Parameter(bool_param=True)})).explain
    assert not decode(message(parameters={"explain": Parameter(bool_param=False)})).explain


def test_the_time_for_a_decision_is_a_positive_number_of_milliseconds() -> None:
    for parameter in (
        Parameter(double_param=2.5),
        Parameter(string_param="2.5"),
    ):
        asked = decode(message(parameters={"decide_within_ms": parameter}))
        assert asked.decide_within_ns == 2_500_000
    assert decode(message()).decide_within_ns == 0
    for parameter, words in (
        (Parameter(int64_param=0), "found 0, expected more than 0 and at most 86400000 millisec"),
        (Parameter(double_param=float("nan")), "found nan, expected more than 0"),
        (Parameter(string_param="soon"), "found 'soon', expected a number of milliseconds"),
        (Parameter(bool_param=True), "found bool_param, expected int64_param, uint64_param"),
    ):
        with pytest.raises(BadRequestError, match=f"parameter decide_within_ms: {words}"):
            decode(message(parameters={"decide_within_ms": parameter}))


def test_a_weight_is_a_positive_number() -> None:
    for parameter in (Parameter(double_param=2.5), Parameter(string_param="2.5")):
        assert decode(message(parameters={"weight": parameter})).weight == 2.5
    assert decode(message()).weight == 1.0
    for parameter, words in (
        (Parameter(int64_param=0), "found 0, expected 0.001 to 1000"),
        (Parameter(double_param=-1), "found -1, expected 0.001"),
        (Parameter(double_param=5e-324), "found 4.94065645841e-324, expected 0.001"),
        (Parameter(double_param=float("nan")), "found nan, expected 0.001"),
        (Parameter(string_param="much"), "found 'much', expected a number$"),
        (Parameter(bool_param=True), "found bool_param, expected int64_param, uint64_param"),
    ):
        with pytest.raises(BadRequestError, match=f"parameter weight: {words}"):
            decode(message(parameters={"weight": parameter}))


def test_the_work_ahead_is_a_part_of_the_slo() -> None:
    asked = decode(
        message(
            parameters={
                "slo_ms": Parameter(int64_param=100),
                "work_ahead_ms": Parameter(double_param=30),
            }
        )
    )
    leave_work_ahead(asked)
    assert (asked.slo_ns, asked.work_ahead_ns) == (70_000_000, 30_000_000)
    assert decode(message()).work_ahead_ns == 0
    asked.work_ahead_ns = asked.slo_ns
    with pytest.raises(
        BadRequestError, match="work_ahead_ms: found 70, expected less than the SLO, 70"
    ):
        leave_work_ahead(asked)


def test_an_application_is_not_asked_to_decide_within_a_time() -> None:
    asked = decode(message(parameters={"decide_within_ms": Parameter(double_param=2.5)}))
    servable = Servable("app", "1", (), (), 1, None, has_contexts=True)
    with pytest.raises(BadRequestError, match="application 'app', expected in requests to models"):
        check_decision(asked, servable)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("slo-ms", "slo_ms"),
        ("slo", "slo_ms"),
        ("SLO_MS", "slo_ms"),
        ("explian", "explain"),
        ("timeout_ms", "timeout"),
        ("tenant_id", "tenant"),
        ("sequence_begin", "sequence_start"),
        ("sequence_stop", "sequence_end"),
    ],
)
def test_a_misspelt_parameter_is_refused_with_the_nearest_that_is_known(
    name: str, nearest: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        decode(message(parameters={name: Parameter(int64_param=25)}))
    assert str(caught.value) == f"found parameter '{name}', which is none; did you mean {nearest}?"


def test_a_misspelt_parameter_of_a_tensor_is_refused_with_its_place() -> None:
    odd = Input(
        name="a", datatype="FP32", shape=[1, 2], parameters={"shared_memory_regoin": Parameter()}
    )
    with pytest.raises(
        BadRequestError, match=r"^input 'a': .*; did you mean shared_memory_region[?]"
    ):
        decode(message(inputs=[odd, GOOD_B]))
    wanted = Output(name="y", parameters={"binary_date": Parameter()})
    with pytest.raises(BadRequestError, match=r"^output 'y': .*; did you mean binary_data[?]"):
        decode(message(outputs=[wanted]))


def test_parameters_for_models_of_other_makes_are_ignored_but_not_many() -> None:
    others = ("temperature", "max_tokens", "stream", "text", "request_id", "lora_weights", "user")
    told = {name: Parameter(string_param="1") for name in others}
    asked = decode(message(parameters={**told, "slo_ms": Parameter(int64_param=25)}))
    assert asked.slo_ns == 25_000_000
    odd = Input(name="a", datatype="FP32", shape=[1, 2], parameters={"foo": Parameter()})
    wanted = Output(name="y", parameters={"foo": Parameter()})
    decode(message(inputs=[odd, GOOD_B], outputs=[wanted]))
    many = {f"x{index}": Parameter(bool_param=True) for index in range(65)}
    with pytest.raises(BadRequestError, match="found 65 parameters, expected 64 at most"):
        decode(message(parameters=many))


def test_what_clients_of_other_makes_send_as_a_matter_of_course_passes() -> None:
    triton = {
        "priority": Parameter(uint64_param=3),
        "timeout": Parameter(int64_param=50_000),
        "triton_enable_empty_final_response": Parameter(bool_param=True),
    }
    assert decode(message(parameters=triton)).slo_source == "timeout"
    kserve = {"binary_data_output": Parameter(bool_param=True)}
    sized = Input(
        name="a",
        datatype="FP32",
        shape=[1, 2],
        parameters={"binary_data_size": Parameter(int64_param=8)},
    )
    wanted = Output(name="y", parameters={"binary_data": Parameter(bool_param=True)})
    decode(message(parameters=kserve, inputs=[sized, GOOD_B], outputs=[wanted]))
    mlserver = {"content_type": Parameter(string_param="np")}
    decode(message(parameters=mlserver))


# --- answers --------------------------------------------------------------------------------------


@given(st.text(max_size=30), st.integers(1, 16), st.booleans())
def test_responses_are_what_protobuf_would_make(
    request_id: str, rows: int, explained: bool
) -> None:
    outputs = [bytes(range(8)) * rows, b"ab" * rows]
    parameters: dict[str, bool | int | str] = {"cold": True, "queue_us": 7, "worker": "w"}
    tensors = [
        Input(name="a", datatype="FP32", shape=[rows, 2]),
        Input(name="b", datatype="INT64", shape=[rows]),
    ]
    request = message(
        id=request_id, inputs=tensors, raw_input_contents=[bytes(8 * rows), bytes(8 * rows)]
    )
    data = encode_response(decode(request), outputs, parameters=parameters if explained else None)
    Tensor = pb.ModelInferResponse.InferOutputTensor
    expected = pb.ModelInferResponse(
        model_name="m",
        model_version="3",
        id=request_id,
        outputs=[
            Tensor(name="y", datatype="FP32", shape=[rows, 2]),
            Tensor(name="z", datatype="FP16", shape=[rows, 1]),
        ],
        raw_output_contents=outputs,
    )
    if explained:
        expected.parameters["cold"].bool_param = True
        expected.parameters["queue_us"].int64_param = 7
        expected.parameters["worker"].string_param = "w"
    assert pb.ModelInferResponse.FromString(b"".join(data)) == expected
    wrapped = pb.ModelStreamInferResponse.FromString(b"".join(wrap_for_stream(data)))
    assert wrapped == pb.ModelStreamInferResponse(infer_response=expected)


def test_an_error_in_a_stream_names_its_request() -> None:
    answer = pb.ModelStreamInferResponse.FromString(
        encode_stream_error("no", "NOT_FOUND", request_id="7")
    )
    assert (answer.error_message, answer.infer_response.id) == ("no", "7")
    bare = pb.ModelStreamInferResponse.FromString(encode_stream_error("no", "NOT_FOUND"))
    assert not bare.infer_response.id
    assert bare.infer_response.parameters["status"].string_param == "NOT_FOUND"


def test_every_datatype_has_a_size() -> None:
    for datatype in DATATYPES.values():
        spec = TensorSpec("x", datatype.name, (3,))
        tensor = Input(name="x", datatype=datatype.name, shape=[2, 3])
        raw = bytes(6 * datatype.num_bytes)
        request = pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[raw])
        assert decode(request, inputs=(spec,)).rows == 2


# --- open dimensions ------------------------------------------------------------------------------

OPEN = Variable(1 << 10, ("length", "width"), (8, 5), 4)
TOKENS = TensorSpec("tokens", "INT16", (-1, 2, -1), vary=OPEN)
MASK = TensorSpec("mask", "BOOL", (-1,), vary=Variable(1 << 9, ("length",), (8,), 4))
STATES = TensorSpec("states", "FP32", (-1, 2), vary=Variable(1 << 10, ("length",), (8,), 4))
LABEL = TensorSpec("label", "FP32", (3,), vary=Variable(1 << 9, unit=4))
OPEN_SERVABLE = Servable("m", "3", (TOKENS, MASK), (STATES, LABEL), 40, None, largest_batch=10)


def open_message(
    shape: tuple[int, ...] = (2, 3, 2, 5), mask: tuple[int, ...] = (2, 3), **fields: object
) -> pb.ModelInferRequest:
    return message(
        inputs=[
            Input(name="mask", datatype="BOOL", shape=mask),
            Input(name="tokens", datatype="INT16", shape=shape),
        ],
        raw_input_contents=[b"m" * math.prod(mask), b"t" * 2 * math.prod(shape)],
        **fields,
    )


def read_open(request: pb.ModelInferRequest) -> CheckedRequest:
    return read_request(
        parse_request(request.SerializeToString()),
        OPEN_SERVABLE,
        rpc_remaining_s=None,
        default_slo_ns=NS_PER_S,
    )


def test_tensors_of_open_sizes_carry_them_inside() -> None:
    asked = read_open(open_message())
    assert asked.rows == -(-2 * 3 * 5 // 4)
    tokens, mask = asked.inputs
    assert TOKENS.unpack(tokens)[0].row_shape == (2, 3, 2, 5)
    assert MASK.unpack(mask)[1] == b"m" * 6
    outputs = [
        STATES.header((2, 3, 2), 48) + b"s" * 48,
        LABEL.header((2, 3), 24) + b"l" * 24,
    ]
    found = unpack_outputs(asked, OPEN_SERVABLE, outputs)
    response = pb.ModelInferResponse.FromString(b"".join(encode_response(asked, found)))
    assert [list(output.shape) for output in response.outputs] == [[2, 3, 2], [2, 3]]
    assert list(response.raw_output_contents) == [b"s" * 48, b"l" * 24]


@pytest.mark.parametrize(
    ("row", "number", "expected"),
    [
        ([0, 1, 1, 1, 1, 0], 2, ["1.000000:1", "1.000000:2"]),
        ([0] * 1000, 1, ["0.000000:0"]),
        ([math.nan, 1, 2, math.nan, -math.inf], 3, ["2.000000:2", "1.000000:1", "nan:0"]),
    ],
)
def test_of_equal_values_the_first_are_the_classes_and_nan_is_the_least(
    row: list[float], number: int, expected: list[str]
) -> None:
    classes = Classes(TensorSpec("y", "FP32", (len(row),)), number)
    raw = struct.pack(f"<{2 * len(row)}f", *row, *row)
    assert [text.decode() for text in cut_texts(classes.classify(raw, 2))] == expected * 2


def test_only_the_outputs_asked_for_are_sent() -> None:
    classes = Output(name="label", parameters={"classification": Parameter(int64_param=2)})
    asked = read_open(open_message(outputs=[classes]))
    label = struct.pack("<6f", 1, 3, 2, 9, 8, 7)
    outputs = [STATES.header((2, 3, 2), 48) + bytes(48), LABEL.header((2, 3), 24) + label]
    found = unpack_outputs(asked, OPEN_SERVABLE, outputs)
    response = pb.ModelInferResponse.FromString(b"".join(encode_response(asked, found)))
    assert [(each.name, list(each.shape)) for each in response.outputs] == [("label", [2, 2])]
    assert b"9.000000:0" in response.raw_output_contents[0]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (open_message((2, 3, 2, 6)), r"found width 6 \(shape\[3\]\), expected 1 to 5"),
        (open_message((2, 0, 2, 5)), r"found length 0 \(shape\[1\]\), expected 1 to 8"),
        (open_message(mask=(2, 4)), r"found length 4 .*, expected 3 as in input 'tokens'"),
        (open_message(mask=(1, 3)), r"found 1 rows .*, expected 2 as in input 'tokens'"),
        (
            open_message((2, 3, 2)),
            r"found shape \[2, 3, 2\], expected \[-1, length, 2, width\] with 1 to 40 in place of -1",
        ),
        (
            open_message((2, 8, 2, 5), (2, 8)),
            "found rows x length x width = 80, expected 40 at most in a request; send fewer rows",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(request_: pb.ModelInferRequest, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        read_open(request_)


def test_the_bytes_must_be_those_of_the_shape() -> None:
    request = open_message()
    request.raw_input_contents[1] = bytes(59)
    with pytest.raises(BadRequestError, match="found 59 raw bytes, expected 120 for INT16"):
        read_open(request)
