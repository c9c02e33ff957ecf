"""The command `clockwright load`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from clockwright.cli.flags import Json, ServerFlags, ns, takes_flags
from clockwright.errors import ClockwrightError, ConfigError

# More than a process sends, and little enough that arrivals and clients fit into its memory.
_RATE_RPS_MAX = 1_000_000
_CLIENTS_MAX = 100_000
# Thirty years, in nanoseconds, fit into 64 bits.
_SECONDS_MAX = 1_000_000_000


@takes_flags
def load(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL[=WEIGHT]",
            help="Models, and the relative rate of each; by default all ready models, equally often.",
        ),
    ] = None,
    rate: Annotated[
        float,
        typer.Option(
            help="Open loop: requests per second, independent of their answers.",
            min=0,
            max=_RATE_RPS_MAX,
        ),
    ] = 0.0,
    arrivals: Annotated[
        str,
        typer.Option(help="Arrivals of an open loop: poisson, or uniform (evenly spaced)."),
    ] = "poisson",
    concurrency: Annotated[
        int,
        typer.Option(
            help="Closed loop: number of clients, each with one open request.",
            min=0,
            max=_CLIENTS_MAX,
        ),
    ] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV of arrivals (time_s, model_id; slo_ms, tenant), of Azure Functions 2019 or 2021, one that "
            "--requests wrote, or requests.csv of a server's or simulation's --telemetry."
        ),
    ] = None,
    scale: Annotated[
        float, typer.Option(help="Requests per arrival of the trace.", min=0, max=_RATE_RPS_MAX)
    ] = 1.0,
    begin_s: Annotated[
        float, typer.Option(help="Second of the trace to start at.", min=0, max=_SECONDS_MAX)
    ] = 0.0,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Seconds of load; by default 10, or the whole trace.", min=0, max=_SECONDS_MAX
        ),
    ] = None,
    warmup_s: Annotated[
        float,
        typer.Option(
            help="Seconds at the start whose requests are not counted.", min=0, max=_SECONDS_MAX
        ),
    ] = 0.0,
    slo_ms: Annotated[
        list[float] | None,
        typer.Option(
            help="SLO of the requests, by default 100; if repeated, each request gets one of them."
        ),
    ] = None,
    slo_as: Annotated[
        str,
        typer.Option(
            help="How the SLO is sent: slo_ms, timeout (Triton's, microseconds), none, or auto (by the "
            "server's name)."
        ),
    ] = "auto",
    decide_within_ms: Annotated[
        float | None,
        typer.Option(help="Each request is to be refused or promised by then (Clockwright only)."),
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(help="What each answer is worth; usually 1 (Clockwright only)."),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Tenant of the requests; if repeated, each request gets one of them."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows per request.", min=1)] = 1,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="NAME=FILE.npy: use its rows in turn; by default inputs are random."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=1,3,224,224: shape of an input; by default open dimensions after the first are 16."
        ),
    ] = None,
    zeros: Annotated[bool, typer.Option("--zeros", help="Zeros instead of random inputs.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and inputs.", min=0)] = 0,
    requests: Annotated[
        Path | None, typer.Option(help="CSV of every request, as the client saw it.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="PNG or SVG: outcomes over time, and latencies with SLOs.")
    ] = None,
    good: Annotated[
        float,
        typer.Option(
            help="Exit with 1 if a smaller share of the requests was answered in time.",
            min=0,
            max=1,
        ),
    ] = 0.0,
    csv: Annotated[
        bool,
        typer.Option("--csv", help="Print CSV: a row in total, per SLO and per model."),
    ] = False,
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Put a load on a server and report how much of it was answered in time.

    It works with any server of the Open Inference Protocol over gRPC. Requests are sent when they are due, and
    latency counts from then, so a stalled server cannot hide it. One process sends a few thousand requests per
    second at most. If this client was the bottleneck, the report says so, and how the server did meanwhile.
    """
    import contextlib
    import sys

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from clockwright.cli.inference import read_inputs, read_shapes
    from clockwright.cli.show import print_json
    from clockwright.units import NS_PER_S
    from traces.load import (
        OfferedLoad,
        read_weights,
        ready_models,
        report_of,
        slo_parameter,
        too_late,
    )
    from traces.load_show import draw, print_report, progress_line
    from traces.replay import AskingStyle, ReplayProgress, play
    from traces.request_inputs import RequestInputs

    if arrivals not in ("poisson", "uniform"):
        raise ConfigError(f"--arrivals is {arrivals!r}, expected poisson or uniform")
    if slo_as not in ("auto", "slo_ms", "timeout", "none"):
        raise ConfigError(f"--slo-as is {slo_as!r}, expected auto, slo_ms, timeout or none")
    if trace is None and bool(rate) == bool(concurrency):
        raise ConfigError(
            f"load: found {'both --rate and --concurrency' if rate else 'nothing'}, expected --rate 100 (an"
            " open loop: requests per second), --concurrency 4 (a closed loop: clients that wait for each answer) or"
            " --trace FILE (recorded arrivals)"
        )
    access = to.access()
    slos_ns = [ns(value, "--slo-ms") for value in slo_ms or [100.0]]
    style = AskingStyle(
        inputs=RequestInputs(
            rows=rows,
            random=not zeros,
            num_variants=1 if zeros else _VARIANTS,
            seed=seed,
            arrays=read_inputs(inputs or []),
            shapes=read_shapes(shape or []),
        ),
        slo_parameter=slo_parameter(to.server, access)
        if slo_as == "auto"
        else slo_as.replace("none", ""),
        decide_within_ns=0
        if decide_within_ms is None
        else ns(decide_within_ms, "--decide-within-ms"),
        weight=weight,
    )

    def all_ready() -> list[str]:
        return ready_models(to.server, access)

    if trace is None:
        workload = OfferedLoad(
            weights=read_weights(models or all_ready()),
            rate_rps=rate,
            arrivals="uniform" if arrivals == "uniform" else "poisson",
            concurrency=concurrency,
            slos_ns=slos_ns,
            tenants=tenant or [],
            duration_ns=round(((10.0 if seconds is None else seconds) + warmup_s) * NS_PER_S),
            seed=seed,
        ).workload()
    else:
        if rate or concurrency or tenant or len(slos_ns) > 1:
            raise ConfigError(
                "--trace: expected no --rate, --concurrency, --tenant, and one --slo-ms"
            )
        from traces.arrivals_file import read_workload

        workload = read_workload(
            trace, models or [], slo_ns=slos_ns[0], scale=scale, seed=seed, ask=all_ready
        )
        begin_ns = round(begin_s * NS_PER_S)
        length_ns = workload.end_ns if seconds is None else round((seconds + warmup_s) * NS_PER_S)
        workload = workload.sliced(
            begin_ns, max(begin_ns, min(begin_ns + length_ns, workload.end_ns))
        )
    counted_s = workload.end_ns / NS_PER_S - warmup_s
    if counted_s <= 0:
        raise ConfigError(f"there are {counted_s:g} s after the warm-up, expected more than 0")
    with contextlib.ExitStack() as stack:
        # Progress goes to standard error; standard output may be a file.
        live = stack.enter_context(
            Live(console=Console(file=sys.stderr), auto_refresh=False, transient=True)
        )
        before: list[ReplayProgress] = []

        def on_progress(progress: ReplayProgress) -> None:
            live.update(Text(progress_line(progress, before[-1] if before else None)), refresh=True)
            before[:] = [progress]

        record = play(
            to.server,
            workload,
            access=access,
            style=style,
            requests_csv=requests,
            on_progress=on_progress,
        )
    report = report_of(record, address=to.server, begin_s=warmup_s, seconds=counted_s)
    record = record.where(record.due_ns >= warmup_s * NS_PER_S)
    if picture is not None:
        draw(report, record, picture)
    if json:
        print_json(report.numbers())
    elif csv:
        _print_csv(report.rows())
    else:
        print_report(report, record, too_late(requests, report))
    if report.total.good_request_fraction < good:
        raise ClockwrightError(
            f"{report.total.good_request_fraction:.4f} of the requests were answered in time, expected {good:g}"
        )


# Enough different requests to defeat a cache of answers, and few enough for the client's memory.
_VARIANTS = 16


def _print_csv(rows: Sequence[dict[str, object]]) -> None:
    import csv
    import sys

    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
