"""A `clockwright up` in processes of its own, as users run it."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

_READY = "ready: "
_LISTENING = "listening on "
_REST = "REST on "
_METRICS = "metrics on "
_FOR_PEOPLE = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")

# Thrice what draining, workers included, may take by their own limits.
_STOP_LIMIT_S = 60.0


def free_ports(number: int) -> list[int]:
    """Find ports of this machine that nothing uses now, for programs that cannot be told to choose one."""
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in made]


def off_fixed_ports(command: str, arguments: Sequence[str]) -> list[str]:
    """Flags with which a command serves nothing on a port that is one for the whole machine.

    Args:
        command: `up`, `controller`, `front`, or `picker` or `scaler`, which have no such ports.
        arguments: of it; where they name a port, that is served.
    """
    doors = {"front": ("http",), "picker": (), "scaler": ()}.get(command, ("http", "metrics"))
    return [f"--no-{door}" for door in doors if f"--{door}-port" not in arguments]


def folders(scratch: Path | str) -> list[str]:
    """Flags of a server that takes its models from a folder below this one, and keeps in another what it compiles."""
    return ["--models", f"{scratch}/models", "--cache-dir", f"{scratch}/cache"]


class LocalServer:
    """Started on a free port; stopped, as SIGTERM does it, at the end of the `with` block."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        show: Callable[[str], None] | None = None,
        start_limit_s: float = 300.0,
        command: str = "up",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process; entering the block waits until it is ready.

        Args:
            arguments: of the command, but for `--port`. There is no REST unless `--http-port` says otherwise, and
                there are no metrics unless `--metrics-port` does.
            show: told each line that it prints on standard output.
            start_limit_s: how long preparing the models may take.
            command: `up`, or `controller`, which starts no workers.
            environment: variables that the process has besides, or instead of, those of this one.
        """
        self._limit_s = start_limit_s
        self._show = show
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        #: Everything it printed on standard output so far.
        self.output: list[str] = []
        #: HOST:PORT, once it listens.
        self.address = ""
        #: URL of REST, where it is on.
        self.rest = ""
        #: URL of the metrics, where they are on.
        self.metrics = ""
        arguments = [*off_fixed_ports(command, arguments), *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clockwright.cli", command, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            # Its lines are read here: colours and redrawn lines are for people.
            env={name: value for name, value in os.environ.items() if name not in _FOR_PEOPLE}
            | dict(environment or {}),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, start: str) -> str:
        """Wait for a line of output that starts with `start`.

        Raises:
            RuntimeError: the process ended, or the line did not come in time.
        """
        deadline_s = time.monotonic() + self._limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(deadline_s - time.monotonic(), 0))
            except queue.Empty:
                raise RuntimeError(
                    f"clockwright up: no line {start!r} within {self._limit_s:g} s"
                ) from None
            if line is None:
                raise RuntimeError(f"clockwright up ended with {self.process.wait()}")
            if line.startswith(_LISTENING):
                self.address = line.removeprefix(_LISTENING)
            if line.startswith(_REST):
                self.rest = line.removeprefix(_REST)
            if line.startswith(_METRICS):
                self.metrics = line.removeprefix(_METRICS)
            if line.startswith(start):
                return line

    def stop(self) -> int:
        """End it as SIGTERM does; returns the exit code, also when it has ended before."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._reader.join()
            if self.process.stdout is not None:
                self.process.stdout.close()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.rstrip("\n")
            self.output.append(text)
            if self._show is not None:
                self._show(text)
            self._lines.put(text)
        self._lines.put(None)

    def __enter__(self) -> Self:
        try:
            self.wait_for(_READY)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
