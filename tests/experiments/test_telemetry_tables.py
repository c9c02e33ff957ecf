"""Rows read back from files are the rows that were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from clockwright.errors import TraceFormatError
from clockwright.units import NS_PER_MS, NS_PER_S, PAGE_BYTES
from controller.telemetry.files import TelemetryFiles, table_files
from controller.telemetry.tables import Telemetry
from experiments.simulator import Case, Cluster, copies_of, run
from experiments.telemetry.tables import read_actions, read_requests
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import Poisson, Workload

ROW = ProfileRow(
    name="net",
    weights_bytes=PAGE_BYTES,
    load_ns=8 * NS_PER_MS,
    exec_ns={1: 2 * NS_PER_MS, 2: 3 * NS_PER_MS},
)


def write(directory: Path) -> Telemetry:
    """A run with answers, refusals, cold starts and evictions."""
    models = copies_of(ROW, 3)
    arrivals = Poisson(
        models=range(3), rate_rps=400, slo_ns=20 * NS_PER_MS, end_ns=NS_PER_S // 2, seed=1
    )
    telemetry = Telemetry()
    with TelemetryFiles(directory) as files:
        telemetry.write_to(files.requests.add, files.actions.add)
        run(
            Case(
                workload=Workload(
                    models=tuple(model.model_id for model in models), sources=(arrivals,)
                ),
                cluster=Cluster(models=models, num_pages=2, noise=Noise(exec_sigma=0.1)),
                duration_ns=NS_PER_S // 2,
            ),
            telemetry=telemetry,
        )
    return telemetry


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    telemetry = write(tmp_path)
    requests, actions = list(read_requests(tmp_path)), list(read_actions(tmp_path))
    assert requests == list(telemetry.requests)
    assert actions == list(telemetry.actions)
    assert {row.type for row in actions} == {"Infer", "LoadWeights", "EvictWeights"}
    assert {row.cold for row in requests if row.outcome == "OK"} == {True, False}


def test_a_row_that_is_none_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    with (tmp_path / "requests.csv").open("a") as file:
        file.write("1,net-0,one\n")
    with pytest.raises(TraceFormatError, match=r"requests\.csv:\d+: 3 cells, expected 21"):
        list(read_requests(tmp_path))
    with pytest.raises(TraceFormatError, match="nowhere"):
        list(read_actions(tmp_path / "nowhere"))


def test_only_the_last_run_of_a_folder_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    telemetry = write(tmp_path)
    assert list(read_requests(tmp_path)) == list(telemetry.requests)
    assert list(read_actions(tmp_path)) == list(telemetry.actions)
    assert (tmp_path / "requests.csv").read_text().count("\n") == 2 * len(telemetry.requests) + 1


def test_a_run_is_read_from_all_the_files_it_wrote(tmp_path: Path) -> None:
    write(tmp_path)
    telemetry = Telemetry()
    source = list(read_requests(tmp_path))
    with TelemetryFiles(tmp_path, file_bytes=10_000) as files:
        telemetry.write_to(files.requests.add, files.actions.add)
        for row in source:
            telemetry.add_request(row)
            files.write_slice()
            files.flush()
    assert len(table_files(tmp_path, "requests")) > 2
    assert list(read_requests(tmp_path)) == source
    assert list(read_actions(tmp_path)) == []
