"""A catalogue without workers: who is offered what, and verdicts that a test gives."""

from __future__ import annotations

import asyncio
from pathlib import Path

from clockwright.units import ActionId, ArchitectureId, GpuKind, ModelId, WorkerId
from clockwright.wire.tensors import TensorSpec
from controller.core import Scheduler
from controller.core.events import ModelReady, WorkerJoined
from controller.models.catalogue import Catalogue
from controller.models.entry import Entry, ModelState
from controller.models.uploads import Uploads
from controller.runtime import Runtime
from controller.telemetry.tables import Telemetry

MS = 1_000_000
SPEC = (TensorSpec("x", "FP32", (4,)),)


def make_folder(
    directory: Path, name: str = "m", *, config: str = "", version: str = "1", data: bytes = b"onnx"
) -> Path:
    folder = directory / name
    (folder / version).mkdir(parents=True)
    (folder / version / "model.onnx").write_bytes(data)
    if config:
        (folder / "config.toml").write_text(config)
    return folder


class OffersMade:
    def __init__(self) -> None:
        self.offered: asyncio.Queue[Entry] = asyncio.Queue()
        self.withdrawn: list[ModelId] = []

    def offer(self, model: Entry) -> None:
        self.offered.put_nowait(model)

    def withdraw(self, model: Entry) -> None:
        self.withdrawn.append(model.model_id)


class NoLink:
    def send(self, *_: object) -> None:
        raise AssertionError("nothing is sent in these tests")

    def look(self) -> None:
        raise AssertionError("nothing is sent in these tests")

    def flush(self, *, now: bool) -> None:
        raise AssertionError("nothing is sent in these tests")

    def withdraw_action(self, action_id: ActionId) -> None:
        pass

    def write_off(self, action_id: ActionId) -> None:
        pass

    def forget_model(self, model_id: ModelId) -> None:
        pass

    def close(self, reason: str) -> None:
        pass


class CatalogueBench:
    def __init__(self, directory: Path, uploads: Uploads | None = None) -> None:
        self.runtime = Runtime(Scheduler(), Telemetry())
        self.catalogue = Catalogue(self.runtime, directory, uploads)
        self.offers = OffersMade()

    @classmethod
    async def scanned(cls, directory: Path, *workers: str) -> CatalogueBench:
        """One that has read its directory, and then workers joined."""
        bench = cls(directory)
        await bench.catalogue.scan()
        for worker in workers:
            bench.join(worker)
        return bench

    def join(self, worker_id: str) -> None:
        worker = WorkerId(worker_id)
        self.runtime.worker_joined(
            NoLink(), WorkerJoined(worker_id=worker, gpu_kind=GpuKind("g"), num_pages=4)
        )
        self.catalogue.worker_joined(worker, self.offers)

    def leave(self, worker_id: str) -> None:
        self.runtime.worker_lost(WorkerId(worker_id))
        self.catalogue.worker_left(WorkerId(worker_id))

    def ready(self, model_id: str, worker_id: str, specs: tuple[TensorSpec, ...] = SPEC) -> bool:
        event = ModelReady(
            worker_id=WorkerId(worker_id),
            model_id=ModelId(model_id),
            architecture_id=ArchitectureId("a"),
            num_pages=1,
            load_ns=MS,
            exec_ns={1: MS, 4: MS},
        )
        return self.catalogue.model_ready(event, inputs=specs, outputs=specs, weights_bytes=10)

    def refuse(self, model_id: str, worker_id: str, reason: str = "not ONNX") -> None:
        self.catalogue.model_refused(WorkerId(worker_id), ModelId(model_id), reason)

    def state(self, name: str) -> ModelState | None:
        model = self.catalogue.find(name)
        return self.catalogue.state(model) if model else None
