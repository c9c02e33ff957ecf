"""The built-in selection policies by name, and how one is made from options.

    weights         exponential weights as logarithms, the state of the next two
    exp3            one model per query, learns from its answer alone
    exp4            an ensemble per query, learns from the label served or from the true one
    tallies         one model per query, counts rewards and losses: Thompson, epsilon-greedy
    rollout         operators' policies: static, A/B, canary, shadow

Learners choose among the models that the scheduler predicts to be in time. A model that is cold, or too slow
for the SLO, is therefore not explored while others serve. A cold one is loaded in the background when a
query has left it out, and is explored once it is there; one that is too slow keeps the weight it has.

All are pure: a policy draws only from the generator that the query brings. None imports another; policies
from other packages (`controller.selection.plugins`) use `core.policy` alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from clockwright.errors import ConfigError
from controller.selection.core.policy import Policy
from controller.selection.policies.exp3 import Exp3, Exp3IX, Exp3S
from controller.selection.policies.exp4 import Exp4, Exp4FullInformation
from controller.selection.policies.rollout import ABTest, Canary, Shadow, Static
from controller.selection.policies.tallies import EpsilonGreedy, Thompson

BUILT_IN: dict[str, type[Policy[Any]]] = {
    "exp3": Exp3,
    "exp3-ix": Exp3IX,
    "exp3-s": Exp3S,
    "exp4": Exp4,
    "exp4-full": Exp4FullInformation,
    "thompson": Thompson,
    "epsilon-greedy": EpsilonGreedy,
    "static": Static,
    "ab": ABTest,
    "canary": Canary,
    "shadow": Shadow,
}


def make_policy(
    name: str,
    options: Mapping[str, Any],
    *,
    others: Mapping[str, type[Policy[Any]]] | None = None,
) -> Policy[Any]:
    """Make a policy.

    Args:
        name: a key of `BUILT_IN` or of `others`.
        options: keyword arguments of the policy's constructor.
        others: policies that users brought, by name.

    Raises:
        ConfigError: there is no such policy, it has no such option, or the option has a wrong value.
    """
    known = {**(others or {}), **BUILT_IN}
    if name not in known:
        raise ConfigError(f"policy: found {name!r}, expected one of {', '.join(sorted(known))}")
    try:
        parameters = inspect.signature(known[name]).parameters
        for option in options:
            if option not in parameters:
                expected = ", ".join(parameters) or "none"
                raise ConfigError(f"found option {option!r}, expected some of {expected}")
        return known[name](**options)
    except (AttributeError, TypeError, ValueError, ConfigError) as error:
        raise ConfigError(f"policy {name}: {error}") from None
    except BaseException as error:
        raise ConfigError(f"policy {name}: {type(error).__name__}") from None
