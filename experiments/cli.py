"""The commands of this floor: `clockwright simulate`, `clockwright replay` and `clockwright trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clockwright.cli.flags import SERVER, Json, Server, Telemetry
from clockwright.errors import ConfigError

trace = typer.Typer(no_args_is_help=True, help="What a run recorded, for other programs.")


def simulate(
    case: Annotated[Path, typer.Argument(help="TOML; see experiments/simulator/case_file.py.")],
    seconds: Annotated[
        float | None, typer.Option(help="Of virtual time, instead of the case's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the case's.", min=0)] = None,
    policy: Annotated[str | None, typer.Option(help="Who decides, instead of the case's.")] = None,
    telemetry: Telemetry = None,
    json: Json = False,
) -> None:
    """Run a described case on virtual time: the real scheduler, modelled devices."""
    from experiments.simulate import simulate as run_simulation

    run_simulation(
        case, seconds=seconds, seed=seed, policy=policy, telemetry_dir=telemetry, as_json=json
    )


def replay(
    case: Annotated[Path, typer.Argument(help="TOML, as for simulate; its models and clients.")],
    server: Server = SERVER,
    seconds: Annotated[float | None, typer.Option(help="Instead of the case's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the case's.", min=0)] = None,
    requests: Annotated[
        Path | None, typer.Option(help="CSV of every request, as the client saw it.")
    ] = None,
    json: Json = False,
) -> None:
    """Send a described workload to a live server; how late the client itself was is reported."""
    from experiments.replay import replay as run_replay

    run_replay(case, server=server, seconds=seconds, seed=seed, requests_csv=requests, as_json=json)


@trace.command()
def export(
    telemetry: Annotated[Path, typer.Argument(help="Folder of requests.csv and actions.csv.")],
    target: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    windows: Annotated[bool, typer.Option(help="Show when actions could begin, too.")] = True,
) -> None:
    """Write a run as a Chrome trace, which ui.perfetto.dev shows: lanes, predictions, requests."""
    from experiments.chrome_trace import export_chrome_trace

    try:
        exported = export_chrome_trace(telemetry, target, windows=windows)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from None
    print(
        f"{target}: {exported.num_actions} actions, {exported.num_requests} requests, "
        f"{exported.num_arrows} arrows; open it at https://ui.perfetto.dev"
    )
