"""Operators that reduce many elements to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.engines.torch_operators.node import Node, Outputs, Tensor, axes_of, number


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen, keep = tuple(axes_of(node, axes) or ()), bool(node.get("keepdims", 1))
        if not chosen and node.get("noop_with_empty_axes", 0):
            # Each element alone, such as its square in ReduceSumSquare.
            x, chosen, keep = x.unsqueeze(0), (0,), False
        return function(x, chosen or tuple(range(x.dim())), keep).to(x.dtype)

    return operator


def _sum_of(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, axes, keep: function(x).sum(axes, keep)


def _prod(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    # torch multiplies along one dimension at a time.
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keep)
    return x


def _norm(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    return x.square().sum(axes, keep).sqrt()


def _log_sum(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    return x.sum(axes, keep).log()


def _arg(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, x: Tensor) -> Tensor:
        axis, keep = node.get("axis", 0), bool(node.get("keepdims", 1))
        if node.get("select_last_index", 0):
            return x.shape[axis] - 1 - function(x.flip(axis), axis, keepdim=keep)
        return function(x, axis, keepdim=keep)

    return operator


def _cumulated(function: Callable[..., Tensor], neutral: int) -> Callable[..., Tensor]:
    def operator(node: Node, x: Tensor, axis: Tensor) -> Tensor:
        dimension = number(axis)
        if node.get("reverse", 0):
            x = x.flip(dimension)
        y = function(x, dimension, dtype=x.dtype)
        if node.get("exclusive", 0):
            first = torch.full_like(y.narrow(dimension, 0, 1), neutral)
            y = torch.cat([first, y.narrow(dimension, 0, y.shape[dimension] - 1)], dimension)
        return y.flip(dimension) if node.get("reverse", 0) else y

    return operator


def _top_k(node: Node, x: Tensor, k: Tensor | None = None) -> Sequence[Tensor]:
    count = number(k, node.get("k"))
    axis = node.get("axis", -1)
    # Sorted, because of equal elements ONNX takes the first, and torch.topk any one.
    found = torch.sort(x, dim=axis, descending=bool(node.get("largest", 1)), stable=True)
    return [part.narrow(axis, 0, count) for part in found]


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "CumProd": _cumulated(torch.cumprod, 1),
    "CumSum": _cumulated(torch.cumsum, 0),
    "ReduceL1": _reduce(_sum_of(torch.abs)),
    "ReduceL2": _reduce(_norm),
    "ReduceLogSum": _reduce(_log_sum),
    "ReduceLogSumExp": _reduce(torch.logsumexp),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin),
    "ReduceProd": _reduce(_prod),
    "ReduceSum": _reduce(torch.sum),
    "ReduceSumSquare": _reduce(_sum_of(torch.square)),
    "TopK": _top_k,
}

STATIC: dict[str, tuple[int, ...]] = dict.fromkeys(
    [name for name in OPERATORS if not name.startswith("Arg")], (1,)
)
