"""A device that only spends the time that a profile gives, to measure everything around a GPU without one.

Outputs are zeros of the right size. Durations are exact, or noisy from a seed: the n-th LOAD of a worker
takes equally long in every run, and so does the n-th EXEC. A process may have many such devices
(`ModelledDevice.twin`): they share what is prepared, and each is a worker of its own.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
from typing_extensions import override

from clockwright.errors import ModelError
from clockwright.units import PAGE_BYTES, ArchitectureId
from clockwright.wire.actions import Infer
from clockwright.wire.bulk import Buffer
from modelzoo.profile import Profile
from worker.compiling.compiler import Compiler
from worker.core.lanes import Lane, Step
from worker.devices.device import Device
from worker.models.file_store import FileStore
from worker.models.model_files import Limits, ModelSource, carrying
from worker.models.served_model import Fetch, Offer, ServedModel, io_bytes_of
from worker.timing import sleep_until

# Each is some hundred bytes.
_PREPARED_MAX = 10_000


class ModelledDevice(Device[ServedModel]):
    """A device that only spends time. See the module."""

    computing_lanes: frozenset[Lane] = frozenset()
    exec_anywhere = True

    def __init__(
        self,
        profile: Profile,
        *,
        limits: Limits,
        io_pool_bytes: int,
        files: FileStore,
        compile_limit_s: float,
    ) -> None:
        self.gpu_kind = f"modelled:{profile.name}"
        self.limits = limits
        self.io_pool_bytes = io_pool_bytes
        self._profile = profile
        self._files = files
        self._compiler = Compiler(
            time_limit_s=compile_limit_s,
            memory_bytes=limits.compile_bytes,
            cpu_limit_s=limits.compile_cpu_s,
        )
        #: What is prepared, by what it depends on. Most offers are copies of a model, or come to several devices.
        self._prepared: dict[object, ServedModel] = {}
        self._preparing = asyncio.Lock()
        self._begin_noise()

    def _begin_noise(self) -> None:
        # One generator per lane, because lanes take turns differently in every run.
        self._load_noise = random.Random(f"load {self._profile.seed}")
        self._exec_noise = random.Random(f"exec {self._profile.seed}")

    def twin(self) -> ModelledDevice:
        """Make another device of this process, which prepares models together with this one."""
        twin = copy.copy(self)
        twin._begin_noise()
        return twin

    @override
    async def prepare(
        self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]
    ) -> ServedModel:
        offer.check_onnx()
        key = (
            frozenset(offer.contents.items()),
            frozenset(offer.fixed_dimensions.items()),
            offer.profile or offer.model_id,
            offer.batch_sizes,
        )
        # One device fetches and reads a model, and the others find it done.
        async with self._preparing:
            model = self._prepared.get(key)
            if model is not None:
                model = copy.copy(model)
                model.model_id, model.from_cache = offer.model_id, True
                return model
            if len(self._prepared) >= _PREPARED_MAX:
                del self._prepared[next(iter(self._prepared))]
            model = self._prepared[key] = await self._prepare(offer, fetch, progress)
            return model

    async def _prepare(
        self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]
    ) -> ServedModel:
        # The model's file is read, not run: only its inputs and outputs matter.
        row = self._profile.row_for(offer.profile or offer.model_id)
        self.limits.check_weights(row.weights_bytes)
        loop = asyncio.get_running_loop()
        missing = [
            file
            for file in offer.files
            if not await loop.run_in_executor(None, self._files.has, file.sha256)
        ]
        await fetch(missing)
        progress("reading")
        with ExitStack() as stack:
            folder = await loop.run_in_executor(
                None, stack.enter_context, self._files.model_folder(offer.contents)
            )
            described = await self._compiler.describe(ModelSource(folder, offer.fixed_dimensions))
        inputs = tuple(tensor.spec for tensor in described.inputs)
        outputs = tuple(tensor.spec for tensor in described.outputs)
        modelled = [size for size in offer.batch_sizes if size in row.exec_ns]
        if not modelled:
            raise ModelError(
                f"profile {self._profile.name!r} has no batch size of {list(offer.batch_sizes)} "
                f"for {row.name!r}, but {list(row.exec_ns)}"
            )
        if described.has_texts:
            most = max(modelled)
            inputs, outputs = carrying(inputs, most), carrying(outputs, most)
        batch_sizes = self.limits.usable_batch_sizes(
            (*inputs, *outputs), modelled, fixed_batch=described.fixed_batch
        )
        # Durations cannot tell models apart that share a row and the shapes of their tensors.
        architecture = repr((row, inputs, outputs)).encode()
        return ServedModel(
            model_id=offer.model_id,
            num_pages=max(1, -(-row.weights_bytes // PAGE_BYTES)),
            io_bytes=io_bytes_of((*inputs, *outputs), batch_sizes),
            architecture_id=ArchitectureId(hashlib.sha256(architecture).hexdigest()),
            inputs=inputs,
            outputs=outputs,
            weights_bytes=row.weights_bytes,
            # The controller refuses a model whose actions take no time, as a mistake.
            load_ns=max(row.load_ns, 1),
            exec_ns={size: max(row.exec_ns[size], 1) for size in batch_sizes},
            from_cache=not missing,
        )

    def duration_ns(self, step: Step[ServedModel]) -> int:
        """Do what `TimedDevice.duration_ns` does."""
        return self._draw_ns(step)

    def _draw_ns(self, step: Step[ServedModel]) -> int:
        noise, model = self._profile.noise, step.model
        if isinstance(step.action, Infer):
            exec_ns = model.exec_ns[step.action.batch_size]
            return _draw(exec_ns, self._exec_noise, noise.exec_sigma)
        return _draw(model.load_ns, self._load_noise, noise.load_sigma)

    # Steps on lanes' threads, and a short EXEC where it is submitted.

    def _spend(self, step: Step[ServedModel]) -> None:
        begin_ns = time.monotonic_ns()
        step.duration_ns = self._draw_ns(step)
        sleep_until(begin_ns + step.duration_ns)

    @override
    def run_load(self, step: Step[ServedModel]) -> None:
        self._spend(step)

    @override
    def run_input(self, step: Step[ServedModel], payload: Sequence[Buffer]) -> None:
        pass  # takes no time: nothing looks at the bytes

    @override
    def run_exec(self, step: Step[ServedModel]) -> None:
        self._spend(step)

    @override
    def run_output(
        self, step: Step[ServedModel], room: memoryview | None = None
    ) -> Sequence[Buffer]:
        assert isinstance(step.action, Infer)
        if step.model.outputs[0].vary is not None:
            return [spec.nothing(rows) for rows in step.action.rows for spec in step.model.outputs]
        if room is not None:
            np.frombuffer(room, np.uint8)[:] = 0
            return (room,)
        return [
            bytes(spec.batch_bytes(rows))
            for rows in step.action.rows
            for spec in step.model.outputs
        ]

    @override
    async def close(self) -> None:
        await self._compiler.close()


def _draw(duration_ns: int, noise: random.Random, sigma: float) -> int:
    return round(duration_ns * noise.lognormvariate(0.0, sigma)) if sigma else duration_ns
