"""Key points of a person: a classifier's trunk and a head that draws one map per joint.

Both heads take features of 8x6 to 17 maps of 64x48. Names and heads are GluonCV's.
"""

from __future__ import annotations

from collections.abc import Callable

from modelzoo.graph import Graph, Value
from modelzoo.layers import conv, conv_relu, deconv, relu

_INPUT = (3, 256, 192)
_JOINTS = 17

Trunk = Callable[[Graph, Value], Value]


def simple_pose(name: str, trunk: Trunk) -> Graph:
    """Head of three transposed convolutions (Xiao et al., 2018)."""
    graph = Graph(name)
    x = trunk(graph, graph.input("input", _INPUT))
    for _ in range(3):
        x = relu(graph, deconv(graph, x, 256))
    graph.output(conv(graph, x, _JOINTS, 1, gain=1.0), "output")
    return graph


def mobile_pose(name: str, trunk: Trunk) -> Graph:
    """Head that moves channels into space three times, which costs no weights."""
    graph = Graph(name)
    x = conv_relu(graph, trunk(graph, graph.input("input", _INPUT)), 256, 1)
    for channels in (512, 256, 128):
        x = conv_relu(graph, x, channels, 3)
        _, height, width = x.shape
        x = graph.op(
            "DepthToSpace",
            x,
            shape=(channels // 4, 2 * height, 2 * width),
            blocksize=2,
            mode="CRD",
        )
    graph.output(conv(graph, x, _JOINTS, 1, bias=False, gain=1.0), "output")
    return graph
