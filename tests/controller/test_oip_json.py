"""JSON of the protocol: long data is read in slices, and what stands beside data has a bound."""

from __future__ import annotations

import asyncio
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright.errors import BadRequestError
from clockwright.wire.bulk import HEADER_BYTES_MAX
from clockwright.wire.texts import cut_texts
from controller.front.oip import json_form
from controller.front.oip.json_form import read_object, read_request

_SLICE = 16 << 10


def read(text: str) -> tuple[bytes, int]:
    """Read a request with one input; gives its elements, and how often others had their turn."""
    num_pauses = 0

    async def pause() -> None:
        nonlocal num_pauses
        num_pauses += 1

    request = asyncio.run(read_request(text.encode(), None, model="m", version="", pause=pause))
    (raw,) = request.raw
    return bytes(raw), num_pauses


def asked(data: str, datatype: str, **more: object) -> str:
    tensor = json.dumps({"name": "x", "shape": [1], "datatype": datatype, **more})
    return f'{{"inputs": [{tensor[:-1]}, "data": {data}}}]}}'


@pytest.mark.parametrize("shape", [(30_000,), (300, 100), (1, 30_000), (10_000, 3, 1), (30_000, 1)])
@pytest.mark.parametrize("indent", [None, 1])
def test_others_have_their_turn_between_slices_of_long_data_and_each_number_comes_through(
    shape: tuple[int, ...], indent: int | None
) -> None:
    values = np.random.default_rng(len(shape)).standard_normal(shape)
    text = json.dumps(values.tolist(), indent=indent)
    raw, num_pauses = read(asked(text, "FP64", shape=shape))
    assert raw == values.tobytes()
    # A slice ends behind the number that its length ends in.
    assert len(text) // (_SLICE + 100) <= num_pauses <= len(text) // _SLICE + 1


def test_numbers_next_to_zero_are_what_they_are_in_data_and_beside_it() -> None:
    tiny = [5e-324, 1e-320, 2.2250738585072011e-308] * 2000
    raw, num_pauses = read(asked(json.dumps(tiny), "FP64", shape=[len(tiny)]))
    assert np.frombuffer(raw).tolist() == tiny
    assert num_pauses > 1
    assert read_object(json.dumps({"a": tiny}).encode()) == {"a": tiny}


@pytest.mark.parametrize(
    "data", ["[1, [2]]", "[[1], 2]", "[[1], [[2]]]", '[1, "2"]', "[1, null]", "[1, true]"]
)
def test_lists_of_other_things_are_refused_in_a_slice_as_in_a_whole(data: str) -> None:
    for text in (data, f"{data[:-1]}{', 1' * _SLICE}]", f"[{'1, ' * _SLICE}{data[1:]}"):
        with pytest.raises(BadRequestError, match="input 'x': data: "):
            read(asked(text, "INT32"))


def test_what_stands_beside_data_has_a_bound() -> None:
    assert read(asked("[1]", "INT8", parameters={"a": "x" * (HEADER_BYTES_MAX - 200)}))[0] == b"\1"
    with pytest.raises(BadRequestError, match="bytes of parameters, expected 1048576"):
        read(asked("[1]", "INT8", parameters={"a": "x" * HEADER_BYTES_MAX}))
    for field in ("inputs", "outputs"):
        tensors = [{"name": "x", "shape": [1], "datatype": "INT8"}] * 1025
        with pytest.raises(BadRequestError, match=f"{field}: found 1025, expected 1024 at most"):
            read(json.dumps({"inputs": [], field: tensors}))


@pytest.mark.parametrize("value", [None, [1], {"a": 1}])
def test_a_parameter_is_a_plain_value(value: object) -> None:
    for name in ("slo_ms", "sequence_id", "classification", "headers"):
        for where in (
            {"parameters": {name: value}},
            {"outputs": [{"name": "y", "parameters": {name: value}}]},
        ):
            told = json.dumps({**json.loads(asked("[1]", "INT8")), **where})
            if name == "headers":  # as MLServer's clients say it
                assert read(told)[0] == b"\1"
                continue
            with pytest.raises(BadRequestError, match=f"{name}': expected a truth value, a number"):
                read(told)


def test_no_number_beside_data_is_infinite() -> None:
    with pytest.raises(BadRequestError, match="found number '-1e400', expected one that 64 bits"):
        read('{"inputs": [], "parameters": {"a": -1e400}}')
    with pytest.raises(BadRequestError, match="found number '1e309'"):
        read_object(b'{"items": [{"query_id": "a", "reward": 1e309}]}')


_TEXT = st.text('ab",[]\\ \n{}:é\U0001f600')


@given(st.integers(1, 3), st.data(), st.integers(1, 40), st.booleans())
def test_texts_come_through_however_long_data_is_cut(
    depth: int, data: st.DataObject, slice_bytes: int, escaped: bool
) -> None:
    shape = [data.draw(st.integers(1, 4)) for _ in range(depth)]
    texts = [data.draw(_TEXT) for _ in range(math.prod(shape))]
    nested = np.array(texts, np.object_).reshape(shape).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_form, "_SLICE_BYTES", slice_bytes)
        for values in (nested, texts):
            text = json.dumps(values, ensure_ascii=escaped)
            assert cut_texts(read(asked(text, "BYTES", shape=shape))[0]) == [
                each.encode() for each in texts
            ]
        ragged = json.dumps([["a,]"], ["b", "c"]])
        with pytest.raises(BadRequestError, match="the first has 1 values"):
            read(asked(ragged, "BYTES", shape=[1, 3]))


@pytest.mark.parametrize("data", ['["a', '["a"', '["a\\"]', '["\\ud800"]', '["a", 1]', '"a"', "{}"])
def test_what_is_no_list_of_texts_is_refused(data: str) -> None:
    with pytest.raises(BadRequestError):
        read(asked(data, "BYTES"))
