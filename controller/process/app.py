"""The controller process: one event loop, one gRPC server, one port for all clients."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import uvloop

from clockwright.errors import ConfigError, ModelError, StoreError
from clockwright.process import freeze_garbage, keep_big_blocks, use_huge_pages
from clockwright.wire.leadership import Term, address_of
from controller.access.guard import Guard
from controller.access.quota_book import QuotaBook
from controller.core.admission import WAY_BACK_NS
from controller.core.events import TenantsWeighed
from controller.dashboard.live import Live
from controller.dashboard.site import DashboardSite
from controller.dashboard.standby import StandbySite
from controller.dashboard.views import DashboardViews
from controller.front.admission.limits import AdmissionLimits
from controller.front.admission.memory import MemoryWatch
from controller.front.http.http2_server import Http2Server
from controller.front.methods import FRONTS, LEADERSHIP, WORKERS, bind
from controller.front.oip.regions import Regions
from controller.front.remote.backend import LocalBackend
from controller.front.remote.front_link import FrontLinks
from controller.front.services.adding import ModelAdder
from controller.front.services.control import ControlService
from controller.front.services.inference import InferenceService
from controller.front.services.leadership import LeadershipService
from controller.front.services.repository import RepositoryService
from controller.front.services.tracing import open_tracing
from controller.links.joining import HeartbeatConfig
from controller.links.slabs import Slabs
from controller.links.worker_link import WorkerLinks
from controller.links.workers_wanted import WorkersWanted
from controller.metrics.page import Page, Parts
from controller.metrics.standby import StandbyPage
from controller.models.catalogue import Catalogue
from controller.models.digests import FileDigests
from controller.models.learned import Learned
from controller.models.state_file import StateFile, begin_term, keep_digests, read_digests
from controller.models.uploads import Uploads
from controller.models.warming import warm
from controller.process.cells.publisher import CellPublisher
from controller.process.config import ControllerConfig
from controller.process.lease.keeper import LeaseKeeper, holder_name
from controller.process.lease.places import open_directory, open_store
from controller.process.rest_listener import monitoring_listener, rest_listener
from controller.process.schedulers import make_scheduler
from controller.process.scratch import clear_left_behind, scratch_folder
from controller.process.server_tls import use_tls
from controller.process.standby import standing_by as standing_by_at
from controller.runtime import Runtime
from controller.selection.applications import Applications
from controller.telemetry.tables import Telemetry
from controller.telemetry.writer import TelemetryWriter

log = logging.getLogger(__name__)

# Calls that still run when all clients have been told to leave get this long. A stream that its client
# does not read, for example, would never end.
_STOP_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Where a controller listens, whether it leads or stands by."""

    #: The port of gRPC; never 0.
    port: int
    #: The port of REST; None: nowhere.
    http_port: int | None
    #: The port for scrapers of metrics; None: nowhere.
    metrics_port: int | None


@dataclass(frozen=True, kw_only=True)
class Controller(Ports):
    """The parts of a running controller; `running` makes it."""

    runtime: Runtime
    catalogue: Catalogue
    links: WorkerLinks
    fronts: FrontLinks
    applications: Applications
    slabs: Slabs
    guard: Guard
    state: StateFile
    learned: Learned

    async def drain(self, limit_s: float, *, notice_s: float) -> None:
        """Be ready no more but serve on, then admit nothing more and finish what is admitted.

        Workers and fronts are left waiting.
        """
        self.runtime.draining = True
        await asyncio.sleep(notice_s)
        self.runtime.close_admission()
        try:
            async with asyncio.timeout(limit_s):
                await self.runtime.wait_idle()
        except TimeoutError:
            log.warning(
                "after %g s %d requests are still waiting", limit_s, self.runtime.num_waiting
            )
        await self.learned.finish()
        # First, so that no front hears that there are no workers: it keeps what is open for the next controller.
        self.fronts.close()
        await self.links.close("the controller is shutting down")


@asynccontextmanager
async def running(
    config: ControllerConfig,
    term: Term = Term(),  # noqa: B008  it is frozen
    *,
    clock: Callable[[], int] = time.monotonic_ns,
) -> AsyncIterator[Controller]:
    """Start a controller in the running event loop; stop it, without draining, at the end.

    It leads in the generation of `term`; by default the next of its state folder, if it has one. The clock goes at the
    pace of the monotonic one. Raises ConfigError if the port is taken, or a directory cannot be used.
    """
    async with AsyncExitStack() as stack:
        telemetry = Telemetry(config.telemetry_capacity)
        guard = Guard(config.access, count=telemetry.denied)
        if config.telemetry_dir is not None:
            writer = TelemetryWriter(config.telemetry_dir)
            await writer.start()
            stack.push_async_callback(writer.close)
            telemetry.write_to(writer.add, writer.add)
        folder = config.state_dir
        scratch = stack.enter_context(scratch_folder())
        added = (folder or scratch) / "uploads"
        state = StateFile(None if folder is None else folder / "state.sqlite", added)
        stack.push_async_callback(state.close)
        if folder is not None and not term.generation:
            try:
                term = await state.run(begin_term)
            except StoreError as error:
                # A full disk, perhaps. It serves all the same, and workers do not ask who was before.
                log.warning("%s: this controller has no generation", error)
        asyncio.get_running_loop().run_in_executor(None, clear_left_behind)
        uploads = Uploads(added, state, bytes_max=config.upload_limit_bytes)
        # Live fronts charge each answer its way to the client, and simulated ones do not.
        way_back_ns = config.scheduler.way_back_ns or WAY_BACK_NS
        scheduler = make_scheduler(replace(config.scheduler, way_back_ns=way_back_ns))
        runtime = Runtime(scheduler, telemetry, clock=clock)
        learned = Learned(runtime, state)
        await learned.recall()
        await stack.enter_async_context(learned.keeping())
        known_digests: dict[str, str] = {}
        with suppress(StoreError):  # Then all files are read.
            known_digests = await state.run(read_digests)
        digests = FileDigests(known_digests)
        catalogue = Catalogue(
            runtime,
            config.models_dir,
            uploads,
            digests,
            state=state,
            warm=functools.partial(warm, runtime),
        )
        quotas = QuotaBook(
            file=config.quotas_file,
            state=state,
            changed=functools.partial(_quotas_changed, runtime, catalogue),
            policy_without_weights="" if scheduler.weighs_tenants else config.scheduler.policy,
        )
        await quotas.start()
        if quotas.file is not None:
            guard.watch([quotas.file], quotas.read_again)
        slabs = Slabs(config.shared_memory_bytes)
        stack.callback(slabs.close)
        links = WorkerLinks(
            runtime,
            catalogue,
            HeartbeatConfig(config.heartbeat_interval_ms, config.silence_limit_ms),
            message_bytes_max=config.max_message_bytes,
            slabs=slabs,
            term=term,
        )
        try:
            links.listen(config.host, config.worker_port, scratch / "workers")
        except OSError as error:
            where = f"port {config.worker_port} of {config.host}"
            raise ConfigError(f"cannot listen on {where} for workers: {error.strerror}") from error
        stack.callback(links.stop_listening)
        try:
            await catalogue.restore()
            if config.models_dir is not None:
                await catalogue.scan()
                if digests.seen != known_digests:
                    with suppress(StoreError):  # A full disk: the next start reads the files again.
                        await state.run(functools.partial(keep_digests, digests=digests.seen))
        except (ModelError, OSError, StoreError) as error:
            raise ConfigError(str(error)) from error
        applications = Applications(runtime, catalogue, config.selection, state)
        stack.push_async_callback(applications.close)
        await applications.restore()
        door = AdmissionLimits(
            max_requests=config.max_open_requests,
            max_bytes=config.max_open_bytes,
            count=telemetry.refused_at_door,
        )
        memory = MemoryWatch(door, config.memory_limit_bytes)
        await stack.enter_async_context(memory.looking())
        server = Http2Server(
            clock=runtime.clock,
            door=door,
            max_message_bytes=config.max_message_bytes,
            max_connections=config.max_connections,
            slabs=slabs,
            authoriser=guard.authoriser,
        )
        turns, entrance = server.turns, server.entrance
        use_tls((server, links.listener), config, guard)
        runtime.unread_ns, entrance.share_elsewhere = turns.unread_ns, runtime.share_with_devices
        runtime.is_pressed, runtime.answers_leave = lambda: entrance.is_pressed, turns.work_now
        regions: Regions | None = None
        if config.allow_client_shm:
            regions = Regions(
                slabs,
                num_bytes_max=config.shared_memory_bytes,
                request_bytes_max=config.max_message_bytes,
            )
        backend = LocalBackend(
            runtime,
            catalogue,
            applications,
            default_slo_ns=config.default_slo_ns,
            quotas=quotas.quotas,
            sequences=config.sequences,
        )
        tracing = open_tracing(config.trace_to, share=config.trace_share, clock=runtime.clock)
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        inference = InferenceService(backend, door=door, regions=regions, tracing=tracing)
        fronts = FrontLinks(
            backend,
            catalogue,
            links,
            HeartbeatConfig(config.heartbeat_interval_ms, config.silence_limit_ms),
            door=door,
            entrance=entrance,
            message_bytes_max=config.max_message_bytes,
            knows_callers=config.access.knows_callers,
            term=term,
        )
        stack.callback(fronts.close)
        page: Page | None = None
        site: DashboardSite | None = None
        if config.metrics_port is not None:
            parts = Parts(
                runtime=runtime,
                catalogue=catalogue,
                links=links,
                fronts=fronts,
                applications=applications,
                quotas=quotas,
                door=door,
                memory=memory.pressure,
                lag_ns=turns.lag_ns,
                generation=term.generation,
                policy=config.scheduler.policy,
                sequences=backend.sequences.book,
            )
            page = Page(parts)
            live = Live()
            site = DashboardSite(DashboardViews(parts, default_slo_ns=config.default_slo_ns), live)
        adder = ModelAdder(catalogue, uploads)
        repository = RepositoryService(
            runtime,
            catalogue,
            backend,
            applications,
            adder=adder,
            door=door,
            client_shm=regions is not None,
            name=config.server_name,
            fill_statistics=None if page is None else page.fill_statistics,
        )
        wanted = WorkersWanted(runtime, links)
        control = ControlService(
            runtime,
            catalogue,
            links,
            applications,
            fronts,
            policy=config.scheduler.policy,
            default_slo_ns=config.default_slo_ns,
            adder=adder,
            quotas=quotas,
            memory=memory.pressure,
            wanted=wanted,
            knows_callers=config.access.knows_callers,
            has_tls=config.tls_certificate is not None,
        )
        leadership = LeadershipService(lambda: None if runtime.draining else term)
        handlers = inference.handlers() | repository.handlers() | control.handlers()
        server.serve(
            handlers | bind(WORKERS, links) | bind(FRONTS, fronts) | bind(LEADERSHIP, leadership)
        )
        port = server.add_insecure_port(config.address)
        await server.start()
        stack.push_async_callback(server.stop, _STOP_GRACE_S)
        stack.callback(repository.health.leave)
        await stack.enter_async_context(wanted.looking())
        http_port = await stack.enter_async_context(
            rest_listener(config, guard, server, handlers, stop_grace_s=_STOP_GRACE_S)
        )
        metrics_port: int | None = None
        if page is not None and site is not None:
            monitoring = monitoring_listener(
                config, guard, server, page, site, stop_grace_s=_STOP_GRACE_S
            )
            metrics_port = await stack.enter_async_context(monitoring)
            # First, so that streams end as HTTP has it and are not cut off.
            stack.callback(site.close)
        await stack.enter_async_context(guard.looking())
        if config.cells is not None:
            publisher = CellPublisher(
                open_directory(config.cells),
                config.cell_address or _reached_at(config.host, port),
                runtime,
                catalogue,
                applications,
                fronts,
            )
            # It ends first: no front chooses a controller that is about to go.
            await stack.enter_async_context(publisher.publishing())
        log.info("listening on %s, port %d", config.host, port)
        for danger in config.access.dangers(
            config.host, has_tls=config.tls_certificate is not None
        ):
            log.warning("--insecure on %s: %s", config.host, danger)
        yield Controller(
            port=port,
            http_port=http_port,
            metrics_port=metrics_port,
            runtime=runtime,
            catalogue=catalogue,
            links=links,
            fronts=fronts,
            applications=applications,
            slabs=slabs,
            guard=guard,
            state=state,
            learned=learned,
        )


def _quotas_changed(runtime: Runtime, catalogue: Catalogue, weights: Mapping[str, float]) -> None:
    """Apply new quotas: in the scheduler, and in whatever the catalogue keeps about how to ask for a model."""
    runtime.tell(TenantsWeighed(weights=weights))
    catalogue.renew()


def _reached_at(host: str, port: int) -> str:
    """Where other machines reach a server that listens on a host's address, if that is no particular one."""
    return address_of(socket.gethostname() if host in ("0.0.0.0", "::") else host, port)


def _say_nothing(_: Ports) -> None:
    pass


async def serve(
    config: ControllerConfig,
    *,
    started: Callable[[Ports], None] = _say_nothing,
    draining: Callable[[], None] = lambda: None,
    standing_by: Callable[[Ports], None] = _say_nothing,
) -> int:
    """Run a controller until SIGTERM or SIGINT, then drain it; a second signal stops at once.

    With a lease, it stands by until it leads, and ends when it leads no more.

    On SIGHUP keys and certificates are read again, which otherwise takes a second after they have changed; while it
    stands by, too.

    Args:
        config: its settings.
        started: is called once connections are accepted.
        draining: is called before the workers are left waiting.
        standing_by: is called once it says at its ports that it is not ready yet.

    Returns:
        The process's exit code: 0, or `os.EX_TEMPFAIL` where another controller leads now.

    Raises:
        ConfigError: it cannot start.
    """
    with signals_to_end() as signals:
        if config.lease is None:
            never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            return await _lead(config, Term(), signals, never, started, draining)
        store = open_store(config.lease)
        async with AsyncExitStack() as stack:
            guard = Guard(config.access)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, guard.read_again)
            server, port, http_port = await stack.enter_async_context(standing_by_at(config, guard))
            # It is found where it was; a port that was taken is tried again.
            config = replace(config, port=port, http_port=http_port or config.http_port)
            keeper = LeaseKeeper(store, holder_name(config.address))
            pages = StandbyPage(config.scheduler.policy)
            site = StandbySite(lambda: keeper.leader)
            metrics_port = await stack.enter_async_context(
                monitoring_listener(config, guard, server, pages, site)
            )
            await stack.enter_async_context(guard.looking())
            config = replace(config, metrics_port=metrics_port or config.metrics_port)
            standing_by(Ports(port=port, http_port=http_port, metrics_port=metrics_port))
            told = asyncio.create_task(signals.get())
            taken = asyncio.create_task(keeper.take())
            await asyncio.wait((told, taken), return_when=asyncio.FIRST_COMPLETED)
        is_told = told.done()
        for task in (told, taken):
            task.cancel()
        await asyncio.gather(told, taken, return_exceptions=True)
        lost = asyncio.create_task(keeper.keep())
        try:
            if is_told:
                return 0
            log.warning("leading, in generation %d", keeper.term.generation)
            return await _lead(config, keeper.term, signals, lost, started, draining)
        finally:
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
            # Last, because its successor needs what it holds: the port, and the state folder.
            await keeper.give_back()


async def _lead(
    config: ControllerConfig,
    term: Term,
    signals: asyncio.Queue[int],
    lost: asyncio.Future[str],
    started: Callable[[Ports], None],
    draining: Callable[[], None],
) -> int:
    """Do what `serve` says, as the leader; `lost` says why it leads no more."""
    async with running(config, term) as controller:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, controller.guard.read_again)
        # All objects made so far live as long as the process: the collector need not look at them.
        freeze_garbage(collect=False)
        use_huge_pages()
        started(controller)
        told = asyncio.create_task(signals.get())
        await asyncio.wait((told, lost), return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            log.info("draining on %s", signal.Signals(told.result()).name)
            draining()
            drain = asyncio.create_task(
                controller.drain(config.drain_limit_s, notice_s=config.notice_s)
            )
            hurry = asyncio.create_task(signals.get())
            await asyncio.wait((drain, hurry, lost), return_when=asyncio.FIRST_COMPLETED)
            if drain.done():
                drain.result()
            for task in (drain, hurry):
                task.cancel()
            await asyncio.gather(drain, hurry, return_exceptions=True)
        told.cancel()
        if not lost.done():
            return 0
        reason = f"another controller may lead now: {lost.result()}"
        log.critical("%s; ending", reason)
        controller.fronts.close()
        await controller.links.close(reason)
        return os.EX_TEMPFAIL


@contextmanager
def signals_to_end() -> Iterator[asyncio.Queue[int]]:
    """Queue the signals that tell this process to end; at the end, remove their handlers and SIGHUP's."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        yield signals
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run the main coroutine of a process that serves."""
    keep_big_blocks()
    # Every connection takes a handle. The soft limit is often 1,024, for programs that use select.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
