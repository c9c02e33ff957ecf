"""A run as a Chrome trace: the format's rules, and what viewers need to show it."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clockwright.cli.main import main
from clockwright.client.client import Client
from clockwright.errors import TraceFormatError
from clockwright.units import NS_PER_MS, NS_PER_US, ActionId, ModelId, RequestId, WorkerId
from clockwright.wire.actions import StepTime
from controller.telemetry.files import TelemetryFiles
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import Telemetry
from experiments.live.local_server import LocalServer
from experiments.telemetry.chrome_trace import export_chrome_trace
from tests.kit.processes import write_models

MS = NS_PER_MS
Event = dict[str, Any]


def infer(action_id: int, begin_ns: int, end_ns: int, **changes: Any) -> ActionRow:  # noqa: ANN401
    row = ActionRow(
        action_id=ActionId(action_id),
        type="Infer",
        worker_id=WorkerId("gpu0"),
        model_id=ModelId("m"),
        batch_size=2,
        rows=2,
        num_requests=2,
        sent_ns=begin_ns - MS,
        earliest_ns=begin_ns - MS,
        latest_ns=begin_ns + 4 * MS,
        expected_begin_ns=begin_ns - 1000,
        expected_duration_ns=end_ns - begin_ns,
        received_ns=begin_ns - MS // 2,
        result_ns=end_ns + MS,
        error="NONE",
        input=StepTime(begin_ns - 2000, begin_ns - 1000, 1000),
        exec=StepTime(begin_ns, end_ns, end_ns - begin_ns),
        output=StepTime(end_ns, end_ns + 500, 500),
    )
    return msgspec.structs.replace(row, **changes)


def request(
    request_id: int,
    action_id: int | None,
    departure_ns: int,
    **changes: Any,  # noqa: ANN401
) -> RequestRow:
    row = RequestRow(
        request_id=RequestId(request_id),
        model_id=ModelId("m"),
        rows=1,
        arrival_ns=departure_ns - 10 * MS,
        slo_ns=50 * MS,
        departure_ns=departure_ns,
        outcome="OK",
        worker_id=WorkerId("gpu0"),
        action_id=None if action_id is None else ActionId(action_id),
        batch_size=2,
    )
    return msgspec.structs.replace(row, **changes)


def write(directory: Path, actions: list[ActionRow], requests: list[RequestRow]) -> None:
    telemetry = Telemetry()
    with TelemetryFiles(directory) as files:
        telemetry.write_to(files.requests.add, files.actions.add)
        for action in actions:
            telemetry.add_action(action)
        for row in requests:
            telemetry.add_request(row)


def export(directory: Path, *, windows: bool = True) -> list[Event]:
    target = directory / "trace.json"
    export_chrome_trace(directory, target, windows=windows)
    document = json.loads(target.read_text(encoding="utf-8"))
    events: list[Event] = document["traceEvents"]
    check(events)
    return events


def check(events: list[Event]) -> None:
    """The rules of the format, and that viewers will find everything in its place."""
    named: dict[str, dict[Any, str]] = {"process_name": {}, "thread_name": {}}
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    opened: dict[tuple[str, int], Event] = {}
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "MXbesf"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            key = event["pid"] if event["name"].startswith("process") else event["tid"]
            if event["name"] in named:
                assert key not in named[event["name"]], "named twice"
                named[event["name"]][key] = event["args"]["name"]
            continue
        assert event["pid"] in named["process_name"], "named before it is used"
        if event["ph"] == "X":
            assert event["tid"] in named["thread_name"]
            assert event["dur"] >= 0
            begin_ns = round(event["ts"] * 1000)
            slices[event["pid"], event["tid"]].append(
                (begin_ns, begin_ns + round(event["dur"] * 1000))
            )
        elif event["ph"] == "b":
            assert (event["cat"], event["id"]) not in opened
            opened[event["cat"], event["id"]] = event
        elif event["ph"] == "e":
            begin = opened[event["cat"], event["id"]]
            assert (begin["name"], begin["pid"]) == (event["name"], event["pid"])
            assert begin["ts"] <= event["ts"]
            begin["closed"] = True
        else:
            flows[event["id"]].append(event)
    assert all(event.get("closed") for event in opened.values())
    for track, of_track in slices.items():
        of_track.sort(key=lambda s: (s[0], -s[1]))
        stack: list[int] = []
        for begin_ns, end_ns in of_track:
            while stack and stack[-1] <= begin_ns:
                stack.pop()
            assert not stack or end_ns <= stack[-1], f"slices of {track} overlap without nesting"
            stack.append(end_ns)
    for ends in flows.values():
        start, finish = ends
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert (start["cat"], start["name"]) == (finish["cat"], finish["name"])
        for end in ends:
            at_ns = round(end["ts"] * 1000)
            of_track = slices[end["pid"], end["tid"]]
            assert any(begin <= at_ns < last for begin, last in of_track), "binds to no slice"


def tracks(events: list[Event]) -> dict[str, list[Event]]:
    """Slices by the name of their track."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def test_every_lane_is_a_track_in_microseconds(tmp_path: Path) -> None:
    load = ActionRow(
        action_id=ActionId(1),
        type="LoadWeights",
        worker_id=WorkerId("gpu0"),
        model_id=ModelId("m"),
        earliest_ns=MS,
        latest_ns=6 * MS,
        expected_begin_ns=MS,
        expected_duration_ns=8 * MS,
        result_ns=11 * MS,
        error="NONE",
        load=StepTime(2 * MS, 10 * MS, 8 * MS),
    )
    write(tmp_path, [load, infer(2, 20 * MS, 25 * MS + 1)], [])
    found = tracks(export(tmp_path))
    assert {name: len(slices) for name, slices in found.items()} == {
        "LOAD": 1, "INPUT": 1, "EXEC": 1, "OUTPUT": 1, "LOAD predicted": 1, "EXEC predicted": 1,
        "LOAD window": 1, "EXEC window": 1,
    }  # fmt: skip
    (execution,), (window,) = found["EXEC"], found["EXEC window"]
    assert (execution["ts"], execution["dur"]) == (20_000, 5_000.001)
    assert execution["name"] == "m x2"
    assert execution["args"]["expected_begin_ns"] == 20 * MS - 1000
    assert (window["ts"], window["dur"]) == (19_000, 5_000)
    assert "EXEC window" not in tracks(export(tmp_path, windows=False))


def test_arrows_lead_from_each_request_to_the_exec_that_answered_it(tmp_path: Path) -> None:
    actions = [infer(1, 20 * MS, 25 * MS), infer(2, 25 * MS, 30 * MS)]
    requests = [
        request(1, 1, 27 * MS),
        request(2, 1, 27 * MS),
        request(3, None, 28 * MS, outcome="COLD", worker_id=None),
        request(4, 2, 32 * MS),
        request(5, 2, 33 * MS, outcome="LATE"),
        request(6, 99, 34 * MS),
    ]
    write(tmp_path, actions, requests)
    events = export(tmp_path)
    finishes = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    assert finishes == {1: 20_000, 2: 20_000, 4: 25_000}
    begins = [event for event in events if event["ph"] == "b"]
    outcomes = [event["args"]["outcome"] for event in begins]
    assert outcomes == ["OK", "OK", "COLD", "OK", "LATE", "OK"]


def test_overlaps_get_a_second_track_and_clock_errors_do_not(tmp_path: Path) -> None:
    actions = [
        infer(1, 20 * MS, 25 * MS),
        infer(2, 25 * MS - 40 * NS_PER_US, 30 * MS),
        infer(3, 28 * MS, 33 * MS),
    ]
    write(tmp_path, actions, [])
    found = tracks(export(tmp_path))
    assert [(s["ts"], s["dur"]) for s in found["EXEC"]] == [(20_000, 5_000), (25_000, 5_000)]
    assert [s["ts"] for s in found["EXEC (2)"]] == [28_000]


def test_hundreds_of_overlaps_stay_legal(tmp_path: Path) -> None:
    write(tmp_path, [infer(n, 20 * MS + n, 25 * MS + 2 * n) for n in range(1, 200)], [])
    assert len(tracks(export(tmp_path))["EXEC window"]) == 1


def test_an_action_that_was_refused_has_its_window_only(tmp_path: Path) -> None:
    refused = infer(1, 20 * MS, 25 * MS, input=None, exec=None, output=None, error="TOO_LATE")
    write(tmp_path, [refused], [])
    found = tracks(export(tmp_path))
    assert set(found) == {"EXEC predicted", "EXEC window"}
    assert found["EXEC window"][0]["args"]["error"] == "TOO_LATE"


@pytest.mark.parametrize(
    ("file", "line", "old", "new", "message"),
    [
        ("actions.csv", 2, "Infer", "Infer,1", "actions.csv:2: .* cells, expected"),
        ("actions.csv", 2, "20000000", "soon", "actions.csv:2: exec_begin_ns is 'soon'"),
        ("actions.csv", 2, "20000000", "90000000", "actions.csv:2: exec ends at .*, before"),
        ("actions.csv", 2, "NONE", '"NONE', r"actions.csv:2: unexpected end"),
        ("actions.csv", 1, "exec_begin_ns", "begin", "actions.csv:1: no column exec_begin_ns"),
        ("requests.csv", 2, "27000000", "", "requests.csv:2: departure_ns is ''"),
        ("requests.csv", 2, "27000000", "1", "requests.csv:2: departure_ns 1 is before"),
    ],
)
def test_a_garbled_table_is_refused_with_file_and_line(
    tmp_path: Path, file: str, line: int, old: str, new: str, message: str
) -> None:
    write(tmp_path, [infer(1, 20 * MS, 25 * MS)], [request(1, 1, 27 * MS)])
    lines = (tmp_path / file).read_text(encoding="utf-8").splitlines()
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    (tmp_path / file).write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(TraceFormatError, match=message):
        export(tmp_path)


def test_a_missing_or_empty_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=r"actions\.csv: No such file"):
        export(tmp_path)
    write(tmp_path, [], [])
    assert tracks(export(tmp_path)) == {}
    (tmp_path / "requests.csv").write_text("")
    with pytest.raises(TraceFormatError, match=r"requests\.csv: empty"):
        export(tmp_path)
    (tmp_path / "requests.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceFormatError, match=r"requests\.csv:.*utf-8"):
        export(tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["clockwright", "trace", "export", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_the_command_exports_a_live_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = write_models(tmp_path / "models", dense="mlp-16-32-4")
    arguments = ["--models", str(models), "--device", "modelled:1ms", "--telemetry", str(tmp_path)]
    arguments += ["--cache-dir", str(tmp_path / "cache")]
    with LocalServer(arguments) as server, Client(server.address) as client:
        for _ in range(20):
            inputs = {
                tensor.name: np.zeros((1, 16), dtype=np.float32)
                for tensor in client.metadata("dense").inputs
            }
            client.infer("dense", inputs, slo_ms=1000)
    target = tmp_path / "trace.json"
    assert run(monkeypatch, str(tmp_path), str(target)) == 0
    out = capsys.readouterr().out
    assert "20 requests, 20 arrows" in out
    events: list[Event] = json.loads(target.read_text())["traceEvents"]
    check(events)
    found = tracks(events)
    assert len(found["EXEC"]) == 20
    assert len(found["LOAD"]) == 1


def test_the_command_says_what_is_wrong_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = run(monkeypatch, str(tmp_path), str(tmp_path / "trace.json"))
    assert code == f"error: {tmp_path}/actions.csv: No such file or directory"
    write(tmp_path, [], [])
    code = run(monkeypatch, str(tmp_path), str(tmp_path / "none" / "trace.json"))
    assert code == f"error: {tmp_path}/none/trace.json: No such file or directory"
