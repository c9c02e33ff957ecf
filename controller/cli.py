"""The commands of this floor: `clockwright up`, `clockwright controller` and `clockwright front`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import override

from clockwright.cli.flags import (
    SERVER,
    Controllers,
    LogFormat,
    LogFormats,
    Telemetry,
    Verbose,
    WorkerFlags,
    log,
    ns,
    takes_flags,
)
from clockwright.errors import ConfigError
from clockwright.process import end_with, outlive_hangups
from controller.front_flags import FrontFlags, FrontJoinFlags

if TYPE_CHECKING:
    from controller.access.config import AccessConfig
    from controller.config import ControllerConfig
    from controller.core import SchedulerConfig
    from controller.front_process import Front

# Triton's.
_METRICS_PORT = 8002


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
            help="Policy that decides: edf_mh (the default), or for comparison clockwork, clipper, infaas, or one that a package "
            "brings; `clockwright policies` says what each is."
        ),
    ] = None
    batching: Annotated[
        str, typer.Option(help="How policy clipper forms batches: aimd, quantile or none.")
    ] = "aimd"
    batch_delay_ms: Annotated[
        float, typer.Option(help="How long a batch of policy clipper waits that is not full.")
    ] = 0
    tenant_weights: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant-weight",
            help="NAME=WEIGHT of a tenant under policy edf_mh, once per tenant, 0.01 to 100; the others weigh 1.",
        ),
    ] = None

    isolation: Annotated[
        float,
        typer.Option(
            help="Under policy edf_mh the part, 0 to 1, of its fair share of GPU time that each tenant can count on "
            "beside a flood. Less answers more in total."
        ),
    ] = 1

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
                tenant_weights=dict(map(_tenant_weight, self.tenant_weights or ())),
            ),
        )
        if self.policy is None:
            return config
        kind_of(self.policy)
        return replace(config, policy=self.policy)


@dataclass(frozen=True, kw_only=True)
class ControllerFlags(FrontFlags):
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
    worker_port: Annotated[
        int,
        typer.Option(
            help="Port where workers on other machines get actions and send results; 0: any free one."
        ),
    ] = 0
    telemetry: Telemetry = None
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port where Prometheus gets /metrics; 0: any free one. Unset: 8002, and none where that is taken."
        ),
    ] = None
    no_metrics: Annotated[
        bool, typer.Option("--no-metrics", help="Serve no metrics, and count nothing for them.")
    ] = False
    selection_store: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL",
            help="Where applications and what they learn are kept, if not in the state folder: a file, or redis://HOST:PORT/DB.",
        ),
    ] = None
    slo_ms: Annotated[
        float, typer.Option(help="SLO of requests that name none, of models without one.")
    ] = 100
    tls_worker_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of an authority of its own, whose certificates let workers join."
        ),
    ] = None
    worker_token_file: Annotated[
        Path | None, typer.Option(help="File with a token that lets workers join.")
    ] = None
    max_message_mib: Annotated[
        int, typer.Option(help="Largest message: a request's inputs, a batch's outputs.")
    ] = 64
    quotas: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of what tenants may have, read again when it changes; else operators set that."
        ),
    ] = None
    upload_limit_mib: Annotated[
        int, typer.Option(help="Disk for models that `models add` brings, together.")
    ] = 16384

    @override
    def access(self) -> AccessConfig:
        return replace(
            super().access(),
            worker_ca=self.tls_worker_ca,
            worker_token_file=self.worker_token_file,
        )

    @property
    def _metrics_port(self) -> int:
        return _METRICS_PORT if self.metrics_port is None else self.metrics_port

    def config(self, host: str, scheduler: SchedulerFlags) -> ControllerConfig:
        """The settings of a controller that listens on `host`.

        Raises:
            ConfigError: one of them is impossible.
        """
        from controller.config import ControllerConfig
        from controller.selection.config import SelectionConfig

        return ControllerConfig(
            scheduler=scheduler.config(),
            host=host,
            port=self.port,
            http_port=self.rest_port,
            http_optional=self.http_port is None,
            worker_port=self.worker_port,
            models_dir=self.models,
            state_dir=self.state,
            telemetry_dir=self.telemetry,
            metrics_port=None if self.no_metrics else self._metrics_port,
            metrics_optional=self.metrics_port is None,
            selection=SelectionConfig(store=self.selection_store),
            default_slo_ns=ns(self.slo_ms, "--slo-ms"),
            tls_certificate=self.tls_cert,
            tls_key=self.tls_key,
            access=self.access(),
            max_open_requests=self.max_open_requests,
            max_open_bytes=self.max_open_mib << 20,
            shared_memory_bytes=self.shared_memory_bytes,
            allow_client_shm=self.allow_client_shm,
            max_connections=self.max_connections,
            max_message_bytes=self.max_message_mib << 20,
            quotas_file=self.quotas,
            memory_limit_bytes=self.memory_limit_bytes,
            trace_to=self.trace_to,
            trace_share=self.trace_share,
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
    fronts: Annotated[
        int,
        typer.Option(
            help="Front processes that share the port of clients; 0: the controller serves clients itself."
        ),
    ] = 0,
    controller_port: Annotated[
        int,
        typer.Option(
            help="With --fronts: the controller's own port, for further workers and fronts; 0: any free one."
        ),
    ] = 0,
    worker: WorkerFlags,
    scheduler: SchedulerFlags,
) -> None:
    """Serve models on this machine: a controller, and workers beside it.

    Only programs of this machine reach it, at 127.0.0.1. To serve other machines, start `clockwright controller
    --host 0.0.0.0` with --keys and --tls-cert, and `clockwright worker` beside it.
    """
    outlive_hangups()
    from clockwright.cli.local_workers import LocalWorkers
    from clockwright.cores import (
        divide_cores,
        granted_cores,
        parse_cores,
        spell_cores,
        usable_cores,
    )
    from controller.local_fronts import LocalFronts
    from controller.up import up as run_up

    if workers is not None and workers < 0:
        raise typer.BadParameter(f"found {workers}, expected 0 or more", param_hint="--workers")
    if fronts < 0:
        raise typer.BadParameter(f"found {fronts}, expected 0 or more", param_hint="--fronts")
    if fronts > 1 and flags.allow_client_shm:
        raise typer.BadParameter(
            f"a region is known only to the front that registered it: found {fronts} fronts behind one port, "
            "expected 1 or 0",
            param_hint="--allow-client-shm",
        )
    log(worker.verbose, log_format=worker.log_format)
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
    local_fronts: LocalFronts | None = None
    if fronts:
        local_fronts = LocalFronts(
            fronts, flags.for_clients(), verbose=worker.verbose, log_format=worker.log_format
        )
        config = replace(config, port=controller_port, http_port=None)
    raise typer.Exit(run_up(config, local, local_fronts, words))


@takes_flags
def controller(
    *,
    flags: ControllerFlags,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0: other machines reach it, with --keys and --tls-cert."
        ),
    ] = "127.0.0.1",
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="file:PATH|etcd://HOST:PORT",
            help="Where controllers that follow each other keep who of them leads; the others stand by. "
            "file: is for those of one host. With TLS: etcds://HOST:PORT?ca=PATH&cert=PATH&key=PATH.",
        ),
    ] = None,
    notice_s: Annotated[
        float,
        typer.Option(help="How long it serves on, and is not ready, when it is told to end."),
    ] = 0,
    scheduler: SchedulerFlags,
    verbose: Verbose = False,
    log_format: LogFormats = LogFormat.TEXT,
) -> None:
    """Serve models with workers that are started elsewhere."""
    outlive_hangups()
    from clockwright.cli.local_workers import LocalWorkers
    from controller.config import default_state_dir
    from controller.up import up as run_up

    log(verbose, log_format=log_format)
    if flags.state is None:
        flags = replace(flags, state=default_state_dir())
    config = replace(flags.config(host, scheduler), lease=lease, notice_s=notice_s)
    raise typer.Exit(run_up(config, LocalWorkers()))


@takes_flags
def front(
    *,
    controller: Controllers = SERVER,
    flags: FrontFlags,
    join: FrontJoinFlags,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0: other machines reach it, with --keys and --tls-cert."
        ),
    ] = "127.0.0.1",
    verbose: Verbose = False,
    log_format: LogFormats = LogFormat.TEXT,
    share_port: Annotated[bool, typer.Option(hidden=True)] = False,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve clients for a controller anywhere, with a processor core of their own."""
    outlive_hangups()
    if parent_pid is not None:
        end_with(parent_pid, signal.SIGTERM)
    from controller.config import FrontConfig
    from controller.front_process import run as run_front

    log(verbose, log_format=log_format)
    try:
        config = FrontConfig(
            controller=controller,
            host=host,
            port=flags.port,
            http_port=flags.rest_port,
            http_optional=flags.http_port is None,
            shares_port=share_port,
            tls_certificate=flags.tls_cert,
            tls_key=flags.tls_key,
            access=flags.access(),
            joining=join.access(),
            max_open_requests=flags.max_open_requests,
            max_open_bytes=flags.max_open_mib << 20,
            max_connections=flags.max_connections,
            shared_memory_bytes=flags.shared_memory_bytes,
            allow_client_shm=flags.allow_client_shm,
            memory_limit_bytes=flags.memory_limit_bytes,
            trace_to=flags.trace_to,
            trace_share=flags.trace_share,
        )
        words = None if parent_pid is not None else _say_where
        code = run_front(config, started=words)
    except ConfigError as error:
        if parent_pid is None:
            raise
        # Whoever supervises this front learns that starting it again is of no use.
        print(f"error: {error}", file=sys.stderr)
        code = os.EX_CONFIG
    raise typer.Exit(code)


def _say_where(front: Front) -> None:
    print(f"listening on {front.host}:{front.port}", flush=True)
    if front.http_port is not None:
        print(f"REST on {front.host}:{front.http_port}", flush=True)


def _tenant_weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(weight)
    raise ConfigError(f"--tenant-weight is {text!r}, expected NAME=WEIGHT, such as gold=4")
