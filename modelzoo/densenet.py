"""DenseNet (Huang et al., 2017): every layer sees the outputs of all before it in its block."""

from __future__ import annotations

from modelzoo.graph import Graph, Value
from modelzoo.layers import (
    average_pool,
    concat,
    conv,
    conv_relu,
    dense,
    global_pool,
    max_pool,
    norm,
    relu,
)

#: By depth: channels of the stem, channels that each layer adds, layers of each block.
VARIANTS = {
    121: (64, 32, (6, 12, 24, 16)),
    161: (96, 48, (6, 12, 36, 24)),
    169: (64, 32, (6, 12, 32, 32)),
    201: (64, 32, (6, 12, 48, 32)),
}


def classifier(name: str, depth: int) -> Graph:
    """An ImageNet classifier: (3, 224, 224) to 1000 logits."""
    stem, growth, blocks = VARIANTS[depth]
    graph = Graph(name)
    x = conv_relu(graph, graph.input("input", (3, 224, 224)), stem, 7, stride=2)
    x = max_pool(graph, x, 3, stride=2, padding=1)
    for index, num_layers in enumerate(blocks):
        if index:
            x = conv(graph, relu(graph, norm(graph, x)), x.shape[0] // 2, 1, bias=False)
            x = average_pool(graph, x, 2, stride=2)
        for _ in range(num_layers):
            x = concat(graph, x, _layer(graph, x, growth))
    x = global_pool(graph, relu(graph, norm(graph, x)))
    graph.output(dense(graph, x, 1000), "output")
    return graph


def _layer(graph: Graph, x: Value, growth: int) -> Value:
    y = conv_relu(graph, relu(graph, norm(graph, x)), 4 * growth, 1)
    return conv(graph, y, growth, 3, bias=False)
