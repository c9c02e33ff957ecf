"""The elements of tensors as numpy arrays. What numpy has no type for is computed as FP32."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # tells numpy the names of types that it does not have, such as bfloat16
import numpy as np

from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import DATATYPES

Array = np.ndarray[Any, np.dtype[Any]]


def elements_of(datatype: str, raw: Buffer | Array) -> Array:
    """View the little-endian bytes of a tensor as its elements, in one dimension.

    Returns a copy as FP32 where numpy has no such type.
    """
    kind = DATATYPES[datatype]
    elements: Array = np.frombuffer(raw, np.dtype(kind.numpy_name).newbyteorder("<"))
    return elements if kind.letter else elements.astype(np.float32)


def bytes_of(datatype: str, elements: Array) -> Array:
    """Round elements to a datatype; returns its bytes, in an array of one dimension."""
    with np.errstate(over="ignore"):
        typed = elements.astype(np.dtype(DATATYPES[datatype].numpy_name).newbyteorder("<"))
    raw: Array = np.ascontiguousarray(typed).reshape(-1).view(np.uint8)
    return raw


def step_of(datatype: str) -> float:
    """The step from 1 to the next number of a datatype; 0 for integers."""
    kind = DATATYPES[datatype]
    if not kind.is_float:
        return 0.0
    return float(ml_dtypes.finfo(kind.numpy_name).eps)  # type: ignore[no-untyped-call]
