"""The worker's side of a process that runs an operator's code.

Rows cross in memory that both processes map. A line of JSON says where the rows of a batch lie, and another where
the outputs are. `worker.containers.container_process` is the program of that process.
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
from clockwright.wire.tensors import TensorSpec

_READ_BYTES = 1 << 16
# A batch runs on one core, unless the operator's environment says otherwise: its duration must not
# depend on other computations (4,096 rows of a LinearSVC on two busy cores: 19 ms with OpenBLAS's own
# choice, 3 ms with one thread). Libraries read these variables when they are loaded, so they are set from
# the start.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# How long a killed process may take to be gone.
_REAP_LIMIT_S = 10.0


class ContainerDiedError(Exception):
    """The process crashed, hung or was ended; it will not answer any more."""


class ContainerFailedError(Exception):
    """The code raised; the process lives."""


class SharedMemory:
    """Bytes that other processes can map; the memory is freed with its last user."""

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
        """Close the file; existing mappings stay."""
        os.close(self.fd)


class Container:
    """One process. A long-lived thread must call `start`; the other methods take one caller at a time."""

    def __init__(self, spec: ContainerSpec, folder: Path, memory: SharedMemory) -> None:
        """Set up; starts nothing.

        Args:
            spec: the container's declaration.
            folder: the version's folder.
            memory: holds the rows.
        """
        self._spec = spec
        self._folder = folder
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._killing = threading.Lock()
        self._asking = threading.RLock()
        #: Whether `stop` ended the process, on purpose.
        self.stopped = False

    def start(self) -> None:
        """Start the process; `wait_ready` waits until it has loaded the code.

        The kernel ends the process together with the thread that called this method.
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
            ModelError: the code cannot be loaded, or loading took longer than `limit_s`.
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

    def run(self, rows: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Run one batch.

        Args:
            rows: the number of rows of each request.
            inputs: the offset of each input in the shared memory.
            outputs: the offset that each output is to get.

        Raises:
            ContainerFailedError: the code raised.
            ContainerDiedError: the process crashed, or hung and was killed.
        """
        job = {"rows": list(rows), "inputs": list(inputs), "outputs": list(outputs)}
        reply = self._ask(job, self._spec.time_limit_s, f"running a batch of {sum(rows)}")
        if "failed" in reply:
            raise ContainerFailedError(reply["failed"])

    @property
    def pid(self) -> int | None:
        """The process's id, if there is a process."""
        process = self._process
        return process.pid if process else None

    def stop(self) -> None:
        """End the process on purpose, whatever it is doing."""
        self.stopped = True
        self.kill()

    def kill(self) -> None:
        """End the process, and wait until it has gone, because it writes to the shared memory."""
        with self._killing:
            process, self._process = self._process, None
            if process is None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ends its children too
            process.wait(_REAP_LIMIT_S)
        with (
            self._asking,
            process,
        ):  # a reader has seen the end by now; leaving the block closes the pipes
            pass

    def _ask(self, job: dict[str, Any], limit_s: float, doing: str) -> dict[str, Any]:
        with self._asking:
            process = self._process
            if process is None:
                raise ContainerDiedError("the container was stopped")
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died; the read that follows tells how
                process.stdin.write(json.dumps(job).encode() + b"\n")
            line = self._read_line(process, time.monotonic() + limit_s)
            if line:
                reply: dict[str, Any] = json.loads(line)
                return reply
            if line is None:
                why = f"hung: {doing} took more than {limit_s:g} s, the time limit"
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_REAP_LIMIT_S)  # its pipe closes a moment before it is gone
                why = f"{how_it_ended(process.returncode or 0)} while {doing}"
            self.kill()
            raise ContainerDiedError(f"the container {why}")

    def _read_line(self, process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
        """Read a line; empty when the process is gone, None after the deadline."""
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


def _plain(spec: TensorSpec) -> tuple[str, str, tuple[int, ...], int]:
    return spec.name, spec.datatype, spec.row_shape, spec.vary.unit_bytes if spec.vary else 0
