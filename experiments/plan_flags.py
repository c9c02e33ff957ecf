"""Flags of `clockwright plan`, apart from what it imports when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a plan is wanted for."""

    load: Annotated[
        Path,
        typer.Argument(
            help="Case in TOML, as for simulate; or what a server was asked: the folder of its --telemetry, a CSV of "
            "arrivals (time_s, model_id; slo_ms, tenant), or a file of Azure Functions 2019 or 2021."
        ),
    ]
    target: Annotated[
        float,
        typer.Option(help="Percent of the requests that are to be answered inside their SLO."),
    ] = 99.9
    have: Annotated[
        list[str] | None,
        typer.Option(
            help="KIND=N: workers that are there anyway; the others are planned in addition to them."
        ),
    ] = None
    scale: Annotated[
        float,
        typer.Option(help="Requests per request of the load: 1.5 plans for half as much more."),
    ] = 1.0
    stretch_s: Annotated[
        float | None,
        typer.Option(
            help="Plan for the busiest so many seconds of the load; by default all of it, or, if it is long, as much "
            "as has 20,000 requests.",
            min=0.1,
        ),
    ] = None
    warmup_s: Annotated[
        float | None,
        typer.Option(help="Seconds at the start that are not counted; by default a tenth.", min=0),
    ] = None
    seed: Annotated[int | None, typer.Option(help="First seed, instead of the case's.", min=0)] = (
        None
    )
    most_runs: Annotated[int, typer.Option(help="The most seeds per size.", min=5)] = 16
    most_workers: Annotated[int, typer.Option(help="The most workers of a kind.", min=1)] = 64
    # What a case says itself.
    profile: Annotated[
        str,
        typer.Option(
            help="What the models of a server cost: table1, a profile's path, or that of what `models list --json` "
            "printed. Not for a case."
        ),
    ] = "table1"
    pages: Annotated[
        int, typer.Option(help="Pages of each worker's weights cache. Not for a case.", min=1)
    ] = 1376
    slo_ms: Annotated[
        float, typer.Option(help="SLO of recorded requests that have none. Not for a case.")
    ] = 100.0
    hours: Annotated[
        float | None,
        typer.Option(help="The last so many hours of what was recorded. Not for a case."),
    ] = None
