"""The processor as a device: real models on onnxruntime, with memory laid out as on a GPU.

All memory is allocated at start: pages, arena, IO pool and one static batch. EXEC maps the model's pages into the
arena (`worker.devices.paged_arena`) and runs a kernel that was bound once to the arena and the static batch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import onnxruntime as ort
from typing_extensions import override

from clockwright.cores import fifo_problem
from clockwright.errors import ModelError
from clockwright.units import PAGE_BYTES, ArchitectureId
from clockwright.wire.actions import Infer
from clockwright.wire.bulk import Buffer
from worker.compiling.compile import COMPILE_FORMAT, read_weights, sample_launch, sized_request
from worker.compiling.compiled_models import CompiledModels
from worker.core.lanes import Lane, Step
from worker.devices.device import Device
from worker.devices.host_io import read_outputs, write_inputs
from worker.devices.host_memory import available_bytes
from worker.devices.paged_arena import PagedArena
from worker.devices.sized_io import run_carrying, run_joined
from worker.engines.onnxruntime import (
    Bytes,
    OrtKernel,
    TextKernel,
    address_of,
    aligned_bytes,
    open_session,
    plain_words,
)
from worker.engines.open_kernel import OpenKernel
from worker.models.file_store import FileStore
from worker.models.model_files import GRAPH_FILE, CompiledModel, Limits
from worker.models.served_model import Fetch, IoLayout, Offer, ServedModel
from worker.timing import bind_thread, tune_thread

_PAGE_COPIES = 5


class Kernel(Protocol):
    """What runs batches of one size."""

    def run(self, step: Step[CpuModel], io: Bytes) -> None:
        """Run a batch whose inputs are in its slot of the IO pool, and write its outputs there."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class BoundKernel:
    """A kernel bound to the arena and the static batch, which is laid out like an IO slot."""

    ort: OrtKernel
    layout: IoLayout
    batch: Bytes

    def run(self, step: Step[CpuModel], io: Bytes) -> None:
        """Do what `Kernel` says."""
        begin, end, batch = self.layout.outputs_begin, self.layout.num_bytes, self.batch
        slot = io[step.io_offset : step.io_offset + end]
        batch[:begin] = slot[:begin]
        self.ort.launch()
        slot[begin:] = batch[begin:end]


@dataclass(slots=True, eq=False, weakref_slot=True)
class BoundTextKernel:
    """A kernel of a model with texts, with its weights in the arena."""

    texts: TextKernel

    def run(self, step: Step[CpuModel], io: Bytes) -> None:
        """Do what `Kernel` says."""
        action, outputs = step.action, step.model.outputs
        assert isinstance(action, Infer)
        places = step.model.places(action.batch_size, step.io_offset)
        rows, run = action.rows, self.texts.run
        run_carrying(io, *places, rows, lambda each: run_joined(each, outputs, rows, run))


@dataclass(slots=True, eq=False, weakref_slot=True)
class BoundOpenKernel:
    """A kernel of a model with open dimensions, bound to the arena. Batches of all sizes share it."""

    open: OpenKernel

    def run(self, step: Step[CpuModel], io: Bytes) -> None:
        """Do what `Kernel` says."""
        action, sizes = step.action, self.open.compiled.open
        assert isinstance(action, Infer)
        assert sizes is not None
        places = step.model.places(action.batch_size, step.io_offset)
        most = action.batch_size * sizes.unit
        run_carrying(io, *places, action.rows, lambda requests: self.open.run(requests, most))


@dataclass(slots=True, kw_only=True, eq=False)
class CpuModel(ServedModel):
    """A model whose weights lie in host memory."""

    weights: Bytes
    #: The kernels by batch size; all models of the architecture share them.
    kernels: Mapping[int, Kernel]


class CpuDevice(Device[CpuModel]):
    """The processor, or some cores of it. See the module."""

    # Copies and models keep a core busy, and the kernel would throttle such threads at real-time priority.
    computing_lanes = frozenset({Lane.LOAD, Lane.EXEC})
    exec_anywhere = True

    def __init__(
        self,
        *,
        limits: Limits,
        io_pool_bytes: int,
        files: FileStore,
        cache_dir: Path,
        compile_limit_s: float,
        thread_counts: Sequence[int] = (1,),
        cores: Sequence[int] = (),
    ) -> None:
        """Allocate all the memory that serving needs.

        Args:
            limits: what there is room for.
            io_pool_bytes: the size of all IO slots together.
            files: the store that fetched files lie in.
            cache_dir: the folder of compiled models.
            compile_limit_s: a model that takes longer to compile is refused.
            thread_counts: the numbers of threads that may run a model, EXEC's own included, ascending; a trial
                decides among several.
            cores: those that these threads are bound to. If empty, the kernel chooses.

        Raises:
            OSError: the cache folder cannot be made.
        """
        processor = processor_name()
        self.gpu_kind = f"cpu:{processor}"
        self.limits = limits
        self.io_pool_bytes = io_pool_bytes
        self._models = CompiledModels(
            files,
            cache_dir=cache_dir,
            # How a sum is split among threads may decide its last digit, so whether rows stay apart is
            # seen for each number of threads.
            target=f"{COMPILE_FORMAT}/onnxruntime {ort.__version__}/{processor}"
            + (f"/threads {list(thread_counts)}" if max(thread_counts) > 1 else ""),
            compile_limit_s=compile_limit_s,
            limits=limits,
            thread_counts=thread_counts,
            cores=cores,
            available_bytes=available_bytes(),
        )
        self.at_once = self._models.at_once
        if cores:
            self.exec_core = cores[0]
            apart = not set(cores) & os.sched_getaffinity(0)
            self.exec_core_is_own = apart and not fifo_problem()
        # Sessions are opened on a thread like EXEC's, because onnxruntime's threads inherit cores and
        # priority of the one that opens; the setup thread runs after all that serve.
        self._opener = ThreadPoolExecutor(
            1, thread_name_prefix="opener", initializer=self._tune_opener, initargs=(tuple(cores),)
        )
        # An executor starts its thread with the first work, and the thread inherits its cores from the thread that submits that work.
        self._opener.submit(int).result()
        self._weights = PagedArena(limits.num_pages, limits.arena_bytes)
        self._io = aligned_bytes(io_pool_bytes)
        self._batch = aligned_bytes(limits.io_bytes)
        #: Those of all runs, to end the one that runs.
        self._run_options = ort.RunOptions()
        self._page_copy_ns = self._measure_page_copy()
        # A kernel lives as long as a model uses it.
        self._kernels: weakref.WeakValueDictionary[tuple[str, int, int], Kernel] = (
            weakref.WeakValueDictionary()
        )
        self._open_kernels: weakref.WeakValueDictionary[tuple[str, int], BoundOpenKernel] = (
            weakref.WeakValueDictionary()
        )
        # One session per architecture and number of threads, whatever the batch size: each session has a copy of
        # the weights that could not be lifted (the integers of a quantised model).
        self._sessions: weakref.WeakValueDictionary[tuple[str, int], ort.InferenceSession] = (
            weakref.WeakValueDictionary()
        )

    # --- models ---------------------------------------------------------------------------------

    @override
    async def prepare(
        self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]
    ) -> CpuModel:
        fitting = await self._models.get(offer, fetch, progress)
        folder, compiled, cache = fitting.folder, fitting.compiled, self._models.cache
        async with self._models.profiling(compiled.architecture_id):
            profile = cache.read_profile(compiled.architecture_id)
            if unknown := [size for size in fitting.batch_sizes if size not in profile]:
                # Some sizes of work are taken to lie between others.
                sizes = unknown if compiled.open is None else fitting.batch_sizes
                profile |= await self._models.compiler.profile(folder, sizes, progress)
                cache.write_profile(compiled.architecture_id, profile)
        progress(f"setting up kernels (threads: {compiled.threads})")
        weights = await self._models.set_up(read_weights, folder, compiled)
        kernels: Mapping[int, Kernel]
        if compiled.open is None:
            kernels = {
                size: await self._models.set_up(self._kernel, folder, compiled, size, weights)
                for size in fitting.batch_sizes
            }
        else:
            kernel = await self._models.set_up(self._open_kernel, folder, compiled, weights)
            kernel.open.run_elements = profile[0]
            kernels = dict.fromkeys(fitting.batch_sizes, kernel)
        copy_ns = self._page_copy_ns * compiled.weights_bytes // PAGE_BYTES
        gather_ns = 0 if self._weights.moves else copy_ns
        return CpuModel(
            model_id=offer.model_id,
            num_pages=compiled.num_pages,
            io_bytes=fitting.io_bytes,
            architecture_id=ArchitectureId(compiled.architecture_id),
            inputs=fitting.inputs,
            outputs=fitting.outputs,
            weights_bytes=compiled.weights_bytes,
            # A seed of zero would say that the action takes no time.
            load_ns=max(copy_ns, 1),
            # The profile is the kernel's alone.
            exec_ns={size: max(profile[size] + gather_ns, 1) for size in fitting.batch_sizes},
            from_cache=fitting.from_cache,
            one_by_one=fitting.compiled.one_by_one,
            weights=weights,
            kernels=kernels,
        )

    def _session(self, folder: Path, compiled: CompiledModel) -> ort.InferenceSession:
        way = (compiled.architecture_id, compiled.threads)
        session = self._sessions.get(way)
        if session is None:
            opening = self._opener.submit(
                open_session, str(folder / GRAPH_FILE), threads=compiled.threads
            )
            session = opening.result()
            self._sessions[way] = session
        return session

    def _open_kernel(
        self, folder: Path, compiled: CompiledModel, weights: Bytes
    ) -> BoundOpenKernel:
        key = (compiled.architecture_id, compiled.threads)
        if (known := self._open_kernels.get(key)) is not None:
            return known
        sizes = compiled.open
        assert sizes is not None
        session = self._session(folder, compiled)
        # As in `_kernel`: the largest row has memory of its own.
        specs = [tensor.spec for tensor in compiled.inputs]
        largest = sized_request(specs, compiled, sizes.taken[-1])
        private = OpenKernel(session, compiled, weights)
        (answer,) = private.run([largest], prod(sizes.taken[-1]))
        if isinstance(answer, str):
            raise ModelError(f"a row of {list(sizes.taken[-1])} failed: {answer}")
        arena, options = self._weights.arena, self._run_options
        kernel = BoundOpenKernel(OpenKernel(session, compiled, arena, options))
        self._open_kernels[key] = kernel
        return kernel

    def _kernel(
        self, folder: Path, compiled: CompiledModel, batch_size: int, weights: Bytes
    ) -> Kernel:
        key = (compiled.architecture_id, compiled.threads, batch_size)
        if (known := self._kernels.get(key)) is not None:
            return known
        session = self._session(folder, compiled)
        # The first run allocates. It has memory of its own, because the arena belongs to the model served now.
        launch = sample_launch(session, compiled, batch_size, weights)
        try:
            launch()
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise ModelError(f"a batch of {batch_size} failed: {plain_words(error)}") from None
        if compiled.has_texts:
            arena, options = self._weights.arena, self._run_options
            texts = BoundTextKernel(TextKernel(session, compiled, arena, options))
            self._kernels[key] = texts
            return texts
        layout = IoLayout.of(
            [tensor.spec for tensor in compiled.inputs],
            [tensor.spec for tensor in compiled.outputs],
            batch_size,
        )
        begin = address_of(self._batch)
        bound = OrtKernel(
            session,
            compiled,
            batch_size,
            weights_address=address_of(self._weights.arena),
            input_addresses=[begin + offset for offset in layout.input_offsets],
            output_addresses=[begin + offset for offset in layout.output_offsets],
            options=self._run_options,
        )
        self._kernels[key] = kernel = BoundKernel(bound, layout, self._batch)
        return kernel

    # --- steps ----------------------------------------------------------------------------------

    @override
    def run_load(self, step: Step[CpuModel]) -> None:
        # Page by page, as on a GPU, where pages bound how long an INPUT waits for the copy engine.
        for stretch, page in _stretches(step):
            self._weights.write(page, step.model.weights[stretch.start : stretch.stop])

    @override
    def run_input(self, step: Step[CpuModel], payload: Sequence[Buffer]) -> None:
        write_inputs(self._io, step, payload)

    @override
    def run_exec(self, step: Step[CpuModel]) -> None:
        action = step.action
        assert isinstance(action, Infer)
        kernel = step.model.kernels[action.batch_size]
        self._weights.show(step.pages, step.model.weights_bytes)
        self._run_options.terminate = False
        kernel.run(step, self._io)

    @override
    def end_exec(self) -> None:
        self._run_options.terminate = True

    @override
    def run_output(self, step: Step[CpuModel], room: memoryview | None = None) -> Sequence[Buffer]:
        return read_outputs(self._io, step, room)

    @override
    async def close(self) -> None:
        await self._models.close()
        self._opener.shutdown()

    def _tune_opener(self, cores: tuple[int, ...]) -> None:
        if cores:
            bind_thread(cores[1:] or cores)
        # Threads that spin between two runs would otherwise keep a core from those that share it.
        if self.exec_core_is_own:
            tune_thread(alone=True)

    def _measure_page_copy(self) -> int:
        """How long the copy of one page takes, in ns. Seeds the duration of every LOAD."""
        content = aligned_bytes(PAGE_BYTES)
        samples = []
        for _ in range(_PAGE_COPIES):
            begin_ns = time.monotonic_ns()
            self._weights.write(0, content)
            samples.append(time.monotonic_ns() - begin_ns)
        return min(samples)


def _stretches(step: Step[CpuModel]) -> Iterator[tuple[range, int]]:
    """The bytes of a model with the page that they lie on; the last page may be used in part."""
    end = step.model.weights_bytes
    for begin, page in zip(range(0, end, PAGE_BYTES), step.pages, strict=False):
        yield range(begin, min(begin + PAGE_BYTES, end)), page


def processor_name() -> str:
    """The processor's model and a digest of its features, both of which compiled code depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    name = fields.get("model name", platform.machine())
    features = fields.get("flags", fields.get("Features", ""))
    return f"{name} {hashlib.sha256(features.encode()).hexdigest()[:8]}"
