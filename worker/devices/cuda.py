"""An NVIDIA GPU as an `Accelerator`: streams with priorities, events, pinned memory, CUDA graphs (`cuda_graph`).

Graphs are captured on one stream into one pool, so that they share the memory of their intermediates: one
EXEC runs at a time, and each graph's last kernels write its outputs to memory of their own. Rehearsals use
another stream, so that the memory torch keeps for the capture stream, cuBLAS's workspace above all, comes
from the pool. torch forgets that workspace whenever a graph of the stream goes (pytorch#193402), but the
pool's memory stays for the graphs that are left.

Locked memory is a mapping of our own, registered with the driver: torch's allocator of pinned memory rounds
every block up to a power of two.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import onnxruntime as ort
import torch
from torch.torch_version import TorchVersion
from typing_extensions import override

from clockwright.errors import ConfigError
from worker.devices.accelerator import Accelerator, Event, Piece, Stream
from worker.devices.cuda_graph import CudaEvent, CudaStream, CudaWork, load_driver
from worker.devices.host_memory import present_memory
from worker.engines.onnxruntime import Place, plain_words
from worker.engines.torch_operators import Tensor

# In the first run cuDNN may look for its fastest algorithm; the other runs settle the allocator.
_WARM_UP_RUNS = 3
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Installation:
    """The versions of CUDA on this machine, as torch reports them."""

    torch_version: str
    #: The CUDA version that torch was built for; None in a build without CUDA.
    cuda_version: str | None
    num_devices: int
    #: Why no GPU is usable, in torch's words; empty if one is.
    complaint: str = ""


def installation() -> Installation:
    """Ask torch, without taking a GPU into use."""
    with warnings.catch_warnings(record=True) as caught:
        # torch says by a warning that a driver is too old.
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    complaint = str(caught[0].message).strip().splitlines()[0] if caught else ""
    count = torch.cuda.device_count() if usable else 0
    return Installation(torch.__version__, torch.version.cuda, count, complaint)


def check_installation(found: Installation, index: int) -> None:
    """Refuse a GPU that is not there.

    Raises ConfigError if torch, the driver or the GPU is missing or does not fit; says which.
    """
    device = f"device 'cuda:{index}'"
    if found.cuda_version is None:
        raise ConfigError(
            f"{device}: found torch {found.torch_version}, which was built without CUDA; "
            "expected a build with it (clockwright[gpu]): uninstall torch and install it from an index "
            "that has no +cpu builds, as https://pypi.org/simple, because pip prefers those"
        )
    if found.num_devices == 0:
        why = found.complaint or "the driver reports no GPU"
        raise ConfigError(
            f"{device}: found no usable GPU ({why}); torch {found.torch_version} expects an NVIDIA "
            f"driver for CUDA {found.cuda_version} and a GPU in CUDA_VISIBLE_DEVICES"
        )
    if index >= found.num_devices:
        last = found.num_devices - 1
        raise ConfigError(
            f"{device}: found {found.num_devices} GPUs, expected cuda:0"
            + (f" to cuda:{last}" if last else "")
        )


class LockedMemory:
    """Host memory that is registered with the driver, so that copies need no processor."""

    def __init__(self) -> None:
        self._taken: list[Tensor] = []

    def take(self, num_bytes: int, file: int | None = None) -> Tensor:
        """Take memory as `Accelerator.host_memory` promises it."""
        # The tensor keeps the mapping alive.
        memory = torch.frombuffer(present_memory(num_bytes, file=file), dtype=torch.uint8)
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if status != 0:
            # The runtime keeps the error, and the next kernel would report it as its own: this one does.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            raise MemoryError(
                f"the driver cannot lock {num_bytes // _MIB} MiB of host memory (error {status}); "
                "start with less host memory, or raise the limit (ulimit -l)"
            )
        self._taken.append(memory)
        return memory[:num_bytes]

    def close(self) -> None:
        """Unregister all of the memory."""
        while self._taken:
            torch.cuda.cudart().cudaHostUnregister(self._taken.pop().data_ptr())


class CudaAccelerator(Accelerator):
    """One GPU."""

    on_host = False

    def __init__(self, index: int, *, search: bool = False) -> None:
        """Open it.

        Args:
            index: the GPU's number among those that CUDA_VISIBLE_DEVICES leaves.
            search: have cuDNN try its algorithms in the first run of each convolution. Each process repeats this,
                because torch keeps the choice in its own memory. Otherwise cuDNN guesses, which takes less time.

        Raises:
            ConfigError: there is no such GPU, no driver for it, or no cuda.bindings.
        """
        check_installation(installation(), index)
        self.device = torch.device("cuda", index)
        self._driver = load_driver(self.device)
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        # What was measured with the algorithms of a search holds for no others.
        self.name = f"cuda:{properties.name}" + "/cudnn-search" * search
        #: The GPU's name in NVML.
        self.uuid = f"GPU-{properties.uuid}"
        torch.backends.cudnn.benchmark = search
        # Captured kernels keep the priority of their capture stream, so it has that of EXEC.
        self._capture_stream = torch.cuda.Stream(self.device, priority=-1)
        self._rehearsal_stream = torch.cuda.Stream(self.device)
        # Held by each capture, because two at once would need two pools, and by `fault`, and by `trim`, which a rehearsal calls.
        self._capturing = threading.RLock()
        self._locked = LockedMemory()
        #: Graphs that are never replayed, and stay.
        self._kept: list[torch.cuda.CUDAGraph] = []
        self._anchor = partial(self.device_memory(1).add_, 1)
        with torch.inference_mode():
            self._anchor()  # the kernel is loaded now: a capture is no time for that
        torch.cuda.synchronize(self.device)
        #: What all captures share; None: the next capture takes another.
        self._pool: tuple[int, int] | None = None
        with torch.inference_mode():
            self._take_pool()

    @override
    def stream(self, *, urgent: bool = False) -> Stream:
        return CudaStream(torch.cuda.Stream(self.device, priority=-1 if urgent else 0))

    @override
    def event(self, *, patient: bool = False) -> Event:
        return CudaEvent(self.device, patient=patient)

    @override
    def device_memory(self, num_bytes: int) -> Tensor:
        try:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            free, total = torch.cuda.mem_get_info(self.device)
            raise MemoryError(
                f"{self.name}: {num_bytes // _MIB} MiB are needed, {free // _MIB} of "
                f"{total // _MIB} MiB are free"
            ) from None
        # The memory is zeroed on torch's current stream, for which none of our streams waits.
        torch.cuda.current_stream(self.device).synchronize()
        return memory

    @override
    def host_memory(self, num_bytes: int, file: int | None = None) -> Tensor:
        return self._locked.take(num_bytes, file)

    @override
    def capture(
        self, pieces: Sequence[Piece | None], *, rehearsal: Callable[[], None], tensor_cores: bool
    ) -> CudaWork:
        with self._capturing, torch.inference_mode():
            torch.backends.cuda.matmul.allow_tf32 = tensor_cores
            torch.backends.cudnn.allow_tf32 = tensor_cores
            with torch.cuda.stream(self._rehearsal_stream):
                for _ in range(_WARM_UP_RUNS):
                    rehearsal()
            self._rehearsal_stream.synchronize()
            # onnxruntime rehearses on the capture stream (`onnxruntime_place`).
            self._capture_stream.synchronize()
            if self._pool is None:
                self._take_pool()
            work = CudaWork(self._driver)
            work.instantiate(self._record(partial(work.capture, self._capture_stream, pieces)))
        return work

    def _take_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        try:
            # torch does not reuse a pool that has lost all its graphs.
            self._kept.append(self._record(self._anchor))
        except RuntimeError:
            self._pool = None
            raise

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # its nodes are changed later
        with torch.cuda.stream(self._capture_stream):
            try:
                # Not `torch.cuda.graph`, which waits for the whole device and collects garbage. Other
                # threads go on serving during a capture, so only this thread's calls may spoil it.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            except RuntimeError:
                if torch.cuda.is_current_stream_capturing():
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                self._leave_pool(graph)
                raise
            try:
                work()
            except BaseException:
                # A complaint of `capture_end` would hide what went wrong.
                with contextlib.suppress(RuntimeError):
                    self._end_capture(graph)
                raise
            self._end_capture(graph)
        return graph

    def _end_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # Before 2.13 torch goes on recording to the pool of a spoilt capture (pytorch#180395).
            if TorchVersion(torch.__version__) < (2, 13):
                self._leave_pool(graph)
            raise

    def _leave_pool(self, spoilt: torch.cuda.CUDAGraph) -> None:
        self._pool = None
        # Its end would be that of the pool, which other graphs still use.
        self._kept.append(spoilt)

    @override
    def onnxruntime_place(self) -> Place | None:
        # onnxruntime's own capture of graphs stays off: the thread that replays such a graph would have to
        # be the one that captured it. onnxruntime gets the stream that is being captured instead, as torch's
        # kernels do, and is told not to wait for that stream.
        provider = "CUDAExecutionProvider"
        if provider not in ort.get_available_providers():
            return None
        options = {
            "device_id": str(self.device.index),
            "user_compute_stream": str(self._capture_stream.cuda_stream),
            "do_copy_in_default_stream": "1",
            # Each session would search again, and there is a session per batch size, so an exhaustive search
            # takes too long. onnxruntime competes with torch by measurement anyway.
            "cudnn_conv_algo_search": "HEURISTIC",
            "arena_extend_strategy": "kSameAsRequested",
            # By default onnxruntime computes float32 in TF32.
            "use_tf32": "0",
        }
        run_options = {"disable_synchronize_execution_providers": "1"}
        return Place(provider, "cuda", self.device.index, options, run_options)

    @override
    def num_allocations(self) -> int:
        return int(torch.cuda.memory_stats(self.device)["num_device_alloc"])

    @override
    def reserved_bytes(self) -> int:
        # torch knows nothing of onnxruntime's memory, so it is not counted.
        return int(torch.cuda.memory_reserved(self.device))

    @override
    def free_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)

    @override
    def total_bytes(self) -> int | None:
        _, total = torch.cuda.mem_get_info(self.device)
        return int(total)

    @override
    def trim(self) -> None:
        # The memory of the captured graphs' pool stays: the pool has the anchor. The lock: a capture allocates.
        with self._capturing:
            torch.cuda.empty_cache()

    @override
    def fault(self) -> str | None:
        # After a fault in a kernel every call of this process fails, so a small computation tells. The lock:
        # waiting for the whole device would spoil a capture on one of its streams.
        with self._capturing:
            # An error that a call left behind shows in the next kernel alone, a fault in each.
            return self._probe() and self._probe()

    def _probe(self) -> str | None:
        try:
            torch.cuda.synchronize(self.device)
            probe = torch.zeros(1, device=self.device)
            if float((probe + 1).item()) != 1.0:
                return f"{self.name}: 0 + 1 is not 1 on it"
        except RuntimeError as error:
            return f"{self.name}: {plain_words(error)}"
        return None

    @override
    def close(self) -> None:
        self._locked.close()
