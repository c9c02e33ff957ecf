"""Tensor datatypes and shapes as the Open Inference Protocol names them. No numpy, no bytes touched."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

#: Bytes per element. BYTES is not among them: models here are numeric.
DATATYPE_BYTES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model."""

    name: str
    datatype: str
    #: Shape of one row, that is without the batch dimension.
    row_shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return DATATYPE_BYTES[self.datatype] * prod(self.row_shape)
