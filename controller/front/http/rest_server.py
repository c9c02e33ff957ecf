"""HTTP/1.1 for REST, metrics and the dashboard, by uvicorn's protocol, behind connections of our own.

uvicorn parses HTTP and keeps connections. What it does not do is here, and is what the other door does: it knows
when a request came, tells of clients that hang up, takes TLS on the same port (of clients on other machines, where it is
required), reads changed certificates, and bounds what a client may send, how slowly, and how many of them there are.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from itertools import islice
from typing import Any

import uvicorn
from typing_extensions import override
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from clockwright.errors import RefusedError
from controller.access.authoriser import Certificate
from controller.front.http.calls import is_local
from controller.front.http.http2_server import Http2Server
from controller.front.http.listener import Listener
from controller.front.http.rest import Origin
from controller.front.http.tls import HANDSHAKE_RECORD, client_certificate
from controller.front.oip.json_form import write_json

log = logging.getLogger(__name__)

#: A request's first line and its headers, and whatever else is no body.
HEADERS_BYTES_MAX = 16 << 10

#: A read that brings so much may have left something behind.
_READ_BYTES_LEAST = 192 << 10

# Requests of one connection that wait behind each other, parsed; what comes behind them waits as it came.
_PIPELINED_MAX = 64
# Ends headers, wherever there are any.
_EMPTY_LINE = re.compile(rb"\n\r?\n")

_NOTHING = memoryview(b"")

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)

_SWEEP_S = 1.0
#: Sweeps within which a request has to have come, however large.
_COMING_MAX = 120
#: Sweeps in which a request may be on its way before its connection counts as idle.
_COMING_SOON = 10
#: Sweeps without a request after which a connection makes room when there are too many, and after which it is closed.
_IDLE_MIN = 2
_IDLE_MAX = 75
#: Sweeps in which a client takes nothing of what waits for it.
_STALL_MAX = 30
#: Sweeps within which a client has to say its first byte, where that tells whether it speaks TLS.
_FIRST_BYTE_MAX = 10
_HANDSHAKE_LIMIT_S = 10.0


class RestServer:
    """Serves an ASGI application, of REST or of monitoring, on sockets of its own. It lives in one event loop."""

    def __init__(
        self,
        app: ASGI3Application,
        server: Http2Server,
        *,
        max_connections: int | None = None,
        tls: ssl.SSLContext | None = None,
        idle_min: int = _IDLE_MIN,
        tls_for_all: bool = False,
    ) -> None:
        """Make a server that listens nowhere yet.

        Args:
            app: answers.
            server: of gRPC, whose bounds and arrival clock hold here, too.
            max_connections: connections beyond which requests are refused; None: as many as there.
            tls: is required of clients on other machines; None: TLS is off. Set `tls` again to change it for
                new connections.
            idle_min: sweeps without a request after which a connection makes room when there are too many.
            tls_for_all: TLS is required of clients on this machine, too.
        """
        self.tls = tls
        self._idle_min = idle_min
        self._tls_for_all = tls_for_all
        #: Requests so far.
        self.num_requests = 0
        self.turns = server.turns
        self.door = server.door
        self.max_connections = max_connections or server.max_connections
        self.state = ServerState()
        self.config = uvicorn.Config(
            app,
            interface="asgi3",
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            # With them, any client could claim another address.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_IDLE_MAX,
        )
        self.config.load()
        self._listener = Listener(
            self.turns,
            max_connections=lambda: self.max_connections,
            num_open=lambda: self._num_open,
            make_room=self._give_up_idlest,
            accepted=self._accepted,
        )
        # Connections of which it is not known whether they speak TLS, and those that shake hands; sweeps since.
        self._silent: dict[socket.socket, int] = {}
        self._opening: dict[asyncio.Task[None], int] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] | None = None

    @property
    def connections(self) -> list[_Connection]:
        """Those that are open."""
        return [each for each in self.state.connections if isinstance(each, _Connection)]

    def add_port(self, address: str, *, shared: bool = False) -> int:
        """Listen on HOST:PORT; as `Listener.add`."""
        return self._listener.add(address, shared=shared)

    async def start(self) -> None:
        """Accept connections."""
        self._listener.start()
        self._keep_sweeping()

    async def stop(self, grace: float) -> None:
        """Stop: accept nothing more, give open requests `grace` seconds, and hang up."""
        loop = asyncio.get_running_loop()
        self._listener.stop()
        for sock in list(self._silent):
            self._close_silent(sock)
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._opening:
            task.cancel()
        for connection in self.connections:
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self.state.connections:
                    self._ended = loop.create_future()
                    await self._ended
        for connection in self.connections:
            connection.transport.abort()
        waiting: set[asyncio.Task[Any]] = self.state.tasks | set(self._opening)
        if waiting:
            await asyncio.wait(waiting, timeout=_SWEEP_S)

    def connection_over(self) -> None:
        """A connection is over."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _accepted(self, sock: socket.socket, address: tuple[Any, ...], floor_ns: int) -> None:
        try:
            first = sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            if self.tls is None:
                self._open(sock, address, None, None)
                return
            self._silent[sock] = 0
            asyncio.get_running_loop().add_reader(sock, self._first_byte, sock, address)
            return
        except OSError:
            first = b""
        # A request may have come long before its connection was accepted.
        self._identify(sock, address, first, floor_ns)

    @property
    def _num_open(self) -> int:
        return len(self.state.connections) + len(self._silent) + len(self._opening)

    def _give_up_idlest(self) -> bool:
        """Have the connection that was idle for longest make room, if any was for long; first who has said nothing yet."""
        if max(self._silent.values(), default=-1) >= self._idle_min:
            self._close_silent(next(iter(self._silent)))
            return True
        if max(self._opening.values(), default=-1) >= self._idle_min:
            task = next(iter(self._opening))
            del self._opening[task]
            task.cancel()
            return True
        idle = [each for each in self.connections if each.idle_sweeps >= self._idle_min]
        idlest = min(idle, key=lambda each: each.last_request, default=None)
        if idlest is None:
            return False
        self.state.connections.discard(idlest)
        idlest.transport.abort()
        return True

    def _close_silent(self, sock: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(sock)
        del self._silent[sock]
        sock.close()

    def _first_byte(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        """Find out whether a client speaks TLS; clients on this machine need not."""
        try:
            first = sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        asyncio.get_running_loop().remove_reader(sock)
        del self._silent[sock]
        self._identify(sock, address, first, None)

    def _identify(
        self, sock: socket.socket, address: tuple[Any, ...], first: bytes, floor_ns: int | None
    ) -> None:
        is_here = is_local(_name_of(address))
        if self.tls is None:
            self._open(sock, address, None, floor_ns)
        elif first and first[0] == HANDSHAKE_RECORD:
            # A request comes after the handshake.
            self._open(sock, address, self.tls, None)
        elif first and is_here and not self._tls_for_all:
            self._open(sock, address, None, floor_ns)
        else:
            log.debug("connection of %s: found no TLS, expected it", address[0])
            sock.close()

    def _open(
        self,
        sock: socket.socket,
        address: tuple[Any, ...],
        tls: ssl.SSLContext | None,
        floor_ns: int | None,
    ) -> None:
        """Serve a connection. `floor_ns`: a time before its first bytes, which are there; None: they come later."""
        crowded: RefusedError | None = None
        if self._num_open >= self.max_connections:
            crowded = self.door.crowded("connections", self._num_open, self.max_connections)
        # The socket has no address any more if its client has disconnected.
        connection = _Connection(self, _name_of(address), crowded=crowded, floor_ns=floor_ns)
        task = asyncio.create_task(self._connect(sock, tls, connection))
        self._opening[task] = 0
        task.add_done_callback(lambda task: self._opening.pop(task, None))

    async def _connect(
        self, sock: socket.socket, tls: ssl.SSLContext | None, connection: _Connection
    ) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else _HANDSHAKE_LIMIT_S,
            )
        except OSError as error:
            log.info("a connection did not come about: %s", error)
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise

    def _keep_sweeping(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._keep_sweeping)
        self.sweep()

    def sweep(self) -> None:
        """Look after all connections, once a second."""
        self.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        for sock, sweeps in list(self._silent.items()):
            self._silent[sock] = sweeps + 1
            if sweeps >= _FIRST_BYTE_MAX:
                self._close_silent(sock)
        for task in self._opening:
            self._opening[task] += 1
        connections = self.connections
        for connection in connections:
            connection.sweep()
        unread_bytes = sum(each.num_unread_bytes for each in connections)
        while unread_bytes > self.door.max_bytes:
            # A bound for each would be none for all: who leaves most unread makes room.
            greediest = max(connections, key=lambda each: each.num_unread_bytes)
            unread_bytes -= greediest.num_unread_bytes
            connections.remove(greediest)
            greediest.transport.abort()


class _Connection(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self, server: RestServer, peer: str, *, crowded: RefusedError | None, floor_ns: int | None
    ) -> None:
        super().__init__(server.config, server.state, {})
        #: As `rest.Connection` says.
        self.peer = peer
        self.certificate: Certificate | None = None
        self.crowded = crowded
        self.when_gone: Callable[[], object] | None = None
        #: Sweeps since it had a request.
        self.idle_sweeps = 0
        #: Number of its last request among the server's; before that of the last one when it came.
        self.last_request = server.num_requests
        self._server = server
        # Every byte that is unread came later than this.
        self._floor_ns = server.turns.bound_ns if floor_ns is None else floor_ns
        # The last read took all that was there.
        self._emptied = floor_ns is None
        self._answering: RequestResponseCycle | None = None
        # Was read, and waits until the requests before it are answered.
        self._held = _NOTHING
        # Bytes of the body that comes, where its request has said how many there are.
        self._num_body_bytes = 0
        # A request has begun to come, and has not ended.
        self._coming = False
        self._sweeps = 0
        # Bytes of the first line and the headers that come; and bytes since anything was complete.
        self._num_header_bytes = 0
        self._num_pending_bytes = 0
        self._stalled_sweeps = 0
        self._unread_before = 0

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of answers that the client does not take."""
        return self.transport.get_write_buffer_size()

    @property
    def _is_serving(self) -> bool:
        """Whether a request that has come as a whole is not answered as a whole."""
        cycle = self._answering
        return cycle is not None and not (cycle.response_complete or cycle.more_body)

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            self.certificate = client_certificate(tls)

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answering is not None:
            # uvicorn tells the last request that has come, and not the one that it answers.
            self._answering.disconnected = True
            self._answering.message_event.set()
        if self.when_gone is not None:
            self.when_gone()
        self._server.connection_over()

    @override
    def data_received(self, data: bytes) -> None:
        turns = self._server.turns
        turns.used()
        if self._emptied:
            self._floor_ns = max(self._floor_ns, turns.bound_ns)
        self._parse(memoryview(b"".join((self._held, data)) if self._held else data))
        self._emptied = len(data) < _READ_BYTES_LEAST and not self.flow.read_paused

    def _parse(self, data: memoryview) -> None:
        """Parse at most as many requests as may wait, hold the other bytes, and stop reading."""
        self._held = data
        while self._held and len(self.pipeline) < _PIPELINED_MAX:
            data = self._held
            # No request begins inside a body, whatever it looks like.
            end = min(self._num_body_bytes, len(data))
            if not end:
                room = _PIPELINED_MAX - len(self.pipeline)
                found = next(islice(_EMPTY_LINE.finditer(data), room - 1, None), None)
                end = len(data) if found is None else found.end()
            piece, self._held = bytes(data[:end]), data[end:]
            self._num_pending_bytes += len(piece)
            if not self._coming and b"pgrade" in piece:
                piece = _without_upgrade(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                self._held = _NOTHING
            elif self._num_pending_bytes > HEADERS_BYTES_MAX:
                self._held = _NOTHING
                self._refuse_headers()
        if self._held:
            self.flow.pause_reading()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held and not self.transport.is_closing():
            if len(self.pipeline) <= _PIPELINED_MAX // 2:
                self._parse(self._held)
            else:
                self.flow.pause_reading()

    @override
    def send_400_response(self, msg: str) -> None:
        """Say that something is no HTTP, and hang up."""
        if self._num_header_bytes > HEADERS_BYTES_MAX:
            self._refuse_headers()
        else:
            # uvicorn handles the parser's error, and leaves its words out.
            why = f": {error}" if (error := sys.exception()) else ""
            self._refuse(b"400 Bad Request", f"found no request of HTTP/1.1, expected one{why}")

    def _refuse_headers(self) -> None:
        text = f"found headers of more than {HEADERS_BYTES_MAX} bytes, expected {HEADERS_BYTES_MAX} at most"
        self._refuse(b"431 Request Header Fields Too Large", text)

    def _refuse(self, status: bytes, text: str) -> None:
        """Answer what is no request, and hang up; where another's answer is on its way, hang up at once."""
        if self._is_serving:
            self.transport.abort()
            return
        body = write_json({"error": text})
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()

    # --- httptools' callbacks -----------------------------------------------------------------

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._server.turns.asked()
        self._coming, self._sweeps, self.idle_sweeps = True, 0, 0
        self._server.num_requests += 1
        self.last_request = self._server.num_requests
        self._num_header_bytes = 0
        # A part of ASGI's scope that servers may add to.
        scope: Any = self.scope
        scope["extensions"] = {"clockwright": Origin(self, self._floor_ns)}

    @override
    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count_header(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > HEADERS_BYTES_MAX:
            raise ValueError(self._num_header_bytes)  # httptools makes an error of HTTP of it.

    @override
    def on_headers_complete(self) -> None:
        self._num_pending_bytes = 0
        lengths = [int(value) for name, value in self.headers if name == b"content-length"]
        self._num_body_bytes = lengths[0] if lengths else 0
        super().on_headers_complete()

    @override
    def on_body(self, body: bytes) -> None:
        self._num_pending_bytes = 0
        self._num_body_bytes = max(self._num_body_bytes - len(body), 0)
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._num_pending_bytes = self._num_body_bytes = 0
        self._coming = False
        super().on_message_complete()

    # --- once a second ------------------------------------------------------------------------

    def sweep(self) -> None:
        """Close the connection of a client that is too slow."""
        unread = self.num_unread_bytes
        self._stalled_sweeps = (
            self._stalled_sweeps + 1 if unread and unread >= self._unread_before else 0
        )
        self._unread_before = unread
        # While others' answers are due, what comes behind them may have been held back here.
        is_serving = self._is_serving
        self._sweeps = self._sweeps + 1 if self._coming and not is_serving else 0
        is_idle = not is_serving and (not self._coming or self._sweeps > _COMING_SOON)
        self.idle_sweeps = self.idle_sweeps + 1 if is_idle else 0
        # uvicorn closes who says nothing at all behind an answer; empty lines stop its clock.
        is_silent = not self._coming and self.idle_sweeps > _IDLE_MAX
        if is_silent or self._sweeps > _COMING_MAX or self._stalled_sweeps > _STALL_MAX:
            log.debug("connection of %s: the client is too slow", self.peer)
            self.transport.abort()


def _without_upgrade(data: bytes) -> bytes:
    """Take the offer of another protocol (`Upgrade: h2c`) out of a request, which is answered as it is then.

    Java's client and curl's `--http2` offer it with every request, and httptools would leave the body to it.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + body


def _name_of(address: tuple[Any, ...]) -> str:
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
