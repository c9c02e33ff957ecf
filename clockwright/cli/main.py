"""The `clockwright` command: flags in, configurations and calls out.

Everything heavy is imported by the command that needs it, so that `--help` comes at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clockwright import __version__
from clockwright.errors import ClockwrightError, ConfigError, RefusedError
from clockwright.units import NS_PER_MS

if TYPE_CHECKING:
    from controller.config import ControllerConfig
    from controller.core import SchedulerConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Deep network serving with latency you can promise.",
)
models_app = typer.Typer(no_args_is_help=True, help="Add, list and remove models of a server.")
app.add_typer(models_app, name="models")
apps_app = typer.Typer(
    no_args_is_help=True,
    help="Applications: asked like models, they choose and combine models and learn from feedback.",
)
app.add_typer(apps_app, name="app")
trace_app = typer.Typer(no_args_is_help=True, help="What a run recorded, for other programs.")
app.add_typer(trace_app, name="trace")

_MIB = 1 << 20

Server = Annotated[str, typer.Option(help="HOST:PORT of the controller.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Models = Annotated[
    Path | None,
    typer.Option(
        help="Folder of models: NAME/VERSION/model.onnx, and optionally NAME/config.toml. The code "
        "of models that are containers runs here."
    ),
]
Port = Annotated[
    int, typer.Option(help="Of clients, workers and operators alike; 0: any free one.")
]
Slo = Annotated[float, typer.Option(help="SLO of requests that name none, of models without one.")]
Lookahead = Annotated[float, typer.Option(help="How much work is sent to a GPU ahead of time.")]
Window = Annotated[float, typer.Option(help="How late an action may begin.")]
Policy = Annotated[
    str | None, typer.Option(help="Who decides; others than the default are there for comparison.")
]
Batching = Annotated[str, typer.Option(help="Of policy clipper: aimd, quantile or none.")]
BatchDelay = Annotated[
    float, typer.Option(help="Of policy clipper: how long a batch that is not full waits.")
]
TenantWeights = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant-weight",
        help="Of policy edf_mh: NAME=WEIGHT, once per tenant; the others weigh 1.",
    ),
]
Telemetry = Annotated[
    Path | None, typer.Option(help="Folder for requests.csv and actions.csv; made if need be.")
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda:N, cuda (a worker process for each GPU), modelled:PROFILE, which only spends time, or container:FOLDER, which "
        "runs the code of the model in that folder."
    ),
]
Pages = Annotated[int, typer.Option(help="Weights cache, in pages of 16 MiB.")]
Precision = Annotated[
    str, typer.Option(help="What models compute in on a GPU: float32, tf32 or float16.")
]
Engine = Annotated[
    str, typer.Option(help="What runs models on a GPU: auto (the faster), torch or onnxruntime.")
]
HostMib = Annotated[
    int, typer.Option(help="On a GPU: the host's memory for the weights of all models.")
]
ArenaMib = Annotated[int, typer.Option(help="Largest model's weights.")]
CacheDir = Annotated[
    Path | None, typer.Option(help="Compiled models; by default in the user's cache folder.")
]
SelectionStore = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|URL",
        help="For applications and what they learn: a file, or redis://HOST:PORT/DB; else gone with the process.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what happens.")]

_SERVER = "127.0.0.1:8001"


@app.command()
def up(
    models: Models = None,
    port: Port = 8001,
    device: Device = "cpu",
    pages: Pages = 64,
    workers: Annotated[
        int, typer.Option(help="Local worker processes, besides those of containers.")
    ] = 1,
    telemetry: Telemetry = None,
    arena_mib: ArenaMib = 512,
    precision: Precision = "float32",
    engine: Engine = "auto",
    host_mib: HostMib = 4096,
    cache_dir: CacheDir = None,
    selection_store: SelectionStore = None,
    slo_ms: Slo = 100,
    lookahead_ms: Lookahead = 5,
    window_ms: Window = 5,
    policy: Policy = None,
    batching: Batching = "aimd",
    batch_delay_ms: BatchDelay = 0,
    tenant_weights: TenantWeights = None,
    verbose: Verbose = False,
) -> None:
    """Serve models on this machine: a controller, and workers beside it."""
    from clockwright.cli.local_workers import LocalWorkers
    from clockwright.cli.up import up as run_up

    if workers < 0:
        raise typer.BadParameter(f"found {workers}, expected 0 or more", param_hint="--workers")
    _log(verbose)
    scheduler = _scheduler_config(
        lookahead_ms, window_ms, policy, batching, batch_delay_ms, tenant_weights or []
    )
    config = _controller_config(
        "127.0.0.1", port, models, telemetry, selection_store, slo_ms, scheduler
    )
    arguments = [f"--device={device}", f"--pages={pages}", f"--arena-mib={arena_mib}"]
    arguments += [f"--precision={precision}", f"--engine={engine}", f"--host-mib={host_mib}"]
    if cache_dir is not None:
        arguments.append(f"--cache-dir={cache_dir}")
    if verbose:
        arguments.append("--verbose")
    local = LocalWorkers(
        workers, arguments, say=lambda text: print(text, file=sys.stderr), models_dir=models
    )
    if local.num_planned == 0:
        raise typer.BadParameter(
            "found 0, and no model is a container: expected 1 or more", param_hint="--workers"
        )
    raise typer.Exit(run_up(config, local))


@app.command()
def controller(
    models: Models = None,
    host: Annotated[str, typer.Option(help="0.0.0.0: everybody may connect, and control it.")] = (
        "127.0.0.1"
    ),
    port: Port = 8001,
    telemetry: Telemetry = None,
    selection_store: SelectionStore = None,
    slo_ms: Slo = 100,
    lookahead_ms: Lookahead = 5,
    window_ms: Window = 5,
    policy: Policy = None,
    batching: Batching = "aimd",
    batch_delay_ms: BatchDelay = 0,
    tenant_weights: TenantWeights = None,
    verbose: Verbose = False,
) -> None:
    """Serve models with workers that are started elsewhere."""
    from clockwright.cli.local_workers import LocalWorkers
    from clockwright.cli.up import up as run_up

    _log(verbose)
    scheduler = _scheduler_config(
        lookahead_ms, window_ms, policy, batching, batch_delay_ms, tenant_weights or []
    )
    config = _controller_config(host, port, models, telemetry, selection_store, slo_ms, scheduler)
    raise typer.Exit(run_up(config, LocalWorkers(0, [], say=print)))


@app.command()
def worker(
    controller: Annotated[str, typer.Option(help="HOST:PORT of the controller.")] = _SERVER,
    device: Device = "cpu",
    pages: Pages = 64,
    worker_id: Annotated[
        str | None, typer.Option("--id", help="Unique; by default HOST-PID.")
    ] = None,
    arena_mib: ArenaMib = 512,
    precision: Precision = "float32",
    engine: Engine = "auto",
    host_mib: HostMib = 4096,
    cache_dir: CacheDir = None,
    verbose: Verbose = False,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one worker, which is one GPU, for a controller anywhere."""
    if parent_pid is not None:
        from clockwright.process import end_with

        end_with(parent_pid, signal.SIGTERM)
    # The worker starts its compiler as a new program, for which gRPC need not be prepared; when it
    # tries and cannot, it complains on standard error.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from worker.config import WorkerConfig, default_cache_dir
    from worker.process import check_host_memory, run_worker

    # What it would warn of, a controller in the same terminal says too.
    _log(verbose, logging.WARNING if parent_pid is None else logging.ERROR)
    if parent_pid is None:
        # Somebody waits to hear that it has found its controller, or has left.
        logging.getLogger("worker.link").setLevel(logging.INFO)
    config = WorkerConfig(
        controller=controller,
        device=device,
        worker_id=worker_id,
        num_pages=pages,
        arena_bytes=arena_mib * _MIB,
        precision=precision,
        engine=engine,
        host_bytes=host_mib * _MIB,
        cache_dir=default_cache_dir() if cache_dir is None else cache_dir,
    )
    if device == "cuda":
        from clockwright.cli.gpu_workers import run_on_each_gpu, visible_gpus

        num_gpus = visible_gpus()
        check_host_memory(config, num_gpus)
        arguments = [f"--pages={pages}", f"--arena-mib={arena_mib}", f"--precision={precision}"]
        arguments += [f"--engine={engine}", f"--host-mib={host_mib}"]
        arguments += [] if cache_dir is None else [f"--cache-dir={cache_dir}"]
        arguments += ["--verbose"] if verbose else []
        raise typer.Exit(run_on_each_gpu(num_gpus, config.name, controller, arguments))
    raise typer.Exit(run_worker(config))


@models_app.command("add")
def add_model(
    folder: Annotated[Path, typer.Argument(help="Holds VERSION/model.onnx.")],
    name: Annotated[str | None, typer.Option(help="By default the folder's name.")] = None,
    replace: Annotated[bool, typer.Option(help="Take the place of a model of this name.")] = False,
    server: Server = _SERVER,
    json: Json = False,
) -> None:
    """Send a model to a server; returns once it is ready, or with the reason why not."""
    from clockwright.cli.show import plain, print_json, print_models
    from clockwright.operator import Operator

    with Operator(server) as operator:
        added = operator.add_model(folder, name=name or folder.resolve().name, replace=replace)
    if json:
        print_json([plain(model) for model in added])
    else:
        print_models(added)


@models_app.command("list")
def list_models(server: Server = _SERVER, json: Json = False) -> None:
    """List models: state, cost, where they are resident, what became of their requests."""
    from clockwright.cli.show import plain, print_json, print_models
    from clockwright.operator import Operator

    with Operator(server) as operator:
        found = operator.models()
    if json:
        print_json([plain(model) for model in found])
    else:
        print_models(found)


@models_app.command("remove")
def remove_model(name: str, server: Server = _SERVER) -> None:
    """Remove a model; requests that wait for it are refused."""
    from clockwright.operator import Operator

    with Operator(server) as operator:
        operator.remove_model(name)
    print(f"removed {name}")


@apps_app.command("add")
def add_application(
    name: str,
    model: Annotated[list[str], typer.Option(help="A candidate; once per model.")],
    policy: Annotated[
        str, typer.Option(help="exp4-full, exp3, thompson, canary, ...; see README.")
    ] = "exp4-full",
    option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of the policy, VALUE in JSON; once per option."),
    ] = None,
    slo_ms: Annotated[float | None, typer.Option(help="By default the server's.")] = None,
    default: Annotated[
        int | None, typer.Option(help="Label to serve when there is no answer; else it is refused.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="Answers with less confidence are withheld.")
    ] = 0.0,
    combination: Annotated[str, typer.Option(help="vote, average or one.")] = "vote",
    label_output: Annotated[str, typer.Option(help="Of the models.")] = "label",
    probability_output: Annotated[
        str, typer.Option(help="Of the models, for average.")
    ] = "probabilities",
    cache: Annotated[bool, typer.Option(help="Take answers from the prediction cache.")] = True,
    replace: Annotated[bool, typer.Option(help="Change the application of this name.")] = False,
    server: Server = _SERVER,
    json: Json = False,
) -> None:
    """Add or change an application."""
    from clockwright.cli.applications import print_application, settings
    from clockwright.cli.show import plain, print_json
    from clockwright.operator import Operator

    wanted = settings(
        name,
        model,
        policy=policy,
        options=option or [],
        slo_ns=0 if slo_ms is None else _ns(slo_ms, "--slo-ms"),
        default_label=default,
        confidence_threshold=threshold,
        combination=combination,
        label_output=label_output,
        probability_output=probability_output,
        no_cache=not cache,
    )
    with Operator(server) as operator:
        info = operator.put_application(wanted, replace=replace)
    if json:
        print_json(plain(info))
    else:
        print_application(info)


@apps_app.command("list")
def list_applications(server: Server = _SERVER, json: Json = False) -> None:
    """List applications: what became of their queries, and the weights of their models."""
    from clockwright.cli.applications import print_applications
    from clockwright.cli.show import plain, print_json
    from clockwright.operator import Operator

    with Operator(server) as operator:
        found = operator.applications()
    if json:
        print_json([plain(info) for info in found])
    else:
        print_applications(found)


@apps_app.command("show")
def show_application(
    name: str,
    context: Annotated[
        str, typer.Option(help="Whose weights; by default everybody's together.")
    ] = "",
    server: Server = _SERVER,
    json: Json = False,
) -> None:
    """Show one application."""
    from clockwright.cli.applications import print_application
    from clockwright.cli.show import plain, print_json
    from clockwright.operator import Operator

    with Operator(server) as operator:
        (info,) = operator.applications(name, context=context)
    if json:
        print_json(plain(info))
    else:
        print_application(info)


@apps_app.command("remove")
def remove_application(name: str, server: Server = _SERVER) -> None:
    """Remove an application with all it has learned; its models stay."""
    from clockwright.operator import Operator

    with Operator(server) as operator:
        operator.remove_application(name)
    print(f"removed {name}")


@apps_app.command("erase")
def erase_context(name: str, context: str, server: Server = _SERVER) -> None:
    """Forget a user, session or tenant."""
    from clockwright.operator import Operator

    with Operator(server) as operator:
        erased = operator.erase_context(name, context)
    print(f"erased {context}" if erased else f"{name} knows nothing of {context}")


@apps_app.command("feedback")
def give_feedback(
    query_id: str,
    label: Annotated[int | None, typer.Option(help="The true one.")] = None,
    reward: Annotated[float | None, typer.Option(help="How good the answer was, 0 to 1.")] = None,
    server: Server = _SERVER,
    json: Json = False,
) -> None:
    """Say what became of an answer."""
    from dataclasses import asdict

    from clockwright.cli.show import print_json
    from clockwright.client import Client, Feedback

    with Client(server) as client:
        (outcome,) = client.feedback(Feedback(query_id, label=label, reward=reward))
    if json:
        print_json(asdict(outcome))
    else:
        losses = ", ".join(f"{m} {loss:g}" for m, loss in sorted(outcome.losses.items()))
        more = f"loss of {losses}" if losses else outcome.message
        print(outcome.status + (f": {more}" if more else ""))


@app.command()
def infer(
    model: str,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="NAME=FILE.npy, shape (rows, ...); once per input."),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Random inputs, always the same.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Of the random inputs.", min=1)] = 1,
    slo_ms: Annotated[float | None, typer.Option(help="By default the model's.")] = None,
    explain: Annotated[bool, typer.Option(help="Say where the time went.")] = False,
    context: Annotated[str, typer.Option(help="Of an application: user, session or tenant.")] = "",
    tenant: Annotated[str, typer.Option(help="Whose share of the GPUs it is to come from.")] = "",
    server: Server = _SERVER,
    json: Json = False,
) -> None:
    """Ask a model once."""
    from clockwright.cli.inference import print_result, random_inputs, read_inputs
    from clockwright.client import Client

    if bool(inputs) == random:
        raise typer.BadParameter(
            "expected either --input NAME=FILE.npy or --random", param_hint="--input"
        )
    with Client(server) as client:
        arrays = (
            random_inputs(client.metadata(model), rows=rows)
            if random
            else read_inputs(inputs or [])
        )
        result = client.infer(
            model, arrays, slo_ms=slo_ms, explain=explain, context=context, tenant=tenant
        )
    print_result(result, json=json)


@app.command()
def status(server: Server = _SERVER, json: Json = False) -> None:
    """Say how a server is: totals, workers, residency."""
    from clockwright.cli.show import plain, print_json, print_status
    from clockwright.operator import Operator

    with Operator(server) as operator:
        totals, workers = operator.status(), operator.workers()
    if json:
        print_json({**plain(totals), "workers": [plain(row) for row in workers]})
    else:
        print_status(totals, workers)


@app.command()
def drain(worker_id: str, server: Server = _SERVER) -> None:
    """Take a worker out: it finishes what it has and leaves."""
    from clockwright.operator import Operator

    with Operator(server) as operator:
        operator.drain(worker_id)
    print(f"worker {worker_id} has left")


@app.command()
def simulate(
    case: Annotated[Path, typer.Argument(help="TOML; see experiments/simulator/case_file.py.")],
    seconds: Annotated[
        float | None, typer.Option(help="Of virtual time, instead of the case's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the case's.", min=0)] = None,
    telemetry: Telemetry = None,
    json: Json = False,
) -> None:
    """Run a described case on virtual time: the real scheduler, modelled devices."""
    from clockwright.cli.simulate import simulate as run_simulation

    run_simulation(case, seconds=seconds, seed=seed, telemetry_dir=telemetry, as_json=json)


@app.command()
def replay(
    case: Annotated[Path, typer.Argument(help="TOML, as for simulate; its models and clients.")],
    server: Server = _SERVER,
    seconds: Annotated[float | None, typer.Option(help="Instead of the case's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the case's.", min=0)] = None,
    requests: Annotated[
        Path | None, typer.Option(help="CSV of every request, as the client saw it.")
    ] = None,
    json: Json = False,
) -> None:
    """Send a described workload to a live server; how late the client itself was is reported."""
    from clockwright.cli.replay import replay as run_replay

    run_replay(case, server=server, seconds=seconds, seed=seed, requests_csv=requests, as_json=json)


@trace_app.command("export")
def export_trace(
    telemetry: Annotated[Path, typer.Argument(help="Folder of requests.csv and actions.csv.")],
    target: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    windows: Annotated[bool, typer.Option(help="Show when actions could begin, too.")] = True,
) -> None:
    """Write a run as a Chrome trace, which ui.perfetto.dev shows: lanes, predictions, requests."""
    from clockwright.cli.trace import export

    export(telemetry, target, windows=windows)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command; a fault that has a name is one line on standard error and exit code 1."""
    try:
        app()
    except RefusedError as error:
        sys.exit(f"refused: {error}")
    except ClockwrightError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _controller_config(
    host: str,
    port: int,
    models: Path | None,
    telemetry: Path | None,
    selection_store: str | None,
    slo_ms: float,
    scheduler: SchedulerConfig,
) -> ControllerConfig:
    from controller.config import ControllerConfig
    from controller.selection.config import SelectionConfig

    return ControllerConfig(
        host=host,
        port=port,
        models_dir=models,
        telemetry_dir=telemetry,
        selection=SelectionConfig(store=selection_store),
        default_slo_ns=_ns(slo_ms, "--slo-ms"),
        scheduler=scheduler,
    )


def _scheduler_config(
    lookahead_ms: float,
    window_ms: float,
    policy: str | None,
    batching: str,
    batch_delay_ms: float,
    tenant_weights: list[str],
) -> SchedulerConfig:
    from controller.core import EdfMhConfig, SchedulerConfig

    config = SchedulerConfig(
        lookahead_ns=_ns(lookahead_ms, "--lookahead-ms"),
        window_ns=_ns(window_ms, "--window-ms"),
        batching=batching,
        batch_delay_ns=_ns(batch_delay_ms, "--batch-delay-ms") if batch_delay_ms else 0,
        edf_mh=EdfMhConfig(tenant_weights=dict(map(_tenant_weight, tenant_weights))),
    )
    return config if policy is None else replace(config, policy=policy)


def _tenant_weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(weight)
    raise ConfigError(f"--tenant-weight is {text!r}, expected NAME=WEIGHT, such as gold=4")


def _ns(milliseconds: float, flag: str) -> int:
    # The comparison is false for NaN too.
    if not 0 < milliseconds < 1e9:
        raise ConfigError(f"{flag} is {milliseconds:g}, expected more than 0")
    return round(milliseconds * NS_PER_MS)


def _log(verbose: bool, level: int = logging.WARNING) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
