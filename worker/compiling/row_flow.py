"""Follows the rows of a batch through a graph, and finds where they meet.

A model is served in batches of several clients' rows, so no row's answer may depend on another row. The
graph is walked once. Each value is known for two batch sizes at a time: its shape by ONNX's own shape
inference, and its content where that follows from shapes and constants alone. A dimension that differs
between the two holds the batch. Rows meet where a value that comes from rows has no such dimension any more
(a reduction), has two (every row beside every other), has one that is no multiple of the batch (a shift), or
where an operator works along it (a softmax, one scale for all).

An operator without a rule leaves the question open, and `worker.compiling.row_probes` asks the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx.inliner
import onnx.reference
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from worker.compiling.onnx_model import model_inputs

# Two primes: no product of other dimensions grows with both of them by accident.
_BATCHES = (5, 7)
# Shapes, axes and bounds are small; weights are not worth a copy.
_MOST_KNOWN = 4096
# The states of a loop change at most from a constant to rows, and from a known dimension to an unknown one.
_LOOP_PASSES = 3

Shape = tuple[int, ...]
_Known = np.ndarray


@dataclass(frozen=True, slots=True)
class RowFlow:
    """What the graph says of the rows of a batch."""

    #: Why the answers of a batch of several rows are not those of its rows alone, in words; empty if the graph
    #: does not show that.
    mixed: str = ""
    #: Whether an operator draws random numbers.
    chance: bool = False
    #: The first operator without a rule on the way to an output; empty if the graph proves that rows stay apart.
    open_at: str = ""
    #: The first operator that may choose otherwise at sizes of a batch that the graph was not followed at; empty if
    #: there is none.
    chooses: str = ""
    #: Whether numbers of few bits are in the graph, so that kernels of two batch sizes may differ in more than
    #: the last digits.
    coarse: bool = False
    #: The rows of the smallest table that an input's integers are indices of, by input.
    index_bounds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Value:
    """A value in the graph, for each of the two batch sizes."""

    types: tuple[onnx.TypeProto | None, ...] = (None,) * len(_BATCHES)
    #: The content, where it follows from shapes and constants.
    known: tuple[_Known | None, ...] = (None,) * len(_BATCHES)
    #: Whether the content depends on the rows of the batch.
    from_rows: bool = False
    #: The dimension that holds the batch; None when it is not known.
    axis: int | None = None
    #: How many whole batches lie in that dimension one after the other: 2 after `Concat(x, x)`.
    outer: int = 1
    #: Why it mixes rows; empty if it does not, as far as known.
    mixed: str = ""
    #: The operator after which nothing was known.
    open_at: str = ""
    #: The model's input whose numbers these are.
    source: str = ""

    @property
    def shapes(self) -> tuple[Shape, ...] | None:
        """The shapes; None when one is not known."""
        shapes = [_shape(kind) for kind in self.types]
        return None if None in shapes else tuple(shapes)  # type: ignore[arg-type]

    @property
    def rank(self) -> int | None:
        """The number of dimensions; None when it is not known."""
        kind = self.types[0]
        if kind is None or not kind.tensor_type.HasField("shape"):
            return None
        return len(kind.tensor_type.shape.dim)


@dataclass(slots=True)
class _Findings:
    """What concerns the whole graph."""

    index_bounds: dict[str, int] = field(default_factory=dict)
    chance: bool = False
    chooses: str = ""
    coarse: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """The attributes and inputs of one node, ready to be judged."""

    node: NodeProto
    inputs: tuple[_Value, ...]
    opset: int
    attributes: Mapping[str, AttributeProto]

    @property
    def name(self) -> str:
        return self.node.op_type

    @property
    def first(self) -> _Value:
        return self.inputs[0]

    def number(self, name: str, default: int) -> int:
        return self.attributes[name].i if name in self.attributes else default

    def numbers(self, name: str, position: int | None = None) -> list[int] | None:
        """Integers of an attribute, or of an input in later operator sets; None if not given or not known."""
        if name in self.attributes:
            return list(self.attributes[name].ints)
        if position is not None and position < len(self.inputs):
            known = self.inputs[position].known
            if known[0] is not None and known[1] is not None and np.array_equal(known[0], known[1]):
                return [int(each) for each in known[0].reshape(-1)]
        return None

    def axis(self, default: int, name: str = "axis") -> int:
        """An axis, counted from the front."""
        axis = self.number(name, default)
        return axis if axis >= 0 else axis + (self.first.rank or 0)


def follow_rows(model: onnx.ModelProto) -> RowFlow:
    """Find out whether a model's rows meet. The model's batch is open; `model` is not changed."""
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    walk = _Walk(model)
    outputs = walk.outputs()
    return RowFlow(
        mixed=next((each.mixed for each in outputs if each.mixed), ""),
        open_at=next((each.open_at for each in outputs if each.open_at), ""),
        chance=walk.findings.chance,
        chooses=walk.findings.chooses,
        coarse=walk.findings.coarse,
        index_bounds=walk.findings.index_bounds,
    )


class _Walk:
    """One walk through a model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._opsets = {each.domain: each.version for each in model.opset_import}
        self.findings = _Findings()

    def outputs(self) -> list[_Value]:
        graph = self._model.graph
        scope = {}
        for value in model_inputs(graph):
            types = []
            for batch in _BATCHES:
                kind = onnx.TypeProto()
                kind.CopyFrom(value.type)
                kind.tensor_type.shape.dim[0].dim_value = batch
                types.append(kind)
            scope[value.name] = _Value(tuple(types), from_rows=True, axis=0, source=value.name)
        return self._graph(graph, scope)

    # --- graphs -----------------------------------------------------------------------------------

    def _graph(self, graph: onnx.GraphProto, scope: dict[str, _Value]) -> list[_Value]:
        """Walk a graph whose inputs and surroundings are in `scope`, which is changed."""
        for tensor in graph.initializer:
            scope[tensor.name] = _constant(tensor)
        alive = _alive(graph)
        for index, node in enumerate(graph.node):
            if index not in alive:
                continue
            inputs = tuple(scope.get(name, _Value()) for name in node.input)
            try:
                values = self._node(node, inputs, scope)
            except (
                Exception
            ):  # what cannot be followed stays open; the runtime judges whether it is valid
                values = [_unknown(inputs, node.op_type)] * len(node.output)
            for name, value in zip(node.output, values, strict=False):
                if name:
                    scope[name] = value
                    self._note(value, node)
        return [scope.get(value.name, _Value()) for value in graph.output]

    def _note(self, value: _Value, node: NodeProto) -> None:
        kind = value.types[0]
        low = kind is not None and kind.tensor_type.elem_type in _COARSE
        if low or any(word in node.op_type for word in ("Quantize", "QLinear", "Integer", "NBits")):
            self.findings.coarse = True

    def _node(
        self, node: NodeProto, inputs: tuple[_Value, ...], scope: dict[str, _Value]
    ) -> list[_Value]:
        attributes = {each.name: each for each in node.attribute}
        opset = self._opsets.get(node.domain, self._opsets.get("ai.onnx", 1))
        call = _Call(node, inputs, opset, attributes)
        if node.op_type in _RANDOM or _drops_out(call):
            self.findings.chance = True
            words = (
                f"{node.op_type} answers by chance: the same row asked again is answered otherwise"
            )
            return [replace(value, mixed=words, from_rows=True) for value in self._plain(call)]
        match node.op_type:
            case "If":
                return self._if(call, scope)
            case "Loop":
                return self._loop(call, scope)
            case "Scan":
                return self._scan(call, scope)
        return self._plain(call)

    # --- one operator -----------------------------------------------------------------------------

    def _plain(self, call: _Call) -> list[_Value]:
        node, inputs = call.node, call.inputs
        if node.op_type in ("Shape", "Size"):
            # The shape of a value says nothing of its content, whatever that is made of.
            inputs = tuple(replace(i, from_rows=False, mixed="", open_at="") for i in inputs)
            call = replace(call, inputs=inputs)
        if not _is_linear(call):
            self.findings.chooses = self.findings.chooses or node.op_type
        from_rows = any(each.from_rows for each in inputs)
        known = [[None] * len(node.output) for _ in _BATCHES] if from_rows else self._known(call)
        types = self._types(call)
        values = []
        for position in range(len(node.output)):
            contents = tuple(each[position] for each in known)
            kinds = tuple(
                kind[position] if content is None else _type_of(content)
                for kind, content in zip(types, contents, strict=True)
            )
            value = _Value(kinds, contents, from_rows=from_rows)
            if from_rows:
                value = self._rows(call, value, position)
            else:
                mixed = next((each.mixed for each in inputs if each.mixed), "")
                value = replace(value, mixed=mixed)
            values.append(value)
        return values

    def _known(self, call: _Call) -> list[list[_Known | None]]:
        """The contents of outputs by batch size, where they follow from what is known."""
        nothing: list[_Known | None] = [None] * len(call.node.output)
        if call.name in ("Shape", "Size"):
            return [self._shape_of(call, kind) for kind in call.first.types]
        if call.node.domain not in ("", "ai.onnx") or any(
            a.HasField("g") for a in call.node.attribute
        ):
            return [nothing] * len(_BATCHES)
        names = [name for name in call.node.input if name]
        given = [v for v, name in zip(call.inputs, call.node.input, strict=True) if name]
        results = []
        for batch in range(len(_BATCHES)):
            contents = [value.known[batch] for value in given]
            if any(each is None for each in contents):
                results.append(nothing)
                continue
            results.append(self._evaluate(call, dict(zip(names, contents, strict=True))) or nothing)
        return results

    def _evaluate(
        self, call: _Call, contents: Mapping[str, _Known | None]
    ) -> list[_Known | None] | None:
        outputs = [name for name in call.node.output if name]
        if len(outputs) != len(call.node.output):
            return None
        opsets = [helper.make_opsetid("", call.opset)]
        function = helper.make_function("f", "f", list(contents), outputs, [call.node], opsets)
        try:
            found = onnx.reference.ReferenceEvaluator(function).run(
                None, dict(contents), attributes={}
            )
        except Exception:  # whatever the evaluator does not know stays unknown
            return None
        return [
            each if isinstance(each, np.ndarray) and each.size <= _MOST_KNOWN else None
            for each in map(_array, found)
        ]

    def _shape_of(self, call: _Call, kind: onnx.TypeProto | None) -> list[_Known | None]:
        shape = _shape(kind)
        if shape is None:
            return [None]
        if call.name == "Size":
            return [np.array(math.prod(shape), dtype=np.int64)]
        begin, end = call.number("start", 0), call.attributes.get("end")
        return [np.array(shape[begin : None if end is None else end.i], dtype=np.int64)]

    def _types(self, call: _Call) -> list[list[onnx.TypeProto | None]]:
        """The types of outputs by batch size; None where they cannot be inferred."""
        node = call.node
        nothing: list[onnx.TypeProto | None] = [None] * len(node.output)
        if node.op_type in _SAME_SHAPE and call.inputs:
            return [[kind, *nothing[1:]] for kind in call.first.types]
        try:
            schema = onnx.defs.get_schema(node.op_type, call.opset, node.domain)
        except onnx.defs.SchemaError:
            return [nothing] * len(_BATCHES)
        results = []
        for batch in range(len(_BATCHES)):
            types, data = {}, {}
            for name, value in zip(node.input, call.inputs, strict=True):
                kind, content = value.types[batch], value.known[batch]
                if name and kind is not None:
                    types[name] = kind
                if name and content is not None:
                    data[name] = numpy_helper.from_array(content, name)
            try:
                found = onnx.shape_inference.infer_node_outputs(
                    schema, node, types, data, opset_imports=list(self._model.opset_import)
                )
            except Exception:  # an operator that cannot be inferred is not known
                results.append(nothing)
                continue
            results.append([found.get(name) for name in node.output])
        return results

    def _rows(self, call: _Call, value: _Value, position: int) -> _Value:
        """Where the batch is in an output that comes from rows, or why its rows are mixed."""
        name = call.name
        rows = [each for each in call.inputs if each.from_rows]
        mixed = next((each.mixed for each in rows if each.mixed), "")
        mixed = mixed or next((each.mixed for each in call.inputs if each.mixed), "")
        opened = next((each.open_at for each in rows if each.open_at), "")
        self._note_indices(call)
        source = call.first.source if name in _SAME_NUMBERS else ""
        if mixed:
            return replace(value, mixed=mixed, source=source)
        if name in _STATISTICS:
            return replace(value, mixed=f"{name} {_STATISTICS[name]}")
        for rule in (_along_the_batch, _size_in_numbers):
            if words := rule(call):
                return replace(value, mixed=f"{name} {words}")

        axis: int | None = None
        outer = 1
        shapes = value.shapes
        if shapes is not None and name not in _OPEN:
            held = _batch_axes(shapes)
            if not held:
                return replace(value, mixed=f"{name} makes one result of all rows of a batch")
            if len(held) > 1:
                return replace(value, mixed=f"{name} sets every row of a batch beside every other")
            axis = held[0]
            if shapes[0][axis] % _BATCHES[0] or shapes[1][axis] % _BATCHES[1]:
                return replace(value, mixed=f"{name} moves rows of a batch against each other")
        elif name in _ROW_BY_ROW_ML and call.first.axis == 0 and (call.first.rank or 0) > 1:
            axis = 0
        if opened or any(each.axis is None for each in rows):
            return replace(value, open_at=opened or name, source=source)
        if name in _OPEN or name not in _RULED or axis is None or _numbers_rows(call):
            return replace(value, open_at=name, source=source)
        outers = {each.outer for each in rows}
        if name in _LAYOUT:
            found = _reshaped(call.first, value, axis)
            if found is None:
                return replace(value, mixed=f"{name} folds the rows of a batch into one another")
            outer = found
        elif len(outers) > 1:
            return replace(value, mixed=f"{name} sets rows of a batch beside others")
        else:
            outer = outers.pop()
            change = _OUTER.get(name)
            if change is not None:
                changed = change(call, axis, outer)
                if changed is None:
                    return replace(value, open_at=name, source=source)
                outer = changed
        return replace(value, axis=axis, outer=outer, source=source)

    def _note_indices(self, call: _Call) -> None:
        """Remember the size of a table that an input's numbers are indices of."""
        if call.name != "Gather" or len(call.inputs) < 2 or not call.inputs[1].source:
            return
        shapes = call.first.shapes
        if shapes is not None and shapes[0]:
            source, bound = call.inputs[1].source, shapes[0][call.axis(0)]
            bounds = self.findings.index_bounds
            bounds[source] = min(bound, bounds.get(source, bound))

    # --- control flow -----------------------------------------------------------------------------

    def _if(self, call: _Call, scope: dict[str, _Value]) -> list[_Value]:
        condition = call.first
        branches = [
            self._graph(call.attributes[name].g, dict(scope))
            for name in ("then_branch", "else_branch")
        ]
        values = [_joined(one, other, "If") for one, other in zip(*branches, strict=True)]
        if condition.from_rows:
            words = "If takes one branch for all rows of a batch"
            return [replace(value, from_rows=True, mixed=value.mixed or words) for value in values]
        return values

    def _loop(self, call: _Call, scope: dict[str, _Value]) -> list[_Value]:
        body = call.attributes["body"].g
        trips, condition, *states = [*call.inputs, _Value(), _Value()][: max(len(call.inputs), 2)]
        mixed = ""
        if trips.from_rows or condition.from_rows:
            mixed = "Loop runs equally often for all rows of a batch"
        outputs: list[_Value] = []
        for _ in range(_LOOP_PASSES):
            inner = dict(scope)
            inner |= {value.name: _Value() for value in body.input[:2]}
            inner |= {v.name: s for v, s in zip(body.input[2:], states, strict=True)}
            outputs = self._graph(body, inner)
            if outputs[0].from_rows:
                mixed = mixed or "Loop runs equally often for all rows of a batch"
            joined = [
                _joined(before, after, "Loop")
                for before, after in zip(states, outputs[1 : 1 + len(states)], strict=True)
            ]
            if joined == states:
                break
            states = joined
        collected = [_stacked(value, "Loop") for value in outputs[1 + len(states) :]]
        values = [*states, *collected]
        if mixed:
            return [replace(value, from_rows=True, mixed=value.mixed or mixed) for value in values]
        return values

    def _scan(self, call: _Call, scope: dict[str, _Value]) -> list[_Value]:
        if call.opset < 9:
            return [_unknown(call.inputs, "Scan")] * len(call.node.output)
        body = call.attributes["body"].g
        num_scanned = call.number("num_scan_inputs", 0)
        num_states = len(call.inputs) - num_scanned
        states, scanned = list(call.inputs[:num_states]), call.inputs[num_states:]
        axes = call.numbers("scan_input_axes") or [0] * num_scanned
        slices = []
        mixed = ""
        for value, axis in zip(scanned, axes, strict=True):
            along = axis if axis >= 0 else axis + (value.rank or 0)
            if value.from_rows and value.axis == along:
                if not num_states:
                    return [_unknown(call.inputs, "Scan")] * len(call.node.output)
                mixed = "Scan goes from row to row of a batch with a state"
            slices.append(_unstacked(value, along))
        outputs: list[_Value] = []
        for _ in range(_LOOP_PASSES):
            inner = dict(scope)
            inner |= {v.name: s for v, s in zip(body.input, [*states, *slices], strict=True)}
            outputs = self._graph(body, inner)
            joined = [
                _joined(before, after, "Scan")
                for before, after in zip(states, outputs[:num_states], strict=True)
            ]
            if joined == states:
                break
            states = joined
        values = [*states, *(_stacked(value, "Scan") for value in outputs[num_states:])]
        if mixed:
            return [replace(value, from_rows=True, mixed=value.mixed or mixed) for value in values]
        return values


# --- rules -----------------------------------------------------------------------------------------


def _along_the_batch(call: _Call) -> str:
    """Say how an operator works along the dimension that holds the batch; empty if it does not."""
    name, axis, rank = call.name, call.first.axis, call.first.rank
    if name in ("MatMul", "Gemm", "MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat"):
        return _contracts(call)
    if name == "Einsum":
        return _einsum_contracts(call)
    if not call.first.from_rows or axis is None or rank is None:
        return ""
    works = False
    match name:
        case "Softmax" | "LogSoftmax" | "Hardmax":
            works = axis == call.axis(-1) if call.opset >= 13 else axis >= call.axis(1)
        case "TopK" | "LpNormalization":
            works = axis == call.axis(-1)
        case "LayerNormalization" | "RMSNormalization" | "SimplifiedLayerNormalization":
            works = axis >= call.axis(-1)
        case "CumSum" | "CumProd":
            along = call.numbers("axis", 1)
            works = along is not None and axis in (along[0], along[0] + rank)
        case "BatchNormalization":
            works = bool(call.number("training_mode", 0)) or len(call.node.output) > 1
        case "MeanVarianceNormalization":
            axes = call.numbers("axes")
            works = axis in [each % rank for each in ([0, 2, 3] if axes is None else axes)]
        case "InstanceNormalization":
            works = axis > 1
        case "GroupNormalization" | "SpaceToDepth" | "DepthToSpace":
            works = axis > 0
        case "LRN":
            works = axis == 1
        case "ReverseSequence":
            works = axis == call.number("time_axis", 0)
        case "RNN" | "GRU" | "LSTM":
            works = axis != (0 if call.number("layout", 0) else 1)
        case "Conv" | "ConvInteger" | "QLinearConv" | "ConvTranspose" | "DeformConv":
            kernel = call.inputs[3 if name == "QLinearConv" else 1].shapes
            works = axis == 1 or (axis > 1 and (kernel is None or kernel[0][axis] != 1))
        case "MaxPool" | "AveragePool" | "LpPool":
            kernel_shape = call.numbers("kernel_shape")
            works = axis > 1 and (kernel_shape is None or kernel_shape[axis - 2] != 1)
        case "Slice":
            works = _turns_around(call, axis)
    return "works along the rows of a batch" if works else ""


def _contracts(call: _Call) -> str:
    left, right = call.inputs[0], call.inputs[3 if call.name == "QLinearMatMul" else 1]
    words = "adds up over the rows of a batch"
    if left.from_rows and left.axis is not None and left.rank is not None:
        contracted = 0 if call.number("transA", 0) else left.rank - 1
        if left.axis == contracted:
            return words
    if right.from_rows and right.axis is not None and right.rank is not None:
        contracted = right.rank - 1 if call.number("transB", 0) else max(right.rank - 2, 0)
        if right.axis == contracted:
            return words
    return ""


def _einsum_contracts(call: _Call) -> str:
    equation = call.attributes["equation"].s.decode().replace(" ", "")
    if "." in equation or "->" not in equation:
        return ""
    terms, result = equation.split("->")
    for term, value in zip(terms.split(","), call.inputs, strict=False):
        if value.from_rows and value.axis is not None and term[value.axis] not in result:
            return "adds up over the rows of a batch"
    return ""


def _turns_around(call: _Call, axis: int) -> bool:
    steps = call.numbers("steps", 4)
    axes = call.numbers("axes", 3)
    if not steps:
        return False
    rank = call.first.rank or 0
    along = range(len(steps)) if axes is None else [each % rank for each in axes]
    return any(each == axis and step < 0 for each, step in zip(along, steps, strict=False))


def _size_in_numbers(call: _Call) -> str:
    """Say that a number of rows enters a calculation; empty if none does."""
    if call.name not in ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Mod"):
        return ""
    for value in call.inputs:
        one, other = value.known
        if (
            not value.from_rows
            and one is not None
            and other is not None
            and one.dtype.kind == "f"
            and one.shape == other.shape
            and not np.array_equal(one, other)
        ):
            return "takes the number of rows in a batch into account"
    return ""


def _is_linear(call: _Call) -> bool:
    """Whether an operator only adds, scales or moves the numbers that grow with the batch, or makes a shape of them.

    Then what holds at two sizes holds at all sizes. A comparison may have another result at a third one.
    """
    growing = [
        position
        for position, value in enumerate(call.inputs)
        if not value.from_rows and not _is_alike(value)
    ]
    if call.name == "Cast":
        return not growing or call.number("to", 0) in _WIDE_TYPES
    return (
        len(growing) <= 1
        if call.name == "Mul"
        else _LINEAR.get(call.name, frozenset()) >= {*growing}
    )


def _is_alike(value: _Value) -> bool:
    """Whether the two contents are the same, or consist of the same number."""
    one, other = value.known
    if one is None or other is None or np.array_equal(one, other):
        return True
    return bool(
        one.size and other.size and (one == other.flat[0]).all() and (other == one.flat[0]).all()
    )


def _numbers_rows(call: _Call) -> bool:
    """Whether a value that does not come from rows may say another thing at each place of the batch."""
    if call.name in ("Expand", "Reshape", "Tile"):
        return False
    for name, value in zip(call.node.input, call.inputs, strict=True):
        if not name or value.from_rows:
            continue
        if value.shapes is None:
            return True
        contents = [each for each in value.known if each is not None]
        alike = len(contents) == len(_BATCHES) and all(
            (each == each.flat[0]).all() for each in contents if each.size
        )
        if _batch_axes(value.shapes) and not alike:
            return True
    return False


def _reshaped(before: _Value, after: _Value, axis: int) -> int | None:
    """How many batches lie one after the other in a reshaped value's dimension; None if rows are torn apart."""
    shapes, new = before.shapes, after.shapes
    if shapes is None or new is None or before.axis is None:
        return None
    batch = _BATCHES[0]
    # Elements are laid out row by row, so whatever lay before a whole batch must lie before it still.
    ahead, ahead_new = math.prod(shapes[0][: before.axis]) * before.outer, math.prod(new[0][:axis])
    outer, rest = divmod(ahead, ahead_new)
    return None if rest or new[0][axis] % (outer * batch) else outer


def _concatenated(call: _Call, axis: int, outer: int) -> int | None:
    if call.axis(1) != axis:
        return outer
    shapes = {each.shapes for each in call.inputs}
    return outer * len(call.inputs) if len(shapes) == 1 and outer == 1 else None


def _split(call: _Call, axis: int, outer: int) -> int | None:
    if call.axis(0) != axis:
        return outer
    return 1 if len(call.node.output) == outer else None


def _tiled(call: _Call, axis: int, outer: int) -> int | None:
    repeats = call.numbers("repeats", 1)
    return None if repeats is None else outer * repeats[axis]


def _sliced(call: _Call, axis: int, outer: int) -> int | None:
    # A slice along the batch may be one of several batches in a dimension, or half of each.
    before = call.first.shapes
    return outer if before is not None and call.first.axis == axis and _keeps(call, axis) else None


def _keeps(call: _Call, axis: int) -> bool:
    """Whether a slice leaves the dimension of the batch alone."""
    axes = call.numbers("axes", 3)
    rank = call.first.rank or 0
    if axes is not None and axis not in [each % rank for each in axes]:
        return True
    starts = call.numbers("starts", 1)
    along = list(range(rank)) if axes is None else [each % rank for each in axes]
    if starts is None or axis not in along or starts[along.index(axis)] != 0:
        return False
    steps = call.numbers("steps", 4)
    if steps and steps[along.index(axis)] != 1:
        return False
    ends = call.numbers("ends", 2)
    return ends is not None and ends[along.index(axis)] > _BATCHES[1] * _MOST_KNOWN


def _gathered(call: _Call, axis: int, outer: int) -> int | None:
    # Rows taken by number: which ones, only a run can tell.
    value = call.first
    return None if value.from_rows and value.axis == call.axis(0) else outer


def _elements_gathered(call: _Call, axis: int, outer: int) -> int | None:
    return None if call.axis(0) == axis else outer


def _nd_gathered(call: _Call, axis: int, outer: int) -> int | None:
    return outer if not call.first.from_rows or call.number("batch_dims", 0) > axis else None


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OUTER: dict[str, Callable[[_Call, int, int], int | None]] = {
    "Concat": _concatenated,
    "Split": _split,
    "Tile": _tiled,
    "Slice": _sliced,
    "Gather": _gathered,
    "GatherElements": _elements_gathered,
    "ScatterElements": _elements_gathered,
    "GatherND": _nd_gathered,
}

_RANDOM = {
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
}
_ONE_SCALE = "takes one scale from all rows of a batch"
#: Operators that look at a whole tensor, and what they do.
_STATISTICS = {
    "DynamicQuantizeLinear": _ONE_SCALE,
    "DynamicQuantizeMatMul": _ONE_SCALE,
    "DynamicQuantizeLSTM": _ONE_SCALE,
    "Unique": "compares all rows of a batch",
}
#: What these give is ordered or selected by content; where a row then is, only a run can tell.
_OPEN = {"NonZero", "Compress", "NonMaxSuppression", "ScatterND", "EyeLike", "SequenceAt"}
#: Operators that take the elements in the order in which they lie.
_LAYOUT = {"Reshape", "Flatten", "Squeeze", "Unsqueeze"}
#: Operators whose results are the numbers of their first input.
_SAME_NUMBERS = {*_LAYOUT, "Identity", "Cast", "Transpose", "Expand", "Slice", "Split", "Tile"}
#: The shape of the first output is that of the first input. These have no shape inference in ONNX.
_SAME_SHAPE = _names(
    """
    BiasGelu FastGelu QuickGelu SkipLayerNormalization SkipSimplifiedLayerNormalization
    QLinearSigmoid QLinearLeakyRelu QLinearSoftmax Normalizer Scaler Imputer Binarizer
    LabelEncoder
    """
)
_ROW_BY_ROW_ML = _names(
    """
    TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor SVMClassifier SVMRegressor
    LinearClassifier LinearRegressor Normalizer Scaler Imputer Binarizer FeatureVectorizer
    OneHotEncoder
    """
)
_ELEMENTWISE = _names(
    """
    Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr
    BitwiseXor Cast CastLike Ceil Celu Clip Cos Cosh DequantizeLinear Div Dropout Elu Equal
    Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN
    LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow
    QuantizeLinear Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt
    Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor LabelEncoder
    """
)
_OTHERS = _names(
    """
    ArgMax ArgMin AveragePool BatchNormalization Conv ConvInteger ConvTranspose CumSum
    DepthToSpace Einsum Expand GRU Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool
    GroupNormalization Hardmax InstanceNormalization LRN LSTM LayerNormalization LogSoftmax
    LpNormalization LpPool MatMul MatMulInteger MaxPool MeanVarianceNormalization OneHot Pad
    QLinearConv QLinearMatMul RMSNormalization RNN ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
    Resize ReverseSequence Softmax SpaceToDepth TopK Transpose Trilu Upsample
    """
)
#: Operators whose rows stay apart when no rule above says otherwise.
_RULED = _ELEMENTWISE | _LAYOUT | _ROW_BY_ROW_ML | _OUTER.keys() | _OTHERS
#: The inputs that may grow with the batch where the result then grows likewise, or is a shape.
_LINEAR: dict[str, frozenset[int]] = {
    **dict.fromkeys(("Concat", "Sum"), frozenset(range(_MOST_KNOWN))),
    **dict.fromkeys(("Add", "Expand", "Reshape", "Sub"), frozenset({0, 1})),
    **dict.fromkeys(
        _names("ConstantOfShape Flatten Gather Identity Neg Shape Size Slice"), frozenset({0})
    ),
    "Resize": frozenset({3}),
    **dict.fromkeys(_names("Split Squeeze Transpose Unsqueeze"), frozenset({0})),
}
#: Every size of a batch has its own number in these.
_WIDE_TYPES = {TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE}
_COARSE = {
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E5M2,
}


# --- values ----------------------------------------------------------------------------------------


def _drops_out(call: _Call) -> bool:
    if call.name != "Dropout" or len(call.inputs) < 3:
        return False
    training = call.inputs[2].known[0]
    return training is not None and bool(training.reshape(-1)[0])


def _constant(tensor: TensorProto) -> _Value:
    kind = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    content = numpy_helper.to_array(tensor) if math.prod(tensor.dims) <= _MOST_KNOWN else None
    return _Value((kind,) * len(_BATCHES), (content,) * len(_BATCHES))


def _unknown(inputs: Sequence[_Value], name: str) -> _Value:
    mixed = next((each.mixed for each in inputs if each.mixed), "")
    return _Value(from_rows=any(each.from_rows for each in inputs), mixed=mixed, open_at=name)


def _joined(one: _Value, other: _Value, name: str) -> _Value:
    """What holds of a value that may be either."""
    from_rows = one.from_rows or other.from_rows
    mixed = one.mixed or other.mixed
    opened = one.open_at or other.open_at
    same = one.shapes == other.shapes
    axes = {each.axis for each in (one, other) if each.from_rows}
    outers = {each.outer for each in (one, other) if each.from_rows}
    agreed = same and len(axes) <= 1 and len(outers) <= 1 and None not in axes
    if from_rows and not agreed:
        return _Value(from_rows=True, mixed=mixed, open_at=opened or name)
    return _Value(
        one.types if same else (None,) * len(_BATCHES),
        from_rows=from_rows,
        axis=axes.pop() if axes else None,
        outer=outers.pop() if outers else 1,
        mixed=mixed,
        open_at=opened,
    )


def _stacked(value: _Value, name: str) -> _Value:
    """What holds of a value's copies from all turns of a loop, one after the other in a new first dimension."""
    if value.axis is None:
        return replace(value, types=(None,) * len(_BATCHES), known=(None,) * len(_BATCHES))
    shapes = value.shapes
    types = tuple(
        _open_first(kind) if shapes is not None and kind is not None else None
        for kind in value.types
    )
    # The number of turns is not known, so neither are the shapes; the place of the batch is.
    return replace(value, types=types, axis=value.axis + 1, open_at=value.open_at or name)


def _open_first(kind: onnx.TypeProto) -> onnx.TypeProto:
    shape = [None, *(each.dim_value for each in kind.tensor_type.shape.dim)]
    return helper.make_tensor_type_proto(kind.tensor_type.elem_type, shape)


def _unstacked(value: _Value, along: int) -> _Value:
    """What holds of one piece of a value that a scan cuts along a dimension."""
    types: list[onnx.TypeProto | None] = []
    for kind in value.types:
        shape = _shape(kind)
        if kind is None or shape is None:
            types.append(None)
            continue
        rest = [*shape[:along], *shape[along + 1 :]]
        types.append(helper.make_tensor_type_proto(kind.tensor_type.elem_type, rest))
    axis = value.axis
    if axis is not None and axis > along:
        axis -= 1
    return replace(value, types=tuple(types), known=(None,) * len(_BATCHES), axis=axis)


def _batch_axes(shapes: tuple[Shape, ...]) -> list[int]:
    one, other = shapes
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def _shape(kind: onnx.TypeProto | None) -> Shape | None:
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    dimensions = kind.tensor_type.shape.dim
    if not all(each.HasField("dim_value") for each in dimensions):
        return None
    return tuple(each.dim_value for each in dimensions)


def _type_of(content: _Known) -> onnx.TypeProto:
    kind = helper.np_dtype_to_tensor_dtype(content.dtype)
    return helper.make_tensor_type_proto(kind, content.shape)


def _array(found: object) -> object:
    return np.asarray(found) if isinstance(found, np.generic) else found


def _alive(graph: onnx.GraphProto) -> set[int]:
    """The nodes that an output needs."""
    wanted = {value.name for value in graph.output}
    alive = set()
    for index in range(len(graph.node) - 1, -1, -1):
        node = graph.node[index]
        if wanted.intersection(node.output):
            alive.add(index)
            wanted.update(_names_read(node))
    return alive


def _names_read(node: NodeProto) -> set[str]:
    names = set(node.input)
    for attribute in node.attribute:
        for subgraph in (attribute.g, *attribute.graphs):
            for inner in subgraph.node:
                names |= _names_read(inner)
            names.update(value.name for value in subgraph.output)
    return names
