"""MobileNet v1 and the trunk of v3 (Howard et al., 2017 and 2019): depthwise and 1x1 convolutions."""

from __future__ import annotations

from math import sqrt

from modelzoo.graph import Graph, Value
from modelzoo.layers import add, conv, conv_relu, dense, global_pool, relu, squeeze_excite

MULTIPLIERS = (1.0, 0.75, 0.5, 0.25)

#: Channels and stride of each pair.
_PAIRS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *[(512, 1)] * 5,
    (1024, 2),
    (1024, 1),
)


def classifier(name: str, multiplier: float) -> Graph:
    """An ImageNet classifier: (3, 224, 224) to 1000 logits; `multiplier` scales every width."""
    graph = Graph(name)
    x = trunk(graph, graph.input("input", (3, 224, 224)), multiplier)
    graph.output(dense(graph, global_pool(graph, x), 1000), "output")
    return graph


def trunk(graph: Graph, x: Value, multiplier: float) -> Value:
    """From (3, height, width) to features 32 times smaller."""
    x = conv_relu(graph, x, int(32 * multiplier), 3, stride=2)
    for channels, stride in _PAIRS:
        x = conv_relu(graph, x, x.shape[0], 3, stride=stride, groups=x.shape[0])
        x = conv_relu(graph, x, int(channels * multiplier), 1)
    return x


# v3-large, each block: kernel, channels within, channels out, squeeze and excite, hard swish (else
# ReLU), stride.
_V3_BLOCKS = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


def trunk_v3(graph: Graph, x: Value) -> Value:
    """v3-large from (3, height, width) to 960 channels, 32 times smaller."""
    x = _activated(graph, conv(graph, x, 16, 3, stride=2), hard_swish=True)
    for kernel, inner, channels, gated, hard_swish, stride in _V3_BLOCKS:
        y = x
        if inner != x.shape[0]:
            y = _activated(graph, conv(graph, y, inner, 1), hard_swish=hard_swish)
        y = conv(graph, y, inner, kernel, stride=stride, groups=inner)
        y = _activated(graph, y, hard_swish=hard_swish)
        if gated:
            y = squeeze_excite(graph, y, ratio=4)
        residual = stride == 1 and channels == x.shape[0]
        y = conv(graph, y, channels, 1, gain=1.0 / sqrt(len(_V3_BLOCKS)) if residual else 1.0)
        x = add(graph, x, y) if residual else y
    return _activated(graph, conv(graph, x, 960, 1), hard_swish=True)


def _activated(graph: Graph, x: Value, *, hard_swish: bool) -> Value:
    return graph.op("HardSwish", x, shape=x.shape) if hard_swish else relu(graph, x)
