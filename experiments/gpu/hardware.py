"""The worker's own accelerator and device, driven by hand: steps without lanes, times by its events."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clockwright.cli.worker_settings import default_cache_dir
from clockwright.errors import ConfigError
from clockwright.units import DEFAULT_BATCH_SIZES, NS_PER_S, ActionId, ModelId
from clockwright.wire.actions import Infer, LoadWeights
from experiments.live.bare_lanes import fetch_nothing, stored
from experiments.results_file import RESULTS
from modelzoo.build import write_model
from worker.core.lanes import Lane, Step
from worker.devices.accelerator import Accelerator, HostAccelerator, Stream
from worker.devices.cuda import CudaAccelerator
from worker.devices.device import Launched
from worker.devices.gpu import TorchDevice, TorchModel, compiled_models
from worker.devices.gpu_health import open_gpu
from worker.models.file_store import FileStore
from worker.models.model_files import IO_SHARE, CompiledModel, Limits
from worker.models.precision import Precision
from worker.models.served_model import Offer

GPU_RESULTS = RESULTS / "gpu"
_WARM_UP_RUNS = 5
# Fields of an action whose holder says when it runs.
_ANY_TIME: Any = {
    "action_id": ActionId(1), "earliest_ns": 0, "latest_ns": NS_PER_S, "expected_duration_ns": 1
}  # fmt: skip


def arguments(description: str, seconds: float) -> argparse.Namespace:
    """Read a section's command line.

    Args:
        description: what the section does, for `--help`.
        seconds: the section's budget by default.

    Returns:
        `device`, `seconds`, `architecture`, `directory` and, with all that was said but the folder, `words`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda:0", help="cuda:N; torch:cpu tries the code only")
    parser.add_argument("--seconds", type=float, default=seconds, help="stop measuring after these")
    parser.add_argument("--architecture", default="", help="this network alone, and no ResNet-50")
    parser.add_argument("--directory", type=Path, default=GPU_RESULTS, help="where all files go")
    options = parser.parse_args()
    # The comparison is false for NaN too.
    if not options.seconds > 0:
        parser.error(f"--seconds is {options.seconds}, expected more than 0")
    options.words = f"--device {options.device} --seconds {options.seconds:g}"
    return options


def open_accelerator(device: str) -> Accelerator:
    """Open what `--device` names.

    Raises:
        ConfigError: there is no such device here, or no such name.
    """
    kind, _, number = device.partition(":")
    if device == "torch:cpu":
        return HostAccelerator()
    if kind == "cuda" and number.isdecimal():
        return CudaAccelerator(int(number))
    raise ConfigError(f"device {device!r}: expected cuda:N or torch:cpu")


def about(accelerator: Accelerator) -> dict[str, object]:
    """Card, driver and versions, for a results file."""
    found: dict[str, object] = {"accelerator": accelerator.name, "torch": torch.__version__}
    if isinstance(accelerator, CudaAccelerator):
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        gpu = open_gpu(accelerator.uuid)
        if gpu is not None:
            found["card"] = asdict(gpu.look())
    return found


def device_times_ns(
    accelerator: Accelerator,
    stream: Stream,
    work: Callable[[], object],
    *,
    runs: int,
    until_s: float = float("inf"),
) -> list[int]:
    """How long the device is busy with a piece of work, again and again.

    Args:
        accelerator: whose events to use.
        stream: where the work runs.
        work: hands the work over; its end is awaited each time.
        runs: how often at most; at least once.
        until_s: time on the monotonic clock after which no run begins.
    """
    begin, end = accelerator.event(), accelerator.event()

    def run() -> int:
        stream.record(begin)
        stream.run(work)
        stream.record(end)
        end.synchronize()
        return end.ns_since(begin)

    return after_warm_up(run, runs, until_s)


def after_warm_up(run: Callable[[], int], runs: int, until_s: float) -> list[int]:
    """What so many runs return, or fewer, after a few for nothing; as `device_times_ns`."""
    times: list[int] = []
    for number in range(_WARM_UP_RUNS + runs):
        if times and time.monotonic() > until_s:
            break
        time_ns = run()
        if number >= _WARM_UP_RUNS:
            times.append(time_ns)
    return times


def quantile(times_ns: Sequence[int], share: float) -> float:
    """Quantile in microseconds."""
    ordered = sorted(times_ns)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] / 1e3


def median_us(times_ns: Sequence[int]) -> float:
    """Median in microseconds."""
    return statistics.median(times_ns) / 1e3


def spread(key: str, times_ns: Sequence[int]) -> dict[str, float]:
    """Median and 99th percentile of times, as figures in microseconds."""
    return {f"{key}_us_p50": median_us(times_ns), f"{key}_us_p99": quantile(times_ns, 0.99)}


@dataclass(frozen=True, slots=True)
class Room:
    """How much memory a device takes."""

    num_pages: int
    arena_bytes: int
    io_bytes: int
    host_bytes: int


async def _offer(
    files: FileStore, name: str, batch_sizes: Sequence[int], *, seed: int = 0
) -> Offer:
    """Build a model of the zoo, as if a controller offered it."""
    with tempfile.TemporaryDirectory() as scratch:
        await asyncio.to_thread(write_model, name, Path(scratch) / "model.onnx", seed=seed)
        offered = stored(files, Path(scratch))
    return Offer(ModelId(f"{name}-{seed}"), offered, tuple(batch_sizes), {}, "")


def compiled_for(name: str, precision: Precision, cache_dir: Path) -> tuple[Path, CompiledModel]:
    """Compile a model of the zoo as a worker does, once per cache; returns its folder and what is in it."""
    files = FileStore(cache_dir)
    # A batch has a worker's share of the IO memory that it takes by default.
    limits = Limits(arena_bytes=2 << 30, num_pages=1024, io_bytes=(128 << 20) // IO_SHARE)
    models = compiled_models(files, cache_dir, limits, precision, compile_limit_s=400.0)

    async def get() -> tuple[Path, CompiledModel]:
        try:
            offer = await _offer(files, name, DEFAULT_BATCH_SIZES)
            found = await models.get(offer, fetch_nothing, lambda stage: None)
        finally:
            await models.close()
        return found.folder, found.compiled

    return asyncio.run(get())


class BareDevice:
    """A device without lanes: its holder says which step runs, and hears how long it took."""

    def __init__(
        self,
        accelerator: Accelerator,
        room: Room,
        *,
        precision: Precision = Precision.FLOAT32,
        cache_dir: Path | None = None,
    ) -> None:
        self.cache_dir = cache_dir or default_cache_dir()
        self._files = FileStore(self.cache_dir)
        self.device = TorchDevice(
            accelerator,
            # A batch has the share that a worker gives it, so that both find what the other has compiled.
            limits=Limits(room.arena_bytes, room.num_pages, room.io_bytes // IO_SHARE),
            io_pool_bytes=room.io_bytes,
            host_bytes=room.host_bytes,
            precision=precision,
            files=self._files,
            cache_dir=self.cache_dir,
            compile_limit_s=120.0,
            on_lost=_raise_lost,
        )

    async def model(self, name: str, batch_sizes: Sequence[int], *, seed: int = 0) -> TorchModel:
        """Build, compile and prepare a model of the zoo; the second time it comes from the cache."""
        offer = await _offer(self._files, name, batch_sizes, seed=seed)
        return await self.device.prepare(offer, fetch_nothing, lambda stage: None)

    def folder(self, model: TorchModel) -> tuple[Path, CompiledModel]:
        """Where a model's compiled files are, and what they say."""
        for folder in (self.cache_dir / "compiled").iterdir():
            text = (folder / "model.json").read_text(encoding="utf-8")
            compiled = CompiledModel.from_json(text)
            if compiled.architecture_id == model.architecture_id:
                return folder, compiled
        raise AssertionError(f"{model.model_id} is not in the cache any more")

    def load(self, model: TorchModel, pages: Sequence[int]) -> int:
        """Run a LOAD; returns how long it took, in ns."""
        action = LoadWeights(model_id=model.model_id, **_ANY_TIME)
        step = Step(Lane.LOAD, action, model, tuple(pages), 0)
        self.device.run_load(step)
        return step.duration_ns or 0

    def infer(self, model: TorchModel, pages: Sequence[int], batch_size: int) -> Step[TorchModel]:
        """An EXEC to run, its inputs random and in place."""
        action = Infer(
            model_id=model.model_id, batch_size=batch_size, rows=(batch_size,), **_ANY_TIME
        )
        step = Step(Lane.EXEC, action, model, tuple(pages), 0)
        generator = np.random.default_rng(0)
        payload = [
            generator.random(spec.batch_bytes(batch_size) // 4, dtype=np.float32).tobytes()
            for spec in model.inputs
        ]
        self.device.run_input(step, payload)
        return step

    def execute(
        self,
        step: Step[TorchModel],
        *,
        runs: int,
        until_s: float = float("inf"),
        gathers: bool = True,
        num_ahead: int = 0,
    ) -> list[int]:
        """Run an EXEC again and again; returns how long each took on the device, in ns.

        Args:
            step: the EXEC.
            runs: how often at most.
            until_s: as of `device_times_ns`.
            gathers: whether each gathers, as after another model's; otherwise it finds its weights in the arena.
            num_ahead: how many are with the device behind the one that runs.
        """
        under_way: deque[Launched] = deque()

        def run() -> int:
            while len(under_way) <= num_ahead:
                if gathers:
                    self.device.execs.forget_arena()
                under_way.append(self.device.launch_exec(step))
            self.device.finish_exec(step, under_way.popleft())
            return step.duration_ns or 0

        times = after_warm_up(run, runs, until_s)
        for launched in under_way:
            self.device.finish_exec(step, launched)
        return times

    async def close(self) -> None:
        """Give everything back."""
        await self.device.close()


def _raise_lost(reason: str) -> None:
    raise RuntimeError(f"the device is lost: {reason}")
