"""Products of matrices, normalisations and softmax."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F

from worker.engines.torch_operators.node import Node, Outputs, Tensor, attributed, number, plain


def _gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    a = a.t() if node.get("transA", 0) else a
    b = b.t() if node.get("transB", 0) else b
    if c is None:
        y = a @ b
        return y if alpha == 1.0 else y * alpha
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


def _einsum(node: Node, *factors: Tensor) -> Tensor:
    return torch.einsum(node.get("equation").decode(), *factors)


def _dft(node: Node, x: Tensor, length: Tensor | None = None, axis: Tensor | None = None) -> Tensor:
    size = number(length)
    dimension = number(axis, node.get("axis", 1 if node.opset < 20 else -2))
    # The last dimension holds a real number, or both parts of a complex one.
    dimension %= x.dim()
    half = bool(node.get("onesided", 0))
    whole = x[..., 0] if x.shape[-1] == 1 else torch.view_as_complex(x.contiguous())
    if node.get("inverse", 0):
        if half:
            return torch.fft.irfft(whole, size, dimension).unsqueeze(-1)
        return torch.view_as_real(torch.fft.ifft(whole, size, dimension))
    return torch.view_as_real((torch.fft.rfft if half else torch.fft.fft)(whole, size, dimension))


def _batch_normalization(
    node: Node, x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    if node.get("training_mode", 0):
        raise node.refuse("training_mode")
    return F.batch_norm(x, mean, variance, scale, shift, eps=node.get("epsilon", 1e-5))


def _layer_normalization(
    node: Node, x: Tensor, scale: Tensor, shift: Tensor | None = None
) -> Outputs:
    axis, epsilon = node.get("axis", -1) % x.dim(), node.get("epsilon", 1e-5)
    if len(node.outputs) > 1:
        return torch.native_layer_norm(x, x.shape[axis:], scale, shift, epsilon)
    return F.layer_norm(x, x.shape[axis:], scale, shift, epsilon)


def _rms_normalization(node: Node, x: Tensor, scale: Tensor) -> Tensor:
    axis = node.get("axis", -1) % x.dim()
    return F.rms_norm(x, x.shape[axis:], None, node.get("epsilon", 1e-5)) * scale


def _instance_normalization(node: Node, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=shift, eps=node.get("epsilon", 1e-5))


def _group_normalization(node: Node, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    groups, channels = node.get("num_groups"), x.shape[1]
    if scale.shape[0] != channels:  # before opset 21 one number per group
        scale, shift = (
            each.unsqueeze(1).expand(-1, channels // groups).reshape(-1) for each in (scale, shift)
        )
    return F.group_norm(x, groups, scale, shift, node.get("epsilon", 1e-5))


def _lrn(node: Node, x: Tensor) -> Tensor:
    size = node.get("size")
    if size % 2 == 0:
        raise node.refuse(f"a size of {size}, which is even")
    alpha, beta = node.get("alpha", 1e-4), node.get("beta", 0.75)
    return F.local_response_norm(x, size, alpha, beta, node.get("bias", 1.0))


def _lp_normalization(x: Tensor, axis: int, p: int) -> Tensor:
    return F.normalize(x, p, axis)


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, x: Tensor) -> Tensor:
        if node.opset >= 13:
            return function(x, node.get("axis", -1))
        # Before opset 13 the sum goes over all dimensions from the axis on.
        axis = node.get("axis", 1) % x.dim()
        return function(x.reshape(prod(x.shape[:axis]), -1), 1).reshape(x.shape)

    return operator


def _hardmax(x: Tensor, axis: int) -> Tensor:
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1)


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "BatchNormalization": _batch_normalization,
    "DFT": _dft,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "GroupNormalization": _group_normalization,
    "Hardmax": _softmax(_hardmax),
    "InstanceNormalization": _instance_normalization,
    "LRN": _lrn,
    "LayerNormalization": _layer_normalization,
    "LogSoftmax": _softmax(torch.log_softmax),
    "LpNormalization": attributed(_lp_normalization, axis=-1, p=2),
    "MatMul": plain(torch.matmul),
    "RMSNormalization": _rms_normalization,
    "Softmax": _softmax(torch.softmax),
}

STATIC: dict[str, tuple[int, ...]] = {"DFT": (1, 2)}
