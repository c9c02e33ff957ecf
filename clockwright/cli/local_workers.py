"""Worker processes that a command starts beside itself: by name, `clockwright worker`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from clockwright.cli.flags import JoinFlags, WorkerFlags, to_arguments
from clockwright.containers import CONFIG_FILE, read_container
from clockwright.errors import ModelError
from clockwright.process import how_it_ended

# A worker that is ended has nothing to finish any more. One that compiles may not listen for long.
_LEAVE_LIMIT_S = 3.0
_KILL_LIMIT_S = 5.0
# The pause before a worker that died is started again: twice as long each time, unless it had lived.
_PAUSE_S, _PAUSE_S_MAX, _LIVED_S = 0.5, 30.0, 30.0
# The longest name that a controller takes.
_ID_MAX = 128


def _nothing() -> None:
    pass


class LocalWorkers:
    """Started together, watched, and gone when this process goes, whichever way it goes.

    When one ends that nobody told to leave, standard error hears of it. Where `start` is told how, one that
    died is started again.
    """

    def __init__(self) -> None:
        self._planned: dict[str, WorkerFlags] = {}
        self._join = JoinFlags()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watchers: dict[str, threading.Thread] = {}
        #: The last pause before a worker was started again; none for one that has not died.
        self._pauses_s: dict[str, float] = {}
        #: Workers that can never work with their settings.
        self._unable: set[str] = set()
        self._again: Callable[[float, Callable[[], None]], object] | None = None
        self._give_up: Callable[[], None] = _nothing
        self._leaving = False

    def plan(self, worker_id: str, flags: WorkerFlags) -> None:
        """Have `start` start one more."""
        self._planned[worker_id] = flags

    def plan_containers(self, models_dir: Path, flags: WorkerFlags) -> None:
        """Have `start` start those of the models that are code, with the same flags but their device."""
        for path in sorted(models_dir.glob(f"*/{CONFIG_FILE}")):
            folder = path.parent.resolve()
            try:
                spec, _ = read_container(folder)
            except ModelError:
                continue  # the controller says what is wrong with it
            own = replace(flags, device=f"container:{folder}")
            for index in range(spec.replicas):
                self.plan(f"container-{index}-{folder.name}"[:_ID_MAX], own)

    def start(
        self,
        controller: str,
        *,
        join: JoinFlags | None = None,
        again: Callable[[float, Callable[[], None]], object] | None = None,
        give_up: Callable[[], None] = _nothing,
    ) -> None:
        """Start the processes. Belongs to the main thread.

        The kernel's promise to end them with their parent holds for the parent's thread that started
        them, and the main thread lives longest.

        Args:
            controller: what they dial, HOST:PORT.
            join: what they show there; None: nothing.
            again: has the main thread call a function after so many seconds; itself, it is called from
                any thread. None: a worker that died is not started again.
            give_up: called from any thread when no worker can work, besides those of containers.
        """
        self._again, self._give_up = again, give_up
        self._join = join or JoinFlags()
        for worker_id in self._planned:
            self._launch(controller, worker_id)

    def _launch(self, controller: str, worker_id: str) -> None:
        if self._leaving:
            return
        process = subprocess.Popen(
            self._command(controller, worker_id),
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for the controller, which lets the workers finish first.
            start_new_session=True,
        )
        self._processes[worker_id] = process
        watcher = threading.Thread(
            target=self._watch, args=(controller, worker_id, process), daemon=True
        )
        watcher.start()
        self._watchers[worker_id] = watcher

    def _command(self, controller: str, worker_id: str) -> list[str]:
        return [
            *(sys.executable, "-m", "clockwright.cli", "worker"),
            *("--controller", controller, "--id", worker_id),
            *("--parent-pid", str(os.getpid())),
            *to_arguments(self._join),
            *to_arguments(self._planned[worker_id]),
        ]

    @property
    def num_planned(self) -> int:
        """Processes that `start` starts."""
        return len(self._planned)

    @property
    def num_alive(self) -> int:
        """Processes that run."""
        return sum(watcher.is_alive() for watcher in self._watchers.values())

    @property
    def unable(self) -> bool:
        """Whether no worker can work with its settings, besides those of containers."""
        common = {
            worker_id
            for worker_id, flags in self._planned.items()
            if not flags.device.startswith("container:")
        }
        return bool(self._unable) and self._unable >= (common or self._planned.keys())

    def stop(self) -> None:
        """Tell all to leave, and end those that do not soon; their controller has gone."""
        self.tell_to_leave()
        self._wait_for(_LEAVE_LIMIT_S)
        for process in self._processes.values():
            process.kill()
        self._wait_for(_KILL_LIMIT_S)

    def tell_to_leave(self) -> None:
        """Ask all of them to drain and go; that they end is no news any more."""
        self._leaving = True
        for process in self._processes.values():
            process.terminate()

    def wait(self) -> list[int]:
        """Return when all have ended, with their exit codes."""
        for watcher in self._watchers.values():
            watcher.join()
        return [process.wait() for process in self._processes.values()]

    def leave(self) -> None:
        """From now on a worker that ends is no news."""
        self._leaving = True

    def _wait_for(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        for watcher in self._watchers.values():
            watcher.join(max(0.0, deadline_s - time.monotonic()))

    def _watch(self, controller: str, worker_id: str, process: subprocess.Popen[bytes]) -> None:
        started_s = time.monotonic()
        status = process.wait()
        if self._leaving:
            return
        text = f"worker {worker_id} (pid {process.pid}) {how_it_ended(status)}"
        # One that left was sent home. One that finds its settings wrong at its first start always will.
        at_once = worker_id not in self._pauses_s
        if self._again is None or status == 0:
            print(text, file=sys.stderr, flush=True)
        elif status == os.EX_CONFIG and at_once:
            print(f"{text}: its settings cannot work", file=sys.stderr, flush=True)
            self._unable.add(worker_id)
            if self.unable:
                self._give_up()
        else:
            lived = time.monotonic() - started_s >= _LIVED_S
            pause_s = _PAUSE_S if lived or at_once else 2 * self._pauses_s[worker_id]
            pause_s = self._pauses_s[worker_id] = min(pause_s, _PAUSE_S_MAX)
            print(f"{text}; starting it again in {pause_s:g} s", file=sys.stderr, flush=True)
            with suppress(RuntimeError):  # the main thread's loop has just ended
                self._again(pause_s, partial(self._launch, controller, worker_id))
