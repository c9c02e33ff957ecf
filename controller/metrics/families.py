"""Every name that is exported. `docs/metrics.md` has the same list, and a test compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """Samples of one name."""

    name: str
    #: "counter", "gauge" or "histogram".
    kind: str
    labels: tuple[str, ...]
    unit: str
    meaning: str


_MODEL = ("model", "version")
_WORKER = ("worker",)
_KIND = ("gpu_kind",)
_TENANT = ("tenant",)

_ALL: Final = (
    # Triton's: per model.
    MetricFamily(
        "nv_inference_request_success",
        "counter",
        _MODEL,
        "requests",
        "Requests that were answered in time",
    ),
    MetricFamily(
        "nv_inference_request_failure",
        "counter",
        (*_MODEL, "reason"),
        "requests",
        "Requests that were not: REJECTED (refused, or late), CANCELED (the client went away), BACKEND (the"
        " engine failed), OTHER (the worker or the model vanished)",
    ),
    MetricFamily(
        "nv_inference_count", "counter", _MODEL, "rows", "Rows of all batches that were run"
    ),
    MetricFamily("nv_inference_exec_count", "counter", _MODEL, "batches", "Batches that were run"),
    MetricFamily(
        "nv_inference_request_duration_us",
        "counter",
        _MODEL,
        "microseconds",
        "Time from arrival to answer, over all requests that were answered in time",
    ),
    MetricFamily(
        "nv_inference_queue_duration_us",
        "counter",
        _MODEL,
        "microseconds",
        "Time from arrival until the worker began with the batch, over all requests of batches",
    ),
    MetricFamily(
        "nv_inference_compute_input_duration_us",
        "counter",
        _MODEL,
        "microseconds",
        "Time in which inputs were brought to the device, over all requests of batches",
    ),
    MetricFamily(
        "nv_inference_compute_infer_duration_us",
        "counter",
        _MODEL,
        "microseconds",
        "Time in which the device computed, over all requests of batches",
    ),
    MetricFamily(
        "nv_inference_compute_output_duration_us",
        "counter",
        _MODEL,
        "microseconds",
        "Time in which outputs were brought from the device, over all requests of batches",
    ),
    MetricFamily(
        "nv_inference_pending_request_count",
        "gauge",
        _MODEL,
        "requests",
        "Requests that wait and were not sent to a worker yet",
    ),
    # Triton's: devices and host.
    MetricFamily(
        "nv_gpu_utilization",
        "gauge",
        ("gpu_uuid",),
        "ratio",
        "Part of the time since an earlier scrape in which the worker's device computed; gpu_uuid is the worker",
    ),
    MetricFamily(
        "nv_gpu_memory_total_bytes",
        "gauge",
        ("gpu_uuid",),
        "bytes",
        "Memory of the worker for weights",
    ),
    MetricFamily(
        "nv_gpu_memory_used_bytes", "gauge", ("gpu_uuid",), "bytes", "What weights take of it"
    ),
    MetricFamily(
        "nv_cpu_utilization",
        "gauge",
        (),
        "ratio",
        "Part of the time since an earlier scrape in which the processors of the controller's host were busy",
    ),
    MetricFamily(
        "nv_cpu_memory_total_bytes", "gauge", (), "bytes", "Memory of the controller's host"
    ),
    MetricFamily("nv_cpu_memory_used_bytes", "gauge", (), "bytes", "What is in use of it"),
    # Requests.
    MetricFamily(
        "clockwright_requests_total",
        "counter",
        (*_MODEL, "outcome", "reason"),
        "requests",
        "Requests that are over, by outcome (ok, refused, cancelled) and the refusal's name",
    ),
    MetricFamily(
        "clockwright_cold_starts_total",
        "counter",
        _MODEL,
        "requests",
        "Requests that were answered in time although no worker had the weights resident when they arrived",
    ),
    MetricFamily(
        "clockwright_request_duration_seconds",
        "histogram",
        _MODEL,
        "seconds",
        "Time from arrival to answer of requests that were answered in time",
    ),
    MetricFamily(
        "clockwright_deadline_slack_seconds",
        "histogram",
        (),
        "seconds",
        "Time from answer to deadline; below 0 the answer was late, and was reported as a refusal",
    ),
    MetricFamily(
        "clockwright_refusal_duration_seconds",
        "histogram",
        ("reason",),
        "seconds",
        "Time from arrival to refusal",
    ),
    MetricFamily(
        "clockwright_prediction_error_seconds",
        "histogram",
        ("predicted",),
        "seconds",
        "How much later than predicted answers left (departure), and how much longer batches (exec) and weights"
        " (load) took the device",
    ),
    MetricFamily(
        "clockwright_slo_attainment_ratio",
        "gauge",
        (),
        "ratio",
        "Part of the requests that were answered in time since an earlier scrape; 1 where there were none",
    ),
    MetricFamily(
        "clockwright_requests_waiting",
        "gauge",
        (),
        "requests",
        "Requests without an answer yet, sent to a worker or not",
    ),
    MetricFamily(
        "clockwright_requests_refused_at_door_total",
        "counter",
        ("reason",),
        "requests",
        "Requests that were refused before they counted for a model: for a quota, for want of memory, or because a"
        " front or the controller was busy",
    ),
    MetricFamily(
        "clockwright_calls_denied_total",
        "counter",
        ("reason",),
        "calls",
        "Calls that their caller may not make",
    ),
    # Models.
    MetricFamily(
        "clockwright_models",
        "gauge",
        ("state",),
        "models",
        "Models by state: READY, LOADING (no worker has judged them) and UNAVAILABLE",
    ),
    MetricFamily(
        "clockwright_model_loads_total",
        "counter",
        _MODEL,
        "loads",
        "Times that weights were loaded",
    ),
    MetricFamily(
        "clockwright_model_evictions_total",
        "counter",
        _MODEL,
        "evictions",
        "Times that weights made room",
    ),
    MetricFamily(
        "clockwright_model_copies", "gauge", _MODEL, "workers", "Workers where weights are resident"
    ),
    # Workers.
    MetricFamily(
        "clockwright_worker_info",
        "gauge",
        ("worker", "gpu_kind", "device", "host"),
        "",
        "1; its labels say what a worker is",
    ),
    MetricFamily(
        "clockwright_workers",
        "gauge",
        ("state",),
        "workers",
        "Workers by state: JOINING, READY and DRAINING",
    ),
    MetricFamily(
        "clockwright_pages",
        "gauge",
        (*_WORKER, "state"),
        "pages",
        "Pages of a worker's memory for weights, by state: resident, loading, free",
    ),
    MetricFamily("clockwright_page_bytes", "gauge", _WORKER, "bytes", "Size of a page"),
    MetricFamily(
        "clockwright_gpu_exec_seconds_total",
        "counter",
        _WORKER,
        "seconds",
        "Time in which a worker's device computed",
    ),
    MetricFamily(
        "clockwright_gpu_load_seconds_total",
        "counter",
        _WORKER,
        "seconds",
        "Time in which weights were on their way to a worker's device",
    ),
    MetricFamily(
        "clockwright_lane_backlog_seconds",
        "gauge",
        (*_WORKER, "lane"),
        "seconds",
        "How long what was sent to a worker will take by prediction, by lane: exec, load",
    ),
    MetricFamily(
        "clockwright_actions_total",
        "counter",
        (*_WORKER, "type", "error"),
        "actions",
        "Actions that are over, by type and by what went wrong (NONE: nothing)",
    ),
    MetricFamily(
        "clockwright_actions_in_flight",
        "gauge",
        _WORKER,
        "actions",
        "Actions that a worker has and has not answered",
    ),
    MetricFamily(
        "clockwright_models_suspended",
        "gauge",
        _WORKER,
        "models",
        "Models that get nothing at a worker, because they failed there, or it is slow or silent",
    ),
    MetricFamily(
        "clockwright_worker_complaints",
        "gauge",
        _WORKER,
        "complaints",
        "What a worker's GPU says that is wrong, or makes it slower than it could be",
    ),
    MetricFamily(
        "clockwright_gpu_clock_hertz",
        "gauge",
        _WORKER,
        "hertz",
        "Clock of a worker's GPU, where it says",
    ),
    MetricFamily(
        "clockwright_worker_round_trip_seconds",
        "gauge",
        _WORKER,
        "seconds",
        "Time of a heartbeat to a worker and back, the shortest lately",
    ),
    # Capacity.
    MetricFamily(
        "clockwright_required_workers",
        "gauge",
        _KIND,
        "workers",
        "Workers of a kind that what is asked now needs; for whoever scales",
    ),
    MetricFamily(
        "clockwright_lane_busy_ratio",
        "gauge",
        (*_KIND, "lane"),
        "ratio",
        "Part of the last seconds in which the workers of a kind were busy, by lane: exec, load",
    ),
    MetricFamily(
        "clockwright_shortage_requests_per_second",
        "gauge",
        (*_KIND, "resource"),
        "requests per second",
        "Requests refused in the last seconds for want of exec, link, load (PCIe) or pages; worker: nobody offers the"
        " model",
    ),
    MetricFamily(
        "clockwright_one_more_requests_per_second",
        "gauge",
        _KIND,
        "requests per second",
        "Requests that one more worker of a kind would answer",
    ),
    # Tenants.
    MetricFamily(
        "clockwright_quota_admitted_total",
        "counter",
        _TENANT,
        "requests",
        "Requests that were inside a tenant's quota",
    ),
    MetricFamily(
        "clockwright_quota_refused_total",
        "counter",
        _TENANT,
        "requests",
        "Requests that were beyond a tenant's quota",
    ),
    MetricFamily(
        "clockwright_quota_open_requests",
        "gauge",
        _TENANT,
        "requests",
        "Requests that a tenant with a quota has open",
    ),
    MetricFamily(
        "clockwright_quota_open_bytes", "gauge", _TENANT, "bytes", "Bytes of their inputs"
    ),
    # The prediction cache.
    MetricFamily(
        "clockwright_cache_lookups_total",
        "counter",
        ("result",),
        "lookups",
        "Look-ups in the prediction cache, by result: hit, join (somebody asks for the same at the moment), miss",
    ),
    MetricFamily(
        "clockwright_cache_bytes", "gauge", (), "bytes", "What the prediction cache takes"
    ),
    # The controller.
    MetricFamily(
        "clockwright_open_requests",
        "gauge",
        (),
        "requests",
        "Requests inside the controller's door, with those of applications",
    ),
    MetricFamily(
        "clockwright_open_requests_limit", "gauge", (), "requests", "How many there may be"
    ),
    MetricFamily(
        "clockwright_open_bytes", "gauge", (), "bytes", "Bytes of requests inside the door"
    ),
    MetricFamily("clockwright_open_bytes_limit", "gauge", (), "bytes", "How many there may be"),
    MetricFamily(
        "clockwright_memory_bytes",
        "gauge",
        (),
        "bytes",
        "Memory that the controller takes up, shared memory included",
    ),
    MetricFamily("clockwright_memory_limit_bytes", "gauge", (), "bytes", "What it may take"),
    MetricFamily(
        "clockwright_memory_state",
        "gauge",
        ("state",),
        "",
        "1 for the state that holds: large requests, or all, are refused while memory is short",
    ),
    MetricFamily(
        "clockwright_throttle_requests_per_second",
        "gauge",
        (),
        "requests per second",
        "Requests that the controller's event loop has time for, and lets in; +Inf: all",
    ),
    MetricFamily(
        "clockwright_event_loop_lag_seconds",
        "gauge",
        (),
        "seconds",
        "How late the controller's event loop is",
    ),
    MetricFamily("clockwright_fronts", "gauge", (), "fronts", "Fronts that are connected"),
    MetricFamily(
        "clockwright_leader",
        "gauge",
        (),
        "",
        "1 while this controller leads; 0 while another does, or it is about to end",
    ),
    MetricFamily(
        "clockwright_generation", "gauge", (), "", "The generation in which it leads; 0: none"
    ),
    MetricFamily(
        "clockwright_ready",
        "gauge",
        (),
        "",
        "1 while requests are taken and every model is ready or known to be unfit",
    ),
    MetricFamily(
        "clockwright_build_info",
        "gauge",
        ("version", "policy"),
        "",
        "1; its labels say what runs here",
    ),
    # The process, by the names that all exporters have.
    MetricFamily("process_cpu_seconds_total", "counter", (), "seconds", "Processor time"),
    MetricFamily("process_resident_memory_bytes", "gauge", (), "bytes", "Memory in RAM"),
    MetricFamily("process_start_time_seconds", "gauge", (), "seconds", "Start in Unix time"),
    MetricFamily("process_open_fds", "gauge", (), "handles", "Open file handles"),
    MetricFamily("process_max_fds", "gauge", (), "handles", "How many there may be"),
)

#: All of them, by name, in the order of the page.
FAMILIES: Final = {family.name: family for family in _ALL}
