"""Work that may take a part of the event loop's time, and no more, however much of it is wanted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopShare:
    """Has pieces of work done one after the other, with pauses. It lives in one event loop."""

    def __init__(self, pause_factor: int, *, clock: Callable[[], float] = time.thread_time) -> None:
        """Begin with nothing done.

        Args:
            pause_factor: each piece is followed by a pause of so many times as long.
            clock: how much the loop's thread has worked, in seconds. So what others do between the steps of a
                piece does not count, and neither does a process that was stopped.
        """
        self._pause_factor = pause_factor
        self._clock = clock
        self._turn = asyncio.Lock()
        #: When the next piece may begin, by the loop's clock.
        self._next_s = 0.0
        # By the piece that is done.
        self._worked_s = 0.0

    async def run(self, make: Callable[[], Awaitable[T]]) -> T:
        """Do a piece of work when it is time for it.

        Args:
            make: does it, and lets others have their turn in between. The next piece waits for its end, so it may
                wait for nothing else.
        """
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(max(self._next_s - loop.time(), 0))
            self._worked_s = 0.0
            try:
                return await self._counted(make().__await__())
            finally:
                self._next_s = loop.time() + self._pause_factor * self._worked_s

    @coroutine
    def _counted(self, steps: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        """Go through the steps of something awaited, and count the work of each."""
        error: BaseException | None = None
        while True:
            began_s = self._clock()
            try:
                waits_for = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self._worked_s += self._clock() - began_s
            error = None
            try:
                yield waits_for
            except BaseException as thrown:  # It is the piece's, a cancellation above all.
                error = thrown
