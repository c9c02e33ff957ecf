"""The command of this floor: `clockwright worker`."""

from __future__ import annotations

import logging
import os
import signal
from typing import Annotated

import typer

from clockwright.cli.flags import SERVER, Controllers, JoinFlags, LogFlags, takes_flags
from clockwright.process import end_with, outlive_hangups
from clockwright.settings import Flags
from worker.config import WorkerConfig


@takes_flags
def worker(
    *,
    controller: Controllers = SERVER,
    worker_id: Annotated[
        str | None, typer.Option("--id", help="Name of the worker, unique; by default HOST-PID.")
    ] = None,
    flags: Flags[WorkerConfig],
    join: JoinFlags,
    logs: LogFlags,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one worker (one GPU, or CPU cores) for a controller on any machine."""
    outlive_hangups()
    if parent_pid is not None:
        end_with(parent_pid, signal.SIGTERM)
    # The worker starts its compiler as a new program, for which gRPC need not be prepared; when it
    # tries and cannot, it complains on standard error.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from worker.process import check_host_memory, run_worker

    # What it would warn of, a controller in the same terminal says too.
    least = logging.WARNING if parent_pid is None else logging.ERROR
    logs.apply(least)
    if parent_pid is None:
        # An operator wants to see that it found its controller, or left, and how much memory of the GPU it took.
        for name in ("worker.link", "worker.devices.gpu_memory"):
            logging.getLogger(name).setLevel(logging.INFO)
    config = flags.make(controller=controller, access=join.access(), worker_id=worker_id)
    if config.device == "cuda":
        from worker.gpu_workers import run_on_each_gpu, visible_gpus

        num_gpus = visible_gpus()
        check_host_memory(config, num_gpus)
        code = run_on_each_gpu(num_gpus, config.name, controller, flags, join, logs)
    else:
        code = run_worker(config)
    raise typer.Exit(code)
