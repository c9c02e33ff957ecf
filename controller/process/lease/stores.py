"""The interfaces of stores, for a lease's record and for the directory of cells, and the record as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from clockwright.errors import StoreError
from clockwright.wire.leadership import Term
from controller.process.lease.lease import LeaseRecord

#: Where the directory of cells may lie.
EXPECTED_OF_CELLS = "file:PATH or etcd://HOST:PORT[,HOST:PORT...][/KEY], or over TLS etcds://...?ca=PATH[&cert=PATH&key=PATH]"
#: Where the record of a lease may lie.
EXPECTED = f"{EXPECTED_OF_CELLS}, or kubernetes://NAMESPACE/NAME[?api=URL]"


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """What was read."""

    #: None: the record does not exist yet.
    record: LeaseRecord | None
    #: The record's holder is known to have ended.
    has_ended: bool = False
    #: Version of the store, for `swap`; empty: it has nothing there.
    revision: str = ""


class LeaseStore(Protocol):
    """Keeps the record. Called from one thread at a time, but not always the same one."""

    def read(self) -> FoundRecord:
        """Read the record. Raises StoreError if the store cannot be reached, or holds something else."""

    def swap(self, found: FoundRecord, record: LeaseRecord) -> bool:
        """Replace the record that was found, unless it changed. Returns whether it was replaced.

        Raises StoreError if the store cannot be reached; the outcome is unknown.
        """

    def close(self) -> None:
        """Close the store."""


class DirectoryStore(Protocol):
    """Keeps entries by key, such as `row/10.0.0.1:8001`. Called from one thread at a time, but not always the same one."""

    def put(self, key: str, data: bytes) -> None:
        """Write an entry, whether there is one or not.

        Raises StoreError if the store cannot be reached; the outcome is unknown.
        """

    def remove(self, key: str) -> None:
        """Remove an entry, if there is one; as `put`."""

    def changes(self) -> tuple[dict[str, bytes], frozenset[str]]:
        """Read the entries that were written since the last call, at first all; and the keys of those that are gone.

        Raises StoreError if the store cannot be reached, or holds something else.
        """

    def close(self) -> None:
        """Close the store."""


class _Record(msgspec.Struct):
    lineage: str
    generation: Annotated[int, Meta(gt=0, le=(1 << 63) - 1)]
    holder: str
    renewals: int
    released: bool


def encode(record: LeaseRecord) -> bytes:
    """Make a record's bytes."""
    term = record.term
    fields = (term.lineage, term.generation, record.holder, record.renewals, record.released)
    return msgspec.json.encode(_Record(*fields))


def decode(data: bytes, *, where: str) -> LeaseRecord:
    """Read a record. Raises StoreError if the bytes are not a record."""
    try:
        found = msgspec.json.decode(data, type=_Record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise StoreError(
            f"lease {where}: found {data[:80]!r}, expected a record of a lease"
        ) from None
    term = Term(found.lineage, found.generation)
    return LeaseRecord(term, found.holder, found.renewals, found.released)
