"""Models and devices for tests of the worker: a network of two pages, offers of it, devices to serve it."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from clockwright.units import ModelId
from modelzoo.profile import load_profile
from worker.compiling.compile import read_weights
from worker.devices.cpu import CpuDevice
from worker.devices.device import Device
from worker.devices.modelled import ModelledDevice
from worker.engines.onnxruntime import open_session, private_kernel
from worker.models.file_store import FileStore
from worker.models.model_files import GRAPH_FILE, CompiledModel, Limits
from worker.models.served_model import Offer, OfferedFile

LIMITS = Limits(arena_bytes=64 << 20, num_pages=4, io_bytes=1 << 20)


IO_POOL_BYTES = 4 << 20


# 1100 * 4096 * 4 bytes: two pages, the second one in part.
WIDE, NARROW = 4096, 1100


def relu_file(values: int = 4) -> bytes:
    """A model of one operator, as a file."""
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", values])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", values])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


def network(seed: int) -> onnx.ModelProto:
    """Two dense layers with weights that straddle two pages."""
    rng = np.random.default_rng(seed)
    weights = {
        "w": rng.standard_normal((NARROW, WIDE), dtype=np.float32),
        "b": rng.standard_normal(WIDE, dtype=np.float32),
        "o": rng.standard_normal((WIDE, 3), dtype=np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("Add", ["h", "b"], ["s"]),
            helper.make_node("Relu", ["s"], ["r"]),
            helper.make_node("MatMul", ["r", "o"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", NARROW])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def stored(files: FileStore, content: bytes, name: str = "model.onnx") -> OfferedFile:
    path = files.new_file()
    path.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    files.add(path, sha256)
    return OfferedFile(name, len(content), sha256)


def offer(
    files: FileStore, model_id: str, content: bytes, batch_sizes: tuple[int, ...] = (1, 2)
) -> Offer:
    return Offer(ModelId(model_id), (stored(files, content),), batch_sizes, {}, "")


async def nothing_to_fetch(files: object) -> None:
    assert not files


def silent(stage: str) -> None:
    pass


def cpu_device(cache_dir: Path, *, io_times: int = 1) -> CpuDevice:
    return CpuDevice(
        limits=replace(LIMITS, io_bytes=io_times * LIMITS.io_bytes),
        io_pool_bytes=io_times * IO_POOL_BYTES,
        files=FileStore(cache_dir),
        cache_dir=cache_dir,
        compile_limit_s=120,
    )


class ThreadedDevice(ModelledDevice):
    """Its lanes have threads, so that tests may have its steps wait."""

    duration_ns = None  # type: ignore[assignment]


AModelledDevice = TypeVar("AModelledDevice", bound=ModelledDevice)


def modelled_device(cache_dir: Path, profile: str) -> ModelledDevice:
    return a_modelled(ModelledDevice, cache_dir, profile)


def a_modelled(
    kind: type[AModelledDevice], cache_dir: Path, profile: str = "1ms", limits: Limits = LIMITS
) -> AModelledDevice:
    return kind(
        load_profile(profile),
        limits=limits,
        io_pool_bytes=max(IO_POOL_BYTES, limits.io_bytes),
        files=FileStore(cache_dir),
        compile_limit_s=120,
    )


def prepared(device: Device[Any], *offers: Offer) -> list[Any]:
    async def prepare() -> list[Any]:
        try:
            return [await device.prepare(each, nothing_to_fetch, silent) for each in offers]
        finally:
            await device.close()

    return asyncio.run(prepare())


def unpaged(folder: Path, compiled: CompiledModel, x: np.ndarray) -> bytes:
    """The same engine, with the weights where the file put them."""
    kernel, inputs, outputs = private_kernel(
        open_session(str(folder / GRAPH_FILE)), compiled, len(x), read_weights(folder, compiled)
    )
    inputs[0][:] = np.frombuffer(x.tobytes(), np.uint8)
    kernel.launch()
    return outputs[0].tobytes()


def compiled_models(cache_dir: Path) -> dict[str, tuple[Path, CompiledModel]]:
    found = {}
    for folder in (cache_dir / "compiled").iterdir():
        compiled = CompiledModel.from_json((folder / "model.json").read_text())
        found[compiled.weights_sha256] = (folder, compiled)
    return found


def echo(values: int) -> bytes:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", values])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", values])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()
