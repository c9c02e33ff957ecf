"""Who leads, and until when: the rules of the lease, without a clock and without a place for the record.

`Lease` is one controller's view. The caller reads the record, asks `propose` for the next one, writes it by
compare-and-swap, and calls `put` when that has succeeded. If the outcome is unknown it calls nothing: the next
read shows it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.wire.leadership import Term

#: A record that does not change for this long has lapsed.
LEASE_NS = 3 * NS_PER_S
#: How often a leader renews it.
RENEW_NS = NS_PER_S
#: How often a standby reads it, and a leader retries a failed renewal.
LOOK_NS = 100 * NS_PER_MS
#: How long a leader relies on it. The drift between two clocks is far smaller than the rest.
HELD_NS = LEASE_NS - 150 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The record that all controllers can read."""

    term: Term
    #: The leader of this generation: one process at a time has the name.
    holder: str
    #: Distinguishes each renewal.
    renewals: int = 0
    #: The holder has released it.
    released: bool = False


class Standing(enum.Enum):
    """What a controller may do."""

    STANDBY = "standby"
    LEADING = "leading"
    #: It has led, and others may lead now: it may do nothing before a renewal has succeeded, which shows that no
    #: other has led meanwhile.
    DOUBTFUL = "doubtful"
    #: Another has led since.
    LOST = "lost"


class Lease:
    """One controller's view of the lease. All times are ns of its own clock, which must not stop."""

    def __init__(self, holder: str, *, lineage: str) -> None:
        """Stand by.

        Args:
            holder: this controller. Of two processes with the same name, the other has ended.
            lineage: what to call a new lease.
        """
        self.standing = Standing.STANDBY
        self._holder = holder
        self._new = LeaseRecord(Term(lineage, 1), holder)
        #: The latest record that was read, or written by this controller, and since when it is unchanged.
        self._seen: LeaseRecord | None = None
        self._since_ns = 0
        #: A renewal that was tried and may have succeeded.
        self._tried: LeaseRecord | None = None
        #: While it leads: until when.
        self._until_ns = 0

    @property
    def term(self) -> Term:
        """The generation in which this controller leads, or led."""
        assert self.standing is not Standing.STANDBY, "a standby has no generation"
        assert self._seen is not None
        return self._seen.term

    @property
    def seen(self) -> LeaseRecord | None:
        """The record as it was found, or put by this controller, last; None: not yet written."""
        return self._seen

    @property
    def until_ns(self) -> int:
        """Until when this controller relies on the lease, once it has led."""
        return self._until_ns

    def check(self, now_ns: int) -> Standing:
        """Returns what this controller may do now; time alone can end its leadership."""
        if self.standing is Standing.LEADING and now_ns >= self._until_ns:
            self.standing = Standing.DOUBTFUL
        return self.standing

    def next_look_ns(self) -> int:
        """When a leader is to renew, at the earliest."""
        return self._since_ns + RENEW_NS

    def propose(
        self, found: LeaseRecord | None, *, now_ns: int, has_ended: bool = False
    ) -> LeaseRecord | None:
        """Decide on a replacement of the record. Returns None to leave it.

        Args:
            found: the record; None: not yet written.
            now_ns: a time after it was read, and before what is returned is put.
            has_ended: its holder certainly does not run any more.
        """
        match self.check(now_ns):
            case Standing.LEADING | Standing.DOUBTFUL:
                return self._renewal(found)
            case Standing.STANDBY:
                return self._claim(found, now_ns, has_ended)
            case Standing.LOST:
                return None

    def _renewal(self, found: LeaseRecord | None) -> LeaseRecord | None:
        assert self._seen is not None
        if found is None or found not in (self._seen, self._tried):
            self.standing = Standing.LOST
            return None
        self._tried = replace(found, renewals=found.renewals + 1)
        return self._tried

    def _claim(self, found: LeaseRecord | None, now_ns: int, has_ended: bool) -> LeaseRecord | None:
        if found is None:
            return self._new
        if found != self._seen:
            self._seen, self._since_ns = found, now_ns
        has_lapsed = now_ns - self._since_ns >= LEASE_NS
        if not (found.released or has_ended or has_lapsed or found.holder == self._holder):
            return None
        return LeaseRecord(found.term.next(), self._holder)

    def put(self, record: LeaseRecord, *, asked_ns: int) -> None:
        """Record that a proposal was written; `asked_ns` is the `now_ns` of the proposal."""
        if self.standing is Standing.LOST:
            return
        self.standing = Standing.LEADING
        self._seen, self._since_ns = record, asked_ns
        self._until_ns = asked_ns + HELD_NS

    def give_back(self, found: LeaseRecord | None) -> LeaseRecord | None:
        """Stop leading. Returns the replacement of the record, or None to leave it."""
        led = self.standing in (Standing.LEADING, Standing.DOUBTFUL)
        self.standing = Standing.LOST
        if not led or found is None or found not in (self._seen, self._tried):
            return None
        return replace(found, released=True)
