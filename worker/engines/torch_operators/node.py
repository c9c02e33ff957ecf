"""The node that every operator gets, and functions that read its inputs and attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from onnx import TensorProto

from clockwright.errors import ModelError

Tensor: TypeAlias = torch.Tensor
#: An attribute of a node; the attribute's name decides its type.
Attribute: TypeAlias = Any
Outputs: TypeAlias = Tensor | Sequence[Tensor]

#: torch's types by ONNX's number of the datatype.
TORCH_TYPES: dict[int, torch.dtype] = {
    TensorProto.BOOL: torch.bool,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a graph."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    #: The version of ONNX's operator set.
    opset: int = 17
    #: The type that float32 is computed in.
    float_type: torch.dtype = torch.float32

    def get(self, name: str, default: Attribute = None) -> Attribute:
        """The value of an attribute."""
        return self.attributes.get(name, default)

    def refuse(self, problem: str) -> ModelError:
        """Make an error about this node."""
        return ModelError(f"operator {self.op_type}: {problem}, which the torch engine cannot run")

    def element_type(self, number: int) -> torch.dtype:
        """The type to compute in, by ONNX's number. Raises ModelError if torch has no such type."""
        found = TORCH_TYPES.get(number)
        if found is None:
            raise self.refuse(f"element type {TensorProto.DataType.Name(number)}")
        return self.float_type if found is torch.float32 else found


def plain(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an operator from a torch function that means the same and takes no attributes."""

    def operator(node: Node, *inputs: Tensor) -> Tensor:
        return function(*inputs)

    return operator


def attributed(function: Callable[..., Tensor], **defaults: Attribute) -> Callable[..., Tensor]:
    """Make an operator from a function of the inputs and then of these attributes."""

    def operator(node: Node, *inputs: Tensor) -> Tensor:
        return function(*inputs, *(node.get(name, value) for name, value in defaults.items()))

    return operator


def ints(tensor: Tensor | None) -> list[int] | None:
    """Read whole numbers that lie in host memory."""
    return None if tensor is None else [int(number) for number in tensor.reshape(-1).tolist()]


def number(tensor: Tensor | None, default: Attribute = None) -> Attribute:
    """Read a single number that lies in host memory."""
    return default if tensor is None else tensor.reshape(-1).tolist()[0]


def axes_of(node: Node, given: Tensor | None) -> list[int] | None:
    """Read the axes, an attribute in older operator sets and an input in newer ones."""
    found = node.get("axes") if given is None else ints(given)
    return None if found is None else list(found)
