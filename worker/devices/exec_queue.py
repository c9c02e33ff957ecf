"""The EXEC stream of a GPU: gather the model's pages into the arena, copy the batch in, compute, copy it out.

All of that is one piece of captured work per architecture and batch size, with the events that time it. One launch
hands it over. So Python can pause before an EXEC but not within it, and a launch takes little of the host's time.
Both engines work this way, because their kernels are captured on one stream. Before a launch the few parts change
that differ each time: the address of the model's list of pages, the IO slot, the events. (The alternative was a
gate: hand everything over after a wait for a word in memory, then set the word. That keeps all the calls from
Python, and needs a driver whose streams can wait for memory.)

If the arena still holds the model's weights, because the same model ran last, nothing is gathered. A duration that
depends on what ran before cannot be predicted. So `ExecQueue.finish` also says how long the gather would have taken.
The sum is the duration of an EXEC that gathers, and predictions stay upper bounds.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from typing_extensions import override

from worker.devices.accelerator import Accelerator, CapturedWork, DeviceCopy, Piece
from worker.devices.device import Launched
from worker.devices.gpu_memory import GpuMemory
from worker.devices.host_weights import HostWeights
from worker.engines.choice import Way
from worker.models.served_model import IoLayout


@dataclass(slots=True, eq=False, weakref_slot=True)
class CapturedKernel:
    """An architecture at one batch size, bound to the arena and the static batch."""

    way: Way
    #: The kernels alone.
    compute: Callable[[], None]
    #: A whole EXEC: `ExecQueue.capture`.
    work: CapturedWork
    layout: IoLayout
    #: Memory that the captured kernels use in addition to arena and batch; held so that it stays.
    memory: object
    #: How long a whole EXEC took when measured, without the copies from and to its IO slot.
    exec_ns: int = 1
    #: The GPU's clock during that measurement; 0 where the GPU does not say.
    clock_mhz: int = 0
    #: How long the last gathers took.
    gathers_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_GATHERS))

    @property
    def gather_ns(self) -> int:
        """How long a gather takes, as far as is known."""
        gathers_ns = sorted(self.gathers_ns)
        return gathers_ns[len(gathers_ns) // 2] if gathers_ns else 0


# The median of so many says what a gather takes: a pause in one of them counts for nothing.
_GATHERS = 9


class ExecLaunch(Launched):
    """The events of an EXEC. They are reused after `ExecQueue.finish` has read them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.begin = accelerator.event()
        # Patient: a LOAD may wait for it behind an EXEC that takes long.
        self.gathered = accelerator.event(patient=True)
        self.end = accelerator.event()
        #: Which launch they belong to now.
        self.number = 0
        self.gathers = True

    @override
    def is_done(self) -> bool:
        return self.end.is_done()


@dataclass(frozen=True, slots=True)
class LaunchRow(Launched):
    """An EXEC of several kernels, one after the other; perhaps of none."""

    parts: list[tuple[CapturedKernel, ExecLaunch]]

    @override
    def is_done(self) -> bool:
        return not self.parts or self.parts[-1][1].is_done()


class ExecQueue:
    """Hands EXECs to the device, and knows which pages they still read. Any thread may call it."""

    def __init__(self, accelerator: Accelerator, memory: GpuMemory) -> None:
        self._accelerator = accelerator
        self._memory = memory
        self._stream = accelerator.stream(urgent=True)
        #: Guards the order on the stream, and everything below.
        self._lock = threading.Lock()
        self._num_launched = 0
        #: Events to capture; no EXEC uses them.
        self._example = ExecLaunch(accelerator)
        #: Events for the next EXEC.
        self._free = [ExecLaunch(accelerator)]
        #: By number, those that are not finished.
        self._under_way: dict[int, ExecLaunch] = {}
        #: For each page, the number of the last launch that gathers it.
        self._last_read = [0] * len(memory.pages)
        #: The weights in the arena after the last EXEC that was handed over. None if the arena is empty or they are gone.
        self._in_arena: Callable[[], HostWeights | None] = _nothing
        # torch has a kernel for few pages and one for many. Both are loaded now, and not during a capture.
        for count in (1, len(memory.arena)):
            self._stream.run(self._gather_of(count))

    def capture(
        self,
        compute: Callable[[], None],
        *,
        rehearsal: Callable[[], None],
        tensor_cores: bool,
        layout: IoLayout,
        num_pages: int,
    ) -> CapturedWork:
        """Prepare an architecture's EXEC.

        Args:
            compute: hands over the kernels, from arena and batch to batch.
            rehearsal: as in `Accelerator.capture`.
            tensor_cores: as in `Accelerator.capture`.
            layout: of the batch.
            num_pages: of the weights.
        """
        pieces = self._pieces(compute, layout, range(num_pages), 0, self._example)
        return self._accelerator.capture(pieces, rehearsal=rehearsal, tensor_cores=tensor_cores)

    def launch(
        self,
        kernel: CapturedKernel,
        weights: HostWeights,
        pages: Sequence[int],
        io_offset: int,
    ) -> ExecLaunch:
        """Hand an EXEC over, after all earlier ones: a model's weights in pages, an IO slot.

        The caller must `finish` it.
        """
        with self._lock:
            return self._launch(kernel, weights, pages, io_offset)

    def launch_row(
        self,
        kernels: Sequence[tuple[CapturedKernel, int]],
        weights: HostWeights,
        pages: Sequence[int],
    ) -> LaunchRow:
        """Hand over an EXEC of several kernels, each with where its part of the IO slot begins. The first gathers."""
        row = LaunchRow([])
        try:
            with self._lock:
                for kernel, offset in kernels:
                    row.parts.append((kernel, self._launch(kernel, weights, pages, offset)))
        except Exception:
            # Those before it still write to a slot that is another's from now on.
            self.finish_row(row)
            raise
        return row

    def finish_row(self, row: LaunchRow) -> tuple[int, int]:
        """Wait for the end of an EXEC of several kernels; returns what `finish` does."""
        if not row.parts:
            return 1, 0
        (_, first), (_, last) = row.parts[0], row.parts[-1]
        last.end.synchronize()
        duration_ns = last.end.ns_since(first.begin)
        spared_ns = [self.finish(kernel, launch)[1] for kernel, launch in row.parts]
        return duration_ns, spared_ns[0]

    def finish(self, kernel: CapturedKernel, launch: ExecLaunch) -> tuple[int, int]:
        """Wait for an EXEC's end.

        Returns how long the device was busy with it, and how much longer it would have been if the arena had not held
        the weights; in ns.
        """
        launch.end.synchronize()
        duration_ns = launch.end.ns_since(launch.begin)
        if launch.gathers:
            kernel.gathers_ns.append(launch.gathered.ns_since(launch.begin))
        spared_ns = 0 if launch.gathers else kernel.gather_ns
        with self._lock:
            del self._under_way[launch.number]
            self._free.append(launch)
        return duration_ns, spared_ns

    def measure(self, kernel: CapturedKernel, num_pages: int) -> int:
        """Run one EXEC between those of the models that are being served. Returns its duration in ns.

        Its inputs are zeros, and its outputs are discarded.
        """
        with self._lock:
            self._stream.run(self._memory.batch[: kernel.layout.outputs_begin].zero_)
            launch = self._launch(kernel, None, range(num_pages), None)
        duration_ns, _ = self.finish(kernel, launch)
        return duration_ns

    def forget_arena(self) -> None:
        """Make the next EXEC gather its weights, even if the arena holds them."""
        with self._lock:
            self._in_arena = _nothing

    def wait_for_readers(self, pages: Sequence[int]) -> None:
        """Wait for the end of the last gather from any of these pages."""
        with self._lock:
            last = max((self._last_read[page] for page in pages), default=0)
            # All before one that is finished have ended, too.
            launch = self._under_way.get(last)
        if launch is not None:
            # If it is finished by now, its events may be another launch's, and this waits for that one's gather.
            launch.gathered.synchronize()

    def _launch(
        self,
        kernel: CapturedKernel,
        weights: HostWeights | None,
        pages: Sequence[int],
        io_offset: int | None,
    ) -> ExecLaunch:
        launch = self._free.pop() if self._free else ExecLaunch(self._accelerator)
        self._num_launched += 1
        launch.number = self._num_launched
        launch.gathers = weights is None or self._in_arena() is not weights
        self._in_arena = _nothing  # should the launch fail
        pieces = self._pieces(kernel.compute, kernel.layout, pages, io_offset, launch)
        # If this fails, it is not known what the events stand for, so they are not used again.
        kernel.work.launch(self._stream, pieces)
        self._under_way[launch.number] = launch
        if launch.gathers:
            for page in pages:
                self._last_read[page] = launch.number
        if weights is not None:
            self._in_arena = weakref.ref(weights)
        return launch

    def _pieces(
        self,
        compute: Callable[[], None],
        layout: IoLayout,
        pages: Sequence[int],
        io_offset: int | None,
        launch: ExecLaunch,
    ) -> list[Piece | None]:
        """The pieces of an EXEC. Without an IO slot there are no copies from and to it."""
        memory, count, split = self._memory, len(pages), layout.outputs_begin
        batch = memory.batch[: layout.num_bytes]
        to_batch: DeviceCopy | None = None
        from_batch: DeviceCopy | None = None
        if io_offset is not None:
            slot = memory.io[io_offset : io_offset + layout.num_bytes]
            to_batch = DeviceCopy(batch[:split], slot[:split])
            from_batch = DeviceCopy(slot[split:], batch[split:])
        page_list: DeviceCopy | None = None
        gather: Callable[[], None] | None = None
        if launch.gathers:
            page_list = DeviceCopy(memory.page_list[:count], memory.page_lists[pages[0]][:count])
            gather = self._gather_of(count)
        return [
            *(launch.begin, page_list, gather, launch.gathered),
            *(to_batch, compute, from_batch, launch.end),
        ]

    def _gather_of(self, count: int) -> Callable[[], None]:
        memory = self._memory
        listed, rows = memory.page_list[:count], memory.arena[:count]

        def gather() -> None:
            torch.index_select(memory.pages, 0, listed, out=rows)

        return gather


def _nothing() -> None:
    """No weights."""
