"""The product's processes in a world: who runs where, and how each begins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from typing_extensions import override

import controller.app
import worker.lane_threads
from clockwright.actions import ActionError, Result
from clockwright.units import NS_PER_MS
from controller.access.config import AccessConfig
from controller.app import Controller, running
from controller.config import ControllerConfig, FrontConfig
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import Command, Event
from controller.core.invariants import check as check_books
from controller.front_process import serving
from experiments.faults.device import FoldingDevice, FoldingModel, ModelSpec
from experiments.faults.sockets import WorldNetwork
from experiments.faults.world import Host, Process, World
from worker.config import WorkerConfig
from worker.core.lanes import Core
from worker.link import ControllerLink
from worker.models.file_store import FileStore
from worker.models.model_files import Limits

CONTROLLER_PORT = 8001
FRONT_PORT = 8002
_IO_BYTES = 8 << 20
_ARENA_BYTES = 256 << 20
_SHARED_BYTES = 32 << 20


# The controller's books forbid what is answered so.
_CONTRADICTIONS = (
    ActionError.UNKNOWN_MODEL,
    ActionError.NO_PAGES,
    ActionError.ALREADY_RESIDENT,
    ActionError.BAD_INPUT,
)


class ObservedCore(Core[FoldingModel]):
    """A worker's core that says when the controller thinks that it has something else than it has."""

    def __init__(self, world: World, *, num_pages: int, io_bytes: int) -> None:
        super().__init__(num_pages=num_pages, io_bytes=io_bytes)
        self._world = world

    @override
    def take_results(self) -> list[Result]:
        results = super().take_results()
        for result in results:
            if result.error in _CONTRADICTIONS:
                self._world.fail(
                    f"a worker and the books differ: {result.error.name}: {result.message}"
                )
        return results


class CheckedScheduler(Scheduler):
    """A scheduler whose books are looked at after every so many events."""

    num_events = 0

    @override
    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        commands = super().handle(event, now_ns=now_ns)
        self.num_events += 1
        if self.num_events % 16 == 0:
            check_books(self)
        return commands


@dataclass
class RunningWorker:
    """A worker process that runs."""

    process: Process
    device: FoldingDevice
    link: ControllerLink[FoldingModel]
    core: ObservedCore


@dataclass
class Plant:
    """Everything that runs, and how to start what does not."""

    world: World
    network: WorldNetwork
    #: A folder for everybody's files.
    folder: Path
    specs: dict[str, ModelSpec] = field(default_factory=dict)
    controller: Controller | None = None
    controller_process: Process | None = None
    fronts: dict[str, Process] = field(default_factory=dict)
    workers: dict[str, RunningWorker] = field(default_factory=dict)
    #: Settings that a story draws.
    heartbeat_ms: int = 50
    silence_ms: int = 500
    keeps_state: bool = True
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    _ports: dict[str, int] = field(default_factory=dict)
    _last_core: ObservedCore | None = None

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Have workers' cores and schedulers be those that are looked into."""

        def make_core(*, num_pages: int, io_bytes: int) -> ObservedCore:
            self._last_core = ObservedCore(self.world, num_pages=num_pages, io_bytes=io_bytes)
            return self._last_core

        with (
            mock.patch.object(worker.lane_threads, "Core", make_core),
            mock.patch.object(worker.lane_threads, "freeze_garbage"),
            mock.patch.object(controller.app, "make_scheduler", CheckedScheduler),
        ):
            yield

    def address(self, host: Host, port: int) -> str:
        """HOST:PORT."""
        return f"{self.network.address(host)}:{port}"

    # --- controllers ----------------------------------------------------------------------------

    def start_controller(self, host: Host) -> Process:
        """Start a controller."""
        process = Process(self.world, host, "controller")
        config = ControllerConfig(
            host=self.network.address(host),
            port=CONTROLLER_PORT,
            models_dir=self.folder / "models",
            scheduler=self.scheduler,
            heartbeat_interval_ms=self.heartbeat_ms,
            silence_limit_ms=self.silence_ms,
            shared_memory_bytes=_SHARED_BYTES,
            default_slo_ns=200 * NS_PER_MS,
            state_dir=self.folder / "state" if self.keeps_state else None,
            access=AccessConfig(insecure=True),
            telemetry_capacity=1000,
        )

        async def main() -> None:
            async with running(config, clock=time.monotonic_ns) as started:
                self.world.say("controller serves")
                self.controller = started
                await asyncio.Event().wait()

        def ended() -> None:
            self.controller = None
            self.controller_process = None

        process.on_end.append(ended)
        self.controller_process = process
        process.start(main)
        return process

    # --- fronts ---------------------------------------------------------------------------------

    def start_front(self, name: str, host: Host, controller_host: Host) -> Process:
        """Start a front."""
        process = self.fronts[name] = Process(self.world, host, name)
        config = FrontConfig(
            controller=self.address(controller_host, CONTROLLER_PORT),
            host=self.network.address(host),
            port=FRONT_PORT + len(self.fronts) if name not in self._ports else self._ports[name],
            shared_memory_bytes=_SHARED_BYTES,
            access=AccessConfig(insecure=True),
        )
        self._ports[name] = config.port

        async def main() -> None:
            async with serving(config, clock=time.monotonic_ns) as front:
                self.world.say(f"{name} serves")
                await front.attaching

        process.start(main)
        return process

    def front_address(self, name: str) -> str:
        """Where clients find a front."""
        return self.address(self.fronts[name].host, self._ports[name])

    # --- workers --------------------------------------------------------------------------------

    def start_worker(self, name: str, host: Host, controller_host: Host, num_pages: int) -> Process:
        """Start a worker."""
        process = Process(self.world, host, name)
        config = WorkerConfig(
            controller=self.address(controller_host, CONTROLLER_PORT),
            device="simulated",
            worker_id=name,
            num_pages=num_pages,
            cache_dir=self.folder / host.name,
            payload_host=self.network.address(host),
        )
        limits = Limits(arena_bytes=_ARENA_BYTES, num_pages=num_pages, io_bytes=_IO_BYTES // 4)

        async def main() -> None:
            files = FileStore(config.cache_dir)
            device = FoldingDevice(process, limits=limits, io_pool_bytes=_IO_BYTES, files=files)
            link = ControllerLink(config, device, files)
            assert self._last_core is not None
            self.workers[name] = RunningWorker(process, device, link, self._last_core)
            await link.run()

        def ended() -> None:
            worker = self.workers.get(name)
            if worker is not None and worker.process is process:
                del self.workers[name]

        process.on_end.append(ended)
        process.start(main)
        return process
