"""Every exported metric. A test compares this list with `docs/metrics.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from controller.telemetry.tables import COUNTERS


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """Samples of one name."""

    name: str
    #: "counter", "gauge" or "histogram".
    kind: str
    labels: tuple[str, ...]
    unit: str
    meaning: str


# A kind with labels, and the families that have both: NAME [UNIT] MEANING.
_TABLE: Final = """
counter model version
    nv_inference_request_success [requests] Requests answered in time
    nv_inference_count [rows] Rows of all batches that ran
    nv_inference_exec_count [batches] Batches that ran
    nv_inference_request_duration_us [microseconds] Time from arrival to answer, summed over all requests
        answered in time
    nv_inference_queue_duration_us [microseconds] Time from arrival until the worker started the batch, summed
        over all requests of batches
    nv_inference_compute_input_duration_us [microseconds] Time to copy inputs to the device, summed over all
        requests of batches
    nv_inference_compute_infer_duration_us [microseconds] Time in which the device computed, summed over all
        requests of batches
    nv_inference_compute_output_duration_us [microseconds] Time to copy outputs from the device, summed over all
        requests of batches
    clockwright_model_loads_total [loads] Loads of the model's weights
    clockwright_model_evictions_total [evictions] Evictions of the model's weights
counter model version reason
    nv_inference_request_failure [requests] Requests not answered in time: REJECTED (refused, or late), CANCELED
        (the client disconnected), BACKEND (the engine failed), OTHER (the worker or the model was lost)
gauge model version
    nv_inference_pending_request_count [requests] Waiting requests that were not sent to a worker yet
    clockwright_model_copies [workers] Workers where the weights are resident
gauge gpu_uuid
    nv_gpu_utilization [ratio] Share of the time since an earlier scrape in which the worker's device computed;
        gpu_uuid is the worker
    nv_gpu_memory_total_bytes [bytes] Size of the worker's weights cache
    nv_gpu_memory_used_bytes [bytes] Bytes of the weights cache in use
gauge
    nv_cpu_utilization [ratio] Share of the time since an earlier scrape in which the CPUs of the controller's
        host were busy
    nv_cpu_memory_total_bytes [bytes] Memory of the controller's host
    nv_cpu_memory_used_bytes [bytes] Memory of the controller's host in use
    clockwright_slo_attainment_ratio [ratio] Share of requests answered in time since an earlier scrape; 1
        without requests
    clockwright_requests_waiting [requests] Requests without an answer, sent to a worker or not
    clockwright_cache_bytes [bytes] Size of the prediction cache
    clockwright_sequences [sequences] Live sequences of steps
    clockwright_sequence_state_bytes [bytes] Bytes of the state of all sequences
    clockwright_open_requests [requests] Open requests in the controller, including those of applications
    clockwright_open_requests_limit [requests] Limit on open requests
    clockwright_open_bytes [bytes] Bytes of open requests in the controller
    clockwright_open_bytes_limit [bytes] Limit on bytes of open requests
    clockwright_memory_bytes [bytes] Memory of the controller, including shared memory
    clockwright_memory_limit_bytes [bytes] Limit on the controller's memory
    clockwright_event_loop_lag_seconds [seconds] Delay of the controller's event loop
    clockwright_fronts [fronts] Connected front processes
    clockwright_leader [] 1 while this controller leads; 0 while another one leads, or before this one ends
    clockwright_generation [] Generation in which this controller leads; 0: without a lease
    clockwright_ready [] 1 while the controller admits requests and every model is ready or refused
    process_resident_memory_bytes [bytes] Resident memory
    process_start_time_seconds [seconds] Start time in Unix time
    process_open_fds [handles] Open file handles
    process_max_fds [handles] Limit on open file handles
counter model version outcome reason
    clockwright_requests_total [requests] Finished requests, by outcome (ok, refused, cancelled) and the
        refusal's reason
histogram model version
    clockwright_request_duration_seconds [seconds] Time from arrival to answer of requests answered in time
histogram
    clockwright_deadline_slack_seconds [seconds] Time from answer to deadline; if it is negative, the answer was
        late and was reported as a refusal
histogram reason
    clockwright_refusal_duration_seconds [seconds] Time from arrival to refusal
histogram predicted
    clockwright_prediction_error_seconds [seconds] Measured minus predicted time: of answers (departure), and of
        the device's time for batches (exec) and weights (load)
counter reason
    clockwright_requests_refused_at_door_total [requests] Requests refused before they counted for a model: for
        a quota, for lack of memory, or because a front or the controller was busy
    clockwright_calls_denied_total [calls] Calls that the caller's roles do not allow
counter
    clockwright_bad_requests_total [requests] Requests for inference that are malformed, do not fit their model,
        or name an unknown one
gauge model
    clockwright_requests_behind_long_runs_per_second [requests per second] Requests to other models that were
        refused in the last seconds while a run of this model, longer than their SLO, held a device
gauge state
    clockwright_models [models] Models by state: READY, LOADING (not prepared by any worker yet) and UNAVAILABLE
    clockwright_workers [workers] Workers by state: JOINING, READY and DRAINING
    clockwright_memory_state [] 1 for the current state: large requests, or all, are refused while memory is
        short
gauge worker gpu_kind device host
    clockwright_worker_info [] Always 1; the labels describe the worker
gauge worker state
    clockwright_pages [pages] Pages of a worker's weights cache, by state: resident, loading, free
gauge worker
    clockwright_page_bytes [bytes] Size of a page
    clockwright_actions_in_flight [actions] Actions sent to a worker and not yet answered
    clockwright_models_suspended [models] Models that a worker gets no requests for, because they failed there,
        or it is slow or silent
    clockwright_worker_complaints [complaints] Problems that a worker's GPU reports: errors, and reasons for low
        clocks
    clockwright_gpu_clock_hertz [hertz] Clock of a worker's GPU, if it is known
    clockwright_worker_round_trip_seconds [seconds] Shortest recent round trip of a heartbeat to a worker
counter worker
    clockwright_gpu_exec_seconds_total [seconds] Time in which a worker's device computed
    clockwright_gpu_load_seconds_total [seconds] Time in which weights were copied to a worker's device
gauge worker lane
    clockwright_lane_backlog_seconds [seconds] Predicted time for all actions sent to a worker, by lane: exec,
        load
counter worker type error
    clockwright_actions_total [actions] Finished actions, by type and error (NONE: success)
gauge gpu_kind
    clockwright_required_workers [workers] Workers of a kind that the load needs by the time that one more would
        be ready
    clockwright_one_more_requests_per_second [requests per second] Requests that one more worker of a kind would
        answer
gauge gpu_kind lane
    clockwright_lane_busy_ratio [ratio] Share of the last seconds in which the workers of a kind were busy, by
        lane: exec, load
gauge gpu_kind resource
    clockwright_shortage_requests_per_second [requests per second] Requests refused in the last seconds for lack
        of exec, link, load (PCIe), pages, or worker (no worker offers the model)
counter tenant
    clockwright_quota_admitted_total [requests] Requests within a tenant's quota
    clockwright_quota_refused_total [requests] Requests over a tenant's quota
gauge tenant
    clockwright_quota_open_requests [requests] Open requests of a tenant with a quota
    clockwright_quota_open_bytes [bytes] Input bytes of the open requests of a tenant with a quota
counter result
    clockwright_cache_lookups_total [lookups] Look-ups in the prediction cache, by result: hit, join (another
        request for the same is running), miss
counter reason
    clockwright_sequences_ended_total [sequences] Sequences that ended, by reason: end (their last step),
        restart (a first step under their id), idle, model (it was replaced or removed)
gauge version policy
    clockwright_build_info [] Always 1; the labels describe the software
counter
    process_cpu_seconds_total [seconds] CPU time
"""


def _families() -> Iterator[MetricFamily]:
    for part in re.split(r"\n(?=\w)", _TABLE.strip()):
        (kind, *labels), *rows = map(str.split, re.split(r"\n {4}(?=\w)", part))
        for name, *words in rows:
            unit, _, meaning = " ".join(words).removeprefix("[").partition("] ")
            yield MetricFamily(name, kind, tuple(labels), unit, meaning)
    for each in COUNTERS:
        yield MetricFamily(each.metric, "counter", ("model", "version"), each.unit, each.help)


#: All of them, by name.
FAMILIES: Final[dict[str, MetricFamily]] = {}
for _family in _families():
    assert _family.meaning, _family.name
    assert _family.name not in FAMILIES, _family.name
    FAMILIES[_family.name] = _family
