"""Who leads, and until when: the rules of the lease, without a clock and without a place for the record.

`Lease` is one controller's view. Whoever has read the record asks `propose` what to put in its place, does so by
comparing and swapping, and says `put` when that has succeeded. An attempt of which nobody knows whether it has
succeeded is said nothing of: the next look shows it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from clockwright.leadership import Term
from clockwright.units import NS_PER_MS, NS_PER_S

#: A record that does not change for so long has lapsed.
LEASE_NS = 3 * NS_PER_S
#: How often a leader renews it.
RENEW_NS = NS_PER_S
#: How often one that stands by looks at it, and a leader that has failed to renew tries again.
LOOK_NS = 100 * NS_PER_MS
#: How long a leader counts on it. Two clocks that run unlike differ by far less than what is left.
HELD_NS = LEASE_NS - 150 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What is kept where all can see it."""

    term: Term
    #: Who leads in this generation: one process at a time has the name.
    holder: str
    #: Makes each renewal another record.
    renewals: int = 0
    #: The holder has given it back.
    released: bool = False


class Standing(enum.Enum):
    """What a controller may do."""

    STANDBY = "standby"
    LEADING = "leading"
    #: It has led, and others may lead now: it may do nothing before a renewal has succeeded, which shows that nobody
    #: else has led meanwhile.
    DOUBTFUL = "doubtful"
    #: Another has led since.
    LOST = "lost"


class Lease:
    """What one controller knows of the lease. All times are ns of its own clock, which must not stand still."""

    def __init__(self, holder: str, *, lineage: str) -> None:
        """Stand by.

        Args:
            holder: this controller. Of two processes with the same name, the other has ended.
            lineage: what to call the lease if there is none yet.
        """
        self.standing = Standing.STANDBY
        self._holder = holder
        self._new = LeaseRecord(Term(lineage, 1), holder)
        #: The latest record that was seen, or put by this controller, and since when it stands.
        self._seen: LeaseRecord | None = None
        self._since_ns = 0
        #: A renewal that was tried, and perhaps succeeded.
        self._tried: LeaseRecord | None = None
        #: While it leads: until then.
        self._until_ns = 0

    @property
    def term(self) -> Term:
        """The generation in which this controller leads, or led."""
        assert self.standing is not Standing.STANDBY, "a standby has no generation"
        assert self._seen is not None
        return self._seen.term

    @property
    def seen(self) -> LeaseRecord | None:
        """The record as it was found, or put by this controller, last; None: there is none yet."""
        return self._seen

    def check(self, now_ns: int) -> Standing:
        """Say what this controller may do now: time alone can end its lead."""
        if self.standing is Standing.LEADING and now_ns >= self._until_ns:
            self.standing = Standing.DOUBTFUL
        return self.standing

    def next_look_ns(self) -> int:
        """When a leader is to renew, at the earliest."""
        return self._since_ns + RENEW_NS

    def propose(
        self, found: LeaseRecord | None, *, now_ns: int, has_ended: bool = False
    ) -> LeaseRecord | None:
        """Decide on what to put in place of the record that was found; None: leave it.

        Args:
            found: the record; None: there is none yet.
            now_ns: a time after it was read, and before what is returned is put.
            has_ended: its holder runs no more, as somebody knows for sure.
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
        """What was proposed stands.

        Args:
            record: as `propose` gave it.
            asked_ns: the `now_ns` that it was proposed at.
        """
        if self.standing is Standing.LOST:
            return
        self.standing = Standing.LEADING
        self._seen, self._since_ns = record, asked_ns
        self._until_ns = asked_ns + HELD_NS

    def give_back(self, found: LeaseRecord | None) -> LeaseRecord | None:
        """Lead no more; returns what to put in place of the record that was found, None: nothing."""
        led = self.standing in (Standing.LEADING, Standing.DOUBTFUL)
        self.standing = Standing.LOST
        if not led or found is None or found not in (self._seen, self._tried):
            return None
        return replace(found, released=True)
