"""What callers may be allowed. Each method needs exactly one role (`controller.front.methods`)."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

from clockwright.errors import ConfigError


class Role(enum.Enum):
    """A group of methods; the names are those of Triton's endpoint groups, where it has one."""

    #: Whether the server and its models are ready; load balancers ask without credentials.
    HEALTH = "health"
    INFERENCE = "inference"
    #: Send feedback on answers to the own tenant's queries.
    FEEDBACK = "feedback"
    #: Inputs and outputs of models.
    METADATA = "metadata"
    #: Keep tensors in memory shared with the server (`--allow-client-shm`).
    SHARED_MEMORY = "shared-memory"
    #: List, add, load and remove models.
    MODEL_REPOSITORY = "model-repository"
    #: Totals, and figures of models and workers.
    STATISTICS = "statistics"
    #: Applications, what they learned about users, and workers; and all that `_OF_OPERATORS` names.
    OPERATOR = "operator"
    #: Join as a worker, which receives all models and serves requests.
    WORKER = "worker"
    #: Join as a front, which is trusted to identify its clients, and forwards their calls.
    FRONT = "front"


EVERY_ROLE: Final = frozenset(Role)
#: Roles of the server's own processes.
JOINING: Final = frozenset((Role.WORKER, Role.FRONT))
#: What else an operator may do, so that one role is enough for the commands of docs/operate.md.
_OF_OPERATORS: Final = frozenset(
    (Role.HEALTH, Role.INFERENCE, Role.METADATA, Role.MODEL_REPOSITORY, Role.STATISTICS)
)


def with_implied(roles: frozenset[Role]) -> frozenset[Role]:
    """Add the roles that others include."""
    return roles | _OF_OPERATORS if Role.OPERATOR in roles else roles


def read_roles(names: Iterable[str], *, where: str) -> frozenset[Role]:
    """Find roles by name. Raises ConfigError if a role does not exist; `where` is named in the message."""
    known = {role.value: role for role in Role}
    roles = set()
    for name in names:
        if name not in known:
            raise ConfigError(f"{where}: found role {name!r}, expected some of {', '.join(known)}")
        roles.add(known[name])
    return frozenset(roles)


def say_roles(roles: Iterable[Role]) -> str:
    """List roles for people, in the order of their definition."""
    wanted = set(roles)
    return ", ".join(role.value for role in Role if role in wanted) or "none"
