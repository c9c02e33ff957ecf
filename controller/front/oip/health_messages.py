"""Messages of gRPC's own health service: a string in and an enum out, both in field 1."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

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

# In a pool of its own: any other program may have registered that file.
_pool = DescriptorPool()
_pool.AddSerializedFile(text_format.Parse(_PROTO, FileDescriptorProto()).SerializeToString())

#: Describes the service and its messages.
DESCRIPTOR: Final = _pool.FindFileByName("grpc/health/v1/health.proto")
_Response: Final[Any] = GetMessageClass(DESCRIPTOR.message_types_by_name["HealthCheckResponse"])

SERVING: Final = _Response(status=1)
NOT_SERVING: Final = _Response(status=2)
SERVICE_UNKNOWN: Final = _Response(status=3)
