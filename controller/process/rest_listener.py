"""HTTP/1.1 of a process: REST next to gRPC, and monitoring, each if a port for it is configured.

uvicorn is imported when there is one, and not before.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from clockwright.errors import ConfigError
from clockwright.wire.leadership import address_of
from controller.access.config import is_loopback
from controller.access.guard import Guard
from controller.front.http.http2_server import Http2Server
from controller.front.http.rest import RestApp
from controller.front.methods import Method
from controller.metrics.app import CONNECTIONS_MAX, MonitoringApp, Pages, Site
from controller.process.config import ControllerConfig, FrontConfig
from controller.process.server_tls import use_tls

log = logging.getLogger(__name__)


@asynccontextmanager
async def rest_listener(
    config: ControllerConfig | FrontConfig,
    guard: Guard,
    server: Http2Server,
    handlers: Mapping[Method, Any],
    *,
    stop_grace_s: float,
    shared: bool = False,
) -> AsyncIterator[int | None]:
    """Serve REST meanwhile, for the same clients, by the same rules and within the same bounds as gRPC.

    Requests that are open at the end get the grace. Yields the port; None: REST is not served. Raises ConfigError if
    the port is taken, or the certificate cannot be used.
    """
    app = RestApp(server, only_here=is_loopback(config.host))
    app.serve(handlers)
    place = _Place(config.http_port, "REST", "--http-port, --no-http", config.http_optional, shared)
    async with _listening(place, config, guard, app, server, stop_grace_s=stop_grace_s) as port:
        yield port


@asynccontextmanager
async def monitoring_listener(
    config: ControllerConfig,
    guard: Guard,
    server: Http2Server,
    pages: Pages,
    site: Site,
    *,
    stop_grace_s: float = 0,
) -> AsyncIterator[int | None]:
    """Serve metrics meanwhile, and a site next to them; arguments and behaviour are those of `rest_listener`."""
    here = is_loopback(config.host)
    app = MonitoringApp(pages, server.authoriser, only_here=here, site=site)
    flags = "--metrics-port, --no-metrics"
    place = _Place(config.metrics_port, "metrics", flags, config.metrics_optional)
    # Scrapers come again, so that the connection which was used least recently makes room.
    traits = {"max_connections": CONNECTIONS_MAX, "idle_min": 0, "tls_for_all": True}
    async with _listening(
        place, config, guard, app, server, stop_grace_s=stop_grace_s, **traits
    ) as port:
        yield port


@dataclass(frozen=True, slots=True)
class _Place:
    """Where something is served."""

    port: int | None
    purpose: str
    #: By which people choose the port.
    flags: str
    #: It is no error where the port is taken.
    optional: bool
    shared: bool = False


@asynccontextmanager
async def _listening(
    place: _Place,
    config: ControllerConfig | FrontConfig,
    guard: Guard,
    app: Any,  # noqa: ANN401  ASGI's
    grpc: Http2Server,
    *,
    stop_grace_s: float,
    **traits: Any,  # noqa: ANN401  of `RestServer`
) -> AsyncIterator[int | None]:
    if place.port is None:
        yield None
        return
    from controller.front.http.rest_server import RestServer

    server = RestServer(app, grpc, **traits)
    use_tls((server,), config, guard, protocol="http/1.1")
    address = address_of(config.host, place.port)
    try:
        port = server.add_port(address, shared=place.shared)
    except OSError as error:
        words = f"cannot listen on {address} for {place.purpose}: {error.strerror} ({place.flags})"
        if not place.optional:
            raise ConfigError(words) from error
        log.warning("%s", words)
        yield None
        return
    await server.start()
    try:
        yield port
    finally:
        await server.stop(stop_grace_s)
