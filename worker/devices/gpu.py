"""A GPU as a device, on torch and onnxruntime; or the processor in its place, which runs the same code in tests.

Everything has its place from the start: pages, arena, IO slots, one static batch and the host's copies of
all weights. EXEC gathers the model's pages into the arena and replays kernels that were captured once per
architecture and batch size, with the arena and the static batch as their memory; always, even if the
arena still holds that very model.

One thing grows: the workspace, which is what captured kernels keep for their intermediates. Setting up an
architecture may take more of it, serving never does. All kernels share it, so that it is as large as the
most demanding one wants it, and stays so; an architecture that wants more than there may be is refused.

Who waits for whom. A lane's step ends when the device says so, and the core starts nothing that needs it
before. One thing could still go wrong: pages are free when the EXEC that reads them ends, but two EXEC
may be under way, and whoever evicts and loads must not depend on that. So a LOAD also waits, on the
device, for the last gather from the pages that it writes to. That is the gather, not the whole EXEC.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnxruntime as ort
import torch

from clockwright.actions import Infer
from clockwright.bulk import Buffer
from clockwright.errors import ConfigError, ModelError
from clockwright.units import PAGE_BYTES, ArchitectureId
from worker.compiling.cache import CompileCache
from worker.compiling.compile import COMPILE_FORMAT
from worker.compiling.compiled_models import CompiledModels
from worker.compiling.compiler import Compiler
from worker.core.io_pool import IoPool
from worker.core.lanes import Lane, Step
from worker.devices.accelerator import Accelerator, Event, Stream
from worker.devices.device import DeviceLostError, Fetch, GpuHealth, Launched
from worker.devices.gpu_health import GpuMonitor
from worker.devices.host_io import read_outputs, write_inputs
from worker.engines.choice import Engine, Way, describe, fastest, ways_to_try
from worker.engines.onnxruntime import OrtKernel, Place, open_session, plain_words
from worker.engines.torch_operators import Tensor
from worker.engines.torch_program import Program
from worker.engines.torch_tensors import typed_view, weight_views
from worker.models.file_store import FileStore
from worker.models.model_files import GRAPH_FILE, WEIGHTS_FILE, CompiledModel, Limits
from worker.models.precision import Precision
from worker.models.served_model import IoLayout, Offer, ServedModel, io_bytes_of
from worker.timing import tune_background_thread

logger = logging.getLogger(__name__)

# Pages are copied and gathered as rows of the largest plain type.
_WORD_BYTES = 8
# The page being copied and the one behind it: no gap between them, and an INPUT that shares the copy
# engine waits for two pages at most.
_PAGES_IN_FLIGHT = 2
# EXEC that may be under way at once: one that runs, one behind it. The others are for stragglers.
_LAUNCHES = 4
# The paper's engine has 512 MB. Here rehearsals keep as much as captured kernels do, and at batch 16 some
# networks have two layers' outputs of 200 MB each at a time: reckoned, not measured.
_WORKSPACE_BYTES = 2 << 30
# Seeds of the estimator, replaced by measurements as they come.
_PROFILE_RUNS = 10


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Kernel:
    """An architecture at one batch size, bound to the arena and the static batch."""

    way: Way
    run: Callable[[], None]
    layout: IoLayout
    #: Kept because the captured kernels use it, beside arena and batch.
    memory: object
    #: Measured: a whole EXEC, but for the copies from and to its IO slot.
    exec_ns: int = 1
    #: The card's clock at that time; 0 where it does not say.
    clock_mhz: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class _HostWeights:
    """A weights blob in the host's locked memory; models of the same bytes share it."""

    memory: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class TorchModel(ServedModel):
    """A model whose weights lie in host memory."""

    weights: _HostWeights
    #: By batch size, shared with all models of the architecture.
    kernels: dict[int, _Kernel]


class _Launch:
    """One of the EXEC under way: its events and its list of pages, used in turn."""

    def __init__(self, accelerator: Accelerator, pages: Tensor) -> None:
        self.begin = accelerator.event()
        self.gathered = accelerator.event()
        self.end = accelerator.event()
        #: In locked memory: the device reads it when the launch's turn has come.
        self.pages = pages

    def is_done(self) -> bool:
        """See `Launched`."""
        return self.end.is_done()


class TorchDevice:
    """See the module. Satisfies `worker.devices.device.Device`, `QueueingDevice` and `WatchedDevice`."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        limits: Limits,
        io_pool_bytes: int,
        host_bytes: int,
        precision: Precision,
        files: FileStore,
        cache_dir: Path,
        compile_limit_s: float,
        engine: Engine = Engine.AUTO,
        on_lost: Callable[[str], object],
        monitor: GpuMonitor | None = None,
    ) -> None:
        """Take all the memory that will ever be needed for serving.

        Args:
            accelerator: what computes; closed with the device.
            limits: what one model may need.
            io_pool_bytes: of all IO slots together.
            host_bytes: for the weights of all models, on the host.
            precision: of all models.
            files: where models' files lie.
            cache_dir: of compiled models.
            compile_limit_s: a model that takes longer is refused.
            engine: what runs them.
            on_lost: told once, from any thread, why nothing can run any more: a GPU's fault is its
                process's end.
            monitor: of the card, where there is one that says how it is.

        Raises:
            ConfigError: there is not enough memory, or the engine is not there.
            OSError: the cache folder cannot be made.
        """
        self._place = accelerator.onnxruntime_place()
        self._ways = ways_to_try(
            engine,
            precision,
            on_host=accelerator.on_host,
            has_onnxruntime=self._place is not None,
        )
        self.gpu_kind = f"{accelerator.name}/{precision.value}"
        if any(way.engine is not Engine.TORCH for way in self._ways):
            # It may run other kernels than a worker that has torch alone.
            self.gpu_kind += f"/{engine.value}"
        self.limits = limits
        self.io_pool_bytes = io_pool_bytes
        self.computing_lanes = (
            frozenset({Lane.LOAD, Lane.EXEC}) if accelerator.on_host else frozenset[Lane]()
        )
        self._accelerator = accelerator
        self._cache = CompileCache(
            cache_dir,
            target=f"{COMPILE_FORMAT}/torch {precision.value}/onnxruntime {ort.__version__}",
        )
        self._compiler = Compiler(time_limit_s=compile_limit_s)
        self._setup = ThreadPoolExecutor(
            1, thread_name_prefix="setup", initializer=tune_background_thread
        )
        self._models = CompiledModels(
            files, self._cache, self._compiler, self._setup, limits, precision
        )
        arena_pages = -(-limits.arena_bytes // PAGE_BYTES)
        try:
            self._pages = _rows(accelerator.device_memory(limits.num_pages * PAGE_BYTES))
            self._arena = _rows(accelerator.device_memory(arena_pages * PAGE_BYTES))
            self._io = accelerator.device_memory(io_pool_bytes)
            self._batch = accelerator.device_memory(limits.io_bytes)
            self._page_list = accelerator.device_memory(arena_pages * _WORD_BYTES).view(torch.int64)
            self._host = accelerator.host_memory(host_bytes)
            # Inputs and outputs on their way. Whole pools, because a slot's offset is the same here.
            self._io_in = accelerator.host_memory(io_pool_bytes)
            self._io_out = accelerator.host_memory(io_pool_bytes)
            lists = accelerator.host_memory(_LAUNCHES * arena_pages * _WORD_BYTES)
        except MemoryError as error:
            raise ConfigError(
                f"not enough memory for {limits.num_pages} pages, arena and IO: {error}"
            ) from None
        #: Beside the workspace.
        self._fixed_bytes = accelerator.reserved_bytes()
        self._load_stream = accelerator.stream()
        self._input_stream = accelerator.stream()
        self._exec_stream = accelerator.stream(urgent=True)
        self._output_stream = accelerator.stream()
        self._launches = [
            _Launch(accelerator, part) for part in lists.view(torch.int64).view(_LAUNCHES, -1)
        ]
        #: Guards the order on the EXEC stream: an EXEC's pieces stay together.
        self._exec_lock = threading.Lock()
        self._num_launched = 0
        #: By page: how many EXEC had been launched when one that reads it was.
        self._last_read = [0] * limits.num_pages
        # Patient: a busy LOAD lane does nothing but wait, and the kernel stops a real-time thread that
        # spins. A page lasts longer than it takes to wake up, and there is one in flight meanwhile.
        self._copied = [accelerator.event(patient=True) for _ in range(_PAGES_IN_FLIGHT)]
        self._load_times = accelerator.event(patient=True), accelerator.event(patient=True)
        self._input_times = accelerator.event(), accelerator.event()
        self._output_times = accelerator.event(), accelerator.event()
        self._host_room = IoPool(host_bytes)
        #: Where weights lay that no model needs any more.
        self._host_unused: deque[int] = deque()
        self._blobs: weakref.WeakValueDictionary[str, _HostWeights] = weakref.WeakValueDictionary()
        self._kernels: weakref.WeakValueDictionary[tuple[str, int], _Kernel] = (
            weakref.WeakValueDictionary()
        )
        self._on_lost = on_lost
        self._monitor = monitor
        self._lost: str | None = None
        self._page_copy_ns = self._measure_page_copy()

    @property
    def num_allocations(self) -> int:
        """How often device memory has been taken so far: it stands still while serving."""
        return self._accelerator.num_allocations()

    async def watch(self, tell: Callable[[GpuHealth], None]) -> None:
        """See `WatchedDevice`."""
        if self._monitor is not None:
            await self._monitor.watch(tell)

    # --- models ---------------------------------------------------------------------------------

    async def prepare(
        self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]
    ) -> TorchModel:
        """See `Device`."""
        offer.check_onnx()
        folder, compiled, from_cache = await self._models.get(offer, fetch, progress)
        inputs = tuple(tensor.spec for tensor in compiled.inputs)
        outputs = tuple(tensor.spec for tensor in compiled.outputs)
        self.limits.check_weights(compiled.weights_bytes)
        batch_sizes = self.limits.usable_batch_sizes(
            (*inputs, *outputs), offer.batch_sizes, fixed_batch=compiled.fixed_batch
        )
        progress("setting up kernels")
        loop = asyncio.get_running_loop()
        weights, kernels, exec_ns = await loop.run_in_executor(
            self._setup, self._set_up, folder, compiled, batch_sizes
        )
        return TorchModel(
            model_id=offer.model_id,
            num_pages=compiled.num_pages,
            io_bytes=io_bytes_of((*inputs, *outputs), batch_sizes),
            architecture_id=ArchitectureId(compiled.architecture_id),
            inputs=inputs,
            outputs=outputs,
            weights_bytes=compiled.weights_bytes,
            load_ns=max(self._page_copy_ns * compiled.weights_bytes // PAGE_BYTES, 1),
            exec_ns=exec_ns,
            # Of kernels that were measured at several, the highest: no seed is then too small.
            clock_mhz=max(kernel.clock_mhz for kernel in kernels.values()),
            from_cache=from_cache,
            weights=weights,
            kernels=kernels,
        )

    def _set_up(
        self, folder: Path, compiled: CompiledModel, batch_sizes: Sequence[int]
    ) -> tuple[_HostWeights, dict[int, _Kernel], dict[int, int]]:
        if self._lost is not None:
            raise ModelError(f"the device is lost: {self._lost}")
        weights = self._host_weights(folder, compiled)
        kind = f"{self.gpu_kind}/torch {torch.__version__}"
        known = self._cache.read_trials(compiled.architecture_id, kind)
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
                self._check_workspace(size, before=workspace_bytes)
                self._kernels[key] = kernel
            kernels[size] = kernel
        if trials != known:
            clock_mhz = min(kernel.clock_mhz for kernel in kernels.values())
            self._cache.write_trials(compiled.architecture_id, kind, trials, clock_mhz=clock_mhz)
        return weights, kernels, {size: kernels[size].exec_ns for size in sorted(kernels)}

    @property
    def _workspace_bytes(self) -> int:
        return self._accelerator.reserved_bytes() - self._fixed_bytes

    def _check_workspace(self, batch_size: int, *, before: int) -> None:
        """Refuse the model that made the workspace too large; others find room in it all the same.

        Raises:
            ModelError: says how large it is, and what to do.
        """
        found = self._workspace_bytes
        if found > max(_WORKSPACE_BYTES, before):
            raise ModelError(
                f"with a batch of {batch_size} kernels work in {found >> 20} MiB, "
                f"expected at most {_WORKSPACE_BYTES >> 20} MiB; offer it with smaller batches"
            )

    def _fastest_kernel(
        self,
        folder: Path,
        compiled: CompiledModel,
        batch_size: int,
        known: Mapping[str, int | None],
    ) -> tuple[_Kernel, dict[str, int | None]]:
        """Capture a graph in each way there is, and keep what is fastest.

        Args:
            folder: of the compiled model.
            compiled: what is in it.
            batch_size: of the kernel.
            known: what this returned when the architecture was set up before.

        Returns:
            The kernel, and how long an EXEC takes in each way; None for one that does not work. The
            way that was the fastest before is taken again without another contest.
        """
        works = {way: exec_ns for way in self._ways if (exec_ns := known.get(way.value))}
        if works and known.keys() >= {way.value for way in self._ways}:
            try:
                kernel, _ = self._try([fastest(works)], folder, compiled, batch_size)
                return kernel, dict(known)
            except ModelError as error:
                if self._lost is not None:
                    raise
                logger.warning("architecture %s: %s", compiled.architecture_id[:12], error)
        kernel, taken = self._try(self._ways, folder, compiled, batch_size)
        if len(self._ways) > 1:
            logger.info(
                "architecture %s, batch %d: %s",
                compiled.architecture_id[:12],
                batch_size,
                describe(taken),
            )
        return kernel, {way.value: taken[way] for way in taken}

    def _try(
        self, ways: Sequence[Way], folder: Path, compiled: CompiledModel, batch_size: int
    ) -> tuple[_Kernel, dict[Way, int | None]]:
        """Capture a graph in some ways; returns the fastest kernel, and what each way takes.

        Raises:
            ModelError: none works; carries the words of the last.
        """
        made: dict[Way, _Kernel] = {}
        problem: ModelError | None = None
        for way in ways:
            try:
                made[way] = self._kernel(folder, compiled, batch_size, way)
            except ModelError as error:
                problem = error
                if self._lost is not None:
                    raise
        samples: dict[Way, list[int]] = {way: [] for way in made}
        # In turns, so that a clock that moves is no advantage to any.
        for way in list(made) * _PROFILE_RUNS:
            if way not in made:
                continue
            try:
                samples[way].append(self._measure(made[way], compiled.num_pages))
            except Exception as error:  # onnxruntime's exceptions have no common base
                self._judge(error)
                problem = ModelError(f"a batch of {batch_size} failed: {plain_words(error)}")
                if self._lost is not None:
                    raise problem from None
                del made[way]
        if not made:
            assert problem is not None
            raise problem
        # At once: an idle card's clock falls.
        clock_mhz = self._monitor.look().clock_mhz if self._monitor else 0
        for way, kernel in made.items():
            kernel.exec_ns = sorted(samples[way])[len(samples[way]) // 2]
            kernel.clock_mhz = clock_mhz
        exec_ns = {way: kernel.exec_ns for way, kernel in made.items()}
        return made[fastest(exec_ns)], {way: exec_ns.get(way) for way in ways}

    def _measure(self, kernel: _Kernel, num_pages: int) -> int:
        """One EXEC in ns, between those of the models that are being served."""
        with self._exec_lock:
            pages = range(min(num_pages, self.limits.num_pages))
            launch = self._enqueue(kernel, pages, None)
        launch.end.synchronize()
        return launch.end.ns_since(launch.begin)

    def _host_weights(self, folder: Path, compiled: CompiledModel) -> _HostWeights:
        known = self._blobs.get(compiled.weights_sha256)
        if known is not None:
            return known
        while self._host_unused:
            self._host_room.release(self._host_unused.popleft())
        offset = self._host_room.acquire(compiled.weights_bytes)
        if offset is None:
            raise ModelError(
                f"no room for {compiled.weights_bytes} bytes of weights in the host's memory, "
                f"{self._host_room.num_bytes} bytes for all models; start the worker with more (--host-mib)"
            )
        memory = self._host[offset : offset + compiled.weights_bytes]
        weights = _HostWeights(memory)
        # On whatever thread lets go of the last model.
        weakref.finalize(weights, self._host_unused.append, offset)
        if compiled.weights_bytes:
            with (folder / WEIGHTS_FILE).open("rb") as file:
                file.readinto(memory.numpy())
        self._blobs[compiled.weights_sha256] = weights
        return weights

    def _kernel(self, folder: Path, compiled: CompiledModel, batch_size: int, way: Way) -> _Kernel:
        """Capture a graph.

        Raises:
            ModelError: the engine cannot run it; carries its words.
        """
        layout = IoLayout.of(
            [tensor.spec for tensor in compiled.inputs],
            [tensor.spec for tensor in compiled.outputs],
            batch_size,
        )
        graph = (folder / GRAPH_FILE).read_bytes()
        if way is Way.ONNXRUNTIME:
            assert self._place is not None
            return self._onnxruntime_kernel(graph, compiled, batch_size, layout, self._place)
        return self._torch_kernel(graph, compiled, batch_size, layout, way)

    def _torch_kernel(
        self,
        graph: bytes,
        compiled: CompiledModel,
        batch_size: int,
        layout: IoLayout,
        way: Way,
    ) -> _Kernel:
        program = Program(graph, self._accelerator.device, join=way is Way.TORCH_JOINED)
        weights = weight_views(self._arena.view(-1).view(torch.uint8), compiled.weights)
        inputs, outputs = (
            [
                typed_view(self._batch[offset:], tensor, batch_size)
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

        def rehearse() -> None:
            # Meanwhile others are served: what they find in arena and batch must be theirs.
            for place, result in zip(outputs, program.run(inputs, weights, constants), strict=True):
                torch.empty_like(place).copy_(result)

        try:
            run = self._accelerator.capture(
                work, rehearsal=rehearse, tensor_cores=program.precision.tensor_cores
            )
        except (RuntimeError, TypeError, IndexError, ValueError) as error:  # what torch raises
            self._judge(error)
            raise ModelError(f"a batch of {batch_size} failed: {_first_line(error)}") from None
        return _Kernel(way, run, layout, constants)

    def _onnxruntime_kernel(
        self,
        graph: bytes,
        compiled: CompiledModel,
        batch_size: int,
        layout: IoLayout,
        place: Place,
    ) -> _Kernel:
        # One per batch size: intermediates that a captured graph uses must stay where they are.
        session = open_session(graph, place=place)

        def bound_to(batch: Tensor) -> OrtKernel:
            begin = batch.data_ptr()
            return OrtKernel(
                session,
                compiled,
                batch_size,
                weights_address=self._arena.data_ptr(),
                input_addresses=[begin + offset for offset in layout.input_offsets],
                output_addresses=[begin + offset for offset in layout.output_offsets],
                memory=batch,
                place=place,
            )

        try:
            kernel = bound_to(self._batch)
            # Rehearsed on zeros, which are legal indices anywhere.
            aside = bound_to(self._accelerator.device_memory(layout.num_bytes))
            run = self._accelerator.capture(
                kernel.launch, rehearsal=aside.launch, tensor_cores=False
            )
        except Exception as error:  # onnxruntime's exceptions have no common base
            self._judge(error)
            raise ModelError(f"a batch of {batch_size} failed: {plain_words(error)}") from None
        return _Kernel(Way.ONNXRUNTIME, run, layout, kernel)

    # --- steps ----------------------------------------------------------------------------------

    def run_load(self, step: Step[TorchModel]) -> None:
        """See `Device`."""
        stream, (begin, end) = self._load_stream, self._load_times
        source = step.model.weights.memory
        with self._watched():
            self._wait_for_readers(step.pages)
            stream.record(begin)
            for index, page in enumerate(step.pages):
                part = source[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
                copied = self._copied[index % _PAGES_IN_FLIGHT]
                copied.synchronize()
                target = self._pages[page].view(torch.uint8)[: len(part)]
                stream.run(partial(target.copy_, part, non_blocking=True))
                stream.record(copied)
            stream.record(end)
            end.synchronize()
            step.duration_ns = end.ns_since(begin)

    def _wait_for_readers(self, pages: Sequence[int]) -> None:
        """Put the LOAD stream behind the last gather from any of these pages."""
        with self._exec_lock:
            last = max((self._last_read[page] for page in pages), default=0)
            # Older ones have ended long ago: their places have been used again.
            if last > self._num_launched - _LAUNCHES:
                self._load_stream.wait(self._launches[last % _LAUNCHES].gathered)

    def run_input(self, step: Step[TorchModel], payload: Sequence[Buffer]) -> None:
        """See `Device`."""
        assert isinstance(step.action, Infer)
        layout = step.model.layouts[step.action.batch_size]
        write_inputs(self._io_in.numpy(), step, payload)
        slot = slice(step.io_offset, step.io_offset + layout.outputs_begin)
        self._copy(step, self._input_stream, self._input_times, self._io[slot], self._io_in[slot])

    def run_exec(self, step: Step[TorchModel]) -> None:
        """See `Device`."""
        self.finish_exec(step, self.launch_exec(step))

    def launch_exec(self, step: Step[TorchModel]) -> Launched:
        """See `QueueingDevice`."""
        assert isinstance(step.action, Infer)
        kernel = step.model.kernels[step.action.batch_size]
        with self._watched(), self._exec_lock:
            return self._enqueue(kernel, step.pages, step.io_offset)

    def finish_exec(self, step: Step[TorchModel], launched: Launched) -> None:
        """See `QueueingDevice`."""
        assert isinstance(launched, _Launch)
        with self._watched():
            launched.end.synchronize()
            step.duration_ns = launched.end.ns_since(launched.begin)

    def _enqueue(self, kernel: _Kernel, pages: Sequence[int], io_offset: int | None) -> _Launch:
        """Hand an EXEC over, with the lock held.

        Args:
            kernel: what to run.
            pages: where its weights lie.
            io_offset: of its IO slot; with None the inputs are zeros, and the outputs go nowhere.
        """
        self._num_launched += 1
        launch = self._launches[self._num_launched % _LAUNCHES]
        # Whoever used this place before has ended, unless more EXEC are under way than ever are.
        launch.end.synchronize()
        for page in pages:
            self._last_read[page] = self._num_launched
        count, stream, layout = len(pages), self._exec_stream, kernel.layout
        launch.pages.numpy()[:count] = pages
        listed, rows = self._page_list[:count], self._arena[:count]

        def gather() -> None:
            listed.copy_(launch.pages[:count], non_blocking=True)
            torch.index_select(self._pages, 0, listed, out=rows)

        stream.record(launch.begin)
        stream.run(gather)
        stream.record(launch.gathered)
        batch, split = self._batch[: layout.num_bytes], layout.outputs_begin
        slot = None if io_offset is None else self._io[io_offset : io_offset + layout.num_bytes]

        def compute() -> None:
            if slot is None:
                batch[:split].zero_()
                kernel.run()
            else:
                batch[:split].copy_(slot[:split])
                kernel.run()
                slot[split:].copy_(batch[split:])

        stream.run(compute)
        stream.record(launch.end)
        return launch

    def run_output(self, step: Step[TorchModel]) -> list[bytes]:
        """See `Device`."""
        assert isinstance(step.action, Infer)
        layout = step.model.layouts[step.action.batch_size]
        slot = slice(step.io_offset + layout.outputs_begin, step.io_offset + layout.num_bytes)
        self._copy(
            step, self._output_stream, self._output_times, self._io_out[slot], self._io[slot]
        )
        return read_outputs(self._io_out.numpy(), step)

    def _copy(
        self,
        step: Step[TorchModel],
        stream: Stream,
        times: tuple[Event, Event],
        target: Tensor,
        source: Tensor,
    ) -> None:
        begin, end = times
        with self._watched():
            stream.record(begin)
            stream.run(partial(target.copy_, source, non_blocking=True))
            stream.record(end)
            end.synchronize()
            step.duration_ns = end.ns_since(begin)

    async def close(self) -> None:
        """See `Device`."""
        self._setup.shutdown(wait=True, cancel_futures=True)
        await self._compiler.close()
        self._accelerator.close()

    # --- inside ---------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Tell an action that failed from a device that is lost.

        Raises:
            DeviceLostError: nothing can run any more, not only this.
        """
        if self._lost is not None:
            raise DeviceLostError(self._lost)
        try:
            yield
        except Exception as error:
            self._judge(error)
            if self._lost is not None:
                raise DeviceLostError(self._lost) from error
            raise

    def _judge(self, error: Exception) -> None:
        """Find out whether the device survived an error."""
        if self._lost is None and (fault := self._accelerator.fault()):
            self._lost = f"{_first_line(error)} ({fault})"
            self._on_lost(self._lost)

    def _measure_page_copy(self) -> int:
        """How long one page takes from host to device, in ns: the seed of every LOAD's duration."""
        stream, (begin, end) = self._load_stream, self._load_times
        source = self._host[:PAGE_BYTES]
        target = self._pages[0].view(torch.uint8)[: len(source)]
        samples = []
        for _ in range(_PROFILE_RUNS):
            stream.record(begin)
            stream.run(partial(target.copy_, source, non_blocking=True))
            stream.record(end)
            end.synchronize()
            samples.append(end.ns_since(begin))
        return sorted(samples)[len(samples) // 2]


def _rows(memory: Tensor) -> Tensor:
    """Pages as rows of a matrix, which can be gathered by number."""
    return memory.view(torch.int64).view(-1, PAGE_BYTES // _WORD_BYTES)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
