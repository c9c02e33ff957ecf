"""A worker's settings, checked before anything starts."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, replace

from clockwright.cli.worker_settings import WorkerSettings
from clockwright.client.channel import Access
from clockwright.cores import granted_cores
from clockwright.errors import ConfigError
from clockwright.settings import check
from clockwright.units import PAGE_BYTES
from clockwright.wire.controller_file import read_addresses
from worker.engines.choice import parse_engine
from worker.models.precision import parse_precision

_MIB = 1024 * 1024
_PAGES = 64
# More gain little, and the worker serves models meanwhile.
_COMPILE_THREADS_MAX = 8


def compile_threads(num_workers: int) -> int:
    """The threads that check compiled models in each worker of this machine that has a GPU."""
    return max(min(granted_cores() // num_workers, _COMPILE_THREADS_MAX), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(WorkerSettings):
    """One worker: one GPU, or what stands in for it.

    On the cpu device all memory is taken at start: pages and IO memory, 1.2 GiB by default; the arena, 0.5 GiB, too
    where pages cannot be moved (`worker.devices.paged_arena`). In tests the device may also be `torch:cpu`, which is
    the GPU's code on the processor.
    """

    #: Where the controller is: as for `read_addresses`. Of several one leads.
    controller: str
    #: What it shows there: a token or a certificate, where the controller asks for one.
    access: Access = field(default_factory=Access)
    #: Unique among the controller's workers; HOST-PID if None.
    worker_id: str | None = None
    #: A model that takes longer to compile, or to profile, is refused; other models queue behind it till then.
    compile_limit_s: float = 600.0
    #: How long to wait for the controller's consent when told to leave.
    drain_limit_s: float = 10.0

    def __post_init__(self) -> None:
        check(self)
        read_addresses(self.controller)
        parse_precision(self.precision)
        parse_engine(self.engine)
        if self.worker_id is not None and not self.worker_id:
            raise ConfigError("worker id: found '', expected a name")
        if self.num_devices > 1 and not self.device.startswith("modelled:"):
            raise ConfigError(
                f"--devices is {self.num_devices} with device {self.device!r}, expected "
                "modelled:PROFILE: only such devices share a process; other workers are started one by "
                "one, and --device cuda starts one for each GPU"
            )
        for name in ("compile_limit_s", "drain_limit_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")

    @property
    def known_pages(self) -> int:
        """The pages as far as they are known before a GPU says how much it has."""
        return _PAGES if self.num_pages is None else self.num_pages

    @property
    def usable_arena_bytes(self) -> int:
        """The arena's size, at most the cache's: no model may be larger than the cache anyway."""
        if self.num_pages is None and self.device.startswith("cuda"):
            # The cache takes what the arena leaves.
            return self.arena_bytes
        return min(self.arena_bytes, self.known_pages * PAGE_BYTES)

    @property
    def usable_compile_bytes(self) -> int:
        """What compiling a model may take."""
        if self.compile_bytes is not None:
            return self.compile_bytes
        return 6 * self.usable_arena_bytes + (2 << 30)

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """The numbers of threads that may run a model on the processor, ascending: powers of two, and all."""
        most = self.threads or max(len(self.cores), 1)
        return (*(1 << e for e in range(most.bit_length()) if 1 << e < most), most)

    @property
    def controllers(self) -> tuple[str, ...]:
        """The controllers' addresses now."""
        return read_addresses(self.controller)

    @property
    def name(self) -> str:
        """The worker's id."""
        return self.worker_id or f"{socket.gethostname()}-{os.getpid()}"

    @property
    def each_device(self) -> list[WorkerConfig]:
        """The settings of the worker that each device of this process is. Of several each adds its number to the name."""
        if self.num_devices == 1:
            return [self]
        return [
            replace(
                self,
                num_devices=1,
                worker_id=f"{self.name}-{index}",
                payload_port=self.payload_port and self.payload_port + index,
            )
            for index in range(self.num_devices)
        ]
