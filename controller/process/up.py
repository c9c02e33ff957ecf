"""`clockwright up` and `clockwright controller`: a controller in this process, and how it comes up."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
from rich.console import Console

from clockwright.cli.local_processes import LocalProcesses
from clockwright.cli.local_workers import LocalWorkers
from clockwright.client.channel import OPTIONS, Access
from clockwright.client.operator import control_stub
from clockwright.v1 import control_pb2 as pb
from controller.access.config import is_loopback
from controller.process.app import Ports, run_loop, serve
from controller.process.config import ControllerConfig
from controller.process.local_fronts import LocalFronts
from controller.process.preparation import Preparation
from controller.process.scratch import scratch_folder

_catalogue_log = logging.getLogger("controller.models.catalogue")

_POLL_INTERVAL_S = 0.2

# Listing thousands of models five times a second would be what slows their preparation down.
_MODELS_LISTED = 100


def up(
    config: ControllerConfig,
    workers: LocalWorkers,
    fronts: LocalFronts | None = None,
    words: str = "",
) -> int:
    """Serve until SIGTERM or Ctrl-C, with local workers and fronts, which are started here and have left in the end.

    `words` say in one line what there is to say of the workers. Returns the exit code: 0, or 1 when no local worker can
    work with its settings. Raises ConfigError if the controller cannot start.
    """
    # This process, its workers and its fronts authenticate with a key of their own.
    key = secrets.token_urlsafe(32)
    config = replace(config, access=replace(config.access, own_key=key))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    announcement: list[asyncio.Task[None]] = []
    local: list[tuple[LocalProcesses[Any], str]] = [(workers, "--worker-token-file")]
    if fronts is not None:
        local.append((fronts, "--front-token-file"))
    # The announcement says the same of every refused model; with -v, all is said as it happens.
    if not _catalogue_log.isEnabledFor(logging.INFO):
        _catalogue_log.setLevel(logging.ERROR)

    def started(ports: Ports) -> None:
        port = ports.port
        address = f"{_reachable(config.host)}:{port}"
        loop = asyncio.get_running_loop()
        for processes, flag in local:
            processes.start(
                address,
                credentials=(f"{flag}={token_file}",),
                again=lambda pause_s, start: loop.call_soon_threadsafe(
                    loop.call_later, pause_s, start
                ),
                give_up=lambda: os.kill(os.getpid(), signal.SIGTERM),
            )
        clients = address
        if fronts is not None:
            console.print(f"controller on {config.host}:{port}")
            clients = f"{_reachable(config.host)}:{fronts.port}"
        console.print(f"listening on {config.host}:{port if fronts is None else fronts.port}")
        if fronts is not None and fronts.http_port is not None:
            console.print(f"REST on {_url(config, fronts.http_port)}")
        if words:
            console.print(words)
        channel = _own_channel(config, address)
        task = _announce(console, channel, key, clients, workers, has_fronts=fronts is not None)
        announcement.append(loop.create_task(task))
        say_more(ports)

    def say_more(ports: Ports) -> None:
        if ports.http_port is not None:
            console.print(f"REST on {_url(config, ports.http_port)}")
        if ports.metrics_port is not None:
            url = _url(config, ports.metrics_port)
            console.print(f"metrics on {url}/metrics\ndashboard on {url}/")

    def standing_by(ports: Ports) -> None:
        console.print(f"standing by on {config.host}:{ports.port}")
        say_more(ports)

    def draining() -> None:
        workers.leave()
        if fronts is not None:
            # They end what is open, and take nothing new, while the controller still answers.
            fronts.tell_to_leave()

    with scratch_folder() as folder:
        # On a command line or in an environment others could read it.
        token_file = folder / "token"
        token_file.write_text(key)
        try:
            code = run_loop(
                serve(config, started=started, draining=draining, standing_by=standing_by)
            )
        finally:
            _catalogue_log.setLevel(logging.NOTSET)
            for processes, _ in reversed(local):
                processes.stop()
    if any(processes.unable for processes, _ in local):
        return 1
    console.print("stopped")
    return code


def _url(config: ControllerConfig, port: int) -> str:
    scheme = "http" if config.tls_certificate is None else "https"
    return f"{scheme}://{_reachable(config.host)}:{port}"


def _own_channel(config: ControllerConfig, address: str) -> Any:  # noqa: ANN401  grpc.aio's
    """Open a channel to the server of this process, which wants TLS on an address that others reach."""
    if config.tls_certificate is None or is_loopback(address.rpartition(":")[0]):
        return Access().async_channel(address)
    # With a library for cryptography, which takes long to import.
    from controller.access.authorities import name_in

    # Whichever name stands in the certificate, it is ours.
    name = ("grpc.ssl_target_name_override", name_in(config.tls_certificate))
    access = Access(ca=config.tls_certificate)
    return access.async_channel(address, options=(*OPTIONS, name))


async def _announce(
    console: Console,
    channel: Any,  # noqa: ANN401  grpc.aio's
    key: str,
    clients: str,
    workers: LocalWorkers,
    *,
    has_fronts: bool,
) -> None:
    """Say that the server is ready, once clients reach it and its models are prepared."""
    with suppress(grpc.aio.AioRpcError):  # it stopped while it was asked
        if has_fronts:
            # They listen when they have found the controller.
            async with Access().async_channel(clients) as to_fronts:
                await to_fronts.channel_ready()
        await show_preparation(console, channel, key, clients, workers)


async def show_preparation(
    console: Console,
    channel: Any,  # noqa: ANN401  grpc.aio's
    key: str,
    clients: str,
    workers: LocalWorkers,
) -> None:
    """Show the models being prepared, until all are ready or refused, or the controller stops.

    They wait for all local workers that live. The channel to the controller is closed in the end. `clients` is the
    HOST:PORT in the line that says that all is ready.
    """
    shown = Access(key=key).metadata
    async with channel:
        stub = control_stub(channel)
        with Preparation(console) as preparation:
            while True:
                status = await stub.Status(pb.StatusRequest(), metadata=shown)
                # The last worker that could not start has told the controller to stop before it counts as dead.
                if status.draining or workers.unable:
                    return
                is_due = preparation.count(status.num_models_ready, status.num_models)
                if status.num_models <= _MODELS_LISTED or is_due:
                    models = (await stub.ListModels(pb.ListModelsRequest(), metadata=shown)).models
                if status.num_models <= _MODELS_LISTED:
                    # A worker that is still to come may serve what the others refuse.
                    all_here = status.num_workers >= workers.num_alive
                    preparation.show(m for m in models if all_here or m.state != "UNAVAILABLE")
                if is_due:
                    preparation.say(status.num_models_ready, models)
                if status.ready and status.num_workers >= workers.num_alive:
                    break
                await asyncio.sleep(_POLL_INTERVAL_S)
            models = (await stub.ListModels(pb.ListModelsRequest(), metadata=shown)).models
            preparation.show(model for model in models if model.state == "UNAVAILABLE")
    # From now on the log tells of models that workers refuse.
    _catalogue_log.setLevel(logging.NOTSET)
    num_ready = sum(model.state == "READY" for model in models)
    console.print(f"ready: {num_ready} of {len(models)} models on {clients}")


def _reachable(host: str) -> str:
    """An address at which this machine reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host
