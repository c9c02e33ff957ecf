"""What the dashboard says at a controller that stands by: that it does, and who leads.

It is the same page, which asks again by itself: when this controller leads it shows what there is to see.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

import msgspec

from controller.dashboard.site import events_reply, file_reply, json_reply, method_of, page_files
from controller.metrics.door import Reply

_INTERVAL_S: Final = 1.0

# The page's first words, before its scripts run, and for whoever runs none.
_ASKING: Final = (
    b'<strong id="finding">ASKING</strong> <span id="words">The server has not answered yet.</span>'
)
_STANDBY: Final = b'<strong id="finding">STANDBY</strong> <span id="words">This controller stands by: another one leads.</span>'


class StandbySite:
    """Answers for the paths of the dashboard, where another controller leads."""

    def __init__(self, leader: Callable[[], str]) -> None:
        """Read the page's files.

        Args:
            leader: says who leads.
        """
        self._leader = leader
        self._files = page_files()
        content_type, page = self._files["/"]
        assert _ASKING in page
        self._files["/"] = content_type, page.replace(_ASKING, _STANDBY)

    def method_of(self, path: str) -> str | None:
        """Path of the gRPC method whose role a page takes; empty: everybody may see it; None: there is none."""
        return method_of(self._files, path)

    async def reply(self, path: str, _: str) -> Reply:
        """Answer for a path that there is."""
        if path in self._files:
            return file_reply(self._files[path])
        if path.startswith("/live/"):
            return events_reply(self._events())
        return json_reply(msgspec.json.encode({"error": self._words()}))

    async def _events(self) -> AsyncGenerator[bytes, None]:
        while True:
            yield b"data: %b\n\n" % msgspec.json.encode({"standby": self._words()})
            await asyncio.sleep(_INTERVAL_S)

    def _words(self) -> str:
        return (
            f"this controller stands by: {self._leader()}. It follows when that one ends, and what there is to see"
            " is then here"
        )
