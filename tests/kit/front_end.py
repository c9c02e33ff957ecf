"""A whole controller in the test's process, but for the workers' stream: real scheduler, runtime,
catalogue and front end on a port of their own, and a worker that is a script.
"""

from __future__ import annotations

import asyncio
import ssl
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import uvloop

from clockwright.client.channel import Access
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.access.authoriser import Authoriser
from controller.access.config import AccessConfig
from controller.access.guard import Guard
from controller.access.quota_book import QuotaBook
from controller.core import Scheduler, SchedulerConfig
from controller.front.admission.entrance import Entrance
from controller.front.admission.limits import AdmissionLimits
from controller.front.admission.pressure import MemoryPressure
from controller.front.http import http2_server
from controller.front.http.http2_server import Http2Server
from controller.front.http.rest import RestApp
from controller.front.http.rest_server import RestServer
from controller.front.methods import FRONTS, WORKERS, bind
from controller.front.oip.regions import Regions
from controller.front.remote.backend import LocalBackend
from controller.front.remote.front_link import FrontLinks
from controller.front.services.adding import ModelAdder
from controller.front.services.control import ControlService
from controller.front.services.inference import InferenceService
from controller.front.services.repository import RepositoryService
from controller.front.services.tracing import Tracing
from controller.links.slabs import Slabs
from controller.links.worker_link import WorkerLinks
from controller.links.workers_wanted import WorkersWanted
from controller.models.catalogue import Catalogue
from controller.models.state_file import StateFile
from controller.models.uploads import Uploads
from controller.process import front_process
from controller.process.config import FrontConfig
from controller.runtime import Runtime
from controller.selection.applications import Applications
from controller.selection.config import SelectionConfig
from controller.stages.sequences.stage import SequenceStage
from controller.telemetry.tables import Telemetry
from tests.kit.scripted_worker import SCRIPTS, InLoopWorker

T = TypeVar("T")

# Above the real service, so that size limits can be tested without gigabytes.
MESSAGE_BYTES_MAX = 4 << 20
#: Shared memory of a front in a test.
SLAB_BYTES = 64 << 20
# A worker that a test holds back does not hang, however slow the machine is.
CONFIG = SchedulerConfig(action_timeout_ns=1000 * NS_PER_S)


@dataclass
class FrontEnd:
    """What a test needs of a running controller."""

    #: HOST:PORT; empty when it listens nowhere.
    address: str
    runtime: Runtime
    catalogue: Catalogue
    worker: InLoopWorker
    applications: Applications
    links: WorkerLinks
    slabs: Slabs
    regions: Regions
    quotas: QuotaBook
    uploads: Uploads
    #: The address of the controller itself, where a front of its own has the other.
    controller: str = ""
    fronts: FrontLinks | None = None
    server: Http2Server | None = None
    #: HOST:PORT of REST, where somebody asked for it; and its server, unless the front is apart.
    rest: str = ""
    rest_server: RestServer | None = None
    #: Whom the front apart lets in.
    guard: Guard | None = None
    backend: LocalBackend | None = None

    @property
    def sequences(self) -> SequenceStage[Any]:
        """Sequences of steps, where it listens."""
        assert self.backend is not None
        return self.backend.sequences

    async def hang_up(self) -> None:
        """Leave all clients and fronts, as a controller does that dies."""
        assert self.fronts is not None
        assert self.server is not None
        self.fronts.close()
        await self.server.stop(grace=None)


@asynccontextmanager
async def controlling(
    directory: Path,
    selection: SelectionConfig | None = None,
    *,
    clock: Callable[[], int] = time.monotonic_ns,
) -> AsyncIterator[FrontEnd]:
    """Control every scripted model of a models directory made below `directory`; no port, no gRPC."""
    for name in SCRIPTS:
        version = directory / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / "model.onnx").write_bytes(b"scripted")
    runtime = Runtime(Scheduler(CONFIG), Telemetry(), clock=clock)
    state = StateFile(None)
    uploads = Uploads(directory / ".uploads", state, bytes_max=1 << 30)
    catalogue = Catalogue(runtime, directory, uploads, state=state)
    await catalogue.restore()
    slabs = Slabs(SLAB_BYTES)
    regions = Regions(slabs, num_bytes_max=SLAB_BYTES, request_bytes_max=MESSAGE_BYTES_MAX)
    links = WorkerLinks(runtime, catalogue, message_bytes_max=1 << 26, slabs=slabs)
    quotas = QuotaBook(changed=lambda _: catalogue.renew())
    worker = InLoopWorker(runtime, catalogue)
    worker.join()
    await catalogue.scan()
    applications = Applications(runtime, catalogue, selection)
    await applications.restore()
    try:
        yield FrontEnd(
            "", runtime, catalogue, worker, applications, links, slabs, regions, quotas, uploads
        )
    finally:
        await applications.close()
        await state.close()
        slabs.close()


@asynccontextmanager
async def serving(
    directory: Path,
    selection: SelectionConfig | None = None,
    *,
    clock: Callable[[], int] = time.monotonic_ns,
    front: str = "here",
    door: AdmissionLimits | None = None,
    max_connections: int = 1000,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    authoriser: Authoriser | None = None,
    access: AccessConfig | None = None,
    joining: Access | None = None,
    client_shm: bool = False,
    entrance: Callable[..., Entrance] = Entrance,
    memory_limit_bytes: int | None = None,
    rest: bool = False,
    rest_tls: ssl.SSLContext | None = None,
    tracing: Tracing | None = None,
) -> AsyncIterator[FrontEnd]:
    """Do what `controlling` does, and listen on a port.

    `memory_limit_bytes`: of a front that is apart.
    `front`: `here`, or `apart`: clients come to a front that has only a link to the controller.
    `rest`: it listens for REST, too, with `rest_tls`.
    `access`: whom the controller lets in, and a front apart, which shows it `joining`.
    """
    async with controlling(directory, selection, clock=clock) as front_end:
        runtime, catalogue = front_end.runtime, front_end.catalogue
        if door is None:
            count = runtime.telemetry.refused_at_door
            door = AdmissionLimits(max_requests=10_000, max_bytes=1 << 30, count=count)
        if authoriser is None:
            authoriser = Authoriser() if access is None else Guard(access).authoriser
        server = Http2Server(
            clock=clock,
            door=door,
            max_message_bytes=MESSAGE_BYTES_MAX,
            max_connections=max_connections,
            slabs=front_end.slabs,
            authoriser=authoriser,
            tls=tls,
        )
        # The machine of a test may be busy with others, and the loop seems idle all the same.
        server.entrance = entrance(
            clock,
            server.turns,
            door,
            soon=asyncio.get_running_loop().call_soon,
            used_ns=lambda: 0,
        )
        backend = LocalBackend(
            runtime, catalogue, front_end.applications, quotas=front_end.quotas.quotas
        )
        # A front apart has regions of its own.
        regions = front_end.regions if client_shm and front != "apart" else None
        inference = InferenceService(backend, door=door, regions=regions, tracing=tracing)
        adder = ModelAdder(catalogue, front_end.uploads)
        repository = RepositoryService(
            runtime,
            catalogue,
            backend,
            front_end.applications,
            adder=adder,
            door=door,
            client_shm=regions is not None,
        )
        with tempfile.TemporaryDirectory() as sockets:
            links = front_end.links
            links.listen(host, 0, Path(sockets) / "fronts")
            fronts = FrontLinks(
                backend,
                catalogue,
                links,
                door=door,
                entrance=server.entrance,
                message_bytes_max=MESSAGE_BYTES_MAX,
                knows_callers=access is not None and access.knows_callers,
            )
            control = ControlService(
                runtime,
                catalogue,
                front_end.links,
                front_end.applications,
                fronts,
                policy="clockwork",
                default_slo_ns=100 * NS_PER_MS,
                adder=adder,
                quotas=front_end.quotas,
                memory=MemoryPressure(1 << 40),
                wanted=WorkersWanted(runtime, links),
            )
            front_end.fronts, front_end.server, front_end.backend = fronts, server, backend
            handlers = inference.handlers() | repository.handlers() | control.handlers()
            server.serve(handlers | bind(WORKERS, links) | bind(FRONTS, fronts))
            listening = server.add_insecure_port(f"{host}:{port}")
            front_end.address = front_end.controller = f"127.0.0.1:{listening}"
            await server.start()
            rest_server: RestServer | None = None
            if rest and front != "apart":
                app = RestApp(server, only_here=host == "127.0.0.1")
                app.serve(handlers)
                rest_server = RestServer(app, server, tls=rest_tls)
                front_end.rest_server = rest_server
                front_end.rest = f"127.0.0.1:{rest_server.add_port(f'{host}:0')}"
                await rest_server.start()
            try:
                if front == "apart":
                    config = FrontConfig(
                        controller=front_end.controller,
                        port=0,
                        http_port=0 if rest else None,
                        allow_client_shm=client_shm,
                        memory_limit_bytes=memory_limit_bytes,
                        access=access or AccessConfig(),
                        joining=joining or Access(),
                    )
                    # Its loop seems idle, too: what says nothing of its SLO, as REST's headers, would be refused.
                    idle = mock.patch.object(http2_server, "thread_used_ns", return_value=lambda: 0)
                    async with AsyncExitStack() as stack:
                        stack.enter_context(idle)
                        own = await stack.enter_async_context(front_process.serving(config))
                        front_end.address = f"127.0.0.1:{own.port}"
                        front_end.guard = own.guard
                        front_end.rest = f"127.0.0.1:{own.http_port}"
                        yield front_end
                else:
                    yield front_end
            finally:
                if rest_server is not None:
                    await rest_server.stop(0)
                await front_end.hang_up()
                links.stop_listening()


class FrontEndInThread:
    """The same for clients that block: the controller's loop runs in a thread of its own."""

    def __init__(self, front_end: FrontEnd, loop: asyncio.AbstractEventLoop) -> None:
        self.address = front_end.address
        self.rest = front_end.rest
        self.front_end = front_end
        self.loop = loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the controller's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def until(self, condition: Callable[[FrontEnd], bool]) -> None:
        """Wait until something is so; evaluated in the controller's loop."""
        self.run(until(lambda: condition(self.front_end)))

    def do(self, work: Callable[[FrontEnd], T]) -> T:
        """Call something in the controller's loop."""

        async def call() -> T:
            return work(self.front_end)

        return self.run(call())


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the event loop until something is so; pytest's timeout bounds the wait."""
    # What is waited for happens in code under test, which sets no events for tests.
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@contextmanager
def serving_in_thread(
    directory: Path,
    *,
    clock: Callable[[], int] = time.monotonic_ns,
    front: str = "here",
    door: AdmissionLimits | None = None,
    max_connections: int = 1000,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    authoriser: Authoriser | None = None,
    joining: Access | None = None,
    client_shm: bool = False,
    entrance: Callable[..., Entrance] = Entrance,
    access: AccessConfig | None = None,
    rest: bool = False,
    rest_tls: ssl.SSLContext | None = None,
    tracing: Tracing | None = None,
) -> Iterator[FrontEndInThread]:
    started: list[FrontEndInThread] = []
    ready = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(
            directory,
            clock=clock,
            front=front,
            door=door,
            max_connections=max_connections,
            tls=tls,
            host=host,
            authoriser=authoriser,
            joining=joining,
            client_shm=client_shm,
            entrance=entrance,
            access=access,
            rest=rest,
            rest_tls=rest_tls,
            tracing=tracing,
        ) as front_end:
            started.append(FrontEndInThread(front_end, asyncio.get_running_loop()))
            ready.set()
            await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    while not ready.wait(1):
        assert thread.is_alive(), "the controller did not start; see what its thread says"
    try:
        yield started[0]
    finally:
        started[0].do(lambda _: stop.set())
        thread.join()
