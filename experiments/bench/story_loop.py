"""An event loop on a virtual time, for stories of what lives in one."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import cast

from clockwright.units import NS_PER_S


class StoryLoop:
    """As much of an event loop as the stage and the runtime need; its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now_ns = 1000 * NS_PER_S
        self._due: list[tuple[int, int, asyncio.Handle]] = []
        self._numbers = count()
        # The rest of an event loop is not needed.
        self._as_loop = cast("asyncio.AbstractEventLoop", self)

    def at(self, time_ns: int, work: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """Call something at a time."""
        handle = asyncio.TimerHandle(time_ns / NS_PER_S, work, args, self._as_loop)
        heapq.heappush(self._due, (time_ns, next(self._numbers), handle))
        return handle

    def play(self, until_ns: int | None = None) -> None:
        """Go on until nothing is left to do, or until a time."""
        asyncio._set_running_loop(self._as_loop)
        try:
            while self._due and (until_ns is None or self._due[0][0] <= until_ns):
                self.now_ns, _, handle = heapq.heappop(self._due)
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    # What asyncio's loops have.

    def get_debug(self) -> bool:
        """No."""
        return False

    def time(self) -> float:
        """The present in s."""
        return self.now_ns / NS_PER_S

    def call_soon(self, work: Callable[..., object], *args: object) -> asyncio.Handle:
        """Call something in the next turn."""
        return self.at(self.now_ns, work, *args)

    def call_later(
        self, delay: float, work: Callable[..., object], *args: object
    ) -> asyncio.TimerHandle:
        """Call something so many seconds later."""
        return self.at(self.now_ns + round(delay * NS_PER_S), work, *args)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def call_exception_handler(self, context: dict[str, Exception]) -> None:
        """End the story."""
        raise context["exception"]
