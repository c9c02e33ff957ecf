"""The GPU device's code on the processor: paging, order between streams, loss, memory."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
import queue
import random
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from clockwright import Client
from clockwright.errors import ConfigError, ModelError
from clockwright.units import NS_PER_S, PAGE_BYTES, ActionId
from clockwright.wire.actions import ActionError, Infer, LoadWeights
from clockwright.wire.bulk import Buffer
from experiments.live.local_server import LocalServer
from modelzoo.build import build_model
from tests.kit.engine_contest import OnnxruntimeAccelerator, forget_trials, time_says
from tests.kit.nvml import driver, told_by
from tests.kit.processes import PATIENCE_S, until, write_models
from tests.kit.running_lanes import load_run_and_evict_at_random, running
from tests.kit.torch_devices import (
    HOST_BYTES,
    DeferredAccelerator,
    GrowingAccelerator,
    torch_device,
)
from tests.kit.worker_models import (
    LIMITS,
    NARROW,
    compiled_models,
    network,
    offer,
    prepared,
)
from tests.kit.worker_models import unpaged as onnxruntime_unpaged
from worker.config import WorkerConfig
from worker.core.lanes import Lane, Step
from worker.devices.accelerator import (
    CapturedWork,
    Event,
    HostAccelerator,
    HostEvent,
    HostStream,
    HostWork,
    Piece,
    Stream,
)
from worker.devices.cuda import Installation, check_installation, installation
from worker.devices.device import DeviceLostError, GpuHealth, Launched, WatchedDevice
from worker.devices.exec_queue import ExecQueue
from worker.devices.gpu import TorchDevice, TorchModel
from worker.devices.gpu_health import GpuMonitor, NvmlGpu
from worker.devices.gpu_memory import pages_that_fit, workspace_limit
from worker.engines.choice import Engine, Way, describe
from worker.engines.torch_program import Program
from worker.engines.torch_tensors import weight_views
from worker.models.file_store import FileStore
from worker.models.model_files import GRAPH_FILE, WEIGHTS_FILE, CompiledModel
from worker.models.precision import Precision
from worker.offers import describe as describe_to_controller
from worker.process import check_packages, make_device


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Four instances of one network of two pages, compiled once: a cache folder and the contents."""
    cache_dir = tmp_path_factory.mktemp("cache")
    contents = {f"m{seed}": network(seed).SerializeToString() for seed in range(4)}
    models = prepared(
        torch_device(cache_dir), *(offer(FileStore(cache_dir), *each) for each in contents.items())
    )
    assert not any(model.from_cache for model in models)
    assert [model.num_pages for model in models] == [2] * 4
    return cache_dir, contents


Instances = tuple[Path, dict[str, bytes]]


def served(device: TorchDevice, instances: Instances, count: int = 4) -> list[TorchModel]:
    cache_dir, contents = instances
    chosen = list(contents.items())[:count]
    models = prepared(device, *(offer(FileStore(cache_dir), *each) for each in chosen))
    assert all(model.from_cache for model in models)
    return models


def unpaged(cache_dir: Path, x: np.ndarray) -> dict[str, bytes]:
    """What the engine says with each model's weights where its file has them, by the weights' hash."""
    answers = {}
    for folder in (cache_dir / "compiled").iterdir():
        compiled = CompiledModel.from_json((folder / "model.json").read_text())
        if compiled.inputs[0].spec.row_shape != (NARROW,):
            continue
        program = Program((folder / GRAPH_FILE).read_bytes(), torch.device("cpu"))
        blob = torch.from_numpy(np.fromfile(folder / WEIGHTS_FILE, np.uint8))
        (y,) = program.run([torch.from_numpy(x)], weight_views(blob, compiled.weights), {})
        answers[compiled.weights_sha256] = y.numpy().tobytes()
    return answers


def by_model(instances: Instances, models: list[TorchModel], x: np.ndarray) -> dict[str, bytes]:
    answers = unpaged(instances[0], x)
    return {model.model_id: answers[weights_sha256(model)] for model in models}


def weights_sha256(model: TorchModel) -> str:
    return hashlib.sha256(model.weights.memory.numpy().data).hexdigest()


@pytest.mark.seeds(1)
def test_half_the_pages_serve_every_instance_bit_for_bit_after_any_loads_and_unloads(
    seed: int, instances: Instances
) -> None:
    rng = random.Random(seed)
    device = torch_device(instances[0])
    models = served(device, instances)
    x = np.random.default_rng(seed).random((2, NARROW), dtype=np.float32)
    one, two = by_model(instances, models, x[:1]), by_model(instances, models, x)
    assert len(set(two.values())) == 4
    with running(device) as harness:
        for model in models:
            harness.lanes.add_model(model)
        resident: list[str] = []
        for _ in range(40):
            name = rng.choice(models).model_id
            if name not in resident:
                if len(resident) == 2:
                    harness.evict(resident.pop(rng.randrange(2)))
                harness.load(name)
                resident.append(name)
            if rng.random() < 0.5:
                assert harness.ok(harness.infer(name, x[:1].tobytes())) == [one[name]]
            else:
                rows = [x[:1].tobytes(), x[1:].tobytes()]
                infer = harness.infer(name, *rows, rows=(1, 1), batch_size=2)
                assert harness.ok(infer) == [two[name][:12], two[name][12:]]


def test_a_batch_that_is_not_full_is_filled_with_zeros(instances: Instances) -> None:
    device = torch_device(instances[0])
    models = served(device, instances, 1)
    x = np.random.default_rng(0).random((1, NARROW), dtype=np.float32)
    padded = by_model(instances, models, np.concatenate([x, np.zeros_like(x)]))
    with running(device) as harness:
        harness.lanes.add_model(models[0])
        harness.ok(harness.load("m0"))
        noise = np.full((2, NARROW), 7, np.float32).tobytes()
        harness.ok(harness.infer("m0", noise, rows=(2,), batch_size=2))
        (alone,) = harness.ok(harness.infer("m0", x.tobytes(), rows=(1,), batch_size=2))
    assert alone == padded["m0"][:12]


def test_the_seeds_of_the_estimator_are_measured_and_durations_are_the_devices(
    instances: Instances,
) -> None:
    device = torch_device(instances[0])
    models = served(device, instances, 1)
    assert models[0].load_ns > 0
    assert set(models[0].exec_ns) == {1, 2}
    assert min(models[0].exec_ns.values()) > 1
    with running(device) as harness:
        harness.lanes.add_model(models[0])
        load = harness.result(harness.load("m0")).load
        exec_time, again = (
            harness.result(harness.infer("m0", bytes(4 * NARROW))).exec for _ in range(2)
        )
    assert exec_time is not None
    assert again is not None
    # The second one gathers nothing.
    assert exec_time.spared_ns == 0 < again.spared_ns
    for step in (load, exec_time):
        assert step is not None
        # Without what the thread did before and after.
        assert 0 < step.duration_ns < step.end_ns - step.begin_ns


def test_kernels_and_weights_go_with_the_last_model_that_needs_them(instances: Instances) -> None:
    cache_dir, contents = instances
    device = torch_device(cache_dir)
    files = FileStore(cache_dir)
    # Two of the same bytes, and another of the same network.
    offers = [offer(files, "a", contents["m0"]), offer(files, "b", contents["m0"])]
    models = prepared(device, *offers, offer(files, "c", contents["m1"]))
    assert models[0].weights is models[1].weights
    assert models[0].kernels == models[2].kernels
    assert (len(device._kernels), len(device._weights)) == (2, 2)
    del models[:2]
    gc.collect()
    assert (len(device._kernels), len(device._weights)) == (2, 1)
    models.clear()
    gc.collect()
    assert (len(device._kernels), len(device._weights)) == (0, 0)


def test_the_hosts_memory_for_weights_is_fixed_and_used_again(instances: Instances) -> None:
    # Room for one model of 17.3 MiB; more is a refusal, until the first one goes.
    device = torch_device(instances[0], host_bytes=20 << 20)
    cache_dir, contents = instances
    files = FileStore(cache_dir)

    async def both() -> None:
        first = await device.prepare(offer(files, "m0", contents["m0"]), no_fetch, quiet)
        with pytest.raises(ModelError, match=r"no room for 18\d+ bytes .* start the worker with"):
            await device.prepare(offer(files, "m1", contents["m1"]), no_fetch, quiet)
        del first
        gc.collect()
        await device.prepare(offer(files, "m1", contents["m1"]), no_fetch, quiet)
        await device.close()

    asyncio.run(both())


async def no_fetch(files: object) -> None:
    assert not files


def quiet(stage: str) -> None:
    pass


# Ten seconds; each precision is compiled and compared in test_torch_engine.py, and test_gpu_live.py starts such servers.
@pytest.mark.long
def test_a_server_of_processes_serves_in_half_precision(tmp_path: Path) -> None:
    precision = Precision.FLOAT16
    models = write_models(tmp_path / "models", tiny="tiny_conv")
    x = np.random.default_rng(0).standard_normal((4, 1, 8, 8), dtype=np.float32)
    path = models / "tiny" / "1" / "model.onnx"
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"input": x})
    arguments = ["--models", str(models), "--cache-dir", str(tmp_path / "cache")]
    arguments += ["--device", "torch:cpu", "--precision", precision.value]
    arguments += ["--pages", "2", "--arena-mib", "16", "--host-mib", "16"]
    with LocalServer(arguments) as server, Client(server.address) as client:
        found = client.infer("tiny", x, slo_ms=30_000).outputs["output"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(
        found, wanted, rtol=precision.tolerance, atol=precision.tolerance * np.abs(wanted).max()
    )


class ApartAccelerator(HostAccelerator):
    """As on a GPU, both ways of running convolutions are tried."""

    on_host = False


@pytest.mark.parametrize("way", ["only apart works", "apart is faster", "joined is faster"])
def test_convolutions_run_joined_with_their_relus_or_apart_whichever_works_and_is_faster(
    way: str, convolutional: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir, content = convolutional
    run = Program.run
    ways = []
    # The device's clock: a pause of this machine makes nobody slow.
    ticks = count()
    slow_ns = 0
    monkeypatch.setattr(
        "worker.devices.accelerator.time",
        SimpleNamespace(monotonic_ns=lambda: next(ticks) + slow_ns),
    )

    def is_joined(program: Program) -> bool:
        return any(node.op_type == "conv_add_relu" for node in program.nodes)

    def slow_or_broken(program: Program, *arguments: Any) -> list[torch.Tensor]:  # noqa: ANN401
        nonlocal slow_ns
        ways.append(is_joined(program))
        if ways[-1] and way == "only apart works":
            raise RuntimeError("FIND was unable to find an engine to execute this computation")
        if way != "only apart works" and ways[-1] is (way == "apart is faster"):
            slow_ns += NS_PER_S
        return run(program, *arguments)

    forget_trials(cache_dir)
    monkeypatch.setattr(Program, "run", slow_or_broken)
    monkeypatch.setattr("worker.devices.kernels._PROFILE_RUNS", 3)
    device = torch_device(cache_dir, ApartAccelerator())
    (model,) = prepared(device, offer(FileStore(cache_dir), "m", content, (1,)))
    ways.clear()
    with running(device) as harness:
        harness.lanes.add_model(model)
        harness.ok(harness.load("m"))
        harness.ok(harness.infer("m", bytes(4 * 64)))
    assert ways == [way == "joined is faster"]


@pytest.fixture(scope="module")
def convolutional(instances: Instances) -> tuple[Path, bytes]:
    """A network of convolutions, compiled: a cache folder and its content."""
    cache_dir, _ = instances
    content = build_model("tiny_conv").SerializeToString()
    prepared(torch_device(cache_dir), offer(FileStore(cache_dir), "m", content, (1,)))
    return cache_dir, content


# --- engines ----------------------------------------------------------------------------------------


TORCH_FASTER = {Way.TORCH_JOINED: 1000, Way.ONNXRUNTIME: 2000}
ONNXRUNTIME_FASTER = {Way.TORCH_JOINED: 2000, Way.ONNXRUNTIME: 1000}


def trials(cache_dir: Path) -> list[dict[str, Any]]:
    return [
        json.loads(path.read_text().splitlines()[1]) for path in (cache_dir / "profiles").iterdir()
    ]


@pytest.mark.seeds(1)
def test_onnxruntime_serves_from_the_same_pages_and_arena(
    instances: Instances, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    forget_trials(instances[0])
    time_says(monkeypatch, ONNXRUNTIME_FASTER)
    device = torch_device(instances[0], OnnxruntimeAccelerator())
    models = served(device, instances)
    assert {kernel.way for model in models for kernel in model.kernels.values()} == {
        Way.ONNXRUNTIME
    }
    x = np.random.default_rng(0).random((2, NARROW), dtype=np.float32)
    compiled = compiled_models(instances[0])
    expected = {
        model.model_id: onnxruntime_unpaged(*compiled[weights_sha256(model)], x) for model in models
    }
    assert len(set(expected.values())) == 4
    rng = random.Random(seed)
    with running(device) as harness:
        for model in models:
            harness.lanes.add_model(model)
        resident: list[str] = []
        for _ in range(20):
            name = rng.choice(models).model_id
            if name not in resident:
                if len(resident) == 2:
                    harness.evict(resident.pop(rng.randrange(2)))
                harness.load(name)
                resident.append(name)
            infer = harness.infer(name, x.tobytes(), rows=(2,), batch_size=2)
            (found,) = harness.ok(infer)
            assert found == expected[name]


@pytest.mark.parametrize("exec_ns", [TORCH_FASTER, ONNXRUNTIME_FASTER])
def test_the_engine_that_is_measured_to_be_faster_is_taken_and_both_are_recorded(
    exec_ns: dict[Way, int],
    instances: Instances,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache_dir = instances[0]
    forget_trials(cache_dir)
    time_says(monkeypatch, exec_ns)
    device = torch_device(cache_dir, OnnxruntimeAccelerator())
    assert device.gpu_kind == "cpu/float32/auto"
    with caplog.at_level(logging.INFO, logger="worker.devices.kernels"):
        (model,) = served(device, instances, 1)
    chosen = min(exec_ns, key=lambda way: exec_ns[way])
    assert [model.kernels[size].way for size in (1, 2)] == [chosen] * 2
    assert model.exec_ns == {1: 1000, 2: 1000}
    (record,) = trials(cache_dir)
    by_name = {way.value: taken for way, taken in exec_ns.items()}
    assert record["exec_ns"] == {"1": by_name, "2": by_name}
    words = [record.getMessage() for record in caplog.records]
    assert len(words) == 2
    assert all(word.endswith(describe(exec_ns)) for word in words), words


def test_a_restarted_worker_takes_the_recorded_engine_without_another_contest(
    instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir = instances[0]
    forget_trials(cache_dir)
    time_says(monkeypatch, ONNXRUNTIME_FASTER)
    served(torch_device(cache_dir, OnnxruntimeAccelerator()), instances, 1)
    # Now torch would win, if it were asked.
    time_says(monkeypatch, {Way.ONNXRUNTIME: 1000, Way.TORCH_JOINED: 1})
    again = torch_device(cache_dir, OnnxruntimeAccelerator())
    (model,) = served(again, instances, 1)
    assert model.kernels[2].way is Way.ONNXRUNTIME

    def refuse(*arguments: object, **settings: object) -> None:
        raise ModelError("another version does not accept it")

    monkeypatch.setattr("worker.devices.kernels.open_session", refuse)
    (model,) = served(torch_device(cache_dir, OnnxruntimeAccelerator()), instances, 1)
    assert model.kernels[2].way is Way.TORCH_JOINED
    (record,) = trials(cache_dir)
    assert record["exec_ns"]["2"] == {"torch": 1, "onnxruntime": None}


def test_an_engine_that_fails_when_it_is_measured_leaves_the_model_to_the_other(
    instances: Instances, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure = ExecQueue.measure

    def fail(execs: ExecQueue, kernel: Any, num_pages: int) -> int:  # noqa: ANN401
        if kernel.way is Way.ONNXRUNTIME:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return measure(execs, kernel, num_pages)

    cache_dir = instances[0]
    forget_trials(cache_dir)
    monkeypatch.setattr(ExecQueue, "measure", fail)
    (model,) = served(torch_device(cache_dir, OnnxruntimeAccelerator()), instances, 1)
    assert model.kernels[1].way is Way.TORCH_JOINED
    alone = torch_device(tmp_path, OnnxruntimeAccelerator(), engine=Engine.ONNXRUNTIME)
    with pytest.raises(ModelError, match="a batch of 2 failed: CUBLAS_STATUS_NOT_SUPPORTED"):
        prepared(alone, offer(FileStore(tmp_path), *next(iter(instances[1].items()))))


def strange_network() -> bytes:
    """A network with two operators that torch is not told how to run."""
    graph = helper.make_graph(
        [
            helper.make_node("Det", ["x"], ["d"]),
            helper.make_node("MeanVarianceNormalization", ["x"], ["m"], axes=[1, 2]),
            helper.make_node("ReduceSum", ["m"], ["s"], keepdims=0),
            helper.make_node("Add", ["d", "s"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


def test_a_model_that_torch_has_no_operators_for_runs_on_onnxruntime_alone(tmp_path: Path) -> None:
    strange = offer(FileStore(tmp_path), "strange", strange_network())
    for from_cache in (False, True):
        device = torch_device(tmp_path, OnnxruntimeAccelerator())
        (model,) = prepared(device, strange)
        assert model.from_cache is from_cache
        assert {kernel.way for kernel in model.kernels.values()} == {Way.ONNXRUNTIME}


def test_without_onnxruntime_a_refusal_names_all_missing_operators_and_what_helps(
    tmp_path: Path,
) -> None:
    strange = offer(FileStore(tmp_path), "strange", strange_network())
    # Which devices have torch alone, tests/worker/test_engine_choice.py says.
    device = torch_device(tmp_path)
    with pytest.raises(
        ModelError,
        match=r"^the torch engine has no operator Det, MeanVarianceNormalization; .*\[gpu-ort\]",
    ):
        prepared(device, strange)


def test_an_engine_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no onnxruntime that computes on this device"):
        torch_device(tmp_path, engine=Engine.ONNXRUNTIME)


# --- order ------------------------------------------------------------------------------------------


def load_step(model: TorchModel, pages: tuple[int, ...]) -> Step[TorchModel]:
    action = LoadWeights(
        action_id=ActionId(1),
        model_id=model.model_id,
        earliest_ns=0,
        latest_ns=1,
        expected_duration_ns=1,
    )
    return Step(Lane.LOAD, action, model, pages, 0)


def infer_step(model: TorchModel, pages: tuple[int, ...], io_offset: int) -> Step[TorchModel]:
    action = Infer(
        action_id=ActionId(1),
        model_id=model.model_id,
        batch_size=1,
        rows=(1,),
        earliest_ns=0,
        latest_ns=1,
        expected_duration_ns=1,
    )
    return Step(Lane.EXEC, action, model, pages, io_offset)


def overwritten_while_queued(device: TorchDevice, models: list[TorchModel], x: bytes) -> Buffer:
    """Launch an EXEC, load another model onto its pages before anybody has waited for it; its output."""
    first, second = models[:2]
    device.run_load(load_step(first, (2, 0)))
    infer = infer_step(first, (2, 0), 0)
    device.run_input(infer, [x])
    launched = device.launch_exec(infer)
    device.run_load(load_step(second, (0, 2)))
    device.finish_exec(infer, launched)
    return device.run_output(infer)[0]


def rounds_that_went_right(instances: Instances) -> list[bool]:
    device = torch_device(instances[0], DeferredAccelerator(0))
    models = served(device, instances, 2)
    x = np.random.default_rng(0).random((1, NARROW), dtype=np.float32)
    expected = by_model(instances, models, x)
    outcomes = []
    for _ in range(12):
        found = overwritten_while_queued(device, models, x.tobytes())
        outcomes.append(found == expected[models[0].model_id])
        models.reverse()  # the same one again would find the arena as it left it
    return outcomes


def test_a_load_onto_pages_that_a_queued_exec_reads_waits_for_its_gather(
    instances: Instances,
) -> None:
    assert all(rounds_that_went_right(instances))


def test_without_that_wait_some_order_gives_a_wrong_answer(
    instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExecQueue, "wait_for_readers", lambda *arguments: None)
    assert not all(rounds_that_went_right(instances))


@pytest.mark.seeds(1)
def test_queued_execs_of_different_models_do_not_mix_in_arena_or_batch(
    seed: int, instances: Instances
) -> None:
    rng = random.Random(seed)
    device = torch_device(instances[0], DeferredAccelerator(seed))
    models = served(device, instances, 2)
    x = np.random.default_rng(seed).random((4, 1, NARROW), dtype=np.float32)
    pages = {"m0": (3, 1), "m1": (0, 2)}
    for model in models[:2]:
        device.run_load(load_step(model, pages[model.model_id]))
    slots: list[int] = []
    under_way: deque[tuple[Step[TorchModel], Launched, bytes]] = deque()
    answers = [by_model(instances, models, row) for row in x]
    slot_bytes = models[0].layouts[1].num_bytes
    for turn in range(12):
        model, row = rng.choice(models[:2]), rng.randrange(4)
        infer = infer_step(model, pages[model.model_id], (turn % 3) * slot_bytes)
        assert infer.io_offset not in slots
        device.run_input(infer, [x[row].tobytes()])
        slots.append(infer.io_offset)
        under_way.append((infer, device.launch_exec(infer), answers[row][model.model_id]))
        while len(under_way) == 2 or (turn == 11 and under_way):
            step, launched, expected = under_way.popleft()
            device.finish_exec(step, launched)
            assert device.run_output(step) == [expected]
            slots.remove(step.io_offset)


@dataclass
class Arena:
    """A device that puts work off, with two loaded models of the same architecture."""

    accelerator: DeferredAccelerator
    device: TorchDevice
    models: list[TorchModel]
    #: By model, what is right for `x`.
    expected: dict[str, bytes]
    x: bytes

    def run(self, index: int) -> Step[TorchModel]:
        """Run a model's EXEC, and check its answer."""
        step = infer_step(self.models[index], ((2, 0), (3, 1))[index], 0)
        self.device.run_input(step, [self.x])
        self.device.run_exec(step)
        duration_ns = step.duration_ns
        assert self.device.run_output(step) == [self.expected[step.model.model_id]]
        step.duration_ns = duration_ns
        return step


@pytest.fixture
def arena(instances: Instances) -> Arena:
    accelerator = DeferredAccelerator(0)
    device = torch_device(instances[0], accelerator)
    models = served(device, instances, 2)
    for model, pages in zip(models, ((2, 0), (3, 1)), strict=True):
        device.run_load(load_step(model, pages))
    x = np.random.default_rng(0).random((1, NARROW), dtype=np.float32)
    return Arena(accelerator, device, models, by_model(instances, models, x), x.tobytes())


def test_an_exec_gathers_unless_the_arena_holds_its_model_and_then_says_what_that_spared(
    arena: Arena,
) -> None:
    # A piece takes 1 ns: the list, the gather and the event behind it.
    gathered, again, other, back = (arena.run(index) for index in (0, 0, 1, 0))
    assert [step.spared_ns for step in (gathered, again, other, back)] == [0, 3, 0, 0]
    # The event stays.
    assert [step.duration_ns for step in (gathered, again, other, back)] == [7, 5, 7, 7]


def test_what_lies_in_the_arena_is_not_taken_for_a_model_that_left_it(
    arena: Arena, instances: Instances
) -> None:
    device, first = arena.device, arena.models[0]
    arena.run(0)
    # Its pages may change then: the arena does not.
    device.run_load(load_step(arena.models[1], (2, 0)))
    assert arena.run(0).spared_ns
    # What is measured gathers whatever is there.
    device.execs.measure(first.kernels[1], first.num_pages)
    device.run_load(load_step(first, (2, 0)))
    assert not arena.run(0).spared_ns
    # The room of weights that are gone is given to others.
    del arena.models[0], first
    gc.collect()
    assert device.execs._in_arena() is None
    device.run_load(load_step(arena.models[0], (2, 0)))
    arena.run(0)
    # Nor does anybody know what an EXEC that failed has left there.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostWork, "launch", raise_out_of_room)
        with pytest.raises(RuntimeError, match="no room"):
            arena.run(0)
    assert not arena.run(0).spared_ns


def test_a_load_waits_for_a_queued_exec_also_after_a_launch_from_its_pages_that_failed(
    instances: Instances,
) -> None:
    device = torch_device(instances[0], DeferredAccelerator(0))
    models = served(device, instances, 2)
    x = np.random.default_rng(0).random((1, NARROW), dtype=np.float32)
    expected = by_model(instances, models, x)
    for _ in range(6):
        first, second = models
        device.run_load(load_step(first, (2, 0)))
        infer = infer_step(first, (2, 0), 0)
        device.run_input(infer, [x.tobytes()])
        launched = device.launch_exec(infer)
        device.execs.forget_arena()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostWork, "launch", raise_out_of_room)
            with pytest.raises(RuntimeError, match="no room"):
                device.launch_exec(infer)
        device.run_load(load_step(second, (0, 2)))
        device.finish_exec(infer, launched)
        assert device.run_output(infer) == [expected[first.model_id]]
        models.reverse()


def raise_out_of_room(*arguments: object) -> None:
    raise RuntimeError("no room")


def test_kernels_that_are_measured_meanwhile_do_not_change_how_long_an_exec_took(
    arena: Arena,
) -> None:
    accelerator, device, model = arena.accelerator, arena.device, arena.models[0]
    step = infer_step(model, (2, 0), 0)
    accelerator.piece_ns = 1000
    launched = device.launch_exec(step)
    accelerator.advance_until(launched.is_done)
    accelerator.piece_ns = 1
    # More than there ever are between an EXEC's end and its thread's turn.
    for _ in range(8):
        device.execs.measure(model.kernels[1], model.num_pages)
    device.finish_exec(step, launched)
    assert step.duration_ns is not None
    assert step.duration_ns >= 1000


# --- beside each other ------------------------------------------------------------------------------


class ThreadedEvent(HostEvent):
    """Done when as many recordings have been reached as were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self.asked = 0
        self._reached = 0

    def reach(self, number: int) -> None:
        with self._changed:
            self.time_ns = time.monotonic_ns()
            self._reached = max(self._reached, number)
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._reached >= number, timeout=PATIENCE_S)

    def synchronize(self) -> None:
        self.wait_for(self.asked)

    def is_done(self) -> bool:
        return self._reached >= self.asked


class ThreadedStream(HostStream):
    """A queue of work that a thread of its own does."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with torch.inference_mode():
            while (work := self.queue.get()) is not None:
                work()

    def run(self, work: Callable[[], object]) -> None:
        self.queue.put(work)

    def record(self, event: Event) -> None:
        assert isinstance(event, ThreadedEvent)
        event.asked += 1
        self.queue.put(partial(event.reach, event.asked))


class ThreadedAccelerator(HostAccelerator):
    """As a GPU: streams work beside each other, and beside whoever hands work to them."""

    on_host = False

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[ThreadedStream] = []
        self.urgent: list[bool] = []

    def stream(self, *, urgent: bool = False) -> Stream:
        self.urgent.append(urgent)
        self.streams.append(ThreadedStream())
        return self.streams[-1]

    def event(self, *, patient: bool = False) -> Event:
        return ThreadedEvent()


@pytest.fixture
def threaded() -> Iterator[ThreadedAccelerator]:
    """Its streams end with the test."""
    accelerator = ThreadedAccelerator()
    yield accelerator
    for stream in accelerator.streams:
        stream.queue.put(None)
        stream.thread.join(PATIENCE_S)


@pytest.mark.seeds(1)
def test_streams_beside_each_other_give_every_answer_bit_for_bit(
    seed: int, instances: Instances, threaded: ThreadedAccelerator
) -> None:
    rng = random.Random(seed)
    device = torch_device(instances[0], threaded)
    models = served(device, instances)
    x = np.random.default_rng(seed).random((1, NARROW), dtype=np.float32)
    expected = by_model(instances, models, x)
    load_run_and_evict_at_random(device, models, rng, x.tobytes(), expected, most_s=0.002)


def test_load_input_and_output_go_on_beside_an_exec_and_the_next_exec_waits_behind_it(
    instances: Instances, threaded: ThreadedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch_device(instances[0], threaded)
    models = served(device, instances, 2)
    kernel = models[0].kernels[1]
    run, gates = kernel.compute, [threading.Event() for _ in range(3)]
    turns = iter(gates)

    def held() -> None:
        assert next(turns).wait(PATIENCE_S)
        run()

    launched: list[Launched] = []
    launch_exec = device.launch_exec

    def noted(step: Step[TorchModel]) -> Launched:
        launched.append(launch_exec(step))
        return launched[-1]

    monkeypatch.setattr(device, "launch_exec", noted)
    kernel.compute = held
    with running(device) as harness:
        try:
            for model in models:
                harness.lanes.add_model(model)
            harness.ok(harness.load("m0"))
            first, second = (harness.infer("m0", bytes(4 * NARROW)) for _ in range(2))
            until(lambda: len(launched) == 2, what="the second is with the device")
            assert not launched[0].is_done()
            harness.ok(harness.load("m1"))
            gates[0].set()
            harness.ok(first)  # its OUTPUT beside the second's EXEC
            third = harness.infer("m0", bytes(4 * NARROW))
            until(lambda: len(launched) == 3, what="the third's INPUT has ended")
            assert not launched[1].is_done()
        finally:
            for gate in gates:
                gate.set()
        times = [harness.result(infer).exec for infer in (first, second, third)]
    for earlier, later in pairwise(times):
        assert earlier is not None
        assert later is not None
        assert later.begin_ns >= earlier.end_ns


def test_load_and_input_share_a_stream_and_the_kernels_of_exec_go_first(
    tmp_path: Path, threaded: ThreadedAccelerator
) -> None:
    device = torch_device(tmp_path, threaded)
    assert device._load.stream is device._input.stream
    # That one, EXEC's and OUTPUT's.
    assert threaded.urgent == [False, True, False]


def test_a_load_copies_page_by_page_with_two_on_their_way_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch_device(tmp_path, DeferredAccelerator(0))
    stream: Any = device._load.stream
    run = stream.run
    copied: list[int] = []
    on_their_way: list[int] = []

    def counted(copy: Any) -> None:  # noqa: ANN401
        run(copy)
        (source,) = copy.args
        if source.dtype is not torch.uint8:
            return  # the list of pages
        copied.append(source.nbytes)
        copies = (work for work in stream.queue if isinstance(work, partial))
        on_their_way.append(sum(work.args[0].dtype is torch.uint8 for work in copies))

    monkeypatch.setattr(stream, "run", counted)
    weights = SimpleNamespace(memory=device._memory.host[: 4 * PAGE_BYTES - 5])
    model: Any = SimpleNamespace(model_id="m", weights=weights)
    device.run_load(load_step(model, (3, 0, 2, 1)))
    assert copied == [PAGE_BYTES] * 3 + [PAGE_BYTES - 5]
    assert on_their_way == [1, 2, 2, 2]


class WaitedForAccelerator(HostAccelerator):
    """Notes which kind of event is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def event(self, *, patient: bool = False) -> Event:
        return WaitedForEvent(self.waits, patient)


class WaitedForEvent(HostEvent):
    def __init__(self, waits: list[bool], patient: bool) -> None:
        super().__init__()
        self._waits, self._patient = waits, patient

    def synchronize(self) -> None:
        self._waits.append(self._patient)


def test_a_load_sleeps_until_its_pages_are_copied_and_nothing_else_does(
    instances: Instances,
) -> None:
    accelerator = WaitedForAccelerator()
    device = torch_device(instances[0], accelerator)
    (model,) = served(device, instances, 1)
    accelerator.waits.clear()
    device.run_load(load_step(model, (2, 0)))
    # Each page, and the end.
    assert accelerator.waits == [True] * 3
    accelerator.waits.clear()
    infer = infer_step(model, (2, 0), 0)
    device.run_input(infer, [bytes(4 * NARROW)])
    device.run_exec(infer)
    device.run_output(infer)
    assert accelerator.waits
    assert not any(accelerator.waits)


# --- failure ----------------------------------------------------------------------------------------


class FailingAccelerator(HostAccelerator):
    """Works until told otherwise."""

    def __init__(self, *, memory_bytes: int = 1 << 40) -> None:
        super().__init__()
        self.memory_bytes = memory_bytes
        self.failing = False
        self.broken: str | None = None
        self.closed = False

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        if num_bytes > self.memory_bytes:
            raise MemoryError(f"{num_bytes} bytes are needed, {self.memory_bytes} are free")
        self.memory_bytes -= num_bytes
        return super().device_memory(num_bytes)

    def stream(self, *, urgent: bool = False) -> Stream:
        return FailingStream(self)

    def fault(self) -> str | None:
        return self.broken

    def close(self) -> None:
        self.closed = True


class FailingStream(HostStream):
    def __init__(self, accelerator: FailingAccelerator) -> None:
        self._accelerator = accelerator

    def run(self, work: Callable[[], Any]) -> None:
        if self._accelerator.failing:
            raise RuntimeError("CUDA error: unspecified launch failure\nand much more")
        super().run(work)


def test_too_little_device_memory_is_said_at_the_start(tmp_path: Path) -> None:
    accelerator = FailingAccelerator(memory_bytes=LIMITS.num_pages * PAGE_BYTES)
    with pytest.raises(ConfigError, match=r"not enough memory for 4 pages, .* 0 are free"):
        torch_device(tmp_path, accelerator)


def test_host_memory_that_cannot_be_locked_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: HostAccelerator, num_bytes: int, file: int | None = None) -> torch.Tensor:
        raise MemoryError("the driver cannot lock it; raise the limit (ulimit -l)")

    monkeypatch.setattr(FailingAccelerator, "host_memory", refuse)
    with pytest.raises(ConfigError, match=r"not enough memory for .* \(ulimit -l\)"):
        torch_device(tmp_path, FailingAccelerator())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("CUDA error: all CUDA-capable devices are busy or unavailable\nmore", "busy or unavail"),
        ("CUDA error: out of memory\nmore", "out of memory"),
        ("", r"RuntimeError\(''\)"),
    ],
)
def test_a_card_that_cannot_be_opened_is_refused_with_the_drivers_words(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index: int, *, search: bool) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr("worker.devices.cuda.CudaAccelerator", fail)
    config = WorkerConfig(
        controller="there:1",
        device="cuda:0",
        cache_dir=tmp_path,
        # Little enough for any machine: the memory is looked at before the card.
        host_bytes=16 << 20,
        io_bytes=1 << 20,
    )
    with pytest.raises(ConfigError, match=f"device 'cuda:0': it cannot be used: .*{told}[a-z]*$"):
        make_device(config, FileStore(tmp_path))


def test_the_worker_of_a_gpu_watches_its_card_and_goes_near_it_before_it_takes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    class Gpu(HostAccelerator):
        uuid = "GPU-1"

        def __init__(self, index: int, *, search: bool) -> None:
            super().__init__()
            done.append(index)

        def free_bytes(self) -> int:
            return 1 << 34

        total_bytes = free_bytes

        def host_memory(self, num_bytes: int, file: int | None = None) -> torch.Tensor:
            done.append("memory")
            return super().host_memory(num_bytes, file)

    def open_gpu(uuid: str) -> NvmlGpu:
        done.append(uuid)
        return NvmlGpu(driver(), uuid)

    monkeypatch.setattr("worker.devices.cuda.CudaAccelerator", Gpu)
    monkeypatch.setattr("worker.process.open_gpu", open_gpu)
    monkeypatch.setattr("worker.process.stay_near", lambda facts: done.append(facts.bus_id))
    config = WorkerConfig(
        controller="there:1",
        device="cuda:1",
        cache_dir=tmp_path,
        num_pages=1,
        arena_bytes=16 << 20,
        host_bytes=16 << 20,
        io_bytes=1 << 20,
        precision="tf32",
    )
    device = make_device(config, FileStore(tmp_path))
    assert done[:4] == [1, "GPU-1", "0000:3b:00.0", "memory"]
    assert device.gpu_kind == "cpu/tf32"
    assert isinstance(device, WatchedDevice)
    assert told_by(device, 1) == [GpuHealth(1980, 1980, ())]


def test_seeds_carry_the_clock_that_they_were_measured_at(instances: Instances) -> None:
    cache_dir, _ = instances
    forget_trials(cache_dir)
    slow = driver(nvmlDeviceGetClockInfo=960, nvmlDeviceGetCurrentClocksThrottleReasons=0x4)
    device = torch_device(cache_dir, monitor=GpuMonitor(NvmlGpu(slow, "GPU-1")))
    (model,) = served(device, instances, 1)
    # The level that 960 MHz belong to.
    assert model.clock_mhz == 966
    assert describe_to_controller(model).clock_mhz == 966
    (record,) = trials(cache_dir)
    assert record["clock_mhz"] == 966


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"onnxruntime": "1.31.1"}, None),
        ({"onnxruntime-gpu": "1.31.1"}, None),
        ({}, r"found no onnxruntime, .* install clockwright\[cpu\], or clockwright\[gpu-ort\]"),
        (
            {"onnxruntime": "1.30.0", "onnxruntime-gpu": "1.31"},
            r"found onnxruntime 1\.30\.0 and onnxruntime-gpu 1\.31,",
        ),
    ],
)
def test_a_worker_with_torch_wants_one_package_of_onnxruntime(
    installed: dict[str, str], words: str | None
) -> None:
    if words is None:
        check_packages(installed.get)
        return
    with pytest.raises(ConfigError, match=words):
        check_packages(installed.get)


def test_a_device_that_is_lost_while_a_model_is_set_up_says_so_once(instances: Instances) -> None:
    accelerator = FailingAccelerator()
    gone: list[str] = []
    device = torch_device(instances[0], accelerator, on_lost=gone.append)
    accelerator.failing, accelerator.broken = True, "cuda:0: it fell off the bus"
    with pytest.raises(ModelError, match="a batch of 2 failed: CUDA error: unspecified launch"):
        served(device, instances, 1)
    assert gone == ["CUDA error: unspecified launch failure (cuda:0: it fell off the bus)"]


def test_an_error_in_one_action_fails_that_action_only(instances: Instances) -> None:
    accelerator = FailingAccelerator()
    device = torch_device(instances[0], accelerator)
    models = served(device, instances, 1)
    lost: list[str] = []
    with running(device) as harness:
        harness.lanes._on_lost = lost.append
        harness.lanes.add_model(models[0])
        harness.ok(harness.load("m0"))
        accelerator.failing = True
        failed = harness.result(harness.infer("m0", bytes(4 * NARROW)))
        accelerator.failing = False
        harness.ok(harness.infer("m0", bytes(4 * NARROW)))
    assert failed.error is ActionError.DEVICE
    assert "unspecified launch failure" in failed.message
    assert not lost


def test_an_error_after_which_nothing_runs_loses_the_device_with_the_reason(
    instances: Instances,
) -> None:
    accelerator = FailingAccelerator()
    gone: list[str] = []
    device = torch_device(instances[0], accelerator, on_lost=gone.append)
    models = served(device, instances, 1)
    lost: list[str] = []
    with running(device) as harness:
        harness.lanes._on_lost = lost.append
        harness.lanes.add_model(models[0])
        harness.ok(harness.load("m0"))
        accelerator.failing, accelerator.broken = True, "cuda:0: it fell off the bus"
        failed = harness.result(harness.infer("m0", bytes(4 * NARROW)))
        # Even if it seems to work again: what its memory holds is not known.
        accelerator.failing, accelerator.broken = False, None
        harness.lanes.abandon()
        harness.lanes.add_model(models[0])
        after = harness.result(harness.load("m0"))
    reason = "CUDA error: unspecified launch failure (cuda:0: it fell off the bus)"
    assert (failed.error, failed.message) == (ActionError.DEVICE, reason)
    assert (after.error, after.message) == (ActionError.DEVICE, reason)
    assert lost[0] == reason
    assert gone == [reason]
    with pytest.raises(DeviceLostError):
        device.run_load(load_step(models[0], (0, 1)))


def test_a_model_whose_kernels_want_too_much_to_work_in_is_refused_and_no_other(
    instances: Instances, convolutional: tuple[Path, bytes]
) -> None:
    cache_dir, contents = instances
    files = FileStore(cache_dir)
    accelerator = GrowingAccelerator()
    device = torch_device(cache_dir, accelerator)

    async def scenario() -> None:
        # The limit is of all kernels together: these two are just within it.
        accelerator.intermediates_bytes = 1 << 30
        served = await device.prepare(offer(files, "m0", contents["m0"]), no_fetch, quiet)
        accelerator.intermediates_bytes = 1 << 20
        words = r"of 1 kernels work in 2049 MiB, expected at most 2048 MiB \(--workspace-mib\); offer it with"
        other = offer(files, "other", convolutional[1], (1,))
        with pytest.raises(ModelError, match=words):
            await device.prepare(other, no_fetch, quiet)
        # What is kept is there for it.
        accelerator.intermediates_bytes = 0
        await device.prepare(other, no_fetch, quiet)
        await device.prepare(offer(files, "m1", contents["m1"]), no_fetch, quiet)
        assert set(served.exec_ns) == {1, 2}
        await device.close()

    asyncio.run(scenario())


class SearchingAccelerator(HostAccelerator):
    """A rehearsal takes memory: more in the first run than in later ones, as a search for algorithms does."""

    first_bytes, later_bytes = 3 << 30, 1 << 20
    kept_bytes = 0

    def capture(
        self, pieces: Sequence[Piece | None], *, rehearsal: Callable[[], None], tensor_cores: bool
    ) -> CapturedWork:
        self.searched = False
        return super().capture(pieces, rehearsal=rehearsal, tensor_cores=tensor_cores)

    def reserved_bytes(self) -> int:
        return super().reserved_bytes() + self.kept_bytes

    def trim(self) -> None:
        self.kept_bytes = 0


def test_memory_of_algorithms_that_lost_is_given_back_and_no_reason_to_refuse(
    instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = SearchingAccelerator()
    device = torch_device(instances[0], accelerator)
    run = Program.run

    def run_and_keep(self: Program, *arguments: Any) -> list[torch.Tensor]:  # noqa: ANN401
        wanted = accelerator.later_bytes if accelerator.searched else accelerator.first_bytes
        accelerator.kept_bytes = max(accelerator.kept_bytes, wanted)
        accelerator.searched = True
        return run(self, *arguments)

    monkeypatch.setattr(Program, "run", run_and_keep)

    async def scenario() -> None:
        cache_dir, contents = instances
        offers = [offer(FileStore(cache_dir), name, contents[name]) for name in ("m0", "m1")]
        await device.prepare(offers[0], no_fetch, quiet)
        assert accelerator.kept_bytes == 1 << 20
        device._kernels._kernels.clear()
        accelerator.later_bytes = 3 << 30
        with pytest.raises(ModelError, match="a batch of 2 kernels work in 3072 MiB"):
            await device.prepare(offers[1], no_fetch, quiet)
        assert accelerator.kept_bytes == 0
        await device.close()

    asyncio.run(scenario())


def test_devices_of_one_host_have_one_copy_of_a_models_weights(instances: Instances) -> None:
    file = os.memfd_create("test")
    os.ftruncate(file, HOST_BYTES)
    path = Path(f"/proc/{os.getpid()}/fd/{file}")
    first, second = (torch_device(instances[0], host_file=path) for _ in range(2))

    async def weights(device: TorchDevice, model_id: str) -> torch.Tensor:
        cache_dir, contents = instances
        offered = offer(FileStore(cache_dir), model_id, contents[model_id], (1,))
        return (await device.prepare(offered, no_fetch, quiet)).weights.memory

    async def scenario() -> None:
        one, other = await weights(first, "m0"), await weights(second, "m0")
        assert torch.equal(one, other)
        one[0] ^= 1
        assert torch.equal(one, other)
        await first.close()
        await second.close()

    asyncio.run(scenario())
    os.close(file)
    with pytest.raises(ConfigError, match=r"memory for weights: .* No such file"):
        torch_device(instances[0], host_file=path)


@pytest.mark.parametrize(
    ("total_gib", "wanted", "limit"), [(None, None, 2 << 30), (80, None, 5 << 30), (80, 7, 7)]
)
def test_the_workspace_follows_the_card_unless_somebody_says(
    total_gib: int | None, wanted: int | None, limit: int
) -> None:
    accelerator = HostAccelerator()
    accelerator.total_bytes = lambda: total_gib and total_gib << 30  # type: ignore[method-assign]
    assert workspace_limit(accelerator, wanted) == limit


def test_the_weights_cache_takes_what_a_card_has_left_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accelerator = HostAccelerator()
    accelerator.free_bytes = lambda: 16 << 30  # type: ignore[method-assign]
    accelerator.total_bytes = lambda: 32 << 30  # type: ignore[method-assign]
    room = {"arena_bytes": 512 << 20, "io_bytes": 512 << 20}
    with caplog.at_level(logging.INFO):
        assert pages_that_fit(accelerator, **room, workspace_bytes=2 << 30) == 12 * 64
    (line,) = caplog.messages
    assert line == (
        "cpu: the weights cache takes 768 pages, 12288 MiB of 16384 MiB that are free: 512 MiB for the arena, "
        "512 MiB for IO, 2048 MiB for workspace, 1024 MiB for graphs and libraries are left"
    )
    with pytest.raises(ConfigError, match="16384 MiB are free, too little for a page and 512 MiB"):
        pages_that_fit(accelerator, **room, workspace_bytes=14 << 30)


def test_the_arena_is_as_large_as_asked_where_the_cache_takes_what_is_left() -> None:
    asked: dict[str, Any] = {"controller": "here:1", "arena_bytes": 3 << 30}
    sizes = [
        WorkerConfig(**asked, **more).usable_arena_bytes >> 30
        for more in ({"device": "cuda:0"}, {"device": "cuda:0", "num_pages": 64}, {"device": "cpu"})
    ]
    assert sizes == [3, 1, 1]


def test_a_lost_device_takes_no_model_and_is_closed_with_its_accelerator(
    instances: Instances,
) -> None:
    accelerator = FailingAccelerator()
    device = torch_device(instances[0], accelerator)
    device._loss.reason = "gone"
    with pytest.raises(ModelError, match="the device is lost: gone"):
        served(device, instances, 1)
    assert accelerator.closed


def test_a_kernel_that_torch_cannot_run_is_refused_with_its_words(
    instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Program, *arguments: object) -> None:
        raise RuntimeError("cuDNN has no such kernel\nmore")

    device = torch_device(instances[0])
    monkeypatch.setattr(Program, "run", fail)
    with pytest.raises(ModelError, match=r"a batch of 2 failed: cuDNN has no such kernel$"):
        served(device, instances, 1)


# --- installation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            Installation("2.13.0+cpu", None, 0),
            r"found torch 2\.13\.0\+cpu, .* without CUDA; .*: uninstall torch and install it from",
        ),
        (
            Installation("2.13.0", "13.0", 0, "The NVIDIA driver on your system is too old"),
            r"found no usable GPU \(The NVIDIA driver .* too old\); .* driver for CUDA 13\.0",
        ),
        (Installation("2.13.0", "13.0", 0), "the driver reports no GPU"),
        (Installation("2.13.0", "13.0", 1), "found 1 GPUs, expected cuda:0$"),
        (Installation("2.13.0", "13.0", 2), "found 2 GPUs, expected cuda:0 to cuda:1$"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_with_what_is(found: Installation, words: str) -> None:
    with pytest.raises(ConfigError, match=f"device 'cuda:3': .*{words}"):
        check_installation(found, 3)


def test_what_torch_says_of_an_old_driver_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old\nmore", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    found = installation()
    words = "The NVIDIA driver on your system is too old"
    assert (found.num_devices, found.complaint) == (0, words)


def test_a_gpu_that_is_there_is_taken_and_the_one_behind_the_last_is_not() -> None:
    found = Installation("2.13.0", "13.0", 4)
    check_installation(found, 3)
    with pytest.raises(ConfigError, match="'cuda:4'"):
        check_installation(found, 4)
