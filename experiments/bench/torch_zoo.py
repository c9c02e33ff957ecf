"""Every network of the model zoo on the torch engine, on the processor, against onnxruntime.

For each network and precision: the largest difference between two rows' outputs and onnxruntime's float32
ones, in parts of the largest output. A processor has no TF32: there the factors of every product are rounded
to it (`worker.compiling.for_torch.Tf32Products`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from clockwright.errors import ConfigError, ModelError
from experiments.results_file import RESULTS, write_results
from modelzoo.build import ARCHITECTURES, build_model, weights_bytes
from worker.compiling.for_torch import TorchTarget, products_as_on_a_gpu
from worker.compiling.lift_weights import lift_weights
from worker.engines.onnxruntime import plain_words
from worker.engines.torch_program import Program
from worker.engines.torch_tensors import weight_views
from worker.models.precision import Precision

NAME = "torch_zoo"
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


def compare(
    names: Sequence[str], *, until_s: float
) -> Iterator[tuple[str, dict[str, float] | str]]:
    """Compare networks until time is up.

    Yields:
        Each network with its errors by precision, or with the words in which it failed.
    """
    for name in names:
        if time.monotonic() > until_s:
            return
        try:
            found = errors(name)
        except (ModelError, RuntimeError, TypeError, IndexError, ValueError) as error:
            yield name, plain_words(error)
            continue
        wrong = [precision for precision, ratio in found.items() if not math.isfinite(ratio)]
        yield name, f"{wrong[0]}: outputs are no numbers" if wrong else found


@dataclass(slots=True, kw_only=True)
class ZooComparison:
    """Networks compared by this run and by the runs that it goes on from."""

    #: Errors by network and precision.
    found: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Words in which each network failed, by network.
    failed: dict[str, str] = field(default_factory=dict)
    #: Networks that earlier runs compared, by the run's commit.
    earlier: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def resumed(cls, path: Path) -> ZooComparison:
        """Go on from a results file; failed networks are tried again.

        Raises:
            ConfigError: there is no such file, or it is no such record.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            earlier: dict[str, list[str]] = dict(record.get("earlier", {}))
            found: dict[str, dict[str, float]] = {}
            for name in ARCHITECTURES:
                for precision in Precision:
                    error = record["figures"].get(_key(name, precision.value))
                    if error is not None:
                        found.setdefault(name, {})[precision.value] = error
            known = {name for names in earlier.values() for name in names}
            new = [name for name in found if name not in known]
            earlier[record["commit"]] = sorted([*earlier.get(record["commit"], []), *new])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: cannot go on from it: {error!r}") from None
        return cls(found=found, earlier=earlier)

    def add(self, name: str, found: dict[str, float] | str) -> None:
        """Enter a network that `compare` yielded."""
        if isinstance(found, str):
            self.failed[name] = found
        else:
            self.found[name] = found

    def figures(self) -> dict[str, float]:
        """Every error by its key, and the worst of each precision."""
        figures = {
            _key(name, precision): error
            for name in sorted(self.found, key=weights_bytes)
            for precision, error in self.found[name].items()
        }
        for precision in Precision:
            value = precision.value
            every = [found[value] for found in self.found.values() if value in found]
            if every:
                figures[f"worst_{value}_error_ratio"] = max(every)
            figures[f"num_{value}"] = float(len(every))
        return figures

    def write(self, command: str, names: Sequence[str], directory: Path) -> None:
        """Write `torch_zoo.json`, with the names that are neither compared nor failed."""
        left_out = [name for name in names if name not in self.found and name not in self.failed]
        write_results(
            NAME,
            self.figures(),
            command=command,
            seeds=[0],
            extra={"left_out": left_out, "failed": self.failed, "earlier": self.earlier},
            directory=directory,
        )


def _key(name: str, precision: str) -> str:
    return f"{name}_{precision}_error_ratio"


def produce(
    names: Sequence[str], *, seconds: float, resume: bool, directory: Path = RESULTS
) -> ZooComparison:
    """Compare networks in this order, and write the file after each: a run may be cut short."""
    path = directory / f"{NAME}.json"
    comparison = ZooComparison.resumed(path) if resume else ZooComparison()
    command = f"python -m experiments bench-torch-zoo --seconds {seconds:g}{' --resume' * resume}"
    to_do = [name for name in names if name not in comparison.found]
    for name, found in compare(to_do, until_s=time.monotonic() + seconds):
        comparison.add(name, found)
        comparison.write(command, names, directory)
        words = (
            found if isinstance(found, str) else ", ".join(f"{p} {e:.2e}" for p, e in found.items())
        )
        print(f"{name:32} {words}", flush=True)
    return comparison


def main() -> int:
    """Compare all, the smallest first.

    Returns:
        The exit code: 1 when a network failed.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="begin no network after these"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what the results file has, compare the rest"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = sorted(ARCHITECTURES, key=weights_bytes)
    comparison = produce(names, seconds=options.seconds, resume=options.resume)
    return 1 if comparison.failed else 0


if __name__ == "__main__":
    sys.exit(main())
