"""Live figures of a GPU without one: their workloads on the processor at tiny size, and what becomes of the rows."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, ActionId, ModelId, WorkerId
from clockwright.wire.actions import StepTime
from controller.telemetry.rows import ActionRow
from experiments.__main__ import called
from experiments.gpu import __main__ as everything
from experiments.gpu import fig2, fig5, fig6, live, serve
from experiments.gpu.hardware import open_accelerator
from experiments.gpu.lateness import action_figures
from experiments.live.live_run import Played, Served, play
from experiments.live.rehearsal import rehearsals
from experiments.study.sides import RunRows
from experiments.study.study import from_command_line
from experiments.telemetry.tables import read_requests
from tests.kit.aims import wanted_of
from tests.kit.pretended_play import pretend_play
from traces.arrivals import Workload
from worker.core.lanes import Step
from worker.devices.accelerator import Accelerator, HostAccelerator
from worker.devices.gpu import TorchDevice, TorchModel

US, MS, S = NS_PER_US, NS_PER_MS, NS_PER_S


#: On the GPU's code, copies of a network of one page.
TINY: dict[str, Any] = {"device": "torch:cpu", "architecture": "tiny_conv", "pages": 3}


def small_serve(cache_dir: Path) -> serve.Setting:
    return serve.Setting(
        **TINY,
        num_models=6,
        seconds=0.6,
        share=1 / 6,
        host_mib=16,
        arena_mib=16,
        io_mib=1,
        cache_dir=str(cache_dir),
    )


# --- on the processor, for real ---------------------------------------------------------------------


def test_figure_2_runs_captured_kernels_of_its_own_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    setting = fig2.Setting(
        device="torch:cpu", architecture="tiny_conv", concurrencies=(1, 3), rounds=1, seconds=0.08
    )
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    queues: list[str | None] = []

    def opened(device: str) -> Accelerator:
        queues.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return open_accelerator(device)

    monkeypatch.setattr(fig2, "open_accelerator", opened)
    fig2.STUDY.produce(setting, tmp_path)
    # A stream each for the EXECs of the largest concurrency, and for their captures.
    assert set(queues) == {"32"}
    figures = json.loads((tmp_path / "fig2.json").read_text())["figures"]
    assert figures["joined"] == 1
    for concurrency in (1, 3):
        for mode in fig2.MODES:
            assert figures[f"{mode}_c{concurrency}_num_execs"] > 0
        assert f"one_at_a_time_c{concurrency}_simulated_rps" in figures
    assert wanted_of("fig2") <= figures.keys()
    assert "throughput_gain_pct" in figures
    assert (tmp_path / "fig2.csv").exists()
    assert (tmp_path / "fig2.png").stat().st_size > 0


def test_one_at_a_time_never_overlaps_and_keeps_the_order() -> None:
    done = fig2.one_at_a_time(lambda _: None, 3, time.monotonic_ns() + MS)
    for before, after in pairwise(done):
        assert before.end_ns <= after.begin_ns
        assert before.asked_ns <= after.asked_ns


@pytest.mark.long
def test_all_live_workloads_are_played_on_a_server_with_more_instances_than_pages(
    tmp_path: Path,
) -> None:
    others: Any = TINY | {"num_models": 6, "cache_dir": str(tmp_path)}
    five = fig5.Setting(**others, seconds=1.6, slos_ms=(100, 500), concurrency=2)
    six = fig6.Setting(**others, seconds=1.2, share=0.25, num_parts=2)
    mixed = small_serve(tmp_path)
    # On one server: to start one takes longer than all of them together.
    rehearsed = rehearsals(five.served, 0.2, mixed.workload)
    played = play([*rehearsed, *five.workloads, *six.workloads, mixed.workload], five.served)
    runs = played.runs
    points = list(live.compare(five, replace(played, runs=runs[:5])))
    assert [point.stretch for point in points] == ["slo100", "slo500"]
    for point in points:
        # A machine too busy for ten requests leaves live figures, and says why there are no others.
        assert ("not_simulated" in point.about) is (point.simulated is None)
    points = list(live.compare(six, replace(played, runs=[*runs[:3], runs[5]])))
    assert [point.stretch for point in points] == [stretch.key for stretch in six.stretches]
    figures = serve.live_figures(mixed, runs[6])
    assert figures["live_num_instances"] == 6
    assert "live_exec_completion_error_us_p99" in figures


# --- what becomes of the rows, in virtual time ------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """In place of a server there is the simulator, with delays of its own; its command line is kept."""
    asked: list[Sequence[str]] = []

    def pretend(workloads: Sequence[Workload], served: Served) -> Played:
        asked.append(("--device", served.device, *served.options))
        return pretend_play(workloads, served)

    for module in (live, serve):
        monkeypatch.setattr(module, "play", pretend)
    return asked


def test_figure_5_foresees_a_server_that_was_measured(
    pretended: list[Sequence[str]], tmp_path: Path
) -> None:
    setting = fig5.Setting(**TINY, num_models=3, seconds=6.0, slos_ms=(100, 500), concurrency=8)
    fig5.STUDY.produce(setting, tmp_path)
    assert pretended[0][:4] == ("--device", "torch:cpu", "--host-mib", "512")
    record = json.loads((tmp_path / "fig5.json").read_text())
    figures = record["figures"]
    assert figures["slo500_live_goodput_rps"] > 100
    assert wanted_of("fig5") <= figures.keys()
    # The simulator has the noise and delays that it measured, not those that were.
    assert abs(figures["worst_goodput_gap_pct"]) < 3
    assert figures["slo500_simulated_mean_batch_size"] == pytest.approx(
        figures["slo500_live_mean_batch_size"], rel=0.05
    )
    assert record["hardware"]["accelerator"] == "cpu"
    assert {"calibration", "rows", "exec_ms"} < set(record)


def test_figure_6_counts_minor_and_major_apart(
    pretended: list[Sequence[str]], tmp_path: Path
) -> None:
    setting = fig6.Setting(
        **TINY | {"pages": 8}, num_models=41, seconds=6.0, share=0.5, num_parts=2
    )
    (workload,) = setting.workloads
    assert workload.models == setting.model_ids
    assert workload.end_ns == setting.borders_ns[-1]
    fig6.STUDY.produce(setting, tmp_path)
    figures = json.loads((tmp_path / "fig6.json").read_text())["figures"]
    assert wanted_of("fig6") <= figures.keys()
    assert figures["num_instances"] == 41
    assert figures["num_instances_answered"] == 41
    assert figures["lead_major_live_goodput_rps"] == 0
    assert figures["lead_minor_live_goodput_rps"] > 0
    # More instances than pages: ever more of what is asked must be loaded first.
    assert figures["end_both_live_cold_pct"] > figures["ramp1_both_live_cold_pct"] > 0
    assert figures["end_both_live_load_busy_pct"] > 20
    for phase in ("lead", "ramp1", "ramp2", "end"):
        both, minor, major = (
            figures[f"{phase}_{kind}_live_goodput_rps"] for kind in ("both", "minor", "major")
        )
        assert both == pytest.approx(minor + major)
    assert abs(figures["end_both_goodput_gap_pct"]) < 10


def test_lanes_of_a_worker_take_no_memory_while_they_serve(
    pretended: list[Sequence[str]], tmp_path: Path
) -> None:
    serve.STUDY.produce(small_serve(tmp_path), tmp_path)
    figures = json.loads((tmp_path / "serve.json").read_text())["figures"]
    assert wanted_of("serve") <= figures.keys()
    assert figures["live_goodput_pct"] > 0
    assert figures["lanes_num_instances"] == 6
    assert figures["lanes_num_Infer"] >= 1
    assert figures["lanes_num_LoadWeights"] >= figures.get("lanes_num_EvictWeights", 0)
    assert figures["lanes_memory_taken_while_serving"] == 0
    # Other processes take and give back the host's memory at any time.
    assert "lanes_free_bytes_change" not in figures


class Card(HostAccelerator):
    """Has so much memory free; less after every look."""

    free = 1 << 30

    def free_bytes(self) -> int:
        self.free -= 4096
        return self.free


def test_a_lane_that_takes_memory_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_load = TorchDevice.run_load

    def takes(device: TorchDevice, step: Step[TorchModel]) -> None:
        device._accelerator.device_memory(1)
        run_load(device, step)

    monkeypatch.setattr(TorchDevice, "run_load", takes)
    figures = asyncio.run(serve.lanes(small_serve(tmp_path), Card()))
    assert figures["lanes_num_LoadWeights"] > 0
    assert figures["lanes_memory_taken_while_serving"] == figures["lanes_num_LoadWeights"]
    assert figures["lanes_free_bytes_change"] == -4096


def test_a_request_that_left_no_row_is_one_that_was_not_answered() -> None:
    setting = serve.Setting(**TINY, num_models=2, seconds=2.0, share=1 / 6)
    (run,) = pretend_play([setting.workload], setting.served).runs
    whole = serve.live_figures(setting, run)
    half = replace(run, rows=replace(run.rows, requests=run.rows.requests[::2]))
    figures = serve.live_figures(setting, half)
    assert figures["live_num_without_row"] == len(run.rows.requests) // 2 > 10
    assert figures["live_goodput_pct"] == pytest.approx(whole["live_goodput_pct"] / 2, rel=0.1)


def test_a_server_that_answers_too_little_has_live_figures_only() -> None:
    setting = fig5.Setting(**TINY, num_models=2, seconds=2.0, slos_ms=(100, 500), concurrency=2)
    first = rehearsals(setting.served, 0.2, setting.mix)
    played = pretend_play([*first, *setting.workloads], setting.served)
    played.runs[0] = replace(played.runs[0], rows=RunRows([], []))
    # One of the two instances answers nobody.
    for run in played.runs[3:]:
        for each in run.rows.requests:
            if each.model_id == "tiny_conv-1":
                each.outcome = "OVERLOADED"
    points = list(live.compare(setting, played))
    study = replace(fig5.STUDY, ask=lambda _setting: points)
    figures = study.figures_of(setting, points)
    assert (figures["num_instances"], figures["num_instances_answered"]) == (2, 1)
    assert figures["slo500_live_goodput_rps"] > 0
    assert not any("simulated" in key or "gap" in key for key in figures)
    assert "0 requests of one client" in points[0].about["not_simulated"]


@pytest.mark.parametrize("section", [fig2, fig5, fig6, serve], ids=lambda module: module.__name__)
def test_a_declared_section_does_what_make_gpu_asks(section: ModuleType) -> None:
    study = section.STUDY
    (part,) = (part for part in everything.PARTS if part[1][:2] == ("experiments", study.command))
    assert called(study.command) == f"gpu-{part[0]}"
    words = ["--device", "cuda:0", "--seconds", str(part[2])]
    setting, options = from_command_line(study.command, study.setting, words)
    assert (setting.device, setting.seconds) == ("cuda:0", part[2])
    # Figure 2 has no server.
    assert section is fig2 or setting.served.device == "cuda:0"
    assert from_command_line(study.command, study.setting, options.split()) == (setting, options)


@pytest.mark.long
def test_a_figure_may_be_served_by_fronts_and_keep_its_telemetry(tmp_path: Path) -> None:
    folder = tmp_path / "telemetry"
    words = ["--fronts", "2", "--keep-telemetry", str(folder)]
    setting, options = from_command_line("gpu-fig5", fig5.Setting(**TINY, num_models=2), words)
    assert options == "--fronts 2 --seed 1 --keep-telemetry DIR"
    (workload,) = replace(setting, seconds=1.0, slos_ms=(500,), concurrency=4).workloads
    (run,) = play([workload], replace(setting, cache_dir=str(tmp_path)).served).runs
    assert run.report.num_by_outcome == {"OK": len(run.report)}
    assert list(read_requests(folder)) == run.rows.requests


def test_a_section_may_be_asked_for_what_a_processor_can_serve() -> None:
    words = "--device torch:cpu --seconds 30 --architecture tiny_conv --pages 201 --share 0.5"
    for study in (fig5.STUDY, fig6.STUDY):
        whole: Any = study.setting
        half, _ = from_command_line(study.command, whole, words.split())
        case = half.served.case
        assert {model.row.name for model in case.cluster.models} == {"tiny_conv"}
        assert case.cluster.num_pages == 201
        assert len(half.model_ids) == len(whole.model_ids)
        asked = [half.mix.expected_requests(), whole.mix.expected_requests()]
        clients = [
            sum(loop.concurrency for loop in setting.mix.closed_loops) for setting in (half, whole)
        ]
        assert asked[0] / 30 == pytest.approx(asked[1] / whole.seconds / 2)
        assert clients[0] == clients[1] / 2
    half, _ = from_command_line("gpu-serve", serve.STUDY.setting, words.split())
    usual = serve.STUDY.setting
    assert len(half.model_ids) == len(usual.model_ids) == 300
    asked = [setting.workload.expected_requests() for setting in (half, usual)]
    assert asked[0] / 30 == pytest.approx(asked[1] / usual.seconds / 2)
    assert half.room.num_pages == half.served.case.cluster.num_pages == 201


@pytest.mark.parametrize("words", ["--pages 0", "--share -1", "--share nan", "--seconds 0"])
def test_a_section_cannot_be_asked_for_nothing(words: str) -> None:
    option, value = words.split()
    with pytest.raises(ConfigError, match=f"{option[2:]} is {value}"):
        from_command_line("gpu-fig6", fig6.STUDY.setting, words.split())


def test_settings_keep_to_the_time_that_they_are_told() -> None:
    for seconds in (26.0, 33.3):
        five = fig5.Setting(seconds=seconds)
        assert 3 * five.rehearsal_s + len(five.slos_ms) * five.each_ns / S < seconds * 1.1
        six = fig6.Setting(seconds=seconds)
        assert 3 * six.rehearsal_s + six.borders_ns[-1] / S < seconds * 1.1
        assert six.workloads[0].end_ns == six.borders_ns[-1]
    assert serve.Setting(seconds=20.0).workload.end_ns == 15 * S


def test_figure_6_asks_a_thousand_instances() -> None:
    (seconds,) = (seconds for name, _, seconds, _ in everything.PARTS if name == "fig6")
    assert seconds is not None
    (workload,) = fig6.Setting(seconds=seconds).workloads
    assert len({request.model for request in workload}) >= 1000


def test_predictions_of_one_executor_follow_from_a_single_client() -> None:
    alone = [
        fig2.Exec(asked_ns=t * 10 * MS, begin_ns=t * 10 * MS, end_ns=t * 10 * MS + 9 * MS)
        for t in range(20)
    ]
    for concurrency in (1, 8):
        assert fig2.predicted_rps(alone, concurrency) == pytest.approx(100, rel=0.02)
    assert fig2.predicted_rps(alone[:1], 1) == pytest.approx(1000 / 9, rel=0.02)


# --- lateness and errors ----------------------------------------------------------------------------


def row(number: int, model: str, **others: Any) -> ActionRow:  # noqa: ANN401
    return ActionRow(
        action_id=ActionId(number),
        type="Infer" if "exec" in others else "LoadWeights",
        worker_id=WorkerId("w"),
        model_id=ModelId(model),
        error="NONE",
        **others,
    )


def test_lateness_counts_from_when_a_step_could_have_begun() -> None:
    step = partial(StepTime, duration_ns=90 * US)
    rows = [
        # Nothing but its window to wait for: 5 us late.
        row(1, "a", received_ns=0, earliest_ns=100 * US, load=step(105 * US, 200 * US)),
        # The lane was busy until 200: 7 us late.
        row(2, "b", received_ns=50 * US, earliest_ns=0, load=step(207 * US, 300 * US)),
        # Its weights came at 200: 11 us late. Its own lane was free.
        row(
            3, "a", received_ns=0, earliest_ns=0,
            input=step(10 * US, 20 * US), exec=step(211 * US, 400 * US),
        ),
        # The EXEC before ended at 400, its input at 413: 20 us late.
        row(
            4, "b", received_ns=0, earliest_ns=0,
            input=step(402 * US, 413 * US), exec=step(433 * US, 500 * US),
        ),
        row(5, "c", received_ns=0, earliest_ns=0),  # an action that did nothing
        msgspec.structs.replace(row(6, "a", load=step(0, S)), error="TOO_LATE"),
    ]  # fmt: skip
    for number, each in enumerate(rows):
        each.expected_begin_ns = 100 * US
        each.expected_duration_ns = (90 + number) * US
    figures = action_figures(rows)
    assert (figures["num_exec"], figures["num_load"]) == (2, 2)
    assert (figures["start_late_us_p50"], figures["start_late_us_p99"]) == (11, 20)
    assert (figures["exec_error_us_p99"], figures["load_error_us_p99"]) == (3, 1)
    assert figures["load_completion_error_us_p99"] == 300 - 100 - 91
    assert figures["exec_completion_error_us_p99"] == 500 - 100 - 93


def test_a_pause_of_the_device_shows_though_the_next_exec_was_queued() -> None:
    def exec_row(number: int, staged: int, begin: int, end: int) -> ActionRow:
        each = row(
            number, "a", received_ns=0, earliest_ns=0,
            input=StepTime(0, staged * US, US),
            exec=StepTime(begin * US, end * US, 100 * US),
        )  # fmt: skip
        each.expected_begin_ns = begin * US
        each.expected_duration_ns = 100 * US
        return each

    rows = [
        exec_row(1, staged=5, begin=10, end=110),
        exec_row(2, staged=60, begin=110, end=213),  # queued, and 3 us were lost
        exec_row(3, staged=230, begin=231, end=331),  # not there yet when the one before ended
        exec_row(4, staged=300, begin=331, end=431),
    ]
    figures = action_figures(rows)
    assert (figures["exec_pause_us_p50"], figures["exec_pause_us_p99"]) == (3, 3)
    # By the host's clock nothing was late but what had nothing before it.
    assert figures["start_late_us_p99"] == 5
    assert "exec_pause_us_p99" not in action_figures(rows[:1])


def test_nothing_done_is_no_figure_that_cannot_be_written() -> None:
    assert all(math.isfinite(figure) for figure in action_figures([]).values())
