"""Each operator of the torch engine on the cases that onnx has for all runtimes."""

from __future__ import annotations

import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests

from clockwright.errors import ModelError
from worker.engines.torch_operators import OPERATORS, STATIC, TORCH_TYPES
from worker.engines.torch_program import Program

# numpy has no such numbers, and so no answers to compare with.
_TYPES = TORCH_TYPES.keys() - {TensorProto.BFLOAT16}

# onnx's tolerance, and one for half precision: torch's attention adds in another order.
_RTOL, _HALF_RTOL, _ATOL = 1e-3, 2e-3, 1e-5

# onnx reckons these cases in Python when they are loaded, in 9 s of 11: `test_torch_engine` has other ones.
_SLOW = ("averagepool", "lppool", "maxpool")

#: What is refused: the names of cases, and words of the refusal.
REFUSED = {
    r"batchnorm_\w*training_mode": "training_mode",
    r"reduce_(max|min)_empty_set\w*": "non-zero size",
    r"resize_\w*(antialias|crop_and_resize)\w*": "antialias, or tf_crop_and_resize",
    r"training_dropout\w*": "training_mode",
}

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module")
def cases() -> Mapping[str, Sequence[Any]]:
    """Cases of a single operator whose tensors torch has types for, by operator."""
    found = defaultdict(list)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # some cases divide by zero on purpose
        for name in _SLOW:
            patch.setitem(sys.modules, f"onnx.backend.test.case.node.{name}", ModuleType(name))
        loaded = load_model_tests(kind="node")
    for case in loaded:
        assert case.model is not None
        graph = case.model.graph
        values = [value.type for value in (*graph.input, *graph.output)]
        if len(graph.node) == 1 and all(
            value.HasField("tensor_type") and value.tensor_type.elem_type in _TYPES
            for value in values
        ):
            found[graph.node[0].op_type].append(case)
    return found


_OTHERS = {"conv_add_relu", "AveragePool", "MaxPool"}


@pytest.mark.parametrize("op_type", sorted({*OPERATORS, "Constant", "If"} - _OTHERS))
def test_an_operator_answers_onnxs_own_cases_or_refuses_them(
    op_type: str, cases: Mapping[str, Sequence[Any]]
) -> None:
    assert cases[op_type]
    for case in cases[op_type]:
        name = case.name.removeprefix("test_")
        ((inputs, outputs),) = case.data_sets
        words = [why for names, why in REFUSED.items() if re.fullmatch(names, name)]
        if words:
            with pytest.raises((ModelError, IndexError), match=words[0]):
                _answers(case.model, inputs)
            continue
        for found, wanted in zip(_answers(case.model, inputs), outputs, strict=True):
            expected = _array(wanted)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
            rtol = _HALF_RTOL if found.dtype == np.float16 else _RTOL
            np.testing.assert_allclose(found, expected, rtol, _ATOL, err_msg=name)


def _answers(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Array]:
    """Run a model of one operator; what decides a shape becomes a constant."""
    (node,) = model.graph.node
    static = {node.input[i] for i in STATIC.get(node.op_type, ()) if i < len(node.input)}
    if node.op_type == "If":
        static.add(node.input[0])
    arrays = {
        value.name: _array(each) for value, each in zip(model.graph.input, inputs, strict=True)
    }
    model = onnx.ModelProto.FromString(model.SerializeToString())
    graph = model.graph
    kept = [value for value in graph.input if value.name not in static]
    graph.initializer.extend(
        numpy_helper.from_array(arrays[value.name], value.name)
        for value in graph.input
        if value.name in static
    )
    del graph.input[:]
    graph.input.extend(kept)
    tensors = [torch.from_numpy(arrays[value.name].copy()) for value in kept]
    before = [tensor.clone() for tensor in tensors]
    with torch.inference_mode():
        found = Program(model.SerializeToString(), torch.device("cpu")).run(tensors, {}, {})
        # A device whose memory cannot be read: nothing waits for it, and nothing on the host meets it.
        shapes = Program(model.SerializeToString(), torch.device("meta")).run(
            [tensor.to("meta") for tensor in tensors], {}, {}
        )
    assert all(map(torch.equal, map(_bits, tensors), map(_bits, before)))
    assert [each.shape for each in shapes] == [each.shape for each in found]
    return [tensor.numpy() for tensor in found]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # A NaN is as it was, though it equals nothing.
    return tensor.nan_to_num()


def _array(value: TensorProto | Array) -> Array:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value)
