"""What the keeper does next: the wish and what is known go in, steps come out.

Pure, and of the standard library alone: Ray's processes take this file with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# What an actor's process is doing.
PENDING = "pending"  # Ray has not placed the actor yet, or places it again
RUNNING = "running"
ENDED = "ended"  # it left as it was told to
UNABLE = "unable"  # its settings cannot work, so it was not started again


@dataclass(frozen=True)
class KindWish:
    """Workers that may be put in each other's place."""

    name: str
    least: int
    most: int
    #: A process whose worker the controller does not know by then is started again.
    start_limit_s: float


@dataclass(frozen=True)
class Wish:
    """What is to be there."""

    kinds: tuple[KindWish, ...]
    num_fronts: int
    num_controllers: int


@dataclass(frozen=True)
class KindSaid:
    """What the controller says about a kind."""

    wanted: int
    num_ready: int
    #: Workers that have drained and hold nothing.
    may_go: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Actor:
    """What an actor has said of itself and its process."""

    state: str = PENDING
    #: The name by which the controller knows its worker.
    worker: str = ""
    #: Whether it was told to leave.
    leaving: bool = False
    #: How long its process has run.
    age_s: float = 0.0
    #: Where its process looks for a controller.
    controllers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """Everything that the steps depend on."""

    #: By name: `controller-N`, `front-N`, `worker-KIND-N`.
    actors: Mapping[str, Actor] = field(default_factory=dict)
    #: By kind, of which the controller has seen a worker; None: it says nothing now, as it is away.
    wanted: Mapping[str, KindSaid] | None = None
    #: Addresses of controllers.
    controllers: tuple[str, ...] = ()
    #: Kinds of which the controller is choosing one to leave.
    releasing: frozenset[str] = frozenset()
    #: Names of all workers that the controller knows; None: it was not asked.
    workers: frozenset[str] | None = None


@dataclass(frozen=True)
class Steps:
    """What is to be done. Nothing is done twice, as each step changes what is known."""

    #: Actors to create.
    start: tuple[str, ...] = ()
    #: Kinds of which the controller is to choose one to leave.
    release: tuple[str, ...] = ()
    #: Actors whose process is told to leave.
    leave: tuple[str, ...] = ()
    #: Actors to remove: nothing of theirs is needed any more.
    remove: tuple[str, ...] = ()
    #: Actors whose process is to start again, with the controllers' addresses of now.
    again: tuple[str, ...] = ()
    #: Whether to ask for the names of all workers.
    ask: bool = False
    #: How many actors of each group there are then: for these there has to be room.
    room: Mapping[str, int] = field(default_factory=dict)


def group_of(name: str) -> str:
    """What an actor is one of: `controller`, `front` or `worker-KIND`."""
    return name.rpartition("-")[0]


def next_steps(wish: Wish, known: Known) -> Steps:
    """Say what brings what is there nearer to what is wished.

    Processes are started before anything is known of the load, as many of each kind as the wish has at least. None
    is told to leave while the controller is away.
    """
    kinds = {f"worker-{kind.name}": kind for kind in wish.kinds}
    groups: dict[str, list[str]] = {name: [] for name in ("controller", "front", *kinds)}
    for name in sorted(known.actors, key=_number):
        groups.setdefault(group_of(name), []).append(name)
    start = [*_missing("controller", groups["controller"], wish.num_controllers)]
    if _can_join(wish, known, groups):
        start += _missing("front", groups["front"], wish.num_fronts)
    leave: list[str] = []
    # Those of kinds that are not wished any more, too: a worker that is told to end drains itself.
    for group, names in groups.items():
        most = {"controller": wish.num_controllers, "front": wish.num_fronts}.get(group, 0)
        if group not in kinds:
            leave += [name for name in names if _number(name)[-1] >= most]
    remove = [name for name, actor in known.actors.items() if actor.state == ENDED]
    again = [
        name
        for name, actor in known.actors.items()
        if actor.state == RUNNING
        and group_of(name) != "controller"
        and not set(actor.controllers) & set(known.controllers or actor.controllers)
    ]
    release: list[str] = []
    ask = False
    for group, kind in kinds.items():
        said = None if known.wanted is None else known.wanted.get(kind.name)
        steps = _steps_of_kind(group, kind, groups[group], said, known)
        if _can_join(wish, known, groups):
            start += steps.start
        release += steps.release
        remove += steps.remove
        again += steps.again
        ask |= steps.ask
    remove = list(dict.fromkeys(remove))
    leave = [name for name in leave if _may_be_told(name, known)]
    stay = [name for name in known.actors if name not in remove]
    return Steps(
        start=tuple(start),
        release=tuple(release),
        leave=tuple(leave),
        remove=tuple(remove),
        again=tuple(dict.fromkeys(name for name in again if name not in remove)),
        ask=ask,
        room=dict(Counter(map(group_of, (*stay, *start)))),
    )


def _steps_of_kind(
    group: str, kind: KindWish, names: list[str], said: KindSaid | None, known: Known
) -> Steps:
    actors = {name: known.actors[name] for name in names}
    may_go = frozenset() if said is None else said.may_go
    remove = [name for name, actor in actors.items() if actor.worker in may_go and actor.leaving]
    # Neither those that have left, whose place is free as soon as they are removed, nor those that leave.
    here = {
        name: actor
        for name, actor in actors.items()
        if not actor.leaving and actor.state != ENDED and name not in remove
    }
    target = min(max(kind.least if said is None else said.wanted, kind.least), kind.most)
    surplus = len(here) - target
    if said is not None and not said.num_ready:
        # Where nothing serves, the controller sees no load.
        surplus = min(surplus, 0)
    if surplus > 0:
        # The controller knows nothing of those that are not there yet: the newest go first, and nothing waits.
        idle = [name for name, actor in here.items() if actor.state in (PENDING, UNABLE)]
        gone = idle[::-1][:surplus]
        remove += gone
        surplus -= len(gone)
    wants_fewer = surplus > 0 and said is not None and kind.name not in known.releasing
    overdue = [
        name
        for name, actor in here.items()
        if actor.state == RUNNING and actor.age_s > kind.start_limit_s and name not in remove
    ]
    running = sum(actor.state == RUNNING for actor in here.values())
    missed = said is not None and said.num_ready < running and bool(overdue)
    return Steps(
        start=tuple(_missing(group, names, len(names) - surplus)) if surplus < 0 else (),
        release=(kind.name,) if wants_fewer else (),
        remove=tuple(remove),
        again=tuple(
            name
            for name in overdue
            if missed and known.workers is not None and actors[name].worker not in known.workers
        ),
        ask=missed and known.workers is None,
    )


def _can_join(wish: Wish, known: Known, groups: Mapping[str, list[str]]) -> bool:
    """Whether workers and fronts can be told where controllers are: first of all of them, later of one."""
    others = any(names for group, names in groups.items() if group != "controller")
    return len(known.controllers) >= (1 if others else wish.num_controllers)


def _missing(group: str, names: Iterable[str], number: int) -> list[str]:
    taken = set(names)
    missing: list[str] = []
    index = 0
    while len(taken) + len(missing) < number:
        name = f"{group}-{index}"
        if name not in taken:
            missing.append(name)
        index += 1
    return missing


def _may_be_told(name: str, known: Known) -> bool:
    actor = known.actors[name]
    return not actor.leaving and actor.state != ENDED


def _number(name: str) -> tuple[str, int]:
    group, _, index = name.rpartition("-")
    return group, int(index)
