"""The telemetry's files, written by a process of their own.

To make the text of a row takes as long as to serve a small request, so the controller's process does not: it
hands rows on as records, some at a time, by a pipe. Where the writer, or its disk, falls behind, rows wait
here; beyond a bound the oldest are dropped, counted, and the log says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import struct
import subprocess
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from clockwright.errors import ConfigError
from clockwright.process import how_it_ended
from controller.telemetry.files import TelemetryFiles
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import CAPACITY

log = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<I")
_FLUSH: Final = _LENGTH.pack(0)
_READY: Final = b"ready\n"

# Rows that are handed on in one go, a fraction of a millisecond's work, and how often there is one.
_SLICE_ROWS: Final = 128
_PAUSE_S: Final = 0.1
# With so many bytes on their way, rows wait.
_PIPE_BYTES: Final = 1 << 20
_START_LIMIT_S: Final = 60.0
_END_LIMIT_S: Final = 10.0
# Before the writer is started again: twice as long each time that it does not start.
_RESTART_PAUSE_S: Final = 1.0
_RESTART_PAUSE_S_MAX: Final = 60.0
# How often the writer's text goes to the disk, in pauses.
_FLUSH_PAUSES: Final = 10

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[list[RequestRow], list[ActionRow]]).decode


class TelemetryWriter:
    """The process that writes, and the rows on their way to it. It belongs to an event loop."""

    def __init__(self, directory: Path, *, capacity: int = CAPACITY) -> None:
        """Write to a folder, which is made; `start` begins. Beyond the capacity the oldest rows are dropped."""
        self._directory = directory
        self._waiting: deque[RequestRow | ActionRow] = deque()
        self._capacity = capacity
        self._num_dropped = 0
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def add(self, row: RequestRow | ActionRow) -> None:
        """Take a complete row, which does not change any more."""
        if len(self._waiting) >= self._capacity:
            self._waiting.popleft()
            self._num_dropped += 1
        self._waiting.append(row)

    async def start(self) -> None:
        """Start the process. Raises ConfigError if the folder cannot be written to, or another process writes to it."""
        await self._spawn()
        self._task = asyncio.create_task(self._hand_on())

    async def close(self) -> None:
        """Write all that waits, and end the process."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        try:
            async with asyncio.timeout(_END_LIMIT_S):
                while self._waiting:
                    self._write_slice(process.stdin)
                    await process.stdin.drain()
                process.stdin.close()
                await process.wait()
        except (TimeoutError, OSError):
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            log.error("telemetry lacks the last rows: %d wait", len(self._waiting))

    async def _spawn(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "controller.telemetry.writer",
            str(self._directory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                said = await process.stdout.readline()
        except TimeoutError:
            said = b""
        if said != _READY:
            with suppress(ProcessLookupError):
                process.kill()
            status = await process.wait()
            raise ConfigError(
                said.decode(errors="replace").strip()
                or f"telemetry directory {self._directory}: its writer {how_it_ended(status)}"
            )
        self._process = process

    async def _hand_on(self) -> None:
        pause_s, said = _RESTART_PAUSE_S, ""
        while True:
            try:
                await self._feed()
                pause_s, said = _RESTART_PAUSE_S, ""
            except ConfigError as error:
                if str(error) != said:
                    said = str(error)
                    log.error("%s; rows wait in memory", said)
                pause_s = min(2 * pause_s, _RESTART_PAUSE_S_MAX)
            await asyncio.sleep(pause_s)

    async def _feed(self) -> None:
        """Hand rows on until the process ends."""
        process = self._process
        if process is None or process.returncode is not None:
            await self._spawn()
            process = self._process
        assert process is not None
        assert process.stdin is not None
        pipe = process.stdin
        num_pauses = 0
        while process.returncode is None:
            while self._waiting and pipe.transport.get_write_buffer_size() < _PIPE_BYTES:
                self._write_slice(pipe)
                await asyncio.sleep(0)  # Let requests go first.
            if self._num_dropped:
                log.warning(
                    "telemetry is written more slowly than it comes: %d rows are dropped",
                    self._num_dropped,
                )
                self._num_dropped = 0
            num_pauses += 1
            if num_pauses % _FLUSH_PAUSES == 0:
                pipe.write(_FLUSH)
            await asyncio.sleep(_PAUSE_S)
        log.error(
            "telemetry's writer %s: rows that it had are lost, and another is started",
            how_it_ended(process.returncode),
        )

    def _write_slice(self, pipe: asyncio.StreamWriter) -> None:
        waiting = self._waiting
        rows = [waiting.popleft() for _ in range(min(len(waiting), _SLICE_ROWS))]
        requests = [row for row in rows if isinstance(row, RequestRow)]
        data = _encode((requests, [row for row in rows if isinstance(row, ActionRow)]))
        pipe.write(_LENGTH.pack(len(data)) + data)


def write(source: BinaryIO, files: TelemetryFiles) -> None:
    """Write the records that come from a pipe until it ends."""
    while len(length := source.read(_LENGTH.size)) == _LENGTH.size:
        if length == _FLUSH:
            files.flush()
        else:
            (num_bytes,) = _LENGTH.unpack(length)
            data = source.read(num_bytes)
            if len(data) < num_bytes:
                return  # The controller was killed while it wrote.
            requests, actions = _decode(data)
            for request in requests:
                files.requests.add(request)
            for action in actions:
                files.actions.add(action)
        # Behind a flush these are rows that have waited for room on the disk, though none may come for long.
        while files.write_slice(_SLICE_ROWS):
            pass


def main() -> None:
    """Write what comes on standard input to the folder that the argument names."""
    # It ends when the controller closes the pipe, by whatever the controller itself is ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    out = os.fdopen(1, "wb", buffering=0)
    try:
        files = TelemetryFiles(Path(sys.argv[1]))
    except ConfigError as error:
        out.write(str(error).replace("\n", " ").encode() + b"\n")
        sys.exit(1)
    with files:
        out.write(_READY)
        write(sys.stdin.buffer, files)


if __name__ == "__main__":
    main()
