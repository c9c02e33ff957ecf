"""The worker's end of the compiler process, which may crash or hang at any time."""

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clockwright.errors import ModelError
from clockwright.foreign import printable
from clockwright.process import how_it_ended
from worker.models.model_files import (
    COMPILE_BYTES,
    COMPILE_CPU_S,
    CompiledModel,
    Limits,
    ModelSource,
)
from worker.models.precision import Precision

logger = logging.getLogger(__name__)


class CompilerKilledError(ModelError):
    """A signal ended the compiler: short memory, an operator or a crash, which may not come again."""


class Compiler:
    """One compiler process, started at the first job and again after it died. One job at a time."""

    def __init__(
        self,
        *,
        time_limit_s: float,
        memory_bytes: int = COMPILE_BYTES,
        cpu_limit_s: float = COMPILE_CPU_S,
        thread_counts: Sequence[int] = (1,),
        cores: Sequence[int] = (),
    ) -> None:
        """Start nothing yet.

        Args:
            time_limit_s: a job that takes longer is given up.
            memory_bytes: a job that takes more memory is given up.
            cpu_limit_s: a job that takes more processor time for each thread that it may have is given up.
            thread_counts: the numbers of threads that a run on onnxruntime may have, ascending.
            cores: those to use beside the process's own.
        """
        self._time_limit_s = time_limit_s
        self._memory_bytes = memory_bytes
        self._cpu_limit_s = cpu_limit_s * max(thread_counts)
        self._run_on = {
            "thread_counts": list(thread_counts),
            "cores": list(cores),
            "cpu_s": self._cpu_limit_s,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()

    async def compile(
        self,
        source: ModelSource,
        folder: Path,
        limits: Limits,
        progress: Callable[[str], None],
        *,
        precision: Precision | None = None,
    ) -> CompiledModel:
        """Do what `worker.compiling.compile.compile_model` does; a hang is a ModelError too.

        `precision` is that of the torch engine; None is for onnxruntime on this processor.

        Raises:
            CompilerKilledError: a signal ended the process.
        """
        job = {**_describe(source, "compile"), "folder": str(folder), "limits": asdict(limits)}
        if precision is not None:
            job["precision"] = precision.value
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
    def pid(self) -> int | None:
        """The process's id, if there is a process."""
        return self._process.pid if self._process is not None else None

    async def close(self) -> None:
        """Kill the process, whatever it is doing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(_reap, process)

    async def _ask(self, job: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
        async with self._turn:
            finished = False
            try:
                async with asyncio.timeout(self._time_limit_s):
                    reply = await self._exchange(job, progress)
                finished = True
            except TimeoutError:
                raise ModelError(
                    f"it took more than {self._time_limit_s:g} s to {job['kind']}, the time limit"
                ) from None
            finally:
                # After a time-out or a cancellation the process is still busy with the old job.
                if not finished:
                    await self.close()
            if "exhausted" in reply:
                await self.close()  # what it could not take has left it in an unknown state
                raise ModelError(
                    f"it took more than {self._memory_bytes >> 20} MiB of memory to {job['kind']}, the limit"
                    " (--compile-memory-mib)"
                )
        if "refused" in reply:
            raise ModelError(reply["refused"])
        return reply

    async def _exchange(
        self, job: dict[str, Any], progress: Callable[[str], None]
    ) -> dict[str, Any]:
        if self._process is not None and self._process.poll() is not None:
            await self.close()  # it was killed between two jobs
        if self._process is None:
            self._process = _start(self._memory_bytes)
        process = self._process
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
    # Not started by the event loop: beside gRPC's threads on a busy machine, 3 of 21 children that uvloop
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
