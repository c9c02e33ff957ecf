"""Real processes for tests: servers, workers by hand, and waiting for what they become."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from experiments.live.local_server import off_fixed_ports
from modelzoo.build import write_model

# Longer than anything here takes on the slowest machine; pytest's own limit is longer.
PATIENCE_S = 180.0


def write_models(directory: Path, *, config: str = "", **architectures: str) -> Path:
    """A models directory; every keyword is a model and its architecture."""
    for name, architecture in architectures.items():
        write_model(architecture, directory / name / "1" / "model.onnx")
        if config:
            (directory / name / "config.toml").write_text(config)
    return directory


def until(condition: Callable[[], object], *, what: str) -> None:
    """Wait until something is so."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent to look does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


@contextmanager
def worker(controller: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A `clockwright worker` started by hand; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "clockwright.cli", "worker", "--controller", controller, *arguments]
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def listening(
    command: str, *arguments: str, log: IO[bytes] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `clockwright controller` or `front` by hand, once it listens, and where; killed at the end.

    Args:
        command: which.
        arguments: its flags.
        log: where its log goes; None: to the test's.
    """
    with _says("listening on ", command, *arguments, log=log) as started:
        yield started


@contextmanager
def standing_by(command: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `clockwright controller` with a lease, once it stands by, and where; killed at the end."""
    with _says("standing by on ", command, *arguments) as started:
        yield started


def _call(command: str, *arguments: str) -> list[str]:
    flags = off_fixed_ports(command, arguments)
    return [sys.executable, "-m", "clockwright.cli", command, *flags, *arguments]


@contextmanager
def _says(
    words: str, command: str, *arguments: str, log: IO[bytes] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        _call(command, *arguments),
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(words):
                # What else it says fits into the pipe.
                yield process, line.split()[-1]
                return
        raise AssertionError(f"{command} ended with {process.wait()} before it said {words!r}")
    finally:
        process.kill()
        # One that was stopped dies all the same.
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def controller(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A `clockwright controller`; killed at the end if it still runs."""
    process = subprocess.Popen(
        _call("controller", *arguments),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
