"""The command of this floor: `clockwright worker`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Annotated

import typer

from clockwright.cli.flags import SERVER, Controllers, JoinFlags, WorkerFlags, log, takes_flags
from clockwright.cores import parse_cores
from clockwright.errors import ConfigError
from clockwright.process import end_with, outlive_hangups

_MIB = 1 << 20


@takes_flags
def worker(
    *,
    controller: Controllers = SERVER,
    worker_id: Annotated[
        str | None, typer.Option("--id", help="Name of the worker, unique; by default HOST-PID.")
    ] = None,
    flags: WorkerFlags,
    join: JoinFlags,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one worker, which is one GPU, for a controller anywhere."""
    outlive_hangups()
    if parent_pid is not None:
        end_with(parent_pid, signal.SIGTERM)
    # The worker starts its compiler as a new program, for which gRPC need not be prepared; when it
    # tries and cannot, it complains on standard error.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from worker.config import WorkerConfig, default_cache_dir
    from worker.process import check_host_memory, run_worker

    # What it would warn of, a controller in the same terminal says too.
    least = logging.WARNING if parent_pid is None else logging.ERROR
    log(flags.verbose, least, flags.log_format)
    if parent_pid is None:
        # Somebody waits to hear that it has found its controller, or has left, and what it took of a GPU.
        for name in ("worker.link", "worker.devices.gpu_memory"):
            logging.getLogger(name).setLevel(logging.INFO)
    config = WorkerConfig(
        controller=controller,
        access=join.access(),
        device=flags.device,
        worker_id=worker_id,
        num_pages=flags.pages,
        arena_bytes=flags.arena_mib * _MIB,
        precision=flags.precision,
        engine=flags.engine,
        workspace_bytes=None if flags.workspace_mib is None else flags.workspace_mib * _MIB,
        cudnn_search=flags.cudnn_search,
        host_bytes=flags.host_mib * _MIB,
        host_file=flags.host_file,
        cache_dir=default_cache_dir() if flags.cache_dir is None else flags.cache_dir,
        compile_bytes=None if flags.compile_memory_mib is None else flags.compile_memory_mib * _MIB,
        compile_cpu_s=flags.compile_cpu_s,
        cores=() if flags.cores is None else parse_cores(flags.cores),
        threads=flags.threads,
        payload_host=flags.payload_host,
        payload_port=flags.payload_port or 0,
    )
    try:
        if flags.device == "cuda":
            from worker.gpu_workers import run_on_each_gpu, visible_gpus

            num_gpus = visible_gpus()
            check_host_memory(config, num_gpus)
            code = run_on_each_gpu(num_gpus, config.name, controller, flags, join)
        else:
            code = run_worker(config)
    except ConfigError as error:
        if parent_pid is None:
            raise
        # Whoever supervises this worker learns that starting it again is of no use.
        print(f"error: {error}", file=sys.stderr)
        code = os.EX_CONFIG
    raise typer.Exit(code)
