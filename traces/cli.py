"""The command of this floor: `clockwright load`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clockwright.cli.flags import Json, ServerFlags, ns, takes_flags
from clockwright.errors import ClockwrightError, ConfigError

if TYPE_CHECKING:
    from traces.arrivals import Workload


@takes_flags
def load(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL[=WEIGHT]",
            help="Models to ask, and how often each; by default all that are ready, equally often.",
        ),
    ] = None,
    rate: Annotated[
        float, typer.Option(help="Open loop: requests per second, whatever becomes of them.", min=0)
    ] = 0.0,
    arrivals: Annotated[
        str,
        typer.Option(
            help="How requests of an open loop arrive: poisson, or uniform (evenly apart)."
        ),
    ] = "poisson",
    concurrency: Annotated[
        int, typer.Option(help="Closed loop: clients, each of which waits for its answer.", min=0)
    ] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV of arrivals (time_s, model_id; slo_ms, tenant), of Azure Functions 2019 or 2021, or one that "
            "--requests wrote."
        ),
    ] = None,
    scale: Annotated[float, typer.Option(help="Requests per arrival of the trace.", min=0)] = 1.0,
    begin_s: Annotated[float, typer.Option(help="Second of the trace to begin at.", min=0)] = 0.0,
    seconds: Annotated[
        float | None,
        typer.Option(help="How many seconds to ask; by default 10, or the whole trace."),
    ] = None,
    warmup_s: Annotated[
        float, typer.Option(help="Requests of the first seconds are sent and not counted.", min=0)
    ] = 0.0,
    slo_ms: Annotated[
        list[float] | None,
        typer.Option(
            help="SLO of the requests, by default 100; several times: each request has one of them."
        ),
    ] = None,
    slo_as: Annotated[
        str,
        typer.Option(
            help="How the server is told the SLO: slo_ms, timeout (Triton's, microseconds), none, or auto, by its name."
        ),
    ] = "auto",
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Tenant of the requests; several times: each request has one of them."),
    ] = None,
    rows: Annotated[int, typer.Option(help="How many rows each request has.", min=1)] = 1,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="NAME=FILE.npy: take rows from it in turn; by default random ones."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=1,3,224,224: shape of an input with open dimensions besides the first."
        ),
    ] = None,
    zeros: Annotated[bool, typer.Option("--zeros", help="Zeros instead of random inputs.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and inputs.", min=0)] = 0,
    requests: Annotated[
        Path | None, typer.Option(help="CSV of every request, as the client saw it.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="PNG or SVG: outcomes over time, latencies beside SLOs.")
    ] = None,
    good: Annotated[
        float,
        typer.Option(
            help="Fail (exit 1) if a smaller share of the requests was answered in time.",
            min=0,
            max=1,
        ),
    ] = 0.0,
    csv: Annotated[
        bool,
        typer.Option(
            "--csv", help="Print CSV, for spreadsheets: a row for all, per SLO and per model."
        ),
    ] = False,
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Put a load on a server and say how much of it was answered in time.

    The server may be any that speaks the Open Inference Protocol over gRPC. Requests leave when they are due,
    and latency counts from then, so a server that stalls cannot hide it.
    """
    import contextlib
    import sys

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from clockwright.cli.inference import read_inputs
    from clockwright.cli.show import print_json
    from clockwright.units import NS_PER_S
    from traces.load import ready_models, report_of, slo_parameter, too_late
    from traces.load_show import draw, print_report, progress_line
    from traces.replay import AskingStyle, ReplayProgress, play
    from traces.request_inputs import RequestInputs

    if arrivals not in ("poisson", "uniform"):
        raise ConfigError(f"--arrivals is {arrivals!r}, expected poisson or uniform")
    if slo_as not in ("auto", "slo_ms", "timeout", "none"):
        raise ConfigError(f"--slo-as is {slo_as!r}, expected auto, slo_ms, timeout or none")
    if trace is None and bool(rate) == bool(concurrency):
        raise ConfigError(
            f"how much to ask: found {'both --rate and --concurrency' if rate else 'nothing'}, expected --rate 100 (an"
            " open loop: so many requests per second), --concurrency 4 (a closed loop: so many clients that wait) or"
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
            shapes=dict(map(_read_shape, shape or [])),
        ),
        slo_parameter=slo_parameter(to.server, access)
        if slo_as == "auto"
        else slo_as.replace("none", ""),
    )

    def all_ready() -> list[str]:
        return ready_models(to.server, access)

    if trace is None:
        workload = _made(
            models or all_ready(),
            rate=rate,
            uniform=arrivals == "uniform",
            concurrency=concurrency,
            slos_ns=slos_ns,
            tenants=tenant or [],
            seconds=(10.0 if seconds is None else seconds) + warmup_s,
            seed=seed,
        )
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
        # Progress is for whoever watches; standard output may be a file.
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


# A cache of answers is not to know every question, and the client's memory is not to be full of them.
_VARIANTS = 16


def _made(
    models: Sequence[str],
    *,
    rate: float,
    uniform: bool,
    concurrency: int,
    slos_ns: Sequence[int],
    tenants: Sequence[str],
    seconds: float,
    seed: int,
) -> Workload:
    from clockwright.units import NS_PER_S
    from traces.load import OfferedLoad, read_weights

    return OfferedLoad(
        weights=read_weights(models),
        rate_rps=rate,
        arrivals="uniform" if uniform else "poisson",
        concurrency=concurrency,
        slos_ns=slos_ns,
        tenants=tenants,
        duration_ns=round(seconds * NS_PER_S),
        seed=seed,
    ).workload()


def _read_shape(argument: str) -> tuple[str, tuple[int, ...]]:
    name, equals, sizes = argument.partition("=")
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = ()
    if not equals or not name or not shape or min(shape) < 1:
        raise ConfigError(f"--shape: found {argument!r}, expected NAME=1,3,224,224")
    return name, shape


def _print_csv(rows: Sequence[dict[str, object]]) -> None:
    import csv
    import sys

    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
