"""Asks an engine whether a row's answer depends on its place, its neighbours and the size of its batch.

Two rows are run alone, then side by side in batches of each size, then each of them beside strangers: rows a
hundred and ten thousand times as large, of the other sign, and zeros; other integers within what the model
takes. In two batches of one size the same kernels run, so a row must have the same answer but for the last
digits. Between sizes kernels differ, and so may roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clockwright.errors import ModelError
from clockwright.tensors import DATATYPE_BYTES, TensorSpec
from worker.engines.onnxruntime import Bytes, aligned_bytes

#: Runs a batch of so many rows; gives the outputs' bytes.
Run = Callable[[int, list[Bytes]], list[Bytes]]

#: A row: the bytes of each input.
_Row = list[Bytes]
_Numbers = np.ndarray[Any, np.dtype[Any]]

NUMPY_TYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}

# One size, one kernel: what differs more than this, as a part of the largest number, has seen its neighbours.
# Nothing differed at all in any model tried; the allowance is for kernels that add in another order.
_SAME_SIZE = {"FP16": 2e-3, "BF16": 1e-2, "FP32": 1e-5, "FP64": 1e-9}
# Between sizes: rounding, and steps of one between quantised numbers.
_BETWEEN_SIZES, _BETWEEN_SIZES_COARSE = 2e-3, 5e-2

# Integers that no table bounds. Small ones are tried where these are refused.
_WIDE = 1000
_INTEGER_RANGES = (_WIDE, 8, 2, 1)
_HUGE = 1e4


@dataclass(frozen=True, slots=True)
class _Seed:
    """Rows to try."""

    #: The rows that are looked at.
    kept: tuple[_Row, _Row]
    #: The rows beside them.
    strangers: list[_Row]


class RowProbes:
    """Rows that a model takes, with their answers alone."""

    def __init__(
        self, run: Run, inputs: Sequence[TensorSpec], bounds: Mapping[str, int], *, num_seeds: int
    ) -> None:
        """Find rows that the model takes, by running each alone.

        Args:
            run: the model as its owner wrote it.
            inputs: what it takes.
            bounds: integers of these inputs must be less, because they are indices.
            num_seeds: how many sets of rows to make.

        Raises:
            ModelError: an output has another shape when the row is another.
        """
        self._inputs = inputs
        self._bounds = bounds
        self._seeds = [self._make(run, seed) for seed in range(num_seeds)]

    def is_chance(self, run: Run) -> bool:
        """Whether the same row, asked twice, is answered differently."""
        kept = self._seeds[0].kept[0]
        once, again = ([each.copy() for each in run(1, kept)] for _ in range(2))
        return any(not np.array_equal(a, b) for a, b in zip(once, again, strict=True))

    def why_mixed(
        self, run: Run, outputs: Sequence[TensorSpec], batch_size: int, *, coarse: bool
    ) -> str:
        """Say how a row's answer in a batch depends on more than the row; empty if it does not.

        Args:
            run: the engine to ask.
            outputs: what it gives.
            batch_size: rows of the batch, more than one.
            coarse: whether the model computes with numbers of few bits.

        Raises:
            ModelError: the engine fails.
        """
        for number, seed in enumerate(self._seeds):
            kept = [seed.kept[place % 2] for place in range(batch_size)]
            strange = [
                seed.strangers[(number + place) % len(seed.strangers)]
                for place in range(batch_size)
            ]
            alone = [run_rows(run, outputs, [row]) for row in seed.kept]
            together = run_rows(run, outputs, kept)
            for index, spec in enumerate(outputs):
                wanted = np.concatenate([alone[place % 2][index] for place in range(batch_size)])
                if _differ_between_sizes(spec, wanted, together[index], coarse=coarse):
                    return f"output {spec.name!r} of a row in a batch of {batch_size} is not what it is alone"
            for parity in range(2):
                mixed = [kept[i] if i % 2 == parity else strange[i] for i in range(batch_size)]
                beside = run_rows(run, outputs, mixed)
                for index, spec in enumerate(outputs):
                    pair = together[index][parity::2], beside[index][parity::2]
                    if _differ(*pair, tolerance=_SAME_SIZE.get(spec.datatype, 0.0)):
                        return (
                            f"output {spec.name!r} of a row changes with the other rows of its batch "
                            f"(seen in a batch of {batch_size})"
                        )
        return ""

    def why_otherwise(
        self, run: Run, outputs: Sequence[TensorSpec], batch_size: int, *, coarse: bool
    ) -> str:
        """Say whether rows between strangers are answered as alone; like `why_mixed`, in a third of its time."""
        seed = self._seeds[0]
        rows = [seed.kept[0], *(seed.strangers * batch_size)[: batch_size - 2], seed.kept[1]]
        found = run_rows(run, outputs, rows)
        alone = [run_rows(run, outputs, [row]) for row in seed.kept]
        for index, spec in enumerate(outputs):
            wanted = np.concatenate([each[index] for each in alone])
            if _differ_between_sizes(spec, wanted, found[index][[0, -1]], coarse=coarse):
                return f"output {spec.name!r} of a row in a batch of {batch_size} is not what it is alone"
        return ""

    # --- rows -------------------------------------------------------------------------------------

    def _make(self, run: Run, seed: int) -> _Seed:
        for most in _INTEGER_RANGES:
            kept = self._row(seed, 0, most), self._row(seed, 1, most)
            if all(_is_taken(run, row) for row in kept):
                strangers = [
                    row for row in self._strangers(seed, kept, most) if _is_taken(run, row)
                ]
                return _Seed(kept, strangers or list(kept))
        raise ModelError("it fails on every row that was tried")

    def _row(self, seed: int, number: int, most: int) -> _Row:
        row = []
        for index, spec in enumerate(self._inputs):
            generator = np.random.default_rng([seed, number, index])
            numbers = self._numbers(
                spec, generator, most, plain=most < _WIDE or bool((seed + number) % 2)
            )
            row.append(_aligned(numbers))
        return row

    def _numbers(
        self, spec: TensorSpec, generator: np.random.Generator, most: int, *, plain: bool
    ) -> _Numbers:
        """Draw the numbers of one input. `plain` floats are not negative; others are as often as not."""
        count = spec.row_bytes // DATATYPE_BYTES[spec.datatype]
        if spec.datatype in ("FP16", "FP32", "FP64", "BF16"):
            drawn = generator.random(count) if plain else generator.standard_normal(count)
            return _as_type(spec.datatype, drawn)
        if spec.datatype == "BOOL":
            return generator.integers(0, 2, count).astype(np.bool_)
        dtype = NUMPY_TYPES[spec.datatype]
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max + 1
        if spec.name in self._bounds:
            low, high = 0, min(self._bounds[spec.name], high)
        elif np.dtype(dtype).itemsize > 1 or most < _WIDE:
            low, high = max(low, -most if most == _WIDE else 0), min(most, high)
        return generator.integers(low, high, count, dtype=dtype)

    def _strangers(self, seed: int, kept: Sequence[_Row], most: int) -> list[_Row]:
        """Rows unlike those that are kept."""
        strangers: list[_Row] = []
        for scale in (100.0, -1.0, _HUGE, 0.0, -_HUGE):
            row = []
            other = self._row(seed, 2 + len(strangers), most)
            for spec, array, drawn in zip(self._inputs, kept[0], other, strict=True):
                if spec.datatype in ("FP16", "FP32", "FP64", "BF16"):
                    scaled = as_numbers(spec.datatype, array).astype(np.float64) * scale
                    row.append(_aligned(_as_type(spec.datatype, scaled)))
                elif scale == 0.0:
                    row.append(aligned_bytes(spec.row_bytes))
                elif spec.datatype == "BOOL":
                    row.append(_aligned(~as_numbers(spec.datatype, array)))
                else:
                    row.append(drawn)
            strangers.append(row)
        return strangers


def _is_taken(run: Run, row: _Row) -> bool:
    try:
        run(1, row)
    except ModelError:
        return False
    return True


def run_rows(run: Run, outputs: Sequence[TensorSpec], rows: Sequence[_Row]) -> list[_Numbers]:
    """Run rows as one batch; returns numbers of shape (row, element) per output."""
    batch = [_aligned(np.concatenate(arrays)) for arrays in zip(*rows, strict=True)]
    found = run(len(rows), batch)
    return [
        as_numbers(spec.datatype, array).reshape(len(rows), -1).copy()
        for spec, array in zip(outputs, found, strict=True)
    ]


def as_numbers(datatype: str, array: Bytes) -> _Numbers:
    """View bytes as numbers."""
    if datatype == "BF16":
        # The upper half of a float32.
        numbers: _Numbers = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return numbers
    numbers = array.view(NUMPY_TYPES[datatype])
    return numbers


def _as_type(datatype: str, numbers: _Numbers) -> _Numbers:
    if datatype == "BF16":
        halves: _Numbers = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return halves
    with np.errstate(over="ignore"):
        typed: _Numbers = numbers.astype(NUMPY_TYPES[datatype])
    return typed


def _aligned(numbers: _Numbers) -> Bytes:
    raw = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)
    array = aligned_bytes(raw.nbytes)
    array[:] = raw
    return array


def _unequal(
    one: _Numbers, other: _Numbers, tolerance: float
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which elements differ; floats by more than a part of the row's largest number."""
    if one.dtype.kind != "f":
        return np.not_equal(one, other)
    a, b = one.astype(np.float64), other.astype(np.float64)
    finite = np.where(np.isfinite(a), np.abs(a), 0.0)
    scale = np.max(finite, axis=1, keepdims=True, initial=0.0)
    with np.errstate(invalid="ignore"):
        near = np.less_equal(np.abs(a - b), tolerance * scale)
    same = np.logical_or(np.equal(a, b), np.logical_and(np.isnan(a), np.isnan(b)))
    unequal: np.ndarray[Any, np.dtype[np.bool_]] = ~(near | same)
    return unequal


def _differ(one: _Numbers, other: _Numbers, *, tolerance: float) -> bool:
    return bool(_unequal(one, other, tolerance).any())


def _differ_between_sizes(
    spec: TensorSpec, alone: _Numbers, together: _Numbers, *, coarse: bool
) -> bool:
    tolerance = _BETWEEN_SIZES_COARSE if coarse else _BETWEEN_SIZES
    unequal = _unequal(alone, together, tolerance).any(axis=1)
    if spec.datatype in _SAME_SIZE:
        return bool(unequal.any())
    # A label may tip over where two scores are all but equal. What counts rows is wrong in most of them.
    return bool(unequal.mean() >= 0.5)
