"""Worker processes that a command starts beside itself: by name, `clockwright worker`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clockwright.cli.flags import WorkerFlags
from clockwright.containers import CONFIG_FILE, ContainerSpec, read_container
from clockwright.errors import ModelError
from clockwright.process import how_it_ended

# A worker that was told to leave has nothing to finish any more: its actions are milliseconds.
_LEAVE_LIMIT_S = 10.0
_TERMINATE_LIMIT_S = 5.0
# The longest name that a controller takes.
_ID_MAX = 128


class LocalWorkers:
    """Started together, watched, and gone when this process goes, whichever way it goes.

    When one ends that nobody told to leave, standard error hears of it.
    """

    def __init__(self) -> None:
        self._planned: dict[str, WorkerFlags] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []
        self._leaving = False

    def plan(self, worker_id: str, flags: WorkerFlags) -> None:
        """Have `start` start one more."""
        self._planned[worker_id] = flags

    def plan_containers(self, models_dir: Path, flags: WorkerFlags) -> None:
        """Have `start` start those of the models that are code, with the same flags but their device."""
        for folder, spec in containers(models_dir):
            own = replace(flags, device=f"container:{folder}")
            for index in range(spec.replicas):
                self.plan(f"container-{index}-{folder.name}"[:_ID_MAX], own)

    def start(self, controller: str) -> None:
        """Start the processes; they dial `controller` (HOST:PORT). Belongs to the main thread.

        The kernel's promise to end them with their parent holds for the parent's thread that started
        them, and the main thread lives longest.
        """
        for worker_id, flags in self._planned.items():
            self._launch(
                worker_id,
                [
                    *(sys.executable, "-m", "clockwright.cli", "worker"),
                    *("--controller", controller, "--id", worker_id),
                    *("--parent-pid", str(os.getpid())),
                    *flags.to_arguments(),
                ],
            )

    def _launch(self, worker_id: str, command: Sequence[str]) -> None:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for the controller, which lets the workers finish first.
            start_new_session=True,
        )
        self._processes[worker_id] = process
        watcher = threading.Thread(target=self._watch, args=(worker_id, process), daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    @property
    def num_planned(self) -> int:
        """Processes that `start` starts."""
        return len(self._planned)

    @property
    def num_alive(self) -> int:
        """Processes that run."""
        return sum(watcher.is_alive() for watcher in self._watchers)

    def stop(self) -> None:
        """Wait until all have left, as the controller told them to; end those that do not."""
        self._leaving = True
        self._join(_LEAVE_LIMIT_S)
        for process in self._processes.values():
            process.terminate()
        self._join(_TERMINATE_LIMIT_S)
        for process in self._processes.values():
            process.kill()
        self._join(_TERMINATE_LIMIT_S)

    def tell_to_leave(self) -> None:
        """Ask all of them to drain and go; that they end is no news any more."""
        self._leaving = True
        for process in self._processes.values():
            process.terminate()

    def wait(self) -> list[int]:
        """Return when all have ended, with their exit codes."""
        for watcher in self._watchers:
            watcher.join()
        return [process.wait() for process in self._processes.values()]

    def leave(self) -> None:
        """From now on a worker that ends is no news."""
        self._leaving = True

    def _join(self, limit_s: float) -> None:
        for watcher in self._watchers:
            watcher.join(limit_s)

    def _watch(self, worker_id: str, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._leaving:
            text = f"worker {worker_id} (pid {process.pid}) {how_it_ended(status)}"
            print(text, file=sys.stderr, flush=True)


def containers(models_dir: Path) -> list[tuple[Path, ContainerSpec]]:
    """Folders of a models directory that hold code; malformed ones are the controller's to report."""
    found = []
    for path in sorted(models_dir.glob(f"*/{CONFIG_FILE}")):
        try:
            spec, _ = read_container(path.parent)
        except ModelError:
            continue
        found.append((path.parent.resolve(), spec))
    return found
