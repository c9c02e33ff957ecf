"""A worker's device in the world: it spends time, and its answers show which inputs it has read."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from typing_extensions import override

from clockwright.errors import ModelError
from clockwright.units import NS_PER_S, NS_PER_US, PAGE_BYTES, ActionId, ArchitectureId
from clockwright.wire.actions import Infer
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from experiments.faults.world import WorldProcess
from worker.compiling.compiler import CompilerKilledError
from worker.core.lanes import Lane, Step
from worker.devices.device import Device, DeviceLostError, Launched, QueueingDevice
from worker.models.file_store import FileStore
from worker.models.model_files import MODEL_FILE, Limits
from worker.models.served_model import Fetch, Offer, ServedModel, io_bytes_of

_FLOAT_BYTES = 4
# A device of this kind computes on however slowly, so what hangs ends some time.
_HANG_NS = 3 * NS_PER_S


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model of the world; its file is this, as JSON."""

    #: Two versions of a model answer differently.
    key: str
    num_inputs: int
    num_outputs: int
    num_pages: int
    load_us: int
    exec_us: int
    batch_sizes: tuple[int, ...] = (1, 2, 4)

    def files(self) -> dict[str, bytes]:
        """The files of its folder, by their paths."""
        sizes = ", ".join(map(str, self.batch_sizes))
        return {
            f"1/{MODEL_FILE}": json.dumps(asdict(self)).encode(),
            "config.toml": f"batch_sizes = [{sizes}]\n".encode(),
        }

    def write(self, folder: Path) -> None:
        """Make its folder."""
        for name, content in self.files().items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def answer(self, row: Buffer) -> bytes:
        """What a row is answered with."""
        return fold(self.key, row, self.num_outputs)


def fold(key: str, row: Buffer, num_outputs: int) -> bytes:
    """Make a row of outputs that depends on all bytes of a row of inputs."""
    return zlib.crc32(row, zlib.crc32(key.encode())).to_bytes(4, "little") * num_outputs


@dataclass(slots=True, kw_only=True, eq=False)
class FoldingModel(ServedModel):
    """A model that is ready."""

    key: str


class FoldingDevice(Device[FoldingModel]):
    """One device of one worker process."""

    computing_lanes: frozenset[Lane] = frozenset()
    exec_anywhere = False
    gpu_kind = "simulated"
    exec_core = None
    exec_core_is_own = False
    at_once = 2

    def __init__(
        self, process: WorldProcess, *, limits: Limits, io_pool_bytes: int, files: FileStore
    ) -> None:
        self.limits = limits
        self.io_pool_bytes = io_pool_bytes
        #: How many times longer everything takes, and whether the next step never ends, fails, loses the device,
        #: or the next compilation is killed.
        self.slowness = 1.0
        self.troubles: list[str] = []
        self._process = process
        self._files = files
        self._read: dict[ActionId, list[bytes]] = {}

    @override
    async def prepare(
        self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]
    ) -> FoldingModel:
        offer.check_onnx()
        loop = asyncio.get_running_loop()
        missing = [
            file
            for file in offer.files
            if not await loop.run_in_executor(None, self._files.has, file.sha256)
        ]
        await fetch(missing)
        progress("reading")

        def read() -> ModelSpec:
            with self._files.model_folder(offer.contents) as folder:
                return ModelSpec(**json.loads((folder / MODEL_FILE).read_text()))

        spec = await loop.run_in_executor(None, read)
        await asyncio.sleep(self._process.world.random.randrange(1, 50) / 1000)
        if self._has("compiler killed"):
            raise CompilerKilledError("the compiler was killed by SIGKILL while reading")
        inputs = (TensorSpec("x", "FP32", (spec.num_inputs,)),)
        outputs = (TensorSpec("y", "FP32", (spec.num_outputs,)),)
        sizes = [size for size in offer.batch_sizes if size in spec.batch_sizes]
        if not sizes:
            raise ModelError(f"no batch size of {list(offer.batch_sizes)}")
        usable = self.limits.usable_batch_sizes((*inputs, *outputs), sizes, fixed_batch=False)
        self.limits.check_weights(spec.num_pages * PAGE_BYTES)
        exec_ns: Mapping[int, int] = {
            size: spec.exec_us * NS_PER_US * (1 + size) // 2 for size in usable
        }
        return FoldingModel(
            model_id=offer.model_id,
            num_pages=spec.num_pages,
            io_bytes=io_bytes_of((*inputs, *outputs), usable),
            architecture_id=ArchitectureId(spec.key),
            inputs=inputs,
            outputs=outputs,
            weights_bytes=spec.num_pages * PAGE_BYTES,
            load_ns=spec.load_us * NS_PER_US,
            exec_ns=exec_ns,
            from_cache=not missing,
            key=spec.key,
        )

    # --- steps, each in its lane's thread ---------------------------------------------------------

    @override
    def run_load(self, step: Step[FoldingModel]) -> None:
        self._spend(step.model.load_ns, "load")

    @override
    def run_input(self, step: Step[FoldingModel], payload: Sequence[Buffer]) -> None:
        assert isinstance(step.action, Infer)
        before = [zlib.crc32(tensor) for tensor in payload]
        self._spend(sum(map(len, payload)) // 8, "")
        # What was written over while it was read is no answer to anything.
        keys = [
            step.model.key if zlib.crc32(tensor) == crc else "torn"
            for tensor, crc in zip(payload, before, strict=True)
        ]
        self._read[step.action.action_id] = [
            self._answer(key, step.model, tensor, rows)
            for key, tensor, rows in zip(keys, payload, step.action.rows, strict=True)
        ]

    def _answer(self, key: str, model: FoldingModel, tensor: Buffer, rows: int) -> bytes:
        num_inputs, num_outputs = model.inputs[0].row_shape[0], model.outputs[0].row_shape[0]
        view, row_bytes = memoryview(tensor), num_inputs * _FLOAT_BYTES
        return b"".join(
            fold(key, view[row * row_bytes : (row + 1) * row_bytes], num_outputs)
            for row in range(rows)
        )

    @override
    def run_exec(self, step: Step[FoldingModel]) -> None:
        assert isinstance(step.action, Infer)
        self._spend(step.model.exec_ns[step.action.batch_size], "exec")

    @override
    def run_output(
        self, step: Step[FoldingModel], room: memoryview | None = None
    ) -> Sequence[Buffer]:
        outputs = self._read.pop(step.action.action_id)
        if room is None:
            return outputs
        joined = b"".join(outputs)
        half = len(joined) // 2
        room[:half] = joined[:half]
        self._spend(len(joined) // 8, "")
        room[half:] = joined[half:]
        return (room,)

    @override
    async def close(self) -> None:
        pass

    def _spend(self, duration_ns: int, what: str) -> None:
        time.sleep(self._draw_ns(duration_ns, what) / NS_PER_S)
        self._fail(what)

    def _draw_ns(self, duration_ns: int, what: str) -> int:
        """Draw how long something takes that should take so long."""
        draw = self._process.world.random
        # A slow device hangs no longer than others do.
        hang_ns = draw.randrange(_HANG_NS) if what and self._has(f"{what} hangs") else 0
        noise = draw.randrange(950, 1050) / 1000
        return round(duration_ns * self.slowness * noise) + hang_ns

    def _fail(self, what: str) -> None:
        """Fail as the story told it to.

        Raises:
            RuntimeError: an action fails.
            DeviceLostError: all will from now on.
        """
        if what and self._has(f"{what} fails"):
            raise RuntimeError(f"{what} failed as it was told to")
        if what and self._has(f"{what} loses the device"):
            raise DeviceLostError("it fell off the bus")

    def _has(self, trouble: str) -> bool:
        if trouble in self.troubles:
            self.troubles.remove(trouble)
            return True
        return False


@dataclass(slots=True)
class _LaunchedExec:
    """An EXEC in the device's queue."""

    end_ns: int

    def is_done(self) -> bool:
        """Whether it has ended."""
        return time.monotonic_ns() >= self.end_ns


class QueueingFoldingDevice(FoldingDevice, QueueingDevice):
    """One on which an EXEC waits for the one before it, as on a GPU."""

    _free_ns = 0

    @override
    def __init__(
        self, process: WorldProcess, *, limits: Limits, io_pool_bytes: int, files: FileStore
    ) -> None:
        super().__init__(process, limits=limits, io_pool_bytes=io_pool_bytes, files=files)
        #: When each EXEC ends.
        self._ends_ns: dict[ActionId, int] = {}

    @override
    def run_output(
        self, step: Step[FoldingModel], room: memoryview | None = None
    ) -> Sequence[Buffer]:
        action_id = step.action.action_id
        if time.monotonic_ns() < self._ends_ns.pop(action_id):
            # A reader that looks before the EXEC has ended finds what was there before.
            self._read[action_id] = [bytes(len(each)) for each in self._read[action_id]]
        return super().run_output(step, room)

    @override
    def launch_exec(self, step: Step[FoldingModel]) -> Launched:
        assert isinstance(step.action, Infer)
        duration_ns = self._draw_ns(step.model.exec_ns[step.action.batch_size], "exec")
        self._free_ns = max(time.monotonic_ns(), self._free_ns) + duration_ns
        self._ends_ns[step.action.action_id] = self._free_ns
        return _LaunchedExec(self._free_ns)

    @override
    def finish_exec(self, step: Step[FoldingModel], launched: Launched) -> None:
        assert isinstance(launched, _LaunchedExec)
        while not launched.is_done():
            # A nanosecond more, because seconds are rounded.
            time.sleep((launched.end_ns - time.monotonic_ns() + 1) / NS_PER_S)
        self._fail("exec")
