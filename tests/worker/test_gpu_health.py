"""Facts about a GPU, from a driver that says what the test wants; and a worker process per GPU."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

import worker.process
from clockwright.cli.flags import JoinFlags, LogFlags
from clockwright.cli.local_workers import LocalWorkers
from clockwright.cli.worker_settings import WorkerSettings
from clockwright.errors import ConfigError
from clockwright.settings import Flags
from tests.kit.nvml import NotSupportedError, driver, told_by
from worker import gpu_workers
from worker.config import WorkerConfig, compile_threads
from worker.devices.device import GpuHealth
from worker.devices.gpu_health import (
    ClockLevel,
    GpuFacts,
    GpuMonitor,
    NvmlGpu,
    complaints,
    near_cores,
    open_gpu,
    stay_near,
)
from worker.process import check_host_memory


def facts_of(**answers: Any) -> GpuFacts:  # noqa: ANN401
    return NvmlGpu(driver(**answers), "GPU-1").look()


def test_a_card_in_good_health_has_all_facts_and_no_complaint() -> None:
    facts = facts_of()
    assert None not in asdict(facts).values()
    assert (facts.name, facts.bus_id) == ("NVIDIA A GPU", "0000:3b:00.0")
    assert complaints(facts) == []


def test_what_a_card_does_not_say_is_unknown_and_no_fault() -> None:
    refused = NotSupportedError("not supported")
    facts = facts_of(
        nvmlDeviceGetTotalEccErrors=refused,
        nvmlDeviceGetCurrentClocksThrottleReasons=None,  # the module has no such function
        nvmlDeviceGetCurrPcieLinkWidth=refused,
    )
    assert facts.uncorrected_errors is None
    assert complaints(facts) == []


def test_throttling_memory_errors_and_a_narrow_link_are_complaints() -> None:
    facts = facts_of(
        nvmlDeviceGetCurrentClocksThrottleReasons=0x4 | 0x40,
        nvmlDeviceGetTotalEccErrors=3,
        nvmlDeviceGetCurrPcieLinkWidth=8,
    )
    assert complaints(facts) == [
        "its clock is held down: power cap",
        "its clock is held down: too hot (hardware)",
        "3 memory errors could not be corrected: replace the card",
        "its PCIe link has 8 of 16 lanes",
    ]


def test_a_card_that_the_driver_cannot_reach_any_more_is_a_complaint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Lost(NotSupportedError):
        value = 15

    questions = [name for name in vars(driver()) if re.match("nvmlDeviceGet(?!Handle)", name)]
    facts = facts_of(**dict.fromkeys(questions, Lost("GPU is lost")))
    words = "the driver cannot reach it any more: restart the host"
    assert complaints(facts) == [words]
    monitor = GpuMonitor(Scripted(facts_of(), facts, facts_of()))
    assert [monitor.look().complaints for _ in range(2)] == [(words,), ()]
    assert caplog.records[0].getMessage() == f"GPU 0000:3b:00.0 (NVIDIA A GPU): {words}"


class Scripted(NvmlGpu):
    """A card that looks like this, then that; the last for ever."""

    def __init__(self, *looks: GpuFacts) -> None:
        self.looks = list(looks)

    def look(self) -> GpuFacts:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


def test_an_operator_hears_of_each_complaint_once_and_of_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sick, well = facts_of(nvmlDeviceGetCurrentClocksThrottleReasons=0x20), facts_of()
    # Once by chance is not yet a complaint, nor the end of one.
    monitor = GpuMonitor(Scripted(well, sick, well, sick, sick, well, sick, well, well))
    with caplog.at_level(logging.WARNING, logger="worker.devices.gpu_health"):
        told = [monitor.look().complaints for _ in range(8)]
    words = "its clock is held down: too hot (software)"
    assert told == [(), (), (), (words,), (words,), (words,), (words,), ()]
    assert [record.getMessage() for record in caplog.records] == [
        f"GPU 0000:3b:00.0 (NVIDIA A GPU): {words}",
        f"GPU 0000:3b:00.0 (NVIDIA A GPU): no more: {words}",
    ]


def test_memory_errors_are_complained_about_at_once_however_fast_they_grow() -> None:
    looks = [facts_of(nvmlDeviceGetTotalEccErrors=count) for count in range(4)]
    monitor = GpuMonitor(Scripted(*looks))
    words = "memory errors could not be corrected: replace the card"
    assert [monitor.look().complaints for _ in range(3)] == [(f"{n} {words}",) for n in (1, 2, 3)]


def test_a_watch_tells_every_look() -> None:
    slow = facts_of(nvmlDeviceGetCurrentClocksThrottleReasons=0x4, nvmlDeviceGetClockInfo=960)
    well, held = (
        GpuHealth(1980, 1980, ()),
        GpuHealth(966, 1980, ("its clock is held down: power cap",)),
    )
    looks = [facts_of(), facts_of(), facts_of(), slow, slow, slow]
    assert told_by(GpuMonitor(Scripted(*looks), interval_s=0.0), 4) == [well, well, held, held]


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ([1980, 966, 1980, 966, 1980, 1980], [1980, 1980, 1980, 1980]),  # never for long
        ([1980, 966, 966, 1980, 966, 966], [1980, 966, 966, 966]),
        ([1980, 1881, 1787, 1698, 1613, 1613], [1980, 1787, 1613, 1613]),  # sinking
    ],
)
def test_a_clock_that_moves_is_told_at_the_second_look(seen: list[int], told: list[int]) -> None:
    looks = [
        facts_of(nvmlDeviceGetCurrentClocksThrottleReasons=0, nvmlDeviceGetClockInfo=mhz)
        for mhz in seen
    ]
    monitor = GpuMonitor(Scripted(looks[0], *looks), interval_s=0.0)
    assert [health.clock_mhz for health in told_by(monitor, 4)] == told


def test_looks_that_fail_do_not_end_a_watch_and_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Scripted):
        def look(self) -> GpuFacts:
            facts = super().look()
            if facts.bus_id is None:
                raise OSError("the driver makes no sense")
            return facts

    well, lost = facts_of(), facts_of(nvmlDeviceGetPciInfo=NotSupportedError("hidden"))
    monitor = GpuMonitor(Failing(well, lost, well, lost, lost, well), interval_s=0.0)
    assert told_by(monitor, 2) == [GpuHealth(1980, 1980, ())] * 2
    (record,) = caplog.records
    assert record.getMessage() == "GPU 0000:3b:00.0: cannot be looked at; trying again"
    assert record.exc_info is not None


def test_clocks_that_wander_a_little_are_of_one_level() -> None:
    level = ClockLevel(1980)
    assert {level.see(mhz) for mhz in (1980, 1965, 1935, 1980, 1950)} == {1980}
    # At the border of two levels it stays where it was, whichever side it came from.
    assert [level.see(mhz) for mhz in (1926, 1900, 1926, 1935)] == [1980, 1881, 1881, 1881]
    assert [level.see(mhz) for mhz in (1980, 960, 975, 1980)] == [1980, 966, 966, 1980]
    assert level.see(9999) == 1980


def test_levels_are_the_same_on_every_card_of_a_kind_whatever_it_went_through() -> None:
    calm, wild = ClockLevel(1410), ClockLevel(1410)
    for mhz in (210, 1300, 765, 1410):
        wild.see(mhz)
    assert calm.see(1095) == wild.see(1095)


def test_an_idle_cards_clock_is_not_taken_for_the_one_that_kernels_run_at() -> None:
    resting = facts_of(nvmlDeviceGetClockInfo=345)  # with nothing to do
    busy = facts_of(nvmlDeviceGetClockInfo=345, nvmlDeviceGetCurrentClocksThrottleReasons=0x80)
    monitor = GpuMonitor(Scripted(resting, resting, busy, resting))
    assert [monitor.look().clock_mhz for _ in range(3)] == [1980, 346, 346]


def test_a_card_that_does_not_tell_its_clock_has_none() -> None:
    refused = NotSupportedError("not supported")
    monitor = GpuMonitor(Scripted(facts_of(nvmlDeviceGetMaxClockInfo=refused)))
    assert monitor.look() == GpuHealth(0, 0, ())


def test_without_nvml_there_are_no_facts_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpu("GPU-1") is None
    broken = driver()
    broken.nvmlInit = lambda: (_ for _ in ()).throw(NotSupportedError("no driver"))
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert open_gpu("GPU-1") is None
    assert "install nvidia-ml-py" in caplog.records[0].getMessage()
    assert "no driver" in caplog.records[1].getMessage()


def test_near_cores_are_read_as_the_system_lists_them(tmp_path: Path) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-3,8,10-11\n")
    assert near_cores("0000:3B:00.0", devices=tmp_path) == {0, 1, 2, 3, 8, 10, 11}
    assert near_cores("0000:00:00.0", devices=tmp_path) == set()


def test_a_card_whose_place_is_unknown_moves_nobody() -> None:
    before = os.sched_getaffinity(0)
    stay_near(facts_of(nvmlDeviceGetPciInfo=NotSupportedError("hidden")))
    assert os.sched_getaffinity(0) == before


def test_a_worker_stays_on_the_cores_near_its_card(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    near = min(allowed)
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    # Also cores that this process may not use, or that are not there.
    (folder / "local_cpulist").write_text(f"{near},{max(allowed) + 1}-{max(allowed) + 9}\n")
    seen: list[set[int]] = []

    def worker() -> None:
        stay_near(facts_of(), devices=tmp_path)
        seen.append(os.sched_getaffinity(0))
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()

    # Affinity is a thread's own: the test's stays as it is.
    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    assert seen == [{near}, {near}]
    assert os.sched_getaffinity(0) == allowed


def test_where_all_near_cores_are_others_a_worker_stays_where_it_is(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text(f"{max(allowed) + 1}\n")
    stay_near(facts_of(), devices=tmp_path)
    assert os.sched_getaffinity(0) == allowed


# --- one process per GPU ----------------------------------------------------------------------------


class Recorded(LocalWorkers):
    """Starts programs of the test's in place of workers."""

    programs: tuple[str, ...] = ()
    started: tuple[dict[str, Flags[WorkerSettings]], str] | None = None

    @override
    def _command(self, controller: str, worker_id: str) -> list[str]:
        type(self).started = dict(self._planned), controller
        program = dict(zip(self._planned, self.programs, strict=True))[worker_id]
        return [sys.executable, "-c", program]


@pytest.mark.parametrize(
    ("programs", "code"), [(("pass", "pass"), 0), (("import sys; sys.exit(1)", "pass"), 1)]
)
def test_each_gpu_gets_a_process_and_one_that_fails_leaves_the_others(
    programs: tuple[str, ...],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu_workers, "LocalWorkers", Recorded)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(Recorded, "programs", programs)
    flags = Flags(WorkerConfig, pages=3)
    assert gpu_workers.run_on_each_gpu(2, "host", "there:1", flags, JoinFlags(), LogFlags()) == code
    assert Recorded.started is not None
    started, controller = Recorded.started
    file = started["host-gpu0"]["host_file"]
    assert file is not None
    assert os.stat(file).st_size == 4 << 30
    threads = compile_threads(2)
    assert controller == "there:1"
    assert {name: sorted(own.spell()) for name, own in started.items()} == {
        f"host-gpu{n}": [
            f"--device=cuda:{n}",
            f"--host-file={file}",
            "--pages=3",
            "--payload-port=0",
            f"--threads={threads}",
        ]
        for n in range(2)
    }
    told = capfd.readouterr().err
    assert ("ended with 1" in told) is bool(code)
    assert told.count("worker host-gpu") == 2


def test_a_gpus_worker_that_fails_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pid_file = str(tmp_path / "pid")
    fails = f"""
import os, sys
with open({pid_file + ".new"!r}, "w") as file:
    file.write(str(os.getpid()))
os.rename({pid_file + ".new"!r}, {pid_file!r})
sys.exit(1)
"""
    # Stays a little longer than the other one, so that whoever wants to end it can.
    goes_on = f"""
import os, time
while not os.path.exists({pid_file!r}):
    time.sleep(0.02)
pid = open({pid_file!r}).read()
while os.path.exists(f"/proc/{{pid}}"):
    time.sleep(0.02)
time.sleep(0.5)
"""
    monkeypatch.setattr(gpu_workers, "LocalWorkers", Recorded)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(Recorded, "programs", (fails, goes_on))
    assert (
        gpu_workers.run_on_each_gpu(
            2, "host", "there:1", Flags(WorkerConfig), JoinFlags(), LogFlags()
        )
        == 1
    )
    told = {line.split()[1]: line for line in capfd.readouterr().err.splitlines()}
    assert told["host-gpu0"].endswith("ended with 1")
    assert told["host-gpu1"].endswith("has left")


def test_gpus_that_together_want_more_than_the_host_has_do_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker.process, "granted_bytes", lambda: 4 << 30)
    config = WorkerConfig(controller="there:1", device="cuda", host_bytes=3 << 30)
    check_host_memory(config, 4)
    words = r"of 5 GPUs on the host need 4352 MiB, 4096 MiB are available; start with less"
    with pytest.raises(ConfigError, match=words):
        check_host_memory(config, 5)
