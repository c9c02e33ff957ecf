"""Says whether this controller leads, to workers and fronts that know several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from clockwright.leadership import Term
from clockwright.v1 import leadership_pb2 as pb
from controller.front.methods import unary

SERVICE = "clockwright.v1.LeadershipService"


def leadership_handler(term: Callable[[], Term | None]) -> grpc.GenericRpcHandler[Any, Any]:
    """Make the service.

    Args:
        term: the generation in which this controller leads; None: it does not.
    """

    async def get_term(_: pb.GetTermRequest) -> pb.GetTermResponse:
        own = term()
        if own is None:
            return pb.GetTermResponse()
        return pb.GetTermResponse(leading=True, lineage=own.lineage, generation=own.generation)

    get = unary("GetTerm", pb.GetTermRequest, get_term)
    return grpc.method_handlers_generic_handler(SERVICE, {"GetTerm": get})
