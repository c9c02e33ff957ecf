"""Writing an ONNX graph node by node, with shapes known and weights drawn last.

A weight is first only declared: name, shape and distribution. So an architecture's size is known
without drawing a number (`weight_bytes`), and every weight has a generator of its own, seeded by
(seed, position), so that one graph and one seed always give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# The newest operator set that every runtime in use reads, and the file version that belongs to it.
OPSET = 17
IR_VERSION = 8

#: The one symbolic dimension of every model here.
BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor flowing through the graph."""

    name: str
    #: Shape of one row; the batch dimension comes before it.
    shape: tuple[int, ...]
    datatype: int = TensorProto.FLOAT


@dataclass(frozen=True, slots=True)
class Weight:
    """A float32 initializer, normally distributed."""

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float

    def draw(self, generator: np.random.Generator) -> onnx.TensorProto:
        """Draw the numbers."""
        values = generator.standard_normal(self.shape, dtype=np.float32)
        values *= np.float32(self.std)
        values += np.float32(self.mean)
        return numpy_helper.from_array(values, self.name)


class Graph:
    """A graph being written. Names are counted, so they are the same in every run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._inputs: list[Value] = []
        self._outputs: list[Value] = []
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[Weight] = []

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, drawn or not."""
        return sum(4 * prod(weight.shape) for weight in self._weights)

    @property
    def operators(self) -> frozenset[str]:
        """ONNX's names of the operators so far."""
        return frozenset(node.op_type for node in self._nodes)

    def input(self, name: str, shape: Sequence[int], datatype: int = TensorProto.FLOAT) -> Value:
        """Declare an input; `shape` is that of one row."""
        value = Value(name, tuple(shape), datatype)
        self._inputs.append(value)
        return value

    def weight(self, shape: Sequence[int], *, std: float, mean: float = 0.0) -> str:
        """Declare a weight and return its name."""
        weight = Weight(f"w{len(self._weights)}", tuple(shape), mean, std)
        self._weights.append(weight)
        return weight.name

    def op(
        self,
        op_type: str,
        *inputs: Value | str,
        shape: Sequence[int],
        datatype: int = TensorProto.FLOAT,
        **attributes: int | float | str | Sequence[int],
    ) -> Value:
        """Append a node of one output; `shape` is that of one row of it."""
        value = Value(f"t{len(self._nodes)}", tuple(shape), datatype)
        names = [each if isinstance(each, str) else each.name for each in inputs]
        node = helper.make_node(op_type, names, [value.name], name=f"n{len(self._nodes)}")
        node.attribute.extend(helper.make_attribute(*item) for item in attributes.items())
        self._nodes.append(node)
        return value

    def halves(self, x: Value) -> tuple[Value, Value]:
        """Split into two along the first dimension of a row."""
        shape = (x.shape[0] // 2, *x.shape[1:])
        parts = [Value(f"t{len(self._nodes)}{half}", shape, x.datatype) for half in "ab"]
        names = [part.name for part in parts]
        node = helper.make_node("Split", [x.name], names, name=f"n{len(self._nodes)}", axis=1)
        self._nodes.append(node)
        return parts[0], parts[1]

    def output(self, value: Value, name: str) -> None:
        """Make a node's output an output of the graph, under this name."""
        node = next(node for node in self._nodes if node.output[0] == value.name)
        for other in self._nodes:
            other.input[:] = [name if each == value.name else each for each in other.input]
        node.output[0] = name
        self._outputs.append(Value(name, value.shape, value.datatype))

    def model(self, *, seed: int) -> onnx.ModelProto:
        """Draw the weights and return the whole model.

        Raises onnx.checker.ValidationError if the graph is not a legal one (our bug).
        """
        initializers = [
            weight.draw(np.random.default_rng([seed, index]))
            for index, weight in enumerate(self._weights)
        ]
        graph = helper.make_graph(
            self._nodes,
            self.name,
            [_info(value) for value in self._inputs],
            [_info(value) for value in self._outputs],
            initializers,
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="clockwright.modelzoo",
        )
        onnx.checker.check_model(model)
        return model


def _info(value: Value) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, value.datatype, [BATCH, *value.shape])
