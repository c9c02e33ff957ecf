"""What callers may be allowed. Each method of each service belongs to exactly one role."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Final

from clockwright.errors import ConfigError


class Role(enum.Enum):
    """A group of methods; the names are those of Triton's endpoint groups, where it has one."""

    #: Whether the server and its models are there, which load balancers ask without credentials.
    HEALTH = "health"
    INFERENCE = "inference"
    #: Say what became of an answer of one's own.
    FEEDBACK = "feedback"
    #: What models take and give.
    METADATA = "metadata"
    #: Keep tensors in memory that is shared with the server (`--allow-client-shm`).
    SHARED_MEMORY = "shared-memory"
    #: Which models there are; add, load and remove them.
    MODEL_REPOSITORY = "model-repository"
    #: Totals, models' and workers' figures.
    STATISTICS = "statistics"
    #: Applications, what they learned of their users, and workers.
    OPERATOR = "operator"
    #: Join as a worker, which gets all models and serves requests.
    WORKER = "worker"
    #: Join as a front, which is believed who its clients are, and hands their calls on.
    FRONT = "front"


EVERY_ROLE: Final = frozenset(Role)
#: Those of processes that are parts of the server itself.
JOINING: Final = frozenset((Role.WORKER, Role.FRONT))

_OF_SERVICES: Mapping[str, Mapping[Role, tuple[str, ...]]] = {
    "inference.GRPCInferenceService": {
        Role.HEALTH: ("ServerLive", "ServerReady", "ModelReady"),
        Role.INFERENCE: ("ModelInfer", "ModelStreamInfer"),
        Role.METADATA: ("ServerMetadata", "ModelMetadata"),
        Role.SHARED_MEMORY: (
            "SystemSharedMemoryStatus",
            "SystemSharedMemoryRegister",
            "SystemSharedMemoryUnregister",
        ),
        Role.MODEL_REPOSITORY: ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
        Role.STATISTICS: ("ModelStatistics",),
    },
    "grpc.health.v1.Health": {Role.HEALTH: ("Check", "Watch")},
    "grpc.reflection.v1.ServerReflection": {Role.METADATA: ("ServerReflectionInfo",)},
    "grpc.reflection.v1alpha.ServerReflection": {Role.METADATA: ("ServerReflectionInfo",)},
    "clockwright.v1.LeadershipService": {Role.HEALTH: ("GetTerm",)},
    "clockwright.v1.ControlService": {
        Role.INFERENCE: ("ExplainOwn",),
        Role.FEEDBACK: ("Feedback",),
        Role.MODEL_REPOSITORY: ("AddModel", "RemoveModel"),
        Role.STATISTICS: ("Status", "ListWorkers", "ListModels"),
        Role.OPERATOR: (
            "DrainWorker",
            "Explain",
            "PinModel",
            "PutApplication",
            "RemoveApplication",
            "ListApplications",
            "EraseContext",
            "SetQuota",
            "RemoveQuota",
            "ListQuotas",
        ),
    },
    "clockwright.v1.WorkerService": {Role.WORKER: ("Attach",)},
    "clockwright.v1.FrontService": {Role.FRONT: ("Attach",)},
}

#: The role that a call needs, by path: `/package.Service/Method`. Nobody may call what is not here.
ROLE_OF: Final[Mapping[str, Role]] = {
    f"/{service}/{method}": role
    for service, roles in _OF_SERVICES.items()
    for role, methods in roles.items()
    for method in methods
}


def read_roles(names: Iterable[str], *, where: str) -> frozenset[Role]:
    """Find roles by name.

    Raises:
        ConfigError: there is no such role; `where` says who names it.
    """
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
