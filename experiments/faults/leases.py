"""Where the lease's record lies in the world: in a file of one host, or with a service that hosts reach or not."""

from __future__ import annotations

from dataclasses import dataclass, field

from clockwright.errors import StoreError
from clockwright.units import NS_PER_MS, NS_PER_US
from controller.process.lease.lease import Lease, LeaseRecord, Standing
from controller.process.lease.stores import FoundRecord
from experiments.faults.sockets import NetworkLink, WorldNetwork
from experiments.faults.world import Host, World, WorldProcess, running_thread

# A replica that is asked answers within so long, or another is asked.
_LIMIT_NS = 700 * NS_PER_MS
_LOOK_NS = 200 * NS_PER_US


@dataclass
class LeasePlace:
    """The place, and what lies there."""

    world: World
    network: WorldNetwork
    #: Where the service is; None: it is a file, whose kernel knows which processes live.
    host: Host | None
    record: LeaseRecord | None = None
    revision: int = 0
    #: Who has put the record.
    holder: WorldProcess | None = None
    #: Every controller's view of it.
    views: dict[WorldProcess, Lease] = field(default_factory=dict)

    def open(self) -> WorldLease:
        """Make the store of the process that runs."""
        return WorldLease(self, self.world.running)

    def view(self, holder: str, *, lineage: str) -> Lease:
        """Make what the process that runs knows of the lease."""
        lease = self.views[self.world.running] = Lease(holder, lineage=lineage)
        return lease

    def leaders(self) -> list[WorldProcess]:
        """Who may lead, as each sees it by its own clock."""
        return [
            process
            for process, lease in self.views.items()
            if process.alive and lease.check(process.host.clock_ns()) is Standing.LEADING
        ]


@dataclass
class WorldLease:
    """A `LeaseStore`, in one process."""

    place: LeasePlace
    process: WorldProcess

    def read(self) -> FoundRecord:
        """Do what `LeaseStore` says."""
        self._go()
        place = self.place
        has_ended = place.host is None and place.holder is not None and not place.holder.alive
        found = FoundRecord(place.record, has_ended, str(place.revision))
        self._go()
        return found

    def swap(self, found: FoundRecord, record: LeaseRecord) -> bool:
        """Do what `LeaseStore` says."""
        self._go()
        place = self.place
        if found.revision != str(place.revision):
            return False
        if place.host is None and place.record is not None and place.record.term != record.term:
            assert place.holder is not None
            place.holder.kill()
        place.record, place.revision, place.holder = record, place.revision + 1, self.process
        # What was put stands, whether the answer comes or not.
        self._go()
        return True

    def close(self) -> None:
        """Do what `LeaseStore` says."""

    def _go(self) -> None:
        """Take the time that one way takes."""
        place, thread = self.place, running_thread()
        if place.host is None:
            thread.block(place.world.below(_LOOK_NS))
            return
        link: NetworkLink = place.network.link(self.process.host, place.host)
        takes_ns = link.arrival_ns() - place.world.now_ns
        thread.block(min(takes_ns, _LIMIT_NS))
        if takes_ns > _LIMIT_NS:
            raise StoreError("lease: it was not reached in time")
