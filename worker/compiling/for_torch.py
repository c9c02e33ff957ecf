"""Compiling for the torch engine: a graph of plain ONNX operators, weights in the precision that runs.

onnxruntime folds what is constant and batch normalisations into convolutions, and stops there: its further
optimisations are for its own kernels. ReLUs and additions are joined with their convolutions when
the graph is read (`worker.engines.torch_program.fuse`), so that weights stay apart from the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import torch.nn.functional as F
from onnx import TensorProto
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from clockwright.errors import ModelError
from worker.compiling.compile import FloatArray, Target
from worker.compiling.lift_weights import LiftedGraph
from worker.core.io_pool import aligned
from worker.engines.onnxruntime import Bytes, plain_words, tensor_bytes
from worker.engines.torch_operators import Tensor
from worker.engines.torch_program import PRECISION_KEY, Program, check_operators
from worker.engines.torch_tensors import typed_view, weight_views
from worker.models.model_files import CompiledModel, WeightTensor
from worker.models.precision import Precision

# The least that the smallest model's outputs are compared with, where all of them are near zero.
_LEAST_SCALE = 1e-3
_PLAIN_TOLERANCE = 1e-3

# Which arguments of a product are rounded: the factors, not what is added.
_FACTORS: dict[Callable[..., Tensor], tuple[int, int]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), (0, 1)),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), (0, 1)),
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), (0, 1)),
    torch.addmm: (1, 2),
}
# Of float32's 23 bits of mantissa TF32 has the first 10.
_DROPPED_BITS = 13


class Tf32Products(TorchFunctionMode):  # type: ignore[misc]  # torch is not type-checked
    """While it is entered, products on the processor are as exact as tensor cores' in TF32.

    Both factors are rounded to TF32, to the nearest and of two as near to the even one; products and sums are
    float32. A card may round a tie otherwise and adds in another order, so this is how far an answer
    moves, not which answer a card gives.
    """

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Called in place of each of torch's functions.
        factors = _FACTORS.get(func, ())
        rounded = [_tf32(each) if i in factors else each for i, each in enumerate(args)]
        return func(*rounded, **(kwargs or {}))


def _tf32(tensor: Tensor) -> Tensor:
    if tensor.dtype is not torch.float32:
        return tensor
    bits = tensor.view(torch.int32)
    # Less than half of what is dropped carries nothing, so that a tie is left to the last bit that stays.
    odd = bits >> _DROPPED_BITS & 1
    carrying = bits + (1 << (_DROPPED_BITS - 1)) - 1 + odd
    return (carrying >> _DROPPED_BITS << _DROPPED_BITS).view(torch.float32)


def products_as_on_a_gpu(precision: Precision) -> AbstractContextManager[object]:
    """What a program is run in on the processor, so that its answers are as exact as on a card."""
    return Tf32Products() if precision is Precision.TF32 else nullcontext()


class TorchTarget(Target):
    """Torch, on whatever device."""

    level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    @override
    def lay_out(self, lifted: LiftedGraph) -> LiftedGraph:
        # Convolutions' weights channels last for tensor cores, float16 if wanted.
        model = onnx.ModelProto.FromString(lifted.graph)
        check_operators(model)
        del model.metadata_props[:]
        model.metadata_props.add(key=PRECISION_KEY, value=self._precision.value)
        kernels = {node.input[1] for node in model.graph.node if node.op_type == "Conv"}
        weights: list[WeightTensor] = []
        pieces: list[Bytes] = []
        offset = 0
        for weight in lifted.weights:
            stored, kind, channels_last = self._stored(weight, lifted.blob, weight.name in kernels)
            weights.append(
                WeightTensor(weight.name, kind, weight.shape, offset, stored.nbytes, channels_last)
            )
            pieces.append(stored)
            offset += aligned(stored.nbytes)
        blob = np.zeros(offset, dtype=np.uint8)
        for weight, piece in zip(weights, pieces, strict=True):
            blob[weight.offset : weight.offset + weight.num_bytes] = piece
        return LiftedGraph(model.SerializeToString(deterministic=True), tuple(weights), blob)

    def _stored(
        self, weight: WeightTensor, blob: Bytes, is_kernel: bool
    ) -> tuple[Bytes, int, bool]:
        """A weight's bytes as they are served, ONNX's number of their type, and whether channels are last."""
        raw = blob[weight.offset : weight.offset + weight.num_bytes]
        if weight.element_type != TensorProto.FLOAT:
            return raw, weight.element_type, False
        array = raw.view(np.float32).reshape(weight.shape)
        channels_last = is_kernel and self._precision.tensor_cores and array.ndim == 4
        if channels_last:
            array = array.transpose(0, 2, 3, 1)
        kind = TensorProto.FLOAT
        if self._precision is Precision.FLOAT16:
            with np.errstate(
                over="ignore"
            ):  # beyond 65,504 it is infinite, and the comparison tells
                array = array.astype(np.float16)
            kind = TensorProto.FLOAT16
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8), kind, channels_last

    @override
    def run(
        self, lifted: LiftedGraph, compiled: CompiledModel, batch_size: int, inputs: list[Bytes]
    ) -> list[Bytes]:
        # On the processor, whatever it is for.
        torch.set_num_threads(1)  # as in onnxruntime's sessions; and it is the compiler's process
        program = Program(lifted.graph, torch.device("cpu"))
        outputs = tensor_bytes([tensor.spec for tensor in compiled.outputs], batch_size)
        places = [torch.from_numpy(array) for array in outputs]
        tensors = [
            typed_view(torch.from_numpy(array), tensor, batch_size)
            for array, tensor in zip(inputs, compiled.inputs, strict=True)
        ]
        try:
            with torch.inference_mode(), products_as_on_a_gpu(self._precision):
                results = program.run(
                    tensors, weight_views(torch.from_numpy(lifted.blob), lifted.weights), {}
                )
                for result, place, tensor in zip(results, places, compiled.outputs, strict=True):
                    typed_view(place, tensor, batch_size).copy_(result)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:  # what torch raises
            raise ModelError(f"a batch of {batch_size} failed: {plain_words(error)}") from None
        return outputs

    @override
    def tolerances(self, wanted: FloatArray) -> tuple[float, float]:
        if self._precision is Precision.FLOAT32:
            return _PLAIN_TOLERANCE, _PLAIN_TOLERANCE
        finite = np.abs(wanted[np.isfinite(wanted)])
        scale = max(float(np.max(finite, initial=0.0)), _LEAST_SCALE)
        return self._precision.tolerance, self._precision.tolerance * scale
