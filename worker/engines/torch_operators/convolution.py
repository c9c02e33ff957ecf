"""Convolutions and pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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


def _padded(x: Tensor, pads: Sequence[int], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Pad here if begin and end differ; otherwise leave the padding to the kernel."""
    half = len(pads) // 2
    begins, ends = list(pads[:half]), list(pads[half:])
    if begins == ends:
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
    strides, dilations, pads = _windows(node, x, weight.shape[2:])
    half = len(pads) // 2
    if pads[:half] != pads[half:] or node.get("output_shape") or node.get("auto_pad"):
        raise node.refuse("padding that differs between begin and end, or an output_shape")
    function = _for_dimensions(node, _TRANSPOSED, x)
    extra = list(node.get("output_padding") or [0] * half)
    return function(x, weight, bias, strides, pads[:half], extra, node.get("group", 1), dilations)


def _max_pool(node: Node, x: Tensor) -> Tensor:
    kernel = node.get("kernel_shape")
    strides, dilations, pads = _windows(node, x, kernel)
    x, padding = _padded(x, pads, float("-inf"))
    function = _for_dimensions(node, _MAX_POOLS, x)
    return function(x, kernel, strides, padding, dilations, bool(node.get("ceil_mode", 0)))


def _average_pool(node: Node, x: Tensor) -> Tensor:
    kernel = node.get("kernel_shape")
    strides, dilations, pads = _windows(node, x, kernel)
    half = len(pads) // 2
    count_pads = bool(node.get("count_include_pad", 0))
    if any(dilation != 1 for dilation in dilations) or (
        pads[:half] != pads[half:] and not count_pads
    ):
        raise node.refuse("dilations, or padding that differs between begin and end")
    x, padding = _padded(x, pads)
    function = _for_dimensions(node, _AVERAGE_POOLS, x)
    return function(x, kernel, strides, padding, bool(node.get("ceil_mode", 0)), count_pads)


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
