"""The contract between `worker.devices.gpu` and the hardware: memory, streams, events, captured work.

Work is handed to a stream, which runs it in order and, on a GPU, later. Only events order the work of two streams.
`worker.devices.cuda` is a GPU. `HostAccelerator` is the processor, which runs work at once. A test has a third
accelerator, which delays work as long as events allow it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from typing_extensions import override

from worker.devices.host_memory import present_memory
from worker.engines.onnxruntime import Place
from worker.engines.torch_operators import Tensor


class Event(Protocol):
    """A point in a stream's work; made once, recorded many times."""

    def synchronize(self) -> None:
        """Wait until everything before the event's last `Stream.record` is done."""

    def is_done(self) -> bool:
        """Whether `synchronize` would return at once."""

    def ns_since(self, earlier: Event) -> int:
        """The time on the device between two events that are done, in ns; at least 1."""


class Stream(Protocol):
    """A queue of work, done in order."""

    def run(self, work: Callable[[], object]) -> None:
        """Hand work over; it runs after all work that was handed over before."""

    def record(self, event: Event) -> None:
        """Set the event after all work that was handed over so far."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCopy:
    """A copy within the device. Both places have the same number of bytes, at least 1, without gaps."""

    target: Tensor
    source: Tensor


#: A piece of captured work: kernels, which a function hands to the current stream; a copy; or an event to record.
Piece = Callable[[], None] | DeviceCopy | Event


class CapturedWork(Protocol):
    """Pieces of work that are launched together, many times."""

    def launch(self, stream: Stream, pieces: Sequence[Piece | None]) -> None:
        """Hand the pieces over in one call, so that the device makes no pause between them.

        Args:
            stream: runs them in order. Not two threads at once.
            pieces: those that `Accelerator.capture` got. Events may differ, copies may have other places, and a
                piece other than an event may be left out (None).
        """


class Accelerator(Protocol):
    """One GPU, or what stands in for it."""

    #: The device's name in torch.
    device: torch.device
    #: Accelerators of one name run the same kernels equally fast.
    name: str
    #: Whether work keeps one of the host's processors busy.
    on_host: bool

    def stream(self, *, urgent: bool = False) -> Stream:
        """Make a stream; the kernels of an urgent one go first."""

    def event(self, *, patient: bool = False) -> Event:
        """Make an event. Until its first record it counts as done.

        Args:
            patient: a thread that waits for the event sleeps, and wakes tens of microseconds late. Otherwise it
                may spin.
        """

    def device_memory(self, num_bytes: int) -> Tensor:
        """Allocate zeroed memory until `close`: uint8, one dimension.

        Raises MemoryError if the memory does not suffice; says how much is free.
        """

    def host_memory(self, num_bytes: int, file: int | None = None) -> Tensor:
        """Allocate zeroed memory of the host until `close`, all of it present; the device can copy from it.

        Args:
            num_bytes: the size.
            file: a file in memory of that size, which other processes map too. None: new memory.

        Raises:
            MemoryError: the memory does not suffice, or must not be locked; says what to do.
        """

    def capture(
        self, pieces: Sequence[Piece | None], *, rehearsal: Callable[[], None], tensor_cores: bool
    ) -> CapturedWork:
        """Prepare work that is launched many times, with the same kernels in the same memory.

        Args:
            pieces: the work; None is left out of every launch. Capturing it writes nothing, and records no event.
            rehearsal: the kernels that never ran before, writing elsewhere. Runs during the call, while other
                streams compute.
            tensor_cores: whether float32 products may be TF32.
        """

    def onnxruntime_place(self) -> Place | None:
        """How onnxruntime computes here. Returns None if it cannot.

        onnxruntime hands its kernels to the stream that `capture` works on.
        """

    def num_allocations(self) -> int:
        """How often device memory has been taken from the driver so far: constant while serving."""

    def reserved_bytes(self) -> int:
        """Device memory that this process keeps: memory taken for good, and the captured kernels' workspace."""

    def free_bytes(self) -> int | None:
        """Device memory that is free. Returns None if the device has no memory of its own.

        Unlike `num_allocations` it also notices libraries with an allocator of their own.
        """

    def total_bytes(self) -> int | None:
        """Device memory, free or not. Returns None if the device has no memory of its own."""

    def trim(self) -> None:
        """Give unused device memory back: that of rehearsals, and what captured kernels do not need."""

    def fault(self) -> str | None:
        """Why nothing can run on the device any more. Returns None while it works. May take a moment."""

    def close(self) -> None:
        """Give everything back."""


class HostEvent(Event):
    """A reading of the clock: all earlier work is done already."""

    def __init__(self) -> None:
        self.time_ns = 0

    @override
    def synchronize(self) -> None:
        pass

    @override
    def is_done(self) -> bool:
        return True

    @override
    def ns_since(self, earlier: Event) -> int:
        assert isinstance(earlier, HostEvent)
        return max(self.time_ns - earlier.time_ns, 1)


class HostStream(Stream):
    """Does everything at once."""

    @override
    def run(self, work: Callable[[], object]) -> None:
        with torch.inference_mode():
            work()

    @override
    def record(self, event: Event) -> None:
        assert isinstance(event, HostEvent)
        event.time_ns = time.monotonic_ns()


class HostWork(CapturedWork):
    """Captures nothing: each launch hands the pieces over again."""

    @override
    def launch(self, stream: Stream, pieces: Sequence[Piece | None]) -> None:
        for piece in pieces:
            if isinstance(piece, DeviceCopy):
                stream.run(partial(piece.target.copy_, piece.source))
            elif callable(piece):
                stream.run(piece)
            elif piece is not None:
                stream.record(piece)


class HostAccelerator(Accelerator):
    """The processor, one core of it: tests run the GPU's code on it."""

    device = torch.device("cpu")
    on_host = True

    def __init__(self) -> None:
        self.name = "cpu"
        self._num_allocations = 0
        self._reserved_bytes = 0
        # The lanes are threads already, and durations must not depend on other computations.
        torch.set_num_threads(1)

    @override
    def stream(self, *, urgent: bool = False) -> Stream:
        return HostStream()

    @override
    def event(self, *, patient: bool = False) -> Event:
        return HostEvent()

    @override
    def device_memory(self, num_bytes: int) -> Tensor:
        self._num_allocations += 1
        self._reserved_bytes += num_bytes
        # Written to now, so that no later use faults.
        return torch.empty(num_bytes, dtype=torch.uint8).zero_()

    @override
    def host_memory(self, num_bytes: int, file: int | None = None) -> Tensor:
        # Nothing to lock: the processor reads whatever is there.
        return torch.frombuffer(present_memory(num_bytes, file=file), dtype=torch.uint8)[:num_bytes]

    @override
    def capture(
        self, pieces: Sequence[Piece | None], *, rehearsal: Callable[[], None], tensor_cores: bool
    ) -> CapturedWork:
        with torch.inference_mode():
            rehearsal()
        return HostWork()

    @override
    def onnxruntime_place(self) -> Place | None:
        # onnxruntime could compute here, but `worker.devices.cpu` is the faster way to that.
        return None

    @override
    def num_allocations(self) -> int:
        # Intermediates are not counted: on a GPU captured kernels keep a place for them.
        return self._num_allocations

    @override
    def reserved_bytes(self) -> int:
        # Intermediates are not counted here either.
        return self._reserved_bytes

    @override
    def free_bytes(self) -> int | None:
        # The host's memory is shared with everything else on this machine.
        return None

    @override
    def total_bytes(self) -> int | None:
        return None

    @override
    def trim(self) -> None:
        pass

    @override
    def fault(self) -> str | None:
        return None

    @override
    def close(self) -> None:
        pass
