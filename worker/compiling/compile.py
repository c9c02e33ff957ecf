"""Compiles an ONNX file to what a worker serves: a graph without weights, the weights, metadata.

This runs in a process of its own (`worker.compiling.compiler_process`), because a hostile or broken model
may crash or hang the runtime. Order matters: optimise first, lift the weights afterwards
(`worker.compiling.lift_weights`).
"""

from __future__ import annotations

import hashlib
import mmap
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from typing_extensions import override

from clockwright.errors import ModelError
from clockwright.tensors import DATATYPE_BYTES, TensorSpec
from clockwright.units import NS_PER_S
from worker.compiling.lift_weights import LIFT_LEVELS, LiftedGraph, lift_weights
from worker.compiling.onnx_model import (
    DATATYPES,
    describe_outputs,
    has_fixed_batch,
    model_inputs,
    read_model,
    tensor_spec,
    tensor_spec_type,
)
from worker.compiling.row_flow import follow_rows
from worker.compiling.row_probes import RowProbes, Run
from worker.compiling.thread_trial import Launches, choose_threads
from worker.engines.onnxruntime import (
    Bytes,
    OrtKernel,
    aligned_bytes,
    open_session,
    plain_words,
    private_kernel,
    run_unshaped,
)
from worker.models.model_files import (
    GRAPH_FILE,
    METADATA_FILE,
    WEIGHTS_FILE,
    BoundTensor,
    CompiledModel,
    Limits,
    ModelSource,
    batch_bytes,
)

# A part of the compile cache's key: raise it when the files' meaning changes.
COMPILE_FORMAT = 4

# A compiled kernel may sum in another order than the reference, and differ in nothing else.
_TOLERANCE = 1e-3
_NUMPY_FLOATS = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}

# Linux 5.14: bring all pages of a mapping in now.
_MADV_POPULATE_READ = 22

# Sets of rows to try where the graph leaves open whether rows meet; one where it proves that they do not.
_UNPROVEN_SEEDS = 4

# Profiles seed the controller's estimates, which measurements replace soon: a few runs are enough.
_PROFILE_RUNS = 7
_PROFILE_BUDGET_NS = NS_PER_S // 2

# The larger batch of the trial of threads: per row it says nearly what larger ones say, in less time.
_TRIAL_BATCH = 4

FloatArray = np.ndarray[Any, np.dtype[np.floating[Any]]]


class Target(Protocol):
    """The engine that compiled models are for."""

    #: How far onnxruntime optimises a graph before its weights are lifted.
    level: ort.GraphOptimizationLevel

    #: By operator, the positions of inputs that it has to know when it reads a graph.
    static: Mapping[str, Sequence[int]]

    #: Whether it computes with fewer digits than float32 has.
    is_coarse: bool

    #: Whether the runs here are one program for all batch sizes, and not the kernels that will serve.
    one_program: bool

    #: The threads of runs that only check.
    check_threads: int

    #: Architectures whose rows were seen apart, with the sizes that were tried.
    seen_apart: set[tuple[str, tuple[int, ...]]]

    def lay_out(self, lifted: LiftedGraph) -> LiftedGraph:
        """Bring graph and weights into the form that is served.

        Raises:
            ModelError: the engine cannot serve the graph.
        """

    def open(self, lifted: LiftedGraph, compiled: CompiledModel) -> Run:
        """Make what runs batches on this machine; it raises a ModelError with the engine's words if it fails.

        Raises:
            ModelError: the engine does not accept the graph; carries its words.
        """

    def choose_threads(
        self, lifted: LiftedGraph, compiled: CompiledModel, batch_sizes: Sequence[int]
    ) -> int:
        """Say how many threads of the processor run the graph best at these batch sizes.

        Raises:
            ModelError: the engine does not accept the graph; carries its words.
        """

    def tolerances(self, wanted: FloatArray) -> tuple[float, float]:
        """How far an output may be from the original's: relative to each number, and absolutely."""


class OnnxruntimeTarget(Target):
    """This machine's processor."""

    def __init__(self, thread_counts: Sequence[int] = (1,)) -> None:
        """Take the numbers of threads that a run may have, ascending."""
        self._thread_counts = thread_counts
        self.check_threads = max(thread_counts)
        self.seen_apart = set()
        #: What was chosen, by architecture.
        self._chosen: dict[str, int] = {}

    level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    static: Mapping[str, Sequence[int]] = MappingProxyType({})
    is_coarse = False
    one_program = False

    @override
    def lay_out(self, lifted: LiftedGraph) -> LiftedGraph:
        # onnxruntime's optimisation has laid everything out already.
        return lifted

    @override
    def open(self, lifted: LiftedGraph, compiled: CompiledModel) -> Run:
        session = open_session(lifted.graph, threads=compiled.threads)
        weights = _aligned(lifted.blob)

        def run(batch_size: int, inputs: list[Bytes]) -> list[Bytes]:
            kernel, places, outputs = private_kernel(session, compiled, batch_size, weights)
            for array, sample in zip(places, inputs, strict=True):
                array[:] = sample
            try:
                kernel.launch()
            except Exception as error:  # onnxruntime's exceptions have no common base
                raise ModelError(f"a batch of {batch_size} failed: {plain_words(error)}") from None
            return outputs

        return run

    @override
    def choose_threads(
        self, lifted: LiftedGraph, compiled: CompiledModel, batch_sizes: Sequence[int]
    ) -> int:
        if len(self._thread_counts) == 1:
            return self._thread_counts[0]
        key = compiled.architecture_id
        if key not in self._chosen:
            launches: dict[int, Launches] = {}
            for count in self._thread_counts:
                session = open_session(lifted.graph, threads=count)
                launches[count] = {
                    size: _sample_kernel(session, compiled, size, _aligned(lifted.blob)).launch
                    for size in {1, min(max(batch_sizes), _TRIAL_BATCH)}
                }
            try:
                self._chosen[key] = choose_threads(launches)
            except Exception as error:  # onnxruntime's exceptions have no common base
                raise ModelError(f"a trial run failed: {plain_words(error)}") from None
        return self._chosen[key]

    @override
    def tolerances(self, wanted: FloatArray) -> tuple[float, float]:
        return _TOLERANCE, _TOLERANCE


def compile_model(
    source: ModelSource,
    folder: Path,
    limits: Limits,
    progress: Callable[[str], None],
    target: Target | None = None,
    otherwise: Target | None = None,
) -> CompiledModel:
    """Compile a model into the files of `worker.models.model_files`.

    Args:
        source: the model.
        folder: the folder to write to; exists and is empty.
        limits: what the worker has room for.
        progress: told the stage, in words.
        target: the engine to compile for; this machine's processor by default.
        otherwise: the engine to compile for where that one refuses the model; optimises graphs as far as it.

    Raises:
        ModelError: the model cannot be served; says what was found and what is expected.
    """
    target = target or OnnxruntimeTarget()
    progress("checking")
    model = read_model(source)
    fixed_batch = has_fixed_batch(model.graph)
    inputs = [tensor_spec(value, "input") for value in model_inputs(model.graph)]
    for value in model.graph.output:
        tensor_spec_type(value, "output")
    # Check the limits before the runtime copies the weights, and before sample inputs are made.
    limits.check_weights(sum(len(t.raw_data) for t in model.graph.initializer))
    limits.usable_batch_sizes(inputs, [1], fixed_batch=fixed_batch)

    progress("optimising")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        optimised_path = Path(scratch) / "optimised.onnx"
        try:
            serialised = model.SerializeToString()
        except ValueError as error:
            raise ModelError(f"the model is too large to be serialised: {error}") from None
        element_types = _element_types(model)
        datatypes = {v.name: DATATYPES[element_types[v.name]] for v in model.graph.output}
        in_batches = not fixed_batch and max(source.batch_sizes) > 1
        flow = follow_rows(model)
        del model
        reference = open_session(
            serialised,
            save_optimised=optimised_path,
            level=target.level,
            threads=target.check_threads,
        )
        del serialised
        bound = [BoundTensor(spec, spec.name, element_types[spec.name]) for spec in inputs]
        original = _Original(reference, bound, datatypes)
        del reference
        samples = {1: _sample_inputs(inputs, 1)}
        expected = {1: original.run(1, samples[1])}
        outputs = original.output_specs()
        larger = [
            size
            for size in sorted(source.batch_sizes)
            if in_batches and size > 1 and batch_bytes((*inputs, *outputs), size) <= limits.io_bytes
        ]
        probes = RowProbes(
            original.run,
            inputs,
            flow.index_bounds,
            num_seeds=_UNPROVEN_SEEDS if larger and flow.open_at else 1,
        )
        original.output_specs()
        one_by_one = ""
        if larger:
            try:
                pair = _sample_inputs(inputs, 2)
                expected[2] = original.run(2, pair)
                original.output_specs()
                one_by_one = flow.mixed
            except ModelError as error:
                one_by_one = str(error)
            if not one_by_one:
                samples[2] = pair
        del original

        progress("lifting weights")
        reasons: dict[Target, list[str]] = {}
        targets = (target,) if otherwise is None else (target, otherwise)
        for target, level in product(targets, LIFT_LEVELS):
            try:
                model = onnx.load(optimised_path)
                lifted = target.lay_out(lift_weights(model, level=level, static=target.static))
                compiled = _describe(
                    lifted, inputs, outputs, element_types, fixed_batch=fixed_batch
                )
                compiled = replace(
                    compiled,
                    threads=target.choose_threads(
                        lifted, compiled, (1,) if one_by_one else (1, *larger)
                    ),
                )
                run = target.open(lifted, compiled)
                if not flow.chance:
                    _compare(target, run, compiled, samples, expected)
            except ModelError as error:
                reasons.setdefault(target, []).append(str(error))
            else:
                break
        else:
            raise ModelError("; ".join(map(_why_refused, reasons.values())))
        if larger and not one_by_one:
            # Where the graph proves that rows stay apart, runs only look for a mistake in the engine, which does not
            # depend on weights.
            is_proven = not flow.open_at and not flow.chooses and not flow.coarse
            seen = (compiled.architecture_id, tuple(larger))
            if not is_proven or seen not in target.seen_apart:
                progress("probing rows")
                one_by_one = _why_one_by_one(
                    run,
                    probes,
                    outputs,
                    larger,
                    coarse=flow.coarse or target.is_coarse,
                    ends_only=is_proven and target.one_program,
                )
                if not one_by_one:
                    target.seen_apart.add(seen)
    compiled = replace(compiled, one_by_one=one_by_one, tried=(1, *larger))
    limits.check_weights(compiled.weights_bytes)
    (folder / GRAPH_FILE).write_bytes(lifted.graph)
    lifted.blob.tofile(folder / WEIGHTS_FILE)
    (folder / METADATA_FILE).write_text(compiled.to_json(), encoding="utf-8")
    return compiled


def describe_model(source: ModelSource) -> CompiledModel:
    """Read a model's inputs and outputs, all that a device needs that computes nothing.

    Raises:
        ModelError: the model cannot be served, as far as that shows without running it.
    """
    model = read_model(source)
    fixed_batch = has_fixed_batch(model.graph)
    inputs = [tensor_spec(value, "input") for value in model_inputs(model.graph)]
    element_types = _element_types(model)
    for value in model.graph.output:
        tensor_spec_type(value, "output")
    outputs = describe_outputs(model)
    return CompiledModel(
        architecture_id="",
        weights_sha256="",
        weights_bytes=0,
        inputs=tuple(BoundTensor(s, s.name, element_types[s.name]) for s in inputs),
        outputs=tuple(BoundTensor(s, s.name, element_types[s.name]) for s in outputs),
        fixed_batch=fixed_batch,
    )


def profile_model(
    folder: Path,
    batch_sizes: Sequence[int],
    progress: Callable[[str], None],
) -> dict[int, int]:
    """Measure a compiled model's kernels, in ns by batch size, without the copies around them."""
    compiled = CompiledModel.from_json((folder / METADATA_FILE).read_text(encoding="utf-8"))
    weights = read_weights(folder, compiled)
    durations = {}
    for batch_size in batch_sizes:
        progress(f"profiling batch {batch_size}")
        session = open_session(str(folder / GRAPH_FILE), threads=compiled.threads)
        kernel = _sample_kernel(session, compiled, batch_size, weights)
        try:
            kernel.launch()  # the first run allocates
            durations[batch_size] = _least_ns(kernel.launch)
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise ModelError(f"a batch of {batch_size} failed: {plain_words(error)}") from None
    return durations


def read_weights(folder: Path, compiled: CompiledModel) -> Bytes:
    """Map a compiled model's weights, which can only be read.

    All models of this host with this file have the same memory, which is the file's in the page cache.
    """
    if not compiled.weights_bytes:
        return aligned_bytes(0)
    with (folder / WEIGHTS_FILE).open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # A LOAD that met a page which is not there would wait for the disk.
    with suppress(OSError):  # a kernel before 5.14: the pages come with the first run
        mapping.madvise(_MADV_POPULATE_READ)
    return np.frombuffer(mapping, np.uint8)


def _sample_kernel(
    session: ort.InferenceSession, compiled: CompiledModel, batch_size: int, weights: Bytes
) -> OrtKernel:
    kernel, inputs, _ = private_kernel(session, compiled, batch_size, weights)
    samples = _sample_inputs([tensor.spec for tensor in compiled.inputs], batch_size)
    for array, sample in zip(inputs, samples, strict=True):
        array[:] = sample
    return kernel


def _aligned(blob: Bytes) -> Bytes:
    weights = aligned_bytes(blob.nbytes)
    weights[:] = blob
    return weights


def _least_ns(launch: Callable[[], None]) -> int:
    samples: list[int] = []
    begin_ns = time.monotonic_ns()
    while len(samples) < _PROFILE_RUNS and time.monotonic_ns() - begin_ns < _PROFILE_BUDGET_NS:
        start_ns = time.monotonic_ns()
        launch()
        samples.append(time.monotonic_ns() - start_ns)
    # Take the least, because other load on the machine only adds. Under such load the median once said
    # 59 ms for a ResNet-18 that takes 19.
    return min(samples)


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    return {
        value.name: value.type.tensor_type.elem_type
        for value in (*model.graph.input, *model.graph.output)
    }


def _sample_inputs(inputs: Sequence[TensorSpec], batch_size: int) -> list[Bytes]:
    """Make inputs to run on: small positive floats, and otherwise zeros, which are legal indices anywhere."""
    arrays = []
    for seed, spec in enumerate(inputs):
        # One generator per input, so that the first row is the same whatever the batch size.
        generator = np.random.default_rng(seed)
        array = aligned_bytes(spec.row_bytes * batch_size)
        if spec.datatype in _NUMPY_FLOATS:
            dtype = _NUMPY_FLOATS[spec.datatype]
            count = array.nbytes // DATATYPE_BYTES[spec.datatype]
            array[:] = generator.random(count, dtype=np.float32).astype(dtype).view(np.uint8)
        arrays.append(array)
    return arrays


class _Original:
    """The model as its owner wrote it, on onnxruntime."""

    def __init__(
        self,
        session: ort.InferenceSession,
        inputs: Sequence[BoundTensor],
        outputs: Mapping[str, str],
    ) -> None:
        """Take a session.

        Args:
            session: the model's.
            inputs: what it takes.
            outputs: the datatypes of what it gives, by name.
        """
        self._session = session
        self._inputs = inputs
        self._outputs = outputs
        #: The batch sizes of runs, each with the shapes of the outputs that came.
        self._shapes: dict[tuple[int, tuple[tuple[int, ...], ...]], None] = {}

    def run(self, batch_size: int, inputs: list[Bytes]) -> list[Bytes]:
        """Run a batch.

        Raises:
            ModelError: the run failed; carries the runtime's words.
        """
        tensors = list(zip(self._inputs, inputs, strict=True))
        found = run_unshaped(self._session, tensors, list(self._outputs), batch_size)
        self._shapes[batch_size, tuple(shape for shape, _ in found)] = None
        return [array for _, array in found]

    def output_specs(self) -> list[TensorSpec]:
        """Read output specs off what runs returned: shapes in files are often missing, and sometimes wrong.

        Raises:
            ModelError: an output does not begin with the batch, or its rows have no fixed shape.
        """
        specs = []
        for index, (name, datatype) in enumerate(self._outputs.items()):
            shapes = dict.fromkeys((size, shapes[index]) for size, shapes in self._shapes)
            found = ", ".join(f"{list(shape)} for {size} rows" for size, shape in shapes)
            for size, shape in shapes:
                if not shape or shape[0] != size:
                    raise ModelError(
                        f"output {name!r} has shape {found}; expected the batch as its first dimension"
                    )
            rows = {shape[1:] for _, shape in shapes}
            if len(rows) != 1 or 0 in next(iter(rows)):
                raise ModelError(
                    f"output {name!r} has shape {found}; expected rows of one fixed shape"
                )
            specs.append(TensorSpec(name, datatype, rows.pop()))
        return specs


def _why_refused(reasons: Sequence[str]) -> str:
    """Say why an engine does not serve a model, of what it said at each level of lifting weights."""
    if len(set(reasons)) == 1:
        return reasons[0]
    return f"its weights cannot be separated from its graph: {reasons[-1]}"


def _why_one_by_one(
    run: Run,
    probes: RowProbes,
    outputs: Sequence[TensorSpec],
    batch_sizes: Sequence[int],
    *,
    coarse: bool,
    ends_only: bool,
) -> str:
    """Say why an engine's answers in batches are not those of the rows alone; empty if they are.

    With `ends_only` the smallest size is probed, and rows of the largest are compared with the rows alone.
    """
    try:
        if probes.is_chance(run):
            return "it answers by chance: the same row asked again is answered otherwise"
        probed, compared = batch_sizes, batch_sizes[:0]
        if ends_only:
            probed, compared = batch_sizes[:1], batch_sizes[1:][-1:]
        reasons = chain(
            (probes.why_mixed(run, outputs, size, coarse=coarse) for size in probed),
            (probes.why_otherwise(run, outputs, size, coarse=coarse) for size in compared),
        )
        return next(filter(None, reasons), "")
    except ModelError as error:
        return str(error)


def _describe(
    lifted: LiftedGraph,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    element_types: dict[str, int],
    *,
    fixed_batch: bool,
) -> CompiledModel:
    graph = onnx.ModelProto.FromString(lifted.graph).graph
    names = [value.name for value in graph.input][: len(inputs)]
    return CompiledModel(
        architecture_id=hashlib.sha256(lifted.graph).hexdigest(),
        weights_sha256=hashlib.sha256(lifted.blob.data).hexdigest(),
        weights_bytes=lifted.blob.nbytes,
        inputs=tuple(
            BoundTensor(spec, name, element_types[spec.name])
            for spec, name in zip(inputs, names, strict=True)
        ),
        outputs=tuple(
            BoundTensor(spec, value.name, element_types[spec.name])
            for spec, value in zip(outputs, graph.output, strict=True)
        ),
        weights=lifted.weights,
        fixed_batch=fixed_batch,
    )


def _compare(
    target: Target,
    run: Run,
    compiled: CompiledModel,
    samples: dict[int, list[Bytes]],
    expected: dict[int, list[Bytes]],
) -> None:
    """Run the compiled graph beside the reference.

    Raises:
        ModelError: the engine fails, or answers something else.
    """
    for size, inputs in samples.items():
        outputs = run(size, inputs)
        for tensor, found, wanted in zip(compiled.outputs, outputs, expected[size], strict=True):
            dtype = _NUMPY_FLOATS.get(tensor.spec.datatype)
            if dtype is None:
                continue
            rtol, atol = target.tolerances(wanted.view(dtype))
            if not np.allclose(
                found.view(dtype), wanted.view(dtype), rtol=rtol, atol=atol, equal_nan=True
            ):
                raise ModelError(f"output {tensor.spec.name!r} differs from the original's")
