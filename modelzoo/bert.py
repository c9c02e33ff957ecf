"""BERT, a transformer encoder (Devlin et al., 2018), for rows of 128 tokens.

Tokens are numbers below `VOCABULARY`; every position attends to every other, so a row has no padding.
The position table has the 128 rows that are used, where the published one has 512.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from onnx import TensorProto

from modelzoo.graph import Graph, Value
from modelzoo.layers import add

VOCABULARY = 30_522
LENGTH = 128
_SEGMENTS = 2
_HEAD_WIDTH = 64
_BIAS_STD = 0.05
_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class BertVariant:
    """What sets one encoder apart from another."""

    layers: int
    #: Of a token's vector; a multiple of the 64 of one attention head.
    width: int


#: The published ones (Turc et al., 2019), by name.
VARIANTS = {
    "bert_tiny": BertVariant(2, 128),
    "bert_mini": BertVariant(4, 256),
    "bert_small": BertVariant(4, 512),
    "bert_medium": BertVariant(8, 512),
    "bert_base": BertVariant(12, 768),
}


def encoder(name: str, variant: BertVariant) -> Graph:
    """Tokens and their segments, INT64 (128,) each, to the first token's pooled vector, (width,)."""
    graph = Graph(name)
    width = variant.width
    tokens = graph.input("input", (LENGTH,), TensorProto.INT64)
    segments = graph.input("segment", (LENGTH,), TensorProto.INT64)
    x = add(graph, _embedding(graph, tokens, VOCABULARY, width), _positions(graph, segments, width))
    x = _norm(graph, x)
    for _ in range(variant.layers):
        x = _norm(graph, add(graph, x, _attention(graph, x)))
        inner = _gelu(graph, _linear(graph, x, 4 * width, gain=sqrt(2.0)))
        x = _norm(graph, add(graph, x, _linear(graph, inner, width)))
    zero = graph.op("Constant", shape=(), datatype=TensorProto.INT64, value_int=0)
    first = graph.op("Gather", x, zero, shape=(width,), axis=1)
    pooled = _linear(graph, first, width)
    graph.output(graph.op("Tanh", pooled, shape=(width,)), "output")
    return graph


def _embedding(graph: Graph, numbers: Value, rows: int, width: int) -> Value:
    table = graph.weight((rows, width), std=1.0)
    return graph.op("Gather", table, numbers, shape=(*numbers.shape, width), axis=0)


def _positions(graph: Graph, segments: Value, width: int) -> Value:
    x = _embedding(graph, segments, _SEGMENTS, width)
    return graph.op("Add", x, graph.weight((LENGTH, width), std=1.0), shape=x.shape)


def _attention(graph: Graph, x: Value) -> Value:
    """Each head's mean of the values, weighted by how well keys fit the query."""
    width = x.shape[-1]
    heads = width // _HEAD_WIDTH

    def split(y: Value, order: tuple[int, ...], shape: tuple[int, ...]) -> Value:
        apart = _reshape(graph, y, (LENGTH, heads, _HEAD_WIDTH))
        return graph.op("Transpose", apart, shape=shape, perm=list(order))

    by_head = (heads, LENGTH, _HEAD_WIDTH)
    query = split(_linear(graph, x, width), (0, 2, 1, 3), by_head)
    key = split(_linear(graph, x, width), (0, 2, 3, 1), (heads, _HEAD_WIDTH, LENGTH))
    value = split(_linear(graph, x, width), (0, 2, 1, 3), by_head)
    square = (heads, LENGTH, LENGTH)
    scores = graph.op("MatMul", query, key, shape=square)
    scores = graph.op("Div", scores, _scalar(graph, sqrt(_HEAD_WIDTH)), shape=square)
    shares = graph.op("Softmax", scores, shape=square, axis=-1)
    mixed = graph.op("MatMul", shares, value, shape=by_head)
    mixed = graph.op("Transpose", mixed, shape=(LENGTH, heads, _HEAD_WIDTH), perm=[0, 2, 1, 3])
    return _linear(graph, _reshape(graph, mixed, (LENGTH, width)), width)


def _linear(graph: Graph, x: Value, units: int, *, gain: float = 1.0) -> Value:
    size = x.shape[-1]
    shape = (*x.shape[:-1], units)
    weight = graph.weight((size, units), std=gain / sqrt(size))
    product = graph.op("MatMul", x, weight, shape=shape)
    return graph.op("Add", product, graph.weight((units,), std=_BIAS_STD), shape=shape)


def _norm(graph: Graph, x: Value) -> Value:
    width = x.shape[-1]
    scale = graph.weight((width,), mean=1.0, std=_BIAS_STD)
    shift = graph.weight((width,), std=_BIAS_STD)
    return graph.op("LayerNormalization", x, scale, shift, shape=x.shape, axis=-1, epsilon=_EPSILON)


def _gelu(graph: Graph, x: Value) -> Value:
    """Scale each number by the share of a normal distribution that lies below it."""
    scaled = graph.op("Div", x, _scalar(graph, sqrt(2.0)), shape=x.shape)
    error = graph.op("Erf", scaled, shape=x.shape)
    doubled = graph.op("Add", error, _scalar(graph, 1.0), shape=x.shape)
    product = graph.op("Mul", x, doubled, shape=x.shape)
    return graph.op("Mul", product, _scalar(graph, 0.5), shape=x.shape)


def _reshape(graph: Graph, x: Value, shape: tuple[int, ...]) -> Value:
    # 0 leaves the batch as it is.
    sizes = graph.op(
        "Constant", shape=(len(shape) + 1,), datatype=TensorProto.INT64, value_ints=[0, *shape]
    )
    return graph.op("Reshape", x, sizes, shape=shape)


def _scalar(graph: Graph, number: float) -> Value:
    return graph.op("Constant", shape=(), value_float=number)
