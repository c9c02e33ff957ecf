"""The GPU's device on the processor."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.kit.worker_models import IO_POOL_BYTES, LIMITS
from worker.devices.accelerator import (
    CapturedWork,
    Event,
    HostAccelerator,
    HostEvent,
    HostStream,
    Piece,
    Stream,
)
from worker.devices.gpu import TorchDevice
from worker.devices.gpu_health import GpuMonitor
from worker.engines.choice import Engine
from worker.models.file_store import FileStore
from worker.models.model_files import Limits
from worker.models.precision import Precision

HOST_BYTES = 96 << 20


def torch_device(
    cache_dir: Path,
    accelerator: HostAccelerator | None = None,
    *,
    limits: Limits = LIMITS,
    host_bytes: int = HOST_BYTES,
    host_file: Path | None = None,
    precision: Precision = Precision.FLOAT32,
    engine: Engine = Engine.AUTO,
    on_lost: Callable[[str], object] = lambda reason: None,
    monitor: GpuMonitor | None = None,
) -> TorchDevice:
    return TorchDevice(
        accelerator or HostAccelerator(),
        limits=limits,
        io_pool_bytes=IO_POOL_BYTES,
        host_bytes=host_bytes,
        host_file=host_file,
        precision=precision,
        files=FileStore(cache_dir),
        cache_dir=cache_dir,
        compile_limit_s=300,
        engine=engine,
        on_lost=on_lost,
        monitor=monitor,
    )


class GrowingAccelerator(HostAccelerator):
    """Every kernel captured keeps memory for its intermediates."""

    intermediates_bytes = 0
    kept_bytes = 0

    def capture(
        self, pieces: Sequence[Piece | None], *, rehearsal: Callable[[], None], tensor_cores: bool
    ) -> CapturedWork:
        self.kept_bytes += self.intermediates_bytes
        return super().capture(pieces, rehearsal=rehearsal, tensor_cores=tensor_cores)

    def reserved_bytes(self) -> int:
        return super().reserved_bytes() + self.kept_bytes


class DeferredEvent(HostEvent):
    """Done when as many recordings have been reached as were asked for; its time counts pieces of work."""

    def __init__(self, owner: DeferredAccelerator) -> None:
        super().__init__()
        self.owner = owner
        self.asked = 0
        self.reached = 0

    def synchronize(self) -> None:
        self.owner.advance_until(self.is_done)

    def is_done(self) -> bool:
        return self.reached >= self.asked


class DeferredStream(HostStream):
    """Puts work off; `DeferredAccelerator` says when."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()

    def run(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def record(self, event: Event) -> None:
        assert isinstance(event, DeferredEvent)
        event.asked += 1
        number = event.asked

        def reach() -> None:
            event.reached = max(event.reached, number)
            event.time_ns = event.owner.time_ns

        self.queue.append(reach)


class DeferredAccelerator(HostAccelerator):
    """Does work only when somebody waits, in any order that streams allow."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._streams: list[DeferredStream] = []
        #: The device's clock, and how long it takes for each piece of work.
        self.time_ns, self.piece_ns = 0, 1

    def stream(self, *, urgent: bool = False) -> Stream:
        self._streams.append(DeferredStream())
        return self._streams[-1]

    def event(self, *, patient: bool = False) -> Event:
        return DeferredEvent(self)

    def advance_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            able = [each for each in self._streams if each.queue]
            work = self._rng.choice(able).queue.popleft()
            self.time_ns += self.piece_ns
            with torch.inference_mode():
                work()
