"""Scheduling policies that other packages bring, as entry points: group `clockwright.schedulers`.

A package announces one so::

    [project.entry-points."clockwright.schedulers"]
    mine = "my_package:MINE"        # MINE = PolicyKind(MyPolicy, Traits(predicts=True))

and `--policy mine` serves with it. `controller.core.policy.Policy` is all that is asked of `MyPolicy`: three
numbers, `wants_any`, and every method, with the same arguments. One that has nothing to say may do
nothing: `leaves_room` gives 0.0 where all are alike, `victims_of_refused` gives None where
refused models take no pages, `catch_up` and `unpark` are empty where no worker's strategies are kept. A
policy that lacks something is refused when it is made, by name of what it lacks. It is not derived from `Policy`,
and so inherits nothing: where the core is compiled (`make native`), interpreted code cannot derive from a protocol.

The parts in `controller.core.policies` (`strategies`, `runs`, `load_queue`, `eviction`) may be used too, but are
the built-in policies' own and change with them; tests/controller/test_schedulers.py has a whole policy made of some.
The look-up is here, and not in `controller.core`, because entry points are files.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points

from clockwright.errors import ConfigError
from controller.core import Scheduler, SchedulerConfig
from controller.core.policies import POLICIES
from controller.core.policy import Policy, PolicyKind

GROUP = "clockwright.schedulers"

# A compiled protocol does not tell them.
_NUMBERS = ("lookahead_ns", "max_outstanding", "margin_ns")


def kind_of(name: str) -> PolicyKind:
    """The policy of a name, built in or brought; a built-in one's name always means that one.

    Raises ConfigError if no policy has that name, or it cannot be loaded; also, from the kind's `make`, one that was
    brought lacks something.
    """
    if name in POLICIES:
        return POLICIES[name]
    points = entry_points(group=GROUP)
    if name not in points.names:
        names = (*POLICIES, *sorted(points.names - POLICIES.keys()))
        raise ConfigError(f"policy is {name!r}, expected one of {', '.join(names)}")
    point = points[name]
    try:
        kind = point.load()
    except (
        Exception,
        SystemExit,
    ) as error:  # a module of another package may do anything on import
        why = str(error) or type(error).__name__
        raise ConfigError(f"policy {name} ({point.value}): {why}") from error
    if not isinstance(kind, PolicyKind):
        raise ConfigError(f"policy {name} ({point.value}): found {kind!r}, expected a PolicyKind")

    def make(config: SchedulerConfig) -> Policy:
        policy = kind.make(config)
        if complaint := "; ".join(_lacking(policy)):
            raise ConfigError(f"policy {name} ({point.value}): {complaint}")
        return policy

    return replace(kind, make=make)


def _lacking(policy: object) -> Iterator[str]:
    """Say what the mechanism asks of a policy and this one has not."""
    asked = {name: member for name, member in vars(Policy).items() if not name.startswith("_")}
    missing = sorted(name for name in (*_NUMBERS, *asked) if not hasattr(policy, name))
    if missing:
        yield f"lacks {', '.join(missing)}"
    for name, member in asked.items():
        if not callable(member) or name in missing:
            continue
        parameters = list(inspect.signature(member).parameters.values())[1:]
        by_name = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(getattr(policy, name)).bind(*parameters[len(by_name) :], **by_name)
        except TypeError:
            yield f"cannot be asked {name}({', '.join(p.name for p in parameters)})"


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """A scheduler with the policy that `config` names. Raises ConfigError as for `kind_of`."""
    return Scheduler(config, kind_of(config.policy))
