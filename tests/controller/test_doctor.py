"""What `clockwright doctor` reads of a host, and what it says of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clockwright.units import NS_PER_MS, NS_PER_US
from controller.process.doctor import HostState, Level, examine, look, steal_between

WELL = HostState(
    system="Linux 6.12",
    python="3.11.7",
    clock_source="tsc",
    clock_step_ns=40,
    sleep_late_ns=80 * NS_PER_US,
    sleep_late_ns_max=NS_PER_MS,
    load_average=3.5,
    num_machine_cores=16,
    steal=0.0,
    num_cores=16,
    num_granted=16,
    has_smt=False,
    governors=("performance",),
    no_real_time="",
    no_real_time_computing="",
    handles_max=1 << 20,
    threads_max=-1,
    locked_bytes_max=-1,
    memory_bytes=64 << 30,
    swap_bytes=0,
    shm_bytes=32 << 30,
    no_memfd="",
    cache_folder="/var/cache",
    cache_bytes=100 << 30,
    backlog_max=4096,
    slow_start_after_idle=False,
    driver="",
    num_cards=0,
    closed_cards=(),
    engines={"onnxruntime": "1.27"},
)

CARD: dict[str, Any] = {
    "driver": "580.1",
    "num_cards": 2,
    "engines": {"onnxruntime-gpu": "1.31", "torch": "2.11", "cuda-bindings": "13.0"},
}


def sick(host: HostState) -> dict[str, Level]:
    return {row.name: row.level for row in examine(host) if row.level is not Level.OK}


def test_a_host_that_is_well_costs_nothing() -> None:
    assert sick(WELL) == {}
    assert sick(replace(WELL, **CARD)) == {}
    assert sick(replace(WELL, redis="redis://a:6379")) == {}


@pytest.mark.parametrize(
    ("change", "name", "level"),
    [
        ({"system": "Darwin 24"}, "system", Level.FAILS),
        ({"clock_source": "hpet"}, "clock", Level.COSTS),
        ({"clock_step_ns": NS_PER_MS}, "clock", Level.COSTS),
        ({"sleep_late_ns_max": 20 * NS_PER_MS}, "timers", Level.COSTS),
        ({"load_average": 5.1, "num_machine_cores": 2}, "load", Level.COSTS),
        ({"steal": 0.1}, "steal", Level.COSTS),
        ({"no_real_time": "there is no right to it"}, "real-time priority", Level.COSTS),
        ({"no_real_time_computing": "it would pause them"}, "real-time priority", Level.COSTS),
        ({"num_granted": 1}, "cores", Level.COSTS),
        ({"num_granted": 4}, "cores", Level.COSTS),
        ({"has_smt": True}, "hyper-threads", Level.COSTS),
        ({"governors": ("performance", "powersave")}, "governor", Level.COSTS),
        ({"handles_max": 1024}, "file handles", Level.FAILS),
        ({"threads_max": 100}, "processes and threads", Level.FAILS),
        ({"memory_bytes": 1 << 30}, "memory", Level.COSTS),
        ({"swap_bytes": 1 << 30}, "swap", Level.COSTS),
        ({"no_memfd": "forbidden"}, "memfd", Level.COSTS),
        ({"shm_bytes": 64 << 20}, "/dev/shm", Level.COSTS),
        ({"shm_bytes": None}, "/dev/shm", Level.COSTS),
        ({"cache_bytes": 1 << 20}, "compiled models", Level.COSTS),
        ({"cache_bytes": None}, "compiled models", Level.COSTS),
        ({"backlog_max": 128}, "TCP", Level.COSTS),
        ({"slow_start_after_idle": True}, "TCP", Level.COSTS),
        ({"engines": {"torch": "2.11"}}, "engines", Level.FAILS),
        ({"engines": {"onnxruntime": "1", "onnxruntime-gpu": "1"}}, "engines", Level.FAILS),
        ({**CARD, "driver": ""}, "GPU", Level.FAILS),
        ({**CARD, "closed_cards": ("nvidia0",)}, "GPU", Level.FAILS),
        ({**CARD, "engines": {"onnxruntime": "1"}}, "GPU", Level.FAILS),
        ({**CARD, "engines": {**CARD["engines"], "torch": "2.13.0+cpu"}}, "GPU", Level.FAILS),
        ({**CARD, "engines": {**CARD["engines"], "torch": "2.13.0+cu129"}}, "GPU", Level.FAILS),
        ({**CARD, "engines": {**CARD["engines"], "torch": "2.9.1"}}, "GPU", Level.FAILS),
        ({**CARD, "engines": {**CARD["engines"], "cuda-bindings": "12.9"}}, "GPU", Level.FAILS),
        ({**CARD, "engines": {"onnxruntime": "1", "torch": "2.11"}}, "GPU", Level.FAILS),
        ({**CARD, "locked_bytes_max": 8 << 20}, "locked memory", Level.COSTS),
        ({"redis": "redis://a:6379", "no_redis": "timed out"}, "Redis", Level.FAILS),
    ],
)
def test_what_ails_a_host_is_named_with_its_cost_and_its_remedy(
    change: dict[str, Any], name: str, level: Level
) -> None:
    host = replace(WELL, **change)
    assert sick(host) == {name: level}
    (finding,) = (row for row in examine(host) if row.name == name)
    assert finding.costs
    assert finding.remedy


def test_a_system_that_says_nothing_is_not_called_sick_for_it() -> None:
    silent = {
        "clock_source": None,
        "load_average": None,
        "steal": None,
        "has_smt": None,
        "governors": (),
        "swap_bytes": None,
    }
    host = replace(WELL, **silent, backlog_max=None, slow_start_after_idle=None)  # type: ignore[arg-type]
    assert sick(host) == {}


def test_steal_is_a_part_of_the_time_between_two_looks() -> None:
    before = (10, 0, 10, 70, 5, 0, 5, 100)
    assert steal_between(before, (20, 0, 20, 130, 5, 0, 5, 120)) == 0.2
    assert steal_between(before, before) is None
    assert steal_between((), ()) is None
    assert steal_between((1, 2, 3), (2, 3, 4)) is None


def test_the_files_of_the_kernel_are_read(tmp_path: Path) -> None:
    for name, text in {
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n",
        "sys/devices/system/cpu/smt/active": "1\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave\n",
        "proc/loadavg": "5.10 4.20 3.00 7/167 22365\n",
        "proc/stat": "cpu  277 161 703 489 9 0 19 43 0 0\ncpu0 1 2 3\n",
        "proc/meminfo": "MemTotal: 9 kB\nSwapTotal:       2048 kB\n",
        "proc/sys/net/core/somaxconn": "128\n",
        "proc/sys/net/ipv4/tcp_slow_start_after_idle": "1\n",
        "proc/sys/kernel/sched_rt_runtime_us": "950000\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
        "sys/fs/cgroup/memory.max": "1073741824\n",
        "sys/fs/cgroup/pids.max": "77\n",
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    host = look(tmp_path)
    assert (host.clock_source, host.has_smt, host.governors) == ("hpet", True, ("powersave",))
    assert (host.swap_bytes, host.backlog_max, host.slow_start_after_idle) == (2 << 20, 128, True)
    assert (host.load_average, host.steal) == (5.1, None)
    assert (host.driver, host.num_cards, host.num_granted) == ("580.65.06", 1, 1)
    assert (host.memory_bytes, host.threads_max) == (1 << 30, 77)
    assert "950000" in host.no_real_time_computing
    assert host.shm_bytes is None


def test_this_host_is_read_without_a_fault() -> None:
    host = look()
    assert host.clock_step_ns > 0
    assert host.memory_bytes > 0
    assert len(examine(host)) >= 17


def doctor(*arguments: str) -> tuple[int, list[dict[str, str]]]:
    done = subprocess.run(
        [sys.executable, "-m", "clockwright.cli", "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_redis_that_answers_is_well_and_one_that_does_not_ends_with_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                connection.sendall(b"+PONG\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        _, there = doctor("--redis", f"redis://127.0.0.1:{port}/0")
        answering.join()
    code, gone = doctor("--redis", f"redis://127.0.0.1:{port}/0")
    assert there[-1] == gone[-1] | {
        "level": "OK", "found": there[-1]["found"], "costs": "", "remedy": "",
    }  # fmt: skip
    assert (code, gone[-1]["level"]) == (1, "FAILS")
