"""`clockwright cells` and `clockwright picker`: several controllers of one directory."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clockwright.cli.flags import Json, LogFlags, ServerFlags, ns, takes_flags
from clockwright.cli.show import print_json, wide_console
from clockwright.errors import ConfigError, StoreError, UnknownModelError
from clockwright.process import outlive_hangups
from clockwright.settings import Flags
from controller.process.config import ServingConfig

if TYPE_CHECKING:
    from controller.front.cells.rows import Entry

cells = typer.Typer(
    no_args_is_help=True, help="Several controllers of one directory: list them, move models."
)

_Cells = Annotated[
    str,
    typer.Option(
        metavar="file:FOLDER|etcd://HOST:PORT",
        help="The directory (`clockwright controller --cells`).",
    ),
]

# Readers hear of a change within three tenths of a second. One that cannot read the directory for a second has no rows.
_FLIP_S = 1.5
# A controller tells of a new model within a tenth.
_LISTED_LIMIT_S = 30.0
_PAUSE_S = 0.1
# A controller that is there writes several rows in this time.
_MOMENT_S = 0.5


@cells.command("list")
def list_cells(cells: _Cells, json: Json = False) -> None:
    """List the controllers of a directory, and in how many ms each could begin a request of each SLO."""
    import msgspec
    from rich import box
    from rich.table import Table

    from controller.front.cells.rows import SLO_CLASSES_NS, CellModels, CellRow

    entries = _read(cells, again=True)
    rows = sorted([e for e in entries if isinstance(e, CellRow)], key=lambda row: row.address)
    if json:
        print_json([msgspec.to_builtins(entry) for entry in entries])
        return
    if not rows:
        print(f"no controller tells of itself in {cells}")
        return
    models = {e.address: e.models for e in entries if isinstance(e, CellModels)}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("controller", "takes", "workers", "free pages", "models", "refused"):
        table.add_column(title, no_wrap=True)
    for class_ns in SLO_CLASSES_NS:
        table.add_column(f"{class_ns // 1_000_000} ms", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.address,
            "requests" if row.open else "none",
            str(row.num_workers),
            str(row.free_pages),
            str(len(models.get(row.address, ()))),
            f"{100 * row.refused:.1f} %",
            *[f"{wait_us / 1000:.1f}" for wait_us in row.waits_us[: len(SLO_CLASSES_NS)]],
        )
    wide_console().print(table)


@cells.command("move")
@takes_flags
def move_model(
    folder: Annotated[Path, typer.Argument(help="The model's folder: VERSION/model.onnx in it.")],
    cells: _Cells,
    to: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="The controller that gets the model, as `list` names it."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="The model's name; by default the folder's.")
    ] = None,
    *,
    at: ServerFlags,
) -> None:
    """Move a model from the controller at --server to another one while it is served.

    It is added there, then its requests go there, then it is removed here. Credentials hold for both.
    """
    from dataclasses import replace

    from controller.front.cells.rows import Move, encode, key_of
    from controller.process.lease.places import open_directory

    name = name or folder.resolve().name
    if to == at.server:
        raise ConfigError(f"--to is {to!r} and so is --server, expected another controller")
    there = replace(at, server=to)
    with there.operator() as operator:
        served = {model.model_id for model in operator.models()}
        if name not in served:
            operator.add_model(folder, name=name, replace=False)
    store = open_directory(cells)
    try:
        _wait_until_listed(cells, to, name)
        move = Move(model=name, to=to)
        store.put(key_of(move), encode(move))
        time.sleep(_FLIP_S)
        # It was removed if the command is given again because it was interrupted.
        with at.operator() as operator, suppress(UnknownModelError):
            operator.remove_model(name)
        store.remove(key_of(move))
    finally:
        store.close()
    print(f"moved {name} to {to}")


def _wait_until_listed(cells: str, address: str, model: str) -> None:
    from controller.front.cells.rows import CellModels

    limit_s = time.monotonic() + _LISTED_LIMIT_S
    while True:
        for entry in _read(cells):
            if isinstance(entry, CellModels) and entry.address == address and model in entry.models:
                return
        if time.monotonic() > limit_s:
            raise ConfigError(
                f"{cells} does not list model {model} at {address} within {_LISTED_LIMIT_S:g} s, expected the address "
                "as `clockwright cells list` names it"
            )
        time.sleep(_PAUSE_S)


def _read(cells: str, *, again: bool = False) -> list[Entry]:
    """Read a directory once, or again after a moment, so that rows of controllers that are gone are left out.

    Raises ConfigError if it cannot be read.
    """
    from controller.front.cells.rows import decoded
    from controller.process.lease.places import open_directory

    store = open_directory(cells)
    try:
        found, gone = store.changes()
        if again:
            time.sleep(_MOMENT_S)
            later, gone = store.changes()
            rows = {key for key in found if key.startswith("row/")} - later.keys()
            found = {k: v for k, v in {**found, **later}.items() if k not in rows | gone}
        entries, faults = decoded(found)
    except StoreError as error:
        raise ConfigError(str(error)) from error
    finally:
        store.close()
    for fault in faults:
        typer.echo(fault, err=True)
    return list(entries)


# What only requests need that pass through the process.
_NOT_OF_PICKERS = (
    *("allow_client_shm", "memory_limit_mib", "shared_memory_mib", "trace_share", "trace_to"),
    *("worker_ca", "worker_token_file", "port"),
)


@takes_flags
def picker(
    *,
    cells: _Cells,
    port: Annotated[int, typer.Option(help="Port for gateways; 0: any free port.")] = 9002,
    slo_ms: Annotated[float, typer.Option(help="SLO of calls that state none.")] = 100,
    flags: Annotated[Flags[ServingConfig], _NOT_OF_PICKERS],
    logs: LogFlags,
) -> None:
    """Choose the controller of each call that a gateway asks about (Envoy's ext_proc, as an endpoint picker)."""
    outlive_hangups()
    from controller.process.picker.picker import run

    logs.apply()
    config = flags.saying(port=port).make(http_port=None)
    raise typer.Exit(run(config, cells, default_slo_ns=ns(slo_ms, "--slo-ms")))
