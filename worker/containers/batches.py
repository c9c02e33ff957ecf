"""Runs a batch that lies in memory: cuts it into arrays, and puts the outputs back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from clockwright.elements import Array
from clockwright.wire.tensors import DATATYPES, TensorSpec
from worker.devices.sized_io import Answer, Bytes, Places, run_carrying, run_joined


def run_batch(
    pool: Bytes,
    inputs: Places,
    outputs: Places,
    rows: Sequence[int],
    run: Callable[[Sequence[Array]], Sequence[Array]],
) -> None:
    """Run a batch, and write the outputs to the pool.

    Args:
        pool: the memory.
        inputs: of the model; where one carries its size, all do.
        outputs: of the model.
        rows: of each request.
        run: takes an array per input, which may be a view of the pool; raises a ModelError if it fails. Where
            tensors carry their sizes, the requests that it fails on get its words; where sizes are open, each request is
            run alone.
    """
    if inputs[0][0].vary is not None:
        specs = [spec for spec, _ in outputs]
        is_open = any(-1 in spec.row_shape for spec, _ in (*inputs, *outputs))

        def answers(requests: Sequence[Sequence[Array]]) -> list[Answer]:
            if not is_open:
                return run_joined(requests, specs, rows, run)
            # One run each: code that pads rows to the longest would make an answer depend on others of its batch.
            return [
                run_joined([each], specs, [own], run)[0]
                for each, own in zip(requests, rows, strict=True)
            ]

        run_carrying(pool, inputs, outputs, rows, answers)
        return
    results = run([_view(pool, spec, sum(rows), offset) for spec, offset in inputs])
    for (spec, offset), result in zip(outputs, results, strict=True):
        _view(pool, spec, sum(rows), offset)[...] = result


def _view(pool: Bytes, spec: TensorSpec, rows: int, offset: int) -> Array:
    count = rows * prod(spec.row_shape)
    flat: np.ndarray[Any, Any] = np.frombuffer(pool, DATATYPES[spec.datatype].dtype, count, offset)
    return flat.reshape(rows, *spec.row_shape)
