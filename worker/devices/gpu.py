"""A GPU as a device, on torch and onnxruntime; in tests the processor takes its place and runs the same code.

All memory is allocated at start (`GpuMemory`): pages, arena, IO slots, one static batch and the host's copies of all
weights. Models are set up while others are served, on one thread (`Kernels`, `HostWeightsStore`).

What waits for what. A lane's step ends when its work on the device has ended, and the core starts nothing earlier
that needs its result. The core frees pages when every EXEC that reads them has ended. With two EXECs under way the
device does not rely on that: a LOAD waits, on the device, for the last gather from the pages that it writes to (the
gather, not the whole EXEC).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnxruntime as ort
import torch
from typing_extensions import override

from clockwright.errors import ConfigError, ModelError
from clockwright.units import PAGE_BYTES, ArchitectureId
from clockwright.wire.actions import Infer
from clockwright.wire.bulk import Buffer
from worker.compiling.compile import COMPILE_FORMAT
from worker.compiling.compiled_models import CompiledModels
from worker.compiling.open_sizes import at_form
from worker.core.lanes import Lane, Step
from worker.devices.accelerator import Accelerator, Stream
from worker.devices.device import Device, GpuHealth, Launched, QueueingDevice, WatchedDevice
from worker.devices.device_loss import DeviceLoss
from worker.devices.exec_queue import CapturedKernel, ExecLaunch, ExecQueue, LaunchRow
from worker.devices.form_batches import FormBatch, FormKernels
from worker.devices.gpu_health import GpuMonitor
from worker.devices.gpu_memory import GpuMemory, workspace_limit
from worker.devices.host_io import read_outputs, write_inputs
from worker.devices.host_memory import available_bytes
from worker.devices.host_weights import HostWeights, HostWeightsStore
from worker.devices.kernels import Kernels
from worker.engines.choice import Engine, Way, ways_to_try
from worker.engines.torch_operators import Tensor
from worker.models.file_store import FileStore
from worker.models.forms import forms_of, row_counts
from worker.models.model_files import CompiledModel, Limits, sizes_to_write
from worker.models.precision import Precision
from worker.models.served_model import Fetch, Offer, ServedModel

# The page being copied and the one behind it: an INPUT waits for two pages at most. A page takes 0.3 ms at 55 GB/s, and the
# lane's thread has as long to wake up. (Measured on an H200: 0.11 ms in the median, 0.24 ms at the 90th percentile. Quarters
# of pages, four in flight, made INPUTs wait for less, but 28 wake-ups instead of 7 made a LOAD of 2.3 ms take 3.5 ms.)
_PAGES_IN_FLIGHT = 2
# Copies of one page at the start, whose median seeds every LOAD's duration.
_PAGE_COPIES = 10


@dataclass(slots=True, kw_only=True, eq=False)
class TorchModel(ServedModel):
    """A model whose weights lie in host memory."""

    weights: HostWeights
    #: The kernels by batch size; all models of the architecture share them. Empty: `forms` has them.
    kernels: dict[int, CapturedKernel]
    #: Those of a model with an open dimension.
    forms: FormKernels | None = None


class _Copies:
    """A lane's copies on a stream, and the events that time them."""

    def __init__(self, accelerator: Accelerator, stream: Stream, *, patient: bool = False) -> None:
        self.stream = stream
        self.begin = accelerator.event(patient=patient)
        self.end = accelerator.event(patient=patient)

    def copy(self, target: Tensor, source: Tensor, places: Sequence[slice] = (slice(None),)) -> int:
        """Copy some places and wait for the end. Returns how long the device was busy, in ns."""
        self.stream.record(self.begin)
        for place in places:
            self.stream.run(partial(target[place].copy_, source[place], non_blocking=True))
        self.stream.record(self.end)
        self.end.synchronize()
        return self.end.ns_since(self.begin)


def compiled_models(
    files: FileStore,
    cache_dir: Path,
    limits: Limits,
    precision: Precision,
    compile_limit_s: float,
    *,
    engines: Sequence[Engine] = (Engine.TORCH,),
    threads: int = 1,
) -> CompiledModels:
    """Open a cache of models compiled for a GPU, on any hardware; see `TorchDevice`.

    Raises OSError if the cache folder cannot be made.
    """
    return CompiledModels(
        files,
        cache_dir=cache_dir,
        # The first engine decides: the second one gets what that refuses, in all workers.
        target=f"{COMPILE_FORMAT}/{engines[0].value} {precision.value}/onnxruntime {ort.__version__}",
        compile_limit_s=compile_limit_s,
        limits=limits,
        precision=precision,
        engines=engines,
        thread_counts=(threads,),
        available_bytes=available_bytes(),
    )


class TorchDevice(Device[TorchModel], QueueingDevice, WatchedDevice):
    """One GPU. See the module."""

    # Its EXEC is launched, and waited for by EXEC's thread.
    exec_anywhere = False

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        limits: Limits,
        io_pool_bytes: int,
        host_bytes: int,
        host_file: Path | None = None,
        precision: Precision,
        files: FileStore,
        cache_dir: Path,
        compile_limit_s: float,
        engine: Engine = Engine.AUTO,
        compile_threads: int = 1,
        workspace_bytes: int | None = None,
        on_lost: Callable[[str], object],
        monitor: GpuMonitor | None = None,
    ) -> None:
        """Allocate all the memory that serving needs.

        Args:
            accelerator: the hardware; closed with the device.
            limits: what one model may need.
            io_pool_bytes: the size of all IO slots together.
            host_bytes: room on the host for the weights of all models.
            host_file: a file in memory of `host_bytes`, which workers of this host share. None: not shared.
            precision: the arithmetic of all models.
            files: where models' files lie.
            cache_dir: where compiled models lie.
            compile_limit_s: a model that takes longer is refused.
            engine: the engine that runs the models, or the choice between both.
            compile_threads: of the processor, to check compiled models with.
            workspace_bytes: what kernels may take for their intermediates; None: a part of the GPU's memory.
            on_lost: called once, from any thread, with the reason why nothing can run any more. The process must
                then end.
            monitor: reads the GPU's sensors. None if they cannot be read.

        Raises:
            ConfigError: the memory does not suffice, or the engine is not installed.
            OSError: the cache folder cannot be made.
        """
        place = accelerator.onnxruntime_place()
        ways = ways_to_try(
            engine, precision, on_host=accelerator.on_host, has_onnxruntime=place is not None
        )
        engines = tuple(dict.fromkeys(way.engine for way in ways))
        self.gpu_kind = _gpu_kind(accelerator.name, precision, engine, ways)
        self.limits = limits
        self.io_pool_bytes = io_pool_bytes
        self.precision = precision
        self.computing_lanes = (
            frozenset({Lane.LOAD, Lane.EXEC}) if accelerator.on_host else frozenset[Lane]()
        )
        self._accelerator = accelerator
        self._monitor = monitor
        self._loss = DeviceLoss(accelerator, on_lost)
        self._models = compiled_models(
            files,
            cache_dir,
            limits,
            precision,
            compile_limit_s,
            engines=engines,
            threads=compile_threads,
        )
        self.at_once = self._models.at_once
        try:
            file = None if host_file is None else os.open(host_file, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"the host's memory for weights: {error}") from None
        self._memory = GpuMemory(
            accelerator,
            limits=limits,
            io_pool_bytes=io_pool_bytes,
            host_bytes=host_bytes,
            host_file=file,
        )
        # LOAD and INPUT share a stream, because they share a copy engine, which goes on with one stream until that has
        # nothing more for it: on an H200 an INPUT with a stream of its own waited for a whole LOAD (1.7 ms in the median).
        to_device = accelerator.stream()
        # Patient: a busy LOAD lane does nothing but wait, and the kernel stops a real-time thread that spins.
        self._load = _Copies(accelerator, to_device, patient=True)
        self._copied = [accelerator.event(patient=True) for _ in range(_PAGES_IN_FLIGHT)]
        self._input = _Copies(accelerator, to_device)
        self.execs = ExecQueue(accelerator, self._memory)
        self._output = _Copies(accelerator, accelerator.stream())
        self._weights = HostWeightsStore(self._memory.host, file)
        self._kernels = Kernels(
            accelerator,
            self._memory,
            self.execs,
            self._models.cache,
            self._loss,
            monitor,
            gpu_kind=self.gpu_kind,
            ways=ways,
            place=place,
            workspace_bytes=workspace_limit(accelerator, workspace_bytes),
        )
        #: Those of models with an open dimension, by the offset of their IO slot; the next takes a dropped one's place.
        self._batches: dict[int, FormBatch] = {}
        self._page_copy_ns = self._measure_page_copy()

    @property
    def num_allocations(self) -> int:
        """How often device memory has been taken so far: constant while serving."""
        return self._accelerator.num_allocations()

    @override
    async def watch(self, tell: Callable[[GpuHealth], None]) -> None:
        if self._monitor is not None:
            await self._monitor.watch(tell)

    # --- models ---------------------------------------------------------------------------------

    @override
    async def prepare(
        self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]
    ) -> TorchModel:
        fitting = await self._models.get(offer, fetch, progress)
        compiled = fitting.compiled
        progress("setting up kernels")
        arguments = fitting.folder, compiled, fitting.batch_sizes
        forms = None
        if compiled.open is None:
            weights, kernels = await self._models.set_up(self._set_up, *arguments)
            exec_ns = {size: kernel.exec_ns for size, kernel in kernels.items()}
            # The highest clock that any of the kernels was measured at: no seed is then too small.
            clock_mhz = max(kernel.clock_mhz for kernel in kernels.values())
        else:
            weights, forms = await self._models.set_up(self._set_up_forms, *arguments)
            kernels, exec_ns, clock_mhz = {}, forms.exec_ns, forms.clock_mhz
        return TorchModel(
            model_id=offer.model_id,
            num_pages=compiled.num_pages,
            io_bytes=fitting.io_bytes,
            architecture_id=ArchitectureId(compiled.architecture_id),
            inputs=fitting.inputs,
            outputs=fitting.outputs,
            weights_bytes=compiled.weights_bytes,
            load_ns=max(self._page_copy_ns * compiled.weights_bytes // PAGE_BYTES, 1),
            exec_ns=exec_ns,
            clock_mhz=clock_mhz,
            from_cache=fitting.from_cache,
            one_by_one=fitting.compiled.one_by_one,
            weights=weights,
            kernels=kernels,
            forms=forms,
        )

    def _host_weights(self, folder: Path, compiled: CompiledModel) -> HostWeights:
        if self._loss.reason is not None:
            raise ModelError(f"the device is lost: {self._loss.reason}")
        return self._weights.get(folder, compiled)

    def _set_up(
        self, folder: Path, compiled: CompiledModel, batch_sizes: Sequence[int]
    ) -> tuple[HostWeights, dict[int, CapturedKernel]]:
        weights = self._host_weights(folder, compiled)
        return weights, self._kernels.set_up(folder, compiled, batch_sizes)

    def _set_up_forms(
        self, folder: Path, compiled: CompiledModel, batch_sizes: Sequence[int]
    ) -> tuple[HostWeights, FormKernels]:
        sizes = compiled.open
        assert sizes is not None
        weights = self._host_weights(folder, compiled)
        elements = max(batch_sizes) * sizes.unit
        # Where a worker with more memory has compiled it, not all have room.
        forms = [form for form in forms_of(sizes) if form <= elements]
        if not forms:
            raise ModelError(f"a row has no room in batches of {elements} elements; more --io-mib")
        kernels = {}
        # The largest first, as in `Kernels`: what has no room is found at once.
        for form, less in zip(reversed(forms), (*reversed(forms[:-1]), 0), strict=True):
            rows = row_counts(form, elements)
            try:
                kernels[form] = self._kernels.set_up(folder, at_form(compiled, form), rows)
            except ModelError as error:
                bound = sizes_to_write((), dict.fromkeys(sizes.symbols, -less))
                raise ModelError(
                    f"rows of {sizes.symbols[0]} {form}: {error}"
                    + f", or bound it in config.toml: {bound}" * bool(less)
                ) from None
        return weights, FormKernels(compiled, dict(sorted(kernels.items())), batch_sizes)

    # --- steps ----------------------------------------------------------------------------------

    @override
    def run_load(self, step: Step[TorchModel]) -> None:
        stream, begin, end = self._load.stream, self._load.begin, self._load.end
        source = step.model.weights.memory
        with self._loss.guard():
            # Here and not in the stream, where INPUTs would wait too.
            self.execs.wait_for_readers(step.pages)
            stream.record(begin)
            page_list = self._memory.load_list[: len(step.pages)]
            page_list.numpy()[:] = step.pages
            listed = self._memory.page_lists[step.pages[0]][: len(step.pages)]
            stream.run(partial(listed.copy_, page_list, non_blocking=True))
            for index, page in enumerate(step.pages):
                part = source[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
                copied = self._copied[index % _PAGES_IN_FLIGHT]
                copied.synchronize()
                target = self._memory.pages[page].view(torch.uint8)[: len(part)]
                stream.run(partial(target.copy_, part, non_blocking=True))
                stream.record(copied)
            stream.record(end)
            end.synchronize()
            step.duration_ns = end.ns_since(begin)

    @override
    def run_input(self, step: Step[TorchModel], payload: Sequence[Buffer]) -> None:
        assert isinstance(step.action, Infer)
        memory, pool, forms = self._memory, self._memory.io_in.numpy(), step.model.forms
        if forms is None:
            layout = step.model.layouts[step.action.batch_size]
            write_inputs(pool, step, payload)
            places = [slice(step.io_offset, step.io_offset + layout.outputs_begin)]
        else:
            batch = self._batches[step.io_offset] = forms.write(pool, step, payload)
            places = batch.inputs
        with self._loss.guard():
            step.duration_ns = self._input.copy(memory.io, memory.io_in, places)

    @override
    def run_exec(self, step: Step[TorchModel]) -> None:
        self.finish_exec(step, self.launch_exec(step))

    @override
    def launch_exec(self, step: Step[TorchModel]) -> Launched:
        assert isinstance(step.action, Infer)
        model = step.model
        if model.forms is not None:
            kernels = model.forms.kernels_of(self._batches[step.io_offset])
            with self._loss.guard():
                return self.execs.launch_row(kernels, model.weights, step.pages)
        kernel = model.kernels[step.action.batch_size]
        with self._loss.guard():
            return self.execs.launch(kernel, model.weights, step.pages, step.io_offset)

    @override
    def finish_exec(self, step: Step[TorchModel], launched: Launched) -> None:
        assert isinstance(step.action, Infer)
        if isinstance(launched, LaunchRow):
            with self._loss.guard():
                step.duration_ns, step.spared_ns = self.execs.finish_row(launched)
            return
        assert isinstance(launched, ExecLaunch)
        kernel = step.model.kernels[step.action.batch_size]
        with self._loss.guard():
            step.duration_ns, step.spared_ns = self.execs.finish(kernel, launched)

    @override
    def run_output(
        self, step: Step[TorchModel], room: memoryview | None = None
    ) -> Sequence[Buffer]:
        assert isinstance(step.action, Infer)
        memory, pool, forms = self._memory, self._memory.io_out.numpy(), step.model.forms
        if forms is None:
            layout = step.model.layouts[step.action.batch_size]
            begin = step.io_offset
            places = [slice(begin + layout.outputs_begin, begin + layout.num_bytes)]
        else:
            batch = self._batches.pop(step.io_offset)
            places = batch.outputs
        with self._loss.guard():
            step.duration_ns = self._output.copy(memory.io_out, memory.io, places)
        return (
            read_outputs(pool, step, room) if forms is None else forms.read(pool, step, batch, room)
        )

    @override
    async def close(self) -> None:
        await self._models.close()
        self._weights.close()
        self._accelerator.close()

    def _measure_page_copy(self) -> int:
        """How long the copy of one page from host to device takes, in ns. Seeds the duration of every LOAD."""
        source = self._memory.host[:PAGE_BYTES]
        target = self._memory.pages[0].view(torch.uint8)[: len(source)]
        samples = sorted(self._load.copy(target, source) for _ in range(_PAGE_COPIES))
        return samples[len(samples) // 2]


def _gpu_kind(name: str, precision: Precision, engine: Engine, ways: Sequence[Way]) -> str:
    kind = f"{name}/{precision.value}"
    if any(way.engine is not Engine.TORCH for way in ways):
        # Such a worker may run other kernels than one that has torch alone.
        kind += f"/{engine.value}"
    return kind
