"""Reads what is wanted on a Ray cluster from TOML.

A whole file::

    models = "/shared/models"       # as the controllers' nodes see it; left out: models are added later
    namespace = "clockwright"       # Ray's, of all actors; another for each deployment of a cluster
    python = "/opt/cw/bin/python"   # of our environment, on every node; the one that runs `up` if left out

    [environment]                   # variables of all processes
    TZ = "UTC"

    [keeper]
    arguments = ["--key-file=/shared/operator.key", "--tls-ca=/shared/ca.pem"]  # of `clockwright workers`
    resources = { head = 0.01 }     # where it runs; every table may have `resources`, `labels` and `cpus`

    [controllers]
    number = 2                      # on nodes of their own; 1 if left out, which is started again where it is lost
    arguments = ["--lease=etcd://10.0.0.5:2379", "--host=0.0.0.0", "--keys=...", "--tls-cert=...", "--tls-key=..."]
    port = 8011                     # 0: any free one

    [fronts]
    number = 2                      # spread over the nodes; 1 if left out
    arguments = ["--host=0.0.0.0"]
    port = 8001

    [[kinds]]
    name = "a100"
    min = 1                         # the controller says how many it needs of what it has seen: one at least
    max = 8
    gpus = 1
    cpus = 4
    resources = { clockwright_a100 = 1 }                # this if left out without labels: one for each of a node's GPUs
    labels = { "ray.io/accelerator-type" = "A100" }
    arguments = ["--device=cuda", "--payload-host=..."] # of `clockwright worker`
    start_limit_s = 600             # a worker that has not joined by then is started again; `up` waits as long
    python = "/opt/cw-gpu/bin/python"
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from clockwright.errors import ConfigError

_Share = Annotated[float, Meta(ge=0)]
_Number = Annotated[int, Meta(ge=1)]
_Port = Annotated[int, Meta(ge=0, le=65535)]
_Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=40)]

# What we say ourselves: where a process listens and who it is.
_OURS = ("--controller", "--port", "--id", "--server", "--models", "--parent-pid")
_NOT_THOSE = {"--devices": "1: one worker per process, as each leaves by itself"}


class Placement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an actor needs of a node, and the arguments of its process."""

    arguments: tuple[str, ...] = ()
    cpus: _Share = 0.0
    resources: dict[str, _Share] = {}
    labels: dict[str, str] = {}


class Controllers(Placement, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table of controllers."""

    number: _Number = 1
    # Something has to be reserved on their nodes.
    cpus: Annotated[float, Meta(gt=0)] = 1.0
    # Fronts have the ports that clients know.
    port: _Port = 8011


class Fronts(Placement, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table of fronts."""

    number: _Number = 1
    cpus: _Share = 1.0
    port: _Port = 8001


class KindTable(Placement, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of `[[kinds]]`."""

    name: _Name
    min: _Number = 1
    max: _Number
    cpus: _Share = 1.0
    gpus: Annotated[float, Meta(ge=0, le=1)] = 0.0
    start_limit_s: Annotated[float, Meta(gt=0)] = 600.0
    python: str = ""


class KindsFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a file."""

    kinds: Annotated[tuple[KindTable, ...], Meta(min_length=1)]
    controllers: Controllers = Controllers()
    fronts: Fronts = Fronts()
    keeper: Placement = Placement()
    models: str = ""
    namespace: _Name = "clockwright"
    python: str = sys.executable
    environment: dict[str, str] = {}


def read_kinds(path: Path) -> KindsFile:
    """Read a file. Raises ConfigError if it cannot be read, or nothing can be placed by it; says where."""
    try:
        file = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), KindsFile)
        _check(file)
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return file


def _check(file: KindsFile) -> None:
    names = [kind.name for kind in file.kinds]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"kinds: found {', '.join(sorted(twice))} twice, expected unlike names")
    for kind in file.kinds:
        if kind.max < kind.min:
            raise ConfigError(f"kind {kind.name}: max is {kind.max}, expected {kind.min} or more")
        _check_arguments(f"kind {kind.name}", kind, _NOT_THOSE)
    for name, table in (("controllers", file.controllers), ("fronts", file.fronts)):
        _check_arguments(name, table)
    _check_arguments("keeper", file.keeper)
    given = {argument.partition("=")[0] for argument in file.controllers.arguments}
    if file.controllers.number > 1 and "--lease" not in given:
        raise ConfigError(
            f"controllers: found {file.controllers.number} without --lease in `arguments`, expected "
            "--lease=etcd://HOST:PORT, which decides who leads; or number = 1"
        )


def _check_arguments(where: str, table: Placement, refused: dict[str, str] | None = None) -> None:
    for argument in table.arguments:
        flag = argument.partition("=")[0]
        if flag in _OURS:
            raise ConfigError(
                f"{where}: found {flag} in `arguments`, expected other flags: it is set here"
            )
        if refused and flag in refused:
            raise ConfigError(f"{where}: found {flag} in `arguments`, expected {refused[flag]}")


def spelled(file: KindsFile) -> dict[str, Any]:
    """All that the keeper has to know, as JSON takes it."""
    controllers, fronts = file.controllers, file.fronts
    models = [f"--models={file.models}"] if file.models else []
    groups = {
        "controller": {
            **_room(controllers),
            "number": controllers.number,
            "command": [
                *_command(file.python, "controller"),
                f"--port={controllers.port}",
                *models,
                *controllers.arguments,
            ],
        },
        "front": {
            **_room(fronts),
            "number": fronts.number,
            "command": [
                *_command(file.python, "front"),
                f"--port={fronts.port}",
                *fronts.arguments,
            ],
        },
    }
    for kind in file.kinds:
        groups[f"worker-{kind.name}"] = {
            **_room(kind),
            "resources": _resources(kind),
            "gpus": kind.gpus,
            "command": [*_command(kind.python or file.python, "worker"), *kind.arguments],
        }
    return {
        "namespace": file.namespace,
        "environment": dict(file.environment),
        "keeper": {
            **_room(file.keeper),
            "command": [file.python, "-m", "clockwright.cli"],
            "arguments": list(file.keeper.arguments),
        },
        "groups": groups,
        "kinds": [
            {
                "name": kind.name,
                "least": kind.min,
                "most": kind.max,
                "start_limit_s": kind.start_limit_s,
            }
            for kind in file.kinds
        ],
    }


def _room(table: Placement) -> dict[str, Any]:
    return {
        "cpus": table.cpus,
        "gpus": 0.0,
        "resources": dict(table.resources),
        "labels": dict(table.labels),
    }


def _resources(kind: KindTable) -> dict[str, float]:
    """Ray's autoscaler of version 1 does not know labels, so a resource is what it is asked for where there is a choice."""
    if kind.resources or kind.labels:
        return dict(kind.resources)
    return {f"clockwright_{kind.name}": 1.0}


def _command(python: str, name: str) -> list[str]:
    return [python, "-m", "clockwright.cli", name]
