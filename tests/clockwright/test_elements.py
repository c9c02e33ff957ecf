"""The elements of datatype BYTES, and what stands for a tensor of them inside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from clockwright.elements import (
    bytes_of,
    elements_of,
)
from clockwright.wire.tensors import TensorSpec, Variable
from clockwright.wire.texts import count_texts, cut_texts, join_texts, skip_texts

ANY = st.lists(st.binary(max_size=9), max_size=9)


@given(ANY)
def test_texts_travel_as_triton_writes_and_reads_them(texts: list[bytes]) -> None:
    raw = join_texts(texts)
    array = np.array(texts, np.object_)
    assert raw == (serialize_byte_tensor(array).item() if texts else b"")
    assert deserialize_bytes_tensor(raw).tolist() == texts
    assert cut_texts(raw) == texts
    assert count_texts(raw, 99) == len(texts)
    assert skip_texts(raw, 0, len(texts)) == len(raw)


@given(ANY)
def test_bytes_that_are_no_text_come_back_as_they_were(texts: list[bytes]) -> None:
    elements = elements_of("BYTES", join_texts(texts))
    assert all(isinstance(each, str) for each in elements)
    assert bytes_of("BYTES", elements).tobytes() == join_texts(texts)


@given(st.binary(max_size=40))
def test_any_bytes_are_elements_or_refused(raw: bytes) -> None:
    try:
        texts = cut_texts(raw)
    except ValueError:
        with pytest.raises(ValueError, match="element "):
            count_texts(raw, len(raw))
    else:
        assert join_texts(texts) == raw


def test_no_more_elements_are_counted_than_are_asked_for() -> None:
    assert count_texts(bytes(4000), 3) == 4


def test_a_tensor_of_texts_carries_its_length() -> None:
    spec = TensorSpec("x", "BYTES", (2,), vary=Variable(100))
    raw = join_texts(["a", "bc"])
    tensor = spec.header((1, 2), len(raw)) + raw
    sized, content = spec.unpack(tensor)
    assert (sized.row_shape, sized.batch_bytes(1), bytes(content)) == ((1, 2), len(raw), raw)
    assert spec.end(b"---" + tensor, 3, 1) == 3 + len(tensor)
    assert spec.fits(len(tensor), 1)
    assert not spec.fits(101, 1)
    with pytest.raises(ValueError, match="which say otherwise"):
        spec.unpack(tensor[:-1])
    empty, content = spec.unpack(spec.nothing(3))
    assert (empty.row_shape, cut_texts(content)) == ((3, 2), [b""] * 6)
