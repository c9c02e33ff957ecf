"""ResNet and its relatives: v1 to v1s, v2, ResNeXt, SE-ResNeXt, ResNeSt, CIFAR and wide ResNets.

Names are GluonCV's. What the letters mean:

* v1: a bottleneck's stride is in its first 1x1; v1b: in its 3x3.
* v1c: v1b with three 3x3 convolutions (32, 32, 64) for the 7x7 stem; v1s: the same, 64, 64, 128.
* v1d: v1c with an average pool before a stage's 1x1 shortcut, which then has no stride.
* v2: normalisation and ReLU come before each convolution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

from onnx import TensorProto

from modelzoo.graph import Graph, Value
from modelzoo.layers import (
    RELU_GAIN,
    add,
    average_pool,
    conv,
    conv_relu,
    dense,
    global_pool,
    max_pool,
    norm,
    relu,
    split_attention,
    squeeze_excite,
)


@dataclass(frozen=True, slots=True)
class ResnetVariant:
    """Choices in which the residual networks differ."""

    #: Number of residual blocks in each stage.
    blocks: tuple[int, ...]
    #: A block is 1x1, 3x3 and 1x1 with four times as many channels out. Otherwise it is two 3x3.
    bottleneck: bool
    #: Normalise before, not after, each convolution.
    preactivation: bool = False
    #: Channels of the stem's 3x3 convolutions; empty: the stem is one 7x7 of 64.
    stem: tuple[int, ...] = ()
    #: Channels of the first stage. Each further stage has twice as many.
    width: int = 64
    #: A bottleneck's 3x3 has this share of its stage's width.
    inner_width: float = 1.0
    groups: int = 1
    stride_in_first: bool = False
    pooled_shortcut: bool = False
    squeeze_excite: bool = False
    #: Split attention stands in place of the 3x3; its stride is an average pool after it.
    split_attention: bool = False


_BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


def _variants() -> dict[str, ResnetVariant]:
    """All of ImageNet's, by name."""
    variants = {}
    for depth, blocks in _BLOCKS.items():
        v1b = ResnetVariant(blocks, bottleneck=depth >= 50)
        variants[f"resnet{depth}_v1"] = replace(v1b, stride_in_first=True)
        variants[f"resnet{depth}_v1b"] = v1b
        variants[f"resnet{depth}_v1c"] = replace(v1b, stem=(32, 32, 64))
        variants[f"resnet{depth}_v1d"] = replace(v1b, stem=(32, 32, 64), pooled_shortcut=True)
        variants[f"resnet{depth}_v1s"] = replace(v1b, stem=(64, 64, 128))
        variants[f"resnet{depth}_v2"] = replace(v1b, preactivation=True)
    # Their makers pruned these for speed and did not say how. These shares give Table 1's weight sizes.
    for name, share in (
        ("50_tuned_1.8x", 0.885),
        ("101_tuned_1.9x", 0.818),
        ("101_tuned_2.2x", 0.792),
    ):
        v1b = variants[f"resnet{name.split('_')[0]}_v1b"]
        variants[f"resnet{name}"] = replace(v1b, inner_width=share)
    for depth, groups in ((50, 32), (101, 32), (101, 64)):
        # 4d: each group has 4 channels in the first stage, where the width is 64.
        resnext = replace(
            variants[f"resnet{depth}_v1b"], groups=groups, inner_width=groups * 4 / 64
        )
        variants[f"resnext{depth}_{groups}x4d"] = resnext
        variants[f"se_resnext{depth}_{groups}x4d"] = replace(resnext, squeeze_excite=True)
    for depth, blocks in {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), **_BLOCKS}.items():
        if depth in (14, 26, 50, 101):
            variants[f"resnest{depth}"] = ResnetVariant(
                blocks,
                bottleneck=True,
                stem=(64, 64, 128) if depth == 101 else (32, 32, 64),
                pooled_shortcut=True,
                split_attention=True,
            )
    return variants


VARIANTS = _variants()


def classifier(name: str, variant: ResnetVariant, *, classes: int = 1000) -> Graph:
    """An ImageNet classifier: (3, 224, 224) to `classes` logits."""
    graph = Graph(name)
    x = trunk(graph, graph.input("input", (3, 224, 224)), variant)
    graph.output(dense(graph, global_pool(graph, x), classes), "output")
    return graph


def winograd_classifier(name: str, variant: ResnetVariant) -> Graph:
    """A v2 classifier as large as one whose 3x3 kernels are stored transformed for Winograd's algorithm.

    All four of Table 1's sizes follow when each stride-1 3x3 kernel is stored as 6x6 in the first
    stage and as 4x4 in the others. Here the kernels stay 3x3, since a runtime transforms them itself if
    it likes; the difference is a table of which each answer reads one row, chosen by its largest
    logit: as much to load, nearly free to run, and no runtime may drop or fold it.
    """
    graph = Graph(name)
    x = trunk(graph, graph.input("input", (3, 224, 224)), variant)
    logits = dense(graph, global_pool(graph, x), 1000)
    extra = 0
    for stage, num_blocks in enumerate(variant.blocks):
        # The first 3x3 of a stage has the stage's stride, in basic blocks and in bottlenecks.
        num_kernels = (1 if variant.bottleneck else 2) * num_blocks - (1 if stage else 0)
        extra += num_kernels * (variant.width << stage) ** 2 * ((16 if stage else 36) - 9)
    row = (round(extra / 1000),)
    best = graph.op("ArgMax", logits, shape=(), datatype=TensorProto.INT64, axis=1, keepdims=0)
    chosen = graph.op("Gather", graph.weight((1000, *row), std=1.0), best, shape=row, axis=0)
    shift = graph.op("ReduceMean", chosen, shape=(1,), axes=[1], keepdims=1)
    graph.output(graph.op("Add", logits, shift, shape=(1000,)), "output")
    return graph


def cifar_classifier(name: str, *, blocks_per_stage: int, width: int, preactivation: bool) -> Graph:
    """A CIFAR-10 classifier of three stages: (3, 32, 32) to 10 logits; the stem has 16 channels."""
    graph = Graph(name)
    variant = ResnetVariant(
        (blocks_per_stage,) * 3, bottleneck=False, preactivation=preactivation, width=width
    )
    x = graph.input("input", (3, 32, 32))
    x = conv(graph, x, 16, 3, bias=False) if preactivation else conv_relu(graph, x, 16, 3)
    x = _stages(graph, x, variant)
    graph.output(dense(graph, global_pool(graph, x), 10), "output")
    return graph


def trunk(graph: Graph, x: Value, variant: ResnetVariant) -> Value:
    """From (3, height, width) to the last stage's features, 32 times smaller."""
    if variant.stem:
        first, second, third = variant.stem
        x = conv_relu(graph, x, first, 3, stride=2)
        x = conv_relu(graph, x, second, 3)
        x = conv_relu(graph, x, third, 3)
    else:
        x = conv_relu(graph, x, 64, 7, stride=2)
    return _stages(graph, max_pool(graph, x, 3, stride=2, padding=1), variant)


def _stages(graph: Graph, x: Value, variant: ResnetVariant) -> Value:
    # Each block adds to the sum; scaled so, all of them together about double it. Without, the
    # outputs of a random ResNet-101 have a standard deviation near 500.
    gain = 1.0 / sqrt(sum(variant.blocks))
    for stage, num_blocks in enumerate(variant.blocks):
        for block in range(num_blocks):
            stride = 2 if stage and not block else 1
            width = variant.width << stage
            build = _preactivated_block if variant.preactivation else _block
            x = build(graph, x, variant, width, stride, gain)
    return relu(graph, norm(graph, x)) if variant.preactivation else x


def _block(
    graph: Graph, x: Value, variant: ResnetVariant, width: int, stride: int, gain: float
) -> Value:
    """Normalisation after each convolution, ReLU after the sum."""
    if variant.bottleneck:
        channels, inner = 4 * width, round(width * variant.inner_width)
        first, second = (stride, 1) if variant.stride_in_first else (1, stride)
        y = conv_relu(graph, x, inner, 1, stride=first)
        if variant.split_attention:
            y = split_attention(graph, y, inner)
            if second > 1:
                y = average_pool(graph, y, 3, stride=second, padding=1)
        else:
            y = conv_relu(graph, y, inner, 3, stride=second, groups=variant.groups)
        y = conv(graph, y, channels, 1, gain=gain)
    else:
        channels = width
        y = conv_relu(graph, x, width, 3, stride=stride)
        y = conv(graph, y, channels, 3, gain=gain)
    if variant.squeeze_excite:
        y = squeeze_excite(graph, y)
    return relu(graph, add(graph, _shortcut(graph, x, variant, channels, stride), y))


def _shortcut(graph: Graph, x: Value, variant: ResnetVariant, channels: int, stride: int) -> Value:
    if stride == 1 and x.shape[0] == channels:
        return x
    if variant.pooled_shortcut and stride > 1:
        x, stride = average_pool(graph, x, stride, stride=stride), 1
    return conv(graph, x, channels, 1, stride=stride, gain=1.0)


def _preactivated_block(
    graph: Graph, x: Value, variant: ResnetVariant, width: int, stride: int, gain: float
) -> Value:
    """Normalisation and ReLU before each convolution, nothing after the sum."""
    channels = 4 * width if variant.bottleneck else width
    y = relu(graph, norm(graph, x))
    if stride != 1 or x.shape[0] != channels:
        x = conv(graph, y, channels, 1, stride=stride, bias=False, gain=RELU_GAIN)
    if variant.bottleneck:
        y = conv_relu(graph, y, width, 1)
        y = conv_relu(graph, y, width, 3, stride=stride)
        y = conv(graph, y, channels, 1, bias=False, gain=gain)
    else:
        y = conv_relu(graph, y, width, 3, stride=stride)
        y = conv(graph, y, channels, 3, bias=False, gain=gain)
    return add(graph, x, y)
