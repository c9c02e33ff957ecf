"""Reads the directory of cells ten times a second."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Final

from clockwright.errors import StoreError
from controller.front.cells.choice import Choices
from controller.front.cells.rows import ROW_INTERVAL_NS, CellRow, Entry, decoded
from controller.process.lease.stores import DirectoryStore

log = logging.getLogger(__name__)

_INTERVAL_S: Final = ROW_INTERVAL_NS / 1e9


@dataclass(eq=False)
class CellReader:
    """Keeps a view of the directory up to date. While the store fails, the last rows hold: links say who is there."""

    store: DirectoryStore
    #: Take in what is read.
    choices: Choices
    _: KW_ONLY
    #: Called after each reading with the addresses of all controllers that the directory has.
    read: Callable[[Collection[str]], None] = lambda _: None
    clock: Callable[[], int] = time.monotonic_ns

    def __post_init__(self) -> None:
        #: Controllers that have written a row.
        self._known: set[str] = set()
        #: Why the last reading failed; empty: it did not.
        self._problem = ""
        self._over = asyncio.Event()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read until the block ends, once before it begins."""
        await self._step()
        if not self._problem and not self._known:
            log.warning(
                "found no controller in the directory of cells, expected one that was started with the same "
                "--cells; waiting"
            )
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            # A store is used by one thread at a time.
            self._over.set()
            await task
            self.store.close()

    async def _run(self) -> None:
        while not self._over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL_S):
                    await self._over.wait()
            await self._step()

    async def _step(self) -> None:
        began_ns = self.clock()
        try:
            found, gone = await asyncio.to_thread(self.store.changes)
        except StoreError as error:
            self.choices.hold(began_ns, self.clock())
            self._say(str(error))
        else:
            entries, faults = decoded(found)
            now_ns = self.clock()
            for entry in entries:
                if self._counts(entry):
                    self.choices.take(entry, now_ns)
            for key in gone:
                self._known.discard(key.removeprefix("row/"))
                self.choices.forget(key)
            self._say("; ".join(faults))
        self.read(self._known)

    def _counts(self, entry: Entry) -> bool:
        """Whether an entry counts: the first row of a controller may be all that is left of one that is gone."""
        if not isinstance(entry, CellRow) or entry.address in self._known:
            return True
        self._known.add(entry.address)
        return False

    def _say(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.warning("%s; trying again", problem)
        self._problem = problem
