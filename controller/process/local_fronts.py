"""Front processes that `clockwright up` starts, behind one port."""

from __future__ import annotations

import logging
import socket

from typing_extensions import override

from clockwright.cli.flags import LogFlags
from clockwright.cli.local_processes import LocalProcesses
from clockwright.errors import ConfigError
from clockwright.settings import Flags, spell
from controller.process.config import FrontConfig
from controller.process.front_flags import RestFlags

log = logging.getLogger(__name__)


class LocalFronts(LocalProcesses[FrontConfig]):
    """Fronts of this machine, which share a port: the kernel spreads connections over them.

    The port is held here, without listening, so that no other process takes it while a front restarts.
    """

    noun = "front"

    def __init__(
        self, number: int, flags: Flags[FrontConfig], rest: RestFlags, logs: LogFlags
    ) -> None:
        """Plan so many. Raises ConfigError if the port is in use."""
        super().__init__(logs)
        held, self.port = _hold(flags["port"])
        self._held = [held]
        #: Where they serve REST, or None.
        self.http_port: int | None = None
        if rest.port is not None:
            try:
                held, self.http_port = _hold(rest.port)
            except ConfigError as error:
                if not rest.optional:
                    raise
                log.warning("%s, so there is no REST", error)
            else:
                self._held.append(held)
        for index in range(number):
            self.plan(f"front-{index}", flags.saying(port=self.port))

    @override
    def stop(self) -> None:
        super().stop()
        for held in self._held:
            held.close()

    @override
    def _arguments(self, controller: str, name: str) -> list[str]:
        rest = RestFlags(http_port=self.http_port, no_http=self.http_port is None)
        return [
            *("front", "--controller", controller, "--share-port"),
            *self._planned[name].spell(),
            *spell(vars(rest)),
        ]


def _hold(port: int) -> tuple[socket.socket, int]:
    """Hold a port without listening on it. Raises ConfigError if the port is in use."""
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
