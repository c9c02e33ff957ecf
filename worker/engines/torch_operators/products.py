"""Products of matrices, normalisations and softmax."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F

from worker.engines.torch_operators.node import Node, Outputs, Tensor, plain


def _gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    a = a.t() if node.get("transA", 0) else a
    b = b.t() if node.get("transB", 0) else b
    if c is None:
        y = a @ b
        return y if alpha == 1.0 else y * alpha
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


def _batch_normalization(
    node: Node, x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    return F.batch_norm(x, mean, variance, scale, shift, eps=node.get("epsilon", 1e-5))


def _layer_normalization(
    node: Node, x: Tensor, scale: Tensor, shift: Tensor | None = None
) -> Tensor:
    axis = node.get("axis", -1) % x.dim()
    return F.layer_norm(x, x.shape[axis:], scale, shift, node.get("epsilon", 1e-5))


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, x: Tensor) -> Tensor:
        if node.opset >= 13:
            return function(x, node.get("axis", -1))
        # Before opset 13 the sum goes over all dimensions from the axis on.
        axis = node.get("axis", 1) % x.dim()
        return function(x.reshape(prod(x.shape[:axis]), -1), 1).reshape(x.shape)

    return operator


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "BatchNormalization": _batch_normalization,
    "Gemm": _gemm,
    "LayerNormalization": _layer_normalization,
    "LogSoftmax": _softmax(torch.log_softmax),
    "MatMul": plain(torch.matmul),
    "Softmax": _softmax(torch.softmax),
}
