"""Workers that join and leave during a run, as a scaler wants."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_S, GpuKind, WorkerId
from controller.core import Scheduler
from controller.core.events import WorkerDraining
from experiments.simulator.case import Case
from experiments.simulator.controller import VirtualController
from experiments.simulator.loop import Loop
from experiments.simulator.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a scaler is told."""

    now_ns: int
    #: Workers that serve, and that were asked for and are not there yet.
    num_ready: int
    num_joining: int
    #: Requests that have no response yet: they wait, or run.
    num_open: int
    #: What happened so far.
    summary: Summary
    scheduler: Scheduler


class FleetScaler(Protocol):
    """Decides how many workers there are to be."""

    def wanted(self, seen: Seen, /) -> int:
        """How many workers, with those that are on their way and without those that drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """How workers come and go. `Case.cluster` has the most that there may be, all of one kind.

    A worker that joins has all models in host memory, and none on its device.
    """

    scaler: FleetScaler
    #: Workers that are there at the start.
    num_first: int = 1
    #: Times from asking for a worker until it serves, one of these at random.
    starts_ns: tuple[int, ...] = (60 * NS_PER_S,)
    #: How often the scaler is asked.
    every_ns: int = NS_PER_S

    def __post_init__(self) -> None:
        if not self.starts_ns or min(self.starts_ns) < 0 or self.every_ns <= 0:
            raise ConfigError(
                f"a fleet starts in {self.starts_ns} ns and is looked at every {self.every_ns} ns, "
                "expected some times of 0 or more, and more than 0"
            )


class FleetMembers:
    """The workers of a fleet during a run, by their places in the cluster."""

    def __init__(
        self,
        fleet: Fleet,
        case: Case,
        loop: Loop,
        controller: VirtualController,
        summary: Summary,
        start: Callable[[int], None],
    ) -> None:
        """Begin with the first workers, and ask the scaler from then on; `start` has a worker serve.

        Raises:
            ConfigError: the case's workers are too few, of several kinds, or lost by faults.
        """
        cluster = case.cluster
        self._kind = GpuKind(cluster.kind_of(0).name)
        self._most = cluster.num_workers
        if not 1 <= fleet.num_first <= self._most:
            raise ConfigError(f"{fleet.num_first} first workers, expected 1 to {self._most}")
        if case.faults.lost_workers or len(set(map(id, cluster.kinds))) > 1:
            raise ConfigError(
                "a fleet of several kinds, or with faults that take workers, expected neither"
            )
        self._fleet = fleet
        self._random = random.Random(f"starts {case.seed}")
        self._loop = loop
        self._controller = controller
        self._summary = summary
        self._start = start
        # Since when each is paid for, in the order in which they were asked for.
        self._ready: dict[int, int] = dict.fromkeys(range(fleet.num_first), loop.now_ns)
        self._joining: dict[int, int] = {}
        self._draining: dict[int, int] = {}
        self._paid_ns = 0
        for place in self._ready:
            start(place)
        loop.at(loop.now_ns, self._look, None)

    def paid_ns(self, until_ns: int) -> int:
        """Time of all workers together until a time, each from when it was asked for until it had gone."""
        since = (*self._ready.values(), *self._joining.values(), *self._draining.values())
        return self._paid_ns + sum(max(0, until_ns - begin_ns) for begin_ns in since)

    def has_gone(self, place: int) -> bool:
        """A worker's link was closed. Returns whether that was wanted."""
        if place not in self._draining:
            return False
        self._paid_ns += self._loop.now_ns - self._draining.pop(place)
        return True

    def _look(self, _: None) -> None:
        fleet, now_ns = self._fleet, self._loop.now_ns
        scheduler = self._controller.scheduler
        wanted = fleet.scaler.wanted(
            Seen(
                now_ns=now_ns,
                num_ready=len(self._ready),
                num_joining=len(self._joining),
                num_open=self._controller.num_open,
                summary=self._summary,
                scheduler=scheduler,
            )
        )
        wanted = min(max(wanted, 1), self._most)
        while len(self._ready) + len(self._joining) < wanted and self._ask():
            pass
        while len(self._ready) + len(self._joining) > wanted:
            if self._joining:
                # What is not there yet is not missed.
                self._paid_ns += now_ns - self._joining.popitem()[1]
            elif not self._release(scheduler):
                break
        self._loop.at(now_ns + fleet.every_ns, self._look, None)

    def _ask(self) -> bool:
        """Ask for one more. Returns False where all places are taken, by some that drain."""
        taken = {*self._ready, *self._joining, *self._draining}
        place = next((place for place in range(self._most) if place not in taken), None)
        if place is None:
            return False
        now_ns = self._loop.now_ns
        self._joining[place] = now_ns
        after_ns = self._random.choice(self._fleet.starts_ns)
        self._loop.at(now_ns + after_ns, self._join, (place, now_ns))
        return True

    def _join(self, asked: tuple[int, int]) -> None:
        place, since_ns = asked
        if self._joining.get(place) == since_ns:
            self._ready[place] = self._joining.pop(place)
            self._start(place)

    def _release(self, scheduler: Scheduler) -> bool:
        """Drain the worker that is cheapest to lose. Returns False where none may leave."""
        worker_id = scheduler.cheapest_to_lose(self._kind, self._loop.now_ns).worker_id
        if worker_id is None:
            return False
        place = next(place for place in self._ready if name_of(place) == worker_id)
        self._draining[place] = self._ready.pop(place)
        self._controller.ledger.tell(WorkerDraining(worker_id=worker_id))
        return True


def name_of(place: int) -> WorkerId:
    """The name of a cluster's worker."""
    return WorkerId(f"gpu{place}")
