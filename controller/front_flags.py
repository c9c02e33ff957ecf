"""Flags of whoever serves clients: `clockwright front`, and a controller."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class FrontFlags:
    """Flags that say where clients are served, and how many."""

    port: Annotated[
        int, typer.Option(help="Of clients, workers and operators alike; 0: any free one.")
    ] = 8001
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="PEM file: other machines have to use TLS then (http2)."),
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None
    max_open_requests: Annotated[
        int, typer.Option(help="Requests that are open at once; more are refused.")
    ] = 10_000
    max_open_mib: Annotated[
        int, typer.Option(help="MiB of all open requests; more are refused.")
    ] = 1024
    max_connections: Annotated[
        int, typer.Option(help="Connections beyond which requests are refused (http2).")
    ] = 1000

    shared_memory_mib: Annotated[
        int | None,
        typer.Option(
            help="Memory shared with workers of this host, for large tensors; 0: none. Unset: an eighth of all."
        ),
    ] = None

    allow_client_shm: Annotated[
        bool,
        typer.Option(
            "--allow-client-shm",
            help="Clients of this machine may keep tensors in shared memory of theirs (Triton's extension).",
        ),
    ] = False

    @property
    def shared_memory_bytes(self) -> int:
        """Memory that is shared with workers."""
        from controller.config import default_shared_bytes

        if self.shared_memory_mib is None:
            return default_shared_bytes()
        return self.shared_memory_mib << 20

    def for_clients(self) -> FrontFlags:
        """Those of them that fronts have."""
        return FrontFlags(**{field.name: getattr(self, field.name) for field in fields(FrontFlags)})
