"""DLA-34, deep layer aggregation (Yu et al., 2018): blocks in trees whose roots join all they hold.

As in GluonCV, the classifier sees the mean of each channel of all six levels, not of the last one only;
without that the weights would be 3 % smaller than Table 1 says.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from modelzoo.graph import Graph, Value
from modelzoo.layers import (
    add,
    concat,
    conv,
    conv_relu,
    dense,
    global_pool,
    max_pool,
    relu,
)

_STEM = (16, 16, 32)
# Channels of the levels that are trees, and how many trees are nested in each.
_LEVELS = ((64, 1), (128, 2), (256, 2), (512, 1))
# Gain of a block's last convolution. Residual blocks follow one another through all the levels.
_GAIN = 1.0 / sqrt(2 * sum(1 << (depth - 1) for _, depth in _LEVELS))


def classifier(name: str) -> Graph:
    """An ImageNet classifier: (3, 224, 224) to 1000 logits."""
    graph = Graph(name)
    x = conv_relu(graph, graph.input("input", (3, 224, 224)), _STEM[0], 7)
    means = []
    for channels, stride in zip(_STEM[1:], (1, 2), strict=True):
        x = conv_relu(graph, x, channels, 3, stride=stride)
        means.append(global_pool(graph, x))
    for level, (channels, depth) in enumerate(_LEVELS):
        # From the second of them on, a level's root sees its own input as well.
        x = _tree(graph, x, channels, depth, stride=2, joins_input=level > 0, joined=())
        means.append(global_pool(graph, x))
    graph.output(dense(graph, concat(graph, *means), 1000), "output")
    return graph


def _tree(
    graph: Graph,
    x: Value,
    channels: int,
    depth: int,
    *,
    stride: int,
    joins_input: bool,
    joined: Sequence[Value],
) -> Value:
    """Two trees one after the other, or at depth 1 two blocks and a root that joins them.

    The first block has the stride. `joined` are further inputs of the last root, which with `joins_input` sees `x`,
    made as small as the output.
    """
    below = max_pool(graph, x, stride, stride=stride) if stride > 1 else x
    if joins_input:
        joined = (*joined, below)
    if depth > 1:
        first = _tree(graph, x, channels, depth - 1, stride=stride, joins_input=False, joined=())
        return _tree(
            graph, first, channels, depth - 1, stride=1, joins_input=False, joined=(*joined, first)
        )
    shortcut = below if x.shape[0] == channels else conv(graph, below, channels, 1, gain=1.0)
    first = _block(graph, x, shortcut, channels, stride)
    second = _block(graph, first, first, channels, 1)
    return conv_relu(graph, concat(graph, second, first, *joined), channels, 1)


def _block(graph: Graph, x: Value, shortcut: Value, channels: int, stride: int) -> Value:
    y = conv(graph, conv_relu(graph, x, channels, 3, stride=stride), channels, 3, gain=_GAIN)
    return relu(graph, add(graph, y, shortcut))
