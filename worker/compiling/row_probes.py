"""Asks an engine whether a row's answer depends on its place, its neighbours and the size of its batch.

Two rows run alone, then together in batches of each size, then each at the other's places with unlike rows: rows a
hundred and ten thousand times as large, of the other sign, zeros, and other integers that the model takes. Two
batches of one size use the same kernels, so a row must have the same answer everywhere in both, except for the last
digits. Batches of different sizes use different kernels, which may round differently.

Among 242 models, these probes found 23 of the 24 that mix rows. They missed a quantised one that answers labels,
and models that were built to mix rare rows only: `worker.compiling.row_flow` finds those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from clockwright.elements import bytes_of, elements_of, step_of
from clockwright.errors import ModelError
from clockwright.wire.tensors import DATATYPES, TensorSpec
from worker.compiling.known_texts import draw_known
from worker.engines.onnxruntime import Bytes, aligned_bytes

#: Runs a batch of so many rows; gives the outputs' bytes.
Run = Callable[[int, list[Bytes]], list[Bytes]]

#: A row: the bytes of each input.
_Row = list[Bytes]
_Numbers = np.ndarray[Any, np.dtype[Any]]

# One size, one kernel: a float that differs more than this, as a part of the largest number, or than two steps of its
# datatype, has seen its neighbours or its place. Nothing differed at all in any model tried; the allowance is for kernels that
# add in another order.
SAME_SIZE: Final = 1e-5
# Between sizes: rounding, and steps of one between quantised numbers.
_BETWEEN_SIZES, _BETWEEN_SIZES_COARSE = 2e-3, 5e-2

# Integers to try are below this. Smaller ones are tried where a model refuses these, as indices of a table; with
# 0, all are 1: the model may divide by them.
_WIDE = 1000
_INTEGER_RANGES = (_WIDE, 8, 2, 1, 0)
_HUGE = 1e4


class RowProbes:
    """Rows that a model takes, with their answers alone."""

    def __init__(
        self, run: Run, inputs: Sequence[TensorSpec], texts: Sequence[Sequence[str]] = ()
    ) -> None:
        """Find rows that the model takes, by running each alone.

        Args:
            run: the model as its owner wrote it.
            inputs: what it takes.
            texts: the lists of texts that it knows.

        Raises:
            ModelError: the model fails on every row that was tried.
        """
        self._inputs = inputs
        #: Integers of the rows are below this; 0: all are 1.
        self.most = _WIDE
        self._texts = texts
        self._kept, self._unlike_rows = self._find_rows(run)

    def why_mixed(
        self, run: Run, outputs: Sequence[TensorSpec], batch_size: int, *, coarse: bool
    ) -> str:
        """Say how a row's answer in a batch depends on more than the row; empty if it does not.

        With `coarse` the model computes with numbers of few bits. Raises ModelError if the engine fails.
        """
        kept = [self._kept[place % 2] for place in range(batch_size)]
        strange = (self._unlike_rows * batch_size)[:batch_size]
        alone = [run_rows(run, outputs, [row]) for row in self._kept]
        together = run_rows(run, outputs, kept)
        for index, spec in enumerate(outputs):
            wanted = np.concatenate([alone[place % 2][index] for place in range(batch_size)])
            if _differ_between_sizes(spec, wanted, together[index], coarse=coarse):
                return f"output {spec.name!r} of a row in a batch of {batch_size} is not what it is alone"
        for parity in range(2):
            moved = [
                strange[i] if i % 2 == parity else self._kept[parity] for i in range(batch_size)
            ]
            apart = run_rows(run, outputs, moved)
            for index, spec in enumerate(outputs):
                first, *others = together[index][parity::2]
                found = np.stack([*others, *apart[index][1 - parity :: 2]])
                wanted = np.broadcast_to(first, found.shape)
                if differ(wanted, found, tolerance=max(SAME_SIZE, 2 * step_of(spec.datatype))):
                    return (
                        f"output {spec.name!r} of a row changes with the other rows of its batch or with its place "
                        f"among them (seen in a batch of {batch_size})"
                    )
        return ""

    def why_otherwise(
        self, run: Run, outputs: Sequence[TensorSpec], batch_size: int, *, coarse: bool
    ) -> str:
        """Compare one row's answer after unlike rows with its answer alone. Takes a third of the time of `why_mixed`."""
        kept = self._kept[0]
        rows = [*(self._unlike_rows * batch_size)[: batch_size - 1], kept]
        found, alone = run_rows(run, outputs, rows), run_rows(run, outputs, [kept])
        for index, spec in enumerate(outputs):
            if _differ_between_sizes(spec, alone[index], found[index][-1:], coarse=coarse):
                return f"output {spec.name!r} of a row in a batch of {batch_size} is not what it is alone"
        return ""

    # --- rows -------------------------------------------------------------------------------------

    def _find_rows(self, run: Run) -> tuple[tuple[_Row, _Row], list[_Row]]:
        """Find two rows that the model takes, and rows unlike them for the same batches."""
        for most in _INTEGER_RANGES:
            kept = self._row(0, most), self._row(1, most)
            if all(_is_taken(run, row) for row in kept):
                self.most = most
                unlike = [row for row in self._unlike(kept[0], most) if _is_taken(run, row)]
                return kept, unlike or list(kept)
        raise ModelError("it fails on every row that was tried")

    def _row(self, number: int, most: int) -> _Row:
        # No float of even rows is negative, nor any of models that take small integers only.
        plain = most < _WIDE or not number % 2
        return [
            _aligned(
                self._drawn_texts(index, np.random.default_rng([number, index]), most)
                if spec.datatype == "BYTES"
                else draw_numbers(spec, np.random.default_rng([number, index]), most, plain=plain)
            )
            for index, spec in enumerate(self._inputs)
        ]

    def _drawn_texts(self, index: int, generator: np.random.Generator, most: int) -> _Numbers:
        # Texts of all lists, and then any, are tried where a model refuses those of its columns.
        lists = self._texts
        if most < _WIDE and lists:
            lists = [sum(map(tuple, lists), ())] if most > 1 else ()
        return draw_known(lists, self._inputs, index, generator)

    def _unlike(self, kept: _Row, most: int) -> Iterator[_Row]:
        for number, scale in enumerate((100.0, -1.0, _HUGE, 0.0, -_HUGE), 2):
            row = []
            for spec, array, drawn in zip(self._inputs, kept, self._row(number, most), strict=True):
                if DATATYPES[spec.datatype].is_float:
                    scaled = elements_of(spec.datatype, array).astype(np.float64) * scale
                    row.append(_aligned(bytes_of(spec.datatype, scaled)))
                elif scale == 0.0:
                    row.append(_aligned(bytes_of(spec.datatype, _nothing(spec))))
                elif spec.datatype == "BOOL":
                    row.append(_aligned(~elements_of(spec.datatype, array)))
                else:
                    row.append(drawn)
            yield row


def draw_numbers(
    spec: TensorSpec, generator: np.random.Generator, most: int, *, plain: bool
) -> _Numbers:
    """Draw the numbers of one input's row. `plain` floats are not negative; others are as often as not."""
    count = prod(spec.row_shape)
    datatype = DATATYPES[spec.datatype]
    if datatype.is_float:
        drawn = generator.random(count) if plain else generator.standard_normal(count)
        return bytes_of(spec.datatype, drawn)
    if spec.datatype == "BOOL":
        return generator.integers(0, 2, count).astype(np.bool_)
    dtype = np.dtype(datatype.dtype)
    if not most:
        return np.ones(count, dtype)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max + 1
    if dtype.itemsize > 1 or most < _WIDE:
        low, high = max(low, -most if most == _WIDE else 0), min(most, high)
    return generator.integers(low, high, count, dtype=dtype)


def _nothing(spec: TensorSpec) -> _Numbers:
    """A row of zeros, or of empty texts."""
    kind = DATATYPES[spec.datatype]
    return np.full(prod(spec.row_shape), 0 if kind.num_bytes else "", kind.dtype)


def _is_taken(run: Run, row: _Row) -> bool:
    try:
        run(1, row)
    except ModelError:
        return False
    return True


def is_by_chance(run: Run, row: _Row) -> bool:
    """Whether the same row, asked twice, is answered differently."""
    once, again = ([each.copy() for each in run(1, row)] for _ in range(2))
    return any(not np.array_equal(a, b) for a, b in zip(once, again, strict=True))


def run_rows(run: Run, outputs: Sequence[TensorSpec], rows: Sequence[_Row]) -> list[_Numbers]:
    """Run rows as one batch; returns numbers of shape (row, element) per output."""
    batch = [_aligned(np.concatenate(arrays)) for arrays in zip(*rows, strict=True)]
    found = run(len(rows), batch)
    return [
        elements_of(spec.datatype, array).reshape(len(rows), -1).copy()
        for spec, array in zip(outputs, found, strict=True)
    ]


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


def differ(one: _Numbers, other: _Numbers, *, tolerance: float) -> bool:
    """Whether elements differ; floats by more than a part of the largest number of their row."""
    return bool(_unequal(one, other, tolerance).any())


def _differ_between_sizes(
    spec: TensorSpec, alone: _Numbers, together: _Numbers, *, coarse: bool
) -> bool:
    tolerance = _BETWEEN_SIZES_COARSE if coarse else _BETWEEN_SIZES
    unequal = _unequal(alone, together, tolerance).any(axis=1)
    if DATATYPES[spec.datatype].is_float:
        return bool(unequal.any())
    # A label may tip over where two scores are all but equal. What counts rows is wrong in most of them.
    return bool(unequal.mean() >= 0.5)
