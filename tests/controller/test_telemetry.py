"""The two tables and their files."""

import csv
from pathlib import Path

import pytest

from clockwright.actions import StepTime
from clockwright.errors import ConfigError
from clockwright.units import ActionId, ModelId, RequestId, WorkerId
from controller.telemetry import ActionRow, RequestRow, Telemetry, TelemetryFiles


def request(request_id: int, outcome: str = "OK", *, cold: bool = False) -> RequestRow:
    return RequestRow(
        request_id=RequestId(request_id),
        model_id=ModelId("m"),
        rows=1,
        arrival_ns=100,
        slo_ns=50,
        departure_ns=140,
        outcome=outcome,
        cold=cold,
    )


def test_totals_count_answers_refusals_and_cold_starts() -> None:
    telemetry = Telemetry()
    for number, (outcome, cold) in enumerate(
        [("OK", True), ("OK", False), ("COLD", False), ("LATE", False), ("COLD", False)]
    ):
        telemetry.add_request(request(number, outcome, cold=cold))
    telemetry.add_request(request(9, "CANCELLED"))
    assert telemetry.total.requests == 6
    assert telemetry.total.answered == 2
    assert telemetry.total.cancelled == 1
    assert telemetry.total.cold_starts == 1
    assert telemetry.total.refusals == {"COLD": 2, "LATE": 1}
    assert telemetry.by_model[ModelId("m")] == telemetry.total


def test_memory_keeps_the_last_rows_and_totals_keep_all() -> None:
    telemetry = Telemetry(capacity=3)
    for number in range(5):
        telemetry.add_request(request(number))
    assert [row.request_id for row in telemetry.requests] == [2, 3, 4]
    assert telemetry.total.requests == 5


def test_files_hold_every_column_of_every_row(tmp_path: Path) -> None:
    telemetry = Telemetry()
    with TelemetryFiles(tmp_path / "new" / "telemetry") as files:
        telemetry.write_to(files)
        for number in range(100):
            telemetry.add_request(request(number, cold=number == 7))
        telemetry.add_action(
            ActionRow(
                action_id=ActionId(3),
                type="LoadWeights",
                worker_id=WorkerId("w"),
                model_id=ModelId("m"),
                earliest_ns=1,
                latest_ns=2,
                error="NONE",
                load=StepTime(10, 30, 15),
            )
        )
        assert files.write_slice(max_rows=64)
        assert not files.write_slice(max_rows=64)
    with (tmp_path / "new" / "telemetry" / "requests.csv").open(newline="") as file:
        requests = list(csv.DictReader(file))
    with (tmp_path / "new" / "telemetry" / "actions.csv").open(newline="") as file:
        (action,) = csv.DictReader(file)
    assert [int(row["request_id"]) for row in requests] == list(range(100))
    assert requests[7]["cold"] == "1"
    assert requests[8]["cold"] == "0"
    assert requests[8]["worker_id"] == ""
    assert action["load_begin_ns"] == "10"
    assert action["load_duration_ns"] == "15"
    assert action["exec_begin_ns"] == ""


def test_a_directory_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="telemetry directory"):
        TelemetryFiles(tmp_path / "file" / "below")
