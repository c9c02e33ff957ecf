"""HTTP/1.1 for whoever watches: `GET /metrics`, and the pages of a site beside it, with a key where callers are known.

Nothing is changed here, and no body is read. Prometheus keeps its connection, so that each is bounded by how long it
says nothing; where all are taken, a new one takes the place of the one that was used least recently.

A browser may be led here by a page of another site. Such a page gets nothing of what needs a role: no header lets it read
an answer, and where the browser says that it asks for another site, or by a name which is none of this machine's, it is
refused. Nobody is known by a cookie.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

from clockwright.errors import ConfigError, Denial, DeniedError
from controller.access.authoriser import Authoriser, Credentials, credentials_of
from controller.access.caller import Caller
from controller.access.config import is_loopback
from controller.front.rest import HttpError, check_site
from controller.front.tls import client_certificate
from controller.metrics.text import OPENMETRICS, PROMETHEUS

log = logging.getLogger(__name__)

#: Connections at a time.
CONNECTIONS_MAX: Final = 64
#: Bytes of a request: its line and its headers.
REQUEST_BYTES_MAX: Final = 16 << 10

# Scrapes are a minute apart at most, as a rule.
_SILENCE_S: Final = 120.0
# A page that a peer does not take in this time is not read at all.
_SEND_S: Final = 60.0
_HANDSHAKE_S: Final = 10.0
_RETRY_S: Final = 0.1

_PATH: Final = "/metrics"
# Whoever may ask for the status may see this, which says more of the same.
_METHOD: Final = "/clockwright.v1.ControlService/Status"

_PHRASES: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_PLAIN: Final = "text/plain; charset=utf-8"
#: What browsers say of a request that this server's own page makes, or the person in front of it.
_OWN_SITE: Final = ("", "same-origin", "none")


@dataclass(slots=True)
class Reply:
    """What is answered."""

    status: int
    #: In pieces.
    body: list[bytes]
    content_type: str = _PLAIN
    #: Further headers, each with the end of its line.
    header: str = ""
    #: The connection ends with it.
    last: bool = False
    #: What else comes, in its own time; the connection ends with it.
    stream: AsyncGenerator[bytes, None] | None = None


class Site(Protocol):
    """Pages beside the metrics."""

    def method_of(self, path: str) -> str | None:
        """Path of the gRPC method whose role a page takes; empty: everybody may see it; None: there is none."""

    async def reply(self, path: str, query: str) -> Reply:
        """Answer for a path that there is."""


class Pages(Protocol):
    """Whoever makes pages."""

    async def make(self, *, openmetrics: bool) -> list[bytes]:
        """Make a page, in pieces, in Prometheus' format or in OpenMetrics'."""


class MetricsDoor:
    """Serves pages. It lives in the controller's event loop."""

    def __init__(
        self,
        pages: Pages,
        authoriser: Authoriser,
        *,
        site: Site | None = None,
    ) -> None:
        """Serve nothing yet.

        Args:
            pages: makes them.
            authoriser: says who may have them.
            site: has further pages; None: there are none.
        """
        self._pages = pages
        self._site = site
        self._authoriser = authoriser
        #: What connections from now on have to use; None: nobody may.
        self.tls: ssl.SSLContext | None = None
        self._listening: socket.socket | None = None
        #: Those that are shaking hands, the first first.
        self._opening: dict[asyncio.Task[None], None] = {}
        # Clients of this machine alone reach it, as in `front.rest.RestApp`.
        self._only_here = False
        #: All connections, the one that was used least recently first.
        self._open: dict[asyncio.StreamWriter, None] = {}

    def listen(self, host: str, port: int) -> int:
        """Begin to serve; returns the port.

        Args:
            host: the address.
            port: 0: any free one.

        Raises:
            ConfigError: the port is taken, or is nobody's to take.
        """
        self._only_here = is_loopback(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, port), family=family)
        except OSError as error:
            where = f"port {port} of {host}"
            raise ConfigError(f"cannot listen on {where} for metrics: {error.strerror}") from error
        self._listening.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listening, self._accept)
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        """Serve no more, and hang up."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        for task in self._opening:
            task.cancel()
        for writer in list(self._open):
            writer.transport.abort()

    def _accept(self) -> None:
        if self._listening is None:
            return
        try:
            sock, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # As a rule there are no handles left: it is tried again when others have been given back.
            log.warning("no connection for metrics can be accepted: %s", error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listening)
            loop.call_later(_RETRY_S, self._accept_again)
            return
        if len(self._opening) >= CONNECTIONS_MAX:
            # Whoever shakes hands for longest may never end.
            longest = next(iter(self._opening))
            del self._opening[longest]
            longest.cancel()
        sock.setblocking(False)
        task = asyncio.create_task(self._connect(sock))
        self._opening[task] = None
        task.add_done_callback(lambda task: self._opening.pop(task, None))

    def _accept_again(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    async def _connect(self, sock: socket.socket) -> None:
        """Begin to serve a connection, with TLS by the present context: a server of asyncio keeps its first one."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=REQUEST_BYTES_MAX, loop=loop)
        try:
            await loop.connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader, self.serve, loop=loop),
                sock,
                ssl=self.tls,
                ssl_handshake_timeout=None if self.tls is None else _HANDSHAKE_S,
            )
        except OSError as error:
            log.info("a connection for metrics did not come about: %s", error)
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer what a connection asks, until it ends."""
        if len(self._open) >= CONNECTIONS_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            while True:
                reply = await self._next_reply(reader, writer)
                if reply is None:
                    return
                # Used now: the last in line to make room.
                if self._open.pop(writer, 0) is None:
                    self._open[writer] = None
                if reply.last:
                    return
        except (OSError, TimeoutError):
            return  # It is gone, or says nothing.
        finally:
            self._open.pop(writer, None)
            writer.close()

    async def _next_reply(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Reply | None:
        """Answer the next request; None: there is none."""
        caller: Caller | None = None
        try:
            async with asyncio.timeout(_SILENCE_S):
                request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            words = f"found a request of more than {REQUEST_BYTES_MAX} bytes\n"
            reply, with_body = Reply(431, [words.encode()], last=True), True
        else:
            reply, with_body, caller = await self._answer(request, writer)
        length = f"Content-Length: {sum(map(len, reply.body))}\r\n"
        if reply.stream is not None:
            length, reply.last = "", True
        head = (
            f"HTTP/1.1 {reply.status} {_PHRASES[reply.status]}\r\nContent-Type: {reply.content_type}\r\n"
            f"{length}Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n{reply.header}"
            f"Connection: {'close' if reply.last else 'keep-alive'}\r\n\r\n"
        )
        writer.write(head.encode())
        if with_body:
            await _send(writer, reply.body)
            if reply.stream is not None:
                await _send_on(reader, writer, reply.stream, caller)
        return reply

    async def _answer(
        self, request: bytes, writer: asyncio.StreamWriter
    ) -> tuple[Reply, bool, Caller | None]:
        """Answer a request; says also whether the answer's body is wanted, and who asks, as far as that was looked at."""
        first, *lines = request.decode("latin-1").split("\r\n")[:-2]
        words = first.split(" ")
        headers = []
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                return Reply(400, [b"found a header that is none\n"], last=True), True, None
            headers.append((name.lower(), value.strip()))
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            return Reply(400, [b"expected a request of HTTP/1.1\n"], last=True), True, None
        method, target, version = words
        found = dict(headers)
        if "transfer-encoding" in found or found.get("content-length", "0") != "0":
            return Reply(400, [b"expected a request without a body\n"], last=True), True, None
        connection = writer.get_extra_info("ssl_object")
        shown = credentials_of(
            headers, None if connection is None else client_certificate(connection)
        )
        reply, caller = await self._reply(method, target, shown, found)
        asked = found.get("connection", "").lower()
        reply.last = asked == "close" or (version == "HTTP/1.0" and asked != "keep-alive")
        return reply, method != "HEAD", caller

    async def _reply(
        self, method: str, target: str, shown: Credentials, headers: Mapping[str, str]
    ) -> tuple[Reply, Caller | None]:
        path, _, query = target.partition("?")
        is_metrics = path == _PATH
        needed: str | None = _METHOD
        if not is_metrics:
            needed = None if self._site is None else self._site.method_of(path)
        if needed is None:
            return Reply(404, [f"expected {_PATH}\n".encode()]), None
        if method not in ("GET", "HEAD"):
            return Reply(405, [b"expected GET\n"], header="Allow: GET, HEAD\r\n"), None
        caller: Caller | None = None
        if needed:
            try:
                if is_metrics:
                    check_site(headers, only_here=self._only_here)
                else:
                    self._check_site(headers)
                caller = self._authoriser.admit(needed, shown, now_s=time.time())
            except HttpError as error:
                return Reply(error.status, [f"{error}\n".encode()]), None
            except DeniedError as error:
                body = [f"{error}\n".encode()]
                if error.denial is Denial.NOT_ALLOWED:
                    return Reply(403, body), None
                return Reply(401, body, header="WWW-Authenticate: Bearer\r\n"), None
        try:
            if self._site is not None and not is_metrics:
                return await self._site.reply(path, query), caller
            openmetrics = "application/openmetrics-text" in headers.get("accept", "")
            page = await self._pages.make(openmetrics=openmetrics)
        except Exception:
            # This is a bug of ours, which must not end the controller, nor be hidden.
            log.exception("page %s cannot be made", path)
            return Reply(500, [b"the page cannot be made; the log says why\n"]), None
        return Reply(200, page, OPENMETRICS if openmetrics else PROMETHEUS), caller

    def _check_site(self, headers: Mapping[str, str]) -> None:
        """Refuse what a page of another site makes a browser ask for.

        Raises:
            HttpError: another's page asks, or a name stands for this machine that is not its own.
        """
        if headers.get("sec-fetch-site", "") not in _OWN_SITE:
            raise HttpError(403, "Sec-Fetch-Site: expected a page of this server")
        check_site(headers, only_here=self._only_here)


async def _send(writer: asyncio.StreamWriter, body: list[bytes]) -> None:
    """Send a body; requests have their turn between its pieces."""
    async with asyncio.timeout(_SEND_S):
        for piece in body:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)


async def _send_on(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    stream: AsyncGenerator[bytes, None],
    caller: Caller | None,
) -> None:
    """Send what comes, for as long as it is taken, the caller may have it, and says nothing."""
    sending = asyncio.create_task(_send_pieces(writer, stream, caller))
    # Whoever hangs up is not worked for until the next piece.
    hung_up = asyncio.create_task(reader.read(1))
    try:
        await asyncio.wait((sending, hung_up), return_when=asyncio.FIRST_COMPLETED)
    finally:
        sending.cancel()
        hung_up.cancel()
        await asyncio.gather(sending, hung_up, return_exceptions=True)


async def _send_pieces(
    writer: asyncio.StreamWriter, stream: AsyncGenerator[bytes, None], caller: Caller | None
) -> None:
    async with aclosing(stream):
        async for piece in stream:
            if caller is not None and caller.over:
                return
            async with asyncio.timeout(_SEND_S):
                writer.write(piece)
                await writer.drain()
