"""The elements of tensors as numpy arrays. What numpy has no type for is computed as FP32.

Elements of datatype BYTES (`clockwright.wire.texts`) are `str` in Python. Bytes that are not UTF-8 are as Python's error
handler `surrogateescape` makes them, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes  # tells numpy the names of types that it does not have, such as bfloat16
import numpy as np

from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import DATATYPES
from clockwright.wire.texts import cut_texts, join_texts

Array = np.ndarray[Any, np.dtype[Any]]

# What random texts are made of.
_WORDS = (
    "",
    "a",
    "the cat",
    "Dog",
    "yes",
    "no",
    "42",
    "-1.5",
    "red green blue",
    "x_y",
    "A",
    "end.",
)


def elements_of(datatype: str, raw: Buffer | Array) -> Array:
    """View the little-endian bytes of a tensor as its elements, in one dimension.

    Returns a copy as FP32 where numpy has no such type, and of BYTES an array of `str` objects. Raises ValueError if
    the bytes are no such elements.
    """
    kind = DATATYPES[datatype]
    if not kind.num_bytes:
        return np.array(
            [text.decode(errors="surrogateescape") for text in cut_texts(bytes(raw))], np.object_
        )
    elements: Array = np.frombuffer(raw, np.dtype(kind.numpy_name).newbyteorder("<"))
    return elements if kind.letter else elements.astype(np.float32)


def bytes_of(datatype: str, elements: Array) -> Array:
    """Round elements to a datatype; returns its bytes, in an array of one dimension."""
    with np.errstate(over="ignore"):
        return raw_of(elements.astype(np.dtype(DATATYPES[datatype].numpy_name).newbyteorder("<")))


def array_of(datatype: str, raw: Buffer | Array, shape: Sequence[int]) -> Array:
    """View the bytes of a tensor as clients have it: bits where numpy has no such numbers, a copy of BYTES.

    Raises ValueError if the bytes are no such tensor.
    """
    kind = DATATYPES[datatype]
    if kind.num_bytes:
        array: Array = np.frombuffer(raw, np.dtype(kind.dtype).newbyteorder("<"))
    else:
        array = elements_of(datatype, raw)
    return array.reshape(tuple(shape))


def raw_of(array: Array) -> Array:
    """The bytes of an array of one of our types or of texts, as they travel, in one dimension."""
    if array.dtype.kind == "O":
        return np.frombuffer(join_texts(array.reshape(-1).tolist()), np.uint8)
    raw: Array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return raw


def draw_texts(random: np.random.Generator, count: int) -> Array:
    """Draw short texts, in an array of `str` objects."""
    return np.array(_WORDS, np.object_)[random.integers(0, len(_WORDS), count)]


def step_of(datatype: str) -> float:
    """The step from 1 to the next number of a datatype; 0 for what are no fractions."""
    kind = DATATYPES[datatype]
    if not kind.is_float:
        return 0.0
    return float(ml_dtypes.finfo(kind.numpy_name).eps)  # type: ignore[no-untyped-call]
