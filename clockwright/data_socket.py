"""The socket between a controller and a worker or front that carries frames: dialling, and settings."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

# Unix sockets hold this much on the sender's side, where the machine allows it: some images. For TCP the
# kernel finds its own measure.
_UNIX_BUFFER_BYTES = 2 << 20
# A connection without traffic is tried this often, so that one that is half open is noticed.
_PROBE_S = 1


def dial(host: str, port: int, path: str, *, limit_s: float) -> socket.socket:
    """Connect to a controller that listens in two places.

    Args:
        host: the controller's.
        port: where it listens.
        path: the file on its own host where it listens, too; may be empty.
        limit_s: how long an attempt may take.

    Returns:
        A socket with that time limit.

    Raises:
        OSError: it cannot be reached.
    """
    # On another host there is no such file, and in a container it may be hidden.
    if path and Path(path).exists():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(limit_s)
        try:
            sock.connect(path)
        except OSError as error:
            sock.close()
            logger.info("no way by %s (%s): taking TCP", path, error.strerror)
        else:
            return sock
    return socket.create_connection((host, port), limit_s)


def prepare(sock: socket.socket, *, silence_limit_ms: int) -> None:
    """Have small frames leave at once, and a peer that cannot be reached given up.

    Args:
        sock: connected; Unix or TCP.
        silence_limit_ms: how long TCP waits for a sign of life.
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # These are Linux's.
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        sock.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(2, silence_limit_ms // (1000 * _PROBE_S))
        )
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_limit_ms)
