"""The worker's code for GPUs on the stand-in. Runs under a torch for CUDA, and prints what it found as JSON.

`python -m experiments.gpu.stand_in.rehearsal NAME [NUMBER]`, in an environment that `stand_in.environment` gives.
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
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from clockwright import Client
from clockwright.actions import Infer, LoadWeights
from clockwright.errors import ConfigError, RefusedError
from clockwright.units import NS_PER_S, ActionId, ModelId
from experiments.live.bare_lanes import fetch_nothing, stored
from experiments.live.local_server import LocalServer
from worker.core.lanes import Lane, Step
from worker.devices.cuda import CudaAccelerator
from worker.devices.device import DeviceLostError
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
_ANY_TIME: Any = {"action_id": ActionId(1), "earliest_ns": 0, "latest_ns": NS_PER_S, "expected_duration_ns": 1}
_OUT_OF_MEMORY, _ILLEGAL_ADDRESS = 2, 700
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


class Network:
    """Computes (x + w) * v. Its weights follow from its seed."""

    def __init__(self, seed: int, width: int) -> None:
        self.name, self.width = f"net{seed}", width
        generator = np.random.default_rng(seed)
        self._w, self._v = (generator.random(width, dtype=np.float32) for _ in range(2))

    def onnx(self) -> bytes:
        nodes = [helper.make_node("Add", ["x", "w"], ["t"]), helper.make_node("Mul", ["t", "v"], ["y"])]
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", self.width]) for name in "xy"]
        weights = [numpy_helper.from_array(self._w, "w"), numpy_helper.from_array(self._v, "v")]
        graph = helper.make_graph(nodes, self.name, ends[:1], ends[1:], weights)
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 8
        return bytes(model.SerializeToString())

    def is_right(self, x: Array, answer: Array) -> bool:
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
        self._models: list[tuple[Network, TorchModel]] = []
        self._pages: dict[int, Sequence[int]] = {}
        self.outcomes = {"right": 0, "wrong": 0, "failed": 0}

    def add(self, network: Network, batch_sizes: Sequence[int] = (1,)) -> None:
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
            last, behind = behind, self._guarded(lambda: self._begin(order, number % 2))
            if last is not None:
                self._guarded(last)
        if behind is not None:
            self._guarded(behind)

    def _guarded(self, work: Callable[[], Any]) -> Any:
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
            self.device.run_load(self._step(Lane.LOAD, LoadWeights(model_id=model.model_id, **_ANY_TIME), model, pages))
            self._pages[index] = pages
        x = np.random.default_rng(order.getrandbits(32)).random((batch_size, network.width), dtype=np.float32)
        action = Infer(model_id=model.model_id, batch_size=batch_size, rows=(batch_size,), **_ANY_TIME)
        step = self._step(Lane.EXEC, action, model, self._pages[index], slot * _SLOT_BYTES)
        self.device.run_input(step, [x.tobytes()])
        launched = self.device.launch_exec(step)

        def end() -> None:
            self.device.finish_exec(step, launched)
            answer = np.frombuffer(b"".join(self.device.run_output(step)), np.float32)
            key = "right" if network.is_right(x, answer.reshape(x.shape)) else "wrong"
            self.outcomes[key] += 1

        return end

    def _step(self, lane: Lane, action: Any, model: TorchModel, pages: Sequence[int], slot: int = 0) -> Step[TorchModel]:
        return Step(lane, action, model, tuple(pages), slot)

    def close(self) -> None:
        asyncio.run(self.device.close())


def networks() -> list[tuple[Network, tuple[int, ...]]]:
    """Two that share their kernels and have two pages each, and one that has batches."""
    return [(Network(0, WIDE), (1,)), (Network(1, WIDE), (1,)), (Network(2, NARROW), (1, 2, 4))]


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
    found = {
        **desk.outcomes,
        "orders": num_orders,
        "allocations": desk.device.num_allocations - taken + after["cudaMalloc"] - before["cudaMalloc"],
        "pageable_copies": sum(after[key] - before.get(key, 0) for key in after if "pageable" in key),
        "captures_spoilt": sum(after[key] for key in after if key.startswith("captures spoilt")),
        "unknown_kernels": sum(after[key] for key in after if key.startswith("unknown kernel")),
    }
    desk.close()
    return found


def without_wait(num_orders: int, cache: Path) -> dict[str, object]:
    """As `answers`, but a LOAD does not wait for the gathers from the pages that it writes to."""
    ExecQueue.make_wait_for_readers = lambda *_: None  # type: ignore[method-assign]
    return answers(num_orders, cache)


RUNS: dict[str, Callable[[int, Path], dict[str, object]]] = {
    "answers": answers,
    "without-wait": without_wait,
}


def main() -> None:
    name, number = sys.argv[1], int((*sys.argv[2:], "1")[0])
    with tempfile.TemporaryDirectory() as cache:
        found = RUNS[name](number, Path(cache))
    print(json.dumps({"torch": torch.__version__, **found}))


if __name__ == "__main__":
    main()
