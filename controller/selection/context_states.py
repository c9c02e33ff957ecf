"""States of contexts: read from the store when needed, written back when changed.

Everything except the store's own work runs in the controller's event loop thread. While the store is unreachable,
queries are answered from the states in memory, and changes wait. Feedback for a context that is not in
memory fails then, because its new state would not follow from the one in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from clockwright.errors import StoreError
from controller.selection.core.contexts import GLOBAL, Address, Contexts
from controller.selection.guarded import PolicyError
from controller.selection.live_application import LiveApplication
from controller.selection.stores import Store

log = logging.getLogger(__name__)

_FLUSH_INTERVAL_S = 1.0

# Limit on concurrent reads of states. While a store hangs, all other users get the global state.
_READS_MAX = 1000
# Callers that only display a state start no read beyond this number: queries have priority.
_LOOKS_READS_MAX = 16

# States written at once. The event loop's part of such a slice takes much less than a millisecond.
_SLICE = 500


@dataclass(slots=True)
class _Held:
    """A context's state, and the revision of the application that it belongs to."""

    running: LiveApplication
    state: Any

    def record(self) -> dict[str, Any]:
        """Make the store's record of the state. The store's thread calls this."""
        return {
            "policy": self.running.application.policy,
            "version": self.running.policy.version,
            "state": self.running.policy.dump(self.state),
        }


class ContextStates:
    """The states of all contexts; each application's global one is its `LiveApplication.state`."""

    def __init__(self, store: Store, *, capacity: int) -> None:
        """Start empty, with room for `capacity` states in memory."""
        self._store = store
        self._contexts = Contexts(capacity=capacity)
        #: Held while a state is written or erased: a write that overtakes an erasure would undo it.
        self.changing = asyncio.Lock()
        self._flushing: asyncio.Task[None] | None = None
        #: Reads in progress; all users of a state wait for the same read.
        self._reading: dict[Address, asyncio.Task[None]] = {}
        self._away = False
        #: The store came back empty, and not all is written again yet.
        self._lost = False
        #: Names of applications with a state that cannot be written; each is logged once.
        self._unwritable: set[str] = set()

    def start(self, refill: Callable[[], Awaitable[None]]) -> None:
        """Write changes from now on, once a second.

        Args:
            refill: writes everything except states after the store lost its contents. It may raise StoreError, and is
                called again then.
        """
        self._flushing = asyncio.create_task(self._keep_flushing(refill))

    async def close(self) -> None:
        """Write all changes that are not written yet."""
        if self._flushing is not None:
            self._flushing.cancel()
        for reading in self._reading.values():
            reading.cancel()
        await self.flush()
        if self.num_waiting:
            log.error("%d changes of states are lost", self.num_waiting)

    # --- reading ------------------------------------------------------------------------------

    async def read(self, running: LiveApplication, context: str) -> Any:  # noqa: ANN401
        """Read the state of a context; the global one where it has none.

        No other task runs between the end of this and the caller's next `await`. Raises StoreError if the state is not
        in memory, and the store cannot be read.
        """
        if not self.is_at_hand(running, context):
            # A caller that stops waiting must not cancel the read for others, nor for the next query.
            await asyncio.shield(self._reading_of(running, context, _READS_MAX))
        return self.in_memory(running, context)

    def at_hand(self, running: LiveApplication, context: str) -> Any:  # noqa: ANN401
        """Give the state of a context, the global one where it has none, without waiting for the store.

        Raises StoreError if the state is not in memory. It is being read, and a later call may find it.
        """
        if not self.is_at_hand(running, context):
            self._reading_of(running, context, _LOOKS_READS_MAX)
            raise StoreError(f"{self._store.name} has not returned the state of {context!r} yet")
        return self.in_memory(running, context)

    def _reading_of(
        self, running: LiveApplication, context: str, reads_max: int
    ) -> asyncio.Task[None]:
        """Read the state of a context, until it is in memory or known not to exist."""
        address = running.application.name, context
        reading = self._reading.get(address)
        if reading is None:
            if len(self._reading) >= reads_max:
                raise StoreError(f"selection store: {reads_max} reads wait for it already")
            reading = asyncio.create_task(self._load(running, context))
            self._reading[address] = reading
            reading.add_done_callback(partial(self._read_over, address))
        return reading

    def is_at_hand(self, running: LiveApplication, context: str) -> bool:
        """Whether the state of a context is in memory, or is known to be the global one."""
        if not context or not running.policy.per_context:
            return True
        name = running.application.name
        return (
            self._contexts.find(name, context) is not None
            or self._contexts.is_stateless(name, context)
            or (not self._store.persistent and not self._contexts.has_dropped)
        )

    def in_memory(self, running: LiveApplication, context: str) -> Any:  # noqa: ANN401
        """Give the state of a context that is in memory, or the global one."""
        if not context or not running.policy.per_context:
            return running.state
        held = self._in_memory(running, context)
        return running.state if held is None else held.state

    async def read_in_time(self, running: LiveApplication, context: str, limit_s: float) -> Any:  # noqa: ANN401
        """Read the state of a context; the global one where it has none or the store is too slow."""
        try:
            # A store in memory is fast, and still has a state that was evicted here, so no limit is needed.
            async with asyncio.timeout(limit_s if self._store.persistent else None):
                return await self.read(running, context)
        except (TimeoutError, StoreError):
            return running.state

    async def _load(self, running: LiveApplication, context: str) -> None:
        name = running.application.name
        try:
            record = await self._store.load((name, context))
        except StoreError as error:
            self._note_absence(error)
            raise
        # An erasure that was asked for meanwhile waits for the store behind this read, so it comes after
        # this and erases the state in memory too.
        restored = _restored(running, record)
        if restored is not None:
            self._contexts.loaded(name, context, restored)
        elif self._contexts.find(name, context) is None:
            self._contexts.note_stateless(name, context)

    def _read_over(self, address: Address, reading: asyncio.Task[None]) -> None:
        del self._reading[address]
        if not reading.cancelled():
            reading.exception()  # Its waiters may have stopped waiting; the store's failure is logged once.

    async def restore(self, running: LiveApplication) -> None:
        """Give an application its global state from the store. Raises StoreError if the store cannot be read."""
        record = await self._store.load((running.application.name, GLOBAL))
        restored = _restored(running, record)
        if restored is not None:
            running.state = restored.state

    def num_contexts(self, application: str) -> int:
        """Number of an application's contexts in memory."""
        return self._contexts.num_of(application)

    @property
    def num_waiting(self) -> int:
        """Number of changes that are not known to be written."""
        return self._contexts.num_dirty

    def _in_memory(self, running: LiveApplication, context: str) -> _Held | None:
        held = self._contexts.find(running.application.name, context)
        if not isinstance(held, _Held) or held.running is running:
            return held
        newer = _Held(running, migrated(running, held.state))
        # A query to an earlier revision must not overwrite the state of a later one.
        if held.running.revision < running.revision:
            self._contexts.set(running.application.name, context, newer)
        return newer

    # --- changing -----------------------------------------------------------------------------

    def set(self, running: LiveApplication, context: str, state: Any) -> None:  # noqa: ANN401
        """Accept a new state, also a global one, to be written."""
        self._contexts.set(running.application.name, context, _Held(running, state))

    def forget(self, application: str, context: str | None = None) -> bool:
        """Forget a context, or all of an application, in memory. Returns whether the context was in memory."""
        found = context is not None and self._contexts.find(application, context) is not None
        self._contexts.erase(application, context)
        return found

    async def flush(self) -> None:
        """Write the states that have changed. If the store fails, they are tried again next time."""
        for _ in range(0, self._contexts.num_dirty, _SLICE):
            async with self.changing:
                changes = self._contexts.changes(_SLICE)
                try:
                    faults = await self._store.save(
                        {address: partial(_Held.record, held) for address, held in changes.items()}
                    )
                except StoreError as error:
                    self._note_absence(error)
                    return
                self._contexts.written(changes)
            for (name, context), fault in faults.items():
                if name not in self._unwritable:
                    self._unwritable.add(name)
                    log.error(
                        "application %s: the state of %r, and perhaps others, cannot be written: %r",
                        name,
                        context,
                        fault,
                    )

    async def _look_after_store(self, refill: Callable[[], Awaitable[None]]) -> None:
        """Find out whether the store is back, and write all again if it has lost everything."""
        try:
            if await self._store.has_lost_everything():
                self._lost = True
                self._contexts.lost()
            if self._lost:
                await refill()
        except StoreError as error:
            self._note_absence(error)
            return
        if self._lost:
            log.warning("%s is back, empty; writing everything in memory again", self._store.name)
        elif self._away:
            lost = self._contexts.num_lost
            log.info("%s is back; changes lost since the start: %d", self._store.name, lost)
        self._lost = self._away = False

    async def _keep_flushing(self, refill: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(_FLUSH_INTERVAL_S)
            try:
                await self._look_after_store(refill)
                await self.flush()
            except Exception:
                # This error is unexpected. The next write is tried anyway.
                log.exception("changed states were not written")

    def _note_absence(self, error: StoreError) -> None:
        if not self._away:
            self._away = True
            log.error("%s; serving from memory, which is written when it is back", error)


def _restored(running: LiveApplication, record: Mapping[str, Any] | None) -> _Held | None:
    """Restore the state in a record. Returns None without a state of this policy and version."""
    if record is None:
        return None
    name, policy = running.application.policy, running.policy
    if (record.get("policy"), record.get("version")) != (name, policy.version):
        return None
    try:
        state = policy.load(record["state"])
        return _Held(running, policy.resize(state, running.application.models))
    except (KeyError, ValueError) as error:  # The record may be another program's.
        log.warning("application %s: a state is dropped: %r", running.application.name, error)
        return None
    except PolicyError:
        return None


def migrated(running: LiveApplication, state: Any) -> Any:  # noqa: ANN401
    """Turn a state of another revision with the same policy into one for this revision's models."""
    policy = running.policy
    try:
        return policy.resize(policy.load(policy.dump(state)), running.application.models)
    except (PolicyError, ValueError) as error:
        log.warning("application %s: a state is dropped: %s", running.application.name, error)
        return running.fresh
