"""A container's device behind a worker's real lanes, without a controller."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from clockwright.units import ModelId
from clockwright.wire.actions import ActionError
from clockwright.wire.bulk import Buffer
from controller.models.model_folder import ModelFolder, read_versions
from tests.kit.processes import PATIENCE_S
from tests.kit.running_lanes import RunningLanes
from worker.containers.device import ContainerDevice, ContainerModel
from worker.lane_threads import LaneThreads, Outcome
from worker.models.model_files import Limits
from worker.models.served_model import Offer, OfferedFile

LIMITS = Limits(arena_bytes=1 << 20, num_pages=4, io_bytes=1 << 20)


def write_container(
    directory: Path, name: str, table: str, *, head: str = "batch_sizes = [1, 4]", **files: str
) -> Path:
    folder = directory / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.toml").write_text(f"{head}\n{table}")
    for stem, text in files.items():
        (folder / "1" / f"{stem}.py").write_text(text)
    return folder


class ContainerBench:
    """A container device behind a worker's real lanes."""

    def __init__(self, folder: Path, *, memory: int = 4 << 20) -> None:
        self.folder: ModelFolder = read_versions(folder)[-1]
        self.device = ContainerDevice(
            folder, limits=LIMITS, io_pool_bytes=memory, start_limit_s=PATIENCE_S
        )
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.lanes: LaneThreads[ContainerModel] = LaneThreads(
            self.device, self.outcomes.put, self.lost.put
        )
        self.running = RunningLanes(self.lanes, self.outcomes)
        self.progress: list[str] = []

    def offer(self, **changes: object) -> Offer:
        files = tuple(OfferedFile(f.name, f.num_bytes, f.sha256) for f in self.folder.files)
        plain = Offer(
            ModelId("m"), files, self.folder.settings.batch_sizes, {}, profile=self.folder.name
        )
        return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]

    def prepare(self, **changes: object) -> ContainerModel:
        async def fetch(files: object) -> None:
            raise AssertionError("no code comes over the link")

        self.lanes.abandon()
        offer = self.offer(**changes)
        model = asyncio.run(self.device.prepare(offer, fetch, self.progress.append))
        self.lanes.add_model(model)
        self.running.ok(self.running.load("m"))
        return model

    def submit(self, *arrays: np.ndarray, rows: tuple[int, ...] = (1,)) -> int:
        batch_size = 1 if sum(rows) == 1 else 4
        payload = [array.tobytes() for array in arrays]
        return self.running.infer("m", *payload, rows=rows, batch_size=batch_size)

    def infer(self, *arrays: np.ndarray, rows: tuple[int, ...] = (1,)) -> Sequence[Buffer]:
        return self.running.ok(self.submit(*arrays, rows=rows))

    def failure(self, *arrays: np.ndarray) -> str:
        result = self.running.result(self.submit(*arrays))
        assert result.error is ActionError.DEVICE
        return result.message


@contextmanager
def bench(folder: Path) -> Iterator[ContainerBench]:
    made = ContainerBench(folder)
    made.lanes.start()
    try:
        yield made
        made.lanes.check()
    finally:
        made.lanes.stop()
        asyncio.run(made.device.close())
