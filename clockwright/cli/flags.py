"""Flags that several commands share, and how a record of flags becomes a command line."""

from __future__ import annotations

import enum
import inspect
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from typing_extensions import override

from clockwright.errors import ConfigError
from clockwright.foreign import printable
from clockwright.settings import Flags, parameters, spell
from clockwright.units import NS_PER_MS, SLO_NS_MAX
from clockwright.wire.leadership import is_address

if TYPE_CHECKING:
    from clockwright.client.channel import Access
    from clockwright.client.client import Client
    from clockwright.client.operator import Operator

#: Default address of the server.
SERVER = "127.0.0.1:8001"

_LINE_CHARS_MAX = 10_000

Controllers = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT[,HOST:PORT...]|file:PATH",
        help="The controller; or several, of which one leads (`clockwright controller --lease`); or a file that says "
        "where it is, read again before each attempt to connect.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class LogFormat(enum.StrEnum):
    """Format of log messages."""

    TEXT = "text"
    JSON = "json"


def access_of(
    key_file: Path | None, ca: Path | None, certificate: Path | None, key: Path | None
) -> Access:
    """What is shown, and TLS. Raises ConfigError if a file cannot be read, or one is missing."""
    from clockwright.client.channel import Access

    return Access(key_file=key_file, ca=ca, certificate=certificate, certificate_key=key)


@dataclass(frozen=True, kw_only=True)
class CallerFlags:
    """The credentials of a command that calls a server."""

    key_file: Annotated[
        Path | None,
        typer.Option(envvar="CLOCKWRIGHT_KEY_FILE", help="File with a key (`keys add`) or token."),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="CLOCKWRIGHT_TLS_CA",
            help="PEM file of the authority of the server's certificate; turns on TLS.",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(envvar="CLOCKWRIGHT_TLS_CERT", help="PEM file of the client's certificate."),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(
            envvar="CLOCKWRIGHT_TLS_KEY", help="PEM file of the client certificate's key."
        ),
    ] = None

    def access(self) -> Access:
        """Credentials and TLS, as `access_of`: the file with the key is read for each call."""
        return access_of(self.key_file, self.tls_ca, self.tls_cert, self.tls_key)


@dataclass(frozen=True, kw_only=True)
class ServerFlags(CallerFlags):
    """The server of a command, and the credentials for it."""

    server: Annotated[
        str, typer.Option(envvar="CLOCKWRIGHT_SERVER", help="HOST:PORT of the controller.")
    ] = SERVER

    def __post_init__(self) -> None:
        # gRPC would take 443 for the port, and 34463 for port 99999.
        if not is_address(self.server):
            raise ConfigError(f"--server is {self.server!r}, expected HOST:PORT, such as {SERVER}")

    def operator(self) -> Operator:
        """Connect as an operator; as `access`."""
        # With gRPC, which takes longer to import than help takes to print.
        from clockwright.client.operator import Operator

        return Operator(self.server, self.access())

    def client(self) -> Client:
        """Connect as a client; as `access`."""
        from clockwright.client.client import Client

        return Client(self.server, self.access())


@dataclass(frozen=True, kw_only=True)
class JoinFlags:
    """A worker's credentials for its controller."""

    worker_token_file: Annotated[
        Path | None, typer.Option(help="File with the token or key that lets workers join.")
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authority of the controller's certificate; turns on TLS."
        ),
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the worker's certificate.")] = (
        None
    )
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None

    def access(self) -> Access:
        """Credentials and TLS, as `access_of`: the files are read for each attempt to join."""
        return access_of(self.worker_token_file, self.tls_ca, self.tls_cert, self.tls_key)


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """What a process logs, and how."""

    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Verbose logging.")] = False
    log_format: Annotated[
        LogFormat,
        typer.Option(help="Format of log messages: text, or one JSON object per line."),
    ] = LogFormat.TEXT

    def apply(self, level: int = logging.WARNING) -> None:
        """Log to standard error: messages of `level` and above, or with --verbose all from INFO."""
        handler = logging.StreamHandler()
        handler.setFormatter(formatter(self.log_format))
        logging.basicConfig(level=logging.INFO if self.verbose else level, handlers=[handler])

    def spell(self) -> list[str]:
        """Spell them on a command line."""
        return spell(vars(self))


def takes_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each field of its parameters that are dataclasses, or `Flags` of a config.

    Typer does not support such records: it gets a function that takes the fields one by one.
    """
    made: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    shown: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind: Any = parameter.annotation
        without: tuple[str, ...] = ()
        if get_origin(kind) is Annotated and get_origin(get_args(kind)[0]) is Flags:
            kind, without = get_args(kind)
        if get_origin(kind) is Flags:
            (config,) = get_args(kind)
            own = parameters(config, without)
            made[parameter.name] = partial(Flags, config), [one.name for one in own]
            shown += own
        elif is_dataclass(kind):
            record: Any = kind
            own = list(inspect.signature(record, eval_str=True).parameters.values())
            made[parameter.name] = record, [one.name for one in own]
            shown += own
        else:
            shown.append(parameter)

    @wraps(command)
    def taken_apart(**values: Any) -> None:  # noqa: ANN401
        for name, (record, own) in made.items():
            values[name] = record(**{flag: values.pop(flag) for flag in own})
        command(**values)

    taken_apart.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return taken_apart


def ns(milliseconds: float, flag: str) -> int:
    """Milliseconds of a flag as nanoseconds. Raises ConfigError if they are no time that an SLO can be."""
    # The comparison is false for NaN too.
    most = SLO_NS_MAX // NS_PER_MS
    if not 0 < milliseconds <= most:
        raise ConfigError(f"{flag} is {milliseconds:g}, expected more than 0 and at most {most}")
    return round(milliseconds * NS_PER_MS)


def checked_days(days: float) -> float:
    """Check --days. Raises ConfigError if nothing can last for so long."""
    # The comparison is false for NaN.
    if not 0 < days < 100_000:
        raise ConfigError(f"--days is {days:g}, expected more than 0 and less than 100000")
    return days


def formatter(log_format: LogFormat = LogFormat.TEXT) -> logging.Formatter:
    """Write each message as one line, also if it quotes untrusted text; a traceback stays as it is.

    In JSON, a traceback is in the message's line too.
    """
    if log_format is LogFormat.JSON:
        return _Objects()
    return _Lines("%(asctime)s %(levelname)s %(name)s: %(message)s")


class _Lines(logging.Formatter):
    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record), chars_max=_LINE_CHARS_MAX)


class _Objects(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage()[:_LINE_CHARS_MAX],
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        # Escaping leaves nothing in it that a terminal or a line parser could interpret.
        return json.dumps(told)
