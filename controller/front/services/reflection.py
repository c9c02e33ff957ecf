"""Tells clients such as grpcurl and Postman which services exist and what their messages look like.

The service is gRPC's own, in both of its versions, which are the same on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError

from clockwright.errors import BadRequestError
from clockwright.foreign import quote
from clockwright.v1 import reflection_pb2 as pb
from controller.access.caller import Caller
from controller.front.methods import DESCRIBED, METHODS, REFLECTION, CallStream, Method, OnStream

# Longer than any name that there is.
_REQUEST_BYTES_MAX = 4096

_BY_NAME: Final[Mapping[str, FileDescriptor]] = {file.name: file for file in DESCRIBED}
_NAMES: Final = sorted(
    service.full_name for file in DESCRIBED for service in file.services_by_name.values()
)
_NOT_FOUND: Final = grpc.StatusCode.NOT_FOUND.value[0]


def reflection_handlers() -> dict[Method, Any]:
    """What answers the methods of both versions."""
    return {
        method: OnStream(reflect) for method in METHODS.values() if method.service in REFLECTION
    }


async def reflect(stream: CallStream, _caller: Caller) -> None:
    """Answer each request of a stream."""
    async for data in stream:
        await stream.write(_tell(data).SerializeToString())


def _tell(data: bytes) -> pb.ReflectionResponse:
    if len(data) > _REQUEST_BYTES_MAX:
        raise BadRequestError(f"found {len(data)} bytes, expected {_REQUEST_BYTES_MAX} at most")
    try:
        request = pb.ReflectionRequest.FromString(data)
    except DecodeError as error:
        raise BadRequestError(f"{len(data)} bytes are no request for reflection: {error}") from None
    response = pb.ReflectionResponse(valid_host=request.host, original_request=request)
    asked = request.WhichOneof("asked")
    if asked == "list_services":
        response.services.services.extend(pb.ReflectedService(name=name) for name in _NAMES)
        return response
    file = None
    if asked == "file_by_filename":
        file = _BY_NAME.get(request.file_by_filename)
    elif asked == "file_containing_symbol":
        file = _file_of(request.file_containing_symbol)
    if file is None:
        what = str(getattr(request, asked)) if asked else ""
        response.error.code = _NOT_FOUND
        response.error.message = f"there is no {quote(what)} here"
    else:
        response.files.files.append(file.serialized_pb)
    return response


def _file_of(symbol: str) -> FileDescriptor | None:
    """Find the file that has a service, a message, or what is inside of one."""
    for file in DESCRIBED:
        named = {**file.services_by_name, **file.message_types_by_name, **file.enum_types_by_name}
        for each in named.values():
            if symbol == each.full_name or symbol.startswith(f"{each.full_name}."):
                return file
    return None
