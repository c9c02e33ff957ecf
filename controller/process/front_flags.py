"""Flags that need more than one setting: the ports of REST and of metrics, and how a front joins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clockwright.cli.flags import access_of

if TYPE_CHECKING:
    from clockwright.client.channel import Access

# Triton's.
_HTTP_PORT, _METRICS_PORT = 8000, 8002


@dataclass(frozen=True, kw_only=True)
class RestFlags:
    """Where REST is served."""

    http_port: Annotated[
        int | None,
        typer.Option(help="Port for REST; 0: any free port. Unset: 8000, or off if it is taken."),
    ] = None
    no_http: Annotated[bool, typer.Option("--no-http", help="Turn off REST.")] = False

    @property
    def optional(self) -> bool:
        """Whether the port may be taken."""
        return self.http_port is None

    @property
    def port(self) -> int | None:
        """The port, or None for no REST."""
        return _port(self.http_port, _HTTP_PORT, no=self.no_http)


@dataclass(frozen=True, kw_only=True)
class MetricsFlags:
    """Where metrics and the dashboard are served."""

    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port of metrics and dashboard; 0: any free port. Unset: 8002, or off if it is taken."
        ),
    ] = None
    no_metrics: Annotated[
        bool, typer.Option("--no-metrics", help="Turn off metrics and dashboard.")
    ] = False

    @property
    def optional(self) -> bool:
        """Whether the port may be taken."""
        return self.metrics_port is None

    @property
    def port(self) -> int | None:
        """The port, or None for no metrics."""
        return _port(self.metrics_port, _METRICS_PORT, no=self.no_metrics)


def _port(said: int | None, default: int, *, no: bool) -> int | None:
    if no:
        return None
    return default if said is None else said


@dataclass(frozen=True, kw_only=True)
class FrontJoinFlags:
    """What a front shows the controller that it joins."""

    front_token_file: Annotated[
        Path | None,
        typer.Option(help="File with a key of role front (`keys add`), or with a token."),
    ] = None
    controller_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authority of the controller's certificate; turns on TLS."
        ),
    ] = None
    front_cert: Annotated[
        Path | None,
        typer.Option(help="PEM file of the front's certificate for the controller."),
    ] = None
    front_key: Annotated[Path | None, typer.Option(help="PEM file of that certificate's key.")] = (
        None
    )

    def access(self) -> Access:
        """Credentials and TLS, as `access_of`: the files are read again for each attempt to join."""
        return access_of(self.front_token_file, self.controller_ca, self.front_cert, self.front_key)
