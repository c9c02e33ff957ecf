"""Requests of unlike lengths to encoders (`experiments.bench.open_models`), and what onnxruntime answers to each alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from clockwright.elements import array_of
from tests.kit.running_lanes import RunningLanes
from worker.models.served_model import ServedModel

Array = np.ndarray[Any, np.dtype[Any]]
#: The outputs of a request, or why it failed.
Answer = list[Array] | str


def tokens(random: np.random.Generator, rows: int, length: int) -> dict[str, Array]:
    mask = np.ones((rows, length), np.int64)
    for row in mask:
        row[random.integers(1, length + 1) :] = 0
    return {"input_ids": random.integers(0, 1000, (rows, length)), "attention_mask": mask}


def alone(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(inputs)))


def answer_of(model: ServedModel, outputs: Sequence[Any]) -> Answer:
    found = []
    for spec, raw in zip(model.outputs, outputs, strict=True):
        if why := spec.failure(raw):
            return why
        sized, content = spec.unpack(raw)
        found.append(array_of(spec.datatype, content, sized.row_shape).view(np.float32))
    return found


def batch_of(
    model: ServedModel, requests: Sequence[Mapping[str, Array]]
) -> tuple[list[bytes], tuple[int, ...], int]:
    """The payload of a batch, its rows of work by request, and its size."""
    vary = model.inputs[0].vary
    assert vary is not None
    payload, rows = [], []
    for request in requests:
        rows.append(vary.work(*request["input_ids"].shape))
        for spec, array in zip(model.inputs, request.values(), strict=True):
            payload.append(spec.header(array.shape, array.nbytes) + array.tobytes())
    return payload, tuple(rows), min(size for size in model.exec_ns if size >= sum(rows))


def answers_of(model: ServedModel, outputs: Sequence[Any]) -> list[Answer]:
    return [answer_of(model, outputs[at : at + 2]) for at in range(0, len(outputs), 2)]


class Asking:
    """Batches of encoders' requests on lanes that run."""

    def __init__(self, lanes: RunningLanes, model: ServedModel) -> None:
        lanes.lanes.add_model(model)
        lanes.ok(lanes.load(model.model_id))
        self._lanes = lanes
        self.model = model

    def answers(self, requests: Sequence[Mapping[str, Array]]) -> list[Answer]:
        payload, rows, batch_size = batch_of(self.model, requests)
        infer = self._lanes.infer(self.model.model_id, *payload, rows=rows, batch_size=batch_size)
        return answers_of(self.model, self._lanes.ok(infer))


def assert_right(
    found: Sequence[Answer], wanted: Sequence[Sequence[Array]], tolerance: float = 1e-4
) -> None:
    for answer, expected in zip(found, wanted, strict=True):
        assert not isinstance(answer, str), answer
        for one, other in zip(answer, expected, strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())
