"""Operators that move elements, or make new ones, as sizes say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod

import torch
import torch.nn.functional as F
from onnx import numpy_helper

from worker.engines.torch_operators.node import Node, Outputs, Tensor, axes_of, ints, number


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
    for axis, begin, end, stride in zip(chosen, begins, finishes, strides, strict=True):
        # Bounds may lie far outside, and of the furthest torch warns.
        places = range(*slice(begin, end, stride).indices(x.shape[axis]))
        if stride < 0:
            # torch has no such slices.
            where = torch.arange(len(places), device=x.device) * stride + places.start
            x = torch.index_select(x, axis, where)
            continue
        index: list[slice] = [slice(None)] * x.dim()
        index[axis] = slice(places.start, places.stop, stride)
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


def _size(node: Node, x: Tensor) -> Tensor:
    return torch.tensor(x.numel())


def _range(node: Node, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    begin, end, step = map(number, (start, limit, delta))
    count = max(ceil((end - begin) / step), 0)
    return (torch.arange(count) * step + begin).to(start.dtype)


def _eye_like(node: Node, x: Tensor) -> Tensor:
    kind = x.dtype if node.get("dtype") is None else node.element_type(node.get("dtype"))
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return (rows.unsqueeze(1) + node.get("k", 0) == columns).to(kind)


def _trilu(node: Node, x: Tensor, diagonal: Tensor | None = None) -> Tensor:
    k = number(diagonal, 0)
    return torch.triu(x, k) if node.get("upper", 1) else torch.tril(x, k)


def _tile(node: Node, x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(ints(repeats))


def _depth_to_space(node: Node, x: Tensor) -> Tensor:
    size = node.get("blocksize")
    if node.get("mode", b"DCR") == b"CRD":
        return F.pixel_shuffle(x, size)
    rows, channels, height, width = x.shape
    x = x.reshape(rows, size, size, channels // size**2, height, width)
    return x.permute(0, 3, 4, 1, 5, 2).reshape(rows, -1, height * size, width * size)


def _space_to_depth(node: Node, x: Tensor) -> Tensor:
    size = node.get("blocksize")
    if node.get("mode", b"DCR") == b"CRD":
        return F.pixel_unshuffle(x, size)
    rows, channels, height, width = x.shape
    x = x.reshape(rows, channels, height // size, size, width // size, size)
    return x.permute(0, 3, 5, 1, 2, 4).reshape(rows, -1, height // size, width // size)


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
    widths = list(zip(chosen, sizes[: len(chosen)], sizes[len(chosen) :], strict=True))
    if mode != "constant":
        for axis, begin, end in widths:
            if begin or end:
                x = torch.index_select(x, axis, _beyond(x, axis, begin, end, mode))
        return x
    both = [0] * 2 * x.dim()
    for axis, begin, end in widths:
        # torch counts dimensions from the last.
        position = 2 * (x.dim() - 1 - axis)
        both[position : position + 2] = [begin, end]
    filling = number(value, node.get("value", 0.0))
    return F.pad(x, both, value=filling)


def _beyond(x: Tensor, axis: int, begin: int, end: int, mode: str) -> Tensor:
    """The elements to take where a dimension goes on beyond both of its ends."""
    size = x.shape[axis]
    places = torch.arange(-begin, size + end, device=x.device)
    if mode == "edge":
        return places.clamp(0, size - 1)
    if mode == "wrap":
        return places % size
    period = max(2 * (size - 1), 1)
    return (places % period - size + 1).abs().neg() + size - 1


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "EyeLike": _eye_like,
    "Flatten": _flatten,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
}

STATIC: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
}
