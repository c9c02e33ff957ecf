"""Where a lease's record is kept: what such a place has to do, and the one that a setting names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clockwright.errors import ConfigError, StoreError
from clockwright.leadership import Term
from controller.lease.lease import Record

#: What can come of a setting, for people.
EXPECTED = "file:PATH or etcd://HOST:PORT[,HOST:PORT...][/KEY]"


@dataclass(frozen=True, slots=True)
class Found:
    """What was read."""

    #: None: there is no record yet.
    record: Record | None
    #: The record's holder runs no more, for sure.
    has_ended: bool = False
    #: Names this state of the place, for `swap`.
    revision: int = 0


class LeaseStore(Protocol):
    """Keeps the record. Called from one thread at a time, which may be another each time."""

    def read(self) -> Found:
        """Read the record.

        Raises:
            StoreError: the place cannot be reached, or holds something else.
        """

    def swap(self, found: Found, record: Record) -> bool:
        """Put a record in place of what was found, unless that has changed; tells whether it did so.

        Raises:
            StoreError: the place cannot be reached; whether the record was put is not known.
        """

    def close(self) -> None:
        """Let the place go."""


def open_store(setting: str) -> LeaseStore:
    """Make the store that a setting names, without reaching for it.

    Raises:
        ConfigError: it names none.
    """
    # Imported here, because each brings what the other does without.
    kind, _, rest = setting.partition(":")
    if kind == "file" and rest:
        from controller.lease.file import FileStore

        return FileStore(Path(rest))
    if kind == "etcd" and rest.startswith("//"):
        from controller.lease.etcd import EtcdStore

        endpoints, _, key = rest[2:].partition("/")
        return EtcdStore(endpoints.split(","), key or "clockwright/lease")
    raise ConfigError(f"lease is {setting!r}, expected {EXPECTED}")


def encode(record: Record) -> bytes:
    """Make a record's bytes."""
    fields = {
        "lineage": record.term.lineage,
        "generation": record.term.generation,
        "holder": record.holder,
        "renewals": record.renewals,
        "released": record.released,
    }
    return json.dumps(fields).encode()


def decode(data: bytes, *, where: str) -> Record:
    """Read a record.

    Raises:
        StoreError: this is none.
    """
    try:
        fields = json.loads(data)
        lineage, generation = fields["lineage"], fields["generation"]
        holder, renewals, released = fields["holder"], fields["renewals"], fields["released"]
    except (ValueError, TypeError, KeyError):
        fields = None
    if (
        fields is None
        or not (isinstance(lineage, str) and isinstance(holder, str))
        or not (isinstance(generation, int) and 0 < generation < 1 << 63)
        or not (isinstance(renewals, int) and isinstance(released, bool))
    ):
        raise StoreError(f"lease {where}: found {data[:80]!r}, expected a record of a lease")
    return Record(Term(lineage, generation), holder, renewals, released)
