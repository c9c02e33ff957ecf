"""Sends the workload of a described case to a live server and prints what the client saw."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clockwright.channel import Access
from clockwright.units import NS_PER_S, format_ns
from experiments.simulator.case import Case
from traces.replay import ReplayProgress, ReplayReport
from traces.replay import replay as run_replay


def replay(
    case: Case,
    *,
    server: str,
    access: Access | None = None,
    requests_csv: Path | None,
    as_json: bool,
) -> None:
    """Drive a server with the clients of a case; most other parts of the case are the simulator's.

    Raises:
        ConfigError: no server answers, or the file cannot be written.
        UnknownModelError: the server lacks one of the case's models.
    """
    with contextlib.ExitStack() as stack:
        # Progress is for whoever watches; standard output may be a file.
        live = stack.enter_context(
            Live(console=Console(file=sys.stderr), refresh_per_second=4, transient=True)
        )

        def on_progress(progress: ReplayProgress) -> None:
            live.update(Text(progress_line(progress)))

        report = run_replay(
            server,
            case.workload,
            access=access,
            refusal_pause_ns=case.refusal_pause_ns,
            requests_csv=requests_csv,
            on_progress=on_progress,
        )
    if as_json:
        print(json.dumps({**asdict(report), "kept_up": report.kept_up}, indent=1))
    else:
        _print(report)


def progress_line(progress: ReplayProgress) -> str:
    """Say how far a replay is, and whether the client keeps up."""
    seconds = max(progress.elapsed_ns, 1) / NS_PER_S
    return (
        f"{seconds:.0f} s: {progress.num_sent:,} sent, {progress.num_done:,} done, goodput "
        f"{progress.num_in_time / seconds:,.1f} r/s so far, sent at most "
        f"{format_ns(progress.lateness_ns_max)} late"
    )


def _print(report: ReplayReport) -> None:
    table = Table(show_header=False)
    for key, value in asdict(report).items():
        if key == "begin_ns":
            continue  # no person's clock
        if isinstance(value, dict):
            text = ", ".join(f"{name}: {count:,}" for name, count in sorted(value.items()))
        elif "_ns" in key:
            text = format_ns(value)
        else:
            text = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
        table.add_row(key.replace("_ns", "").replace("_", " "), text)
    console = Console(highlight=False, markup=False)
    console.print(table)
    if not report.kept_up:
        console.print(
            f"the client did not keep up: {report.num_late:,} of {report.num_open:,} open-loop requests "
            "left late; what was measured is in part the client"
        )
