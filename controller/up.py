"""`clockwright up` and `clockwright controller`: a controller in this process, and how it comes up."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Any

import grpc
from rich.console import Console

from clockwright.channel import OPTIONS
from clockwright.cli.local_workers import LocalWorkers
from clockwright.v1 import control_pb2 as pb
from clockwright.v1 import control_pb2_grpc as pb_grpc
from controller.app import run
from controller.config import ControllerConfig
from controller.preparation import Preparation

_catalogue_log = logging.getLogger("controller.catalogue")

_POLL_INTERVAL_S = 0.2

# Listing thousands of models five times a second would be what slows their preparation down.
_MODELS_LISTED = 100


def up(config: ControllerConfig, workers: LocalWorkers) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        config: the controller's settings.
        workers: local ones, which are started here and have left when this returns; may be none.

    Returns:
        The exit code: 0, or 1 when all local workers died before one of them joined.

    Raises:
        ConfigError: the controller cannot start.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    announcement: list[asyncio.Task[bool]] = []
    # The announcement says the same of every refused model; with -v, all is said as it happens.
    if not _catalogue_log.isEnabledFor(logging.INFO):
        _catalogue_log.setLevel(logging.ERROR)

    def started(port: int) -> None:
        address = f"{_reachable(config.host)}:{port}"
        workers.start(address)
        loop = asyncio.get_running_loop()
        console.print(f"listening on {config.host}:{port}")
        announcement.append(loop.create_task(_announce(console, address, workers)))

    try:
        code = run(config, started=started, draining=workers.leave)
    finally:
        workers.stop()
    for task in announcement:
        if task.done() and not task.cancelled() and not task.result():
            return 1
    console.print("stopped")
    return code


async def _announce(console: Console, address: str, workers: LocalWorkers) -> bool:
    """Show the models being prepared, until all are ready or refused.

    Returns:
        False when that will not come, because no local worker is left of those there should be.
    """
    num_workers = workers.num_alive
    channel: Any = grpc.aio.insecure_channel(address, options=OPTIONS)
    async with channel:
        stub: Any = pb_grpc.ControlServiceStub(channel)  # type: ignore[no-untyped-call]
        with Preparation(console) as preparation:
            joined = False
            while True:
                status = await stub.Status(pb.StatusRequest())
                if status.draining:
                    return True
                joined = joined or status.num_workers > 0
                if num_workers and not joined and workers.num_alive == 0:
                    print(
                        "every local worker died before it had joined; what it said is above",
                        file=sys.stderr,
                    )
                    os.kill(os.getpid(), signal.SIGTERM)
                    return False
                if status.num_models <= _MODELS_LISTED:
                    preparation.show((await stub.ListModels(pb.ListModelsRequest())).models)
                preparation.count(status.num_models_ready, status.num_models)
                if status.ready and status.num_workers >= workers.num_alive:
                    break
                await asyncio.sleep(_POLL_INTERVAL_S)
            models = (await stub.ListModels(pb.ListModelsRequest())).models
            preparation.show(model for model in models if model.state == "UNAVAILABLE")
    # From now on the log tells of models that workers refuse.
    _catalogue_log.setLevel(logging.NOTSET)
    num_ready = sum(model.state == "READY" for model in models)
    console.print(f"ready: {num_ready} of {len(models)} models on {address}")
    return True


def _reachable(host: str) -> str:
    """An address at which this machine reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host
