"""Operators that move elements, or make new ones, as sizes say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.nn.functional as F
from onnx import numpy_helper

from worker.engines.torch_operators.node import Node, Outputs, Tensor, axes_of, ints


def _reshape(node: Node, x: Tensor, shape: Tensor) -> Tensor:
    sizes = ints(shape)
    assert sizes is not None
    if not node.get("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(node: Node, x: Tensor) -> Tensor:
    axis = node.get("axis", 1)
    axis += x.dim() if axis < 0 else 0
    return x.reshape(prod(x.shape[:axis]), -1)


def _transpose(node: Node, x: Tensor) -> Tensor:
    return x.permute(node.get("perm") or list(range(x.dim()))[::-1])


def _concat(node: Node, *parts: Tensor) -> Tensor:
    return torch.cat(parts, node.get("axis"))


def _split(node: Node, x: Tensor, sizes: Tensor | None = None) -> Sequence[Tensor]:
    axis = node.get("axis", 0)
    lengths = node.get("split") if sizes is None else ints(sizes)
    if lengths is None:
        # The last part is smaller when the size does not divide.
        lengths = -(-x.shape[axis] // len(node.outputs))
    return list(torch.split(x, lengths, axis))


def _slice(
    node: Node,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    begins = node.get("starts") if starts is None else ints(starts)
    finishes = node.get("ends") if ends is None else ints(ends)
    assert begins is not None
    assert finishes is not None
    chosen = axes_of(node, axes) or list(range(len(begins)))
    strides = ints(steps) or [1] * len(begins)
    if min(strides) < 1:
        raise node.refuse(f"steps {strides}")
    for axis, begin, end, stride in zip(chosen, begins, finishes, strides, strict=True):
        index: list[slice] = [slice(None)] * x.dim()
        index[axis] = slice(begin, end, stride)
        x = x[tuple(index)]
    return x


def _squeeze(node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = axes_of(node, axes)
    return x.squeeze() if chosen is None else x.squeeze(tuple(chosen))


def _unsqueeze(node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = axes_of(node, axes) or []
    dimensions = x.dim() + len(chosen)
    for axis in sorted(axis % dimensions for axis in chosen):
        x = x.unsqueeze(axis)
    return x


def _constant_of_shape(node: Node, shape: Tensor) -> Tensor:
    value = node.get("value")
    sizes = ints(shape)
    if value is None:
        return torch.zeros(sizes, dtype=node.float_type)
    array = numpy_helper.to_array(value)
    return torch.full(sizes, array.item(), dtype=node.element_type(value.data_type))


def _expand(node: Node, x: Tensor, shape: Tensor) -> Tensor:
    sizes = ints(shape)
    assert sizes is not None
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(sizes)))


def _shape(node: Node, x: Tensor) -> Tensor:
    sizes = list(x.shape)[node.get("start", 0) : node.get("end")]
    return torch.tensor(sizes, dtype=torch.int64)


def _depth_to_space(node: Node, x: Tensor) -> Tensor:
    size = node.get("blocksize")
    if node.get("mode", b"DCR") == b"CRD":
        return F.pixel_shuffle(x, size)
    rows, channels, height, width = x.shape
    x = x.reshape(rows, size, size, channels // size**2, height, width)
    return x.permute(0, 3, 4, 1, 5, 2).reshape(rows, -1, height * size, width * size)


def _pad(
    node: Node,
    x: Tensor,
    pads: Tensor | None = None,
    value: Tensor | None = None,
    axes: Tensor | None = None,
) -> Tensor:
    sizes = node.get("pads") if pads is None else ints(pads)
    mode = node.get("mode", b"constant").decode()
    chosen = [axis % x.dim() for axis in axes_of(node, axes) or range(x.dim())]
    assert sizes is not None
    if mode != "constant" or min(sizes) < 0:
        raise node.refuse(f"mode {mode!r}, or less than nothing")
    both = [0] * 2 * x.dim()
    for index, axis in enumerate(chosen):
        # torch counts dimensions from the last.
        position = 2 * (x.dim() - 1 - axis)
        both[position : position + 2] = [sizes[index], sizes[len(chosen) + index]]
    filling = node.get("value", 0.0) if value is None else value.reshape(-1).tolist()[0]
    return F.pad(x, both, value=filling)


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _flatten,
    "Pad": _pad,
    "Reshape": _reshape,
    "Shape": _shape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}

STATIC: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Pad": (1, 2, 3),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
}
