"""Front processes that `clockwright up` starts beside itself, behind one port."""

from __future__ import annotations

import socket

from typing_extensions import override

from clockwright.cli.flags import LogFormat, spell
from clockwright.cli.local_processes import LocalProcesses
from clockwright.errors import ConfigError
from controller.front_flags import FrontFlags


class LocalFronts(LocalProcesses[FrontFlags]):
    """Fronts of this machine, which share a port: the kernel spreads connections over them.

    The port is held here, without listening, so that nobody else takes it while a front starts again.
    """

    noun = "front"

    def __init__(
        self, number: int, flags: FrontFlags, *, verbose: bool, log_format: LogFormat
    ) -> None:
        """Plan so many.

        Raises:
            ConfigError: somebody listens on the port.
        """
        super().__init__()
        self._verbose = verbose
        self._log_format = log_format
        host = "127.0.0.1"
        try:
            # With SO_REUSEPORT alone, fronts of another server would get half of the connections.
            with socket.create_server((host, flags.port)) as probe:
                self.port: int = probe.getsockname()[1]
            self._held = socket.socket()
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._held.bind((host, self.port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{flags.port}: {error.strerror}") from error
        for index in range(number):
            self.plan(f"front-{index}", flags)

    @override
    def stop(self) -> None:
        super().stop()
        self._held.close()

    @override
    def _arguments(self, controller: str, name: str) -> list[str]:
        flags = [flag for flag in spell(self._planned[name]) if not flag.startswith("--port=")]
        return [
            *("front", "--controller", controller, f"--port={self.port}", "--share-port", *flags),
            *(("--verbose",) if self._verbose else ()),
            f"--log-format={self._log_format}",
        ]
