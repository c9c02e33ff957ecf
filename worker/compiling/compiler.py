"""The worker's side of the compiler process, which may crash or hang at any time.

Several jobs run at once, each in a process of its own. Those that profile run one after the other: two would disturb
each other's measurements. A slow job steps aside: it goes on in its process, and the next job has its turn. So a
model that never ends delays others by some seconds, not until its time limit. As many jobs may be aside as have turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clockwright.errors import ModelError
from clockwright.foreign import printable
from clockwright.process import how_it_ended
from worker.engines.choice import Engine
from worker.models.model_files import (
    COMPILE_BYTES,
    COMPILE_CPU_S,
    CompiledModel,
    Limits,
    ModelSource,
)
from worker.models.precision import Precision

logger = logging.getLogger(__name__)

#: Most models are compiled and measured in less.
LONG_S = 15.0

# More at once read the same disk, and each process has libraries of 300 MiB in memory.
_AT_ONCE_MAX = 4


def jobs_at_once(cores: int, available_bytes: int | None, memory_bytes: int) -> int:
    """How many jobs have a turn at once: as many as there are cores and memory for, those aside counted; at least 1.

    Args:
        cores: those that compiling keeps busy.
        available_bytes: the host's free memory; None: not known.
        memory_bytes: what one job may take.
    """
    most = _AT_ONCE_MAX if available_bytes is None else available_bytes // (2 * memory_bytes)
    return max(min(cores, most, _AT_ONCE_MAX), 1)


class CompilerKilledError(ModelError):
    """A signal ended the compiler: short memory, an operator or a crash, which may not come again."""


@dataclass(slots=True, eq=False)
class _Seat:
    """A place for a process."""

    process: subprocess.Popen[bytes] | None = None

    async def close(self) -> None:
        """Kill the process, whatever it is doing."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(_reap, process)


class Compiler:
    """Starts compiler processes for jobs, and keeps those that were not killed for later jobs."""

    def __init__(
        self,
        *,
        time_limit_s: float,
        memory_bytes: int = COMPILE_BYTES,
        cpu_limit_s: float = COMPILE_CPU_S,
        long_s: float = LONG_S,
        thread_counts: Sequence[int] = (1,),
        cores: Sequence[int] = (),
        at_once: int = 1,
    ) -> None:
        """Start nothing yet.

        Args:
            time_limit_s: a job that takes longer is given up.
            memory_bytes: a job that takes more memory is given up.
            cpu_limit_s: a job that takes more processor time for each thread that it may have is given up.
            long_s: a job that takes longer steps aside.
            thread_counts: the numbers of threads that a run on onnxruntime may have, ascending.
            cores: those to use in addition to the process's own.
            at_once: so many jobs have a turn at once, and as many may be aside.
        """
        self._time_limit_s = time_limit_s
        self._memory_bytes = memory_bytes
        self._cpu_limit_s = cpu_limit_s * max(thread_counts)
        self._run_on = {
            "thread_counts": list(thread_counts),
            "cores": list(cores),
            "cpu_s": self._cpu_limit_s,
        }
        self._long_s = long_s
        self.at_once = at_once
        self._turns, self._aside = asyncio.Semaphore(at_once), asyncio.Semaphore(at_once)
        self._measuring = asyncio.Lock()
        #: Those whose process has no job, the one that has the next job last.
        self._idle: list[_Seat] = []
        self._busy: set[_Seat] = set()

    async def compile(
        self,
        source: ModelSource,
        folder: Path,
        limits: Limits,
        progress: Callable[[str], None],
        *,
        precision: Precision | None = None,
        engines: Sequence[Engine] = (),
    ) -> CompiledModel:
        """Do what `worker.compiling.compile.compile_model` does; a hang is a ModelError too.

        `precision` and `engines` are a GPU's; a precision of None is for onnxruntime on this processor. Raises
        CompilerKilledError if a signal ended the process.
        """
        job = {**_describe(source, "compile"), "folder": str(folder), "limits": asdict(limits)}
        if precision is not None:
            job |= {"precision": precision.value, "engines": [each.value for each in engines]}
        reply = await self._ask(job, progress)
        return CompiledModel.from_json(reply["done"])

    async def describe(self, source: ModelSource) -> CompiledModel:
        """Do what `worker.compiling.compile.describe_model` does; a hang is a ModelError too."""
        reply = await self._ask(_describe(source, "describe"), _ignore)
        return CompiledModel.from_json(reply["done"])

    async def profile(
        self, folder: Path, batch_sizes: Sequence[int], progress: Callable[[str], None]
    ) -> dict[int, int]:
        """Do what `worker.compiling.compile.profile_model` does; a hang is a ModelError too."""
        job = {"kind": "profile", "folder": str(folder), "batch_sizes": list(batch_sizes)}
        reply = await self._ask(job, progress)
        return {int(size): ns for size, ns in reply["done"].items()}

    @property
    def pids(self) -> list[int]:
        """The ids of all processes."""
        seats = (*self._idle, *self._busy)
        return [seat.process.pid for seat in seats if seat.process is not None]

    async def close(self) -> None:
        """Kill the processes, whatever they are doing."""
        idle, self._idle = self._idle, []
        for seat in (*idle, *self._busy):
            await seat.close()

    async def _ask(self, job: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
        async with AsyncExitStack() as turn:
            if job["kind"] == "profile":
                await turn.enter_async_context(self._measuring)
            await turn.enter_async_context(self._turns)
            stepping = asyncio.create_task(self._step_aside(turn))
            seat = self._idle.pop() if self._idle else _Seat()
            self._busy.add(seat)
            try:
                reply = await self._ask_at(seat, job, progress)
            finally:
                stepping.cancel()
                self._busy.discard(seat)
                if seat.process is not None and len(self._idle) < self.at_once:
                    self._idle.append(seat)
                else:
                    await seat.close()
        if "refused" in reply:
            raise ModelError(reply["refused"])
        return reply

    async def _step_aside(self, turn: AsyncExitStack) -> None:
        """Let others have their turn when a job has taken long."""
        await asyncio.sleep(self._long_s)
        await self._aside.acquire()
        given_up = turn.pop_all()
        turn.callback(self._aside.release)
        await given_up.aclose()

    async def _ask_at(
        self, seat: _Seat, job: dict[str, Any], progress: Callable[[str], None]
    ) -> dict[str, Any]:
        finished = False
        try:
            async with asyncio.timeout(self._time_limit_s):
                reply = await self._exchange(seat, job, progress)
            # What it could not take has left it in an unknown state.
            finished = "exhausted" not in reply
        except TimeoutError:
            raise ModelError(
                f"it took more than {self._time_limit_s:g} s to {job['kind']}, the time limit"
            ) from None
        finally:
            # After a time-out or a cancellation the process is still busy with the old job.
            if not finished:
                await seat.close()
        if "exhausted" in reply:
            raise ModelError(
                f"it took more than {self._memory_bytes >> 20} MiB of memory to {job['kind']}, the limit"
                " (--compile-memory-mib)"
            )
        return reply

    async def _exchange(
        self, seat: _Seat, job: dict[str, Any], progress: Callable[[str], None]
    ) -> dict[str, Any]:
        if seat.process is not None and seat.process.poll() is not None:
            await seat.close()  # it was killed between two jobs
        if seat.process is None:
            seat.process = _start(self._memory_bytes)
        process = seat.process
        assert process.stdout is not None
        stage = "starting"
        await asyncio.to_thread(_write, process, json.dumps(job | self._run_on).encode() + b"\n")
        while line := await asyncio.to_thread(process.stdout.readline):
            reply: dict[str, Any] = json.loads(line)
            if "progress" not in reply:
                return reply
            stage = reply["progress"]
            progress(stage)
        status = await asyncio.to_thread(process.wait)
        if status == -signal.SIGXCPU:
            raise ModelError(
                f"it took more than {self._cpu_limit_s:g} s of processor time to {job['kind']}, the limit"
                " (--compile-cpu-s)"
            )
        how = f"the compiler {how_it_ended(status)} while {stage}"
        raise CompilerKilledError(how) if status < 0 else ModelError(how)


def _start(memory_bytes: int) -> subprocess.Popen[bytes]:
    # Not started by the event loop: with gRPC's threads, on a busy machine, 3 of 21 children that uvloop
    # had forked died before they read anything. subprocess uses vfork, so no fork handlers run in the
    # child, and of 14 children started this way none died.
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "worker.compiling.compiler_process",
            str(os.getpid()),
            str(memory_bytes),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C goes to the worker, which ends this process itself.
        start_new_session=True,
    )
    threading.Thread(target=_log_words, args=(process,), daemon=True).start()
    return process


def _log_words(process: subprocess.Popen[bytes]) -> None:
    """Log what libraries print: it may quote the model, and an escape sequence is a terminal's command."""
    assert process.stderr is not None
    with contextlib.suppress(ValueError):  # closed meanwhile
        for line in process.stderr:
            logger.warning("the compiler: %s", printable(line.decode(errors="replace").rstrip()))


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died; the read that follows tells why
        process.stdin.write(data)
        process.stdin.flush()


def _reap(process: subprocess.Popen[bytes]) -> None:
    # Leaving the block closes the pipes and waits; unwritten data has nowhere to go.
    with contextlib.suppress(BrokenPipeError), process:
        pass


def _describe(source: ModelSource, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "source": str(source.folder),
        "fixed_dimensions": dict(source.fixed_dimensions),
        "batch_sizes": list(source.batch_sizes),
    }


def _ignore(stage: str) -> None:
    pass
