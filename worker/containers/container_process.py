"""The process that runs a container's Python code: `python -m worker.containers.container_process PARENT GROUP JOB`.

It speaks the protocol of `worker.containers.frames`, but rows lie in memory that it shares with the worker. The job, as
JSON, says what to load and what the tensors are.

The code is not confined. The kernel kills this process first when memory runs out, and it dies with its worker.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.errors import ModelError
from clockwright.wire.tensors import DATATYPES, TensorSpec, Variable
from worker.containers.batches import run_batch
from worker.containers.frames import Kind
from worker.containers.launch import connect, settle

Array = np.ndarray[Any, np.dtype[Any]]
Predict = Callable[..., object]


def main() -> int:
    """Load, then answer batches until the worker ends the connection."""
    settle(int(sys.argv[1]), sys.argv[2])
    job = json.loads(sys.argv[3])
    memory = np.frombuffer(mmap.mmap(job["memory"], 0), np.uint8)
    inputs, outputs, method = _specs(job["inputs"]), _specs(job["outputs"]), job["method"]
    try:
        predict = load(Path(job["folder"]), job["load"], method)
    except ModelError as error:
        connect().send(Kind.ERROR, _words(error))
        return 0

    def run(arguments: Sequence[Array]) -> list[Array]:
        # What lies in the memory is copied, because the code may keep its argument or change it.
        own = [each if each.flags.owndata else each.copy() for each in arguments]
        try:
            return name_outputs(predict(*own), outputs, len(own[0]))
        except Exception as error:  # whatever the code raises is about these rows
            raise ModelError(f"{method} raised {type(error).__name__}: {error}") from None

    worker = connect()
    worker.send(Kind.READY)
    while True:
        try:
            _, body = worker.receive()
        except EOFError:
            return 0
        num_requests, *rest = struct.unpack(f"<{len(body) // 8}Q", body)
        rows, places = rest[:num_requests], iter(rest[num_requests:])
        try:
            run_batch(memory, _placed(inputs, places), _placed(outputs, places), rows, run)
        except ModelError as error:
            worker.send(Kind.ERROR, _words(error))
        else:
            worker.send(Kind.DONE)


def load(folder: Path, name: str, method: str) -> Predict:
    """Load the code, which runs it: a file of the version's folder, or `package.module:name`, and its method.

    The code may import files from the folder. Raises ModelError if it cannot be loaded, or there is nothing to call.
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

    It is one array for one output; a sequence of arrays, or a dictionary by name, for several. Raises ValueError if it
    is not what was declared.
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
    # NumPy's own kinds of text drop zeros at the end.
    array: Array = np.asarray(value, np.object_ if spec.datatype == "BYTES" else None)
    if not spec.is_shape_of(array.shape, rows):
        raise ValueError(
            f"output {spec.name!r} has shape {list(array.shape)}, expected {spec.words(rows)}"
        )
    if spec.datatype == "BYTES":
        if not all(isinstance(each, str | bytes) for each in array.reshape(-1).tolist()):
            found = sorted({type(each).__name__ for each in array.reshape(-1).tolist()})
            raise ValueError(
                f"output {spec.name!r} has {' and '.join(found)}, expected str or bytes"
            )
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


def _words(error: ModelError) -> bytes:
    # The code's own words may be of any length, and no text.
    return str(error)[:2000].encode(errors="replace")


def _placed(specs: Sequence[TensorSpec], places: Iterator[int]) -> list[tuple[TensorSpec, int]]:
    return [(spec, next(places)) for spec in specs]


def _specs(table: Sequence[Sequence[Any]]) -> list[TensorSpec]:
    return [
        TensorSpec(
            name,
            datatype,
            tuple(shape),
            vary=Variable(unit_bytes, tuple(symbols), tuple(most)) if unit_bytes else None,
        )
        for name, datatype, shape, unit_bytes, symbols, most in table
    ]


if __name__ == "__main__":
    sys.exit(main())
