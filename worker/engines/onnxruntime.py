"""onnxruntime behind the smallest interface that serving needs: fixed addresses, `launch()`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx.helper
import onnx.parser
import onnxruntime as ort

from clockwright.elements import Array, array_of, raw_of
from clockwright.errors import ModelError
from clockwright.wire.tensors import ONNX_DATATYPES, TensorSpec
from worker.core.io_pool import ALIGNMENT_BYTES
from worker.models.model_files import BoundTensor, CompiledModel

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

#: The name of the operators that `worker.compiling.plain_values` adds to make one tensor of a sequence.
SEQUENCE_NODE = "one tensor of a sequence"

_shares_allocator = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where onnxruntime computes, and how it calls the memory there."""

    provider: str
    device: str
    index: int = 0
    #: The provider's settings.
    options: Mapping[str, str] = field(default_factory=dict)
    #: The settings of each run.
    run_options: Mapping[str, str] = field(default_factory=dict)


PROCESSOR = Place("CPUExecutionProvider", "cpu")


def aligned_bytes(num_bytes: int) -> Bytes:
    """Take zeroed memory that starts on a cache line, every page touched, so that no use faults later."""
    raw = np.empty(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    raw.fill(0)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + num_bytes]


def open_session(
    graph: bytes | str,
    *,
    save_optimised: Path | None = None,
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    place: Place = PROCESSOR,
    threads: int = 1,
) -> ort.InferenceSession:
    """Make a session that computes on the calling thread, and on `threads - 1` of its own.

    Those inherit cores and priority of the thread that calls this.

    Args:
        graph: a serialised model or its path, taken as it stands unless `save_optimised` is given.
        save_optimised: a path; optimise the graph first and save the result there.
        level: how far to optimise then; all the way is for this processor alone.
        place: where the whole graph computes: a part that a GPU left to the processor could not be
            captured.
        threads: the threads of a run, the calling one included.

    Raises:
        ModelError: the runtime does not accept the graph, or not at this place; carries its words.
    """
    options = ort.SessionOptions()
    # With one thread there is no pool to wait for.
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # A wake-up costs as much as a small operator. So the threads spin from operator to operator, and
    # sleep as soon as the run is over.
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(threads > 1)))
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 4  # fatal only: every error comes back as an exception too
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if save_optimised is not None:
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(save_optimised)
    if place is not PROCESSOR:
        # This level joins convolutions with their ReLUs, which needs no constant weights.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    else:
        # Sessions run one at a time, so the memory that they share grows to the largest need, not to the sum.
        _share_allocator()
        options.add_session_config_entry("session.use_env_allocators", "1")
    try:
        session = ort.InferenceSession(
            graph, options, providers=[(place.provider, dict(place.options))]
        )
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise ModelError(f"onnxruntime does not accept the model: {plain_words(error)}") from None
    # onnxruntime replaces a provider that cannot be loaded by the processor, with a line in the log.
    if place.provider not in session.get_providers():
        raise ModelError(
            f"onnxruntime does not run the model on {place.provider}, but on "
            f"{', '.join(session.get_providers())}"
        )
    return session


class OrtKernel:
    """One architecture at one batch size, bound once to fixed addresses."""

    def __init__(
        self,
        session: ort.InferenceSession,
        compiled: CompiledModel,
        batch_size: int,
        *,
        weights_address: int,
        input_addresses: Sequence[int],
        output_addresses: Sequence[int],
        memory: object = None,
        place: Place = PROCESSOR,
        options: ort.RunOptions | None = None,
    ) -> None:
        """Bind.

        Args:
            session: the compiled graph's session.
            compiled: the graph's metadata.
            batch_size: rows of every launch.
            weights_address: where the weights blob begins at every launch.
            input_addresses: where the batch of each input begins, in the model's order.
            output_addresses: where the batch of each output begins, in the model's order.
            memory: kept alive with the kernel, which knows only addresses.
            place: where the session computes and the addresses point.
            options: those of every run, which can end one. None: no run is ended.
        """
        self._session = session
        self._memory = memory
        self._run_options = options or ort.RunOptions()
        for name, value in place.run_options.items():
            self._run_options.add_run_config_entry(name, value)
        self._binding = session.io_binding()
        for weight in compiled.weights:
            self._binding.bind_input(
                weight.name,
                place.device,
                place.index,
                weight.element_type,
                list(weight.shape),
                weights_address + weight.offset,
            )
        for bind, tensors, addresses in (
            (self._binding.bind_input, compiled.inputs, input_addresses),
            (self._binding.bind_output, compiled.outputs, output_addresses),
        ):
            for tensor, address in zip(tensors, addresses, strict=True):
                shape = list(tensor.spec.shape(batch_size))
                bind(
                    tensor.graph_name,
                    place.device,
                    place.index,
                    tensor.element_type,
                    shape,
                    address,
                )

    def launch(self) -> None:
        """Run once without the GIL. On the processor the outputs are in place at the return."""
        self._session.run_with_iobinding(self._binding, self._run_options)


def tensor_bytes(tensors: Sequence[TensorSpec], batch_size: int) -> list[Bytes]:
    """Take private zeroed memory for a batch of each tensor."""
    return [aligned_bytes(spec.batch_bytes(batch_size)) for spec in tensors]


def private_kernel(
    session: ort.InferenceSession, compiled: CompiledModel, batch_size: int, weights: Bytes
) -> tuple[OrtKernel, list[Bytes], list[Bytes]]:
    """Bind a kernel to memory of its own, apart from the memory of serving.

    Returns the kernel, its inputs and its outputs (zeros so far), each in the model's order.
    """
    inputs = tensor_bytes([tensor.spec for tensor in compiled.inputs], batch_size)
    outputs = tensor_bytes([tensor.spec for tensor in compiled.outputs], batch_size)
    kernel = OrtKernel(
        session,
        compiled,
        batch_size,
        weights_address=address_of(weights),
        input_addresses=[address_of(array) for array in inputs],
        output_addresses=[address_of(array) for array in outputs],
        memory=(weights, inputs, outputs),
    )
    return kernel, inputs, outputs


def run_unshaped(
    session: ort.InferenceSession,
    inputs: Sequence[tuple[BoundTensor, int, Bytes]],
    output_names: Sequence[str],
) -> list[tuple[tuple[int, ...], Bytes]]:
    """Run a batch whose output shapes are not known yet: inputs come with their number of rows.

    Returns the shape and the bytes of each output that is wanted. Raises ModelError that carries the runtime's words.
    """
    if has_texts(session):
        feed = {
            tensor.graph_name: array_of(tensor.spec.datatype, array, tensor.spec.shape(rows))
            for tensor, rows, array in inputs
        }
        arrays = _run_arrays(session, feed, output_names)
        return [(array.shape, raw_of(array)) for array in arrays]
    binding = session.io_binding()
    for tensor, rows, array in inputs:
        shape = list(tensor.spec.shape(rows))
        binding.bind_input(
            tensor.graph_name, "cpu", 0, tensor.element_type, shape, address_of(array)
        )
    for name in output_names:
        binding.bind_output(name, "cpu")
    try:
        session.run_with_iobinding(binding)
    except Exception as error:  # onnxruntime's exceptions have no common base
        most = max(rows for _, rows, _ in inputs)
        raise ModelError(f"a batch of {most} failed: {plain_words(error)}") from None
    results = []
    for value in binding.get_outputs():
        num_bytes = int(value.tensor_size_in_bytes())
        results.append((tuple(value.shape()), _copy_of(value.data_ptr(), num_bytes)))
    return results


# --- texts: onnxruntime takes and gives them as Python's objects only -------------------------------


def has_texts(session: ort.InferenceSession) -> bool:
    """Whether an input or output of a session's graph is text, which has no address to be bound to."""
    return any(
        value.type == "tensor(string)" for value in (*session.get_inputs(), *session.get_outputs())
    )


def _run_arrays(
    session: ort.InferenceSession,
    feed: Mapping[str, Array],
    output_names: Sequence[str],
    options: ort.RunOptions | None = None,
) -> list[Array]:
    try:
        return [np.asarray(found) for found in session.run(output_names, feed, options)]
    except UnicodeEncodeError:
        raise ModelError("found text that is not UTF-8, expected UTF-8, as ONNX has it") from None
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise ModelError(f"a batch failed: {plain_words(error)}") from None


class TextKernel:
    """An architecture with texts, at any batch size."""

    def __init__(
        self,
        session: ort.InferenceSession,
        compiled: CompiledModel,
        weights: Bytes,
        options: ort.RunOptions | None = None,
    ) -> None:
        """Take a compiled graph's session, its metadata, the memory where its weights lie, and the options of every run."""
        self._session = session
        self._options = options
        self._inputs = [tensor.graph_name for tensor in compiled.inputs]
        self._outputs = [tensor.graph_name for tensor in compiled.outputs]
        self._weights = {
            weight.name: weights[weight.offset : weight.offset + weight.num_bytes]
            .view(ONNX_DATATYPES[weight.element_type].numpy_name)
            .reshape(weight.shape)
            for weight in compiled.weights
        }

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Run a batch of the model's inputs. Returns its outputs.

        Raises ModelError if the run failed; carries the runtime's words.
        """
        feed = {**dict(zip(self._inputs, inputs, strict=True)), **self._weights}
        return _run_arrays(self._session, feed, self._outputs, self._options)


def address_of(array: Bytes) -> int:
    """The address at which an array begins."""
    return int(array.ctypes.data)


def plain_words(error: Exception) -> str:
    """The first line of an error that is not empty, without onnxruntime's source locations. torch appends pages of advice."""
    line = next((text.strip() for text in str(error).splitlines() if text.strip()), repr(error))
    head, _, tail = line.partition(" : ")
    if "ONNXRuntimeError" in head and tail:
        line = tail.split(" : ", 2)[-1]
    if f"Name:'{SEQUENCE_NODE}'" in line:
        return (
            "an output is a sequence of tensors of unlike shapes, or of none, expected one shape; export the model with an"
            " output for each tensor, or pad them to one shape"
        )
    return line


def release_memory() -> None:
    """Give back the memory that runs on the processor left behind. All sessions share it, and keep it otherwise."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _empty_session().run(None, {"x": np.array(True)}, options)


@functools.cache
def _empty_session() -> ort.InferenceSession:
    graph = onnx.parser.parse_graph("release (bool x) => (bool y) { y = Not(x) }")
    opset = onnx.helper.make_opsetid("", 17)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8)
    return open_session(model.SerializeToString())


def _copy_of(address: int, num_bytes: int) -> Bytes:
    return np.frombuffer(ctypes.string_at(address, num_bytes), dtype=np.uint8)


def _share_allocator() -> None:
    global _shares_allocator
    if not _shares_allocator:
        memory = ort.OrtMemoryInfo(
            "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
        )
        ort.create_and_register_allocator(memory, None)
        _shares_allocator = True
