"""Scheduling policies that other packages bring, as entry points: group `clockwright.schedulers`.

A package announces one so::

    [project.entry-points."clockwright.schedulers"]
    mine = "my_package:MINE"        # MINE = PolicyKind(MyPolicy, Traits(predicts=True))

and `--policy mine` serves with it. `MyPolicy` has all the methods of `controller.core.policy.Policy` and is
not derived from it: where the core is compiled (`make native`), interpreted code cannot derive from a
protocol. The look-up is here, and not in `controller.core`, because entry points are files.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from clockwright.errors import ConfigError
from controller.core import Scheduler, SchedulerConfig
from controller.core.policies import POLICIES
from controller.core.policy import PolicyKind

GROUP = "clockwright.schedulers"


def kind_of(name: str) -> PolicyKind:
    """The policy of a name, built in or brought; a built-in one's name always means that one.

    Raises:
        ConfigError: there is none of that name, or it cannot be loaded.
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
    except (Exception, SystemExit) as error:  # whatever a stranger's module does on import
        why = str(error) or type(error).__name__
        raise ConfigError(f"policy {name} ({point.value}): {why}") from error
    if not isinstance(kind, PolicyKind):
        raise ConfigError(f"policy {name} ({point.value}): found {kind!r}, expected a PolicyKind")
    return kind


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """A scheduler with the policy that `config` names.

    Raises:
        ConfigError: as for `kind_of`.
    """
    return Scheduler(config, kind_of(config.policy))
