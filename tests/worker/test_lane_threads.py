"""The worker's lanes with real threads, on the CPU device and on a modelled one."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import worker
from clockwright.errors import ModelError
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from clockwright.wire.actions import ActionError
from clockwright.wire.bulk import Buffer
from tests.kit.processes import until
from tests.kit.queue_device import QueueDevice
from tests.kit.running_lanes import load_run_and_evict_at_random, running
from tests.kit.scripted_controller import infer as infer_of
from tests.kit.scripted_controller import load as load_of
from tests.kit.worker_models import (
    LIMITS,
    NARROW,
    ThreadedDevice,
    a_modelled,
    compiled_models,
    cpu_device,
    echo,
    modelled_device,
    network,
    offer,
    prepared,
    silent,
    stored,
    unpaged,
)
from worker.core.lanes import Lane, Step
from worker.devices.device import Device
from worker.devices.modelled import ModelledDevice
from worker.lane_threads import LONG_INLINE_BYTES, SHORT_NS
from worker.models.file_store import FileStore
from worker.models.model_files import Limits
from worker.models.served_model import Offer, OfferedFile, ServedModel


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Four instances of one network, compiled once: a cache folder and the files' contents."""
    cache_dir = tmp_path_factory.mktemp("cache")
    contents = {f"m{seed}": network(seed).SerializeToString() for seed in range(4)}
    device = cpu_device(cache_dir)
    models = prepared(device, *(offer(FileStore(cache_dir), *each) for each in contents.items()))
    assert not any(model.from_cache for model in models)
    assert len({model.architecture_id for model in models}) == 1
    assert [model.num_pages for model in models] == [2] * 4
    return cache_dir, contents


@pytest.mark.seeds(2)
def test_half_the_pages_serve_every_instance_bit_for_bit_after_any_loads_and_unloads(
    seed: int, instances: tuple[Path, dict[str, bytes]]
) -> None:
    cache_dir, contents = instances
    rng = random.Random(seed)
    device = cpu_device(cache_dir)
    models = prepared(device, *(offer(FileStore(cache_dir), *each) for each in contents.items()))
    assert all(model.from_cache for model in models)
    assert sum(model.num_pages for model in models) == 2 * LIMITS.num_pages

    inputs = np.random.default_rng(seed).random((2, NARROW), dtype=np.float32)
    expected = {}
    for model in models:
        (folder, description) = compiled_models(cache_dir)[
            hashlib.sha256(model.weights.data).hexdigest()
        ]
        expected[model.model_id] = [unpaged(folder, description, inputs[:n]) for n in (1, 2)]
    assert len({outputs[0] for outputs in expected.values()}) == 4

    with running(device) as harness:
        for model in models:
            harness.lanes.add_model(model)
        resident: list[str] = []
        num_loads = 0
        checks = []
        for _ in range(60):
            name = rng.choice(models).model_id
            if name not in resident:
                if len(resident) == 2:
                    harness.evict(resident.pop(rng.randrange(2)))
                harness.load(name)
                resident.append(name)
                num_loads += 1
            if rng.random() < 0.5:
                infer = harness.infer(name, inputs[:1].tobytes())
                checks.append((infer, [expected[name][0]]))
            else:
                rows = [inputs[:1].tobytes(), inputs[1:].tobytes()]
                infer = harness.infer(name, *rows, rows=(1, 1), batch_size=2)
                whole = expected[name][1]
                checks.append((infer, [whole[:12], whole[12:]]))
            # Evicting is the controller's decision, and it never evicts what it still needs.
            harness.ok(infer)
        assert num_loads > 10
        for infer, outputs in checks:
            assert harness.ok(infer) == outputs


@pytest.mark.seeds(2)
def test_pages_evicted_under_a_running_exec_are_not_overwritten(
    seed: int, instances: tuple[Path, dict[str, bytes]]
) -> None:
    cache_dir, contents = instances
    rng = random.Random(seed)
    device = cpu_device(cache_dir)
    models = prepared(device, *(offer(FileStore(cache_dir), *each) for each in contents.items()))
    x = np.random.default_rng(seed).random((1, NARROW), dtype=np.float32)
    by_weights = compiled_models(cache_dir)
    expected = {
        model.model_id: unpaged(*by_weights[hashlib.sha256(model.weights.data).hexdigest()], x)
        for model in models
    }
    load_run_and_evict_at_random(device, models, rng, x.tobytes(), expected, most_s=0.005)


def test_a_batch_that_is_not_full_is_filled_with_zeros(
    instances: tuple[Path, dict[str, bytes]],
) -> None:
    cache_dir, contents = instances
    device = cpu_device(cache_dir)
    (model,) = prepared(device, offer(FileStore(cache_dir), "m0", contents["m0"]))
    x = np.random.default_rng(0).random((1, NARROW), dtype=np.float32)
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.load("m0")
        noise = np.full((2, NARROW), 7, np.float32).tobytes()
        harness.ok(harness.infer("m0", noise, rows=(2,), batch_size=2))
        (alone,) = harness.ok(harness.infer("m0", x.tobytes(), rows=(1,), batch_size=2))
        padded = np.concatenate([x, np.zeros_like(x)]).tobytes()
        (both,) = harness.ok(harness.infer("m0", padded, rows=(2,), batch_size=2))
    assert alone == both[:12]


def test_a_payload_that_does_not_fit_is_bad_input_and_says_why(
    instances: tuple[Path, dict[str, bytes]],
) -> None:
    cache_dir, contents = instances
    device = cpu_device(cache_dir)
    (model,) = prepared(device, offer(FileStore(cache_dir), "m0", contents["m0"]))
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("m0"))
        short = harness.result(harness.infer("m0", b"abc"))
        missing = harness.result(harness.infer("m0"))
    assert (short.error, missing.error) == (ActionError.BAD_INPUT, ActionError.BAD_INPUT)
    assert "request 0: input 'x' has 3 bytes, expected 4400 for 1 rows" in short.message
    assert "payload has 0 tensors, expected 1" in missing.message


def test_kernels_go_when_the_last_model_of_their_architecture_goes(
    instances: tuple[Path, dict[str, bytes]],
) -> None:
    cache_dir, contents = instances
    device = cpu_device(cache_dir)
    models = prepared(
        device, *(offer(FileStore(cache_dir), name, contents[name]) for name in ("m0", "m1"))
    )
    assert models[0].kernels == models[1].kernels
    assert len(device._kernels) == 2
    # What a graph keeps of its weights is in memory once, not once per batch size.
    assert len({id(kernel.ort._session) for kernel in models[0].kernels.values()}) == 1
    models.pop()
    assert len(device._kernels) == 2
    models.pop()
    assert len(device._kernels) == len(device._sessions) == 0


# --- modelled -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make_device", [cpu_device, lambda folder: modelled_device(folder, "1ms")])
def test_external_data_that_came_with_the_model_is_found(
    make_device: Callable[[Path], Device[Any]], tmp_path: Path
) -> None:
    model = onnx.load_from_string(network(0).SerializeToString())
    files = FileStore(tmp_path)
    came = []
    for tensor in model.graph.initializer:
        name = f"weights/{tensor.name}"
        came.append(stored(files, tensor.raw_data, name))
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=name)
    came.append(stored(files, model.SerializeToString()))
    (served,) = prepared(make_device(tmp_path), Offer(ModelId("m"), tuple(came), (1, 2), {}, ""))
    assert [spec.name for spec in served.outputs] == ["y"]


def modelled(cache_dir: Path, profile: str, values: int = 4) -> tuple[ModelledDevice, ServedModel]:
    device = modelled_device(cache_dir, profile)
    (model,) = prepared(device, offer(FileStore(cache_dir), "echo", echo(values)))
    return device, model


def test_a_profile_that_takes_no_time_reports_the_least_that_a_controller_accepts(
    tmp_path: Path,
) -> None:
    _, model = modelled(tmp_path, "0us")
    assert (model.load_ns, model.exec_ns) == (1, {1: 1})


@pytest.mark.parametrize("values", [4, 100_000])
def test_a_modelled_device_takes_as_long_as_its_profile_says_and_answers_zeros(
    values: int, tmp_path: Path
) -> None:
    device, model = modelled(tmp_path, "20ms", values)
    assert (model.load_ns, dict(model.exec_ns)) == (NS_PER_MS, {1: 20 * NS_PER_MS})
    with running(device) as harness:
        harness.lanes.add_model(model)
        load = harness.result(harness.load("echo"))
        infers = [harness.infer("echo", bytes(4 * values)) for _ in range(3)]
        outcomes = [harness.answer(infer) for infer in infers]
    assert load.load is not None
    assert load.load.duration_ns >= NS_PER_MS
    for result, outputs in outcomes:
        assert result.error is ActionError.NONE
        assert outputs == [bytes(4 * values)]
        assert result.exec is not None
        assert result.exec.duration_ns >= 20 * NS_PER_MS
    # One EXEC at a time.
    times = [result.exec for result, _ in outcomes]
    for before, after in itertools.pairwise(times):
        assert before is not None
        assert after is not None
        assert before.end_ns <= after.begin_ns


class HeldDevice(ThreadedDevice):
    """An EXEC ends when the test says so."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **settings)
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def run_exec(self, step: Step[ServedModel]) -> None:
        self.begun.set()
        assert self.may_end.wait(60)


def test_actions_wait_for_their_window_and_are_refused_after_it(tmp_path: Path) -> None:
    device = a_modelled(HeldDevice, tmp_path)
    (model,) = prepared(device, offer(FileStore(tmp_path), "echo", echo(4)))
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("echo"))
        device.may_end.set()
        opens_ns = time.monotonic_ns() + 30 * NS_PER_MS
        waited = harness.result(harness.infer("echo", bytes(16), opens_in_ns=30 * NS_PER_MS))
        device.may_end.clear()
        device.begun.clear()
        blocking = harness.infer("echo", bytes(16))
        assert device.begun.wait(60)
        behind = harness.infer("echo", bytes(16), width_ns=NS_PER_MS)
        closed_ns = time.monotonic_ns() + NS_PER_MS
        until(lambda: time.monotonic_ns() > closed_ns, what="its window has closed")
        device.may_end.set()
        late = harness.result(behind)
        harness.ok(blocking)
        past = harness.result(
            harness.infer("echo", bytes(16), opens_in_ns=-2 * NS_PER_S, width_ns=1)
        )
    assert waited.exec is not None
    assert waited.exec.begin_ns >= opens_ns
    assert [late.error, past.error] == [ActionError.TOO_LATE, ActionError.TOO_LATE]


def test_an_infer_sent_right_behind_its_load_runs_when_the_load_ends(tmp_path: Path) -> None:
    device, model = modelled(tmp_path, "1ms")
    with running(device) as harness:
        harness.lanes.add_model(model)
        load, infer = harness.load("echo"), harness.infer("echo", bytes(16))
        harness.ok(infer)
        loaded, ran = harness.result(load).load, harness.result(infer).exec
    assert loaded is not None
    assert ran is not None
    assert loaded.end_ns <= ran.begin_ns


def test_noise_is_the_same_in_every_run_and_of_each_lane_by_itself(tmp_path: Path) -> None:
    (tmp_path / "noisy.json").write_text(
        '{"name": "noisy", "seed": 5, "noise": {"exec_sigma": 0.1, "load_sigma": 0.1}, "rows": '
        '[{"name": "*", "weights_bytes": 1, "load_ns": 1000, "exec_ns": {"1": 2000000}}]}'
    )
    draws = []
    for loads_between in (0, 3):
        device, model = modelled(tmp_path, str(tmp_path / "noisy.json"))
        run = Step(Lane.EXEC, infer_of(1, "echo"), model, (), 0)
        load = Step(Lane.LOAD, load_of(2, "echo"), model, (), 0)
        durations = []
        for _ in range(100):
            durations.append(device.duration_ns(run))
            for _ in range(loads_between):
                device.duration_ns(load)
        draws.append(durations)
    assert draws[0] == draws[1]
    assert len(set(draws[0])) == 100
    assert 1_900_000 < sorted(draws[0])[50] < 2_100_000


def test_a_modelled_device_refuses_what_its_profile_does_not_know(tmp_path: Path) -> None:
    device = modelled_device(tmp_path, "table1")
    with pytest.raises(ModelError, match="no row for model 'echo'"):
        prepared(device, offer(FileStore(tmp_path), "echo", echo(4)))
    device = modelled_device(tmp_path, "10ms")
    with pytest.raises(ModelError, match=r"no batch size of \[2, 4\] for '\*', but \[1\]"):
        prepared(device, offer(FileStore(tmp_path), "echo", echo(4), (2, 4)))


def test_devices_of_one_process_fetch_and_read_a_model_once(tmp_path: Path) -> None:
    content = echo(4)
    file = OfferedFile("model.onnx", len(content), hashlib.sha256(content).hexdigest())
    fetched: list[OfferedFile] = []

    async def fetch(files: Sequence[OfferedFile]) -> None:
        fetched.extend(files)
        for _ in files:
            stored(FileStore(tmp_path), content)

    async def prepare() -> list[ServedModel]:
        device = modelled_device(tmp_path, "1ms")
        twin = device.twin()
        try:
            return await asyncio.gather(
                *(
                    each.prepare(Offer(ModelId(name), (file,), (1,), {}, "row"), fetch, silent)
                    for name in ("m-0", "m-1")
                    for each in (device, twin)
                )
            )
        finally:
            await device.close()

    models = asyncio.run(prepare())
    assert fetched == [file]
    assert [model.model_id for model in models] == ["m-0", "m-0", "m-1", "m-1"]
    assert [model.from_cache for model in models] == [False, True, True, True]
    assert len({id(model) for model in models}) == 4
    assert len({model.architecture_id for model in models}) == 1


def test_abandoned_work_is_not_reported_and_does_not_stay(tmp_path: Path) -> None:
    device, model = modelled(tmp_path, "20ms")
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("echo"))
        for _ in range(3):
            harness.infer("echo", bytes(16))
        harness.lanes.abandon()
        assert harness.lanes.num_pending == 0
        assert harness.result(harness.infer("echo", bytes(16))).error is ActionError.UNKNOWN_MODEL
        harness.lanes.add_model(model)
        harness.ok(harness.load("echo"))
        harness.ok(harness.infer("echo", bytes(16)))
        assert harness.outcomes.empty()


class BrokenDevice(ThreadedDevice):
    """A real device that fails when told to."""

    broken = False

    def run_exec(self, step: Step[ServedModel]) -> None:
        if self.broken:
            raise RuntimeError("smoke")
        super().run_exec(step)


# A short EXEC runs where it is submitted.
@pytest.mark.parametrize("expected_ns", [NS_PER_MS, 1])
def test_a_device_that_fails_fails_the_action_only(expected_ns: int, tmp_path: Path) -> None:
    device = a_modelled(BrokenDevice, tmp_path)
    (model,) = prepared(device, offer(FileStore(tmp_path), "echo", echo(4)))
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("echo"))
        device.broken = True
        result = harness.result(harness.infer("echo", bytes(16), expected_ns=expected_ns))
        assert (result.error, result.message) == (ActionError.DEVICE, "RuntimeError: smoke")
        device.broken = False
        harness.ok(harness.infer("echo", bytes(16), expected_ns=expected_ns))


# --- short ones -----------------------------------------------------------------------------------


class NotedDevice(ThreadedDevice):
    """Notes which thread runs what."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **settings)
        self.ran: list[tuple[str, str]] = []
        self.held = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def _note(self, step: Step[ServedModel]) -> None:
        me = threading.current_thread()
        self.ran.append((step.lane.value, "here" if me is threading.main_thread() else me.name))

    def run_load(self, step: Step[ServedModel]) -> None:
        self._note(step)
        super().run_load(step)

    def run_exec(self, step: Step[ServedModel]) -> None:
        self._note(step)
        if not self.may_end.is_set():
            self.held.set()
            assert self.may_end.wait(60)

    def run_output(
        self, step: Step[ServedModel], room: memoryview | None = None
    ) -> Sequence[Buffer]:
        self._note(step)
        return super().run_output(step, room)

    def take_ran(self) -> list[tuple[str, str]]:
        ran, self.ran = self.ran, []
        return ran


def test_a_short_infer_on_idle_lanes_runs_where_it_is_submitted(tmp_path: Path) -> None:
    device = a_modelled(NotedDevice, tmp_path)
    (model,) = prepared(device, offer(FileStore(tmp_path), "echo", echo(4)))
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("echo", expected_ns=1))
        assert device.take_ran() == [("load", "load")]
        short = harness.infer("echo", bytes(16), expected_ns=SHORT_NS)
        assert not harness.outcomes.empty()
        assert harness.ok(short) == [bytes(16)]
        assert device.take_ran() == [("exec", "here"), ("output", "here")]
        harness.ok(harness.infer("echo", bytes(16), expected_ns=SHORT_NS + 1))
        assert device.take_ran() == [("exec", "exec"), ("output", "exec")]
        # Nor does one whose window is not open yet.
        harness.ok(harness.infer("echo", bytes(16), expected_ns=1, opens_in_ns=20 * NS_PER_MS))
        assert device.take_ran() == [("exec", "exec"), ("output", "exec")]
        # Nor one behind another.
        device.may_end.clear()
        first = harness.infer("echo", bytes(16))
        assert device.held.wait(60)
        second = harness.infer("echo", bytes(16), expected_ns=1)
        device.may_end.set()
        harness.ok(first)
        harness.ok(second)
        assert {thread for _, thread in device.take_ran()} <= {"exec", "output"}


def test_a_short_infer_on_idle_lanes_costs_no_more_lines_than_it_did(tmp_path: Path) -> None:
    package, num_lines = str(Path(worker.__path__[0])), 0

    def count(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401
        nonlocal num_lines
        name = frame.f_code.co_filename
        if not name.startswith(package) or name.endswith("timing.py"):
            return None
        num_lines += event == "line"
        return count

    device = a_modelled(ModelledDevice, tmp_path)
    (model,) = prepared(device, offer(FileStore(tmp_path), "echo", echo(4)))
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("echo"))
        harness.ok(harness.infer("echo", bytes(16), expected_ns=1))
        before = sys.gettrace()
        sys.settrace(count)
        harness.ok(harness.infer("echo", bytes(16), expected_ns=1))
        sys.settrace(before)
    # Steps that are reported one by one, each under the lock, came to 445.
    assert 0 < num_lines < 230


def test_a_short_infer_behind_its_load_waits_for_it_elsewhere(tmp_path: Path) -> None:
    device = a_modelled(NotedDevice, tmp_path)
    (model,) = prepared(device, offer(FileStore(tmp_path), "echo", echo(4)))
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.load("echo")
        harness.ok(harness.infer("echo", bytes(16), expected_ns=1))
    ran = dict(device.take_ran())
    assert (ran["load"], ran["exec"]) == ("load", "exec")


def test_a_short_infer_that_is_large_leaves_the_submitting_thread_alone(tmp_path: Path) -> None:
    room = Limits(arena_bytes=64 << 20, num_pages=4, io_bytes=3 * LONG_INLINE_BYTES)
    device = a_modelled(NotedDevice, tmp_path, limits=room)
    values = LONG_INLINE_BYTES // 4 + 1
    (model,) = prepared(device, offer(FileStore(tmp_path), "echo", echo(values)))
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("echo"))
        device.take_ran()
        harness.ok(harness.infer("echo", bytes(4 * values), expected_ns=1))
    assert "here" not in dict(device.take_ran()).values()


def test_an_image_of_602_kb_goes_through_where_it_is_submitted(tmp_path: Path) -> None:
    device = a_modelled(
        NotedDevice, tmp_path, limits=Limits(arena_bytes=64 << 20, num_pages=4, io_bytes=2 << 20)
    )
    (model,) = prepared(device, offer(FileStore(tmp_path), "echo", echo(150_528)))
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("echo"))
        device.take_ran()
        harness.ok(harness.infer("echo", bytes(602_112), expected_ns=1))
    assert device.take_ran() == [("exec", "here"), ("output", "here")]


def test_a_device_that_forbids_it_runs_every_exec_on_its_own_thread(tmp_path: Path) -> None:
    class Particular(NotedDevice):
        exec_anywhere = False

    device = a_modelled(Particular, tmp_path)
    (model,) = prepared(device, offer(FileStore(tmp_path), "echo", echo(4)))
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("echo"))
        harness.ok(harness.infer("echo", bytes(16), expected_ns=1))
    assert ("exec", "exec") in device.take_ran()


# --- a device with a queue ------------------------------------------------------------------------


def queue_device(cache_dir: Path) -> tuple[QueueDevice, ServedModel]:
    device = a_modelled(QueueDevice, cache_dir)
    (model,) = prepared(device, offer(FileStore(cache_dir), "echo", echo(4)))
    return device, model


def test_the_next_exec_is_with_the_device_before_the_one_that_runs_has_ended(
    tmp_path: Path,
) -> None:
    device, model = queue_device(tmp_path)
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("echo"))
        infers = [harness.infer("echo", bytes(16)) for _ in range(3)]
        first, second = device.next_launch(), device.next_launch()
        assert [first.step.action.action_id, second.step.action.action_id] == infers[:2]
        # One that runs and one behind it: the third may still be refused or overtaken.
        assert not first.is_done()
        assert device.launched.empty()
        first.ended.set()
        third = device.next_launch()
        assert third.step.action.action_id == infers[2]
        second.ended.set()
        third.ended.set()
        times = [harness.result(infer).exec for infer in infers]
        for infer in infers:
            harness.ok(infer)
    for before, after in itertools.pairwise(times):
        assert before is not None
        assert after is not None
        # It began when the device came to it, not when it was launched; durations are the device's.
        assert after.begin_ns >= before.end_ns
        assert after.duration_ns == 7


def test_what_can_no_longer_run_is_answered_while_an_exec_runs(tmp_path: Path) -> None:
    device, model = queue_device(tmp_path)
    files = FileStore(tmp_path)
    (other,) = prepared(device, offer(files, "other", echo(4)))
    with running(device) as harness:
        for each in (model, other):
            harness.lanes.add_model(each)
            harness.ok(harness.load(each.model_id))
        infer = harness.infer("echo", bytes(16))
        ticket = device.next_launch()
        # Not to be queued behind the one that runs, but known to be in vain as soon as it is evicted.
        in_vain = harness.infer("other", bytes(16), opens_in_ns=600 * NS_PER_S)
        harness.evict("other")
        assert harness.result(in_vain).error is ActionError.NOT_RESIDENT
        assert not ticket.is_done()
        ticket.ended.set()
        harness.ok(infer)


def test_a_launch_that_fails_fails_its_action_and_the_lane_goes_on(tmp_path: Path) -> None:
    device, model = queue_device(tmp_path)
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("echo"))
        device.refuses = {harness.last_id + 2}
        infers = [harness.infer("echo", bytes(16)) for _ in range(3)]
        device.next_launch().ended.set()
        device.next_launch().ended.set()
        results = [harness.result(infer) for infer in infers]
    assert [result.error for result in results] == [
        ActionError.NONE,
        ActionError.DEVICE,
        ActionError.NONE,
    ]
    assert results[1].message == "RuntimeError: no room in the queue"
