"""A device that answers slowly with its inputs, turned over; and a worker process of its own with it.

python -m tests.kit.slow_echo PORT FOLDER [--stall]
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from clockwright.client.channel import Access
from clockwright.wire.actions import Infer
from clockwright.wire.bulk import Buffer
from modelzoo.profile import load_profile
from tests.kit.worker_models import ThreadedDevice
from worker.action_thread import ActionThread
from worker.config import WorkerConfig
from worker.core.lanes import Step
from worker.link import ControllerLink
from worker.models.file_store import FileStore
from worker.models.model_files import Limits
from worker.models.served_model import ServedModel

#: FP32 values of a row: 160 kB in, and as much out.
VALUES = 40_000
ROW_BYTES = 4 * VALUES


class SlowEcho(ThreadedDevice):
    """Answers with the inputs, turned over, after a while; like a GPU it copies them in and the outputs out."""

    def __init__(self, cache: Path) -> None:
        super().__init__(
            load_profile("0us"),
            limits=Limits(arena_bytes=64 << 20, num_pages=4, io_bytes=1 << 20),
            io_pool_bytes=8 << 20,
            files=FileStore(cache),
            compile_limit_s=100.0,
        )
        self.rng = random.Random(1)
        self.kept: dict[int, bytes] = {}
        #: How inputs came, and outputs went: by shared memory or not.
        self.shared_inputs = self.shared_outputs = self.own_inputs = self.own_outputs = 0
        #: EXECs wait for it.
        self.go = threading.Event()
        self.go.set()

    @override
    def run_input(self, step: Step[ServedModel], payload: Sequence[Buffer]) -> None:
        for tensor in payload:
            if isinstance(tensor, memoryview) and tensor.readonly and len(tensor) == ROW_BYTES:
                self.shared_inputs += 1
            else:
                self.own_inputs += 1
        self.kept[step.action.action_id] = b"".join(payload)

    @override
    def run_exec(self, step: Step[ServedModel]) -> None:
        # A worker that now takes three times as long as before is not trusted.
        threading.Event().wait(self.rng.choice((0.006, 0.008, 0.012)))
        self.go.wait()

    @override
    def run_output(
        self, step: Step[ServedModel], room: memoryview | None = None
    ) -> Sequence[Buffer]:
        action = step.action
        assert isinstance(action, Infer)
        data = turned(self.kept.pop(action.action_id))
        if room is not None:
            self.shared_outputs += 1
            room[:] = data
            return (room,)
        self.own_outputs += 1
        return [data[begin : begin + ROW_BYTES] for begin in range(0, len(data), ROW_BYTES)]


def turned(data: bytes) -> bytes:
    return data.translate(bytes(255 - value for value in range(256)))


class Stalling(SlowEcho):
    """Writes nonsense into the room of its first outputs, without end, while its event loop stands still."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(folder / "cache")
        self._folder = folder
        self._loop = loop

    @override
    def run_output(
        self, step: Step[ServedModel], room: memoryview | None = None
    ) -> Sequence[Buffer]:
        if room is None:
            # Its memory was not mapped yet when the action came.
            return super().run_output(step)
        # Else it would hear that it was given up, and come back as a good worker.
        self._loop.call_soon_threadsafe(threading.Event().wait)
        number = 0
        while True:
            room[:] = bytes([number % 256]) * len(room)
            number += 1
            (self._folder / "written").write_text(str(number))
            threading.Event().wait(0.001)


async def serve(
    controller: str, folder: Path, device: SlowEcho, name: str, access: Access | None = None
) -> None:
    """Be a worker of the controller at an address, or of the one of several that leads."""
    settings = WorkerConfig(
        controller=controller,
        access=access or Access(),
        device="modelled:0us",
        worker_id=name,
        cache_dir=folder / "cache",
    )
    with contextlib.closing(ActionThread()) as actions:
        await ControllerLink(settings, device, FileStore(settings.cache_dir), actions).run()


async def main(port: str, folder: str, *rest: str) -> None:
    """Run from the command line."""
    path = Path(folder)
    loop = asyncio.get_running_loop()
    device = Stalling(path, loop) if "--stall" in rest else SlowEcho(path / "cache")
    await serve(f"127.0.0.1:{port}", path, device, path.name)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
