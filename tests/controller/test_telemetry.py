"""The two tables and their files."""

import csv
import errno
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from clockwright.errors import ConfigError
from clockwright.units import ActionId, ModelId, RequestId, WorkerId
from clockwright.wire.actions import StepTime
from controller.telemetry.files import REQUEST_COLUMNS, TelemetryFiles, table_files
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import Telemetry


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
    telemetry.add_model(ModelId("m"))
    for number, (outcome, cold) in enumerate(
        [("OK", True), ("OK", False), ("COLD", False), ("LATE", False), ("COLD", False)]
    ):
        telemetry.add_request(request(number, outcome, cold=cold))
    telemetry.add_request(request(9, "CANCELLED"))
    assert telemetry.total.requests == 6
    assert telemetry.total.answered == 2
    assert telemetry.total.cancelled == 1
    assert telemetry.total.by_name() == {"cold_starts": 1}
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
        telemetry.write_to(files.requests.add, files.actions.add)
        for number in range(100):
            telemetry.add_request(request(number, cold=number == 7))
        load = ActionRow(
            action_id=ActionId(3),
            type="LoadWeights",
            worker_id=WorkerId("w"),
            model_id=ModelId("m"),
            earliest_ns=1,
            latest_ns=2,
            error="NONE",
            load=StepTime(10, 30, 15),
        )
        telemetry.add_action(load)
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


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_run(directory: Path, *numbers: int) -> None:
    """One run that leaves requests of these ids."""
    telemetry = Telemetry()
    with TelemetryFiles(directory) as files:
        telemetry.write_to(files.requests.add, files.actions.add)
        for number in numbers:
            telemetry.add_request(request(number))


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond a size: the kernel takes what fits, and then nothing."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_counts_of_models_that_were_removed_are_forgotten() -> None:
    telemetry = Telemetry()
    for generation in range(100):
        model_id = ModelId(f"m#{generation}")
        telemetry.add_model(model_id)
        telemetry.remove_model(model_id)
        late = request(generation)
        late.model_id = model_id
        telemetry.add_request(late)
    assert telemetry.by_model == {}
    assert telemetry.total.requests == 100


def test_a_second_run_appends_to_what_the_first_left(tmp_path: Path) -> None:
    write_run(tmp_path, 1, 2)
    write_run(tmp_path, 3)
    rows = rows_of(tmp_path / "requests.csv")
    assert [(row["run"], row["request_id"]) for row in rows] == [("1", "1"), ("1", "2"), ("2", "3")]
    assert (tmp_path / "requests.csv").read_text().count("run,") == 1


def test_each_row_has_the_wall_clocks_time_beside_the_monotonic_one(tmp_path: Path) -> None:
    telemetry = Telemetry()
    before = time.time()
    with TelemetryFiles(tmp_path) as files:
        telemetry.write_to(files.requests.add, files.actions.add)
        row = request(1)
        row.departure_ns = time.monotonic_ns()
        telemetry.add_request(row)
    (written,) = rows_of(tmp_path / "requests.csv")
    departed = datetime.fromisoformat(written["departure_utc"])
    assert departed.tzinfo is not None
    assert before - 1e-3 <= departed.timestamp() <= time.time() + 1e-3
    assert int(written["departure_ns"]) == row.departure_ns


def test_tenant_and_refusal_figures_are_written(tmp_path: Path) -> None:
    telemetry = Telemetry()
    with TelemetryFiles(tmp_path) as files:
        telemetry.write_to(files.requests.add, files.actions.add)
        row = request(1, "COLD")
        row.tenant = "ann, of A"
        row.load_ns, row.exec_ns, row.queue_ns, row.margin_ns = 8, 3, 2, 1
        telemetry.add_request(row)
    (written,) = rows_of(tmp_path / "requests.csv")
    assert written["tenant"] == "ann, of A"
    figures = [written[f"{name}_ns"] for name in ("load", "exec", "queue", "margin")]
    assert figures == ["8", "3", "2", "1"]


def test_a_file_with_other_columns_is_kept_beside(tmp_path: Path) -> None:
    old = "request_id,model_id\n1,m\n"
    (tmp_path / "requests.csv").write_text(old)
    write_run(tmp_path, 7)
    assert (tmp_path / "requests.1.csv").read_text() == old
    (row,) = rows_of(tmp_path / "requests.csv")
    assert row["request_id"] == "7"


def test_a_table_goes_on_in_a_new_file_at_its_size_and_keeps_a_number_of_them(
    tmp_path: Path,
) -> None:
    telemetry = Telemetry()
    with TelemetryFiles(tmp_path, file_bytes=2000) as files:
        telemetry.write_to(files.requests.add, files.actions.add)
        for number in range(400):
            telemetry.add_request(request(number))
            if number % 5 == 4:
                while files.write_slice():
                    pass
                files.flush()
    paths = table_files(tmp_path, "requests")
    assert len(paths) == 9
    assert all(path.stat().st_size <= 2000 for path in paths)
    numbers = [int(row["request_id"]) for path in paths for row in rows_of(path)]
    assert numbers == list(range(numbers[0], 400))
    assert numbers[0] > 0
    # A later run goes on counting.
    write_run(tmp_path, 400)
    assert rows_of(paths[-1])[-1]["run"] == "2"


def test_a_full_disk_costs_no_row_that_memory_has_room_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry()
    with TelemetryFiles(tmp_path, capacity=1000) as files, caplog.at_level(logging.WARNING):
        telemetry.write_to(files.requests.add, files.actions.add)
        with full_disk(10_000):
            for number in range(700):
                telemetry.add_request(request(number))
                while files.write_slice():
                    pass
                files.flush()
            assert (tmp_path / "requests.csv").stat().st_size == 10_000  # a torn row
        while files.write_slice():
            pass
        files.flush()
    assert [int(row["request_id"]) for row in rows_of(tmp_path / "requests.csv")] == list(
        range(700)
    )
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert os.strerror(errno.EFBIG) in said[0]
    assert said[1] == "telemetry is written; dropped before: 0 requests, 0 actions"


def test_rows_that_a_full_disk_costs_are_counted_and_the_newest_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry()
    with TelemetryFiles(tmp_path, capacity=20) as files, caplog.at_level(logging.WARNING):
        telemetry.write_to(files.requests.add, files.actions.add)
        with full_disk(2_000):
            for number in range(100):
                telemetry.add_request(request(number))
                while files.write_slice():
                    pass
                files.flush()
        while files.write_slice():
            pass
        files.flush()
    rows = rows_of(tmp_path / "requests.csv")
    numbers = [int(row["request_id"]) for row in rows]
    assert numbers[-20:] == list(range(80, 100))
    assert all(None not in row and None not in row.values() for row in rows)
    dropped = 100 - len(numbers)
    assert dropped > 0
    assert f"dropped before: {dropped} requests, 0 actions" in caplog.text


def test_a_run_that_begins_on_a_full_disk_writes_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry()
    with caplog.at_level(logging.WARNING):
        with full_disk(0):
            files = TelemetryFiles(tmp_path)
            telemetry.write_to(files.requests.add, files.actions.add)
            telemetry.add_request(request(7))
            files.write_slice()
            files.flush()
        files.close()
    assert [row["request_id"] for row in rows_of(tmp_path / "requests.csv")] == ["7"]
    assert "telemetry waits in memory until it can be written" in caplog.text


def test_a_process_that_ends_while_the_disk_is_full_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry()
    with caplog.at_level(logging.ERROR), full_disk(1000), TelemetryFiles(tmp_path) as files:
        telemetry.write_to(files.requests.add, files.actions.add)
        for number in range(30):
            telemetry.add_request(request(number))
    assert "telemetry lacks the last 30 requests and 0 actions" in caplog.text


def test_a_row_that_was_torn_by_a_kill_is_cut_when_the_next_run_begins(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    with (tmp_path / "requests.csv").open("a") as file:
        file.write("1,2026-11-22T10:00:00")
    write_run(tmp_path, 2)
    assert [row["request_id"] for row in rows_of(tmp_path / "requests.csv")] == ["1", "2"]


def test_a_second_process_is_refused_the_folder(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from controller.telemetry.files import TelemetryFiles\n"
        "TelemetryFiles(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match="another process uses it"):
            TelemetryFiles(tmp_path)
        other.communicate("")
    with TelemetryFiles(tmp_path):
        assert (tmp_path / "requests.csv").read_text() == ",".join(REQUEST_COLUMNS) + "\n"
