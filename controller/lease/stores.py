"""Where a lease's record is kept: what such a place has to do, and the record as bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol

from clockwright.errors import StoreError
from clockwright.leadership import Term
from controller.lease.lease import LeaseRecord

#: What can come of a setting, for people.
EXPECTED = (
    "file:PATH or etcd://HOST:PORT[,HOST:PORT...][/KEY], over TLS "
    "etcds://...?ca=PATH[&cert=PATH&key=PATH]"
)


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """What was read."""

    #: None: there is no record yet.
    record: LeaseRecord | None
    #: The record's holder runs no more, for sure.
    has_ended: bool = False
    #: Names this state of the place, for `swap`.
    revision: int = 0


class LeaseStore(Protocol):
    """Keeps the record. Called from one thread at a time, which may be another each time."""

    def read(self) -> FoundRecord:
        """Read the record.

        Raises:
            StoreError: the place cannot be reached, or holds something else.
        """

    def swap(self, found: FoundRecord, record: LeaseRecord) -> bool:
        """Put a record in place of what was found, unless that has changed; tells whether it did so.

        Raises:
            StoreError: the place cannot be reached; whether the record was put is not known.
        """

    def close(self) -> None:
        """Let the place go."""


def encode(record: LeaseRecord) -> bytes:
    """Make a record's bytes."""
    fields = {
        "lineage": record.term.lineage,
        "generation": record.term.generation,
        "holder": record.holder,
        "renewals": record.renewals,
        "released": record.released,
    }
    return json.dumps(fields).encode()


def decode(data: bytes, *, where: str) -> LeaseRecord:
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
    return LeaseRecord(Term(lineage, generation), holder, renewals, released)
