"""The dashboard of a standby controller: it names the leader.

It is the same page, which asks again by itself, and shows everything once this controller leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

import msgspec

from controller.dashboard.site import PageFiles, events_reply, file_reply, json_reply
from controller.metrics.app import Reply

_INTERVAL_S: Final = 1.0

# The page's text before its scripts run, and without scripts.
_ASKING: Final = (
    b'<strong id="finding">ASKING</strong> <span id="words">The server has not answered yet.</span>'
)
_STANDBY: Final = b'<strong id="finding">STANDBY</strong> <span id="words">This controller stands by: another one leads.</span>'


class StandbySite(PageFiles):
    """Answers for the paths of the dashboard, where another controller leads."""

    def __init__(self, leader: Callable[[], str]) -> None:
        """Read the page's files; `leader` describes the leader."""
        super().__init__()
        self._leader = leader
        content_type, page = self.files["/"]
        assert _ASKING in page
        self.files["/"] = content_type, page.replace(_ASKING, _STANDBY)

    async def reply(self, path: str, _: str) -> Reply:
        """Answer for a path that there is."""
        if path in self.files:
            return file_reply(self.files[path])
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
