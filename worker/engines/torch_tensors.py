"""Tensors as views of plain bytes, such as the arena or a batch."""

from __future__ import annotations

from collections.abc import Sequence

from clockwright.errors import ModelError
from worker.engines.torch_operators import TORCH_TYPES, Tensor
from worker.models.model_files import BoundTensor, WeightTensor


def weight_views(blob: Tensor, weights: Sequence[WeightTensor]) -> dict[str, Tensor]:
    """View the weights by name, without a copy, in a blob of uint8 that may be longer.

    Raises ModelError if torch has no type like a weight's.
    """
    return {weight.name: _weight_view(blob, weight) for weight in weights}


def _weight_view(blob: Tensor, weight: WeightTensor) -> Tensor:
    stored = blob[weight.offset : weight.offset + weight.num_bytes]
    flat = stored.view(_torch_type(weight.element_type, f"weight {weight.name}"))
    if not weight.channels_last:
        return flat.view(weight.shape)
    first, channels, height, width = weight.shape
    return flat.view(first, height, width, channels).permute(0, 3, 1, 2)


def typed_view(memory: Tensor, tensor: BoundTensor, batch_size: int) -> Tensor:
    """View a batch of an input or output, without a copy, in memory of uint8 that may be longer.

    Raises ModelError if torch has no such type.
    """
    spec = tensor.spec
    kind = _torch_type(tensor.element_type, f"tensor {spec.name!r}")
    return memory[: spec.batch_bytes(batch_size)].view(kind).view(spec.shape(batch_size))


def _torch_type(number: int, where: str) -> object:
    if number not in TORCH_TYPES:
        expected = ", ".join(str(kind) for kind in TORCH_TYPES.values())
        raise ModelError(f"{where}: found ONNX type {number}, expected one of {expected}")
    return TORCH_TYPES[number]
