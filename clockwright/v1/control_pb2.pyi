from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RefusalCount(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("version", "policy", "uptime_ns", "ready", "draining", "num_workers", "num_models", "num_models_ready", "requests", "answered", "refusals", "counters", "waiting", "kinds", "dropped_without_worker_rps", "fronts", "knows_callers", "has_tls", "denials", "memory_bytes", "memory_limit_bytes", "memory_state", "recent")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    UPTIME_NS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_MODELS_FIELD_NUMBER: _ClassVar[int]
    NUM_MODELS_READY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_WITHOUT_WORKER_RPS_FIELD_NUMBER: _ClassVar[int]
    FRONTS_FIELD_NUMBER: _ClassVar[int]
    KNOWS_CALLERS_FIELD_NUMBER: _ClassVar[int]
    HAS_TLS_FIELD_NUMBER: _ClassVar[int]
    DENIALS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_STATE_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    version: str
    policy: str
    uptime_ns: int
    ready: bool
    draining: bool
    num_workers: int
    num_models: int
    num_models_ready: int
    requests: int
    answered: int
    refusals: _containers.RepeatedCompositeFieldContainer[RefusalCount]
    counters: _containers.ScalarMap[str, int]
    waiting: int
    kinds: _containers.RepeatedCompositeFieldContainer[KindInfo]
    dropped_without_worker_rps: float
    fronts: _containers.RepeatedCompositeFieldContainer[FrontInfo]
    knows_callers: bool
    has_tls: bool
    denials: _containers.RepeatedCompositeFieldContainer[RefusalCount]
    memory_bytes: int
    memory_limit_bytes: int
    memory_state: str
    recent: RecentRequests
    def __init__(self, version: _Optional[str] = ..., policy: _Optional[str] = ..., uptime_ns: _Optional[int] = ..., ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., num_workers: _Optional[int] = ..., num_models: _Optional[int] = ..., num_models_ready: _Optional[int] = ..., requests: _Optional[int] = ..., answered: _Optional[int] = ..., refusals: _Optional[_Iterable[_Union[RefusalCount, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., waiting: _Optional[int] = ..., kinds: _Optional[_Iterable[_Union[KindInfo, _Mapping]]] = ..., dropped_without_worker_rps: _Optional[float] = ..., fronts: _Optional[_Iterable[_Union[FrontInfo, _Mapping]]] = ..., knows_callers: _Optional[bool] = ..., has_tls: _Optional[bool] = ..., denials: _Optional[_Iterable[_Union[RefusalCount, _Mapping]]] = ..., memory_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ..., memory_state: _Optional[str] = ..., recent: _Optional[_Union[RecentRequests, _Mapping]] = ...) -> None: ...

class RecentRequests(_message.Message):
    __slots__ = ("over_ns", "requests", "answered", "refusals", "counters", "latency_ns_p50", "latency_ns_p99", "slo_share_p50", "slo_share_p99", "long_runs")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    OVER_NS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_NS_P50_FIELD_NUMBER: _ClassVar[int]
    LATENCY_NS_P99_FIELD_NUMBER: _ClassVar[int]
    SLO_SHARE_P50_FIELD_NUMBER: _ClassVar[int]
    SLO_SHARE_P99_FIELD_NUMBER: _ClassVar[int]
    LONG_RUNS_FIELD_NUMBER: _ClassVar[int]
    over_ns: int
    requests: int
    answered: int
    refusals: _containers.RepeatedCompositeFieldContainer[RefusalCount]
    counters: _containers.ScalarMap[str, int]
    latency_ns_p50: int
    latency_ns_p99: int
    slo_share_p50: float
    slo_share_p99: float
    long_runs: LongRuns
    def __init__(self, over_ns: _Optional[int] = ..., requests: _Optional[int] = ..., answered: _Optional[int] = ..., refusals: _Optional[_Iterable[_Union[RefusalCount, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., latency_ns_p50: _Optional[int] = ..., latency_ns_p99: _Optional[int] = ..., slo_share_p50: _Optional[float] = ..., slo_share_p99: _Optional[float] = ..., long_runs: _Optional[_Union[LongRuns, _Mapping]] = ...) -> None: ...

class LongRuns(_message.Message):
    __slots__ = ("model_id", "exec_ns", "others", "slo_ns", "refused")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_NS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    SLO_NS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    exec_ns: int
    others: _containers.RepeatedScalarFieldContainer[str]
    slo_ns: int
    refused: int
    def __init__(self, model_id: _Optional[str] = ..., exec_ns: _Optional[int] = ..., others: _Optional[_Iterable[str]] = ..., slo_ns: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class RecentActions(_message.Message):
    __slots__ = ("over_ns", "infers", "loads", "exec_busy", "load_busy", "exec_over_predicted", "too_late", "failed", "exec_over_others")
    OVER_NS_FIELD_NUMBER: _ClassVar[int]
    INFERS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    EXEC_BUSY_FIELD_NUMBER: _ClassVar[int]
    LOAD_BUSY_FIELD_NUMBER: _ClassVar[int]
    EXEC_OVER_PREDICTED_FIELD_NUMBER: _ClassVar[int]
    TOO_LATE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    EXEC_OVER_OTHERS_FIELD_NUMBER: _ClassVar[int]
    over_ns: int
    infers: int
    loads: int
    exec_busy: float
    load_busy: float
    exec_over_predicted: float
    too_late: int
    failed: int
    exec_over_others: float
    def __init__(self, over_ns: _Optional[int] = ..., infers: _Optional[int] = ..., loads: _Optional[int] = ..., exec_busy: _Optional[float] = ..., load_busy: _Optional[float] = ..., exec_over_predicted: _Optional[float] = ..., too_late: _Optional[int] = ..., failed: _Optional[int] = ..., exec_over_others: _Optional[float] = ...) -> None: ...

class FrontInfo(_message.Message):
    __slots__ = ("name", "address", "age_ns", "requests_open", "link_bytes", "workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AGE_NS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_OPEN_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    age_ns: int
    requests_open: int
    link_bytes: int
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., age_ns: _Optional[int] = ..., requests_open: _Optional[int] = ..., link_bytes: _Optional[int] = ..., workers: _Optional[_Iterable[str]] = ...) -> None: ...

class KindInfo(_message.Message):
    __slots__ = ("gpu_kind", "num_workers", "over_ns", "exec_busy", "load_busy", "run_rps", "loads_per_s", "evictions_per_s", "dropped_for_exec_rps", "dropped_for_loads_rps", "dropped_for_pages_rps", "one_more_rps", "dropped_for_links_rps", "wanted", "limit", "num_joining", "start_ns")
    GPU_KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    OVER_NS_FIELD_NUMBER: _ClassVar[int]
    EXEC_BUSY_FIELD_NUMBER: _ClassVar[int]
    LOAD_BUSY_FIELD_NUMBER: _ClassVar[int]
    RUN_RPS_FIELD_NUMBER: _ClassVar[int]
    LOADS_PER_S_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FOR_EXEC_RPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FOR_LOADS_RPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FOR_PAGES_RPS_FIELD_NUMBER: _ClassVar[int]
    ONE_MORE_RPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FOR_LINKS_RPS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NUM_JOINING_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    gpu_kind: str
    num_workers: int
    over_ns: int
    exec_busy: float
    load_busy: float
    run_rps: float
    loads_per_s: float
    evictions_per_s: float
    dropped_for_exec_rps: float
    dropped_for_loads_rps: float
    dropped_for_pages_rps: float
    one_more_rps: float
    dropped_for_links_rps: float
    wanted: int
    limit: str
    num_joining: int
    start_ns: int
    def __init__(self, gpu_kind: _Optional[str] = ..., num_workers: _Optional[int] = ..., over_ns: _Optional[int] = ..., exec_busy: _Optional[float] = ..., load_busy: _Optional[float] = ..., run_rps: _Optional[float] = ..., loads_per_s: _Optional[float] = ..., evictions_per_s: _Optional[float] = ..., dropped_for_exec_rps: _Optional[float] = ..., dropped_for_loads_rps: _Optional[float] = ..., dropped_for_pages_rps: _Optional[float] = ..., one_more_rps: _Optional[float] = ..., dropped_for_links_rps: _Optional[float] = ..., wanted: _Optional[int] = ..., limit: _Optional[str] = ..., num_joining: _Optional[int] = ..., start_ns: _Optional[int] = ...) -> None: ...

class WatchWorkersWantedRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkersWanted(_message.Message):
    __slots__ = ("kinds",)
    KINDS_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedCompositeFieldContainer[KindWanted]
    def __init__(self, kinds: _Optional[_Iterable[_Union[KindWanted, _Mapping]]] = ...) -> None: ...

class KindWanted(_message.Message):
    __slots__ = ("gpu_kind", "wanted", "ready", "joining", "draining", "start_s", "limit", "may_go")
    GPU_KIND_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MAY_GO_FIELD_NUMBER: _ClassVar[int]
    gpu_kind: str
    wanted: int
    ready: int
    joining: int
    draining: int
    start_s: float
    limit: str
    may_go: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, gpu_kind: _Optional[str] = ..., wanted: _Optional[int] = ..., ready: _Optional[int] = ..., joining: _Optional[int] = ..., draining: _Optional[int] = ..., start_s: _Optional[float] = ..., limit: _Optional[str] = ..., may_go: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseWorkerRequest(_message.Message):
    __slots__ = ("gpu_kind", "worker")
    GPU_KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    gpu_kind: str
    worker: str
    def __init__(self, gpu_kind: _Optional[str] = ..., worker: _Optional[str] = ...) -> None: ...

class ReleaseWorkerResponse(_message.Message):
    __slots__ = ("worker", "reason")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker: str
    reason: str
    def __init__(self, worker: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "device", "gpu_kind", "host", "pid", "state", "num_pages", "num_free_pages", "page_bytes", "resident", "loading", "exec_backlog_ns", "load_backlog_ns", "actions_in_flight", "clock_offset_us", "round_trip_us", "models_refused", "clock_mhz", "clock_mhz_max", "complaints", "suspended", "payload_address", "recent")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GPU_KIND_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    EXEC_BACKLOG_NS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BACKLOG_NS_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_US_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    MODELS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_MAX_FIELD_NUMBER: _ClassVar[int]
    COMPLAINTS_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    device: str
    gpu_kind: str
    host: str
    pid: int
    state: str
    num_pages: int
    num_free_pages: int
    page_bytes: int
    resident: _containers.RepeatedScalarFieldContainer[str]
    loading: _containers.RepeatedScalarFieldContainer[str]
    exec_backlog_ns: int
    load_backlog_ns: int
    actions_in_flight: int
    clock_offset_us: float
    round_trip_us: float
    models_refused: _containers.RepeatedScalarFieldContainer[str]
    clock_mhz: int
    clock_mhz_max: int
    complaints: _containers.RepeatedScalarFieldContainer[str]
    suspended: _containers.RepeatedScalarFieldContainer[str]
    payload_address: str
    recent: RecentActions
    def __init__(self, worker_id: _Optional[str] = ..., device: _Optional[str] = ..., gpu_kind: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., num_pages: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., page_bytes: _Optional[int] = ..., resident: _Optional[_Iterable[str]] = ..., loading: _Optional[_Iterable[str]] = ..., exec_backlog_ns: _Optional[int] = ..., load_backlog_ns: _Optional[int] = ..., actions_in_flight: _Optional[int] = ..., clock_offset_us: _Optional[float] = ..., round_trip_us: _Optional[float] = ..., models_refused: _Optional[_Iterable[str]] = ..., clock_mhz: _Optional[int] = ..., clock_mhz_max: _Optional[int] = ..., complaints: _Optional[_Iterable[str]] = ..., suspended: _Optional[_Iterable[str]] = ..., payload_address: _Optional[str] = ..., recent: _Optional[_Union[RecentActions, _Mapping]] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class BatchEstimate(_message.Message):
    __slots__ = ("batch_size", "exec_ns")
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXEC_NS_FIELD_NUMBER: _ClassVar[int]
    batch_size: int
    exec_ns: int
    def __init__(self, batch_size: _Optional[int] = ..., exec_ns: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_id", "version", "state", "reason", "architecture_id", "slo_ns", "weights_bytes", "num_pages", "resident_on", "waiting", "load_ns", "exec", "requests", "answered", "refusals", "counters", "one_by_one", "pinned", "aliases", "share", "shadow")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_ID_FIELD_NUMBER: _ClassVar[int]
    SLO_NS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_ON_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    EXEC_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ONE_BY_ONE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    version: str
    state: str
    reason: str
    architecture_id: str
    slo_ns: int
    weights_bytes: int
    num_pages: int
    resident_on: _containers.RepeatedScalarFieldContainer[str]
    waiting: int
    load_ns: int
    exec: _containers.RepeatedCompositeFieldContainer[BatchEstimate]
    requests: int
    answered: int
    refusals: _containers.RepeatedCompositeFieldContainer[RefusalCount]
    counters: _containers.ScalarMap[str, int]
    one_by_one: str
    pinned: bool
    aliases: _containers.RepeatedScalarFieldContainer[str]
    share: float
    shadow: float
    def __init__(self, model_id: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., architecture_id: _Optional[str] = ..., slo_ns: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., num_pages: _Optional[int] = ..., resident_on: _Optional[_Iterable[str]] = ..., waiting: _Optional[int] = ..., load_ns: _Optional[int] = ..., exec: _Optional[_Iterable[_Union[BatchEstimate, _Mapping]]] = ..., requests: _Optional[int] = ..., answered: _Optional[int] = ..., refusals: _Optional[_Iterable[_Union[RefusalCount, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., one_by_one: _Optional[str] = ..., pinned: _Optional[bool] = ..., aliases: _Optional[_Iterable[str]] = ..., share: _Optional[float] = ..., shadow: _Optional[float] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "unless_last")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    UNLESS_LAST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    unless_last: bool
    def __init__(self, worker_id: _Optional[str] = ..., unless_last: _Optional[bool] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddModelRequest(_message.Message):
    __slots__ = ("model_id", "path", "content", "replace")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    path: str
    content: bytes
    replace: bool
    def __init__(self, model_id: _Optional[str] = ..., path: _Optional[str] = ..., content: _Optional[bytes] = ..., replace: _Optional[bool] = ...) -> None: ...

class AddModelResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class RemoveModelRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class RemoveModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinModelRequest(_message.Message):
    __slots__ = ("model_id", "pinned")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    pinned: bool
    def __init__(self, model_id: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class PinModelResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class RouteModelRequest(_message.Message):
    __slots__ = ("model_id", "aliases", "traffic", "shadow", "roll_back")
    class AliasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class TrafficEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ShadowEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    ROLL_BACK_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    aliases: _containers.ScalarMap[str, str]
    traffic: _containers.ScalarMap[str, float]
    shadow: _containers.ScalarMap[str, float]
    roll_back: bool
    def __init__(self, model_id: _Optional[str] = ..., aliases: _Optional[_Mapping[str, str]] = ..., traffic: _Optional[_Mapping[str, float]] = ..., shadow: _Optional[_Mapping[str, float]] = ..., roll_back: _Optional[bool] = ...) -> None: ...

class RouteModelResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class Application(_message.Message):
    __slots__ = ("name", "models", "policy", "options_json", "slo_ns", "default_label", "confidence_threshold", "combination", "label_output", "probability_output", "no_cache")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    SLO_NS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LABEL_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    COMBINATION_FIELD_NUMBER: _ClassVar[int]
    LABEL_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    NO_CACHE_FIELD_NUMBER: _ClassVar[int]
    name: str
    models: _containers.RepeatedScalarFieldContainer[str]
    policy: str
    options_json: str
    slo_ns: int
    default_label: int
    confidence_threshold: float
    combination: str
    label_output: str
    probability_output: str
    no_cache: bool
    def __init__(self, name: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., policy: _Optional[str] = ..., options_json: _Optional[str] = ..., slo_ns: _Optional[int] = ..., default_label: _Optional[int] = ..., confidence_threshold: _Optional[float] = ..., combination: _Optional[str] = ..., label_output: _Optional[str] = ..., probability_output: _Optional[str] = ..., no_cache: _Optional[bool] = ...) -> None: ...

class PutApplicationRequest(_message.Message):
    __slots__ = ("application", "replace")
    APPLICATION_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    application: Application
    replace: bool
    def __init__(self, application: _Optional[_Union[Application, _Mapping]] = ..., replace: _Optional[bool] = ...) -> None: ...

class PutApplicationResponse(_message.Message):
    __slots__ = ("application",)
    APPLICATION_FIELD_NUMBER: _ClassVar[int]
    application: ApplicationInfo
    def __init__(self, application: _Optional[_Union[ApplicationInfo, _Mapping]] = ...) -> None: ...

class RemoveApplicationRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveApplicationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListApplicationsRequest(_message.Message):
    __slots__ = ("name", "context")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    context: str
    def __init__(self, name: _Optional[str] = ..., context: _Optional[str] = ...) -> None: ...

class ModelWeight(_message.Message):
    __slots__ = ("model", "weight", "missing", "misfit")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    MISFIT_FIELD_NUMBER: _ClassVar[int]
    model: str
    weight: float
    missing: int
    misfit: str
    def __init__(self, model: _Optional[str] = ..., weight: _Optional[float] = ..., missing: _Optional[int] = ..., misfit: _Optional[str] = ...) -> None: ...

class ReasonCount(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ApplicationInfo(_message.Message):
    __slots__ = ("application", "revision", "state", "weights", "remark", "queries", "defaults", "refusals", "feedbacks", "num_contexts")
    APPLICATION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REMARK_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    FEEDBACKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    application: Application
    revision: int
    state: str
    weights: _containers.RepeatedCompositeFieldContainer[ModelWeight]
    remark: str
    queries: int
    defaults: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    refusals: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    feedbacks: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    num_contexts: int
    def __init__(self, application: _Optional[_Union[Application, _Mapping]] = ..., revision: _Optional[int] = ..., state: _Optional[str] = ..., weights: _Optional[_Iterable[_Union[ModelWeight, _Mapping]]] = ..., remark: _Optional[str] = ..., queries: _Optional[int] = ..., defaults: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., feedbacks: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., num_contexts: _Optional[int] = ...) -> None: ...

class ListApplicationsResponse(_message.Message):
    __slots__ = ("applications", "cache_hits", "cache_joins", "cache_misses", "cache_bytes")
    APPLICATIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    CACHE_JOINS_FIELD_NUMBER: _ClassVar[int]
    CACHE_MISSES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    applications: _containers.RepeatedCompositeFieldContainer[ApplicationInfo]
    cache_hits: int
    cache_joins: int
    cache_misses: int
    cache_bytes: int
    def __init__(self, applications: _Optional[_Iterable[_Union[ApplicationInfo, _Mapping]]] = ..., cache_hits: _Optional[int] = ..., cache_joins: _Optional[int] = ..., cache_misses: _Optional[int] = ..., cache_bytes: _Optional[int] = ...) -> None: ...

class FeedbackItem(_message.Message):
    __slots__ = ("query_id", "label", "reward", "text")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    query_id: str
    label: int
    reward: float
    text: str
    def __init__(self, query_id: _Optional[str] = ..., label: _Optional[int] = ..., reward: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class FeedbackRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[FeedbackItem]
    def __init__(self, items: _Optional[_Iterable[_Union[FeedbackItem, _Mapping]]] = ...) -> None: ...

class FeedbackOutcome(_message.Message):
    __slots__ = ("query_id", "status", "losses", "weights", "message")
    class LossesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    query_id: str
    status: str
    losses: _containers.ScalarMap[str, float]
    weights: _containers.ScalarMap[str, float]
    message: str
    def __init__(self, query_id: _Optional[str] = ..., status: _Optional[str] = ..., losses: _Optional[_Mapping[str, float]] = ..., weights: _Optional[_Mapping[str, float]] = ..., message: _Optional[str] = ...) -> None: ...

class FeedbackResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[FeedbackOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[FeedbackOutcome, _Mapping]]] = ...) -> None: ...

class EraseContextRequest(_message.Message):
    __slots__ = ("application", "context")
    APPLICATION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    application: str
    context: str
    def __init__(self, application: _Optional[str] = ..., context: _Optional[str] = ...) -> None: ...

class EraseContextResponse(_message.Message):
    __slots__ = ("erased",)
    ERASED_FIELD_NUMBER: _ClassVar[int]
    erased: bool
    def __init__(self, erased: _Optional[bool] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("rate_rps", "burst", "open_requests", "open_bytes", "slo_ns_min", "slo_ns_max", "weight", "request_weight_max")
    RATE_RPS_FIELD_NUMBER: _ClassVar[int]
    BURST_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLO_NS_MIN_FIELD_NUMBER: _ClassVar[int]
    SLO_NS_MAX_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_WEIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    rate_rps: float
    burst: int
    open_requests: int
    open_bytes: int
    slo_ns_min: int
    slo_ns_max: int
    weight: float
    request_weight_max: float
    def __init__(self, rate_rps: _Optional[float] = ..., burst: _Optional[int] = ..., open_requests: _Optional[int] = ..., open_bytes: _Optional[int] = ..., slo_ns_min: _Optional[int] = ..., slo_ns_max: _Optional[int] = ..., weight: _Optional[float] = ..., request_weight_max: _Optional[float] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("tenant", "quota")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    quota: Quota
    def __init__(self, tenant: _Optional[str] = ..., quota: _Optional[_Union[Quota, _Mapping]] = ...) -> None: ...

class SetQuotaResponse(_message.Message):
    __slots__ = ("remark",)
    REMARK_FIELD_NUMBER: _ClassVar[int]
    remark: str
    def __init__(self, remark: _Optional[str] = ...) -> None: ...

class RemoveQuotaRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class RemoveQuotaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQuotasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QuotaInfo(_message.Message):
    __slots__ = ("tenant", "quota", "open_requests", "open_bytes", "admitted", "refused")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    quota: Quota
    open_requests: int
    open_bytes: int
    admitted: int
    refused: int
    def __init__(self, tenant: _Optional[str] = ..., quota: _Optional[_Union[Quota, _Mapping]] = ..., open_requests: _Optional[int] = ..., open_bytes: _Optional[int] = ..., admitted: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class ListQuotasResponse(_message.Message):
    __slots__ = ("quotas", "file")
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    quotas: _containers.RepeatedCompositeFieldContainer[QuotaInfo]
    file: str
    def __init__(self, quotas: _Optional[_Iterable[_Union[QuotaInfo, _Mapping]]] = ..., file: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainedAction(_message.Message):
    __slots__ = ("action_id", "worker_id", "batch_size", "num_requests", "sent_ns", "earliest_ns", "latest_ns", "expected_begin_ns", "expected_duration_ns", "begin_ns", "end_ns", "duration_ns", "error")
    ACTION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    EARLIEST_NS_FIELD_NUMBER: _ClassVar[int]
    LATEST_NS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    action_id: int
    worker_id: str
    batch_size: int
    num_requests: int
    sent_ns: int
    earliest_ns: int
    latest_ns: int
    expected_begin_ns: int
    expected_duration_ns: int
    begin_ns: int
    end_ns: int
    duration_ns: int
    error: str
    def __init__(self, action_id: _Optional[int] = ..., worker_id: _Optional[str] = ..., batch_size: _Optional[int] = ..., num_requests: _Optional[int] = ..., sent_ns: _Optional[int] = ..., earliest_ns: _Optional[int] = ..., latest_ns: _Optional[int] = ..., expected_begin_ns: _Optional[int] = ..., expected_duration_ns: _Optional[int] = ..., begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class ExplainedLane(_message.Message):
    __slots__ = ("worker_id", "resident", "loading", "exec_busy_ns", "load_busy_ns", "num_free_pages", "num_pages")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    EXEC_BUSY_NS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BUSY_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    resident: bool
    loading: bool
    exec_busy_ns: int
    load_busy_ns: int
    num_free_pages: int
    num_pages: int
    def __init__(self, worker_id: _Optional[str] = ..., resident: _Optional[bool] = ..., loading: _Optional[bool] = ..., exec_busy_ns: _Optional[int] = ..., load_busy_ns: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class ExplainedMember(_message.Message):
    __slots__ = ("model", "request_id", "outcome")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    model: str
    request_id: int
    outcome: str
    def __init__(self, model: _Optional[str] = ..., request_id: _Optional[int] = ..., outcome: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "client_request_id", "model_id", "tenant", "outcome", "detail", "rows", "age_ns", "slo_ns", "latency_ns", "cold", "expected_latency_ns", "spent_queue_ns", "spent_load_ns", "spent_input_ns", "spent_exec_ns", "spent_output_ns", "spent_network_ns", "run", "load", "load_ns", "exec_ns", "queue_ns", "margin_ns", "num_waiting", "num_open", "num_pages", "dropped_share", "lanes", "enough_slo_ns", "more_workers", "pinning", "words", "members")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    AGE_NS_FIELD_NUMBER: _ClassVar[int]
    SLO_NS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_NS_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LATENCY_NS_FIELD_NUMBER: _ClassVar[int]
    SPENT_QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    SPENT_LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    SPENT_INPUT_NS_FIELD_NUMBER: _ClassVar[int]
    SPENT_EXEC_NS_FIELD_NUMBER: _ClassVar[int]
    SPENT_OUTPUT_NS_FIELD_NUMBER: _ClassVar[int]
    SPENT_NETWORK_NS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    EXEC_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    MARGIN_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_SHARE_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    ENOUGH_SLO_NS_FIELD_NUMBER: _ClassVar[int]
    MORE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    PINNING_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    client_request_id: str
    model_id: str
    tenant: str
    outcome: str
    detail: str
    rows: int
    age_ns: int
    slo_ns: int
    latency_ns: int
    cold: bool
    expected_latency_ns: int
    spent_queue_ns: int
    spent_load_ns: int
    spent_input_ns: int
    spent_exec_ns: int
    spent_output_ns: int
    spent_network_ns: int
    run: ExplainedAction
    load: ExplainedAction
    load_ns: int
    exec_ns: int
    queue_ns: int
    margin_ns: int
    num_waiting: int
    num_open: int
    num_pages: int
    dropped_share: float
    lanes: _containers.RepeatedCompositeFieldContainer[ExplainedLane]
    enough_slo_ns: int
    more_workers: int
    pinning: bool
    words: _containers.RepeatedScalarFieldContainer[str]
    members: _containers.RepeatedCompositeFieldContainer[ExplainedMember]
    def __init__(self, request_id: _Optional[int] = ..., client_request_id: _Optional[str] = ..., model_id: _Optional[str] = ..., tenant: _Optional[str] = ..., outcome: _Optional[str] = ..., detail: _Optional[str] = ..., rows: _Optional[int] = ..., age_ns: _Optional[int] = ..., slo_ns: _Optional[int] = ..., latency_ns: _Optional[int] = ..., cold: _Optional[bool] = ..., expected_latency_ns: _Optional[int] = ..., spent_queue_ns: _Optional[int] = ..., spent_load_ns: _Optional[int] = ..., spent_input_ns: _Optional[int] = ..., spent_exec_ns: _Optional[int] = ..., spent_output_ns: _Optional[int] = ..., spent_network_ns: _Optional[int] = ..., run: _Optional[_Union[ExplainedAction, _Mapping]] = ..., load: _Optional[_Union[ExplainedAction, _Mapping]] = ..., load_ns: _Optional[int] = ..., exec_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., margin_ns: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_open: _Optional[int] = ..., num_pages: _Optional[int] = ..., dropped_share: _Optional[float] = ..., lanes: _Optional[_Iterable[_Union[ExplainedLane, _Mapping]]] = ..., enough_slo_ns: _Optional[int] = ..., more_workers: _Optional[int] = ..., pinning: _Optional[bool] = ..., words: _Optional[_Iterable[str]] = ..., members: _Optional[_Iterable[_Union[ExplainedMember, _Mapping]]] = ...) -> None: ...
