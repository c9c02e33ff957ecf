"""Takes the lease, renews and releases it: reads and writes the record at the times of the rules."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from pathlib import Path

from clockwright.errors import StoreError
from clockwright.units import NS_PER_S
from clockwright.wire.leadership import Term
from controller.process.lease.lease import LOOK_NS, RENEW_NS, Lease, Standing
from controller.process.lease.stores import FoundRecord, LeaseStore

log = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def clock_ns() -> int:
    """Now. Unlike the monotonic clock, this one continues while the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def holder_name(address: str) -> str:
    """Name this process uniquely, by an address that it listens on."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else str(os.getpid())
    return f"{socket.gethostname()} {boot} {address}"


class LeaseKeeper:
    """One controller's hold on the lease. The store is used in a thread, by one call at a time."""

    def __init__(self, store: LeaseStore, holder: str) -> None:
        """Start without the lease; `take` stands by. The holder is this controller's name, by `holder_name`."""
        self._store = store
        self._lease = Lease(holder, lineage=secrets.token_hex(8))
        #: Why the store does not answer; empty when it does.
        self._problem = ""
        #: What `keep` asks of the store.
        self._asking: asyncio.Task[Standing] | None = None

    @property
    def term(self) -> Term:
        """The generation in which this controller leads."""
        return self._lease.term

    @property
    def leader(self) -> str:
        """Describe the leader, as far as a standby knows it."""
        if self._problem:
            return f"the leader is not known: {self._problem}"
        record = self._lease.seen
        if record is None or record.released:
            return "no controller leads yet"
        # By `holder_name`.
        host, address = record.holder.partition(" ")[0], record.holder.rpartition(" ")[2]
        return f"the one on {host} that listens on {address} leads, in generation {record.term.generation}"

    async def take(self) -> Term:
        """Stand by until this controller leads."""
        # Others change the record, in other processes.
        while await self._step() is not Standing.LEADING:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_NS / NS_PER_S)
        return self.term

    async def keep(self) -> str:
        """Renew the lease until that fails. Returns why this controller no longer leads."""
        while True:
            now_ns = clock_ns()
            pause_ns = max(self._lease.next_look_ns() - now_ns, LOOK_NS)
            await asyncio.sleep(pause_ns / NS_PER_S)
            self._asking = asyncio.create_task(self._step())
            # A store that does not answer makes no lease longer. But a controller that was stopped, or starved,
            # leads on if no other has taken over.
            left_ns = max(self._lease.until_ns - clock_ns(), RENEW_NS)
            await asyncio.wait([self._asking], timeout=left_ns / NS_PER_S)
            has_answered = self._asking.done()
            standing = self._asking.result() if has_answered else self._lease.check(clock_ns())
            if standing is Standing.LOST:
                return "another controller has taken the lease"
            if standing is Standing.DOUBTFUL or not has_answered:
                return self._problem or "the lease was not renewed in time"

    async def give_back(self) -> None:
        """Release the lease, so that the next controller leads immediately."""
        if self._asking is not None:
            await asyncio.wait([self._asking])  # Its thread has the store.
        try:
            found = await asyncio.to_thread(self._store.read)
            released = self._lease.give_back(found.record)
            if released is not None:
                await asyncio.to_thread(self._store.swap, found, released)
        except StoreError as error:
            log.warning("%s; the next controller waits until the lease has lapsed", error)
        finally:
            self._store.close()

    async def _step(self) -> Standing:
        try:
            found = await asyncio.to_thread(self._store.read)
            await self._put(found)
        except StoreError as error:
            if not self._problem:
                log.warning("%s; trying again", error)
            self._problem = str(error)
        else:
            self._problem = ""
        return self._lease.check(clock_ns())

    async def _put(self, found: FoundRecord) -> None:
        asked_ns = clock_ns()
        record = self._lease.propose(found.record, now_ns=asked_ns, has_ended=found.has_ended)
        if record is not None and await asyncio.to_thread(self._store.swap, found, record):
            self._lease.put(record, asked_ns=asked_ns)
