"""Metrics of a standby controller: another one leads."""

from __future__ import annotations

from clockwright import __version__
from controller.metrics.process import ProcessFigures
from controller.metrics.text import Text, labels_of


class StandbyPage:
    """Makes pages of a standby controller."""

    def __init__(self, policy: str) -> None:
        """Begin; the policy is that of the scheduler when it leads."""
        self._build = labels_of(version=__version__, policy=policy)
        self._process = ProcessFigures()

    async def make(self, *, openmetrics: bool) -> list[bytes]:
        """Make a page."""
        text = Text(openmetrics=openmetrics)
        text.one("clockwright_leader", 0)
        text.one("clockwright_ready", 0)
        text.each("clockwright_build_info", [(self._build, 1)])
        self._process.write(text)
        return text.end()
