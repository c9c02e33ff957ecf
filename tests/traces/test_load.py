"""What `clockwright load` asks, what it counts, and servers of other makes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from clockwright.errors import ConfigError, TraceFormatError
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.v1 import inference_pb2 as pb
from tests.kit.foreign_server import foreign_server
from traces.arrivals import FixedRate, Workload
from traces.arrivals_file import read_workload
from traces.client_record import ClientRecord, summarise
from traces.load import OfferedLoad, read_weights, report_of, too_late
from traces.load_show import histogram, progress_line
from traces.replay import AskingStyle, ReplayProgress, play
from traces.request_inputs import RequestInputs, model_inputs

MS = NS_PER_MS


def record_of(*rows: tuple[int, int, int, int, str]) -> ClientRecord:
    """A record of requests: due, sent, departure and SLO in ms, and the outcome."""
    outcomes = tuple(dict.fromkeys(row[-1] for row in rows))
    due, sent, departure, slo = (
        np.array([row[column] for row in rows], np.int64) * MS for column in range(4)
    )
    return ClientRecord(
        models=("a",),
        outcomes=outcomes,
        model=np.zeros(len(rows), np.int64),
        outcome=np.array([outcomes.index(row[-1]) for row in rows], np.int64),
        is_open=np.ones(len(rows), bool),
        slo_ns=slo,
        due_ns=due,
        sent_ns=sent,
        departure_ns=departure,
        begin_ns=0,
    )


# --- what is counted ------------------------------------------------------------------------------


def test_every_request_is_in_time_late_refused_or_failed() -> None:
    summary = summarise(
        record_of(
            (0, 0, 10, 20, "OK"),
            (0, 0, 21, 20, "OK"),
            (0, 0, 5, 20, "COLD"),
            (0, 0, 5, 20, "UNAVAILABLE"),
        ),
        seconds=2.0,
    )
    parts = (summary.num_in_time, summary.num_late, summary.num_refused, summary.num_failed)
    assert parts == (1, 1, 1, 1)
    assert summary.good_request_fraction == 0.25
    assert (summary.offered_rps, summary.goodput_rps) == (2.0, 0.5)
    assert (summary.refusals, summary.failures) == ({"COLD": 1}, {"UNAVAILABLE": 1})


def test_latency_counts_from_when_a_request_was_due_and_so_does_the_deadline() -> None:
    summary = summarise(record_of((0, 30, 40, 20, "OK")), seconds=1.0)
    assert summary.latency_ms["50"] == 40.0
    assert summary.num_late == 1


def test_a_run_without_requests_has_a_summary() -> None:
    assert summarise(record_of(), seconds=1.0).good_request_fraction == 1.0
    assert histogram(record_of()) == []


def progress_of(
    seconds: int, sent: int, done: int, in_time: int, **outcomes: int
) -> ReplayProgress:
    return ReplayProgress(
        elapsed_ns=seconds * NS_PER_S,
        num_sent=sent,
        num_done=done,
        num_in_time=in_time,
        outcomes=outcomes,
        latency_ns_p50=3 * MS,
        latency_ns_p99=9 * MS,
    )


def test_progress_is_of_the_time_since_it_was_last_told() -> None:
    first = progress_of(1, 3000, 2990, 2900, OK=2900, COLD=90)
    assert progress_line(first, None) == (
        "   1 s  sent 3,000 r/s, in time 2,900 r/s, p50 3.0 ms, p99 9.0 ms, 90 COLD; 10 open"
    )
    # What was refused before, and is no more, is not said; what is new is.
    second = progress_of(3, 5000, 5000, 4800, OK=4800, COLD=90, LATE=110)
    assert progress_line(second, first) == (
        "   3 s  sent 1,000 r/s, in time 950 r/s, p50 3.0 ms, p99 9.0 ms, 55 LATE; 0 open"
    )


def test_a_replay_tells_its_progress_while_it_runs_and_nothing_is_counted_twice() -> None:
    told: list[ReplayProgress] = []
    with foreign_server() as server:
        source = FixedRate(
            models=range(1), rate_rps=40, slo_ns=60 * NS_PER_S, end_ns=3 * NS_PER_S // 2
        )
        record = play(
            server.address, Workload(models=("echo",), sources=(source,)), on_progress=told.append
        )
    assert told
    for before, now in zip((None, *told), told, strict=False):
        assert progress_line(now, before).endswith(f"; {now.num_sent - now.num_done} open")
    assert told[-1].num_done <= told[-1].num_sent <= len(record)
    assert sum(told[-1].outcomes.values()) == told[-1].num_done


def test_each_slo_has_numbers_of_its_own_and_the_warm_up_none() -> None:
    record = record_of(
        (0, 0, 500, 20, "OK"), (1000, 1000, 1010, 20, "OK"), (1000, 1000, 1090, 100, "OK")
    )
    report = report_of(record, address="", begin_s=0.5, seconds=1.0)
    assert report.total.num_requests == report.total.num_in_time == 2
    assert {slo: row.latency_ms["100"] for slo, row in report.by_slo_ms.items()} == {
        "20": 10.0,
        "100": 90.0,
    }
    assert [(row["of"], row["name"]) for row in report.rows()] == [
        ("all", ""), ("slo_ms", "20"), ("slo_ms", "100"), ("model", "a"),
    ]  # fmt: skip


# --- what is asked --------------------------------------------------------------------------------


def test_what_the_client_sent_late_is_named_and_not_the_servers() -> None:
    # Two requests left 90 ms late, and were answered 10 ms after that.
    prompt = [(due, due, due + 10, 50, "OK") for due in range(0, 1000, 100)]
    late = [(due, due + 90, due + 100, 50, "OK") for due in (50, 150)]
    report = report_of(record_of(*prompt, *late), address="", begin_s=0.0, seconds=1.0)
    assert (report.kept_up, report.client_late) == (False, 2)
    assert report.left_in_time.good_request_fraction == 1.0
    words = too_late(None, report)
    assert "2 of 12 requests were sent over 5 ms late" in words
    assert "Of the 10 others 100.00% were answered in time, p99 10.0 ms" in words
    report = report_of(record_of(*prompt), address="", begin_s=0.0, seconds=1.0)
    assert too_late(None, report) == ""


def load_of(**settings: object) -> Workload:
    fields: dict[str, object] = {
        "weights": {"a": Fraction(3), "b": Fraction(1)},
        "slos_ns": (20 * MS,),
        "duration_ns": 10 * NS_PER_S,
        **settings,
    }
    return OfferedLoad(**fields).workload()  # type: ignore[arg-type]


def test_models_are_asked_by_their_weights_and_slos_evenly() -> None:
    workload = load_of(rate_rps=400.0, slos_ns=(20 * MS, 50 * MS), tenants=("ann", "bob"))
    requests = list(workload)
    assert len(requests) == pytest.approx(4000, rel=0.1)
    asked = Counter(workload.models[request.model] for request in requests)
    assert asked["a"] / asked["b"] == pytest.approx(3, rel=0.1)
    slos = Counter(request.slo_ns for request in requests)
    assert slos[20 * MS] / slos[50 * MS] == pytest.approx(1, rel=0.1)
    assert {workload.tenants[request.tenant] for request in requests} == {"ann", "bob"}


def test_uniform_arrivals_are_evenly_apart_whatever_the_number_of_slos() -> None:
    requests = list(load_of(rate_rps=100.0, slos_ns=(20 * MS, 50 * MS), arrivals="uniform"))
    gaps = np.diff([request.time_ns for request in requests])
    assert set(gaps.tolist()) == {10 * MS}
    asked = Counter(request.model for request in requests)
    assert asked[0] / asked[1] == pytest.approx(3, rel=0.02)


def test_clients_of_a_closed_loop_are_dealt_out_by_weight() -> None:
    loops = load_of(concurrency=8).closed_loops
    assert Counter(loop.model for loop in loops) == {0: 6, 1: 2}
    assert all(loop.concurrency == 1 for loop in loops)


@pytest.mark.parametrize("settings", [{}, {"rate_rps": 1.0, "concurrency": 1}])
def test_a_load_is_an_open_loop_or_a_closed_one(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected one of them"):
        load_of(**settings)


def test_weights_are_read_exactly() -> None:
    assert read_weights(["a=0.1", "b"]) == {"a": Fraction(1, 10), "b": Fraction(1)}
    for wrong in (["a=0"], ["a=-1"], ["a=x"], ["=1"], ["a", "a"], ["a=1/0"]):
        with pytest.raises(ConfigError):
            read_weights(wrong)


def test_arrivals_of_a_file_keep_their_times_slos_and_tenants(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text(
        "model_id,time_s,slo_ms,tenant,note\na,10.5,20,ann,x\nb,10,,,y\na,10.25,50,bob,z\n"
    )
    workload = read_workload(path, (), slo_ns=100 * MS)
    rows = [
        (r.time_ns // MS, workload.models[r.model], r.slo_ns // MS, workload.tenants[r.tenant])
        for r in workload
    ]
    assert rows == [(0, "b", 100, ""), (250, "a", 50, "bob"), (500, "a", 20, "ann")]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("model_id\na\n", ":1: "),
        ("model_id,time_s,due_ns\na,1,1\n", ":1: "),
        ("model_id,time_s\n", ":2: "),
        ("model_id,time_s\na,1\na,soon\n", ":3: "),
        ("model_id,time_s\na\n", ":2: "),
        ("model_id,time_s,slo_ms\na,1,-5\n", ":2: "),
        ("some,thing\n", ":1: "),
        ("model_id,time_s\na,1e18\n", ":2: time_s is '1e18', expected a number, "),
        ("model_id,due_ns\na,0\na,9223372036854775807\n", ":3: due_ns is "),
        ("model_id,time_s,slo_ms\na,1,0\n", ":2: slo_ms is 0, expected more than 0 and at most "),
        ("model_id,time_s\n,1\n", ":2: model_id is empty"),
        (f"model_id,time_s\na,1\n{'a' * 200_000},1\n", ":3: field larger than"),
        ('model_id,time_s\n"a,1\nb,2\n', ":3: unexpected end of data"),
    ],
)
def test_a_file_that_does_not_fit_is_named_with_its_line(
    tmp_path: Path, text: str, where: str
) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text(text)
    with pytest.raises(TraceFormatError, match=where):
        read_workload(path, (), slo_ns=MS, ask=lambda: ["a"])


def test_a_file_may_begin_with_a_byte_order_mark_and_have_spaces_behind_commas(
    tmp_path: Path,
) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text("\ufeffmodel_id, time_s\na, 1\nb, 2\n", encoding="utf-8")
    workload = read_workload(path, (), slo_ns=MS)
    assert (workload.models, [r.time_ns for r in workload]) == (("a", "b"), [0, NS_PER_S])


def test_azures_traces_are_known_by_their_first_line(tmp_path: Path) -> None:
    minutes, calls = tmp_path / "2019.csv", tmp_path / "2021.csv"
    minutes.write_text("HashOwner,HashApp,HashFunction,Trigger,1\no,a,f,http,60\n")
    calls.write_text("app,func,end_timestamp,duration\na,f,5.0,1.0\na,g,7.0,1.0\n")
    assert read_workload(minutes, ["m"], slo_ns=MS).expected_requests() == 60
    assert [r.time_ns for r in read_workload(calls, (), slo_ns=MS, ask=lambda: ["m"])] == [
        0,
        2 * NS_PER_S,
    ]


# --- what requests carry --------------------------------------------------------------------------


def metadata(*inputs: tuple[str, str, list[int]]) -> pb.ModelMetadataResponse:
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name="m", inputs=[tensor(name=n, datatype=d, shape=s) for n, d, s in inputs]
    )


def test_rows_of_a_file_are_taken_in_turn() -> None:
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    made = model_inputs(metadata(("x", "FP32", [-1, 3])), RequestInputs(rows=2, arrays={"x": rows}))
    assert [tuple(tensor.shape) for tensor in made.tensors] == [(2, 3)]
    assert [variant[0] for variant in made.variants] == [rows[:2].tobytes(), rows[2:4].tobytes()]


def test_random_inputs_differ_and_are_the_same_again() -> None:
    wanted = RequestInputs(random=True, num_variants=4)
    described = metadata(("x", "FP32", [-1, 3]), ("ids", "INT64", [-1]), ("mask", "BOOL", [-1, 2]))
    made, again = model_inputs(described, wanted), model_inputs(described, wanted)
    assert len({variant[0] for variant in made.variants}) == 4
    assert made.variants == again.variants
    assert [len(part) for part in made.variants[0]] == [12, 8, 2]


def test_an_open_dimension_has_the_size_of_a_shape_or_a_file_or_16() -> None:
    described = metadata(("x", "FP32", [-1, -1]))
    assert len(model_inputs(described, RequestInputs(rows=2)).variants[0][0]) == 2 * 16 * 4
    said = model_inputs(described, RequestInputs(shapes={"x": (1, 7)}))
    assert len(said.variants[0][0]) == 28


def test_a_file_of_another_shape_or_type_is_refused() -> None:
    described = metadata(("x", "FP32", [-1, 3]))
    for wrong in (np.zeros((2, 4), np.float32), np.zeros((2, 3)), np.zeros((0, 3), np.float32)):
        with pytest.raises(ConfigError, match="the file has"):
            model_inputs(described, RequestInputs(arrays={"x": wrong}))


def test_a_model_without_a_batch_dimension_is_asked_in_its_own_shape() -> None:
    made = model_inputs(metadata(("x", "FP32", [2, 3])), RequestInputs(rows=5))
    assert tuple(made.tensors[0].shape) == (2, 3)


def test_texts_travel_with_their_lengths() -> None:
    texts = np.array([["a"], ["bcd"]])
    made = model_inputs(metadata(("t", "BYTES", [-1, 1])), RequestInputs(arrays={"t": texts}))
    assert [variant[0] for variant in made.variants] == [b"\1\0\0\0a", b"\3\0\0\0bcd"]


# --- a server of another make ---------------------------------------------------------------------


def at_rate(rate_rps: float, num: int, *models: str) -> Workload:
    source = FixedRate(
        models=range(len(models)),
        rate_rps=rate_rps,
        slo_ns=10 * NS_PER_S,
        end_ns=round((num + 0.5) * NS_PER_S / rate_rps),
    )
    return Workload(models=models, sources=(source,))


def test_a_foreign_server_gets_no_parameter_that_it_does_not_know() -> None:
    with foreign_server() as server:
        record = play(
            server.address, at_rate(200, 20, "a", "broken"), style=AskingStyle(slo_parameter="")
        )
    assert record.num_by_outcome == {"INTERNAL": 10, "OK": 10}
    assert all(not request.parameters for request in server.requests)
    assert [list(request.inputs[0].shape) for request in server.requests[:1]] == [[1, 3]]


def test_triton_is_told_the_slo_in_microseconds() -> None:
    with foreign_server() as server:
        play(server.address, at_rate(200, 1, "a"), style=AskingStyle(slo_parameter="timeout"))
    assert server.requests[0].parameters["timeout"].int64_param == 10_000_000


def test_each_request_of_a_load_asks_for_a_decision_if_it_is_told_to() -> None:
    style = AskingStyle(slo_parameter="", decide_within_ns=5_000_000)
    with foreign_server() as server:
        play(server.address, at_rate(200, 3, "a"), style=style)
    asked = [request.parameters["decide_within_ms"].double_param for request in server.requests]
    assert asked == [5.0] * 3


def test_each_request_of_a_load_has_its_weight() -> None:
    style = AskingStyle(slo_parameter="", weight=2.5)
    with foreign_server() as server:
        play(server.address, at_rate(200, 3, "a"), style=style)
    assert [request.parameters["weight"].double_param for request in server.requests] == [2.5] * 3


def test_a_server_that_stalls_cannot_hide_it() -> None:
    """All requests keep coming while it stalls, and each counts from when it was due."""
    num, stalled_s = 50, 0.0
    with foreign_server() as server:
        server.go.clear()
        all_there = threading.Event()
        began: list[float] = []

        def came(number: int) -> None:
            began.append(time.monotonic())
            if number == num:
                all_there.set()

        server.came = came

        def release() -> None:
            all_there.wait()
            server.go.set()

        releasing = threading.Thread(target=release)
        releasing.start()
        record = play(server.address, at_rate(200, num, "a"), style=AskingStyle(slo_parameter=""))
        releasing.join()
        stalled_s = began[-1] - began[0]
    assert len(record) == num
    # The first was due before it came, and was answered after the last had come.
    latency_s = record.latency_ns / NS_PER_S
    assert latency_s[0] >= stalled_s
    # 50 requests 5 ms apart: all of them waited for the last, which a closed loop would never have sent.
    assert np.all(record.departure_ns >= record.due_ns[-1])
    assert summarise(record, 1.0).latency_ms["50"] >= (num // 2 - 1) * 5
