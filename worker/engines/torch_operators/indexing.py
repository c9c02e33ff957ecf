"""Operators that find elements by index.

An index outside its table counts as the nearest inside, where ONNX makes the run fail: a captured kernel
cannot raise, and on a GPU the fault would cost the whole process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.engines.torch_operators.node import Node, Outputs, Tensor


def _gather(node: Node, table: Tensor, indices: Tensor) -> Tensor:
    """Take rows of a table. An index outside the table counts as the nearest inside (ONNX: an error)."""
    axis = node.get("axis", 0) % table.dim()
    size = table.shape[axis]
    inside = indices.to(torch.int64)
    inside = torch.where(inside < 0, inside + size, inside).clamp(0, size - 1)
    shape = (*table.shape[:axis], *indices.shape, *table.shape[axis + 1 :])
    return torch.index_select(table, axis, inside.reshape(-1)).reshape(shape)


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "Gather": _gather,
}
