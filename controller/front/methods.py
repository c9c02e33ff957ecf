"""The one table of methods: what each takes and gives, the role that it needs, its paths in REST, and where it is answered.

Everything else reads it: gRPC, REST, roles, fronts that hand calls on, a controller that stands by, reflection, and the
pages of docs. A method named `AddModel` is answered by the method `add_model` of whichever object `bind` is given:

    async def add_model(self, request, caller) -> response        one message each way
    async def attach(self, stream, caller) -> None                a stream of messages, in at least one direction

A handler ends a call by an exception, whose status is in `controller.front.oip.statuses`.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from clockwright.v1 import (
    control_pb2,
    inference_pb2,
    leadership_pb2,
    reflection_pb2,
)
from clockwright.wire.bulk import FIELDS_MAX, HEADER_BYTES_MAX
from clockwright.wire.peer import ATTACH, FRONT_SERVICE, WORKER_SERVICE
from controller.access.caller import Caller
from controller.access.roles import Role
from controller.front.oip import health_messages
from controller.front.oip import json_messages as rest
from controller.front.oip.json_form import JSON_BYTES_MAX
from controller.front.oip.json_messages import RestRequest

INFERENCE: Final = "inference.GRPCInferenceService"
CONTROL: Final = "clockwright.v1.ControlService"
HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = (
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
)
LEADERSHIP: Final = "clockwright.v1.LeadershipService"
WORKERS: Final = WORKER_SERVICE
FRONTS: Final = FRONT_SERVICE

#: What reflection tells of: the services that clients and operators use.
DESCRIBED: Final[tuple[FileDescriptor, ...]] = (
    inference_pb2.DESCRIPTOR,
    control_pb2.DESCRIPTOR,
    health_messages.DESCRIPTOR,
)

# What is read in a millisecond or two, and longer than any right body that is no inference.
_BODY_BYTES_MAX: Final = 128 << 10
# What the limit of all messages leaves (`--max-message-mib`).
_ANY: Final = 1 << 62


class AtFront(enum.Enum):
    """What a front that is a process of its own does with a call."""

    #: It answers.
    ANSWERED = "answered"
    #: It hands the call on to its controller.
    FORWARDED = "forwarded"
    #: It does not have the method.
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Route:
    """A path of REST."""

    verb: str
    #: `{name}` stands for any segment, and means the field of the request's message.
    pattern: str
    #: Makes the request's message.
    fill: Callable[[Message, RestRequest], None] = rest.fill
    #: Makes what is answered, as JSON can say it, and the HTTP status.
    tell: Callable[[Any, RestRequest], tuple[Any, int]] = rest.tell
    #: Longest body that is taken, unless it is an inference's.
    bytes_max: int = _BODY_BYTES_MAX


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """A method, but for its handler."""

    service: str
    name: str
    role: Role
    request: type[Message]
    response: type[Message]
    routes: tuple[Route, ...] = ()
    #: Its requests are a stream of messages, or its answers are.
    takes_stream: bool = False
    gives_stream: bool = False
    at_front: AtFront = AtFront.FORWARDED
    #: A controller that stands by answers it; of others it says that another one leads.
    at_standby: bool = False
    #: Clients on other machines may not call it.
    local_only: bool = False
    #: Refused when the front is full.
    bounded: bool = False
    #: Most bytes, and most top-level fields, of a request.
    bytes_max: int = HEADER_BYTES_MAX
    fields_max: int = FIELDS_MAX

    @property
    def path(self) -> str:
        """Its path in gRPC: `/package.Service/Method`."""
        return f"/{self.service}/{self.name}"

    @property
    def handler_name(self) -> str:
        """What its handler is called: `add_model` for `AddModel`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()


class CallStream(Protocol):
    """The messages of a call, as they travel, and the stream of its responses."""

    #: The latest moment that is surely before the message came that was read last, on the server's clock.
    arrival_ns: int

    def time_left_s(self) -> float | None:
        """Time to the RPC deadline; None: the call has none."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """The client's messages."""

    async def read(self) -> bytes | None:
        """The next of them; None: it sends no more."""

    async def write(self, message: bytes) -> None:
        """Send a message; returns when the client has taken those before, or nearly so.

        Raises asyncio.InvalidStateError if the call is over.
        """


@dataclass(frozen=True, slots=True)
class OnStream:
    """Answers a call by its stream."""

    handle: Callable[[CallStream, Caller], Awaitable[None]]


def bind(service: str, owner: object) -> dict[Method, Any]:
    """Find the handlers that an object has of a service's methods.

    Returns by method a coroutine function, an `OnStream`, or what an attribute of that name is which is no function.
    """
    handlers: dict[Method, Any] = {}
    for method in METHODS.values():
        handler = getattr(owner, method.handler_name, None) if method.service == service else None
        if handler is not None:
            streams = callable(handler) and (method.takes_stream or method.gives_stream)
            handlers[method] = OnStream(handler) if streams else handler
    return handlers


# --- the table ------------------------------------------------------------------------------------


def _method(
    file: FileDescriptor,
    service: str,
    name: str,
    role: Role,
    *routes: Route,
    **traits: Any,  # noqa: ANN401  the other fields of `Method`
) -> Method:
    found = file.services_by_name[service].methods_by_name[name]
    return Method(
        f"{file.package}.{service}",
        name,
        role,
        GetMessageClass(found.input_type),
        GetMessageClass(found.output_type),
        routes,
        found.client_streaming,
        found.server_streaming,
        **traits,
    )


_oip = functools.partial(_method, inference_pb2.DESCRIPTOR, "GRPCInferenceService", bounded=True)
_control = functools.partial(_method, control_pb2.DESCRIPTOR, "ControlService")
_health = functools.partial(_method, health_messages.DESCRIPTOR, "Health", at_standby=True)
_own = functools.partial(_oip, at_front=AtFront.ANSWERED)
_absent = functools.partial(_method, at_front=AtFront.ABSENT)

_MODEL: Final = "v2/models/{name}"
_VERSION: Final = f"{_MODEL}/versions/{{version}}"
_REGIONS: Final = "v2/systemsharedmemory"
_CUDA: Final = "v2/cudasharedmemory"
_REGION: Final = f"{_REGIONS}/region/{{name}}"
_LOAD: Final = "v2/repository/models/{model_name}"
_APPLICATION: Final = "v2/applications/{name}"
_EXPLAIN: Final = "v2/requests/{request_id}"

_ready = functools.partial(Route, "GET", tell=rest.tell_ready)
_query = functools.partial(Route, "GET", fill=rest.fill_query)

_TABLE: Final = (
    _own("ServerLive", Role.HEALTH, _ready("v2/health/live"), at_standby=True),
    _oip("ServerReady", Role.HEALTH, _ready("v2/health/ready"), at_standby=True),
    _oip("ServerMetadata", Role.METADATA, Route("GET", "v2")),
    # In front of the model of that name, as Triton has it.
    _oip(
        "ModelStatistics",
        Role.STATISTICS,
        Route("GET", "v2/models/stats"),
        Route("GET", f"{_MODEL}/stats"),
        Route("GET", f"{_VERSION}/stats"),
    ),
    _oip("ModelReady", Role.HEALTH, _ready(f"{_MODEL}/ready"), _ready(f"{_VERSION}/ready")),
    _oip("ModelMetadata", Role.METADATA, Route("GET", _MODEL), Route("GET", _VERSION)),
    _oip(
        "ModelConfig",
        Role.METADATA,
        Route("GET", f"{_MODEL}/config", tell=rest.tell_config),
        Route("GET", f"{_VERSION}/config", tell=rest.tell_config),
    ),
    _own(
        "ModelInfer",
        Role.INFERENCE,
        *(
            Route("POST", f"{path}/{form}")
            for path in (_MODEL, _VERSION)
            for form in ("infer", "generate", "generate_stream")
        ),
    ),
    _own("ModelStreamInfer", Role.INFERENCE),
    _oip(
        "RepositoryIndex",
        Role.MODEL_REPOSITORY,
        Route("POST", "v2/repository/index", tell=rest.tell_list),
    ),
    _oip(
        "RepositoryModelLoad",
        Role.MODEL_REPOSITORY,
        Route("POST", f"{_LOAD}/load", rest.fill_parameters, bytes_max=JSON_BYTES_MAX),
        bytes_max=_ANY,
    ),
    _oip(
        "RepositoryModelUnload",
        Role.MODEL_REPOSITORY,
        Route("POST", f"{_LOAD}/unload", rest.fill_parameters),
    ),
    _own(
        "SystemSharedMemoryStatus",
        Role.SHARED_MEMORY,
        Route("GET", f"{_REGIONS}/status", tell=rest.tell_regions),
        Route("GET", f"{_REGION}/status", tell=rest.tell_regions),
        local_only=True,
    ),
    _own(
        "SystemSharedMemoryRegister",
        Role.SHARED_MEMORY,
        Route("POST", f"{_REGION}/register"),
        local_only=True,
    ),
    _own(
        "SystemSharedMemoryUnregister",
        Role.SHARED_MEMORY,
        Route("POST", f"{_REGION}/unregister"),
        Route("POST", f"{_REGIONS}/unregister"),
        local_only=True,
    ),
    # Regions of this kind do not exist, so the answer to a client that clears them is a success.
    _own(
        "CudaSharedMemoryStatus",
        Role.SHARED_MEMORY,
        Route("GET", f"{_CUDA}/status", tell=rest.tell_no_regions),
        Route("GET", f"{_CUDA}/region/{{name}}/status", tell=rest.tell_no_regions),
    ),
    _own(
        "CudaSharedMemoryUnregister",
        Role.SHARED_MEMORY,
        Route("POST", f"{_CUDA}/unregister"),
        Route("POST", f"{_CUDA}/region/{{name}}/unregister"),
    ),
    _control("ListApplications", Role.OPERATOR, _query("v2/applications"), _query(_APPLICATION)),
    _control("PutApplication", Role.OPERATOR, Route("PUT", _APPLICATION, rest.fill_put)),
    _control("RemoveApplication", Role.OPERATOR, Route("DELETE", _APPLICATION)),
    _control(
        "EraseContext",
        Role.OPERATOR,
        Route("DELETE", "v2/applications/{application}/contexts/{context}"),
    ),
    _control("Explain", Role.OPERATOR, Route("GET", _EXPLAIN)),
    _control("ExplainOwn", Role.INFERENCE, Route("GET", f"{_EXPLAIN}/own")),
    _control(
        "Feedback",
        Role.FEEDBACK,
        Route("POST", "v2/feedback", rest.fill_feedback, bytes_max=HEADER_BYTES_MAX),
        fields_max=rest.FEEDBACK_ITEMS_MAX,
    ),
    _control("Status", Role.STATISTICS),
    _control("ListWorkers", Role.STATISTICS),
    _control("ListModels", Role.STATISTICS),
    _control("DrainWorker", Role.OPERATOR),
    _control("WatchWorkersWanted", Role.STATISTICS),
    _control("ReleaseWorker", Role.OPERATOR),
    _control("AddModel", Role.MODEL_REPOSITORY),
    _control("RemoveModel", Role.MODEL_REPOSITORY),
    _control("PinModel", Role.OPERATOR),
    _control("RouteModel", Role.OPERATOR, Route("POST", "v2/models/{model_id}/route")),
    _control("SetQuota", Role.OPERATOR),
    _control("RemoveQuota", Role.OPERATOR),
    _control("ListQuotas", Role.OPERATOR),
    _health("Check", Role.HEALTH),
    _health("Watch", Role.HEALTH, at_front=AtFront.ANSWERED, at_standby=False),
    *(
        Method(
            service,
            "ServerReflectionInfo",
            Role.METADATA,
            reflection_pb2.ReflectionRequest,
            reflection_pb2.ReflectionResponse,
            takes_stream=True,
            gives_stream=True,
        )
        for service in REFLECTION
    ),
    _absent(
        leadership_pb2.DESCRIPTOR, "LeadershipService", "GetTerm", Role.HEALTH, at_standby=True
    ),
    # Their messages are msgpack (`clockwright.wire.peer`).
    *(
        Method(
            service,
            ATTACH,
            role,
            Message,
            Message,
            takes_stream=True,
            gives_stream=True,
            at_front=AtFront.ABSENT,
        )
        for service, role in ((WORKERS, Role.WORKER), (FRONTS, Role.FRONT))
    ),
)

#: By path.
METHODS: Final[Mapping[str, Method]] = {method.path: method for method in _TABLE}
#: Each path of REST, in the order in which they are looked at, and its method.
ROUTES: Final = tuple((route, method) for method in _TABLE for route in method.routes)
