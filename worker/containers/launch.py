"""Starts a container's program: `python -m worker.containers.launch PARENT GROUP FOLDER COMMAND ...`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

from clockwright.process import end_with
from worker.containers.frames import SOCKET_VARIABLE, FrameConnection, Kind


def settle(parent_pid: int, group: str) -> None:
    """Make this process a container: it dies with its worker, and first when memory runs out.

    `group` is the folder of its control group; empty: it is not bounded.
    """
    end_with(parent_pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if group:
        try:
            Path(group, "cgroup.procs").write_text("0", encoding="ascii")
        except OSError as error:
            # It serves without bounds, as where there are no groups.
            print(f"memory_mib and cpus, if set, do not hold: {group}: {error}", file=sys.stderr)


def connect() -> FrameConnection:
    """Connect to the worker that started this process."""
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(os.environ[SOCKET_VARIABLE])
    return FrameConnection(connected)


def main() -> None:
    """Become the program; tell the worker if that fails."""
    _, parent_pid, group, folder, *command = sys.argv
    settle(int(parent_pid), group)
    os.chdir(folder)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        words = f"{command[0]} cannot be started: {error.strerror}"
        connect().send(Kind.ERROR, words.encode())


if __name__ == "__main__":
    main()
