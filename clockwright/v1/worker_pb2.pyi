from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromWorker(_message.Message):
    __slots__ = ("register", "model_needed", "model_progress", "model_ready", "model_refused", "chunk_received", "heartbeat", "drain", "next")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    MODEL_NEEDED_FIELD_NUMBER: _ClassVar[int]
    MODEL_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_READY_FIELD_NUMBER: _ClassVar[int]
    MODEL_REFUSED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    register: Register
    model_needed: ModelNeeded
    model_progress: ModelProgress
    model_ready: ModelReady
    model_refused: ModelRefused
    chunk_received: ChunkReceived
    heartbeat: Heartbeat
    drain: Drain
    next: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., model_needed: _Optional[_Union[ModelNeeded, _Mapping]] = ..., model_progress: _Optional[_Union[ModelProgress, _Mapping]] = ..., model_ready: _Optional[_Union[ModelReady, _Mapping]] = ..., model_refused: _Optional[_Union[ModelRefused, _Mapping]] = ..., chunk_received: _Optional[_Union[ChunkReceived, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., next: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("welcome", "rejected", "model_offer", "model_chunk", "model_drop", "heartbeat", "drain", "next", "payload")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    MODEL_OFFER_FIELD_NUMBER: _ClassVar[int]
    MODEL_CHUNK_FIELD_NUMBER: _ClassVar[int]
    MODEL_DROP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    rejected: Rejected
    model_offer: ModelOffer
    model_chunk: ModelChunk
    model_drop: ModelDrop
    heartbeat: Heartbeat
    drain: Drain
    next: _containers.RepeatedScalarFieldContainer[bytes]
    payload: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., model_offer: _Optional[_Union[ModelOffer, _Mapping]] = ..., model_chunk: _Optional[_Union[ModelChunk, _Mapping]] = ..., model_drop: _Optional[_Union[ModelDrop, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., next: _Optional[_Iterable[bytes]] = ..., payload: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "device", "gpu_kind", "num_pages", "page_bytes", "arena_bytes", "host", "pid", "software_version", "held", "payload_host", "payload_port", "payload_certificate_sha256")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GPU_KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_HOST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_PORT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_CERTIFICATE_SHA256_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    device: str
    gpu_kind: str
    num_pages: int
    page_bytes: int
    arena_bytes: int
    host: str
    pid: int
    software_version: str
    held: _containers.RepeatedCompositeFieldContainer[Held]
    payload_host: str
    payload_port: int
    payload_certificate_sha256: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., device: _Optional[str] = ..., gpu_kind: _Optional[str] = ..., num_pages: _Optional[int] = ..., page_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., software_version: _Optional[str] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., payload_host: _Optional[str] = ..., payload_port: _Optional[int] = ..., payload_certificate_sha256: _Optional[bytes] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("ready", "offer_digest", "resident")
    READY_FIELD_NUMBER: _ClassVar[int]
    OFFER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    ready: ModelReady
    offer_digest: bytes
    resident: bool
    def __init__(self, ready: _Optional[_Union[ModelReady, _Mapping]] = ..., offer_digest: _Optional[bytes] = ..., resident: _Optional[bool] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("heartbeat_interval_ms", "silence_limit_ms", "socket_path", "socket_port", "token", "keep", "lineage", "generation")
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval_ms: int
    silence_limit_ms: int
    socket_path: str
    socket_port: int
    token: bytes
    keep: _containers.RepeatedScalarFieldContainer[str]
    lineage: str
    generation: int
    def __init__(self, heartbeat_interval_ms: _Optional[int] = ..., silence_limit_ms: _Optional[int] = ..., socket_path: _Optional[str] = ..., socket_port: _Optional[int] = ..., token: _Optional[bytes] = ..., keep: _Optional[_Iterable[str]] = ..., lineage: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sent_ns", "min_delta_ns", "card")
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    MIN_DELTA_NS_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    sent_ns: int
    min_delta_ns: int
    card: Card
    def __init__(self, sent_ns: _Optional[int] = ..., min_delta_ns: _Optional[int] = ..., card: _Optional[_Union[Card, _Mapping]] = ...) -> None: ...

class Card(_message.Message):
    __slots__ = ("clock_mhz", "clock_mhz_max", "complaints")
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_MAX_FIELD_NUMBER: _ClassVar[int]
    COMPLAINTS_FIELD_NUMBER: _ClassVar[int]
    clock_mhz: int
    clock_mhz_max: int
    complaints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, clock_mhz: _Optional[int] = ..., clock_mhz_max: _Optional[int] = ..., complaints: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelFile(_message.Message):
    __slots__ = ("name", "num_bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_bytes: int
    sha256: str
    def __init__(self, name: _Optional[str] = ..., num_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class Dimension(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class ModelOffer(_message.Message):
    __slots__ = ("model_id", "files", "batch_sizes", "fixed_dimensions", "profile")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    FIXED_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    files: _containers.RepeatedCompositeFieldContainer[ModelFile]
    batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    fixed_dimensions: _containers.RepeatedCompositeFieldContainer[Dimension]
    profile: str
    def __init__(self, model_id: _Optional[str] = ..., files: _Optional[_Iterable[_Union[ModelFile, _Mapping]]] = ..., batch_sizes: _Optional[_Iterable[int]] = ..., fixed_dimensions: _Optional[_Iterable[_Union[Dimension, _Mapping]]] = ..., profile: _Optional[str] = ...) -> None: ...

class ModelNeeded(_message.Message):
    __slots__ = ("model_id", "sha256")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    sha256: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model_id: _Optional[str] = ..., sha256: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelChunk(_message.Message):
    __slots__ = ("model_id", "sha256", "offset", "last")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    sha256: str
    offset: int
    last: bool
    def __init__(self, model_id: _Optional[str] = ..., sha256: _Optional[str] = ..., offset: _Optional[int] = ..., last: _Optional[bool] = ...) -> None: ...

class ChunkReceived(_message.Message):
    __slots__ = ("model_id", "sha256", "num_bytes")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    sha256: str
    num_bytes: int
    def __init__(self, model_id: _Optional[str] = ..., sha256: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ModelProgress(_message.Message):
    __slots__ = ("model_id", "stage")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    stage: str
    def __init__(self, model_id: _Optional[str] = ..., stage: _Optional[str] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "datatype", "row_shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATATYPE_FIELD_NUMBER: _ClassVar[int]
    ROW_SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    datatype: str
    row_shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., datatype: _Optional[str] = ..., row_shape: _Optional[_Iterable[int]] = ...) -> None: ...

class BatchProfile(_message.Message):
    __slots__ = ("batch_size", "exec_ns")
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXEC_NS_FIELD_NUMBER: _ClassVar[int]
    batch_size: int
    exec_ns: int
    def __init__(self, batch_size: _Optional[int] = ..., exec_ns: _Optional[int] = ...) -> None: ...

class ModelReady(_message.Message):
    __slots__ = ("model_id", "architecture_id", "num_pages", "weights_bytes", "inputs", "outputs", "load_ns", "batches", "from_cache", "clock_mhz", "one_by_one")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    FROM_CACHE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    ONE_BY_ONE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    architecture_id: str
    num_pages: int
    weights_bytes: int
    inputs: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    outputs: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    load_ns: int
    batches: _containers.RepeatedCompositeFieldContainer[BatchProfile]
    from_cache: bool
    clock_mhz: int
    one_by_one: str
    def __init__(self, model_id: _Optional[str] = ..., architecture_id: _Optional[str] = ..., num_pages: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., inputs: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., load_ns: _Optional[int] = ..., batches: _Optional[_Iterable[_Union[BatchProfile, _Mapping]]] = ..., from_cache: _Optional[bool] = ..., clock_mhz: _Optional[int] = ..., one_by_one: _Optional[str] = ...) -> None: ...

class ModelRefused(_message.Message):
    __slots__ = ("model_id", "reason", "for_others")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FOR_OTHERS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    reason: str
    for_others: bool
    def __init__(self, model_id: _Optional[str] = ..., reason: _Optional[str] = ..., for_others: _Optional[bool] = ...) -> None: ...

class ModelDrop(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
