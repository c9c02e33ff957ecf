"""Clients that ask in an open loop, from one event loop: at given times, or as long as a block runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from clockwright.errors import ClockwrightError

T = TypeVar("T")


async def ask_at(times_s: Iterable[float], ask: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
    """Ask at times from now on, whatever has come of the requests before; gives what came of each.

    Args:
        times_s: in their order.
        ask: sends the request of a number, the first is 0.
    """
    begin_s = time.monotonic()
    open_: list[asyncio.Task[T]] = []
    for number, due_s in enumerate(times_s):
        await asyncio.sleep(max(begin_s + due_s - time.monotonic(), 0))
        open_.append(asyncio.create_task(ask(number)))
    return await asyncio.gather(*open_)


@dataclass(slots=True)
class AskedOnce:
    """One request."""

    sent_s: float
    done_s: float = 0.0
    #: Why it was not answered; empty: it was.
    fault: str = ""


AskedT = TypeVar("AskedT", bound=AskedOnce)


class Asker(Generic[AskedT]):
    """Asks in its `async with` block, and keeps all that it asked, in the order of the questions."""

    def __init__(
        self,
        make: Callable[[float], AskedT],
        ask: Callable[[AskedT], Awaitable[None]],
        gap_s: Callable[[], float],
    ) -> None:
        """Ask nothing before the block begins.

        Args:
            make: a request that is sent at a time.
            ask: sends it, and writes down what came.
            gap_s: from one request to the next.
        """
        self.asked: list[AskedT] = []
        self._make, self._ask, self._gap_s = make, ask, gap_s
        self._stopped = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._asking = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ask nothing more, and wait for what is open."""
        self._stopped.set()
        await self._asking

    async def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stopped.is_set():
            self.asked.append(self._make(time.monotonic()))
            task = asyncio.create_task(self._one(self.asked[-1]))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            due_s += self._gap_s()
            await asyncio.sleep(max(due_s - time.monotonic(), 0))
        await asyncio.gather(*self._open)

    async def _one(self, asked: AskedT) -> None:
        try:
            await self._ask(asked)
        except ClockwrightError as error:
            asked.fault = f"{type(error).__name__}: {error}"
        asked.done_s = time.monotonic()
