"""Tensor datatypes and shapes as the Open Inference Protocol names them. No numpy, no bytes touched."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Final

from clockwright.errors import Refusal, RefusedError
from clockwright.wire.bulk import Buffer


@dataclass(frozen=True, slots=True)
class Datatype:
    """The names of one datatype in the protocol, in numpy, in ONNX and in Python."""

    #: The name in the protocol.
    name: str
    #: Bytes per element; 0: each stands behind its own length (`clockwright.elements`).
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
        return self.numpy_name if self.letter or not self.num_bytes else f"uint{8 * self.num_bytes}"


#: By name. Torch's types are in `worker.engines.torch_operators`.
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
        Datatype("BYTES", 0, "object", 8, "", "bytes_contents"),
    )
}
#: By ONNX's number.
ONNX_DATATYPES: Final = {each.onnx: each for each in DATATYPES.values()}
#: Those that numpy and Python can compute with, by name.
PLAIN_DATATYPES: Final = {name: each for name, each in DATATYPES.items() if each.letter}


#: Words of a failure have no more, so that the controller always sees them: longer outputs may go straight to fronts.
FAILURE_BYTES_MAX: Final = 1024
#: The most rows of a model with open dimensions that are one row of work: outputs of a row may be large, however short it is.
ROWS_OF_UNIT: Final = 4


@dataclass(frozen=True, slots=True)
class Variable:
    """How the sizes of one spec's tensors vary. Inside, such a tensor carries its size: a header before its bytes.

    A model with such a tensor has no others: a request's *rows of work*, which all but clients count, are not its
    rows then. They are its elements (its rows, times the sizes of the model's open dimensions) in units, rounded up.
    """

    #: The most bytes of a tensor for each row of work, its header included.
    unit_bytes: int
    #: The symbols of the open dimensions, in their order. Dimensions of one symbol are equal in a request. One whose symbol
    #: is a sum (`addends`) has the sum of the others' sizes.
    symbols: tuple[str, ...] = ()
    #: The largest size of each.
    most: tuple[int, ...] = ()
    #: The elements of one row of work; the same in all specs of a model. 0: its rows of work are its rows.
    unit: int = 0
    #: The bytes of a tensor of one row of work, as far as that is known beforehand; 0: `unit_bytes`.
    usual_bytes: int = 0
    #: Whether some tensors have fewer dimensions, as a network that drops those of size 1 answers.
    may_lack: bool = False
    #: The symbols whose size may be 0.
    empty: tuple[str, ...] = ()

    @property
    def rows_of_unit(self) -> int:
        """The most rows that are one row of work."""
        return self.unit // max(self.unit // ROWS_OF_UNIT, 1) or 1

    def work(self, rows: int, elements: int) -> int:
        """Rows of work of rows of so many elements (`row_elements`). A row counts as some elements at least."""
        return -(-rows * max(elements, self.unit // ROWS_OF_UNIT) // self.unit)


def addends(symbol: str, symbols: Collection[str]) -> tuple[str, ...]:
    """Split a symbol that is a sum of numbers and of other symbols, as exporters of decoders write it.

    `past + sequence` is the length of what such a model attends to. Returns () if it is no sum.
    """
    parts = tuple(part.strip() for part in symbol.split("+"))
    is_sum = len(parts) > 1 and all(part.isdecimal() or part in symbols for part in parts)
    return parts if is_sum else ()


def sum_of(parts: Sequence[str], sizes: Mapping[str, int]) -> int:
    """The size that a sum has."""
    return sum(int(part) if part.isdecimal() else sizes[part] for part in parts)


def row_elements(
    sizes: Mapping[str, int], sums: Mapping[str, Sequence[str]], empty: Collection[str]
) -> int:
    """The elements of a row of some sizes, which its rows of work are counted in: their product.

    A size that may be 0 counts as the sum that it is a part of: each step of a decoder attends to its past and to all
    others.

    Args:
        sizes: by symbol, without sums.
        sums: the symbols that are sums, with their parts.
        empty: the symbols whose size may be 0.
    """
    if not sums:
        return prod(sizes.values())
    counted = dict(sizes)
    for parts in sums.values():
        counted.update((part, sum_of(parts, sizes)) for part in parts if part in empty)
    return prod(counted.values())


# Without slots, so that its size is computed once.
@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a model. Only it knows how many bytes rows have."""

    name: str
    datatype: str
    #: Shape of one row, that is without the batch dimension; -1: the dimension is open.
    row_shape: tuple[int, ...]
    #: The position of the batch dimension in the whole shape. None: there is no batch, a request has the tensor once.
    axis: int | None = 0
    #: How its tensors vary in size; None: a number of rows has one size, and its tensors have no header.
    vary: Variable | None = field(default=None, repr=False)
    #: The bytes of one tensor of BYTES whose size is known.
    text_bytes: int = field(default=0, repr=False)

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

    # One of the two numbers is 0, so that the batch costs requests nothing but a multiplication. Both are 0 where
    # sizes vary.
    @cached_property
    def _row_bytes(self) -> int:
        return 0 if self.axis is None else self._plain_bytes

    @cached_property
    def _whole_bytes(self) -> int:
        return self._plain_bytes if self.axis is None else 0

    @cached_property
    def _plain_bytes(self) -> int:
        if self.vary:
            return 0
        return self.text_bytes or DATATYPES[self.datatype].num_bytes * prod(self.row_shape)

    def is_shape_of(self, shape: Sequence[int], rows: int) -> bool:
        """Whether a whole shape is one of so many rows, no larger than the largest."""
        expected = self.shape(rows)
        most = iter(self.vary.most if self.vary else ())
        return len(shape) == len(expected) and all(
            found == size or (size < 0 and found <= next(most, found))
            for found, size in zip(shape, expected, strict=True)
        )

    def words(self, rows: int) -> str:
        """The whole shape of so many rows, with the largest sizes of open dimensions, for messages."""
        most = iter(self.vary.most if self.vary else ())
        sizes = [f"<={next(most, size)}" if size < 0 else str(size) for size in self.shape(rows)]
        return f"[{', '.join(sizes)}]"

    @property
    def largest_row(self) -> tuple[int, ...]:
        """The shape of a row whose open dimensions have their largest sizes, if those are known."""
        most = iter(self.vary.most if self.vary else ())
        return tuple(next(most, size) if size < 0 else size for size in self.row_shape)

    def batch_bytes(self, rows: int) -> int:
        """The bytes of so many rows; where sizes vary, the most for so many rows of work."""
        return (
            rows * self._row_bytes
            or self._whole_bytes
            or (rows * self.vary.unit_bytes if self.vary else 0)
        )

    def end(self, raw: Any, begin: int, rows: int) -> int:  # noqa: ANN401  bytes, or an array of them
        """Where so many rows end that begin at a place in `raw`. It may lie outside `raw` where sizes vary."""
        return begin + (
            rows * self._row_bytes or self._whole_bytes or self._carried_bytes(raw, begin)
        )

    def fits(self, num_bytes: int, rows: int) -> bool:
        """Whether so many bytes may be so many rows."""
        return num_bytes == (rows * self._row_bytes or self._whole_bytes) or (
            self.vary is not None and self._header.size <= num_bytes <= self.batch_bytes(rows)
        )

    # --- tensors that carry their size ----------------------------------------------------------

    @cached_property
    def _header(self) -> struct.Struct:
        """The bytes behind the header, which are text if their number is negative; then the whole shape."""
        return struct.Struct(f"<{1 + len(self.row_shape) + (self.axis is not None)}q")

    @property
    def header_bytes(self) -> int:
        """The bytes of what stands before a tensor."""
        return self._header.size

    def _carried_bytes(self, raw: Any, begin: int) -> int:  # noqa: ANN401
        if self.vary is None:
            return 0
        size = self._header.size
        if not 0 <= begin <= len(raw) - size:
            return size
        return size + abs(int(self._header.unpack_from(raw, begin)[0]))

    def header(self, shape: Sequence[int], num_bytes: int) -> bytes:
        """Make what stands before the bytes of a tensor of a shape. -1 stands for a dimension that is lacking."""
        lacking = self._header.size // 8 - 1 - len(shape)
        return self._header.pack(num_bytes, *shape, *[-1] * lacking)

    def failed(self, why: str) -> bytes:
        """Make what stands for a tensor of a request that failed while others of its batch did not."""
        assert self.vary is not None
        room = min(self.vary.unit_bytes - self._header.size, FAILURE_BYTES_MAX)
        text = why.encode(errors="replace")[:room]
        return self.header([0] * (self._header.size // 8 - 1), -len(text)) + text

    def nothing(self, rows: int) -> bytes:
        """Make a tensor of so many rows of zeros or empty texts that carries its size; no elements if a size is open."""
        shape = [max(size, 0) for size in self.shape(rows)]
        num_bytes = prod(shape) * (DATATYPES[self.datatype].num_bytes or 4)
        return self.header(shape, num_bytes) + bytes(num_bytes)

    def failure(self, raw: Buffer) -> str:
        """Why the request failed that a tensor stands for; empty if it did not."""
        if self.vary is None or int.from_bytes(raw[:8], "little", signed=True) >= 0:
            return ""
        return bytes(raw[self._header.size :]).decode(errors="replace") or "it failed"

    def unpack(self, raw: Buffer) -> tuple[TensorSpec, memoryview]:
        """Take a tensor's header off. Returns the spec of its one size, which has no batch, and its bytes.

        Raises RefusedError if it stands for a request that failed; ValueError if it is no tensor of this spec.
        """
        view = memoryview(raw).cast("B")
        size = self._header.size
        num_bytes, *shape = self._header.unpack_from(view) if len(view) >= size else (-1,)
        if abs(num_bytes) != len(view) - size:
            raise ValueError(f"tensor {self.name!r}: found {len(view)} bytes, which say otherwise")
        if num_bytes < 0:
            raise RefusedError(Refusal.FAILED, bytes(view[size:]).decode(errors="replace"))
        if -1 in shape:
            shape = shape[: shape.index(-1)]
        sized = self.sized(shape, num_bytes)
        if not self.allows(shape) or not sized.fits(num_bytes, 1):
            raise ValueError(f"tensor {self.name!r}: found shape {shape} and {num_bytes} bytes")
        return sized, view[size:]

    def sized(self, shape: Sequence[int], num_bytes: int = 0) -> TensorSpec:
        """The spec of the tensors of one whole shape, and of BYTES of one length: they have no batch and no header."""
        if self.datatype == "BYTES":
            return TensorSpec(self.name, self.datatype, tuple(shape), None, text_bytes=num_bytes)
        return _sized(self, tuple(shape))

    def allows(self, shape: Sequence[int]) -> bool:
        """Whether a whole shape is one of this spec, however large."""
        expected = self.shape(-1)
        if self.vary and self.vary.may_lack:
            expected = expected[: len(shape)]
        return len(shape) == len(expected) and all(
            found >= 0 and (size < 0 or found == size)
            for found, size in zip(shape, expected, strict=True)
        )


# Clients ask in few sizes.
@lru_cache(maxsize=4096)
def _sized(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(spec.name, spec.datatype, shape, None)


def total_bytes(specs: Iterable[TensorSpec], rows: int) -> int:
    """The bytes of so many rows of all these tensors."""
    return sum([spec.batch_bytes(rows) for spec in specs])


def usual_row_bytes(specs: Iterable[TensorSpec]) -> int:
    """The bytes of a row, or of a row of work, of all these tensors, as far as that is known beforehand."""
    return sum(
        [(spec.vary.usual_bytes if spec.vary else 0) or spec.batch_bytes(1) for spec in specs]
    )


def describe(specs: Iterable[TensorSpec]) -> str:
    """Name, datatype and shape of a row of each tensor, for messages."""
    parts = [
        f"{spec.name} {spec.datatype} {list(spec.row_shape)}"
        + (
            f" up to {list(spec.vary.most)}, in units of {spec.vary.unit}"
            if spec.vary and spec.vary.unit
            else ""
        )
        for spec in specs
    ]
    return ", ".join(parts) or "none"
