"""Operators that treat each element alone, with operands that are broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch
import torch.nn.functional as F

from worker.engines.torch_operators.node import Node, Outputs, Tensor, attributed, number, plain


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, *inputs: Tensor) -> Tensor:
        return reduce(function, inputs)

    return operator


def _mean(node: Node, *inputs: Tensor) -> Tensor:
    return reduce(torch.add, inputs) / len(inputs)


def _div(node: Node, a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _mod(a: Tensor, b: Tensor, fmod: int) -> Tensor:
    # The sign is that of the dividend, as in C, or else that of the divisor.
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


def _pow(node: Node, x: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(x, exponent).to(x.dtype)


def _bit_shift(node: Node, x: Tensor, by: Tensor) -> Tensor:
    return x << by if node.get("direction") == b"LEFT" else x >> by


def _clip(node: Node, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    least = node.get("min") if low is None else low
    most = node.get("max") if high is None else high
    if least is None and most is None:
        return x
    if isinstance(least, torch.Tensor) is isinstance(most, torch.Tensor) or None in (least, most):
        return torch.clamp(x, least, most)
    return torch.clamp(torch.clamp(x, min=least), max=most)


def _hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    return torch.clamp(x * alpha + beta, 0.0, 1.0)


def _selu(x: Tensor, alpha: float, gamma: float) -> Tensor:
    return gamma * F.elu(x, alpha)


def _shrink(x: Tensor, bias: float, limit: float) -> Tensor:
    inside = torch.where(x < -limit, x + bias, torch.zeros_like(x))
    return torch.where(x > limit, x - bias, inside)


def _swish(x: Tensor, alpha: float) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _prelu(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    # ONNX broadcasts the slope like any other operand; torch's own takes one number per channel.
    return torch.where(x < 0, x * slope, x)


def _gelu(node: Node, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=node.get("approximate", b"none").decode())


def _is_inf(x: Tensor, negative: int, positive: int) -> Tensor:
    found = torch.isinf(x)
    if not negative:
        found &= x > 0
    return found if positive else found & (x < 0)


def _cast(node: Node, x: Tensor) -> Tensor:
    return x.to(node.element_type(node.get("to")))


def _cast_like(node: Node, x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)


def _identity(node: Node, x: Tensor) -> Tensor:
    return x


def _dropout(
    node: Node, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None
) -> Sequence[Tensor]:
    if number(training):
        raise node.refuse("training_mode")
    return x, torch.ones_like(x, dtype=torch.bool)


# Those that torch has under the same name, in small letters.
_SAME = """
    Abs Acos Acosh Add Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor IsNaN Log Mul Neg
    Reciprocal Relu Round Sigmoid Sign Sin Sinh Sqrt Sub Tan Tanh Where
"""

OPERATORS: dict[str, Callable[..., Outputs]] = {
    **{name: plain(getattr(torch, name.lower())) for name in _SAME.split()},
    "And": plain(torch.logical_and),
    "BitShift": _bit_shift,
    "BitwiseAnd": plain(torch.bitwise_and),
    "BitwiseNot": plain(torch.bitwise_not),
    "BitwiseOr": plain(torch.bitwise_or),
    "BitwiseXor": plain(torch.bitwise_xor),
    "Cast": _cast,
    "CastLike": _cast_like,
    "Celu": attributed(F.celu, alpha=1.0),
    "Clip": _clip,
    "Div": _div,
    "Dropout": _dropout,
    "Elu": attributed(F.elu, alpha=1.0),
    "Equal": plain(torch.eq),
    "Gelu": _gelu,
    "Greater": plain(torch.gt),
    "GreaterOrEqual": plain(torch.ge),
    "HardSigmoid": attributed(_hard_sigmoid, alpha=0.2, beta=0.5),
    "HardSwish": plain(F.hardswish),
    "Identity": _identity,
    "IsInf": attributed(_is_inf, detect_negative=1, detect_positive=1),
    "LeakyRelu": attributed(F.leaky_relu, alpha=0.01),
    "Less": plain(torch.lt),
    "LessOrEqual": plain(torch.le),
    "Max": _folded(torch.maximum),
    "Mean": _mean,
    "Min": _folded(torch.minimum),
    "Mish": plain(F.mish),
    "Mod": attributed(_mod, fmod=0),
    "Not": plain(torch.logical_not),
    "Or": plain(torch.logical_or),
    "PRelu": _prelu,
    "Pow": _pow,
    "Selu": attributed(_selu, alpha=1.6732632423543772, gamma=1.0507009873554805),
    "Shrink": attributed(_shrink, bias=0.0, lambd=0.5),
    "Softplus": plain(F.softplus),
    "Softsign": plain(F.softsign),
    "Sum": _folded(torch.add),
    "Swish": attributed(_swish, alpha=1.0),
    "ThresholdedRelu": attributed(partial(F.threshold, value=0.0), alpha=1.0),
    "Xor": plain(torch.logical_xor),
}

STATIC: dict[str, tuple[int, ...]] = {"Dropout": (1, 2)}
