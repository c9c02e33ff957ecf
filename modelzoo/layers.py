"""Layers of convolutional networks, in inference form.

A normalisation that follows a convolution is folded into it, so a convolution has a bias and the
normalisation is gone. One that comes before its convolution (with a ReLU between them) cannot be
folded and is a multiplication and an addition. Weights are drawn so that activations neither grow
nor vanish with depth: random networks of 150 layers must still give finite answers in half precision.
"""

from __future__ import annotations

from math import prod, sqrt

from modelzoo.graph import Graph, Value

# Gain that keeps the mean square through a ReLU, which halves it (He et al., 2015).
RELU_GAIN = sqrt(2.0)
_BIAS_STD = 0.05
_NORM_STD = 0.1


def conv(
    graph: Graph,
    x: Value,
    channels: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    padding: int | tuple[int, int] | None = None,
    groups: int = 1,
    bias: bool = True,
    gain: float = RELU_GAIN,
) -> Value:
    """Convolve.

    Args:
        graph: written to.
        x: (channels, height, width).
        channels: number of output channels.
        kernel: height and width.
        stride: stride in both dimensions.
        padding: on both sides, by height and width; half the kernel when None, which keeps an odd
            kernel's height and width.
        groups: number of groups of channels, each convolved alone.
        bias: the bias that a following normalisation leaves when it is folded.
        gain: the output's root mean square, in terms of the input's.
    """
    in_channels, height, width = x.shape
    kernel_h, kernel_w = (kernel, kernel) if isinstance(kernel, int) else kernel
    if padding is None:
        padding = (kernel_h // 2, kernel_w // 2)
    pad_h, pad_w = (padding, padding) if isinstance(padding, int) else padding
    fan_in = in_channels // groups * kernel_h * kernel_w
    inputs: list[Value | str] = [
        x,
        graph.weight(
            (channels, in_channels // groups, kernel_h, kernel_w), std=gain / sqrt(fan_in)
        ),
    ]
    if bias:
        inputs.append(graph.weight((channels,), std=_BIAS_STD))
    return graph.op(
        "Conv",
        *inputs,
        shape=(
            channels,
            (height + 2 * pad_h - kernel_h) // stride + 1,
            (width + 2 * pad_w - kernel_w) // stride + 1,
        ),
        kernel_shape=[kernel_h, kernel_w],
        strides=[stride, stride],
        pads=[pad_h, pad_w, pad_h, pad_w],
        group=groups,
    )


def conv_relu(
    graph: Graph,
    x: Value,
    channels: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    padding: int | tuple[int, int] | None = None,
    groups: int = 1,
) -> Value:
    """Convolve, normalise (folded), and cut off below zero."""
    return relu(
        graph, conv(graph, x, channels, kernel, stride=stride, padding=padding, groups=groups)
    )


def deconv(graph: Graph, x: Value, channels: int) -> Value:
    """Transposed convolution, 4x4 with stride 2: doubles height and width. No bias."""
    in_channels, height, width = x.shape
    # Stride 2 leaves each output pixel 2x2 of the 4x4 kernel's taps.
    weight = graph.weight((in_channels, channels, 4, 4), std=RELU_GAIN / sqrt(4 * in_channels))
    return graph.op(
        "ConvTranspose",
        x,
        weight,
        shape=(channels, 2 * height, 2 * width),
        kernel_shape=[4, 4],
        strides=[2, 2],
        pads=[1, 1, 1, 1],
    )


def norm(graph: Graph, x: Value) -> Value:
    """Normalise where it cannot be folded: a scale and a shift per channel."""
    shape = (x.shape[0], 1, 1)
    scaled = graph.op("Mul", x, graph.weight(shape, mean=1.0, std=_NORM_STD), shape=x.shape)
    return graph.op("Add", scaled, graph.weight(shape, std=_NORM_STD), shape=x.shape)


def relu(graph: Graph, x: Value) -> Value:
    """max(x, 0)."""
    return graph.op("Relu", x, shape=x.shape)


def add(graph: Graph, x: Value, y: Value) -> Value:
    """Add elementwise."""
    assert x.shape == y.shape, f"{graph.name}: adding {x.shape} and {y.shape}"
    return graph.op("Add", x, y, shape=x.shape)


def concat(graph: Graph, *parts: Value) -> Value:
    """Join along the channels."""
    assert len({part.shape[1:] for part in parts}) == 1, f"{graph.name}: {parts}"
    channels = sum(part.shape[0] for part in parts)
    return graph.op("Concat", *parts, shape=(channels, *parts[0].shape[1:]), axis=1)


def max_pool(
    graph: Graph, x: Value, kernel: int, *, stride: int, padding: int = 0, ceil: bool = False
) -> Value:
    """Largest of each window; with `ceil`, windows that begin inside count though they end outside."""
    return _pool(graph, "MaxPool", x, kernel, stride, padding, ceil)


def average_pool(graph: Graph, x: Value, kernel: int, *, stride: int, padding: int = 0) -> Value:
    """Mean of each window, padding not counted."""
    return _pool(graph, "AveragePool", x, kernel, stride, padding, ceil=False)


def global_pool(graph: Graph, x: Value) -> Value:
    """Mean of each channel: (channels, 1, 1)."""
    return graph.op("GlobalAveragePool", x, shape=(x.shape[0], 1, 1))


def squeeze_excite(graph: Graph, x: Value, ratio: int = 16) -> Value:
    """Scale each channel by a gate computed from all channels' means (Hu et al., 2018)."""
    channels = x.shape[0]
    gate = conv_relu(graph, global_pool(graph, x), channels // ratio, 1)
    gate = conv(graph, gate, channels, 1, gain=1.0)
    gate = graph.op("Sigmoid", gate, shape=gate.shape)
    return graph.op("Mul", x, gate, shape=x.shape)


def split_attention(graph: Graph, x: Value, channels: int) -> Value:
    """A 3x3 convolution done twice, and of each channel a mixture that all channels decide.

    The two shares of a channel sum to 1 (Zhang et al., 2020, radix 2).
    """
    x = conv_relu(graph, x, 2 * channels, 3, groups=2)
    first, second = graph.halves(x)
    both = global_pool(graph, add(graph, first, second))
    gate = conv_relu(graph, both, max(channels // 2, 32), 1)
    one, other = graph.halves(conv(graph, gate, 2 * channels, 1, gain=1.0))
    # The softmax of two numbers is the sigmoid of their difference.
    share = graph.op("Sigmoid", graph.op("Sub", one, other, shape=one.shape), shape=one.shape)
    # second + share * (first - second)
    difference = graph.op("Sub", first, second, shape=first.shape)
    return add(graph, second, graph.op("Mul", difference, share, shape=first.shape))


def dense(graph: Graph, x: Value, units: int, *, gain: float = 1.0) -> Value:
    """Fully connected, over everything in a row."""
    size = prod(x.shape)
    if len(x.shape) != 1:
        x = graph.op("Flatten", x, shape=(size,), axis=1)
    weight = graph.weight((units, size), std=gain / sqrt(size))
    return graph.op(
        "Gemm", x, weight, graph.weight((units,), std=_BIAS_STD), shape=(units,), transB=1
    )


def _pool(
    graph: Graph, operator: str, x: Value, kernel: int, stride: int, padding: int, ceil: bool
) -> Value:
    channels, height, width = x.shape
    round_up = stride - 1 if ceil else 0
    return graph.op(
        operator,
        x,
        shape=(
            channels,
            (height + 2 * padding - kernel + round_up) // stride + 1,
            (width + 2 * padding - kernel + round_up) // stride + 1,
        ),
        kernel_shape=[kernel, kernel],
        strides=[stride, stride],
        pads=[padding] * 4,
        ceil_mode=int(ceil),
    )
