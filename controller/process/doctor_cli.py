"""`clockwright doctor`: says how fit a host is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clockwright.cli.flags import Json


def doctor(
    redis: Annotated[
        str,
        typer.Option(help="Check the Redis of --selection-store: redis://HOST:PORT/DB."),
    ] = "",
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of compiled models; by default in the user's cache folder."),
    ] = None,
    json: Json = False,
) -> None:
    """Report host settings that hurt latency or fail, and what to do. Changes nothing.

    Exits with 1 if a check fails; a setting that only costs latency is no failure.
    """
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from clockwright.cli.show import print_json
    from controller.process.doctor import Level, examine, look

    findings = examine(look(redis=redis, cache=cache_dir))
    if json:
        print_json([asdict(finding) | {"level": finding.level.value} for finding in findings])
    else:
        console = Console(highlight=False, markup=False)
        styles = {Level.OK: "green", Level.COSTS: "yellow", Level.FAILS: "bold red"}
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            words = [finding.found]
            if finding.level is not Level.OK:
                words += [f"costs: {finding.costs}", f"do: {finding.remedy}"]
            level = Text(finding.level.value, style=styles[finding.level])
            table.add_row(level, finding.name, "\n".join(words))
        console.print(table)
        counts = {level: sum(row.level is level for row in findings) for level in Level}
        console.print(
            f"{counts[Level.OK]} of {len(findings)} are well, {counts[Level.COSTS]} cost, "
            f"{counts[Level.FAILS]} fail"
        )
    if any(finding.level is Level.FAILS for finding in findings):
        raise typer.Exit(1)
