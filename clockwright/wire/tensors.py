"""Tensor datatypes and shapes as the Open Inference Protocol names them. No numpy, no bytes touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final


@dataclass(frozen=True, slots=True)
class Datatype:
    """The names of one datatype of numbers in the protocol, in numpy, in ONNX and in Python."""

    #: The name in the protocol.
    name: str
    #: Bytes per element.
    num_bytes: int
    #: numpy's name, or that of `ml_dtypes` where numpy has no such numbers.
    numpy_name: str
    #: ONNX's number.
    onnx: int
    #: The letter of `struct`; empty if neither Python nor numpy has such numbers.
    letter: str = ""
    #: The field of a message's typed contents; empty if the protocol has none.
    contents: str = ""

    @property
    def is_float(self) -> bool:
        """Whether elements are fractions."""
        return "float" in self.numpy_name

    @property
    def dtype(self) -> str:
        """Numpy's name of the array that clients get: bits as integers where numpy has no such numbers."""
        return self.numpy_name if self.letter else f"uint{8 * self.num_bytes}"


#: By name. BYTES is not among them: models here are numeric. Torch's types are in `worker.engines.torch_operators`.
DATATYPES: Final = {
    each.name: each
    for each in (
        Datatype("BOOL", 1, "bool", 9, "?", "bool_contents"),
        Datatype("UINT8", 1, "uint8", 2, "B", "uint_contents"),
        Datatype("UINT16", 2, "uint16", 4, "H", "uint_contents"),
        Datatype("UINT32", 4, "uint32", 12, "I", "uint_contents"),
        Datatype("UINT64", 8, "uint64", 13, "Q", "uint64_contents"),
        Datatype("INT8", 1, "int8", 3, "b", "int_contents"),
        Datatype("INT16", 2, "int16", 5, "h", "int_contents"),
        Datatype("INT32", 4, "int32", 6, "i", "int_contents"),
        Datatype("INT64", 8, "int64", 7, "q", "int64_contents"),
        Datatype("FP16", 2, "float16", 10, "e"),
        Datatype("BF16", 2, "bfloat16", 16),
        Datatype("FP32", 4, "float32", 1, "f", "fp32_contents"),
        Datatype("FP64", 8, "float64", 11, "d", "fp64_contents"),
    )
}
#: By ONNX's number.
ONNX_DATATYPES: Final = {each.onnx: each for each in DATATYPES.values()}
#: Those that numpy and Python can compute with, by name.
PLAIN_DATATYPES: Final = {name: each for name, each in DATATYPES.items() if each.letter}


# Without slots, so that its size is computed once.
@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a model. Only it knows how many bytes rows have."""

    name: str
    datatype: str
    #: Shape of one row, that is without the batch dimension.
    row_shape: tuple[int, ...]
    #: The position of the batch dimension in the whole shape. None: there is no batch, a request has the tensor once.
    axis: int | None = 0

    def shape(self, rows: int) -> tuple[int, ...]:
        """The whole shape of so many rows."""
        if self.axis == 0:
            return (rows, *self.row_shape)
        if self.axis is None:
            return self.row_shape
        return (*self.row_shape[: self.axis], rows, *self.row_shape[self.axis :])

    @staticmethod
    def of_shape(name: str, datatype: str, shape: Sequence[int]) -> TensorSpec:
        """Read the whole shape that metadata states: -1 stands for the batch, or 1 in the first place."""
        axis = next((index for index, size in enumerate(shape) if size < 0), None)
        if axis is None and shape and shape[0] == 1:
            axis = 0
        if axis is None:
            return TensorSpec(name, datatype, tuple(shape), None)
        return TensorSpec(name, datatype, (*shape[:axis], *shape[axis + 1 :]), axis)

    # One of the two numbers is 0, so that the batch costs requests nothing but a multiplication.
    @cached_property
    def _row_bytes(self) -> int:
        return 0 if self.axis is None else DATATYPES[self.datatype].num_bytes * prod(self.row_shape)

    @cached_property
    def _whole_bytes(self) -> int:
        return DATATYPES[self.datatype].num_bytes * prod(self.row_shape) if self.axis is None else 0

    def batch_bytes(self, rows: int) -> int:
        """The bytes of so many rows."""
        return rows * self._row_bytes or self._whole_bytes

    def end(self, raw: object, begin: int, rows: int) -> int:
        """Where so many rows end that begin at a place in `raw`."""
        return begin + (rows * self._row_bytes or self._whole_bytes)

    def fits(self, num_bytes: int, rows: int) -> bool:
        """Whether so many bytes may be so many rows."""
        return num_bytes == (rows * self._row_bytes or self._whole_bytes)


def total_bytes(specs: Iterable[TensorSpec], rows: int) -> int:
    """The bytes of so many rows of all these tensors."""
    return sum([spec.batch_bytes(rows) for spec in specs])


def describe(specs: Iterable[TensorSpec]) -> str:
    """Name, datatype and shape of a row of each tensor, for messages."""
    parts = [f"{spec.name} {spec.datatype} {list(spec.row_shape)}" for spec in specs]
    return ", ".join(parts) or "none"
