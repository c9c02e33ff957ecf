"""Child processes of a command, which end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from clockwright.cli.flags import LogFlags
from clockwright.process import how_it_ended
from clockwright.settings import Flags

# Grace period before a kill. A worker that compiles may not react for long.
_LEAVE_LIMIT_S = 3.0
_KILL_LIMIT_S = 5.0
# Pause before a process that died is restarted: doubled each time, unless it had run for a while.
_PAUSE_S, _PAUSE_S_MAX, _LIVED_S = 0.5, 30.0, 30.0

C = TypeVar("C")


def _nothing() -> None:
    pass


class LocalProcesses(ABC, Generic[C]):
    """Started together, watched, and gone when this process goes, whichever way it goes.

    If one ends without being told to, that is printed to standard error. If `start` is given `again`, a process
    that died is restarted.
    """

    #: What each is, for messages.
    noun = "process"

    def __init__(self, logs: LogFlags) -> None:
        self._logs = logs
        self._planned: dict[str, Flags[C]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watchers: dict[str, threading.Thread] = {}
        #: The last pause before a restart, of those that died.
        self._pauses_s: dict[str, float] = {}
        #: Those whose settings cannot work.
        self._unable: set[str] = set()
        self._again: Callable[[float, Callable[[], None]], object] | None = None
        self._give_up: Callable[[], None] = _nothing
        self._leaving = False
        self._credentials: Sequence[str] = ()

    def plan(self, name: str, flags: Flags[C]) -> None:
        """Have `start` start one more."""
        self._planned[name] = flags

    def start(
        self,
        controller: str,
        *,
        credentials: Sequence[str] = (),
        again: Callable[[float, Callable[[], None]], object] | None = None,
        give_up: Callable[[], None] = _nothing,
    ) -> None:
        """Start the processes. Belongs to the main thread.

        The kernel's promise to end them with their parent holds for the parent's thread that started
        them, and the main thread lives longest.

        Args:
            controller: its address, HOST:PORT.
            credentials: flags with their credentials.
            again: has the main thread call a function after a number of seconds; callable from any thread.
                None: a process that died is not restarted.
            give_up: called from any thread when they are `unable`.
        """
        self._credentials = credentials
        self._again, self._give_up = again, give_up
        for name in self._planned:
            self._launch(controller, name)

    def _launch(self, controller: str, name: str) -> None:
        if self._leaving:
            return
        process = subprocess.Popen(
            self._command(controller, name),
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for this process, which lets them finish first.
            start_new_session=True,
        )
        self._processes[name] = process
        watcher = threading.Thread(
            target=self._watch, args=(controller, name, process), daemon=True
        )
        watcher.start()
        self._watchers[name] = watcher

    def _command(self, controller: str, name: str) -> list[str]:
        return [
            *(sys.executable, "-m", "clockwright.cli", *self._arguments(controller, name)),
            *self._logs.spell(),
            *self._credentials,
            *("--parent-pid", str(os.getpid())),
        ]

    @abstractmethod
    def _arguments(self, controller: str, name: str) -> list[str]:
        """Its own part of that."""

    @property
    def num_planned(self) -> int:
        """Processes that `start` starts."""
        return len(self._planned)

    @property
    def unable(self) -> bool:
        """Whether the settings of all cannot work."""
        return bool(self._unable) and self._unable >= self._needed()

    def _needed(self) -> set[str]:
        """Processes without which the command gives up."""
        return set(self._planned)

    def stop(self) -> None:
        """Tell all to end, and kill those that do not soon; their controller has ended."""
        self.tell_to_leave()
        self._join(_LEAVE_LIMIT_S)
        for process in self._processes.values():
            process.kill()
        self._join(_KILL_LIMIT_S)

    def tell_to_leave(self) -> None:
        """Ask all of them to drain and end; their ends are not reported any more."""
        self._leaving = True
        for process in self._processes.values():
            process.terminate()

    def wait(self) -> list[int]:
        """Return when all have ended, with their exit codes."""
        for watcher in self._watchers.values():
            watcher.join()
        return [process.wait() for process in self._processes.values()]

    def leave(self) -> None:
        """Stop reporting ends of processes."""
        self._leaving = True

    def _join(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        for watcher in self._watchers.values():
            watcher.join(max(0.0, deadline_s - time.monotonic()))

    def _watch(self, controller: str, name: str, process: subprocess.Popen[bytes]) -> None:
        started_s = time.monotonic()
        status = process.wait()
        if self._leaving:
            return
        text = f"{self.noun} {name} (pid {process.pid}) {how_it_ended(status)}"
        # A process that left was told to. One whose settings were wrong at its first start will always fail.
        at_once = name not in self._pauses_s
        if self._again is None or status == 0:
            print(text, file=sys.stderr, flush=True)
        elif status == os.EX_CONFIG and at_once:
            print(f"{text}: its settings cannot work", file=sys.stderr, flush=True)
            self._unable.add(name)
            if self.unable:
                self._give_up()
        else:
            lived = time.monotonic() - started_s >= _LIVED_S
            pause_s = _PAUSE_S if lived or at_once else 2 * self._pauses_s[name]
            pause_s = self._pauses_s[name] = min(pause_s, _PAUSE_S_MAX)
            print(f"{text}; starting it again in {pause_s:g} s", file=sys.stderr, flush=True)
            with suppress(RuntimeError):  # the main thread's loop has just ended
                self._again(pause_s, partial(self._launch, controller, name))
