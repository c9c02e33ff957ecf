"""A process that runs somebody's code, from this side: started, asked, given up after too long, ended.

Rows cross in memory that both map; a line of JSON each way says where they lie. See
`worker.containers.container_process` for the other end.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.containers import ContainerSpec
from clockwright.errors import ModelError
from clockwright.process import how_it_ended
from clockwright.tensors import TensorSpec

_READ_BYTES = 1 << 16
# A batch runs on one core, unless the operator's environment says otherwise: its duration must not
# depend on who else computes (4,096 rows of a LinearSVC: 19 ms with OpenBLAS's own choice on two busy
# cores, 3 ms so). The libraries read it when they are loaded, so it has to be there from the start.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# What a process that was killed may take to be gone.
_REAP_LIMIT_S = 10.0


class ContainerDiedError(Exception):
    """The process crashed, hung or was ended; it will not answer any more."""


class ContainerFailedError(Exception):
    """The code raised; the process lives."""


class SharedMemory:
    """Bytes that other processes can map; gone with the last of them."""

    def __init__(self, num_bytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("clockwright-io")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.ftruncate(self.fd, num_bytes)
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(
            mmap.mmap(self.fd, num_bytes), np.uint8
        )

    def close(self) -> None:
        """Give the file up; the mapping stays for those who hold it."""
        os.close(self.fd)


class Container:
    """One process. `start` belongs to the thread that lives longest; one caller at a time otherwise."""

    def __init__(self, spec: ContainerSpec, folder: Path, memory: SharedMemory) -> None:
        """Set up; starts nothing.

        Args:
            spec: what it is.
            folder: of the version.
            memory: holds the rows.
        """
        self._spec = spec
        self._folder = folder
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._killing = threading.Lock()
        self._asking = threading.RLock()
        #: Ended from here, on purpose.
        self.stopped = False

    def start(self) -> None:
        """Start the process; `wait_ready` says what became of it.

        The kernel ends it with the thread that called this.
        """
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "worker.containers.container_process"),
                *(str(os.getpid()), str(self._memory.fd)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._memory.fd,),
            env={**_ONE_THREAD, **os.environ},
            bufsize=0,
            # Ctrl-C goes to the worker, which ends this process itself.
            start_new_session=True,
        )

    def wait_ready(self, limit_s: float) -> None:
        """Wait until the code is loaded.

        Raises:
            ModelError: it cannot be, or it took longer than `limit_s`.
        """
        spec = self._spec
        job = {
            "folder": str(self._folder),
            "load": spec.load,
            "method": spec.method,
            "inputs": [_plain(tensor) for tensor in spec.inputs],
            "outputs": [_plain(tensor) for tensor in spec.outputs],
        }
        try:
            reply = self._ask(job, limit_s, f"loading {spec.load}")
        except ContainerDiedError as error:
            raise ModelError(str(error)) from None
        if "refused" in reply:
            self.kill()
            raise ModelError(reply["refused"])

    def run(self, rows: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Run one batch.

        Args:
            rows: how many.
            inputs: where each input begins in the shared memory.
            outputs: where each output is to begin.

        Raises:
            ContainerFailedError: the code raised.
            ContainerDiedError: the process crashed, or hung and was killed.
        """
        job = {"rows": rows, "inputs": list(inputs), "outputs": list(outputs)}
        reply = self._ask(job, self._spec.time_limit_s, f"running a batch of {rows}")
        if "failed" in reply:
            raise ContainerFailedError(reply["failed"])

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        process = self._process
        return process.pid if process else None

    def stop(self) -> None:
        """End it on purpose, whatever it does."""
        self.stopped = True
        self.kill()

    def kill(self) -> None:
        """End the process, and wait until it has gone: it writes to the shared memory."""
        with self._killing:
            process, self._process = self._process, None
            if process is None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started goes too
            process.wait(_REAP_LIMIT_S)
        with self._asking, process:  # whoever reads has heard of the end; closes the pipes
            pass

    def _ask(self, job: dict[str, Any], limit_s: float, doing: str) -> dict[str, Any]:
        with self._asking:
            process = self._process
            if process is None:
                raise ContainerDiedError("the container was stopped")
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died, which reading tells
                process.stdin.write(json.dumps(job).encode() + b"\n")
            line = self._read_line(process, time.monotonic() + limit_s)
            if line:
                reply: dict[str, Any] = json.loads(line)
                return reply
            if line is None:
                why = f"hung: {doing} took more than {limit_s:g} s, the time limit"
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_REAP_LIMIT_S)  # its pipe closes a moment before
                why = f"{how_it_ended(process.returncode or 0)} while {doing}"
            self.kill()
            raise ContainerDiedError(f"the container {why}")

    def _read_line(self, process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
        """A line; empty when the process is gone; None when it is too late."""
        assert process.stdout is not None
        fd = process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._received:
            remaining_ms = (deadline_s - time.monotonic()) * 1e3
            if remaining_ms <= 0 or not poll.poll(remaining_ms):
                return None
            data = os.read(fd, _READ_BYTES)
            if not data:
                return b""
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line


def _plain(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    return spec.name, spec.datatype, spec.row_shape
