"""GoogLeNet and Inception v3 (Szegedy et al., 2014 and 2015), with normalisation, without side heads."""

from __future__ import annotations

from modelzoo.graph import Graph, Value
from modelzoo.layers import average_pool, concat, conv_relu, dense, global_pool, max_pool

# Channels of a module's four branches: 1x1; 1x1 then 3x3; 1x1 then 3x3 (5x5 in the paper; Table 1's
# size is that of 3x3); pool then 1x1. None is a pool that halves height and width.
_GOOGLENET: tuple[tuple[int, ...] | None, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


def googlenet(name: str, *, size: int = 224, classes: int = 1000) -> Graph:
    """(3, size, size) to `classes` logits."""
    graph = Graph(name)
    x = conv_relu(graph, graph.input("input", (3, size, size)), 64, 7, stride=2)
    x = max_pool(graph, x, 3, stride=2, ceil=True)
    x = conv_relu(graph, conv_relu(graph, x, 64, 1), 192, 3)
    x = max_pool(graph, x, 3, stride=2, ceil=True)
    for module in _GOOGLENET:
        if module is None:
            x = max_pool(graph, x, 3, stride=2, ceil=True)
            continue
        one, two_in, two, three_in, three, pooled = module
        x = concat(
            graph,
            conv_relu(graph, x, one, 1),
            conv_relu(graph, conv_relu(graph, x, two_in, 1), two, 3),
            conv_relu(graph, conv_relu(graph, x, three_in, 1), three, 3),
            conv_relu(graph, max_pool(graph, x, 3, stride=1, padding=1), pooled, 1),
        )
    graph.output(dense(graph, global_pool(graph, x), classes), "output")
    return graph


def inception_v3(name: str, *, classes: int = 1000) -> Graph:
    """(3, 299, 299) to `classes` logits."""
    graph = Graph(name)
    x = conv_relu(graph, graph.input("input", (3, 299, 299)), 32, 3, stride=2, padding=0)
    x = conv_relu(graph, conv_relu(graph, x, 32, 3, padding=0), 64, 3)
    x = max_pool(graph, x, 3, stride=2)
    x = conv_relu(graph, conv_relu(graph, x, 80, 1), 192, 3, padding=0)
    x = max_pool(graph, x, 3, stride=2)
    for pooled in (32, 64, 64):
        x = _module_35(graph, x, pooled)
    x = _reduce_to_17(graph, x)
    for inner in (128, 160, 160, 192):
        x = _module_17(graph, x, inner)
    x = _reduce_to_8(graph, x)
    for _ in range(2):
        x = _module_8(graph, x)
    graph.output(dense(graph, global_pool(graph, x), classes), "output")
    return graph


def _chain(graph: Graph, x: Value, *convs: tuple[int, int, int]) -> Value:
    """Convolutions one after the other: channels, kernel's height and width."""
    for channels, height, width in convs:
        x = conv_relu(graph, x, channels, (height, width))
    return x


def _pooled(graph: Graph, x: Value, channels: int) -> Value:
    return conv_relu(graph, average_pool(graph, x, 3, stride=1, padding=1), channels, 1)


def _module_35(graph: Graph, x: Value, pooled: int) -> Value:
    return concat(
        graph,
        _chain(graph, x, (64, 1, 1)),
        _chain(graph, x, (48, 1, 1), (64, 5, 5)),
        _chain(graph, x, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
        _pooled(graph, x, pooled),
    )


def _reduce_to_17(graph: Graph, x: Value) -> Value:
    y = _chain(graph, x, (64, 1, 1), (96, 3, 3))
    return concat(
        graph,
        conv_relu(graph, x, 384, 3, stride=2, padding=0),
        conv_relu(graph, y, 96, 3, stride=2, padding=0),
        max_pool(graph, x, 3, stride=2),
    )


def _module_17(graph: Graph, x: Value, inner: int) -> Value:
    return concat(
        graph,
        _chain(graph, x, (192, 1, 1)),
        _chain(graph, x, (inner, 1, 1), (inner, 1, 7), (192, 7, 1)),
        _chain(graph, x, (inner, 1, 1), (inner, 7, 1), (inner, 1, 7), (inner, 7, 1), (192, 1, 7)),
        _pooled(graph, x, 192),
    )


def _reduce_to_8(graph: Graph, x: Value) -> Value:
    y = _chain(graph, x, (192, 1, 1))
    z = _chain(graph, x, (192, 1, 1), (192, 1, 7), (192, 7, 1))
    return concat(
        graph,
        conv_relu(graph, y, 320, 3, stride=2, padding=0),
        conv_relu(graph, z, 192, 3, stride=2, padding=0),
        max_pool(graph, x, 3, stride=2),
    )


def _module_8(graph: Graph, x: Value) -> Value:
    y = _chain(graph, x, (384, 1, 1))
    z = _chain(graph, x, (448, 1, 1), (384, 3, 3))
    return concat(
        graph,
        _chain(graph, x, (320, 1, 1)),
        *[_chain(graph, y, (384, *kernel)) for kernel in ((1, 3), (3, 1))],
        *[_chain(graph, z, (384, *kernel)) for kernel in ((1, 3), (3, 1))],
        _pooled(graph, x, 192),
    )
