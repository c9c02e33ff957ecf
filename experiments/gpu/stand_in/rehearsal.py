"""The worker's code for GPUs on the stand-in. Runs under a torch for CUDA, and prints what it found as JSON.

`stand_in.rehearse` starts it. What it cannot show: kernels of cuDNN and cuBLAS, NVML, and times.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from clockwright import Client
from clockwright.errors import ModelError, RefusedError
from clockwright.units import NS_PER_S, ActionId, ModelId
from clockwright.wire.actions import Infer, LoadWeights
from experiments.live.bare_lanes import fetch_nothing, stored
from experiments.live.local_server import LocalServer
from worker.core.lanes import Lane, Step
from worker.devices.accelerator import Piece
from worker.devices.cuda import CudaAccelerator
from worker.devices.cuda_graph import CudaWork
from worker.devices.exec_queue import ExecQueue
from worker.devices.gpu import TorchDevice, TorchModel
from worker.models.file_store import FileStore
from worker.models.model_files import Limits
from worker.models.precision import Precision
from worker.models.served_model import Offer

# A network of the wide kind has two pages, and a weight that lies on both.
WIDE, NARROW = 3 << 20, 1 << 10
NUM_PAGES = 8
# The largest relative error that is no wrong answer.
TOLERANCE = 1e-5
_SLOT_BYTES = 32 << 20
_ANY_TIME: Any = {
    "action_id": ActionId(1),
    "earliest_ns": 0,
    "latest_ns": NS_PER_S,
    "expected_duration_ns": 1,
}
# Devices that stay until their process is gone: torch aborts where a lost one's graphs go.
_KEPT: list[Desk] = []
_OUT_OF_MEMORY, _ILLEGAL_ADDRESS = 2, 700
T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[np.float32]]


class StandIn:
    """The stand-in of this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcudart.so.13")

    def counts(self) -> dict[str, int]:
        """How often everything was done so far."""
        room = ctypes.create_string_buffer(1 << 20)
        self._library.standInCounts(room, len(room))
        lines = (line.split(" ", 1) for line in room.value.decode().splitlines())
        return {what: int(number) for number, what in lines}

    def fail(self, call: str, number: int, error: int, *, sticky: bool = False) -> None:
        """Have the call of this number fail from now on; the first is 1, and 0 takes the order back."""
        self._library.standInFail(call.encode(), ctypes.c_long(number), error, int(sticky))

    def dawdle(self, seed: int, delay_us: int = 200) -> None:
        """Have streams begin late by chance from now on; at once with a negative seed."""
        self._library.standInDawdle(ctypes.c_long(seed), ctypes.c_long(delay_us))


class AddAndMul:
    """Computes (x + w) * v. Its weights follow from its seed."""

    def __init__(self, seed: int, width: int) -> None:
        self.name, self.width = f"net{seed}", width
        generator = np.random.default_rng(seed)
        self._w, self._v = (generator.random(width, dtype=np.float32) for _ in range(2))

    def onnx(self) -> bytes:
        """The network as a file."""
        nodes = [
            helper.make_node("Add", ["x", "w"], ["t"]),
            helper.make_node("Mul", ["t", "v"], ["y"]),
        ]
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", self.width])
            for name in "xy"
        ]
        weights = [numpy_helper.from_array(self._w, "w"), numpy_helper.from_array(self._v, "v")]
        graph = helper.make_graph(nodes, self.name, ends[:1], ends[1:], weights)
        model: onnx.ModelProto = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 17)]
        )
        model.ir_version = 8
        return bytes(model.SerializeToString())

    def is_right(self, x: Array, answer: Array) -> bool:
        """Whether an answer is that of numpy."""
        return np.allclose(answer, (x + self._w) * self._v, rtol=TOLERANCE, atol=0)


class Desk:
    """A device whose steps are handed over in a random order, two EXEC at a time."""

    def __init__(self, cache: Path) -> None:
        self.lost: list[str] = []
        self._files = FileStore(cache)
        self.device = TorchDevice(
            CudaAccelerator(0, search=False),
            limits=Limits(64 << 20, NUM_PAGES, _SLOT_BYTES),
            io_pool_bytes=2 * _SLOT_BYTES,
            host_bytes=96 << 20,
            precision=Precision.FLOAT32,
            files=self._files,
            cache_dir=cache,
            compile_limit_s=120,
            on_lost=self.lost.append,
        )
        self._models: list[tuple[AddAndMul, TorchModel]] = []
        self._pages: dict[int, Sequence[int]] = {}
        self.outcomes = {"right": 0, "wrong": 0, "failed": 0}

    def add(self, network: AddAndMul, batch_sizes: Sequence[int] = (1,)) -> None:
        """Set a network up."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "model.onnx").write_bytes(network.onnx())
            offered = stored(self._files, Path(folder))
        offer = Offer(ModelId(network.name), offered, tuple(batch_sizes), {}, "")
        model = asyncio.run(self.device.prepare(offer, fetch_nothing, lambda _: None))
        self._models.append((network, model))

    def serve(self, num_requests: int, seed: int) -> None:
        """Ask the networks at random, from random pages, while the EXEC before is still under way."""
        order = random.Random(seed)
        behind: Callable[[], object] | None = None
        for number in range(num_requests):
            last, behind = behind, self._guarded(partial(self._begin, order, number % 2))
            if last is not None:
                self._guarded(last)
        if behind is not None:
            self._guarded(behind)

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """Do a part of a request, whose failure is that of the request alone."""
        try:
            return work()
        except Exception:  # whatever a device raises fails the action
            self.outcomes["failed"] += 1
            return None

    def _begin(self, order: random.Random, slot: int) -> Callable[[], object]:
        index = order.randrange(len(self._models))
        network, model = self._models[index]
        batch_size = order.choice(list(model.kernels))
        if index not in self._pages or order.random() < 0.5:
            pages = order.sample(range(NUM_PAGES), model.num_pages)
            # What lay there is gone, also if the LOAD fails.
            self._pages = {key: held for key, held in self._pages.items() if not {*held} & {*pages}}
            self._pages.pop(index, None)
            self.device.run_load(
                self._step(
                    Lane.LOAD, LoadWeights(model_id=model.model_id, **_ANY_TIME), model, pages
                )
            )
            self._pages[index] = pages
        x = np.random.default_rng(order.getrandbits(32)).random(
            (batch_size, network.width), dtype=np.float32
        )
        action = Infer(
            model_id=model.model_id, batch_size=batch_size, rows=(batch_size,), **_ANY_TIME
        )
        step = self._step(Lane.EXEC, action, model, self._pages[index], slot * _SLOT_BYTES)
        self.device.run_input(step, [x.tobytes()])
        launched = self.device.launch_exec(step)

        def end() -> None:
            self.device.finish_exec(step, launched)
            answer = np.frombuffer(b"".join(self.device.run_output(step)), np.float32)
            key = "right" if network.is_right(x, answer.reshape(x.shape)) else "wrong"
            self.outcomes[key] += 1

        return end

    def _step(
        self,
        lane: Lane,
        action: Infer | LoadWeights,
        model: TorchModel,
        pages: Sequence[int],
        slot: int = 0,
    ) -> Step[TorchModel]:
        return Step(lane, action, model, tuple(pages), slot)

    def close(self) -> None:
        """Give everything back."""
        asyncio.run(self.device.close())


def networks() -> list[tuple[AddAndMul, tuple[int, ...]]]:
    """Two that share their kernels and have two pages each, and one that has batches."""
    return [
        (AddAndMul(0, WIDE), (1,)),
        (AddAndMul(1, WIDE), (1,)),
        (AddAndMul(2, NARROW), (1, 2, 4)),
    ]


# --- what is rehearsed ------------------------------------------------------------------------------


def answers(num_orders: int, cache: Path) -> dict[str, object]:
    """100 requests in each of some random orders, with as many seeds for late beginnings."""
    stand_in = StandIn()
    desk = Desk(cache)
    for network, sizes in networks():
        desk.add(network, sizes)
    taken, before = desk.device.num_allocations, stand_in.counts()
    for seed in range(num_orders):
        stand_in.dawdle(seed)
        desk.serve(100, seed)
    after = stand_in.counts()
    found: dict[str, object] = {
        **desk.outcomes,
        "orders": num_orders,
        "allocations": desk.device.num_allocations
        - taken
        + after["cudaMalloc"]
        - before["cudaMalloc"],
        "pageable_copies": sum(
            after[key] - before.get(key, 0) for key in after if "pageable" in key
        ),
        "captures_spoilt": sum(after[key] for key in after if key.startswith("captures spoilt")),
        "unknown_kernels": sum(after[key] for key in after if key.startswith("unknown kernel")),
    }
    desk.close()
    return found


def without_wait(num_orders: int, cache: Path) -> dict[str, object]:
    """As `answers`, but a LOAD does not wait for the gathers from the pages that it writes to."""
    ExecQueue.wait_for_readers = lambda *_: None  # type: ignore[method-assign]
    return answers(num_orders, cache)


def spoilt(_: int, cache: Path) -> dict[str, object]:
    """One network's capture waits for its stream, as a capture forbids; those before and behind it are served."""
    desk = Desk(cache)
    (first, sizes), (second, sizes), (third, others) = networks()
    desk.add(first, sizes)
    capture = CudaAccelerator.capture

    def wait_too(
        self: CudaAccelerator,
        pieces: Sequence[Piece | None],
        **settings: Any,  # noqa: ANN401
    ) -> CudaWork:
        return capture(
            self, [*pieces, lambda: torch.cuda.current_stream().synchronize()], **settings
        )

    CudaAccelerator.capture = wait_too  # type: ignore[method-assign]
    refused = []
    for batch_size in (2, 4):
        try:
            desk.add(third, (batch_size,))
        except ModelError as error:
            refused.append(str(error))
    CudaAccelerator.capture = capture  # type: ignore[method-assign]
    desk.add(second, sizes)
    desk.add(third, others)
    desk.serve(30, seed=0)
    found = {**desk.outcomes, "refused": refused, "lost": desk.lost}
    desk.close()
    return found


def register_refused(_: int, cache: Path) -> dict[str, object]:
    """Locked memory is refused once; then a kernel runs."""
    accelerator = CudaAccelerator(0, search=False)
    StandIn().fail("cudaHostRegister", 1, _OUT_OF_MEMORY)
    try:
        accelerator.host_memory(1)
        words = ""
    except MemoryError as error:
        words = str(error)
    return {"words": words, "next": float((torch.zeros(1, device="cuda") + 1).item())}


# What a lost worker could not even be asked for, and what only says what went wrong.
_NOT_TRIED = ("cudaDriverGetVersion", "cudaGetDeviceCount", "cudaGetDevice", "cudaSetDevice")


def faults(num_places: int, cache: Path) -> dict[str, object]:
    """Each call of the runtime fails: while the second network is set up, and while both are served.

    Each fault has a process of its own. It comes at the first such call of its phase, at the last, and at some
    between; as an error that passes, and at one of them as one after which every call fails.
    """
    clean = _in_child(partial(_with_fault, cache, None))
    tried = []
    for phase in ("set-up", "serving"):
        for call, number in sorted(clean["calls"][phase].items()):
            if not call.startswith("cuda") or call in _NOT_TRIED:
                continue
            places = {
                round(1 + (number - 1) * part / max(num_places - 1, 1))
                for part in range(num_places)
            }
            for index, place in enumerate(sorted(places)):
                for sticky in (False, True)[: 1 + (index == 0)]:
                    fault = (phase, call, place, sticky)
                    found = _in_child(partial(_with_fault, cache, fault))
                    tried.append(
                        {"phase": phase, "call": call, "number": place, "sticky": sticky, **found}
                    )
    needlessly = [
        each
        for each in tried
        if each["phase"] == "set-up" and not each["sticky"] and not each.get("serves")
    ]
    return {
        "faults_tried": len(tried),
        "calls": sorted({each["call"] for each in tried}),
        "wrong_answers": sum(each.get("wrong", 0) for each in tried),
        "workers_lost": sum(not each.get("serves") for each in tried),
        "workers_lost_needlessly": len(needlessly),
        "networks_refused": sum(bool(each.get("refused")) for each in tried),
        # Ends of the whole process: a lost device may be the end of one, nothing else.
        "ended": [each for each in tried if "ended" in each and not each["sticky"]],
        "needlessly": needlessly,
    }


def _with_fault(cache: Path, fault: tuple[str, str, int, bool] | None) -> dict[str, Any]:
    """Set two networks up and serve them; says what happened to requests, and whether the worker lives on."""
    stand_in = StandIn()
    calls: dict[str, dict[str, int]] = {}
    desk = Desk(cache)
    _KEPT.append(desk)
    desk.add(AddAndMul(2, NARROW), (1, 2))
    refused = ""

    def phase(name: str, work: Callable[[], None]) -> None:
        before = stand_in.counts()
        if fault is not None and fault[0] == name:
            _, call, number, sticky = fault
            stand_in.fail(
                call, number, _ILLEGAL_ADDRESS if sticky else _OUT_OF_MEMORY, sticky=sticky
            )
        work()
        if fault is not None:
            stand_in.fail(fault[1], 0, 0)
        after = stand_in.counts()
        calls[name] = {
            key: after[key] - before.get(key, 0) for key in after if after[key] > before.get(key, 0)
        }

    def set_up() -> None:
        nonlocal refused
        try:
            desk.add(AddAndMul(3, NARROW // 2), (1,))
        except Exception as error:  # the worker refuses the model, whatever it is
            refused = f"{type(error).__name__}: {error}"

    phase("set-up", set_up)
    stand_in.dawdle(0, 20)
    phase("serving", lambda: desk.serve(8, seed=1))
    counted = dict(desk.outcomes)
    desk.serve(4, seed=2)
    serves = not desk.lost and desk.outcomes["right"] >= counted["right"] + 4
    found = {**desk.outcomes, "refused": refused, "lost": desk.lost, "serves": serves}
    return found if fault else {**found, "calls": calls}


def _in_child(work: Callable[[], dict[str, Any]], limit_s: int = 60) -> dict[str, Any]:
    """Do it in a copy of this process, which has not used the device yet and knows all modules."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(limit_s)
        try:
            found = work()
        except Exception as error:  # the parent says so
            found = {"ended": f"{type(error).__name__}: {error}"[:300]}
        with os.fdopen(writes, "w") as pipe:
            pipe.write(json.dumps(found))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"ended": f"with status {status}"}


def serve(num_requests: int, cache: Path) -> dict[str, object]:
    """`clockwright up --device cuda:0` with sixty models in sixteen pages, asked by three clients at a time."""
    counts = {"right": 0, "wrong": 0, "refused": 0}
    lock = threading.Lock()
    served = [AddAndMul(seed, NARROW << 8) for seed in range(3)]
    for network in served:
        (cache / "models" / network.name / "1").mkdir(parents=True)
        (cache / "models" / network.name / "1" / "model.onnx").write_bytes(network.onnx())
        (cache / "models" / network.name / "config.toml").write_text(
            "copies = 20\nbatch_sizes = [1]\n"
        )
    folders = {"--models": "models", "--cache-dir": "cache", "--telemetry": "telemetry"}
    flags = [word for flag, name in folders.items() for word in (flag, str(cache / name))]
    flags += ["--device", "cuda:0", "--pages", "16", "--host-mib", "64"]
    (cache / "reports").mkdir()
    environment = {"STAND_IN_SEED": "1", "STAND_IN_REPORT": str(cache / "reports")}
    begin_s = time.monotonic()
    with LocalServer(flags, environment=environment) as server:
        ready_s = time.monotonic() - begin_s
        number = iter(range(num_requests))

        def ask(seed: int) -> None:
            order = random.Random(seed)
            with Client(server.address) as client:
                while next(number, None) is not None:
                    network = order.choice(served)
                    x = np.random.default_rng(order.getrandbits(32)).random(
                        (1, network.width), dtype=np.float32
                    )
                    try:
                        name = f"{network.name}-{order.randrange(20)}"
                        answer = client.infer(name, {"x": x}, slo_ms=20_000).outputs["y"]
                        key = "right" if network.is_right(x, answer) else "wrong"
                    except RefusedError:
                        key = "refused"
                    with lock:
                        counts[key] += 1

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = [
        line for path in (cache / "reports").iterdir() for line in path.read_text().splitlines()
    ]
    forbidden = [
        line
        for line in lines
        if "captures spoilt" in line or "unknown kernel" in line or "pageable" in line
    ]
    launches = sum(int(line.split()[0]) for line in lines if line.endswith(" graph launches"))
    return {**counts, "ready_s": ready_s, "launches": launches, "forbidden": forbidden}


RUNS: dict[str, Callable[[int, Path], dict[str, object]]] = {
    "answers": answers,
    "without-wait": without_wait,
    "spoilt": spoilt,
    "register-refused": register_refused,
    "faults": faults,
    "serve": serve,
}


def main() -> None:
    """Run the part that the command line names, with its number."""
    name, number = sys.argv[1], int((*sys.argv[2:], "1")[0])
    with tempfile.TemporaryDirectory() as cache:
        found = RUNS[name](number, Path(cache))
    print(json.dumps({"torch": torch.__version__, **found}))
