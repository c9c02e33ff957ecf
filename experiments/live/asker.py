"""A client that asks in an open loop, from one event loop, until it is told to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from clockwright.errors import ClockwrightError


@dataclass(slots=True)
class AskedOnce:
    """One request."""

    sent_s: float
    done_s: float = 0.0
    #: Why it was not answered; empty: it was.
    fault: str = ""


AskedT = TypeVar("AskedT", bound=AskedOnce)


class Asker(Generic[AskedT]):
    """Keeps all that it asked, in the order of the questions."""

    def __init__(
        self,
        make: Callable[[float], AskedT],
        ask: Callable[[AskedT], Awaitable[None]],
        gap_s: Callable[[], float],
    ) -> None:
        """Ask nothing yet.

        Args:
            make: a request that is sent at a time.
            ask: sends it, and writes down what came.
            gap_s: from one request to the next.
        """
        self.asked: list[AskedT] = []
        self._make, self._ask, self._gap_s = make, ask, gap_s
        self._stopped = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Ask, and then wait for what is open."""
        due_s = time.monotonic()
        while not self._stopped.is_set():
            self.asked.append(self._make(time.monotonic()))
            task = asyncio.create_task(self._one(self.asked[-1]))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            due_s += self._gap_s()
            await asyncio.sleep(max(due_s - time.monotonic(), 0))
        await asyncio.gather(*self._open)

    def stop(self) -> None:
        """Ask nothing more."""
        self._stopped.set()

    async def _one(self, asked: AskedT) -> None:
        try:
            await self._ask(asked)
        except ClockwrightError as error:
            asked.fault = f"{type(error).__name__}: {error}"
        asked.done_s = time.monotonic()
