"""Finds where a graph makes one thing of all rows of a batch.

A model is served in batches of several clients' rows, so no row's answer may depend on another row. The shapes of
all values are inferred for two batch sizes. A dimension that differs between the two holds the batch. A value that
is computed from the inputs and has no such dimension is one result of all rows: a sum over the batch, a scale, the
condition of an `If`. An answer may follow from it for rare rows only, which `worker.compiling.row_probes` misses.
A number that the graph computes from the batch's size must not be added to rows either. It may say how large a
tensor is, or which element to take.

Nothing follows from values whose shapes are not known. The probes find all other models that mix rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from worker.compiling.onnx_model import RowAxes, find_rows, model_inputs, used_names
from worker.engines.onnxruntime import open_session

# Two primes: no product of other dimensions grows with both of them by accident.
_BATCHES = (5, 7)
# Shapes and bounds are small. Shape inference does not need weights, and a copy of them is expensive.
_MAX_KNOWN_ELEMENTS = 4096

_RANDOM = {
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
}
#: Operators outside ONNX, for which no shapes are inferred, that take one scale from a whole tensor.
_ONE_SCALE = {"DynamicQuantizeMatMul", "DynamicQuantizeLSTM"}
_COARSE_TYPES = {
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E5M2,
}
#: The operators that take sizes, axes and places from inputs: the positions of those inputs.
_SIZES_AND_PLACES = {
    "ConstantOfShape": {0},
    "Resize": {1, 2, 3},
    "Slice": {1, 2, 3, 4},
    "Expand": {1},
    "Gather": {1},
    "GatherElements": {1},
    "GatherND": {1},
    "OneHot": {1},
    "Pad": {1},
    "Reshape": {1},
    "ScatterElements": {1},
    "ScatterND": {1},
    "Split": {1},
    "Squeeze": {1},
    "Tile": {1},
    "TopK": {1},
    "Trilu": {1},
    "Unsqueeze": {1},
    "Upsample": {1},
}
#: Those of them that repeat or only arrange what they are given.
_REPEATS = {"ConstantOfShape", "Expand", "Reshape", "Squeeze", "Tile", "Unsqueeze"}
#: Operators whose answer's shape follows from values, and the inputs of others that decide it, besides those above.
_SHAPED_BY_VALUES = {
    "Compress",
    "NonMaxSuppression",
    "NonZero",
    "StringNormalizer",
    "StringSplit",
    "Unique",
}
_SHAPES = {
    **_SIZES_AND_PLACES,
    "AffineGrid": {1},
    "CenterCropPad": {1},
    "Col2Im": {1},
    "DFT": {1, 2},
    "If": {0},
    "Loop": {0, 1},
    "MaxUnpool": {2},
    "Range": {0, 1, 2},
    "STFT": {1, 3},
    "BlackmanWindow": {0},
    "HammingWindow": {0},
    "HannWindow": {0},
    **{
        f"Reduce{name}": {1}
        for name in (
            "L1",
            "L2",
            "LogSum",
            "LogSumExp",
            "Max",
            "Mean",
            "Min",
            "Prod",
            "Sum",
            "SumSquare",
        )
    },
}
# What is gathered or scattered has the shape of the places, whatever they are.
_PLACES = {"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Trilu"}
_FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
_COARSE_WORDS = ("Quantize", "QLinear", "Integer", "NBits")

_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class RowFlow:
    """What a graph says about the rows of a batch."""

    #: Why the answers of a batch are not those of its rows alone, in words; empty if the graph does not show that.
    mixed: str
    #: Whether an operator draws random numbers.
    chance: bool
    #: Whether numbers of few bits are in the graph, so that kernels of two batch sizes may differ in more than the
    #: last digits.
    coarse: bool
    #: The outputs that do not depend on rows.
    constant: frozenset[str] = frozenset()
    #: The outputs whose shapes may follow from the values of inputs, with what is known of them; -1: unknown.
    by_value: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def follow_rows(
    model: onnx.ModelProto,
    sizes: Mapping[str, int] = MappingProxyType({}),
    rows: RowAxes | None = None,
) -> RowFlow:
    """Find out whether a graph makes one thing of all rows, and which shapes follow from values.

    `sizes` are those to look at of other open dimensions, by their symbols. Where inputs have the batch they say.
    """
    rows = rows or find_rows(model.graph)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    types = [dict(_inferred_types(model, rows, batch, sizes)) for batch in _BATCHES]
    mixed = {name: "" for name, axis in rows.axes.items() if axis is not None}
    counts = _find_counts(model, types)
    _follow(model.graph, mixed, counts, types)
    for name in (value.name for value in model.graph.output):
        if counts.get(name):
            mixed[name] = (
                mixed.get(name) or f"output {name!r} is computed from the number of rows of a batch"
            )
    operators = {node.op_type for node in _nodes(model.graph)}
    return RowFlow(
        mixed=next(filter(None, (mixed.get(value.name) for value in model.graph.output)), ""),
        chance=not operators.isdisjoint(_RANDOM),
        coarse=any(kind.tensor_type.elem_type in _COARSE_TYPES for kind in types[0].values())
        or any(word in name for name in operators for word in _COARSE_WORDS),
        constant=frozenset(value.name for value in model.graph.output if value.name not in mixed),
        by_value=_outputs_by_value(model.graph, types[0]),
    )


def shaped_by_values(graph: GraphProto) -> set[str]:
    """Find the values of a graph behind an operator that shapes by values."""
    values = {value.name for value in model_inputs(graph)}
    shaped: set[str] = set()
    for node in graph.node:
        if node.op_type in ("Shape", "Size"):
            # A size that follows from values is one.
            if not shaped.isdisjoint(node.input):
                values.update(node.output)
            continue
        used = set(used_names(node))
        if values.isdisjoint(used):
            continue
        values.update(node.output)
        places = set() if node.op_type in _PLACES else _SHAPES.get(node.op_type, set())
        inner = {each.op_type for each in _inner_nodes(node)}
        if not shaped.isdisjoint(used) or not _SHAPED_BY_VALUES.isdisjoint({node.op_type, *inner}):
            shaped.update(node.output)
        elif any(name in values for index, name in enumerate(node.input) if index in places):
            # What a loop carries keeps its shape; what it collects is as long as it runs.
            shaped.update(node.output[len(node.input) - 2 if node.op_type == "Loop" else 0 :])
    return shaped


def _outputs_by_value(
    graph: GraphProto, types: Mapping[str, TypeProto]
) -> dict[str, tuple[int, ...]]:
    """Find the outputs whose shapes may follow from values, which are not inferred."""
    shaped, found = shaped_by_values(graph), {}
    for value in graph.output:
        kind = types.get(value.name)
        if value.name in shaped and _shape(kind) is None:
            has_shape = kind is not None and kind.tensor_type.HasField("shape")
            # Where not even their number is known, the file may say it.
            dimensions = (kind if has_shape and kind else value.type).tensor_type.shape.dim
            found[value.name] = tuple(
                each.dim_value if has_shape and each.HasField("dim_value") else -1
                for each in dimensions
            )
    return found


def _find_counts(
    model: onnx.ModelProto, types: Sequence[Mapping[str, TypeProto]]
) -> dict[str, bool]:
    """Compute the small values that no row changes, for both batch sizes.

    Returns for each value, whether the number of rows changes it: a size, the places of all rows. A value with the same
    elements for each row is not changed.
    """
    small = [
        each for each in model.graph.initializer if math.prod(each.dims) <= _MAX_KNOWN_ELEMENTS
    ]
    known = {each.name for each in small}
    nodes: list[NodeProto] = []
    shapes: list[tuple[NodeProto, tuple[tuple[int, ...], tuple[int, ...]]]] = []
    for node in model.graph.node:
        if node.op_type in ("Shape", "Size"):
            found = [_shape(kinds.get(node.input[0])) for kinds in types]
            one, other = found
            if one is not None and other is not None:
                shapes.append((node, (one, other)))
                known.update(node.output)
        elif (
            known.issuperset(filter(None, node.input))
            and node.op_type not in _RANDOM
            and node.domain in ("", "ai.onnx")
            and not any(_bodies(node))
        ):
            nodes.append(node)
            known.update(node.output)
    if all(one == other for _, (one, other) in shapes):
        return {}
    names = [name for node in nodes for name in node.output if name]
    values = []
    for index in range(len(_BATCHES)):
        sizes = {node.output[0]: _sizes(node, found[index]) for node, found in shapes}
        tensors = [numpy_helper.from_array(array, name) for name, array in sizes.items()]
        graph = helper.make_graph(nodes, "counts", [], [], [*small, *tensors])
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        sized = helper.make_model(
            graph, opset_imports=model.opset_import, ir_version=model.ir_version
        )
        if names:
            try:
                session = open_session(
                    sized.SerializeToString(), level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL
                )
                sizes.update(zip(names, session.run(names, {}), strict=True))
            except Exception:  # onnxruntime's exceptions have no common base
                return {}
        values.append(sizes)
    return {name: not _have_same_rows(one, values[1][name]) for name, one in values[0].items()}


def _sizes(node: NodeProto, shape: Sequence[int]) -> _Array:
    """What a Shape or Size operator answers."""
    if node.op_type == "Size":
        return np.array(math.prod(shape), np.int64)
    ends = {each.name: each.i for each in node.attribute}
    return np.array(shape[ends.get("start") : ends.get("end")], np.int64)


def _have_same_rows(one: _Array, other: _Array) -> bool:
    """Whether values for the two batch sizes are the same, or repeat the same elements for each row."""
    if one.ndim != other.ndim:
        return False
    for axis in range(one.ndim):
        if one.shape[axis] == other.shape[axis]:
            continue
        heads = []
        for each, batch in zip((one, other), _BATCHES, strict=True):
            row = each.take(range(each.shape[axis] // batch), axis)
            if not np.array_equal(each, np.concatenate([row] * batch, axis)):
                return False
            heads.append(row)
        one, other = heads
    return np.array_equal(one, other)


def _follow(
    graph: GraphProto,
    mixed: dict[str, str],
    counts: dict[str, bool],
    types: Sequence[Mapping[str, TypeProto]],
) -> None:
    """Go through a graph.

    Args:
        graph: the graph, or the body of an `If`, `Loop` or `Scan`.
        mixed: for each value that comes from rows, why it mixes them, or ""; the graph's own values are added.
        counts: for values, whether the number of rows changes them; the graph's own values are added.
        types: the types of values, for each of the two batch sizes.
    """
    for node in graph.node:
        if node.op_type in ("Shape", "Size"):
            continue
        reasons = [mixed[name] for name in node.input if name in mixed]
        for body in _bodies(node):
            if reasons:
                mixed.update(dict.fromkeys((value.name for value in body.input), ""))
            _follow(body, mixed, counts, types)
            reasons += [mixed[value.name] for value in body.output if value.name in mixed]
        sizes = _SIZES_AND_PLACES.get(node.op_type, set())
        computes = any(
            counts.get(name) and (index not in sizes or not (reasons or node.op_type in _REPEATS))
            for index, name in enumerate(node.input)
        )
        if not reasons:
            for name in node.output:
                counts.setdefault(name, computes)
            continue
        if node.op_type in _ONE_SCALE:
            reasons.append(f"{node.op_type} takes one scale from all rows of a batch")
        if computes:
            # Integers may be places of elements, which are no matter of another row.
            counts.update(dict.fromkeys(node.output, True))
            if types[0].get(node.output[0], TypeProto()).tensor_type.elem_type in _FLOATS:
                reasons.append(f"{node.op_type} computes with the number of rows of a batch")
        reason = next(filter(None, reasons), "")
        for name in filter(None, node.output):
            shapes = [_shape(kinds.get(name)) for kinds in types]
            if not reason and shapes[0] is not None and shapes[0] == shapes[1]:
                mixed[name] = f"{node.op_type} makes one result of all rows of a batch"
            else:
                mixed[name] = reason


def _inferred_types(
    model: onnx.ModelProto, rows: RowAxes, batch: int, sizes: Mapping[str, int]
) -> Iterator[tuple[str, TypeProto]]:
    """Infer the types of a graph's values for a batch size. Declared shapes are often wrong and are not used."""
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    graph = bare.graph
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    for node in _nodes(graph):
        for body in _bodies(node):
            del body.value_info[:]
            for value in (*body.input, *body.output):
                value.type.tensor_type.ClearField("shape")
    graph.input.extend(model_inputs(model.graph))
    for value in graph.input:
        if rows.is_open and (axis := rows.axes[value.name]) is not None:
            value.type.tensor_type.shape.dim[axis].dim_value = batch
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in sizes:
                dimension.dim_value = sizes[dimension.dim_param]
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _MAX_KNOWN_ELEMENTS:
            graph.initializer.append(tensor)
        else:
            graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    for value in model.graph.output:
        kind = value.type.tensor_type.elem_type
        graph.output.append(helper.make_tensor_value_info(value.name, kind, None))
    inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    for graph in (inferred, *(body for node in _nodes(inferred) for body in _bodies(node))):
        for value in (*graph.input, *graph.value_info, *graph.output):
            yield value.name, value.type
    for tensor in inferred.initializer:
        yield tensor.name, helper.make_tensor_type_proto(tensor.data_type, tensor.dims)


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    return (each.g for each in node.attribute if each.type == AttributeProto.GRAPH)


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        yield from _inner_nodes(node)


def _inner_nodes(node: NodeProto) -> Iterator[NodeProto]:
    for body in _bodies(node):
        yield from _nodes(body)


def _shape(kind: TypeProto | None) -> tuple[int, ...] | None:
    """Returns None if a dimension is not known."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    dimensions = kind.tensor_type.shape.dim
    if not all(each.HasField("dim_value") for each in dimensions):
        return None
    return tuple(each.dim_value for each in dimensions)
