"""What the worker asks of a device: see the modules `worker.*_device`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from clockwright.bulk import Buffer
from worker.core.lanes import Lane, Step
from worker.models.file_store import Fetch
from worker.models.model_files import Limits
from worker.models.served_model import Offer, ServedModel

M = TypeVar("M", bound=ServedModel)


class DeviceLostError(Exception):
    """Raised by a step: nothing more can run before models are prepared anew.

    The action fails with these words, and no other step runs; then the worker ends its stream, so that
    what waits behind the action goes to other workers, and attaches again.
    """


class Device(Protocol[M]):
    """One GPU, or what stands in for it.

    The `run_` methods are called from lane threads, at most one at a time per lane; whatever they raise
    fails the action. One that can tell how long the device itself was busy says so in
    `step.duration_ns`. The other methods belong to the link's event loop.
    """

    #: Workers of one kind run the same kernels equally fast.
    gpu_kind: str
    limits: Limits
    #: Of all IO slots together.
    io_pool_bytes: int
    #: Lanes whose steps keep a processor busy, so that real-time priority is not for them.
    computing_lanes: frozenset[Lane]

    async def prepare(self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]) -> M:
        """Get a model ready for `LoadWeights`.

        Args:
            offer: the model.
            fetch: gets the named files into the worker's file store; asked for those only that are
                needed and not there.
            progress: told the stage, in words.

        Raises:
            ModelError: it cannot be served here; the message says why.
        """

    def run_load(self, step: Step[M]) -> None:
        """Copy the weights into `step.pages`."""

    def run_input(self, step: Step[M], payload: Sequence[Buffer]) -> None:
        """Copy a batch's inputs, per request and per input, into the IO slot."""

    def run_exec(self, step: Step[M]) -> None:
        """Run the batch in the IO slot; outputs go there too."""

    def run_output(self, step: Step[M]) -> list[bytes]:
        """Copy the outputs out of the IO slot, per request and per output."""

    async def close(self) -> None:
        """Let go of everything outside this process; nothing runs any more."""


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """What the controller is told of a look at a card."""

    #: The level of the clock that kernels run at; 0 where the card does not say.
    clock_mhz: int
    clock_mhz_max: int
    #: What makes it slower than it could be, or wrong, in words.
    complaints: tuple[str, ...]


@runtime_checkable
class WatchedDevice(Protocol):
    """A device whose hardware can say how it is."""

    async def watch(self, tell: Callable[[GpuHealth], None]) -> None:
        """Tell every look at the hardware; returns where there is nothing to look at, else never."""


class Launched(Protocol):
    """An EXEC that the device has been told to do."""

    def is_done(self) -> bool:
        """Whether it has ended, well or badly."""


@runtime_checkable
class QueueingDevice(Protocol):
    """A device on which an EXEC can wait for the one before it to end, ready to begin at once."""

    def launch_exec(self, step: Step[Any]) -> Launched:
        """Begin what `Device.run_exec` does, behind all EXEC that were begun before."""

    def finish_exec(self, step: Step[Any], launched: Launched) -> None:
        """Return at its end; raises what `Device.run_exec` would."""
