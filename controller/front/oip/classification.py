"""Triton's classification extension: of each row of an output the largest values, as texts `VALUE:INDEX[:LABEL]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clockwright.elements import elements_of, join_texts
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import DATATYPES, TensorSpec

#: Texts of an output, of all of its rows: each takes a microsecond.
CLASSES_MAX: Final = 16_384


@dataclass(frozen=True, slots=True)
class Classes:
    """What is wanted of an output in place of its values."""

    spec: TensorSpec
    #: Texts per row, not more than a row has elements. The largest value comes first, and of equal ones the first.
    number: int
    #: Of the elements of a row, from the first on; may be fewer.
    labels: Sequence[str] = ()

    @property
    def texts(self) -> TensorSpec:
        """The spec of the texts."""
        return TensorSpec(self.spec.name, "BYTES", (self.number,))

    def classify(self, raw: Buffer, rows: int) -> bytes:
        """Make the elements of datatype BYTES that stand for so many rows of the output."""
        is_float = DATATYPES[self.spec.datatype].is_float
        texts = []
        for row in elements_of(self.spec.datatype, raw).reshape(rows, -1):
            found = np.argpartition(row, -self.number)[-self.number :].tolist()
            for value, index in sorted((-row[index].item(), index) for index in found):
                text = f"{-value:f}:{index}" if is_float else f"{-value}:{index}"
                texts.append(f"{text}:{self.labels[index]}" if index < len(self.labels) else text)
        return join_texts(texts)
