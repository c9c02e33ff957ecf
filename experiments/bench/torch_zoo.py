"""Every network of the model zoo on the torch engine, on the processor, against onnxruntime.

For each network and precision: the largest difference between two rows' outputs and onnxruntime's float32
ones, in parts of the largest output. A processor has no TF32: there the factors of every product are rounded
to it (`worker.compiling.for_torch.TensorCoreProducts`).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from typing_extensions import override

from clockwright.errors import ModelError
from experiments.study.study import Study, chosen
from modelzoo.build import ARCHITECTURES, build_model, weights_bytes
from worker.compiling.for_torch import TorchTarget, products_as_on_a_gpu
from worker.compiling.lift_weights import lift_weights
from worker.engines.onnxruntime import plain_words
from worker.engines.torch_program import Program
from worker.engines.torch_tensors import weight_views
from worker.models.precision import Precision

_ROWS = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is compared."""

    seed: int = 0
    #: Begin no network after these.
    seconds: float = 3600.0
    networks: tuple[str, ...] = tuple(ARCHITECTURES)

    def __post_init__(self) -> None:
        chosen("network", self.networks, ARCHITECTURES)


@dataclass(frozen=True, slots=True)
class ZooEntry:
    """One network compared with onnxruntime."""

    network: str
    #: The largest difference by precision, in parts of the largest output.
    errors: Mapping[str, float] = field(default_factory=dict)
    #: The words in which it failed; empty: it did not.
    failure: str = ""

    @override
    def __str__(self) -> str:
        words = ", ".join(f"{precision} {error:.2e}" for precision, error in self.errors.items())
        return f"{self.network:32} {words or self.failure}"


def compare(setting: Setting) -> Iterator[ZooEntry]:
    """Compare networks until time is up, the smallest first."""
    torch.set_num_threads(1)
    until_s = time.monotonic() + setting.seconds
    for name in sorted(setting.networks, key=weights_bytes):
        if time.monotonic() >= until_s:
            return
        try:
            found = errors(name, setting.seed)
        except (ModelError, RuntimeError, TypeError, IndexError, ValueError) as error:
            yield ZooEntry(name, failure=plain_words(error))
            continue
        wrong = [precision for precision, ratio in found.items() if not math.isfinite(ratio)]
        if wrong:
            yield ZooEntry(name, failure=f"{wrong[0]}: outputs are no numbers")
        else:
            yield ZooEntry(name, found)


def errors(name: str, seed: int) -> dict[str, float]:
    """Compare one network in each precision.

    Raises:
        ModelError: the engine cannot run it.
    """
    model = build_model(name)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "optimised.onnx"
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(path)
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        optimised = path.read_bytes()
    rng = np.random.default_rng(seed)
    inputs = {
        each.name: rng.standard_normal((_ROWS, *each.shape[1:]), dtype=np.float32)
        if each.type == "tensor(float)"
        else rng.integers(0, 2, (_ROWS, *each.shape[1:]))
        for each in session.get_inputs()
    }
    wanted = session.run(None, inputs)
    found = {}
    for precision in Precision:
        lifted = lift_weights(type(model).FromString(optimised), level=(0, 1))
        lifted = TorchTarget(precision).lay_out(lifted)
        program = Program(lifted.graph, torch.device("cpu"))
        weights = weight_views(torch.from_numpy(lifted.blob), lifted.weights)
        tensors = [torch.from_numpy(array) for array in inputs.values()]
        with torch.inference_mode(), products_as_on_a_gpu(precision):
            outputs = program.run(tensors, weights, {})
        found[precision.value] = max(
            float(np.abs(output.numpy() - expected).max() / np.abs(expected).max())
            for output, expected in zip(outputs, wanted, strict=True)
        )
    return found


def figures_of(_setting: Setting, compared: Sequence[ZooEntry]) -> dict[str, float]:
    """Every error by its key, and the worst of each precision."""
    figures = {
        f"{each.network}_{precision}_error_ratio": error
        for each in compared
        for precision, error in each.errors.items()
    }
    for value in (precision.value for precision in Precision):
        every = [each.errors[value] for each in compared if value in each.errors]
        if every:
            figures[f"worst_{value}_error_ratio"] = max(every)
        figures[f"num_{value}"] = float(len(every))
    return figures


def failed(compared: Sequence[ZooEntry]) -> dict[str, str]:
    """Words in which each network failed, by network."""
    return {each.network: each.failure for each in compared if each.failure}


def not_compared(setting: Setting, compared: Sequence[ZooEntry]) -> dict[str, Any]:
    """Networks without figures: those that failed, and those that were not begun."""
    begun = {each.network for each in compared}
    left_out = [name for name in setting.networks if name not in begun]
    return {"left_out": left_out, "failed": failed(compared)}


STUDY = Study(
    name="torch_zoo",
    command="bench-torch-zoo",
    setting=Setting(),
    ask=compare,
    key="",
    figures=figures_of,
    tables={},
    extra=not_compared,
    fault=lambda compared: ", ".join(
        f"{name}: {words}" for name, words in failed(compared).items()
    ),
)
