"""A Redis server of a test's own, behind a socket in a folder of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.kit.processes import PATIENCE_S, until


def redis_program() -> str | None:
    """The program, installed by the system or beside this Python."""
    return shutil.which("redis-server") or shutil.which(
        "redis-server", path=str(Path(sys.executable).parent)
    )


class RedisServer:
    """Keeps what it is told over a stop and a start."""

    def __init__(self, program: str, directory: Path) -> None:
        self._program = program
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        # Patient, because it may be a busy machine.
        self.url = f"unix://{directory}/socket?socket_timeout=60&socket_connect_timeout=60"

    def start(self) -> None:
        log = self._directory / "log"
        with log.open("ab") as output:
            self._process = process = subprocess.Popen(
                [
                    self._program,
                    *("--port", "0", "--unixsocket", f"{self._directory}/socket"),
                    *("--dir", str(self._directory), "--save", "", "--appendonly", "yes"),
                ],
                stdout=output,
                stderr=output,
            )

        def answers() -> bool:
            assert process.poll() is None, f"the server has ended: {log.read_text()}"
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):  # also while it reads its file
                return False

        with self.client() as client:
            until(answers, what="Redis answers")

    def stop(self) -> None:
        """Have it write what it has, and end."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(PATIENCE_S)

    def forget(self) -> None:
        """Lose, while it is stopped, what it has written."""
        shutil.rmtree(self._directory / "appendonlydir")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)

    def freeze(self) -> None:
        """It takes connections and does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, decode_responses=True)


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    program = redis_program()
    if program is None:
        pytest.skip("there is no redis-server here: .ci/run tells how to get one")
    # Not pytest's folder: a socket's path has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="redis-", dir="/tmp") as directory:
        server = RedisServer(program, Path(directory))
        try:
            server.start()
            yield server
        finally:
            server.kill()
