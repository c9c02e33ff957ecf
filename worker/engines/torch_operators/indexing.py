"""Operators that find elements by index.

An index outside its table counts as the nearest inside, where ONNX makes the run fail: a captured kernel
cannot raise, and on a GPU the fault would cost the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from worker.engines.torch_operators.node import Node, Outputs, Tensor, number


def _inside(indices: Tensor, size: int) -> Tensor:
    wide = indices.to(torch.int64)
    return torch.where(wide < 0, wide + size, wide).clamp(0, size - 1)


def _gather(node: Node, table: Tensor, indices: Tensor) -> Tensor:
    axis = node.get("axis", 0) % table.dim()
    inside = _inside(indices, table.shape[axis])
    shape = (*table.shape[:axis], *indices.shape, *table.shape[axis + 1 :])
    return torch.index_select(table, axis, inside.reshape(-1)).reshape(shape)


def _gather_elements(node: Node, table: Tensor, indices: Tensor) -> Tensor:
    axis = node.get("axis", 0) % table.dim()
    return torch.gather(table, axis, _inside(indices, table.shape[axis]))


def _rows(table: Tensor, indices: Tensor, batch_dims: int) -> tuple[Tensor, Tensor]:
    """View a table as rows, and find which ones the last dimension of some indices means.

    Returns the table with all dimensions that are indexed as one, and the positions there, one dimension.
    """
    begin, end = batch_dims, batch_dims + indices.shape[-1]
    flat = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=indices.device)
    for axis in range(begin):
        steps = torch.arange(table.shape[axis], device=indices.device)
        flat = flat * table.shape[axis] + steps.view(-1, *[1] * (flat.dim() - axis - 1))
    for axis in range(begin, end):
        flat = flat * table.shape[axis] + _inside(indices[..., axis - begin], table.shape[axis])
    return table.reshape(prod(table.shape[:end]), -1), flat.reshape(-1)


def _gather_nd(node: Node, table: Tensor, indices: Tensor) -> Tensor:
    batch_dims = node.get("batch_dims", 0)
    rows, flat = _rows(table, indices, batch_dims)
    inner = table.shape[batch_dims + indices.shape[-1] :]
    return torch.index_select(rows, 0, flat).reshape(*indices.shape[:-1], *inner)


_REDUCTIONS = {b"add": "sum", b"mul": "prod", b"max": "amax", b"min": "amin"}


def _scatter_nd(node: Node, table: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    rows, flat = _rows(table, indices, 0)
    new = updates.reshape(-1, rows.shape[1])
    where = flat.unsqueeze(1).expand_as(new)
    return _scattered(node, rows, 0, where, new).reshape(table.shape)


def _scatter_elements(node: Node, table: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis = node.get("axis", 0) % table.dim()
    return _scattered(node, table, axis, _inside(indices, table.shape[axis]), updates)


def _scattered(node: Node, table: Tensor, axis: int, where: Tensor, new: Tensor) -> Tensor:
    how = node.get("reduction", b"none")
    if how == b"none":
        return table.scatter(axis, where, new)
    return table.scatter_reduce(axis, where, new, _REDUCTIONS[how])


def _one_hot(node: Node, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    count = number(depth)
    axis = node.get("axis", -1) % (indices.dim() + 1)
    wide = indices.to(torch.int64)
    # An index outside the depth sets nothing, in ONNX too.
    wide = torch.where(wide < 0, wide + count, wide).unsqueeze(axis)
    places = torch.arange(count, device=indices.device)
    hot = wide == places.view(-1, *[1] * (indices.dim() - axis))
    return torch.where(hot, values[1], values[0])


def _compress(node: Node, x: Tensor, condition: Tensor) -> Tensor:
    axis = node.get("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    chosen = [i for i, wanted in enumerate(condition.tolist()) if wanted]
    parts = [x.narrow(axis, i, 1) for i in chosen]
    return torch.cat(parts, axis) if parts else x.narrow(axis, 0, 0)


def _non_zero(node: Node, x: Tensor) -> Tensor:
    return x.nonzero().t()


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "Compress": _compress,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "NonZero": _non_zero,
    "OneHot": _one_hot,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
}

STATIC: dict[str, tuple[int, ...]] = {"Compress": (1,), "NonZero": (0,), "OneHot": (1,)}
