"""Xception with 65 layers, as segmentation networks use it: Table 1's size is not that of the original."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from modelzoo.graph import Graph, Value
from modelzoo.layers import add, conv, conv_relu, dense, global_pool, relu

_MIDDLE_BLOCKS = 16
# Gain of a block's last convolution. 20 blocks in all add to the sum.
_GAIN = 1.0 / sqrt(20)


def classifier(name: str) -> Graph:
    """An ImageNet classifier: (3, 224, 224) to 1000 logits."""
    graph = Graph(name)
    x = conv_relu(graph, graph.input("input", (3, 224, 224)), 32, 3, stride=2)
    x = conv_relu(graph, x, 64, 3)
    for channels in (128, 256, 728):
        x = _block(graph, x, (channels,) * 3, stride=2)
    for _ in range(_MIDDLE_BLOCKS):
        x = _block(graph, x, (728,) * 3, stride=1)
    x = _block(graph, x, (728, 1024, 1024), stride=2)
    for channels in (1536, 1536, 2048):
        x = _separable(graph, relu(graph, x), channels, stride=1, gain=sqrt(2.0))
    graph.output(dense(graph, global_pool(graph, relu(graph, x)), 1000), "output")
    return graph


def _block(graph: Graph, x: Value, widths: Sequence[int], *, stride: int) -> Value:
    """Three separable convolutions, a ReLU before each; the last has the stride."""
    y = x
    for index, channels in enumerate(widths):
        last = index == len(widths) - 1
        y = _separable(
            graph,
            relu(graph, y),
            channels,
            stride=stride if last else 1,
            gain=_GAIN if last else sqrt(2.0),
        )
    if stride != 1:
        x = conv(graph, x, widths[-1], 1, stride=stride, gain=1.0)
    return add(graph, x, y)


def _separable(graph: Graph, x: Value, channels: int, *, stride: int, gain: float) -> Value:
    x = conv(graph, x, x.shape[0], 3, stride=stride, groups=x.shape[0], gain=1.0)
    return conv(graph, x, channels, 1, gain=gain)
