"""The process that writes telemetry: every row, in order, whatever becomes of the processes."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from clockwright.errors import ConfigError
from clockwright.units import ActionId, ModelId, RequestId, WorkerId
from clockwright.wire.actions import StepTime
from controller.telemetry import writer as telemetry_writer
from controller.telemetry.files import TelemetryFiles
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.writer import TelemetryWriter, write


def request(number: int) -> RequestRow:
    return RequestRow(
        request_id=RequestId(number),
        model_id=ModelId("m"),
        rows=1,
        arrival_ns=100,
        slo_ns=50,
        tenant="ann",
        departure_ns=140,
        outcome="OK",
        cold=True,
        worker_id=WorkerId("w"),
    )


def action(number: int) -> ActionRow:
    return ActionRow(
        action_id=ActionId(number),
        type="Infer",
        worker_id=WorkerId("w"),
        model_id=ModelId("m"),
        batch_size=4,
        earliest_ns=1,
        error="NONE",
        exec=StepTime(10, 30, 15),
    )


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 300))


def ids(path: Path, column: str = "request_id") -> list[int]:
    with path.open(newline="") as file:
        return [int(row[column]) for row in csv.DictReader(file)]


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def test_every_row_is_in_the_files_when_the_writer_is_closed(tmp_path: Path) -> None:
    async def test() -> None:
        writer = TelemetryWriter(tmp_path / "new" / "telemetry")
        await writer.start()
        for number in range(3000):
            writer.add(request(number))
            writer.add(action(number))
            if number % 500 == 0:
                await asyncio.sleep(0.01)
        await writer.close()

    run(test)
    assert ids(tmp_path / "new" / "telemetry" / "requests.csv") == list(range(3000))
    assert ids(tmp_path / "new" / "telemetry" / "actions.csv", "action_id") == list(range(3000))
    with (tmp_path / "new" / "telemetry" / "requests.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    assert (row["tenant"], row["cold"], row["worker_id"], row["action_id"]) == ("ann", "1", "w", "")
    with (tmp_path / "new" / "telemetry" / "actions.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    assert (row["exec_begin_ns"], row["exec_duration_ns"], row["load_end_ns"]) == ("10", "15", "")


async def test_rows_are_on_disk_soon_while_the_controller_lives(tmp_path: Path) -> None:
    writer = TelemetryWriter(tmp_path)
    await writer.start()
    writer.add(request(7))
    while not ids(tmp_path / "requests.csv"):  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.02)
    await writer.close()


async def test_a_folder_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"telemetry directory .*file/below"):
        await TelemetryWriter(tmp_path / "file" / "below").start()
    writer = TelemetryWriter(tmp_path / "taken")
    await writer.start()
    with pytest.raises(ConfigError, match="another process uses it"):
        await TelemetryWriter(tmp_path / "taken").start()
    await writer.close()


def test_a_writer_that_is_killed_is_replaced_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_writer, "_RESTART_PAUSE_S", 0.01)

    async def test() -> None:
        before = children()
        writer = TelemetryWriter(tmp_path)
        await writer.start()
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        while "telemetry's writer was killed by SIGKILL" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        writer.add(request(5))
        await asyncio.sleep(0)
        while not ids(tmp_path / "requests.csv"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await writer.close()

    run(test)
    assert ids(tmp_path / "requests.csv") == [5]


def test_what_waits_is_bounded_and_what_is_dropped_is_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        writer = TelemetryWriter(tmp_path, capacity=100)
        await writer.start()
        for number in range(250):  # in one turn of the loop
            writer.add(request(number))
        await asyncio.sleep(0.3)
        await writer.close()

    run(test)
    assert ids(tmp_path / "requests.csv") == list(range(150, 250))
    assert "150 rows are dropped" in caplog.text


def test_a_writer_that_stands_still_costs_the_controller_a_bounded_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_writer, "_END_LIMIT_S", 0.3)

    async def test() -> None:
        before = children()
        writer = TelemetryWriter(tmp_path, capacity=100_000)
        await writer.start()
        (pid,) = children() - before
        os.kill(pid, signal.SIGSTOP)
        for number in range(50_000):
            writer.add(request(number))
        await asyncio.sleep(0.5)
        await writer.close()

    run(test)
    assert "telemetry lacks the last rows" in caplog.text


@pytest.mark.parametrize("cut", [1, 3, 10])
def test_a_pipe_that_ends_in_the_middle_of_a_record_ends_the_writer(
    cut: int, tmp_path: Path
) -> None:
    async def taken() -> bytes:
        data = bytearray()

        class Pipe:
            def write(self, part: bytes) -> None:
                data.extend(part)

        writer = TelemetryWriter(tmp_path)
        for number in (1, 2):
            writer.add(request(number))
            writer._write_slice(Pipe())  # type: ignore[arg-type]
        return bytes(data)

    data = asyncio.run(taken())
    with TelemetryFiles(tmp_path) as files:
        write(io.BytesIO(data[:-cut]), files)
    assert ids(tmp_path / "requests.csv") == [1]


def test_a_whole_record_that_is_none_of_rows_is_no_end_of_the_pipe(tmp_path: Path) -> None:
    data = msgspec.msgpack.encode(([{"odd": 1}], []))
    with TelemetryFiles(tmp_path) as files, pytest.raises(msgspec.ValidationError):
        write(io.BytesIO(len(data).to_bytes(4, "little") + data), files)
