"""The GPU's device on the processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.kit.worker_models import IO_POOL_BYTES, LIMITS
from worker.devices.accelerator import CapturedWork, HostAccelerator, Piece
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
