"""A server's certificate and authorities, which are read again when their files change."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Protocol

from controller.access.guard import Guard
from controller.front.http.tls import server_context
from controller.process.config import ServingConfig


class TlsDoor(Protocol):
    """Whatever may have TLS."""

    #: For connections from now on; None: TLS is off.
    tls: ssl.SSLContext | None


def use_tls(
    doors: Sequence[TlsDoor],
    config: ServingConfig,
    guard: Guard,
    *,
    protocol: str = "h2",
) -> None:
    """Have doors show their certificate, and those who connect once it has changed the new one.

    `protocol` is spoken behind TLS, by its name in ALPN. Raises ConfigError if the files cannot be used.
    """
    certificate, key = config.tls_certificate, config.tls_key
    if certificate is None or key is None:
        return
    client_ca, worker_ca = config.access.client_ca, config.access.worker_ca

    def read() -> None:
        context = server_context(certificate, key, client_ca, worker_ca, protocol=protocol)
        for door in doors:
            door.tls = context

    # First, so that what changes while it is read is read again.
    files = (certificate, key, client_ca, worker_ca)
    guard.watch([path for path in files if path is not None], read)
    read()
