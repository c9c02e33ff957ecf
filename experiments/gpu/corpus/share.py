"""How many of the corpus's networks compile for torch, and how far their answers are from onnxruntime's."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch

from clockwright.errors import ModelError
from experiments.gpu.corpus import Array, names, network, rows
from worker.compiling.compile import compile_model, read_weights
from worker.compiling.for_torch import TorchTarget
from worker.engines.onnxruntime import open_session
from worker.engines.torch_program import Program
from worker.engines.torch_tensors import weight_views
from worker.models.model_files import GRAPH_FILE, MODEL_FILE, CompiledModel, Limits, ModelSource
from worker.models.precision import Precision

#: How far an answer may be from onnxruntime's, as a part of the largest number of its output.
TOLERANCE = 1e-4
_ROWS = (1, 2)
_LIMITS = Limits(arena_bytes=1 << 30, num_pages=64, io_bytes=64 << 20)


@dataclass(frozen=True, slots=True)
class TriedNetwork:
    """What happened to a network."""

    name: str
    #: Why it does not compile; empty if it does.
    refusal: str
    #: The largest difference between its answers and onnxruntime's, as a part of the largest number of the output.
    difference: float
    #: Why it runs row by row, as the compiler found; empty if it runs in batches.
    one_by_one: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it compiles and answers as onnxruntime does."""
        return not self.refusal and self.difference <= TOLERANCE


def try_network(name: str) -> TriedNetwork:
    """Compile a network of the corpus for torch on the processor, and ask it and onnxruntime the same."""
    model = network(name)
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "source"), Path(scratch, "target")
        source.mkdir()
        target.mkdir()
        onnx.save_model(model, source / MODEL_FILE)
        try:
            compiled = compile_model(
                ModelSource(source),
                target,
                _LIMITS,
                lambda stage: None,
                TorchTarget(Precision.FLOAT32),
            )
        except ModelError as error:
            return TriedNetwork(name, str(error), 0.0)
        program = Program((target / GRAPH_FILE).read_bytes(), torch.device("cpu"))
        weights = read_weights(target, compiled).copy()
    return TriedNetwork(
        name, "", _difference(model, program, compiled, weights), compiled.one_by_one
    )


def _difference(
    model: onnx.ModelProto, program: Program, compiled: CompiledModel, weights: Array
) -> float:
    session = open_session(model.SerializeToString())
    views = weight_views(torch.from_numpy(weights), compiled.weights)
    largest = 0.0
    for count in _ROWS[:1] if compiled.one_by_one else _ROWS:
        asked = rows(model, count)
        wanted = session.run(None, asked)
        with torch.inference_mode():
            found = program.run([torch.from_numpy(each) for each in asked.values()], views, {})
        for one, other in zip(wanted, found, strict=True):
            scale = float(np.abs(one).max())
            largest = max(largest, float(np.abs(one - other.numpy()).max()) / scale)
    return largest


def compiled_share(*, processes: int) -> tuple[float, list[TriedNetwork]]:
    """Try the networks of the corpus.

    Args:
        processes: how many to try at a time.

    Returns:
        The part of them that compile and answer as onnxruntime does, and what happened to each.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        outcomes = list(pool.map(try_network, names()))
    return sum(each.is_right for each in outcomes) / len(outcomes), outcomes
