"""Keeps applications and their states beyond the life of the process.

    Store            asynchronous, JSON inside; the interface for the selection layer
    database         the protocol of its databases, whose calls block
    sqlite, redis    the two databases

A store runs all calls of its database in one thread of its own, in the order in which they were asked for.
So the event loop never waits for a disk or a network, and no write overtakes an erasure.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from clockwright.errors import ConfigError, StoreError
from controller.models.state_file import StateFile
from controller.selection.core.contexts import Address
from controller.selection.stores.database import Database
from controller.selection.stores.sqlite import SqliteDatabase

log = logging.getLogger(__name__)

T = TypeVar("T")


class Store:
    """States by application and context, and the applications; JSON inside.

    Every call may raise StoreError.
    """

    def __init__(
        self, where: StateFile | str | Path | None, *, contexts_max: int | None = None
    ) -> None:
        """Open a file; `open` has yet to be called, which reaches a Redis.

        A state file stays its owner's; else it is the path of one of the store's own, the URL of a Redis, or None: in
        memory, where about `contexts_max` are kept. Raises ConfigError if it cannot be opened, or is something else.
        """
        #: What is closed with the store, if anything.
        self._file: StateFile | None = None
        if not isinstance(where, StateFile) and "://" not in str(where):
            where = self._file = StateFile(None if where is None else Path(where))
        self._database: Database
        if isinstance(where, StateFile):
            self._thread = where.thread
            rows_max = contexts_max if where.path is None else None
            self._database = SqliteDatabase(where.connection, where.name, rows_max=rows_max)
        else:
            self._database = _redis(str(where))
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="selection-store")
        #: The store outlives the process, so it may hold states that were never in memory.
        self.persistent = not isinstance(where, StateFile) or where.path is not None
        #: For people.
        self.name = f"selection store {self._database.name}"

    async def open(self) -> None:
        """Reach the database, which comes first. Raises ConfigError if it does not answer, or is of another version."""
        await self._run(self._database.open)

    async def load(self, address: Address) -> dict[str, Any] | None:
        """Find the record of a context, if there is one that can be read."""
        text = await self._run(lambda: self._database.load(address))
        return None if text is None else _parsed(text, f"the state of {address}")

    async def save(
        self, changes: Mapping[Address, Callable[[], dict[str, Any]]]
    ) -> dict[Address, Exception]:
        """Write records. The store's thread makes each of them, so they are made of immutable values.

        Returns the records that could not be made, and why; all others are written.
        """
        return await self._run(lambda: self._save(changes))

    async def erase(self, application: str, context: str) -> bool:
        """Erase a context; returns whether there was one."""
        return await self._run(lambda: self._database.erase(application, context))

    async def applications(self) -> list[dict[str, Any]]:
        """Give the settings of all applications that can be read, sorted by name."""
        texts = await self._run(self._database.applications)
        parsed = [_parsed(text, f"application {name}") for name, text in texts.items()]
        return [settings for settings in parsed if settings is not None]

    async def save_application(
        self, name: str, settings: Mapping[str, Any], *, forget: bool
    ) -> None:
        """Write the settings of an application; with `forget`, also erase all of its states."""
        text = json.dumps(settings)
        await self._run(lambda: self._database.save_application(name, text, forget=forget))

    async def remove_application(self, name: str) -> None:
        """Erase an application with all of its states."""
        await self._run(lambda: self._database.remove_application(name))

    async def has_lost_everything(self) -> bool:
        """Whether the database came back without its contents since this was asked last."""
        return await self._run(self._database.has_lost_everything)

    async def close(self) -> None:
        """Finish all calls, and close the database if the store owns it."""
        await self._run(self._database.close)
        if self._file is not None:
            await self._file.close()
        elif not isinstance(self._database, SqliteDatabase):
            self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except self._database.faults as error:
            raise StoreError(f"selection store {self._database.name}: {error}") from error

    def _save(
        self, changes: Mapping[Address, Callable[[], dict[str, Any]]]
    ) -> dict[Address, Exception]:
        records: dict[Address, str] = {}
        faults: dict[Address, Exception] = {}
        for address, make in changes.items():
            try:
                records[address] = json.dumps(make())
            except Exception as error:  # Another package's policy may raise anything.
                faults[address] = error
        self._database.save(records)
        return faults


def _redis(url: str) -> Database:
    scheme = url.partition("://")[0]
    if scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"selection store: found a URL of {scheme}://, expected a file, or redis://, rediss:// or unix://"
        )
    # The client is there only with the extra `redis`.
    from controller.selection.stores.redis import RedisDatabase

    return RedisDatabase(url)


def _parsed(text: str, what: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except ValueError as error:
        log.error("%s in the store cannot be read: %s", what, error)
        return None
    if not isinstance(record, dict):
        log.error("%s in the store is a %s, expected an object", what, type(record).__name__)
        return None
    return record
