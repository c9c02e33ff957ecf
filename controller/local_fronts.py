"""Front processes that `clockwright up` starts beside itself, behind one port."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace

from typing_extensions import override

from clockwright.cli.flags import LogFormat, spell
from clockwright.cli.local_processes import LocalProcesses
from clockwright.errors import ConfigError
from controller.front_flags import FrontFlags

log = logging.getLogger(__name__)


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
        held, self.port = _hold(flags.port)
        self._held = [held]
        #: Where they serve REST; None: nowhere.
        self.http_port: int | None = None
        if flags.rest_port is not None:
            try:
                held, self.http_port = _hold(flags.rest_port)
            except ConfigError as error:
                if flags.http_port is not None:
                    raise
                log.warning("%s, so there is no REST", error)
            else:
                self._held.append(held)
        flags = replace(flags, http_port=self.http_port, no_http=self.http_port is None)
        for index in range(number):
            self.plan(f"front-{index}", flags)

    @override
    def stop(self) -> None:
        super().stop()
        for held in self._held:
            held.close()

    @override
    def _arguments(self, controller: str, name: str) -> list[str]:
        flags = [flag for flag in spell(self._planned[name]) if not flag.startswith("--port=")]
        return [
            *("front", "--controller", controller, f"--port={self.port}", "--share-port", *flags),
            *(("--verbose",) if self._verbose else ()),
            f"--log-format={self._log_format}",
        ]


def _hold(port: int) -> tuple[socket.socket, int]:
    """Hold a port without listening on it.

    Raises:
        ConfigError: somebody listens there.
    """
    host = "127.0.0.1"
    try:
        # With SO_REUSEPORT alone, fronts of another server would get half of the connections.
        with socket.create_server((host, port)) as probe:
            port = probe.getsockname()[1]
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return held, port
