"""A compiled graph as a list of torch calls; the caller says where the weights lie.

Values that the device computes lie on the device. Shapes, and values computed from shapes and constants alone, lie in
host memory, where an operator that needs numbers can read them without waiting. At a fixed batch size the host's values are the same in every run, so a run may be captured
as a CUDA graph, in which nothing may wait or be copied from ordinary host memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import onnx
import torch
from onnx import helper, numpy_helper

from clockwright.errors import ModelError
from worker.engines.torch_operators import OPERATORS, STATIC, TORCH_TYPES, Node, Outputs
from worker.models.precision import Precision

Tensor: TypeAlias = torch.Tensor

#: The graph property that names the precision to run in, which is thereby part of the architecture.
PRECISION_KEY = "clockwright.precision"
#: The graph property of a graph that one engine alone can run; names the engine.
ENGINE_KEY = "clockwright.engine"

# What lies on the host whatever it is made from: at a fixed batch size a shape is the same in every run.
_FROM_SHAPES = frozenset({"Shape", "Size"})


class Program:
    """One architecture, for any batch size and any weights. Owns nothing but constants."""

    def __init__(self, graph: bytes, device: torch.device, *, join: bool = True) -> None:
        """Read a compiled graph.

        Args:
            graph: a graph made by `worker.compiling.for_torch`: canonical names, also in subgraphs.
            device: the device that the graph will run on.
            join: join convolutions with the operators behind them (`fuse`); experiments.gpu measures both.

        Raises:
            ModelError: an operator is missing here, or the graph was compiled for another engine; says which.
        """
        model = onnx.ModelProto.FromString(graph)
        properties = {entry.key: entry.value for entry in model.metadata_props}
        self.precision = Precision(properties.get(PRECISION_KEY, Precision.FLOAT32.value))
        self._device = device
        self._float = torch.float16 if self.precision is Precision.FLOAT16 else torch.float32
        check_operators(model)
        if ENGINE_KEY in properties:
            raise ModelError(
                f"the graph was compiled for {properties[ENGINE_KEY]} alone, as torch refused it; a GPU with "
                "onnxruntime-gpu (clockwright[gpu-ort]) runs it in float32"
            )
        self._opset = max(
            entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")
        )
        self._inputs = [value.name for value in model.graph.input]
        self._outputs = {value.name: _torch_type(value) for value in model.graph.output}
        #: All constants by name, those of subgraphs included.
        self._constants: dict[str, Tensor] = {}
        nodes = self._read(model.graph)
        self.nodes = fuse(nodes, list(self._outputs)) if join else nodes
        self._last_used = _last_uses(self.nodes, keep=set(self._outputs))

    def run(
        self, inputs: Sequence[Tensor], weights: Mapping[str, Tensor], moved: dict[str, Tensor]
    ) -> list[Tensor]:
        """Run once.

        Args:
            inputs: a batch of each input, in the model's order and in its types, on the device.
            weights: the weights by their names in the graph, on the device.
            moved: host values that the device needs, by name. The first run fills it; all later runs of that
                batch size must get the same one.

        Returns:
            The outputs in the model's order and types; new tensors, or the inputs themselves.

        Raises:
            ModelError: the graph does something that the operators here cannot.
            RuntimeError: torch cannot run an operator.
        """
        values = _Values(self._device, dict(self._constants), dict(weights), moved)
        for name, tensor in zip(self._inputs, inputs, strict=False):
            is_plain = tensor.dtype is torch.float32
            values.device[name] = tensor.to(self._float) if is_plain else tensor
        for node, unneeded in zip(self.nodes, self._last_used, strict=True):
            _run_node(node, values)
            # Values that no later node reads make room for the rest.
            for name in unneeded:
                values.device.pop(name, None)
        return [values.on_device(name).to(kind) for name, kind in self._outputs.items()]

    def _read(self, graph: onnx.GraphProto) -> list[Node]:
        """Read the nodes of a graph or subgraph, and keep its constants."""
        self._constants |= {tensor.name: self._constant(tensor) for tensor in graph.initializer}
        nodes = []
        for node in graph.node:
            if node.op_type == "Constant":
                self._constants[node.output[0]] = self._constant_node(node)
            else:
                nodes.append(self._node(node))
        return nodes

    def _node(self, node: onnx.NodeProto) -> Node:
        attributes: dict[str, Any] = {}
        inputs = list(node.input)
        for attribute in node.attribute:
            value = helper.get_attribute_value(attribute)
            if isinstance(value, onnx.GraphProto):
                value = Branch(self._read(value), [output.name for output in value.output])
                # A branch reads what lies around it.
                inputs += [name for inner in value.nodes for name in inner.inputs] + value.outputs
            attributes[attribute.name] = list(value) if isinstance(value, (list, tuple)) else value
        return Node(
            node.op_type, tuple(inputs), tuple(node.output), attributes, self._opset, self._float
        )

    def _constant(self, tensor: onnx.TensorProto) -> Tensor:
        if tensor.data_type not in TORCH_TYPES:
            kind = onnx.TensorProto.DataType.Name(tensor.data_type)
            raise ModelError(f"a constant is {kind}, which the torch engine cannot run")
        # torch wants to own memory that it may write to, so copy.
        value = torch.from_numpy(numpy_helper.to_array(tensor).copy())
        if value.dtype is not torch.float32 or self._float is torch.float32:
            return value
        # Cut off what is beyond half precision, as in weights (`worker.compiling.for_torch`).
        limits = torch.finfo(self._float)
        return value.clamp(limits.min, limits.max).to(self._float)

    def _constant_node(self, node: onnx.NodeProto) -> Tensor:
        attribute = node.attribute[0]
        value = helper.get_attribute_value(attribute)
        if attribute.name == "value":
            return self._constant(value)
        floats = attribute.name in ("value_float", "value_floats")
        if not floats and attribute.name not in ("value_int", "value_ints"):
            raise ModelError(
                f"operator Constant: attribute {attribute.name}, which the torch engine cannot run"
            )
        return torch.tensor(value, dtype=self._float if floats else torch.int64)


@dataclass(frozen=True, slots=True)
class Branch:
    """A subgraph, whose values have names of their own."""

    nodes: list[Node]
    outputs: list[str]


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of a run that are known so far, by name."""

    where: torch.device
    host: dict[str, Tensor]
    device: dict[str, Tensor]
    #: See `Program.run`.
    moved: dict[str, Tensor]

    def on_device(self, name: str) -> Tensor:
        """The value on the device, to which a host value is brought once for all runs."""
        if name in self.device:
            return self.device[name]
        if name not in self.moved:
            self.moved[name] = self.host[name].to(self.where)
        return self.moved[name]


def _run_node(node: Node, values: _Values) -> None:
    if node.op_type == "If":
        _run_branch(node, values)
        return
    host = values.host
    known = all(name in host for name in node.inputs if name)
    static = STATIC.get(node.op_type, ())
    arguments: list[Tensor | None] = []
    for position, name in enumerate(node.inputs):
        if position in static and name and name not in host:
            raise node.refuse(f"input {position} is computed from the model's inputs")
        on_host = known or position in static
        arguments.append((host[name] if on_host else values.on_device(name)) if name else None)
    results = _as_sequence(OPERATORS[node.op_type](node, *arguments))
    if len(results) < sum(map(bool, node.outputs)):
        raise node.refuse(f"{len(node.outputs)} outputs")
    place = host if known or node.op_type in _FROM_SHAPES else values.device
    place.update(zip(node.outputs, results, strict=False))


def _run_branch(node: Node, values: _Values) -> None:
    condition = values.host.get(node.inputs[0])
    if condition is None:
        raise node.refuse("the condition is computed from the model's inputs")
    branch: Branch = node.get("then_branch" if any(condition.reshape(-1)) else "else_branch")
    for inner in branch.nodes:
        _run_node(inner, values)
    for name, result in zip(node.outputs, branch.outputs, strict=True):
        place = values.host if result in values.host else values.device
        place[name] = place[result]


def check_operators(model: onnx.ModelProto) -> None:
    """Refuse a graph with operators that the torch engine does not have.

    Raises ModelError that names all of them, and says what helps.
    """
    unknown = {
        f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        for node in _nodes_in(model.graph)
        if node.domain not in ("", "ai.onnx")
        or (node.op_type not in OPERATORS and node.op_type not in ("Constant", "If"))
    }
    if unknown:
        raise ModelError(
            f"the torch engine has no operator {', '.join(sorted(unknown))}; "
            "onnxruntime-gpu (clockwright[gpu-ort]) may run it, in float32 on a GPU"
        )


def _nodes_in(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes of a graph and its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for subgraph in (attribute.g, *attribute.graphs):
                yield from _nodes_in(subgraph)


def fuse(nodes: Sequence[Node], outputs: Sequence[str]) -> list[Node]:
    """Join each convolution with the ReLU behind it, and with the addition between them if there is one.

    Batch normalisations were folded into the weights at compile time. Weights stay inputs, so they can
    still lie in pages.

    Args:
        nodes: the operations, in an order in which they can run.
        outputs: the names of values that must stay.
    """
    uses = Counter(name for node in nodes for name in node.inputs)
    uses.update(outputs)
    reader = {name: index for index, node in enumerate(nodes) for name in node.inputs}
    joined: dict[int, Node] = {}
    gone: set[int] = set()
    for index, node in enumerate(nodes):
        if node.op_type != "Conv" or len(node.inputs) < 3:
            continue
        chain = _chain(nodes, reader, uses, index)
        # Where two convolutions are added, one of them takes the addition along.
        if chain is None or gone.intersection(chain):
            continue
        other = [
            name
            for position in chain[1:-1]
            for name in nodes[position].inputs
            if name != node.outputs[0]
        ]
        # The joint node stands at the ReLU's place, where all its inputs have been computed.
        joined[chain[-1]] = replace(
            node,
            op_type="conv_add_relu",
            inputs=(*node.inputs, *other),
            outputs=nodes[chain[-1]].outputs,
        )
        gone.update(chain)
    return [joined.get(i, node) for i, node in enumerate(nodes) if i not in gone or i in joined]


def _chain(
    nodes: Sequence[Node], reader: Mapping[str, int], uses: Mapping[str, int], begin: int
) -> list[int] | None:
    """Find a convolution, the addition behind it if any, and a ReLU; None if others read between them.

    Returns their positions.
    """
    chain = [begin]
    for expected in ("Add", "Relu"):
        (result,) = nodes[chain[-1]].outputs
        if uses[result] != 1 or result not in reader:
            return None
        following = nodes[reader[result]]
        if following.op_type == "Relu" or following.op_type == expected:
            chain.append(reader[result])
        if following.op_type == "Relu":
            return chain
    return None


def _last_uses(nodes: Sequence[Node], *, keep: set[str]) -> list[list[str]]:
    """List for each node the values that no later node needs."""
    seen = set(keep)
    unneeded: list[list[str]] = []
    for node in reversed(nodes):
        names = {name for name in (*node.inputs, *node.outputs) if name} - seen
        seen |= names
        unneeded.append(sorted(names))
    return unneeded[::-1]


def _torch_type(value: onnx.ValueInfoProto) -> torch.dtype:
    number = value.type.tensor_type.elem_type
    if number not in TORCH_TYPES:
        kind = onnx.TensorProto.DataType.Name(number)
        raise ModelError(f"an output is {kind}, which the torch engine cannot run")
    return TORCH_TYPES[number]


def _as_sequence(outputs: Outputs) -> Sequence[Tensor]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs
