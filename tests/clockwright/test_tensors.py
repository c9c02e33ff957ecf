"""Tensors that carry their size."""

from __future__ import annotations

import struct
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright.errors import Refusal, RefusedError
from clockwright.wire.tensors import TensorSpec, Variable, total_bytes

SPEC = TensorSpec("x", "INT16", (-1, 3, -1), vary=Variable(500, ("h", "w"), (8, 9), 16))
FIXED = TensorSpec("x", "INT16", (4, 3))


def carried(shape: tuple[int, ...]) -> bytes:
    num_bytes = 2 * prod(shape)
    return SPEC.header(shape, num_bytes) + bytes(range(256))[:1] * num_bytes


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 9)), max_size=5))
def test_tensors_one_after_the_other_are_cut_apart(sizes: list[tuple[int, int, int]]) -> None:
    shapes = [(rows, height, 3, width) for rows, height, width in sizes]
    memory = memoryview(b"..." + b"".join(map(carried, shapes)) + b"...")
    begin = 3
    for shape in shapes:
        end = SPEC.end(memory, begin, 77)
        sized, content = SPEC.unpack(memory[begin:end])
        assert sized == TensorSpec("x", "INT16", shape, None)
        assert len(content) == sized.batch_bytes(1) == 2 * prod(shape)
        begin = end
    assert begin == len(memory) - 3


@given(st.binary(max_size=80))
def test_no_bytes_are_taken_for_another_tensor(raw: bytes) -> None:
    assert SPEC.end(raw, 0, 1) >= 0
    try:
        sized, content = SPEC.unpack(raw)
    except (ValueError, RefusedError):
        return
    assert SPEC.allows(sized.row_shape)
    assert sized.batch_bytes(1) == len(content)


def test_the_sizes_of_a_shape_are_bounded_by_the_rows_of_work() -> None:
    assert SPEC.batch_bytes(3) == 1500
    assert total_bytes((SPEC, FIXED), 2) == 1000 + 2 * 24
    assert SPEC.fits(1500, 3)
    assert not SPEC.fits(1501, 3)
    assert not SPEC.fits(39, 3)
    assert FIXED.fits(72, 3)
    assert not FIXED.fits(71, 3)
    assert FIXED.end(b"", 5, 3) == 5 + 72
    assert TensorSpec("x", "INT16", (0,)).end(b"", 5, 3) == 5


@pytest.mark.parametrize(
    "shape", [(1, 2, 3), (1, 2, 4, 5), (1, -2, 3, 5), (-1, 2, 3, 5), (1, 2, 3, 5, 1)]
)
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    assert not SPEC.allows(shape)


def test_a_shape_and_a_number_of_bytes_must_agree() -> None:
    raw = struct.pack("<5q", 2, 1, 1, 3, 1) + bytes(2)
    with pytest.raises(ValueError, match=r"found shape \[1, 1, 3, 1\] and 2 bytes"):
        SPEC.unpack(raw)
    with pytest.raises(ValueError, match="found 43 bytes, which say otherwise"):
        SPEC.unpack(raw + b"!")


def test_a_request_fails_alone() -> None:
    raw = SPEC.failed("x" * 1000)
    assert len(raw) == 500
    assert SPEC.end(b"__" + raw + raw, 2, 1) == 2 + len(raw)
    with pytest.raises(RefusedError, match=": xxx") as found:
        SPEC.unpack(raw)
    assert found.value.refusal is Refusal.FAILED
