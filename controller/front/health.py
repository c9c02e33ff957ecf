"""gRPC's own health service, which Kubernetes and gRPC's load balancers ask: now, or from now on.

The messages are a string in and an enum out, both in field 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from clockwright.bulk import split_bulk
from clockwright.errors import Refusal, RefusedError, UnknownModelError
from controller.front.oip import quote
from controller.front.server import SERVICE
from controller.front.statuses import fail

HEALTH_SERVICE: Final = "grpc.health.v1.Health"

#: Answers, as they travel.
SERVING: Final = b"\x08\x01"
NOT_SERVING: Final = b"\x08\x02"
SERVICE_UNKNOWN: Final = b"\x08\x03"

#: Anybody may watch, and each who does keeps a call open: so many at once.
WATCHERS_MAX: Final = 64
#: How often a watcher looks, in seconds: what changes and changes back between two looks is not told.
WATCH_INTERVAL_S: Final = 0.5

# In a pool of its own: any other program may have registered that file.
_PROTO: Final = """
name: "grpc/health/v1/health.proto" package: "grpc.health.v1" syntax: "proto3"
message_type {
  name: "HealthCheckRequest"
  field { name: "service" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
}
message_type {
  name: "HealthCheckResponse"
  field {
    name: "status" number: 1 label: LABEL_OPTIONAL type: TYPE_ENUM
    type_name: ".grpc.health.v1.HealthCheckResponse.ServingStatus"
  }
  enum_type {
    name: "ServingStatus"
    value { name: "UNKNOWN" number: 0 }
    value { name: "SERVING" number: 1 }
    value { name: "NOT_SERVING" number: 2 }
    value { name: "SERVICE_UNKNOWN" number: 3 }
  }
}
service {
  name: "Health"
  method {
    name: "Check"
    input_type: ".grpc.health.v1.HealthCheckRequest" output_type: ".grpc.health.v1.HealthCheckResponse"
  }
  method {
    name: "Watch" server_streaming: true
    input_type: ".grpc.health.v1.HealthCheckRequest" output_type: ".grpc.health.v1.HealthCheckResponse"
  }
}
"""


def health_file() -> FileDescriptor:
    """Describe the service, for reflection."""
    pool = DescriptorPool()
    described = text_format.Parse(_PROTO, FileDescriptorProto())
    pool.AddSerializedFile(described.SerializeToString())
    return pool.FindFileByName(described.name)


class HealthService:
    """Says whether a server serves, as often as that changes."""

    def __init__(self, is_serving: Callable[[], Awaitable[bool]]) -> None:
        """Ask `is_serving` for each call, and again and again for those who watch."""
        self._is_serving = is_serving
        self._num_watchers = 0
        self._leaving = asyncio.Event()

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Make the handlers, by name."""
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    def leave(self) -> None:
        """The server stops: tell those who watch, and let them go."""
        self._leaving.set()

    async def _check(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            name = _service_in(data)
            if name not in ("", SERVICE):
                raise UnknownModelError(f"there is no service {quote(name)}, expected {SERVICE}")
        except Exception as error:
            return fail(context, error, method="Check")
        return SERVING if await self._is_serving() else NOT_SERVING

    async def _watch(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Tell the status at once and whenever it is another, until the client goes or the server."""
        try:
            # As gRPC wants it, a service that is not known is no error: it may come later.
            is_known = _service_in(data) in ("", SERVICE)
            if self._num_watchers >= WATCHERS_MAX:
                text = f"found {WATCHERS_MAX} who watch the health, expected fewer"
                raise RefusedError(Refusal.OVERLOADED, text)
        except Exception as error:
            fail(context, error, method="Watch")
            return
        self._num_watchers += 1
        told = b""
        try:
            while True:
                is_over = self._leaving.is_set()
                status = SERVICE_UNKNOWN
                if is_known:
                    is_serving = not is_over and await self._is_serving()
                    status = SERVING if is_serving else NOT_SERVING
                if status != told:
                    await context.write(status)
                    told = status
                if is_over:
                    return
                try:
                    async with asyncio.timeout(WATCH_INTERVAL_S):
                        await self._leaving.wait()
                except TimeoutError:
                    pass
        finally:
            self._num_watchers -= 1


def _service_in(data: bytes) -> str:
    """Find the service that is asked about; empty: the server as a whole.

    Raises:
        BadRequestError: the bytes are no message.
    """
    _, names = split_bulk(data, 1)
    return bytes(names[-1]).decode(errors="replace") if names else ""
