"""Whole numbers that stand for floats: products are computed as floats of enough digits to be exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from onnx import TensorProto

from worker.engines.torch_operators.convolution import OPERATORS as CONVOLUTIONS
from worker.engines.torch_operators.node import Node, Outputs, Tensor


def _for_blocks(node: Node, x: Tensor, setting: Tensor | None) -> Tensor | None:
    """Broadcast a scale or zero point, which may be per element of an axis or per block, to x."""
    if setting is None or setting.numel() == 1:
        return setting if setting is None else setting.reshape(())
    axis = node.get("axis", 1) % x.dim()
    if node.get("block_size", 0):
        return setting.repeat_interleave(node.get("block_size"), axis).narrow(
            axis, 0, x.shape[axis]
        )
    return setting.view(-1, *[1] * (x.dim() - axis - 1))


def _rounded(x: Tensor, zero: Tensor | None, kind: torch.dtype) -> Tensor:
    y = torch.round(x) if zero is None else torch.round(x) + zero.to(x.dtype)
    limits = torch.iinfo(kind)
    return y.clamp(limits.min, limits.max).to(kind)


def _quantize(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    number = node.get("output_dtype", 0) or TensorProto.UINT8
    kind = node.element_type(number) if zero is None else zero.dtype
    divisor = _for_blocks(node, x, scale)
    return _rounded(x.to(scale.dtype) / divisor, _for_blocks(node, x, zero), kind)


def _dequantize(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    begin = _for_blocks(node, x, zero)
    wide = x.to(torch.int32) if begin is None else x.to(torch.int32) - begin.to(torch.int32)
    return wide.to(scale.dtype) * _for_blocks(node, x, scale)


def _dynamic_quantize(node: Node, x: Tensor) -> Sequence[Tensor]:
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    # Zeros have no scale: onnxruntime takes 1.
    scale = torch.where(scale == 0, 1, scale)
    zero = _rounded(-low / scale, None, torch.uint8)
    return _rounded(x / scale, zero, torch.uint8), scale, zero


def _shifted(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """What a tensor stands for, before it is scaled."""
    if zero is None:
        return x.double()
    if zero.dim() == 1:
        zero = zero.view([-1 if each == axis % x.dim() else 1 for each in range(x.dim())])
    return x.double() - zero.double()


def _matmul_integer(
    node: Node, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    y = torch.matmul(_shifted(a, a_zero, -2), _shifted(b, b_zero, -1))
    return y.to(torch.int32)


def _conv_integer(
    node: Node, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> Tensor:
    y = CONVOLUTIONS["Conv"](node, _shifted(x, x_zero, 1), _shifted(w, w_zero, 0))
    assert isinstance(y, torch.Tensor)
    return y.to(torch.int32)


def _qlinear_matmul(
    node: Node,
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    y = torch.matmul(_shifted(a, a_zero, -2), _shifted(b, b_zero, -1))
    y = y * a_scale.double() * b_scale.double() / y_scale.double()
    return _rounded(y, y_zero, y_zero.dtype)


def _qlinear_conv(
    node: Node,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    wide = None if bias is None else bias.double()
    y = CONVOLUTIONS["Conv"](node, _shifted(x, x_zero, 1), _shifted(w, w_zero, 0), wide)
    scale = x_scale.double() * w_scale.double() / y_scale.double()
    return _rounded(y * scale.view(-1, *[1] * (x.dim() - 2)), y_zero, y_zero.dtype)


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "ConvInteger": _conv_integer,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic_quantize,
    "MatMulInteger": _matmul_integer,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "QuantizeLinear": _quantize,
}
