"""The process that runs a container's code: `python -m worker.containers.container_process PARENT FD`.

Requests and answers are JSON objects, one per line; rows lie in the shared memory FD. The first line says what to
load, and the answer is `ready` or `refused`. Each further line says where the rows of a batch lie, and the answer
is `done` or `failed`. `worker.containers.container` is the worker's side.

The code is not confined. The kernel kills this process first when memory runs out, and it dies with its worker.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import mmap
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.errors import ModelError
from clockwright.process import end_with
from clockwright.wire.tensors import DATATYPES, TensorSpec, Variable
from worker.devices.sized_io import run_carrying, run_joined

Array = np.ndarray[Any, np.dtype[Any]]
Predict = Callable[..., object]


def main() -> int:
    """Load, then answer batches until standard input ends."""
    end_with(int(sys.argv[1]), signal.SIGKILL)
    # The code may print, so the protocol takes standard output and leaves it standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")

    def reply(**message: object) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    job = json.loads(sys.stdin.readline())
    memory = mmap.mmap(int(sys.argv[2]), 0)
    inputs, outputs = _specs(job["inputs"]), _specs(job["outputs"])
    try:
        predict = load(Path(job["folder"]), job["load"], job["method"])
    except ModelError as error:
        reply(refused=str(error))
        return 0
    reply(ready=True)
    for line in sys.stdin:
        batch = json.loads(line)
        rows: int = sum(batch["rows"])
        if inputs[0].vary is not None:
            _run_carrying(memory, inputs, outputs, batch, predict, job["method"])
            reply(done=True)
            continue
        arguments = [
            # Copied, because the code may keep its argument or change it.
            _view(memory, spec, rows, offset).copy()
            for spec, offset in zip(inputs, batch["inputs"], strict=True)
        ]
        try:
            results = name_outputs(predict(*arguments), outputs, rows)
        except Exception as error:  # whatever the code raises is about this batch
            reply(failed=f"{job['method']} raised {type(error).__name__}: {error}"[:2000])
            continue
        for spec, offset, result in zip(outputs, batch["outputs"], results, strict=True):
            _view(memory, spec, rows, offset)[...] = result
        reply(done=True)
    return 0


def _run_carrying(
    memory: mmap.mmap,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    batch: Mapping[str, Any],
    predict: Predict,
    method: str,
) -> None:
    """Run a batch of tensors that carry their sizes. The requests that the code fails on get its words."""

    def run(arguments: list[Array]) -> list[Array]:
        try:
            return name_outputs(predict(*arguments), outputs, len(arguments[0]))
        except Exception as error:  # whatever the code raises is about these rows
            raise ModelError(f"{method} raised {type(error).__name__}: {error}"[:2000]) from None

    run_carrying(
        np.frombuffer(memory, np.uint8),
        list(zip(inputs, batch["inputs"], strict=True)),
        list(zip(outputs, batch["outputs"], strict=True)),
        batch["rows"],
        lambda requests: run_joined(requests, outputs, batch["rows"], run),
    )


def load(folder: Path, name: str, method: str) -> Predict:
    """Load the code, which runs it.

    Args:
        folder: the version's folder; the code may import files from it.
        name: a file, or `package.module:name`.
        method: the method or function to call.

    Raises:
        ModelError: the code cannot be loaded, or there is nothing to call.
    """
    # The folder's files are hashed, so no bytecode may appear among them.
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    try:
        if ":" in name:
            module_name, _, attribute = name.partition(":")
            loaded = getattr(importlib.import_module(module_name), attribute)
        elif name.endswith(".py"):
            loaded = _run_file(folder / name)
            if not callable(getattr(loaded, method, None)):
                found = ", ".join(k for k, v in vars(loaded).items() if callable(v)) or "none"
                raise ModelError(f"{name}: expected a function {method!r}, found {found}")
        elif name.endswith(".joblib"):
            import joblib

            loaded = joblib.load(folder / name)
        else:
            with (folder / name).open("rb") as file:
                loaded = pickle.load(file)
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from None
    chosen = getattr(loaded, method, None)
    if not callable(chosen):
        chosen = loaded
    if not callable(chosen):
        raise ModelError(
            f"{name} holds a {type(loaded).__name__}: expected a method {method!r}, or something "
            f"that can be called"
        )
    predict: Predict = chosen
    return predict


def name_outputs(result: object, outputs: Sequence[TensorSpec], rows: int) -> list[Array]:
    """Bring what the code returned into the order of the outputs, fit to be copied.

    Args:
        result: one array for one output; a sequence of arrays, or a dictionary by name, for several.
        outputs: the declared outputs.
        rows: the batch's number of rows.

    Raises:
        ValueError: the result is not what was declared.
    """
    if isinstance(result, Mapping):
        if set(result) != {spec.name for spec in outputs}:
            raise ValueError(
                f"found outputs {sorted(map(str, result))}, expected {[s.name for s in outputs]}"
            )
        values = [result[spec.name] for spec in outputs]
    elif len(outputs) == 1:
        values = [result]
    elif isinstance(result, tuple | list) and len(result) == len(outputs):
        values = list(result)
    else:
        found = (
            f"{len(result)} of them" if isinstance(result, tuple | list) else type(result).__name__
        )
        raise ValueError(f"expected {len(outputs)} outputs, found {found}")
    return [_fit(value, spec, rows) for value, spec in zip(values, outputs, strict=True)]


def _fit(value: object, spec: TensorSpec, rows: int) -> Array:
    array: Array = np.asarray(value)
    expected = (rows, *spec.row_shape)
    if array.shape != expected:
        raise ValueError(
            f"output {spec.name!r} has shape {list(array.shape)}, expected {list(expected)}"
        )
    if spec.datatype == "BYTES":
        if not all(isinstance(each, str | bytes) for each in array.reshape(-1).tolist()):
            raise ValueError(f"output {spec.name!r} is {array.dtype}, expected str or bytes")
    elif not np.can_cast(array.dtype, DATATYPES[spec.datatype].dtype, "same_kind"):
        raise ValueError(f"output {spec.name!r} is {array.dtype}, expected {spec.datatype}")
    return array.astype(DATATYPES[spec.datatype].dtype, copy=False)


def _run_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location("model", path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path.name} is not Python code")
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module
    spec.loader.exec_module(module)
    return module


def _view(memory: mmap.mmap, spec: TensorSpec, rows: int, offset: int) -> Array:
    count = rows * prod(spec.row_shape)
    flat: Array = np.frombuffer(memory, DATATYPES[spec.datatype].dtype, count, offset)
    return flat.reshape(rows, *spec.row_shape)


def _specs(table: Sequence[Sequence[Any]]) -> list[TensorSpec]:
    return [
        TensorSpec(name, datatype, tuple(shape), vary=Variable(unit_bytes) if unit_bytes else None)
        for name, datatype, shape, unit_bytes in table
    ]


if __name__ == "__main__":
    sys.exit(main())
