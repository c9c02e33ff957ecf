"""A random story: what a cluster is like, what is asked of it, and what goes wrong, all of a seed.

A story is drawn first, as a list of happenings, and then played. So a story that fails can be played again with
fewer happenings.
"""

from __future__ import annotations

import csv
import gc
import logging
import math
import random
import shutil
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from typing_extensions import override

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from controller.core.quotas import Quota
from controller.selection.policies.tallies import Tallies
from controller.telemetry.files import REQUEST_COLUMNS
from experiments.faults import checks
from experiments.faults.clients import WorldClients
from experiments.faults.device import ModelSpec
from experiments.faults.interpose import interposed
from experiments.faults.keys import UNWELCOME, KeyFile
from experiments.faults.leases import LeasePlace
from experiments.faults.operators import ModelOperator
from experiments.faults.plant import Plant
from experiments.faults.redis_place import PORT as REDIS_PORT
from experiments.faults.redis_place import RedisPlace
from experiments.faults.world import Violation, World, WorldProcess

# Where folders are made that last as long as a story.
_SCRATCH = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
_START_LIMIT_NS = 20 * NS_PER_S
_RESTART_NS = 200 * NS_PER_MS
_STEP_NS = 20 * NS_PER_MS
# When nothing goes wrong any more, everything is well again after so long.
_RECOVERY_LIMIT_NS = 60 * NS_PER_S
# A slab may be on its way back for so long.
_RETURN_LIMIT_NS = NS_PER_S
# With a lease, which lapses after 3 s, a story goes on for so long, and what goes wrong may last so long.
_LEASE_STORY_NS = 6 * NS_PER_S
_LEASE_WHILE_MS = 5000
_WHILE_MS = 900
# Telemetry is written once a second.
_WRITING_NS = 2500 * NS_PER_MS
# A file of keys that has changed is read after so long.
_READ_AGAIN_NS = 1500 * NS_PER_MS
# What was learned is on the disk after so long.
_KEPT_NS = 3 * NS_PER_S
_SLO_MS = (5, 20, 50, 100, 200, 500)
# Loggers of those who say so when a disk is full, and go on.
_MAY_FAIL = ("controller.telemetry", "controller.selection.context_states")

#: The application, and the models that it chooses from.
APPLICATION, LEARNED = "app", ("a0", "a1")
#: The Redis that keeps it, if one does.
STORE = "store"

Act = Callable[["Play"], object]


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happens, so long after the beginning."""

    at_ns: int
    words: str
    act: Act = field(repr=False)


@dataclass
class StoryOutcome:
    """What happened to a story."""

    seed: int
    #: What must hold and did not; empty: all did.
    violation: str
    transcript: Sequence[str]
    outcomes: Counter[str]
    num_events: int
    #: Numbers of two plays of one story agree.
    digest: int


class _Log(logging.Handler):
    """Takes what the product logs into the transcript. Errors are its own bugs; what is critical is not."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world

    @override
    def emit(self, record: logging.LogRecord) -> None:
        world = self._world
        if world.over or world.current is None:
            return
        words = f"{world.current.name} says: {record.getMessage()}"
        if record.exc_info:
            words += f"\n{logging.Formatter().formatException(record.exc_info)}"
        world.say(words)
        # A full disk is no bug, and neither is a writer that was killed.
        if record.levelno == logging.ERROR and not record.name.startswith(_MAY_FAIL):
            world.fail(words)


class Story:
    """What a seed draws."""

    def __init__(
        self,
        seed: int,
        *,
        num_requests: int = 40,
        length_ns: int = 500 * NS_PER_MS,
        kinds: Sequence[str] | None = None,
        lease: str | None = None,
        keyed: bool | None = None,
        learns: bool | None = None,
        writes: bool | None = None,
        limited: bool | None = None,
        revokes: bool | None = None,
        queues: bool | None = None,
        redis: bool | None = None,
    ) -> None:
        """Draw a story.

        Args:
            seed: decides everything.
            num_requests: of clients.
            length_ns: how long things go on, and wrong.
            kinds: what goes wrong; None: the seed says, and in one story of sixteen nothing does.
            lease: where two controllers keep who leads, `file` or `service`; empty: there is one; None: the seed says.
            keyed: callers show keys; None: the seed says.
            learns: there is an application that learns from feedback; None: the seed says.
            writes: controllers write telemetry to files; None: the seed says.
            limited: tenants have quotas, unless there is an application; None: the seed says.
            revokes: a key is revoked, if there are any; None: the seed says.
            queues: an EXEC waits on its device for the one before it; None: the seed says.
            redis: an application is kept in a Redis, if there is one; None: the seed says.
        """
        self.seed = seed
        draw = self._draw = random.Random(seed)
        drawn = draw.choice([*[""] * 14, "file", "service"])
        self.lease = drawn if lease is None else lease
        self.controllers = ["controller0", "controller1"] if self.lease else ["controller0"]
        self.length_ns = max(length_ns, _LEASE_STORY_NS) if self.lease else length_ns
        self.num_workers = draw.choice([1, 1, 2, 2, 3])
        self.num_fronts = draw.choice([1, 1, 2])
        #: Which of them stand on the controller's host.
        self.near = {name for name in self._names() if draw.random() < 0.5}
        self.policy = draw.choice(["clockwork", "clockwork", "edf_mh"])
        self.num_pages = draw.choice([4, 6, 16])
        self.silence_ms = draw.choice([200, 500])
        self.action_timeout_ns = draw.choice([100, 400]) * NS_PER_MS
        #: Callers show keys, and all requests to a model are those of one tenant.
        self.is_keyed = draw.random() < 0.25 if keyed is None else keyed
        self.specs = {f"m{number}": self._spec(number) for number in range(draw.randint(1, 4))}
        self.happenings: list[Happening] = []
        # Models that an operator adds, replaces and removes, all of one shape, so that clients need not know.
        # Controllers of several hosts do not know of each other's.
        num_put = draw.choice([0, 0, 1, 2]) if self.lease != "service" else 0
        self.put = {f"u{number}" for number in range(num_put)}
        for name in sorted(self.put):
            for number in range(draw.randint(1, 4)):
                self._say(self._operation(name, number))
        # An application lives with its models' controller, as theirs does.
        self.learns = self.lease != "service" and (
            draw.random() < 0.2 if learns is None else learns
        )
        # Drawn apart, as is what else has come to stories that are told.
        self.has_redis = self.learns and (
            random.Random(f"{seed}: store").random() < 0.5 if redis is None else redis
        )
        if self.learns:
            for name in LEARNED:
                self.specs[name] = ModelSpec(f"{name} of {seed}", 16, 2, 1, 500, 400, (1, 2, 4))
            put = "an application is to be put", lambda play: play.put_application()
            self.happenings.append(Happening(0, *put))
        names = [*self.specs, *sorted(self.put), *([APPLICATION] if self.learns else [])]
        self.tenants = {name: draw.choice(["gold", "tin"]) for name in names if self.is_keyed}
        if self.is_keyed and self.learns:
            self.tenants |= dict.fromkeys(LEARNED, self.tenants[APPLICATION])
        self._names_asked = names
        self.writes_telemetry = draw.random() < 0.2 if writes is None else writes
        if self.writes_telemetry:
            self.length_ns = max(self.length_ns, _WRITING_NS)
        self._requests(num_requests)
        #: Few kinds in a story, and these often, so that they meet each other and themselves.
        there = {"lease": self.lease == "service", "store": self.has_redis}
        known = [kind for kind in FAULTS if there.get(kind, True) and kind not in _LATER]
        self.kinds = draw.sample(known, draw.randint(1, 4)) if seed % 16 else []
        # Drawn apart as well, and behind the others: what a story was without them it is before they happen.
        for kind in _LATER if self.kinds else ():
            if random.Random(f"{seed}: {kind}").random() < 0.2:
                self.kinds.append(kind)
        if kinds is not None:
            self.kinds = list(kinds)
        for kind in self.kinds:
            for _ in range(draw.choice([1, 2, 4])):
                self._say(FAULTS[kind](self))
        # Drawn apart, so that whether there are quotas changes nothing else of a story.
        apart = random.Random(f"{seed}: quotas, revoked keys and queues")
        self.quotas: dict[str, Quota] = {}
        if (apart.random() < 0.25 if limited is None else limited) and not self.learns:
            for tenant in apart.sample(["gold", "tin", ""], apart.randint(1, 3)):
                rate_rps, burst = apart.choice([20, 100, 400]), apart.choice([1, 2, 8])
                self.quotas[tenant] = Quota(rate_rps=rate_rps, burst=burst)
        self.devices_queue = apart.random() < 0.1 if queues is None else queues
        self.revoked = ""
        if self.is_keyed and (apart.random() < 0.3 if revokes is None else revokes):
            self.revoked = apart.choice(["gold", "tin"])
            at_ns, words = apart.randrange(self.length_ns), f"the key of {self.revoked} is revoked"
            self.happenings.append(Happening(at_ns, words, lambda play: play.revoke()))
        self.happenings.sort(key=lambda happening: happening.at_ns)

    def _names(self) -> list[str]:
        workers = [f"worker{number}" for number in range(self.num_workers)]
        return [*workers, *(f"front{number}" for number in range(self.num_fronts))]

    def _spec(self, number: int) -> ModelSpec:
        draw = self._draw
        large = draw.random() < 0.4
        return ModelSpec(
            key=f"m{number} of {self.seed}",
            num_inputs=draw.choice([16_384, 20_000]) if large else draw.choice([2, 16, 64]),
            num_outputs=draw.choice([16_384, 4]) if large else draw.choice([1, 10]),
            num_pages=draw.randint(1, 3),
            load_us=draw.choice([500, 2000, 8000]),
            exec_us=draw.choice([200, 1000, 4000]),
            batch_sizes=draw.choice([(1,), (1, 2, 4)]),
        )

    def _say(self, happening: tuple[str, Act]) -> None:
        self.happenings.append(Happening(self._draw.randrange(self.length_ns), *happening))

    def _requests(self, number: int) -> None:
        draw = self._draw
        left = number
        while left > 0:
            # Alone, or in bursts.
            count = min(left, draw.choice([1, 1, 2, 8]))
            left -= count
            at_ns = draw.randrange(self.length_ns)
            for _ in range(count):
                self.happenings.append(Happening(at_ns, *self._request()))

    def _operation(self, name: str, number: int) -> tuple[str, Act]:
        if number and self._draw.random() < 0.4:
            return f"{name} is to be removed", lambda play: play.operator.remove(name)
        spec = ModelSpec(f"{name}.{number} of {self.seed}", 16, 2, 1, 1000, 1000, (1, 2, 4))
        return f"{spec.key} is to be put", lambda play: play.operator.put(name, spec)

    def _request(self) -> tuple[str, Act]:
        draw = self._draw
        model = draw.choice(self._names_asked)
        front = draw.choice([name for name in self._names() if name.startswith("front")])
        slo_ms = draw.choice(_SLO_MS)
        most = self.specs[model].batch_sizes[-1] if model in self.specs else 4
        rows = min(draw.choice([1, 1, 1, 2, 3]), 1 if model == APPLICATION else most)
        tenant, caller = draw.choice(["", "", "gold", "tin"]), ""
        if self.is_keyed:
            # Some show a key that does not allow it, or none, or say that they are another tenant.
            caller = self.tenants[model]
            if draw.random() < 0.1:
                caller = draw.choice([*UNWELCOME, ""])
            tenant = draw.choice(["", "", "", tenant])
        by_stream = draw.random() < 0.15
        context = draw.choice(["", "anna", "berta"]) if model == APPLICATION else ""
        # Some are told of twice at once, some by who has not asked.
        judges = [caller] * draw.choice([0, 1, 1, 2])
        if self.is_keyed and draw.random() < 0.3:
            judges.append("tin" if caller == "gold" else "gold")
        cancel_ns = draw.randrange(slo_ms * NS_PER_MS) if draw.random() < 0.05 else None
        deadline_s = draw.choice([None, None, slo_ms / 500])

        def act(play: Play) -> None:
            play.clients.ask(
                model,
                front=front,
                slo_ns=slo_ms * NS_PER_MS,
                rows=rows,
                tenant=tenant,
                cancel_after_ns=cancel_ns,
                deadline_s=deadline_s,
                caller=caller,
                by_stream=by_stream,
                context=context,
                judges=judges,
            )

        how = f"{f' of {caller}' if caller else ''}{' in a stream' if by_stream else ''}"
        return f"a request to {model} by {front}, {slo_ms} ms{how}", act

    # --- drawing --------------------------------------------------------------------------------

    def somebody(self, kinds: str = "worker front controller") -> str:
        """Draw a process."""
        names = [*self._names(), *self.controllers]
        return self._draw.choice([name for name in names if name.rstrip("0123456789") in kinds])

    def a_while_ns(self, most_ms: int | None = None) -> int:
        """Draw how long something lasts: often short, sometimes up to the most."""
        if most_ms is None:
            most_ms = _LEASE_WHILE_MS if self.lease or self.writes_telemetry else _WHILE_MS
        return round(math.pow(most_ms, self._draw.random()) * NS_PER_MS)

    def someplace(self) -> str:
        """Draw the peers from which a process may be cut off."""
        return self.one_of(*self.controllers, *(["lease"] if self.lease else []), "clients")

    def number(self, below: int) -> int:
        """Draw a number."""
        return self._draw.randrange(below)

    def one_of(self, *choices: str) -> str:
        """Draw one."""
        return self._draw.choice(choices)


# --- what goes wrong ------------------------------------------------------------------------------


def _crash(story: Story) -> tuple[str, Act]:
    name, down_ns = story.somebody(), story.a_while_ns()
    return f"{name} is killed, back after {_ms(down_ns)}", lambda play: play.crash(name, down_ns)


def _terminate(story: Story) -> tuple[str, Act]:
    name = story.somebody("worker controller")
    return f"{name} is told to leave", lambda play: play.terminate(name)


def _power_loss(story: Story) -> tuple[str, Act]:
    name, down_ns = story.somebody("worker front"), story.a_while_ns()
    return (
        f"the host of {name} loses power, back after {_ms(down_ns)}",
        lambda play: play.crash(name, down_ns, silently=True),
    )


def _freeze(story: Story) -> tuple[str, Act]:
    name, for_ns = story.somebody(), story.a_while_ns()
    return f"{name} stands still for {_ms(for_ns)}", lambda play: play.freeze(name, for_ns)


def _slow(story: Story) -> tuple[str, Act]:
    name, for_ns, factor = story.somebody(), story.a_while_ns(), 2 << story.number(7)
    return (
        f"{name} is {factor} times slower for {_ms(for_ns)}",
        lambda play: play.slow(name, for_ns, factor),
    )


def _partition(story: Story) -> tuple[str, Act]:
    one, other, for_ns = story.somebody(), story.someplace(), story.a_while_ns()
    return (
        f"{one} and {other} do not reach each other for {_ms(for_ns)}",
        lambda play: play.cut(one, other, for_ns),
    )


def _hiccups(story: Story) -> tuple[str, Act]:
    one, other = story.somebody(), story.someplace()
    one_in, hiccup_ns = 2 + story.number(20), story.a_while_ns(200)
    return (
        f"one in {one_in} messages between {one} and {other} takes {_ms(hiccup_ns)}",
        lambda play: play.hiccup(one, other, one_in, hiccup_ns),
    )


def _reset(story: Story) -> tuple[str, Act]:
    name, which = story.somebody(), story.number(100)
    return f"a connection of {name} breaks", lambda play: play.reset(name, which)


def _clock_jump(story: Story) -> tuple[str, Act]:
    name, by_ns = story.somebody(), story.a_while_ns(5000)
    return f"the clock of {name} jumps by {_ms(by_ns)}", lambda play: play.jump(name, by_ns)


def _wall_clock(story: Story) -> tuple[str, Act]:
    name, by_ns = story.somebody(), story.a_while_ns(5000) - 50 * NS_PER_MS
    return f"the wall clock of {name} is set by {_ms(by_ns)}", lambda play: play.set_wall(
        name, by_ns
    )


def _disk_full(story: Story) -> tuple[str, Act]:
    name, for_ns = story.somebody(), story.a_while_ns()
    return f"the disk of {name} is full for {_ms(for_ns)}", lambda play: play.fill(name, for_ns)


def _torn_file(story: Story) -> tuple[str, Act]:
    name, down_ns, part = story.somebody("worker"), story.a_while_ns(), story.number(100)
    return (
        f"{name} is killed and a file of it torn, back after {_ms(down_ns)}",
        lambda play: play.tear(name, down_ns, part),
    )


def _no_memory(story: Story) -> tuple[str, Act]:
    name, for_ns = story.somebody(), story.a_while_ns()
    return (
        f"{name} is given no memory for {_ms(for_ns)}, and starts again",
        lambda play: play.refuse_memory(name, for_ns),
    )


def _device(story: Story) -> tuple[str, Act]:
    name = story.somebody("worker")
    trouble = story.one_of(
        "exec fails",
        "exec hangs",
        "load fails",
        "load hangs",
        "exec loses the device",
        "load loses the device",
        "compiler killed",
    )
    return f"{name}: {trouble}", lambda play: play.trouble(name, trouble)


def _slow_device(story: Story) -> tuple[str, Act]:
    name, for_ns, factor = story.somebody("worker"), story.a_while_ns(), 2 << story.number(4)
    return (
        f"the device of {name} is {factor} times slower for {_ms(for_ns)}",
        lambda play: play.slow_device(name, for_ns, factor),
    )


def _lease_out_of_reach(story: Story) -> tuple[str, Act]:
    name, for_ns = story.somebody("controller"), (2 + story.number(5)) * NS_PER_S
    return (
        f"{name} does not reach the lease for {_ms(for_ns)}",
        lambda play: play.cut(name, "lease", for_ns),
    )


def _store(story: Story) -> tuple[str, Act]:
    for_ns = story.a_while_ns(5000)
    trouble = story.one_of(
        "is killed",
        "is killed and loses all",
        "stands still",
        "is out of reach",
        "is full",
        "reads its file",
        "loses a connection",
    )
    which = story.number(100)
    return (
        f"the store {trouble}, for {_ms(for_ns)}",
        lambda play: play.trouble_store(trouble, for_ns, which),
    )


def _duplicate(story: Story) -> tuple[str, Act]:
    for_ns, which = story.a_while_ns(), story.number(100)
    return (
        f"clients send all twice for {_ms(for_ns)}, and again what a connection that breaks costs",
        lambda play: play.duplicate(for_ns, which),
    )


def _host_power(story: Story) -> tuple[str, Act]:
    name, down_ns = story.somebody("controller"), story.a_while_ns()
    return (
        f"the host of {name} loses power, with all that runs there and was not synced, back after {_ms(down_ns)}",
        lambda play: play.lose_power(name, down_ns),
    )


FAULTS: dict[str, Callable[[Story], tuple[str, Act]]] = {
    "crash": _crash,
    "terminate": _terminate,
    "power": _power_loss,
    "hang": _freeze,
    "slow": _slow,
    "partition": _partition,
    "delay": _hiccups,
    "reset": _reset,
    "clock jump": _clock_jump,
    "wall clock": _wall_clock,
    "disk full": _disk_full,
    "torn write": _torn_file,
    "memory refused": _no_memory,
    "device": _device,
    "slow device": _slow_device,
    "lease": _lease_out_of_reach,
    "store": _store,
    "duplicate": _duplicate,
    "host power": _host_power,
}
# Kinds that came to stories that were told already.
_LATER = ("duplicate", "host power")


def _ms(time_ns: int) -> str:
    return f"{time_ns / NS_PER_MS:.1f} ms"


# --- playing --------------------------------------------------------------------------------------


class Play:
    """A story that is being played."""

    def __init__(self, story: Story, world: World, plant: Plant) -> None:
        self.story, self.world, self.plant = story, world, plant
        controller_host = world.host("host0")
        lease_host = world.host("host of the lease") if story.lease == "service" else None
        for name in story.controllers:
            apart = lease_host is not None and name != "controller0"
            plant.controller_hosts[name] = world.host("host1") if apart else controller_host
        if story.lease:
            plant.lease = LeasePlace(world, plant.network, lease_host)
        if story.has_redis:
            host = world.host("host of the store")
            url = f"redis://{plant.network.address(host)}:{REDIS_PORT}?socket_timeout=0.3&socket_connect_timeout=0.3"
            plant.redis = RedisPlace(world, host, url)
        self.clients = WorldClients(plant, world.host("clients"))
        self._hosts = {
            name: controller_host if name in story.near else world.host(f"host of {name}")
            for name in story._names()
        }
        self.operator = ModelOperator(plant, self.clients)
        self._down_until_ns = dict.fromkeys(self.names, 0)
        self._hosts |= plant.controller_hosts
        self._hosts["clients"] = self.clients.host
        self._hosts["lease"] = lease_host or controller_host
        if plant.redis is not None:
            self._hosts[STORE] = plant.redis.host

    # --- who is there ---------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a process, unless it runs."""
        if self.process(name) is not None or self.world.now_ns < self._down_until_ns[name]:
            return
        host = self._hosts[name]
        if name == STORE:
            assert self.plant.redis is not None
            self.plant.redis.start(name)
        elif name in self.story.controllers:
            self.plant.start_controller(name)
        elif name.startswith("front"):
            self.plant.start_front(name, host)
        else:
            self.plant.start_worker(name, host, self.story.num_pages)
        process = self.process(name)
        assert process is not None
        # The supervisor starts it again, for whatever reason it has ended.
        process.on_end.append(lambda: self.world.after(_RESTART_NS, lambda: self.start(name)))

    def process(self, name: str) -> WorldProcess | None:
        """Find a process that runs."""
        return next(
            (each for each in self.world.processes if each.name == name and each.alive), None
        )

    @property
    def names(self) -> list[str]:
        """All that are to run."""
        store = [STORE] if self.story.has_redis else []
        return [*store, *self.story._names(), *self.story.controllers]

    # --- what goes wrong ------------------------------------------------------------------------

    def crash(self, name: str, down_ns: int, *, silently: bool = False) -> None:
        process = self.process(name)
        if process is not None:
            self._down_until_ns[name] = self.world.now_ns + down_ns
            process.kill(silently=silently)
        self.world.after(down_ns, lambda: self.start(name))

    def lose_power(self, name: str, down_ns: int) -> None:
        host = self._hosts[name]
        here = [each for each in self.names if self._hosts[each] is host]
        for each in here:
            self._down_until_ns[each] = self.world.now_ns + down_ns
        host.lose_power()
        for each in here:
            self.world.after(down_ns, partial(self.start, each))

    def terminate(self, name: str) -> None:
        if (process := self.process(name)) is not None:
            self.plant.terminate(process)

    def freeze(self, name: str, for_ns: int) -> None:
        if (process := self.process(name)) is not None:
            process.freeze(for_ns)

    def slow(self, name: str, for_ns: int, factor: int) -> None:
        if (process := self.process(name)) is not None:
            process.slowness = factor
            self.world.after(for_ns, partial(setattr, process, "slowness", 1))

    def cut(self, one: str, other: str, for_ns: int) -> None:
        if self._hosts[one] is not self._hosts[other]:
            link = self.plant.network.link(self._hosts[one], self._hosts[other])
            link.cut_until_ns = max(link.cut_until_ns, self.world.now_ns + for_ns)

    def hiccup(self, one: str, other: str, one_in: int, hiccup_ns: int) -> None:
        if self._hosts[one] is not self._hosts[other]:
            link = self.plant.network.link(self._hosts[one], self._hosts[other])
            link.hiccup_one_in, link.hiccup_ns = one_in, hiccup_ns

    def reset(self, name: str, which: int) -> None:
        if (process := self.process(name)) is None:
            return
        connected = [sock for sock in process.sockets if sock.peer is not None]
        if connected:
            sock = connected[which % len(connected)]
            sock.reset(104)
            sock.peer.reset(104)

    def duplicate(self, for_ns: int, which: int) -> None:
        clients, world = self.clients, self.world
        clients.insist_until_ns = max(clients.insist_until_ns, world.now_ns + for_ns)

        # TCP gives nothing twice: who sends again is a client that does not know what happened to it.
        def break_one() -> None:
            if world.now_ns < clients.insist_until_ns:
                self.reset("clients", which)

        world.after(for_ns // 2, break_one)

    def jump(self, name: str, by_ns: int) -> None:
        self._hosts[name].jump(by_ns)

    def set_wall(self, name: str, by_ns: int) -> None:
        self._hosts[name].wall_ns += by_ns

    def fill(self, name: str, for_ns: int) -> None:
        self._hosts[name].disk_full_until_ns = self.world.now_ns + for_ns

    def tear(self, name: str, down_ns: int, part: int) -> None:
        self.crash(name, down_ns, silently=True)
        folder = self.plant.folder / self._hosts[name].name / "files"
        files = sorted(folder.iterdir()) if folder.exists() else []
        if files:
            torn = files[part % len(files)]
            content = torn.read_bytes()
            torn.write_bytes(content[: len(content) * part // 100])

    def refuse_memory(self, name: str, for_ns: int) -> None:
        self._hosts[name].no_memory_until_ns = self.world.now_ns + for_ns
        self.crash(name, for_ns // 2)

    def trouble(self, name: str, trouble: str) -> None:
        if (worker := self.plant.workers.get(name)) is not None:
            worker.device.troubles.append(trouble)

    def slow_device(self, name: str, for_ns: int, factor: int) -> None:
        if (worker := self.plant.workers.get(name)) is not None:
            worker.device.slowness = factor
            self.world.after(for_ns, partial(setattr, worker.device, "slowness", 1.0))

    def trouble_store(self, trouble: str, for_ns: int, which: int) -> None:
        redis = self.plant.redis
        assert redis is not None
        until_ns = self.world.now_ns + for_ns
        match trouble:
            case "is killed" | "is killed and loses all":
                self.crash(STORE, for_ns)
                if "loses" in trouble:
                    redis.forget()
            case "stands still":
                self.freeze(STORE, for_ns)
            case "is out of reach":
                for name in self.story.controllers:
                    self.cut(name, STORE, for_ns)
            case "is full":
                redis.full_until_ns = until_ns
            case "reads its file":
                redis.reading_until_ns = until_ns
            case "loses a connection":
                self.reset(STORE, which)

    def revoke(self) -> None:
        assert self.plant.keys is not None
        self.plant.keys.revoke(self.story.revoked)

    def put_application(self) -> None:
        versions = self.clients.versions
        versions[APPLICATION] = [spec for name in LEARNED for spec in versions[name]]
        self.operator.put_application(APPLICATION, LEARNED)

    # --- the course -----------------------------------------------------------------------------

    def run(self, happenings: Sequence[Happening]) -> None:
        """Play it all."""
        world, plant = self.world, self.plant
        for name in self.names:
            self.start(name)
        self._wait(self._is_ready, _START_LIMIT_NS, "the cluster does not get ready")
        begin_ns = world.now_ns
        for happening in happenings:
            world.run(begin_ns + happening.at_ns)
            world.say(happening.words)
            happening.act(self)
        world.run(begin_ns + self.story.length_ns)
        self._heal()
        world.say("nothing goes wrong any more")
        self._wait(self._is_quiet, _RECOVERY_LIMIT_NS, "requests stay open")
        self._wait(self._is_ready, _RECOVERY_LIMIT_NS, "the cluster does not get ready again")
        self._keeps_promises()
        if self.story.revoked:
            self._keeps_out()
        self._serves_again()
        if self.story.writes_telemetry:
            self._is_written()
        if self.story.learns:
            self._remembers()
        self._wait(self._is_idle, _RECOVERY_LIMIT_NS, "workers stay busy")
        self._wait(
            lambda: not checks.num_held_bytes(plant),
            _RETURN_LIMIT_NS,
            "slabs are held without a holder",
        )
        checks.at_rest(plant, self.clients)

    def _heal(self) -> None:
        """End whatever goes wrong."""
        world = self.world
        for link in self.plant.network.links.values():
            link.cut_until_ns = min(link.cut_until_ns, world.now_ns)
            link.hiccup_one_in = 0
        for host in world.hosts.values():
            host.disk_full_until_ns = host.no_memory_until_ns = 0
        for worker in self.plant.workers.values():
            worker.device.troubles.clear()
            worker.device.slowness = 1.0
        for process in world.processes:
            process.slowness = 1
        self.clients.insist_until_ns = 0
        if (redis := self.plant.redis) is not None:
            redis.full_until_ns = redis.reading_until_ns = 0
        for name in self.names:
            self._down_until_ns[name] = 0
            self.start(name)

    def _wait(self, is_so: Callable[[], bool], limit_ns: int, otherwise: str) -> None:
        until_ns = self.world.now_ns + limit_ns
        while not is_so():
            if self.world.now_ns > until_ns:
                raise Violation(f"{otherwise}: {self._state()}")
            self.world.run(self.world.now_ns + _STEP_NS)

    def _is_ready(self) -> bool:
        plant = self.plant
        controller = plant.controller
        if (
            controller is None
            or plant.num_leading != 1
            or controller.fronts.num_fronts < self.story.num_fronts
        ):
            return False
        statistics = controller.runtime.statistics()
        # What a worker was too slow for is tried there again when it is asked for, and not before.
        ready = Counter(model for worker in statistics.workers for model in worker.suspended)
        ready.update({model.model_id: len(model.ready_on) for model in statistics.models})
        workers = {name: worker.process.pid for name, worker in self.plant.workers.items()}
        linked = {link.worker_id: link.register.pid for link in controller.links.links}
        here = len(workers) == len(statistics.workers) == self.story.num_workers
        return (
            here
            and linked == workers
            and all(
                ready[model.model_id] == self.story.num_workers
                for model in controller.catalogue.models
            )
        )

    def _state(self) -> str:
        """Say who is there, for people."""
        controller = self.plant.controller
        if controller is None:
            return "no controller"
        statistics = controller.runtime.statistics()
        models = [
            f"{model.name} {controller.catalogue.state(model).value} {controller.catalogue.reason(model)}"
            for model in controller.catalogue.models
        ]
        ready = [f"{model.model_id} on {model.ready_on}" for model in statistics.models]
        workers = [worker.worker_id for worker in statistics.workers]
        fronts = controller.fronts.num_fronts
        return f"workers {workers}, {fronts} fronts, models {models}, ready {ready}"

    def _is_quiet(self) -> bool:
        return self.clients.num_open == 0 and self.operator.num_open == 0

    def _keeps_promises(self) -> None:
        """What an operator was told is done is so."""
        controller = self.plant.controller
        assert controller is not None
        for model, spec in self.operator.certain.items():
            if (controller.catalogue.find(model) is None) != (spec is None):
                raise Violation(
                    f"{model} is to be {spec}, and is {controller.catalogue.find(model)}"
                )
        if self._may_forget():
            self.operator.applications.clear()
        for name in self.operator.applications:
            if controller.applications.find(name) is None:
                raise Violation(f"application {name} is to be there, and is not")

    def _may_forget(self) -> bool:
        """Whether the store has lost all, and a controller that would have filled it again has ended."""
        redis = self.plant.redis
        return redis is not None and redis.num_lost > 0 and self.plant.num_ended > 0

    def _keeps_out(self) -> None:
        """Look whether who has no key any more is denied everywhere, and give it again."""
        keys, model = self.plant.keys, next(iter(self.story.specs))
        assert keys is not None
        self.world.run(self.world.now_ns + _READ_AGAIN_NS)
        for front in self.plant.fronts:
            # Where the front's host lost its power, the client's first request since meets the end of its connection.
            for _ in range(2):
                self.clients.ask(
                    model, front=front, slo_ns=500 * NS_PER_MS, caller=self.story.revoked
                )
                self._wait(self._is_quiet, 10 * NS_PER_S, "no answer")
                outcome = self.clients.asked[-1].outcome
                if not outcome.startswith("UNAVAILABLE"):
                    break
            if not outcome.startswith("UNAUTHENTICATED"):
                raise Violation(f"{front} lets in whose key was revoked: {outcome}")
        keys.restore()
        self.world.run(self.world.now_ns + _READ_AGAIN_NS)

    def _remembers(self) -> None:
        """Look whether each feedback has taught something once, and whether that outlives the controller."""
        clients, plant = self.clients, self.plant
        told = clients.learned.total()
        before = self._num_learned()
        if before > told + clients.in_doubt or (not plant.num_ended and before < told):
            raise Violation(f"{before} feedbacks have taught something, and {told} were to")
        self.world.run(self.world.now_ns + _KEPT_NS)
        self._wait(self._is_kept, _RECOVERY_LIMIT_NS, "what was learned is not written")
        for name in self.story.controllers:
            self.crash(name, 0)
        self._wait(self._is_ready, _RECOVERY_LIMIT_NS, "the cluster does not get ready again")
        if (after := self._num_learned()) != before:
            raise Violation(f"{before} feedbacks had taught something, and {after} are remembered")

    def _is_kept(self) -> bool:
        controller = self.plant.controller
        return controller is not None and not controller.applications._states.num_waiting

    def _is_written(self) -> None:
        """Look whether telemetry is whole: rows, once each, and all those of a controller that nothing has befallen."""
        self.world.run(self.world.now_ns + _KEPT_NS)
        for name, running in self.plant.controllers.items():
            if running.writer is None:
                continue  # It stands by.
            seen: Counter[tuple[str, str]] = Counter()
            with (self.plant.telemetry_folder(name) / "requests.csv").open(newline="") as file:
                for row in csv.reader(file):
                    if len(row) != len(REQUEST_COLUMNS):
                        raise Violation(f"telemetry of {name} has a row {row}")
                    seen[row[0], row[2]] += 1
            if max(seen.values()) > 1:
                raise Violation(f"telemetry of {name} has a request twice")
            number, given = len(seen) - 1, running.writer.num_requests  # one is the columns' names
            if number != given and not self.plant.num_ended:
                raise Violation(f"telemetry of {name} has {number} requests of {given}")

    def _num_learned(self) -> int:
        controller = self.plant.controller
        assert controller is not None
        application = controller.applications.find(APPLICATION)
        if application is None:
            raise Violation(f"application {APPLICATION} is gone")
        tallies: Tallies = application.state
        return round(sum(tallies.rewards) + sum(tallies.losses))

    def _is_idle(self) -> bool:
        controller = self.plant.controller
        return controller is not None and not any(
            worker.num_in_flight or worker.loading
            for worker in controller.runtime.statistics().workers
        )

    def _serves_again(self) -> None:
        """Ask each model by each front until it answers, which it does soon."""
        if self.story.learns and not self.operator.applications:
            self.put_application()
            self._wait(self._is_quiet, _RECOVERY_LIMIT_NS, "the operator waits")
        for front in self.plant.fronts:
            for model, spec in self.operator.certain.items():
                if spec is not None:
                    self.clients.versions[model] = [spec]
            present = [model for model, spec in self.operator.certain.items() if spec is not None]
            for model in [*self.story.specs, *present, *sorted(self.operator.applications)]:
                for _ in range(30):
                    caller = self.story.tenants.get(model, "")
                    self.clients.ask(model, front=front, slo_ns=500 * NS_PER_MS, caller=caller)
                    asked = self.clients.asked[-1]
                    limit_ns = 10 * NS_PER_S
                    self._wait(self._is_quiet, limit_ns, "no answer")
                    if asked.outcome == "answered":
                        break
                    self.world.run(self.world.now_ns + 200 * NS_PER_MS)
                else:
                    raise Violation(f"{model} is not served by {front} again: {asked.outcome}")


def play(story: Story, happenings: Sequence[Happening] | None = None) -> StoryOutcome:
    """Play a story, or a part of it."""
    collects, complain = gc.isenabled(), sys.unraisablehook
    gc.disable()  # or garbage of an earlier story would decide when what goes
    if freezes := not gc.get_freeze_count():
        gc.freeze()
    else:
        gc.collect()  # what was frozen before is not looked at
    try:
        return _play(story, story.happenings if happenings is None else happenings)
    finally:
        # Coroutines of processes that were killed complain of their end, which no process lives to see.
        sys.unraisablehook = lambda _: None
        gc.collect()
        if freezes:
            gc.unfreeze()
        sys.unraisablehook = complain
        if collects:
            gc.enable()


def _quotas_text(quotas: Mapping[str, Quota]) -> str:
    return "".join(
        f'["{tenant}"]\nrate_rps = {quota.rate_rps}\nburst = {quota.burst}\n'
        for tenant, quota in quotas.items()
    )


@contextmanager
def _logged(world: World) -> Iterator[None]:
    """Have the transcript take in what is logged, whatever the levels of loggers are."""
    root = logging.getLogger()
    named = [each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    settings = "level", "handlers", "filters", "propagate", "disabled"
    before = [(each, [getattr(each, name) for name in settings]) for each in (root, *named)]
    disabled = root.manager.disable
    for each in named:
        each.handlers, each.filters, each.propagate, each.disabled = [], [], True, False
        each.setLevel(logging.NOTSET)
    root.handlers, root.filters, root.disabled = [_Log(world)], [], False
    root.setLevel(logging.INFO)
    logging.disable(logging.NOTSET)
    try:
        yield
    finally:
        for each, values in before:
            for name, value in zip(settings, values, strict=True):
                setattr(each, name, value)
        logging.disable(disabled)  # and no logger remembers what it was set to meanwhile


def _play(story: Story, happenings: Sequence[Happening]) -> StoryOutcome:
    world = World(story.seed)
    violation = ""
    folder = Path(tempfile.mkdtemp(prefix="clockwright-faults-", dir=_SCRATCH))
    outcomes: Counter[str] = Counter()
    try:
        for name, spec in story.specs.items():
            spec.write(folder / "models" / name)
        scheduler = SchedulerConfig(policy=story.policy, action_timeout_ns=story.action_timeout_ns)
        world.folder = str(folder)
        strict = warnings.catch_warnings(action="error")
        with _logged(world), strict, interposed(world, folder) as network:
            plant = Plant(
                world,
                network,
                folder,
                dict(story.specs),
                silence_ms=story.silence_ms,
                scheduler=scheduler,
            )
            if story.is_keyed:
                plant.keys, plant.tenants = KeyFile(folder / "keys"), story.tenants
            if story.quotas:
                plant.quotas, plant.quotas_file = story.quotas, folder / "quotas.toml"
                plant.quotas_file.write_text(_quotas_text(story.quotas))
            plant.writes_telemetry = story.writes_telemetry
            plant.devices_queue = story.devices_queue
            with plant.observed():
                played = Play(story, world, plant)
                outcomes = played.clients.outcomes
                world.checks.append(lambda: checks.after_each(plant, played.clients))
                try:
                    played.run(happenings)
                except AssertionError as error:
                    violation = str(error) or repr(error)
                    world.say(f"VIOLATION: {violation}")
                sys.unraisablehook = lambda _: None
                world.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = "\n".join(world.transcript)
    digest = zlib.crc32(f"{lines}{world.num_events}{world.random.random()}".encode())
    return StoryOutcome(story.seed, violation, world.transcript, outcomes, world.num_events, digest)
