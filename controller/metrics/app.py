"""HTTP for monitoring: `GET /metrics` and the pages of a site, with a key if callers are known.

It is an ASGI application behind `front.http.rest_server`, which bounds connections and headers. It is read only and
takes no body.

A page of another site may send a browser here. Such a page gets nothing that needs a role: no header lets it read
an answer, and a request that the browser marks as cross-site, or that names another host than this machine, is
refused. There are no cookies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Protocol

from clockwright.errors import Denial, DeniedError
from controller.access.authoriser import Authoriser, credentials_of
from controller.access.caller import Caller
from controller.front.http.rest import HttpError, Origin, check_site, read_headers
from controller.front.methods import CONTROL, METHODS, Method
from controller.metrics.text import OPENMETRICS, PROMETHEUS

log = logging.getLogger(__name__)

#: Connections at a time.
CONNECTIONS_MAX: Final = 64

_PATH: Final = "/metrics"
# The role of the status is enough: this shows more of the same.
_STATUS: Final = METHODS[f"/{CONTROL}/Status"]

_PLAIN: Final = "text/plain; charset=utf-8"
#: What browsers say of a request that this server's own page makes, or the person in front of it.
_OWN_SITE: Final = ("", "same-origin", "none")


@dataclass(slots=True)
class Reply:
    """An answer."""

    status: int
    #: In chunks.
    body: list[bytes]
    content_type: str = _PLAIN
    headers: Sequence[tuple[str, str]] = ()
    #: Further chunks, as they become ready.
    stream: AsyncGenerator[bytes, None] | None = None


class Site(Protocol):
    """Pages in addition to the metrics."""

    def has(self, path: str) -> bool:
        """Whether the page exists."""

    def method_of(self, path: str) -> Method | None:
        """The method whose role a page needs. Returns None if it is public."""

    async def reply(self, path: str, query: str) -> Reply:
        """Answer for an existing path."""


class Pages(Protocol):
    """Makes pages."""

    async def make(self, *, openmetrics: bool) -> list[bytes]:
        """Make a page, in pieces, in Prometheus' format or in OpenMetrics'."""


@dataclass(eq=False)
class MonitoringApp:
    """Serves pages. It lives in the controller's event loop."""

    pages: Pages
    authoriser: Authoriser
    _: KW_ONLY
    #: Clients of this machine alone reach it, as in `front.http.rest.RestApp`.
    only_here: bool
    site: Site | None = None

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Answer one request, as ASGI has it."""
        assert scope["type"] == "http"
        try:
            reply, caller = await self._reply(scope)
        except HttpError as error:
            reply, caller = Reply(error.status, [f"{error}\n".encode()]), None
            reply.headers = [(key.decode(), value.decode()) for key, value in error.headers]
        headers = [
            ("content-type", reply.content_type),
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
            *reply.headers,
        ]
        if reply.stream is None:
            headers.append(("content-length", str(sum(map(len, reply.body)))))
        start = {"type": "http.response.start", "status": reply.status}
        start["headers"] = [(name.encode(), value.encode()) for name, value in headers]
        await send(start)
        for piece in reply.body:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            # Requests get their turn between chunks.
            await asyncio.sleep(0)
        if reply.stream is not None and scope["method"] != "HEAD":
            await _send_on(reply.stream, receive, send, caller)
        await send({"type": "http.response.body", "body": b""})

    async def _reply(self, scope: Mapping[str, Any]) -> tuple[Reply, Caller | None]:
        """Answer a request. Returns the caller too, if the path needs one.

        Raises HttpError if the path does not exist, or the request is not allowed.
        """
        origin: Origin = scope["extensions"]["clockwright"]
        if origin.connection.crowded is not None:
            raise HttpError(503, str(origin.connection.crowded))
        headers = read_headers(scope["headers"])
        path = scope["raw_path"].decode("latin-1")
        site = self.site if self.site is not None and self.site.has(path) else None
        if site is None and path != _PATH:
            raise HttpError(404, f"expected {_PATH}")
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            raise HttpError(400, "expected a request without a body", [(b"connection", b"close")])
        if scope["method"] not in ("GET", "HEAD"):
            raise HttpError(405, "expected GET", [(b"allow", b"GET, HEAD")])
        method = _STATUS if site is None else site.method_of(path)
        caller: Caller | None = None
        if method is not None:
            if site is not None and headers.get("sec-fetch-site", "") not in _OWN_SITE:
                raise HttpError(403, "Sec-Fetch-Site: expected a page of this server")
            check_site(headers, only_here=self.only_here)
            shown = credentials_of(headers.items(), origin.connection.certificate)
            try:
                caller = self.authoriser.admit(method, shown, now_s=time.time())
            except DeniedError as error:
                if error.denial is Denial.NOT_ALLOWED:
                    raise HttpError(403, str(error)) from None
                bearer = (b"www-authenticate", b"Bearer")
                raise HttpError(401, str(error), [bearer]) from None
        try:
            if site is not None:
                query = scope["query_string"].decode("latin-1")
                return await site.reply(path, query), caller
            openmetrics = "application/openmetrics-text" in headers.get("accept", "")
            page = await self.pages.make(openmetrics=openmetrics)
        except Exception:
            # This is a bug of ours, which must not end the controller, nor be hidden.
            log.exception("page %s cannot be made", path)
            raise HttpError(500, "the page cannot be made; the log says why") from None
        return Reply(200, page, OPENMETRICS if openmetrics else PROMETHEUS), caller


async def _send_on(
    stream: AsyncGenerator[bytes, None],
    receive: Callable[[], Awaitable[Any]],
    send: Callable[[Any], Awaitable[None]],
    caller: Caller | None,
) -> None:
    """Send chunks until the client is gone or its role is lost."""
    sending = asyncio.create_task(_send_pieces(stream, send, caller))
    # If the client disconnects, stop without waiting for the next chunk.
    hung_up = asyncio.create_task(_wait_until_gone(receive))
    try:
        await asyncio.wait((sending, hung_up), return_when=asyncio.FIRST_COMPLETED)
    finally:
        sending.cancel()
        hung_up.cancel()
        await asyncio.gather(sending, hung_up, return_exceptions=True)


async def _send_pieces(
    stream: AsyncGenerator[bytes, None],
    send: Callable[[Any], Awaitable[None]],
    caller: Caller | None,
) -> None:
    async with aclosing(stream):
        async for piece in stream:
            if caller is not None and caller.over:
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _wait_until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
