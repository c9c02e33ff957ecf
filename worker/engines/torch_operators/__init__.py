"""ONNX operators as torch calls, for `worker.engines.torch_program`.

An operator is a function of a node and its input tensors. Inputs that decide a shape (listed in `STATIC`)
arrive as tensors in host memory, so that nothing waits for the device; all other inputs lie on the device.
Inputs that a node leaves out are None. No function changes its inputs, waits for the device, or copies from
the host to it.

Each file has the operators of one kind, and its own part of both tables.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.engines.torch_operators import (
    attention,
    convolution,
    elementwise,
    indexing,
    products,
    quantised,
    recurrent,
    reductions,
    resizing,
    shapes,
)
from worker.engines.torch_operators.convolution import conv_add_relu
from worker.engines.torch_operators.node import TORCH_TYPES, Attribute, Node, Outputs, Tensor

__all__ = [
    "OPERATORS",
    "STATIC",
    "TORCH_TYPES",
    "Attribute",
    "Node",
    "Outputs",
    "Tensor",
    "conv_add_relu",
]

#: The operators that can be run, by ONNX's name.
OPERATORS: dict[str, Callable[..., Outputs]] = {
    **attention.OPERATORS,
    **convolution.OPERATORS,
    **elementwise.OPERATORS,
    **indexing.OPERATORS,
    **products.OPERATORS,
    **quantised.OPERATORS,
    **recurrent.OPERATORS,
    **reductions.OPERATORS,
    **resizing.OPERATORS,
    **shapes.OPERATORS,
}

#: Positions of inputs that decide shapes, and so must be known before the device computes.
STATIC: dict[str, tuple[int, ...]] = {
    **elementwise.STATIC,
    **indexing.STATIC,
    **products.STATIC,
    **reductions.STATIC,
    **resizing.STATIC,
    **shapes.STATIC,
}
