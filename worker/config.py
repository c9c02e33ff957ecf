"""A worker's settings, checked before anything starts."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from clockwright.channel import Access
from clockwright.cores import granted_cores
from clockwright.errors import ConfigError
from clockwright.leadership import parse_addresses
from clockwright.units import PAGE_BYTES
from worker.engines.choice import Engine, parse_engine
from worker.models.model_files import COMPILE_CPU_S
from worker.models.precision import Precision, parse_precision

_MIB = 1024 * 1024
# onnxruntime and torch are loaded in less.
_COMPILE_BYTES_MIN = 512 * _MIB


_PAGES = 64
# More gain little, and models are served beside.
_COMPILE_THREADS_MAX = 8


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/clockwright`, or `~/.cache/clockwright`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "clockwright"


def compile_threads(num_workers: int) -> int:
    """The threads that check compiled models in each worker of this machine that has a GPU."""
    return max(min(granted_cores() // num_workers, _COMPILE_THREADS_MAX), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker: one GPU, or what stands in for it.

    On the cpu device all memory is taken at start: pages and IO memory, 1.2 GiB by default; the arena, 0.5 GiB, too
    where pages cannot be moved (`worker.devices.paged_arena`).
    """

    #: The controller's address, HOST:PORT, or those of several with commas between: one of them leads.
    controller: str
    #: What it shows there, which is a token or a certificate where strangers may not join.
    access: Access = field(default_factory=Access)
    #: `cpu`, `cuda:N`, `modelled:PROFILE` or `container:FOLDER`; in tests also `torch:cpu`, which is
    #: the GPU's code on the processor.
    device: str = "cpu"
    #: The worker's name, unique among the controller's workers; HOST-PID if None.
    worker_id: str | None = None
    #: The weights cache, in pages of 16 MiB. Too few: models evict each other all the time. Too many:
    #: the machine swaps, or the worker does not start. 64 hold ten ResNet-50. None: 64; on a GPU as many as
    #: leave room for everything else.
    num_pages: int | None = None
    #: Room for the weights of the model that runs; no model may be larger. Never more than the weights
    #: cache. 512 MiB is the paper's workspace.
    arena_bytes: int = 512 * _MIB
    #: Room for inputs and outputs of Infers in hand. Too little: Infers wait for one another. One
    #: Infer may use a quarter of it, which caps batch sizes; 32 MiB is 53 images of 602 kB.
    io_bytes: int = 128 * _MIB
    #: The arithmetic on a GPU: `float32`, `tf32` or `float16` (`worker.models.precision`).
    precision: str = Precision.FLOAT32.value
    #: The engine on a GPU: `auto`, `torch` or `onnxruntime` (`worker.engines.choice`).
    engine: str = Engine.AUTO.value
    #: Device memory for the intermediates of a GPU's kernels. Too little: large models are refused. Too much: it
    #: is missing elsewhere. None: a sixteenth of the GPU's, or 2 GiB.
    workspace_bytes: int | None = None
    #: On a GPU: whether cuDNN tries its algorithms when a model is set up, at each start anew.
    cudnn_search: bool = False
    #: Host memory for the weights of all models, locked at start, which all GPUs of a host share (`worker.gpu_workers`). Too little: models are
    #: refused. Too much: the host has none left, or locking takes long (seconds per 10 GiB).
    host_bytes: int = 4096 * _MIB
    #: A file in memory of `host_bytes`, where several workers of a host keep one copy of each model's weights.
    host_file: Path | None = None
    #: The folder of model files and compiled models; several workers may share it.
    cache_dir: Path = field(default_factory=default_cache_dir)
    #: The cores that EXEC computes on, on the processor; with any other device, those of the whole process.
    #: None named: wherever the kernel likes.
    cores: tuple[int, ...] = ()
    #: The most threads that run a model on the processor, each as many as make it faster. None is one per core of
    #: `cores`, or one. With a GPU: the threads that check compiled models; None is one per core, 8 at most.
    threads: int | None = None
    #: Where fronts of other hosts bring inputs and get outputs: an address of this machine, the one by which it
    #: reaches the controller if empty; and a port, any if 0.
    payload_host: str = ""
    payload_port: int = 0
    #: A model that takes longer to compile, or to profile, is refused; other models queue behind it till then.
    compile_limit_s: float = 600.0
    #: A model that takes more memory to compile is refused. Too little: large models are; too much: a hostile
    #: one takes it from others. None: six times the arena, and 2 GiB for activations.
    compile_bytes: int | None = None
    #: A model that takes more processor time to compile, for each thread that it may have, is refused.
    compile_cpu_s: float = COMPILE_CPU_S
    #: How long to wait for the controller's consent when told to leave.
    drain_limit_s: float = 10.0

    def __post_init__(self) -> None:
        parse_addresses(self.controller)
        if self.known_pages < 1:
            raise ConfigError(f"pages: found {self.known_pages}, expected 1 or more")
        if self.arena_bytes < _MIB:
            raise ConfigError(f"arena: found {self.arena_bytes} bytes, expected {_MIB} or more")
        if self.io_bytes < _MIB:
            raise ConfigError(f"IO memory: found {self.io_bytes} bytes, expected {_MIB} or more")
        if self.host_bytes < _MIB:
            raise ConfigError(
                f"host memory: found {self.host_bytes} bytes, expected {_MIB} or more"
            )
        if self.workspace_bytes is not None and self.workspace_bytes < _MIB:
            raise ConfigError(
                f"workspace: found {self.workspace_bytes} bytes, expected {_MIB} or more"
            )
        parse_precision(self.precision)
        parse_engine(self.engine)
        if not 0 <= self.payload_port < 65536:
            raise ConfigError(f"payload port: found {self.payload_port}, expected 0 to 65535")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads: found {self.threads}, expected 1 or more")
        if self.worker_id is not None and not self.worker_id:
            raise ConfigError("worker id: found '', expected a name")
        if self.compile_bytes is not None and self.compile_bytes < _COMPILE_BYTES_MIN:
            raise ConfigError(
                f"compile memory: found {self.compile_bytes} bytes, expected {_COMPILE_BYTES_MIN} or more"
            )
        for name, value in (
            ("compile", self.compile_limit_s),
            ("compile processor", self.compile_cpu_s),
            ("drain", self.drain_limit_s),
        ):
            if not value > 0:
                raise ConfigError(f"{name} limit: found {value} s, expected more than 0")

    @property
    def known_pages(self) -> int:
        """The pages as far as they are known before a GPU says how much it has."""
        return _PAGES if self.num_pages is None else self.num_pages

    @property
    def usable_arena_bytes(self) -> int:
        """The arena's size, at most the cache's: no model may be larger than the cache anyway."""
        if self.num_pages is None and self.device.startswith("cuda"):
            # The cache takes what is left beside the arena.
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
        """The controllers' addresses."""
        return parse_addresses(self.controller)

    @property
    def name(self) -> str:
        """The worker's id."""
        return self.worker_id or f"{socket.gethostname()}-{os.getpid()}"
