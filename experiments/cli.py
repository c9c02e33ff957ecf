"""The commands of this floor: `clockwright simulate`, `clockwright plan` and `clockwright trace`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from clockwright.cli.flags import Json, takes_flags
from clockwright.errors import ConfigError
from experiments.plan_flags import Wanted

trace = typer.Typer(no_args_is_help=True, help="What a run recorded, for other programs.")


def simulate(
    case: Annotated[
        Path, typer.Argument(help="Case in TOML; see experiments/simulator/case_file.py.")
    ],
    seconds: Annotated[
        float | None, typer.Option(help="Seconds of virtual time, instead of the case's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, instead of the case's.", min=0)] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy that decides, instead of the case's.")
    ] = None,
    telemetry: Annotated[
        Path | None,
        typer.Option(
            help="Folder for requests.csv and actions.csv; existing files are appended to."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run a case on virtual time, with the real scheduler and modelled devices."""
    from controller.process.schedulers import kind_of
    from experiments.simulate import simulate as run_simulation
    from experiments.simulator.case_file import read_case

    described = read_case(case, seconds=seconds, seed=seed)
    if policy is not None:
        kind_of(policy)
        described = replace(described, scheduler=replace(described.scheduler, policy=policy))
    run_simulation(described, telemetry_dir=telemetry, as_json=json)


@takes_flags
def plan(
    *,
    wanted: Wanted,
    slo_costs: Annotated[
        bool, typer.Option(help="Find the sizes at half and at double of each SLO, too.")
    ] = True,
    picture: Annotated[
        Path | None, typer.Option(help="PNG: what each size answers in time, and what SLOs cost.")
    ] = None,
    json: Json = False,
) -> None:
    """Find how many workers of which kind a load needs, and what limits.

    Simulates the load with the real scheduler on modelled workers, for several seeds, and searches the cheapest size that
    answers the target's share of the requests inside their SLO. Kinds of workers and their prices are those of the
    case (`cluster.kinds`); their numbers in it do not matter.
    """
    from experiments.plan import plan as run_plan

    run_plan(wanted, slo_costs=slo_costs, picture=picture, as_json=json)


@trace.command()
def export(
    telemetry: Annotated[Path, typer.Argument(help="Folder of requests.csv and actions.csv.")],
    target: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    windows: Annotated[bool, typer.Option(help="Show when actions could begin, too.")] = True,
) -> None:
    """Write a run as a trace for ui.perfetto.dev: lanes, predictions, requests."""
    from experiments.telemetry.chrome_trace import export_chrome_trace

    try:
        exported = export_chrome_trace(telemetry, target, windows=windows)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from None
    print(
        f"{target}: {exported.num_actions} actions, {exported.num_requests} requests, "
        f"{exported.num_arrows} arrows; open it at https://ui.perfetto.dev"
    )
