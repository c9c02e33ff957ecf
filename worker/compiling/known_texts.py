"""The texts that a model knows: categories, keys, vocabularies. Rows to try are made of them.

A model may fail on others, as scikit-learn's OneHotEncoder does if it was not told to ignore them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx

from clockwright.elements import bytes_of, draw_texts
from clockwright.wire.tensors import TensorSpec
from worker.engines.onnxruntime import Bytes

# The attributes of ONNX's operators that hold texts which are looked up.
_LOOKED_UP = {"cats_strings", "classes_strings", "keys_strings", "pool_strings"}
# So many of a list are kept.
_MOST = 64
#: What a model takes that reads numbers in texts.
NUMERALS = ("0", "1", "2", "7", "42")


def draw_known(
    lists: Sequence[Sequence[str]],
    specs: Sequence[TensorSpec],
    index: int,
    random: np.random.Generator,
    rows: int = 1,
) -> Bytes:
    """Draw rows of one of the inputs, which is of texts; any texts if the model knows none.

    Exporters write a list per column of text, in the order of the columns. An input that belongs to all rows is drawn once.
    """
    count = prod(specs[index].row_shape)
    rows = 1 if specs[index].axis is None else rows
    if not lists:
        return bytes_of("BYTES", draw_texts(random, rows * count))
    before = sum(prod(spec.row_shape) for spec in specs[:index] if spec.datatype == "BYTES")
    chosen = [lists[(before + place) % len(lists)] for place in range(count)]
    drawn = [texts[int(random.integers(len(texts)))] for _ in range(rows) for texts in chosen]
    return bytes_of("BYTES", np.array(drawn, np.object_))


def known_texts(graph: onnx.GraphProto) -> tuple[tuple[str, ...], ...]:
    """Find the lists of texts that a graph looks up, in the order of its nodes."""
    found: dict[tuple[str, ...], None] = {}
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in _LOOKED_UP and attribute.strings:
                texts = [text.decode(errors="replace") for text in attribute.strings[:_MOST]]
                found[tuple(texts)] = None
    return tuple(found)
