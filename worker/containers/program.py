"""A program in a process of its own, or at an address, that speaks the protocol of `worker.containers.frames`.

Python code is such a program: `worker.containers.container_process`. Its rows cross in memory that both processes map,
those of other programs in frames.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from clockwright.containers import ContainerSpec
from clockwright.errors import ModelError, ProtocolError
from clockwright.foreign import printable
from clockwright.process import how_it_ended
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec, Variable
from worker.containers.bounds import Bounds, ControlGroup
from worker.containers.container import (
    Container,
    ContainerAwayError,
    ContainerDiedError,
    ContainerFailedError,
    SharedMemory,
)
from worker.containers.frames import (
    SOCKET_VARIABLE,
    FrameConnection,
    Kind,
    Tensor,
    join_tensors,
    most_bytes,
    split_tensors,
)

T = TypeVar("T")

# A batch runs on one core, unless the operator's environment says otherwise: its duration must not
# depend on other computations (4,096 rows of a LinearSVC on two busy cores: 19 ms with OpenBLAS's own
# choice, 3 ms with one thread). Libraries read these variables when they are loaded, so they are set from
# the start.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# How long a killed process may take to be gone.
_REAP_LIMIT_S = 10.0
# A process is gone a moment after its end of the connection. One that is not has closed it.
_LEAVE_LIMIT_S = 2.0
# The path of a socket has 107 bytes, and TMPDIR may be long.
_FOLDER_BYTES_MAX = 100
# A machine that is not there does not answer at all.
_DIAL_LIMIT_S = 5.0


class ProgramContainer(Container):
    """One program."""

    def __init__(
        self, spec: ContainerSpec, folder: Path, memory: SharedMemory, bounds: Bounds
    ) -> None:
        """Set up; starts nothing. The bounds hold its memory and processor time."""
        super().__init__(spec, folder, memory)
        self._bounds = bounds
        self._group: ControlGroup | None = None
        self._listener: _Listener | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: FrameConnection | None = None
        self._killing = threading.Lock()
        self._asking = threading.RLock()

    @override
    def start(self) -> None:
        """Start the process, unless the program runs already.

        The kernel ends the process together with the thread that called this method.
        """
        spec = self._spec
        if spec.address:
            return
        self._listener = _Listener()
        # The group comes first, so that the program is never outside of it.
        self._group = self._bounds.open(spec)
        settings = [str(os.getpid()), str(self._group.folder) if self._group else ""]
        if spec.load:
            job = {
                "folder": str(self._folder),
                "load": spec.load,
                "method": spec.method,
                "inputs": [_plain(tensor) for tensor in spec.inputs],
                "outputs": [_plain(tensor) for tensor in spec.outputs],
                "memory": self._memory.fd,
            }
            command = ["worker.containers.container_process", *settings, json.dumps(job)]
        else:
            command = ["worker.containers.launch", *settings, str(self._folder), *spec.command]
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            # What it prints is no answer of the worker's.
            stdout=2,
            pass_fds=(self._memory.fd,) if spec.load else (),
            env={**_ONE_THREAD, **os.environ, SOCKET_VARIABLE: self._listener.path},
            # Ctrl-C goes to the worker, which ends this process itself.
            start_new_session=True,
        )

    @override
    def wait_ready(self, limit_s: float) -> None:
        spec = self._spec
        doing = f"loading {spec.load}" if spec.load else f"starting {spec.title}"
        end_s = time.monotonic() + limit_s

        # Before the lock, because `stop` waits for the lock.
        dialled = self._dial(end_s) if spec.address else None

        def connect() -> tuple[Kind, bytearray]:
            connection = self._connection = FrameConnection(dialled or self._accept(end_s))
            if self.stopped:  # before there was a connection to interrupt
                raise EOFError
            return connection.receive(most_bytes=0, deadline_s=end_s)

        try:
            kind, body = self._guard(limit_s, doing, connect)
        except ContainerDiedError as error:
            raise ModelError(str(error)) from None
        if kind is Kind.READY:
            return
        self.kill()
        if kind is Kind.ERROR:
            raise ModelError(_words(body))
        raise ModelError(f"found a frame {kind.name} while {doing}, expected READY")

    def _accept(self, end_s: float) -> socket.socket:
        process = self._process
        if process is None or self._listener is None:
            raise EOFError  # it was stopped
        with contextlib.closing(self._listener):
            return self._listener.accept(process.pid, end_s)

    def _dial(self, end_s: float) -> socket.socket:
        limit_s = min(_DIAL_LIMIT_S, end_s - time.monotonic())
        kind, _, place = self._spec.address.partition("://")
        host, _, port = place.rpartition(":")
        dialled: socket.socket | None = None
        try:
            if kind == "tcp":
                dialled = socket.create_connection((host.strip("[]"), int(port)), limit_s)
                # A batch must not wait for an acknowledgement of the one before.
                dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            else:
                dialled = socket.socket(socket.AF_UNIX)
                dialled.settimeout(limit_s)
                dialled.connect(place)
        except (OSError, UnicodeError) as error:  # the second: no DNS name
            if dialled is not None:
                dialled.close()
            raise ContainerAwayError(f"{self._spec.address}: {error}") from None
        return dialled

    @override
    def _run(self, rows: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        if not self._spec.load:
            super()._run(rows, inputs, outputs)
            return
        places = [len(rows), *rows, *inputs, *outputs]
        self._ask(Kind.RUN_IN_MEMORY, [struct.pack(f"<{len(places)}Q", *places)], sum(rows), 0)

    @override
    def _run_tensors(self, inputs: Sequence[Tensor], rows: int) -> Sequence[Tensor]:
        most = most_bytes((len(s.shape(rows)), s.batch_bytes(rows)) for s in self._spec.outputs)
        return self._ask(Kind.RUN, join_tensors(inputs), rows, most)

    def _ask(
        self, kind: Kind, body: Sequence[Buffer], rows: int, most_bytes: int
    ) -> Sequence[Tensor]:
        end_s = self._batch_end_s

        def talk() -> Sequence[Tensor]:
            connection = self._connection
            if connection is None:
                raise EOFError
            connection.send(kind, *body, deadline_s=end_s)
            said, answer = connection.receive(most_bytes=most_bytes, deadline_s=end_s)
            if said is Kind.ERROR:
                raise ContainerFailedError(_words(answer))
            if said is not Kind.DONE:
                raise ProtocolError(f"found a frame {said.name}, expected DONE or ERROR")
            return split_tensors(answer) if kind is Kind.RUN else ()

        return self._guard(self._spec.time_limit_s, f"running a batch of {rows}", talk)

    def _guard(self, limit_s: float, doing: str, talk: Callable[[], T]) -> T:
        """Talk with the program; end it if it does not answer as it should. Raises ContainerDiedError that says why."""
        with self._asking:
            process = self._process
            try:
                return talk()
            except TimeoutError:
                why = f"hung: {doing} took more than {limit_s:g} s, the time limit"
            except ProtocolError as error:
                why = f"broke the protocol while {doing}: {error}"
            except (EOFError, OSError):
                why = f"{self._how_it_ended(process)} while {doing}"
            self.kill()
            raise ContainerDiedError(f"the container {why}")

    def _how_it_ended(self, process: subprocess.Popen[bytes] | None) -> str:
        if process is None:
            return "closed the connection" if self._spec.address else "was stopped"
        try:
            ended = how_it_ended(process.wait(_LEAVE_LIMIT_S))
        except subprocess.TimeoutExpired:
            return "closed the connection"
        group = self._group
        return ended + (group.verdict() if group else "")

    @property
    def pid(self) -> int | None:  # type: ignore[override]
        """The process's id, if there is a process."""
        process = self._process
        return process.pid if process else None

    @override
    def kill(self) -> None:
        with self._killing:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
            listener, self._listener = self._listener, None
            group, self._group = self._group, None
            if connection is not None:
                connection.interrupt()
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    # Ends its children too; those in sessions of their own end with the control group.
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(_REAP_LIMIT_S)
        with self._asking:  # a reader has seen the end by now
            if connection is not None:
                connection.close()
            if listener is not None:
                listener.close()
            if group is not None:
                group.close()


class _Listener:
    """The socket that a program connects to, for this user only."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="clockwright-")
        if len(os.fsencode(self._folder.name)) > _FOLDER_BYTES_MAX:
            self._folder.cleanup()
            self._folder = tempfile.TemporaryDirectory(prefix="clockwright-", dir="/tmp")
        self.path = f"{self._folder.name}/socket"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(1)

    def accept(self, pid: int, end_s: float) -> socket.socket:
        """Wait until the program connects. Raises TimeoutError if it does not; EOFError if it has ended."""
        watched = os.pidfd_open(pid)
        try:
            poll = select.poll()
            for fd in (watched, self._socket.fileno()):
                poll.register(fd, select.POLLIN)
            found = poll.poll(max(end_s - time.monotonic(), 0) * 1e3)
        finally:
            os.close(watched)
        if not found:
            raise TimeoutError
        if self._socket.fileno() not in dict(found):
            raise EOFError
        return self._socket.accept()[0]

    def close(self) -> None:
        """Take no more connections."""
        self._socket.close()
        self._folder.cleanup()


def _words(body: Buffer) -> str:
    return printable(bytes(body).decode(errors="replace"), 2000) or "it failed"


def _plain(spec: TensorSpec) -> tuple[object, ...]:
    vary = spec.vary or Variable(0)
    return spec.name, spec.datatype, spec.row_shape, vary.unit_bytes, vary.symbols, vary.most
