"""What is made of runs with a broken worker, and a short run of the whole."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clockwright.actions import Infer, LoadWeights
from clockwright.units import ActionId, ArchitectureId, ModelId
from experiments.live import broken
from experiments.live.broken import BrokenCase, Setting, figures_of
from experiments.live.broken_worker import BrokenDevice
from experiments.live.open_loop import Account
from modelzoo.profile import Profile, ProfileRow
from worker.core.lanes import Lane, Step
from worker.models.file_store import FileStore
from worker.models.model_files import Limits
from worker.models.served_model import ServedModel


def case(
    fault: str, goodput_rps: float, *, since: str = "start", policy: str = "edf_mh"
) -> BrokenCase:
    nothing = np.zeros(0, np.int64)
    return BrokenCase(
        policy=policy, num_workers=2, fault=fault, since=since, load=0.8, goodput_rps=goodput_rps,
        healthy_rps=100.0, account=Account(nothing, nothing, nothing, [], 50, 1.0),
    )  # fmt: skip


def test_a_fault_s_share_is_that_of_its_worst_case_and_hangs_of_both_kinds_are_one() -> None:
    figures = figures_of(
        [
            case("fast_fail", 97.0),
            case("fast_fail", 96.0, since="mid-run"),
            case("hang", 99.0),
            case("silent", 50.0, policy="clockwork"),
            case("slow", 101.0),
        ]
    )
    assert figures["fast_fail_share"] == 0.96
    assert figures["hang_share"] == 0.5
    assert figures["slow_share"] == 1.01
    assert "bad_load_share" not in figures
    assert figures["clockwork_1of2_silent_start_x0.8_share"] == 0.5
    assert figures["edf_mh_1of2_fast_fail_mid_run_x0.8_share"] == 0.96


@pytest.mark.long
def test_a_short_run_leaves_a_row_for_each_way_to_break(tmp_path: Path) -> None:
    setting = Setting(
        policies=("edf_mh",), clusters=(2,), faults=("fast_fail",), overloaded=(), num_models=2,
        num_pages=2, load=0.2, seconds=0.5, slo_ms=1000,
    )  # fmt: skip
    cases = broken.STUDY.produce(setting, tmp_path)
    assert [found.since for found in cases] == ["start", "mid-run"]
    for found in cases:
        assert found.healthy_rps > 0
        assert found.account.num_offered > 0
        assert not found.account.others
    with (tmp_path / "broken.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["share"]) for row in rows] == pytest.approx(
        [found.share for found in cases], rel=1e-4
    )
    record = json.loads((tmp_path / "broken.json").read_text())
    assert record["figures"] == figures_of(cases)


MODEL = ServedModel(
    model_id=ModelId("m"), num_pages=1, io_bytes={1: 1}, architecture_id=ArchitectureId("a"), inputs=(),
    outputs=(), weights_bytes=1, load_ns=1000, exec_ns={1: 1000}, from_cache=False,
)  # fmt: skip
# An action's number, its model, when it may begin, and how long it is expected to take.
WINDOW: dict[str, Any] = {
    "action_id": ActionId(1), "model_id": ModelId("m"), "earliest_ns": 0, "latest_ns": 0,
    "expected_duration_ns": 1000,
}  # fmt: skip


def outcomes(device: BrokenDevice) -> tuple[str, str, int]:
    """What becomes of a LOAD and of an EXEC, and how long the next EXEC would take."""
    load = Step(Lane.LOAD, LoadWeights(**WINDOW), MODEL, (0,), 0)
    infer = Infer(**WINDOW, batch_size=1, rows=(1,))
    said = []
    for run, step in (
        (device.run_load, load),
        (device.run_exec, Step(Lane.EXEC, infer, MODEL, (0,), 0)),
    ):
        try:
            run(step)
            said.append("done")
        except RuntimeError as error:
            said.append(str(error))
    return said[0], said[1], device.exec_duration_ns(MODEL, 1)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("fast_fail", ("done", "an illegal memory access was encountered", 1000)),
        ("bad_load", ("the weights cannot be copied", "done", 1000)),
        ("slow", ("done", "done", 10_000)),
    ],
)
def test_a_device_is_well_until_it_breaks_the_way_it_was_told(
    fault: str, expected: tuple[str, str, int], tmp_path: Path
) -> None:
    row = ProfileRow(name="*", weights_bytes=1, load_ns=1000, exec_ns={1: 1000})
    device = BrokenDevice(
        fault,
        profile=Profile(name="steady", rows={"*": row}),
        limits=Limits(arena_bytes=1 << 20, num_pages=1, io_bytes=1 << 20),
        io_pool_bytes=1 << 20,
        files=FileStore(tmp_path),
        compile_limit_s=1.0,
    )
    assert outcomes(device) == ("done", "done", 1000)
    device.broken = True
    assert outcomes(device) == expected
