"""Messages of Envoy's external processing (ext_proc v3), as far as an endpoint picker needs them.

A subset by the same numbers of fields: what is not in it is skipped when it is read. The whole is in
https://github.com/envoyproxy/envoy/blob/main/api/envoy/service/ext_proc/v3/external_processor.proto; all its
descriptors would take 20 MB of files and a second to load.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, struct_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_F: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bytes": _F.TYPE_BYTES,
    "string": _F.TYPE_STRING,
    "bool": _F.TYPE_BOOL,
    "int32": _F.TYPE_INT32,
    "uint32": _F.TYPE_UINT32,
}
#: By message, its fields: number, type; `*` marks a repeated one, and `|` one of several that exclude each other. Enums are
#: int32 here, which is the same on the wire.
_MESSAGES: Final[dict[str, dict[str, tuple[int, str]]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "MetadataEntry": {"key": (1, "string"), "value": (2, "Struct")},
    # A map is a repeated pair.
    "Metadata": {"filter_metadata": (1, "*MetadataEntry")},
    "ProtocolConfiguration": {
        "request_body_mode": (1, "int32"),
        "response_body_mode": (2, "int32"),
    },
    "ProcessingRequest": {
        "request_headers": (2, "|HttpHeaders"),
        "response_headers": (3, "|HttpHeaders"),
        "request_body": (4, "|HttpBody"),
        "response_body": (5, "|HttpBody"),
        "request_trailers": (6, "|HttpTrailers"),
        "response_trailers": (7, "|HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption"), "remove_headers": (2, "*string")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {
        "status": (1, "int32"),
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "Answer": {"response": (1, "CommonResponse")},
    "HttpStatus": {"code": (1, "int32")},
    "GrpcStatus": {"status": (1, "uint32")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "grpc_status": (4, "GrpcStatus"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "|Answer"),
        "response_headers": (2, "|Answer"),
        "request_body": (3, "|Answer"),
        "response_body": (4, "|Answer"),
        "request_trailers": (5, "|TrailersResponse"),
        "response_trailers": (6, "|TrailersResponse"),
        "immediate_response": (7, "|ImmediateResponse"),
        "dynamic_metadata": (8, "Struct"),
    },
}
_PACKAGE: Final = "clockwright.picker"


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="clockwright/picker.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=["google/protobuf/struct.proto"],
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if any(kind.startswith("|") for _, kind in fields.values()):
            message.oneof_decl.add(name="one")
        for field, (number, kind) in fields.items():
            own = message.field.add(name=field, number=number)
            own.label = _F.LABEL_REPEATED if kind.startswith("*") else _F.LABEL_OPTIONAL
            if kind.startswith("|"):
                own.oneof_index = 0
            kind = kind.lstrip("*|")
            if kind in _SCALARS:
                own.type = _SCALARS[kind]
            else:
                own.type = _F.TYPE_MESSAGE
                own.type_name = (
                    f".google.protobuf.{kind}" if kind == "Struct" else f".{_PACKAGE}.{kind}"
                )
    return file


# In a pool of its own: any other program may have registered these files.
_pool = DescriptorPool()
_pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
_pool.AddSerializedFile(_file().SerializeToString())


def _class(name: str) -> Any:  # noqa: ANN401
    return GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


#: What a gateway sends of each call, and what it is answered.
ProcessingRequest: Final = _class("ProcessingRequest")
ProcessingResponse: Final = _class("ProcessingResponse")
