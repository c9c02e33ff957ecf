"""SqueezeNet 1.0 and 1.1 (Iandola et al., 2016): few weights, no dense layer."""

from __future__ import annotations

from modelzoo.graph import Graph, Value
from modelzoo.layers import concat, conv_relu, global_pool, max_pool

#: By version: channels and kernel of the stem; then modules, a number being the squeezed channels
#: of a fire module (which expands them eightfold) and None a pool.
VARIANTS: dict[str, tuple[int, int, tuple[int | None, ...]]] = {
    "1.0": (96, 7, (None, 16, 16, 32, None, 32, 48, 48, 64, None, 64)),
    "1.1": (64, 3, (None, 16, 16, None, 32, 32, None, 48, 48, 64, 64)),
}


def classifier(name: str, version: str) -> Graph:
    """An ImageNet classifier: (3, 224, 224) to 1000 outputs, which are never negative."""
    channels, kernel, modules = VARIANTS[version]
    graph = Graph(name)
    x = conv_relu(graph, graph.input("input", (3, 224, 224)), channels, kernel, stride=2, padding=0)
    for squeezed in modules:
        x = (
            max_pool(graph, x, 3, stride=2, ceil=True)
            if squeezed is None
            else _fire(graph, x, squeezed)
        )
    x = global_pool(graph, conv_relu(graph, x, 1000, 1))
    graph.output(graph.op("Flatten", x, shape=(1000,), axis=1), "output")
    return graph


def _fire(graph: Graph, x: Value, squeezed: int) -> Value:
    x = conv_relu(graph, x, squeezed, 1)
    return concat(graph, conv_relu(graph, x, 4 * squeezed, 1), conv_relu(graph, x, 4 * squeezed, 3))
