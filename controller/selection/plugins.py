"""Policies that users bring: entry points of installed packages."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from typing import Any

from controller.selection.core.policy import Policy
from controller.selection.guarded import words_of
from controller.selection.policies import BUILT_IN

log = logging.getLogger(__name__)

GROUP = "clockwright.policies"


def plugin_policies() -> dict[str, type[Policy[Any]]]:
    """Find all policies of other packages, by name. One that cannot be loaded is logged and left out."""
    found: dict[str, type[Policy[Any]]] = {}
    for point in entry_points(group=GROUP):
        try:
            policy = point.load()
        except BaseException as error:
            log.warning("policy %s (%s): %s", point.name, point.value, words_of(error))
            continue
        if point.name in BUILT_IN:
            log.warning("policy %s (%s): a built-in one has that name", point.name, point.value)
        elif not (isinstance(policy, type) and issubclass(policy, Policy)):
            log.warning(
                "policy %s (%s): found %r, expected a subclass of Policy",
                point.name,
                point.value,
                policy,
            )
        else:
            found[point.name] = policy
    return found
