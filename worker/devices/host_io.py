"""Batches in an IO pool of host memory: requests' tensors lie one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from clockwright.elements import Array, bytes_of, elements_of
from clockwright.errors import ModelError
from clockwright.wire.actions import Infer
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from worker.core.lanes import Step
from worker.models.served_model import ServedModel

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def write_inputs(pool: Bytes, step: Step[Any], payload: Sequence[Buffer]) -> None:
    """Copy a batch's inputs, per request and per input, into its slot; the remaining rows become zero."""
    action, model = step.action, step.model
    assert isinstance(action, Infer)
    assert isinstance(model, ServedModel)
    layout = model.layouts[action.batch_size]
    num_inputs = len(model.inputs)
    for index, (spec, offset) in enumerate(zip(model.inputs, layout.input_offsets, strict=True)):
        position = begin = step.io_offset + offset
        for entry in payload[index::num_inputs]:
            pool[position : position + len(entry)] = np.frombuffer(entry, np.uint8)
            position += len(entry)
        # What carries its size is not read behind the last.
        if spec.vary is None:
            pool[position : begin + spec.batch_bytes(action.batch_size)] = 0


def read_outputs(pool: Bytes, step: Step[Any], room: memoryview | None) -> Sequence[Buffer]:
    """Copy a batch's outputs out of its slot, per request and per output: into `room`, or into new memory."""
    action, model = step.action, step.model
    assert isinstance(action, Infer)
    assert isinstance(model, ServedModel)
    layout = model.layouts[action.batch_size]
    payload: list[Buffer] = []
    begins = [step.io_offset + offset for offset in layout.output_offsets]
    position = 0
    for rows in action.rows:
        for index, spec in enumerate(model.outputs):
            begin, begins[index] = begins[index], spec.end(pool, begins[index], rows)
            output = pool[begin : begins[index]]
            if room is None:
                payload.append(output.tobytes())
            else:
                place = room[position : position + len(output)]
                np.frombuffer(place, np.uint8)[:] = output
                payload.append(place)
                position += len(output)
    return payload


def run_carrying(
    pool: Bytes,
    inputs: Sequence[tuple[TensorSpec, int]],
    outputs: Sequence[tuple[TensorSpec, int]],
    rows: Sequence[int],
    run: Callable[[list[Array]], Sequence[Array]],
) -> None:
    """Run a batch of tensors that carry their sizes: its requests' rows together, and each alone if that fails.

    The outputs of a request, or why it failed, are written to the pool.

    Args:
        pool: the memory.
        inputs: the model's, each with the place in the memory where the batch has it: one request after the other.
        outputs: likewise.
        rows: of each request.
        run: takes the inputs of some rows, and gives their outputs; raises a ModelError if it fails.
    """
    requests: list[list[Array]] = [[] for _ in rows]
    for spec, begin in inputs:
        for arrays, num in zip(requests, rows, strict=True):
            end = spec.end(pool, begin, num)
            sized, content = spec.unpack(pool[begin:end].data)
            arrays.append(elements_of(sized.datatype, content).reshape(sized.row_shape))
            begin = end
    specs = [spec for spec, _ in outputs]
    answers = [
        _tensors(specs, num, answer)
        for num, answer in zip(rows, _answers(specs, rows, requests, run), strict=True)
    ]
    for (_, begin), column in zip(outputs, zip(*answers, strict=True), strict=True):
        raw = b"".join(column)
        pool[begin : begin + len(raw)] = np.frombuffer(raw, np.uint8)


def _answers(
    outputs: Sequence[TensorSpec],
    rows: Sequence[int],
    requests: Sequence[list[Array]],
    run: Callable[[list[Array]], Sequence[Array]],
) -> list[Sequence[Array] | str]:
    """Run requests. Returns the outputs of each, or why it failed."""
    try:
        found = run(
            [np.concatenate(arrays) for arrays in zip(*requests, strict=True)]
            if len(requests) > 1
            else requests[0]
        )
        total = sum(rows)
        for spec, array in zip(outputs, found, strict=True):
            if array.shape != spec.shape(total):
                raise ModelError(
                    f"output {spec.name!r} has shape {list(array.shape)} for {total} rows, expected"
                    f" {list(spec.shape(total))}, as when the model was prepared"
                )
    except ModelError as error:
        if len(requests) == 1:
            return [str(error)]
        return [
            answer
            for num, arrays in zip(rows, requests, strict=True)
            for answer in _answers(outputs, [num], [arrays], run)
        ]
    if len(requests) == 1:
        return [found]
    ends = list(accumulate(rows))
    return [
        [array[end - num : end] for array in found] for num, end in zip(rows, ends, strict=True)
    ]


def _tensors(
    outputs: Sequence[TensorSpec], rows: int, answer: Sequence[Array] | str
) -> list[bytes]:
    """Make a request's outputs, each with its size before it."""
    made = []
    if not isinstance(answer, str):
        for spec, array in zip(outputs, answer, strict=True):
            raw = bytes_of(spec.datatype, array).tobytes()
            tensor = spec.header(array.shape, len(raw)) + raw
            if not spec.fits(len(tensor), rows):
                answer = (
                    f"output {spec.name!r} has {len(tensor)} bytes of text in {rows} rows, expected"
                    f" {spec.batch_bytes(rows)} at most; smaller batch_sizes in config.toml allow more"
                )
                break
            made.append(tensor)
        else:
            return made
    return [spec.failed(answer) for spec in outputs]
