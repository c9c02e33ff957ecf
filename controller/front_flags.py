"""Flags of whoever serves clients: `clockwright front`, and a controller."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from clockwright.channel import Access
    from controller.access.config import AccessConfig


# Triton's.
_HTTP_PORT = 8000


@dataclass(frozen=True, kw_only=True)
class FrontFlags:
    """Flags that say where clients are served, and how many."""

    port: Annotated[
        int, typer.Option(help="Port of clients, workers and operators alike; 0: any free one.")
    ] = 8001
    http_port: Annotated[
        int | None,
        typer.Option(
            help="Port of clients that speak REST; 0: any free one. Unset: 8000, and none where that is taken."
        ),
    ] = None
    no_http: Annotated[bool, typer.Option("--no-http", help="Serve gRPC only, no REST.")] = False
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the server's certificate: other machines have to use TLS then (http2)."
        ),
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None
    keys: Annotated[
        Path | None,
        typer.Option(
            help="File of keys (`clockwright keys`): who shows none may ask for health only."
        ),
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authority of clients' certificates, whose names are in --keys."
        ),
    ] = None
    jwt_issuer: Annotated[
        str, typer.Option(help="Whose JSON Web Tokens are believed (claim iss).")
    ] = ""
    jwt_audience: Annotated[
        str, typer.Option(help="What JSON Web Tokens are made for (claim aud).")
    ] = ""
    jwt_keys: Annotated[
        str, typer.Option(metavar="FILE|URL", help="The issuer's public keys (JWKS).")
    ] = ""
    jwt_roles_claim: Annotated[str, typer.Option(help="Claim with a caller's roles.")] = "roles"
    jwt_tenant_claim: Annotated[str, typer.Option(help="Claim with a caller's tenant.")] = "tenant"
    anonymous: Annotated[
        list[str] | None,
        typer.Option(
            help="A role of everybody who shows no key, once per role; with keys by default health."
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Serve other machines without keys or TLS: strangers may do harm."
        ),
    ] = False
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

    memory_limit_mib: Annotated[
        int | None,
        typer.Option(
            help="Memory of this process: at 85 % of it large requests are refused, at 95 % all. Unset: the limit of its "
            "control group, or of the machine."
        ),
    ] = None

    allow_client_shm: Annotated[
        bool,
        typer.Option(
            "--allow-client-shm",
            help="Clients of this machine may keep tensors in shared memory of theirs (Triton's extension).",
        ),
    ] = False

    trace_to: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|URL",
            help="Collector of OpenTelemetry that gets traces (OTLP over gRPC). Needs the extra `otel`.",
        ),
    ] = ""
    trace_share: Annotated[
        float,
        typer.Option(
            help="Share of the requests without a W3C traceparent that are traced, 0 to 1; with a sampled one all are."
        ),
    ] = 0.0

    @property
    def rest_port(self) -> int | None:
        """Where REST is served; None: nowhere."""
        if self.no_http:
            return None
        return _HTTP_PORT if self.http_port is None else self.http_port

    @property
    def shared_memory_bytes(self) -> int:
        """Memory that is shared with workers."""
        from controller.config import default_shared_bytes

        if self.shared_memory_mib is None:
            return default_shared_bytes()
        return self.shared_memory_mib << 20

    def access(self) -> AccessConfig:
        """Whom the server lets in.

        Raises:
            ConfigError: one of the settings is impossible.
        """
        from controller.access.config import AccessConfig
        from controller.access.roles import read_roles

        return AccessConfig(
            keys_file=self.keys,
            client_ca=self.tls_client_ca,
            issuer=self.jwt_issuer,
            audience=self.jwt_audience,
            issuer_keys=self.jwt_keys,
            roles_claim=self.jwt_roles_claim,
            tenant_claim=self.jwt_tenant_claim,
            anonymous=(
                None if self.anonymous is None else read_roles(self.anonymous, where="--anonymous")
            ),
            insecure=self.insecure,
        )

    @property
    def memory_limit_bytes(self) -> int | None:
        """What this process may take; None: what there is."""
        return None if self.memory_limit_mib is None else self.memory_limit_mib << 20

    def for_clients(self) -> FrontFlags:
        """Those of them that fronts have."""
        return FrontFlags(**{field.name: getattr(self, field.name) for field in fields(FrontFlags)})


@dataclass(frozen=True, kw_only=True)
class FrontJoinFlags:
    """What a front shows the controller that it joins."""

    front_token_file: Annotated[
        Path | None, typer.Option(help="File with a key of role front (`keys add`), or a token.")
    ] = None
    controller_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file: TLS to a controller with a certificate of this authority."),
    ] = None
    front_cert: Annotated[
        Path | None,
        typer.Option(help="PEM file: the front's certificate for the controller."),
    ] = None
    front_key: Annotated[Path | None, typer.Option(help="PEM file of that certificate's key.")] = (
        None
    )

    def access(self) -> Access:
        """What is shown, and TLS: the files are read anew for each attempt to join.

        Raises:
            ConfigError: a file cannot be read, or one is missing.
        """
        from clockwright.channel import Access

        return Access(
            key_file=self.front_token_file,
            ca=self.controller_ca,
            certificate=self.front_cert,
            certificate_key=self.front_key,
        )
