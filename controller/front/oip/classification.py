"""Triton's classification extension: of each row of an output the largest values, as texts `VALUE:INDEX[:LABEL]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clockwright.elements import elements_of
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import DATATYPES, TensorSpec
from clockwright.wire.texts import join_texts

#: Texts of an output, of all of its rows: each takes a microsecond.
CLASSES_MAX: Final = 16_384


@dataclass(frozen=True, slots=True)
class Classes:
    """What is wanted of an output in place of its values."""

    spec: TensorSpec
    #: Texts per row, not more than a row has elements. The largest value comes first, and of equal ones the first;
    #: NaN is the least.
    #: An output that has no rows first is one row, whose texts have one dimension.
    number: int
    #: Names of the elements of a row, from the first on; may be fewer.
    labels: Sequence[str] = ()

    @property
    def texts(self) -> TensorSpec:
        """The spec of the texts."""
        axis = 0 if self.spec.axis == 0 else None
        return TensorSpec(self.spec.name, "BYTES", (self.number,), axis)

    def classify(self, raw: Buffer, rows: int) -> bytes:
        """Make the elements of datatype BYTES that stand for so many rows of the output."""
        rows = rows if self.spec.axis == 0 else 1
        is_float = DATATYPES[self.spec.datatype].is_float
        texts = []
        for row in elements_of(self.spec.datatype, raw).reshape(rows, -1):
            # What is no number counts as the least.
            ranked = np.where(np.isnan(row), -np.inf, row) if is_float else row
            least = np.partition(ranked, -self.number)[-self.number]
            larger = np.flatnonzero(ranked > least)
            equal = np.flatnonzero(ranked == least)[: self.number - len(larger)]
            order = sorted(
                (-ranked[index].item(), index) for index in (*larger.tolist(), *equal.tolist())
            )
            for _, index in order:
                value = row[index].item()
                text = f"{value:f}:{index}" if is_float else f"{int(value)}:{index}"
                texts.append(f"{text}:{self.labels[index]}" if index < len(self.labels) else text)
        return join_texts(texts)
