"""Convolutions and pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from operator import le

import torch
import torch.nn.functional as F

from worker.engines.torch_operators.node import Node, Outputs, Tensor


def _windows(
    node: Node, x: Tensor, kernel: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and pads (all begins, then all ends) of a sliding window."""
    dimensions = len(kernel)
    strides = list(node.get("strides") or [1] * dimensions)
    dilations = list(node.get("dilations") or [1] * dimensions)
    automatic = node.get("auto_pad", b"NOTSET").decode()
    if automatic in ("NOTSET", "VALID"):
        pads = list(node.get("pads") or [0] * 2 * dimensions)
        return strides, dilations, pads if automatic == "NOTSET" else [0] * 2 * dimensions
    begins, ends = [], []
    for size, width, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + dilation * (width - 1) + 1 - size, 0)
        small, large = total // 2, total - total // 2
        begins.append(small if automatic == "SAME_UPPER" else large)
        ends.append(large if automatic == "SAME_UPPER" else small)
    return strides, dilations, begins + ends


def _padded(
    x: Tensor, pads: Sequence[int], value: float = 0.0, most: Sequence[int] | None = None
) -> tuple[Tensor, list[int]]:
    """Pad here if begin and end differ, or are more than the kernel takes; otherwise leave it to the kernel."""
    half = len(pads) // 2
    begins, ends = list(pads[:half]), list(pads[half:])
    if begins == ends and all(map(le, begins, most or begins)):
        return x, begins
    reverse = [n for pair in zip(reversed(begins), reversed(ends), strict=True) for n in pair]
    return F.pad(x, reverse, value=value), [0] * half


_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _for_dimensions(
    node: Node, table: Mapping[int, Callable[..., Tensor]], x: Tensor
) -> Callable[..., Tensor]:
    function = table.get(x.dim() - 2)
    if function is None:
        raise node.refuse(f"an input of {x.dim()} dimensions")
    return function


def _conv(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    strides, dilations, pads = _windows(node, x, weight.shape[2:])
    x, padding = _padded(x, pads)
    function = _for_dimensions(node, _CONVOLUTIONS, x)
    return function(x, weight, bias, strides, padding, dilations, node.get("group", 1))


def conv_add_relu(
    node: Node, x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None = None
) -> Tensor:
    """Run a convolution, the addition and the ReLU behind it (`worker.engines.torch_program` joins them).

    cuDNN does all three in one kernel where it has one; elsewhere addition and ReLU reuse the convolution's
    output.
    """
    strides, dilations, pads = _windows(node, x, weight.shape[2:])
    x, padding = _padded(x, pads)
    groups = node.get("group", 1)
    sizes = [
        (size + 2 * pad - dilation * (width - 1) - 1) // stride + 1
        for size, pad, dilation, width, stride in zip(
            x.shape[2:], padding, dilations, weight.shape[2:], strides, strict=True
        )
    ]
    same_shape = other is None or tuple(other.shape) == (x.shape[0], weight.shape[0], *sizes)
    if x.is_cuda and x.dim() == 4 and same_shape:
        geometry = (strides, padding, dilations, groups)
        if other is None:
            return torch.cudnn_convolution_relu(x, weight, bias, *geometry)
        return torch.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, *geometry)
    function = _for_dimensions(node, _CONVOLUTIONS, x)
    y = function(x, weight, bias, strides, padding, dilations, groups)
    if other is not None:
        y = y.add_(other) if same_shape else y + other
    return y.relu_()


def _conv_transpose(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    function = _for_dimensions(node, _TRANSPOSED, x)
    kernel = weight.shape[2:]
    strides = list(node.get("strides") or [1] * len(kernel))
    dilations = list(node.get("dilations") or [1] * len(kernel))
    extra = list(node.get("output_padding") or [0] * len(kernel))
    begins, ends = _cuts(node, x, kernel, strides, dilations, extra)
    groups = node.get("group", 1)
    if begins == ends and min(begins) >= 0:
        return function(x, weight, bias, strides, begins, extra, groups, dilations)
    # What padding cuts off differs between both ends, so cut here.
    y = function(x, weight, bias, strides, 0, extra, groups, dilations)
    both = zip(reversed(begins), reversed(ends), strict=True)
    return F.pad(y, [-n for pair in both for n in pair])


def _cuts(
    node: Node,
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    extra: Sequence[int],
) -> tuple[list[int], list[int]]:
    """How much of a transposed convolution's full output to cut off at the begin and end of dimensions."""
    automatic = node.get("auto_pad", b"NOTSET").decode()
    sizes = node.get("output_shape")
    if sizes is None and automatic in ("NOTSET", "VALID"):
        pads = list(node.get("pads") or []) if automatic == "NOTSET" else []
        pads = pads or [0] * 2 * len(kernel)
        return pads[: len(kernel)], pads[len(kernel) :]
    if sizes is None:
        sizes = [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
    totals = [
        stride * (size - 1) + more + (width - 1) * dilation + 1 - wanted
        for size, stride, more, width, dilation, wanted in zip(
            x.shape[2:], strides, extra, kernel, dilations, sizes[-len(kernel) :], strict=True
        )
    ]
    small = [total // 2 for total in totals]
    large = [total - total // 2 for total in totals]
    return (small, large) if automatic == "SAME_UPPER" else (large, small)


def _max_pool(node: Node, x: Tensor) -> Tensor:
    kernel = node.get("kernel_shape")
    strides, dilations, pads = _windows(node, x, kernel)
    lowest = -inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    x, padding = _padded(x, pads, lowest, [width // 2 for width in kernel])
    function = _for_dimensions(node, _MAX_POOLS, x)
    return function(x, kernel, strides, padding, dilations, bool(node.get("ceil_mode", 0)))


def _average_pool(node: Node, x: Tensor) -> Tensor:
    kernel = node.get("kernel_shape")
    strides, dilations, pads = _windows(node, x, kernel)
    if any(dilation != 1 for dilation in dilations):
        raise node.refuse(f"dilations {dilations}")
    count_pads = bool(node.get("count_include_pad", 0))
    function = _for_dimensions(node, _AVERAGE_POOLS, x)
    padded, padding = _padded(x, pads, most=[width // 2 for width in kernel])
    geometry = (kernel, strides, padding, bool(node.get("ceil_mode", 0)), count_pads)
    y = function(padded, *geometry)
    if padded is x or count_pads:
        return y
    # Those pads are in the sum as zeros; count what is not a pad.
    counted, _ = _padded(torch.ones_like(x[:1, :1]), pads, most=[width // 2 for width in kernel])
    return y / function(counted, *geometry)


def _global_average_pool(node: Node, x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


def _global_max_pool(node: Node, x: Tensor) -> Tensor:
    return x.amax(tuple(range(2, x.dim())), keepdim=True)


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "AveragePool": _average_pool,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "GlobalAveragePool": _global_average_pool,
    "GlobalMaxPool": _global_max_pool,
    "MaxPool": _max_pool,
    "conv_add_relu": conv_add_relu,
}
