from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class AttachFrontRequest(_message.Message):
    __slots__ = ("protocol_version", "host", "pid", "knows_callers", "still_looks_at", "instance")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    KNOWS_CALLERS_FIELD_NUMBER: _ClassVar[int]
    STILL_LOOKS_AT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    host: str
    pid: int
    knows_callers: bool
    still_looks_at: _containers.RepeatedScalarFieldContainer[int]
    instance: str
    def __init__(self, protocol_version: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., knows_callers: _Optional[bool] = ..., still_looks_at: _Optional[_Iterable[int]] = ..., instance: _Optional[str] = ...) -> None: ...

class AttachFrontResponse(_message.Message):
    __slots__ = ("heartbeat_interval_ms", "silence_limit_ms", "socket_path", "socket_port", "token", "default_slo_ns", "message_bytes_max", "lineage", "generation")
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SLO_NS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval_ms: int
    silence_limit_ms: int
    socket_path: str
    socket_port: int
    token: bytes
    default_slo_ns: int
    message_bytes_max: int
    lineage: str
    generation: int
    def __init__(self, heartbeat_interval_ms: _Optional[int] = ..., silence_limit_ms: _Optional[int] = ..., socket_path: _Optional[str] = ..., socket_port: _Optional[int] = ..., token: _Optional[bytes] = ..., default_slo_ns: _Optional[int] = ..., message_bytes_max: _Optional[int] = ..., lineage: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...
