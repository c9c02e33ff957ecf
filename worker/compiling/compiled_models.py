"""Gets the compiled model of an offer: from the cache, or by compiling it now.

A device with an engine owns one `CompiledModels`. That owns the compile cache, the compiler process and the setup
thread, which keeps slow work off the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from clockwright.cores import granted_cores
from clockwright.wire.tensors import TensorSpec
from worker.compiling.cache import CompileCache
from worker.compiling.compiler import Compiler, jobs_at_once
from worker.engines.choice import Engine
from worker.models.file_store import FileStore
from worker.models.model_files import CompiledModel, Limits, ModelSource, carrying
from worker.models.precision import Precision
from worker.models.served_model import Fetch, Offer, io_bytes_of
from worker.timing import tune_background_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class FittingModel:
    """A compiled model that this worker has room for."""

    #: The folder that holds the compiled model's files.
    folder: Path
    compiled: CompiledModel
    #: Inputs and outputs as the client knows them.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: The offered batch sizes that fit, in ascending order.
    batch_sizes: tuple[int, ...]
    #: Whether nothing had to be fetched or compiled.
    from_cache: bool
    #: An IO slot has room for so many times a batch's tensors.
    room: int

    @property
    def io_bytes(self) -> dict[int, int]:
        """Bytes of an IO slot by batch size."""
        each = io_bytes_of((*self.inputs, *self.outputs), self.batch_sizes)
        return {size: self.room * num_bytes for size, num_bytes in each.items()}


class CompiledModels:
    """Compiled models for a device with an engine."""

    def __init__(
        self,
        files: FileStore,
        *,
        cache_dir: Path,
        target: str,
        compile_limit_s: float,
        limits: Limits,
        precision: Precision | None = None,
        engines: Sequence[Engine] = (),
        thread_counts: Sequence[int] = (1,),
        cores: Sequence[int] = (),
        available_bytes: int | None = None,
    ) -> None:
        """Open the cache; the compiler's process and the thread start when they are needed.

        Args:
            files: the store that fetched files lie in.
            cache_dir: the folder of compiled models.
            target: what compiled code depends on besides the model: format, runtime, processor.
            compile_limit_s: a model that takes longer to compile is refused.
            limits: what the worker has room for.
            precision: that of a GPU's models; None for onnxruntime on this processor.
            engines: the engines that may run a model on that GPU, the preferred one first.
            thread_counts: the numbers of threads that a run on onnxruntime may have, ascending.
            cores: those to run on, in addition to the process's own.
            available_bytes: the host's free memory, which limits how many models are compiled at once; None: not known.

        Raises:
            OSError: the cache folder cannot be made.
        """
        self._files = files
        self._limits = limits
        self._precision = precision
        self._engines = engines
        self.cache = CompileCache(cache_dir, target=target)
        # Most of a job is on one thread, whatever a run may have.
        cores_each = min(max(thread_counts), 2)
        at_once = jobs_at_once(
            max(len(cores), granted_cores()) // cores_each, available_bytes, limits.compile_bytes
        )
        self.compiler = Compiler(
            at_once=at_once,
            time_limit_s=compile_limit_s,
            memory_bytes=limits.compile_bytes,
            cpu_limit_s=limits.compile_cpu_s,
            thread_counts=thread_counts,
            cores=cores,
        )
        logger.info(
            "compiles %d models at once, and as many that take long; each takes %d MiB of memory at most",
            at_once,
            limits.compile_bytes >> 20,
        )
        self._profiling: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # One thread: models are set up one after the other.
        self._setup = ThreadPoolExecutor(
            1, thread_name_prefix="setup", initializer=tune_background_thread
        )

    @property
    def at_once(self) -> int:
        """How many models may be under way at once: those that compile, and those that take long."""
        return 2 * self.compiler.at_once

    async def get(
        self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]
    ) -> FittingModel:
        """Find or make a compiled model, and say which batch sizes of it fit.

        Raises ModelError if the model cannot be served here; the message says why.
        """
        offer.check_onnx()
        folder, compiled, from_cache = await self._find_or_make(offer, fetch, progress)
        self._limits.check_weights(compiled.weights_bytes)
        offered: Sequence[int] = offer.batch_sizes
        if compiled.open is not None:
            offered = compiled.open.batch_sizes(offered)
        elif max(offered) == 1:
            compiled = replace(compiled, one_by_one="")
        elif compiled.one_by_one:
            offered = (1,)
        inputs, outputs = (
            tuple(tensor.spec for tensor in side) for side in (compiled.inputs, compiled.outputs)
        )
        if compiled.has_texts and compiled.open is None:
            most = 1 if compiled.fixed_batch else max(offered)
            inputs = carrying(inputs, most)
            outputs = carrying(outputs, most, compiled.usual_bytes)
        room = compiled.open.room if compiled.open is not None else 1
        batch_sizes = self._limits.usable_batch_sizes(
            (*inputs, *outputs),
            offered,
            fixed_batch=compiled.fixed_batch and compiled.open is None,
            room=room,
        )
        return FittingModel(folder, compiled, inputs, outputs, batch_sizes, from_cache, room)

    def profiling(self, architecture_id: str) -> asyncio.Lock:
        """The lock of who profiles an architecture. The next finds the profile in the cache."""
        return self._profiling.setdefault(architecture_id, asyncio.Lock())

    async def set_up(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Run a slow function on the setup thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._setup, work, *arguments)

    async def close(self) -> None:
        """Wait for the setup thread, then end the compiler's process."""
        self._setup.shutdown(wait=True, cancel_futures=True)
        await self.compiler.close()

    async def _find_or_make(
        self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]
    ) -> tuple[Path, CompiledModel, bool]:
        key = self.cache.key(offer.contents, offer.fixed_dimensions)

        def suffices(compiled: CompiledModel) -> bool:
            return compiled.covers(offer.batch_sizes, self._limits.io_bytes)

        if found := await self.set_up(self.cache.find, key, suffices):
            return *found, True
        missing = [
            file for file in offer.files if not await self.set_up(self._files.has, file.sha256)
        ]
        await fetch(missing)
        with ExitStack() as stack:
            source = await self.set_up(
                stack.enter_context, self._files.model_folder(offer.contents)
            )
            folder = stack.enter_context(self.cache.new_folder())
            compiled = await self.compiler.compile(
                ModelSource(source, offer.fixed_dimensions, offer.batch_sizes),
                folder,
                self._limits,
                progress,
                precision=self._precision,
                engines=self._engines,
            )
            return self.cache.publish(folder, key), compiled, False
