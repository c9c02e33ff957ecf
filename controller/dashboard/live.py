"""Refreshes pages once a second while they have viewers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from controller.metrics.loop_share import LoopShare

log = logging.getLogger(__name__)

#: Viewers at a time.
VIEWERS_MAX: Final = 16
#: Those who look once and wait for it.
ASKERS_MAX: Final = 16

# Each refresh is followed by a pause of this many times its own time, so that all refreshes together take a bounded
# share of the event loop's time.
_PAUSE_FACTOR: Final = 20


@dataclass(slots=True)
class _Topic:
    """What several viewers look at."""

    #: The newest look, and how many there were.
    newest: bytes = b""
    number: int = 0
    num_viewers: int = 0
    #: Is set, and replaced, with each look.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Live:
    """Makes looks for viewers. It lives in one event loop."""

    def __init__(
        self, *, interval_s: float = 1.0, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """Begin without viewers.

        Args:
            interval_s: between two looks. Less: the loop's time goes into looks; more: people wait.
            clock: how much the loop's thread has worked, in seconds.
        """
        self._interval_s = interval_s
        self._topics: dict[str, _Topic] = {}
        self._share = LoopShare(_PAUSE_FACTOR, clock=clock)
        self._num_askers = 0
        self._asking = asyncio.Lock()
        self._closed = False

    @property
    def num_viewers(self) -> int:
        """How many look now."""
        return sum(topic.num_viewers for topic in self._topics.values())

    @property
    def has_room(self) -> bool:
        """Whether one more may look."""
        return self.num_viewers < VIEWERS_MAX

    @property
    def has_room_to_ask(self) -> bool:
        """Whether one more may look once."""
        return self._num_askers < ASKERS_MAX

    async def watch(
        self, name: str, make: Callable[[], Awaitable[bytes]]
    ) -> AsyncGenerator[bytes, None]:
        """Give one viewer each look that is the newest when it asks for the next; viewers of one name share refreshes."""
        topic = self._topics.setdefault(name, _Topic())
        topic.num_viewers += 1
        if topic.task is None:
            topic.task = asyncio.create_task(self._keep_looking(topic, make))
        seen = 0
        try:
            while not self._closed:
                if topic.number == seen:
                    await topic.changed.wait()
                    continue
                seen = topic.number
                yield topic.newest
        finally:
            topic.num_viewers -= 1
            if not topic.num_viewers:
                topic.task.cancel()
                # Another may have been made since, for others.
                if self._topics.get(name) is topic:
                    del self._topics[name]

    async def look(self, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Make one look, when it is time for it: one after the other, with pauses. All others wait while it is made."""
        self._num_askers += 1
        try:
            # Only the first in line competes with the viewers, so a long line does not slow their refreshes.
            async with self._asking:
                return await self._share.run(make)
        finally:
            self._num_askers -= 1

    def close(self) -> None:
        """End all viewers' streams."""
        self._closed = True
        for topic in self._topics.values():
            topic.changed.set()

    async def _keep_looking(self, topic: _Topic, make: Callable[[], Awaitable[bytes]]) -> None:
        while not self._closed:
            try:
                topic.newest = await self._share.run(make)
            except Exception:
                # This is our bug. Viewers see that updates have stopped.
                log.exception("a page of the dashboard cannot be made")
            else:
                topic.number += 1
                topic.changed.set()
                topic.changed = asyncio.Event()
            await asyncio.sleep(self._interval_s)
