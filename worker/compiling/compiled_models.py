"""Compiled models by offer: from the cache, or fetched and compiled now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path

from worker.compiling.cache import CompileCache
from worker.compiling.compiler import Compiler
from worker.devices.device import Fetch
from worker.models.file_store import FileStore
from worker.models.model_files import CompiledModel, Limits, ModelSource
from worker.models.precision import Precision
from worker.models.served_model import Offer


class CompiledModels:
    """What a device with an engine does before anything else with an offer."""

    def __init__(
        self,
        files: FileStore,
        cache: CompileCache,
        compiler: Compiler,
        executor: Executor,
        limits: Limits,
        precision: Precision | None = None,
    ) -> None:
        """Set up.

        Args:
            files: where fetched files lie.
            cache: of what this device's target compiles.
            compiler: makes the rest.
            executor: for what takes long and must not hold up the event loop.
            limits: of the worker.
            precision: of the torch engine; None for onnxruntime.
        """
        self._files = files
        self._cache = cache
        self._compiler = compiler
        self._executor = executor
        self._limits = limits
        self._precision = precision

    async def get(
        self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]
    ) -> tuple[Path, CompiledModel, bool]:
        """Find or make a compiled model.

        Returns:
            Its folder, what is in it, and whether it was in the cache.

        Raises:
            ModelError: it cannot be served here; the message says why.
        """
        loop = asyncio.get_running_loop()
        key = self._cache.key(offer.contents, offer.fixed_dimensions)
        if found := await loop.run_in_executor(self._executor, self._cache.find, key):
            return *found, True
        missing = [
            file
            for file in offer.files
            if not await loop.run_in_executor(self._executor, self._files.has, file.sha256)
        ]
        await fetch(missing)
        with ExitStack() as stack:
            source = await loop.run_in_executor(
                self._executor, stack.enter_context, self._files.model_folder(offer.contents)
            )
            folder = stack.enter_context(self._cache.new_folder())
            compiled = await self._compiler.compile(
                ModelSource(source, offer.fixed_dimensions),
                folder,
                self._limits,
                progress,
                precision=self._precision,
            )
            return self._cache.publish(folder, key), compiled, False
