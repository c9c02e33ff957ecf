"""A server's certificate and authorities, which are read again when their files change."""

from __future__ import annotations

from collections.abc import Sequence

from clockwright.frame_socket import SocketListener
from controller.access.guard import Guard
from controller.config import ControllerConfig, FrontConfig
from controller.front.http2_server import Http2Server
from controller.front.tls import server_context


def use_tls(
    doors: Sequence[Http2Server | SocketListener],
    config: ControllerConfig | FrontConfig,
    guard: Guard,
) -> None:
    """Have doors show their certificate, and those who connect once it has changed the new one.

    Raises:
        ConfigError: the files cannot be used.
    """
    certificate, key = config.tls_certificate, config.tls_key
    if certificate is None or key is None:
        return
    client_ca, worker_ca = config.access.client_ca, config.access.worker_ca

    def read() -> None:
        context = server_context(certificate, key, client_ca, worker_ca)
        for door in doors:
            door.tls = context

    # First, so that what changes while it is read is read again.
    files = (certificate, key, client_ca, worker_ca)
    guard.watch([path for path in files if path is not None], read)
    read()
