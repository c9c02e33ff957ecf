"""Operators that treat each element alone, with operands that are broadcast."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
import torch.nn.functional as F

from worker.engines.torch_operators.node import Node, Outputs, Tensor, plain


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, *inputs: Tensor) -> Tensor:
        return reduce(function, inputs)

    return operator


def _div(node: Node, a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _clip(node: Node, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    least = node.get("min") if low is None else low
    most = node.get("max") if high is None else high
    if least is None and most is None:
        return x
    if isinstance(least, torch.Tensor) is isinstance(most, torch.Tensor) or None in (least, most):
        return torch.clamp(x, least, most)
    return torch.clamp(torch.clamp(x, min=least), max=most)


def _hard_sigmoid(node: Node, x: Tensor) -> Tensor:
    return torch.clamp(x * node.get("alpha", 0.2) + node.get("beta", 0.5), 0.0, 1.0)


def _hard_swish(node: Node, x: Tensor) -> Tensor:
    return F.hardswish(x)


def _leaky_relu(node: Node, x: Tensor) -> Tensor:
    return F.leaky_relu(x, node.get("alpha", 0.01))


def _elu(node: Node, x: Tensor) -> Tensor:
    return F.elu(x, node.get("alpha", 1.0))


def _prelu(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    # ONNX broadcasts the slope like any other operand; torch's own takes one number per channel.
    return torch.where(x < 0, x * slope, x)


def _gelu(node: Node, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=node.get("approximate", b"none").decode())


def _cast(node: Node, x: Tensor) -> Tensor:
    return x.to(node.element_type(node.get("to")))


def _where(node: Node, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


def _identity(node: Node, x: Tensor, *settings: Tensor) -> Tensor:
    return x


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "Abs": plain(torch.abs),
    "Add": plain(torch.add),
    "And": plain(torch.logical_and),
    "Cast": _cast,
    "Clip": _clip,
    "Div": _div,
    "Dropout": _identity,
    "Elu": _elu,
    "Equal": plain(torch.eq),
    "Erf": plain(torch.erf),
    "Exp": plain(torch.exp),
    "Gelu": _gelu,
    "Greater": plain(torch.gt),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Identity": _identity,
    "LeakyRelu": _leaky_relu,
    "Less": plain(torch.lt),
    "Log": plain(torch.log),
    "Max": _folded(torch.maximum),
    "Min": _folded(torch.minimum),
    "Mul": plain(torch.mul),
    "Neg": plain(torch.neg),
    "Not": plain(torch.logical_not),
    "Or": plain(torch.logical_or),
    "PRelu": _prelu,
    "Pow": plain(torch.pow),
    "Reciprocal": plain(torch.reciprocal),
    "Relu": plain(torch.relu),
    "Sigmoid": plain(torch.sigmoid),
    "Softplus": plain(F.softplus),
    "Sqrt": plain(torch.sqrt),
    "Sub": plain(torch.sub),
    "Sum": _folded(torch.add),
    "Tanh": plain(torch.tanh),
    "Where": _where,
}
