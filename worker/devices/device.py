"""The contract between a worker and its device.

`cpu`, `gpu` and `modelled` in this package satisfy it, and so does `worker.containers.device`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from clockwright.wire.bulk import Buffer
from worker.core.lanes import Lane, Step
from worker.models.model_files import Limits
from worker.models.served_model import Fetch, Offer, ServedModel

M = TypeVar("M", bound=ServedModel)


class DeviceLostError(Exception):
    """Raised by a step: nothing can run before all models are prepared again.

    The action fails with these words, and no other step runs. The worker then ends its stream, so that the
    controller sends the waiting actions to other workers, and attaches again.
    """


class Device(Protocol[M]):
    """One GPU, or what stands in for it.

    The `run_` methods are called from lane threads, at most one at a time per lane; an exception that they
    raise fails the action. A device that can tell how long it was busy sets `step.duration_ns`. The other
    methods belong to the link's event loop.
    """

    #: The kind of GPU: workers of one kind run the same kernels equally fast.
    gpu_kind: str
    limits: Limits
    #: The size of all IO slots together.
    io_pool_bytes: int
    #: Lanes whose steps keep a core busy; their threads must not run at real-time priority.
    computing_lanes: frozenset[Lane]
    #: Whether any thread may run a short EXEC; still one at a time.
    exec_anywhere: bool
    #: The core that EXEC's thread is bound to; None: it runs on those of the process.
    exec_core: int | None = None
    #: Whether nothing else runs on that core, so that EXEC's thread may compute at real-time priority.
    exec_core_is_own: bool = False
    #: How many calls of `prepare` may be under way at once.
    at_once: int = 1

    async def prepare(self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]) -> M:
        """Get a model ready for `LoadWeights`.

        Args:
            offer: the model.
            fetch: gets files into the worker's file store; called only for files that are missing there.
            progress: told the stage, in words.

        Raises:
            ModelError: the model cannot be served here; the message says why.
        """

    def run_load(self, step: Step[M]) -> None:
        """Copy the weights into `step.pages`."""

    def run_input(self, step: Step[M], payload: Sequence[Buffer]) -> None:
        """Copy a batch's inputs, per request and per input, into the IO slot."""

    def run_exec(self, step: Step[M]) -> None:
        """Run the batch in the IO slot; the outputs go into the slot too."""

    def end_exec(self) -> None:
        """End the EXEC that runs, whose result is not wanted, if that is possible. Called until no step runs."""
        return

    def run_output(self, step: Step[M], room: memoryview | None = None) -> Sequence[Buffer]:
        """Copy the outputs out of the IO slot, per request and per output.

        Args:
            step: the action's.
            room: the memory for them, one after the other. None: allocate memory.
        """

    async def close(self) -> None:
        """Free everything outside this process. Called when no step runs any more."""


@runtime_checkable
class TimedDevice(Device[M], Protocol[M]):
    """A device that only spends time in LOAD and EXEC, and none in INPUT and OUTPUT. Its lanes need no threads."""

    def duration_ns(self, step: Step[M]) -> int:
        """Say how long a LOAD or an EXEC that begins now takes."""


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """One reading of a GPU's sensors, as reported to the controller."""

    #: The level of the clock that kernels run at; 0 where the GPU does not say.
    clock_mhz: int
    clock_mhz_max: int
    #: What makes the GPU slower than it could be, or wrong, in words.
    complaints: tuple[str, ...]


@runtime_checkable
class WatchedDevice(Protocol):
    """A device whose hardware reports its clock and its faults."""

    async def watch(self, tell: Callable[[GpuHealth], None]) -> None:
        """Report the hardware's state every second. Returns only if the hardware cannot be read."""


class Launched(Protocol):
    """An EXEC that was handed to the device."""

    def is_done(self) -> bool:
        """Whether the EXEC has ended, well or badly."""


@runtime_checkable
class QueueingDevice(Protocol):
    """A device on which an EXEC can wait for the one before it to end, ready to begin at once."""

    def launch_exec(self, step: Step[Any]) -> Launched:
        """Hand an EXEC to the device, which begins it when all earlier ones have ended."""

    def finish_exec(self, step: Step[Any], launched: Launched) -> None:
        """Wait for an EXEC's end. Raises the same as `Device.run_exec`."""
