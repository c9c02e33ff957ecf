"""Flags that commands of several floors have, and how a record of flags is spelled on a command line."""

from __future__ import annotations

import enum
import inspect
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import override

from clockwright.errors import ConfigError
from clockwright.foreign import printable
from clockwright.units import NS_PER_MS

if TYPE_CHECKING:
    from clockwright.channel import Access
    from clockwright.client import Client
    from clockwright.operator import Operator

#: Where commands look for a server that is not named.
SERVER = "127.0.0.1:8001"

_LINE_CHARS_MAX = 10_000

Server = Annotated[str, typer.Option(help="HOST:PORT of the controller.")]
Controllers = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT[,HOST:PORT...]",
        help="The controller, or several of which one leads (`clockwright controller --lease`).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what happens.")]


class LogFormat(enum.StrEnum):
    """How messages are written."""

    TEXT = "text"
    JSON = "json"


LogFormats = Annotated[
    LogFormat,
    typer.Option(
        "--log-format", help="How messages are written: lines for people, or an object a line."
    ),
]
Telemetry = Annotated[
    Path | None,
    typer.Option(help="Folder for requests.csv and actions.csv, which are appended to."),
]


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Which server a command asks, and what it shows there."""

    server: Annotated[
        str, typer.Option(envvar="CLOCKWRIGHT_SERVER", help="HOST:PORT of the controller.")
    ] = SERVER
    key_file: Annotated[
        Path | None,
        typer.Option(envvar="CLOCKWRIGHT_KEY_FILE", help="File with a key (`keys add`) or token."),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="CLOCKWRIGHT_TLS_CA",
            help="PEM file: TLS to a server with a certificate of this authority.",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(envvar="CLOCKWRIGHT_TLS_CERT", help="PEM file: a certificate to show."),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(envvar="CLOCKWRIGHT_TLS_KEY", help="PEM file: its key.")
    ] = None

    def __post_init__(self) -> None:
        # gRPC would take 443 for the port.
        if ":" not in self.server:
            raise ConfigError(f"--server is {self.server!r}, expected HOST:PORT, such as {SERVER}")

    def access(self) -> Access:
        """What is shown, and TLS.

        Raises:
            ConfigError: a file cannot be read, or one is missing.
        """
        from clockwright.channel import Access, read_key

        return Access(
            key="" if self.key_file is None else read_key(self.key_file),
            ca=self.tls_ca,
            certificate=self.tls_cert,
            certificate_key=self.tls_key,
        )

    def operator(self) -> Operator:
        """Connect as an operator; as `access`."""
        # With gRPC, which takes longer to import than help takes to print.
        from clockwright.operator import Operator

        return Operator(self.server, self.access())

    def client(self) -> Client:
        """Connect as a client; as `access`."""
        from clockwright.client import Client

        return Client(self.server, self.access())


@dataclass(frozen=True, kw_only=True)
class JoinFlags:
    """What a worker shows the controller that it joins."""

    worker_token_file: Annotated[
        Path | None, typer.Option(help="File with the token or key that lets workers join.")
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file: TLS to a controller with a certificate of this authority."),
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file: the worker's certificate.")] = (
        None
    )
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None

    def access(self) -> Access:
        """What is shown, and TLS: the files are read anew for each attempt to join.

        Raises:
            ConfigError: a file cannot be read, or one is missing.
        """
        from clockwright.channel import Access

        return Access(
            key_file=self.worker_token_file,
            ca=self.tls_ca,
            certificate=self.tls_cert,
            certificate_key=self.tls_key,
        )


def _pages(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"found {text!r}, expected auto or a number of pages from 1 on"
        ) from None


@dataclass(frozen=True, kw_only=True)
class WorkerFlags:
    """How a worker is to be: flags of `worker`, and of whoever starts workers."""

    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda:N, cuda (a worker process for each GPU), modelled:PROFILE, which only spends time, or container:FOLDER, which "
            "runs the code of the model in that folder."
        ),
    ] = "cpu"
    pages: Annotated[
        int | None,
        typer.Option(
            metavar="N|auto",
            parser=_pages,
            help="Weights cache, in pages of 16 MiB; auto or unset: on a GPU all that its free memory allows, else 64.",
        ),
    ] = None
    arena_mib: Annotated[int, typer.Option(help="Largest model's weights.")] = 512
    precision: Annotated[
        str, typer.Option(help="What models compute in on a GPU: float32, tf32 or float16.")
    ] = "float32"
    engine: Annotated[
        str,
        typer.Option(help="What runs models on a GPU: auto (the faster), torch or onnxruntime."),
    ] = "auto"
    workspace_mib: Annotated[
        int | None,
        typer.Option(
            help="On a GPU: memory that kernels work in; by default a sixteenth of the card, 2048 at least."
        ),
    ] = None
    cudnn_search: Annotated[
        bool,
        typer.Option(
            help="On a GPU: have cuDNN try its algorithms for each model, at each start anew; otherwise it guesses."
        ),
    ] = False
    host_mib: Annotated[
        int,
        typer.Option(
            help="On a GPU: the host's memory for the weights of all models; one copy serves all GPUs of --device cuda."
        ),
    ] = 4096
    host_file: Annotated[Path | None, typer.Option(hidden=True)] = None
    cache_dir: Annotated[
        Path | None, typer.Option(help="Compiled models; by default in the user's cache folder.")
    ] = None
    compile_memory_mib: Annotated[
        int | None,
        typer.Option(
            help="Memory for compiling a model; by default six times the arena, and 2048 for activations."
        ),
    ] = None
    compile_cpu_s: Annotated[
        float, typer.Option(help="Processor time for compiling a model, in seconds.")
    ] = 300
    threads: Annotated[
        int | None,
        typer.Option(
            help="On the processor: the most threads of a model, each as many as make it faster; by "
            "default one per core of --cores. On a GPU: threads that check models while compiling; by default "
            "this worker's share of the cores, at most 8."
        ),
    ] = None
    payload_host: Annotated[
        str,
        typer.Option(
            help="Address where fronts that share no memory with it bring inputs; by default the one by "
            "which it reaches the controller."
        ),
    ] = ""
    payload_port: Annotated[
        int | None,
        typer.Option(help="Its port; each further GPU takes the next one; by default any."),
    ] = None
    cores: Annotated[
        str | None,
        typer.Option(help="Cores of its own to compute on, such as 2-9,12; by default any."),
    ] = None
    verbose: Verbose = False
    log_format: LogFormats = LogFormat.TEXT


def spell(flags: Any) -> list[str]:  # noqa: ANN401  any record of flags
    """Spell a record of flags on a command line."""
    values = {field.name.replace("_", "-"): getattr(flags, field.name) for field in fields(flags)}
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, found in values.items()
        for value in (found if isinstance(found, list) else [found])
        if value is not None and value is not False and value != ""
    ]


def takes_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each field of its parameters that are dataclasses.

    Typer knows no such records: it is shown a function that takes the fields one by one.
    """
    records: dict[str, Any] = {}
    shown: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            record: Any = parameter.annotation
            records[parameter.name] = record
            shown += inspect.signature(record, eval_str=True).parameters.values()
        else:
            shown.append(parameter)

    @wraps(command)
    def taken_apart(**values: Any) -> None:  # noqa: ANN401
        for name, record in records.items():
            values[name] = record(
                **{field.name: values.pop(field.name) for field in fields(record)}
            )
        command(**values)

    taken_apart.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return taken_apart


def ns(milliseconds: float, flag: str) -> int:
    """Milliseconds of a flag as nanoseconds.

    Raises:
        ConfigError: they are no positive time.
    """
    # The comparison is false for NaN too.
    if not 0 < milliseconds < 1e9:
        raise ConfigError(f"{flag} is {milliseconds:g}, expected more than 0")
    return round(milliseconds * NS_PER_MS)


def log(
    verbose: bool, level: int = logging.WARNING, log_format: LogFormat = LogFormat.TEXT
) -> None:
    """Log to standard error: from `level` up, or what happens."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=logging.INFO if verbose else level, handlers=[handler])


def formatter(log_format: LogFormat = LogFormat.TEXT) -> logging.Formatter:
    """Make one line of each message, whatever strangers' words it quotes; a traceback stays as it is.

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
        # Escapes leave nothing in it that a terminal or a parser of lines could take for its own.
        return json.dumps(told)
