"""Compiling for the torch engine: a graph of plain ONNX operators, weights in the precision that runs.

onnxruntime folds constants, and batch normalisations into convolutions, and stops there, because its further
optimisations are for its own kernels. ReLUs and additions are joined with their convolutions only when
the graph is read (`worker.engines.torch_program.fuse`), so that weights stay apart from the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
from worker.compiling.compile import FloatArray, OnnxruntimeTarget, Target
from worker.compiling.lift_weights import LiftedGraph
from worker.compiling.row_probes import Run
from worker.core.io_pool import aligned
from worker.engines.choice import Engine
from worker.engines.onnxruntime import Bytes, plain_words, tensor_bytes
from worker.engines.torch_operators import STATIC, Tensor
from worker.engines.torch_program import ENGINE_KEY, PRECISION_KEY, Program, check_operators
from worker.engines.torch_tensors import typed_view, weight_views
from worker.models.model_files import CompiledModel, WeightTensor
from worker.models.precision import Precision

# The least scale to compare outputs on, for a model whose outputs are all near zero.
_LEAST_SCALE = 1e-3
_PLAIN_TOLERANCE = 1e-3

# The positions of the arguments that a product rounds: its factors, not the sum's other term.
_FACTORS: dict[Callable[..., Any], tuple[int, ...]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), (0, 1)),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), (0, 1)),
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), (0, 1)),
    torch.addmm: (1, 2),
    torch.einsum: (1, 2),
    F.scaled_dot_product_attention: (0, 1, 2),
}
# TF32 keeps the first 10 of float32's 23 bits of mantissa.
_DROPPED_BITS = 13


class TensorCoreProducts(TorchFunctionMode):  # type: ignore[misc]  # torch is not type-checked
    """Makes products on the processor, while entered, as exact as those of tensor cores.

    Float32 factors are rounded to the nearest TF32 number, and a tie to the even one. Float16 factors stay as
    they are. Products and sums are float32, and a sum of float16 products is rounded to float16 at the end, as on
    a GPU. This takes a fifth of the time of the processor's own float16. A GPU may round ties differently, and
    adds in another order. So this shows how far an answer moves, not the exact answer of a GPU.
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
        if func not in _FACTORS:
            return func(*args, **(kwargs or {}))
        factors = _FACTORS[func]
        if args[factors[0]].dtype is torch.float16:
            exact = [each.float() if isinstance(each, torch.Tensor) else each for each in args]
            return func(*exact, **(kwargs or {})).half()
        rounded = [_tf32(each) if i in factors else each for i, each in enumerate(args)]
        return func(*rounded, **(kwargs or {}))


def _tf32(tensor: Tensor) -> Tensor:
    if tensor.dtype is not torch.float32:
        return tensor
    bits = tensor.view(torch.int32)
    # Add just under half of the dropped part, and the last bit that stays: that bit then decides a tie.
    odd = bits >> _DROPPED_BITS & 1
    carrying = bits + (1 << (_DROPPED_BITS - 1)) - 1 + odd
    return (carrying >> _DROPPED_BITS << _DROPPED_BITS).view(torch.float32)


def products_as_on_a_gpu(precision: Precision) -> AbstractContextManager[object]:
    """A context in which a program on the processor answers only as exactly as on a GPU."""
    return TensorCoreProducts() if precision.tensor_cores else nullcontext()


class OnnxruntimeOnGpuTarget(OnnxruntimeTarget):
    """onnxruntime where torch computes too, for graphs that torch does not run."""

    # Its kernels are the device's own, so further optimisations come with the session there.
    level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    takes_any_size = False

    @override
    def lay_out(self, lifted: LiftedGraph) -> LiftedGraph:
        model = onnx.ModelProto.FromString(lifted.graph)
        _refuse_texts(model)
        # torch's answers are not compared with the original's, so torch must never run it.
        model.metadata_props.add(key=ENGINE_KEY, value=Engine.ONNXRUNTIME.value)
        return replace(lifted, graph=model.SerializeToString(deterministic=True))


def _refuse_texts(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.STRING:
            raise ModelError(
                "an input or output has datatype STRING, which a GPU does not run; start a worker with --device cpu"
            )


class TorchTarget(Target):
    """Torch, on whatever device."""

    level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    static = STATIC
    one_program = True
    takes_any_size = False

    def __init__(self, precision: Precision, check_threads: int = 1) -> None:
        self._precision = precision
        self.check_threads = check_threads
        self.seen_apart = set()
        self.is_coarse = precision is not Precision.FLOAT32

    @override
    def lay_out(self, lifted: LiftedGraph) -> LiftedGraph:
        # Tensor cores get the weights of convolutions with channels last; all weights are float16 if wanted.
        model = onnx.ModelProto.FromString(lifted.graph)
        _refuse_texts(model)
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

    @override
    def choose_threads(
        self, lifted: LiftedGraph, compiled: CompiledModel, batch_sizes: Sequence[int]
    ) -> int:
        return 1

    def _stored(
        self, weight: WeightTensor, blob: Bytes, is_kernel: bool
    ) -> tuple[Bytes, int, bool]:
        """A weight's bytes as served, ONNX's number of their type, and whether channels come last."""
        raw = blob[weight.offset : weight.offset + weight.num_bytes]
        if weight.element_type != TensorProto.FLOAT:
            return raw, weight.element_type, False
        array = raw.view(np.float32).reshape(weight.shape)
        channels_last = is_kernel and self._precision.tensor_cores and array.ndim == 4
        if channels_last:
            array = array.transpose(0, 2, 3, 1)
        kind = TensorProto.FLOAT
        if self._precision is Precision.FLOAT16:
            # Masks are often float32's least number, which times zero must stay zero. A weight that is cut off
            # for no such reason changes the answers, and the comparison with the original finds it.
            most = float(np.finfo(np.float16).max)
            array = array.clip(-most, most).astype(np.float16)
            kind = TensorProto.FLOAT16
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8), kind, channels_last

    @override
    def open(self, lifted: LiftedGraph, compiled: CompiledModel) -> Run:
        # The compiler has only the processor, whatever device the model is for.
        torch.set_num_threads(self.check_threads)
        program = Program(lifted.graph, torch.device("cpu"))
        weights = weight_views(torch.from_numpy(lifted.blob), lifted.weights)

        def run(batch_size: int, inputs: list[Bytes]) -> list[Bytes]:
            outputs = tensor_bytes([tensor.spec for tensor in compiled.outputs], batch_size)
            places = [torch.from_numpy(array) for array in outputs]
            tensors = [
                typed_view(torch.from_numpy(array), tensor, batch_size)
                for array, tensor in zip(inputs, compiled.inputs, strict=True)
            ]
            try:
                with torch.inference_mode(), products_as_on_a_gpu(self._precision):
                    results = program.run(tensors, weights, {})
                    for result, place, tensor in zip(
                        results, places, compiled.outputs, strict=True
                    ):
                        typed_view(place, tensor, batch_size).copy_(result)
            except (RuntimeError, TypeError, IndexError, ValueError) as error:  # what torch raises
                raise ModelError(f"a batch of {batch_size} failed: {plain_words(error)}") from None
            return outputs

        return run

    @override
    def tolerances(self, wanted: FloatArray) -> tuple[float, float]:
        if self._precision is Precision.FLOAT32:
            return _PLAIN_TOLERANCE, _PLAIN_TOLERANCE
        finite = np.abs(wanted[np.isfinite(wanted)])
        scale = max(float(np.max(finite, initial=0.0)), _LEAST_SCALE)
        return self._precision.tolerance, self._precision.tolerance * scale
