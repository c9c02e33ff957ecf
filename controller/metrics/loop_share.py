"""Limits work to a share of the event loop's time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopShare:
    """Runs pieces of work one after the other, with pauses. It lives in one event loop."""

    def __init__(self, pause_factor: int, *, clock: Callable[[], float] = time.thread_time) -> None:
        """Start without work.

        Args:
            pause_factor: each piece is followed by a pause of this many times its own time.
            clock: CPU time of the loop's thread, in seconds, so that neither other work between the steps of a
                piece nor a stopped process counts.
        """
        self._pause_factor = pause_factor
        self._clock = clock
        self._turn = asyncio.Lock()
        #: When the next piece may start, by the loop's clock.
        self._next_s = 0.0
        # Set by the finished piece.
        self._worked_s = 0.0

    async def run(self, make: Callable[[], Awaitable[T]]) -> T:
        """Run a piece of work when its turn comes. It yields in between, and must not wait for anything else."""
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
            except BaseException as thrown:  # It belongs to the piece; usually a cancellation.
                error = thrown
