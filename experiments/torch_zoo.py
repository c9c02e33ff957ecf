"""Every network of the model zoo on the torch engine, on the processor, against onnxruntime.

For each network and precision: the largest difference between two rows' outputs and onnxruntime's float32
ones, in parts of the largest output. On a processor TF32 is float32 with convolutions' weights channels
last. Half precision is slow there, so the larger networks are compared in float32 and TF32 only.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from experiments.results_file import RESULTS, write_results
from modelzoo.build import ARCHITECTURES, build_model, weights_bytes
from worker.lift import lift_weights
from worker.precision import Precision
from worker.torch_compile import TorchTarget
from worker.torch_program import Program
from worker.torch_tensors import weight_views

HALF_PRECISION_BYTES = 60_000_000
_ROWS = 2


def errors(name: str) -> dict[str, float]:
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
    rng = np.random.default_rng(0)
    inputs = {
        each.name: rng.standard_normal((_ROWS, *each.shape[1:]), dtype=np.float32)
        if each.type == "tensor(float)"
        else rng.integers(0, 2, (_ROWS, *each.shape[1:]))
        for each in session.get_inputs()
    }
    wanted = session.run(None, inputs)
    found = {}
    for precision in Precision:
        if precision is Precision.FLOAT16 and weights_bytes(name) > HALF_PRECISION_BYTES:
            continue
        lifted = lift_weights(type(model).FromString(optimised), level=(0, 1))
        lifted = TorchTarget(precision).lay_out(lifted)
        program = Program(lifted.graph, torch.device("cpu"))
        weights = weight_views(torch.from_numpy(lifted.blob), lifted.weights)
        tensors = [torch.from_numpy(array) for array in inputs.values()]
        with torch.inference_mode():
            outputs = program.run(tensors, weights, {})
        found[precision.value] = max(
            float(np.abs(output.numpy() - expected).max() / np.abs(expected).max())
            for output, expected in zip(outputs, wanted, strict=True)
        )
    return found


def compare(names: Sequence[str], *, until_s: float) -> tuple[dict[str, float], list[str]]:
    """Compare networks until time is up; figures by key, and the names left out."""
    figures: dict[str, float] = {}
    for index, name in enumerate(names):
        if time.monotonic() > until_s:
            return figures, list(names[index:])
        for precision, error in errors(name).items():
            figures[f"{name}_{precision}_error_ratio"] = error
            print(f"{name:32} {precision:8} {error:.2e}", flush=True)
    return figures, []


def main() -> None:
    """Compare all, the smallest first, and write `torch_zoo.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="begin no network after these"
    )
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    names = sorted(ARCHITECTURES, key=weights_bytes)
    figures, left_out = compare(names, until_s=time.monotonic() + seconds)
    for precision in Precision:
        worst = [value for key, value in figures.items() if f"_{precision.value}_" in key]
        figures[f"worst_{precision.value}_error_ratio"] = max(worst)
        figures[f"num_{precision.value}"] = float(len(worst))
    write_results(
        "torch_zoo",
        figures,
        command=f"python -m experiments.torch_zoo --seconds {seconds:g}",
        seeds=[0],
        extra={"left_out": left_out},
        directory=RESULTS,
    )


if __name__ == "__main__":
    main()
