"""The telemetry's writer, which a controller starts as a process of its own: its program, in a process of the world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from clockwright.errors import ConfigError
from controller.telemetry.files import TelemetryFiles
from controller.telemetry.writer import write
from experiments.faults.world import WorldProcess, WorldThread, running_thread

# A pipe's way takes so long, at most.
_WAY_NS = 50_000


class _Pipe:
    """Bytes on their way from a controller to its writer; both of asyncio's ends and of the reader's."""

    def __init__(self, reader: WorldProcess) -> None:
        self._reader = reader
        self._data = bytearray()
        self._has_end = False
        self._wake: Callable[[], None] | None = None

    # --- the controller's end -------------------------------------------------------------------

    @property
    def transport(self) -> _Pipe:
        """Knows how much waits."""
        return self

    def get_write_buffer_size(self) -> int:
        """Bytes that were not read."""
        return len(self._data)

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self._data += data
        self._tell()

    async def drain(self) -> None:
        """Wait for nothing: there is always room."""

    def close(self) -> None:
        """Send nothing more."""
        self._has_end = True
        self._tell()

    def _tell(self) -> None:
        if self._wake is not None:
            wake, self._wake = self._wake, None
            self._reader.world.after(self._reader.world.below(_WAY_NS), wake)

    # --- the writer's ---------------------------------------------------------------------------

    def read(self, num_bytes: int) -> bytes:
        """Wait for so many bytes, or the end."""
        thread = running_thread()
        while len(self._data) < num_bytes and not self._has_end:
            self._wake = thread.waker()
            thread.block()
        data = bytes(self._data[:num_bytes])
        del self._data[:num_bytes]
        return data


class WriterProcess:
    """In place of `asyncio.subprocess.Process`."""

    def __init__(self, parent: WorldProcess, directory: Path) -> None:
        """Start it."""
        self.returncode: int | None = None
        self._parent = parent
        self._directory = directory
        self._process = WorldProcess(parent.world, parent.host, f"writer of {parent.name}")
        self.stdin = _Pipe(self._process)
        self.stdout = self
        self._said: asyncio.Future[bytes] = parent.loop.create_future()
        self._ended: asyncio.Future[int] = parent.loop.create_future()
        self._process.on_end.append(self._over)
        parent.on_end.append(self.stdin.close)
        WorldThread(self._process, self._main).start()

    async def readline(self) -> bytes:
        """What it says first."""
        return await asyncio.shield(self._said)

    async def wait(self) -> int:
        """Wait for its end."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def _main(self) -> None:
        try:
            files = TelemetryFiles(self._directory)
        except ConfigError as error:
            self._tell(self._said, f"{error}\n".encode())
        else:
            with files:
                self._tell(self._said, b"ready\n")
                write(cast(BinaryIO, self.stdin), files)
            self.returncode = 0
        self._process.kill()

    def _over(self) -> None:
        if self.returncode is None:
            self.returncode = -9
        self._tell(self._said, b"")
        self._tell(self._ended, self.returncode)

    def _tell(self, future: asyncio.Future[Any], result: object) -> None:
        def tell() -> None:
            if not future.done():
                future.set_result(result)

        if self._parent.alive:
            self._parent.loop.call_soon_threadsafe(tell)


async def start_writer(*arguments: str, **_: object) -> WriterProcess:
    """In place of `asyncio.create_subprocess_exec`."""
    loop = asyncio.get_running_loop()
    return WriterProcess(loop.process, Path(arguments[-1]))  # type: ignore[attr-defined]
