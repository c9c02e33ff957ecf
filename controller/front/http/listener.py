"""Sockets that listen, and the connections that they accept, of which there are not too many."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from controller.front.http.arrival_clock import ArrivalClock

log = logging.getLogger(__name__)

#: Connections beyond `max_connections` that are kept to tell their calls why they are refused; those beyond
#: that are closed unheard.
_SPARE_CONNECTIONS = 64
_BACKLOG = 4096
_ACCEPTS_PER_TURN = 64
#: The receive buffer of a connection, as the kernel counts it. What does not fit waits with the sender,
#: where its age cannot be seen: here are some seconds of small requests.
_RECEIVE_BUFFER_BYTES = 4 << 20

_SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)


@dataclass(eq=False)
class Listener:
    """Accepts connections. It lives in one event loop."""

    #: Knows since when connections may have waited.
    arrivals: ArrivalClock
    _: KW_ONLY
    #: Gives how many are wanted; some more are accepted, to be told why they are refused.
    max_connections: Callable[[], int]
    #: Counts those that are open.
    num_open: Callable[[], int]
    #: Ends an idle one; gives whether there was any.
    make_room: Callable[[], bool]
    #: Takes a connection, its address, and a time before its first byte came.
    accepted: Callable[[socket.socket, tuple[Any, ...], int], None]

    def __post_init__(self) -> None:
        # Every connection that is not accepted came later than this, per socket; None: no connection waits.
        self._sockets: dict[socket.socket, int | None] = {}

    def add(self, address: str, *, shared: bool) -> int:
        """Listen on HOST:PORT; port 0 takes any free one, which is returned. Raises OSError if that cannot be.

        With `shared`, other processes of this user may listen there too, and get connections each.
        """
        for sock in listening_sockets(address, shared=shared):
            self._sockets[sock] = None
            port: int = sock.getsockname()[1]
        return port

    def start(self) -> None:
        """Accept connections."""
        for sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def stop(self) -> None:
        """Accept nothing more."""
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        self._sockets.clear()

    def _accept(self, listening: socket.socket) -> None:
        self.arrivals.used()
        floor_ns = self._sockets[listening]
        if floor_ns is None:
            floor_ns = self._sockets[listening] = self.arrivals.bound_ns
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                self._sockets[listening] = None
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                log.warning("no connection can be accepted: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(0.1, self._accept_again, listening)
                return
            most = self.max_connections()
            while self.num_open() >= most and self.make_room():
                pass
            if self.num_open() >= most + _SPARE_CONNECTIONS:
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.accepted(sock, address, floor_ns)

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)


def listening_sockets(address: str, *, shared: bool) -> list[socket.socket]:
    """Listen on HOST:PORT, on all addresses of the host and on one port; the arguments are those of `Listener.add`.

    Raises OSError if the address cannot be used.
    """
    host, _, port_text = address.rpartition(":")
    port = int(port_text)
    found = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    with ExitStack() as stack:
        sockets = []
        for family, kind, protocol, _, where in found:
            sock = stack.enter_context(socket.socket(family, kind, protocol))
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, len(found) > 1)
            _prepare(sock)
            sock.bind((where[0], port, *where[2:]))
            sock.listen(_BACKLOG)
            port = sock.getsockname()[1]
            sockets.append(sock)
        stack.pop_all()
    return sockets


def _prepare(sock: socket.socket) -> None:
    """Have the kernel stamp what comes, and hold a lot of it; accepted sockets inherit both."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    # Linux makes the buffer fit the mark, and leaves it when the mark goes down again. SO_RCVBUF would
    # end the kernel's own tuning of it.
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _RECEIVE_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
