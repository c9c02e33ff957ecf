"""A front as a process of its own: clients' connections, and a link to the controller that decides.

It runs what a controller runs for clients (`front.http`, `front.services`); only the controller is
elsewhere (`front.remote`). What is not inference is handed on (`front.services.forwarding`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from clockwright.process import freeze_garbage, use_huge_pages
from controller.access.guard import Guard
from controller.front.admission.limits import AdmissionLimits
from controller.front.admission.memory import MemoryWatch
from controller.front.cells.choice import Choices
from controller.front.http.http2_server import Http2Server
from controller.front.oip.regions import Regions
from controller.front.remote.cells_backend import CellsBackend
from controller.front.remote.remote_backend import RemoteBackend
from controller.front.services.forwarding import Forwarding
from controller.front.services.inference import InferenceService
from controller.front.services.tracing import open_tracing
from controller.links.slabs import Slabs
from controller.process.app import run_loop, signals_to_end
from controller.process.cells.reader import CellReader
from controller.process.config import FrontConfig
from controller.process.lease.places import open_directory
from controller.process.rest_listener import rest_listener
from controller.process.server_tls import use_tls

log = logging.getLogger(__name__)

# Calls that are open when the front is told to leave get this long.
_STOP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Front:
    """A running front; `serving` makes it."""

    host: str
    #: Where it listens; never 0.
    port: int
    #: Where it listens for REST; None: nowhere.
    http_port: int | None
    #: Keeps the controller attached, and ends only by an error.
    attaching: asyncio.Task[None]
    slabs: Slabs
    backend: RemoteBackend | CellsBackend
    guard: Guard
    forwarding: Forwarding


@asynccontextmanager
async def serving(
    config: FrontConfig, *, clock: Callable[[], int] = time.monotonic_ns
) -> AsyncIterator[Front]:
    """Serve in the running event loop, once the controller is there.

    Raises ConfigError if the port is taken, or the controller takes no front of this version.
    """
    async with AsyncExitStack() as stack:
        slabs = Slabs(config.shared_memory_bytes)
        stack.callback(slabs.close)
        backend = await _find_backend(config, slabs, clock, stack)
        guard = Guard(config.access, count=backend.denied)
        attaching = asyncio.create_task(backend.run())

        async def detach() -> None:
            attaching.cancel()
            await asyncio.wait([attaching])

        stack.push_async_callback(detach)
        attached = asyncio.create_task(backend.attached.wait())
        await asyncio.wait((attaching, attached), return_when=asyncio.FIRST_COMPLETED)
        if attaching.done():
            attached.cancel()
            attaching.result()
        door = AdmissionLimits(
            max_requests=config.max_open_requests,
            max_bytes=config.max_open_bytes,
            count=backend.refused_at_door,
        )
        await stack.enter_async_context(MemoryWatch(door, config.memory_limit_bytes).looking())
        server = Http2Server(
            clock=backend.clock,
            door=door,
            max_message_bytes=backend.message_bytes_max,
            max_connections=config.max_connections,
            slabs=slabs,
            authoriser=guard.authoriser,
        )
        server.entrance.whose = "the front itself"
        use_tls((server,), config, guard)
        regions: Regions | None = None
        if config.allow_client_shm:
            regions = Regions(
                slabs,
                num_bytes_max=config.shared_memory_bytes,
                request_bytes_max=backend.message_bytes_max,
            )
        tracing = open_tracing(config.trace_to, share=config.trace_share, clock=backend.clock)
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        inference = InferenceService(backend, door=door, regions=regions, tracing=tracing)
        forwarding = Forwarding(backend.find_link, door=door, client_shm=regions is not None)
        # The front's own after those that it hands on.
        handlers = forwarding.handlers() | inference.handlers()
        server.serve(handlers)
        port = server.add_insecure_port(config.address, shared=config.shares_port)
        await server.start()
        stack.push_async_callback(server.stop, _STOP_GRACE_S)
        stack.callback(forwarding.health.leave)
        http_port = await stack.enter_async_context(
            rest_listener(
                config,
                guard,
                server,
                handlers,
                stop_grace_s=_STOP_GRACE_S,
                shared=config.shares_port,
            )
        )
        await stack.enter_async_context(guard.looking())
        log.info("listening on %s, port %d", config.host, port)
        yield Front(config.host, port, http_port, attaching, slabs, backend, guard, forwarding)


async def _find_backend(
    config: FrontConfig, slabs: Slabs, clock: Callable[[], int], stack: AsyncExitStack
) -> RemoteBackend | CellsBackend:
    """Make the link to the controller, or what links to those of a directory."""
    joining, knows_callers = config.joining, config.access.knows_callers
    if config.cells is None:
        return RemoteBackend(
            config.controller, slabs, joining=joining, knows_callers=knows_callers, clock=clock
        )
    choices = Choices()
    backend = CellsBackend(
        choices, slabs, joining=joining, knows_callers=knows_callers, clock=clock
    )
    store = open_directory(config.cells)
    reader = CellReader(store, choices, read=backend.follow, clock=clock)
    await stack.enter_async_context(reader.reading())
    return backend


async def serve(config: FrontConfig, *, started: Callable[[Front], None] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; a second signal stops at once. Returns the process's exit code.

    `started` is called once connections are accepted. Raises ConfigError if it cannot start, or the controller has
    changed to a version that takes no such front.
    """
    with signals_to_end() as signals:
        told = asyncio.create_task(signals.get())
        serving_task = asyncio.create_task(_serve(config, told, started))
        await asyncio.wait((told, serving_task), return_when=asyncio.FIRST_COMPLETED)
        hurry = asyncio.create_task(signals.get())
        if told.done():
            await asyncio.wait((hurry, serving_task), return_when=asyncio.FIRST_COMPLETED)
        for task in (told, hurry):
            task.cancel()
        if not serving_task.done():
            serving_task.cancel()
            await asyncio.wait([serving_task])
            return 0
        serving_task.result()
    return 0


async def _serve(
    config: FrontConfig, told: asyncio.Task[int], started: Callable[[Front], None] | None
) -> None:
    async with serving(config) as front:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, front.guard.read_again)
        freeze_garbage(collect=False)
        use_huge_pages()
        if started is not None:
            started(front)
        await asyncio.wait((told, front.attaching), return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            front.forwarding.is_leaving = True
            await asyncio.wait((front.attaching,), timeout=config.notice_s)
        if front.attaching.done():
            front.attaching.result()


def run(config: FrontConfig, *, started: Callable[[Front], None] | None = None) -> int:
    """Run a front process until it is told to leave; the arguments are those of `serve`."""
    return run_loop(serve(config, started=started))
