"""`clockwright worker --device cuda`: one worker process for each GPU of this host."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from clockwright.cli.flags import JoinFlags, LogFlags
from clockwright.cli.local_workers import LocalWorkers
from clockwright.cli.worker_settings import WorkerSettings
from clockwright.errors import ConfigError
from clockwright.settings import Flags, spell
from worker.config import WorkerConfig, compile_threads


def visible_gpus() -> int:
    """How many GPUs torch sees here; CUDA_VISIBLE_DEVICES may hide some.

    Raises ConfigError if there is no GPU, or no torch; says what is missing.
    """
    try:
        from worker.devices.cuda import check_installation, installation
    except ImportError as error:
        raise ConfigError(f"device 'cuda': {error}; install clockwright[gpu]") from None
    found = installation()
    check_installation(found, 0)
    return found.num_devices


def run_on_each_gpu(
    num_gpus: int,
    name: str,
    controller: str,
    flags: Flags[WorkerConfig],
    join: JoinFlags,
    logs: LogFlags,
) -> int:
    """Run a worker process per GPU until all have left. Each adds its GPU's number to the name.

    When one ends early, a line on standard error says so, and the others go on. Returns the exit code: 0 if all left as
    ordered, `os.EX_CONFIG` if no worker can run with these settings, else 1.
    """
    # One copy of the weights for all. It goes with the last process that has it open.
    file = os.memfd_create("clockwright-weights")
    os.ftruncate(file, flags["host_mib"] << 20)
    shared = flags.common(WorkerSettings).saying(host_file=Path(f"/proc/{os.getpid()}/fd/{file}"))
    workers = LocalWorkers(logs)
    for index in range(num_gpus):
        port = flags["payload_port"] and flags["payload_port"] + index
        threads = flags["threads"] or compile_threads(num_gpus)
        own = shared.saying(device=f"cuda:{index}", payload_port=port, threads=threads)
        workers.plan(f"{name}-gpu{index}", own)
    told_to_leave = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told_to_leave.set())
    workers.start(controller, credentials=spell(vars(join)))
    while workers.num_alive and not told_to_leave.wait(0.2):
        pass
    if told_to_leave.is_set():
        # Each worker asks the controller for permission to go, and finishes its actions.
        workers.tell_to_leave()
    codes = set(workers.wait())
    if codes == {os.EX_CONFIG}:
        return os.EX_CONFIG
    return 0 if codes == {0} else 1
