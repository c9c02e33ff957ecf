"""Batches in an IO pool of host memory: requests' tensors lie one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clockwright.wire.actions import Infer
from clockwright.wire.bulk import Buffer
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
