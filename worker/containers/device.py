"""A device for one model that is code in a process of its own, or that another server has.

The worker runs the container of one folder, which the operator named and whose files are on this machine: no
code comes over the link. An offer must match that folder, file by file.

Code has no weights that could be paged, so LOAD does nothing. EXEC hands the batch to the container and waits. What
the code cannot run fails its own batch. A container that crashes, hangs or goes away fails the batch that it had, and
the device is lost: waiting actions go to other workers, and the worker attaches again and restarts the container. The
pauses grow if the container keeps dying.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from typing_extensions import override

from clockwright.containers import ContainerSpec, read_container
from clockwright.errors import ConfigError, ModelError, OtherWorkersError
from clockwright.units import NS_PER_S, ArchitectureId, ModelId
from clockwright.wire.actions import Infer
from clockwright.wire.bulk import Buffer
from worker.containers.bounds import Bounds
from worker.containers.container import (
    Container,
    ContainerAwayError,
    ContainerBusyError,
    ContainerDiedError,
    ContainerFailedError,
    SharedMemory,
)
from worker.containers.program import ProgramContainer
from worker.core.lanes import Lane, Step
from worker.devices.device import Device, DeviceLostError
from worker.devices.host_io import read_outputs, write_inputs
from worker.models.file_store import sha256_of
from worker.models.model_files import Limits, carrying
from worker.models.served_model import Fetch, IoLayout, Offer, ServedModel, io_bytes_of

# Profiles seed the controller's estimates, which measurements replace soon.
_PROFILE_RUNS = 7
_PROFILE_BUDGET_NS = NS_PER_S // 2


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class ContainerModel(ServedModel):
    """A model whose container runs."""

    container: Container


class Backoff:
    """The pause before a container is started again."""

    FIRST_S, LIMIT_S = 0.1, 10.0
    #: A container that lived this long did not die from starting up.
    FORGET_S = 30.0

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._started_s = 0.0

    def started(self, now_s: float) -> None:
        """Note that a container was started."""
        self._started_s = now_s

    def died(self, now_s: float) -> None:
        """Note that the container died."""
        if now_s - self._started_s >= self.FORGET_S:
            self._pause_s = 0.0
        else:
            self._pause_s = min(max(2 * self._pause_s, self.FIRST_S), self.LIMIT_S)

    @property
    def pause_s(self) -> float:
        """Seconds to pause before the next start."""
        return self._pause_s


class ContainerDevice(Device[ContainerModel]):
    """One container as a device. See the module."""

    # The lanes only copy and wait: the code computes in its own process.
    computing_lanes: frozenset[Lane] = frozenset()
    # Its process takes as long as it likes.
    exec_anywhere = False
    # A program that says nothing is waited for, while offers of other models are refused next to it.
    at_once = 2

    def __init__(
        self, folder: Path, *, limits: Limits, io_pool_bytes: int, start_limit_s: float
    ) -> None:
        """Take the memory that rows cross in, for a model whose name is that of the folder.

        All IO slots have a size together. Raises ConfigError if the folder declares no container.
        """
        self._folder = folder.resolve()
        try:
            read_container(self._folder)
        except ModelError as error:
            raise ConfigError(f"container {folder}: {error}") from None
        self.gpu_kind = f"container:{self._folder.name}"
        self.limits = limits
        self.io_pool_bytes = io_pool_bytes
        self._start_limit_s = start_limit_s
        # Behind the slots there is room for the batch that is measured while others are served.
        self._memory = SharedMemory(io_pool_bytes + limits.io_bytes)
        self._setup = ThreadPoolExecutor(1, thread_name_prefix="setup")
        self._backoff = Backoff()
        self._bounds = Bounds(self._folder.name)
        #: Why the last container died; empty when none did.
        self._death = ""
        #: Containers by model, to find one whose step still runs. A container ends with its model.
        self._containers: weakref.WeakValueDictionary[ModelId, Container] = (
            weakref.WeakValueDictionary()
        )
        #: Exec ns by architecture and batch size, so that a container started again is not measured again.
        self._profile: dict[tuple[str, int], int] = {}

    # --- models ---------------------------------------------------------------------------------

    @override
    async def prepare(
        self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]
    ) -> ContainerModel:
        # Nothing is fetched: the files lie here.
        name = self._folder.name
        if offer.profile != name:
            raise OtherWorkersError("this worker runs one container only, that of another model")
        loop = asyncio.get_running_loop()
        spec, version_folder = await loop.run_in_executor(self._setup, read_container, self._folder)
        await loop.run_in_executor(self._setup, _check_contents, offer, version_folder)
        if any(each.vary or each.datatype == "BYTES" for each in (*spec.inputs, *spec.outputs)):
            most = max(offer.batch_sizes)
            spec = replace(
                spec, inputs=carrying(spec.inputs, most), outputs=carrying(spec.outputs, most)
            )
        tensors = (*spec.inputs, *spec.outputs)
        batch_sizes = self.limits.usable_batch_sizes(tensors, offer.batch_sizes, fixed_batch=False)
        architecture = _digest(spec, offer)
        while True:
            served_before = self._death
            if served_before and self._backoff.pause_s:
                progress(f"pausing {self._backoff.pause_s:g} s: {self._death}")
                await asyncio.sleep(self._backoff.pause_s)
            try:
                container, exec_ns = await self._start(
                    offer.model_id, spec, version_folder, batch_sizes, architecture, progress
                )
                break
            except (ModelError, ContainerAwayError) as error:
                if not served_before:
                    raise
                # The container has been served before, so the trouble may pass: try again.
                self._died(str(error))
        model = ContainerModel(
            model_id=offer.model_id,
            num_pages=1,
            io_bytes=io_bytes_of(tensors, batch_sizes),
            architecture_id=ArchitectureId(architecture),
            inputs=spec.inputs,
            outputs=spec.outputs,
            weights_bytes=0,
            # A seed of zero would say that the action takes no time.
            load_ns=1,
            exec_ns=exec_ns,
            container=container,
        )
        weakref.finalize(model, container.stop)
        return model

    async def _start(
        self,
        model_id: ModelId,
        spec: ContainerSpec,
        folder: Path,
        batch_sizes: Sequence[int],
        architecture: str,
        progress: Callable[[str], None],
    ) -> tuple[Container, dict[int, int]]:
        progress("starting")
        loop = asyncio.get_running_loop()
        # A container of an earlier stream is stopped first; that stream's last step may still wait for it.
        if old := self._containers.pop(model_id, None):
            await loop.run_in_executor(self._setup, old.stop)
        container = self._containers[model_id] = self._make(spec, folder)
        self._backoff.started(time.monotonic())
        try:
            container.start()
            await loop.run_in_executor(self._setup, container.wait_ready, self._start_limit_s)
            for size in batch_sizes:
                if (architecture, size) not in self._profile:
                    progress(f"profiling batch {size}")
                    measured = await loop.run_in_executor(
                        self._setup,
                        _profile,
                        container,
                        self._memory,
                        spec,
                        size,
                        self.io_pool_bytes,
                    )
                    self._profile[architecture, size] = measured
        except BaseException:
            container.stop()
            raise
        return container, {size: self._profile[architecture, size] for size in batch_sizes}

    def _make(self, spec: ContainerSpec, folder: Path) -> Container:
        if spec.address.startswith("grpc"):
            # Imported here, because programs need no gRPC.
            from worker.containers.oip_server import OipServer

            return OipServer(spec, folder, self._memory)
        return ProgramContainer(spec, folder, self._memory, self._bounds)

    # --- steps ----------------------------------------------------------------------------------

    @override
    def run_load(self, step: Step[ContainerModel]) -> None:
        pass  # there are no weights

    @override
    def run_input(self, step: Step[ContainerModel], payload: Sequence[Buffer]) -> None:
        write_inputs(self._memory.bytes, step, payload)

    @override
    def run_exec(self, step: Step[ContainerModel]) -> None:
        # The code sees the rows that were sent, never padding.
        action, model = step.action, step.model
        assert isinstance(action, Infer)
        layout = model.layouts[action.batch_size]
        try:
            _run(model.container, layout, action.rows, step.io_offset)
        except ContainerDiedError as error:
            if model.container.stopped:
                raise  # stopped on purpose: its successor is fine
            self._died(str(error))
            raise DeviceLostError(str(error)) from None

    @override
    def run_output(
        self, step: Step[ContainerModel], room: memoryview | None = None
    ) -> Sequence[Buffer]:
        return read_outputs(self._memory.bytes, step, room)

    @override
    async def close(self) -> None:
        for container in list(self._containers.values()):
            container.stop()
        self._setup.shutdown(wait=True, cancel_futures=True)
        self._memory.close()

    def _died(self, why: str) -> None:
        self._death = why
        self._backoff.died(time.monotonic())


def _check_contents(offer: Offer, version_folder: Path) -> None:
    """Check that the controller offers the files that the operator placed here. Raises ModelError if a file differs."""
    for file in offer.files:
        try:
            found = sha256_of(version_folder / file.name) or "no such file"
        except OSError as error:
            found = str(error)
        if found != file.sha256:
            raise ModelError(
                f"{version_folder.name}/{file.name} is not what this worker has: found {found} "
                f"here, the controller offers {file.sha256}"
            )


def _digest(spec: ContainerSpec, offer: Offer) -> str:
    sizes = [each.vary for each in (*spec.inputs, *spec.outputs)]
    return hashlib.sha256(repr((spec, sizes, sorted(offer.contents.items()))).encode()).hexdigest()


def _run(container: Container, layout: IoLayout, rows: Sequence[int], begin: int) -> None:
    container.run(
        rows,
        [begin + offset for offset in layout.input_offsets],
        [begin + offset for offset in layout.output_offsets],
    )


def _profile(
    container: Container, memory: SharedMemory, spec: ContainerSpec, size: int, begin: int
) -> int:
    """Measure a batch of zeros and empty texts, which are legal values anywhere, at the largest sizes, in ns.

    Raises ModelError if the code cannot run it; ContainerAwayError if what runs elsewhere went away, or is busy.
    """
    layout = IoLayout.of(spec.inputs, spec.outputs, size)
    # The measurement of another size left its outputs in this memory.
    memory.bytes[begin : begin + layout.outputs_begin] = 0
    for tensor, offset in zip(spec.inputs, layout.input_offsets, strict=True):
        if tensor.vary is not None:
            largest = replace(tensor, row_shape=tensor.largest_row)
            raw = np.frombuffer(largest.nothing(size), np.uint8)
            memory.bytes[begin + offset : begin + offset + len(raw)] = raw
    samples: list[int] = []
    try:
        _run(container, layout, [size], begin)  # the first run allocates
        end_ns = time.monotonic_ns() + _PROFILE_BUDGET_NS
        while not samples or (len(samples) < _PROFILE_RUNS and time.monotonic_ns() < end_ns):
            begin_ns = time.monotonic_ns()
            _run(container, layout, [size], begin)
            samples.append(max(time.monotonic_ns() - begin_ns, 1))
    except (ContainerDiedError, ContainerFailedError) as error:
        why = f"a batch of {size} zeros: {error}"
        died = isinstance(error, ContainerDiedError)
        if spec.address and (died or isinstance(error, ContainerBusyError)):
            raise ContainerAwayError(f"{spec.address}: {why}") from None
        raise ModelError(why) from None
    # Take the least, because other load on the machine only adds.
    return min(samples)
