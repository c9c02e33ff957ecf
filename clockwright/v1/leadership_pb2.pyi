from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetTermRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTermResponse(_message.Message):
    __slots__ = ("leading", "lineage", "generation")
    LEADING_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    leading: bool
    lineage: str
    generation: int
    def __init__(self, leading: _Optional[bool] = ..., lineage: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...
