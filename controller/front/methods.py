"""Unary methods on bytes: messages are parsed where errors become statuses.

gRPC's own hook would log a traceback for each message that is none, and end the call as UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address, ip_address
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from clockwright.bulk import FIELDS_MAX, check_fields
from clockwright.errors import NotAllowedError
from controller.front.statuses import fail

MessageT = TypeVar("MessageT", bound=Message)


def unary(
    name: str,
    kind: type[MessageT],
    behaviour: Callable[[MessageT], Awaitable[Message]],
    *,
    fields_max: int = FIELDS_MAX,
    only_here: bool = False,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Make the handler of a method; whatever is raised becomes its status.

    Args:
        name: of the method, for people.
        kind: of its request.
        behaviour: answers a request.
        fields_max: most top-level fields of a request.
        only_here: clients on other machines may not call it.
    """

    async def handle(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            if only_here:
                _check_here(context.peer(), name)
            check_fields(data, fields_max=fields_max)
            return (await behaviour(kind.FromString(data))).SerializeToString()
        except Exception as error:
            return fail(context, error, method=name)

    return grpc.unary_unary_rpc_method_handler(handle)


def _check_here(peer: str, method: str) -> None:
    """Look whether a client, named as gRPC does it, is on this machine."""
    kind, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    address = ip_address(host) if kind in ("ipv4", "ipv6") else None
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if kind != "unix" and (address is None or not address.is_loopback):
        raise NotAllowedError(f"{method} is for clients on this machine, found one at {peer}")
