"""The commands of this floor: `clockwright up` and `clockwright controller`."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clockwright.cli.flags import Telemetry, Verbose, WorkerFlags, log, ns, takes_flags
from clockwright.errors import ConfigError

if TYPE_CHECKING:
    from controller.config import ControllerConfig
    from controller.core import SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class SchedulerFlags:
    """How a controller is to decide."""

    lookahead_ms: Annotated[
        float, typer.Option(help="How much work is sent to a GPU ahead of time.")
    ] = 5
    window_ms: Annotated[float, typer.Option(help="How late an action may begin.")] = 5
    policy: Annotated[
        str | None,
        typer.Option(
            help="Who decides; others than the default are there for comparison, or come from "
            "packages (controller/schedulers.py)."
        ),
    ] = None
    batching: Annotated[str, typer.Option(help="Of policy clipper: aimd, quantile or none.")] = (
        "aimd"
    )
    batch_delay_ms: Annotated[
        float, typer.Option(help="Of policy clipper: how long a batch that is not full waits.")
    ] = 0
    tenant_weights: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant-weight",
            help="Of policy edf_mh: NAME=WEIGHT, once per tenant; the others weigh 1.",
        ),
    ] = None

    isolation: Annotated[
        float,
        typer.Option(
            help="Of policy edf_mh: the part, 0 to 1, of its fair share of GPU time that each tenant can count on "
            "beside a flood. Less answers more in total."
        ),
    ] = 1
    at_once: Annotated[
        float,
        typer.Option(
            help="Of policy edf_mh: the part, 0 to 1, of all refusals under overload that leave at arrival. More "
            "answers less; with 0 whatever may be in time waits."
        ),
    ] = 0

    def config(self) -> SchedulerConfig:
        """The settings of a scheduler.

        Raises:
            ConfigError: one of them is impossible.
        """
        from controller.core import EdfMhConfig, SchedulerConfig
        from controller.schedulers import kind_of

        config = SchedulerConfig(
            lookahead_ns=ns(self.lookahead_ms, "--lookahead-ms"),
            window_ns=ns(self.window_ms, "--window-ms"),
            batching=self.batching,
            batch_delay_ns=ns(self.batch_delay_ms, "--batch-delay-ms")
            if self.batch_delay_ms
            else 0,
            edf_mh=EdfMhConfig(
                isolation=self.isolation,
                at_once=self.at_once,
                tenant_weights=dict(map(_tenant_weight, self.tenant_weights or ())),
            ),
        )
        if self.policy is None:
            return config
        kind_of(self.policy)
        return replace(config, policy=self.policy)


@dataclass(frozen=True, kw_only=True)
class ControllerFlags:
    """Flags that say what a controller serves, and where."""

    models: Annotated[
        Path | None,
        typer.Option(
            help="Folder of models: NAME/VERSION/model.onnx, and optionally NAME/config.toml. The code "
            "of models that are containers runs here."
        ),
    ] = None
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder for added models, applications and what they learn. Unset: the user's state folder for "
            "`controller`, and for `up` they are gone with the process."
        ),
    ] = None
    port: Annotated[
        int, typer.Option(help="Of clients, workers and operators alike; 0: any free one.")
    ] = 8001
    worker_port: Annotated[
        int,
        typer.Option(
            help="Where workers on other machines get actions and send results; 0: any free one."
        ),
    ] = 0
    telemetry: Telemetry = None
    selection_store: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL",
            help="For applications and what they learn, if not the state folder: a file, or redis://HOST:PORT/DB.",
        ),
    ] = None
    slo_ms: Annotated[
        float, typer.Option(help="SLO of requests that name none, of models without one.")
    ] = 100
    front: Annotated[
        str,
        typer.Option(
            metavar="http2|grpc",
            help="Server of all calls: our own, or grpcio's, which cannot tell how long a request "
            "waited in its queue.",
        ),
    ] = "http2"
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="PEM file: other machines have to use TLS then (http2)."),
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None
    max_open_requests: Annotated[
        int, typer.Option(help="Requests that are open at once; more are refused.")
    ] = 10_000
    max_open_mib: Annotated[
        int, typer.Option(help="MiB of all open requests; more are refused.")
    ] = 1024
    shared_memory_mib: Annotated[
        int | None,
        typer.Option(
            help="Memory shared with workers of this host, for large tensors; 0: none. Unset: an eighth of all."
        ),
    ] = None
    allow_client_shm: Annotated[
        bool,
        typer.Option(
            "--allow-client-shm",
            help="Clients of this machine may keep tensors in shared memory of theirs (Triton's extension).",
        ),
    ] = False
    max_connections: Annotated[
        int, typer.Option(help="Connections beyond which requests are refused (http2).")
    ] = 1000
    max_message_mib: Annotated[
        int, typer.Option(help="Largest message: a request's inputs, a batch's outputs.")
    ] = 64
    upload_limit_mib: Annotated[
        int, typer.Option(help="Disk for models that `models add` brings, together.")
    ] = 16384

    def config(self, host: str, scheduler: SchedulerFlags) -> ControllerConfig:
        """The settings of a controller that listens on `host`.

        Raises:
            ConfigError: one of them is impossible.
        """
        from controller.config import ControllerConfig, default_shared_bytes
        from controller.selection.config import SelectionConfig

        return ControllerConfig(
            scheduler=scheduler.config(),
            host=host,
            port=self.port,
            worker_port=self.worker_port,
            models_dir=self.models,
            state_dir=self.state,
            telemetry_dir=self.telemetry,
            selection=SelectionConfig(store=self.selection_store),
            default_slo_ns=ns(self.slo_ms, "--slo-ms"),
            front=self.front,
            tls_certificate=self.tls_cert,
            tls_key=self.tls_key,
            max_open_requests=self.max_open_requests,
            max_open_bytes=self.max_open_mib << 20,
            shared_memory_bytes=(
                default_shared_bytes()
                if self.shared_memory_mib is None
                else self.shared_memory_mib << 20
            ),
            allow_client_shm=self.allow_client_shm,
            max_connections=self.max_connections,
            max_message_bytes=self.max_message_mib << 20,
            upload_limit_bytes=self.upload_limit_mib << 20,
        )


@takes_flags
def up(
    *,
    flags: ControllerFlags,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Local worker processes, besides those of containers; by default one, which has "
            "the machine's cores to compute on."
        ),
    ] = None,
    worker: WorkerFlags,
    scheduler: SchedulerFlags,
) -> None:
    """Serve models on this machine: a controller, and workers beside it."""
    from clockwright.cli.local_workers import LocalWorkers
    from clockwright.cores import (
        divide_cores,
        granted_cores,
        parse_cores,
        spell_cores,
        usable_cores,
    )
    from controller.up import up as run_up

    if workers is not None and workers < 0:
        raise typer.BadParameter(f"found {workers}, expected 0 or more", param_hint="--workers")
    log(worker.verbose)
    config = flags.config("127.0.0.1", scheduler)
    local = LocalWorkers()
    plan = [worker] * (1 if workers is None else workers)
    elsewhere, words = worker, ""
    if worker.device == "cpu" and plan:
        usable = usable_cores()
        given = () if worker.cores is None else parse_cores(worker.cores)
        division = divide_cores(usable, len(plan), worker.threads, given, granted_cores())
        plan = [
            replace(worker, cores=spell_cores(cores) or None, threads=division.threads)
            for cores in division.workers
        ]
        words = division.words
        if division.aside:
            # Whatever starts from here on runs beside the workers' cores, unless told its own.
            os.sched_setaffinity(0, division.aside)
            elsewhere = replace(worker, cores=spell_cores(usable))
    for index, own in enumerate(plan):
        local.plan(f"local-{index}", own)
    if flags.models is not None:
        local.plan_containers(flags.models, elsewhere)
    if local.num_planned == 0:
        raise typer.BadParameter(
            "found 0, and no model is a container: expected 1 or more", param_hint="--workers"
        )
    raise typer.Exit(run_up(config, local, words))


@takes_flags
def controller(
    *,
    flags: ControllerFlags,
    host: Annotated[str, typer.Option(help="0.0.0.0: everybody may connect, and control it.")] = (
        "127.0.0.1"
    ),
    scheduler: SchedulerFlags,
    verbose: Verbose = False,
) -> None:
    """Serve models with workers that are started elsewhere."""
    from clockwright.cli.local_workers import LocalWorkers
    from controller.config import default_state_dir
    from controller.up import up as run_up

    log(verbose)
    if flags.state is None:
        flags = replace(flags, state=default_state_dir())
    raise typer.Exit(run_up(flags.config(host, scheduler), LocalWorkers()))


def _tenant_weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(weight)
    raise ConfigError(f"--tenant-weight is {text!r}, expected NAME=WEIGHT, such as gold=4")
