"""Operators that make one element of many."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.engines.torch_operators.node import Node, Outputs, Tensor, axes_of


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen = axes_of(node, axes)
        if chosen is None and node.get("noop_with_empty_axes", 0):
            return x
        dimensions = tuple(chosen) if chosen else tuple(range(x.dim()))
        return function(x, dimensions, keepdim=bool(node.get("keepdims", 1)))

    return operator


def _arg(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, x: Tensor) -> Tensor:
        if node.get("select_last_index", 0):
            raise node.refuse("select_last_index")
        return function(x, node.get("axis", 0), keepdim=bool(node.get("keepdims", 1)))

    return operator


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin),
    "ReduceSum": _reduce(torch.sum),
}

STATIC: dict[str, tuple[int, ...]] = {
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceSum": (1,),
}
