"""Triton's classification extension: of each row of an output the largest values, as texts `VALUE:INDEX`."""

from __future__ import annotations

from typing import Final

import numpy as np

from clockwright.elements import elements_of
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import DATATYPES, TensorSpec

#: Texts of an output, of all of its rows: each takes a microsecond.
CLASSES_MAX: Final = 16_384


def classify(raw: Buffer, spec: TensorSpec, rows: int, num_classes: int) -> bytes:
    """Make the elements of datatype BYTES that stand for an output.

    Args:
        raw: `rows` rows of the output.
        spec: the output.
        rows: how many there are.
        num_classes: texts per row, not more than a row has elements. The largest value comes first, and of equal
            ones the first.
    """
    is_float = DATATYPES[spec.datatype].is_float
    parts = []
    for row in elements_of(spec.datatype, raw).reshape(rows, -1):
        found = np.argpartition(row, -num_classes)[-num_classes:].tolist()
        for value, index in sorted((-row[index].item(), index) for index in found):
            text = f"{-value:f}:{index}" if is_float else f"{-value}:{index}"
            parts.append(len(text).to_bytes(4, "little") + text.encode())
    return b"".join(parts)
