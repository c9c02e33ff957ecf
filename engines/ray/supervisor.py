"""An actor of Ray that runs one of our commands: it starts it, again where it dies, and says what it does.

Runs in Ray's processes, so that it uses the standard library and Ray alone; Ray carries it to its nodes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from engines.ray.reconcile import ENDED, PENDING, RUNNING, UNABLE, group_of

# Pause before a process that died is started again: doubled each time, unless it had run for a while.
_PAUSE_S, _PAUSE_S_MAX, _LIVED_S = 0.5, 30.0, 30.0
# A caller of `said` hears at least this often, so that one that is gone is not waited for.
_NEWS_S = 10.0
#: Longer than a controller and a worker take to drain by their own limits.
LEAVE_S = 30.0
# A line of a log.
_LINE_BYTES_MAX = 1 << 20
_TAIL_LINES = 20
_LAST_WORDS_S = 1.0
# Exit codes: a flag is unknown, or its value cannot be (`clockwright front` and `worker` end with the second).
_HOPELESS = (2, os.EX_CONFIG)

# How the last words end of a process whose port is taken; where a flag in `arguments` says the port, they name the flag.
_TAKEN = os.strerror(errno.EADDRINUSE)
_LISTENS = ("listening on ", "standing by on ")
_ANYWHERE = ("0.0.0.0", "[::]")

# Has the kernel tell a process to end when the one that started it is gone, and becomes the process. A worker then
# drains, while its actor starts another elsewhere.
_TIED = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


def environment_of(more: Mapping[str, str]) -> dict[str, str]:
    """The variables of our processes: those of Ray's, but what Ray sets for its own.

    It allows as many threads as an actor has cores by its bookkeeping, which is 1 for most.
    """
    dropped = ("PYTHONPATH", "OMP_NUM_THREADS")
    own = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("RAY_")}
    return own | dict(more)


async def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: int = asyncio.subprocess.PIPE,
    errors: int | None = None,
) -> asyncio.subprocess.Process:
    """Start a command that ends with this process."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env=environment_of(environment),
        start_new_session=True,
        limit=_LINE_BYTES_MAX,
    )


class News:
    """What a party says of itself, with a number that grows with each change."""

    def __init__(self) -> None:
        self._number = 0
        self._changed = asyncio.Event()

    def change(self) -> None:
        """Wake who waits."""
        self._number += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, seen: int) -> int:
        """Wait until the number is another than `seen`, or for long; returns it."""
        if seen == self._number:
            with suppress(TimeoutError):
                async with asyncio.timeout(_NEWS_S):
                    await self._changed.wait()
        return self._number


class Supervisor:
    """Runs one of our commands, and starts it again where it dies.

    It needs no keeper for that. When its own process is gone, the command's drains and ends, and Ray starts a supervisor
    elsewhere, with a process of another name.
    """

    def __init__(
        self,
        name: str,
        place: tuple[str, str],
        command: Sequence[str],
        environment: Mapping[str, str],
        controllers: Sequence[str],
    ) -> None:
        """Start, in a loop that runs.

        Args:
            name: the actor's.
            place: Ray's name of the node, and the node's address.
            command: of ours, but for what is said here: the worker's name, and where controllers are.
            environment: variables of the process, besides this one's.
            controllers: addresses; none for a controller.
        """
        self._name = name
        self._node, self._host = place
        self._command = list(command)
        self._environment = environment
        self._controllers = list(controllers)
        self._news = News()
        self._wake = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._state = PENDING
        self._worker = self._address = ""
        self._leaving = False
        self._begun_s = time.monotonic()
        self._num_starts = 0
        self._code: int | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._task = asyncio.create_task(self._run())

    async def said(self, seen: int) -> tuple[int, dict[str, Any]]:
        """Say how it stands, once something is another than at number `seen`, or after a while."""
        number = await self._news.after(seen)
        return number, {
            "state": self._state,
            "worker": self._worker,
            "address": self._address,
            "leaving": self._leaving,
            "controllers": self._controllers,
            "age_s": time.monotonic() - self._begun_s,
            "node": self._node,
            "host": self._host,
            "pid": self._process.pid if self._process is not None else 0,
            "starts": self._num_starts,
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "code": self._code,
            "tail": [] if self._state == RUNNING else list(self._tail),
        }

    async def leave(self, tell: bool) -> None:
        """Do not start the process again; unless the controller has told it already, `tell` it to drain and end."""
        self._leaving = True
        if tell:
            self._end_process()
        else:
            # The controller that told it may have gone meanwhile, and its successor knows nothing of it.
            asyncio.get_running_loop().call_later(LEAVE_S, self._end_process)
        self._news.change()

    async def start_again(self, controllers: Sequence[str]) -> None:
        """End the process, and start another that knows these controllers."""
        self._controllers = list(controllers)
        self._begun_s = time.monotonic()
        self._end_process()

    def _end_process(self) -> None:
        self._wake.set()
        if (process := self._process) is None:
            return

        def tell(end: Callable[[], None]) -> None:
            with suppress(ProcessLookupError):
                end()

        tell(process.terminate)
        asyncio.get_running_loop().call_later(LEAVE_S, tell, process.kill)

    async def _run(self) -> None:
        pause_s = 0.0
        while not self._leaving:
            self._wake.clear()
            self._code = await self._run_once()
            if self._leaving or (self._code == 0 and not self._wake.is_set()):
                break
            complain(f"{self._name} ended with {self._code}")
            if taken := [line for line in self._tail if line.endswith(_TAKEN)]:
                self._hear(
                    f"{taken[-1]} on node {self._host}: port = 0 in [{group_of(self._name)}s] takes any free port, "
                    "a fixed one needs a node for each"
                )
            if self._code in _HOPELESS and self._num_starts == 1:
                self._tell(UNABLE)
                return
            lived = time.monotonic() - self._begun_s >= _LIVED_S
            pause_s = _PAUSE_S if lived or not pause_s else min(2 * pause_s, _PAUSE_S_MAX)
            self._tell(PENDING)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
        self._tell(ENDED)

    async def _run_once(self) -> int:
        command = list(self._command)
        if self._controllers:
            command.append(f"--controller={','.join(self._controllers)}")
        if self._name.startswith("worker-"):
            # A controller takes no second process of a name while the first one drains.
            self._worker = f"{self._name.removeprefix('worker-')}-{secrets.token_hex(2)}"
            command.append(f"--id={self._worker}")
        self._num_starts += 1
        self._tail.clear()
        self._begun_s = time.monotonic()
        # Not a pipe of asyncio's: programs that the process has started may hold it for longer than the process lives.
        reading, writing = os.pipe()
        try:
            self._process = await started(
                command, self._environment, output=writing, errors=asyncio.subprocess.STDOUT
            )
        finally:
            os.close(writing)
        if self._wake.is_set():
            # It was told to end while it started.
            self._end_process()
        self._tell(RUNNING)
        hearing = asyncio.create_task(self._hear_all(reading))
        code = await self._process.wait()
        await asyncio.wait({hearing}, timeout=_LAST_WORDS_S)
        hearing.cancel()
        await asyncio.wait({hearing})
        return code

    async def _hear_all(self, reading: int) -> None:
        stream = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", 0)
        )
        with closing(transport):
            while True:
                # A line that is too long is dropped.
                with suppress(ValueError):
                    if not (data := await stream.readline()):
                        return
                    self._hear(data.decode(errors="replace").rstrip("\n"))

    def _hear(self, line: str) -> None:
        print(line, flush=True)
        self._tail.append(line)
        if not line.startswith(_LISTENS):
            return
        host, _, port = line.split()[-1].rpartition(":")
        # Who knew it finds it again.
        self._command = [f"--port={port}" if word == "--port=0" else word for word in self._command]
        self._address = f"{self._host if host in _ANYWHERE else host}:{port}"
        self._news.change()

    def _tell(self, state: str) -> None:
        self._state = state
        self._news.change()


class Placed(Supervisor):
    """A supervisor that is an actor."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        controllers: Sequence[str],
    ) -> None:
        import ray

        place = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        super().__init__(name, place, command, environment, controllers)


def nothing_said() -> dict[str, Any]:
    """What an actor says that is not there yet: nothing."""
    return {
        "state": PENDING,
        "worker": "",
        "address": "",
        "leaving": False,
        "controllers": (),
        "age_s": 0.0,
        "node": "",
        "host": "",
        "pid": 0,
        "starts": 0,
        "nice": 0,
        "code": None,
        "tail": [],
    }


def complain(words: str) -> None:
    """Say it on standard error, which Ray keeps."""
    print(words, file=sys.stderr, flush=True)
