"""The EXEC stream of a GPU: gather the model's pages into the arena, copy the batch in, replay, copy it out.

An EXEC is always all of that, even if the arena still holds the model from the last time: a duration that
depended on what ran before could not be predicted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from worker.devices.accelerator import Accelerator, Stream
from worker.devices.device import Launched
from worker.devices.gpu_memory import GpuMemory
from worker.engines.choice import Way
from worker.engines.torch_operators import Tensor
from worker.models.served_model import IoLayout

# How many EXEC may be under way at once: one runs, one waits behind it, the others are for stragglers.
NUM_LAUNCHES = 4


@dataclass(slots=True, eq=False, weakref_slot=True)
class CapturedKernel:
    """An architecture at one batch size, bound to the arena and the static batch."""

    way: Way
    run: Callable[[], None]
    layout: IoLayout
    #: Memory that the captured kernels use beside arena and batch; held so that it stays.
    memory: object
    #: How long a whole EXEC took when measured, without the copies from and to its IO slot.
    exec_ns: int = 1
    #: The GPU's clock during that measurement; 0 where the GPU does not say.
    clock_mhz: int = 0


class ExecLaunch(Launched):
    """One of the EXEC under way: its events and its list of pages. Launches are used in turn."""

    def __init__(self, accelerator: Accelerator, pages: Tensor) -> None:
        self.begin = accelerator.event()
        self.gathered = accelerator.event()
        self.end = accelerator.event()
        #: In locked memory, because the device reads the list only when the launch's turn has come.
        self.pages = pages

    @override
    def is_done(self) -> bool:
        return self.end.is_done()


class ExecQueue:
    """Hands EXEC to the device, and knows which pages they still read. Any thread may call it."""

    def __init__(self, accelerator: Accelerator, memory: GpuMemory) -> None:
        self._memory = memory
        self._stream = accelerator.stream(urgent=True)
        self._launches = [ExecLaunch(accelerator, pages) for pages in memory.launch_lists]
        #: Guards the order on the stream: the pieces of one EXEC stay together.
        self._lock = threading.Lock()
        self._num_launched = 0
        #: For each page, the number of the last launch that reads the page.
        self._last_read = [0] * len(memory.pages)

    def launch(
        self, kernel: CapturedKernel, pages: Sequence[int], io_offset: int | None
    ) -> ExecLaunch:
        """Hand an EXEC over, behind all that were handed over before.

        Args:
            kernel: the kernel to run.
            pages: the pages that hold the model's weights.
            io_offset: where its IO slot begins; with None the inputs are zeros, and the outputs go nowhere.
        """
        with self._lock:
            return self._enqueue(kernel, pages, io_offset)

    def measure(self, kernel: CapturedKernel, num_pages: int) -> int:
        """Run one EXEC between those of the models that are being served; returns its duration in ns."""
        launch = self.launch(kernel, range(min(num_pages, len(self._memory.pages))), None)
        launch.end.synchronize()
        return launch.end.ns_since(launch.begin)

    def make_wait_for_readers(self, stream: Stream, pages: Sequence[int]) -> None:
        """Put a stream behind the last gather from any of these pages; returns at once."""
        with self._lock:
            last = max((self._last_read[page] for page in pages), default=0)
            # An older launch has ended long ago: its place has been used again.
            if last > self._num_launched - NUM_LAUNCHES:
                stream.wait(self._launches[last % NUM_LAUNCHES].gathered)

    def _enqueue(
        self, kernel: CapturedKernel, pages: Sequence[int], io_offset: int | None
    ) -> ExecLaunch:
        self._num_launched += 1
        launch = self._launches[self._num_launched % NUM_LAUNCHES]
        # Blocks only if more EXEC are under way than ever are: the place's last user ended long ago.
        launch.end.synchronize()
        for page in pages:
            self._last_read[page] = self._num_launched
        memory, stream, layout = self._memory, self._stream, kernel.layout
        count = len(pages)
        launch.pages.numpy()[:count] = pages
        listed, rows = memory.page_list[:count], memory.arena[:count]

        def gather() -> None:
            listed.copy_(launch.pages[:count], non_blocking=True)
            torch.index_select(memory.pages, 0, listed, out=rows)

        stream.record(launch.begin)
        stream.run(gather)
        stream.record(launch.gathered)
        batch, split = memory.batch[: layout.num_bytes], layout.outputs_begin
        slot = None if io_offset is None else memory.io[io_offset : io_offset + layout.num_bytes]

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
