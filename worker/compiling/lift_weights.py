"""Turns the weights of an optimised graph into inputs, and gives everything canonical names.

All instances of one network then have the same graph, byte for byte, and share its sessions, kernels and profile.
Their weights lie in pages. Lifting comes *after* optimisation, because blocked convolution layouts and folded
batch norms need constant weights: ResNet-50 is 21-26 % slower when its weights are lifted before, and 0-4 % when
they are lifted after (measured on an AVX-512 EPYC).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from worker.core.io_pool import aligned
from worker.models.model_files import WeightTensor

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}

_BYTES = {TensorProto.INT8, TensorProto.UINT8}
# Operators that read a quantised table as it lies. Those that multiply pack a constant one when a session is made, and
# one from a page at each run: an 8-bit product of 768 columns took 2.9 times as long for one row and 1.5 times for 16,
# a convolution 1.3 to 1.6 times, an LSTM 2.8 times, all with the same answers.
_READERS = {"DequantizeLinear", "Gather", "GatherElements", "GatherND"}
_LEAST_TABLE = 1024

#: The smallest float initializer to lift, as (dimensions, elements). The levels lift ever less, because some
#: operators insist on constant scalars or small vectors.
LIFT_LEVELS = ((0, 1), (1, 16), (2, 1024))


@dataclass(frozen=True, slots=True)
class LiftedGraph:
    """A graph without weights, and the weights."""

    #: The serialised graph. Its inputs are the original's, then one per weight tensor in the blob's order.
    graph: bytes
    weights: tuple[WeightTensor, ...]
    #: The weights' bytes, at the offsets that `weights` gives.
    blob: np.ndarray


def lift_weights(
    model: onnx.ModelProto,
    *,
    level: tuple[int, int],
    static: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> LiftedGraph:
    """Lift the float initializers of an optimised model, and quantised tables; `model` is changed.

    Args:
        model: the model as onnxruntime saved it, with its weights inside.
        level: one of `LIFT_LEVELS`.
        static: by operator, the positions of inputs that decide shapes; these are not weights.
    """
    graph = model.graph
    taken = {value.name for value in graph.input}
    for value in graph.output:
        if value.name in taken:
            # The runtime would leave the output's memory as it is.
            copy = f"{value.name}/copy"
            graph.node.append(helper.make_node("Identity", [value.name], [copy]))
            value.name = copy
    least_dimensions, least_elements = level
    lifted: list[TensorProto] = []
    kept: list[TensorProto] = []
    fixed = {value.name for value in graph.output}
    for node in graph.node:
        fixed.update(node.input[i] for i in static.get(node.op_type, ()) if i < len(node.input))
    multiplied = _multiplied(graph)
    for tensor in graph.initializer:
        large = len(tensor.dims) >= least_dimensions and _elements(tensor) >= least_elements
        is_table = (
            tensor.data_type in _BYTES
            and _elements(tensor) >= _LEAST_TABLE
            and tensor.name not in multiplied
        )
        is_weight = (tensor.data_type in _FLOATS and large) or is_table
        liftable = is_weight and tensor.name not in fixed
        (lifted if liftable else kept).append(tensor)
    # Sort by first use: the order in the file follows names that a client chose.
    first_use = _first_uses(graph)
    lifted.sort(key=lambda tensor: first_use[tensor.name])
    kept.sort(key=lambda tensor: first_use[tensor.name])

    arrays = [numpy_helper.to_array(tensor) for tensor in lifted]
    lifted_names = {tensor.name for tensor in lifted}
    inputs = [v for v in graph.input if v.name not in {t.name for t in graph.initializer}]
    weight_inputs = [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in lifted]
    kept_copies = [TensorProto.FromString(t.SerializeToString()) for t in kept]
    del graph.input[:]
    del graph.initializer[:]
    graph.input.extend([*inputs, *weight_inputs])
    graph.initializer.extend(kept_copies)
    new_names = canonicalise(model)
    assert lifted_names <= new_names.keys(), "a lifted weight lost its name"

    weights: list[WeightTensor] = []
    offset = 0
    for tensor, array in zip(lifted, arrays, strict=True):
        name = new_names[tensor.name]
        weights.append(
            WeightTensor(name, tensor.data_type, tuple(tensor.dims), offset, array.nbytes)
        )
        offset += aligned(array.nbytes)
    blob = np.zeros(offset, dtype=np.uint8)
    for weight, array in zip(weights, arrays, strict=True):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        blob[weight.offset : weight.offset + weight.num_bytes] = flat
    return LiftedGraph(model.SerializeToString(deterministic=True), tuple(weights), blob)


def canonicalise(model: onnx.ModelProto) -> dict[str, str]:
    """Rename all values by position and drop what does not affect the computation.

    Returns the new names of the top graph's values, by their old names.
    """
    names: dict[str, str] = {}
    graph = model.graph
    symbols: dict[str, str] = {}
    for value in graph.output:
        # Converters declare an output of one row whatever the batch, and the runtime would insist on that.
        value.type.tensor_type.ClearField("shape")
    for value in (*graph.input, *graph.output):
        value.doc_string = ""
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param:
                symbol = symbols.setdefault(dimension.dim_param, f"d{len(symbols)}")
                dimension.dim_param = symbol
    _rename(graph, names, prefix="v")
    model.producer_name = model.producer_version = model.domain = model.doc_string = ""
    model.model_version = 0
    del model.metadata_props[:]
    opsets = sorted((opset.domain, opset.version) for opset in model.opset_import)
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*opset) for opset in opsets)
    return names


def _rename(graph: onnx.GraphProto, names: dict[str, str], *, prefix: str) -> None:
    graph.name = "graph"
    graph.doc_string = ""
    del graph.value_info[:]
    del graph.quantization_annotation[:]
    del graph.metadata_props[:]

    def new(name: str) -> str:
        # The empty name means "not given".
        return names.setdefault(name, f"{prefix}{len(names)}") if name else ""

    for value in graph.input:
        value.name = new(value.name)
    for tensor in graph.initializer:
        tensor.name = new(tensor.name)
        tensor.doc_string = ""
    for index, node in enumerate(graph.node):
        node.name = ""
        node.doc_string = ""
        del node.metadata_props[:]
        node.input[:] = [new(name) for name in node.input]
        for position, attribute in enumerate(node.attribute):
            attribute.doc_string = ""
            for number, subgraph in enumerate((attribute.g, *attribute.graphs)):
                # A subgraph sees the names around it, and keeps its own names to itself.
                if subgraph.node or subgraph.output:
                    inner = f"{prefix}{index}_{position}_{number}_"
                    _rename(subgraph, dict(names), prefix=inner)
        node.output[:] = [new(name) for name in node.output]
    for value in graph.output:
        value.name = new(value.name)


def _first_uses(graph: onnx.GraphProto) -> dict[str, int]:
    uses: dict[str, int] = {}

    def visit(inner: onnx.GraphProto) -> None:
        for node in inner.node:
            for name in node.input:
                uses.setdefault(name, len(uses))
            for attribute in node.attribute:
                for subgraph in (attribute.g, *attribute.graphs):
                    visit(subgraph)
        for value in inner.output:
            uses.setdefault(value.name, len(uses))

    visit(graph)
    for tensor in graph.initializer:
        uses.setdefault(tensor.name, len(uses))
    return uses


def _multiplied(graph: onnx.GraphProto) -> set[str]:
    """The values that a node uses as more than a table to read."""
    names: set[str] = set()
    for node in graph.node:
        names.update(node.input[node.op_type in _READERS :])
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                names |= _multiplied(body)
    return names


def _elements(tensor: TensorProto) -> int:
    count = 1
    for size in tensor.dims:
        count *= size
    return count
