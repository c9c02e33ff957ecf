"""On a real GPU: that what the other tests show on the processor holds there. Skipped without one."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch

from clockwright.errors import ModelError
from clockwright.units import NS_PER_MS
from experiments.bench.open_models import encoder
from experiments.gpu.hardware import BareDevice, Room
from modelzoo.build import build_model
from tests.kit.open_requests import Asking, alone, assert_right, tokens
from tests.kit.running_lanes import running
from tests.kit.worker_models import nothing_to_fetch, offer, silent
from worker.core.lanes import Step
from worker.devices.cuda import CudaAccelerator, installation
from worker.devices.gpu import TorchModel
from worker.engines.choice import Way
from worker.engines.torch_operators import Node, conv_add_relu
from worker.models.precision import Precision

_FOUND = installation()

pytestmark = [
    pytest.mark.gpu,
    # What torch has to say of a card or a driver is no reason to fail: a warning is not an error here.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        _FOUND.num_devices == 0,
        reason=f"no GPU that torch {_FOUND.torch_version} can use"
        + (f" ({_FOUND.complaint})" if _FOUND.complaint else ""),
    ),
]

ROOM = Room(num_pages=24, arena_bytes=192 << 20, io_bytes=128 << 20, host_bytes=1 << 30)

# One of each kind of graph.
NETWORKS = (
    "bert_tiny",
    "cifar_resnet20_v1",
    "densenet121",
    "dla34",
    "googlenet",
    "mobile_pose_mobilenetv3",
    "mobilenet0.25",
    "resnest14",
    "resnet18_v1",
    "se_resnext50_32x4d",
    "simple_pose_resnet18_v1b",
    "squeezenet1.1",
    "winograd_resnet18_v2",
)
# Compiling takes most of the time that `make gpu` has for tests.
FEW = ("bert_tiny", "mobile_pose_mobilenetv3", "resnest14", "resnet18_v1")


@pytest.fixture(scope="module")
def accelerator() -> CudaAccelerator:
    # Compiling takes long enough: nobody waits here for the fastest kernels too.
    return CudaAccelerator(0, search=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=list(Precision), ids=lambda precision: precision.value)
def bench(
    request: pytest.FixtureRequest, accelerator: CudaAccelerator, folder: Path
) -> Iterator[BareDevice]:
    bench = BareDevice(accelerator, ROOM, precision=request.param, cache_dir=folder)
    yield bench
    # Not closed: that would close the accelerator, which the others need.
    asyncio.run(bench.device._models.close())


def outputs(bench: BareDevice, step: Step[TorchModel]) -> np.ndarray:
    bench.device.run_exec(step)
    return np.frombuffer(b"".join(bench.device.run_output(step)), np.float32)


def assert_close(found: np.ndarray, wanted: np.ndarray, bench: BareDevice) -> None:
    """But for the order of sums, which kernels that share one sum among blocks leave to chance."""
    precision = bench.device.precision
    tolerance = precision.tolerance * float(np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


def reference(name: str, model: TorchModel, rows: int, seed: int = 0) -> np.ndarray:
    """Onnxruntime's answer to what `BareDevice.infer` puts in."""
    session = ort.InferenceSession(
        build_model(name, seed=seed).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    generator = np.random.default_rng(0)
    inputs = {}
    for spec in model.inputs:
        drawn = generator.random(spec.batch_bytes(rows) // 4, dtype=np.float32)
        # For tokens the same bytes are huge numbers: only indices inside their table can be compared.
        array = drawn if spec.datatype == "FP32" else np.zeros(drawn.nbytes // 8, np.int64)
        inputs[spec.name] = array.reshape(rows, *spec.row_shape)
    return np.asarray(session.run(None, inputs)[0], np.float32).reshape(-1)


def check_answer(bench: BareDevice, name: str, model: TorchModel, *, tolerance: float) -> None:
    """A batch of four answers as on the processor, within a part of the largest output."""
    pages = random.Random(0).sample(range(ROOM.num_pages), model.num_pages)
    bench.load(model, pages)
    step = bench.infer(model, pages, 4)
    if model.inputs[0].datatype != "FP32":
        bench.device.run_input(step, [bytes(spec.batch_bytes(4)) for spec in model.inputs])
    wanted = reference(name, model, 4)
    largest = float(np.abs(wanted).max())
    np.testing.assert_allclose(outputs(bench, step), wanted, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize(
    ("bench", "name"),
    [(Precision.FLOAT32, name) for name in NETWORKS]
    + [(precision, name) for precision in (Precision.TF32, Precision.FLOAT16) for name in FEW],
    indirect=["bench"],
)
def test_a_network_answers_as_on_onnxruntime(bench: BareDevice, name: str) -> None:
    precision = bench.device.precision
    model = asyncio.run(bench.model(name, (1, 4)))
    # cuDNN may choose another algorithm than the processor's: more than rounding in the last bits.
    check_answer(bench, name, model, tolerance=max(precision.tolerance, 2e-3))


@pytest.mark.parametrize("bench", [Precision.FLOAT32], indirect=True)
def test_sequences_of_unlike_lengths_are_answered_as_on_onnxruntime(bench: BareDevice) -> None:
    network = encoder(layers=1, positions=20)
    offered = offer(bench._files, "encoder", network.SerializeToString(), (1, 2, 4))
    model = asyncio.run(bench.device.prepare(offered, nothing_to_fetch, silent))
    generator = np.random.default_rng(0)
    shapes = ((1, 20), (3, 7), (1, 1), (2, 5), (1, 11))
    requests = [tokens(generator, *shape) for shape in shapes]
    taken = bench.device.num_allocations
    with running(bench.device) as lanes:
        asking = Asking(lanes, model)
        for some in (requests, requests[:1], requests[1:4]):
            assert_right(asking.answers(some), [alone(network, each) for each in some], 2e-3)
    assert bench.device.num_allocations == taken


@pytest.mark.parametrize("bench", [Precision.FLOAT32], indirect=True)
def test_the_other_engine_answers_as_on_the_processor_unless_it_refuses_the_network(
    bench: BareDevice, accelerator: CudaAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if accelerator.onnxruntime_place() is None:
        pytest.skip("onnxruntime is installed without CUDA")
    monkeypatch.setattr(bench.device._kernels, "_ways", (Way.ONNXRUNTIME,))
    refused = []
    for name in FEW:
        try:
            model = asyncio.run(bench.model(name, (1, 4)))
        except ModelError as error:
            # An operator that it runs on the processor alone is enough; a worker then takes torch.
            refused.append(f"{name} ({error})")
            continue
        assert {kernel.way for kernel in model.kernels.values()} == {Way.ONNXRUNTIME}
        check_answer(bench, name, model, tolerance=2e-3)
    words = ", ".join(refused)
    assert len(refused) < len(FEW), words
    if refused:
        pytest.skip(f"the other networks are right, but onnxruntime refuses {words}")


def test_paging_changes_no_answer_and_takes_no_memory(bench: BareDevice) -> None:
    models = [asyncio.run(bench.model("resnet18_v1", (1, 2), seed=seed)) for seed in range(3)]
    first = tuple(range(models[0].num_pages))
    expected = []
    for model in models:
        bench.load(model, first)
        expected.append(outputs(bench, bench.infer(model, first, 2)))
    for other in expected[1:]:
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_close(other, expected[0], bench)
    taken = bench.device.num_allocations
    rng = random.Random(0)
    for _ in range(50):
        chosen = rng.randrange(3)
        pages = rng.sample(range(ROOM.num_pages), models[chosen].num_pages)
        bench.load(models[chosen], pages)
        found = outputs(bench, bench.infer(models[chosen], pages, 2))
        assert_close(found, expected[chosen], bench)
    assert bench.device.num_allocations == taken


def test_pages_overwritten_behind_a_queued_exec_do_not_change_its_answer(bench: BareDevice) -> None:
    models = [asyncio.run(bench.model("resnet18_v1", (1, 2), seed=seed)) for seed in range(2)]
    pages = tuple(range(models[0].num_pages))
    bench.load(models[0], pages)
    expected = outputs(bench, bench.infer(models[0], pages, 2))
    for _ in range(20):
        bench.load(models[0], pages)
        ahead, behind = bench.infer(models[0], pages, 2), bench.infer(models[0], pages, 2)
        launched = [bench.device.launch_exec(step) for step in (ahead, behind)]
        bench.load(models[1], pages)
        for step, ticket in zip((ahead, behind), launched, strict=True):
            bench.device.finish_exec(step, ticket)
        payload = bench.device.run_output(behind)
        assert_close(np.frombuffer(b"".join(payload), np.float32), expected, bench)


def test_events_of_captured_work_are_not_done_from_its_launch_until_they_are_reached(
    accelerator: CudaAccelerator,
) -> None:
    # All answers rest on it: an EXEC whose end is taken for that of the one before is read too soon.
    memory = accelerator.device_memory(1 << 30)

    def work() -> None:
        for _ in range(50):
            memory.add_(1)

    stream, begin, end = accelerator.stream(), accelerator.event(), accelerator.event()
    captured = accelerator.capture([begin, work, end], rehearsal=work, tensor_cores=False)
    begin.synchronize()
    for _ in range(3):
        captured.launch(stream, [begin, work, end])
        # 100 GiB are read and written: tens of milliseconds on any card.
        assert not end.is_done()
        end.synchronize()
        assert end.ns_since(begin) > NS_PER_MS


def test_a_joint_convolution_makes_nothing_of_what_lay_where_its_output_goes(
    accelerator: CudaAccelerator,
) -> None:
    # cuDNN's kernel adds a tensor that this one does not have: torch gives it the output, times 0.
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 64, 56, 56), (64, 64, 3, 3), (64,)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    wanted = torch.nn.functional.conv2d(x, weight, bias, padding=1).relu().numpy()
    on_device = [tensor.to(accelerator.device) for tensor in (x, weight, bias)]
    # What the allocator hands out next.
    stale = [torch.full(wanted.shape, float("nan"), device=accelerator.device) for _ in range(8)]
    del stale
    try:
        found = conv_add_relu(Node("conv_add_relu", (), (), {"pads": [1] * 4}), *on_device)
    except RuntimeError as error:
        pytest.skip(f"cuDNN has no joint kernel for it: {error}")
    tolerance = Precision.TF32.tolerance * float(wanted.max())
    np.testing.assert_allclose(found.cpu().numpy(), wanted, rtol=0, atol=tolerance)


def test_a_fault_in_a_kernel_is_told_from_an_error_in_a_call() -> None:
    # In a process of its own, which the fault ends.
    program = """
        import torch
        from worker.devices.cuda import CudaAccelerator
        accelerator = CudaAccelerator(0)
        try:
            torch.zeros(2, device="cuda") + torch.zeros(3, device="cuda")
        except RuntimeError:
            print("harmless:", accelerator.fault())
        table = torch.zeros(4, device="cuda")
        try:
            table[torch.tensor([10**6], device="cuda")].cpu()
        except RuntimeError:
            print("fatal:", accelerator.fault())
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "harmless: None" in run.stdout, run.stderr
    assert "fatal: cuda:" in run.stdout, run.stderr


def test_more_memory_than_the_card_has_is_refused(accelerator: CudaAccelerator) -> None:
    with pytest.raises(MemoryError, match=r"MiB are needed, .* MiB are free"):
        accelerator.device_memory(1 << 44)
