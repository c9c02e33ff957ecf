"""Paths of the dashboard: the page's own files, and the data of its scripts."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

import msgspec

from clockwright.errors import ClockwrightError
from controller.dashboard.live import ASKERS_MAX, VIEWERS_MAX, Live
from controller.dashboard.views import DashboardViews
from controller.front.methods import CONTROL, METHODS, Method
from controller.metrics.app import Reply

_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: Longest name in a query; existing names are shorter.
_NAME_CHARS_MAX: Final = 1024

# Only files of this folder are run, drawn or requested; text cannot become markup; the page cannot be embedded in another
# one.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_OWN_ONLY: Final = (("cross-origin-resource-policy", "same-origin"),)
_HEADERS: Final = (
    ("content-security-policy", _POLICY),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    *_OWN_ONLY,
)

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"

#: What is looked at, and the method of ControlService whose role that takes.
METHOD_OF: Final[Mapping[str, Method]] = {
    path: METHODS[f"/{CONTROL}/{name}"]
    for path, name in (
        ("/live/overview", "Status"),
        ("/live/models", "ListModels"),
        ("/live/pages", "ListWorkers"),
        ("/live/timeline", "ListWorkers"),
        ("/live/model", "ListModels"),
        ("/live/applications", "ListApplications"),
        ("/look/history", "Status"),
        ("/look/request", "Explain"),
    )
}


def page_files() -> dict[str, tuple[str, bytes]]:
    """Read the page's own files: by path, what they are and what is in them."""
    files = {
        f"/{path.relative_to(_STATIC)}": (_TYPES[path.suffix], path.read_bytes())
        for path in _STATIC.rglob("*")
        if path.suffix in _TYPES
    }
    return {**files, "/": files["/index.html"]}


def file_reply(file: tuple[str, bytes]) -> Reply:
    """Answer with a file of the page."""
    content_type, data = file
    return Reply(200, [data], content_type, _HEADERS)


def json_reply(data: bytes) -> Reply:
    """Answer with a look."""
    return Reply(200, [data], _JSON, _OWN_ONLY)


def events_reply(events: AsyncGenerator[bytes, None]) -> Reply:
    """Answer with Server-Sent Events."""
    return Reply(200, [], _EVENTS, _OWN_ONLY, stream=events)


class PageFiles:
    """The page's own files, which are public; the rest needs a role."""

    def __init__(self) -> None:
        self.files = page_files()

    def has(self, path: str) -> bool:
        """Do what `Site` says."""
        return path in self.files or path in METHOD_OF

    def method_of(self, path: str) -> Method | None:
        """Do what `Site` says."""
        return METHOD_OF.get(path)


class DashboardSite(PageFiles):
    """Answers for the paths of the dashboard. It lives in the controller's event loop."""

    def __init__(self, views: DashboardViews, live: Live) -> None:
        """Read the page's files."""
        super().__init__()
        self._views = views
        self._live = live

    def close(self) -> None:
        """End all viewers' streams."""
        self._live.close()

    async def reply(self, path: str, query: str) -> Reply:
        """Answer for a path that there is."""
        if path in self.files:
            return file_reply(self.files[path])
        asked = {
            name: values[0][:_NAME_CHARS_MAX]
            for name, values in parse_qs(query, errors="replace").items()
        }
        make = self._maker(path, asked)
        if path.startswith("/look/"):
            if not self._live.has_room_to_ask:
                return _refusal(f"found {ASKERS_MAX} looks that wait, expected one less; ask again")
            return json_reply(await self._live.look(functools.partial(_told, make)))
        if not self._live.has_room:
            return _refusal(f"found {VIEWERS_MAX} viewers, expected one less; close a dashboard")
        topic = f"{path}?{sorted(asked.items())}"
        return events_reply(self._events(topic, make))

    def _maker(self, path: str, asked: Mapping[str, str]) -> Callable[[], Awaitable[bytes]]:
        views, name = self._views, asked.get("name", "")
        makers: Mapping[str, Callable[[], Awaitable[bytes]]] = {
            "/live/overview": views.overview,
            "/live/models": views.models,
            "/live/pages": views.pages,
            "/live/timeline": views.timeline,
            "/live/model": functools.partial(views.model, name),
            "/live/applications": functools.partial(
                views.applications, name, asked.get("context", "")
            ),
            "/look/history": functools.partial(views.history, name),
            "/look/request": functools.partial(views.request, asked.get("id", "")),
        }
        return makers[path]

    async def _events(
        self, topic: str, make: Callable[[], Awaitable[bytes]]
    ) -> AsyncGenerator[bytes, None]:
        """Looks as Server-Sent Events."""
        async for data in self._live.watch(topic, functools.partial(_told, make)):
            yield b"data: %b\n\n" % data


def _refusal(words: str) -> Reply:
    return Reply(503, [f"{words}\n".encode()], headers=[("retry-after", "5")])


async def _told(make: Callable[[], Awaitable[bytes]]) -> bytes:
    try:
        return await make()
    except ClockwrightError as error:
        return msgspec.json.encode({"error": str(error)})
