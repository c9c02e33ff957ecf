"""What the hardware itself can do, which says how good a LOAD, a gather or an EXEC is.

* `copy`: host to device bandwidth from locked memory, one page at a time and many; device to device.
* `gather`: a model's pages into the arena, by index_select, the same captured, and by one copy per page; from
  a small weights cache and from Figure 6's, whose words are too many for 32 bits to count, which some kernels
  are slower for.
* `host`: inputs and outputs of ResNet-50 on their way; what it takes to have locked memory; how late threads
  wake up, tuned as the lanes' are and not.
* `exec`: captured ResNet-50 in each precision, convolutions joined with their ReLUs or not, and with their
  weights in the order that this precision is not served in (channels first, channels last), largest batch and
  single; kernel launches without a graph for comparison.
* `beside_*`: a single EXEC alone, while pages are copied from the host, and while a second EXEC runs on
  another stream (the paper's argument for one EXEC at a time); an input while pages are copied, in a stream of
  its own and in theirs.
* `graphs`: time and device memory of one captured graph more.

Mapping a model's pages into a range of addresses, in place of the gather, is not measured: it needs bindings
to the driver that nothing else here does, and would be of interest only if the gather took more than a
tenth of a single EXEC.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from clockwright.cli.worker_settings import default_cache_dir
from clockwright.units import NS_PER_MS, PAGE_BYTES
from experiments.clockwork_paper import fig6
from experiments.gpu.hardware import (
    about,
    after_warm_up,
    arguments,
    compiled_for,
    device_times_ns,
    median_us,
    open_accelerator,
    spread,
)
from experiments.results_file import write_results
from worker.devices.accelerator import Accelerator, CapturedWork, Event, Stream
from worker.devices.gpu_memory import rows_of_pages
from worker.devices.host_memory import present_memory
from worker.engines.torch_operators import Tensor
from worker.engines.torch_program import Program
from worker.engines.torch_tensors import typed_view, weight_views
from worker.models.model_files import (
    GRAPH_FILE,
    WEIGHTS_FILE,
    BoundTensor,
    CompiledModel,
)
from worker.models.precision import Precision
from worker.timing import sleep_until, tune_thread

ARCHITECTURE = "resnet50_v1"
PAGES = 7  # of ResNet-50 in float32
SMALL_CACHE_PAGES = 4 * PAGES
ROW_BYTES = {"input": 4 * 3 * 224 * 224, "output": 4 * 1000}
RUNS = 300
BATCH_SIZES = (1, 16)

Figures = dict[str, float]


def copy(accelerator: Accelerator, *, pages: int = PAGES, runs: int = RUNS) -> Figures:
    """Bandwidths in GB/s (10^9), and how long one page takes."""
    stream = accelerator.stream()
    host = accelerator.host_memory(pages * PAGE_BYTES)
    near = accelerator.device_memory(pages * PAGE_BYTES)
    other = accelerator.device_memory(pages * PAGE_BYTES)
    one = slice(0, PAGE_BYTES)
    figures = {}
    for key, work, num_bytes in (
        ("h2d_page", partial(near[one].copy_, host[one], non_blocking=True), PAGE_BYTES),
        ("h2d", partial(near.copy_, host, non_blocking=True), near.nbytes),
        ("d2h", partial(host.copy_, near, non_blocking=True), near.nbytes),
        ("d2d", partial(other.copy_, near, non_blocking=True), near.nbytes),
    ):
        times = device_times_ns(accelerator, stream, work, runs=runs)
        figures[f"{key}_gbps"] = num_bytes / statistics.median(times)
        figures |= spread(key, times)
    return figures


def gather(
    accelerator: Accelerator,
    *,
    pages: int = PAGES,
    cache_pages: int = SMALL_CACHE_PAGES,
    name: str = "gather",
    runs: int = RUNS,
) -> Figures:
    """Microseconds and GB/s of weights; twice that is moved, being read and written.

    Args:
        accelerator: where.
        pages: of the model.
        cache_pages: of the weights cache, throughout which they lie.
        name: of the figures; its `_to_copy_ratio` compares it with one copy of as much within the same memory.
        runs: of each kind.
    """
    stream = accelerator.stream()
    cache = rows_of_pages(accelerator.device_memory(cache_pages * PAGE_BYTES))
    arena = rows_of_pages(accelerator.device_memory(pages * PAGE_BYTES))
    chosen = [(2 * index + 1) * cache_pages // (2 * pages) for index in range(pages)]
    listed = torch.tensor(chosen, device=accelerator.device)

    def by_copies() -> None:
        for row, page in enumerate(chosen):
            arena[row].copy_(cache[page], non_blocking=True)

    def by_index() -> None:
        torch.index_select(cache, 0, listed, out=arena)

    captured = accelerator.capture([by_index], rehearsal=by_index, tensor_cores=False)
    figures = {f"{name}_cache_pages": float(cache_pages)}
    for key, work in (
        ("index_select", by_index),
        ("captured", partial(captured.launch, stream, [by_index])),
        ("copies", by_copies),
        ("in_one_piece", partial(arena.copy_, cache[:pages], non_blocking=True)),
    ):
        times = device_times_ns(accelerator, stream, work, runs=runs)
        figures[f"{name}_{key}_us_p50"] = median_us(times)
        figures[f"{name}_{key}_gbps"] = pages * PAGE_BYTES / statistics.median(times)
    ratio = figures[f"{name}_index_select_gbps"] / figures[f"{name}_in_one_piece_gbps"]
    return {**figures, f"{name}_to_copy_ratio": ratio}


def large_cache_pages(accelerator: Accelerator) -> int:
    """Number of pages in Figure 6's weights cache, or in half of the free memory if that is less."""
    free_bytes = accelerator.free_bytes()
    if free_bytes is None:
        return SMALL_CACHE_PAGES
    return max(PAGES, min(fig6.Setting().num_pages, free_bytes // 2 // PAGE_BYTES))


def host(accelerator: Accelerator, *, num_bytes: int = 1 << 30, runs: int = RUNS) -> Figures:
    """Time and memory that serving takes of the host.

    Args:
        accelerator: where inputs go to and outputs come from.
        num_bytes: of locked memory, which is taken twice: without locking it, and with.
        runs: of each kind.
    """
    begin_s = time.perf_counter()
    unlocked = present_memory(num_bytes)
    figures = {"host_memory_present_ms": 1e3 * (time.perf_counter() - begin_s)}
    del unlocked
    begin_s = time.perf_counter()
    there = accelerator.host_memory(num_bytes)
    figures["host_memory_locked_ms"] = 1e3 * (time.perf_counter() - begin_s)
    stream = accelerator.stream()
    for batch_size in BATCH_SIZES:
        for kind, row_bytes in ROW_BYTES.items():
            far = there[: batch_size * row_bytes]
            near = accelerator.device_memory(far.nbytes)
            target, source = (near, far) if kind == "input" else (far, near)
            work = partial(target.copy_, source, non_blocking=True)
            times = device_times_ns(accelerator, stream, work, runs=runs)
            figures |= spread(f"{kind}_b{batch_size}", times)
    for key, tuned in (("plain", False), ("tuned", True)):
        late: list[int] = []
        # A thread of its own: it cannot be tuned back.
        thread = threading.Thread(
            target=_wake_up, args=(late,), kwargs={"runs": runs, "tuned": tuned}
        )
        thread.start()
        thread.join()
        figures |= spread(f"wake_up_{key}", late)
    return figures


def _wake_up(late: list[int], *, runs: int, tuned: bool) -> None:
    """Sleep for 1 to 4 ms, again and again; note by how many ns each sleep was too long."""
    if tuned:
        tune_thread(waits=True)
    rng = random.Random(0)
    for _ in range(runs):
        time_ns = time.monotonic_ns() + rng.randint(NS_PER_MS, 4 * NS_PER_MS)
        sleep_until(time_ns)
        late.append(time.monotonic_ns() - time_ns)


def graphs(
    accelerator: Accelerator, cache_dir: Path, *, name: str = ARCHITECTURE, more: int = 8
) -> Figures:
    """Milliseconds and KiB of a graph of batch 1, captured together with one that has the same kernels."""
    folder, compiled = compiled_for(name, Precision.FLOAT32, cache_dir)
    work = bare_kernel(accelerator, folder, compiled, 1).launch
    free, begin_s = accelerator.free_bytes(), time.perf_counter()
    kept = [accelerator.capture([work], rehearsal=work, tensor_cores=False) for _ in range(more)]
    figures = {"graph_ms": 1e3 * (time.perf_counter() - begin_s) / len(kept)}
    if free is not None and (left := accelerator.free_bytes()) is not None:
        figures["graph_kib"] = (free - left) / 1024 / len(kept)
    return figures


@dataclass(frozen=True, slots=True)
class BareKernel:
    """A model with its weights where they are, without pages, arena or slots."""

    captured: CapturedWork
    #: Launches the same kernels one by one. Keeps their memory alive: captured kernels hold addresses only.
    launch: Callable[[], None]
    #: Whether convolutions and their ReLUs are one kernel.
    joined: bool
    #: Captured with the kernels.
    begin: Event
    end: Event

    def replay(self, stream: Stream) -> None:
        """Hand the captured kernels over."""
        self.captured.launch(stream, [self.begin, self.launch, self.end])

    def times_ns(self, stream: Stream, *, runs: int, until_s: float = float("inf")) -> list[int]:
        """As `device_times_ns`, of the captured kernels."""

        def run() -> int:
            self.replay(stream)
            self.end.synchronize()
            return self.end.ns_since(self.begin)

        return after_warm_up(run, runs, until_s)


def bare_kernel(
    accelerator: Accelerator,
    folder: Path,
    compiled: CompiledModel,
    batch_size: int,
    *,
    joined: bool = True,
    layout: torch.memory_format | None = None,
) -> BareKernel:
    """Capture a model.

    Args:
        accelerator: where.
        folder: of the compiled model.
        compiled: what is in it.
        batch_size: rows.
        joined: convolutions with their ReLUs where that works; cuDNN has no such kernel for some
            shapes, and then they are apart.
        layout: of convolutions' weights; None: as compiled.
    """
    if joined:
        with contextlib.suppress(RuntimeError):
            return _bare_kernel(accelerator, folder, compiled, batch_size, layout, joined=True)
    return _bare_kernel(accelerator, folder, compiled, batch_size, layout, joined=False)


def _bare_kernel(
    accelerator: Accelerator,
    folder: Path,
    compiled: CompiledModel,
    batch_size: int,
    layout: torch.memory_format | None,
    *,
    joined: bool,
) -> BareKernel:
    program = Program((folder / GRAPH_FILE).read_bytes(), accelerator.device, join=joined)
    blob = accelerator.device_memory(compiled.weights_bytes)
    blob.copy_(torch.from_file(str(folder / WEIGHTS_FILE), size=blob.nbytes, dtype=torch.uint8))
    weights = weight_views(blob, compiled.weights)
    if layout is not None:
        # `to` would not do: a kernel of 1 x 1 is in either order already, and keeps the other order's strides.
        weights |= {
            name: weight.clone(memory_format=layout)
            for name, weight in weights.items()
            if weight.dim() == 4
        }

    def tensors(bound: tuple[BoundTensor, ...]) -> list[Tensor]:
        return [
            typed_view(accelerator.device_memory(t.spec.batch_bytes(batch_size)), t, batch_size)
            for t in bound
        ]

    inputs, outputs = tensors(compiled.inputs), tensors(compiled.outputs)
    moved: dict[str, Tensor] = {}

    def work() -> None:
        for place, result in zip(outputs, program.run(inputs, weights, moved), strict=True):
            place.copy_(result)

    cores = program.precision.tensor_cores
    begin, end = accelerator.event(), accelerator.event()
    captured = accelerator.capture([begin, work, end], rehearsal=work, tensor_cores=cores)
    return BareKernel(captured, work, joined, begin, end)


def execute(
    accelerator: Accelerator,
    cache_dir: Path,
    *,
    name: str = ARCHITECTURE,
    runs: int = RUNS,
    until_s: float = float("inf"),
) -> Figures:
    """Microseconds by precision and batch size; largest batch first, as when serving.

    Kernels as they are served come first: when time is up, what they are compared with is left out.
    """
    figures: Figures = {}
    for precision, variant, joined, layout in _variants():
        if variant and time.monotonic() > until_s:
            break
        folder, compiled = compiled_for(name, precision, cache_dir)
        for batch_size in sorted(BATCH_SIZES, reverse=True):
            kernel = bare_kernel(
                accelerator, folder, compiled, batch_size, joined=joined, layout=layout
            )
            if kernel.joined is not joined:
                continue  # no figure, but for those of convolutions apart
            key = f"exec_{precision.value}{variant}_b{batch_size}"
            stream = accelerator.stream()
            times = kernel.times_ns(stream, runs=runs, until_s=until_s)
            figures |= spread(key, times)
            times = device_times_ns(accelerator, stream, kernel.launch, runs=runs, until_s=until_s)
            figures |= spread(f"{key}_launched", times)
    return figures


def _variants() -> Iterator[tuple[Precision, str, bool, torch.memory_format | None]]:
    """Precision, name of the variant, whether convolutions are joined, and their weights' other layout."""
    for precision in Precision:
        yield precision, "", True, None
    for precision in Precision:
        yield precision, "_apart", False, None
    for precision in Precision:
        if precision.tensor_cores:
            yield precision, "_channels_first", True, torch.contiguous_format
        else:
            yield precision, "_channels_last", True, torch.channels_last


def beside(
    accelerator: Accelerator, cache_dir: Path, *, name: str = ARCHITECTURE, runs: int = RUNS
) -> Figures:
    """One EXEC of batch 1, alone and with something else going on."""
    folder, compiled = compiled_for(name, Precision.FLOAT32, cache_dir)
    first, second = (bare_kernel(accelerator, folder, compiled, 1) for _ in range(2))
    host = accelerator.host_memory(PAGE_BYTES)
    page = accelerator.device_memory(PAGE_BYTES)
    figures = {"beside_joined": float(first.joined and second.joined)}
    load = partial(page.copy_, host, non_blocking=True)
    for key, other in (
        ("alone", None),
        ("load", lambda stream: stream.run(load)),
        ("exec", second.replay),
    ):
        stop = threading.Event()
        args = (accelerator, accelerator.stream(), other, stop)
        thread = threading.Thread(target=_repeat, args=args)
        thread.start()
        try:
            times = first.times_ns(accelerator.stream(urgent=True), runs=runs)
        finally:
            stop.set()
            thread.join()
        figures |= spread(f"beside_{key}", times)
    return figures


def inputs_beside_load(accelerator: Accelerator, *, runs: int = RUNS) -> Figures:
    """What a thread waits for an input of ResNet-50 while pages are copied, two ahead, in another stream or the same."""
    num_bytes = ROW_BYTES["input"]
    host = accelerator.host_memory(PAGE_BYTES + num_bytes)
    near = accelerator.device_memory(PAGE_BYTES + num_bytes)
    load = partial(near[:PAGE_BYTES].copy_, host[:PAGE_BYTES], non_blocking=True)
    copy_input = partial(near[PAGE_BYTES:].copy_, host[PAGE_BYTES:], non_blocking=True)
    done, rng = accelerator.event(), random.Random(0)
    figures: Figures = {}
    for key in ("apart", "shared"):
        loads = accelerator.stream()
        stream = loads if key == "shared" else accelerator.stream()
        stop = threading.Event()
        args = (accelerator, loads, lambda stream: stream.run(load), stop)
        thread = threading.Thread(target=_repeat, args=args, kwargs={"ahead": 2})
        thread.start()
        times = []
        try:
            for _ in range(runs):
                time.sleep(rng.random() / 1000)  # at any moment of a page
                begin_ns = time.monotonic_ns()
                stream.run(copy_input)
                stream.record(done)
                done.synchronize()
                times.append(time.monotonic_ns() - begin_ns)
        finally:
            stop.set()
            thread.join()
        figures |= spread(f"input_{key}_beside_load", times)
    return figures


def _repeat(
    accelerator: Accelerator,
    stream: Stream,
    hand_over: Callable[[Stream], None] | None,
    stop: threading.Event,
    *,
    ahead: int = 1,
) -> None:
    done = deque(accelerator.event() for _ in range(ahead))
    while hand_over is not None and not stop.is_set():
        done[0].synchronize()
        hand_over(stream)
        stream.record(done[0])
        done.rotate(-1)
    for event in done:
        event.synchronize()


def main() -> None:
    """Run all sections, and write `probe.json` after each."""
    options = arguments(__doc__.splitlines()[0], seconds=120.0)
    accelerator = open_accelerator(options.device)
    until_s = time.monotonic() + options.seconds
    figures: Figures = {}
    cache_dir, name = default_cache_dir(), options.architecture or ARCHITECTURE
    sections: tuple[Callable[[], Figures], ...] = (
        partial(copy, accelerator),
        partial(gather, accelerator),
        partial(
            gather,
            accelerator,
            cache_pages=large_cache_pages(accelerator),
            name="gather_large",
        ),
        partial(host, accelerator),
        partial(inputs_beside_load, accelerator),
        partial(beside, accelerator, cache_dir, name=name),
        partial(graphs, accelerator, cache_dir, name=name),
        partial(execute, accelerator, cache_dir, name=name, until_s=until_s),
    )
    for section in sections:
        found = section()
        for key, figure in found.items():
            print(f"{key:40} {figure:12.2f}", flush=True)
        figures |= found
        # Write after every section, because a time limit from outside may end the next one.
        write_results(
            "probe",
            figures,
            command=f"python -m experiments gpu-probe {options.words}",
            seeds=[0],
            extra={"hardware": about(accelerator)},
            directory=options.directory,
        )


if __name__ == "__main__":
    main()
