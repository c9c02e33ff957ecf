"""The commands of this floor: `clockwright up`, `clockwright controller` and `clockwright front`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from clockwright.cli.flags import (
    SERVER,
    Controllers,
    LogFlags,
    ns,
    takes_flags,
)
from clockwright.cli.worker_settings import WorkerSettings
from clockwright.errors import ConfigError
from clockwright.process import end_with, outlive_hangups
from clockwright.settings import Flags
from controller.process.config import ControllerConfig, FrontConfig, default_state_dir
from controller.process.front_flags import FrontJoinFlags, MetricsFlags, RestFlags

if TYPE_CHECKING:
    from controller.core import SchedulerConfig
    from controller.process.front_process import Front


@dataclass(frozen=True, kw_only=True)
class SchedulerFlags:
    """How a controller is to decide."""

    lookahead_ms: Annotated[
        float, typer.Option(help="How far ahead actions are sent to a worker.")
    ] = 5
    window_ms: Annotated[float, typer.Option(help="How late an action may start.")] = 5
    policy: Annotated[
        str | None,
        typer.Option(
            help="Scheduling policy: edf_mh (the default); for comparison clockwork, clipper, infaas; or "
            "one from a package. `clockwright policies` describes each."
        ),
    ] = None
    batching: Annotated[
        str, typer.Option(help="How policy clipper forms batches: aimd, quantile or none.")
    ] = "aimd"
    batch_delay_ms: Annotated[
        float, typer.Option(help="How long policy clipper waits for a batch to fill.")
    ] = 0
    tenant_weights: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant-weight",
            help="NAME=WEIGHT of a tenant, 0.01 to 100, under policy edf_mh; repeat per tenant. Other "
            "tenants have weight 1.",
        ),
    ] = None

    isolation: Annotated[
        float,
        typer.Option(
            help="Under policy edf_mh, the part (0 to 1) of its fair share of GPU time that each tenant "
            "keeps when others overload the server. Lower values give more answers in total, at the "
            "cost of small tenants."
        ),
    ] = 1

    def config(self) -> SchedulerConfig:
        """The settings of a scheduler. Raises ConfigError if one of them is impossible."""
        from controller.core import EdfMhConfig, SchedulerConfig
        from controller.process.schedulers import kind_of

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


@takes_flags
def up(
    *,
    flags: Annotated[Flags[ControllerConfig], ("host", "lease", "notice_s")],
    rest: RestFlags,
    metrics: MetricsFlags,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Local worker processes, in addition to those of containers; by default one, which uses "
            "all cores."
        ),
    ] = None,
    fronts: Annotated[
        int,
        typer.Option(
            help="Front processes that share the clients' port; 0: the controller serves clients itself."
        ),
    ] = 0,
    controller_port: Annotated[
        int,
        typer.Option(
            help="With --fronts: the controller's own port, for further workers and fronts; 0: any free "
            "port."
        ),
    ] = 0,
    worker: Flags[WorkerSettings],
    scheduler: SchedulerFlags,
    logs: LogFlags,
) -> None:
    """Serve models on this machine: a controller and its workers.

    Only programs of this machine reach it, at 127.0.0.1. To serve other machines, start `clockwright controller
    --host 0.0.0.0` with --keys and --tls-cert, and `clockwright worker`.
    """
    outlive_hangups()
    from clockwright.cli.local_workers import LocalWorkers
    from clockwright.cores import divide_cores, granted_cores, spell_cores, usable_cores
    from controller.process.local_fronts import LocalFronts
    from controller.process.up import up as run_up

    if workers is not None and workers < 0:
        raise typer.BadParameter(f"found {workers}, expected 0 or more", param_hint="--workers")
    if fronts < 0:
        raise typer.BadParameter(f"found {fronts}, expected 0 or more", param_hint="--fronts")
    if fronts > 1 and flags["allow_client_shm"]:
        raise typer.BadParameter(
            f"a region is known only to the front that registered it: found {fronts} fronts behind one port, "
            "expected 1 or 0",
            param_hint="--allow-client-shm",
        )
    ports = (
        ("--controller-port", controller_port),
        ("--worker-port", flags["worker_port"]),
        ("--metrics-port", metrics.metrics_port),
    )
    taken = (flags["port"], rest.port) if fronts else ()
    for flag, port in ports:
        if port and port in taken:
            raise typer.BadParameter(
                f"found {port}, where the fronts listen, expected another port", param_hint=flag
            )
    if metrics.optional and metrics.port in taken:
        print(f"metrics are off: the fronts listen on {metrics.port}", file=sys.stderr)
        metrics = MetricsFlags(no_metrics=True)
    logs.apply()
    config = _controller_config(flags, rest, metrics, scheduler)
    local = LocalWorkers(logs)
    settings = worker.make()
    plan = [worker] * (1 if workers is None else workers)
    elsewhere, words = worker, ""
    if settings.device == "cpu" and plan:
        usable = usable_cores()
        division = divide_cores(
            usable, len(plan), settings.threads, settings.cores, granted_cores()
        )
        plan = [
            worker.saying(cores=spell_cores(cores) or None, threads=division.threads)
            for cores in division.workers
        ]
        words = division.words
        if division.aside:
            # Processes started from here on run on the other cores, unless they get their own.
            os.sched_setaffinity(0, division.aside)
            elsewhere = worker.saying(cores=spell_cores(usable))
    for index, own in enumerate(plan):
        local.plan(f"local-{index}", own)
    if config.models_dir is not None:
        local.plan_containers(config.models_dir, elsewhere)
    if local.num_planned == 0:
        raise typer.BadParameter(
            "found 0, and no model is a container: expected 1 or more", param_hint="--workers"
        )
    local_fronts: LocalFronts | None = None
    if fronts:
        local_fronts = LocalFronts(fronts, flags.common(FrontConfig), rest, logs)
        config = replace(config, port=controller_port, http_port=None)
    raise typer.Exit(run_up(config, local, local_fronts, words))


@takes_flags
def controller(
    *,
    flags: Flags[ControllerConfig],
    rest: RestFlags,
    metrics: MetricsFlags,
    scheduler: SchedulerFlags,
    logs: LogFlags,
) -> None:
    """Serve models with workers that are started elsewhere."""
    outlive_hangups()
    from clockwright.cli.local_workers import LocalWorkers
    from controller.process.up import up as run_up

    logs.apply()
    config = _controller_config(flags, rest, metrics, scheduler)
    if config.state_dir is None:
        config = replace(config, state_dir=default_state_dir())
    raise typer.Exit(run_up(config, LocalWorkers(logs)))


def _controller_config(
    flags: Flags[ControllerConfig],
    rest: RestFlags,
    metrics: MetricsFlags,
    scheduler: SchedulerFlags,
) -> ControllerConfig:
    return flags.make(
        http_port=rest.port,
        http_optional=rest.optional,
        metrics_port=metrics.port,
        metrics_optional=metrics.optional,
        scheduler=scheduler.config(),
    )


@takes_flags
def front(
    *,
    controller: Controllers = SERVER,
    flags: Flags[FrontConfig],
    rest: RestFlags,
    join: FrontJoinFlags,
    logs: LogFlags,
    share_port: Annotated[bool, typer.Option(hidden=True)] = False,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve clients in a process of its own, for a controller on any machine."""
    outlive_hangups()
    if parent_pid is not None:
        end_with(parent_pid, signal.SIGTERM)
    from controller.process.front_process import run as run_front

    logs.apply()
    config = flags.make(
        controller=controller,
        http_port=rest.port,
        http_optional=rest.optional,
        shares_port=share_port,
        joining=join.access(),
    )
    words = None if parent_pid is not None else _say_where
    raise typer.Exit(run_front(config, started=words))


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
