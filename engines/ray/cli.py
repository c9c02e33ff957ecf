"""The command `clockwright up --ray`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from clockwright.errors import ConfigError


def up(
    *,
    ray: Annotated[str, typer.Option(metavar="HOST:PORT|auto", help="Address of the Ray cluster.")],
    kinds: Annotated[
        Path | None,
        typer.Option(help="TOML file: kinds of workers, fronts, controllers. See docs/beyond.md."),
    ] = None,
    ray_python: Annotated[
        Path | None,
        typer.Option(
            envvar="CLOCKWRIGHT_RAY_PYTHON",
            help="Python of an environment with Ray; by default that of the command `ray`.",
        ),
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop", help="End everything in order: fronts, workers, controllers.")
    ] = False,
) -> None:
    """Serve models on a Ray cluster: returns when all is ready, and Ray keeps it running.

    With another file it changes what is there: a process that runs keeps its settings until it starts again.
    """
    from engines.ray.environment import check_cluster, inside
    from engines.ray.environment import ray_python as found_python
    from engines.ray.kinds import read_kinds, spelled

    if kinds is None and not stop:
        raise ConfigError("found no --kinds, expected a TOML file of what to serve on")
    wish = None if kinds is None else spelled(read_kinds(kinds))
    order = {"do": "stop" if stop else "up", "address": ray, "wish": wish}
    order["namespace"] = "clockwright" if wish is None else wish["namespace"]
    python = found_python(ray_python)
    check_cluster(ray)
    with inside(python, "launch", shown=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.close()
        code = process.wait()
    raise typer.Exit(code)
