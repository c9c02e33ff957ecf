"""Unary methods on bytes: messages are parsed where errors become statuses.

gRPC's own hook would log a traceback for each message that is none, and end the call as UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from clockwright.bulk import FIELDS_MAX, check_fields
from controller.front.statuses import fail

MessageT = TypeVar("MessageT", bound=Message)


def unary(
    name: str,
    kind: type[MessageT],
    behaviour: Callable[[MessageT], Awaitable[Message]],
    *,
    fields_max: int = FIELDS_MAX,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Make the handler of a method; whatever is raised becomes its status.

    Args:
        name: of the method, for people.
        kind: of its request.
        behaviour: answers a request.
        fields_max: most top-level fields of a request.
    """

    async def handle(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            check_fields(data, fields_max=fields_max)
            return (await behaviour(kind.FromString(data))).SerializeToString()
        except Exception as error:
            return fail(context, error, method=name)

    return grpc.unary_unary_rpc_method_handler(handle)
