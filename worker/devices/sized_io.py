"""Batches of tensors that carry their sizes, in host memory: read, run and written (`worker.devices.host_io` copies them).

A request that fails has words in place of its outputs, and no other fails with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from clockwright.elements import Array, array_of, raw_of
from clockwright.errors import ModelError
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from worker.models.groups import run_or_each

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
#: Tensors, each with the place in memory where a batch has it: one request after the other.
Places = Sequence[tuple[TensorSpec, int]]
#: The outputs of a request, or why it failed.
Answer = Sequence[Array] | str


def run_carrying(
    pool: Bytes,
    inputs: Places,
    outputs: Places,
    rows: Sequence[int],
    run: Callable[[list[list[Array]]], Sequence[Answer]],
) -> None:
    """Run a batch, whose requests have so many rows of work each, and write their outputs to the pool.

    `run` takes requests, an array per input of each, which may be a view of the pool.
    """
    requests: list[list[Array]] = [[] for _ in rows]
    for spec, begin in inputs:
        for arrays, work in zip(requests, rows, strict=True):
            end = spec.end(pool, begin, work)
            arrays.append(unpacked(spec, pool[begin:end].data))
            begin = end
    specs = [spec for spec, _ in outputs]
    answers = [
        sized_tensors(specs, work, answer) for work, answer in zip(rows, run(requests), strict=True)
    ]
    for (_, begin), column in zip(outputs, zip(*answers, strict=True), strict=True):
        raw = b"".join(column)
        pool[begin : begin + len(raw)] = np.frombuffer(raw, np.uint8)


def unpacked(spec: TensorSpec, entry: Buffer) -> Array:
    """A view of a tensor behind its size."""
    sized, content = spec.unpack(entry)
    return array_of(spec.datatype, content, sized.row_shape)


def run_joined(
    requests: Sequence[Sequence[Array]],
    outputs: Sequence[TensorSpec],
    rows: Sequence[int],
    run: Callable[[list[Array]], Sequence[Array]],
) -> list[Answer]:
    """Run requests whose rows have one shape, an array per input each, all in one run.

    `run` takes the inputs of some rows, which it may keep and change; raises a ModelError if it fails.
    """

    def together(some: Sequence[int]) -> Sequence[Answer]:
        columns = zip(*[requests[index] for index in some], strict=True)
        found = run([np.concatenate(c) if len(c) > 1 else c[0].copy() for c in columns])
        ends = list(accumulate(rows[index] for index in some))
        for spec, array in zip(outputs, found, strict=True):
            if not spec.is_shape_of(array.shape, ends[-1]):
                raise ModelError(
                    f"output {spec.name!r} has shape {list(array.shape)} for {ends[-1]} rows, expected"
                    f" {list(spec.shape(ends[-1]))}, as when the model was prepared"
                )
        if len(some) == 1:
            return [found]
        return [
            [array[end - rows[index] : end] for array in found]
            for index, end in zip(some, ends, strict=True)
        ]

    return run_or_each(range(len(requests)), together)


def sized_tensors(outputs: Sequence[TensorSpec], rows: int, answer: Answer) -> list[bytes]:
    """Make a request's outputs, each with its size before it."""
    if not isinstance(answer, str):
        try:
            return [_tensor(spec, rows, array) for spec, array in zip(outputs, answer, strict=True)]
        except ModelError as error:
            answer = str(error)
    return [spec.failed(answer) for spec in outputs]


def _tensor(spec: TensorSpec, rows: int, array: Array) -> bytes:
    """Put an output behind its size.

    Raises ModelError if there is no room for it, or the model's description says otherwise.
    """
    if not spec.allows(array.shape):
        raise ModelError(
            f"output {spec.name!r} has shape {list(array.shape)}, expected {list(spec.shape(-1))}"
        )
    try:
        raw = raw_of(array)
    except UnicodeEncodeError as error:
        raise ModelError(f"output {spec.name!r} has text that is no UTF-8: {error}") from None
    header = spec.header(array.shape, len(raw))
    if not spec.fits(len(header) + len(raw), rows):
        hint = (
            "; smaller batch_sizes in config.toml allow more"
            if spec.datatype == "BYTES"
            else ", as seen when the model was prepared"
        )
        raise ModelError(
            f"output {spec.name!r} has {len(raw)} bytes for shape {list(array.shape)}, expected"
            f" {spec.batch_bytes(rows) - len(header)} at most{hint}"
        )
    return header + raw.tobytes()
