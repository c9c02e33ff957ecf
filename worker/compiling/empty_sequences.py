"""Makes a graph fail where it gives an LSTM or a GRU nothing: onnxruntime aborts the process there.

A run ends with `terminate called without an active exception` at an LSTM over no rows, and at a GRU over no rows or
steps (onnxruntime 1.32). Clients may cause that where sizes are open or follow from values: a picture too narrow for the
strides before a GRU, a mask that keeps nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from worker.compiling.onnx_model import used_names

_RECURRENT = {"LSTM", "DynamicQuantizeLSTM", "GRU"}
# ConstantOfShape came with it.
_LEAST_OPSET = 9


def guard_recurrent(model: onnx.ModelProto, shaped: Collection[str] | None) -> None:
    """Put a check before each LSTM and GRU of a model that may get nothing.

    Args:
        model: is changed.
        shaped: the values of its top graph whose sizes follow from values; None: any size may be 0.
    """
    opsets = [each.version for each in model.opset_import if each.domain in ("", "ai.onnx")]
    if max(opsets, default=0) >= _LEAST_OPSET:
        _guard(model.graph, shaped)


def _guard(graph: GraphProto, shaped: Collection[str] | None) -> None:
    for index in range(len(graph.node) - 1, -1, -1):
        node = graph.node[index]
        if shaped is not None and not set(used_names(node)) & set(shaped):
            continue
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                _guard(body, None)
        if node.op_type in _RECURRENT:
            checks = _checks(
                node.input[0], node.op_type == "GRU", f"{node.output[0]}{index}/checked"
            )
            node.input[0] = checks[-1].output[0]
            for at, check in enumerate(checks):
                graph.node.insert(index + at, check)


def _checks(name: str, any_size: bool, prefix: str) -> Sequence[NodeProto]:
    """Nodes that repeat a value, and fail if it has no rows; in case of `any_size` also if it has no steps."""

    def constant(number: str, values: object) -> NodeProto:
        tensor = numpy_helper.from_array(np.array(values, np.int64))
        return helper.make_node("Constant", [], [f"{prefix}{number}"], value=tensor)

    # The first of as many zeros as there are elements or rows is added to the shape.
    zeros = helper.make_tensor("", TensorProto.INT64, [1], [0])
    number = (
        helper.make_node("ReduceProd", [f"{prefix}0"], [f"{prefix}2"])
        if any_size
        else helper.make_node("Gather", [f"{prefix}0", f"{prefix}1"], [f"{prefix}2"])
    )
    return (
        helper.make_node("Shape", [name], [f"{prefix}0"]),
        constant("1", [1]),
        number,
        helper.make_node("ConstantOfShape", [f"{prefix}2"], [f"{prefix}3"], value=zeros),
        constant("4", [0]),
        helper.make_node("Gather", [f"{prefix}3", f"{prefix}4"], [f"{prefix}5"]),
        helper.make_node("Add", [f"{prefix}0", f"{prefix}5"], [f"{prefix}6"]),
        helper.make_node("Reshape", [name, f"{prefix}6"], [prefix]),
    )
