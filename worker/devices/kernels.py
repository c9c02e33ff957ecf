"""Sets up the kernels of an architecture on a GPU, and chooses the fastest way to run it.

A kernel is captured once per architecture and batch size, with the arena and the static batch as its memory.
If a graph can run in several ways (`worker.engines.choice`), each is captured and measured in turns with the others,
and the fastest stays. The compile cache keeps the measurements, so a worker that restarts captures the fastest only.

Only the workspace grows: the memory that captured kernels keep for their intermediates. Setting up an architecture
may enlarge it, serving never does. All kernels share the workspace, so it is as large as the most demanding
architecture needs. An architecture that needs more than the limit is refused.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch

from clockwright.errors import ModelError
from clockwright.units import NS_PER_S
from worker.compiling.cache import CompileCache
from worker.devices.accelerator import Accelerator
from worker.devices.device_loss import DeviceLoss
from worker.devices.exec_queue import CapturedKernel, ExecQueue
from worker.devices.gpu_health import GpuMonitor
from worker.devices.gpu_memory import GpuMemory
from worker.engines.choice import Way, describe, fastest
from worker.engines.onnxruntime import OrtKernel, Place, open_session, plain_words
from worker.engines.torch_operators import Tensor
from worker.engines.torch_program import Program
from worker.engines.torch_tensors import typed_view, weight_views
from worker.models.model_files import GRAPH_FILE, CompiledModel
from worker.models.served_model import IoLayout

logger = logging.getLogger(__name__)

# The results seed the estimator, which replaces them by measurements as they come.
_PROFILE_RUNS = 10
# The runs of one batch size in all ways take no longer, but for the first of each.
_PROFILE_BUDGET_NS = NS_PER_S // 2


@dataclass(eq=False)
class Kernels:
    """The captured kernels that some model holds. Belongs to the setup thread."""

    #: Captures kernels.
    accelerator: Accelerator
    #: Holds the arena and the static batch.
    memory: GpuMemory
    #: Runs a kernel to measure it.
    execs: ExecQueue
    #: Remembers what was measured.
    cache: CompileCache
    #: Judges the exceptions of engines.
    loss: DeviceLoss
    #: Reads the GPU's clock, if anything can.
    monitor: GpuMonitor | None
    _: KW_ONLY
    #: The kind of GPU that measurements hold for.
    gpu_kind: str
    #: The ways that are tried.
    ways: tuple[Way, ...]
    #: Where onnxruntime computes; not None if `ways` has it.
    place: Place | None
    #: What kernels may take in addition to the memory that is taken by now.
    workspace_bytes: int

    def __post_init__(self) -> None:
        self._kind = f"{self.gpu_kind}/torch {torch.__version__}"
        #: The device memory that this process keeps apart from the workspace.
        self._fixed_bytes = self.accelerator.reserved_bytes()
        self._kernels: weakref.WeakValueDictionary[tuple[str, int], CapturedKernel] = (
            weakref.WeakValueDictionary()
        )

    def __len__(self) -> int:
        return len(self._kernels)

    def set_up(
        self, folder: Path, compiled: CompiledModel, batch_sizes: Sequence[int]
    ) -> dict[int, CapturedKernel]:
        """Find or capture an architecture's kernels; by batch size.

        Raises ModelError if no way runs the architecture, or it wants too large a workspace.
        """
        try:
            return self._set_up(folder, compiled, batch_sizes)
        except ModelError:
            # What the refused model took for its rehearsals.
            self.accelerator.trim()
            raise

    def _set_up(
        self, folder: Path, compiled: CompiledModel, batch_sizes: Sequence[int]
    ) -> dict[int, CapturedKernel]:
        known = self.cache.read_trials(compiled.architecture_id, self._kind)
        trials = dict(known)
        workspace_bytes = self._workspace_bytes
        kernels = {}
        # The largest first: the memory of its intermediates then serves the others.
        for size in sorted(batch_sizes, reverse=True):
            key = (compiled.architecture_id, size)
            kernel = self._kernels.get(key)
            if kernel is None:
                kernel, trials[size] = self._fastest_kernel(
                    folder, compiled, size, known.get(size, {})
                )
                if self._workspace_bytes > max(self.workspace_bytes, workspace_bytes):
                    # Rehearsals took memory too, and kernels need none of that; others find room in what stays.
                    self.accelerator.trim()
                    if self._workspace_bytes > workspace_bytes:
                        self._check_workspace(size, self._workspace_bytes)
                self._kernels[key] = kernel
            kernels[size] = kernel
        if trials != known:
            clock_mhz = min(kernel.clock_mhz for kernel in kernels.values())
            self.cache.write_trials(
                compiled.architecture_id, self._kind, trials, clock_mhz=clock_mhz
            )
        return {size: kernels[size] for size in sorted(kernels)}

    @property
    def _workspace_bytes(self) -> int:
        return self.accelerator.reserved_bytes() - self._fixed_bytes

    def _check_workspace(self, batch_size: int, num_bytes: int) -> None:
        """Refuse a model that makes the workspace too large.

        Raises ModelError that says how large the workspace is, and what to do.
        """
        if num_bytes > self.workspace_bytes:
            raise ModelError(
                f"with a batch of {batch_size} kernels work in {num_bytes >> 20} MiB, expected at most "
                f"{self.workspace_bytes >> 20} MiB (--workspace-mib); offer it with smaller batches"
            )

    # --- the contest ----------------------------------------------------------------------------

    def _fastest_kernel(
        self,
        folder: Path,
        compiled: CompiledModel,
        batch_size: int,
        known: Mapping[str, int | None],
    ) -> tuple[CapturedKernel, dict[str, int | None]]:
        """Capture a graph in each way, and keep the fastest kernel.

        Args:
            folder: the compiled model's files.
            compiled: the model that they hold.
            batch_size: the rows of the kernel.
            known: the durations that this method returned when the architecture was set up before.

        Returns:
            The kernel, and how long an EXEC takes in each way; None for a way that does not work. The way that was
            the fastest before is taken again without measuring the others.
        """
        works = {way: exec_ns for way in self.ways if (exec_ns := known.get(way.value))}
        if works and known.keys() >= {way.value for way in self.ways}:
            try:
                kernel, _ = self._try([fastest(works)], folder, compiled, batch_size)
                return kernel, dict(known)
            except ModelError as error:
                if self.loss.reason is not None:
                    raise
                logger.warning("architecture %s: %s", compiled.architecture_id[:12], error)
        kernel, taken = self._try(self.ways, folder, compiled, batch_size)
        if len(self.ways) > 1:
            logger.info(
                "architecture %s, batch %d: %s",
                compiled.architecture_id[:12],
                batch_size,
                describe(taken),
            )
        return kernel, {way.value: taken[way] for way in taken}

    def _try(
        self, ways: Sequence[Way], folder: Path, compiled: CompiledModel, batch_size: int
    ) -> tuple[CapturedKernel, dict[Way, int | None]]:
        """Capture a graph in some ways; returns the fastest kernel, and what each way takes.

        Raises ModelError if none works; carries the words of the last.
        """
        made: dict[Way, CapturedKernel] = {}
        problem: ModelError | None = None
        for way in ways:
            try:
                made[way] = self._capture(folder, compiled, batch_size, way)
            except ModelError as error:
                problem = error
                if self.loss.reason is not None:
                    raise
        samples: dict[Way, list[int]] = {way: [] for way in made}
        # The ways take turns, so that a clock that moves is no advantage to any.
        end_ns = time.monotonic_ns() + _PROFILE_BUDGET_NS
        for way in list(made) * _PROFILE_RUNS:
            if way not in made or (samples[way] and time.monotonic_ns() > end_ns):
                continue
            try:
                samples[way].append(self.execs.measure(made[way], compiled.num_pages))
            except Exception as error:  # onnxruntime's exceptions have no common base
                self.loss.judge(error)
                problem = ModelError(f"a batch of {batch_size} failed: {plain_words(error)}")
                if self.loss.reason is not None:
                    raise problem from None
                del made[way]
        if not made:
            assert problem is not None
            raise problem
        # Read the clock at once: that of an idle GPU falls.
        clock_mhz = self.monitor.look().clock_mhz if self.monitor else 0
        for way, kernel in made.items():
            kernel.exec_ns = sorted(samples[way])[len(samples[way]) // 2]
            kernel.clock_mhz = clock_mhz
        exec_ns = {way: kernel.exec_ns for way, kernel in made.items()}
        return made[fastest(exec_ns)], {way: exec_ns.get(way) for way in ways}

    # --- one way --------------------------------------------------------------------------------

    def _capture(
        self, folder: Path, compiled: CompiledModel, batch_size: int, way: Way
    ) -> CapturedKernel:
        """Capture a graph. Raises ModelError if the engine cannot run the graph; carries the engine's words."""
        layout = IoLayout.of(
            [tensor.spec for tensor in compiled.inputs],
            [tensor.spec for tensor in compiled.outputs],
            batch_size,
        )
        graph = (folder / GRAPH_FILE).read_bytes()
        if way is Way.ONNXRUNTIME:
            assert self.place is not None
            return self._onnxruntime_kernel(graph, compiled, batch_size, layout, self.place)
        return self._torch_kernel(graph, compiled, batch_size, layout, way)

    def _torch_kernel(
        self,
        graph: bytes,
        compiled: CompiledModel,
        batch_size: int,
        layout: IoLayout,
        way: Way,
    ) -> CapturedKernel:
        program = Program(graph, self.accelerator.device, join=way is Way.TORCH_JOINED)
        weights = weight_views(self.memory.arena.view(-1).view(torch.uint8), compiled.weights)
        inputs, outputs = (
            [
                typed_view(self.memory.batch[offset:], tensor, batch_size)
                for tensor, offset in zip(tensors, offsets, strict=True)
            ]
            for tensors, offsets in (
                (compiled.inputs, layout.input_offsets),
                (compiled.outputs, layout.output_offsets),
            )
        )
        constants: dict[str, Tensor] = {}

        def work() -> None:
            results = program.run(inputs, weights, constants)
            for place, result in zip(outputs, results, strict=True):
                place.copy_(result)

        def run_aside() -> None:
            # Other models are served during a rehearsal, so arena and batch are only read.
            for place, result in zip(outputs, program.run(inputs, weights, constants), strict=True):
                torch.empty_like(place).copy_(result)

        def rehearse() -> None:
            run_aside()
            if self._workspace_bytes > self.workspace_bytes:
                # A part may be that of algorithms that lost a search. What the pool of captured kernels takes it keeps,
                # so a model that wants too much is refused here.
                self.accelerator.trim()
                before = self._workspace_bytes
                run_aside()
                self._check_workspace(batch_size, self._workspace_bytes - before)

        try:
            captured = self.execs.capture(
                work,
                rehearsal=rehearse,
                tensor_cores=program.precision.tensor_cores,
                layout=layout,
                num_pages=compiled.num_pages,
            )
        except (RuntimeError, TypeError, IndexError, ValueError) as error:  # what torch raises
            self.loss.judge(error)
            raise ModelError(f"a batch of {batch_size} failed: {plain_words(error)}") from None
        return CapturedKernel(way, work, captured, layout, constants)

    def _onnxruntime_kernel(
        self,
        graph: bytes,
        compiled: CompiledModel,
        batch_size: int,
        layout: IoLayout,
        place: Place,
    ) -> CapturedKernel:
        # A session per batch size: intermediates that a captured graph uses must stay where they are.
        session = open_session(graph, place=place)

        def bound_to(batch: Tensor) -> OrtKernel:
            begin = batch.data_ptr()
            return OrtKernel(
                session,
                compiled,
                batch_size,
                weights_address=self.memory.arena.data_ptr(),
                input_addresses=[begin + offset for offset in layout.input_offsets],
                output_addresses=[begin + offset for offset in layout.output_offsets],
                memory=batch,
                place=place,
            )

        try:
            kernel = bound_to(self.memory.batch)
            # The rehearsal reads zeros, which are legal indices anywhere.
            aside = bound_to(self.accelerator.device_memory(layout.num_bytes))
            captured = self.execs.capture(
                kernel.launch,
                rehearsal=aside.launch,
                tensor_cores=False,
                layout=layout,
                num_pages=compiled.num_pages,
            )
        except Exception as error:  # onnxruntime's exceptions have no common base
            self.loss.judge(error)
            raise ModelError(f"a batch of {batch_size} failed: {plain_words(error)}") from None
        return CapturedKernel(Way.ONNXRUNTIME, kernel.launch, captured, layout, kernel)
