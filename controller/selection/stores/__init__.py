"""Where states and applications outlive the process.

All of it runs in one thread of its own, in the order asked for, so that the event loop never waits for a
disk or a network and an erasure is never overtaken by a write.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from clockwright.errors import ConfigError, StoreError
from controller.selection.core.contexts import Address
from controller.selection.stores.sqlite import SqliteDatabase

log = logging.getLogger(__name__)

T = TypeVar("T")


class Database(Protocol):
    """What keeps the records; used by one thread only.

    Every call may raise one of `faults`; what it was to change is then as it was, or changed.
    """

    #: For people; without a password.
    name: str
    faults: tuple[type[Exception], ...]

    def load(self, address: Address) -> str | None:
        """The record of a context, if there is one."""

    def save(self, records: Mapping[Address, str]) -> None:
        """Write records, all or none."""

    def erase(self, application: str, context: str) -> bool:
        """Erase a context; returns whether there was one."""

    def applications(self) -> dict[str, str]:
        """Settings of all applications, by name, sorted."""

    def save_application(self, name: str, settings: str, *, forget: bool) -> None:
        """Write the settings of an application; `forget`: and erase all of its states."""

    def remove_application(self, name: str) -> None:
        """Erase an application with all of its states."""

    def close(self) -> None:
        """Let go of it."""


class Store:
    """States by application and context, and the applications; JSON inside.

    Every call may raise StoreError.
    """

    def __init__(self, where: str | Path | None) -> None:
        """Open a database.

        Args:
            where: a file, made if need be, or the URL of a Redis; None: in memory, gone with the process.

        Raises:
            ConfigError: it cannot be opened, or is of another kind.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="selection-store")
        #: Whether anything is ever found here that was not in memory a moment ago.
        self.persistent = where is not None
        try:
            self._database: Database = self._thread.submit(_open, where).result()
        except BaseException:
            self._thread.shutdown()
            raise

    async def load(self, address: Address) -> dict[str, Any] | None:
        """The record of a context, if there is one that can be read."""
        text = await self._run(lambda: self._database.load(address))
        return None if text is None else _parsed(text, f"the state of {address}")

    async def save(
        self, changes: Mapping[Address, Callable[[], dict[str, Any]]]
    ) -> dict[Address, Exception]:
        """Write records; each is made in the store's thread, of something immutable.

        Returns:
            Those that could not be made, and why; all others are written.
        """
        return await self._run(lambda: self._save(changes))

    async def erase(self, application: str, context: str) -> bool:
        """Erase a context; returns whether there was one."""
        return await self._run(lambda: self._database.erase(application, context))

    async def applications(self) -> list[dict[str, Any]]:
        """Settings of all applications that can be read, by name."""
        texts = await self._run(self._database.applications)
        parsed = [_parsed(text, f"application {name}") for name, text in texts.items()]
        return [settings for settings in parsed if settings is not None]

    async def save_application(
        self, name: str, settings: Mapping[str, Any], *, forget: bool
    ) -> None:
        """Write the settings of an application; `forget`: and erase all of its states."""
        text = json.dumps(settings)
        await self._run(lambda: self._database.save_application(name, text, forget=forget))

    async def remove_application(self, name: str) -> None:
        """Erase an application with all of its states."""
        await self._run(lambda: self._database.remove_application(name))

    async def close(self) -> None:
        """Finish what was asked for and let go of the database."""
        await self._run(self._database.close)
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
            except Exception as error:  # whatever a stranger's policy does
                faults[address] = error
        self._database.save(records)
        return faults


def _open(where: str | Path | None) -> Database:
    scheme, colon, _ = str(where).partition("://")
    if not colon:
        return SqliteDatabase(where)
    if scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"selection store: found a URL of {scheme}://, expected a file, or redis://, rediss:// or unix://"
        )
    # Only with the extra `redis`.
    from controller.selection.stores.redis import RedisDatabase

    return RedisDatabase(str(where))


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
