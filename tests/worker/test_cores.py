"""A worker on the processor computes on the cores that it was given, and answers as ever."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clockwright import Client
from clockwright.client.operator import Operator
from clockwright.cores import (
    divide_cores,
    granted_cores,
    parse_cores,
    spell_cores,
    take_short_slices,
    usable_cores,
)
from clockwright.errors import ConfigError
from clockwright.units import NS_PER_S, ActionId, ModelId
from clockwright.wire.actions import ActionError, Infer, LoadWeights
from experiments.live.local_server import LocalServer
from tests.kit.processes import until, write_models
from tests.kit.worker_models import (
    IO_POOL_BYTES,
    LIMITS,
    NARROW,
    network,
    nothing_to_fetch,
    offer,
    prepared,
    silent,
)
from worker.config import WorkerConfig
from worker.devices.cpu import CpuDevice
from worker.lane_threads import LaneThreads, Outcome
from worker.models.file_store import FileStore
from worker.models.model_files import WEIGHTS_FILE
from worker.process import check_cores
from worker.timing import tune_process, tune_thread


@pytest.mark.parametrize("text", ["3", "0-1", "2-9,12", "0,2,4-6"])
def test_cores_are_written_as_they_are_read(text: str) -> None:
    assert spell_cores(parse_cores(text)) == text


@pytest.mark.parametrize("text", ["", "a", "3-", "5-2", "-1", "1,,2"])
def test_words_that_name_no_cores_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected numbers and ranges"):
        parse_cores(text)


def _group(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_a_quota_of_one_core_leaves_one(tmp_path: Path) -> None:
    version_2 = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}
    version_1 = {
        "proc/self/cgroup": "4:cpu,cpuacct:/x\n",
        "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
    }
    assert granted_cores(_group(tmp_path / "2", version_2)) == 1
    assert granted_cores(_group(tmp_path / "1", version_1)) == 1


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}
    assert granted_cores(_group(tmp_path, files)) == len(usable_cores())
    assert set(usable_cores()) == os.sched_getaffinity(0)


def test_cores_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="cores: found 900, which are not there"):
        check_cores((900,))


def _in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("allowed", [True, False])
def test_a_thread_that_computes_comes_before_ordinary_ones_where_that_is_allowed(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def set_priority(*of: int) -> None:
        asked.append(of)
        if not allowed:
            raise PermissionError(of)

    monkeypatch.setattr(os, "getpriority", lambda *_: 4)
    monkeypatch.setattr(os, "setpriority", set_priority)
    _in_a_thread(tune_thread)
    assert asked == [(os.PRIO_PROCESS, 0, -6)]


@pytest.mark.parametrize("alone", [False, True])
def test_threads_that_wait_are_real_time_threads_where_devices_are_not_more_than_cores(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("worker.timing.granted_cores", lambda: 2)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *of: asked.append(of[:2]))
    # What is set here is as it was at the end.
    monkeypatch.setattr("worker.timing._is_crowded", False)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    for num_devices in (2, 3):
        tune_process(num_devices=num_devices)
        _in_a_thread(lambda: tune_thread(waits=not alone, alone=alone))
    assert asked == [(0, os.SCHED_FIFO)] * (2 if alone else 1)


def test_a_thread_that_waits_takes_short_slices_where_real_time_priority_is_forbidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbid(*of: object) -> None:
        raise PermissionError(of)

    def take() -> bool:
        found.append(take_short_slices())
        return found[-1]

    found: list[bool] = []
    monkeypatch.setattr(os, "sched_setscheduler", forbid)
    monkeypatch.setattr("worker.timing.take_short_slices", take)
    _in_a_thread(lambda: tune_thread(waits=True))
    # Linux 6.12 brought them.
    known = tuple(map(int, platform.release().split(".")[:2])) >= (6, 12)
    assert found == [known and platform.machine() in ("x86_64", "aarch64")]


def test_a_worker_tries_up_to_a_thread_for_each_of_its_cores() -> None:
    def counts(cores: tuple[int, ...], threads: int | None) -> tuple[int, ...]:
        return WorkerConfig(controller="h:1", cores=cores, threads=threads).thread_counts

    assert [counts((), None), counts((2, 3), None)] == [(1,), (1, 2)]
    assert [counts((2, 3), 5), counts(tuple(range(8)), None)] == [(1, 2, 4, 5), (1, 2, 4, 8)]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the tests that serve the same network: compiling takes most of their time."""
    return tmp_path_factory.mktemp("cache")


def _threads_on(cores: set[int]) -> int:
    """The threads of this process that may run on exactly these cores."""
    tasks = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    found = 0
    for task in tasks:
        try:
            found += os.sched_getaffinity(task) == cores
        except OSError:  # it has just ended
            continue
    return found


def _device(cache_dir: Path, threads: int, cores: tuple[int, ...] = ()) -> CpuDevice:
    return CpuDevice(
        limits=LIMITS,
        io_pool_bytes=IO_POOL_BYTES,
        files=FileStore(cache_dir),
        cache_dir=cache_dir,
        compile_limit_s=600,
        thread_counts=(threads,),
        cores=cores,
    )


def _answers(cache_dir: Path, threads: int, cores: tuple[int, ...], rounds: int) -> set[bytes]:
    """What the network answers to a batch of two through real lanes, as often as asked."""
    files = FileStore(cache_dir)
    device = _device(cache_dir, threads, cores)
    outcomes: list[Outcome] = []
    lanes = LaneThreads(device, outcomes.append)
    lanes.start()

    async def serve() -> None:
        try:
            offered = offer(files, "m", network(0).SerializeToString())
            lanes.add_model(await device.prepare(offered, nothing_to_fetch, silent))
            # EXEC's, the one that opens sessions, and onnxruntime's.
            assert not cores or _threads_on(set(cores)) >= 1 + 1 + (threads - 1)
            x = np.random.default_rng(1).random((2, NARROW), np.float32).tobytes()
            latest_ns = time.monotonic_ns() + 600 * NS_PER_S
            lanes.submit(
                LoadWeights(
                    action_id=ActionId(0), model_id=ModelId("m"), latest_ns=latest_ns,
                    earliest_ns=0, expected_duration_ns=NS_PER_S,
                )
            )  # fmt: skip
            for number in range(rounds):
                lanes.submit(
                    Infer(
                        action_id=ActionId(1 + number), model_id=ModelId("m"), latest_ns=latest_ns,
                        earliest_ns=0, expected_duration_ns=NS_PER_S, batch_size=2, rows=(2,),
                    ),
                    [x],
                )  # fmt: skip
            await asyncio.to_thread(until, lambda: len(outcomes) == 1 + rounds, what="answers")
        finally:
            await asyncio.to_thread(lanes.stop)
            await device.close()

    asyncio.run(serve())
    assert all(result.error is ActionError.NONE for result, _ in outcomes), outcomes
    return {bytes(outputs[0]) for _, outputs in outcomes if outputs}


def test_threads_answer_the_same_each_time_and_nearly_what_one_answers(cache_dir: Path) -> None:
    last = max(os.sched_getaffinity(0))
    alone = _answers(cache_dir, 1, (), 3)
    several = _answers(cache_dir, 3, (last,), 10)
    assert len(alone) == len(several) == 1
    np.testing.assert_allclose(
        np.frombuffer(alone.pop(), np.float32),
        np.frombuffer(several.pop(), np.float32),
        rtol=1e-3,
        atol=1e-3,
    )


def test_a_small_machine_computes_on_all_its_cores_and_binds_nobody() -> None:
    division = divide_cores((0, 1), 1)
    assert (division.workers, division.threads, division.aside) == (((),), 2, ())
    assert division.words == "1 worker of up to 2 threads on 2 cores, bound to none"


def test_cores_that_were_named_are_kept_even_if_they_are_all() -> None:
    division = divide_cores((0, 1), 1, given=(0, 1))
    assert (division.workers, division.threads, division.aside) == (((0, 1),), 2, ())
    assert division.words == "1 worker of up to 2 threads on cores 0-1, which the controller shares"


def test_a_large_machine_spares_its_first_core_for_the_controller() -> None:
    division = divide_cores(tuple(range(16)), 1)
    assert (division.workers, division.threads) == ((tuple(range(1, 16)),), 15)
    assert division.aside == (0,)
    assert division.words.startswith(
        "1 worker of up to 15 threads on cores 1-15, the controller on 0"
    )


def test_workers_and_threads_that_were_named_are_kept() -> None:
    division = divide_cores((0, 1, 2, 3, 8, 9), 2, 2)
    assert (division.workers, division.aside) == (((2, 3), (8, 9)), (0, 1))


def test_more_threads_than_cores_are_bound_to_none() -> None:
    division = divide_cores((0, 1), 2, 3)
    assert (division.workers, division.threads, division.aside) == (((), ()), 3, ())
    assert division.words == "2 workers of up to 3 threads on 2 cores, bound to none"


def test_a_part_of_a_machine_by_quota_binds_nobody_to_the_cores_that_others_take_too() -> None:
    division = divide_cores((0, 1, 2, 3), 1, granted=2)
    assert (division.workers, division.threads, division.aside) == (((),), 2, ())
    assert division.words == "1 worker of up to 2 threads on 2 cores, bound to none"


def test_two_models_with_the_same_file_have_its_weights_in_memory_once(cache_dir: Path) -> None:
    devices = [_device(cache_dir, threads=1) for _ in range(2)]
    files = FileStore(cache_dir)
    content = network(0).SerializeToString()
    models = [prepared(device, offer(files, "m", content))[0] for device in devices]
    inodes = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(WEIGHTS_FILE):
            inodes.add((line.split()[1], line.split()[4]))
    # Both are mapped, to be read only, from one file.
    assert {access for access, _ in inodes} == {"r--s"}
    assert len({inode for _, inode in inodes}) == 1
    assert not any(model.weights.flags.writeable for model in models)


def test_the_controller_stays_off_cores_that_were_named() -> None:
    division = divide_cores((0, 1, 2, 3), 1, given=(2, 3))
    assert (division.workers, division.aside) == (((2, 3),), (0, 1))


@pytest.mark.skipif(len(usable_cores()) < 2, reason="a single core has none beside it")
def test_up_keeps_its_controller_off_the_cores_of_its_worker(tmp_path: Path) -> None:
    *others, last = usable_cores()
    write_models(tmp_path / "models", mlp="mlp-784-128-10")
    arguments = ["--cores", str(last), "--pages", "2", "--arena-mib", "16"]
    arguments += ["--models", str(tmp_path / "models"), "--cache-dir", str(tmp_path / "cache")]
    with LocalServer(arguments) as server, Client(server.address) as client:
        [words] = [line for line in server.output if line.startswith("1 worker of 1 thread on")]
        assert f"on cores {last}, the controller on {spell_cores(tuple(others))}" in words
        assert os.sched_getaffinity(server.process.pid) == set(others)
        x = np.zeros((1, 784), np.float32)
        assert client.infer("mlp", x, slo_ms=600_000).outputs
        with Operator(server.address) as operator:
            [row] = operator.workers()
        tasks = [int(path.name) for path in Path(f"/proc/{row.pid}/task").iterdir()]
        bound = {
            Path(f"/proc/{row.pid}/task/{task}/comm").read_text().strip()
            for task in tasks
            if os.sched_getaffinity(task) == {last}
        }
        assert len(tasks) > len(bound) >= 1
