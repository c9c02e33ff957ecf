"""Runs a described case on virtual time and prints its outcome."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clockwright.units import NS_PER_MS, NS_PER_S, format_ns
from controller.telemetry.files import TelemetryFiles
from controller.telemetry.tables import Telemetry
from experiments.bounds.simulated import bound_of_case
from experiments.simulator import Progress, Run, bottleneck, run
from experiments.simulator.case import Case

# Enough buckets to tell the end of the arrivals from the time after; few enough for a run of any length.
_BUCKETS = 200

# With more tenants than this, none is counted apart: each has buckets of its own.
_MOST_TENANTS = 100

# Short runs end before their progress is of interest.
_QUIET_S = 2.0
# Time between two updates of the progress line, which counts all buckets.
_UPDATE_S = 0.5


def simulate(case: Case, *, telemetry_dir: Path | None, as_json: bool) -> None:
    """Run a case.

    Args:
        case: what to run.
        telemetry_dir: folder for requests.csv and actions.csv.
        as_json: print figures for programs.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        telemetry: Telemetry | None = None
        files: TelemetryFiles | None = None
        if telemetry_dir is not None:
            # Virtual time begins in 1970, so that equal cases leave equal rows. Nothing is deleted.
            files = stack.enter_context(
                TelemetryFiles(telemetry_dir, file_bytes=None, wall_zero_ns=lambda: 0)
            )
            # The rows are in the files, so memory keeps none.
            telemetry = Telemetry(capacity=0)
            telemetry.write_to(files.requests.add, files.actions.add)
        # Progress is for people; standard output may be a file.
        console = Console(file=sys.stderr)
        live = stack.enter_context(Live(console=console, refresh_per_second=4, transient=True))
        update_s = _QUIET_S

        def on_progress(progress: Progress) -> None:
            nonlocal update_s
            while files is not None and files.write_slice(4096):
                files.flush()
            if progress.wall_s >= update_s:
                update_s = progress.wall_s + _UPDATE_S
                live.update(Text(progress_line(progress, case.duration_ns)))

        tenants = [name for name in case.workload.tenants if name]
        done = run(
            case,
            groups={name: name for name in tenants} if len(tenants) <= _MOST_TENANTS else None,
            # Answers come for milliseconds after the last request, however soon that was.
            bucket_ns=max(NS_PER_MS, case.duration_ns // _BUCKETS),
            telemetry=telemetry,
            on_progress=on_progress,
            progress_ns=NS_PER_S // 10,
        )
    found = {**figures(done), **bound_figures(done)}
    by_tenant = tenant_figures(done)
    if as_json:
        print(json.dumps({**found, "tenants": by_tenant}, indent=1))
        return
    _print(found, by_tenant)


def progress_line(progress: Progress, duration_ns: int) -> str:
    """Say how far a run is: simulated time, speed against real time, goodput so far."""
    simulated_s = progress.simulated_ns / NS_PER_S
    total = progress.summary.total()
    return (
        f"simulated {format_ns(progress.simulated_ns)} of {format_ns(duration_ns)}, "
        f"{simulated_s / progress.wall_s:.1f} times real time, "
        f"{total.arrived / progress.wall_s:,.0f} requests per wall second, "
        f"goodput {total.answered / simulated_s:,.1f} r/s so far"
    )


def figures(done: Run) -> dict[str, object]:
    """Figures of a run: rates while requests arrived, counts up to the last response."""
    summary, total = done.summary, done.summary.total()
    duration_ns = done.case.duration_ns
    seconds = duration_ns / NS_PER_S
    inside = summary.total(0, duration_ns)
    utilisations = done.utilisations()
    busiest, busy = bottleneck(utilisations)
    return {
        "policy": done.case.scheduler.policy,
        "seed": done.case.seed,
        "simulated_s": seconds,
        "requests": total.arrived,
        "offered_rps": total.arrived / seconds,
        "goodput_rps": inside.answered / seconds,
        "answered": total.answered,
        "refused": dict(sorted(total.refused.items())),
        "unanswered": done.num_unanswered,
        "cold_answered": total.cold_answered,
        "latency_p50_ms": total.latency_ns(50) / NS_PER_MS,
        "latency_p99_ms": total.latency_ns(99) / NS_PER_MS,
        "latency_p999_ms": total.latency_ns(99.9) / NS_PER_MS,
        "latency_max_ms": total.latency_ns(100) / NS_PER_MS,
        "refusal_p50_ms": total.refusal_ns(50) / NS_PER_MS,
        "refusal_p99_ms": total.refusal_ns(99) / NS_PER_MS,
        "batches": {str(size): count for size, count in sorted(total.batches.items())},
        "mean_batch_size": total.mean_batch_size,
        "loads": total.loads,
        "action_errors": dict(sorted(total.action_errors.items())),
        "front_utilisation": utilisations["front"],
        "controller_utilisation": utilisations["controller"],
        "link_utilisation": utilisations["link"],
        "gpu_utilisation": utilisations["EXEC"],
        "pcie_utilisation": utilisations["PCIe"],
        "bottleneck": busiest,
        "bottleneck_utilisation": busy,
        "wall_s": done.wall_s,
        "requests_per_wall_s": done.requests_per_wall_s,
    }


def tenant_figures(done: Run) -> dict[str, dict[str, float]]:
    """What happened to each tenant's requests; empty if they are of no tenant, or of too many."""
    seconds = done.case.duration_ns / NS_PER_S
    return {
        name: {
            "requests": (total := summary.total()).arrived,
            "answered": total.answered,
            "goodput_rps": summary.total(0, done.case.duration_ns).answered / seconds,
            "refused": total.refused.total(),
            "latency_p50_ms": total.latency_ns(50) / NS_PER_MS,
            "latency_p99_ms": total.latency_ns(99) / NS_PER_MS,
        }
        for name, summary in done.groups.items()
    }


def bound_figures(done: Run) -> dict[str, object]:
    """The most that any policy could have answered in time, and what part of it this one did.

    Returns:
        `bound` and `bound_share` are None where no bound is known; `bound_by` is what it counts, or why not.
    """
    bound = bound_of_case(done.case)
    answered = done.summary.total().answered
    return {
        "bound": bound.answers,
        "bound_share": answered / bound.answers if bound.answers else None,
        "bound_by": bound.words,
    }


def _print(found: Mapping[str, object], by_tenant: Mapping[str, Mapping[str, float]]) -> None:
    console = Console(highlight=False, markup=False)
    table = Table(show_header=False)
    for key, value in found.items():
        if isinstance(value, dict):
            text = ", ".join(f"{name}: {count:,}" for name, count in value.items()) or "none"
        else:
            text = "not known" if value is None else _number(value)
        table.add_row(key.replace("_", " "), text)
    console.print(table)
    if by_tenant:
        columns = (key.replace("_", " ") for key in next(iter(by_tenant.values())))
        table = Table("tenant", *columns)
        for name, row in by_tenant.items():
            table.add_row(name, *map(_number, row.values()))
        console.print(table)


def _number(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else f"{value}"
