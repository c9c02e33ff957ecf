"""Triton's classification extension: of each row of an output the largest values, as texts `VALUE:INDEX`."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clockwright.bulk import Buffer
from clockwright.tensors import TensorSpec

#: Texts of an output, of all of its rows: each takes a microsecond.
CLASSES_MAX: Final = 16_384

#: How numpy names an element of a datatype, little-endian. It does not know BF16.
DTYPES: Final = {
    "BOOL": "?",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}


def elements_of(datatype: str, raw: Buffer) -> NDArray[Any]:
    """View the bytes of a tensor as its elements; those of BF16 become FP32."""
    if datatype == "BF16":
        wide = np.frombuffer(raw, "<u2").astype("<u4") << 16
        return wide.view("<f4")
    return np.frombuffer(raw, DTYPES[datatype])


def classify(raw: Buffer, spec: TensorSpec, rows: int, num_classes: int) -> bytes:
    """Make the elements of datatype BYTES that stand for an output.

    Args:
        raw: `rows` rows of the output.
        spec: the output.
        rows: how many there are.
        num_classes: texts per row, not more than a row has elements. The largest value comes first, and of equal
            ones the first.
    """
    is_float = spec.datatype in ("FP16", "BF16", "FP32", "FP64")
    parts = []
    for row in elements_of(spec.datatype, raw).reshape(rows, -1):
        found = np.argpartition(row, -num_classes)[-num_classes:].tolist()
        for value, index in sorted((-row[index].item(), index) for index in found):
            text = f"{-value:f}:{index}" if is_float else f"{-value}:{index}"
            parts.append(len(text).to_bytes(4, "little") + text.encode())
    return b"".join(parts)
