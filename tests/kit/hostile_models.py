"""Models as a stranger may upload them: some bytes of ONNX that want everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def model_of(
    nodes: Sequence[onnx.NodeProto],
    tensors: Mapping[str, np.ndarray],
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", FLOAT, ["n", 4])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("here", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=functions)


def honest() -> onnx.ModelProto:
    return model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": np.ones((4, 4), np.float32)}
    )


def bomb(num_bytes: int) -> onnx.ModelProto:
    """Some 200 bytes that ask for so many."""
    return model_of(
        [
            helper.make_node("ConstantOfShape", ["shape"], ["huge"]),
            helper.make_node("ReduceSum", ["huge"], ["sum"], keepdims=0),
            helper.make_node("Add", ["x", "sum"], ["y"]),
        ],
        {"shape": np.array([num_bytes // 4], np.int64)},
    )


def endless() -> onnx.ModelProto:
    """A loop of 2^62 turns."""
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Identity", ["value"], ["value_out"]),
        ],
        "body",
        [
            info("i", TensorProto.INT64, []),
            info("go", TensorProto.BOOL, []),
            info("value", FLOAT, None),
        ],
        [info("go_on", TensorProto.BOOL, []), info("value_out", FLOAT, None)],
    )
    return model_of(
        [helper.make_node("Loop", ["times", "start", "x"], ["y"], body=body)],
        {"times": np.array(2**62, np.int64), "start": np.array(True)},
    )
