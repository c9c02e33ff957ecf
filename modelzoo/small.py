"""Small models for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from modelzoo.graph import Graph
from modelzoo.layers import RELU_GAIN, conv_relu, dense, global_pool, max_pool, relu


def mlp(name: str, sizes: Sequence[int]) -> Graph:
    """Dense layers with ReLU between them: (sizes[0],) to (sizes[-1],)."""
    graph = Graph(name)
    x = graph.input("input", (sizes[0],))
    for units in sizes[1:-1]:
        x = relu(graph, dense(graph, x, units, gain=RELU_GAIN))
    graph.output(dense(graph, x, sizes[-1]), "output")
    return graph


def tiny_conv(name: str) -> Graph:
    """Two convolutions and a dense layer, 5.6 kB of weights: (1, 8, 8) to 10 logits."""
    graph = Graph(name)
    x = conv_relu(graph, graph.input("input", (1, 8, 8)), 8, 3)
    x = conv_relu(graph, max_pool(graph, x, 2, stride=2), 16, 3)
    graph.output(dense(graph, global_pool(graph, x), 10), "output")
    return graph


def echo(name: str, size: int) -> Graph:
    """Gives back its input, (size,), bit for bit, and is nearly free to run.

    A leaky ReLU whose slope below zero is a weight of exactly 1. Unlike an Identity, or a
    multiplication by 1, no runtime removes it, so the model has a weight and a kernel as others do.
    """
    graph = Graph(name)
    x = graph.input("input", (size,))
    slope = graph.weight((1,), mean=1.0, std=0.0)
    graph.output(graph.op("PRelu", x, slope, shape=(size,)), "output")
    return graph


def two_by_two(name: str) -> Graph:
    """Two inputs and two outputs of differing datatypes, for the protocol.

    `sum` (FP32 [3]) is `a` (FP32 [3]) plus the total of `b` (INT64 [2]); `doubled` (INT64 [2]) is
    `b` twice. The one weight is the two ones that total `b`.
    """
    graph = Graph(name)
    a = graph.input("a", (3,))
    b = graph.input("b", (2,), TensorProto.INT64)
    as_float = graph.op("Cast", b, shape=(2,), to=TensorProto.FLOAT)
    ones = graph.weight((2, 1), mean=1.0, std=0.0)
    total = graph.op("MatMul", as_float, ones, shape=(1,))
    graph.output(graph.op("Add", a, total, shape=(3,)), "sum")
    graph.output(graph.op("Add", b, b, shape=(2,), datatype=TensorProto.INT64), "doubled")
    return graph
