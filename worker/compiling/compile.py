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
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from typing_extensions import override

from clockwright.elements import Array, array_of, raw_of
from clockwright.errors import ModelError, ModelFaults
from clockwright.units import NS_PER_S
from clockwright.wire.tensors import (
    DATATYPES,
    ONNX_DATATYPES,
    PLAIN_DATATYPES,
    TensorSpec,
    sum_of,
)
from worker.compiling.empty_sequences import guard_recurrent
from worker.compiling.known_texts import NUMERALS, draw_known, known_texts
from worker.compiling.lift_weights import LIFT_LEVELS, LiftedGraph, lift_weights
from worker.compiling.onnx_model import (
    describe_outputs,
    find_rows,
    input_specs,
    read_model,
)
from worker.compiling.open_sizes import (
    RanksError,
    Shapes,
    Sizes,
    SizeSearch,
    at_form,
    at_sizes,
    draw_row,
    fullest,
    open_inputs,
    open_outputs,
    prove_padding,
    short_sizes,
    sums_of,
    symbols_of,
    taking,
)
from worker.compiling.row_flow import follow_rows, shaped_by_values
from worker.compiling.row_probes import RowProbes, Run, is_by_chance
from worker.compiling.thread_trial import Launches, choose_threads
from worker.engines.onnxruntime import (
    Bytes,
    TextKernel,
    aligned_bytes,
    has_texts,
    open_session,
    plain_words,
    private_kernel,
    run_unshaped,
)
from worker.engines.open_kernel import OpenKernel
from worker.models.forms import PADDED_ROOM, forms_of
from worker.models.model_files import (
    GRAPH_FILE,
    METADATA_FILE,
    WEIGHTS_FILE,
    BoundTensor,
    CompiledModel,
    Limits,
    ModelSource,
    OpenSizes,
    batch_bytes,
    sizes_to_write,
)

# A part of the compile cache's key: raise it when the files' meaning changes.
COMPILE_FORMAT = 12

# A compiled kernel may sum in another order than the reference, and differ in nothing else.
_TOLERANCE = 1e-3

# Linux 5.14: bring all pages of a mapping in now.
_MADV_POPULATE_READ = 22

# What to write into integers of the first runs, until the model takes it: a count of 0 may divide, axes have to differ.
# Then floats are 1, too: they may be scales. The last two are for the shape of a Reshape, and for the steps and axes of
# a Slice.
_COUNTED, _ONES, _REST, _BACK = -1, -2, -3, -4
_PATTERNS = {
    _COUNTED: np.arange(1, 9),
    _REST: np.array([-1, 1, 1, 1, 1, 1, 1, 1]),
    _BACK: np.arange(-1, -9, -1),
}
_FILLS = (0, 1, 2, 3, _COUNTED, _ONES, _REST, _BACK)

# More open dimensions than any model has.
_OPEN_MAX = 1 << 10

_CHANCE = "it answers by chance: the same row asked again is answered otherwise"

# Profiles seed the controller's estimates, which measurements replace soon: a few runs are enough.
_PROFILE_RUNS = 7
_PROFILE_BUDGET_NS = NS_PER_S // 2
#: After so long, larger batches are not measured. A second per row takes a minute for the usual sizes.
PROFILE_LIMIT_NS = 10 * NS_PER_S

# A batch that takes more of what its rows take in smaller ones gains nothing. The least of some runs differs by less.
_NO_GAIN = 0.97

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

    #: Whether it runs any shape as it is. Otherwise it has kernels for some sizes of one open dimension, and rows are padded.
    takes_any_size: bool

    #: The threads of runs that only check.
    check_threads: int

    #: Architectures whose rows were seen apart, with the sizes that were tried.
    seen_apart: set[tuple[str, tuple[int, ...]]]

    def lay_out(self, lifted: LiftedGraph) -> LiftedGraph:
        """Bring graph and weights into the form that the engine serves.

        Raises ModelError if the engine cannot serve the graph.
        """

    def open(self, lifted: LiftedGraph, compiled: CompiledModel) -> Run:
        """Open the graph for runs on this machine. A run that fails raises a ModelError with the engine's message.

        Raises ModelError if the engine does not accept the graph; carries its words.
        """

    def choose_threads(
        self, lifted: LiftedGraph, compiled: CompiledModel, batch_sizes: Sequence[int]
    ) -> int:
        """Choose the number of threads that runs the graph best at these batch sizes.

        Raises ModelError if the engine does not accept the graph; carries its words.
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
    takes_any_size = True

    @override
    def lay_out(self, lifted: LiftedGraph) -> LiftedGraph:
        # onnxruntime's optimisation has laid everything out already.
        return lifted

    @override
    def open(self, lifted: LiftedGraph, compiled: CompiledModel) -> Run:
        session = open_session(lifted.graph, threads=compiled.threads)
        weights = _aligned(lifted.blob)
        if has_texts(session):
            return _text_run(session, compiled, weights)

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
                    size: sample_launch(session, compiled, size, _aligned(lifted.blob))
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
        otherwise: the engine to compile for if `target` refuses the model; it optimises graphs as far as `target`.

    Raises:
        ModelError: the model cannot be served; says what was found and what is expected.
    """
    target = target or OnnxruntimeTarget()
    arguments = source, folder, limits, progress, target, otherwise
    try:
        return _compile(*arguments, is_whole=False)
    except (_NoRowsError, RanksError):
        return _compile(*arguments, is_whole=True)


class _NoRowsError(Exception):
    """Answers are not made of rows, so a request has to be one run, and its batch a dimension as any other."""


def _compile(
    source: ModelSource,
    folder: Path,
    limits: Limits,
    progress: Callable[[str], None],
    target: Target,
    otherwise: Target | None,
    *,
    is_whole: bool,
) -> CompiledModel:
    progress("checking")
    faults = ModelFaults()
    model = read_model(source, faults, is_whole=is_whole)
    rows = find_rows(model.graph, is_whole=is_whole)
    if rows.is_square and target.takes_any_size:
        raise _NoRowsError
    fixed_batch = not rows.is_open
    inputs = opened = list[TensorSpec]()
    given = {} if faults.found else source.fixed_dimensions
    with faults.collected():
        open_max = _OPEN_MAX if target.takes_any_size else 1
        inputs = opened = input_specs(model.graph, rows, given, open_max=open_max)
    symbols = symbols_of(opened)
    room = 1 if target.takes_any_size else PADDED_ROOM
    if target.takes_any_size:
        guard_recurrent(model, None if symbols else shaped_by_values(model.graph))
    # Check the limits before the runtime copies the weights, and before sample inputs are made.
    with faults.collected():
        limits.check_weights(sum(len(t.raw_data) for t in model.graph.initializer))
    if inputs:
        with faults.collected():
            limits.usable_batch_sizes(inputs, [1], fixed_batch=fixed_batch)
    faults.check()

    progress("optimising")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        optimised_path = Path(scratch) / "optimised.onnx"
        try:
            serialised = model.SerializeToString()
        except ValueError as error:
            raise ModelError(f"the model is too large to be serialised: {error}") from None
        element_types = _element_types(model)
        datatypes = {v.name: ONNX_DATATYPES[element_types[v.name]].name for v in model.graph.output}
        # Batches of a model of open sizes hold several requests whatever their sizes, which are in rows of work.
        wanted = {*source.batch_sizes, 2} if symbols else set(source.batch_sizes)
        in_batches = not fixed_batch and max(wanted) > 1
        # Files are large, so the model does not stay in memory with its session, but where sizes are to be found first.
        flow = None if symbols else follow_rows(model, rows=rows)
        texts = known_texts(model.graph) if "BYTES" in {each.datatype for each in inputs} else ()
        if not symbols:
            del model
        reference = open_session(
            serialised,
            save_optimised=optimised_path,
            level=target.level,
            threads=target.check_threads,
        )
        del serialised
        found_sizes: OpenSizes | None = None
        bounds: dict[str, int] = {}
        taken: dict[Sizes, Shapes] = {}
        if symbols:
            progress("finding sizes")
            bounds = {name: -size for name, size in source.fixed_dimensions.items() if size < 0}
            run_at = _RowRuns(reference, opened, element_types, datatypes, texts).run
            search = SizeSearch(
                run_at,
                symbols,
                bounds,
                limits.io_bytes // (2 * room),
                opened,
                list(datatypes.values()),
            )
            sizes = dict(zip(symbols, search.find(), strict=True))
            sizes |= {name: sum_of(parts, sizes) for name, parts in sums_of(opened).items()}
            taken, found_sizes = search.taken, replace(search.open_sizes(), room=room)
            inputs = [at_sizes(spec, sizes) for spec in opened]
            flow = follow_rows(model, sizes, rows)
            del model
        assert flow is not None
        original = _Original(reference, _bind(inputs, element_types), datatypes, texts)
        del reference
        fill = original.find_fill()
        texts = original.texts
        samples = {1: sample_inputs(inputs, 1, fill, texts)}
        expected = {1: original.run(1, samples[1])}
        outputs = original.output_specs()
        larger = [
            size
            for size in sorted(wanted)
            if in_batches and size > 1 and batch_bytes((*inputs, *outputs), size) <= limits.io_bytes
        ]
        carries = target.takes_any_size  # Tensors that carry their sizes may have any.
        by_value = original.by_value(flow.by_value) if carries else {}
        probes = None
        if not by_value:  # Any numbers in place of a size could be more than there is memory for.
            probes = RowProbes(original.run, inputs, texts)
            by_value = original.by_value({}) if carries else {}
        if by_value and rows.is_open:
            raise _NoRowsError
        if not by_value:
            original.output_specs()
        is_chance = flow.chance or is_by_chance(original.run, samples[1])
        one_by_one, has_whole = "", bool(by_value)
        if larger and probes is not None:
            try:
                pair = sample_inputs(inputs, 2, fill, texts)
                expected[2] = original.run(2, pair)
                # Shapes may follow the batch up to a number of rows. Requests may have more than a batch.
                for size in sorted({3, larger[-1] + 1}):
                    original.run(size, sample_inputs(inputs, size, fill, texts))
                try:
                    outputs = original.output_specs()
                except ModelError:
                    has_whole = True
                    raise
                has_whole = any(
                    spec.axis is None
                    and (spec.name not in flow.constant or not np.array_equal(alone, both))
                    for spec, alone, both in zip(outputs, expected[1], expected[2], strict=True)
                )
                one_by_one = _CHANCE if is_chance else _why_apart(inputs, outputs) or flow.mixed
                # Weights decide too. Other models of the architecture are asked nothing else.
                one_by_one = one_by_one or probes.why_otherwise(
                    original.run, outputs, 2, coarse=flow.coarse
                )
            except ModelError as error:
                one_by_one = str(error)
            if has_whole and carries:
                raise _NoRowsError
            if has_whole:
                # An output of several rows is not made of the outputs of each: a request is one run of one row.
                inputs, outputs = (
                    [TensorSpec(spec.name, spec.datatype, spec.shape(1), None) for spec in specs]
                    for specs in (inputs, outputs)
                )
            if not one_by_one:
                samples[2] = pair
            elif len(set(rows.symbols.values())) > 1 and (
                why := original.takes_unequal(rows.symbols)
            ):
                if carries:
                    raise _NoRowsError
                raise ModelError(why)
        del original

        progress("lifting weights")
        reasons: dict[Target, list[str]] = {}
        targets = (target,) if otherwise is None else (target, otherwise)
        for target, level in product(targets, LIFT_LEVELS):
            try:
                model = onnx.load(optimised_path)
                plain = lift_weights(model, level=level, static=target.static)
                lifted = target.lay_out(plain)
                if not symbols:
                    plain = lifted  # the other may take as much memory again
                compiled = _describe(
                    lifted,
                    inputs,
                    outputs,
                    element_types,
                    fixed_batch=fixed_batch,
                    fill=fill,
                    texts=texts,
                )
                compiled = replace(
                    compiled,
                    threads=target.choose_threads(
                        lifted, compiled, (1,) if one_by_one else (1, *larger)
                    ),
                )
                run = target.open(lifted, compiled)
                for size, sample in samples.items() if not is_chance else ():
                    _compare(target, compiled.outputs, run(size, sample), expected[size])
            except ModelError as error:
                reasons.setdefault(target, []).append(str(error))
            else:
                break
        else:
            raise ModelError("; ".join(map(_why_refused, reasons.values())))
        if larger and probes is not None and not one_by_one:
            # What sizes of a batch change does not depend on weights.
            seen = (compiled.architecture_id, tuple(larger))
            if seen not in target.seen_apart:
                coarse = flow.coarse or target.is_coarse
                one_by_one = _why_one_by_one(
                    run,
                    probes,
                    outputs,
                    larger,
                    progress,
                    coarse=coarse,
                    one_program=target.one_program,
                )
                if not one_by_one:
                    target.seen_apart.add(seen)
    usual = tuple(array.nbytes for array in expected[1]) if compiled.has_texts else ()
    compiled = replace(compiled, one_by_one=one_by_one, tried=(1, *larger), usual_bytes=usual)
    if by_value and not symbols:
        taken = {(): [spec.shape(1) for spec in outputs]}
        found_sizes = taking(OpenSizes(0, (), ()), [()])
    if found_sizes is not None:
        progress("trying sizes")
        plainly = _open(
            replace(compiled, weights=plain.weights),
            plain,
            found_sizes,
            taken,
            opened,
            limits,
            by_value,
            is_bound=any(bounds),
            is_whole=fixed_batch or has_whole,
            most=probes.most if probes is not None else 0,
        )
        if not target.takes_any_size:
            _check_forms(target, lifted, plain, plainly)
        compiled = replace(plainly, weights=compiled.weights)
    limits.check_weights(compiled.weights_bytes)
    (folder / GRAPH_FILE).write_bytes(lifted.graph)
    lifted.blob.tofile(folder / WEIGHTS_FILE)
    (folder / METADATA_FILE).write_text(compiled.to_json(), encoding="utf-8")
    return compiled


def _bind(specs: Sequence[TensorSpec], element_types: Mapping[str, int]) -> list[BoundTensor]:
    return [BoundTensor(spec, spec.name, element_types[spec.name]) for spec in specs]


@dataclass(eq=False)
class _RowRuns:
    """Runs single rows of a model of many sizes."""

    session: ort.InferenceSession
    inputs: Sequence[TensorSpec]
    element_types: Mapping[str, int]
    outputs: Mapping[str, str]
    texts: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        self._fill: int | None = None

    def run(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Run one row. Returns the shapes of the outputs.

        Raises ModelError if the run failed; carries the runtime's words.
        """
        specs = [at_sizes(spec, sizes) for spec in self.inputs]
        original = _Original(
            self.session, _bind(specs, self.element_types), self.outputs, self.texts
        )
        if self._fill is None:
            self._fill = original.find_fill()
            self.texts = original.texts
        original.run(1, sample_inputs(specs, 1, self._fill, self.texts))
        return original.shapes


def _open(
    compiled: CompiledModel,
    lifted: LiftedGraph,
    sizes: OpenSizes,
    taken: Mapping[Sizes, Shapes],
    inputs: Sequence[TensorSpec],
    limits: Limits,
    by_value: Mapping[str, tuple[int, ...]],
    *,
    is_bound: bool,
    is_whole: bool,
    most: int,
) -> CompiledModel:
    """Describe a model that was compiled at some sizes for all sizes that it takes.

    `taken` are the shapes of its outputs at those. With `is_bound` its owner says how large it gets, so no less will do.
    Integers to try are below `most`. Raises ModelError if no size leaves room, or an output has not always as many
    dimensions.
    """
    outputs = [tensor.spec for tensor in compiled.outputs]
    while True:
        specs = (
            open_inputs(inputs, sizes, whole=is_whole),
            open_outputs(outputs, taken, sizes, by_value, limits.io_bytes, whole=is_whole),
        )
        num_bytes = sizes.room * batch_bytes((*specs[0], *specs[1]), sizes.largest)
        if num_bytes <= limits.io_bytes:
            break
        if len(sizes.taken) == 1 or is_bound:
            limits.refuse_batch(1, num_bytes)
        sizes = taking(sizes, sizes.taken[:-1])
    bound = [
        tuple(replace(tensor, spec=spec) for tensor, spec in zip(side, opened, strict=True))
        for side, opened in zip((compiled.inputs, compiled.outputs), specs, strict=True)
    ]
    compiled = replace(compiled, inputs=bound[0], outputs=bound[1], open=sizes)
    may_pad = not compiled.one_by_one and not is_whole and not compiled.has_texts
    if may_pad and not sums_of(inputs):
        trial = replace(sizes, pads=True, guarded=(False,) * len(inputs))
        session = open_session(lifted.graph, threads=compiled.threads)
        weights = _aligned(lifted.blob)
        kernel = OpenKernel(session, replace(compiled, open=trial), weights)
        kernel.run_elements = 1 << 62
        sizes = prove_padding(kernel.run, inputs, specs[1], sizes, most=most)
    # Profiles are an architecture's, by rows of work.
    digest = hashlib.sha256(f"{compiled.architecture_id} {sizes}".encode())
    return replace(
        compiled,
        open=sizes,
        architecture_id=digest.hexdigest(),
        graph_sha256=compiled.architecture_id,
    )


def _check_forms(
    target: Target, lifted: LiftedGraph, plain: LiftedGraph, compiled: CompiledModel
) -> None:
    """Have an engine of fixed shapes run each form, with a row padded as far as any, and compare with that row alone.

    Args:
        target: the engine.
        lifted: its graph and weights.
        plain: those of onnxruntime.
        compiled: how that runs it.

    Raises:
        ModelError: the model cannot be padded, or the engine fails, or answers something else.
    """
    sizes = compiled.open
    assert sizes is not None
    (symbol,) = sizes.symbols
    fixed = sizes_to_write(sizes.symbols, {})
    if why := _why_not_padded(compiled, sizes):
        raise ModelError(
            f"a GPU pads rows to some sizes of {symbol!r}, and here {why}; write the size in config.toml: {fixed}, or"
            " start a worker with --device cpu"
        )
    session = open_session(plain.graph, threads=target.check_threads)
    weights = _aligned(plain.blob)
    kernel = OpenKernel(session, compiled, weights)
    inputs = [tensor.spec for tensor in compiled.inputs]
    (size,) = sizes.taken[0]
    for form in forms_of(sizes):
        # 0 and 1 are tokens as well as a mask.
        row = draw_row(inputs, {symbol: size}, 2, form, sizes.guarded)
        (alone,) = kernel.run([row], 1)
        at = at_form(replace(compiled, weights=lifted.weights), form)
        padded = []
        for tensor, array in zip(at.inputs, row, strict=True):
            place = np.zeros(tensor.spec.shape(1), array.dtype)
            place[tuple(map(slice, array.shape))] = array
            padded.append(raw_of(place))
        if isinstance(alone, str):
            raise ModelError(f"a row of {symbol} {size} failed: {alone}; write a size: {fixed}")
        found = []
        for tensor, raw, wanted in zip(
            at.outputs, target.open(lifted, at)(1, padded), alone, strict=True
        ):
            whole = array_of(tensor.spec.datatype, raw, tensor.spec.shape(1))
            found.append(raw_of(whole[tuple(map(slice, wanted.shape))]))
        try:
            _compare(target, at.outputs, found, list(map(raw_of, alone)))
        except ModelError as error:
            raise ModelError(
                f"{error} where {symbol} {size} is padded to {form}; write a size: {fixed}"
            ) from None
        size = form + 1


def _why_not_padded(compiled: CompiledModel, sizes: OpenSizes) -> str:
    """Say why rows cannot be padded, and run together; empty if they can."""
    if compiled.one_by_one:
        return f"rows run one by one: {compiled.one_by_one}"
    tensors = (*compiled.inputs, *compiled.outputs)
    if any(tensor.spec.axis != 0 for tensor in tensors):
        return "requests are one run each"
    if not sizes.pads:
        return "zeros behind a row change its answer"
    for tensor, is_guarded in zip(compiled.inputs, sizes.guarded, strict=True):
        if is_guarded and DATATYPES[tensor.spec.datatype].is_float:
            return f"zeros behind a row of {tensor.spec.name!r} change its answer if that has no number of 1 or more, or a negative one"
    return ""


def describe_model(source: ModelSource) -> CompiledModel:
    """Read a model's inputs and outputs, for a device that computes nothing.

    Raises ModelError if the model cannot be served. Faults that only a run shows are not found.
    """
    faults = ModelFaults()
    model = read_model(source, faults)
    rows = find_rows(model.graph)
    with faults.collected():
        given = {} if faults.found else source.fixed_dimensions
        inputs = input_specs(model.graph, rows, given)
    faults.check()
    element_types = _element_types(model)
    outputs = describe_outputs(model, rows)
    return CompiledModel(
        architecture_id="",
        weights_sha256="",
        weights_bytes=0,
        inputs=tuple(BoundTensor(s, s.name, element_types[s.name]) for s in inputs),
        outputs=tuple(BoundTensor(s, s.name, element_types[s.name]) for s in outputs),
        fixed_batch=not rows.is_open or bool(_why_apart(inputs, outputs)),
    )


def profile_model(
    folder: Path,
    batch_sizes: Sequence[int],
    progress: Callable[[str], None],
) -> dict[int, int]:
    """Measure a compiled model's kernels, in ns by batch size, without the copies around them.

    When that takes too long, or larger batches gain nothing, the others are taken to last as long per row as the last
    one measured.
    """
    compiled = CompiledModel.from_json((folder / METADATA_FILE).read_text(encoding="utf-8"))
    weights = read_weights(folder, compiled)
    if compiled.open is not None:
        return _profile_open(folder, compiled, weights, batch_sizes, progress)
    durations: dict[int, int] = {}
    limit_ns = time.monotonic_ns() + PROFILE_LIMIT_NS
    for batch_size in sorted(batch_sizes):
        if durations and (why := _why_enough(durations, limit_ns)):
            measured = max(durations)
            progress(f"{why}: batch {batch_size} is estimated from {measured}")
            durations[batch_size] = durations[measured] * batch_size // measured
            continue
        progress(f"profiling batch {batch_size}")
        session = open_session(str(folder / GRAPH_FILE), threads=compiled.threads)
        launch = sample_launch(session, compiled, batch_size, weights)
        try:
            launch()  # the first run allocates
            durations[batch_size] = _least_ns(launch)
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise ModelError(f"a batch of {batch_size} failed: {plain_words(error)}") from None
    return durations


def _why_enough(durations: Mapping[int, int], limit_ns: int) -> str:
    """Say why larger batches are not measured; empty if they are to be.

    Those that follow one another need not be alike: one row may run by itself faster than as one of two. So the last two
    have to gain nothing over smaller ones.
    """
    if time.monotonic_ns() > limit_ns:
        return f"profiling cut short after {PROFILE_LIMIT_NS // NS_PER_S} s"
    per_row = [durations[size] / size for size in sorted(durations) if size]
    if len(per_row) > 2 and min(per_row[-2:]) > _NO_GAIN * min(per_row[:-2]):
        return "larger batches gain nothing"
    return ""


def _profile_open(
    folder: Path,
    compiled: CompiledModel,
    weights: Bytes,
    batch_sizes: Sequence[int],
    progress: Callable[[str], None],
) -> dict[int, int]:
    """Do what `profile_model` does, by rows of work.

    A batch is measured twice: filled by rows as large as fit, and by as many short requests of unlike sizes. The longer
    counts. The entry of 0 is not a duration: one more run takes as long as so many elements.
    """
    session = open_session(str(folder / GRAPH_FILE), threads=compiled.threads)
    kernel = OpenKernel(session, compiled, weights)
    sizes = compiled.open
    assert sizes is not None
    inputs = [tensor.spec for tensor in compiled.inputs]
    short = short_sizes(sizes)
    requests = [sized_request(inputs, compiled, each) for each in short]
    answers = kernel.run(requests, 1 << 62)
    requests = [
        request
        for request, answer in zip(requests, answers, strict=True)
        if not isinstance(answer, str)
    ]
    if not requests:
        raise ModelError(f"rows of {list(short)} failed: {answers[0]}")

    def measure(some: Sequence[Sequence[Array]], work: int) -> int:
        def launch() -> None:
            for answer in kernel.run(some, work * sizes.unit):
                if isinstance(answer, str):
                    raise ModelError(f"a batch of {work} rows of work failed: {answer}")

        launch()  # the first run allocates
        return _least_ns(launch)

    has_rows = any(spec.axis is not None for spec in inputs)
    largest = sized_request(inputs, compiled, sizes.taken[-1])
    one_ns, largest_ns = measure(requests[:1], 1), measure([largest], sizes.largest)
    more_elements = max(sizes.elements(sizes.taken[-1]) - sizes.elements(short[0]), 1)
    durations = {0: max(int(one_ns * more_elements / max(largest_ns - one_ns, one_ns / 32)), 1)}
    kernel.run_elements = durations[0]
    limit_ns = time.monotonic_ns() + PROFILE_LIMIT_NS
    for work in sorted(batch_sizes):
        if len(durations) > 1 and _why_enough(durations, limit_ns):
            measured = max(durations)
            durations[work] = durations[measured] * work // measured
            continue
        if work & (work - 1) and work < max(batch_sizes):
            continue
        progress(f"profiling {work} rows of work")
        filling = fullest(sizes, work)
        rows = max(1, work * sizes.unit // sizes.elements(filling)) if has_rows else 1
        full = sized_request(inputs, compiled, filling, rows=rows)
        many = [requests[index % len(requests)] for index in range(work)]
        durations[work] = max(measure([full], work), measure(many, work))
    # Other load on the machine only adds, so a batch takes no longer than a larger one. Halves between powers of two
    # are taken to lie between.
    least_ns = max(durations.values())
    for work in sorted(batch_sizes, reverse=True):
        if work in durations:
            least_ns = durations[work] = min(least_ns, durations[work])
    measured_sizes = sorted(durations.keys() - {0})
    for work in sorted(set(batch_sizes) - durations.keys()):
        less = max(size for size in measured_sizes if size < work)
        more = min(size for size in measured_sizes if size > work)
        share = (work - less) / (more - less)
        durations[work] = round(durations[less] + share * (durations[more] - durations[less]))
    return durations


def read_weights(folder: Path, compiled: CompiledModel) -> Bytes:
    """Map a compiled model's weights, which can only be read.

    All workers of this host that serve this file share its memory, which is in the page cache.
    """
    if not compiled.weights_bytes:
        return aligned_bytes(0)
    with (folder / WEIGHTS_FILE).open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # A LOAD that met a page which is not there would wait for the disk.
    with suppress(OSError):  # a kernel before 5.14: the pages come with the first run
        mapping.madvise(_MADV_POPULATE_READ)
    return np.frombuffer(mapping, np.uint8)


def sample_launch(
    session: ort.InferenceSession, compiled: CompiledModel, batch_size: int, weights: Bytes
) -> Callable[[], object]:
    """Prepare runs that have memory of their own, and inputs that the model takes."""
    specs = [tensor.spec for tensor in compiled.inputs]
    samples = sample_inputs(specs, batch_size, compiled.fill, compiled.texts)
    if has_texts(session):
        return partial(_text_run(session, compiled, weights), batch_size, samples)
    kernel, inputs, _ = private_kernel(session, compiled, batch_size, weights)
    for array, sample in zip(inputs, samples, strict=True):
        array[:] = sample
    return kernel.launch


def _text_run(session: ort.InferenceSession, compiled: CompiledModel, weights: Bytes) -> Run:
    kernel = TextKernel(session, compiled, weights)

    def run(batch_size: int, inputs: list[Bytes]) -> list[Bytes]:
        arrays = [
            array_of(tensor.spec.datatype, array, tensor.spec.shape(batch_size))
            for tensor, array in zip(compiled.inputs, inputs, strict=True)
        ]
        return list(map(raw_of, kernel.run(arrays)))

    return run


def _aligned(blob: Bytes) -> Bytes:
    weights = aligned_bytes(blob.nbytes)
    weights[:] = blob
    return weights


def _least_ns(launch: Callable[[], object]) -> int:
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


def sample_inputs(
    inputs: Sequence[TensorSpec],
    batch_size: int,
    fill: int = 0,
    texts: Sequence[Sequence[str]] = (),
) -> list[Bytes]:
    """Make inputs to run on: small positive floats, texts of these lists, and otherwise `fill`.

    Zeros are legal indices anywhere.
    """
    arrays = []
    for seed, spec in enumerate(inputs):
        # One generator per input, so that the first row is the same whatever the batch size.
        generator = np.random.default_rng(seed)
        if spec.datatype == "BYTES":
            arrays.append(draw_known(texts, inputs, seed, generator, batch_size))
            continue
        array = aligned_bytes(spec.batch_bytes(batch_size))
        if dtype := _float_type(spec):
            numbers = array.view(dtype)
            numbers[:] = 1 if fill == _ONES else generator.random(len(numbers), dtype=np.float32)
        elif fill and not DATATYPES[spec.datatype].is_float:
            numbers = array.view(DATATYPES[spec.datatype].dtype)
            numbers[:] = np.resize(_PATTERNS.get(fill, max(fill, 1)), len(numbers))
        arrays.append(array)
    return arrays


def sized_request(
    inputs: Sequence[TensorSpec], compiled: CompiledModel, at: Sequence[int], *, rows: int = 1
) -> list[Array]:
    """Make a request of some sizes to run on, an array per input."""
    assert compiled.open is not None
    named = dict(zip(compiled.open.symbols, at, strict=True))
    specs = [at_sizes(spec, named) for spec in inputs]
    samples = sample_inputs(specs, rows, compiled.fill, compiled.texts)
    return [
        array_of(spec.datatype, raw, spec.shape(rows))
        for spec, raw in zip(specs, samples, strict=True)
    ]


def _float_type(spec: TensorSpec) -> str | None:
    """Numpy's name of a tensor's floats; None if it has integers, or floats that numpy does not have."""
    datatype = PLAIN_DATATYPES.get(spec.datatype)
    return datatype.dtype if datatype is not None and datatype.is_float else None


@dataclass(eq=False)
class _Original:
    """The model as its owner wrote it, on onnxruntime."""

    session: ort.InferenceSession
    inputs: Sequence[BoundTensor]
    #: The datatypes, by name.
    outputs: Mapping[str, str]
    #: The lists of texts that samples are drawn from.
    texts: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        #: The batch sizes of runs, each with the shapes of the outputs that came.
        self._shapes: dict[tuple[int, tuple[tuple[int, ...], ...]], None] = {}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the outputs of the first run."""
        _, shapes = next(iter(self._shapes))
        return list(shapes)

    def run(self, batch_size: int, inputs: list[Bytes]) -> list[Bytes]:
        """Run a batch. Raises ModelError if the run failed; carries the runtime's words."""
        found = self._run([batch_size] * len(inputs), inputs)
        self._shapes[batch_size, tuple(shape for shape, _ in found)] = None
        return [array for _, array in found]

    def find_fill(self) -> int:
        """Find what to write into integers, so that the model runs; and texts, if it reads numbers in them.

        Raises ModelError if it fails on all that was tried; carries the runtime's words of the first try.
        """
        specs = [tensor.spec for tensor in self.inputs]
        failed: ModelError | None = None
        has_texts = any(spec.datatype == "BYTES" for spec in specs)
        for texts, fill in product((self.texts, (NUMERALS,))[: 1 + has_texts], _FILLS):
            try:
                self._run([1] * len(specs), sample_inputs(specs, 1, fill, texts))
            except ModelError as error:
                failed = failed or error
            else:
                self.texts = texts
                return fill
        assert failed is not None
        raise failed

    def takes_unequal(self, symbols: Mapping[str, str]) -> str:
        """Say that a model takes other numbers of rows of one input than of another: its rows are no batch.

        Exporters may give the batch a symbol in each input. Then the model fails on unequal numbers, and nothing is said.

        Args:
            symbols: the first dimension of each input, by the input's name; not all are equal.
        """
        names = list(dict.fromkeys(symbols.values()))
        specs = [tensor.spec for tensor in self.inputs]
        rows = [2 + names.index(symbols[spec.name]) for spec in specs]
        samples = [sample_inputs([spec], num)[0] for spec, num in zip(specs, rows, strict=True)]
        try:
            self._run(rows, samples)
        except ModelError:
            return ""
        found = ", ".join(f"{symbol!r} of input {name!r}" for name, symbol in symbols.items())
        return (
            f"found several first dimensions, which need not be equal: {found}; expected the batch as the first"
            " dimension of all inputs"
        )

    def _run(self, rows: Sequence[int], inputs: list[Bytes]) -> list[tuple[tuple[int, ...], Bytes]]:
        tensors = list(zip(self.inputs, rows, inputs, strict=True))
        return run_unshaped(self.session, tensors, list(self.outputs))

    def by_value(self, suspected: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Find the outputs whose shapes follow from values, as the graph or runs tell; -1: a dimension does.

        Args:
            suspected: what the graph tells, by output.
        """
        found = {}
        for index, name in enumerate(self.outputs):
            shapes = [shapes[index] for size, shapes in self._shapes if size == 1]
            told = suspected.get(name, ())
            if name in suspected or len(set(shapes)) > 1:
                rank = len(told or shapes[0])
                alike = [shape for shape in shapes if len(shape) == rank]
                columns = list(zip(*alike, strict=True)) or [(-1,)] * rank
                fixed = [size for size in told] or [
                    column[0] if len(set(column)) == 1 else -1 for column in columns
                ]
                found[name] = tuple(fixed)
        return found

    def output_specs(self) -> list[TensorSpec]:
        """Read output specs off what runs returned: shapes in files are often missing, and sometimes wrong.

        Raises ModelError if an output has no fixed shape, or rows of no fixed shape.
        """
        specs = []
        for index, (name, datatype) in enumerate(self.outputs.items()):
            shapes = dict.fromkeys((size, shapes[index]) for size, shapes in self._shapes)
            if (spec := _fitting_spec(name, datatype, list(shapes))) is None:
                found = ", ".join(f"{list(shape)} for {size} rows" for size, shape in shapes)
                varies = len({size for size, _ in shapes}) < len(shapes)
                why = ": it depends on the values of the inputs" if varies else ""
                raise ModelError(
                    f"output {name!r} has shape {found}{why}; expected rows of one fixed shape"
                )
            specs.append(spec)
        return specs


def _fitting_spec(
    name: str, datatype: str, found: Sequence[tuple[int, tuple[int, ...]]]
) -> TensorSpec | None:
    """Find the spec of an output whose shapes are these, by the number of rows. Returns None if no spec fits.

    The batch is the first dimension that has always as many elements as there were rows. Where there was one row
    only, that says nothing of dimensions behind the first.
    """
    _, shape = found[0]
    has_sizes = len({size for size, _ in found}) > 1
    axes: list[int | None] = [*range(len(shape) if has_sizes else min(1, len(shape))), None]
    for axis in axes:
        row_shape = shape if axis is None else (*shape[:axis], *shape[axis + 1 :])
        spec = TensorSpec(name, datatype, row_shape, axis)
        if all(spec.shape(size) == each for size, each in found):
            return spec
    return None


def _why_apart(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Say why requests cannot lie one after the other in a batch; empty if they can."""
    for role, specs in (("input", inputs), ("output", outputs)):
        for spec in specs:
            if spec.axis is None:
                return f"{role} {spec.name!r} has no rows: its shape is {list(spec.row_shape)} for any number of them"
            if spec.axis:
                return (
                    f"{role} {spec.name!r} has its rows in dimension {spec.axis}, not in the first"
                )
    return ""


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
    progress: Callable[[str], None],
    *,
    coarse: bool,
    one_program: bool,
) -> str:
    """Say why an engine's answers in batches are not those of the rows alone; empty if they are.

    One program for all sizes is probed at the smallest, and asked for one row's answer at the others.
    """
    try:
        for size in batch_sizes:
            progress(f"probing rows of batch {size}")
            probe = (
                probes.why_otherwise if one_program and size > batch_sizes[0] else probes.why_mixed
            )
            if reason := probe(run, outputs, size, coarse=coarse):
                return reason
    except ModelError as error:
        return str(error)
    return ""


def _describe(
    lifted: LiftedGraph,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    element_types: dict[str, int],
    *,
    fixed_batch: bool,
    fill: int,
    texts: tuple[tuple[str, ...], ...],
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
        fill=fill,
        texts=texts,
    )


def _compare(
    target: Target,
    outputs: Sequence[BoundTensor],
    found: Sequence[Bytes],
    expected: Sequence[Bytes],
) -> None:
    """Compare an answer of the compiled graph with the reference. Raises ModelError if it is something else."""
    for tensor, answer, wanted in zip(outputs, found, expected, strict=True):
        dtype = _float_type(tensor.spec)
        if dtype is None:
            continue
        rtol, atol = target.tolerances(wanted.view(dtype))
        if not np.allclose(
            answer.view(dtype), wanted.view(dtype), rtol=rtol, atol=atol, equal_nan=True
        ):
            raise ModelError(f"output {tensor.spec.name!r} differs from the original's")
