"""The REST door of a process that serves clients: opened beside gRPC's where a port for it is configured.

uvicorn is imported when a door is opened, and not before.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from clockwright.errors import ConfigError
from controller.access.config import is_loopback
from controller.access.guard import Guard
from controller.config import ControllerConfig, FrontConfig, address_of
from controller.front.door import Door
from controller.front.rest import RestApp
from controller.front.throttle import Throttle
from controller.front.turns import Turns
from controller.server_tls import use_tls
from controller.slabs import Slabs

log = logging.getLogger(__name__)


@asynccontextmanager
async def rest_door(
    config: ControllerConfig | FrontConfig,
    guard: Guard,
    *,
    clock: Callable[[], int],
    door: Door,
    throttle: Throttle,
    turns: Turns,
    slabs: Slabs,
    max_message_bytes: int,
    mount: Callable[[RestApp], None],
    stop_grace_s: float,
    shared: bool = False,
) -> AsyncIterator[int | None]:
    """Serve REST meanwhile, for the same clients, by the same rules and within the same bounds as gRPC.

    Args:
        config: with or without a port for it.
        guard: knows the callers, and looks after the certificate.
        clock: as the rest of these, what gRPC's door has.
        door: likewise.
        throttle: likewise.
        turns: likewise.
        slabs: likewise.
        max_message_bytes: likewise.
        mount: has services answer.
        stop_grace_s: requests that are open at the end get this long.
        shared: other processes may listen on the port too.

    Yields:
        The port; None: there is none.

    Raises:
        ConfigError: the port is taken, or the certificate cannot be used.
    """
    if config.http_port is None:
        yield None
        return
    from controller.front.rest_server import RestServer

    app = RestApp(
        clock=clock,
        door=door,
        throttle=throttle,
        authoriser=guard.authoriser,
        slabs=slabs,
        max_message_bytes=max_message_bytes,
        only_here=is_loopback(config.host),
    )
    mount(app)
    server = RestServer(app, door=door, turns=turns, max_connections=config.max_connections)
    use_tls((server,), config, guard, protocol="http/1.1")
    address = address_of(config.host, config.http_port)
    try:
        port = server.add_port(address, shared=shared)
    except OSError as error:
        words = f"cannot listen on {address} for REST: {error.strerror} (--http-port, --no-http)"
        if not config.http_optional:
            raise ConfigError(words) from error
        log.warning("%s", words)
        yield None
        return
    await server.start()
    try:
        yield port
    finally:
        await server.stop(stop_grace_s)
