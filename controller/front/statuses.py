"""Turns every error of a call into a gRPC status: one table for all services of the controller's port.

A refusal carries its reason twice: in words, and as `google.rpc.ErrorInfo` in the trailing metadata
`grpc-status-details-bin`, the place where gRPC libraries of every language look for it.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from clockwright.errors import (
    BadRequestError,
    ModelError,
    NameTakenError,
    NoRoomError,
    ProtocolError,
    Refusal,
    RefusedError,
    StoreError,
    UnknownModelError,
    UnknownWorkerError,
)
from clockwright.foreign import printable
from controller.front.refusals import refusal_text
from controller.runtime import NoAnswerError

log = logging.getLogger(__name__)

DOMAIN = "clockwright"

# A request that cannot be in time gets RESOURCE_EXHAUSTED, not UNAVAILABLE. Clients retry UNAVAILABLE by
# themselves (KServe's three times), and refused requests that are sent again are the overload.
CODES = {
    Refusal.INFEASIBLE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.COLD: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Refusal.WORKER_LOST: grpc.StatusCode.UNAVAILABLE,
    Refusal.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
    Refusal.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Refusal.MODEL_REMOVED: grpc.StatusCode.NOT_FOUND,
    Refusal.FAILED: grpc.StatusCode.INTERNAL,
    Refusal.LOW_CONFIDENCE: grpc.StatusCode.FAILED_PRECONDITION,
}

# Longest text of a status. It travels in HTTP headers, of which clients take 8 KiB in all.
_TEXT_CHARS_MAX = 1000


def status_of(error: Exception, *, method: str) -> tuple[grpc.StatusCode, str]:
    """Find the code and text for an error. An error that nobody foresaw is logged in one line.

    The text of a refusal begins with its reason.
    """
    match error:
        case NoAnswerError():
            return CODES[error.refusal], _say(f"{error.refusal.value}: {refusal_text(error)}")
        case RefusedError():
            return CODES[error.refusal], _say(str(error))
        case UnknownModelError() | UnknownWorkerError():
            return grpc.StatusCode.NOT_FOUND, _say(str(error))
        case BadRequestError() | ProtocolError():
            return grpc.StatusCode.INVALID_ARGUMENT, _say(str(error))
        case DecodeError():
            return grpc.StatusCode.INVALID_ARGUMENT, _say(f"not the request of {method}: {error}")
        case NameTakenError():
            return grpc.StatusCode.ALREADY_EXISTS, _say(str(error))
        case NoRoomError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, _say(str(error))
        case ModelError():
            return grpc.StatusCode.FAILED_PRECONDITION, _say(str(error))
        case StoreError():
            # UNAVAILABLE would tell clients that there is no server.
            return grpc.StatusCode.ABORTED, _say(str(error))
    log.error("%s: unexpected %s: %s", method, type(error).__name__, error)
    log.debug("%s", method, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"internal error in {method}: {type(error).__name__}"


def fail(context: grpc.aio.ServicerContext[Any, Any], error: Exception, *, method: str) -> bytes:
    """Give a call the status of an error; returns the answer, which gRPC throws away.

    Calls end this way and not by gRPC's own `abort`. An aborted call is a cycle (gRPC's state
    of the call, its exception, the frames) and keeps the request's tensors until the garbage collector
    comes by: a thousand refusals of 602 kB held 600 MB, and the collector took 40 ms to find them.
    """
    code, text = status_of(error, method=method)
    context.set_code(code)
    context.set_details(text)
    context.set_trailing_metadata(details(error, code, text))
    return b""


def details(error: Exception, code: grpc.StatusCode, text: str) -> tuple[tuple[str, bytes], ...]:
    """Make the trailing metadata of an error; empty for what is no refusal."""
    if not isinstance(error, RefusedError):
        return ()
    info = error_details_pb2.ErrorInfo(
        reason=error.refusal.value,
        domain=DOMAIN,
        metadata={name: str(figure) for name, figure in error.figures.items()},
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=code.value[0], message=text, details=[detail])
    return (("grpc-status-details-bin", status.SerializeToString()),)


def _say(text: str) -> str:
    return printable(text, _TEXT_CHARS_MAX)
