"""Turns every error of a call into a gRPC status: one table for all services of the controller's port.

A refusal or denial carries its reason twice: in words, and as `google.rpc.ErrorInfo` in the trailing metadata
`grpc-status-details-bin`, the place where gRPC libraries of every language look for it. Where a retry can help, and
only there, it says when: as `google.rpc.RetryInfo` for programs, and as `grpc-retry-pushback-ms`, which gRPC's own
retries heed.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import NamedTuple

import grpc
from google.protobuf.message import DecodeError

from clockwright.errors import (
    BadRequestError,
    Denial,
    DeniedError,
    LinkEndedError,
    ModelError,
    NameTakenError,
    NoRoomError,
    NotAllowedError,
    ProtocolError,
    Refusal,
    RefusedError,
    StoreError,
    UnknownModelError,
    UnknownRegionError,
    UnknownRequestError,
    UnknownTenantError,
    UnknownWorkerError,
)
from clockwright.foreign import printable
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.wire.bulk import encode_varint
from controller.front.oip.refusals import NoAnswerError, refusal_text, retry_ns
from controller.port import Failed

log = logging.getLogger(__name__)

#: Trailing metadata: a serialised `google.rpc.Status`.
DETAILS = "grpc-status-details-bin"
#: Trailing metadata: milliseconds until a retry can help.
PUSHBACK = "grpc-retry-pushback-ms"
_DOMAIN = b"clockwright"
_ERROR_INFO = b"type.googleapis.com/google.rpc.ErrorInfo"
_RETRY_INFO = b"type.googleapis.com/google.rpc.RetryInfo"

# A request that cannot be in time gets RESOURCE_EXHAUSTED, not UNAVAILABLE. Clients retry UNAVAILABLE by
# themselves (KServe's three times), and refused requests that are sent again are the overload.
CODES = {
    Refusal.INFEASIBLE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.COLD: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.QUOTA: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Refusal.WORKER_LOST: grpc.StatusCode.UNAVAILABLE,
    Refusal.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
    Refusal.LOADING: grpc.StatusCode.UNAVAILABLE,
    Refusal.UNFIT: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Refusal.MODEL_REMOVED: grpc.StatusCode.NOT_FOUND,
    Refusal.FAILED: grpc.StatusCode.INTERNAL,
    Refusal.LOW_CONFIDENCE: grpc.StatusCode.FAILED_PRECONDITION,
}

_CODES_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}

# Longest text of a status. It travels in HTTP headers, of which clients take 8 KiB in all.
_TEXT_CHARS_MAX = 1000


class Status(NamedTuple):
    """How a call ends that is not answered."""

    code: grpc.StatusCode
    text: str
    #: What programs can read of a refusal, as trailing metadata; empty for what is none.
    details: tuple[tuple[str, str | bytes], ...]


class ToldStatusError(Exception):
    """A call ends with the status that another process decided: the controller of a front, for example."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.text)
        self.status = status


def failed_of(error: Exception, *, method: str) -> Failed:
    """Say how a request ends that is not answered, for another process to hear."""
    status = status_of(error, method=method)
    details = {
        name: each.encode() if isinstance(each, str) else each for name, each in status.details
    }
    return Failed(status.code.value[0], status.text, details)


def told_error(failed: Failed) -> ToldStatusError:
    """Make the error of what `failed_of` said. Raises ProtocolError if gRPC knows no such status."""
    code = _CODES_BY_NUMBER.get(failed.code)
    if code is None:
        raise ProtocolError(f"status {failed.code}, which gRPC does not know")
    # As gRPC tells text from bytes.
    details = tuple(
        (name, each if name.endswith("-bin") else each.decode(errors="replace"))
        for name, each in failed.details.items()
    )
    return ToldStatusError(Status(code, failed.text, details))


def status_of(error: Exception, *, method: str) -> Status:
    """Make the status of an error. An unexpected error is logged in one line.

    The text of a refusal begins with its reason.
    """
    if isinstance(error, ToldStatusError):
        return error.status
    code, text = _code_and_text(error, method)
    return Status(code, text, _details(error, code, text))


def _code_and_text(error: Exception, method: str) -> tuple[grpc.StatusCode, str]:
    match error:
        case NoAnswerError():
            return CODES[error.refusal], _say(f"{error.refusal.value}: {refusal_text(error)}")
        case RefusedError():
            return CODES[error.refusal], _say(str(error))
        case DeniedError():
            known = error.denial is Denial.NOT_ALLOWED
            code = grpc.StatusCode.PERMISSION_DENIED if known else grpc.StatusCode.UNAUTHENTICATED
            return code, _say(str(error))
        case (
            UnknownModelError()
            | UnknownWorkerError()
            | UnknownRegionError()
            | UnknownTenantError()
            | UnknownRequestError()
        ):
            return grpc.StatusCode.NOT_FOUND, _say(str(error))
        case BadRequestError() | ProtocolError():
            return grpc.StatusCode.INVALID_ARGUMENT, _say(str(error))
        case DecodeError():
            return grpc.StatusCode.INVALID_ARGUMENT, _say(f"not the request of {method}: {error}")
        case NameTakenError():
            return grpc.StatusCode.ALREADY_EXISTS, _say(str(error))
        case NotAllowedError():
            return grpc.StatusCode.PERMISSION_DENIED, _say(str(error))
        case NoRoomError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, _say(str(error))
        case ModelError():
            return grpc.StatusCode.FAILED_PRECONDITION, _say(str(error))
        case StoreError() | LinkEndedError():
            # UNAVAILABLE would tell clients that there is no server.
            return grpc.StatusCode.ABORTED, _say(str(error))
    log.error("%s: unexpected %s: %s", method, type(error).__name__, error)
    log.debug("%s", method, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"internal error in {method}: {type(error).__name__}"


def _details(
    error: Exception, code: grpc.StatusCode, text: str
) -> tuple[tuple[str, str | bytes], ...]:
    # By hand: a third of what protobuf takes, and under overload nearly all answers are refusals.
    if isinstance(error, RefusedError):
        info = [(1, error.refusal.value.encode()), (2, _DOMAIN)]
        figures = b"".join([_figure(name, figure) for name, figure in error.figures.items()])
    elif isinstance(error, DeniedError):
        info = [(1, error.denial.value.encode()), (2, _DOMAIN)]
        figures = b""
    else:
        return ()
    detail = _message((1, _ERROR_INFO), (2, _message(*info) + figures))
    status = b"\x08%c" % code.value[0] + _message((2, text.encode()), (3, detail))
    if isinstance(error, RefusedError) and (after_ns := retry_ns(error)):
        # A google.protobuf.Duration: seconds, nanoseconds.
        seconds, rest_ns = map(encode_varint, divmod(after_ns, NS_PER_S))
        retry = _message((1, b"\x08" + seconds + b"\x10" + rest_ns))
        status += _message((3, _message((1, _RETRY_INFO), (2, retry))))
        return ((DETAILS, status), (PUSHBACK, str(-(-after_ns // NS_PER_MS))))
    return ((DETAILS, status),)


def _figure(name: str, figure: int) -> bytes:
    """Serialise an entry of ErrorInfo's map, of which each refusal has several, in a fifth of the time."""
    value = b"%d" % figure
    key = _key(name)
    return b"\x1a%c%b\x12%c%b" % (len(key) + 2 + len(value), key, len(value), value)


@lru_cache
def _key(name: str) -> bytes:
    return _message((1, name.encode()))


def _message(*fields: tuple[int, bytes]) -> bytes:
    """Serialise a protobuf message of strings, bytes and messages, by field number, below 2 MiB each."""
    parts = []
    for number, content in fields:
        length = len(content)
        if length < 0x80:
            parts.append(b"%c%c" % (number << 3 | 2, length))
        else:
            low, middle, high = length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14
            parts.append(bytes((number << 3 | 2, low, middle, high)))
        parts.append(content)
    return b"".join(parts)


def _say(text: str) -> str:
    return printable(text, _TEXT_CHARS_MAX)
