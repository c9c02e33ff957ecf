"""The product's processes in a world: who runs where, and how each begins."""

from __future__ import annotations

import signal
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from typing_extensions import override

import controller.front.remote.front_link
import controller.front.remote.front_memory
import controller.front.remote.shared_tensors
import controller.links.slabs
import controller.links.worker_actions
import controller.links.worker_link
import controller.process.app
import controller.process.lease.keeper
import worker.lane_threads
import worker.link
from clockwright.client.channel import Access
from clockwright.units import NS_PER_MS, WEIGHT_MIN
from clockwright.wire.actions import ActionError, FromFronts, Result
from clockwright.wire.bulk import Buffer
from clockwright.wire.frames import Frame
from clockwright.wire.leadership import Fence, Term
from clockwright.wire.peer import Welcome
from clockwright.wire.worker_messages import ToWorker
from controller.access.config import AccessConfig
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import Command, Event, RequestArrived, RequestsArrived
from controller.core.invariants import check as check_books
from controller.core.quotas import Quota
from controller.models.catalogue import name_of
from controller.process.app import Controller, running, serve
from controller.process.config import ControllerConfig, FrontConfig
from controller.process.front_process import serving
from controller.process.lease.lease import Lease
from controller.selection.config import SelectionConfig
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.writer import TelemetryWriter
from experiments.faults.device import FoldingDevice, FoldingModel, ModelSpec, QueueingFoldingDevice
from experiments.faults.keys import KeyFile
from experiments.faults.leases import LeasePlace, WorldLease
from experiments.faults.redis_place import RedisPlace
from experiments.faults.slabs import (
    SlabWatch,
    WatchedActions,
    WatchedArena,
    WatchedFrontMemory,
    WatchedMemory,
)
from experiments.faults.sockets import WorldNetwork
from experiments.faults.world import Host, World, WorldProcess
from worker.action_thread import ActionThread
from worker.config import WorkerConfig
from worker.controller_socket import ControllerSocket, Order
from worker.core.lanes import Core, Lane
from worker.link import ControllerLink
from worker.models.file_store import FileStore
from worker.models.model_files import Limits

CONTROLLER_PORT = 8001
FRONT_PORT = 8101
_IO_BYTES = 8 << 20
_ARENA_BYTES = 256 << 20
_SHARED_BYTES = 32 << 20
# What this process has taken up says nothing about the world's.
_MEMORY_BYTES = 1 << 60


# The controller's books forbid what is answered so.
_CONTRADICTIONS = (
    ActionError.UNKNOWN_MODEL,
    ActionError.NO_PAGES,
    ActionError.ALREADY_RESIDENT,
    ActionError.BAD_INPUT,
)
# Steps that read slabs, or write to them.
_AT_SLABS = (Lane.INPUT, Lane.OUTPUT)


class ObservedCore(Core[FoldingModel]):
    """A worker's core that says when the controller is told what is not so."""

    def __init__(self, world: World, *, num_pages: int, io_bytes: int) -> None:
        super().__init__(num_pages=num_pages, io_bytes=io_bytes)
        self._world = world

    @override
    def take_results(self) -> list[Result]:
        results = super().take_results()
        for result in results:
            for lane in _AT_SLABS:
                job = self._running[lane]
                # What is abandoned was another controller's, and may have the same number.
                if job is None or job.abandoned or job.action.action_id != result.action_id:
                    continue
                self._world.fail(
                    f"a slab is free early: action {result.action_id} is over, and its"
                    f" {lane.value} runs"
                )
            if result.error in _CONTRADICTIONS:
                self._world.fail(
                    f"a worker and the books differ: {result.error.name}: {result.message}"
                )
        return results


class ObservedSocket(ControllerSocket):
    """A worker's connection that says when the worker obeys a controller that another has followed."""

    plant: Plant  # that runs

    def __init__(
        self,
        actions: ActionThread,
        host: str,
        welcome: Welcome,
        tls: ssl.SSLContext | None,
        take: Callable[[Order, Sequence[Buffer], memoryview | FromFronts | None], None],
        hear: Callable[[ToWorker, Buffer, int], None],
    ) -> None:
        plant = self.plant
        fence = plant.fences[plant.world.running]
        term = Term(welcome.lineage, welcome.generation)

        def take_in_turn(
            order: Order, payload: Sequence[Buffer], where: memoryview | FromFronts | None
        ) -> None:
            if term.is_older_than(fence.newest):
                plant.world.fail(
                    f"a worker obeys generation {term.generation}, and knows that"
                    f" {fence.newest.generation} has followed it"
                )
            take(order, payload, where)

        super().__init__(actions, host, welcome, tls, take_in_turn, hear)


class CheckedActions(WatchedActions):
    """A worker's actions, by which books and worker are compared whenever nothing is under way."""

    plant: Plant  # that runs

    @override
    def take_result(self, frame: Frame) -> None:
        super().take_result(frame)
        runtime: Any = self._finished.__self__  # type: ignore[attr-defined]
        ledger, worker = runtime._ledger, self.plant.workers.get(self.worker_id)
        here = ledger._workers.get(self.worker_id)
        if here is None or here.link.actions is not self or here.actions or worker is None:
            return
        if not worker.hears(self._data._sock):
            return  # It tells what it has as it registers again.
        found, books = set(worker.core.resident()), ledger._scheduler._books
        state = books.workers[self.worker_id]
        believed = {model.model_id for model in state.copies}
        # The controller tells a worker that a model was removed, so the model may be there a little longer.
        known = {
            model.model_id
            for model in books.models.values()
            if state in model.ready or state in model.suspended
        }
        if believed - found or (found - believed) & known:
            self.plant.world.fail(
                f"a worker and the books differ: {self.worker_id} has {sorted(found)} at rest,"
                f" and the books say {sorted(believed)}"
            )


class CountingWriter(TelemetryWriter):
    """A writer of telemetry that counts what it is given."""

    num_requests = 0

    @override
    def add(self, row: RequestRow | ActionRow) -> None:
        self.num_requests += isinstance(row, RequestRow)
        super().add(row)


class CheckedScheduler(Scheduler):
    """A scheduler whose books are looked at after each of its events, and that counts whose requests it gets."""

    plant: Plant  # that runs
    _began_ns: int | None = None
    _num_asked: Counter[str] | None = None

    @override
    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        if self._num_asked is None or self._began_ns is None:
            self._began_ns, self._num_asked = now_ns, Counter()
        if isinstance(event, RequestArrived | RequestsArrived):
            requests = event.requests if isinstance(event, RequestsArrived) else (event,)
            self._look_whose(requests)
            self._num_asked.update(request.tenant for request in requests)
            self._look_how_many(self._num_asked, now_ns - self._began_ns)
        commands = super().handle(event, now_ns=now_ns)
        check_books(self)
        return commands

    def _look_how_many(self, num_asked: Counter[str], time_ns: int) -> None:
        """Find that no tenant was let in more often than its quota gives since the beginning."""
        for tenant, quota in self.plant.quotas.items():
            assert quota.rate_rps is not None
            assert quota.burst is not None
            if num_asked[tenant] > quota.burst + quota.rate_rps * time_ns / 1e9 + 1:
                self.plant.world.fail(
                    f"{num_asked[tenant]} requests of {tenant!r} were let in, of {quota}"
                )

    def _look_whose(self, requests: Sequence[RequestArrived]) -> None:
        plant = self.plant
        for request in requests:
            model = name_of(request.model_id)
            if not request.tenant and request.weight == WEIGHT_MIN:
                continue  # The server's own, by which a new version runs before it serves.
            if request.tenant != plant.tenants.get(model, request.tenant):
                plant.world.fail(f"a request to {model} counts as that of {request.tenant!r}")


@dataclass
class RunningController:
    """A controller process that runs."""

    process: WorldProcess
    #: While it leads.
    controller: Controller | None = None
    generation: int = 0
    #: Its telemetry, if that is written.
    writer: CountingWriter | None = None


@dataclass
class RunningWorker:
    """A worker process that runs."""

    process: WorldProcess
    device: FoldingDevice
    link: ControllerLink[FoldingModel]
    core: ObservedCore

    def hears(self, sock: object) -> bool:
        """Whether it takes actions from a controller's socket, which is this."""
        session = self.link._session
        if session is None or session.data is None or session.data._is_closed:
            return False
        own: Any = session.data._sock
        return own is not None and own.peer is sock


@dataclass
class Plant:
    """Everything that runs, and how to start what does not."""

    world: World
    network: WorldNetwork
    #: A folder for the files of all processes.
    folder: Path
    specs: dict[str, ModelSpec] = field(default_factory=dict)
    #: Where the controllers are, by their names.
    controller_hosts: dict[str, Host] = field(default_factory=dict)
    #: Says which of several leads; None: there is one.
    lease: LeasePlace | None = None
    controllers: dict[str, RunningController] = field(default_factory=dict)
    #: How many controllers have ended.
    num_ended: int = 0
    #: What each worker process knows of those who led.
    fences: dict[WorldProcess, Fence] = field(default_factory=dict)
    fronts: dict[str, WorldProcess] = field(default_factory=dict)
    workers: dict[str, RunningWorker] = field(default_factory=dict)
    #: Settings that a story draws.
    silence_ms: int = 500
    writes_telemetry: bool = False
    #: Where applications and what they learn are kept; None: in the controller's state folder.
    redis: RedisPlace | None = None
    #: Devices of workers have an EXEC wait for the one before it.
    devices_queue: bool = False
    #: Who may do what; None: all callers may do everything.
    keys: KeyFile | None = None
    #: Tenants' quotas, and the file that says so; None: no tenant has one.
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    quotas_file: Path | None = None
    #: Whose all requests to a model are, where keys say so.
    tenants: Mapping[str, str] = field(default_factory=dict)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    _ports: dict[str, int] = field(default_factory=dict)
    _last_core: ObservedCore | None = None

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Have workers' cores and schedulers be those that are looked into."""

        def make_core(*, num_pages: int, io_bytes: int) -> ObservedCore:
            self._last_core = ObservedCore(self.world, num_pages=num_pages, io_bytes=io_bytes)
            return self._last_core

        def make_fence() -> Fence:
            fence = self.fences[self.world.running] = Fence()
            return fence

        def make_writer(folder: Path) -> CountingWriter:
            own = self.controllers[self.world.running.name]
            own.writer = CountingWriter(folder)
            return own.writer

        watch = SlabWatch(self.world)
        with ExitStack() as stack:
            for kind in (ObservedSocket, CheckedScheduler, CheckedActions):
                stack.enter_context(mock.patch.object(kind, "plant", self, create=True))
            for each in (WatchedArena, WatchedMemory, WatchedActions):
                stack.enter_context(mock.patch.object(each, "watch", watch, create=True))

            def put(owner: Any, name: str, inside: Callable[..., Any]) -> None:
                door = self.world.door(inside, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, door))

            put(controller.process.app, "running", self._running)
            put(controller.process.app, "freeze_garbage", lambda **_: None)
            put(controller.process.app, "use_huge_pages", lambda: None)
            put(controller.process.app, "open_store", self._open_lease)
            put(controller.process.app, "make_scheduler", CheckedScheduler)
            put(controller.process.app, "TelemetryWriter", make_writer)
            put(controller.process.lease.keeper, "Lease", self._view_lease)
            put(controller.links.slabs, "Arena", WatchedArena)
            for module in (
                controller.front.remote.front_memory,
                controller.front.remote.shared_tensors,
            ):
                put(module, "MappedMemory", WatchedMemory)
            put(controller.front.remote.front_link, "FrontMemory", WatchedFrontMemory)
            put(controller.links.worker_link, "WorkerActions", CheckedActions)
            put(controller.links.worker_actions, "encode_action", watch.encode_action)
            put(controller.links.worker_actions, "decode_result", watch.decode_result)
            put(worker.link, "Fence", make_fence)
            put(worker.link, "ControllerSocket", ObservedSocket)
            put(worker.lane_threads, "Core", make_core)
            put(worker.lane_threads, "freeze_garbage", lambda **_: None)
            yield

    def shown_by(self, name: str) -> Access:
        """What a caller shows to the called."""
        return Access() if self.keys is None else self.keys.access(name)

    @property
    def _access(self) -> AccessConfig:
        return AccessConfig(insecure=True, keys_file=None if self.keys is None else self.keys.path)

    def address(self, host: Host, port: int) -> str:
        """HOST:PORT."""
        return f"{self.network.address(host)}:{port}"

    # --- controllers ----------------------------------------------------------------------------

    @property
    def controller(self) -> Controller | None:
        """The one that leads, or has begun to last; None: none does."""
        leading = [each for each in self.controllers.values() if each.controller is not None]
        latest = max(leading, key=lambda each: each.generation, default=None)
        return None if latest is None else latest.controller

    @property
    def num_leading(self) -> int:
        """How many serve, or assume that they may."""
        return sum(each.controller is not None for each in self.controllers.values())

    @property
    def controller_address(self) -> str:
        """Whom an operator turns to."""
        leading = {name: each for name, each in self.controllers.items() if each.controller}
        name = max(leading, key=lambda name: leading[name].generation, default="")
        return self._controller_address(name or next(iter(self.controller_hosts)))

    def _controller_address(self, name: str) -> str:
        number = list(self.controller_hosts).index(name)
        return self.address(self.controller_hosts[name], CONTROLLER_PORT + number)

    @property
    def _controller_addresses(self) -> str:
        return ",".join(map(self._controller_address, self.controller_hosts))

    def _open_lease(self, _setting: str) -> WorldLease:
        assert self.lease is not None
        return self.lease.open()

    def _view_lease(self, holder: str, *, lineage: str) -> Lease:
        assert self.lease is not None
        return self.lease.view(holder, lineage=lineage)

    @asynccontextmanager
    async def _running(
        self,
        config: ControllerConfig,
        term: Term = Term(),  # noqa: B008  it is frozen
    ) -> AsyncIterator[Controller]:
        """Do what `running` does, on the world's clock, and note it."""
        process = self.world.running
        async with running(config, term, clock=time.monotonic_ns) as started:
            own = self.controllers[process.name]
            own.controller, own.generation = started, term.generation
            try:
                yield started
            finally:
                own.controller = None

    def start_controller(self, name: str) -> WorldProcess:
        """Start a controller."""
        host = self.controller_hosts[name]
        process = WorldProcess(self.world, host, name)
        lease = self.lease
        # On one host all have one folder, and each of several hosts has its own.
        state = "state" if lease is None or lease.host is None else f"state of {name}"
        host.disk.folders |= {self.folder / state, self.telemetry_folder(name)}
        config = ControllerConfig(
            host=self.network.address(host),
            port=int(self._controller_address(name).rpartition(":")[2]),
            models_dir=self.folder / "models",
            scheduler=self.scheduler,
            heartbeat_interval_ms=50,
            silence_limit_ms=self.silence_ms,
            shared_memory_bytes=_SHARED_BYTES,
            memory_limit_bytes=_MEMORY_BYTES,
            default_slo_ns=200 * NS_PER_MS,
            state_dir=self.folder / state,
            lease=None if lease is None else "file:the world's",
            access=self._access,
            quotas_file=self.quotas_file,
            selection=SelectionConfig(store=None if self.redis is None else self.redis.url),
            telemetry_capacity=1000,
            telemetry_dir=self.telemetry_folder(name) if self.writes_telemetry else None,
        )

        async def main() -> None:
            await serve(config, started=lambda _: self.world.say(f"{name} serves"))

        own = self.controllers[name] = RunningController(process)

        def ended() -> None:
            self.num_ended += 1
            if self.controllers.get(name) is own:
                del self.controllers[name]

        process.on_end.append(ended)
        process.start(main)
        return process

    def telemetry_folder(self, name: str) -> Path:
        """Where a controller's telemetry is written."""
        return self.folder / f"telemetry of {name}"

    def terminate(self, process: WorldProcess) -> None:
        """Tell a controller or a worker to leave, as by SIGTERM."""
        worker = self.workers.get(process.name)
        if worker is not None:
            process.loop.call_soon(worker.link.leave)
        else:
            process.signal(signal.SIGTERM)

    # --- fronts ---------------------------------------------------------------------------------

    def start_front(self, name: str, host: Host) -> WorldProcess:
        """Start a front."""
        process = self.fronts[name] = WorldProcess(self.world, host, name)
        config = FrontConfig(
            controller=self._controller_addresses,
            host=self.network.address(host),
            port=FRONT_PORT + len(self.fronts) if name not in self._ports else self._ports[name],
            shared_memory_bytes=_SHARED_BYTES,
            memory_limit_bytes=_MEMORY_BYTES,
            access=self._access,
            joining=self.shown_by("front"),
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

    def start_worker(self, name: str, host: Host, num_pages: int) -> WorldProcess:
        """Start a worker."""
        process = WorldProcess(self.world, host, name)
        config = WorkerConfig(
            controller=self._controller_addresses,
            access=self.shown_by("worker"),
            device="simulated",
            worker_id=name,
            num_pages=num_pages,
            cache_dir=self.folder / host.name,
            payload_host=self.network.address(host),
        )
        host.disk.folders.add(config.cache_dir)
        limits = Limits(arena_bytes=_ARENA_BYTES, num_pages=num_pages, io_bytes=_IO_BYTES // 4)

        async def main() -> None:
            files = FileStore(config.cache_dir)
            kind = QueueingFoldingDevice if self.devices_queue else FoldingDevice
            device = kind(process, limits=limits, io_pool_bytes=_IO_BYTES, files=files)
            link = ControllerLink(config, device, files, ActionThread())
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
