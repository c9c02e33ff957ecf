"""Rewrites a graph so that its inputs and outputs are tensors of numbers that the protocol has.

* Probabilities as a sequence of maps (a ZipMap node at the end) become the tensor of which the maps are made. Its
  columns are the classes in the order of the labels.
* Another sequence of tensors of one shape becomes one tensor, with the sequence as its first dimension.
* Floats of 4 and 8 bits and integers of 2 and 4 bits travel as a wider type that has all their values.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto, ValueInfoProto, helper

from worker.engines.onnxruntime import SEQUENCE_NODE

_ML = "ai.onnx.ml"
_OPSET = 13

#: By ONNX's number, the type that clients see, which has all the values.
WIDER = {
    getattr(TensorProto, name): wider
    for name, wider in (
        ("FLOAT8E4M3FN", TensorProto.FLOAT16),
        ("FLOAT8E4M3FNUZ", TensorProto.FLOAT16),
        ("FLOAT8E5M2", TensorProto.FLOAT16),
        ("FLOAT8E5M2FNUZ", TensorProto.FLOAT16),
        ("FLOAT8E8M0", TensorProto.FLOAT),
        ("FLOAT4E2M1", TensorProto.FLOAT16),
        ("INT4", TensorProto.INT8),
        ("UINT4", TensorProto.UINT8),
        ("INT2", TensorProto.INT8),
        ("UINT2", TensorProto.UINT8),
    )
    if hasattr(TensorProto, name)
}


def make_plain(model: onnx.ModelProto) -> None:
    """Rewrite a model's graph in place."""
    graph = model.graph
    if not any(each.domain in ("", "ai.onnx") for each in model.opset_import):
        # CatBoost imports none but those for trees.
        model.opset_import.append(helper.make_opsetid("", _OPSET))
    for node in graph.node:
        if node.op_type == "ZipMap" and node.domain == _ML:
            name = node.output[0]
            node.CopyFrom(helper.make_node("Identity", [node.input[0]], [name]))
            for value in graph.output:
                if value.name == name:
                    value.type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    for value in graph.output:
        kind = value.type
        if kind.WhichOneof("value") == "sequence_type" and kind.sequence_type.elem_type.HasField(
            "tensor_type"
        ):
            element = kind.sequence_type.elem_type.tensor_type.elem_type
            inner = _rename(graph, value.name)
            made = helper.make_node(
                "ConcatFromSequence", [inner], [value.name], axis=0, new_axis=1, name=SEQUENCE_NODE
            )
            graph.node.append(made)
            kind.CopyFrom(helper.make_tensor_type_proto(element, None))
    _widen(graph)


def _widen(graph: onnx.GraphProto) -> None:
    constants = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if (narrow := _narrow_type(value)) and value.name not in constants:
            inner = _rename(graph, value.name)
            graph.node.insert(0, helper.make_node("Cast", [value.name], [inner], to=narrow))
            value.type.tensor_type.elem_type = WIDER[narrow]
    inputs = {value.name for value in graph.input} - constants
    for value in graph.output:
        if narrow := _narrow_type(value):
            if value.name in inputs:  # widened above
                value.type.tensor_type.elem_type = WIDER[narrow]
                continue
            inner = _rename(graph, value.name)
            graph.node.append(helper.make_node("Cast", [inner], [value.name], to=WIDER[narrow]))
            value.type.tensor_type.elem_type = WIDER[narrow]


def _narrow_type(value: ValueInfoProto) -> int:
    """The type of a tensor of narrow numbers, else 0."""
    number = value.type.tensor_type.elem_type
    return number if number in WIDER else 0


def _rename(graph: onnx.GraphProto, name: str) -> str:
    """Give a value another name wherever it is made or used. Returns the new name."""
    inner = f"{name}/inner"
    for tensor in graph.initializer:
        if tensor.name == name:
            tensor.name = inner
    for node in _nodes(graph):
        for names in (node.input, node.output):
            for index, each in enumerate(names):
                if each == name:
                    names[index] = inner
    return inner


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _nodes(body)
