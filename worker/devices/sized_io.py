"""Batches of tensors that carry their size, in an IO pool of host memory (`worker.devices.host_io`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clockwright.wire.actions import Infer
from worker.core.lanes import Step
from worker.engines.open_kernel import Answer, Array, plain_array
from worker.models.served_model import ServedModel

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def read_sized_inputs(pool: Bytes, step: Step[Any]) -> list[list[Array]]:
    """Copy a batch's inputs out of its slot: per request, an array per input."""
    action, model = step.action, step.model
    assert isinstance(action, Infer)
    assert isinstance(model, ServedModel)
    begins = [step.io_offset + offset for offset in model.layouts[action.batch_size].input_offsets]
    requests = []
    for work in action.rows:
        request = []
        for index, spec in enumerate(model.inputs):
            end = spec.end(pool, begins[index], work)
            sized, content = spec.unpack(pool[begins[index] : end].data)
            request.append(plain_array(spec, sized.row_shape, content))
            begins[index] = end
        requests.append(request)
    return requests


def write_sized_outputs(pool: Bytes, step: Step[Any], answers: Sequence[Answer]) -> None:
    """Write a batch's outputs into its slot; those of a request that failed say so."""
    action, model = step.action, step.model
    assert isinstance(action, Infer)
    assert isinstance(model, ServedModel)
    begins = [step.io_offset + offset for offset in model.layouts[action.batch_size].output_offsets]
    for work, answer in zip(action.rows, answers, strict=True):
        answer = _unless_too_large(model, work, answer)
        for index, spec in enumerate(model.outputs):
            if isinstance(answer, str):
                raw = spec.failed(answer)
            else:
                array = np.ascontiguousarray(answer[index])
                raw = spec.header(array.shape, array.nbytes) + array.tobytes()
            end = begins[index] + len(raw)
            pool[begins[index] : end] = np.frombuffer(raw, np.uint8)
            begins[index] = end


def _unless_too_large(model: ServedModel, work: int, answer: Answer) -> Answer:
    """Refuse an answer that there is no room for, or that is of another shape than the model's description says."""
    if isinstance(answer, str):
        return answer
    for spec, array in zip(model.outputs, answer, strict=True):
        if not spec.allows(array.shape):
            return f"output {spec.name!r} has shape {list(array.shape)}, expected {list(spec.shape(-1))}"
        room = spec.batch_bytes(work) - len(spec.header(array.shape, 0))
        if array.nbytes > room:
            return (
                f"output {spec.name!r} has {array.nbytes} bytes for shape {list(array.shape)}, more than the {room}"
                " that were seen to be needed for such a request when the model was prepared"
            )
    return answer
