"""Turns a call's gRPC status into the exception that `Client`, `AsyncClient` and `Operator` raise.

`controller/front/oip/statuses.py` goes the other way.
"""

from __future__ import annotations

import re
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from clockwright.errors import (
    BadRequestError,
    ClockwrightError,
    ConfigError,
    Denial,
    DeniedError,
    ModelError,
    Refusal,
    RefusedError,
    UnknownModelError,
)
from clockwright.foreign import printable
from clockwright.wire.tls_faults import tls_fault

# Our servers send no longer ones.
_TEXT_CHARS_MAX = 2000
_FIGURE = re.compile("-?[0-9]{1,19}")


def error_of(error: Any, address: str) -> ClockwrightError:  # noqa: ANN401  grpc's two kinds share no typed base
    """Make the exception for a call that failed.

    Args:
        error: the call's `grpc.RpcError`, or that of grpc.aio.
        address: the address that was called.
    """
    named = _named(error)
    if named is not None:
        return named
    return _error_of_code(error.code(), printable(error.details() or "", _TEXT_CHARS_MAX), address)


def error_in_stream(message: str, status: str) -> ClockwrightError:
    """Make the exception for an error that a stream has in place of an answer.

    Args:
        message: its text, which begins with the reason of a refusal.
        status: the name of gRPC's status; servers of other makes say none.
    """
    text = printable(message, _TEXT_CHARS_MAX)
    reason, _, words = text.partition(": ")
    if reason in Refusal.__members__:
        return RefusedError(Refusal(reason), words)
    if reason in Denial.__members__:
        return DeniedError(Denial(reason), words)
    return _error_of_code(getattr(grpc.StatusCode, status, None), text, "the server")


def _error_of_code(code: grpc.StatusCode | None, text: str, address: str) -> ClockwrightError:
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            if words := tls_fault(text):
                return ConfigError(f"{address}: {words} ({text})")
            return ConfigError(
                f"no server answers at {address}; is `clockwright up` running there? ({text})"
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return ConfigError(
                f"the server at {address} is not Clockwright, or of another version: {text}"
            )
        case grpc.StatusCode.INVALID_ARGUMENT:
            return BadRequestError(text)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            # gRPC itself says this, when the message is longer than the server takes.
            return BadRequestError(f"the request is too big: {text}")
        case grpc.StatusCode.NOT_FOUND:
            return UnknownModelError(text)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return ModelError(text)
        case grpc.StatusCode.ALREADY_EXISTS:
            return ModelError(f"{text}; --replace takes its place")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return RefusedError(Refusal.LATE, f"no answer from {address} in time")
    return ClockwrightError(f"{address}: {code.name if code else 'error'}: {text}")


def _named(error: Any) -> RefusedError | DeniedError | None:  # noqa: ANN401
    """Read the refusal or denial in an error's trailing metadata, if there is one."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                return None
            info = error_details_pb2.ErrorInfo()
            for detail in status.details:
                if not detail.Unpack(info):
                    continue
                message = printable(
                    status.message.removeprefix(f"{info.reason}: "), _TEXT_CHARS_MAX
                )
                if info.reason in Denial.__members__:
                    return DeniedError(Denial(info.reason), message)
                if info.reason in Refusal.__members__:
                    figures = {
                        name: int(figure)
                        for name, figure in info.metadata.items()
                        if _FIGURE.fullmatch(figure)
                    }
                    return RefusedError(Refusal(info.reason), message, figures=figures)
    return None
